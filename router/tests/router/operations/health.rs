//! Engines that are ejected and return to rotation, invisible to clients.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::TestRouter;

const HANDLE: u128 = 0xabc;

async fn leasing_engine() -> FakeEngine {
    FakeEngine::always(Action::Lease(Some(HANDLE))).await
}

pub(crate) fn error_body(code: &str) -> Value {
    json!({"error": {"message": "x", "type": "server_error", "param": null, "code": code}})
}

/// One engine's entry in `/engines`.
async fn shown(system: &TestRouter, engine: &FakeEngine) -> Value {
    let all = get(system.admin, "/engines").await.json();
    let engines = all["engines"].as_array().expect("a list").clone();
    engines.into_iter().find(|one| one["url"] == engine.url()).expect("it is listed")
}

pub(crate) async fn standing(system: &TestRouter, engine: &FakeEngine, leg: &str) -> String {
    shown(system, engine).await["legs"][leg]["standing"].as_str().expect("a standing").to_owned()
}

pub(crate) async fn stands(system: &TestRouter, engine: &FakeEngine, leg: &str, expected: &str) {
    let begun = std::time::Instant::now();
    while standing(system, engine, leg).await != expected {
        assert!(begun.elapsed().as_secs() < 20, "{}", shown(system, engine).await);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

async fn order(system: &TestRouter, engine: &FakeEngine, verb: &str) -> u16 {
    let mut client = Client::connect(system.admin).await;
    let path = format!("/engines/{}/{verb}", engine.address);
    client
        .send(format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n").as_bytes())
        .await;
    client.answer().await.status
}

#[tokio::test]
async fn only_the_first_request_waits_for_a_silent_engine() {
    let p = leasing_engine().await;
    let silent = FakeEngine::always(Action::Hang).await.unresponsive();
    let live = FakeEngine::always(Action::Whole(1)).await;
    let top = "timeouts: {liveness_probe_ms: 20}\nhealth: {active: {interval_ms: 0, timeout_ms: 100}, \
               breaker: {cool_down_ms: 50, cool_down_max_ms: 100}}";
    let system = TestRouter::with(&[&p], &[&silent, &live], "", top).await;
    for _ in 0..12 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(silent.received().len(), 1, "one request found out");
    stands(&system, &silent, "decode", "unresponsive").await;
    assert_eq!(shown(&system, &silent).await["reasons"], json!(["silent"]));
    let questions = silent.probes();
    silent.wait("it is probed repeatedly", |d| d.probes() > questions + 3).await;
    assert_eq!(silent.received().len(), 1, "with questions of the router's own, and not with requests");
    silent.respond_again();
    stands(&system, &silent, "decode", "trial").await;
    system.settled().await;
}

#[tokio::test]
async fn a_recovered_engine_gets_one_trial_request_and_then_its_share() {
    let p = leasing_engine().await;
    let (d, other) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {active: {interval_ms: 0}, breaker: {cool_down_ms: 20, cool_down_max_ms: 40}}";
    let system = TestRouter::with(&[&p], &[&d, &other], "", top).await;
    let address = d.address;
    d.die().await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(other.received().len(), 4);
    let d = FakeEngine::at(address, Action::WholeGated(1)).await;
    stands(&system, &d, "decode", "trial").await;
    let asking: Vec<_> = (0..6)
        .map(|_| {
            let at = system.address;
            tokio::spawn(async move { post(at, "/v1/completions", &completion(false)).await.status })
        })
        .collect();
    other.wait("the others went elsewhere", |other| other.received().len() == 9).await;
    d.wait("one went there", |d| d.received().len() == 1).await;
    d.open_gate();
    for call in asking {
        assert_eq!(call.await.unwrap(), 200);
    }
    stands(&system, &d, "decode", "usable").await;
}

#[tokio::test]
async fn an_engine_with_consecutive_failures_is_ejected() {
    let p = leasing_engine().await;
    let broken = FakeEngine::always(Action::Refuse(500, error_body("x"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
    let system = TestRouter::with(&[&p], &[&broken, &good], "", top).await;
    for _ in 0..12 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(broken.received().len(), 3);
    assert_eq!(standing(&system, &broken, "decode").await, "ejected");
    let series = format!(
        "baton_router_engine_standing{{engine=\"{}\",leg=\"decode\",standing=\"ejected\"}}",
        broken.address
    );
    system.counts(&series, 1.0).await;
}

#[tokio::test]
async fn requests_that_fail_on_every_engine_eject_none() {
    let poisoned = || async {
        FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
            (request.body["prompt"] == "poison").then_some(Action::Refuse(500, error_body("x")))
        })
    };
    let p = leasing_engine().await;
    let (a, b) = (poisoned().await, poisoned().await);
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 2}}";
    let system = TestRouter::with(&[&p], &[&a, &b], "", top).await;
    let poison = json!({"model": "m", "prompt": "poison", "max_tokens": 8});
    for _ in 0..10 {
        assert_eq!(post(system.address, "/v1/completions", &poison).await.status, 502);
    }
    for engine in [&a, &b] {
        assert_eq!(standing(&system, engine, "decode").await, "usable");
    }
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

#[tokio::test]
async fn one_client_cannot_eject_the_only_engine() {
    let d = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        (request.body["prompt"] == "poison").then_some(Action::Refuse(500, error_body("x")))
    });
    let top = "health: {active: {interval_ms: 0}, all_out: refuse, breaker: {failures: 2}}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let poison = json!({"model": "m", "prompt": "poison", "max_tokens": 8});
    for _ in 0..10 {
        assert_eq!(post(system.address, "/v1/completions", &poison).await.status, 502);
    }
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

#[tokio::test]
async fn requests_that_one_engine_fails_and_another_refuses_eject_none() {
    let poisoned = |status| async move {
        FakeEngine::always(Action::Whole(1)).await.with_rule(move |request| {
            (request.body["prompt"] == "poison").then_some(Action::Refuse(status, error_body("x")))
        })
    };
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 2}}";
    let poison = json!({"model": "m", "prompt": "poison", "max_tokens": 8});
    for leg in ["decode", "prefill"] {
        let (fails, refuses) = (poisoned(500).await, poisoned(400).await);
        let (p, d) = (leasing_engine().await, FakeEngine::always(Action::Whole(1)).await);
        let system = match leg {
            "decode" => TestRouter::with(&[&p], &[&fails, &refuses], "", top).await,
            _ => TestRouter::with(&[&fails, &refuses], &[&d], "", top).await,
        };
        for _ in 0..10 {
            assert_eq!(post(system.address, "/v1/completions", &poison).await.status, 400);
        }
        assert!(fails.received().len() >= 4, "{leg}: it was chosen first as often as the other");
        assert_eq!(standing(&system, &fails, leg).await, "usable", "{leg}");
        assert_eq!(standing(&system, &refuses, leg).await, "usable", "{leg}");
    }
}

