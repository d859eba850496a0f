//! An engine refuses, is full, is down or dies during a request. The client gets one clear error in OpenAI's envelope
//! and without an engine's address, and nothing stays held.

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, Engine, GenerateRequest, PATIENCE, Reply, eventually};

/// A prefill engine that computes 64 tokens per step, and the time of each step.
const SLOW_PREFILL: &str = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";

/// Checks the envelope and returns its `error`.
pub(crate) fn refusal(cluster: &Cluster, reply: &Reply, status: u16, kind: &str) -> Value {
    let body = reply.json();
    assert_eq!(reply.status, status, "{body}");
    let error = clear(cluster, &body, kind);
    assert!(reply.header("x-request-id").is_some(), "{}", reply.head);
    error
}

/// Checks for one clear error: its type, a message for people, and no engine's address.
fn clear(cluster: &Cluster, body: &Value, kind: &str) -> Value {
    let error = &body["error"];
    assert_eq!(error["type"], kind, "{body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    for field in ["param", "code"] {
        assert!(error.get(field).is_some(), "the envelope has no {field}: {body}");
    }
    let text = body.to_string();
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        let (_, port) = engine.address.rsplit_once(':').expect("HOST:PORT");
        assert!(!text.contains("127.0.0.1") && !text.contains(port), "an engine's address: {text}");
    }
    error.clone()
}

fn fetched(engine: &Engine) -> f64 {
    engine.metric("vllm:external_prefix_cache_hits_total", "")
}

#[test]
fn a_prompt_too_long_for_the_decode_engine_is_one_400_and_the_prefill_engine_is_free() {
    let cluster = Cluster::new().decode("--max-model-len 128").start();
    for ask in [GenerateRequest::fresh(300), GenerateRequest::fresh(300).streamed()] {
        let error = refusal(&cluster, &cluster.ask(&ask), 400, "invalid_request_error");
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("prompt")));
        cluster.settled(AT_ONCE);
    }
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 2, "the prefill engine was to lend first");
    cluster.still_serves();
}

#[test]
fn a_prompt_too_long_for_every_engine_is_one_400() {
    let cluster = Cluster::new().start();
    let error = refusal(&cluster, &cluster.ask(&GenerateRequest::fresh(3000)), 400, "invalid_request_error");
    assert_eq!(error["code"], "context_length_exceeded");
    cluster.settled(AT_ONCE);
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 0);
}

#[test]
fn a_decode_engine_without_the_model_is_an_operator_fault_and_the_lease_is_released() {
    let cluster = Cluster::new().decode("--served-model-name another").start();
    let error = refusal(&cluster, &cluster.ask(&GenerateRequest::fresh(100)), 502, "server_error");
    assert_eq!(error["code"], "misconfigured_model");
    cluster.settled(AT_ONCE);
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1, "the prefill engine was to lend first");
}

#[test]
fn a_full_decode_engine_is_one_429_with_retry_after() {
    let cluster = Cluster::new().decode("--max-num-seqs 1 --max-waiting 1 --pace-ms 50").start();
    let d = &cluster.decode[0];
    let served = [0, 1].map(|waiting| {
        let call = cluster.send(&GenerateRequest::fresh(60).tokens(40));
        d.shows("it has a place", |snapshot| {
            snapshot.running + snapshot.fetching == 1 && snapshot.waiting == waiting
        });
        call
    });
    let reply = cluster.ask(&GenerateRequest::fresh(60).tokens(40));
    refusal(&cluster, &reply, 429, "overloaded_error");
    assert!(reply.header("retry-after").is_some(), "{}", reply.head);
    cluster.prefill[0].shows("the refused one's blocks are back", |snapshot| snapshot.leases <= 1);
    for call in served {
        assert_eq!(call.reply().status, 200);
    }
    cluster.settled(AT_ONCE);
}

#[test]
fn a_full_prefill_engine_without_a_fallback_is_one_429() {
    let narrow = "--max-num-batched-tokens 64 --max-num-seqs 1 --max-waiting 1 --pace-ms 60";
    let cluster = Cluster::new().prefill(narrow).no_fallback().start();
    let p = &cluster.prefill[0];
    let served = [0, 1].map(|waiting| {
        let call = cluster.send(&GenerateRequest::fresh(600));
        p.shows("it has a place", |snapshot| snapshot.running == 1 && snapshot.waiting == waiting);
        call
    });
    let reply = cluster.ask(&GenerateRequest::fresh(600));
    refusal(&cluster, &reply, 429, "overloaded_error");
    assert!(reply.header("retry-after").is_some(), "{}", reply.head);
    for call in served {
        assert_eq!(call.reply().status, 200);
    }
    cluster.settled(AT_ONCE);
}

