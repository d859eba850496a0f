//! The five source reports, each as a test that fails with the reported defect. `docs/explanation/source-reports.md`
//! maps the reports to code and to the other tests.
//!
//! Leases are long wherever time must not be what frees the blocks: [`FOREVER`].

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{
    AT_ONCE, Cluster, Engine, GenerateRequest, LinkFault, PATIENCE, PendingCall, eventually,
};

/// A lease that outlasts every test.
const FOREVER: &str = "--kv-lease-duration 600";

fn abort(engine: &Engine, requests: &[String], leg: &str) -> Value {
    let body = json!({"request_ids": requests, "leg": leg});
    let reply = engine.send("POST", "/abort_requests", &body).reply();
    assert_eq!(reply.status, 200, "{}", reply.json());
    reply.json()["results"].take()
}

fn lending(ask: GenerateRequest) -> GenerateRequest {
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
    ask.with("max_tokens", json!(1)).with("kv_transfer_params", params)
}

/// vLLM #25067: an abort that arrived after the request had finished ran `request_finished` a second time. The worker
/// raised a KeyError for an unknown request, and the engine died.
///
/// Catches an engine that dies or returns an error after such an abort, frees a lease's blocks twice, or keeps the
/// lease. `tests/model` has a mutation of this kind.
#[test]
fn vllm_25067_an_abort_that_arrives_after_the_finish_is_an_event_to_the_lease() {
    let cluster = Cluster::new().prefill(FOREVER).start();
    let p = &cluster.prefill[0];
    let reply = p.send_as("finished", &lending(GenerateRequest::fresh(100))).reply();
    assert_eq!(reply.status, 200, "{}", reply.json());
    p.shows("its blocks are leased", |snapshot| (snapshot.leases, snapshot.leased) == (1, 7));
    let name = ["finished".to_owned()];
    assert_eq!(abort(p, &name, "prefill")["finished"], "released");
    for _ in 0..3 {
        // A late abort gets a reply, not an error.
        let said = abort(p, &name, "prefill")["finished"].take();
        assert!(said == "already" || said == "unknown", "{said}");
    }
    p.settled(AT_ONCE);
    // The other leg: a decode engine that has sent its last event.
    let d = &cluster.decode[0];
    assert_eq!(d.send_as("said", &GenerateRequest::fresh(40)).reply().status, 200);
    for leg in ["decode", "prefill"] {
        abort(d, &["said".to_owned(), "never".to_owned()], leg);
    }
    cluster.still_serves();
}

/// vLLM #25067 with many requests: they finish in one step, and each is aborted in that step, twice, over several
/// connections.
///
/// Catches a defect that only appears when the abort and the finish are in the same step. The test checks that both
/// orders happened: some requests had finished (they have a handoff), some had not.
#[test]
fn vllm_25067_a_storm_of_aborts_in_the_step_in_which_their_requests_finish() {
    const REQUESTS: usize = 24;
    const ROUNDS: u32 = 16;
    let options = format!("{FOREVER} --max-num-seqs {REQUESTS} --max-num-batched-tokens 1024 --pace-ms 40");
    let cluster = Cluster::new().prefill(&options).start();
    let p = &cluster.prefill[0];
    let named =
        |round: u32| -> Vec<String> { (0..REQUESTS).map(|at| format!("storm-{round}-{at}")).collect() };
    // A step takes 1,024 tokens, so one step computes all requests.
    let begin = |names: &[String]| -> Vec<PendingCall> {
        let calls = names.iter().map(|name| p.send_as(name, &lending(GenerateRequest::fresh(40)))).collect();
        p.shows("they run", |snapshot| snapshot.running + snapshot.leases >= 1);
        calls
    };
    // A round without aborts, to measure when the requests finish.
    let names = named(ROUNDS);
    let calls = begin(&names);
    let since = Instant::now();
    p.shows("all are leased", |snapshot| snapshot.leases == REQUESTS as u64);
    let finish = since.elapsed();
    assert!(calls.into_iter().all(|call| call.reply().status == 200));
    abort(p, &names, "prefill");
    let (mut finished, mut aborted) = (0, 0);
    for round in 0..ROUNDS {
        let names = named(round);
        let calls = begin(&names);
        // From before the end of the step to after it, a little later each round.
        let moment = Instant::now() + finish * (ROUNDS / 2 + round) / ROUNDS;
        let comes = || if Instant::now() >= moment { Ok(()) } else { Err("it comes".to_owned()) };
        eventually(PATIENCE, "the moment", comes);
        std::thread::scope(|scope| {
            for part in names.chunks(REQUESTS / 4).chain(names.chunks(REQUESTS / 3)) {
                scope.spawn(|| abort(p, part, "prefill"));
            }
        });
        for call in calls {
            let reply = call.reply();
            let leased =
                reply.status == 200 && reply.json()["kv_transfer_params"]["remote_handle"].is_string();
            if leased { finished += 1 } else { aborted += 1 }
        }
        p.settled(AT_ONCE);
    }
    println!("{finished} had finished, {aborted} had not");
    assert!(finished > 0 && aborted > 0, "both orders were to happen: {finished}, {aborted}");
    p.expired_nothing();
    cluster.still_serves();
}

