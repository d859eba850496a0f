//! `baton check` and other commands as people and scripts use them: their output and exit codes.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

const GOOD: &str = "models:\n  - name: m\n    decode: {engines: [{url: 'http://127.0.0.1:2'}]}\n";

fn baton(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).output().unwrap()
}

fn out(output: &Output) -> (bool, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn an_engine_refuses_element_types_that_do_not_go_together() {
    let (sound, _, printed) = out(&baton(&["engine", "--dtype", "bfloat16", "--quantize", "int8"]));
    assert!(!sound && printed.contains("--dtype bfloat16 conflicts with --quantize"), "{printed}");
    let four = ["engine", "--dtype", "float32", "--quantize", "int4"];
    let (sound, _, printed) = out(&baton(&four));
    assert!(!sound && printed.contains("--dtype float32 conflicts with --quantize int4"), "{printed}");
    let mixed = ["engine", "--device", "cuda:0", "--dtype", "bfloat16", "--kv-cache-dtype", "f32"];
    let (sound, _, printed) = out(&baton(&mixed));
    assert!(!sound && printed.contains("--dtype and --kv-cache-dtype must be equal"), "{printed}");
    let (sound, _, printed) = out(&baton(&["engine", "--dtype", "float16"]));
    assert!(!sound && printed.contains("float32") && printed.contains("bfloat16"), "{printed}");
}

#[test]
fn an_engine_refuses_other_methods_of_speculative_decoding_by_name() {
    let refused = |config: &str| {
        let (sound, _, printed) = out(&baton(&["engine", "--speculative-config", config]));
        assert!(!sound && printed.contains("--speculative-config: "), "{printed}");
        printed
    };
    let printed = refused(r#"{"method": "eagle3", "model": "x", "num_speculative_tokens": 3}"#);
    assert!(printed.contains("`method`") && printed.contains("eagle3"), "{printed}");
    let printed = refused(r#"{"method": "ngram", "num_speculative_tokens": 100}"#);
    assert!(printed.contains("`num_speculative_tokens` must be from 1 to 16"), "{printed}");
}

#[test]
fn an_engine_serves_a_gguf_file_and_refuses_others_by_name() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/fixtures/qwen2-gguf/model.gguf");
    let served =
        ["engine", "--listen", "127.0.0.1:0", "--kv-cache-mib", "64", "--until-stdin-ends", "--model"];
    let (sound, said, printed) = out(&baton(&[&served[..], &[model.to_str().unwrap()]].concat()));
    assert!(sound && said.contains("ready") && said.contains("model=model"), "{said}{printed}");

    // Integers are multiplied as integers by default, exactly on demand, and floats are rounded on demand.
    let model = model.to_str().unwrap();
    for more in [&["--dtype", "float32"][..], &["--quantize", "int4"], &["--dtype", "int8"]] {
        let (sound, said, printed) = out(&baton(&[&served[..], &[model], more].concat()));
        assert!(sound && said.contains("ready"), "{more:?}: {said}{printed}");
    }

    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}"#;
    file(folder.path(), "config.json", config);
    let other = folder.path().join("other.gguf");
    let mut bytes = std::fs::read(model).unwrap();
    let at = bytes.windows(5).position(|bytes| bytes == b"qwen2").unwrap();
    bytes[at..at + 5].copy_from_slice(b"qwen9");
    std::fs::write(&other, bytes).unwrap();
    for (path, words) in [
        (folder.path().to_str().unwrap(), "quantization_config (hqq)"),
        (other.to_str().unwrap(), "architecture qwen9"),
        (file(folder.path(), "text.gguf", "text").as_str(), "is not a GGUF file"),
        ("/nowhere.gguf", "there is no such folder or file"),
    ] {
        let (sound, _, printed) = out(&baton(&["engine", "--model", path]));
        assert!(!sound && printed.contains(words), "{path}: {printed}");
    }
}

#[test]
fn an_invalid_log_filter_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(folder.path(), "good.yaml", GOOD);
    for (filter, is_invalid) in [("info,baton_router=verbose", true), ("info,baton_router=debug", false)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        let (sound, _, printed) =
            out(&command.env("RUST_LOG", filter).args(["check", &good]).output().unwrap());
        assert!(sound && printed.contains("log_filter_invalid") == is_invalid, "{filter}: {printed}");
    }
}

