//! Routers and engines are replaced under load, one after the other, also with another cluster secret: no request
//! fails, and no lease expires.
//!
//! `BATON_UPGRADE_SECONDS=60 cargo test --test e2e upgrade` runs for longer than the default.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{GenerateRequest, PATIENCE, PendingCall, Process, Signal, eventually, metric, signal};

/// Requests per second.
const RATE: u32 = 12;
/// Routers that follow the first.
const SUCCESSORS: usize = 3;
const ROLES: [&str; 4] = ["prefill", "prefill", "decode", "decode"];
/// Limit for a process to finish its requests.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

fn seconds() -> u64 {
    std::env::var("BATON_UPGRADE_SECONDS").map_or(14, |text| text.parse().expect("seconds"))
}

fn started(name: &str, arguments: &[&str], folder: &Path) -> Process {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let mut process = Process::start(name, &arguments, folder);
    process.wait_ready();
    process
}

fn engine(name: &str, role: &str, listen: &str, folder: &Path) -> Process {
    engine_with(name, role, listen, folder, &[])
}

fn engine_with(name: &str, role: &str, listen: &str, folder: &Path, options: &[&str]) -> Process {
    let place = ["engine", "--role", role, "--listen", listen, "--side-channel", "127.0.0.1:0"];
    started(name, &[&place, ["--kv-cache-mib", "32", "--threads", "1"].as_slice(), options].concat(), folder)
}

/// Ends an engine, starts its successor at the same address, and waits until the router uses it, as an operator does.
fn replace(engine: &mut Process, admin: &str, role: &str, start: impl FnOnce(&str) -> Process) {
    let place = engine.fact("http");
    nothing_expired(&place);
    engine.signal(Signal::Terminate);
    engine.ends_well(ENDS_WITHIN);
    *engine = start(&place);
    eventually(PATIENCE, "the router uses the engine again", || {
        let shown = ask(admin, "/engines").json();
        let all = shown["engines"].as_array().expect("engines");
        let ours = all.iter().find(|one| one["engine"] == place.as_str()).expect("it is in the list");
        // Without load a trial does not end.
        let used = ["usable", "trial"].map(Value::from).contains(&ours["legs"][role]["standing"]);
        if used { Ok(()) } else { Err(ours.to_string()) }
    });
}

fn router(name: &str, folder: &Path) -> Process {
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    started(
        name,
        &["router", "--config", &path("router.yaml"), "--takeover-socket", &path("handover")],
        folder,
    )
}

/// Waits until the next step.
#[allow(clippy::disallowed_methods, reason = "the load continues meanwhile, and the test checks it")]
fn wait(time: Duration) {
    std::thread::sleep(time);
}

fn ask(address: &str, path: &str) -> crate::harness::Reply {
    PendingCall::new(address, "GET", path, b"").reply()
}

/// No lease of this engine has expired, and in the end nothing is held.
fn nothing_expired(address: &str) {
    let metrics = String::from_utf8_lossy(&ask(address, "/metrics").body).into_owned();
    assert_eq!(metric(&metrics, "vllm:nixl_num_kv_expired_reqs", ""), 0.0, "a lease of {address} ran out");
}

