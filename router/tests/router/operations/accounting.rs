//! The cost of a response in every format of the engines, and 200 responses that are invalid.

use baton_router::NewKey;
use serde_json::{Value, json};

use crate::harness::client::{Client, ClientResponse, completion, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest, event};
use crate::harness::system::TestRouter;

const HANDLE: u128 = 0xacc;
const JSON: (&str, &str) = ("content-type", "application/json");
const SSE: (&str, &str) = ("content-type", "text/event-stream");

/// One decode engine and a key with this many tokens per minute.
async fn limited(d: &FakeEngine, tokens: u64) -> (TestRouter, String) {
    let key = NewKey::make();
    let top = format!(
        "auth: {{keys: [{{id: a, hash: '{}', tenant: t, limits: {{tokens_per_minute: {tokens}}}}}]}}",
        key.hash
    );
    (TestRouter::with(&[], &[d], "", &top).await, key.key)
}

async fn ask(system: &TestRouter, key: &str, body: &Value) -> ClientResponse {
    let mut client = Client::connect(system.address).await;
    let headers = format!("Authorization: Bearer {key}\r\n");
    client.post_bytes("/v1/completions", &headers, body.to_string().as_bytes()).await;
    client.answer().await
}

/// Seconds until the next request is permitted.
async fn retry_after(system: &TestRouter, key: &str) -> u64 {
    let refused = ask(system, key, &json!({"model": "m", "prompt": "x", "max_tokens": 1})).await;
    assert_eq!(
        (refused.status, refused.code()),
        (429, "rate_limit_exceeded".to_owned()),
        "{}",
        refused.text()
    );
    refused.header("retry-after-ms").unwrap().parse::<u64>().unwrap() / 1000
}

fn short(stream: bool) -> Value {
    json!({"model": "m", "prompt": "x", "max_tokens": 8, "stream": stream})
}

#[tokio::test]
async fn a_stream_is_charged_by_its_tokens_at_any_framing() {
    let used = r#"data: {"choices":[],"usage":{"prompt_tokens":400,"completion_tokens":8000}}"#;
    let (comment, done) = (format!(": {}\n\n", "x".repeat(5000)), "data: [DONE]\n\n");
    let ids = format!("\"prompt_token_ids\":[{}1]", "12345,".repeat(2000));
    for pieces in [
        vec![event(0), format!("{used}\n\n{comment}"), done.to_owned()],
        vec![event(0), format!("{used}\nid: {comment}{done}")],
        vec![event(0), used[..40].to_owned(), format!("{}\n\n{done}", &used[40..])],
        vec![event(0), format!("{},{ids}}}\r\n\r\n{done}", &used[..used.len() - 1])],
        vec![event(0).replace('\n', "\r"), format!("{used}\r\r"), done.replace('\n', "\r")],
    ] {
        let d = FakeEngine::always(Action::Frames(pieces.clone(), true)).await;
        let (system, key) = limited(&d, 1000).await;
        let mut body = short(true);
        body["stream_options"] = json!({"include_usage": true});
        let answer = ask(&system, &key, &body).await;
        assert_eq!((answer.status, answer.text()), (200, pieces.concat()));
        let retry_after = retry_after(&system, &key).await;
        assert!(
            (430..=450).contains(&retry_after),
            "7,400 tokens more than a minute's worth: {retry_after} s"
        );
        system.counts("baton_router_tokens_total{model=\"m\",kind=\"completion\"}", 8000.0).await;
    }
}

#[tokio::test]
async fn two_thousand_events_in_one_write_cost_two_thousand_tokens() {
    let events: String = (0..2000).map(event).collect();
    let d = FakeEngine::always(Action::Frames(vec![events, "data: [DONE]\n\n".to_owned()], true)).await;
    let (system, key) = limited(&d, 1000).await;
    assert_eq!(ask(&system, &key, &short(true)).await.status, 200);
    let retry_after = retry_after(&system, &key).await;
    assert!(
        (55..=61).contains(&retry_after),
        "a thousand tokens more than a minute's worth: {retry_after} s"
    );
    system.counts("baton_router_tokens_total{model=\"m\",kind=\"completion\"}", 2000.0).await;
}

