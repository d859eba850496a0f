//! A decode engine that aborts a request by itself, as stock vLLM does while it shuts down: status 200, the finish reason
//! `abort` and no content. The handoff is spent, so the next engine recomputes the prompt.

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
