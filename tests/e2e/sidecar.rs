//! `baton sidecar` beside a real decode engine: the client, not a router, names the prefill engine. A disconnect in each
//! phase leaves no block at either engine.

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, PendingCall, Process, eventually};

/// A prefill engine that computes 64 tokens per step, and the time of each step.
const SLOW_PREFILL: &str = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";

/// A sidecar beside the first decode engine of a cluster.
struct Sidecar {
    address: String,
    named: String,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl Sidecar {
    fn beside(cluster: &Cluster) -> Self {
        Self::with(cluster, "")
    }

    /// With further options.
    fn with(cluster: &Cluster, options: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let (_, decode) = cluster.decode[0].address.rsplit_once(':').expect("an address");
        let args = format!(
            "sidecar --host 127.0.0.1 --port {port} --model-server-port {decode} --secure-proxy=false {options}"
        );
        let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        let mut process = Process::start("sidecar", &args, folder.path());
        process.wait_ready();
        let named = format!("x-prefiller-host-port: {}\r\n", cluster.prefill[0].address);
        Self { address: process.fact("http"), named, _process: process, _folder: folder }
    }

    fn send(&self, headers: &str, ask: &GenerateRequest) -> PendingCall {
        let body = ask.body.to_string();
        PendingCall::try_with(&self.address, "POST", ask.path, headers, body.as_bytes()).expect("it listens")
    }
}

#[test]
fn the_text_is_that_of_one_engine_and_the_blocks_come_from_the_named_one() {
    let cluster = Cluster::new().start();
    let sidecar = Sidecar::beside(&cluster);
    let ask = GenerateRequest::recall(20);
    let alone = sidecar.send("", &ask).reply();
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 0, "no header, no prefill elsewhere");
    let split = sidecar.send(&sidecar.named, &ask).reply();
    assert_eq!((alone.status, split.status), (200, 200));
    assert_eq!(alone.text(), split.text());
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1);
    cluster.settled(PATIENCE);
}

#[test]
fn a_cancel_through_a_sidecar_strands_no_block_in_any_phase() {
    let mut cluster = Cluster::new().prefill(SLOW_PREFILL).not_early().start();
    let sidecar = Sidecar::beside(&cluster);
    for how in HangUp::BOTH {
        let steps = cluster.prefill[0].snapshot().steps;
        let computing = sidecar.send(&sidecar.named, &GenerateRequest::fresh(1000));
        cluster.prefill[0].shows("it computes", |engine| engine.running == 1 && engine.steps >= steps + 2);
        computing.hang_up(how);
        cluster.settled(AT_ONCE);

        cluster.decode[0].pause();
        let leased = sidecar.send(&sidecar.named, &GenerateRequest::fresh(100));
        cluster.prefill[0].shows("the blocks are leased", |engine| engine.leases == 1);
        leased.hang_up(how);
        cluster.prefill[0].shows_within(PATIENCE, "the lease is released", |engine| engine.leases == 0);
        cluster.decode[0].go_on();
        cluster.settled(PATIENCE);

        let mut streaming =
            sidecar.send(&sidecar.named, &GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        streaming.event().expect("an event");
        streaming.hang_up(how);
        cluster.settled(AT_ONCE);
    }
    let last = sidecar.send(&sidecar.named, &GenerateRequest::fresh(40)).reply();
    assert_eq!(last.status, 200, "{}", last.json());
    cluster.settled(PATIENCE);
}

#[test]
fn with_the_cluster_secret_both_legs_work_and_a_cancel_between_them_releases_the_lease() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("secret");
    std::fs::write(&file, "a secret of this cluster").expect("it can be written");
    let guarded = format!("--cluster-secret-file {}", file.display());
    let cluster = Cluster::new().prefill(&guarded).decode(&guarded).not_early();
    let mut cluster = cluster.router("cluster_secret_file", json!(file)).start();
    let options = format!("{guarded} --allow-prefiller 127.0.0.1 --cluster-secret-stages prefiller,decoder");
    let sidecar = Sidecar::with(&cluster, &options);
    // Snapshots need the secret, and metrics do not.
    let leases = |cluster: &Cluster, expected: f64| {
        eventually(PATIENCE, "the live leases", || match cluster.prefill[0].metric("baton_kv_leases", "") {
            found if found == expected => Ok(()),
            other => Err(format!("{other} leases")),
        });
    };
    let reply = sidecar.send(&sidecar.named, &GenerateRequest::recall(20)).reply();
    assert_eq!(reply.status, 200, "{}", reply.json());
    leases(&cluster, 0.0);
    for how in HangUp::BOTH {
        cluster.decode[0].pause();
        let leased = sidecar.send(&sidecar.named, &GenerateRequest::fresh(100));
        leases(&cluster, 1.0);
        leased.hang_up(how);
        leases(&cluster, 0.0);
        cluster.decode[0].go_on();
    }
    cluster.prefill[0].expired_nothing();
    assert_eq!(cluster.prefill[0].metric("baton_kv_release_total", "cause=\"client_gone\""), 2.0);
}

#[test]
fn a_sidecar_without_its_engine_answers_as_llmds_does() {
    let mut cluster = Cluster::new().start();
    let sidecar = Sidecar::beside(&cluster);
    cluster.decode[0].kill();
    for headers in ["", &sidecar.named] {
        let reply = sidecar.send(headers, &GenerateRequest::fresh(40)).reply();
        assert_eq!((reply.status, &reply.json()["type"]), (503, &Value::from("ServiceUnavailable")));
    }
    cluster.prefill[0].settled(PATIENCE);
}