#[test]
fn routers_and_engines_are_replaced_under_load_and_no_request_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let fresh = |n: usize, role: &str| engine(&format!("{role}-{n}"), role, "127.0.0.1:0", folder.path());
    let mut engines: Vec<Process> = ROLES.iter().enumerate().map(|(n, role)| fresh(n, role)).collect();
    let at = |role: &str| -> Vec<Value> {
        let of = ROLES.iter().zip(&engines).filter(|(of, _)| **of == role);
        of.map(|(_, engine)| json!({"url": format!("http://{}", engine.fact("http"))})).collect()
    };
    let config = json!({
        "listen": "127.0.0.1:0",
        "admin": {"listen": "127.0.0.1:0"},
        "health": {"active": {"interval_ms": 200}},
        "models": [{
            "name": engines[0].fact("model"), "prefill": {"engines": at("prefill")}, "decode": {"engines": at("decode")},
            "fallback": "aggregate",
        }],
    });
    std::fs::write(folder.path().join("router.yaml"), config.to_string()).expect("a configuration");
    let mut front = router("router-0", folder.path());
    let (http, admin) = (front.fact("http"), front.fact("admin"));
    let requests = (seconds() * u64::from(RATE)).to_string();
    let url = format!("http://{http}");
    let load = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["bench", "serve", "--json", "--url", &url, "--num-prompts", &requests])
        .args(["--request-rate", &RATE.to_string(), "--input-len", "96", "--output-len", "40"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary under test can be started");
    let begun = Instant::now();
    let steps = (SUCCESSORS + engines.len()) as u32;
    let each = Duration::from_secs(seconds()) / (steps + 2);
    let mut turn = 0;
    let mut next = || {
        turn += 1;
        wait((begun + each * turn).saturating_duration_since(Instant::now()));
    };
    for step in 0..engines.len().max(SUCCESSORS) {
        if step < SUCCESSORS {
            next();
            let successor = router(&format!("router-{}", step + 1), folder.path());
            assert_eq!((successor.fact("http"), successor.fact("admin")), (http.clone(), admin.clone()));
            std::mem::replace(&mut front, successor).ends_well(ENDS_WITHIN);
        }
        if let Some(role) = ROLES.get(step) {
            next();
            let name = format!("{role}-{step}-again");
            let successor = |place: &str| engine(&name, role, place, folder.path());
            replace(&mut engines[step], &admin, role, successor);
        }
    }
    let output = load.wait_with_output().expect("the load ends");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let run = &report["runs"][0];
    assert_eq!(
        (&run["failed"], &run["sent"]),
        (&json!(0), &json!(seconds() * u64::from(RATE))),
        "{run:#}\n{log}"
    );
    for engine in &engines {
        let address = engine.fact("http");
        nothing_expired(&address);
        eventually(PATIENCE, "every block is free", || {
            let shown = ask(&address, "/debug/kv").json();
            let blocks = &shown["blocks"];
            let free =
                blocks["free"].as_u64().zip(blocks["cached"].as_u64()).map(|(free, cached)| free + cached);
            if free == blocks["total"].as_u64() { Ok(()) } else { Err(shown.to_string()) }
        });
    }
    // The last router still responds at the same address and waits for the next one.
    assert_eq!(ask(&http, "/v1/models").status, 200);
    assert!(folder.path().join("handover").exists());
    front.signal(Signal::Terminate);
    front.ends_well(ENDS_WITHIN);
    assert!(!folder.path().join("handover").exists(), "it waits there no longer");
}

/// The engines accept both secrets, the router sends the new one, and the engines drop the old one.
#[test]
fn the_cluster_secret_is_rotated_under_load_and_no_request_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let [old, new] = ["the secret before the rotation", "the secret after the rotation"];
    let file = |name: &str, secret: &str| {
        std::fs::write(folder.path().join(name), secret).expect("a file");
        folder.path().join(name).to_str().expect("a path").to_owned()
    };
    let (sent, old_file, new_file) = (file("sent", old), file("old", old), file("new", new));
    let options: [&[&str]; 3] = [
        &["--cluster-secret-file", &old_file],
        &["--cluster-secret-file", &new_file, "--previous-cluster-secret-file", &old_file],
        &["--cluster-secret-file", &new_file],
    ];
    let at = |n: usize, round: usize, place: &str| {
        let name = format!("{}-{n}-{round}", ROLES[n]);
        engine_with(&name, ROLES[n], place, folder.path(), options[round])
    };
    let mut engines: Vec<Process> = (0..ROLES.len()).map(|n| at(n, 0, "127.0.0.1:0")).collect();
    let url = |n: usize| json!({"url": format!("http://{}", engines[n].fact("http"))});
    let config = json!({
        "listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"}, "reload": {"poll_ms": 20},
        "health": {"active": {"interval_ms": 200}}, "cluster_secret_file": sent,
        "models": [{
            "name": engines[0].fact("model"), "fallback": "aggregate",
            "prefill": {"engines": [url(0), url(1)]}, "decode": {"engines": [url(2), url(3)]},
        }],
    });
    file("router.yaml", &config.to_string());
    let mut front = router("router", folder.path());
    let (http, admin) = (front.fact("http"), front.fact("admin"));
    let over = AtomicBool::new(false);
    let load = || -> Result<(), String> {
        while !over.load(Ordering::Relaxed) {
            let ask = GenerateRequest::fresh(96).tokens(24);
            let reply = PendingCall::new(&http, "POST", ask.path, ask.body.to_string().as_bytes()).reply();
            if reply.status != 200 {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        Ok(())
    };
    let showing = |engine: &Process, secret: &str| {
        let header = format!("x-baton-cluster-secret: {secret}\r\n");
        let call = PendingCall::try_with(&engine.fact("http"), "GET", "/debug/kv", &header, b"");
        call.expect("it listens").reply().status
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3).map(|_| scope.spawn(load)).collect();
        let mut rounds = || {
            for round in [1, 2] {
                for (n, engine) in engines.iter_mut().enumerate() {
                    replace(engine, &admin, ROLES[n], |place| at(n, round, place));
                    let accepted = [old, new].map(|secret| showing(engine, secret));
                    assert_eq!(accepted, if round == 1 { [200, 200] } else { [401, 200] });
                }
                if round == 1 {
                    file("sent", new);
                    eventually(PATIENCE, "the router sends the new secret", || {
                        let metrics = String::from_utf8_lossy(&ask(&admin, "/metrics").body).into_owned();
                        let generation = metric(&metrics, "baton_router_config_generation", "");
                        if generation == 2.0 { Ok(()) } else { Err(generation.to_string()) }
                    });
                }
            }
        };
        // A failed assertion ends the load too, and then the test.
        let rotated = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut rounds));
        over.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().expect("it does not panic").expect("every request succeeds");
        }
        rotated.expect("the secret is rotated");
    });
    let metrics = String::from_utf8_lossy(&ask(&admin, "/metrics").body).into_owned();
    for leg in ["prefill", "decode"] {
        let labels = format!("leg=\"{leg}\"");
        assert_eq!(metric(&metrics, "baton_router_misconfigured_total", &labels), 0.0, "{leg}");
    }
    engines.iter().for_each(|engine| nothing_expired(&engine.fact("http")));
    front.signal(Signal::Terminate);
    front.ends_well(ENDS_WITHIN);
}

