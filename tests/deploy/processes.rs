//! Runs the real binary with the arguments of the documents.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::harness::{PendingCall, Process};
use crate::references::{Fleet, containers, list, port_of};
use crate::{baton, run};

/// A container's arguments, with the values of the pod's variables.
fn arguments(command: &str, container: &Value) -> Vec<String> {
    let variable = |name: &str| list(&container["env"]).any(|variable| variable["name"] == name);
    let args = list(&container["args"]).map(|arg| {
        let arg = arg.as_str().expect("arguments are text");
        assert!(!arg.contains("$(") || variable("POD_IP"), "{arg}");
        let arg = arg.replace("$(POD_IP)", "127.0.0.1");
        assert!(!arg.contains('$'), "{arg}");
        arg
    });
    std::iter::once(command.to_owned()).chain(args).collect()
}

/// The containers of Baton's engines, with their overlays.
fn engines() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for fleet in Fleet::all() {
        for (name, pod) in fleet.pods() {
            let container = containers(pod).next().expect("a container");
            if container["image"].as_str().is_some_and(|image| image.contains("baton/engine")) {
                found.push((format!("{}-{name}", fleet.name), container.clone()));
            }
        }
    }
    assert!(found.len() >= 4, "two overlays with two deployments: {found:?}");
    found
}

/// The probes of a container: kind, port and path.
fn probes(container: &Value) -> Vec<(&'static str, String, String)> {
    let probes = ["startupProbe", "livenessProbe", "readinessProbe"].map(|kind| {
        let get = &container[kind]["httpGet"];
        let text = |key: &str| get[key].as_str().unwrap_or_else(|| panic!("{kind} has no {key}")).to_owned();
        (kind, text("port"), text("path"))
    });
    probes.to_vec()
}

/// A router's configuration for this machine. `folder` contains the files of its pod's mounts.
fn with_local_files(fleet: &Fleet, folder: &Path) -> String {
    let mut text = fleet.router_yaml().to_owned();
    for (at, keys) in fleet.mounts(fleet.router()) {
        let here = folder.join(at.trim_start_matches('/'));
        fs::create_dir_all(&here).expect("the test's folder can be written");
        for key in keys.iter().filter(|key| *key != "router.yaml") {
            let file = here.join(key);
            if !file.exists() {
                fs::write(&file, content(key)).expect("the test's folder can be written");
            }
        }
        text = text.replace(&format!("{at}/"), &format!("{}/", here.display()));
    }
    let (certificate, key) =
        (folder.join("run/secrets/baton-tls/tls.crt"), folder.join("run/secrets/baton-tls/tls.key"));
    if certificate.exists() {
        let made =
            rcgen::generate_simple_self_signed(vec!["baton.example".to_owned()]).expect("a certificate");
        fs::write(certificate.with_file_name("ca.crt"), made.cert.pem()).expect("a file of the test");
        fs::write(certificate, made.cert.pem()).expect("a file of the test");
        fs::write(key, made.signing_key.serialize_pem()).expect("a file of the test");
    }
    text
}

/// The content of a secret's file.
fn content(key: &str) -> String {
    match key {
        "keys.yaml" => {
            let words = ["key", "new", "--id", "chat-1", "--tenant", "chat"].map(str::to_owned);
            let (made, text) = baton(&words);
            assert!(made, "{text}");
            format!("keys:\n{text}")
        }
        _ => "0123456789abcdef0123456789abcdef".to_owned(),
    }
}

fn health(url: &str) -> (bool, String) {
    baton(&["health".to_owned(), url.to_owned()])
}

fn status(address: &str, path: &str) -> (u16, String) {
    let reply = PendingCall::new(address, "GET", path, b"").reply();
    (reply.status, String::from_utf8_lossy(&reply.body).into_owned())
}

#[test]
fn engines_understand_their_arguments() {
    for (name, container) in engines() {
        // The only error is that the checkpoint does not exist here.
        let args = arguments("engine", &container);
        let (started, printed) = baton(&args);
        assert!(!started && printed.contains("--model /model: there is no such folder"), "{name}: {printed}");
        let (started, printed) = baton(&[args, vec!["--side-chanel=1".to_owned()]].concat());
        assert!(!started && printed.contains("unexpected argument '--side-chanel'"), "{name}: {printed}");
    }
}

