//! Both legs: disconnects in every phase, engines that fail, retries, SGLang.

use serde_json::{Value, json};

use super::{TestSidecar, named, nowhere};
use crate::harness::client::{Client, DISCONNECT_KINDS, completion};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::await_requests;

const HANDLE: u128 = 0xabc;

fn handle() -> String {
    format!("{HANDLE:032x}")
}

async fn pair(prefill: Action, decode: Action) -> (FakeEngine, FakeEngine, TestSidecar) {
    let (p, d) = (FakeEngine::always(prefill).await, FakeEngine::always(decode).await);
    let sidecar = TestSidecar::beside(&d).await;
    (p, d, sidecar)
}

/// An error in llm-d's form.
fn assert_llmd_error(body: &Value, kind: &str, code: u16) {
    assert_eq!(
        (&body["object"], &body["type"], &body["code"]),
        (&json!("error"), &json!(kind), &json!(code)),
        "{body}"
    );
    assert!(body["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
}

#[tokio::test]
async fn the_named_engine_prefills_and_the_own_engine_decodes() {
    let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::Whole(5)).await;
    let answer = sidecar.complete(&format!("authorization: Bearer key\r\n{}", named(&p))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (of_p, of_d) = (&p.received()[0], &d.received()[0]);
    assert_eq!(of_p.body["max_tokens"], 1);
    assert_eq!(of_d.body["kv_transfer_params"]["remote_handle"], handle());
    assert_eq!(of_p.headers["x-request-id"], of_d.headers["x-request-id"]);
    for request in [of_p, of_d] {
        assert_eq!(
            (&request.body["model"], &request.headers["authorization"]),
            (&json!("m"), &"Bearer key".parse().unwrap())
        );
        assert!(
            !request.headers.keys().any(|name| name.as_str().contains("host-port")),
            "{:?}",
            request.headers
        );
    }
    sidecar.settled().await;
    assert!(p.releases().is_empty() && p.aborts().is_empty() && d.aborts().is_empty());
}

#[tokio::test]
async fn any_model_is_forwarded_as_it_is_and_an_unknown_one_is_the_clients_error() {
    let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::Whole(5)).await;
    for body in [json!({"model": "org/any-name", "prompt": "x"}), json!({"prompt": "x"})] {
        let mut client = Client::connect(sidecar.address).await;
        client.post_bytes("/v1/completions", &named(&p), body.to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
        for engine in [&p, &d] {
            assert_eq!(engine.received().last().unwrap().body.get("model"), body.get("model"));
        }
    }
    let unknown =
        Action::Refuse(404, json!({"error": {"message": "no", "type": "NotFoundError", "code": 404}}));
    for (prefill, decode) in [(unknown.clone(), Action::Whole(1)), (Action::Lease(Some(HANDLE)), unknown)] {
        let (p, _d, sidecar) = pair(prefill, decode).await;
        let answer = sidecar.complete(&named(&p)).await;
        assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
        sidecar.settled().await;
    }
}

#[tokio::test]
async fn without_a_header_the_decode_engine_is_alone() {
    let (_, d, sidecar) = pair(Action::Hang, Action::Whole(5)).await;
    for headers in ["", "x-prefiller-host-port: \r\n"] {
        assert_eq!(sidecar.complete(headers).await.status, 200);
    }
    assert!(d.received().iter().all(|request| request.body.get("kv_transfer_params").is_none()));
}

#[tokio::test]
async fn a_disconnect_leaves_nothing_at_either_engine_in_any_phase() {
    for how in DISCONNECT_KINDS {
        // During the prefill.
        let (p, d, sidecar) = pair(Action::LeaseGated(Some(HANDLE)), Action::Whole(1)).await;
        let client = sidecar.begin(&named(&p), true).await;
        await_requests(&p, 1).await;
        client.hang_up(how);
        p.wait("the abort", |p| p.aborts().len() == 1).await;
        p.open_gate();
        p.wait("the release of the late handoff", |p| p.releases().len() == 1).await;
        sidecar.settled().await;
        assert!(d.all().is_empty(), "{how:?}");
        sidecar.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
        // Before the decode engine's first event.
        let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::Hang).await;
        let client = sidecar.begin(&named(&p), true).await;
        await_requests(&d, 1).await;
        client.hang_up(how);
        d.wait("the abort", |d| d.aborts().len() == 1).await;
        p.wait("the release", |p| p.releases() == [(handle(), "client_gone".to_owned())]).await;
        sidecar.settled().await;
        // In the stream.
        let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::StreamGated(10)).await;
        let mut client = sidecar.begin(&named(&p), true).await;
        d.open_gate();
        assert_eq!(client.head().await.0, 200);
        client.event().await.expect("an event");
        client.hang_up(how);
        d.wait("the abort", |d| d.aborts().len() == 1 && d.cut() == 1).await;
        sidecar.settled().await;
        assert!(p.releases().is_empty(), "the decode engine has the blocks");
    }
}