#[test]
fn an_engine_beyond_loopback_needs_a_secret() {
    for (listen, side) in
        [("0.0.0.0:0", "127.0.0.1:0"), ("127.0.0.1:0", "192.0.2.1:0"), ("[::]:0", "[::1]:0")]
    {
        let (started, _, printed) = out(&baton(&["engine", "--listen", listen, "--side-channel", side]));
        assert!(
            !started && printed.contains("beyond loopback needs --cluster-secret-file"),
            "{listen}: {printed}"
        );
    }
    // An engine without handoffs has no side channel.
    let (started, _, printed) =
        out(&baton(&["engine", "--role", "standalone", "--side-channel", "127.0.0.1:0"]));
    assert!(!started && printed.contains("--side-channel has no effect with --role standalone"), "{printed}");
    let (started, _, printed) = out(&baton(&["engine", "--role", "standalone", "--listen", "0.0.0.0:0"]));
    assert!(!started && printed.contains("beyond loopback needs --cluster-secret-file"), "{printed}");
    // A password that could be guessed is not accepted either.
    let folder = tempfile::tempdir().unwrap();
    let short = file(folder.path(), "secret", "fifteen bytes..");
    let (started, _, printed) = out(&baton(&[
        "engine",
        "--listen",
        "0.0.0.0:0",
        "--side-channel",
        "127.0.0.1:0",
        "--cluster-secret-file",
        &short,
    ]));
    assert!(!started && printed.contains("expected at least 16"), "{printed}");
}

#[test]
fn check_prints_ok_or_what_is_in_effect_and_it_is_a_configuration_again() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(folder.path(), "good.yaml", GOOD);
    assert_eq!(out(&baton(&["check", &good])), (true, format!("{good}: OK\n"), String::new()));
    let (sound, effective, _) = out(&baton(&["check", "--print", &good]));
    assert!(sound && effective.contains("drain_timeout_ms: 30000"), "{effective}");
    let again = file(folder.path(), "again.yaml", &effective);
    let (sound, text, _) = out(&baton(&["check", "--print", &again]));
    let below = |text: &str| text.split_once('\n').unwrap().1.to_owned();
    assert!(sound);
    assert_eq!(below(&text), below(&effective));
}

#[test]
fn check_without_files_judges_a_configuration_whose_secrets_are_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let secrets =
        format!("{GOOD}cluster_secret_file: /nowhere/secret\nadmin: {{token_file: /nowhere/token}}\n");
    let there = file(folder.path(), "there.yaml", &secrets);
    let (sound, _, printed) = out(&baton(&["check", &there]));
    assert!(!sound && printed.contains("/nowhere/secret"), "{printed}");
    let (sound, effective, printed) = out(&baton(&["check", "--no-files", "--print", &there]));
    assert!(sound && effective.contains("cluster_secret_file: /nowhere/secret"), "{effective}\n{printed}");
    let not_seen: Vec<_> = printed.lines().collect();
    assert_eq!(not_seen.len(), 2, "{printed}");
    for (line, key) in
        not_seen.iter().zip(["admin.token_file: /nowhere/token", "cluster_secret_file: /nowhere/secret"])
    {
        assert_eq!(*line, format!("{there}: not checked: {key}"));
    }
    // Problems of the file itself are reported as always.
    let wrong = file(folder.path(), "wrong.yaml", &secrets.replace("token_file", "tokn_file"));
    let (sound, _, printed) = out(&baton(&["check", "--no-files", &wrong]));
    assert!(!sound && printed.contains("tokn_file"), "{printed}");
}

