//! Comments in streams that wait (`sse_keepalive_ms`).

use serde_json::{Value, json};

use crate::harness::client::{Client, DISCONNECT_KINDS, completion};
use crate::harness::engine::{Action, FakeEngine, event};
use crate::harness::system::{TestRouter, await_requests};

const PATH: &str = "/v1/completions";
const HANDLE: u128 = 0xabc;
const COMMENT: &[u8] = b": ka\n";
const COMMENTS: &str = "timeouts: {sse_keepalive_ms: 100}";

/// Begins a stream and reads its head and its first comment.
async fn waiting(system: &TestRouter) -> Client {
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(true)).await;
    let (status, head) = client.head().await;
    assert_eq!(status, 200, "{head}");
    for line in
        ["content-type: text/event-stream; charset=utf-8", "cache-control: no-cache", "x-request-id: "]
    {
        assert!(head.to_ascii_lowercase().contains(line), "{head}");
    }
    assert_eq!(client.chunk().await.as_deref(), Some(COMMENT));
    client
}

/// The next chunk that is no comment, and the number of comments before it.
async fn next(client: &mut Client) -> (usize, Option<Vec<u8>>) {
    let mut comments = 0;
    loop {
        match client.chunk().await {
            Some(chunk) if chunk == COMMENT => comments += 1,
            chunk => return (comments, chunk),
        }
    }
}

/// The rest of a stream without its comments.
async fn events(client: &mut Client) -> String {
    let mut events = Vec::new();
    while let (_, Some(chunk)) = next(client).await {
        events.extend_from_slice(&chunk);
    }
    String::from_utf8(events).unwrap()
}

/// The error of a stream that contains nothing else.
async fn only_error(client: &mut Client) -> Value {
    let text = events(client).await;
    let error = text.strip_suffix("\n\ndata: [DONE]\n\n").and_then(|text| text.strip_prefix("data: "));
    let error: Value = serde_json::from_str(error.unwrap_or_else(|| panic!("{text}"))).unwrap();
    error["error"].clone()
}

#[tokio::test]
async fn a_stream_gets_comments_in_every_silence_and_its_events_unchanged() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::StreamGated(2)).await;
    let system = TestRouter::with(&[&p], &[&d], "", COMMENTS).await;
    let mut client = waiting(&system).await;
    assert_eq!(client.chunk().await.as_deref(), Some(COMMENT), "the prefill still computes");
    assert_eq!(d.received().len(), 0);
    p.open_gate();
    await_requests(&d, 1).await;
    assert_eq!(client.chunk().await.as_deref(), Some(COMMENT), "no event yet");
    d.open_gate();
    let (_, first) = next(&mut client).await;
    assert_eq!(first.unwrap(), event(0).as_bytes());
    assert_eq!(client.chunk().await.as_deref(), Some(COMMENT), "between two events");
    d.open_gate();
    assert_eq!(events(&mut client).await, format!("{}data: [DONE]\n\n", event(1)));
    // The connection is still usable.
    p.open_gate();
    d.open_gate();
    d.open_gate();
    client.post(PATH, &completion(true)).await;
    assert_eq!(client.answer().await.status, 200);
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"completed\",code=\"2xx\"}", 2.0).await;
    assert!(p.aborts().is_empty() && p.releases().is_empty() && d.aborts().is_empty());
}

#[tokio::test]
async fn comments_come_within_a_read_timeout_which_is_then_no_deadline() {
    let d = FakeEngine::always(Action::Stream(1)).await;
    let system = TestRouter::with(&[], &[&d], "", COMMENTS).await;
    for (more, expected) in [("", false), ("x-first-token-timeout-ms: 30000\r\n", true)] {
        let mut client = Client::connect(system.address).await;
        let headers = format!("x-stainless-read-timeout: 20\r\n{more}");
        client.post_bytes(PATH, &headers, completion(true).to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
        let sent = d.received().pop().unwrap();
        assert_eq!(sent.headers.contains_key("x-first-token-timeout-ms"), expected, "{more}");
    }
}

#[tokio::test]
async fn a_whole_answer_and_a_stream_without_the_option_get_no_comment() {
    let whole = FakeEngine::always(Action::WholeGated(9)).await;
    let stream = FakeEngine::always(Action::StreamGated(1)).await;
    let body = |model: &str, stream| json!({"model": model, "prompt": "hello", "stream": stream});
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n{COMMENTS}\n\
         models:\n  - {{name: m, decode: {{engines: [{{url: '{whole}'}}]}}}}\n  - name: quiet\n    \
         timeouts: {{sse_keepalive_ms: 0}}\n    decode: {{engines: [{{url: '{stream}'}}]}}\n  - \
         {{name: other, decode: {{engines: [{{url: '{stream}'}}]}}}}\n",
        whole = whole.url(),
        stream = stream.url()
    ))
    .await;
    let mut without = Client::connect(system.address).await;
    without.post(PATH, &body("m", false)).await;
    let mut quiet = Client::connect(system.address).await;
    quiet.post(PATH, &body("quiet", true)).await;
    await_requests(&whole, 1).await;
    await_requests(&stream, 1).await;
    // A third request shows that both would have had comments.
    let mut third = Client::connect(system.address).await;
    third.post(PATH, &body("other", true)).await;
    assert_eq!(third.head().await.0, 200);
    for _ in 0..3 {
        assert_eq!(third.chunk().await.as_deref(), Some(COMMENT));
    }
    whole.open_gate();
    let answer = without.answer().await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(answer.header("content-length").is_some() && !answer.text().contains(": ka"));
    stream.open_gate();
    stream.open_gate();
    assert_eq!(quiet.answer().await.text(), format!("{}data: [DONE]\n\n", event(0)));
}

