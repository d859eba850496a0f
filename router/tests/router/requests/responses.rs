//! OpenAI's Responses: engines that have the endpoint get requests as they are, and others get a chat.

use serde_json::{Value, json};

use crate::harness::client::{ClientResponse, post};
use crate::harness::engine::{Action, FakeEngine, handoff};
use crate::harness::system::TestRouter;

const TRANSLATE: &str = "    responses: translate";

fn request(stream: bool) -> Value {
    json!({"model": "alias", "max_output_tokens": 8, "instructions": "Be brief.", "stream": stream, "input": "hello"})
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    format!("data: {}\n\n", json!({"id": "chatcmpl-7", "created": 7, "model": "m", "choices": [choice]}))
}

fn usage() -> String {
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 2});
    format!("data: {}\n\n", json!({"id": "chatcmpl-7", "choices": [], "usage": usage}))
}

/// The data of each event; its name is the data's type.
fn events(answer: &ClientResponse) -> Vec<Value> {
    let text = answer.text();
    let frames = text.split_terminator("\n\n").filter(|frame| !frame.starts_with(':')).map(|frame| {
        let (name, data) = frame.split_once("\ndata: ").unwrap_or_else(|| panic!("no event: {frame}"));
        let data: Value = serde_json::from_str(data).unwrap_or_else(|_| panic!("no JSON: {frame}"));
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap_or_default()));
        data
    });
    frames.collect()
}

async fn ask(system: &TestRouter, body: &Value) -> ClientResponse {
    post(system.address, "/v1/responses", body).await
}

#[tokio::test]
async fn a_response_is_translated_for_engines_that_have_chats_only() {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let message = json!({"role": "assistant", "content": "so", "tool_calls": [call]});
    let reply = json!({"id": "chatcmpl-7", "model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "kv_transfer_params": handoff(None)});
    let (p, d) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Json(reply)).await);
    let system = TestRouter::with(&[&p], &[&d], TRANSLATE, "").await;
    let mut body = request(false);
    body["kv_transfer_params"] = json!({"remote_host": "MARK"});
    body["tools"] = json!([{"type": "function", "name": "f", "parameters": {}, "request_id": "MARK"}]);
    let answer = ask(&system, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let found = answer.json();
    assert_eq!(
        (&found["object"], &found["status"], &found["id"], found.get("kv_transfer_params")),
        (&json!("response"), &json!("completed"), &json!("resp_7"), None)
    );
    let kinds: Vec<_> = found["output"].as_array().unwrap().iter().map(|item| item["type"].clone()).collect();
    assert_eq!(kinds, ["message", "function_call"]);
    assert_eq!((&found["output"][1]["call_id"], &found["usage"]["input_tokens"]), (&json!("c1"), &json!(5)));
    assert_eq!((&found["instructions"], &found["store"]), (&json!("Be brief."), &json!(false)));
    for sent in [p.received(), d.received()].concat() {
        assert_eq!(sent.path, "/v1/chat/completions");
        assert_eq!(sent.body["messages"][0], json!({"role": "system", "content": "Be brief."}));
        assert!(!String::from_utf8_lossy(&sent.raw).contains("MARK"));
    }
    let (prefill, decode) = (p.received().pop().unwrap(), d.received().pop().unwrap());
    assert_eq!((&prefill.body["max_tokens"], &decode.body["max_tokens"]), (&json!(1), &json!(8)));
    assert_eq!(decode.body["kv_transfer_params"], handoff(Some(7)));
    system.settled().await;
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
    system.counts("baton_router_tokens_total{model=\"m\",kind=\"completion\"}", 2.0).await;
}

#[tokio::test]
async fn a_translated_stream_of_a_response_has_its_usage_and_its_end() {
    let frames = vec![
        chunk(&json!({"role": "assistant", "content": ""}), None),
        ": keep-alive\n\n".to_owned(),
        chunk(&json!({"content": "h"}), None) + &chunk(&json!({"content": "i"}), None),
        chunk(&json!({}), Some("length")),
        usage(),
        "data: [DONE]\n\n".to_owned(),
    ];
    let d = FakeEngine::always(Action::Frames(frames, true)).await;
    let system = TestRouter::with(&[], &[&d], TRANSLATE, "").await;
    let answer = ask(&system, &request(true)).await;
    let events = events(&answer);
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds, expected, "{}", answer.text());
    assert!(answer.text().contains("\n\n: ka\n\n"), "a comment keeps the connection alive");
    let response = &events[9]["response"];
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["content"][0]["text"], "hi");
    assert_eq!((&response["usage"]["output_tokens"], &response["max_output_tokens"]), (&json!(2), &json!(8)));
    assert_eq!(d.received()[0].body["stream_options"]["include_usage"], true);
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn a_translated_stream_that_breaks_ends_with_a_failed_response() {
    let text = vec![chunk(&json!({"content": "hi"}), None)];
    let finished = vec![chunk(&json!({"content": "hi"}), Some("stop"))];
    for frames in [text, finished] {
        for is_clean_end in [false, true] {
            let d = FakeEngine::always(Action::Frames(frames.clone(), is_clean_end)).await;
            let system = TestRouter::with(&[], &[&d], TRANSLATE, "").await;
            let answer = ask(&system, &request(true)).await;
            assert_eq!(answer.status, 200);
            let events = events(&answer);
            let last = events.last().expect("an event");
            assert_eq!(
                (&last["type"], &last["response"]["status"], &last["response"]["error"]["code"]),
                (&json!("response.failed"), &json!("failed"), &json!("server_error"))
            );
            assert_eq!(last["response"]["output"][0]["content"][0]["text"], "hi");
            assert!(events.iter().all(|event| event["type"] != "response.completed"));
            let broken = "baton_router_requests_total{model=\"m\",outcome=\"stream_broken\"}";
            system.counts(broken, 1.0).await;
        }
    }
}