#[test]
fn check_prints_every_problem_with_its_place_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let bad = file(folder.path(), "bad.yaml", &GOOD.replace("name", "nam").replace("2'", "2', weight: 0"));
    let (sound, nothing, printed) = out(&baton(&["check", &bad]));
    assert!(!sound && nothing.is_empty(), "{nothing}");
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(lines.len(), 4, "{printed}");
    assert!(lines[0].starts_with(&format!("{bad}:2:5: ")), "{printed}");
    assert_eq!(lines[1], format!("{bad}:2:5: unknown key `nam`, did you mean `name`?"));
    assert!(lines[2].starts_with(&format!("{bad}:3:")) && lines[2].ends_with("0 is below 1"), "{printed}");
    assert_eq!(lines[3], "baton: 3 problems");
}

#[test]
fn check_warns_of_keys_without_effect_and_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let text = GOOD.replace("decode: {", "decode: {kv_events: {port: 5557}, ");
    let warnings = |name: &str, text: &str| {
        let (sound, _, printed) = out(&baton(&["check", &file(folder.path(), name, text)]));
        assert!(sound, "{printed}");
        printed
    };
    assert_eq!(warnings("plain.yaml", &text), "");
    let without_keys = warnings("auth.yaml", &format!("{text}auth: {{}}\n"));
    assert!(without_keys.contains("auth.yaml: warning: auth: has no `keys`"), "{without_keys}");
    let issuer = "auth: {jwt: [{issuer: 'https://login.example.com', audience: baton, tenant: t}]}\n";
    assert_eq!(warnings("issuer.yaml", &format!("{text}{issuer}")), "");
    assert_eq!(warnings("ranks.yaml", &text.replace(":2'", ":2', data_parallel_size: 4")), "");
    let tokenized = |text: &str| text.replace("decode: {", "tokenize: {from: engine}\n    decode: {");
    assert_eq!(warnings("tokenized.yaml", &tokenized(&text)), "");
    let unused = warnings("unused.yaml", &tokenized(GOOD));
    assert!(unused.contains("warning: models[0].tokenize: no engine has `kv_events`"), "{unused}");
}

#[test]
fn check_reports_unreadable_files() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("secret");
    let anywhere = "listen: '127.0.0.1:0'\nadmin: {listen: '127.0.0.1:0'}\n";
    let text = format!("{anywhere}{GOOD}cluster_secret_file: '{}'\n", missing.display());
    let config = file(folder.path(), "router.yaml", &text);
    let (sound, _, printed) = out(&baton(&["check", &config]));
    let named = format!("cluster_secret_file: {}", missing.display());
    assert!(!sound && printed.contains(&named), "{printed}");
    let (started, _, printed) = out(&baton(&["router", "--config", &config]));
    assert!(!started && printed.contains(&named), "{printed}");
    let (started, _, printed) =
        out(&baton(&["engine", "--role", "both", "--cluster-secret-file", &missing.display().to_string()]));
    assert!(
        !started && printed.contains(&format!("--cluster-secret-file {}", missing.display())),
        "{printed}"
    );
    std::fs::write(&missing, "0123456789abcdef").unwrap();
    assert!(out(&baton(&["check", &config])).0);
}

#[test]
fn a_router_whose_port_is_taken_names_the_configuration_key() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for (key, listen, admin) in [
        ("listen", address, "127.0.0.1:0".parse().unwrap()),
        ("admin.listen", "127.0.0.1:0".parse().unwrap(), address),
    ] {
        let text = format!("listen: '{listen}'\nadmin: {{listen: '{admin}'}}\n{GOOD}");
        let config = file(folder.path(), "taken.yaml", &text);
        let (started, _, printed) = out(&baton(&["router", "--config", &config]));
        assert!(!started && printed.contains(&format!("{key}: cannot listen on {address}")), "{printed}");
        assert!(printed.contains(&format!("set `{key}` in the configuration to another port")), "{printed}");
    }
}

#[test]
fn an_engine_whose_port_is_taken_names_the_option() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (option, other) in [("--listen", "--side-channel"), ("--side-channel", "--listen")] {
        let (started, _, printed) = out(&baton(&["engine", option, &address, other, "127.0.0.1:0"]));
        assert!(!started && printed.contains(&format!("{address} ({option})")), "{printed}");
    }
}

