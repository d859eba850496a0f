//! The units, checked by `systemd-analyze`, and their commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::harness::{GenerateRequest, PendingCall, Process};
use crate::{baton, installed, ours, read, run, skipped};

/// The path of the binary in the units.
const BINARY: &str = "/usr/bin/baton";

/// Maximum exposure by `systemd-analyze security`, from 0 to 10, in tenths. The remaining exposure is the network,
/// which is the units' purpose, and the calls of `@resources`, which pin threads to cores.
const EXPOSURE_MAX: &str = "16";

/// The value of each line `KEY=VALUE` of a unit or an environment file.
fn values(text: &str, key: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    lines.map(str::to_owned).collect()
}

fn one(text: &str, key: &str) -> String {
    let values = values(text, key);
    assert_eq!(values.len(), 1, "{key}: {values:?}");
    values.into_iter().next().expect("there is one")
}

fn unit(name: &str) -> String {
    read(&ours("deploy/systemd").join(name))
}

/// The instances that have a file of options, with the words of that file.
fn engines() -> Vec<(String, Vec<String>)> {
    let named = ["prefill", "decode"].map(|name| {
        let options = one(&unit(&format!("engine-{name}.env")), "ENGINE_OPTIONS");
        (name.to_owned(), options.split(' ').map(str::to_owned).collect())
    });
    named.to_vec()
}

/// Installs the units into a folder with the binary under test, as systemd has them.
fn install(folder: &Path) -> [String; 3] {
    let binary = env!("CARGO_BIN_EXE_baton");
    let write = |name: &str, text: String| {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("the test's folder can be written");
        fs::write(&file, text.replace(BINARY, binary)).expect("the test's folder can be written");
        file.display().to_string()
    };
    let engine = unit("baton-engine@.service");
    let router = write("baton-router.service", unit("baton-router.service"));
    let plain = write("baton-engine@prefill.service", engine.clone());
    let cuda = write("baton-engine@cuda.service", engine);
    write("baton-router.socket", unit("baton-router.socket"));
    write("baton-engine@cuda.service.d/cuda.conf", unit("baton-engine-cuda.conf"));
    [router, plain, cuda]
}

#[test]
fn systemd_verifies_the_units_and_their_exposure_is_low() {
    if !installed("systemd-analyze") {
        return skipped("systemd-analyze is not installed: the units were not verified");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let units = install(folder.path());
    for unit in &units {
        let (fine, printed) =
            run(Command::new("systemd-analyze").args(["verify", "--man=no", "--recursive-errors=no", unit]));
        assert!(fine && printed.is_empty(), "{unit}: {printed}");
    }
    for unit in &units[..2] {
        let limit = format!("--threshold={EXPOSURE_MAX}");
        let (fine, printed) = run(Command::new("systemd-analyze").args([
            "security",
            "--offline=true",
            "--no-pager",
            &limit,
            unit,
        ]));
        let last = printed.lines().last().unwrap_or_default();
        println!("{unit}: {last}");
        assert!(fine, "{printed}");
    }
    // The check fails for an unknown key.
    fs::write(folder.path().join("broken.service"), "[Service]\nExecStart=/bin/true\nProtectSytem=strict\n")
        .expect("a file");
    let broken = folder.path().join("broken.service");
    let (_, printed) = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(broken));
    assert!(printed.contains("ProtectSytem"), "{printed}");
}

#[test]
fn the_units_use_valid_commands() {
    let engine = unit("baton-engine@.service");
    assert_eq!(one(&engine, "ExecStart"), format!("{BINARY} engine --log-json $ENGINE_OPTIONS"));
    for (name, options) in engines() {
        let args = [vec!["engine".to_owned(), "--log-json".to_owned()], options].concat();
        let (started, printed) = baton(&args);
        let expected = "--model /srv/models/my-model: there is no such folder";
        assert!(!started && printed.contains(expected), "{name}: {printed}");
    }
    let router = unit("baton-router.service");
    assert_eq!(
        one(&router, "ExecStart"),
        format!("{BINARY} router --log-json --config /etc/baton/router.yaml")
    );
    assert_eq!(one(&router, "ExecStartPre"), format!("{BINARY} check /etc/baton/router.yaml"));

    // The configuration names credentials and folders of the unit.
    let config = ours("deploy/config/systemd.yaml");
    let mut text = read(&config);
    let folder = tempfile::tempdir().expect("a temporary folder");
    for credential in values(&router, "LoadCredential") {
        let (name, _) = credential.split_once(':').expect("NAME:FILE");
        let (named, here) =
            (format!("/run/credentials/baton-router.service/{name}"), folder.path().join(name));
        assert!(text.contains(&named), "the configuration has no use for {name}");
        fs::write(&here, "0123456789abcdef0123456789abcdef\n").expect("the test's folder can be written");
        text = text.replace(&named, &here.display().to_string());
    }
    let logs = format!("/var/log/{}", one(&router, "LogsDirectory"));
    assert!(text.contains(&logs));
    let file = folder.path().join("router.yaml");
    fs::write(&file, text).expect("the test's folder can be written");
    let (sound, printed) = baton(&["check".to_owned(), file.display().to_string()]);
    assert!(sound && !printed.contains("warning:") && !printed.contains("/run/credentials"), "{printed}");
}

