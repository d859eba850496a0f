//! A table of all paths on which a decode engine refuses a request with a handoff. The producer's blocks are free at
//! once, although its leases live for an hour, and the decode engine does nothing else meanwhile.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{LLAMA, Node, fresh_id, greedy, options, prompt, with};
use crate::harness::http;
use crate::harness::http::Reply;

/// Too long for an expiry to free the blocks.
const LEASE: Duration = Duration::from_secs(3600);
/// "At once", on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(10);

const SECRET: &str = "a secret of the whole cluster";

/// A request to a decode engine, as bytes.
struct Request {
    path: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// The value of `content-length`, if it differs from the length.
    announced: Option<usize>,
}

/// The reply; `None` if the client left without an answer.
type ReplySummary = Option<(u16, Option<&'static str>)>;

impl Request {
    fn of(body: &Value) -> Self {
        Self::raw(body.to_string())
    }

    fn raw(body: impl Into<Vec<u8>>) -> Self {
        Self { path: "/v1/completions", headers: Vec::new(), body: body.into(), announced: None }
    }

    fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    fn at(mut self, path: &'static str) -> Self {
        self.path = path;
        self
    }

    fn announcing(mut self, length: usize) -> Self {
        self.announced = Some(length);
        self
    }

    fn send(&self, to: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(to).expect("the engine listens");
        let length = self.announced.unwrap_or(self.body.len());
        let mut head = format!("POST {} HTTP/1.1\r\nhost: d\r\nconnection: close\r\n", self.path);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("the engine reads");
        // An engine may refuse, and close, before it has read the whole body.
        let _ = stream.write_all(&self.body);
        stream
    }
}

/// The sum of a metric's series with this label.
fn series(metrics: &str, name: &str, label: &str) -> f64 {
    let of_it = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(label);
    metrics
        .lines()
        .filter(of_it)
        .map(|line| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()).expect(line))
        .sum()
}

/// A client of engines with or without a secret, with the cluster's own headers.
struct ClusterClient<'a>(&'a Node, Option<&'a str>);

impl ClusterClient<'_> {
    fn get(&self, path: &str) -> Reply {
        let secret = self.1.map(|secret| ("x-baton-cluster-secret", secret));
        http::call(self.0.http, "GET", path, secret.as_slice(), "")
    }

    fn post(&self, body: &Value) -> Reply {
        let secret = self.1.map(|secret| ("x-baton-cluster-secret", secret));
        http::call(self.0.http, "POST", "/v1/completions", secret.as_slice(), &body.to_string())
    }

    fn open_lease(&self, body: &Value) -> Value {
        let handoff =
            self.post(&crate::harness::cluster::prefill_leg(body)).ok()["kv_transfer_params"].clone();
        assert_eq!(handoff["do_remote_prefill"], true, "{handoff}");
        handoff
    }

    fn series(&self, name: &str, label: &str) -> f64 {
        series(&self.get("/metrics").text, name, label)
    }

    #[track_caller]
    fn until(&self, case: &str, what: &str, so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + AT_ONCE;
        while !so(self) {
            assert!(
                Instant::now() < deadline,
                "{case}: {what}: {}\n{}",
                self.get("/debug/kv").text,
                self.get("/metrics").text
            );
            thread::yield_now();
        }
    }

    #[track_caller]
    fn has_its_blocks(&self, case: &str) {
        self.until(case, "the blocks are not free", |p| {
            let kv = p.get("/debug/kv").ok();
            kv["leases"]["live"] == 0 && kv["blocks"]["leased"] == 0
        });
        assert_eq!(self.series("vllm:nixl_num_kv_expired_reqs", ""), 0.0, "{case}: by expiry");
    }
}

fn producer(secret: Option<&str>) -> Node {
    let mut producer = options(LLAMA, Role::Prefill);
    producer.kv_lease_duration = LEASE;
    producer.cluster_secret = secret.map(str::to_owned);
    Node::start(producer)
}

/// Sends one request and checks all effects of its refusal.
#[track_caller]
fn refused(
    case: &str,
    p: &ClusterClient<'_>,
    d: &ClusterClient<'_>,
    request: &Request,
    cause: &str,
    answer: ReplySummary,
) {
    let label = format!("reason=\"{cause}\"");
    let counted = |d: &ClusterClient<'_>| d.series("baton_early_rejections_total", &label);
    let noticed = |d: &ClusterClient<'_>| {
        d.series("baton_release_notices_total", "reason=\"consumer_rejected\",result=\"released\"")
    };
    let before = (counted(d), noticed(d));
    let stream = request.send(d.0.http);
    match answer {
        None => stream.shutdown(Shutdown::Both).expect("the connection is open"),
        Some((status, code)) => {
            let reply = http::receive(stream);
            assert_eq!(reply.status, status, "{case}: {}", reply.text);
            let error = &reply.json()["error"];
            assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{case}: {}", reply.text);
            assert!(error["type"].is_string(), "{case}: {}", reply.text);
            if code.is_some() {
                assert_eq!(error["code"].as_str(), code, "{case}: {}", reply.text);
            }
        }
    }
    p.has_its_blocks(case);
    d.until(case, "the answer to the notice is not counted", |d| noticed(d) == before.1 + 1.0);
    assert_eq!(counted(d), before.0 + 1.0, "{case}: {label}");
}

