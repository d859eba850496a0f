//! One complete, correctly nested trace per request, and W3C trace context on both legs. A failing collector affects
//! only itself.

use serde_json::{Value, json};

use crate::harness::client::{Client, DisconnectKind, completion, post};
use crate::harness::collector::{Collector, Span};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const NAME: &str = "POST /v1/completions";

async fn ask(system: &TestRouter, headers: &str, body: &Value) -> crate::harness::client::ClientResponse {
    let mut client = Client::connect(system.address).await;
    client.post_bytes("/v1/completions", headers, body.to_string().as_bytes()).await;
    client.answer().await
}

fn context(engine: &FakeEngine, name: &str) -> Option<String> {
    let requests = engine.received();
    requests[0].headers.get(name).map(|value| value.to_str().unwrap().to_owned())
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no {name}: {spans:#?}"));
    assert!(found.next().is_none(), "{name} twice");
    span
}

#[tokio::test]
async fn a_request_is_one_trace_and_both_legs_continue_it() {
    let collector = Collector::start().await;
    let answer = json!({"id": "d", "choices": [{"text": "t", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}});
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Refuse(200, answer)).await;
    let folder = tempfile::tempdir().unwrap();
    let secrets = folder.path().join("headers");
    std::fs::write(&secrets, "authorization: Bearer collector-key\n\nx-scope: a b\n").unwrap();
    let more = format!(
        ", headers_file: '{}', service_name: door, sample_ratio: 0.0, resource: {{deployment.environment.name: test}}",
        secrets.display()
    );
    let system = TestRouter::with(&[&p], &[&d], "", &collector.yaml(&more)).await;
    let headers =
        format!("traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: vendor=1\r\nuser-agent: test/1\r\n");
    assert_eq!(ask(&system, &headers, &completion(false)).await.status, 200);
    collector.has(NAME, 1).await;
    let spans = collector.spans();
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(spans.len(), 6, "{names:?}");
    let (server, queue, prefill) = (named(&spans, NAME), named(&spans, "queue"), named(&spans, "prefill"));
    let (gap, decode, fetch) = (named(&spans, "gap"), named(&spans, "decode"), named(&spans, "fetch"));
    assert!(spans.iter().all(|span| span.trace == TRACE && span.status != 2), "{spans:#?}");
    assert_eq!((server.parent.as_str(), server.kind), (PARENT, 2));
    for child in [queue, prefill, gap, decode] {
        assert_eq!(child.parent, server.id, "{}", child.name);
    }
    assert_eq!((fetch.parent.as_str(), prefill.kind, decode.kind, gap.kind), (decode.id.as_str(), 3, 3, 1));
    let mut ids: Vec<_> = spans.iter().map(|span| span.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 6);
    // The spans of the legs are the parents of the engines' spans.
    assert_eq!(context(&p, "traceparent").unwrap(), format!("00-{TRACE}-{}-01", prefill.id));
    assert_eq!(context(&d, "traceparent").unwrap(), format!("00-{TRACE}-{}-01", decode.id));
    assert_eq!(context(&d, "tracestate").unwrap(), "vendor=1");
    // Each phase ends where the next one begins.
    assert_eq!((server.start_ns, queue.end_ns), (queue.start_ns, prefill.start_ns));
    assert_eq!(
        (prefill.end_ns, gap.end_ns, decode.start_ns),
        (gap.start_ns, decode.start_ns, fetch.start_ns)
    );
    assert!(decode.end_ns <= server.end_ns && fetch.end_ns <= decode.end_ns);
    let took = |span: &Span| span.end_ns - span.start_ns;
    let sum = [queue, prefill, gap, decode].map(took).iter().sum::<u128>();
    assert_eq!(sum, decode.end_ns - server.start_ns, "the phases add up");
    for (key, value) in [
        ("gen_ai.request.model", json!("m")),
        ("gen_ai.operation.name", json!("text_completion")),
        ("gen_ai.usage.input_tokens", json!("7")),
        ("gen_ai.usage.output_tokens", json!("2")),
        ("http.request.method", json!("POST")),
        ("user_agent.original", json!("test/1")),
        ("baton.outcome", json!("completed")),
    ] {
        assert_eq!(server.attributes[key], value, "{key}");
    }
    assert_eq!(server.attributes["http.response.status_code"].to_string().trim_matches('"'), "200");
    assert_eq!(server.attributes["gen_ai.response.finish_reasons"]["values"][0]["stringValue"], "length");
    assert_eq!(prefill.attributes["server.address"], json!(p.address.to_string()));
    let (sent, body) = &collector.received()[0];
    assert_eq!(
        (&sent["authorization"], &sent["x-scope"]),
        (&"Bearer collector-key".parse().unwrap(), &"a b".parse().unwrap())
    );
    let resource = body["resourceSpans"][0]["resource"].to_string();
    assert!(resource.contains("\"door\"") && resource.contains("deployment.environment.name"), "{resource}");
    assert!(!body.to_string().contains("hello"), "no prompt");
    system.counts("baton_router_spans_total", 6.0).await;
}

#[tokio::test]
async fn a_cancel_is_recorded_in_its_phase() {
    let collector = Collector::start().await;
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::StreamGated(9)).await;
    let system = TestRouter::with(&[&p], &[&d], "", &collector.yaml("")).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    assert_eq!(client.head().await.0, 200);
    client.chunk().await.unwrap();
    client.hang_up(DisconnectKind::Fin);
    let server = collector.has(NAME, 1).await.remove(0);
    assert_eq!((server.status, server.message.as_str()), (2, "client_gone in decode_stream"));
    assert_eq!(server.parent, "", "the trace begins here");
    let spans = collector.spans();
    assert_eq!((named(&spans, "decode").status, named(&spans, "prefill").status), (2, 0));
    assert_eq!(server.attributes["error.type"], "client_gone");
}

