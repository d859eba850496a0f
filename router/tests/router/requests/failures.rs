//! Engines that refuse, fail, are unreachable or die: another engine or one clear error, and no lease is left.

use serde_json::json;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, event};
use crate::harness::system::TestRouter;
use crate::operations::health::standing;

const HANDLE: u128 = 0xabc;

fn released(cause: &str) -> Vec<(String, String)> {
    vec![(format!("{HANDLE:032x}"), cause.to_owned())]
}

fn error(code: &str) -> serde_json::Value {
    json!({"error": {"message": "said so", "type": "invalid_request_error", "param": "prompt", "code": code}})
}

async fn down() -> FakeEngine {
    FakeEngine::always(Action::Hang).await
}

#[tokio::test]
async fn a_decode_refusal_is_forwarded_and_the_lease_released() {
    for status in [400, 404, 413, 422] {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Refuse(status, error("context_length_exceeded"))).await;
        let other = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&p], &[&d, &other]).await;
        let answer = post(system.address, "/v1/completions", &completion(true)).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, "context_length_exceeded"));
        assert_eq!(answer.json()["error"]["message"], "said so");
        p.wait("the release", |p| p.releases() == released("decode_refused")).await;
        system.settled().await;
        assert!(other.all().is_empty() && p.aborts().is_empty() && d.aborts().is_empty());
    }
}

#[tokio::test]
async fn a_failed_decode_engine_is_replaced_with_the_same_handoff() {
    let no = |status| Action::Refuse(status, json!({"error": {"message": "x"}}));
    for trouble in [no(500), no(503), no(429), no(529), no(409), no(412), Action::Close] {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let first = FakeEngine::always(trouble.clone()).await;
        let second = FakeEngine::always(Action::Whole(5)).await;
        let system = TestRouter::start(&[&p], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 200, "{trouble:?}: {}", answer.text());
        let (a, b) = (&first.received()[0], &second.received()[0]);
        assert_eq!(a.body, b.body, "the same handoff");
        assert_eq!(p.received().len(), 1, "no second prefill");
        system.settled().await;
        assert!(p.releases().is_empty());
        let aborted = if matches!(trouble, Action::Close) { 1 } else { 0 };
        assert_eq!(first.aborts().len(), aborted, "{trouble:?}");
    }
}

#[tokio::test]
async fn a_decode_engine_that_is_down_is_replaced() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let (dead, live) = (down().await, FakeEngine::always(Action::Whole(5)).await);
    let system = TestRouter::start(&[&p], &[&dead, &live]).await;
    dead.die().await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    system.settled().await;
    assert!(p.releases().is_empty());
}

#[tokio::test]
async fn without_a_decode_engine_the_client_gets_one_error_and_the_lease_is_released() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let (a, b) = (down().await, down().await);
    let system = TestRouter::start(&[&p], &[&a, &b]).await;
    let (a_at, b_at) = (a.address.to_string(), b.address.to_string());
    a.die().await;
    b.die().await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    assert!(answer.header("retry-after").is_some());
    assert!(!answer.text().contains(&a_at) && !answer.text().contains(&b_at), "no addresses");
    p.wait("the release", |p| p.releases() == released("decode_unreachable")).await;
    system.settled().await;
    assert_eq!(p.received().len(), 1);
}

#[tokio::test]
async fn full_decode_engines_are_429_with_retry_after() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Refuse(429, json!({"error": {"message": "queue full"}}))).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (429, "overloaded"));
    assert!(answer.header("retry-after").is_some());
    p.wait("the release", |p| p.releases() == released("decode_failed")).await;
}

#[tokio::test]
async fn retry_after_is_parsed_in_seconds_or_as_a_date() {
    for (retry_after, expected) in [("7", "7"), ("Fri, 31 Dec 9999 23:59:59 GMT", "3600"), ("soon", "1")] {
        for (status, sent) in [(429, 429), (503, 503), (529, 429), (409, 503), (412, 503)] {
            let full = Action::Answer(status, vec![("retry-after", retry_after)], b"{}".to_vec());
            let d = FakeEngine::always(full).await;
            let system = TestRouter::start(&[], &[&d]).await;
            let answer = post(system.address, "/v1/completions", &completion(false)).await;
            assert_eq!(
                (answer.status, answer.header("retry-after")),
                (sent, Some(expected)),
                "{status} {retry_after}"
            );
        }
    }
}

