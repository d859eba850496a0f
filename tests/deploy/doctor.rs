//! The runbook's first check: `baton doctor --strict`. With the example for systemd it passes as soon as clients need a
//! key, or the missing key is ignored on purpose.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::Process;
use crate::{baton, ours, parsed, read};

/// The example's router with two engines, at addresses of this machine.
struct DoctorSetup {
    _processes: Vec<Process>,
    url: String,
    admin: String,
}

impl DoctorSetup {
    /// `auth` is not part of the example.
    fn start(folder: &Path, auth: Option<Value>) -> Self {
        let secret = folder.join("cluster-secret");
        fs::write(&secret, "the secret of this test's cluster\n").expect("the test's folder can be written");
        let token = folder.join("admin-token");
        fs::write(&token, "the token of this test's router\n").expect("the test's folder can be written");
        let engine = |role: &str| {
            let words = format!(
                "engine --role {role} --listen 127.0.0.1:0 --side-channel 127.0.0.1:0 --kv-cache-mib 32 --threads 1"
            );
            let mut args: Vec<String> = words.split(' ').map(str::to_owned).collect();
            args.extend(["--cluster-secret-file".to_owned(), secret.display().to_string()]);
            let mut process = Process::start(role, &args, folder);
            process.wait_ready();
            process
        };
        let engines = ["prefill", "decode"].map(engine);
        let example = ours("deploy/config/systemd.yaml");
        let mut config = parsed(&read(&example), &example);
        assert!(config["listen"].as_str().is_some_and(|listen| listen.starts_with("0.0.0.0:")));
        config["listen"] = json!("0.0.0.0:0");
        config["admin"] = json!({"listen": "0.0.0.0:0", "token_file": token});
        config["cluster_secret_file"] = json!(secret);
        config["access_log"]["path"] = json!(folder.join("access.log"));
        config["models"][0]["name"] = json!(engines[0].fact("model"));
        for (leg, engine) in ["prefill", "decode"].into_iter().zip(&engines) {
            config["models"][0][leg]["engines"][0]["url"] = json!(format!("http://{}", engine.fact("http")));
        }
        // This machine does not have the unit's LimitNOFILE.
        config["limits"] = json!({"connections": 64, "in_flight": 32});
        if let Some(auth) = auth {
            config["auth"] = auth;
        }
        let file = folder.join("router.yaml");
        fs::write(&file, config.to_string()).expect("the test's folder can be written");
        let args = ["router", "--config", &file.display().to_string()].map(str::to_owned);
        let mut router = Process::start("router", &args, folder);
        router.wait_ready();
        let at = |name: &str| router.fact(name).replace("0.0.0.0", "http://127.0.0.1");
        let (url, admin) = (at("http"), at("admin"));
        // The first health checks of the engines may take a while.
        let ready = format!("{url}/ready");
        let is_ready = || {
            let health = Command::new(env!("CARGO_BIN_EXE_baton")).args(["health", &ready]).output();
            health.is_ok_and(|health| health.status.success())
        };
        let begun = Instant::now();
        while !is_ready() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the router has engines");
        }
        Self { _processes: engines.into_iter().chain([router]).collect(), url, admin }
    }

    /// The doctor's exit code, and its lines with these marks.
    fn doctor(&self, folder: &Path, more: &[&str]) -> (Option<i32>, Vec<(String, String)>) {
        let file = |name: &str| folder.join(name).display().to_string();
        let output = Command::new(env!("CARGO_BIN_EXE_baton"))
            .args(["doctor", &self.url, "--admin", &self.admin, "--strict", "--json"])
            .args([
                "--admin-token-file",
                &file("admin-token"),
                "--cluster-secret-file",
                &file("cluster-secret"),
            ])
            .args(more)
            .output()
            .expect("the binary under test can be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let lines = report["checks"].as_array().expect("a list").iter();
        let lines = lines.filter(|line| ["WARN", "FAIL", "IGNORED"].map(Value::from).contains(&line["mark"]));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let lines = lines
            .map(|line| (text(&line["mark"]), format!("{} {}", text(&line["check"]), text(&line["told"]))));
        (output.status.code(), lines.collect())
    }
}

#[test]
fn the_doctor_accepts_the_example_when_its_open_listener_is_ignored() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let site = DoctorSetup::start(folder.path(), None);
    let (code, found) = site.doctor(folder.path(), &[]);
    assert_eq!((code, found.len()), (Some(1), 1), "{found:?}");
    assert!(found[0].0 == "WARN" && found[0].1.starts_with("exposure clients need neither key"), "{found:?}");
    let (code, meant) = site.doctor(folder.path(), &["--ignore", "exposure"]);
    assert_eq!(code, Some(0), "{meant:?}");
    assert_eq!(meant, [("IGNORED".to_owned(), found[0].1.clone())]);
    // Ignoring another check does not ignore this one.
    let (code, found) = site.doctor(folder.path(), &["--ignore", "clock", "--no-requests"]);
    assert_eq!((code, found[0].0.as_str()), (Some(1), "WARN"), "{found:?}");

    // Without a token the error message names the reason.
    let admin = ["top", "--once", "--admin", &site.admin].map(str::to_owned);
    let (fine, said) = baton(&admin);
    assert!(!fine && said.contains("401") && !said.contains(char::REPLACEMENT_CHARACTER), "{said}");
}

#[test]
fn the_doctor_accepts_the_example_with_client_keys() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (made, keys) = baton(&["key", "new", "--id", "doctor", "--tenant", "operators"].map(str::to_owned));
    let key = keys.lines().find_map(|line| line.strip_prefix("#   ")).expect("the key is shown once");
    assert!(made, "{keys}");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("the test's folder can be written");
        path.display().to_string()
    };
    let keys_file = file("keys.yaml", &format!("keys:\n{keys}"));
    let site = DoctorSetup::start(folder.path(), Some(json!({"keys_file": keys_file})));
    let (code, found) = site.doctor(folder.path(), &["--api-key-file", &file("key", key)]);
    assert_eq!((code, found), (Some(0), Vec::new()));
}
