//! Anthropic's Messages: engines that have the endpoint get requests as they are, and others get a chat.

use baton_router::NewKey;
use serde_json::{Value, json};

use crate::harness::client::{Client, ClientResponse, get, post};
use crate::harness::engine::{Action, FakeEngine, handoff};
use crate::harness::system::TestRouter;

const NATIVE: &str = "    messages: native";
const TRANSLATE: &str = "    messages: translate";

fn request(stream: bool) -> Value {
    json!({"model": "alias", "max_tokens": 8, "system": "Be brief.", "stream": stream,
        "messages": [{"role": "user", "content": "hello"}]})
}

fn event(data: &Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().expect("a type"))
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    format!("data: {}\n\n", json!({"id": "chatcmpl-7", "model": "m", "choices": [choice]}))
}

/// The events of a stream that an engine sends: all, or those before the last one.
fn message_events(is_complete: bool) -> Vec<String> {
    let usage = json!({"input_tokens": 5, "output_tokens": 0});
    let mut events = vec![
        json!({"type": "message_start", "message": {"id": "chatcmpl-7", "content": [], "usage": usage}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"},
            "usage": {"input_tokens": 5, "output_tokens": 1}}),
    ];
    events.extend(is_complete.then(|| json!({"type": "message_stop"})));
    events.iter().map(event).collect()
}

/// The data of each event; its name is the data's type.
fn events(answer: &ClientResponse) -> Vec<Value> {
    let text = answer.text();
    let frames = text.split_terminator("\n\n").map(|frame| {
        let (name, data) = frame.split_once("\ndata: ").unwrap_or_else(|| panic!("no event: {frame}"));
        let data: Value = serde_json::from_str(data).unwrap_or_else(|_| panic!("no JSON: {frame}"));
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap_or_default()));
        data
    });
    frames.collect()
}

/// The `type` and the message of an error in Anthropic's envelope.
fn error(answer: &ClientResponse) -> (u16, String, String) {
    let body = answer.json();
    assert_eq!(
        (&body["type"], body["error"].as_object().map(serde_json::Map::len)),
        (&json!("error"), Some(2))
    );
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    assert!(answer.header("request-id").is_some());
    let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    (answer.status, text("type"), text("message"))
}

async fn ask(system: &TestRouter, body: &Value) -> ClientResponse {
    post(system.address, "/v1/messages", body).await
}

