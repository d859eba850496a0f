//! An engine without handoffs as a process: what it does not have, and what it serves behind a router.

use std::collections::BTreeSet;

use serde_json::json;

use crate::harness::{GenerateRequest, MODEL, PATIENCE, PendingCall, Process, eventually, metric};

/// Starts of the names of threads that only handoffs need.
const OF_HANDOFFS: [&str; 4] = ["lease-timer", "fetch-", "heartbeat-", "notices-"];

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The threads of a process that only handoffs need.
fn threads_of_handoffs(process: &Process) -> BTreeSet<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.pid())).expect("it runs");
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let names = names.map(|name| name.trim().to_owned());
    names.filter(|name| OF_HANDOFFS.iter().any(|start| name.starts_with(start))).collect()
}

#[test]
fn a_standalone_engine_serves_behind_a_router_without_mirror_side_channel_or_their_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = |name: &str, options: &str| {
        let fixed =
            "--device software --kv-cache-dtype f32 --listen 127.0.0.1:0 --kv-cache-mib 32 --threads 1";
        let mut engine = Process::start(name, &words(&format!("engine {options} {fixed}")), folder.path());
        engine.wait_ready();
        engine
    };
    let (alone, pair) = (start("standalone", "--role standalone"), start("both", "--role both"));
    let address = alone.fact("http");
    assert_eq!(alone.fact("side_channel"), "none");
    assert_eq!(threads_of_handoffs(&alone), BTreeSet::new());
    let found = threads_of_handoffs(&pair);
    assert!(found.contains("lease-timer") && found.len() > 4, "an engine with handoffs has {found:?}");
    // The log line and the metric agree.
    for (engine, has_mirror) in [(&alone, false), (&pair, true)] {
        let page = PendingCall::new(&engine.fact("http"), "GET", "/metrics", b"").reply();
        let bytes = metric(&String::from_utf8_lossy(&page.body), "baton_kv_mirror_bytes", "");
        assert_eq!(bytes > 0.0, has_mirror);
        let log = engine.log();
        let line = log.lines().find(|line| line.contains("kv_pool_allocated")).expect("the pool is logged");
        assert!(line.ends_with(&format!("mirror_bytes={bytes}")), "{line}");
    }

    let engines = json!({"engines": [{"url": format!("http://{address}")}]});
    let config = json!({
        "listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"},
        "models": [{"name": MODEL, "decode": engines}],
    });
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, config.to_string()).expect("the folder can be written");
    let args = ["router".to_owned(), "--config".to_owned(), file.display().to_string()];
    let mut router = Process::start("router", &args, folder.path());
    router.wait_ready();
    eventually(PATIENCE, "the engine is known to the router", || {
        let shown = PendingCall::new(&router.fact("admin"), "GET", "/engines", b"").reply().json();
        if shown["engines"][0]["known"] == true { Ok(()) } else { Err(shown.to_string()) }
    });
    let ask = GenerateRequest::fresh(50).tokens(12);
    let post = |to: &str, ask: &GenerateRequest| {
        PendingCall::new(to, "POST", ask.path, ask.body.to_string().as_bytes()).reply()
    };
    let (routed, with_handoffs) = (post(&router.fact("http"), &ask), post(&pair.fact("http"), &ask));
    assert_eq!((routed.status, with_handoffs.status), (200, 200), "{}", routed.json());
    assert_eq!(routed.json()["choices"], with_handoffs.json()["choices"]);
    eventually(PATIENCE, "the router shows the engine's role", || {
        let shown = PendingCall::new(&router.fact("admin"), "GET", "/debug/kv", b"").reply().json();
        if shown["engines"][0]["role"] == "standalone" { Ok(()) } else { Err(shown.to_string()) }
    });

    // A refused handoff is released at its producer, by threads that start now.
    let intent = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let leg = ask.clone().with("max_tokens", json!(1)).with("kv_transfer_params", intent);
    assert_eq!(post(&address, &leg).json()["error"]["code"], "kv_wrong_role");
    assert_eq!(threads_of_handoffs(&alone), BTreeSet::new());
    let handoff = post(&pair.fact("http"), &leg).json()["kv_transfer_params"].take();
    let refused = post(&address, &ask.with("kv_transfer_params", handoff)).json();
    assert_eq!(refused["error"]["code"], "kv_wrong_role", "{refused}");
    eventually(PATIENCE, "the lease ends", || {
        let shown = PendingCall::new(&pair.fact("http"), "GET", "/debug/kv", b"").reply().json();
        if shown["leases"]["live"] == 0 { Ok(()) } else { Err(shown.to_string()) }
    });
    let started = threads_of_handoffs(&alone);
    let is_for_notices = |name: &String| name.starts_with("notices-") || name == "heartbeat-0";
    assert!(!started.is_empty() && started.iter().all(is_for_notices), "{started:?}");
}