#[tokio::test]
async fn an_engine_that_breaks_every_stream_is_ejected() {
    let breaks = FakeEngine::always(Action::StreamAndDie(2)).await;
    let good = FakeEngine::always(Action::Stream(2)).await;
    let top = "health: {active: {interval_ms: 0}, \
               breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
    let system = TestRouter::with(&[], &[&breaks, &good], "", top).await;
    let ask = async |from: [u8; 4]| {
        let mut client = Client::connect_from(from.into(), system.address).await;
        client.post("/v1/completions", &completion(true)).await;
        assert_eq!(client.answer().await.status, 200);
    };
    for _ in 0..12 {
        ask([127, 0, 0, 1]).await;
    }
    assert_eq!(breaks.received().len(), 6);
    assert_eq!(standing(&system, &breaks, "decode").await, "usable", "one client may be at fault itself");
    for client in 0..12 {
        ask([127, 0, 0, 2 + client / 2 % 2]).await;
    }
    assert_eq!(breaks.received().len(), 8, "two more, of two others");
    assert_eq!(standing(&system, &breaks, "decode").await, "ejected");
    assert_eq!(standing(&system, &good, "decode").await, "usable");
}

/// Never responds to requests, and leaves this many liveness probes unanswered.
async fn silent_for(questions: usize) -> FakeEngine {
    let calls = std::sync::atomic::AtomicUsize::new(0);
    FakeEngine::always(Action::Hang).await.with_rule(move |request| {
        let unanswered =
            request.path == "/health" && calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < questions;
        unanswered.then_some(Action::Close)
    })
}