/// An operator's drain order belongs to the deployment, not to the process: the next router applies it too.
#[test]
fn a_drain_order_survives_a_router_upgrade() {
    let folder = tempfile::tempdir().expect("a folder");
    let engines = ["first", "second"].map(|name| engine(name, "decode", "127.0.0.1:0", folder.path()));
    let decode: Vec<_> =
        engines.iter().map(|one| json!({"url": format!("http://{}", one.fact("http"))})).collect();
    let config = json!({
        "listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"},
        "models": [{"name": engines[0].fact("model"), "decode": {"engines": decode}}],
    });
    std::fs::write(folder.path().join("router.yaml"), config.to_string()).expect("a configuration");
    let mut front = router("router-0", folder.path());
    let admin = front.fact("admin");
    let drained = engines[0].fact("http");
    let order = |verb: &str| {
        let path = format!("/engines/{drained}/{verb}");
        assert_eq!(PendingCall::new(&admin, "POST", &path, b"").reply().status, 200);
    };
    let standing = || {
        let shown = ask(&admin, "/engines").json();
        let all = shown["engines"].as_array().expect("engines");
        let one = all.iter().find(|one| one["engine"] == drained.as_str()).expect("it is in the list");
        (one["legs"]["decode"]["standing"].clone(), one["reasons"].clone())
    };
    order("drain");
    let replace = |front: &mut Process, number: u32| {
        let successor = router(&format!("router-{number}"), folder.path());
        std::mem::replace(front, successor).ends_well(ENDS_WITHIN);
    };
    replace(&mut front, 1);
    assert_eq!(standing(), (json!("draining"), json!(["drained by an operator"])));
    order("undrain");
    replace(&mut front, 2);
    assert_eq!(standing().1, json!([]));
    order("drain");
    // No router takes over. This router logs the orders that will be lost.
    front.signal(Signal::Terminate);
    front.ends_well(ENDS_WITHIN);
    let log = front.log();
    let logged = log.lines().find(|line| line.contains("operator drain orders end with this router"));
    assert!(logged.is_some_and(|line| line.contains(&drained)), "{log}");
}