#[tokio::test]
async fn shed_load_ejects_no_engine() {
    for status in [529, 409, 412] {
        let d = FakeEngine::always(Action::Refuse(status, json!({"error": {"message": "x"}}))).await;
        let breaker = "{failures: 2, cool_down_ms: 600000, cool_down_max_ms: 600000}";
        let top = format!("health: {{active: {{interval_ms: 0}}, breaker: {breaker}}}");
        let system = TestRouter::with(&[], &[&d], "", &top).await;
        for source in ["a", "b", "c", "d"] {
            let mut client = Client::connect(system.address).await;
            let key = format!("Authorization: Bearer {source}\r\n");
            client.post_bytes("/v1/completions", &key, completion(false).to_string().as_bytes()).await;
            assert!(client.answer().await.status >= 429);
        }
        system.settled().await;
        assert_eq!(standing(&system, &d, "decode").await, "usable", "{status}");
        assert_eq!(d.received().len(), 4);
    }
}

#[tokio::test]
async fn a_silent_decode_engine_is_aborted_and_replaced() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let (silent, live) = (down().await, FakeEngine::always(Action::Whole(1)).await);
    let top = "timeouts: {decode_first_byte_ms: 150}";
    let system = TestRouter::with(&[&p], &[&silent, &live], "", top).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    silent.wait("the cut and the abort", |d| d.cut() == 1 && d.aborts().len() == 1).await;
    system.settled().await;
    assert!(p.releases().is_empty());
}

#[tokio::test]
async fn an_unreachable_or_failing_prefill_engine_is_replaced() {
    let no = |status| Action::Refuse(status, json!({"error": {"message": "x"}}));
    for trouble in [no(500), no(503), no(429), no(529), no(409), no(412), Action::Close] {
        let first = FakeEngine::always(trouble).await;
        let second = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&first, &second], &[&d]).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        assert!(d.received()[0].body["kv_transfer_params"]["remote_handle"].is_string());
        system.settled().await;
        assert!(second.releases().is_empty());
    }
}

#[tokio::test]
async fn without_a_prefill_engine_the_decode_engine_computes_the_prompt() {
    let (p, d) = (down().await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    p.die().await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert!(d.received()[0].body.get("kv_transfer_params").is_none());
    system.counts("baton_router_disagg_decisions_total{reason=\"fell_back\"}", 1.0).await;
    assert_eq!(
        system.metric("baton_router_disagg_decisions_total").await,
        1.0,
        "one decision for one request"
    );
    assert_eq!(system.metric("baton_router_prefill_seconds_count").await, 0.0, "nothing was prefilled");
}

#[tokio::test]
async fn without_any_prefill_engine_and_without_fallback_the_client_gets_one_error() {
    let (p, d) = (down().await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::with(&[&p], &[&d], "    fallback: none", "").await;
    p.die().await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn a_prefill_engines_refusal_is_the_clients_answer() {
    let p = FakeEngine::always(Action::Refuse(400, error("context_length_exceeded"))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "context_length_exceeded"));
    system.settled().await;
    assert!(d.all().is_empty() && p.aborts().is_empty() && p.releases().is_empty());
}

#[tokio::test]
async fn a_silent_prefill_engine_is_aborted_and_its_late_handle_is_released() {
    let silent = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let live = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top = "timeouts: {prefill_silence_ms: 150}";
    let system = TestRouter::with(&[&silent, &live], &[&d], "", top).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    silent.wait("the abort", |p| p.aborts().len() == 1).await;
    silent.open_gate();
    silent.wait("the release", |p| p.releases() == released("late_reply")).await;
    system.settled().await;
    assert!(live.releases().is_empty() && live.aborts().is_empty());
}

#[tokio::test]
async fn a_handoff_that_is_not_complete_never_reaches_a_decode_engine() {
    let mut broken = crate::harness::engine::handoff(Some(HANDLE));
    broken.as_object_mut().unwrap().remove("remote_request_id");
    let p = FakeEngine::always(Action::Reply(broken)).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert!(d.received()[0].body.get("kv_transfer_params").is_none(), "computed by D alone");
    p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
}

#[tokio::test]
async fn a_decode_engine_that_dies_in_mid_stream_ends_in_a_typed_error_at_a_frame_boundary() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::StreamAndDie(2)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    let text = answer.text();
    let frames: Vec<_> = text.split_terminator("\n\n").collect();
    assert_eq!(frames.len(), 4, "{text}");
    assert_eq!(format!("{}\n\n{}\n\n", frames[0], frames[1]), event(0) + &event(1));
    let error: serde_json::Value = serde_json::from_str(frames[2].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(frames[3], "data: [DONE]");
    p.wait("the release", |p| p.releases() == released("decode_broken")).await;
    d.wait("the abort", |d| d.aborts().len() == 1).await;
}

#[tokio::test]
async fn a_decode_engine_that_dies_in_an_unstreamed_answer_is_a_502() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::HalfAndDie).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "bad_gateway"));
    p.wait("the release", |p| p.releases() == released("decode_broken")).await;
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_in_a_typed_error() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::StreamGated(3)).await;
    let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {stream_silence_ms: 150}").await;
    d.open_gate();
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert!(answer.text().starts_with(&event(0)), "{}", answer.text());
    assert!(answer.text().contains("\"timeout_error\"") && answer.text().ends_with("data: [DONE]\n\n"));
    d.wait("the cut and the abort", |d| d.cut() == 1 && d.aborts().len() == 1).await;
    p.wait("the release", |p| p.releases().len() == 1).await;
}