#[tokio::test]
async fn an_unsampled_trace_is_forwarded_and_not_exported() {
    let collector = Collector::start().await;
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&d], "", &collector.yaml("")).await;
    ask(&system, &format!("traceparent: 00-{TRACE}-{PARENT}-00\r\n"), &completion(false)).await;
    let sent = context(&d, "traceparent").unwrap();
    assert!(sent.starts_with(&format!("00-{TRACE}-")) && sent.ends_with("-00"), "{sent}");
    // The next request is recorded: all spans of the first one were sent before.
    ask(&system, "traceparent: hostile\r\ntracestate: lost=1\r\n", &completion(false)).await;
    let server = collector.has(NAME, 1).await;
    assert!(server.len() == 1 && server[0].trace != TRACE);
    let headers = &d.received()[1].headers;
    assert!(headers["traceparent"].to_str().unwrap().contains(&server[0].trace));
    assert!(headers.get("tracestate").is_none());
}

#[tokio::test]
async fn without_telemetry_a_good_context_passes_and_a_bad_one_does_not() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let good = format!("00-{TRACE}-{PARENT}-01");
    ask(&system, &format!("traceparent: {good}\r\ntracestate: vendor=1\r\n"), &completion(false)).await;
    for engine in [&p, &d] {
        assert_eq!(context(engine, "traceparent").as_deref(), Some(good.as_str()));
        assert_eq!(context(engine, "tracestate").as_deref(), Some("vendor=1"));
    }
    for bad in ["00-1-2-3", &good.to_uppercase()] {
        ask(&system, &format!("traceparent: {bad}\r\n"), &completion(false)).await;
        assert!(d.received().pop().unwrap().headers.get("traceparent").is_none(), "{bad}");
    }
    ask(&system, "", &completion(false)).await;
    assert!(d.received().pop().unwrap().headers.get("traceparent").is_none());
}

#[tokio::test]
async fn a_failing_collector_drops_spans_and_delays_no_request() {
    let collector = Collector::start().await;
    collector.answers(503);
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", &collector.yaml("")).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    // Server, queue, decode, fetch.
    system.counts("baton_router_spans_dropped_total{reason=\"export_failed\"}", 4.0).await;
    collector.answers(0);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    collector.has(NAME, 1).await;

    let silent = Collector::start().await;
    silent.answers(1);
    let system = TestRouter::with(&[], &[&d], "", &silent.yaml(", queue: 1, timeout_ms: 60000")).await;
    let dropped = "baton_router_spans_dropped_total{reason=\"queue_full\"}";
    let mut requests = 0;
    while system.metric(dropped).await == 0.0 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        requests += 1;
        assert!(requests < 2000, "the queue has no bound");
    }
}

#[tokio::test]
async fn pending_spans_are_exported_at_shutdown() {
    let collector = Collector::start().await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let mut system = TestRouter::with(&[], &[&d], "", &collector.yaml("")).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    await_requests(&d, 1).await;
    system.shut_down();
    system.stopped().await;
    assert_eq!(collector.spans().iter().filter(|span| span.name == NAME).count(), 1);
}
