//! Engines that are ejected and return to rotation, invisible to clients.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::TestRouter;

const HANDLE: u128 = 0xabc;

async fn lender() -> FakeEngine {
    FakeEngine::always(Action::Lease(Some(HANDLE))).await
}

pub(crate) fn said(code: &str) -> Value {
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
async fn a_silent_engine_costs_the_first_request_its_patience_and_no_later_one() {
    let p = lender().await;
    let silent = FakeEngine::always(Action::Hang).await.unresponsive();
    let live = FakeEngine::always(Action::Whole(1)).await;
    let top = "timeouts: {liveness_probe_ms: 20}\nhealth: {active: {interval_ms: 0, timeout_ms: 100}, \
               breaker: {cool_down_ms: 50, cool_down_max_ms: 100}}";
    let system = TestRouter::with(&[&p], &[&silent, &live], "", top).await;
    for _ in 0..12 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(silent.asked().len(), 1, "one request found out");
    stands(&system, &silent, "decode", "unresponsive").await;
    assert_eq!(shown(&system, &silent).await["reasons"], json!(["silent"]));
    let questions = silent.probes();
    silent.wait("it is asked again and again", |d| d.probes() > questions + 3).await;
    assert_eq!(silent.asked().len(), 1, "with questions of the router's own, and not with requests");
    silent.respond_again();
    stands(&system, &silent, "decode", "trial").await;
    system.settled().await;
}

#[tokio::test]
async fn an_engine_that_comes_back_gets_one_request_first_and_then_its_share() {
    let p = lender().await;
    let (d, other) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {active: {interval_ms: 0}, breaker: {cool_down_ms: 20, cool_down_max_ms: 40}}";
    let system = TestRouter::with(&[&p], &[&d, &other], "", top).await;
    let address = d.address;
    d.die().await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(other.asked().len(), 4);
    let d = FakeEngine::at(address, Action::WholeGated(1)).await;
    stands(&system, &d, "decode", "trial").await;
    let asking: Vec<_> = (0..6)
        .map(|_| {
            let at = system.address;
            tokio::spawn(async move { post(at, "/v1/completions", &completion(false)).await.status })
        })
        .collect();
    other.wait("the others went elsewhere", |other| other.asked().len() == 9).await;
    d.wait("one went there", |d| d.asked().len() == 1).await;
    d.open_gate();
    for asked in asking {
        assert_eq!(asked.await.unwrap(), 200);
    }
    stands(&system, &d, "decode", "usable").await;
}

#[tokio::test]
async fn an_engine_that_fails_what_others_serve_is_left_out_after_so_many_in_a_row() {
    let p = lender().await;
    let broken = FakeEngine::always(Action::Refuse(500, said("x"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
    let system = TestRouter::with(&[&p], &[&broken, &good], "", top).await;
    for _ in 0..12 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(broken.asked().len(), 3);
    assert_eq!(standing(&system, &broken, "decode").await, "ejected");
    let series = format!(
        "baton_router_engine_standing{{engine=\"{}\",leg=\"decode\",standing=\"ejected\"}}",
        broken.address
    );
    system.counts(&series, 1.0).await;
}

#[tokio::test]
async fn requests_that_break_every_engine_take_no_engine_from_the_others() {
    let poisoned = || async {
        FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
            (request.body["prompt"] == "poison").then_some(Action::Refuse(500, said("x")))
        })
    };
    let p = lender().await;
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
async fn one_client_alone_cannot_take_the_only_engine_from_the_others() {
    let d = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(|request| (request.body["prompt"] == "poison").then_some(Action::Refuse(500, said("x"))));
    let top = "health: {active: {interval_ms: 0}, all_out: refuse, breaker: {failures: 2}}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let poison = json!({"model": "m", "prompt": "poison", "max_tokens": 8});
    for _ in 0..10 {
        assert_eq!(post(system.address, "/v1/completions", &poison).await.status, 502);
    }
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

#[tokio::test]
async fn requests_that_one_engine_fails_and_another_refuses_take_no_engine_from_the_others() {
    let poisoned = |status| async move {
        FakeEngine::always(Action::Whole(1)).await.with_rule(move |request| {
            (request.body["prompt"] == "poison").then_some(Action::Refuse(status, said("x")))
        })
    };
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 2}}";
    let poison = json!({"model": "m", "prompt": "poison", "max_tokens": 8});
    for leg in ["decode", "prefill"] {
        let (fails, refuses) = (poisoned(500).await, poisoned(400).await);
        let (p, d) = (lender().await, FakeEngine::always(Action::Whole(1)).await);
        let system = match leg {
            "decode" => TestRouter::with(&[&p], &[&fails, &refuses], "", top).await,
            _ => TestRouter::with(&[&fails, &refuses], &[&d], "", top).await,
        };
        for _ in 0..10 {
            assert_eq!(post(system.address, "/v1/completions", &poison).await.status, 400);
        }
        assert!(fails.asked().len() >= 4, "{leg}: it was asked first as often as the other");
        assert_eq!(standing(&system, &fails, leg).await, "usable", "{leg}");
        assert_eq!(standing(&system, &refuses, leg).await, "usable", "{leg}");
    }
}

#[tokio::test]
async fn an_engine_that_takes_every_request_and_breaks_every_stream_is_left_out() {
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
    assert_eq!(breaks.asked().len(), 6);
    assert_eq!(standing(&system, &breaks, "decode").await, "usable", "one client may be at fault itself");
    for client in 0..12 {
        ask([127, 0, 0, 2 + client / 2 % 2]).await;
    }
    assert_eq!(breaks.asked().len(), 8, "two more, of two others");
    assert_eq!(standing(&system, &breaks, "decode").await, "ejected");
    assert_eq!(standing(&system, &good, "decode").await, "usable");
}

/// Never responds to requests, and leaves this many liveness probes unanswered.
async fn silent_for(questions: usize) -> FakeEngine {
    let asked = std::sync::atomic::AtomicUsize::new(0);
    FakeEngine::always(Action::Hang).await.with_rule(move |request| {
        let unanswered =
            request.path == "/health" && asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < questions;
        unanswered.then_some(Action::Close)
    })
}

#[tokio::test]
async fn an_engine_that_was_deaf_to_one_request_only_is_asked_and_stays() {
    let p = lender().await;
    // Two probes while the request waits, and the one that decides.
    for (questions, expected) in [(2, "usable"), (1000, "unresponsive")] {
        let (busy, live) = (silent_for(questions).await, FakeEngine::always(Action::Whole(1)).await);
        let top = "timeouts: {liveness_probe_ms: 10}\nhealth: {active: {interval_ms: 0}, \
                   breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
        let system = TestRouter::with(&[&p], &[&busy, &live], "", top).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        assert_eq!(busy.asked().len(), 1);
        busy.wait("it is asked once more", |d| d.probes() == 3).await;
        stands(&system, &busy, "decode", expected).await;
    }
}

#[tokio::test]
async fn a_request_that_two_engines_were_deaf_to_is_sent_to_no_other() {
    let engines = [silent_for(9).await, silent_for(9).await, silent_for(9).await];
    let d = FakeEngine::always(Action::Whole(1)).await;
    let [a, b, c] = &engines;
    for (prefill, decode) in [(vec![], vec![a, b, c]), (vec![a, b, c], vec![&d])] {
        let before = engines.iter().map(|engine| engine.asked().len()).sum::<usize>();
        let top = "timeouts: {liveness_probe_ms: 10}\nattempts: {prefill: 3, decode: 3}\nhealth: {active: {interval_ms: 0}}";
        let system = TestRouter::with(&prefill, &decode, "", top).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 504);
        let after = engines.iter().map(|engine| engine.asked().len()).sum::<usize>();
        assert_eq!(after - before, 2);
        system.settled().await;
    }
    assert!(d.asked().is_empty(), "nor to the other leg");
}

#[tokio::test]
async fn engines_that_are_full_are_not_ill() {
    let p = lender().await;
    let full = FakeEngine::always(Action::Refuse(429, said("overloaded"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 2}}";
    let system = TestRouter::with(&[&p], &[&full, &good], "", top).await;
    for _ in 0..10 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(standing(&system, &full, "decode").await, "usable");
    assert!(full.asked().len() >= 5, "it goes on getting its turn");
}

#[tokio::test]
async fn an_engine_that_says_it_is_not_well_is_left_out_until_it_says_otherwise() {
    let p = lender().await;
    let (ill, good) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {active: {interval_ms: 20, unhealthy: 2, healthy: 2}}";
    let system = TestRouter::with(&[&p], &[&ill, &good], "", top).await;
    ill.set_healthy(false);
    stands(&system, &ill, "decode", "ejected").await;
    assert_eq!(shown(&system, &ill).await["reasons"], json!(["fails its health checks"]));
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((ill.asked().len(), good.asked().len()), (0, 4));
    ill.set_healthy(true);
    stands(&system, &ill, "decode", "usable").await;
}

#[tokio::test]
async fn an_engine_far_worse_than_its_pools_others_is_left_out() {
    let p = lender().await;
    let odd = std::sync::atomic::AtomicUsize::new(0);
    // Every second request fails: never enough in a row to open the breaker.
    let flaky = FakeEngine::always(Action::Whole(1)).await.with_rule(move |request| {
        let nth =
            odd.fetch_add(usize::from(request.path.starts_with("/v1/")), std::sync::atomic::Ordering::SeqCst);
        (nth % 2 == 1).then_some(Action::Refuse(500, said("x")))
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
        let asked: Vec<_> = (0..24)
            .map(|_| {
                tokio::spawn(async move { post(at, "/v1/completions", &completion(false)).await.status })
            })
            .collect();
        for asked in asked {
            assert_eq!(asked.await.unwrap(), 200);
        }
    }
    assert_eq!(shown(&system, &flaky).await["reasons"], json!(["ejected from decode"]));
    assert_eq!(standing(&system, &b, "decode").await, "usable");
}

#[tokio::test]
async fn a_drained_engine_gets_nothing_new_until_it_is_undrained() {
    let p = lender().await;
    let (a, b) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::start(&[&p], &[&a, &b]).await;
    assert_eq!(order(&system, &a, "drain").await, 200);
    assert_eq!(shown(&system, &a).await["reasons"], json!(["drained by an operator"]));
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((a.asked().len(), b.asked().len()), (0, 4));
    let plan = post(system.admin, "/dry-run?path=/v1/completions", &completion(false)).await.json();
    let left_out = json!([{"engine": a.address.to_string(), "why": "draining"}]);
    assert_eq!(plan["decode"]["removed"], left_out, "in the word of /engines: {plan}");
    assert_eq!(order(&system, &b, "drain").await, 200);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 503);
    assert_eq!(p.asked().len(), 4, "no prefill without a decode engine");
    let ready = get(system.admin, "/ready").await;
    assert_eq!((ready.status, ready.text().as_str()), (503, "no engine\n"));
    assert_eq!(order(&system, &a, "undrain").await, 200);
    assert_eq!(get(system.admin, "/ready").await.status, 200);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert_eq!(order(&system, &a, "dance").await, 404);
}

#[tokio::test]
async fn an_engine_that_says_it_drains_or_is_drained_by_the_configuration_gets_nothing_new() {
    let p = lender().await;
    let leaving = FakeEngine::always(Action::Refuse(503, said("draining"))).await;
    let (drained, stays) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, prefill: {{engines: [{{url: '{}'}}]}}, \
         decode: {{policy: round_robin, engines: [{{url: '{}'}}, {{url: '{}', drain: true}}, {{url: '{}'}}]}}}}]",
        p.url(), leaving.url(), drained.url(), stays.url()
    ))
    .await;
    for _ in 0..6 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((leaving.asked().len(), drained.asked().len(), stays.asked().len()), (1, 0, 6));
    assert_eq!(shown(&system, &leaving).await["reasons"], json!(["reports that it drains"]));
    assert_eq!(shown(&system, &drained).await["reasons"], json!(["drained by the configuration"]));
}