#[tokio::test]
async fn an_engine_unresponsive_to_one_request_is_probed_and_stays() {
    let p = leasing_engine().await;
    // Two probes while the request waits, and the one that decides.
    for (questions, expected) in [(2, "usable"), (1000, "unresponsive")] {
        let (busy, live) = (silent_for(questions).await, FakeEngine::always(Action::Whole(1)).await);
        let top = "timeouts: {liveness_probe_ms: 10}\nhealth: {active: {interval_ms: 0}, \
                   breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
        let system = TestRouter::with(&[&p], &[&busy, &live], "", top).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        assert_eq!(busy.received().len(), 1);
        busy.wait("it is probed once more", |d| d.probes() == 3).await;
        stands(&system, &busy, "decode", expected).await;
    }
}

#[tokio::test]
async fn a_request_with_two_unresponsive_engines_is_not_retried() {
    let engines = [silent_for(9).await, silent_for(9).await, silent_for(9).await];
    let d = FakeEngine::always(Action::Whole(1)).await;
    let [a, b, c] = &engines;
    for (prefill, decode) in [(vec![], vec![a, b, c]), (vec![a, b, c], vec![&d])] {
        let before = engines.iter().map(|engine| engine.received().len()).sum::<usize>();
        let top = "timeouts: {liveness_probe_ms: 10}\nattempts: {prefill: 3, decode: 3}\nhealth: {active: {interval_ms: 0}}";
        let system = TestRouter::with(&prefill, &decode, "", top).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 504);
        let after = engines.iter().map(|engine| engine.received().len()).sum::<usize>();
        assert_eq!(after - before, 2);
        system.settled().await;
    }
    assert!(d.received().is_empty(), "nor to the other leg");
}

