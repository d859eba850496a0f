//! A decode engine that aborts a request by itself, as stock vLLM does while it shuts down: status 200, the finish reason
//! `abort` and no content. The handoff is spent, so the next engine recomputes the prompt.
//!
//! In Messages the abort is an end without `stop_reason`, and in Responses the status `cancelled`.

use serde_json::{Value, json};

use crate::harness::client::{completion, post};
use crate::harness::engine::{Action, FakeEngine, event, handoff};
use crate::harness::system::TestRouter;
use crate::operations::health::standing;

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "stream": true})
}

fn frame(choice: &Value) -> String {
    format!("data: {}\n\n", json!({"id": "cmpl-1-0", "choices": [choice]}))
}

/// The stream of an aborted chat, each event in a write of its own.
fn aborted_chat() -> Action {
    let role = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
    let end = json!({"index": 0, "delta": {"content": ""}, "finish_reason": "abort"});
    Action::Frames(vec![frame(&role), frame(&end), "data: [DONE]\n\n".to_owned()], true)
}

fn aborted_completion() -> Action {
    let end = json!({"index": 0, "text": "", "finish_reason": "abort"});
    Action::Frames(vec![frame(&end), "data: [DONE]\n\n".to_owned()], true)
}

fn aborted_whole() -> Action {
    Action::Json(json!({"id": "cmpl-1-0", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}}))
}

#[tokio::test]
async fn a_request_that_an_engine_aborts_is_recomputed_by_another() {
    for (path, body, aborts, serves) in [
        ("/v1/completions", completion(true), aborted_completion(), Action::Stream(2)),
        ("/v1/chat/completions", chat(), aborted_chat(), Action::Stream(2)),
        ("/v1/completions", completion(false), aborted_whole(), Action::Whole(2)),
    ] {
        let p = FakeEngine::always(Action::Lease(None)).await;
        let (drains, lives) = (FakeEngine::always(aborts).await, FakeEngine::always(serves).await);
        let system = TestRouter::start(&[&p], &[&drains, &lives]).await;
        // The pool takes turns, so one of two requests begins at the engine that drains.
        for _ in 0..2 {
            let answer = post(system.address, path, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(!answer.text().contains("abort"), "{}", answer.text());
        }
        system.settled().await;
        let aborted = drains.received().len();
        assert!((1..=2).contains(&aborted), "{path}: {aborted}");
        assert_eq!(standing(&system, &drains, "decode").await, "usable", "one abort is no sign of a drain");
        // A stock decode engine has notified the producer: the blocks may be another request's by now.
        let with_handoff = |engine: &FakeEngine| {
            let received = engine.received();
            received.iter().filter(|request| request.body["kv_transfer_params"] == handoff(None)).count()
        };
        assert_eq!((with_handoff(&drains), with_handoff(&lives)), (aborted, 2 - aborted), "{path}");
        assert_eq!(lives.received().len(), 2, "it computes the aborted request's prompt");
    }
}

#[tokio::test]
async fn without_another_engine_an_aborted_request_is_503_and_its_lease_is_released() {
    const HANDLE: u128 = 0xabc;
    for (body, aborts) in [
        (completion(true), aborted_completion()),
        (completion(false), aborted_whole()),
        (chat(), aborted_chat()),
    ] {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(aborts).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let answer = post(system.address, path, &body).await;
        assert_eq!(answer.status, 503, "{}", answer.text());
        assert!(answer.header("retry-after").is_some(), "{}", answer.head);
        system.settled().await;
        assert_eq!(p.releases(), [(format!("{HANDLE:032x}"), "unusable_handoff".to_owned())]);
    }
}

#[tokio::test]
async fn an_abort_after_content_or_by_a_baton_engine_is_passed_on() {
    let text = json!({"index": 0, "text": "a", "finish_reason": null});
    let end = json!({"index": 0, "text": "", "finish_reason": "abort"});
    let marked = frame(&end).replace("cmpl-1-0", "cmpl-1.0123456789abcdef");
    for frames in [vec![frame(&text), frame(&end)], vec![event(0), frame(&end)], vec![marked]] {
        let whole = frames.concat() + "data: [DONE]\n\n";
        let sent = frames.into_iter().chain(["data: [DONE]\n\n".to_owned()]).collect();
        let d = FakeEngine::always(Action::Frames(sent, true)).await;
        let system = TestRouter::start(&[], &[&d]).await;
        let answer = post(system.address, "/v1/completions", &completion(true)).await;
        assert_eq!((answer.status, answer.text()), (200, whole));
    }
}

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const NATIVE: &str = "    messages: native\n    responses: native";

/// How far an engine gets with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    AbortedBeforeContent,
    AbortedAfterContent,
    Complete,
}

fn native(path: &str, stream: bool) -> Value {
    match path {
        MESSAGES => json!({"model": "m", "max_tokens": 8, "stream": stream,
            "messages": [{"role": "user", "content": "x"}]}),
        _ => json!({"model": "m", "input": "x", "stream": stream}),
    }
}

