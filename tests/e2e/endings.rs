//! The router is killed or shut down, or an engine is shut down. The remaining processes hold nothing for the one that
//! has ended. A process that shuts down finishes its requests.

use std::net::TcpStream;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, PendingCall};

#[test]
fn a_router_killed_during_prefill_strands_no_block() {
    for early in [false, true] {
        let plan = Cluster::new().prefill("--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60");
        let mut cluster = if early { plan } else { plan.not_early() }.start();
        let _waiting = cluster.send(&GenerateRequest::fresh(1000));
        cluster.prefill[0]
            .shows("two chunks are computed", |snapshot| snapshot.running == 1 && snapshot.steps >= 2);
        cluster.kill_router();
        cluster.settled(AT_ONCE);
        let opened = cluster.prefill[0].snapshot().leases_opened;
        assert_eq!(opened, u64::from(early), "a lease without a reader was opened");
    }
}

#[test]
fn a_router_killed_during_the_stream_strands_no_block() {
    let mut cluster = Cluster::new().decode("--pace-ms 30").start();
    let mut stream = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
    stream.event().expect("an event");
    let _waiting = cluster.send(&GenerateRequest::fresh(100).tokens(400));
    cluster.decode[0].shows("both run", |snapshot| snapshot.running == 2);
    cluster.kill_router();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_router_killed_in_the_gap_strands_no_block() {
    for kept in [false, true] {
        // No probes: a stopped engine receives only the request. Idle connections outlive a busy machine.
        let quiet = Cluster::new().router("health", json!({"active": {"interval_ms": 0}}));
        let mut cluster = quiet.router("timeouts", json!({"engine_idle_ms": 20_000})).start();
        if kept {
            assert_eq!(cluster.ask(&GenerateRequest::fresh(100)).status, 200);
            cluster.settled(PATIENCE);
        }
        let before = cluster.decode[0].connections();
        cluster.decode[0].pause();
        let _waiting = cluster.send(&GenerateRequest::fresh(100));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        let sent = cluster.decode[0].is_sent_something();
        assert_eq!(sent.iter().any(|port| before.contains(port)), kept, "{before:?} {sent:?}");
        cluster.kill_router();
        // The handoff is in the decode engine's socket. The engine fetches or releases it, well before its expiry.
        cluster.decode[0].go_on();
        cluster.settled(AT_ONCE);
    }
}

#[test]
fn a_verb_sent_to_a_stopped_engine_takes_effect_after_its_sender_closed() {
    let mut cluster = Cluster::new().start();
    for how in HangUp::BOTH {
        // To the prefill engine: a verb that ends the lease.
        for path in ["/kv/release", "/abort_requests"] {
            let handoff = cluster.prefill[0].open_lease(&GenerateRequest::fresh(100));
            let body = match path {
                "/kv/release" => json!({"handle": handoff["remote_handle"], "reason": "router_release"}),
                _ => json!({"request_ids": [cluster.prefill[0].lease_of_one()]}),
            };
            let kept = PendingCall::kept(&cluster.prefill[0].address);
            cluster.prefill[0].pause();
            kept.send(path, &body).hang_up(how);
            cluster.prefill[0].go_on();
            cluster.settled(AT_ONCE);
        }
        // To the decode engine: the handoff, with any kind of request.
        for path in ["/v1/completions", "/v1/embeddings"] {
            let ask = GenerateRequest::fresh(100);
            let handoff = cluster.prefill[0].open_lease(&ask);
            let kept = PendingCall::kept(&cluster.decode[0].address);
            cluster.decode[0].pause();
            kept.send(path, &ask.with("kv_transfer_params", handoff).body).hang_up(how);
            cluster.decode[0].go_on();
            cluster.settled(AT_ONCE);
        }
    }
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 8);
}