#[tokio::test]
async fn an_unstreamed_response_is_charged_for_usage_at_any_position() {
    let long = "7,".repeat(800_000);
    for behind in
        ["", &*format!(r#","prompt_logprobs":[null,[{}7]]"#, &long[..9000]), &*format!(r#","ids":[{long}7]"#)]
    {
        let body =
            format!(r#"{{"choices":[],"usage":{{"prompt_tokens":730,"completion_tokens":5270}}{behind}}}"#);
        let d = FakeEngine::always(Action::Bytes(vec![JSON], body.clone().into())).await;
        let (system, key) = limited(&d, 3000).await;
        let answer = ask(&system, &key, &short(false)).await;
        assert!(answer.status == 200 && answer.text() == body);
        let retry_after = retry_after(&system, &key).await;
        assert!((55..=61).contains(&retry_after), "{retry_after} s");
    }
}

#[tokio::test]
async fn an_empty_usage_is_unknown_and_not_nothing() {
    let frames =
        [(0..500).map(event).collect(), "data: {\"usage\":{}}\n\n".to_owned(), "data: [DONE]\n\n".to_owned()];
    let d = FakeEngine::always(Action::Frames(frames.to_vec(), true)).await;
    let (system, key) = limited(&d, 100).await;
    assert_eq!(ask(&system, &key, &short(true)).await.status, 200);
    assert!(retry_after(&system, &key).await > 200);
}

/// Includes usage if the request asks for it, as vLLM does.
fn counting(request: &ReceivedRequest) -> Option<Action> {
    let mut frames: Vec<String> = (0..3).map(event).collect();
    if request.body["stream_options"]["include_usage"] == true {
        frames.push(
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\n".to_owned(),
        );
    }
    frames.push("data: [DONE]\n\n".to_owned());
    Some(Action::Frames(frames, true))
}

#[tokio::test]
async fn the_usage_of_every_stream_is_known_and_sent_only_on_request() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Hang).await.with_rule(counting);
    let system = TestRouter::start(&[&p], &[&d]).await;
    for (options, requested) in [
        (None, false),
        (Some(json!(null)), false),
        (Some(json!({"include_usage": false, "continuous_usage_stats": true})), false),
        (Some(json!({"include_usage": true})), true),
    ] {
        let mut body = short(true);
        if let Some(options) = options {
            body["stream_options"] = options;
        }
        let answer = post(system.address, "/v1/completions", &body).await;
        assert_eq!((answer.status, answer.text().contains("usage")), (200, requested), "{body}");
        assert!(answer.text().starts_with(&(0..3).map(event).collect::<String>()));
        assert!(answer.text().ends_with("data: [DONE]\n\n"));
    }
    system.counts("baton_router_tokens_total{model=\"m\",kind=\"completion\"}", 12.0).await;
    system.counts("baton_router_tokens_total{model=\"m\",kind=\"prompt\"}", 28.0).await;
    let sent: Vec<_> =
        d.received().into_iter().map(|request| request.body["stream_options"].clone()).collect();
    assert!(sent.iter().all(|options| options["include_usage"] == true), "{sent:?}");
    assert_eq!(sent[2]["continuous_usage_stats"], false, "without `include_usage` it asks for nothing");
    assert!(p.received().iter().all(|request| request.body.get("stream_options").is_none()));
    assert_eq!(post(system.address, "/v1/completions", &short(false)).await.status, 200);
    assert!(d.received().last().unwrap().body.get("stream_options").is_none(), "only of streams");
}

#[tokio::test]
async fn an_engine_that_refuses_the_usage_option_serves_streams_without_it() {
    let d = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        if request.body.get("stream_options").is_some() {
            return Some(Action::Refuse(400, json!({"error": {"message": "Bad request"}})));
        }
        counting(request)
    });
    let system = TestRouter::start(&[], &[&d]).await;
    for requested in [2, 3, 4] {
        let answer = post(system.address, "/v1/completions", &short(true)).await;
        assert_eq!((answer.status, d.received().len()), (200, requested), "{}", answer.text());
    }
    // A client that requests usage itself reads the refusal.
    let mut body = short(true);
    body["stream_options"] = json!({"include_usage": true});
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 400);
    assert_eq!(d.received().len(), 5);
}

#[tokio::test]
async fn a_refusal_for_another_reason_is_retried_once_and_forwarded() {
    let d = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        if request.body["prompt"] == "bad" {
            return Some(Action::Refuse(400, json!({"error": {"message": "no such thing"}})));
        }
        counting(request)
    });
    let system = TestRouter::start(&[], &[&d]).await;
    let bad = json!({"model": "m", "prompt": "bad", "stream": true});
    let answer = post(system.address, "/v1/completions", &bad).await;
    assert_eq!((answer.status, answer.text().contains("no such thing"), d.received().len()), (400, true, 2));
    assert_eq!(post(system.address, "/v1/completions", &short(true)).await.status, 200);
    assert_eq!(post(system.address, "/v1/completions", &bad).await.status, 400);
    assert_eq!(d.received().len(), 4, "it is known to take it");
}