#[tokio::test]
async fn full_engines_are_healthy() {
    let p = leasing_engine().await;
    let full = FakeEngine::always(Action::Refuse(429, error_body("overloaded"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 2}}";
    let system = TestRouter::with(&[&p], &[&full, &good], "", top).await;
    for _ in 0..10 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(standing(&system, &full, "decode").await, "usable");
    assert!(full.received().len() >= 5, "it goes on getting its turn");
}

#[tokio::test]
async fn an_engine_that_reports_unhealthy_is_ejected_until_it_reports_healthy() {
    let p = leasing_engine().await;
    let (unhealthy, good) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {active: {interval_ms: 20, unhealthy: 2, healthy: 2}}";
    let system = TestRouter::with(&[&p], &[&unhealthy, &good], "", top).await;
    unhealthy.set_healthy(false);
    stands(&system, &unhealthy, "decode", "ejected").await;
    assert_eq!(shown(&system, &unhealthy).await["reasons"], json!(["fails its health checks"]));
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((unhealthy.received().len(), good.received().len()), (0, 4));
    unhealthy.set_healthy(true);
    stands(&system, &unhealthy, "decode", "usable").await;
}

#[tokio::test]
async fn an_outlier_of_its_pool_is_ejected() {
    let p = leasing_engine().await;
    let odd = std::sync::atomic::AtomicUsize::new(0);
    // Every second request fails: never enough in a row to open the breaker.
    let flaky = FakeEngine::always(Action::Whole(1)).await.with_rule(move |request| {
        let nth =
            odd.fetch_add(usize::from(request.path.starts_with("/v1/")), std::sync::atomic::Ordering::SeqCst);
        (nth % 2 == 1).then_some(Action::Refuse(500, error_body("x")))
    });
    let (b, c) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    // The retry budget refuses no retry: this test is about the engine.
    let top = "retries: {min_per_second: 1000000}\n\
               health: {active: {interval_ms: 0}, \
               outlier: {interval_ms: 50, requests_min: 3, failure_percent: 20, ejection_ms: 60000}}";
    let system = TestRouter::with(&[&p], &[&flaky, &b, &c], "", top).await;
    let begun = std::time::Instant::now();
    while standing(&system, &flaky, "decode").await != "ejected" {
        assert!(begun.elapsed().as_secs() < 30, "{}", shown(&system, &flaky).await);
        let at = system.address;
        let calls: Vec<_> = (0..24)
            .map(|_| {
                tokio::spawn(async move { post(at, "/v1/completions", &completion(false)).await.status })
            })
            .collect();
        for call in calls {
            assert_eq!(call.await.unwrap(), 200);
        }
    }
    assert_eq!(shown(&system, &flaky).await["reasons"], json!(["ejected from decode"]));
    assert_eq!(standing(&system, &b, "decode").await, "usable");
}

#[tokio::test]
async fn a_drained_engine_gets_no_new_request_until_undrained() {
    let p = leasing_engine().await;
    let (a, b) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::start(&[&p], &[&a, &b]).await;
    assert_eq!(order(&system, &a, "drain").await, 200);
    assert_eq!(shown(&system, &a).await["reasons"], json!(["drained by an operator"]));
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((a.received().len(), b.received().len()), (0, 4));
    let plan = post(system.admin, "/dry-run?path=/v1/completions", &completion(false)).await.json();
    let left_out = json!([{"engine": a.address.to_string(), "why": "draining"}]);
    assert_eq!(plan["decode"]["removed"], left_out, "in the word of /engines: {plan}");
    assert_eq!(order(&system, &b, "drain").await, 200);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 503);
    assert_eq!(p.received().len(), 4, "no prefill without a decode engine");
    let ready = get(system.admin, "/ready").await;
    assert_eq!((ready.status, ready.text().as_str()), (503, "no engine\n"));
    assert_eq!(order(&system, &a, "undrain").await, 200);
    assert_eq!(get(system.admin, "/ready").await.status, 200);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert_eq!(order(&system, &a, "dance").await, 404);
}

#[tokio::test]
async fn an_engine_drained_by_itself_or_the_configuration_gets_no_new_request() {
    let p = leasing_engine().await;
    let draining = FakeEngine::always(Action::Refuse(503, error_body("draining"))).await;
    let (drained, stays) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, prefill: {{engines: [{{url: '{}'}}]}}, \
         decode: {{policy: round_robin, engines: [{{url: '{}'}}, {{url: '{}', drain: true}}, {{url: '{}'}}]}}}}]",
        p.url(), draining.url(), drained.url(), stays.url()
    ))
    .await;
    for _ in 0..6 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((draining.received().len(), drained.received().len(), stays.received().len()), (1, 0, 6));
    assert_eq!(shown(&system, &draining).await["reasons"], json!(["reports that it drains"]));
    assert_eq!(shown(&system, &drained).await["reasons"], json!(["drained by the configuration"]));
}