#[test]
fn every_refusal_releases_the_lease_at_once() {
    let p = producer(None);
    let d = Node::start(options(LLAMA, Role::Decode));
    let other_blocks = {
        let mut options = options(LLAMA, Role::Decode);
        options.block_tokens = 12;
        Node::start(options)
    };
    let both = Node::start(options(LLAMA, Role::Prefill));
    let broken = {
        let mut options = options(LLAMA, Role::Decode);
        options.device_fails_after = Some(0);
        Node::start(options)
    };
    assert_eq!(broken.generate(&fresh_id(), &greedy(&prompt(9, 10), 4)).status, 503);
    let (full, draining) = (busy(1), busy(8));
    // These requests run and wait until their connections are closed.
    let long = |seed| with(&greedy(&prompt(seed, 10), 140), "stream", json!(true)).to_string();
    let _at_full = [2, 3].map(|seed| {
        let call = http::send(full.http, "POST", "/v1/completions", &[], &long(seed));
        let phase = if seed == 2 { "running" } else { "waiting" };
        full.wait_until("it has no place", |kv| kv["requests"][phase] == 1);
        call
    });
    let _at_draining = http::send(draining.http, "POST", "/v1/completions", &[], &long(4));
    draining.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
    draining.begin_to_stop();
    while draining.get("/health").status == 200 {
        thread::yield_now();
    }

    let body = greedy(&prompt(1, 40), 8);
    // A complete handoff first, as Baton's routers send it, followed by the rest.
    let broken_body = |handoff: &Value, rest: &[u8]| {
        Request::raw(
            [format!("{{\"kv_transfer_params\":{handoff},\"prompt\":[1,2],").as_bytes(), rest].concat(),
        )
    };
    let set = |name: &'static str, value: Value| {
        let body = body.clone();
        move |handoff: &Value| {
            Request::of(&with(&with(&body, name, value.clone()), "kv_transfer_params", handoff.clone()))
        }
    };
    let good = set("max_tokens", json!(8));
    let chat = |messages: Value| {
        move |handoff: &Value| {
            Request::of(&json!({"messages": messages, "kv_transfer_params": handoff}))
                .at("/v1/chat/completions")
        }
    };
    let mebi = 1 << 20;
    type Make<'a> = Box<dyn Fn(&Value) -> Request + 'a>;
    let table: Vec<(&str, &Node, Make<'_>, &str, ReplySummary)> = vec![
        (
            "template",
            &d,
            Box::new(chat(json!([{"role": "alien", "content": "x"}]))),
            "invalid",
            Some((400, None)),
        ),
        ("chat field", &d, Box::new(chat(json!("x"))), "invalid", Some((400, None))),
        (
            "model",
            &d,
            Box::new(set("model", json!("another"))),
            "unknown_model",
            Some((404, Some("model_not_found"))),
        ),
        ("range", &d, Box::new(set("temperature", json!(-1))), "invalid", Some((400, None))),
        ("type", &d, Box::new(set("temperature", json!("warm"))), "invalid", Some((400, None))),
        ("n", &d, Box::new(set("n", json!(0))), "invalid", Some((400, None))),
        ("stop", &d, Box::new(set("stop", json!([""]))), "invalid", Some((400, None))),
        (
            "echo with logprobs",
            &d,
            Box::new(set("echo", json!(true))),
            "unsupported",
            Some((400, Some("kv_unsupported"))),
        ),
        (
            "prompt_logprobs",
            &d,
            Box::new(set("prompt_logprobs", json!(1))),
            "unsupported",
            Some((400, Some("kv_unsupported"))),
        ),
        ("vocabulary", &d, Box::new(set("prompt", json!([4_000_000]))), "invalid", Some((400, None))),
        (
            "length",
            &d,
            Box::new(set("max_tokens", json!(100_000))),
            "too_long",
            Some((400, Some("context_length_exceeded"))),
        ),
        (
            "prompts",
            &d,
            Box::new(set("prompt", json!([prompt(1, 40), prompt(1, 40)]))),
            "unsupported",
            Some((400, Some("kv_unsupported"))),
        ),
        (
            "prompt",
            &d,
            Box::new(set("prompt", json!(prompt(2, 40)))),
            "prompt",
            Some((400, Some("kv_prompt_mismatch"))),
        ),
        (
            "shorter prompt",
            &d,
            Box::new(set("prompt", json!(prompt(1, 39)))),
            "prompt",
            Some((400, Some("kv_prompt_mismatch"))),
        ),
        ("layout", &other_blocks, Box::new(&good), "layout", Some((400, Some("kv_layout_mismatch")))),
        ("role", &both, Box::new(&good), "wrong_role", Some((400, Some("kv_wrong_role")))),
        (
            "rank",
            &d,
            Box::new(|handoff| good(handoff).header("x-data-parallel-rank", "7")),
            "invalid",
            Some((400, Some("invalid_data_parallel_rank"))),
        ),
        (
            "path",
            &d,
            Box::new(|handoff| good(handoff).at("/v1/rerank")),
            "unknown_path",
            Some((404, Some("unsupported_endpoint"))),
        ),
        (
            "garbage behind",
            &d,
            Box::new(|handoff| {
                let mut r = good(handoff);
                r.body.extend(b"}} more");
                r
            }),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "cut off inside",
            &d,
            Box::new(|handoff| broken_body(handoff, b"\"stop\":[\"a")),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "not UTF-8",
            &d,
            Box::new(|handoff| broken_body(handoff, b"\"user\":\"\xff\xfe\"}")),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "not a number",
            &d,
            Box::new(|handoff| broken_body(handoff, b"\"temperature\":NaN}")),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "a field twice",
            &d,
            Box::new(|handoff| broken_body(handoff, b"\"model\":\"a\",\"model\":\"b\"}")),
            "unreadable",
            Some((400, Some("duplicate_field"))),
        ),
        (
            "byte order mark",
            &d,
            Box::new(|handoff| {
                let mut r = good(handoff);
                r.body.splice(0..0, *b"\xEF\xBB\xBF");
                r
            }),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "nested too deep",
            &d,
            Box::new(|handoff| {
                broken_body(handoff, format!("\"x\":{}{}}}", "[".repeat(500), "]".repeat(500)).as_bytes())
            }),
            "unreadable",
            Some((400, Some("malformed_body"))),
        ),
        (
            "announced too large",
            &d,
            Box::new(|handoff| broken_body(handoff, &vec![b' '; 2 * mebi]).announcing(64 * mebi)),
            "too_large",
            Some((413, Some("payload_too_large"))),
        ),
        (
            "cut off",
            &d,
            Box::new(|handoff| broken_body(handoff, b"\"user\":\"").announcing(100_000)),
            "cut_off",
            None,
        ),
        ("queue full", &full, Box::new(&good), "queue_full", Some((429, Some("overloaded")))),
        ("draining", &draining, Box::new(&good), "draining", Some((503, Some("draining")))),
        ("device", &broken, Box::new(&good), "engine_failed", Some((503, Some("engine_failed")))),
    ];
    let producer = ClusterClient(&p, None);
    for (case, d, make, cause, answer) in &table {
        let handoff = producer.open_lease(&body);
        refused(case, &producer, &ClusterClient(d, None), &make(&handoff), cause, *answer);
    }
    d.is_clean();
    p.is_clean();
}

