//! One request's trace from end to end: a client with a `traceparent`, a router with `deploy/otel/router.yaml`, a
//! prefill and a decode engine, each a process, and a receiver that parses OTLP by the protocol's own types. Proxies
//! record the requests to the engines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;

use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{
    EngineSnapshot, GenerateRequest, HangUp, MODEL, PATIENCE, PendingCall, Process, Proxy, Signal,
    eventually, metric,
};
use crate::receiver::{ReceivedRequest, Receiver, attribute_map, hex};
use crate::{collector, ours, read};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
/// Values of `SpanKind`.
const KINDS: [(i32, &str); 3] = [(1, ""), (2, "server"), (3, "client")];
/// A value of `StatusCode`.
const ERROR: i32 = 2;

/// A router and two engines, with a recording proxy on each link between them.
struct TracedRequest {
    receiver: Receiver,
    folder: TempDir,
    prefill: Process,
    decode: Process,
    /// From the router to the prefill engine, and to the decode engine.
    ways: [Proxy; 2],
    router: Process,
}

impl TracedRequest {
    /// The router's configuration is the example's, with other addresses, another model name, and another path of the
    /// log.
    fn start() -> Self {
        let (receiver, folder) = (Receiver::start(), tempfile::tempdir().expect("a temporary folder"));
        let engine = |role: &str| {
            let line = format!("engine --role {role} --listen 127.0.0.1:0 --kv-cache-mib 32 --threads 1");
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            Process::start(role, &words, folder.path())
        };
        let (mut prefill, mut decode) = (engine("prefill"), engine("decode"));
        let way = |engine: &mut Process| {
            engine.wait_ready();
            let target: SocketAddr = engine.fact("http").parse().expect("an address");
            Proxy::start(SocketAddr::from(([127, 0, 0, 1], 0)), target).expect("a free port")
        };
        let ways = [way(&mut prefill), way(&mut decode)];
        let mut config = read(&ours("deploy/otel/router.yaml"));
        for (theirs, ours) in [
            ("http://127.0.0.1:4318", format!("http://{}", receiver.address)),
            ("http://127.0.0.1:9001", format!("http://{}", ways[0].address)),
            ("http://127.0.0.1:9002", format!("http://{}", ways[1].address)),
            ("my-model", MODEL.to_owned()),
            ("/var/log/baton", folder.path().display().to_string()),
        ] {
            assert_eq!(config.matches(theirs).count(), 1, "{theirs} in {config}");
            config = config.replace(theirs, &ours);
        }
        config.push_str("listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\n");
        let file = folder.path().join("router.yaml");
        fs::write(&file, config).expect("the test's folder can be written");
        let args = ["router", "--config", &file.display().to_string()].map(str::to_owned);
        let mut router = Process::start("router", &args, folder.path());
        router.wait_ready();
        Self { receiver, folder, prefill, decode, ways, router }
    }

    fn send(&self, ask: &GenerateRequest, headers: &str) -> PendingCall {
        let body = ask.body.to_string();
        PendingCall::try_with(&self.router.fact("http"), "POST", ask.path, headers, body.as_bytes())
            .expect("it listens")
    }

    /// The spans of the trace whose server span has this attribute. The server span is sent last.
    fn trace(&self, key: &str, value: &str) -> Vec<ReceivedRequest> {
        eventually(PATIENCE, &format!("a trace with {key} {value} arrives"), || {
            let spans = self.receiver.spans();
            let of = |one: &&ReceivedRequest| {
                attribute_map(&one.span.attributes).get(key).is_some_and(|found| found == value)
            };
            let server = spans.iter().find(of).ok_or_else(|| format!("{} other spans", spans.len()))?;
            let id = server.span.trace_id.clone();
            Ok(spans.iter().filter(|one| one.span.trace_id == id).cloned().collect())
        })
    }

    /// The line of a trace in the access log.
    fn line(&self, trace: &str) -> Value {
        eventually(PATIENCE, "the request is logged", || {
            let text = fs::read_to_string(self.folder.path().join("access.log")).unwrap_or_default();
            let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.find(|line| line["trace_id"] == trace).ok_or(text.clone())
        })
    }

    /// The values of a header in the requests of one leg.
    fn header_values(&self, leg: usize, name: &str) -> BTreeSet<String> {
        let received = self.ways[leg].received();
        let values = received.lines().filter_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then(|| value.to_owned())
        });
        values.collect()
    }
}

fn get(engine: &Process, path: &str) -> Value {
    PendingCall::new(&engine.fact("http"), "GET", path, b"").reply().json()
}