#[test]
fn a_full_router_is_one_429_without_an_engine_request() {
    let slow = "--pace-ms 30";
    let cluster = Cluster::new().decode(slow).router("limits", json!({"in_flight": 1})).start();
    let served = cluster.send(&GenerateRequest::fresh(60).tokens(40));
    cluster.decode[0].shows("it decodes", |snapshot| snapshot.running == 1);
    let reply = cluster.ask(&GenerateRequest::fresh(60));
    refusal(&cluster, &reply, 429, "overloaded_error");
    assert!(reply.header("retry-after").is_some(), "{}", reply.head);
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1);
    assert_eq!(served.reply().status, 200);
    cluster.still_serves();
}

#[test]
fn without_its_only_decode_engine_a_request_is_one_503_and_the_prefill_engine_is_free() {
    let mut cluster = Cluster::new().start();
    cluster.decode[0].kill();
    for ask in [GenerateRequest::fresh(100), GenerateRequest::fresh(100).streamed()] {
        let reply = cluster.ask(&ask);
        refusal(&cluster, &reply, 503, "service_unavailable_error");
        assert!(reply.header("retry-after").is_some(), "{}", reply.head);
        cluster.settled(AT_ONCE);
    }
}

#[test]
fn another_decode_engine_gets_the_same_handoff_without_a_second_prefill() {
    let mut cluster = Cluster::new().decode("").decode("").start();
    let p_tokens = |cluster: &Cluster| cluster.prefill[0].metric("vllm:prompt_tokens_total", "");
    cluster.decode[0].kill();
    for number in 1..=4 {
        let before = p_tokens(&cluster);
        let reply = cluster.ask(&GenerateRequest::fresh(100));
        assert_eq!(reply.status, 200, "{}", reply.json());
        assert_eq!(p_tokens(&cluster) - before, 100.0, "one prefill");
        assert_eq!(cluster.prefill[0].snapshot().leases_opened, number, "one lease");
        cluster.settled(AT_ONCE);
    }
    let (retries, hits) =
        (cluster.router_metric("baton_router_retries_total", "leg=\"decode\""), fetched(&cluster.decode[1]));
    assert!(retries >= 1.0, "the dead engine was never asked");
    assert!(hits >= 4.0 * 96.0, "only {hits} tokens were fetched: the handoff was not used");
}