#[tokio::test]
async fn a_drain_finishes_what_is_in_flight_and_takes_nothing_new() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::StreamGated(2)).await;
    let mut system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    client.head().await;
    assert_eq!(client.event().await, Some(event(0)));
    system.shut_down();
    let refused = || async { tokio::net::TcpStream::connect(system.address).await.is_err() };
    while !refused().await {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert_eq!(get(system.admin, "/ready").await.status, 503);
    d.open_gate();
    assert_eq!(client.event().await, Some(event(1)));
    assert_eq!(client.event().await.as_deref(), Some("data: [DONE]\n\n"));
    system.stopped().await;
    assert!(d.aborts().is_empty() && p.releases().is_empty());
}

#[tokio::test]
async fn a_drain_that_takes_too_long_cuts_and_settles() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Hang]).await;
    let d = FakeEngine::always(Action::Hang).await;
    let top = "drain_timeout_ms: 100\ntimeouts: {settle_ms: 300}";
    let mut system = TestRouter::with(&[&p], &[&d], "", top).await;
    let mut first = Client::connect(system.address).await;
    first.post("/v1/completions", &completion(true)).await;
    d.wait("the first request decodes", |d| d.received().len() == 1).await;
    let mut second = Client::connect(system.address).await;
    second.post("/v1/completions", &completion(true)).await;
    p.wait("the second request prefills", |p| p.received().len() == 2).await;
    system.shut_down();
    system.stopped().await;
    assert_eq!(p.releases(), released("router_shutdown"), "settled before run() returns");
    assert_eq!((p.aborts().len(), d.aborts().len()), (1, 1));
}

#[tokio::test]
async fn a_kept_connection_that_the_engine_closed_is_replaced_without_an_error() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let address = p.address;
    p.die().await;
    let p = FakeEngine::at(address, Action::Lease(Some(HANDLE))).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(p.received().len(), 1, "the restarted engine got the request on a new connection");
    assert_eq!(system.metric("baton_router_engine_replays_total").await, 0.0, "its end was seen in time");
}

#[tokio::test]
async fn a_request_that_is_sent_again_on_a_new_connection_is_one_attempt_and_is_counted() {
    let d = FakeEngine::scripted(vec![Action::Whole(1), Action::Close, Action::Whole(1)]).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(d.received().len(), 3, "the second request came twice");
    let of_engine = format!("{{engine=\"{}\"}}", d.address);
    system.counts(&format!("baton_router_engine_replays_total{of_engine}"), 1.0).await;
    system.counts(&format!("baton_router_engine_requests_total{of_engine}"), 2.0).await;
    system.counts(&format!("baton_router_engine_errors_total{of_engine}"), 0.0).await;
}

#[tokio::test]
async fn an_engine_error_reaches_the_client_in_every_form_without_its_address() {
    let text = || vec![("content-type", "text/plain")];
    let list = json!({"detail": [{"type": "missing", "loc": ["body", "messages", 0, "content"],
        "msg": "Field required", "url": "http://10.0.0.7:8000/missing"}]});
    for (status, headers, body, message, param) in [
        (400, text(), "`n` is over 16\n".to_owned(), "`n` is over 16", None),
        (400, text(), "10.0.0.7:8000 has no `n`".to_owned(), "[address] has no `n`", None),
        (422, vec![], list.to_string(), "messages.0.content: Field required", Some("messages.0.content")),
        (422, vec![], json!({"detail": "too odd"}).to_string(), "too odd", None),
    ] {
        let refuses = Action::Answer(status, headers, body.clone().into_bytes());
        let engines = || async {
            (FakeEngine::always(refuses.clone()).await, FakeEngine::always(Action::Lease(Some(1))).await)
        };
        let ((d, p), (bad_p, unasked)) = (engines().await, engines().await);
        for system in [TestRouter::start(&[&p], &[&d]).await, TestRouter::start(&[&bad_p], &[&unasked]).await]
        {
            let answer = post(system.address, "/v1/completions", &completion(true)).await;
            let error = &answer.json()["error"];
            assert_eq!((answer.status, error["message"].as_str()), (status, Some(message)), "{body}");
            assert_eq!(error["param"].as_str(), param, "{body}");
        }
    }
    // The prefill leg requests one token: the client's error contains the prompt's length, but not that number.
    let message = "This model's maximum context length is 8 tokens. However, you requested 1 output tokens and your prompt \
                contains at least 9 input tokens, for a total of at least 10 tokens. Please reduce the length.";
    let p =
        FakeEngine::always(Action::Refuse(400, json!({"error": {"message": message, "code": 400}}))).await;
    let system = TestRouter::start(&[&p], &[&p]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    let message = "This model's maximum context length is 8 tokens, but the prompt has 9";
    assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (400, Some(message)));
}