#[test]
fn the_units_load_the_secret_and_allow_the_drain() {
    let (engine, router) = (unit("baton-engine@.service"), unit("baton-router.service"));
    let seconds = |text: &str| one(text, "TimeoutStopSec").parse::<u64>().expect("seconds");
    for (name, options) in engines() {
        let at = options.iter().position(|option| option == "--shutdown-timeout").expect("it is said");
        let drain: u64 = options[at + 1].parse().expect("seconds");
        assert!(seconds(&engine) >= drain + 15, "{name}");
        let disk = options.iter().position(|option| option == "--kv-offload-disk");
        if let Some(at) = disk {
            assert_eq!(
                one(&engine, "StateDirectory").replace("%i", &name),
                options[at + 1]["/var/lib/".len()..]
            );
        }
    }
    assert!(
        values(&engine, "Environment")
            .contains(&"BATON_CLUSTER_SECRET_FILE=/run/credentials/%n/cluster-secret".to_owned())
    );
    assert!(one(&engine, "LoadCredential").starts_with("cluster-secret:"));
    // `connector/shm/src/peer.rs` shares memory within one user. Instances with different users would use TCP.
    assert_eq!(one(&engine, "User"), "baton-engine");

    let config: Value = crate::parsed(&read(&ours("deploy/config/systemd.yaml")), "systemd.yaml".as_ref());
    let ms = |key: &str| config[key].as_u64().unwrap_or(0);
    assert!(seconds(&router) * 1000 >= ms("drain_delay_ms") + ms("drain_timeout_ms") + 30_000);
    // One connection of each client, and one to each of its two engines (`limits.connections` is 16,384 by default).
    let most: u64 = one(&router, "LimitNOFILE").parse().expect("a number");
    assert!(most >= 3 * 16_384 + 1_024);
}

/// The systemd version of each key, and of some values, by systemd's NEWS (of 252). Versions before 200 count as one.
const KNOWN_SINCE: [(u32, &str); 13] = [
    (
        0,
        "After Backlog CapabilityBoundingSet Description DeviceAllow Environment EnvironmentFile ExecReload ExecStart \
         ExecStartPre KillMode LimitMEMLOCK LimitNOFILE ListenStream NoNewPrivileges PrivateTmp Restart RestartSec \
         SystemCallFilter TimeoutStopSec UMask User WantedBy Wants",
    ),
    (209, "KillMode=mixed PrivateDevices SystemCallArchitectures SystemCallErrorNumber"),
    (212, "DevicePolicy RestrictAddressFamilies"),
    (214, "ProtectHome"),
    (216, "NoDelay"),
    (229, "AmbientCapabilities"),
    (230, "StartLimitIntervalSec"),
    (231, "MemoryDenyWriteExecute RestrictRealtime"),
    (
        232,
        "DynamicUser PrivateUsers ProtectControlGroups ProtectKernelModules ProtectKernelTunables ProtectSystem=strict RemoveIPC",
    ),
    (
        235,
        "CacheDirectory LockPersonality LogsDirectory RestrictNamespaces StateDirectory StateDirectoryMode",
    ),
    (242, "ProtectHostname RestrictSUIDSGID Type=exec"),
    (245, "ProtectClock ProtectKernelLogs"),
    (247, "LoadCredential ProcSubset ProtectProc"),
];

/// The oldest systemd that knows every line of a unit.
fn needed(text: &str) -> u32 {
    let settings = text.lines().filter(|line| !line.starts_with(['#', '[']) && !line.is_empty());
    let since = |line: &str| {
        let (key, _) = line.split_once('=').unwrap_or_else(|| panic!("{line} is no KEY=VALUE"));
        let known = |(_, words): &&(u32, &str)| words.split(' ').any(|word| word == key || word == line);
        let known = KNOWN_SINCE.iter().rev().find(known);
        assert!(!line.contains("%d"), "{line}: only systemd 251 knows that");
        known.unwrap_or_else(|| panic!("{line}: since which systemd?")).0
    };
    settings.map(since).max().expect("it sets something")
}

#[test]
fn the_units_name_their_minimum_systemd() {
    for name in
        ["baton-router.service", "baton-engine@.service", "baton-engine-cuda.conf", "baton-router.socket"]
    {
        let text = unit(name);
        let expected = format!("systemd {} or newer", needed(&text));
        assert!(text.contains(&expected), "{name} does not say: {expected}");
    }
    let page = read(&ours("docs/how-to/systemd.md"));
    assert!(page.contains(&format!("systemd {} or newer", needed(&unit("baton-router.service")))));
}