#[tokio::test]
async fn a_200_without_a_response_is_an_error_without_addresses() {
    let error = r#"{"error":{"message":"lost 10.0.0.7:8000","type":"InternalServerError","code":500}}"#;
    let refusal = r#"{"object":"error","message":"too long","code":400}"#;
    for (bytes, headers, status) in [
        (error, vec![JSON], 502),
        (refusal, vec![JSON], 400),
        (r#"{"choices":[{"text":"10.0.0.7"#, vec![JSON], 502),
        (r#"{"choices":[{"text":"a"}]"#, vec![JSON], 502),
        ("", vec![JSON], 502),
        ("<html>10.0.0.7</html>", vec![("content-type", "text/html")], 502),
        ("<html>10.0.0.7</html>", vec![], 502),
    ] {
        let d = FakeEngine::always(Action::Bytes(headers, bytes.into())).await;
        let system = TestRouter::start(&[], &[&d]).await;
        let answer = post(system.address, "/v1/completions", &completion(false)).await;
        assert_eq!(answer.status, status, "{bytes}: {}", answer.text());
        assert!(
            !answer.code().contains("10.0.0.7") && !answer.text().contains("10.0.0.7"),
            "{}",
            answer.text()
        );
        assert_eq!(
            system
                .metric("baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}")
                .await,
            0.0
        );
        system.settled().await;
    }
}

#[tokio::test]
async fn an_error_in_an_oversized_response_is_an_error() {
    // Larger than the budget for all responses.
    let bulk = "1,".repeat(800_000);
    let error = |message: &str| {
        format!(r#""error":{{"message":"{message}","type":"x","code":400,"at":"10.0.0.7:8000"}}"#)
    };
    let whole = format!(r#"{{{},"ids":[{bulk}1]}}"#, error("lost"));
    let page = format!("<html>{bulk} 10.0.0.7</html>");
    let late = format!(r#"{{"choices":[],"ids":[{bulk}1],{}}}"#, error("lost"));
    let split = format!(r#"{{"choices":[],"ids":[{bulk}1],{}}}"#, error(&bulk));
    for (path, body, status) in [
        ("completions", &whole, Some(502)),
        ("completions", &page, Some(502)),
        ("completions", &late, None),
        ("completions", &split, None),
        ("embeddings", &late, None),
        ("embeddings", &format!("{{\"data\":[{bulk}"), None),
    ] {
        let d = FakeEngine::always(Action::Bytes(vec![JSON], body.clone().into())).await;
        let top = "limits: {body_bytes: 4096, body_bytes_total: 1048576}";
        let system = TestRouter::with(&[], &[&d], "", top).await;
        let mut client = Client::connect(system.address).await;
        let requested = json!({"model": "m", "prompt": "x", "input": "x", "max_tokens": 8});
        client.post(&format!("/v1/{path}"), &requested).await;
        match status {
            Some(status) => {
                let answer = client.answer().await;
                assert_eq!(answer.status, status, "{path} {body:.40}");
                assert!(
                    !answer.code().is_empty() && !answer.text().contains("10.0.0.7"),
                    "{}",
                    answer.text()
                );
            }
            None => {
                assert_eq!(client.head().await.0, 200);
                let read = client.rest().await;
                let text = String::from_utf8_lossy(&read);
                assert!(!text.ends_with("0\r\n\r\n") && !text.contains("10.0.0.7"), "{path} {body:.40}");
            }
        }
        system.settled().await;
        let good = format!(
            "baton_router_requests_total{{model=\"m\",outcome=\"{}\",code=\"2xx\"}}",
            if path == "embeddings" { "passed" } else { "completed" }
        );
        assert_eq!(system.metric(&good).await, 0.0, "{path} {body:.40}");
    }
}

#[tokio::test]
async fn an_error_over_several_lines_of_an_event_is_an_error() {
    let split = "data: {\"error\": {\"message\":\ndata: \"lost 10.0.0.7:8000\",\ndata: \"code\": 500}}\n\n";
    for (line, ends) in [(split.to_owned(), "\n\n"), (split.replace('\n', "\r"), "\r\r")] {
        let frames = vec![event(0).replace("\n\n", ends), line, format!("data: [DONE]{ends}")];
        let d = FakeEngine::always(Action::Frames(frames, true)).await;
        let system = TestRouter::start(&[], &[&d]).await;
        let answer = post(system.address, "/v1/completions", &completion(true)).await;
        let text = answer.text();
        assert!(
            text.contains("\"error\"") && text.contains("bad_gateway") && !text.contains("10.0.0.7"),
            "{text}"
        );
        assert!(text.ends_with("data: [DONE]\n\n"));
        assert_eq!(
            system
                .metric("baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}")
                .await,
            0.0
        );
        system.settled().await;
    }
}

#[tokio::test]
async fn a_stream_whose_lines_end_with_cr_is_served_as_it_comes() {
    let stream = "\u{feff}data:{\"choices\":[]}\r\r: c\r\rdata: [DONE]\r\r";
    let d = FakeEngine::always(Action::Bytes(vec![SSE], stream.into())).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, &*answer.text()), (200, stream));
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}", 1.0).await;
}

#[tokio::test]
async fn a_prefill_engines_error_under_a_200_is_its_failure() {
    let fails = FakeEngine::always(Action::Json(json!({"error": {"message": "x", "code": 503}}))).await;
    let leasing = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&fails, &leasing], &[&d], "", "").await;
    for _ in 0..4 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert!(
        d.received().iter().all(|request| request.body["kv_transfer_params"].is_object()),
        "each has a handoff"
    );
    assert!(!fails.received().is_empty());
}
