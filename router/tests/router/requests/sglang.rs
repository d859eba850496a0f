//! Two engines that behave like SGLang's prefill and decode engines: both legs at once, with the same room.

use serde_json::{Value, json};

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, eventually};
use crate::harness::system::{TestRouter, await_requests};
use crate::operations::log::Warnings;

const TOKEN: &str = r#"{"id":"p","object":"text_completion","model":"m","choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}"#;

/// SGLang's paths, and `action` for requests to generate.
fn sglang(
    mode: &'static str,
    action: Action,
) -> impl Fn(&ReceivedRequest) -> Option<Action> + Send + 'static {
    move |request| match request.path.as_str() {
        "/server_info" => Some(Action::Json(
            json!({"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9_123, "version": "0.5.23"}),
        )),
        "/abort_request" => Some(Action::Text("")),
        "/abort_requests" | "/kv/release" | "/health" => panic!("not a path of SGLang: {}", request.path),
        path if path.starts_with("/v1/") => {
            assert!(request.body.get("kv_transfer_params").is_none());
            Some(action.clone())
        }
        _ => None,
    }
}

async fn engine(mode: &'static str, action: Action) -> FakeEngine {
    FakeEngine::always(action.clone()).await.with_rule(sglang(mode, action))
}

async fn prefill() -> FakeEngine {
    engine("prefill", Action::Text(TOKEN)).await
}

/// A prefill engine whose answer waits for the test.
async fn gated_prefill() -> FakeEngine {
    engine("prefill", Action::ReplyGated(Value::Null)).await
}

/// The rids of all aborts. Each abort is sent three times: an engine confirms also an abort that has overtaken its
/// request.
fn rids(engine: &FakeEngine) -> Vec<String> {
    let aborts = engine.all().into_iter().filter(|request| request.path == "/abort_request");
    let mut rids: Vec<_> =
        aborts.map(|request| request.body["rid"].as_str().unwrap_or_default().to_owned()).collect();
    rids.dedup();
    rids
}

fn rid(engine: &FakeEngine, number: usize) -> String {
    engine.received()[number].body["rid"].as_str().unwrap_or_default().to_owned()
}

/// A client whose streamed completion both engines have received.
async fn sent_to_both(system: &TestRouter, p: &FakeEngine, d: &FakeEngine) -> Client {
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(p, 1).await;
    await_requests(d, 1).await;
    client
}

/// Waits until an engine has received one abort of its first request.
async fn aborted(engine: &FakeEngine) {
    let rid = rid(engine, 0);
    engine.wait("the abort", |engine| rids(engine) == [rid.as_str()]).await;
}

#[tokio::test]
async fn both_legs_are_sent_at_once_with_the_same_room() {
    let (p, d) = (gated_prefill().await, engine("decode", Action::StreamGated(3)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = sent_to_both(&system, &p, &d).await;
    let (p_body, d_body) = (p.received()[0].body.clone(), d.received()[0].body.clone());
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid", "max_tokens", "model"] {
        assert_eq!(p_body[name], d_body[name], "{name}");
    }
    assert_eq!((&p_body["bootstrap_host"], &p_body["bootstrap_port"]), (&json!("127.0.0.1"), &json!(9_123)));
    assert!(p_body["bootstrap_room"].as_u64().is_some_and(|room| room > 0 && i64::try_from(room).is_ok()));
    assert_eq!((&p_body["stream"], &d_body["stream"]), (&json!(false), &json!(true)));
    let ids = [&p, &d].map(|engine| engine.received()[0].headers["x-request-id"].clone());
    assert_eq!(ids[0], ids[1]);
    p.open_gate();
    (0..3).for_each(|_| d.open_gate());
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    system.settled().await;
    assert!(rids(&p).is_empty() && rids(&d).is_empty());
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn turns_that_are_not_kept_are_logged_once_per_model() {
    let warnings = Warnings::default();
    // The test's runtime has one thread, which runs the whole router.
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let logged = || warnings.lines().iter().filter(|line| line.contains("turns_not_kept")).count();
    for (model, lines) in [("", 0), ("    bidirectional_kv: {idle_ms: 1000}\n", 1)] {
        let (p, d) = (prefill().await, engine("decode", Action::Whole(1)).await);
        let system = TestRouter::with(&[&p], &[&d], model, "").await;
        for _ in 0..3 {
            let answer = post(system.address, "/v1/completions", &completion(false)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        assert_eq!(logged(), lines, "{model}");
    }
}

#[tokio::test]
async fn a_cancel_ends_both_legs_in_every_phase() {
    for how in DISCONNECT_KINDS {
        // While both compute, after P's answer, and in the stream with and without P's answer.
        for (p_answers, events) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
            let (p, d) = (gated_prefill().await, engine("decode", Action::StreamGated(3)).await);
            let system = TestRouter::start(&[&p], &[&d]).await;
            let mut client = sent_to_both(&system, &p, &d).await;
            if p_answers {
                p.open_gate();
                let engine = p.address;
                let in_flight = format!("baton_router_engine_requests_in_flight{{engine=\"{engine}\"}}");
                system.counts(&in_flight, 0.0).await;
            }
            for event in 0..events {
                d.open_gate();
                if event == 0 {
                    assert_eq!(client.head().await.0, 200);
                }
                client.event().await.expect("an event");
            }
            let before = [p.cut(), d.cut()];
            client.hang_up(how);
            aborted(&d).await;
            d.wait("the end of the decode leg", |d| d.cut() > before[1]).await;
            if p_answers && events > 0 {
                // The prefill engine holds nothing.
                system.settled().await;
                assert!(rids(&p).is_empty(), "{how:?}");
            } else if !p_answers {
                aborted(&p).await;
                p.open_gate();
                p.wait("the end of the prefill leg", |p| p.open() == 0 || p.cut() >= before[0]).await;
            }
            system.settled().await;
            assert_eq!(rids(&d).len(), 1);
        }
    }
}

#[tokio::test]
async fn an_abort_is_repeated_because_it_may_overtake_its_request() {
    let (p, d) = (gated_prefill().await, engine("decode", Action::Hang).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    drop(client);
    let aborts =
        |engine: &FakeEngine| engine.all().iter().filter(|request| request.path == "/abort_request").count();
    for engine in [&p, &d] {
        engine.wait("three aborts", |engine| aborts(engine) == 3).await;
    }
    p.open_gate();
    system.settled().await;
}

#[tokio::test]
async fn a_refusal_of_the_prefill_engine_ends_the_decode_leg_and_is_the_answer() {
    let body = json!({"object": "error", "message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400});
    let (p, d) = (engine("prefill", Action::Refuse(400, body)).await, engine("decode", Action::Hang).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(answer.json()["error"]["message"], "too long");
    if !d.received().is_empty() {
        aborted(&d).await;
    }
    system.settled().await;
    assert!(rids(&p).is_empty());
}

#[tokio::test]
async fn a_failed_leg_ends_the_other_and_the_next_pair_has_a_new_room() {
    let failure = || Action::Refuse(500, json!({"error": {"message": "Decode transfer failed"}}));
    for p_fails in [true, false] {
        let (bad_action, d_action) = match p_fails {
            true => (Action::HangGated, Action::Hang),
            false => (Action::ReplyGated(Value::Null), failure()),
        };
        let (bad, good) = (engine("prefill", bad_action).await, prefill().await);
        let (d, other) = (engine("decode", d_action).await, engine("decode", Action::Stream(2)).await);
        let system = TestRouter::start(&[&bad, &good], &[&d, &other]).await;
        let mut client = sent_to_both(&system, &bad, &d).await;
        if p_fails {
            bad.open_gate();
        }
        let answer = client.answer().await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        aborted(if p_fails { &d } else { &bad }).await;
        bad.open_gate();
        system.settled().await;
        let room = |p: &FakeEngine| p.received()[0].body["bootstrap_room"].clone();
        assert_ne!(room(&bad), room(&good), "a room is used once");
        let (first, second) = (rid(&bad, 0), rid(&good, 0));
        assert_ne!(first, second);
        assert_eq!(first.len(), second.len(), "no rid begins with another");
        system.counts("baton_router_requests_total{outcome=\"completed\"}", 1.0).await;
    }
}

#[tokio::test]
async fn a_refusal_of_the_decode_engine_ends_the_prefill_leg() {
    let refusal = Action::Refuse(400, json!({"error": {"message": "no"}}));
    let (p, d) = (gated_prefill().await, engine("decode", refusal).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 400);
    p.wait("the end of the prefill leg", |p| p.received().is_empty() || rids(p) == [rid(p, 0)]).await;
    p.open_gate();
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"decode_refused\"}", 1.0).await;
}

#[tokio::test]
async fn a_response_may_end_before_the_prefill_engine_answers() {
    let (p, d) = (gated_prefill().await, engine("decode", Action::Stream(2)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!(answer.status, 200);
    system.counts("baton_router_requests_in_flight", 0.0).await;
    p.open_gate();
    eventually("the prefill engine is idle", || p.open() <= 1).await;
    system.settled().await;
    assert!(rids(&p).is_empty() && rids(&d).is_empty());
    assert_eq!(p.cut(), 0, "its answer was read");
}

#[tokio::test]
async fn several_choices_are_refused_before_an_engine_is_asked() {
    let (p, d) = (prefill().await, engine("decode", Action::Stream(2)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut body = completion(true);
    body["n"] = json!(2);
    let answer = post(system.address, "/v1/completions", &body).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("n")));
    system.settled().await;
    assert!(p.received().is_empty() && d.received().is_empty());
}

#[tokio::test]
async fn several_prompts_have_a_room_each() {
    let (p, d) = (prefill().await, engine("decode", Action::Whole(3)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut body = completion(false);
    body["prompt"] = json!(["a", "b", "c"]);
    let answer = post(system.address, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let rooms = d.received()[0].body["bootstrap_room"].as_array().expect("a list").clone();
    assert_eq!(rooms.len(), 3);
    assert!(rooms[0] != rooms[1] && rooms[1] != rooms[2] && rooms[0] != rooms[2]);
    system.settled().await;
}

#[tokio::test]
async fn an_unreachable_prefill_engine_costs_the_decode_engine_nothing() {
    let (p, d) = (prefill().await, engine("decode", Action::Hang).await);
    let model = "    protocol: sglang\n";
    let system = TestRouter::with(&[&p], &[&d], model, "").await;
    p.die().await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    d.wait("the end of the decode leg", |d| d.received().len() == rids(d).len()).await;
    system.settled().await;
}

#[tokio::test]
async fn a_health_check_generates_no_token() {
    let (p, d) = (prefill().await, engine("decode", Action::Stream(2)).await);
    let health = "health: {active: {interval_ms: 50}}\n";
    let system = TestRouter::with(&[&p], &[&d], "", health).await;
    p.wait("a probe", |p| p.all().iter().any(|request| request.path == "/ready")).await;
    d.wait("a probe", |d| d.all().iter().any(|request| request.path == "/ready")).await;
    assert_eq!(get(system.address, "/ready").await.status, 200);
}

#[tokio::test]
async fn a_client_chooses_no_room() {
    let (p, d) = (prefill().await, engine("decode", Action::Whole(3)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut body = completion(false);
    for (name, value) in [
        ("bootstrap_room", json!(0)),
        ("bootstrap_host", json!("evil")),
        ("rid", json!("x")),
        ("routed_dp_rank", json!(7)),
        ("disagg_prefill_dp_rank", json!(7)),
    ] {
        body[name] = value;
    }
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 200);
    for engine in [&p, &d] {
        let body = engine.received()[0].body.clone();
        assert_ne!(body["bootstrap_room"], 0);
        assert_eq!(body["bootstrap_host"], "127.0.0.1");
        assert_ne!(body["rid"], "x");
        assert!(body.get("routed_dp_rank").is_none() && body.get("disagg_prefill_dp_rank").is_none());
    }
    system.settled().await;
}

#[tokio::test]
async fn a_configured_bootstrap_address_is_sent_to_both_engines() {
    let (p, d) = (prefill().await, engine("decode", Action::Whole(3)).await);
    let yaml = format!(
        "listen: 127.0.0.1:0\nmodels:\n  - name: m\n    protocol: sglang\n    prefill: {{engines: [{{url: '{}', \
         bootstrap_host: p.internal, bootstrap_port: 7000, data_parallel_size: 4}}]}}\n    decode: {{engines: \
         [{{url: '{}'}}]}}\nhealth: {{active: {{interval_ms: 0}}}}\n",
        p.url(),
        d.url()
    );
    let system = TestRouter::of(&yaml).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    for engine in [&p, &d] {
        let body = engine.received()[0].body.clone();
        assert_eq!((&body["bootstrap_host"], &body["bootstrap_port"]), (&json!("p.internal"), &json!(7_000)));
        let rank: u64 = p.received()[0].headers["x-data-parallel-rank"].to_str().unwrap().parse().unwrap();
        assert_eq!(body["bootstrap_room"].as_u64().expect("a room") % 4, rank);
    }
}

#[tokio::test]
async fn a_decode_engine_that_fails_behind_an_answered_prefill_costs_a_new_pair() {
    let (p, d) = (prefill().await, engine("decode", Action::HangGated).await);
    let other = engine("decode", Action::Stream(2)).await;
    let system = TestRouter::start(&[&p], &[&d, &other]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    let in_flight = format!("baton_router_engine_requests_in_flight{{engine=\"{}\"}}", p.address);
    system.counts(&in_flight, 0.0).await;
    // The connection breaks without an answer.
    d.open_gate();
    let answer = client.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    system.settled().await;
    assert_eq!((p.received().len(), other.received().len()), (2, 1));
    assert_eq!(rids(&d), [rid(&d, 0)], "only the failed decode leg is aborted");
    assert!(rids(&p).is_empty() && rids(&other).is_empty());
}

#[tokio::test]
async fn the_only_decode_engine_gets_a_second_pair_after_an_error() {
    let failure = Action::Refuse(500, json!({"error": {"message": "Decode transfer failed"}}));
    let p = prefill().await;
    let d = FakeEngine::always(Action::Hang).await;
    let count = std::sync::atomic::AtomicUsize::new(0);
    let d = d.with_rule(move |request| {
        let is_first =
            request.path.starts_with("/v1/") && count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        sglang("decode", if is_first { failure.clone() } else { Action::Stream(2) })(request)
    });
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    system.settled().await;
    assert_ne!(rid(&d, 0), rid(&d, 1));
}

#[tokio::test]
async fn a_response_of_the_responses_api_waits_for_the_prefill_engine() {
    let created =
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{}}\n\n".to_owned();
    let refusal = json!({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400});
    let p = FakeEngine::always(Action::Hang).await;
    let p = p.with_rule(sglang("prefill", Action::Refuse(400, refusal)));
    let d = engine("decode", Action::Frames(vec![created], false)).await;
    let system = TestRouter::with(&[&p], &[&d], "    responses: native", "").await;
    let body = json!({"model": "m", "input": "x", "stream": true});
    let answer = post(system.address, "/v1/responses", &body).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    system.settled().await;
}

#[tokio::test]
async fn concurrent_first_requests_wait_for_the_same_query() {
    let (p, d) = (prefill().await, engine("decode", Action::Whole(3)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let body = completion(false);
    let answers =
        futures::future::join_all((0..8).map(|_| post(system.address, "/v1/completions", &body))).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    assert!(d.received().iter().all(|leg| leg.body["bootstrap_room"].is_u64()));
}

/// Messages, Responses and several prompts have no `rid`: engines see the end of their connections only.
#[tokio::test]
async fn legs_without_an_id_are_aborted_by_the_end_of_their_connections() {
    let message = json!({"role": "user", "content": "Hello"});
    for (path, body) in [
        ("/v1/messages", json!({"model": "m", "messages": [message], "max_tokens": 8, "stream": true})),
        ("/v1/responses", json!({"model": "m", "input": "Hello", "stream": true})),
        ("/v1/completions", json!({"model": "m", "prompt": ["a", "b"], "max_tokens": 8, "stream": true})),
    ] {
        let (p, d) = (gated_prefill().await, engine("decode", Action::Hang).await);
        let native = "    messages: native\n    responses: native\n";
        let system = TestRouter::with(&[&p], &[&d], native, "").await;
        let mut client = Client::connect(system.address).await;
        client.post(path, &body).await;
        await_requests(&p, 1).await;
        await_requests(&d, 1).await;
        drop(client);
        for engine in [&p, &d] {
            engine.wait("the end of the leg", |engine| engine.cut() == 1).await;
        }
        system.settled().await;
        for engine in [&p, &d] {
            assert!(rids(engine).is_empty(), "{path}: no engine knows such an id");
        }
    }
}