/// Runs one sequence at a time, slowly. Up to `max_waiting` others wait.
fn busy(max_waiting: usize) -> Node {
    let mut busy = options(LLAMA, Role::Decode);
    (busy.max_num_seqs, busy.max_waiting) = (1, max_waiting);
    (busy.pace, busy.shutdown_timeout) = (Some(Duration::from_millis(300)), Duration::from_secs(60));
    Node::start(busy)
}

#[test]
fn an_accepted_stream_that_never_starts_releases_the_lease() {
    let (p, d) = (producer(None), busy(8));
    let long = with(&greedy(&prompt(2, 10), 140), "stream", json!(true)).to_string();
    let running = http::send(d.http, "POST", "/v1/completions", &[], &long);
    d.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
    let body = greedy(&prompt(1, 40), 8);
    for stream in [true, false] {
        let leg = with(&with(&body, "stream", json!(stream)), "kv_transfer_params", p.open_lease(&body));
        let call = http::send(d.http, "POST", "/v1/completions", &[], &leg.to_string());
        d.wait_until("it does not wait", |kv| kv["requests"]["waiting"] == 1);
        assert_eq!(p.kv()["leases"]["live"], 1);
        drop(call);
        ClusterClient(&p, None).has_its_blocks("left before the first event");
    }
    let released = ClusterClient(&d, None).series("baton_release_notices_total", "result=\"released\"");
    drop(running);
    d.is_clean();
    assert!(released >= 1.0, "D itself released the first one");
}