/// As systemd starts a router with its socket unit: the sockets are open before the router runs.
#[test]
fn sockets_that_a_supervisor_has_opened_are_served() {
    let activate = "systemd-socket-activate";
    if Command::new(activate).arg("--version").output().is_err() {
        println!("SKIPPED: {activate} is not installed: sockets from a supervisor were not tried");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    // A port that was free a moment ago.
    let free = || {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        socket.local_addr().expect("it is bound").to_string()
    };
    let (http, admin) = (free(), free());
    let config = json!({
        "listen": http, "admin": {"listen": admin},
        "models": [{
            "name": "m", "prefill": {"engines": [{"url": "http://127.0.0.1:1"}]},
            "decode": {"engines": [{"url": "http://127.0.0.1:1"}]},
        }],
    });
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, config.to_string()).expect("a configuration");
    let mut router = Command::new(activate)
        .args(["-l", &http, "-l", &admin, env!("CARGO_BIN_EXE_baton"), "router", "--config"])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it can be started");
    let answers = |address: &str| {
        eventually(PATIENCE, "the router answers", || {
            let call =
                PendingCall::try_new(address, "GET", "/health", b"").map_err(|error| error.to_string())?;
            let reply = call.try_reply().map_err(|error| error.to_string())?;
            if reply.status == 200 { Ok(()) } else { Err(format!("{}", reply.status)) }
        });
    };
    answers(&http);
    answers(&admin);
    signal(router.id(), Signal::Terminate);
    assert!(router.wait().expect("it is our child").success());
}

/// A router with these sockets as its third and fourth descriptor, as systemd passes them. Its supervisor keeps them
/// open.
fn supervised(clients: &TcpListener, admin: &TcpListener, config: &Path) -> Child {
    let passed = |socket: &TcpListener| OwnedFd::from(socket.try_clone().expect("a descriptor"));
    let script = "exec 3<&0 4<&1 0</dev/null 1>/dev/null; export LISTEN_FDS=2 LISTEN_PID=$$; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_baton"), "router", "--config"]).arg(config);
    command.stdin(passed(clients)).stdout(passed(admin)).stderr(Stdio::null());
    command.spawn().expect("it can be started")
}