#[test]
fn a_terminated_router_finishes_its_requests() {
    let mut cluster = Cluster::new().decode("--pace-ms 20").start();
    let usage = json!({"include_usage": true});
    let ask = GenerateRequest::fresh(100).tokens(40).streamed().with("stream_options", usage);
    let mut stream = cluster.send(&ask).stream();
    stream.event().expect("an event");
    let whole = cluster.send(&GenerateRequest::fresh(100).tokens(40));
    cluster.decode[0].shows("both run", |snapshot| snapshot.running == 2);
    cluster.interrupt_router();
    let reply = whole.reply();
    assert_eq!(reply.json()["usage"]["completion_tokens"], 40, "{}", reply.json());
    let events: Vec<String> = std::iter::from_fn(|| stream.event()).collect();
    let [.., usage, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    let usage: Value = serde_json::from_str(usage).expect("JSON");
    assert_eq!(usage["usage"]["completion_tokens"], 40, "{usage}");
    cluster.router_ends_well();
    assert!(TcpStream::connect(&cluster.url).is_err(), "the listener is closed");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_terminated_decode_engine_finishes_its_requests() {
    let mut cluster = Cluster::new().decode("--pace-ms 20").start();
    let call = cluster.send(&GenerateRequest::fresh(100).tokens(40));
    cluster.decode[0].shows("it decodes", |snapshot| snapshot.running == 1);
    cluster.decode[0].interrupt();
    assert_eq!(call.reply().json()["usage"]["completion_tokens"], 40);
    cluster.decode[0].ends_well();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_terminated_prefill_engine_keeps_leases_until_they_are_fetched() {
    let mut cluster = Cluster::new().start();
    cluster.decode[0].pause();
    let call = cluster.send(&GenerateRequest::fresh(100));
    cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.prefill[0].interrupt();
    cluster.decode[0].go_on();
    assert_eq!(call.reply().status, 200);
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched >= 96.0, "only {fetched} tokens were fetched");
    cluster.prefill[0].ends_well();
    cluster.settled(PATIENCE);
}

/// A drain of at most half a second.
const SHORT_DRAIN: &str = "--shutdown-timeout 0.5";

#[test]
fn a_terminated_decode_engine_releases_unfinished_requests() {
    let slow = format!("--max-num-seqs 1 --pace-ms 100 {SHORT_DRAIN}");
    let mut cluster = Cluster::new().prefill("--kv-lease-duration 600").decode(&slow).start();
    let running = cluster.send(&GenerateRequest::fresh(100).tokens(400));
    cluster.decode[0].shows("one decodes", |snapshot| snapshot.running == 1);
    let waiting = cluster.send(&GenerateRequest::fresh(100).tokens(400));
    cluster.decode[0].shows("one waits, with its handoff", |snapshot| snapshot.waiting == 1);
    cluster.prefill[0].shows("its blocks are leased", |snapshot| snapshot.leases == 1);
    cluster.decode[0].terminate();
    for call in [running, waiting] {
        let reply = call.reply();
        assert_eq!(reply.status, 503, "{}", reply.json());
        assert_eq!(reply.json()["error"]["type"], "service_unavailable_error");
    }
    cluster.decode[0].ends_well();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_decode_engine_that_is_terminated_in_mid_stream_ends_the_stream_with_one_typed_error() {
    let slow = format!("--pace-ms 50 {SHORT_DRAIN}");
    let mut cluster = Cluster::new().prefill("--kv-lease-duration 600").decode(&slow).start();
    let mut stream = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
    stream.event().expect("an event");
    cluster.decode[0].terminate();
    let events: Vec<String> = std::iter::from_fn(|| stream.event()).collect();
    let [.., error, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    let error: Value = serde_json::from_str(error).expect("JSON");
    assert_eq!(error["error"]["type"], "service_unavailable_error", "{error}");
    cluster.decode[0].ends_well();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_terminated_prefill_engine_finishes_and_opens_its_lease() {
    let slow = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";
    let mut cluster = Cluster::new().prefill(slow).start();
    let call = cluster.send(&GenerateRequest::fresh(600));
    cluster.prefill[0]
        .shows("two chunks are computed", |snapshot| snapshot.running == 1 && snapshot.steps >= 2);
    cluster.prefill[0].terminate();
    assert_eq!(call.reply().status, 200);
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched >= 560.0, "only {fetched} tokens were fetched");
    cluster.prefill[0].ends_well();
    cluster.settled(PATIENCE);
}

#[test]
fn a_terminated_prefill_engine_ends_in_time_with_unfetched_leases() {
    let patient = format!("--kv-lease-duration 600 {SHORT_DRAIN}");
    let mut cluster = Cluster::new().prefill(&patient).start();
    let mut ask = GenerateRequest::fresh(100);
    ask.body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let leased = cluster.prefill[0].send("POST", ask.path, &ask.body).reply().json();
    assert!(leased["kv_transfer_params"]["remote_handle"].is_string(), "{leased}");
    cluster.prefill[0].terminate();
    cluster.prefill[0].ends_well();
    // A decode engine that requests the blocks now does not wait: it computes the prompt.
    ask.body["kv_transfer_params"] = leased["kv_transfer_params"].clone();
    let reply = cluster.decode[0].send("POST", ask.path, &ask.body).reply();
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!(cluster.decode[0].metric("baton_kv_load_failures_total", "policy=\"recompute\""), 1.0);
    cluster.settled(PATIENCE);
}