#[test]
fn a_failed_device_frees_the_blocks_of_its_requests() {
    let p = producer(None);
    let mut failing = options(LLAMA, Role::Decode);
    (failing.max_num_seqs, failing.device_fails_after) = (1, Some(3));
    failing.pace = Some(Duration::from_millis(300));
    let d = Node::start(failing);
    let body = greedy(&prompt(1, 40), 8);
    thread::scope(|scope| {
        let first = scope.spawn(|| d.generate(&fresh_id(), &greedy(&prompt(2, 10), 40)));
        d.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
        // It waits when the device fails.
        let reply = d.decode(&body, &p.open_lease(&body));
        assert_eq!(reply.status, 503, "{}", reply.text);
        assert_eq!(first.join().expect("an answer").status, 503);
    });
    p.is_clean();
    assert_eq!(d.get("/health").status, 503);
}

#[test]
fn a_caller_without_the_secret_is_refused_and_a_sealed_handoff_is_released() {
    let p = producer(Some(SECRET));
    let mut guarded = options(LLAMA, Role::Decode);
    guarded.cluster_secret = Some(SECRET.into());
    let d = Node::start(guarded);
    let (p, d) = (ClusterClient(&p, Some(SECRET)), ClusterClient(&d, Some(SECRET)));
    let body = greedy(&prompt(1, 40), 8);
    let unauthorized = |handoff: &Value| Request::of(&with(&body, "kv_transfer_params", handoff.clone()));
    let expected = Some((401, Some("invalid_cluster_secret")));
    refused("no secret", &p, &d, &unauthorized(&p.open_lease(&body)), "unauthorized", expected);
    let guessed =
        unauthorized(&p.open_lease(&body)).header("x-baton-cluster-secret", "the secret of no cluster");
    refused("another secret", &p, &d, &guessed, "unauthorized", expected);
    let mut cut = unauthorized(&p.open_lease(&body));
    cut.body.pop();
    refused("unreadable", &p, &d, &cut, "unreadable", Some((400, Some("malformed_body"))));

    // A caller without the secret cannot make the engine connect to an address of its choice.
    let trap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let handoff = p.open_lease(&body);
    let port = trap.local_addr().expect("an address").port();
    let reply = http::receive(unauthorized(&with(&handoff, "remote_port", json!(port))).send(d.0.http));
    assert_eq!(reply.status, 401);
    assert_eq!(d.series("baton_early_rejections_total", "reason=\"unproven\""), 1.0);
    trap.set_nonblocking(true).expect("a non-blocking listener");
    assert!(trap.accept().is_err(), "the engine connected");
    assert_eq!(p.get("/debug/kv").ok()["leases"]["live"], 1, "and nothing was released");
    let answer = d.post(&with(&body, "kv_transfer_params", handoff)).ok();
    assert_eq!(answer["choices"][0]["token_ids"].as_array().expect("ids").len(), 8);
    p.has_its_blocks("fetched");
}

#[test]
fn a_notice_is_repeated_until_the_producer_answers() {
    let p = producer(None);
    let d = Node::start(options(LLAMA, Role::Decode));
    let body = greedy(&prompt(1, 40), 8);
    let handoff = p.open_lease(&body);
    // A proxy of the producer's side channel: it closes the first three connections, and forwards the fourth.
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = proxy.local_addr().expect("an address").port();
    let behind = p.side_channel();
    let carried = thread::spawn(move || {
        for _ in 0..3 {
            drop(proxy.accept().expect("a connection"));
        }
        let (front, _) = proxy.accept().expect("a connection");
        let back = TcpStream::connect(behind).expect("the producer listens");
        let (mut from, mut to) = (front.try_clone().expect("a socket"), back.try_clone().expect("a socket"));
        let requests = thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        let (mut from, mut to) = (back, front);
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        drop(requests.join());
    });
    let refused = with(&body, "temperature", json!(-1));
    assert_eq!(d.decode(&refused, &with(&handoff, "remote_port", json!(port))).status, 400);
    ClusterClient(&p, None).has_its_blocks("repeated");
    // A second notice of the same lease changes nothing and is answered.
    assert_eq!(d.decode(&refused, &handoff).status, 400);
    ClusterClient(&d, None).until("again", "it is not answered", |d| {
        d.series("baton_release_notices_total", "result=\"already\"") == 1.0
    });
    d.stop();
    carried.join().expect("the proxy ends with its connection");
    p.is_clean();
}
