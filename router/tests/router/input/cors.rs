//! Requests of browsers from pages of other origins.

use baton_router::NewKey;

use crate::harness::client::{Client, ClientResponse, completion};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, event};
use crate::harness::system::TestRouter;

const PAGE: &str = "https://chat.example.com";

/// Sends a request whose head has these further lines.
async fn ask(system: &TestRouter, line: &str, headers: &str, body: &str) -> ClientResponse {
    let mut client = Client::connect(system.address).await;
    let head = format!("{line} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
    client.send(head.as_bytes()).await;
    client.answer().await
}

fn allowed(answer: &ClientResponse) -> (Option<&str>, Option<&str>) {
    (answer.header("access-control-allow-origin"), answer.header("vary"))
}

#[tokio::test]
async fn a_page_of_a_listed_origin_reads_streams_answers_and_errors() {
    let key = NewKey::make();
    let d = FakeEngine::always(Action::Stream(1)).await;
    let top = format!(
        "cors: {{origins: ['{PAGE}'], headers: [x-app]}}\nauth:\n  keys: [{{id: a, hash: '{}', tenant: a}}]\n",
        key.hash
    );
    let system = TestRouter::with(&[], &[&d], "", &top).await;
    let origin = format!("Origin: {PAGE}\r\n");
    // Without the key, as browsers send it.
    let preflight = format!(
        "{origin}Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization, \
         content-type, x-app, x-stainless-os, x-other\r\n"
    );
    let answer = ask(&system, "OPTIONS /v1/chat/completions", &preflight, "").await;
    assert_eq!((answer.status, allowed(&answer)), (200, (Some(PAGE), Some("origin"))));
    assert_eq!(
        answer.header("access-control-allow-headers"),
        Some("authorization, content-type, x-app, x-stainless-os")
    );
    assert_eq!(answer.header("access-control-allow-methods"), Some("GET, HEAD, POST"));
    assert_eq!(answer.header("access-control-max-age"), Some("600"));
    assert_eq!(answer.header("access-control-allow-credentials"), None);

    let with_key = format!("{origin}Authorization: Bearer {}\r\ncontent-type: application/json\r\n", key.key);
    let body = completion(true).to_string();
    let answer = ask(&system, "POST /v1/completions", &with_key, &body).await;
    assert_eq!((answer.status, allowed(&answer)), (200, (Some(PAGE), Some("origin"))));
    assert!(answer.text().starts_with(&event(0)));
    assert!(
        answer.header("access-control-expose-headers").is_some_and(|names| names.contains("retry-after"))
    );
    for (line, headers, body, status) in [
        ("POST /v1/completions", &origin, &*body, 401),
        ("GET /v1/models", &with_key, "", 200),
        ("GET /v1/models/none", &with_key, "", 404),
        ("GET /nowhere", &origin, "", 404),
        ("DELETE /v1/models", &origin, "", 405),
        ("POST /v1/completions", &with_key, "{", 400),
        ("GET /health", &origin, "", 200),
    ] {
        let answer = ask(&system, line, headers, body).await;
        assert_eq!((answer.status, allowed(&answer)), (status, (Some(PAGE), Some("origin"))), "{line}");
    }
    let asked = |request: &&ReceivedRequest| request.path == "/v1/completions";
    assert_eq!(d.received().iter().filter(asked).count(), 1, "refused requests reach no engine");
    // Another page, and a client that is no browser.
    for headers in [preflight.replace(PAGE, "https://evil.example"), String::new()] {
        let answer = ask(&system, "OPTIONS /v1/chat/completions", &headers, "").await;
        assert_eq!((answer.status, allowed(&answer)), (200, (None, Some("origin"))));
        assert_eq!(answer.header("access-control-allow-headers"), None);
    }
}

#[tokio::test]
async fn without_origins_no_page_is_allowed() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let preflight = format!("Origin: {PAGE}\r\nAccess-Control-Request-Method: POST\r\n");
    for line in ["OPTIONS /v1/completions", "GET /v1/models"] {
        let answer = ask(&system, line, &preflight, "").await;
        assert_eq!((answer.status, allowed(&answer)), (200, (None, None)), "{line}");
        assert!(!answer.head.contains("access-control"), "{}", answer.head);
    }
}

#[tokio::test]
async fn a_stream_that_a_comment_has_begun_can_be_read_by_its_page() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let top = "cors: {origins: ['*']}\ntimeouts: {sse_keepalive_ms: 100}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(true).to_string();
    client.post_bytes("/v1/completions", &format!("Origin: {PAGE}\r\n"), body.as_bytes()).await;
    let (status, head) = client.head().await;
    assert_eq!(status, 200);
    let head = head.to_ascii_lowercase();
    assert!(head.contains("access-control-allow-origin: *\r\n") && !head.contains("vary"), "{head}");
    assert_eq!(client.chunk().await.as_deref(), Some(&b": ka\n"[..]));
    d.open_gate();
}