#[tokio::test]
async fn a_message_has_two_legs_and_no_internal_field_passes() {
    let reply = json!({"id": "chatcmpl-7", "type": "message", "content": [], "stop_reason": "end_turn",
        "usage": {"input_tokens": 5, "output_tokens": 1}, "kv_transfer_params": handoff(None)});
    let (p, d) =
        (FakeEngine::always(Action::Lease(None)).await, FakeEngine::always(Action::Json(reply)).await);
    let system = TestRouter::with(&[&p], &[&d], NATIVE, "").await;
    let mut body = request(false);
    body["kv_transfer_params"] = json!({"remote_host": "MARK"});
    body["request_id"] = json!("MARK");
    let mut client = Client::connect(system.address).await;
    let headers = "x-api-key: k\r\nanthropic-version: 2099-01-01\r\nanthropic-beta: x\r\n";
    client.post_bytes("/v1/messages", headers, body.to_string().as_bytes()).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, &answer.json()["kv_transfer_params"]), (200, &json!(null)));
    assert_eq!(answer.json()["stop_reason"], "end_turn");
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    let (prefill, decode) = (p.received().pop().unwrap(), d.received().pop().unwrap());
    assert_eq!((&prefill.body["max_tokens"], &prefill.body["stream"]), (&json!(1), &json!(false)));
    assert_eq!(prefill.body["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(decode.body["kv_transfer_params"], handoff(None));
    assert_eq!((&decode.body["max_tokens"], &decode.body["model"]), (&json!(8), &json!("m")));
    for sent in [prefill, decode] {
        assert_eq!((sent.path.as_str(), &sent.body["system"]), ("/v1/messages", &json!("Be brief.")));
        assert_eq!(sent.headers["authorization"], "Bearer k");
        assert!(!sent.headers.contains_key("x-api-key"));
        assert!(!String::from_utf8_lossy(&sent.raw).contains("MARK"));
    }
    system.settled().await;
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn a_stream_of_messages_passes_unchanged() {
    let (p, d) = (
        FakeEngine::always(Action::Lease(None)).await,
        FakeEngine::always(Action::Frames(message_events(true), true)).await,
    );
    let system = TestRouter::with(&[&p], &[&d], NATIVE, "").await;
    let answer = ask(&system, &request(true)).await;
    assert_eq!((answer.status, answer.text()), (200, message_events(true).concat()));
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
    system.counts("baton_router_tokens_total{model=\"m\",kind=\"completion\"}", 1.0).await;
}

/// The SDK takes a stream that is cut before `message_stop` as complete.
#[tokio::test]
async fn a_stream_without_its_last_event_ends_with_an_error_event() {
    let chat = vec![chunk(&json!({"content": "hi"}), None)];
    let finished = vec![chunk(&json!({"content": "hi"}), Some("stop"))];
    for (mode, frames) in [(NATIVE, message_events(false)), (TRANSLATE, chat), (TRANSLATE, finished)] {
        for is_clean_end in [false, true] {
            let d = FakeEngine::always(Action::Frames(frames.clone(), is_clean_end)).await;
            let system = TestRouter::with(&[], &[&d], mode, "").await;
            let answer = ask(&system, &request(true)).await;
            assert_eq!(answer.status, 200);
            let events = events(&answer);
            let last = events.last().expect("an event");
            assert_eq!(last["error"]["type"], "api_error", "{mode}: {}", answer.text());
            assert!(events.iter().all(|event| event["type"] != "message_stop"));
            assert!(!answer.text().contains("[DONE]"));
            let broken = "baton_router_requests_total{model=\"m\",outcome=\"stream_broken\"}";
            system.counts(broken, 1.0).await;
        }
    }
}

#[tokio::test]
async fn an_error_as_the_first_event_is_retried_and_as_a_later_one_is_passed() {
    let error_event =
        |kind: &str| event(&json!({"type": "error", "error": {"type": kind, "message": "at 10.0.0.1:7"}}));
    let failing = FakeEngine::always(Action::Frames(vec![error_event("api_error")], true)).await;
    let good = FakeEngine::always(Action::Frames(message_events(true), true)).await;
    let system = TestRouter::with(&[], &[&failing, &good], NATIVE, "").await;
    for _ in 0..2 {
        assert_eq!(ask(&system, &request(true)).await.text(), message_events(true).concat());
    }
    assert!(!failing.received().is_empty());
    let system = TestRouter::with(&[], &[&failing], NATIVE, "").await;
    let (status, kind, message) = error(&ask(&system, &request(true)).await);
    assert_eq!((status, kind.as_str()), (502, "api_error"));
    assert!(!message.contains("10.0.0.1"), "{message}");
    let refusing = FakeEngine::always(Action::Frames(vec![error_event("invalid_request_error")], true)).await;
    let system = TestRouter::with(&[], &[&refusing], NATIVE, "").await;
    let (status, kind, _) = error(&ask(&system, &request(true)).await);
    assert_eq!((status, kind.as_str()), (400, "invalid_request_error"));
    let mut frames = message_events(true)[..3].to_vec();
    frames.push(error_event("overloaded_error"));
    let late = FakeEngine::always(Action::Frames(frames, true)).await;
    let system = TestRouter::with(&[], &[&late], NATIVE, "").await;
    let events = events(&ask(&system, &request(true)).await);
    assert_eq!((events.len(), &events[3]["type"]), (4, &json!("error")));
}

#[tokio::test]
async fn errors_of_router_and_engines_have_anthropics_envelope() {
    let openai =
        json!({"error": {"message": "budget_tokens is too large", "type": "Bad Request", "code": 400}});
    let d = FakeEngine::always(Action::Refuse(400, openai)).await;
    let system = TestRouter::with(&[], &[&d], NATIVE, "").await;
    let (status, kind, message) = error(&ask(&system, &request(false)).await);
    assert_eq!(
        (status, kind.as_str(), message.as_str()),
        (400, "invalid_request_error", "budget_tokens is too large")
    );
    let with = |name: &str, value: Value| {
        let mut body = request(false);
        body[name] = value;
        body
    };
    for (body, status, kind) in [
        (with("model", json!("none")), 404, "not_found_error"),
        (with("max_tokens", json!(null)), 400, "invalid_request_error"),
        (with("max_tokens", json!(0)), 400, "invalid_request_error"),
        (with("messages", json!("x")), 400, "invalid_request_error"),
        (json!([]), 400, "invalid_request_error"),
    ] {
        for mode in [NATIVE, TRANSLATE] {
            let system = TestRouter::with(&[], &[&d], mode, "").await;
            let found = error(&ask(&system, &body).await);
            assert_eq!((found.0, found.1.as_str()), (status, kind), "{mode}: {body}");
        }
    }
    assert_eq!(d.received().len(), 1, "nothing invalid leaves the router");
    assert_eq!(error(&get(system.address, "/v1/messages").await).0, 405);
    let batches = post(system.address, "/v1/messages/batches", &json!({})).await;
    assert_eq!((error(&batches).0, error(&batches).1.as_str()), (404, "not_found_error"));
    let full = FakeEngine::always(Action::Refuse(503, json!({}))).await;
    let system = TestRouter::with(&[], &[&full], NATIVE, "").await;
    let answer = ask(&system, &request(false)).await;
    assert_eq!((error(&answer).0, error(&answer).1.as_str()), (503, "overloaded_error"));
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test]
async fn a_key_in_anthropics_header_is_a_key() {
    let key = NewKey::make();
    let d = FakeEngine::always(Action::Frames(message_events(true), true)).await;
    let top = format!("auth:\n  keys:\n    - {{id: a, hash: '{}', tenant: t}}\n", key.hash);
    let system = TestRouter::with(&[], &[&d], NATIVE, &top).await;
    let ask = async |headers: String| {
        let mut client = Client::connect(system.address).await;
        client.post_bytes("/v1/messages", &headers, request(true).to_string().as_bytes()).await;
        client.answer().await
    };
    assert_eq!(ask(format!("x-api-key: {}\r\n", key.key)).await.status, 200);
    let sent = d.received().pop().unwrap();
    assert!(!sent.headers.contains_key("authorization") && !sent.headers.contains_key("x-api-key"));
    for headers in [
        String::new(),
        "x-api-key: wrong\r\n".to_owned(),
        format!("x-api-key: {}\r\nauthorization: Bearer wrong\r\n", key.key),
        format!("x-api-key: {0}\r\nx-api-key: {0}\r\n", key.key),
    ] {
        let answer = ask(headers).await;
        assert_eq!((error(&answer).0, error(&answer).1.as_str()), (401, "authentication_error"));
    }
}

#[tokio::test]
async fn tokens_are_counted_by_one_engine_without_a_prefill() {
    let counted = json!({"input_tokens": 9, "context_management": {"original_input_tokens": 9}});
    let (p, d) =
        (FakeEngine::always(Action::Hang).await, FakeEngine::always(Action::Json(counted.clone())).await);
    let body = json!({"model": "alias", "messages": [{"role": "user", "content": "hello"}], "system": "s"});
    for (mode, path, expected) in [
        (NATIVE, "/v1/messages/count_tokens", counted),
        // The scripted engine answers so on paths outside of `/v1`.
        (TRANSLATE, "/tokenize", json!({"input_tokens": 3})),
    ] {
        let system = TestRouter::with(&[&p], &[&d], mode, "").await;
        let answer = post(system.address, "/v1/messages/count_tokens", &body).await;
        assert_eq!((answer.status, answer.json()), (200, expected));
        let sent = d.all().into_iter().rfind(|request| request.path == path).expect("a request");
        assert_eq!(sent.body["model"], "m");
        let is_chat = sent.body["messages"][0]["role"] == "system";
        assert_eq!(is_chat, mode == TRANSLATE);
    }
    assert!(p.received().is_empty());
    let lacking = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        (request.path == "/tokenize").then(|| Action::Refuse(404, json!({"detail": "Not Found"})))
    });
    let system = TestRouter::with(&[], &[&lacking], TRANSLATE, "").await;
    let refused = post(system.address, "/v1/messages/count_tokens", &body).await;
    let (status, kind, message) = error(&refused);
    assert_eq!((status, kind.as_str()), (404, "not_found_error"));
    assert!(message.contains("do not have this endpoint"), "{message}");
}

