//! Cores as the Python half and routers use them.

mod consumer;
mod http;
mod producer;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::abi::{self, tests as calls};

/// Longest wait of a test for a state.
const PATIENCE: Duration = Duration::from_secs(30);

/// The layout of the cores of a test.
const LAYOUT: &str = "00000000000000bb";

/// The fingerprint of the prompts of a test.
const PROMPT: &str = "00000000000000cc00000000000000dd";

/// A core that is stopped with its test.
struct TestCore {
    number: u64,
    epoch: String,
    http: String,
    channel_port: u64,
}

impl TestCore {
    /// A core with these settings beside the addresses.
    fn start(settings: &Value) -> Self {
        let mut config = json!({
            "http": "127.0.0.1:0", "channel": "127.0.0.1:0", "channel_host": null, "secret_file": null,
            "lease_s": 30, "rank": 0, "engine": "vllm 0", "engine_id": "e", "nixl_port": 5600, "blocks": 63, "block_tokens": 16,
            "policy": "recompute", "model": "m",
        });
        for (key, value) in settings.as_object().into_iter().flatten() {
            config[key.as_str()] = value.clone();
        }
        let facts = calls::start(&config.to_string());
        assert!(facts.get("error").is_none(), "{facts}");
        let text = |key: &str| facts[key].as_str().expect("a text").to_owned();
        Self {
            number: facts["core"].as_u64().expect("a number"),
            epoch: text("epoch"),
            http: text("http"),
            channel_port: facts["channel_port"].as_u64().expect("a port"),
        }
    }

    /// Runs an operation that succeeds.
    fn call(&self, op: &Value) -> Value {
        let reply = calls::call(self.number, &op.to_string());
        assert!(reply.get("error").is_none(), "{op}: {reply}");
        reply
    }

    fn pending(&self) -> u32 {
        abi::baton_vllm_pending(self.number)
    }

    /// Registers a request with the router's id.
    fn queued(&self, id: &str, router: &str, leg: &str) -> bool {
        let op =
            json!({"op": "queued", "id": id, "request_id": router, "leg": leg, "prompt": 33, "tag": "me"});
        self.call(&op)["released"] == true
    }

    /// Ends a request and lends its blocks, as the scheduler does.
    fn offer(&self, id: &str, blocks: &Value, consumers: u64) -> Value {
        self.events(&json!([{"id": id, "kind": "ended", "outcome": "length", "generated": 1, "computed": 33,
            "blocks": 3}]));
        self.call(
            &json!({"op": "offer", "id": id, "blocks": blocks, "consumers": consumers, "prompt": PROMPT}),
        )
    }

    fn events(&self, events: &Value) {
        self.call(&json!({"op": "events", "events": events}));
    }

    fn stats(&self) -> Value {
        self.call(&json!({"op": "stats"}))
    }

    fn take(&self) -> Value {
        self.call(&json!({"op": "take"}))
    }

    /// Waits for ended leases, and returns the first ones.
    fn ended(&self) -> Vec<Value> {
        let mut ended = Vec::new();
        until("a lease ends", || {
            ended = self.take()["ended"].as_array().cloned().unwrap_or_default();
            !ended.is_empty()
        });
        ended
    }

    /// One HTTP exchange: status and body.
    fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.http_with(method, path, "", body)
    }

    /// As [`Self::http`], with further headers, each with its line end.
    fn http_with(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        self.raw(request.as_bytes())
    }

    /// Sends bytes and reads the answer to its end.
    fn raw(&self, request: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.http).expect("the port listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.write_all(request).expect("it is sent");
        let mut answer = String::new();
        // A server that refuses a body may reset the connection after its answer.
        let _ = stream.read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer.as_str(), ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no status in {answer:?}")), body.to_owned())
    }

    /// A verb that is answered with 200.
    fn verb(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.http("POST", path, &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).expect("JSON")
    }

    /// The kinds of the events of a request so far.
    fn kinds(&self, request: &str) -> Vec<Value> {
        let (status, body) = self.http("GET", "/debug/kv/events?after=0", "");
        assert_eq!(status, 200, "{body}");
        let page: Value = serde_json::from_str(&body).expect("JSON");
        let events = page["events"].as_array().expect("a list").iter();
        events.filter(|event| event["request_id"] == request).map(|event| event["kind"].clone()).collect()
    }
}

impl Drop for TestCore {
    fn drop(&mut self) {
        abi::baton_vllm_stop(self.number);
    }
}

/// Waits for a state.
#[allow(clippy::disallowed_methods, reason = "the pause of a bounded poll")]
fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
