//! The images: the instructions of the Dockerfile, and the contents of a container, run without a container engine.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::{PendingCall, Process};
use crate::{files_below, installed, ours, read, run, skipped};

/// Maximum bytes of the router's image. The code of the dev profile is optimized little, and twice as long.
const BYTES_MAX: u64 = if cfg!(debug_assertions) { 128_000_000 } else { 64_000_000 };
/// The user of the containers.
const USER: &str = "65532";
/// Libraries that the binary may need: the C library, and the unwinder for panics.
const LIBRARIES: [&str; 5] =
    ["ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libgcc_s.so.1", "libm.so.6"];

/// One stage: its name, its base, and its instructions.
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) from: String,
    pub(crate) lines: Vec<(String, String)>,
}

/// The stages of a Dockerfile.
pub(crate) fn stages(file: &str) -> Vec<Stage> {
    let text = read(&ours(file)).replace("\\\n", " ");
    let mut stages: Vec<Stage> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (word, rest) = line.split_once(' ').expect("an instruction and its arguments");
        match word {
            "FROM" => {
                let (from, name) = rest.split_once(" AS ").expect("every stage has a name");
                stages.push(Stage { name: name.to_owned(), from: from.to_owned(), lines: Vec::new() });
            }
            _ => stages.last_mut().expect("FROM comes first").lines.push((word.to_owned(), rest.to_owned())),
        }
    }
    stages
}

/// The arguments of a stage's instruction, or of the same instruction in its base.
pub(crate) fn instruction<'a>(stages: &'a [Stage], name: &str, word: &str) -> Option<&'a str> {
    let stage = stages.iter().find(|stage| stage.name == name)?;
    let own = stage.lines.iter().rev().find(|(other, _)| other == word);
    own.map(|(_, rest)| rest.as_str()).or_else(|| instruction(stages, &stage.from, word))
}

/// The words of the JSON form of a command.
fn json_words(text: &str) -> Vec<String> {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn every_image_runs_as_non_root_with_a_health_check_and_without_a_toolkit() {
    let stages = stages("deploy/container/Dockerfile");
    let names: Vec<_> = stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["build", "rootfs", "router", "engine-cpu", "engine-cuda"]);
    for (target, command, health) in [
        ("router", "router", "http://127.0.0.1:8081/health"),
        ("engine-cpu", "engine", "http://127.0.0.1:8000/health"),
        ("engine-cuda", "engine", "http://127.0.0.1:8000/health"),
    ] {
        assert_eq!(instruction(&stages, target, "USER"), Some("65532:65532"), "{target}");
        // Manifests append their arguments to the entry point.
        let entry = json_words(instruction(&stages, target, "ENTRYPOINT").expect("it starts something"));
        assert_eq!(entry, ["/usr/bin/baton", command]);
        let check = instruction(&stages, target, "HEALTHCHECK").expect("it says how it is");
        let (_, check) = check.split_once("CMD ").expect("a command");
        assert_eq!(json_words(check), ["/usr/bin/baton", "health", health]);
    }
    assert_eq!(
        json_words(instruction(&stages, "router", "CMD").expect("where its configuration is")),
        ["--config", "/etc/baton/router.yaml"]
    );
    let cuda = &stages[4].from;
    assert!(cuda.contains("-runtime-") && !cuda.contains("devel"), "{cuda}");
    // The base `nvidia/cuda:MAJOR.MINOR.PATCH-runtime-…` contains the libraries that an engine loads at its start.
    let version = cuda.split(':').nth(1).expect("a tag").split('-').next().expect("a version");
    let major = version.split('.').next().expect("a number");
    let sought = read(&ours("engine/src/compute/cuda/driver/libraries.rs"));
    for library in [
        format!("libnvrtc.so.{major}"),
        // Any version: the beginning of the name counts.
        "libnvrtc-builtins.so.".to_owned(),
        format!("libcublasLt.so.{major}"),
    ] {
        assert!(
            sought.contains(&format!("\"{library}\"")),
            "{cuda} has {library}, which no engine looks for"
        );
    }
    let mut earlier = vec!["scratch"];
    for stage in &stages {
        let from = stage.lines.iter().filter_map(|(_, rest)| rest.strip_prefix("--from=")?.split(' ').next());
        for other in from.chain(Some(stage.from.as_str()).filter(|from| !from.contains(':'))) {
            assert!(earlier.contains(&other), "{} is made from {other}", stage.name);
        }
        earlier.push(&stage.name);
    }
    let version = read(&ours("Cargo.toml"));
    let version = version.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("it is said");
    assert_eq!(stages[0].from, format!("rust:{}-bookworm", version.trim_matches('"')));
    let ignored = read(&ours("deploy/container/Dockerfile.dockerignore"));
    assert!(ignored.lines().any(|line| line == "**/secrets"), "secrets stay out of images");
}