#[tokio::test]
async fn a_refusal_of_the_prefill_engine_reaches_the_client() {
    let refusal =
        json!({"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}});
    let (p, d, sidecar) = pair(Action::Refuse(400, refusal), Action::Whole(1)).await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (400, &json!("too long")));
    assert!(d.all().is_empty(), "the decode engine does not compute the prompt");
}

#[tokio::test]
async fn a_failure_of_the_prefill_engine_is_a_bad_gateway() {
    let (p, d, sidecar) = pair(Action::Refuse(500, json!({})), Action::Whole(1)).await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!((answer.status, answer.header("x-baton-failed-leg")), (502, Some("prefill")));
    assert_llmd_error(&answer.json(), "BadGateway", 502);
    let gone = nowhere().await;
    for _ in 0..3 {
        // The engine is ejected after the first failure, and tried nevertheless.
        let answer = sidecar.complete(&format!("x-prefiller-host-port: {gone}\r\n")).await;
        assert_eq!((answer.status, answer.header("x-baton-failed-leg")), (502, Some("prefill")));
        assert_llmd_error(&answer.json(), "BadGateway", 502);
    }
    assert!(d.all().is_empty());
    sidecar.settled().await;
}

/// A stock prefill engine that dies behind its lease fails the decode leg, and then the second prefill.
#[tokio::test]
async fn the_leg_that_failed_last_is_named() {
    let p = FakeEngine::scripted(vec![Action::Lease(None), Action::Close]).await.without_verbs();
    let d = FakeEngine::always(Action::Refuse(500, json!({}))).await.without_verbs();
    let sidecar = TestSidecar::with(&d, "").await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!((answer.status, answer.header("x-baton-failed-leg")), (502, Some("prefill")));
    sidecar.settled().await;
}

#[tokio::test]
async fn a_prefill_is_retried_at_the_same_engine_as_often_as_configured() {
    let busy = || Action::Refuse(503, json!({}));
    for (retries, failures, status) in [(0, 1, 503), (1, 1, 200), (2, 3, 503)] {
        let script = std::iter::repeat_with(busy).take(failures).chain([Action::Lease(Some(HANDLE))]);
        let p = FakeEngine::scripted(script.collect()).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let yaml = format!("prefill-max-retries: {retries}\nprefill-retry-backoff: 1ms\n");
        let sidecar = TestSidecar::with(&d, &yaml).await;
        let answer = sidecar.complete(&named(&p)).await;
        assert_eq!(answer.status, status, "{retries} retries");
        assert_eq!(answer.header("x-baton-failed-leg"), None, "a full engine has not failed");
        assert_eq!(p.received().len(), retries + 1);
        sidecar.settled().await;
    }
}

#[tokio::test]
async fn a_decode_engine_that_refuses_the_connection_is_unavailable() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let sidecar = TestSidecar::at_port(nowhere().await.port(), 1, "").await;
    for headers in [String::new(), named(&p)] {
        for _ in 0..2 {
            let answer = sidecar.complete(&headers).await;
            assert_eq!(answer.status, 503, "{}", answer.text());
            assert_eq!(answer.header("x-baton-failed-leg"), Some("decode"));
            assert_llmd_error(&answer.json(), "ServiceUnavailable", 503);
        }
    }
    p.wait("the releases", |p| p.releases().len() == 2).await;
    sidecar.settled().await;
}

#[tokio::test]
async fn a_decode_engine_that_fails_gives_the_blocks_back() {
    let (p, _d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::Close).await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!(answer.status, 502);
    assert_llmd_error(&answer.json(), "BadGateway", 502);
    p.wait("the release", |p| p.releases().len() == 1).await;
    sidecar.settled().await;
}