#[test]
fn the_environment_file_has_only_variables_of_the_router() {
    let files = values(&unit("baton-router.service"), "EnvironmentFile");
    assert_eq!(files, ["-/etc/baton/router.env"]);
    let text = unit("router.env");
    assert!(text.starts_with("# /etc/baton/router.env"), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    for line in &lines {
        let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("{line} is no KEY=VALUE"));
        assert_eq!(key, "RUST_LOG", "the router reads no other");
        let filter = tracing_subscriber::EnvFilter::try_new(value);
        assert!(filter.is_ok_and(|filter| filter.to_string() == value), "{value}");
    }
    assert_eq!(lines.len(), 1, "{lines:?}");
}

/// The calls that a filter of systemd lets through, its sets resolved.
fn allowed(sets: &[&str]) -> BTreeSet<String> {
    let mut calls = BTreeSet::new();
    for set in sets {
        let (_, printed) = run(Command::new("systemd-analyze").args(["syscall-filter", "--no-pager", set]));
        for word in printed
            .lines()
            .filter(|line| line.starts_with(' '))
            .map(str::trim)
            .filter(|word| !word.starts_with('#'))
        {
            match word.starts_with('@') {
                true => calls.extend(allowed(&[word])),
                false => drop(calls.insert(word.to_owned())),
            }
        }
    }
    calls
}

#[test]
fn the_filters_let_through_every_system_call_that_router_and_engine_make() {
    if !installed("systemd-analyze") || !installed("strace") {
        return skipped(
            "systemd-analyze or strace is not installed: system calls were not compared with the units' filters",
        );
    }
    for text in [unit("baton-router.service"), unit("baton-engine@.service")] {
        assert_eq!(values(&text, "SystemCallFilter"), ["@system-service", "~@privileged"]);
    }
    let mut calls = allowed(&["@system-service"]);
    let base = allowed(&["@default"]);
    let privileged = allowed(&["@privileged"]);
    calls.retain(|call| !privileged.contains(call) || base.contains(call));
    assert!(calls.len() > 150, "{calls:?}");

    let folder = tempfile::tempdir().expect("a temporary folder");
    let trace = |name: &str| folder.path().join(format!("{name}.trace"));
    let (works, printed) = run(Command::new("strace").args(["-f", "-o"]).arg(trace("try")).arg("true"));
    if !works {
        return skipped(&format!(
            "strace may not trace here ({}): system calls were not compared",
            printed.trim()
        ));
    }
    let start = |name: &str, words: &str| {
        let args: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let mut process = Process::traced(name, &args, folder.path(), &trace(name));
        process.wait_ready();
        process
    };
    let engine = "engine --listen 127.0.0.1:0 --kv-cache-mib 32 --threads 1 --shutdown-timeout 5";
    let tiers = format!(
        "--kv-offload-host-mib 8 --kv-offload-disk {}/tier --kv-offload-disk-mib 8",
        folder.path().display()
    );
    let mut engines = [
        start("prefill", &format!("{engine} --role prefill")),
        start("decode", &format!("{engine} --role decode {tiers}")),
        start("tcp", &format!("{engine} --role decode --kv-transport tcp")),
    ];
    let urls = engines.iter().skip(1).map(|engine| format!("{{url: 'http://{}'}}", engine.fact("http")));
    let config = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\naccess_log: {{enabled: true, path: '{}/access.log'}}\n\
         models:\n  - name: baton-demo\n    prefill: {{engines: [{{url: 'http://{}'}}]}}\n    decode: {{policy: round_robin, engines: [{}]}}\n",
        folder.path().display(),
        engines[0].fact("http"),
        urls.collect::<Vec<_>>().join(", "),
    );
    let file = folder.path().join("router.yaml");
    fs::write(&file, config).expect("the test's folder can be written");
    let mut router = start("router", &format!("router --config {}", file.display()));
    for _ in 0..4 {
        let ask = GenerateRequest::fresh(200);
        let reply =
            PendingCall::new(&router.fact("http"), "POST", ask.path, ask.body.to_string().as_bytes()).reply();
        assert_eq!(reply.status, 200, "{}", reply.json());
    }
    assert_eq!(PendingCall::new(&router.fact("admin"), "GET", "/metrics", b"").reply().status, 200);
    router.stop();
    engines.iter_mut().for_each(Process::stop);

    let mut refused = BTreeSet::new();
    let mut made = BTreeSet::new();
    for name in ["router", "prefill", "decode", "tcp"] {
        // `PID call(…`. A call that continues on another line has its name in an earlier line.
        let text = String::from_utf8_lossy(&fs::read(trace(name)).expect("a trace")).into_owned();
        let names = text
            .lines()
            .filter_map(|line| Some(line.split_whitespace().nth(1)?.split_once('(')?.0.to_owned()));
        made.extend(names.clone());
        refused.extend(names.filter(|call| !calls.contains(call)).map(|call| format!("{name}: {call}")));
    }
    assert!(made.len() > 30 && made.contains("memfd_create") && made.contains("accept4"), "{made:?}");
    assert!(refused.is_empty(), "the filter would refuse {refused:?}");
}