/// The script's output for the binary under test.
fn rootfs(folder: &Path) -> std::path::PathBuf {
    let root = folder.join("rootfs");
    let script = ours("deploy/container/rootfs.sh");
    let (made, text) = run(Command::new(script).arg(env!("CARGO_BIN_EXE_baton")).arg(&root));
    assert!(made, "{text}");
    root
}

fn missing_tools() -> Option<&'static str> {
    ["strip", "ldd", "bash"].into_iter().find(|tool| !installed(tool))
}

#[test]
fn the_routers_image_is_small_and_has_nothing_that_it_does_not_need() {
    if let Some(tool) = missing_tools() {
        return skipped(&format!("{tool} is not installed: the image's contents were not made"));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = rootfs(folder.path());
    let files = files_below(&root);
    let bytes: u64 = files.iter().map(|file| fs::metadata(file).expect("it is there").len()).sum();
    println!("the router's image: {bytes} bytes in {} files, of this build's profile", files.len());
    assert!(bytes < BYTES_MAX, "{bytes} bytes");
    for file in &files {
        let below = file.strip_prefix(&root).expect("it is below").display().to_string();
        let name = file.file_name().and_then(|name| name.to_str()).expect("a name");
        let known = LIBRARIES.contains(&name)
            || [
                "usr/bin/baton",
                "etc/ssl/certs/ca-certificates.crt",
                "etc/passwd",
                "etc/group",
                "etc/nsswitch.conf",
            ]
            .contains(&below.as_str());
        assert!(known, "{below} is in the image");
    }
}

/// Runs in the image's root, read-only, without privileges, with the arguments that follow.
const INSIDE: &str = "root=$1; shift\n\
    mount --bind \"$root\" \"$root\" && mount --rbind /proc \"$root/proc\" && mount -o remount,bind,ro \"$root\" || exit 71\n\
    exec chroot --userspec=65532:65532 \"$root\" /usr/bin/baton \"$@\"";

fn inside(root: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh"]).arg(root);
    command
}

#[test]
fn the_image_runs_on_a_read_only_root_as_any_user() {
    if let Some(tool) =
        missing_tools().or_else(|| ["unshare", "chroot"].into_iter().find(|tool| !installed(tool)))
    {
        return skipped(&format!("{tool} is not installed: the image's contents were not run"));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = rootfs(folder.path());
    let config = "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\nmodels:\n  - name: baton-demo\n    decode: {engines: [{url: 'http://localhost:2'}]}\n";
    fs::write(root.join("etc/baton/router.yaml"), config).expect("the test's folder can be written");
    let (works, text) = run(inside(&root).arg("--version"));
    if !works {
        return skipped(&format!(
            "mounts or chroot are not allowed here: the image's contents were not run ({})",
            text.trim()
        ));
    }
    let start = |name: &str, args: &[&str]| {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut process = Process::spawn(name, inside(&root), &args, folder.path());
        process.wait_ready();
        let status = read(Path::new(&format!("/proc/{}/status", process.pid())));
        let field = |key: &str| {
            status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim().to_owned()
        };
        assert!(field("Uid:").split_whitespace().all(|id| id == USER), "{name}: {}", field("Uid:"));
        assert_eq!(field("CapEff:"), "0000000000000000", "{name}");
        process
    };
    let healthy = |url: &str| run(inside(&root).args(["health", url]));

    // With the target's entry point.
    let mut router = start("router", &["router", "--config", "/etc/baton/router.yaml"]);
    let admin = router.fact("admin");
    let (fine, text) = healthy(&format!("http://{admin}/health"));
    assert!(fine, "{text}");
    // No engine responds yet, and an unknown path is not healthy.
    assert_eq!(PendingCall::new(&router.fact("http"), "GET", "/version", b"").reply().status, 200);
    let (fine, text) = healthy(&format!("http://{admin}/nothing"));
    assert!(!fine && text.contains("404"), "{text}");
    let mut engine =
        start("engine", &["engine", "--listen", "127.0.0.1:0", "--kv-cache-mib", "32", "--threads", "1"]);
    let (fine, text) = healthy(&format!("http://{}/health", engine.fact("http")));
    assert!(fine, "{text}");
    router.stop();
    engine.stop();
    let (fine, text) = healthy(&format!("http://{admin}/health"));
    assert!(!fine && text.contains(&admin), "{text}");
}