#[test]
fn a_decode_engine_that_dies_before_its_response_is_replaced() {
    let mut cluster = Cluster::new().decode("").decode("").start();
    cluster.decode[0].pause();
    cluster.decode[1].pause();
    let call = cluster.send(&GenerateRequest::fresh(100));
    cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    // Of two equal engines the router chooses the first.
    cluster.decode[0].is_sent_something();
    cluster.decode[0].kill();
    cluster.decode[1].go_on();
    let reply = call.reply();
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1, "one prefill");
    assert!(fetched(&cluster.decode[1]) >= 96.0, "the handoff was not used");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_decode_engine_that_dies_before_it_answers_is_one_502_and_the_prefill_engine_is_free() {
    let mut cluster = Cluster::new().start();
    cluster.decode[0].pause();
    let call = cluster.send(&GenerateRequest::fresh(100));
    cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.decode[0].kill();
    refusal(&cluster, &call.reply(), 502, "server_error");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_decode_engine_that_dies_in_mid_stream_ends_the_stream_with_one_typed_error() {
    let mut cluster = Cluster::new().decode("--pace-ms 30").start();
    let mut stream = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
    for _ in 0..3 {
        let event: Value = serde_json::from_str(&stream.event().expect("an event")).expect("JSON");
        assert!(event["choices"].is_array(), "{event}");
    }
    cluster.decode[0].kill();
    let rest: Vec<String> = std::iter::from_fn(|| stream.event()).collect();
    let (done, events) = rest.split_last().expect("an end");
    assert_eq!(done, "[DONE]");
    let errors: Vec<Value> = events
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .filter(|event: &Value| event.get("error").is_some())
        .collect();
    assert_eq!(errors.len(), 1, "{rest:?}");
    clear(&cluster, &errors[0], "server_error");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_decode_engine_that_dies_in_an_answer_that_is_not_streamed_is_one_502() {
    let mut cluster = Cluster::new().decode("--pace-ms 30").start();
    let call = cluster.send(&GenerateRequest::fresh(100).tokens(400));
    cluster.decode[0].shows("it decodes", |snapshot| snapshot.running == 1 && snapshot.steps >= 3);
    cluster.decode[0].kill();
    refusal(&cluster, &call.reply(), 502, "server_error");
    cluster.settled(AT_ONCE);
}

#[test]
fn without_a_prefill_engine_a_decode_engine_computes_the_whole_request() {
    let mut cluster = Cluster::new().start();
    let ask = GenerateRequest::recall(20);
    let with_prefill = cluster.ask(&ask).text();
    let _ = cluster.decode[0].send("POST", "/reset_prefix_cache", &json!({})).reply();
    cluster.prefill[0].kill();
    let queries = cluster.decode[0].metric("vllm:external_prefix_cache_queries_total", "");
    assert_eq!(cluster.ask(&ask).text(), with_prefill);
    assert_eq!(cluster.decode[0].metric("vllm:external_prefix_cache_queries_total", ""), queries);
    cluster.settled(AT_ONCE);
}

#[test]
fn without_a_prefill_engine_and_without_a_fallback_a_request_is_one_503() {
    let mut cluster = Cluster::new().no_fallback().start();
    cluster.prefill[0].kill();
    for ask in [GenerateRequest::fresh(100), GenerateRequest::fresh(100).streamed()] {
        refusal(&cluster, &cluster.ask(&ask), 503, "service_unavailable_error");
    }
    assert_eq!(cluster.decode[0].snapshot().steps, 0, "the decode engine was to hear nothing");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_prefill_engine_that_dies_while_it_computes_is_replaced() {
    let mut cluster = Cluster::new().prefill(SLOW_PREFILL).start();
    let ask = GenerateRequest::recall(100);
    let call = cluster.send(&ask);
    cluster.prefill[0]
        .shows("two chunks are computed", |snapshot| snapshot.running == 1 && snapshot.steps >= 2);
    cluster.prefill[0].kill();
    let answer = call.reply().text();
    assert_eq!(cluster.ask(&ask).text(), answer);
    cluster.settled(AT_ONCE);
}

#[test]
fn a_prefill_engine_that_dies_without_a_fallback_is_one_502() {
    let mut cluster = Cluster::new().prefill(SLOW_PREFILL).no_fallback().not_early().start();
    let call = cluster.send(&GenerateRequest::fresh(1000));
    cluster.prefill[0]
        .shows("two chunks are computed", |snapshot| snapshot.running == 1 && snapshot.steps >= 2);
    cluster.prefill[0].kill();
    refusal(&cluster, &call.reply(), 502, "server_error");
    cluster.settled(AT_ONCE);
}

#[test]
fn another_prefill_engine_replaces_a_dead_one() {
    let mut cluster = Cluster::new().prefill("").prefill("").no_fallback().start();
    cluster.prefill[0].kill();
    for number in 1..=2 {
        let reply = cluster.ask(&GenerateRequest::fresh(100));
        assert_eq!(reply.status, 200, "{}", reply.json());
        assert_eq!(cluster.prefill[1].snapshot().leases_opened, number);
    }
    assert!(fetched(&cluster.decode[0]) >= 2.0 * 96.0);
    cluster.settled(AT_ONCE);
}

#[test]
fn a_prefill_engine_that_dies_before_its_blocks_are_fetched_does_not_change_the_answer() {
    let mut cluster = Cluster::new().start();
    let ask = GenerateRequest::recall(20);
    cluster.decode[0].pause();
    let call = cluster.send(&ask);
    cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.prefill[0].kill();
    cluster.decode[0].go_on();
    let answer = call.reply().text();
    assert_eq!(cluster.decode[0].metric("baton_kv_load_failures_total", "policy=\"recompute\""), 1.0);
    assert_eq!(fetched(&cluster.decode[0]), 0.0);
    let _ = cluster.decode[0].send("POST", "/reset_prefix_cache", &json!({})).reply();
    assert_eq!(cluster.ask(&ask).text(), answer, "computed afresh it is another");
    cluster.settled(AT_ONCE);
}

/// The prefill engine dies during its lease to a decode engine whose policy is to fail.
fn producer_dies(mut cluster: Cluster, ask: &GenerateRequest) -> (Cluster, Reply) {
    cluster.decode[0].pause();
    let call = cluster.send(ask);
    cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.prefill[0].kill();
    cluster.decode[0].go_on();
    let reply = call.reply();
    (cluster, reply)
}

#[test]
fn under_policy_fail_the_router_recomputes_unfetchable_blocks() {
    let ask = GenerateRequest::recall(20);
    let cluster = Cluster::new().decode("--kv-load-failure-policy fail").start();
    let (cluster, reply) = producer_dies(cluster, &ask);
    let answer = reply.text();
    assert_eq!(cluster.router_metric("baton_router_recomputes_total", ""), 1.0);
    let _ = cluster.decode[0].send("POST", "/reset_prefix_cache", &json!({})).reply();
    assert_eq!(cluster.ask(&ask).text(), answer, "computed afresh it is another");
    cluster.settled(PATIENCE);
}

#[test]
fn unfetchable_blocks_without_a_fallback_are_one_503() {
    let cluster = Cluster::new().decode("--kv-load-failure-policy fail").no_fallback().start();
    let (cluster, reply) = producer_dies(cluster, &GenerateRequest::fresh(100));
    refusal(&cluster, &reply, 503, "service_unavailable_error");
    cluster.settled(PATIENCE);
}

#[test]
fn a_decode_engine_that_cannot_use_the_handoff_costs_neither_a_second_prefill_nor_an_error() {
    let cluster = Cluster::new().decode("--kv-cache-dtype f16").decode("").start();
    for number in 1..=4 {
        assert_eq!(cluster.ask(&GenerateRequest::fresh(100)).status, 200);
        assert_eq!(cluster.prefill[0].snapshot().leases_opened, number, "one prefill");
        cluster.settled(AT_ONCE);
    }
    assert!(fetched(&cluster.decode[1]) >= 4.0 * 96.0, "the handoff was not used");
    let left = cluster.decode[0].metric("baton_early_rejections_total", "reason=\"left_to_router\"");
    assert!(left >= 1.0, "the other one was never asked");
}

#[test]
fn a_handoff_unusable_everywhere_is_released_and_the_response_completes() {
    let cluster = Cluster::new().decode("--kv-cache-dtype f16").start();
    for ask in [GenerateRequest::fresh(100), GenerateRequest::fresh(100).streamed()] {
        assert_eq!(cluster.ask(&ask).status, 200);
        cluster.settled(AT_ONCE);
    }
    assert_eq!(cluster.router_metric("baton_router_recomputes_total", ""), 2.0);
    assert_eq!(cluster.router_metric("baton_router_releases_total", "cause=\"unusable_handoff\""), 2.0);
}

#[test]
fn a_stopped_decode_engine_is_replaced_while_the_lease_is_live() {
    let mut cluster =
        Cluster::new().decode("").decode("").router("timeouts", json!({"liveness_probe_ms": 300})).start();
    cluster.decode[0].pause();
    // Equal engines take turns: one of the two requests goes to the stopped engine.
    let calls = [0, 1].map(|_| cluster.send(&GenerateRequest::fresh(100)));
    for call in calls {
        assert_eq!(call.reply().status, 200);
    }
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 2, "no second prefill");
    assert!(fetched(&cluster.decode[1]) >= 2.0 * 96.0, "the handoff was not used");
    cluster.decode[0].go_on();
    cluster.settled(PATIENCE);
}

#[test]
fn a_wrong_cluster_secret_is_never_the_clients_fault() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("secret");
    std::fs::write(&file, "a secret that the router does not know").expect("it can be written");
    let guarded = format!("--cluster-secret-file {}", file.display());
    let cluster = Cluster::new().decode(&guarded).start();
    let error = refusal(&cluster, &cluster.ask(&GenerateRequest::fresh(100)), 502, "server_error");
    assert_eq!(error["code"], "misconfigured");
    assert_eq!(cluster.router_metric("baton_router_misconfigured_total", "leg=\"decode\""), 1.0);
    cluster.prefill[0].settled(AT_ONCE);
}

#[test]
fn an_unclaimed_lease_ends_by_expiry_and_is_counted() {
    let mut cluster = Cluster::new().prefill("--kv-lease-duration 0.5").start();
    let p = &mut cluster.prefill[0];
    let mut ask = GenerateRequest::fresh(100);
    ask.body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let reply = p.send("POST", ask.path, &ask.body).reply();
    assert!(reply.json()["kv_transfer_params"]["remote_block_ids"].is_array(), "{}", reply.json());
    p.settled(PATIENCE);
    // This also shows that `settled` would detect an expiry.
    let expired = || match p.metric("vllm:nixl_num_kv_expired_reqs", "") {
        1.0 => Ok(()),
        other => Err(format!("{other} expired")),
    };
    eventually(PATIENCE, "the expiry is counted", expired);
}