/// The reply of an engine that has the endpoint, as vLLM sends it. Each event is in a write of its own.
fn native_reply(path: &str, stream: bool, progress: Progress) -> Action {
    let is_complete = progress == Progress::Complete;
    let has_content = progress != Progress::AbortedBeforeContent;
    let reason = if is_complete { json!("end_turn") } else { Value::Null };
    let usage = json!({"input_tokens": 5, "output_tokens": u8::from(has_content)});
    let status = if is_complete { "completed" } else { "cancelled" };
    let output = if has_content { json!([{"type": "message"}]) } else { json!([]) };
    let response =
        json!({"id": "resp_1", "object": "response", "status": status, "output": output, "usage": usage});
    if !stream {
        // A whole message has no `null`.
        let mut message = json!({"id": "chatcmpl-7", "type": "message", "content": output, "usage": usage});
        if is_complete {
            message["stop_reason"] = reason;
        }
        return Action::Json(if path == MESSAGES { message } else { response });
    }
    let (start, content, end) = if path == MESSAGES {
        let content = vec![
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
            json!({"type": "content_block_stop", "index": 0}),
        ];
        let end = vec![
            json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": usage}),
            json!({"type": "message_stop"}),
        ];
        (json!({"type": "message_start", "message": {"content": [], "stop_reason": null}}), content, end)
    } else {
        let created = json!({"status": "in_progress", "output": [], "usage": null});
        (
            json!({"type": "response.created", "response": created}),
            vec![json!({"type": "response.output_text.delta", "delta": "hi"})],
            vec![json!({"type": "response.completed", "response": response})],
        )
    };
    let content = if has_content { content } else { Vec::new() };
    let named = |data: Value| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().expect("a type"));
    Action::Frames([start].into_iter().chain(content).chain(end).map(named).collect(), true)
}

#[tokio::test]
async fn an_abort_of_a_message_or_a_response_is_recomputed_by_another_engine() {
    for (path, stream, progress) in [
        (MESSAGES, true, Progress::AbortedBeforeContent),
        (MESSAGES, false, Progress::AbortedBeforeContent),
        (MESSAGES, false, Progress::AbortedAfterContent),
        (RESPONSES, true, Progress::AbortedBeforeContent),
        (RESPONSES, false, Progress::AbortedBeforeContent),
        (RESPONSES, false, Progress::AbortedAfterContent),
    ] {
        let p = FakeEngine::always(Action::Lease(None)).await;
        let drains = FakeEngine::always(native_reply(path, stream, progress)).await;
        let lives = FakeEngine::always(native_reply(path, stream, Progress::Complete)).await;
        let system = TestRouter::with(&[&p], &[&drains, &lives], NATIVE, "").await;
        for _ in 0..2 {
            let answer = post(system.address, path, &native(path, stream)).await;
            let end = if path == MESSAGES { "end_turn" } else { "completed" };
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            assert!(answer.text().contains(end), "{path}: {}", answer.text());
            assert!(!answer.text().contains("cancelled"), "{path}: {}", answer.text());
        }
        system.settled().await;
        assert_eq!(lives.received().len(), 2, "{path}: it computes the aborted request's prompt");
        assert_eq!(standing(&system, &drains, "decode").await, "usable", "one abort is no sign of a drain");
    }
}

#[tokio::test]
async fn without_another_engine_an_aborted_message_or_response_is_503() {
    for path in [MESSAGES, RESPONSES] {
        for stream in [true, false] {
            let d = FakeEngine::always(native_reply(path, stream, Progress::AbortedBeforeContent)).await;
            let system = TestRouter::with(&[], &[&d], NATIVE, "").await;
            let answer = post(system.address, path, &native(path, stream)).await;
            assert_eq!(answer.status, 503, "{path}: {}", answer.text());
            assert_eq!(answer.json()["type"] == "error", path == MESSAGES, "{}", answer.text());
            system.settled().await;
        }
    }
}

#[tokio::test]
async fn an_abort_after_content_of_a_message_or_a_response_is_an_error_event() {
    for (path, last) in [(MESSAGES, "message_stop"), (RESPONSES, "response.completed")] {
        let d = FakeEngine::always(native_reply(path, true, Progress::AbortedAfterContent)).await;
        let system = TestRouter::with(&[], &[&d], NATIVE, "").await;
        let answer = post(system.address, path, &native(path, true)).await;
        let text = answer.text();
        assert_eq!(answer.status, 200, "{text}");
        assert!(text.contains("\"hi\"") && !text.contains(last), "{text}");
        assert!(text.contains("event: error") && text.contains("\"error\""), "{text}");
        system.counts("baton_router_requests_total{model=\"m\",outcome=\"stream_broken\"}", 1.0).await;
    }
}

/// A proxy that ends a response in order although its engine is gone.
#[tokio::test]
async fn a_response_without_its_last_event_ends_with_an_error() {
    for is_clean_end in [true, false] {
        let delta = json!({"type": "response.output_text.delta", "delta": "hi"});
        let frames = vec![format!("event: response.output_text.delta\ndata: {delta}\n\n")];
        let d = FakeEngine::always(Action::Frames(frames, is_clean_end)).await;
        let system = TestRouter::start(&[], &[&d]).await;
        let answer = post(system.address, RESPONSES, &native(RESPONSES, true)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.text().contains("\"error\""), "{}", answer.text());
        system.counts("baton_router_requests_total{model=\"m\",outcome=\"stream_broken\"}", 1.0).await;
    }
}