#[test]
fn check_prints_the_schema_and_what_changes() {
    let (sound, schema, _) = out(&baton(&["check", "--schema"]));
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    assert!(sound && schema["properties"]["models"].is_object());
    let folder = tempfile::tempdir().unwrap();
    let old = file(folder.path(), "old.yaml", GOOD);
    let new = file(folder.path(), "new.yaml", &format!("{GOOD}attempts: {{decode: 5}}\n"));
    let (sound, changes, _) = out(&baton(&["check", "--diff", &old, &new]));
    assert!(sound);
    assert_eq!(changes, "- attempts.decode: 3\n+ attempts.decode: 5\n");
}

/// `/config` of a router's admin listener.
fn in_effect(admin: &str) -> serde_json::Value {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(admin).unwrap();
    stream.write_all(b"GET /config HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[test]
fn a_running_router_reads_its_file_again_on_sighup() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    let folder = tempfile::tempdir().unwrap();
    let text =
        format!("listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nreload: {{poll_ms: 0}}\n{GOOD}");
    let config = file(folder.path(), "router.yaml", &text);
    let mut router = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["router", "--config", &config, "--until-stdin-ends"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(router.stdout.take().unwrap()).lines();
    let ready = lines.next().unwrap().unwrap();
    let admin = ready.split("admin=").nth(1).unwrap().to_owned();
    let until = |what: &dyn Fn(&serde_json::Value) -> bool| {
        let begun = Instant::now();
        while !what(&in_effect(&admin)) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{}", in_effect(&admin));
            #[allow(clippy::disallowed_methods, reason = "a pause between two looks")]
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let hang_up = || {
        let sent = Command::new("kill").args(["-HUP", &router.id().to_string()]).status().unwrap();
        assert!(sent.success());
    };
    assert_eq!(in_effect(&admin)["generation"], 1);
    file(folder.path(), "router.yaml", &format!("{text}attempts: {{decode: 7}}\n"));
    hang_up();
    until(&|now| now["generation"] == 2 && now["config"]["attempts"]["decode"] == 7);
    let next = file(folder.path(), "next.yaml", &format!("{text}attempts: {{decode: 6}}\n"));
    let (sound, changes, printed) = out(&baton(&["check", "--diff", &format!("http://{admin}"), &next]));
    assert!(sound, "{printed}");
    assert_eq!(changes, "- attempts.decode: 7\n+ attempts.decode: 6\n");
    file(folder.path(), "router.yaml", "models: nothing");
    hang_up();
    until(&|now| now["reloads"]["last"]["result"] == "rejected" && now["generation"] == 2);
    drop(router.stdin.take());
    assert!(router.wait().unwrap().success(), "it stops when its supervisor leaves");
}

#[test]
fn simulated_engines_print_their_addresses_and_a_valid_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("router.yaml").display().to_string();
    // The command's input has ended already.
    let args = ["bench", "sim", "--decode", "2", "--until-stdin-ends", "--router-config", &file];
    let (sound, printed, _) = out(&baton(&args));
    let line = printed.strip_prefix("ready prefill=").unwrap().trim_end();
    let (prefill, decode) = line.split_once(" decode=").unwrap();
    let decode: Vec<_> = decode.split(',').collect();
    assert!(sound && decode.len() == 2, "{printed}");
    let (sound, effective, printed) = out(&baton(&["check", "--print", &file]));
    assert!(sound, "{printed}");
    for address in decode.into_iter().chain([prefill]) {
        assert!(effective.contains(&format!("http://{address}")), "{address}: {effective}");
    }
    let (sound, _, printed) = out(&baton(&["bench", "sim", "--fault", "refuses:2"]));
    assert!(!sound && printed.contains("`2` is no share between 0 and 1"), "{printed}");
    let (sound, _, printed) =
        out(&baton(&["bench", "sim", "--fault", "dies@prefill-7", "--until-stdin-ends"]));
    assert!(!sound && printed.contains("there is no such engine"), "{printed}");
    let (sound, _, printed) = out(&baton(&["bench", "compare", "--lease-ms", "100"]));
    assert!(!sound && printed.contains("--lease-ms must be"), "{printed}");
}

#[test]
fn the_disconnect_benchmark_finds_planted_faults() {
    let judge = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/aiperf_judge.py");
    let Ok(checked) = Command::new("python3").arg(&judge).arg("--check").output() else {
        eprintln!("SKIPPED: the judge was not tested: there is no python3");
        return;
    };
    let (sound, printed, wrong) = out(&checked);
    assert!(sound && printed.contains("finds every planted fault"), "{printed}{wrong}");
    // The committed result still holds under the current judge.
    let kept =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results/disconnect/2026-11-23-aiperf-zen5.json.gz");
    let again =
        Command::new("python3").arg(judge).arg("--again").arg(kept).output().expect("it ran just now");
    let (sound, printed, wrong) = out(&again);
    assert!(sound && printed.contains("9 of 9 runs hold\n"), "{printed}{wrong}");
}

#[test]
#[cfg(unix)]
fn compared_routers_are_installed_separately_and_missing_ones_reported() {
    use std::os::unix::fs::PermissionsExt;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/peers.sh");
    let program = |folder: &Path, name: &str, does: &str| {
        std::fs::create_dir_all(folder).unwrap();
        let path = file(folder, name, &format!("#!/bin/sh\n{does}\n"));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    };
    let folder = tempfile::tempdir().unwrap();
    // No package index is used: the folder has a `pip` with some of the packages.
    let with = |has: &str| {
        let place = folder.path().join(has);
        let does = format!("case \"$*\" in *{has}==*) ;; *) echo 'ERROR: not to be had' >&2; exit 1;; esac");
        program(&place.join("bin"), "pip", &does);
        Command::new("bash").arg(&script).arg(place).output()
    };
    let Ok(one) = with("vllm-router") else {
        eprintln!("SKIPPED: the script was not tested: there is no bash");
        return;
    };
    let (_, printed, wrong) = out(&one);
    assert_eq!(one.status.code(), Some(0), "{wrong}");
    assert!(
        printed.contains("--peers") && wrong.starts_with("SKIPPED smg: ") && wrong.contains("not to be had"),
        "{wrong}"
    );
    assert_eq!(wrong.matches("SKIPPED").count(), 1, "{wrong}");
    let (_, _, wrong) = out(&with("smg").unwrap());
    assert!(wrong.starts_with("SKIPPED vllm-router: ") && wrong.matches("SKIPPED").count() == 1, "{wrong}");
    let none = with("neither").unwrap();
    assert_eq!((none.status.code(), out(&none).2.matches("SKIPPED").count()), (Some(77), 2));
    // A Python that cannot create an environment, like Debian's without python3-venv.
    let python = program(folder.path(), "python", "echo 'ensurepip is not available' >&2; exit 1");
    let bare = Command::new("bash")
        .arg(&script)
        .arg(folder.path().join("bare"))
        .env("PYTHON", python)
        .output()
        .unwrap();
    let (_, _, wrong) = out(&bare);
    assert_eq!(bare.status.code(), Some(77), "{wrong}");
    assert!(wrong.contains("SKIPPED smg: ") && wrong.contains("ensurepip is not available"), "{wrong}");
}

/// Runs a command whose standard output, or else its standard error, is a pipe that nothing reads.
fn unread(arguments: &[&str], is_output: bool) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if is_output {
        command.stdout(writer)
    } else {
        command.stderr(writer)
    };
    command.output().unwrap()
}

/// A process that ends with the test.
struct ChildGuard(std::process::Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // The process may have ended already. A test detects this in another way.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_printing_command_ends_quietly_on_a_closed_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (listen, admin) = (free(), free());
    let good = file(folder.path(), "good.yaml", GOOD);
    let changed = file(folder.path(), "changed.yaml", &format!("{GOOD}drain_timeout_ms: 1\n"));
    let wrong = file(folder.path(), "wrong.yaml", "listen: 8080\n");
    let served = file(
        folder.path(),
        "router.yaml",
        &format!("listen: {listen}\nadmin: {{listen: '{admin}'}}\n{GOOD}"),
    );
    // A router without a reader of its output starts, logs and serves.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let router = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["router", "-c", &served])
        .stdin(Stdio::null())
        .stdout(writer.try_clone().unwrap())
        .stderr(writer)
        .spawn()
        .unwrap();
    let mut router = ChildGuard(router);
    let (admin, client) = (format!("http://{admin}"), format!("http://{listen}"));
    let health = format!("{admin}/health");
    let begun = std::time::Instant::now();
    while !baton(&["health", &health]).status.success() {
        assert!(router.0.try_wait().unwrap().is_none() && begun.elapsed().as_secs() < 60, "it serves");
        #[allow(
            clippy::disallowed_methods,
            reason = "a pause between two looks at whether a process has ended"
        )]
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let events =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results/disconnect/sample/events.jsonl.gz");
    std::fs::copy(events, folder.path().join("events.jsonl.gz")).unwrap();
    let folder = folder.path().to_str().unwrap();
    let commands: [&[&str]; 15] = [
        &["--help"],
        &["--version"],
        &["help", "check"],
        &["check", &good],
        &["check", "--print", &good],
        &["check", "--schema"],
        &["check", &changed, "--diff", &good],
        &["check", &changed, "--diff", &admin],
        &["key", "new", "--id", "a", "--tenant", "b"],
        &["explain", "--admin", &admin],
        &["explain", "--admin", &admin, "--json"],
        &["top", "--once", "--admin", &admin],
        &["doctor", &client, "--admin", &admin, "--no-requests"],
        &["bench", "report", folder],
        &["bench", "report", "--json", folder],
    ];
    for command in commands {
        let output = unread(command, true);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(141), "{command:?}: {printed}");
        assert!(!printed.contains("panicked") && !printed.contains("roken pipe"), "{command:?}: {printed}");
    }
    // A command's purpose is not its standard error: its exit code stays the same.
    let commands: [(&[&str], i32); 5] = [
        (&["check", &good], 0),
        (&["check", &wrong], 1),
        (&["check", "--no-such-option"], 2),
        (&["explain", "no-such-request", "--admin", &admin], 1),
        (&["doctor", &client, "--admin", "http://127.0.0.1:1", "--no-requests"], 1),
    ];
    for (command, code) in commands {
        assert_eq!(unread(command, false).status.code(), Some(code), "{command:?}");
    }
    assert!(baton(&["health", &health]).status.success(), "the router serves on");
    let pid = router.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(router.0.wait().unwrap().code(), Some(0), "it ends as a router that gets SIGTERM");
    // A new command is added above, or as an exception here, with the reason.
    let without = ["up", "engine", "router", "picker", "sidecar", "health", "parity"]; // servers; prints nothing; needs a folder of outputs
    let (_, help, _) = out(&baton(&["--help"]));
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names =
        listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
    let missing: Vec<_> = names
        .filter(|name| !without.contains(name) && !["help"].contains(name))
        .filter(|name| !["check", "key", "explain", "top", "doctor", "bench"].contains(name))
        .collect();
    assert!(missing.is_empty() && help.contains("Commands:"), "{missing:?}");
}