/// vLLM #35506: a request is aborted after it has finished. Its blocks stay pinned until the timeout, although no
/// engine will read them.
///
/// Catches a release that waits for time. The lease is ten minutes long, and the blocks are freed within a second.
#[test]
fn vllm_35506_the_blocks_of_an_aborted_finished_request_are_freed_at_once() {
    let cluster = Cluster::new().prefill(FOREVER).start();
    let p = &cluster.prefill[0];
    for at in 0..10 {
        let name = format!("left-{at}");
        assert_eq!(p.send_as(&name, &lending(GenerateRequest::fresh(200))).reply().status, 200);
        p.shows("its blocks are leased", |snapshot| (snapshot.leases, snapshot.leased) == (1, 13));
        let since = Instant::now();
        assert_eq!(abort(p, std::slice::from_ref(&name), "prefill")[&name], "released");
        p.settled(AT_ONCE);
        println!("back after {:.1} ms", since.elapsed().as_secs_f64() * 1000.0);
    }
    p.expired_nothing();
    cluster.still_serves();
}

/// vLLM #35506, the other half: the blocks are freed at once, but never under a reader. During a read the lease drains
/// first.
///
/// Catches blocks that are free, and given to another prompt, while a decode engine still reads them. The text would be
/// wrong, or the lease was not checked.
#[test]
fn vllm_35506_an_abort_during_a_read_drains_it_first_and_the_reader_uses_nothing_of_it() {
    let cluster = Cluster::new().links().prefill(&format!("{FOREVER} --kv-blocks 40")).start();
    let (p, d) = (&cluster.prefill[0], &cluster.decode[0]);
    let ask = GenerateRequest::fresh(500).tokens(12).with("logprobs", json!(1));
    let truth = d.send("POST", ask.path, &ask.body).reply().json()["choices"].take();
    let _ = d.send("POST", "/reset_prefix_cache", &json!({})).reply();
    let reply = p.send_as("read", &lending(ask.clone())).reply().json();
    let link = cluster.side_channel.as_ref().expect("a cluster with links");
    link.set(LinkFault::Slow { bytes: 2048, pause: Duration::from_millis(10) });
    let with = ask.clone().with("kv_transfer_params", reply["kv_transfer_params"].clone());
    let call = d.send("POST", with.path, &with.body);
    d.shows("it reads", |snapshot| snapshot.fetching == 1);
    eventually(PATIENCE, "some bytes have come", || match link.passed() {
        some if some > 8192 => Ok(()),
        few => Err(format!("{few} bytes")),
    });
    assert_eq!(abort(p, &["read".to_owned()], "prefill")["read"], "draining");
    assert_eq!(p.lease_states(), ["draining"]);
    // The blocks are freed long before the lease's expiry, and other requests use them.
    p.settled(PATIENCE);
    for _ in 0..3 {
        p.release(&p.open_lease(&GenerateRequest::fresh(500)));
    }
    assert_eq!(d.snapshot().fetching, 1, "the reader was to be reading still");
    link.set(LinkFault::None);
    assert_eq!(call.reply().json()["choices"], truth, "a wrong text");
    cluster.settled(PATIENCE);
}

