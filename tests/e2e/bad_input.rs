//! Invalid requests: each gets a 4xx in OpenAI's envelope and leaves nothing held. If the router can detect the error,
//! no engine receives the request. Clients can choose neither an engine, nor a handle, nor another request's name.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::TcpListener;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, PendingCall, eventually};
use crate::refusals::refusal;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Larger than any valid row of the tables.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// One row: its subject, the request, and the response's status and `code` (`""`: any).
struct BadRequestCase {
    what: String,
    method: &'static str,
    path: &'static str,
    body: Vec<u8>,
    status: u16,
    code: &'static str,
}

fn row(
    what: &str,
    path: &'static str,
    body: impl Into<Vec<u8>>,
    status: u16,
    code: &'static str,
) -> BadRequestCase {
    BadRequestCase { what: what.to_owned(), method: "POST", path, body: body.into(), status, code }
}

/// A completion with one more field, whose value is written as given.
fn with(field: &str, value: &str) -> BadRequestCase {
    let body = format!(r#"{{"model":"baton-demo","prompt":"Hi","{field}":{value}}}"#);
    row(&format!("{field} = {value}"), COMPLETIONS, body, 400, "")
}

fn chat_with(field: &str, value: &str) -> BadRequestCase {
    let hello = r#"[{"role":"user","content":"Hi"}]"#;
    let body = match field {
        "messages" => format!(r#"{{"model":"baton-demo","messages":{value}}}"#),
        _ => format!(r#"{{"model":"baton-demo","messages":{hello},"{field}":{value}}}"#),
    };
    row(&format!("chat: {field} = {value}"), CHAT, body, 400, "")
}

fn prompt(value: &str) -> BadRequestCase {
    row(
        &format!("prompt = {value}"),
        COMPLETIONS,
        format!(r#"{{"model":"baton-demo","prompt":{value}}}"#),
        400,
        "",
    )
}

fn method(method: &'static str, path: &'static str, status: u16) -> BadRequestCase {
    let code = if status == 404 { "not_found" } else { "" };
    BadRequestCase { what: format!("{method} {path}"), method, path, body: Vec::new(), status, code }
}

/// Errors that the router detects itself.
fn known_to_the_router() -> Vec<BadRequestCase> {
    let malformed = |what, body: &[u8]| row(what, COMPLETIONS, body, 400, "malformed_body");
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!(r#"{{"model":"baton-demo","prompt":"Hi","metadata":{open}{close}}}"#)
    };
    let mut rows = vec![
        malformed("no body", b""),
        malformed("half an object", br#"{"model":"baton-demo","prompt":"Hi""#),
        malformed("not JSON", b"prompt=Hi"),
        malformed("an array", b"[1]"),
        malformed("a string", br#""Hi""#),
        malformed("two objects", br#"{"model":"baton-demo","prompt":"Hi"}{}"#),
        malformed("invalid UTF-8", b"{\"model\":\"baton-demo\",\"prompt\":\"\xff\xfe\"}"),
        malformed("half a surrogate pair", br#"{"model":"baton-demo","prompt":"\ud800"}"#),
        malformed("NaN", br#"{"model":"baton-demo","prompt":"Hi","temperature":NaN}"#),
        malformed("Infinity", br#"{"model":"baton-demo","prompt":"Hi","temperature":Infinity}"#),
        malformed("a number beyond f64", br#"{"model":"baton-demo","prompt":"Hi","temperature":1e999}"#),
        malformed("nested 10,000 deep", deep(10_000).as_bytes()),
        malformed("nested 200 deep", deep(200).as_bytes()),
        row("unknown model", COMPLETIONS, r#"{"model":"gpt-9","prompt":"Hi"}"#, 404, "model_not_found"),
        row("unknown chat model", CHAT, chat_model("gpt-9"), 404, "model_not_found"),
        row("a model's name that is a number", COMPLETIONS, r#"{"model":7,"prompt":"Hi"}"#, 400, ""),
        row(
            "model twice",
            COMPLETIONS,
            r#"{"model":"a","model":"baton-demo","prompt":"Hi"}"#,
            400,
            "duplicate_field",
        ),
        row("no prompt", COMPLETIONS, r#"{"model":"baton-demo"}"#, 400, ""),
        row("no messages", CHAT, r#"{"model":"baton-demo"}"#, 400, ""),
        method("POST", "/v1/nothing", 404),
        method("POST", "/v1/completions/", 404),
        method("POST", "/kv/release", 404),
        method("POST", "/abort_requests", 404),
        method("POST", "/reset_prefix_cache", 404),
        method("GET", "/debug/kv", 404),
        method("GET", "/metrics", 404),
        method("GET", COMPLETIONS, 405),
        method("DELETE", CHAT, 405),
        method("POST", "/v1/models", 405),
    ];
    rows.extend(
        ["\"\"", "[]", "[[]]", "7", "true", "{}", "[\"a\", 7]", "[-1]", "[1.5]", "[1e30]", "[null]"]
            .map(prompt),
    );
    rows.extend(
        [
            "[]",
            "7",
            "\"Hi\"",
            "[7]",
            "[{}]",
            r#"[{"role":"user"}]"#,
            r#"[{"role":7,"content":"Hi"}]"#,
            r#"[{"role":"user","content":7}]"#,
        ]
        .map(|messages| chat_with("messages", messages)),
    );
    for (field, values) in [
        ("max_tokens", &["-1", "1e20", "1.5", "\"4\"", "true", "[]", "99999999999999999999"][..]),
        ("temperature", &["-1", "1e39", "\"0\"", "{}"]),
        ("top_p", &["-0.1", "1.1", "0", "\"1\""]),
        ("top_k", &["-2", "1.5", "\"1\""]),
        ("min_p", &["-0.1", "1.1"]),
        ("n", &["0", "-1", "1000000", "1.5", "\"1\""]),
        ("stop", &["[\"\"]", "7", "[7]", "{}"]),
        ("stop_token_ids", &["7", "[-1]", "[\"a\"]"]),
        ("seed", &["1.5", "\"a\""]),
        ("presence_penalty", &["-3", "3", "\"a\""]),
        ("frequency_penalty", &["-3", "3"]),
        ("repetition_penalty", &["-1", "0"]),
        ("logprobs", &["\"a\""]),
        ("logit_bias", &["7", "{\"a\": 1}", "{\"7\": \"a\"}"]),
        ("min_tokens", &["-1", "1e20"]),
        ("stream", &["1", "\"true\""]),
        ("stream_options", &["{\"include_usage\": true}", "7"]),
        ("echo", &["1"]),
        ("ignore_eos", &["\"no\""]),
    ] {
        rows.extend(values.iter().map(|value| with(field, value)));
    }
    for (field, values) in [
        ("max_completion_tokens", &["-1", "0"][..]),
        ("top_logprobs", &["3"]),
        ("tools", &["7", "[7]"]),
        ("stream_options", &["{\"include_usage\": true}"]),
    ] {
        rows.extend(values.iter().map(|value| chat_with(field, value)));
    }
    rows.push(row("over the limit", COMPLETIONS, large_body(BODY_BYTES_MAX + 1), 413, ""));
    rows.push(row("far over the limit", COMPLETIONS, large_body(4 << 20), 413, ""));
    rows
}

fn chat_model(name: &str) -> String {
    json!({"model": name, "messages": [{"role": "user", "content": "Hi"}]}).to_string()
}

fn large_body(bytes: usize) -> String {
    format!(r#"{{"model":"baton-demo","prompt":"{}"}}"#, "x".repeat(bytes))
}

/// Sends every row and collects all deviations, so that one run shows all of them.
fn send_all(cluster: &Cluster, rows: &[BadRequestCase]) -> String {
    let mut wrong = String::new();
    for row in rows {
        let call = PendingCall::new(&cluster.url, row.method, row.path, &row.body);
        let outcome = match call.try_reply() {
            Err(error) => Err(format!("no answer: {error}")),
            Ok(reply) if reply.status != row.status => Err(format!(
                "{} instead of {}: {}",
                reply.status,
                row.status,
                String::from_utf8_lossy(&reply.body)
            )),
            Ok(reply) => {
                let error = refusal(cluster, &reply, row.status, "invalid_request_error");
                println!("{}: {} {}", row.what, reply.status, error["message"]);
                match error["code"].as_str().unwrap_or_default() {
                    code if row.code.is_empty() || code == row.code => Ok(()),
                    code => Err(format!("code {code:?} instead of {:?}", row.code)),
                }
            }
        };
        if let Err(why) = outcome {
            writeln!(wrong, "{}: {why}", row.what).expect("a string takes all");
        }
    }
    wrong
}

fn small_bodies() -> Cluster {
    Cluster::new().router("limits", json!({"body_bytes": BODY_BYTES_MAX})).start()
}

#[test]
fn requests_that_the_router_rejects_never_reach_an_engine() {
    let cluster = small_bodies();
    let rows = known_to_the_router();
    let wrong = send_all(&cluster, &rows);
    assert!(wrong.is_empty(), "\n{wrong}");
    // The router counts a request after it has sent the response.
    eventually(PATIENCE, "every row ends at the router", || {
        let rejected = cluster.router_metric("baton_router_requests_total", "outcome=\"rejected\"");
        if rejected as usize == rows.len() { Ok(()) } else { Err(format!("{rejected} of {}", rows.len())) }
    });
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        assert_eq!(engine.snapshot().steps, 0, "an engine has computed something");
        assert_eq!(engine.metric("vllm:request_success_total", ""), 0.0);
    }
    cluster.still_serves();
}

#[test]
fn a_body_over_the_limit_is_a_413_with_any_framing() {
    let cluster = small_bodies();
    let declared = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n");
    let chunk = format!("{:x}\r\n{}\r\n", 40_000, "x".repeat(40_000));
    let chunked = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n"
    );
    for request in [declared, chunked] {
        let reply = PendingCall::raw(&cluster.url, request.as_bytes()).reply();
        refusal(&cluster, &reply, 413, "invalid_request_error");
    }
    cluster.still_serves();
}

#[test]
fn a_head_that_two_parsers_could_read_differently_reaches_no_engine() {
    let cluster = Cluster::new().start();
    let body = GenerateRequest::recall(3).body.to_string();
    let length = body.len();
    for (what, headers) in [
        ("a negative length", "content-length: -1".to_owned()),
        ("two lengths", format!("content-length: {length}\r\ncontent-length: 5")),
        ("a list of lengths", format!("content-length: {length}, 5")),
        ("an encoding that is not known", "transfer-encoding: gzip".to_owned()),
    ] {
        let request =
            format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{headers}\r\nconnection: close\r\n\r\n{body}");
        let status = PendingCall::raw(&cluster.url, request.as_bytes()).try_reply().map(|reply| reply.status);
        println!("{what}: {status:?}");
        assert!(!matches!(status, Ok(200..400 | 500..)), "{what}: {status:?}");
    }
    cluster.settled(AT_ONCE);
    assert_eq!(cluster.prefill[0].snapshot().steps, 0, "an engine has computed something");
    assert_eq!(cluster.decode[0].snapshot().steps, 0, "an engine has computed something");
    cluster.still_serves();
}

#[test]
fn a_request_that_only_an_engine_can_reject_holds_no_block() {
    let cluster = Cluster::new().start();
    let rows = [
        row(
            "first id past the vocabulary",
            COMPLETIONS,
            r#"{"model":"baton-demo","prompt":[7,1536]}"#,
            400,
            "",
        ),
        row("largest id", COMPLETIONS, r#"{"model":"baton-demo","prompt":[4294967295]}"#, 400, ""),
        row(
            "more tokens than the context has",
            COMPLETIONS,
            r#"{"model":"baton-demo","prompt":"Hi","max_tokens":100000}"#,
            400,
            "context_length_exceeded",
        ),
        row(
            "more tokens than the chat's context has",
            CHAT,
            r#"{"model":"baton-demo","messages":[{"role":"user","content":""}],"max_tokens":100000}"#,
            400,
            "context_length_exceeded",
        ),
        with("temperature", "1e30"),
        with("logit_bias", "{\"7\": 1e9}"),
        // For some servers, -1 means all.
        with("logprobs", "-1"),
        with("logprobs", "1000"),
        chat_with("top_logprobs", "-1"),
        chat_with("top_logprobs", "1000"),
    ];
    let wrong = send_all(&cluster, &rows);
    assert!(wrong.is_empty(), "\n{wrong}");
    cluster.settled(AT_ONCE);
    cluster.still_serves();
}

/// A listener to which nothing may connect.
struct UnusedListener(TcpListener);

impl UnusedListener {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket option");
        Self(listener)
    }

    fn params(&self) -> Value {
        let port = self.0.local_addr().expect("it is bound").port();
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e", "remote_request_id": "r",
            "remote_host": "127.0.0.1", "remote_port": port, "remote_block_ids": [0, 1, 2, 3], "tp_size": 1,
            "remote_handle": "00000000000000000000000000000001", "remote_epoch": "0000000000000001",
        })
    }

    fn is_untouched(&self) {
        let came = self.0.accept();
        assert!(matches!(&came, Err(error) if error.kind() == ErrorKind::WouldBlock), "{came:?}");
    }
}

#[test]
fn kv_transfer_params_of_a_client_reach_no_engine() {
    let cluster = Cluster::new().start();
    let trap = UnusedListener::new();
    let (params, text) = (trap.params(), trap.params().to_string());
    let plain = GenerateRequest::recall(20);
    let answer = cluster.ask(&plain).text();
    let mut sent = 1.0;
    let injected = [
        plain.clone().with("kv_transfer_params", params.clone()),
        plain
            .clone()
            .with("kv_transfer_params", json!({"do_remote_decode": true, "do_remote_prefill": false})),
        plain.clone().with("kv_transfer_params", json!("nonsense")),
        plain.clone().with("vllm_xargs", json!({"kv_transfer_params": params})),
        plain.clone().with("extra_body", json!({"kv_transfer_params": params, "remote_host": "127.0.0.1"})),
        plain.clone().with("metadata", json!({"deep": {"kv_transfer_params": text}})),
        plain.clone().with("remote_host", json!("127.0.0.1")).with("do_remote_prefill", json!(true)),
        plain.clone().with("request_id", json!("mine")).with("abort_immediately", json!(true)),
    ];
    for ask in &injected {
        let reply = cluster.ask(ask);
        assert_eq!(reply.text(), answer, "{}", ask.body);
        assert!(reply.json().get("kv_transfer_params").is_none_or(Value::is_null), "{}", reply.json());
        sent += 1.0;
    }
    let opened = cluster.prefill[0].snapshot().leases_opened;
    assert!(f64::from(u32::try_from(opened).expect("few")) <= sent, "a client opened a lease of its own");
    assert_eq!(cluster.decode[0].metric("vllm:nixl_num_failed_transfers", ""), 0.0);
    assert_eq!(cluster.decode[0].metric("baton_early_rejections_total", ""), 0.0);
    trap.is_untouched();
    cluster.settled(AT_ONCE);
}

#[test]
fn kv_transfer_params_of_a_client_reach_no_engine_that_computes_the_whole_request() {
    let mut cluster = Cluster::new().start();
    let trap = UnusedListener::new();
    let d = |cluster: &Cluster, name: &str| cluster.decode[0].metric(name, "");
    let several = json!(["One prompt.", "And another."]);
    let inject = |cluster: &Cluster| {
        for ask in [
            GenerateRequest::recall(20),
            GenerateRequest::fresh(40),
            GenerateRequest::fresh(1).with("prompt", several.clone()),
        ] {
            let reply = cluster.ask(&ask.with("kv_transfer_params", trap.params()));
            assert_eq!(reply.status, 200, "{}", reply.json());
        }
    };
    inject(&cluster);
    let queries = d(&cluster, "vllm:external_prefix_cache_queries_total");
    cluster.prefill[0].kill();
    inject(&cluster);
    assert_eq!(
        d(&cluster, "vllm:external_prefix_cache_queries_total"),
        queries,
        "a handoff reached the engine"
    );
    assert_eq!(d(&cluster, "baton_early_rejections_total"), 0.0);
    trap.is_untouched();
    cluster.settled(AT_ONCE);
}

#[test]
fn kv_transfer_params_that_two_parsers_could_read_differently_are_refused_or_taken_out() {
    let cluster = Cluster::new().start();
    let trap = UnusedListener::new();
    let params = trap.params();
    let body = |fields: &str| format!(r#"{{"model":"baton-demo","prompt":"Hi","max_tokens":2,{fields}}}"#);
    let twice = body(&format!(r#""kv_transfer_params":null,"kv_transfer_params":{params}"#));
    let escaped_twice = body(&format!(r#""kv_transfer_params":null,"\u006bv_transfer_params":{params}"#));
    for duplicate in [twice, escaped_twice] {
        let reply = PendingCall::new(&cluster.url, "POST", COMPLETIONS, duplicate.as_bytes()).reply();
        let error = refusal(&cluster, &reply, 400, "invalid_request_error");
        assert_eq!(error["code"], "duplicate_field");
    }
    assert_eq!(cluster.prefill[0].snapshot().steps, 0);
    for hidden in [
        body(&format!(r#""\u006bv_transfer_params":{params}"#)),
        body(&format!(r#""vllm_xargs":{{"kv_transfer_params":null,"\u006bv_transfer_params":{params}}}"#)),
    ] {
        let reply = PendingCall::new(&cluster.url, "POST", COMPLETIONS, hidden.as_bytes()).reply();
        assert_eq!(reply.status, 200, "{}", reply.json());
    }
    assert_eq!(cluster.decode[0].metric("vllm:nixl_num_failed_transfers", ""), 0.0);
    trap.is_untouched();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_client_that_knows_a_live_handle_can_neither_read_nor_release_it() {
    let cluster = Cluster::new().start();
    let (p, d) = (&cluster.prefill[0], &cluster.decode[0]);
    let mut ask = GenerateRequest::fresh(100);
    ask.body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let leased = p.send("POST", ask.path, &ask.body).reply().json();
    let stolen = &leased["kv_transfer_params"];
    let handle = stolen["remote_handle"].as_str().unwrap_or_else(|| panic!("no handle: {leased}"));
    // The same prompt: the handoff would be valid at an engine that received it.
    ask.body["kv_transfer_params"] = stolen.clone();
    assert_eq!(cluster.ask(&ask).status, 200);
    let release = json!({"handle": handle, "reason": "stolen"});
    let reply = PendingCall::new(&cluster.url, "POST", "/kv/release", release.to_string().as_bytes()).reply();
    assert_eq!(reply.status, 404);
    let snapshot = p.shows("only the first lease lives", |snapshot| snapshot.leases == 1);
    assert!(snapshot.leased > 0);
    assert_eq!(d.metric("baton_early_rejections_total", ""), 0.0);
    // The lease's owner can still release it.
    let released = p.send("POST", "/kv/release", &release).reply().json();
    assert_eq!(released["result"], "released", "{released}");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_clients_request_id_is_not_used_inside() {
    let cluster = Cluster::new().decode("--pace-ms 20").start();
    let named = |ask: &GenerateRequest| {
        let body = ask.body.to_string();
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: x\r\nx-request-id: same\r\nx-baton-router-settles: 1\r\ncontent-length: {}\r\n\r\n{body}",
            ask.path,
            body.len()
        );
        PendingCall::raw(&cluster.url, head.as_bytes())
    };
    let (staying, cancelled) =
        (named(&GenerateRequest::fresh(50).tokens(60)), named(&GenerateRequest::fresh(50).tokens(400)));
    cluster.decode[0].shows("both run", |snapshot| snapshot.running == 2);
    cancelled.hang_up(HangUp::Rst);
    let reply = staying.reply();
    assert_eq!(reply.header("x-request-id").as_deref(), Some("same"));
    let body = reply.json();
    assert_eq!(body["usage"]["completion_tokens"], 60, "{body}");
    cluster.settled(PATIENCE);
}