#[tokio::test]
async fn ejected_engines_are_tried_when_all_are_out_if_configured() {
    for (all_out, status, calls) in [("fail_open", 200, 1), ("refuse", 503, 0)] {
        let p = leasing_engine().await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let top = format!(
            "health: {{active: {{interval_ms: 0}}, all_out: {all_out}, ready: every_model, \
             breaker: {{cool_down_ms: 60000, cool_down_max_ms: 60000}}}}"
        );
        let system = TestRouter::with(&[&p], &[&d], "", &top).await;
        let address = d.address;
        d.die().await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 503);
        let d = FakeEngine::at(address, Action::Whole(1)).await;
        assert_eq!(get(system.admin, "/ready").await.status, 503);
        assert_eq!(
            post(system.address, "/v1/completions", &completion(false)).await.status,
            status,
            "{all_out}"
        );
        assert_eq!(d.received().len(), calls, "{all_out}");
    }
}

#[tokio::test]
async fn below_the_panic_threshold_health_is_ignored() {
    let p = leasing_engine().await;
    let (unhealthy, good) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {panic_percent: 60, active: {interval_ms: 20, unhealthy: 1}}";
    let system = TestRouter::with(&[&p], &[&unhealthy, &good], "", top).await;
    unhealthy.set_healthy(false);
    stands(&system, &unhealthy, "decode", "ejected").await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(
        (unhealthy.received().len(), good.received().len()),
        (2, 2),
        "half of the pool is less than 60 percent"
    );
}

#[tokio::test]
async fn an_engine_without_the_model_is_an_operator_fault() {
    let p = leasing_engine().await;
    let vllm =
        json!({"error": {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}});
    for refusal in [error_body("model_not_found"), vllm] {
        let wrong = FakeEngine::always(Action::Refuse(404, refusal)).await;
        let good = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&p], &[&wrong, &good]).await;
        for _ in 0..2 {
            assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        }
        system.counts("baton_router_wrong_model_total{leg=\"decode\"}", 2.0).await;
        let system = TestRouter::start(&[&p], &[&wrong]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "misconfigured_model"));
        system.settled().await;
    }
}

#[tokio::test]
async fn retries_stay_within_a_budget() {
    let p = leasing_engine().await;
    let broken = FakeEngine::always(Action::Refuse(500, error_body("x"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "retries: {budget_percent: 0, min_per_second: 0}";
    let system = TestRouter::with(&[&p], &[&broken, &good], "", top).await;
    let mut failed = 0;
    for _ in 0..4 {
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        failed += usize::from(answer.status == 502);
    }
    assert_eq!((failed, broken.received().len(), good.received().len()), (4, 4, 0));
    system.counts("baton_router_retries_refused_total{leg=\"decode\"}", 4.0).await;
    p.wait("every lease is released", |p| p.releases().len() == 4).await;
}

#[tokio::test]
async fn attempts_bound_the_prefills_of_a_request() {
    let no = || FakeEngine::always(Action::Refuse(500, error_body("x")));
    let (a, b, c) = (no().await, no().await, no().await);
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&a, &b, &c], &[&d], "", "attempts: {prefill: 2}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert_eq!(a.received().len() + b.received().len() + c.received().len(), 2);

    // A decode pool that fails altogether: the handoff is tried at every engine, and is prefilled once.
    let p = leasing_engine().await;
    let system = TestRouter::with(&[&p], &[&a, &b, &c], "", "retries: {pause_ms: 1, pause_max_ms: 1}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 502);
    p.wait("the lease is released", |p| p.releases().len() == 1).await;
    system.settled().await;
    assert_eq!(p.received().len(), 1);
    // An unreachable prefill engine costs only a retry and is not counted as a prefill.
    assert_eq!(system.metric("baton_router_prefill_seconds_count{model=\"m\"}").await, 1.0);
}

#[tokio::test]
async fn a_prompt_that_no_prefill_engine_computed_is_not_counted_as_a_prefill() {
    let no = FakeEngine::always(Action::Refuse(500, error_body("x"))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&no], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    system.settled().await;
    assert_eq!(system.metric("baton_router_prefill_seconds_count{model=\"m\"}").await, 0.0);
}

#[tokio::test]
async fn an_engines_own_load_is_read_if_configured() {
    let p = leasing_engine().await;
    let d = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        let text = "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_waiting{engine=\"0\"} 1.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n";
        (request.path == "/metrics").then_some(Action::Text(text))
    });
    let top = "health: {active: {interval_ms: 0}, load: {interval_ms: 10, stale_ms: 600000}}";
    let system = TestRouter::with(&[&p], &[&d], "", top).await;
    d.wait("its metrics are read", |d| {
        d.all().iter().filter(|request| request.path == "/metrics").count() > 1
    })
    .await;
    let load = shown(&system, &d).await["load"].clone();
    assert_eq!((&load["running"], &load["waiting"], &load["kv_usage"]), (&json!(3), &json!(1), &json!(0.5)));
    assert_eq!(shown(&system, &p).await["load"], Value::Null, "it reports no load");
}

#[tokio::test]
async fn each_data_parallel_rank_is_a_candidate_and_the_router_names_it() {
    let p = leasing_engine().await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, prefill: {{engines: [{{url: '{}'}}]}}, \
         decode: {{policy: round_robin, engines: [{{url: '{}', data_parallel_size: 2}}]}}}}]",
        p.url(), d.url()
    ))
    .await;
    for _ in 0..4 {
        let mut client = Client::connect(system.address).await;
        let body = completion(false).to_string();
        client.post_bytes("/v1/completions", "x-data-parallel-rank: 7\r\n", body.as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    }
    let rank = |request: &crate::harness::engine::ReceivedRequest| {
        request.headers.get("x-data-parallel-rank").map(|v| v.to_str().unwrap().to_owned())
    };
    let mut ranks: Vec<_> = d.received().iter().map(|request| rank(request).expect("a rank")).collect();
    ranks.sort();
    assert_eq!(ranks, ["0", "0", "1", "1"]);
    assert!(
        p.received().iter().all(|request| rank(request).is_none()),
        "an engine of one rank is not named one"
    );
    eventually("nothing is left", || d.cut() == 0).await;
}

