//! Simulated engines as seen by their callers: by HTTP, one engine after the other, and behind the real router.

mod behind_the_router;
mod planted;
mod protocol;
mod push;
mod sglang_pair;

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::common::http_client::{ServiceClient, WebError};

/// Maximum wait of a test. Waits are normally far shorter.
const PATIENCE: Duration = Duration::from_secs(20);

fn prompt(number: usize, words: usize) -> String {
    (0..words).map(|word| format!("w{number}x{word} ")).collect()
}

fn ask(prompt: &str, max_tokens: usize, tag: &str) -> Value {
    json!({"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "user": tag})
}

/// The request of a router to its prefill engine.
fn first_leg(ask: &Value) -> Value {
    let mut leg = ask.clone();
    leg["max_tokens"] = json!(1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    leg
}

fn text(reply: &Value) -> String {
    reply["choices"][0]["text"].as_str().expect("a text").to_owned()
}

/// A fleet, and requests to its engines.
struct TestFleet {
    fleet: SimFleet,
}

impl TestFleet {
    fn of(plan: FleetPlan) -> Self {
        Self { fleet: SimFleet::start(plan).expect("a fleet starts on loopback") }
    }

    fn with(engine: EnginePlan) -> Self {
        Self::of(FleetPlan::new(1, 1, engine))
    }

    fn at(&self, role: Role) -> SocketAddr {
        match role {
            Role::Prefill => self.fleet.prefill()[0],
            Role::Decode => self.fleet.decode()[0],
        }
    }

    async fn post(&self, role: Role, path: &str, body: &Value) -> Result<Value, WebError> {
        let service = ServiceClient::parse(&self.at(role).to_string()).expect("an address");
        service.post_json(path, body, PATIENCE).await
    }

    async fn complete(&self, role: Role, body: &Value) -> Value {
        self.post(role, "/v1/completions", body).await.expect("an answer")
    }

    /// Sends a prefill and returns the request for the decode engine.
    async fn open_lease(&self, ask: &Value) -> Value {
        let reply = self.complete(Role::Prefill, &first_leg(ask)).await;
        let mut second = ask.clone();
        second["kv_transfer_params"] = reply["kv_transfer_params"].clone();
        assert!(second["kv_transfer_params"].is_object(), "{reply}");
        second
    }

    fn events(&self, role: Role, tag: &str) -> Vec<Value> {
        let log = self.fleet.log(role, 0).expect("it lives");
        log.page(0, usize::MAX).events.into_iter().filter(|event| event["tag"] == tag).collect()
    }

    fn kinds(&self, role: Role, tag: &str) -> Vec<String> {
        let kind = |event: &Value| event["kind"].as_str().expect("a kind").to_owned();
        self.events(role, tag).iter().map(kind).collect()
    }

    /// The first event of this kind, once there is one.
    async fn event(&self, role: Role, tag: &str, kind: &str) -> Value {
        eventually(kind, || self.events(role, tag).into_iter().find(|event| event["kind"] == kind)).await
    }

    fn usage(&self, role: Role) -> pool::PoolUsage {
        let member = self.fleet.member(role, 0).expect("it exists").lock().expect("no thread panics");
        member.runs.as_ref().expect("it lives").0.inspect(core::Core::usage)
    }

    /// Waits until all blocks of both engines are free.
    async fn settled(&self) {
        let all_free = |role| self.usage(role).free == self.usage(role).total;
        eventually("every block free", || (all_free(Role::Prefill) && all_free(Role::Decode)).then_some(()))
            .await;
    }
}

async fn eventually<T>(what: &str, mut seen: impl FnMut() -> Option<T>) -> T {
    let waited = async {
        loop {
            if let Some(seen) = seen() {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waited).await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// How a caller disconnects.
#[derive(Clone, Copy, Debug)]
enum HangUp {
    Fin,
    Rst,
}

/// A caller that can disconnect.
struct TestCaller(TcpStream);

impl TestCaller {
    async fn post(at: SocketAddr, path: &str, body: &Value) -> Self {
        let mut stream = TcpStream::connect(at).await.expect("it listens");
        let body = body.to_string();
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(head.as_bytes()).await.expect("it is sent");
        Self(stream)
    }

    /// The data that was received once it contains `part`.
    async fn reads_until(&mut self, part: &str) -> String {
        let mut read = Vec::new();
        let reads = async {
            while !String::from_utf8_lossy(&read).contains(part) {
                let more = self.0.read_buf(&mut read).await.expect("it is read");
                assert!(more > 0, "ended: {}", String::from_utf8_lossy(&read));
            }
        };
        tokio::time::timeout(PATIENCE, reads).await.unwrap_or_else(|_| panic!("never read: {part}"));
        String::from_utf8_lossy(&read).into_owned()
    }

    fn leaves(self, how: HangUp) {
        if matches!(how, HangUp::Rst) {
            socket2::SockRef::from(&self.0).set_linger(Some(Duration::ZERO)).expect("a socket");
        }
    }
}