/// As with `deploy/systemd/baton-router.socket`: the sockets stay open while one router ends and the next one starts.
/// New clients wait in between, and requests in flight are finished.
#[test]
fn a_restart_behind_sockets_that_a_supervisor_keeps_loses_no_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let engine = engine("decode", "decode", "127.0.0.1:0", folder.path());
    let socket = || TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (clients, admin) = (socket(), socket());
    let address = |socket: &TcpListener| socket.local_addr().expect("it is bound").to_string();
    let http = address(&clients);
    let config = json!({
        "listen": http, "admin": {"listen": address(&admin)}, "drain_delay_ms": 0,
        "models": [{
            "name": engine.fact("model"), "decode": {"engines": [{"url": format!("http://{}", engine.fact("http"))}]},
        }],
    });
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, config.to_string()).expect("a configuration");
    let call = || {
        let ask = GenerateRequest::fresh(24).tokens(4);
        PendingCall::try_new(&http, "POST", ask.path, ask.body.to_string().as_bytes())
    };
    let mut router = supervised(&clients, &admin, &file);
    assert_eq!(call().expect("it listens").reply().status, 200);
    let over = AtomicBool::new(false);
    let load = || -> Result<usize, String> {
        let mut answered = 0;
        while !over.load(Ordering::Relaxed) {
            let reply = call()
                .and_then(PendingCall::try_reply)
                .map_err(|error| format!("after {answered}: {error}"))?;
            if reply.status != 200 {
                return Err(format!("after {answered}: {}", reply.status));
            }
            answered += 1;
        }
        Ok(answered)
    };
    std::thread::scope(|scope| {
        let clients_of_it: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
        for _ in 0..SUCCESSORS {
            // A stream that is active when the router shuts down.
            let ask = GenerateRequest::fresh(24).tokens(300).streamed();
            let mut stream =
                PendingCall::new(&http, "POST", ask.path, ask.body.to_string().as_bytes()).stream();
            stream.event().expect("an event");
            signal(router.id(), Signal::Terminate);
            let mut last = None;
            while let Some(event) = stream.event() {
                last = Some(event);
            }
            assert_eq!(last.as_deref(), Some("[DONE]"));
            assert!(router.wait().expect("it is our child").success());
            // No process accepts now.
            let between = call().expect("the socket is open");
            assert!(between.is_unanswered());
            router = supervised(&clients, &admin, &file);
            assert_eq!(between.reply().status, 200);
        }
        over.store(true, Ordering::Relaxed);
        for client in clients_of_it {
            let answered = client.join().expect("it does not panic").expect("every request is answered");
            assert!(answered > 0);
        }
    });
    signal(router.id(), Signal::Terminate);
    assert!(router.wait().expect("it is our child").success());
}

/// A client that has connected before a drain gets a response, because its request may be on its way.
#[test]
fn a_client_that_connected_before_a_drain_gets_a_response() {
    let folder = tempfile::tempdir().expect("a folder");
    let engine = engine("decode", "decode", "127.0.0.1:0", folder.path());
    let decode = json!({"engines": [{"url": format!("http://{}", engine.fact("http"))}]});
    let config = json!({
        "listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"},
        "models": [{"name": engine.fact("model"), "decode": decode}],
    });
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, config.to_string()).expect("a configuration");
    let arguments = ["router", "--config", file.to_str().expect("a path")];
    for round in 0..20 {
        let mut router = started(&format!("router-{round}"), &arguments, folder.path());
        let (http, admin) = (router.fact("http"), router.fact("admin"));
        let begun = Instant::now();
        let mut client = TcpStream::connect(&http).expect("it listens");
        eventually(PATIENCE, "the router has taken the connection", || {
            let metrics = String::from_utf8_lossy(&ask(&admin, "/metrics").body).into_owned();
            let open = metric(&metrics, "baton_router_connections_open", "");
            if open == 1.0 { Ok(()) } else { Err(format!("{open} are open")) }
        });
        router.signal(Signal::Terminate);
        eventually(PATIENCE, "it takes no more", || {
            TcpStream::connect(&http).map_or(Ok(()), |_| Err("it listens".to_owned()))
        });
        // A machine that is too busy misses the moment under test.
        let in_time = begun.elapsed() < Duration::from_millis(500);
        if in_time {
            let asked = format!("GET /v1/models HTTP/1.1\r\nhost: {http}\r\n\r\n");
            client.write_all(asked.as_bytes()).expect("the connection is open");
            let mut head = [0; 15];
            client.read_exact(&mut head).expect("an answer");
            assert_eq!(&head, b"HTTP/1.1 200 OK");
        }
        drop(client);
        router.ends_well(ENDS_WITHIN);
        if in_time {
            return;
        }
    }
    panic!("no drain began within half a second after a connection");
}
