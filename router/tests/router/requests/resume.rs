//! A decode engine that dies during a stream: another engine continues, and the client gets one response.

use baton_router::NewKey;
use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, event};
use crate::harness::system::TestRouter;
use crate::harness::tokens;
use crate::harness::tokens::{StreamContent, read};

const HANDLE: u128 = 0xabc;

pub(crate) fn streamed(extra: Value) -> Value {
    let mut body = json!({"model": "m", "prompt": "once upon a time", "max_tokens": 12, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true}});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn chat(extra: Value) -> Value {
    let mut body = streamed(extra);
    body.as_object_mut().unwrap().remove("prompt");
    body["messages"] = json!([{"role": "user", "content": "tell me"}]);
    body
}

/// Computes, and dies after this many frames of its first response, in the middle of the next one.
fn dying(name: &'static str, after: usize) -> impl Fn(&ReceivedRequest) -> Option<Action> + Send + 'static {
    let died = std::sync::atomic::AtomicBool::new(false);
    move |request| {
        if !request.path.ends_with("/completions") {
            return (request.path == "/v1/models")
                .then(|| Action::Json(json!({"data": [{"id": "m", "max_model_len": 40}]})));
        }
        let answer = tokens::answer(request, name);
        if died.swap(true, std::sync::atomic::Ordering::SeqCst) {
            return Some(answer);
        }
        let Action::Frames(mut frames, _) = answer else { return Some(answer) };
        if after >= frames.len() {
            return Some(Action::Frames(frames, true));
        }
        frames.truncate(after + 1);
        let half = frames.pop().map(|frame| frame[..frame.len() / 2].to_owned());
        frames.extend(half);
        Some(Action::Frames(frames, false))
    }
}

pub(crate) async fn engine(name: &'static str, after: usize) -> FakeEngine {
    FakeEngine::always(Action::Hang).await.with_rule(dying(name, after))
}

pub(crate) const NEVER: usize = usize::MAX;

/// The response of an engine that does not die.
async fn uninterrupted(path: &str, body: &Value) -> StreamContent {
    let d = engine("first", NEVER).await;
    let system = TestRouter::start(&[], &[&d]).await;
    read(&post(system.address, path, body).await.text())
}

#[tokio::test]
async fn a_stream_whose_decode_engine_dies_is_continued_by_another() {
    for (path, body) in [("/v1/completions", streamed(json!({}))), ("/v1/chat/completions", chat(json!({})))]
    {
        let expected = uninterrupted(path, &body).await;
        assert_eq!((expected.finishes, expected.dones, expected.text.len()), (1, 1, 12));
        for after in 0..16 {
            let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
            let (dies, lives) = (engine("first", after).await, engine("second", NEVER).await);
            let system = TestRouter::with(&[&p], &[&dies, &lives], "    resume: true", "").await;
            let answer = read(&post(system.address, path, &body).await.text());
            if after == 0 {
                // Nothing was sent, so the other engine's response is relayed under its own id.
                assert_eq!((&answer.text, answer.dones, answer.errors), (&expected.text, 1, 0), "{path}");
            } else {
                assert_eq!(answer, expected, "{path} after {after} frames");
            }
            system.settled().await;
            assert_eq!(p.received().len(), 1, "one prefill");
            // The first engine had sent nothing: the second one can use the handoff.
            let handed = |request: &ReceivedRequest| request.body.get("kv_transfer_params").is_some();
            assert!(
                lives.received().iter().all(|request| handed(request) == (after == 0)),
                "{path} after {after}"
            );
            let ended = "baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}";
            system.counts(ended, 1.0).await;
        }
    }
}

#[tokio::test]
async fn a_chat_without_a_bound_may_fill_the_rest_of_the_context() {
    let mut body = chat(json!({}));
    body.as_object_mut().unwrap().remove("max_tokens");
    body["messages"] = json!([]);
    // This engine generates 16 tokens without a limit in the request; the next one gets the rest of its context as
    // limit.
    let (dies, lives) = (engine("first", 4).await, engine("second", NEVER).await);
    let system = TestRouter::with(&[], &[&dies, &lives], "    resume: true", "").await;
    assert_eq!(post(system.address, "/v1/chat/completions", &body).await.status, 400, "no messages");
    body["messages"] = json!([{"role": "user", "content": ""}]);
    let answer = read(&post(system.address, "/v1/chat/completions", &body).await.text());
    assert_eq!((answer.dones, answer.errors, answer.finishes), (1, 0, 1), "{answer:?}");
    let requests = lives.received();
    let prompt = requests.last().unwrap().body["prompt"].as_array().unwrap().len() as u64;
    assert_eq!(requests.last().unwrap().body["max_tokens"], 40 - prompt);
}

#[tokio::test]
async fn several_engines_in_a_row_may_die() {
    let body = streamed(json!({}));
    let expected = uninterrupted("/v1/completions", &body).await;
    // Each engine dies once; the third attempt is at the first engine again.
    let (a, b) = (engine("first", 3).await, engine("second", 2).await);
    let system = TestRouter::with(&[], &[&a, &b], "    resume: true", "").await;
    let answer = read(&post(system.address, "/v1/completions", &body).await.text());
    assert_eq!(answer, expected);
    system.counts("baton_router_resumes_total{result=\"resumed\"}", 2.0).await;
}

/// Dies after this many frames of every response.
async fn fatal(name: &'static str, after: usize) -> FakeEngine {
    FakeEngine::always(Action::Hang).await.with_rule(move |request| {
        let Action::Frames(mut frames, _) = tokens::answer(request, name) else { return None };
        frames.truncate(after);
        Some(Action::Frames(frames, false))
    })
}

#[tokio::test]
async fn a_stream_that_crashes_engines_is_resumed_at_most_three_times() {
    let top = "attempts: {decode: 16}\nretries: {min_per_second: 1000}";
    let mut body = streamed(json!({}));
    body["max_tokens"] = json!(100);
    let (a, b) = (fatal("first", 3).await, fatal("second", 3).await);
    let system = TestRouter::with(&[], &[&a, &b], "    resume: true", top).await;
    let answer = read(&post(system.address, "/v1/completions", &body).await.text());
    assert_eq!((answer.errors, answer.dones, answer.finishes), (1, 1, 0), "{answer:?}");
    assert_eq!(a.received().len() + b.received().len(), 4);
    assert!(a.received().len().abs_diff(b.received().len()) < 2, "the engine that died is not the next one");
    system.counts("baton_router_resumes_total{result=\"resumed\"}", 3.0).await;
    system.settled().await;

    // Before the first event it is a failed attempt: the client reads a status, and every engine is tried once.
    let (a, b) = (fatal("first", 0).await, fatal("second", 0).await);
    let system = TestRouter::with(&[], &[&a, &b], "    resume: true", top).await;
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 502);
    assert_eq!((a.received().len(), b.received().len()), (1, 1));
    system.settled().await;
}