#[test]
fn up_warns_of_an_open_listener_and_keeps_the_admin_listener_on_loopback() {
    // Options that no engine accepts: the processes end soon.
    let open = baton(&["up", "--listen", "0.0.0.0:0", "--", "--no-such-option"]);
    let (sound, _, printed) = out(&open);
    assert!(!sound && printed.contains("warning: 0.0.0.0:0 is reachable from other machines"), "{printed}");
    let closed = baton(&["up", "--listen", "localhost:0", "--", "--no-such-option"]);
    let (sound, _, printed) = out(&closed);
    assert!(!sound && !printed.contains("warning"), "{printed}");
    let (sound, _, printed) = out(&baton(&["up", "--listen", "localhost:0", "--admin-listen", "0.0.0.0:0"]));
    assert!(!sound && printed.contains("--admin-listen 0.0.0.0:0 is beyond loopback"), "{printed}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let (sound, _, printed) = out(&baton(&["up", "--listen", "localhost:0", "--admin-listen", &taken]));
    assert!(!sound && printed.contains("choose another with --admin-listen"), "{printed}");
    let (sound, _, printed) = out(&baton(&["up", "--listen", ":8000"]));
    assert!(!sound && printed.contains("write `127.0.0.1:8000` (this machine only)"), "{printed}");
}