#[test]
fn engines_listen_on_their_declared_ports_and_answer_probes() {
    for (name, container) in engines() {
        let mut args = arguments("engine", &container);
        for (key, port) in [("--listen=", "http"), ("--side-channel=", "side-channel")] {
            let number = port_of(&container, port).unwrap_or_else(|| panic!("{name} has no port {port}"));
            let listens = format!("{key}0.0.0.0:{number}");
            let arg = args.iter_mut().find(|arg| **arg == listens);
            *arg.unwrap_or_else(|| panic!("{name} does not say {listens}")) = format!("{key}127.0.0.1:0");
        }
        // A small engine with the built-in model.
        let folder = tempfile::tempdir().expect("a temporary folder");
        let secret = folder.path().join("secret");
        fs::write(&secret, content("secret")).expect("a file of the test");
        args.retain(|arg| !arg.starts_with("--model="));
        for (key, value) in [
            ("--kv-cache-mib=", "32"),
            ("--threads=", "1"),
            ("--cluster-secret-file=", &secret.display().to_string()),
        ] {
            let arg =
                args.iter_mut().find(|arg| arg.starts_with(key)).unwrap_or_else(|| panic!("{name}: {key}"));
            *arg = format!("{key}{value}");
        }
        let mut engine = Process::start(&name, &args, folder.path());
        engine.wait_ready();
        let address = engine.fact("http");
        for (probe, port, path) in probes(&container) {
            assert_eq!(port, "http", "{name}: {probe}");
            assert_eq!(status(&address, &path).0, 200, "{name}: {probe} {path}");
            // The probe of a container without `curl`.
            let (fine, printed) = health(&format!("http://{address}{path}"));
            assert!(fine && printed.is_empty(), "{name}: {printed}");
        }
        assert_eq!(status(&address, "/metrics").0, 200, "{name}: what ServiceMonitors scrape");
        assert_eq!(status(&address, "/ready").0, 404, "{name}: a probe of what is not there would be seen");
    }
}

#[test]
fn routers_accept_their_configuration_listen_on_their_ports_and_answer_probes() {
    for fleet in Fleet::all() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut text = with_local_files(&fleet, folder.path());
        let file = folder.path().join("router.yaml");
        let container = containers(fleet.router()).next().expect("a container").clone();
        let args = arguments("router", &container);
        assert_eq!(args[1..3], ["--config", "/etc/baton/router.yaml"], "{}", fleet.name);

        fs::write(&file, &text).expect("a file of the test");
        let (sound, printed) = run(Command::new(env!("CARGO_BIN_EXE_baton")).arg("check").arg(&file));
        assert!(sound && !printed.contains("warning:"), "{}: {printed}", fleet.name);

        for (port, place) in [("http", "\nlisten: "), ("admin", "\n  listen: ")] {
            let number = port_of(&container, port).unwrap_or_else(|| panic!("no port {port}"));
            let listens = format!("{place}0.0.0.0:{number}\n");
            assert!(text.contains(&listens), "{}: no {listens:?} in {text}", fleet.name);
            text = text.replace(&listens, &format!("{place}127.0.0.1:0\n"));
        }
        fs::write(&file, &text).expect("a file of the test");
        let args = [&args[..1], &["--config".to_owned(), file.display().to_string()], &args[3..]].concat();
        let mut router = Process::start(&format!("router-{}", fleet.name), &args, folder.path());
        router.wait_ready();
        for (probe, port, path) in probes(&container) {
            let address = router.fact(if port == "http" { "http" } else { "admin" });
            let (status, body) = status(&address, &path);
            let (fine, printed) = health(&format!("http://{address}{path}"));
            assert!(
                fine == (status == 200) && (fine || printed.contains("status 503 for /ready: no engine")),
                "{printed}"
            );
            match probe {
                // Without a cluster there is no engine, and a router without an engine must not get requests.
                "readinessProbe" => {
                    assert_eq!((status, body.trim()), (503, "no engine"), "{}", fleet.name)
                }
                _ => assert_eq!(status, 200, "{}: {probe} {path}", fleet.name),
            }
        }
        assert_eq!(status(&router.fact("admin"), "/metrics").0, 401, "{}: it needs the token", fleet.name);
    }
}