#[tokio::test]
async fn a_message_is_translated_for_engines_that_have_chats_only() {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let message = json!({"role": "assistant", "content": "so", "tool_calls": [call]});
    let reply = json!({"id": "chatcmpl-7", "model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]});
    let (p, d) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Json(reply)).await);
    let system = TestRouter::with(&[&p], &[&d], TRANSLATE, "").await;
    let mut body = request(false);
    body["tools"] = json!([{"name": "f", "input_schema": {"type": "object"}, "kv_transfer_params": "MARK"}]);
    let answer = ask(&system, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let found = answer.json();
    assert_eq!(
        (&found["type"], &found["stop_reason"], &found["id"]),
        (&json!("message"), &json!("tool_use"), &json!("msg_7"))
    );
    assert_eq!(found["content"][1], json!({"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}));
    assert_eq!(found["usage"]["input_tokens"], 5);
    for sent in [p.received(), d.received()].concat() {
        assert_eq!(sent.path, "/v1/chat/completions");
        assert_eq!(sent.body["messages"][0], json!({"role": "system", "content": "Be brief."}));
        assert!(!String::from_utf8_lossy(&sent.raw).contains("MARK"));
    }
    assert_eq!(d.received()[0].body["kv_transfer_params"], handoff(Some(7)));
    system.settled().await;
    let refusing =
        FakeEngine::always(Action::Refuse(400, json!({"error": {"message": "reads text only"}}))).await;
    let system = TestRouter::with(&[], &[&refusing], TRANSLATE, "").await;
    let (status, kind, message) = error(&ask(&system, &body).await);
    assert_eq!((status, kind.as_str(), message.as_str()), (400, "invalid_request_error", "reads text only"));
    let aborted = json!({"id": "x.0123456789abcdef", "choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]});
    let aborting = FakeEngine::always(Action::Json(aborted)).await;
    let system = TestRouter::with(&[], &[&aborting], TRANSLATE, "").await;
    assert_eq!(error(&ask(&system, &body).await).0, 502, "an incomplete response is none");
}

#[tokio::test]
async fn a_translated_stream_has_its_usage_and_its_end() {
    let usage =
        json!({"id": "chatcmpl-7", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}});
    let frames = vec![
        chunk(&json!({"role": "assistant", "content": ""}), None),
        ": keep-alive\n\n".to_owned(),
        chunk(&json!({"content": "h"}), None) + &chunk(&json!({"content": "i"}), None),
        chunk(&json!({}), Some("length")),
        format!("data: {usage}\n\n"),
        "data: [DONE]\n\n".to_owned(),
    ];
    let d = FakeEngine::always(Action::Frames(frames, true)).await;
    let system = TestRouter::with(&[], &[&d], TRANSLATE, "").await;
    let answer = ask(&system, &request(true)).await;
    let events = events(&answer);
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let delta = "content_block_delta";
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        delta,
        delta,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expected, "{}", answer.text());
    assert_eq!(
        (&events[6]["delta"]["stop_reason"], &events[6]["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(2))
    );
    assert_eq!(d.received()[0].body["stream_options"]["include_usage"], true);
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn the_router_learns_which_engines_have_messages() {
    let chat =
        json!({"id": "chatcmpl-7", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]});
    for status in [404, 405, 501] {
        let chat = chat.clone();
        let d = FakeEngine::always(Action::Hang).await.with_rule(move |request| {
            let lacks = request.path == "/v1/messages";
            Some(if lacks {
                Action::Refuse(status, json!({"detail": "Not Found"}))
            } else {
                Action::Json(chat.clone())
            })
        });
        let system = TestRouter::with(&[], &[&d], "", "").await;
        for _ in 0..2 {
            assert_eq!(ask(&system, &request(false)).await.json()["type"], "message");
        }
        let paths: Vec<_> = d.received().into_iter().map(|request| request.path).collect();
        assert_eq!(paths, ["/v1/messages", "/v1/chat/completions", "/v1/chat/completions"], "asked once");
    }
    let native = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        let is_question = request.body == json!({});
        let reply = json!({"type": "message", "content": [], "stop_reason": "end_turn"});
        Some(if is_question { Action::Refuse(400, json!({})) } else { Action::Json(reply) })
    });
    let system = TestRouter::with(&[], &[&native], "", "").await;
    for _ in 0..2 {
        assert_eq!(ask(&system, &request(false)).await.status, 200);
    }
    let paths: Vec<_> = native.received().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/v1/messages"; 3]);
}

#[tokio::test]
async fn only_batons_engines_get_a_budget_of_reasoning() {
    let chat =
        json!({"id": "chatcmpl-7", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]});
    let mut body = request(false);
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
    let batons =
        json!({"error": {"code": "unsupported_endpoint", "message": "this server does not have it"}});
    for (mode, lacks, budget) in [
        // It leaves a token of the request's eight for the content.
        ("", batons.clone(), json!(7)),
        ("", json!({"detail": "Not Found"}), Value::Null),
        (TRANSLATE, batons, Value::Null),
    ] {
        let chat = chat.clone();
        let d = FakeEngine::always(Action::Hang).await.with_rule(move |request| {
            let is_question = request.path == "/v1/messages";
            Some(if is_question { Action::Refuse(404, lacks.clone()) } else { Action::Json(chat.clone()) })
        });
        let system = TestRouter::with(&[], &[&d], mode, "").await;
        assert_eq!(ask(&system, &body).await.json()["type"], "message");
        let sent = d.received().pop().expect("a chat").body;
        assert_eq!(sent["thinking_token_budget"], budget, "{mode}");
        assert_eq!(sent["chat_template_kwargs"]["enable_thinking"], true);
    }
}

#[tokio::test]
async fn an_engine_that_gets_no_requests_is_not_asked_for_messages() {
    let chat =
        json!({"id": "chatcmpl-7", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]});
    let drains = FakeEngine::always(Action::Hang).await;
    let d = FakeEngine::always(Action::Refuse(404, json!({"detail": "Not Found"}))).await;
    let d = d.with_rule(move |request| {
        (request.path == "/v1/chat/completions").then(|| Action::Json(chat.clone()))
    });
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         models: [{{name: m, aliases: [alias], decode: {{engines: [{{url: '{}', drain: true}}, {{url: '{}'}}]}}}}]\n",
        drains.url(),
        d.url()
    ))
    .await;
    assert_eq!(ask(&system, &request(false)).await.json()["type"], "message");
    assert!(drains.received().is_empty());
}