#[tokio::test]
async fn when_every_engine_is_out_they_are_tried_nevertheless_or_not_as_the_configuration_says() {
    for (all_out, status, asked) in [("fail_open", 200, 1), ("refuse", 503, 0)] {
        let p = lender().await;
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
        assert_eq!(d.asked().len(), asked, "{all_out}");
    }
}

#[tokio::test]
async fn in_a_panic_health_is_not_looked_at() {
    let p = lender().await;
    let (ill, good) =
        (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let top = "health: {panic_percent: 60, active: {interval_ms: 20, unhealthy: 1}}";
    let system = TestRouter::with(&[&p], &[&ill, &good], "", top).await;
    ill.set_healthy(false);
    stands(&system, &ill, "decode", "ejected").await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!((ill.asked().len(), good.asked().len()), (2, 2), "half of the pool is less than 60 percent");
}

#[tokio::test]
async fn an_engine_without_the_model_is_the_operators_fault_and_not_the_clients() {
    let p = lender().await;
    let vllm =
        json!({"error": {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}});
    for refusal in [said("model_not_found"), vllm] {
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
async fn second_attempts_are_made_within_a_budget() {
    let p = lender().await;
    let broken = FakeEngine::always(Action::Refuse(500, said("x"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "retries: {budget_percent: 0, min_per_second: 0}";
    let system = TestRouter::with(&[&p], &[&broken, &good], "", top).await;
    let mut failed = 0;
    for _ in 0..4 {
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        failed += usize::from(answer.status == 502);
    }
    assert_eq!((failed, broken.asked().len(), good.asked().len()), (4, 4, 0));
    system.counts("baton_router_retries_refused_total{leg=\"decode\"}", 4.0).await;
    p.wait("every lease comes back", |p| p.releases().len() == 4).await;
}

#[tokio::test]
async fn one_request_never_costs_more_prefills_than_it_may_have_attempts() {
    let no = || FakeEngine::always(Action::Refuse(500, said("x")));
    let (a, b, c) = (no().await, no().await, no().await);
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&a, &b, &c], &[&d], "", "attempts: {prefill: 2}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert_eq!(a.asked().len() + b.asked().len() + c.asked().len(), 2);

    // A decode pool that fails altogether: the handoff is tried at every engine, and is prefilled once.
    let p = lender().await;
    let system = TestRouter::with(&[&p], &[&a, &b, &c], "", "retries: {pause_ms: 1, pause_max_ms: 1}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 502);
    p.wait("the lease comes back", |p| p.releases().len() == 1).await;
    system.settled().await;
    assert_eq!(p.asked().len(), 1);
    // An unreachable prefill engine costs only a retry and is not counted as a prefill.
    assert_eq!(system.metric("baton_router_prefill_seconds_count{model=\"m\"}").await, 1.0);
}

#[tokio::test]
async fn a_prompt_that_no_prefill_engine_computed_is_not_counted_as_a_prefill() {
    let no = FakeEngine::always(Action::Refuse(500, said("x"))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&no], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    system.settled().await;
    assert_eq!(system.metric("baton_router_prefill_seconds_count{model=\"m\"}").await, 0.0);
}

#[tokio::test]
async fn an_engines_own_load_is_read_where_that_is_asked_for() {
    let p = lender().await;
    let d = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        let text = "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_waiting{engine=\"0\"} 1.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n";
        (request.path == "/metrics").then_some(Action::Text(text))
    });
    let top = "health: {active: {interval_ms: 0}, load: {interval_ms: 10, stale_ms: 600000}}";
    let system = TestRouter::with(&[&p], &[&d], "", top).await;
    d.wait("it is asked", |d| d.all().iter().filter(|request| request.path == "/metrics").count() > 1).await;
    let load = shown(&system, &d).await["load"].clone();
    assert_eq!((&load["running"], &load["waiting"], &load["kv_usage"]), (&json!(3), &json!(1), &json!(0.5)));
    assert_eq!(shown(&system, &p).await["load"], Value::Null, "it says nothing of the kind");
}

#[tokio::test]
async fn each_data_parallel_rank_is_a_candidate_and_the_router_names_it() {
    let p = lender().await;
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
    let mut ranks: Vec<_> = d.asked().iter().map(|request| rank(request).expect("a rank")).collect();
    ranks.sort();
    assert_eq!(ranks, ["0", "0", "1", "1"]);
    assert!(
        p.asked().iter().all(|request| rank(request).is_none()),
        "an engine of one rank is not named one"
    );
    eventually("nothing is left", || d.cut() == 0).await;
}

#[tokio::test]
async fn a_router_is_ready_when_an_engine_has_said_that_it_is_well() {
    let p = lender().await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    d.set_healthy(false);
    let top = "health: {active: {interval_ms: 50, unhealthy: 100}}";
    let system = TestRouter::with(&[&p], &[&d], "", top).await;
    d.wait("it is asked before any request", |d| d.probes() > 2).await;
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
async fn a_router_that_drains_says_so_first_and_closes_connections_with_their_answers() {
    let p = lender().await;
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
    assert_eq!(answer.status, 200, "whom the load balancer still sends is served");
    assert_eq!(answer.header("connection"), Some("close"));
    system.stopped().await;
}