/// Errors of a decode engine that cannot use a handoff that another engine could use.
const CANNOT_USE: [(u16, &str); 8] = [
    (503, "kv_handshake_failed"),
    (503, "kv_transfer_failed"),
    (503, "kv_unverified"),
    (503, "kv_refused"),
    (400, "kv_layout_mismatch"),
    (400, "kv_prompt_mismatch"),
    (400, "kv_wrong_role"),
    (400, "invalid_kv_transfer_params"),
];

#[tokio::test]
async fn a_handoff_unusable_at_one_decode_engine_goes_to_another() {
    for (status, code) in CANNOT_USE {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let first = FakeEngine::always(Action::Refuse(status, error(code))).await;
        let second = FakeEngine::always(Action::Whole(5)).await;
        let system = TestRouter::start(&[&p], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 200, "{code}: {}", answer.text());
        assert_eq!(first.received()[0].body, second.received()[0].body, "{code}: the same handoff");
        system.settled().await;
        assert!(p.releases().is_empty() && p.received().len() == 1, "{code}");
    }
}

#[tokio::test]
async fn a_handoff_unusable_everywhere_is_released_and_the_prompt_recomputed() {
    for (status, code) in CANNOT_USE.into_iter().chain([(503, "kv_gone"), (400, "kv_unsupported")]) {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::scripted(vec![Action::Refuse(status, error(code)), Action::Whole(5)]).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let answer = post(system.address, "/v1/completions", &completion(true)).await;
        assert_eq!(answer.status, 200, "{code}: {}", answer.text());
        let requests = d.received();
        assert!(requests[0].body["kv_transfer_params"].is_object(), "{code}");
        assert!(requests[1].body.get("kv_transfer_params").is_none(), "{code}: computed by D alone");
        p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
        system.settled().await;
        assert_eq!(p.received().len(), 1, "{code}");
    }
}

#[tokio::test]
async fn an_ended_handoff_is_not_tried_at_another_engine() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let spent = || FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]);
    let (a, b) = (spent().await, spent().await);
    let system = TestRouter::start(&[&p], &[&a, &b]).await;
    // The next engine can report the same error once more, without a handoff: then the other engine is tried.
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let with_handoff =
        |d: &FakeEngine| d.received().iter().filter(|s| s.body["kv_transfer_params"].is_object()).count();
    assert_eq!(with_handoff(&a) + with_handoff(&b), 1);
    system.settled().await;
}

#[tokio::test]
async fn where_decode_engines_may_not_prefill_a_spent_handoff_is_replaced_by_a_second_one() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Lease(Some(7))]).await;
    let d = FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]).await;
    let system = TestRouter::with(&[&p], &[&d], "    fallback: none", "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let handle = &d.received()[1].body["kv_transfer_params"]["remote_handle"];
    assert_eq!(handle, &json!(format!("{:032x}", 7)));
    p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
    system.settled().await;
    assert_eq!(p.received().len(), 2);
}

#[tokio::test]
async fn a_recomputed_leg_has_its_own_id_and_survives_a_late_abort() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Lease(Some(7))]).await;
    let broken = FakeEngine::scripted(vec![Action::Close, Action::Whole(5)]).await;
    let spent = FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]).await;
    let system = TestRouter::with(&[&p], &[&broken, &spent], "    fallback: none", "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    broken.wait("the abort of its first attempt", |d| d.aborts().len() == 1).await;
    system.settled().await;
    let named =
        |request: &ReceivedRequest| request.headers["x-request-id"].to_str().expect("an id").to_owned();
    let names: Vec<_> = p.received().iter().map(named).collect();
    assert_eq!(names.len(), 2);
    assert_ne!(names[0], names[1]);
    assert_eq!(broken.aborts(), [names[0].clone()]);
    let of =
        |d: &FakeEngine, name: &String| d.received().iter().filter(|request| named(request) == *name).count();
    assert_eq!((of(&broken, &names[0]), of(&spent, &names[0])), (1, 1));
    assert_eq!(of(&broken, &names[1]) + of(&spent, &names[1]), 1, "the second round has the second name");
}