/// vLLM #41269: the decode engine refuses a request before its admission, and the prefill engine is not notified. Its
/// blocks stay pinned for the whole lease.
///
/// Catches any of these refusals that leaves the lease to time, or that waits until the decode engine does other work.
/// The decode engine is idle throughout and computes no step.
#[test]
fn vllm_41269_a_refusal_before_admission_by_an_idle_decode_engine_frees_the_blocks() {
    let cluster = Cluster::new().prefill(FOREVER).decode("--max-model-len 128").start();
    let (p, d) = (&cluster.prefill[0], &cluster.decode[0]);
    let refusals: &[(&str, u16, Value)] = &[
        ("unknown model", 404, json!({"model": "another"})),
        ("temperature out of range", 400, json!({"temperature": -1})),
        ("temperature of another type", 400, json!({"temperature": "abc"})),
        ("max_tokens out of range", 400, json!({"max_tokens": -1})),
        ("max_tokens beyond the context", 400, json!({"max_tokens": 4000})),
        ("top_p out of range", 400, json!({"top_p": 3})),
        ("no prompt", 400, json!({"prompt": null})),
        ("a prompt of another kind", 400, json!({"prompt": {"a": 1}})),
        ("too many stop strings", 400, json!({"stop": vec!["x"; 100_000]})),
        ("another prompt than the one that was prefilled", 400, json!({"prompt": [7, 8, 9]})),
    ];
    for (what, status, change) in refusals {
        let ask = GenerateRequest::fresh(100);
        let handoff = p.open_lease(&ask);
        assert_eq!(p.snapshot().leases, 1, "{what}");
        let mut body = ask.with("kv_transfer_params", handoff).body;
        for (field, value) in change.as_object().expect("an object") {
            body[field] = value.clone();
        }
        let since = Instant::now();
        let reply = d.send("POST", "/v1/completions", &body).reply();
        assert_eq!(reply.status, *status, "{what}: {}", reply.json());
        p.shows_within(AT_ONCE, &format!("after a refusal ({what}) the blocks are back"), |snapshot| {
            snapshot.leases == 0 && snapshot.leased == 0
        });
        println!("{what}: back after {:.1} ms", since.elapsed().as_secs_f64() * 1000.0);
    }
    // A prompt that is too long only for this engine, through the router.
    let reply = cluster.ask(&GenerateRequest::fresh(300));
    assert_eq!(reply.status, 400, "{}", reply.json());
    cluster.settled(AT_ONCE);
    assert_eq!(d.snapshot().steps, 0, "it was to be idle");
    cluster.still_serves();
}

/// The lease ends by its expiry, with one log line and one count.
fn expires_once(p: &Engine, request: &str) {
    p.settled(PATIENCE);
    let expired = || match p.metric("vllm:nixl_num_kv_expired_reqs", "") {
        1.0 => Ok(()),
        other => Err(format!("{other} leases have expired")),
    };
    eventually(PATIENCE, "one expiry is counted", expired);
    let log = p.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("lease expired")).collect();
    let [line] = lines[..] else { panic!("one line was to say it: {lines:?}") };
    assert!(line.contains(request), "it was to name the request {request}: {line}");
    for word in ["done", "expected", "held"] {
        assert!(line.contains(word), "it was to say {word}: {line}");
    }
}

/// vLLM #20139: the router dies between the two engines. No process knows of the blocks, and only time can free them.
/// In the report they were never freed.
///
/// Catches a lease without an end, an end without a log line or a count, and an end that is counted twice.
#[test]
fn vllm_20139_when_the_router_dies_between_the_engines_time_frees_the_blocks() {
    let mut cluster = Cluster::new().links().prefill("--kv-lease-duration 1").start();
    // The router's data does not reach the decode engine.
    let lost = LinkFault::HalfOpen { up: true, down: true };
    cluster.router_decode.as_ref().expect("a cluster with links").set(lost);
    let _waiting = cluster.send(&GenerateRequest::fresh(100));
    let p = &cluster.prefill[0];
    p.shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    let request = p.lease_of_one();
    cluster.kill_router();
    expires_once(&cluster.prefill[0], &request);
    assert_eq!(
        cluster.decode[0].snapshot().leases_opened + cluster.decode[0].snapshot().steps,
        0,
        "it heard nothing"
    );
}

/// vLLM #20139, the other crash: the decode engine dies during its read, and no router can report this.
///
/// Catches a lost reader that holds the lease forever.
#[test]
fn vllm_20139_when_the_decode_engine_dies_in_its_read_time_frees_the_blocks() {
    let mut cluster = Cluster::new().links().prefill("--kv-lease-duration 1").start();
    let ask = GenerateRequest::fresh(500);
    let p = &cluster.prefill[0];
    let handoff = p.open_lease(&ask);
    let request = p.lease_of_one();
    let link = cluster.side_channel.as_ref().expect("a cluster with links");
    link.set(LinkFault::Slow { bytes: 2048, pause: Duration::from_millis(10) });
    let with = ask.with("kv_transfer_params", handoff);
    let _waiting = cluster.decode[0].send("POST", with.path, &with.body);
    cluster.decode[0].shows("it reads", |snapshot| snapshot.fetching == 1);
    cluster.decode[0].kill();
    expires_once(&cluster.prefill[0], &request);
    cluster.prefill[0].settled(AT_ONCE);
}