#[tokio::test]
async fn an_engine_without_the_endpoint_is_no_broken_engine() {
    let d = FakeEngine::always(Action::Refuse(501, json!({"error": {"message": "not supported yet"}}))).await;
    let system = TestRouter::with(&[], &[&d], NATIVE, "").await;
    for _ in 0..8 {
        let (status, kind, message) = error(&ask(&system, &request(false)).await);
        assert_eq!((status, kind.as_str()), (404, "not_found_error"));
        assert!(message.contains("do not have this endpoint"), "{message}");
    }
    assert_eq!(d.received().len(), 8, "it stays in rotation");
}

#[tokio::test]
async fn a_response_that_depends_on_its_engine_has_no_prefill_leg() {
    let params = handoff(None);
    let last =
        json!({"type": "response.completed", "response": {"id": "resp_1", "kv_transfer_params": params}});
    let (p, d) = (
        FakeEngine::always(Action::Lease(None)).await,
        FakeEngine::always(Action::Frames(vec![event(&last)], true)).await,
    );
    let system = TestRouter::with(&[&p], &[&d], "    responses: native", "").await;
    let answer =
        post(system.address, "/v1/responses", &json!({"model": "m", "input": "a", "stream": true})).await;
    let found = events(&answer);
    assert_eq!(found[0]["response"], json!({"id": "resp_1", "kv_transfer_params": null}));
    assert_eq!((p.received().len(), &p.received()[0].body["store"]), (1, &json!(false)));
    for field in [
        json!({"previous_response_id": "resp_1"}),
        json!({"background": true}),
        json!({"tools": [{"type": "web_search"}]}),
    ] {
        let mut body = json!({"model": "m", "input": "a", "stream": true});
        body.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        assert_eq!(post(system.address, "/v1/responses", &body).await.status, 200);
    }
    assert_eq!((p.received().len(), d.received().len()), (1, 4));
    system.counts("baton_router_disagg_decisions_total{reason=\"engine_state\"}", 3.0).await;
}