#[tokio::test]
async fn a_router_is_ready_after_the_first_healthy_engine() {
    let p = leasing_engine().await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    d.set_healthy(false);
    let top = "health: {active: {interval_ms: 50, unhealthy: 100}}";
    let system = TestRouter::with(&[&p], &[&d], "", top).await;
    d.wait("it is probed before any request", |d| d.probes() > 2).await;
    // The engine has no failure yet, and its health is still unknown.
    assert_eq!(standing(&system, &d, "decode").await, "usable");
    let ready = get(system.admin, "/ready").await;
    assert_eq!((ready.status, ready.text().as_str()), (503, "no engine\n"));
    d.set_healthy(true);
    let begun = std::time::Instant::now();
    while get(system.admin, "/ready").await.status != 200 {
        assert!(begun.elapsed().as_secs() < 10);
    }
}

#[tokio::test]
async fn a_draining_router_reports_it_and_closes_connections_after_their_responses() {
    let p = leasing_engine().await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let mut system = TestRouter::with(&[&p], &[&d], "", "drain_delay_ms: 3000").await;
    let mut kept = Client::connect(system.address).await;
    kept.post("/v1/completions", &completion(false)).await;
    assert_eq!(kept.answer().await.status, 200);
    system.shut_down();
    let begun = std::time::Instant::now();
    while get(system.admin, "/ready").await.status == 200 {
        assert!(begun.elapsed().as_secs() < 10);
    }
    kept.post("/v1/completions", &completion(false)).await;
    let answer = kept.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    let mut late = Client::connect(system.address).await;
    late.post("/v1/completions", &completion(false)).await;
    let answer = late.answer().await;
    assert_eq!(answer.status, 200, "a request that the load balancer still sends is served");
    assert_eq!(answer.header("connection"), Some("close"));
    system.stopped().await;
}