#[tokio::test]
async fn engines_are_still_replaced_behind_a_comment() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let dies = FakeEngine::always(Action::Close).await;
    let serves = FakeEngine::always(Action::Stream(2)).await;
    let system = TestRouter::with(&[&p], &[&dies, &serves], "", COMMENTS).await;
    let mut client = waiting(&system).await;
    p.open_gate();
    assert_eq!(events(&mut client).await, format!("{}{}data: [DONE]\n\n", event(0), event(1)));
    assert_eq!((p.received().len(), dies.received().len(), serves.received().len()), (1, 1, 1));
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"completed\",code=\"2xx\"}", 1.0).await;
}

#[tokio::test]
async fn an_error_behind_a_comment_is_a_typed_event() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let refusal = json!({"error": {"message": "no such tool", "type": "BadRequestError", "param": "tools", "code": 400}});
    let refuses = FakeEngine::always(Action::Refuse(400, refusal)).await;
    let system = TestRouter::with(&[&p], &[&refuses], "", COMMENTS).await;
    let mut client = waiting(&system).await;
    p.open_gate();
    let error = only_error(&mut client).await;
    assert_eq!((error["message"].as_str(), error["param"].as_str()), (Some("no such tool"), Some("tools")));
    p.wait("the release", |p| p.releases().len() == 1).await;
    system.counts("baton_router_requests_total{outcome=\"decode_refused\",code=\"2xx\"}", 1.0).await;
    // The response is complete, so the connection stays usable.
    client.post("/v1/nothing", &json!({})).await;
    assert_eq!(client.answer().await.status, 404);

    let closes = FakeEngine::always(Action::Close).await;
    let system = TestRouter::with(&[&p], &[&closes], "", COMMENTS).await;
    let mut client = waiting(&system).await;
    p.open_gate();
    assert_eq!(only_error(&mut client).await["type"], "server_error");
    system.counts("baton_router_requests_total{outcome=\"decode_exhausted\",code=\"2xx\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn an_error_behind_a_comment_has_the_form_of_responses() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let closes = FakeEngine::always(Action::Close).await;
    let system = TestRouter::with(&[&p], &[&closes], "    responses: translate", COMMENTS).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/responses", &json!({"model": "m", "input": "hi", "stream": true})).await;
    assert_eq!(client.head().await.0, 200);
    assert_eq!(client.chunk().await.as_deref(), Some(COMMENT));
    p.open_gate();
    let text = events(&mut client).await;
    let data = text.strip_prefix("event: error\ndata: ").and_then(|text| text.strip_suffix("\n\n"));
    let error: Value = serde_json::from_str(data.unwrap_or_else(|| panic!("{text}"))).unwrap();
    assert_eq!(
        (&error["type"], &error["sequence_number"], &error["error"]["code"]),
        (&json!("error"), &json!(0), &json!("server_error"))
    );
    system.settled().await;
}

#[tokio::test]
async fn a_whole_answer_behind_a_comment_is_an_error_of_its_engine() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Whole(9)).await;
    let system = TestRouter::with(&[&p], &[&d], "", COMMENTS).await;
    let mut client = waiting(&system).await;
    p.open_gate();
    assert_eq!(only_error(&mut client).await["type"], "server_error");
    system.settled().await;
}

#[tokio::test]
async fn a_request_in_the_queue_gets_comments_and_its_timeout_as_an_event() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let capacity = "    # the only place\n    timeouts: {}";
    let top = format!("{COMMENTS}\nqueue: {{timeout_ms: 300}}");
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - \
         name: m\n{capacity}\n    decode: {{capacity: {{max_in_flight: 1}}, engines: [{{url: '{}'}}]}}\n{top}\n",
        d.url()
    );
    let system = TestRouter::of(&yaml).await;
    let _first = waiting(&system).await;
    let mut second = waiting(&system).await;
    assert_eq!(only_error(&mut second).await["code"], "queue_timeout");
    assert_eq!(d.received().len(), 1);
    system.counts("baton_router_requests_total{outcome=\"not_admitted\",code=\"2xx\"}", 1.0).await;
}

#[tokio::test]
async fn a_client_that_leaves_behind_a_comment_is_noticed() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::Hang).await;
        let d = FakeEngine::always(Action::Stream(1)).await;
        let system = TestRouter::with(&[&p], &[&d], "", COMMENTS).await;
        let client = waiting(&system).await;
        client.hang_up(how);
        p.wait("the prefill is aborted", |p| p.aborts().len() == 1).await;
        system.settled().await;
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
        assert_eq!(d.received().len(), 0);
    }
}

#[tokio::test]
async fn a_client_without_chunks_gets_comments_too() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], "", COMMENTS).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(true).to_string();
    let head = format!("POST {PATH} HTTP/1.0\r\ncontent-length: {}\r\n\r\n", body.len());
    client.send((head + &body).as_bytes()).await;
    // A comment has sent it, because no event came.
    let (status, head) = client.head().await;
    assert_eq!((status, head.contains("chunked")), (200, false));
    d.open_gate();
    let rest = String::from_utf8(client.rest().await).unwrap();
    let events = rest.replace(": ka\n", "");
    assert!(rest.starts_with(": ka\n"), "{rest}");
    assert_eq!(events, format!("{}data: [DONE]\n\n", event(0)));
}