/// Checks that an engine has transfers in flight between its tiers.
fn in_flight(engine: &Engine) -> Result<(), String> {
    let shown = engine.send("GET", "/debug/kv", &json!({})).reply().json();
    if shown["offload"]["in_flight"] == 0 { Ok(()) } else { Err(shown["offload"].to_string()) }
}

/// Dynamo #6681: a write to an offload tier finished in the step in which its request stopped and was aborted. By the
/// order of the three an assertion failed, a removed slot was unwrapped, or blocks leaked.
///
/// Requests fill their last block with their last token, so that its store is due in the step in which they stop. In
/// that step they are aborted, twice, over several connections.
///
/// Catches an engine that dies, blocks that a store or a lease keeps, and a tier that returns other bytes than it
/// stored. The test checks that both orders happened, and that blocks were stored and loaded.
#[test]
fn dynamo_6681_a_store_that_ends_with_its_stopped_and_aborted_request_loses_no_block() {
    const REQUESTS: usize = 16;
    const ROUNDS: u32 = 16;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let options = |name: &str| {
        let disk = folder.path().join(name);
        std::fs::create_dir(&disk).expect("the test's folder can be written");
        format!(
            "{FOREVER} --max-num-seqs {REQUESTS} --max-num-batched-tokens 1024 --kv-blocks 120 --pace-ms 5 \
             --kv-offload-host-mib 4 --kv-offload-disk {} --kv-offload-disk-mib 16",
            disk.display()
        )
    };
    let cluster = Cluster::new().prefill(&options("p")).decode(&options("d")).start();
    let known = GenerateRequest::fresh(200).tokens(8).with("logprobs", json!(1));
    let d = &cluster.decode[0];
    let truth = d.send("POST", known.path, &known.body).reply().json()["choices"].take();
    let (mut finished, mut aborted) = (0, 0);
    for (engine, leg) in [(&cluster.prefill[0], "prefill"), (d, "decode")] {
        // 64 tokens are four blocks. No block contains the last sampled token.
        let ask = || {
            if leg == "prefill" {
                lending(GenerateRequest::fresh(64))
            } else {
                GenerateRequest::fresh(48).tokens(17)
            }
        };
        let begin = |round: u32| -> (Vec<String>, Vec<PendingCall>) {
            let names = (0..REQUESTS).map(|at| format!("{leg}-{round}-{at}"));
            let calls = names.map(|name| (engine.send_as(&name, &ask()), name));
            let (calls, names) = calls.unzip();
            (names, calls)
        };
        let since = Instant::now();
        let (names, calls) = begin(ROUNDS);
        assert!(calls.into_iter().all(|call| call.reply().status == 200));
        let all = since.elapsed();
        abort(engine, &names, leg);
        for round in 0..ROUNDS {
            let begun = Instant::now();
            let (names, calls) = begin(round);
            // From their beginning to after their end, a little later each round.
            let moment = begun + all * (round + 1) / ROUNDS;
            let comes = || if Instant::now() >= moment { Ok(()) } else { Err("it comes".to_owned()) };
            eventually(PATIENCE, "the moment", comes);
            std::thread::scope(|scope| {
                for part in names.chunks(REQUESTS / 4).chain(names.chunks(REQUESTS / 2)) {
                    scope.spawn(|| abort(engine, part, leg));
                }
            });
            for call in calls {
                let reply = call.reply();
                let end = reply.json()["choices"][0]["finish_reason"].take();
                if end == "length" { finished += 1 } else { aborted += 1 }
            }
            engine.settled(PATIENCE);
            eventually(PATIENCE, "nothing is in flight between the tiers", || in_flight(engine));
        }
        assert!(engine.metric("baton_kv_offload_stored_blocks_total", "") > 0.0, "nothing was stored");
        engine.expired_nothing();
    }
    println!("{finished} had finished, {aborted} had not");
    assert!(finished > 0 && aborted > 0, "both orders were to happen: {finished}, {aborted}");
    // The tiers return the bytes that they stored: the prompt is recomputed and stored, dropped from the pool, and
    // loaded.
    for _ in 0..2 {
        let again = d.send("POST", known.path, &known.body).reply();
        assert_eq!(again.json()["choices"], truth, "a wrong text");
        eventually(PATIENCE, "nothing is in flight between the tiers", || in_flight(d));
        let _ = d.send("POST", "/reset_prefix_cache", &json!({})).reply();
    }
    assert!(d.metric("baton_kv_offload_hit_tokens_total", "") > 0.0, "nothing was loaded");
    cluster.still_serves();
}