#[tokio::test]
async fn what_a_chat_does_not_have_is_refused_by_the_names_of_the_request() {
    let refusal = json!({"error": {"message": "`max_tokens` is too large", "param": "max_tokens",
        "type": "invalid_request_error"}});
    let d = FakeEngine::always(Action::Refuse(400, refusal)).await;
    let system = TestRouter::with(&[], &[&d], TRANSLATE, "").await;
    for (name, value) in [
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!("conv_1")),
        ("background", json!(true)),
        ("max_output_tokens", json!(0)),
        ("input", json!(7)),
        ("top_p", json!(2)),
    ] {
        let mut body = request(false);
        body[name] = value;
        let answer = ask(&system, &body).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(name)),
            "{}",
            answer.text()
        );
    }
    let mut body = request(false);
    body["tools"] = json!([{"type": "web_search"}]);
    assert_eq!(ask(&system, &body).await.json()["error"]["param"], "tools[0].type");
    assert!(d.received().is_empty(), "no engine has received any of them");
    let answer = ask(&system, &request(false)).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"], &answer.json()["error"]["message"]),
        (400, &json!("max_output_tokens"), &json!("`max_output_tokens` is too large"))
    );
    let aborted = json!({"id": "x.0123456789abcdef", "choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]});
    let aborting = FakeEngine::always(Action::Json(aborted)).await;
    let system = TestRouter::with(&[], &[&aborting], TRANSLATE, "").await;
    assert_eq!(ask(&system, &request(false)).await.status, 502, "an incomplete response is none");
}

#[tokio::test]
async fn the_router_learns_which_engines_have_responses() {
    let chat =
        json!({"id": "chatcmpl-7", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]});
    let d = FakeEngine::always(Action::Hang).await.with_rule(move |request| {
        let lacks = request.path == "/v1/responses";
        Some(if lacks { Action::Refuse(404, json!({})) } else { Action::Json(chat.clone()) })
    });
    let system = TestRouter::with(&[], &[&d], "", "").await;
    for _ in 0..2 {
        assert_eq!(ask(&system, &request(false)).await.json()["object"], "response");
    }
    let received = d.received();
    let paths: Vec<_> = received.iter().map(|request| request.path.as_str()).collect();
    assert_eq!(paths, ["/v1/responses", "/v1/chat/completions", "/v1/chat/completions"], "asked once");
    // By this header Baton's engines know the question of a router, which translates for them.
    assert_eq!(received[0].body, json!({}));
    assert!(received[0].headers.contains_key("x-baton-router-settles"));
    let native = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        let is_question = request.body == json!({});
        let reply = json!({"object": "response", "output": [{}], "status": "completed"});
        Some(if is_question { Action::Refuse(400, json!({})) } else { Action::Json(reply) })
    });
    let system = TestRouter::with(&[], &[&native], "", "").await;
    for _ in 0..2 {
        assert_eq!(ask(&system, &request(false)).await.status, 200);
    }
    let paths: Vec<_> = native.received().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/v1/responses"; 3]);
}