/// The tree of `docs/reference/traces.md`: each span's name with its kind and its parent's name, the first without one.
fn documented() -> BTreeMap<String, (String, Option<String>)> {
    let page = read(&ours("docs/reference/traces.md"));
    let (_, rest) = page.split_once("```text\nPOST /v1/").expect("the tree");
    let tree = format!("POST /v1/{}", rest.split("```").next().unwrap_or_default());
    let mut above: Vec<String> = Vec::new();
    let mut spans = BTreeMap::new();
    for line in tree.lines() {
        let depth = line.chars().take_while(|c| " │├└─".contains(*c)).count() / 3;
        let words = line.trim_start_matches([' ', '│', '├', '└', '─']);
        let (name, rest) = words.split_once("  ").unwrap_or((words, ""));
        let kind_name = rest.split_whitespace().next().unwrap_or_default();
        let kind = if ["server", "client"].contains(&kind_name) { kind_name } else { "" };
        above.truncate(depth);
        spans.insert(name.trim().to_owned(), (kind.to_owned(), above.last().cloned()));
        above.push(name.trim().to_owned());
    }
    spans
}

fn named<'a>(spans: &'a [ReceivedRequest], name: &str) -> &'a Span {
    let mut found = spans.iter().filter(|one| one.span.name == name);
    let span = &found.next().unwrap_or_else(|| panic!("no {name}: {spans:?}")).span;
    assert!(found.next().is_none(), "{name} twice");
    span
}

/// Checks the tree of the spans, with their kinds, against the page.
fn is_documented_tree(spans: &[ReceivedRequest]) {
    let documented = documented();
    assert_eq!(documented.len(), 6, "{documented:?}");
    let here: BTreeSet<_> = spans.iter().map(|one| one.span.name.as_str()).collect();
    assert_eq!(here, documented.keys().map(String::as_str).collect());
    for (name, (kind, parent)) in &documented {
        let span = named(spans, name);
        assert_eq!(
            KINDS.iter().find(|(number, _)| *number == span.kind).map(|(_, word)| *word),
            Some(kind.as_str()),
            "{name}"
        );
        if let Some(parent) = parent {
            let parent = named(spans, parent);
            assert_eq!(hex(&span.parent_span_id), hex(&parent.span_id), "{name}");
            let inside = parent.start_time_unix_nano <= span.start_time_unix_nano
                && span.end_time_unix_nano <= parent.end_time_unix_nano;
            assert!(inside, "{name}: {span:?} in {parent:?}");
        }
    }
    let ids: BTreeSet<_> = spans.iter().map(|one| hex(&one.span.span_id)).collect();
    assert!(ids.len() == spans.len() && ids.iter().all(|id| id.len() == 16), "{ids:?}");
    for one in spans {
        assert_eq!(one.scope, "baton-router");
        assert_eq!(one.resource["service.name"], "baton-router");
        assert_eq!(one.resource["service.version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(one.resource["deployment.environment.name"], "prod");
    }
}

/// The attributes of the page's table.
fn attributes() -> Vec<String> {
    let page = read(&ours("docs/reference/traces.md"));
    let (_, rest) = page.split_once("<!-- attributes: begin -->").expect("the table begins");
    let (table, _) = rest.split_once("<!-- attributes: end -->").expect("the table ends");
    table.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned())).collect()
}