/// Stock vLLM's error for blocks that it could not fetch, after the head of a stream.
fn failed_in_the_stream(before: usize, code: u64) -> Vec<String> {
    let mut frames: Vec<String> = (0..before).map(event).collect();
    let error = json!({"error": {"message": "EngineCore encountered an issue at 10.0.0.7:8000",
        "type": "InternalServerError", "param": null, "code": code}});
    frames.extend([format!("data: {error}\n\n"), "data: [DONE]\n\n".to_owned()]);
    frames
}

#[tokio::test]
async fn an_engine_that_fails_in_its_stream_has_failed() {
    // Before its first event another engine gets the same handoff.
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let fails = FakeEngine::always(Action::Frames(failed_in_the_stream(0, 500), true)).await;
    let lives = FakeEngine::always(Action::Stream(2)).await;
    let system = TestRouter::with(&[&p], &[&fails, &lives], "", "").await;
    for _ in 0..4 {
        let answer = post(system.address, "/v1/completions", &streamed(json!({}))).await;
        assert_eq!((answer.status, answer.text().contains("error")), (200, false), "{}", answer.text());
    }
    assert!(!fails.received().is_empty() && lives.received().len() == 4);
    let handed = |request: &ReceivedRequest| request.body.get("kv_transfer_params").is_some();
    assert!(lives.received().iter().all(handed), "the same handoff");
    system.settled().await;

    // Alone, the failure becomes a status and not a stream.
    let system = TestRouter::with(&[&p], &[&fails], "", "").await;
    let answer = post(system.address, "/v1/completions", &streamed(json!({}))).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "bad_gateway"));
    system.settled().await;
    p.wait("the releases", |p| !p.releases().is_empty()).await;

    // A request that cannot be served gets the engine's error.
    let refuses = FakeEngine::always(Action::Frames(failed_in_the_stream(0, 400), true)).await;
    let system = TestRouter::with(&[], &[&refuses], "", "").await;
    let answer = post(system.address, "/v1/completions", &streamed(json!({}))).await;
    assert_eq!(answer.status, 400);
    assert!(!answer.text().contains("10.0.0.7"), "{}", answer.text());

    // A keep-alive comment is no event.
    let mut pinged = failed_in_the_stream(0, 400);
    pinged.insert(0, ": ping\n\n".to_owned());
    let refuses = FakeEngine::always(Action::Frames(pinged, true)).await;
    let system = TestRouter::with(&[], &[&refuses], "", "").await;
    assert_eq!(post(system.address, "/v1/completions", &streamed(json!({}))).await.status, 400);

    // In the middle it becomes one typed error without the engine's message, and counts as a broken stream.
    let breaks = FakeEngine::always(Action::Frames(failed_in_the_stream(2, 500), true)).await;
    let system = TestRouter::with(&[], &[&breaks], "", "").await;
    let text = post(system.address, "/v1/completions", &streamed(json!({}))).await.text();
    let expected = format!("{}{}", event(0), event(1));
    assert!(text.starts_with(&expected) && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!((text.matches("\"error\"").count(), text.matches("[DONE]").count()), (1, 1), "{text}");
    assert!(text.contains("bad_gateway") && !text.contains("10.0.0.7"), "{text}");
    let ended = "baton_router_requests_total{model=\"m\",outcome=\"stream_broken\",code=\"2xx\"}";
    system.counts(ended, 1.0).await;
    breaks.wait("the abort", |d| d.aborts().len() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn a_stream_ends_with_done_despite_trailing_or_missing_data() {
    for last in ["data: [DONE]\n\n: ping\n\n", "data: [DONE]\n"] {
        let d = FakeEngine::always(Action::Frames(vec![event(0), last.to_owned()], true)).await;
        let system = TestRouter::with(&[], &[&d], "", "").await;
        let text = post(system.address, "/v1/completions", &streamed(json!({}))).await.text();
        assert_eq!(text, format!("{}data: [DONE]\n\n", event(0)), "{last:?}");
        let ended = "baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}";
        system.counts(ended, 1.0).await;
    }
}

#[tokio::test]
async fn resumption_is_charged_to_the_retry_budget() {
    let (dies, lives) = (engine("first", 3).await, engine("second", NEVER).await);
    let top = "retries: {budget_percent: 0, min_per_second: 0}";
    let system = TestRouter::with(&[], &[&dies, &lives], "    resume: true", top).await;
    let answer = read(&post(system.address, "/v1/completions", &streamed(json!({}))).await.text());
    assert_eq!((answer.errors, answer.dones, answer.finishes), (1, 1, 0), "{answer:?}");
    assert!(lives.received().is_empty());
    system.counts("baton_router_resumes_total{result=\"failed\"}", 1.0).await;
}

#[tokio::test]
async fn a_stream_that_cannot_be_resumed_ends_in_one_typed_error() {
    for (extra, resume) in [(json!({"stop": ["zzz"]}), true), (json!({"n": 1}), false)] {
        let (dies, lives) = (engine("first", 3).await, engine("second", NEVER).await);
        let system = TestRouter::with(&[], &[&dies, &lives], &format!("    resume: {resume}"), "").await;
        let answer = read(&post(system.address, "/v1/completions", &streamed(extra)).await.text());
        assert_eq!((answer.errors, answer.dones, answer.finishes), (1, 1, 0), "{answer:?}");
        assert!(lives.received().is_empty());
        let count = if resume { 1.0 } else { 0.0 };
        system.counts("baton_router_resumes_total{result=\"not_allowed\"}", count).await;
    }
}

#[tokio::test]
async fn without_another_engine_the_stream_ends_in_one_typed_error() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let dies = engine("first", 3).await;
    let broken = FakeEngine::always(Action::Refuse(500, json!({"error": {"message": "x"}}))).await;
    let top = "attempts: {decode: 1}";
    let system = TestRouter::with(&[&p], &[&dies, &broken], "    resume: true", top).await;
    let answer = read(&post(system.address, "/v1/completions", &streamed(json!({}))).await.text());
    assert_eq!((answer.errors, answer.dones, answer.finishes), (1, 1, 0), "{answer:?}");
    system.counts("baton_router_resumes_total{result=\"failed\"}", 1.0).await;
    p.wait("the release", |p| p.releases().len() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn token_ids_are_requested_only_for_resumable_streams() {
    let d = engine("first", NEVER).await;
    let system = TestRouter::with(&[], &[&d], "    resume: true", "").await;
    post(system.address, "/v1/completions", &streamed(json!({}))).await;
    post(system.address, "/v1/completions", &completion(false)).await;
    let requests: Vec<_> =
        d.received().iter().map(|request| request.body.get("return_token_ids").cloned()).collect();
    assert_eq!(requests, [Some(json!(true)), None]);
}

#[tokio::test]
async fn a_translated_message_is_continued_like_a_chat() {
    let body = json!({"model": "m", "max_tokens": 12, "temperature": 0, "stream": true,
        "messages": [{"role": "user", "content": "tell me"}]});
    let ask = async |engines: &[&FakeEngine]| -> (String, Vec<String>) {
        let system = TestRouter::with(&[], engines, "    messages: translate\n    resume: true", "").await;
        let stream = post(system.address, "/v1/messages", &body).await.text();
        let (mut text, mut others) = (String::new(), Vec::new());
        for data in stream.lines().filter_map(|line| line.strip_prefix("data: ")) {
            let event: Value = serde_json::from_str(data).expect("JSON");
            match event["delta"]["text"].as_str() {
                Some(part) => text.push_str(part),
                None => others.push(event.to_string()),
            }
        }
        (text, others)
    };
    let expected = ask(&[&engine("first", NEVER).await]).await;
    assert_eq!(
        (expected.0.len(), expected.1.last().map(String::as_str)),
        (12, Some(r#"{"type":"message_stop"}"#))
    );
    for after in 1..16 {
        let (dies, lives) = (engine("first", after).await, engine("second", NEVER).await);
        assert_eq!(ask(&[&dies, &lives]).await, expected, "after {after} frames");
    }
}

#[tokio::test]
async fn a_translated_response_is_continued_like_a_chat() {
    let body =
        json!({"model": "m", "max_output_tokens": 12, "temperature": 0, "stream": true, "input": "tell me"});
    let ask = async |engines: &[&FakeEngine]| -> (String, Value) {
        let system = TestRouter::with(&[], engines, "    responses: translate\n    resume: true", "").await;
        let stream = post(system.address, "/v1/responses", &body).await.text();
        let data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
        let mut events: Vec<Value> = data.map(|data| serde_json::from_str(data).expect("JSON")).collect();
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number, "{event}");
        }
        let added = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let text = added.filter_map(|event| event["delta"].as_str()).collect();
        (text, events.pop().expect("an event"))
    };
    let expected = ask(&[&engine("first", NEVER).await]).await;
    assert_eq!((expected.0.len(), &expected.1["type"]), (12, &json!("response.incomplete")));
    assert_eq!(expected.1["response"]["output"][0]["content"][0]["text"], expected.0);
    for after in 1..16 {
        let (dies, lives) = (engine("first", after).await, engine("second", NEVER).await);
        let (text, mut last) = ask(&[&dies, &lives]).await;
        assert_eq!(text, expected.0, "after {after} frames");
        // The sequence number counts the pieces, which the break has joined or not.
        last["sequence_number"] = expected.1["sequence_number"].clone();
        assert_eq!(last, expected.1, "after {after} frames");
    }
}

#[tokio::test]
async fn a_continuation_has_its_owners_fields_and_no_deadline_for_a_first_token() {
    let key = NewKey::make();
    let keys =
        format!("auth:\n  keys:\n    - {{id: a, hash: '{}', tenant: a, priority_max: low}}\n", key.hash);
    for (model, priority) in
        [("    resume: true\n    priority_scheduling: true\n", json!(1)), ("    resume: true\n", json!(null))]
    {
        let (dies, lives) = (engine("first", 4).await, engine("second", NEVER).await);
        let system = TestRouter::with(&[], &[&dies, &lives], model, &keys).await;
        let mut client = Client::connect(system.address).await;
        let headers = format!(
            "Authorization: Bearer {}\r\nx-stainless-read-timeout: 30\r\nx-request-timeout-ms: 60000\r\n",
            key.key
        );
        let body = streamed(json!({"cache_salt": "own", "priority": -3}));
        client.post_bytes("/v1/completions", &headers, body.to_string().as_bytes()).await;
        let answer = read(&client.answer().await.text());
        assert_eq!((answer.dones, answer.errors, answer.finishes), (1, 0, 1), "{answer:?}");
        let sent = |engine: &FakeEngine| {
            engine.received().into_iter().find(|request| request.path == "/v1/completions").unwrap()
        };
        let (first, next) = (sent(&dies), sent(&lives));
        assert!(next.body["prompt"].is_array(), "it continues");
        assert_eq!((&first.body["priority"], &next.body["priority"]), (&priority, &priority));
        assert_eq!(next.body["cache_salt"], first.body["cache_salt"]);
        assert_ne!(next.body["cache_salt"], "own", "tenants have caches of their own");
        let times = |request: &ReceivedRequest| {
            ["x-first-token-timeout-ms", "x-request-timeout-ms"]
                .map(|name| request.headers.contains_key(name))
        };
        assert_eq!((times(&first), times(&next)), ([true, true], [false, true]));
        system.settled().await;
    }
}