#[tokio::test]
async fn the_prompt_is_recomputed_once_before_the_client_gets_an_error() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Lease(Some(7))]).await;
    let d = FakeEngine::always(Action::Refuse(503, error("kv_transfer_failed"))).await;
    let system = TestRouter::with(&[&p], &[&d], "    fallback: none", "").await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "unavailable"));
    assert!(
        !answer.text().contains("said so"),
        "an engine's words about a handoff are not the client's business"
    );
    let reasons = |p: &FakeEngine| p.releases().into_iter().map(|(_, reason)| reason).collect::<Vec<_>>();
    p.wait("both releases", |p| reasons(p) == ["unusable_handoff", "decode_failed"]).await;
    system.settled().await;
    assert_eq!((p.received().len(), d.received().len()), (2, 2));
}

#[tokio::test]
async fn an_engine_that_refuses_the_routers_secret_is_passed_over_and_never_the_clients_fault() {
    let wrong = || FakeEngine::always(Action::Refuse(401, error("invalid_cluster_secret")));
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let (strict, good) = (wrong().await, FakeEngine::always(Action::Whole(5)).await);
    let system = TestRouter::start(&[&p], &[&strict, &good]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    system.settled().await;
    assert!(p.releases().is_empty(), "the other one has the handoff");

    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let system = TestRouter::start(&[&p], &[&strict]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "misconfigured"));
    assert!(!answer.text().contains("said so"));
    p.wait("the release", |p| p.releases() == released("decode_failed")).await;
    let metrics = get(system.admin, "/metrics").await.text();
    assert!(metrics.contains("baton_router_misconfigured_total{leg=\"decode\"} 1"), "{metrics}");

    let (p, d) = (wrong().await, FakeEngine::always(Action::Whole(5)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    assert_eq!(
        post(system.address, "/v1/completions", &completion(false)).await.status,
        200,
        "D computes all"
    );
    assert!(d.received()[0].body.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn an_unresponsive_engine_is_abandoned_before_the_request_timeout() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let dead = FakeEngine::always(Action::Hang).await.unresponsive();
    let live = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&dead, &live], "", "timeouts: {liveness_probe_ms: 50}").await;
    for _ in 0..2 {
        // One of the two requests goes to the dead engine first.
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    dead.wait("the cut and the abort", |d| d.cut() >= 1 && !d.aborts().is_empty()).await;
    assert_eq!(dead.received()[0].body["kv_transfer_params"], live.received()[0].body["kv_transfer_params"]);
    system.settled().await;
    assert!(p.releases().is_empty());

    let dead = FakeEngine::always(Action::Hang).await.unresponsive();
    let system = TestRouter::with(&[&dead, &p], &[&live], "", "timeouts: {liveness_probe_ms: 50}").await;
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    dead.wait("the abort", |p| !p.aborts().is_empty()).await;
}

#[tokio::test]
async fn a_slow_engine_that_passes_its_liveness_probe_is_awaited() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let slow = FakeEngine::always(Action::WholeGated(5)).await;
    let system = TestRouter::with(&[&p], &[&slow], "", "timeouts: {liveness_probe_ms: 20}").await;
    let address = system.address;
    let asking = tokio::spawn(async move { post(address, "/v1/completions", &completion(false)).await });
    slow.wait("it has been probed many times", |d| d.probes() >= 10).await;
    slow.open_gate();
    assert_eq!(asking.await.unwrap().status, 200);
    system.settled().await;
    assert_eq!((slow.received().len(), slow.aborts().len()), (1, 0));
}

#[tokio::test]
async fn a_refusal_of_any_size_is_passed_on_once_and_cut() {
    for bytes in [30_000, 200_000] {
        let body = json!({"error": {"message": "x".repeat(bytes), "type": "invalid_request_error"}});
        let first = FakeEngine::always(Action::Refuse(400, body)).await;
        let second = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 400, "{bytes}");
        let length = answer.json()["error"]["message"].as_str().unwrap().len();
        assert!((1..=1024).contains(&length), "{bytes}: {length}");
        assert!(second.received().is_empty(), "another engine would refuse it too");
    }
}