#[test]
fn one_request_is_one_trace_across_both_engines_even_after_a_cancel() {
    let mut traced = TracedRequest::start();
    let ask = GenerateRequest::recall(20).with("stream_options", Value::Null);
    let headers = format!(
        "traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: vendor=1\r\nuser-agent: test/1\r\nx-request-id: mine\r\n"
    );
    let reply = traced.send(&ask, &headers).reply();
    assert_eq!((reply.status, reply.header("x-request-id").as_deref()), (200, Some("mine")));
    let answer = reply.json();
    let whole = traced.trace("user_agent.original", "test/1");
    is_documented_tree(&whole);
    let server = named(&whole, "POST /v1/chat/completions");
    assert_eq!((hex(&server.trace_id).as_str(), hex(&server.parent_span_id).as_str()), (TRACE, PARENT));
    assert!(whole.iter().all(|one| one.span.status.as_ref().is_none_or(|status| status.code != ERROR)));
    // Each phase ends where the next one begins.
    let [queue, prefill, gap, decode] = ["queue", "prefill", "gap", "decode"].map(|name| named(&whole, name));
    for (one, next) in [(queue, prefill), (prefill, gap), (gap, decode)] {
        assert_eq!(one.end_time_unix_nano, next.start_time_unix_nano, "{} and {}", one.name, next.name);
    }
    // Engines get their leg's span, the client's state, and the request id.
    let server_attributes = attribute_map(&server.attributes);
    let request = server_attributes["baton.request_id"].clone();
    for (leg, span) in [(0, prefill), (1, decode)] {
        assert_eq!(
            traced.header_values(leg, "traceparent"),
            [format!("00-{TRACE}-{}-01", hex(&span.span_id))].into()
        );
        assert_eq!(traced.header_values(leg, "tracestate"), ["vendor=1".to_owned()].into());
        assert_eq!(traced.header_values(leg, "x-request-id"), [request.clone()].into());
        let of = attribute_map(&span.attributes);
        assert_eq!(
            (of["baton.attempts"].as_str(), of["server.address"].as_str()),
            ("1", &*traced.ways[leg].address.to_string())
        );
    }
    // The request id finds the entries of the engines' event logs, and the line of the access log.
    for engine in [&traced.prefill, &traced.decode] {
        let events = get(engine, "/debug/kv/events?wait_ms=0");
        let events = events["events"].as_array().expect("a list");
        assert!(events.iter().any(|event| event["request_id"] == request.as_str()), "{events:?}");
    }
    let line = traced.line(TRACE);
    assert_eq!((&line["request_id"], &line["client_request_id"]), (&request.as_str().into(), &"mine".into()));
    collector::reads_line(&line);
    // The numbers are those of the response.
    let usage = &answer["usage"];
    for (key, value) in [
        ("gen_ai.usage.input_tokens", usage["prompt_tokens"].to_string()),
        ("gen_ai.usage.output_tokens", usage["completion_tokens"].to_string()),
        (
            "gen_ai.response.finish_reasons",
            answer["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned(),
        ),
        ("gen_ai.operation.name", "chat".to_owned()),
        ("gen_ai.request.model", MODEL.to_owned()),
        ("http.response.status_code", "200".to_owned()),
        ("http.response.body.size", reply.body.len().to_string()),
        ("http.request.body.size", ask.body.to_string().len().to_string()),
        ("url.path", "/v1/chat/completions".to_owned()),
        ("baton.outcome", "completed".to_owned()),
    ] {
        assert_eq!(server_attributes.get(key), Some(&value), "{key}");
    }

    // A client without a context disconnects while a decode engine has its handoff and has not responded.
    traced.decode.signal(Signal::Pause);
    let left = GenerateRequest::recall(21);
    let leaving = traced.send(&left, "user-agent: test/2\r\n");
    eventually(PATIENCE, "the decode engine is asked", || {
        let asked = traced.ways[1].received().matches("POST /v1/chat/completions").count();
        if asked == 2 { Ok(()) } else { Err(format!("{asked} requests")) }
    });
    leaving.hang_up(HangUp::Fin);
    let cut = traced.trace("user_agent.original", "test/2");
    is_documented_tree(&cut);
    // No decode engine accepted it: the span lasts to the end.
    let [decode, fetch] = ["decode", "fetch"].map(|name| named(&cut, name));
    assert_eq!(decode.end_time_unix_nano, fetch.end_time_unix_nano);
    let server = named(&cut, "POST /v1/chat/completions");
    assert!(
        server.parent_span_id.is_empty() && hex(&server.trace_id) != TRACE,
        "this trace begins here: {server:?}"
    );
    let failed = |span: &Span| {
        span.status.as_ref().filter(|status| status.code == ERROR).map(|status| status.message.clone())
    };
    assert_eq!(failed(server).as_deref(), Some("client_gone in decode_pre_first"));
    assert!(failed(named(&cut, "decode")).is_some() && failed(named(&cut, "prefill")).is_none());
    let cancelled = attribute_map(&server.attributes);
    assert_eq!(
        (cancelled["error.type"].as_str(), cancelled["baton.outcome"].as_str()),
        ("client_gone", "client_gone")
    );
    let trace = hex(&server.trace_id);
    for (leg, name) in [(0, "prefill"), (1, "decode")] {
        // 3: sampled, and a random id.
        let parent = format!("00-{trace}-{}-03", hex(&named(&cut, name).span_id));
        assert!(
            traced.header_values(leg, "traceparent").contains(&parent),
            "{name}: {:?}",
            traced.header_values(leg, "traceparent")
        );
    }
    let line = traced.line(&trace);
    assert_eq!((&line["status"], &line["disconnect_phase"]), (&499.into(), &"decode_pre_first".into()));
    collector::reads_line(&line);
    traced.decode.signal(Signal::Continue);
    for engine in [&traced.prefill, &traced.decode] {
        let free = || match EngineSnapshot::read(&get(engine, "/debug/kv")) {
            snapshot if snapshot.is_baseline() => Ok(()),
            snapshot => Err(format!("{snapshot:?}")),
        };
        eventually(PATIENCE, "every block is free", free);
    }

    // The two traces have exactly the attributes that the page names, and no word of a prompt.
    let spans = traced.receiver.spans();
    let seen: BTreeSet<String> =
        spans.iter().flat_map(|one| attribute_map(&one.span.attributes).into_keys()).collect();
    let page = attributes();
    let means =
        |page: &str, key: &str| page.strip_suffix('*').map_or(page == key, |start| key.starts_with(start));
    let unnamed: Vec<_> = seen.iter().filter(|key| !page.iter().any(|name| means(name, key))).collect();
    let unseen: Vec<_> = page.iter().filter(|name| !seen.iter().any(|key| means(name, key))).collect();
    assert!(
        unnamed.is_empty() && unseen.is_empty(),
        "the page does not name {unnamed:?}; no span has {unseen:?}"
    );
    assert!(!format!("{spans:?}").contains("lives in"), "a prompt's words");
    let counted = PendingCall::new(&traced.router.fact("admin"), "GET", "/metrics", b"").reply();
    let counted = metric(&String::from_utf8_lossy(&counted.body), "baton_router_spans_total", "");
    assert_eq!(counted, spans.len() as f64);
}
