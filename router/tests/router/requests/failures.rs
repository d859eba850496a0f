//! Engines that refuse, fail, are unreachable or die: another engine or one clear error, and no lease is left.

use serde_json::json;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, event};
use crate::harness::system::TestRouter;

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
async fn a_decode_engine_that_refuses_is_passed_on_and_the_lease_comes_back() {
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
async fn a_decode_engine_in_trouble_is_replaced_and_the_other_gets_the_same_handoff() {
    let no = |status| Action::Refuse(status, json!({"error": {"message": "x"}}));
    for trouble in [no(500), no(503), no(429), Action::Close] {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let first = FakeEngine::always(trouble.clone()).await;
        let second = FakeEngine::always(Action::Whole(5)).await;
        let system = TestRouter::start(&[&p], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 200, "{trouble:?}: {}", answer.text());
        let (a, b) = (&first.asked()[0], &second.asked()[0]);
        assert_eq!(a.body, b.body, "the same handoff");
        assert_eq!(p.asked().len(), 1, "no second prefill");
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
async fn without_any_decode_engine_the_client_gets_one_error_and_the_lease_comes_back() {
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
    assert_eq!(p.asked().len(), 1);
}

#[tokio::test]
async fn full_decode_engines_are_429_with_a_time_to_come_back() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Refuse(429, json!({"error": {"message": "queue full"}}))).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (429, "overloaded"));
    assert!(answer.header("retry-after").is_some());
    p.wait("the release", |p| p.releases() == released("decode_failed")).await;
}

#[tokio::test]
async fn a_time_to_come_back_is_read_in_seconds_or_as_a_date() {
    for (said, expected) in [("7", "7"), ("Fri, 31 Dec 9999 23:59:59 GMT", "3600"), ("soon", "1")] {
        for status in [429, 503] {
            let full = Action::Answer(status, vec![("retry-after", said)], b"{}".to_vec());
            let d = FakeEngine::always(full).await;
            let system = TestRouter::start(&[], &[&d]).await;
            let answer = post(system.address, "/v1/completions", &completion(false)).await;
            assert_eq!((answer.status, answer.header("retry-after")), (status, Some(expected)), "{said}");
        }
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
async fn a_prefill_engine_that_is_down_or_in_trouble_is_replaced() {
    let no = |status| Action::Refuse(status, json!({"error": {"message": "x"}}));
    for trouble in [no(500), no(503), no(429), Action::Close] {
        let first = FakeEngine::always(trouble).await;
        let second = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&first, &second], &[&d]).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        assert!(d.asked()[0].body["kv_transfer_params"]["remote_handle"].is_string());
        system.settled().await;
        assert!(second.releases().is_empty());
    }
}

#[tokio::test]
async fn without_any_prefill_engine_the_decode_engine_computes_everything() {
    let (p, d) = (down().await, FakeEngine::always(Action::Whole(1)).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    p.die().await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert!(d.asked()[0].body.get("kv_transfer_params").is_none());
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
    assert!(d.asked()[0].body.get("kv_transfer_params").is_none(), "computed by D alone");
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
    d.wait("the first request decodes", |d| d.asked().len() == 1).await;
    let mut second = Client::connect(system.address).await;
    second.post("/v1/completions", &completion(true)).await;
    p.wait("the second request prefills", |p| p.asked().len() == 2).await;
    system.shut_down();
    system.stopped().await;
    assert_eq!(p.releases(), released("router_shutdown"), "paid before run() returns");
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
    assert_eq!(p.asked().len(), 1, "the restarted engine was asked on a new connection");
    assert_eq!(system.metric("baton_router_engine_replays_total").await, 0.0, "its end was seen in time");
}

#[tokio::test]
async fn a_request_that_is_sent_again_on_a_new_connection_is_one_attempt_and_is_counted() {
    let d = FakeEngine::scripted(vec![Action::Whole(1), Action::Close, Action::Whole(1)]).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(d.asked().len(), 3, "the second request came twice");
    let of_engine = format!("{{engine=\"{}\"}}", d.address);
    system.counts(&format!("baton_router_engine_replays_total{of_engine}"), 1.0).await;
    system.counts(&format!("baton_router_engine_requests_total{of_engine}"), 2.0).await;
    system.counts(&format!("baton_router_engine_errors_total{of_engine}"), 0.0).await;
}

#[tokio::test]
async fn an_engines_words_reach_the_client_in_every_form_and_without_its_address() {
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
    let said = "This model's maximum context length is 8 tokens. However, you requested 1 output tokens and your prompt \
                contains at least 9 input tokens, for a total of at least 10 tokens. Please reduce the length.";
    let p = FakeEngine::always(Action::Refuse(400, json!({"error": {"message": said, "code": 400}}))).await;
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
async fn a_handoff_that_one_decode_engine_cannot_use_goes_to_another_as_it_is() {
    for (status, code) in CANNOT_USE {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let first = FakeEngine::always(Action::Refuse(status, error(code))).await;
        let second = FakeEngine::always(Action::Whole(5)).await;
        let system = TestRouter::start(&[&p], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 200, "{code}: {}", answer.text());
        assert_eq!(first.asked()[0].body, second.asked()[0].body, "{code}: the same handoff");
        system.settled().await;
        assert!(p.releases().is_empty() && p.asked().len() == 1, "{code}");
    }
}

#[tokio::test]
async fn a_handoff_that_no_decode_engine_can_use_goes_back_and_the_prompt_is_computed_anew() {
    for (status, code) in CANNOT_USE.into_iter().chain([(503, "kv_gone"), (400, "kv_unsupported")]) {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::scripted(vec![Action::Refuse(status, error(code)), Action::Whole(5)]).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let answer = post(system.address, "/v1/completions", &completion(true)).await;
        assert_eq!(answer.status, 200, "{code}: {}", answer.text());
        let asked = d.asked();
        assert!(asked[0].body["kv_transfer_params"].is_object(), "{code}");
        assert!(asked[1].body.get("kv_transfer_params").is_none(), "{code}: computed by D alone");
        p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
        system.settled().await;
        assert_eq!(p.asked().len(), 1, "{code}");
    }
}

#[tokio::test]
async fn a_handoff_that_is_gone_is_tried_nowhere_else() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let gone = || FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]);
    let (a, b) = (gone().await, gone().await);
    let system = TestRouter::start(&[&p], &[&a, &b]).await;
    // The next engine can report the same error once more, without a handoff: then the other engine is tried.
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let with_handoff =
        |d: &FakeEngine| d.asked().iter().filter(|s| s.body["kv_transfer_params"].is_object()).count();
    assert_eq!(with_handoff(&a) + with_handoff(&b), 1);
    system.settled().await;
}