#[tokio::test]
async fn messages_and_responses_have_both_legs_and_their_own_errors() {
    for (path, body) in [
        (
            "/v1/messages",
            json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}),
        ),
        ("/v1/responses", json!({"model": "m", "input": "x"})),
        ("/v1/chat/completions", json!({"model": "m", "messages": [{"role": "user", "content": "x"}]})),
    ] {
        let reply = Action::Json(json!({"id": "d", "choices": [{"text": "t"}], "stop_reason": "end_turn"}));
        let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), reply).await;
        let mut client = Client::connect(sidecar.address).await;
        client.post_bytes(path, &named(&p), body.to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200, "{path}");
        assert_eq!([&p, &d].map(|engine| engine.received()[0].path.clone()), [path, path]);
        client.post_bytes(path, &named(&p), b"{\"model\": 1}").await;
        let answer = client.answer().await;
        let form = answer.json();
        assert_eq!((answer.status, form["type"] == "error"), (400, path == "/v1/messages"), "{form}");
    }
}

/// A router's client that sends both legs of SGLang, and what the engines answer.
fn sglang(answer: Action) -> impl Fn(&crate::harness::engine::ReceivedRequest) -> Option<Action> + Send {
    move |request| match request.path.as_str() {
        "/abort_request" => Some(Action::Text("")),
        "/server_info" => Some(Action::Answer(404, Vec::new(), Vec::new())),
        "/v1/completions" => Some(answer.clone()),
        path => panic!("not asked for by the sidecar: {path}"),
    }
}

#[tokio::test]
async fn with_sglang_both_legs_are_sent_at_once_and_end_together() {
    let p = FakeEngine::always(Action::Hang).await.with_rule(sglang(Action::ReplyGated(Value::Null)));
    let d = FakeEngine::always(Action::Hang).await.with_rule(sglang(Action::StreamGated(2)));
    let sidecar = TestSidecar::with(&d, "kv-connector: sglang").await;
    let mut client = sidecar.begin(&named(&p), true).await;
    await_requests(&p, 1).await;
    await_requests(&d, 1).await;
    let [of_p, of_d] = [&p, &d].map(|engine| engine.received()[0].body.clone());
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
        assert_eq!(of_p[name], of_d[name], "{name}");
    }
    assert_eq!((&of_p["bootstrap_host"], &of_p["bootstrap_port"]), (&json!("127.0.0.1"), &json!(8998)));
    p.open_gate();
    (0..2).for_each(|_| d.open_gate());
    assert!(client.answer().await.text().ends_with("data: [DONE]\n\n"));
    // A client that leaves ends both legs.
    let client = sidecar.begin(&named(&p), true).await;
    await_requests(&p, 2).await;
    await_requests(&d, 2).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    let aborts =
        |engine: &FakeEngine| engine.all().iter().filter(|request| request.path == "/abort_request").count();
    for engine in [&p, &d] {
        engine.wait("the abort", |engine| aborts(engine) > 0).await;
    }
    sidecar.settled().await;
}

#[tokio::test]
async fn with_sglang_the_error_names_the_engine_that_cannot_be_reached() {
    let p = FakeEngine::always(Action::Hang).await.with_rule(sglang(Action::ReplyGated(Value::Null)));
    let sidecar = TestSidecar::at_port(nowhere().await.port(), 1, "kv-connector: sglang").await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!((answer.status, answer.header("x-baton-failed-leg")), (503, Some("decode")));
    sidecar.settled().await;
    let d = FakeEngine::always(Action::Hang).await.with_rule(sglang(Action::StreamGated(1)));
    let sidecar = TestSidecar::with(&d, "kv-connector: sglang").await;
    let gone = nowhere().await;
    let answer = sidecar.complete(&format!("x-prefiller-host-port: {gone}\r\n")).await;
    assert_eq!((answer.status, answer.header("x-baton-failed-leg")), (502, Some("prefill")));
    sidecar.settled().await;
}

#[tokio::test]
async fn a_drain_lets_requests_end() {
    let (p, d, sidecar) = pair(Action::Lease(Some(HANDLE)), Action::StreamGated(2)).await;
    let mut client = sidecar.begin(&named(&p), true).await;
    d.open_gate();
    assert_eq!(client.head().await.0, 200);
    sidecar.shutdown.cancel();
    d.open_gate();
    let rest = client.rest().await;
    assert!(rest.windows(6).any(|bytes| bytes == b"[DONE]"), "{}", String::from_utf8_lossy(&rest));
    let (address, body) = (sidecar.address, completion(false));
    let refused = async { while tokio::net::TcpStream::connect(address).await.is_ok() {} };
    tokio::time::timeout(std::time::Duration::from_secs(10), refused).await.expect("it stops listening");
    drop(body);
}