#[tokio::test]
async fn where_decode_engines_may_not_prefill_a_spent_handoff_is_replaced_by_a_second_one() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Lease(Some(7))]).await;
    let d = FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]).await;
    let system = TestRouter::with(&[&p], &[&d], "    fallback: none", "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let handle = &d.asked()[1].body["kv_transfer_params"]["remote_handle"];
    assert_eq!(handle, &json!(format!("{:032x}", 7)));
    p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
    system.settled().await;
    assert_eq!(p.asked().len(), 2);
}

#[tokio::test]
async fn what_is_computed_anew_has_a_name_of_its_own_so_that_a_late_abort_cannot_end_it() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Lease(Some(7))]).await;
    let broken = FakeEngine::scripted(vec![Action::Close, Action::Whole(5)]).await;
    let gone = FakeEngine::scripted(vec![Action::Refuse(503, error("kv_gone")), Action::Whole(5)]).await;
    let system = TestRouter::with(&[&p], &[&broken, &gone], "    fallback: none", "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    broken.wait("the abort of its first attempt", |d| d.aborts().len() == 1).await;
    system.settled().await;
    let named =
        |request: &ReceivedRequest| request.headers["x-request-id"].to_str().expect("an id").to_owned();
    let names: Vec<_> = p.asked().iter().map(named).collect();
    assert_eq!(names.len(), 2);
    assert_ne!(names[0], names[1]);
    assert_eq!(broken.aborts(), [names[0].clone()]);
    let of =
        |d: &FakeEngine, name: &String| d.asked().iter().filter(|request| named(request) == *name).count();
    assert_eq!((of(&broken, &names[0]), of(&gone, &names[0])), (1, 1));
    assert_eq!(of(&broken, &names[1]) + of(&gone, &names[1]), 1, "the second round has the second name");
}

#[tokio::test]
async fn the_prompt_is_computed_anew_once_and_then_the_client_gets_one_error() {
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
    assert_eq!((p.asked().len(), d.asked().len()), (2, 2));
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
    assert!(d.asked()[0].body.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn an_engine_that_took_a_request_and_answers_nothing_at_all_is_given_up_long_before_its_bound() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let dead = FakeEngine::always(Action::Hang).await.unresponsive();
    let live = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&dead, &live], "", "timeouts: {liveness_probe_ms: 50}").await;
    for _ in 0..2 {
        // One of the two requests goes to the dead engine first.
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    dead.wait("the cut and the abort", |d| d.cut() >= 1 && !d.aborts().is_empty()).await;
    assert_eq!(dead.asked()[0].body["kv_transfer_params"], live.asked()[0].body["kv_transfer_params"]);
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
async fn an_engine_that_is_slow_and_says_that_it_lives_is_waited_for() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let slow = FakeEngine::always(Action::WholeGated(5)).await;
    let system = TestRouter::with(&[&p], &[&slow], "", "timeouts: {liveness_probe_ms: 20}").await;
    let address = system.address;
    let asking = tokio::spawn(async move { post(address, "/v1/completions", &completion(false)).await });
    slow.wait("it has been asked many times", |d| d.probes() >= 10).await;
    slow.open_gate();
    assert_eq!(asking.await.unwrap().status, 200);
    system.settled().await;
    assert_eq!((slow.asked().len(), slow.aborts().len()), (1, 0));
}

#[tokio::test]
async fn a_refusal_of_any_size_is_passed_on_once_and_cut() {
    for bytes in [30_000, 200_000] {
        let said = json!({"error": {"message": "x".repeat(bytes), "type": "invalid_request_error"}});
        let first = FakeEngine::always(Action::Refuse(400, said)).await;
        let second = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[], &[&first, &second]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, 400, "{bytes}");
        let length = answer.json()["error"]["message"].as_str().unwrap().len();
        assert!((1..=1024).contains(&length), "{bytes}: {length}");
        assert!(second.asked().is_empty(), "another engine would refuse it too");
    }
}
