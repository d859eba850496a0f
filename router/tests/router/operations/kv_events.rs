//! Engines that publish KV events, with a real ZeroMQ publisher and vLLM's message format.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

use crate::harness::client::post;
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

/// An engine's publisher.
pub(super) struct Publisher {
    socket: PubSocket,
    sequence: u64,
    pub port: u16,
}

impl Publisher {
    pub(super) async fn at(port: u16) -> Self {
        let mut socket = PubSocket::new();
        let begun = Instant::now();
        // The previous publisher may not have closed its listener yet.
        let endpoint = loop {
            match socket.bind(&format!("tcp://127.0.0.1:{port}")).await {
                Ok(endpoint) => break endpoint.to_string(),
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let port = endpoint.rsplit(':').next().unwrap().parse().unwrap();
        Self { socket, sequence: 0, port }
    }

    /// Publishes one message with these events, framed as by vLLM.
    pub(super) async fn publish(&mut self, events: &Value) {
        let payload = rmp_serde::to_vec(&json!([1_795_163_885.05, events, 0])).unwrap();
        let mut message = ZmqMessage::from(Bytes::from_static(b"kv"));
        message.push_back(Bytes::copy_from_slice(&self.sequence.to_be_bytes()));
        message.push_back(Bytes::from(payload));
        self.sequence += 1;
        self.socket.send(message).await.unwrap();
    }
}

pub(super) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null,
        "extra_keys": vec![Value::Null; hashes.len()], "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
}

fn prompt() -> Value {
    json!({"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]})
}

/// The engine that a dry run chooses, and the number of the prompt's blocks that it is known to hold.
async fn chosen(system: &TestRouter) -> (String, u64) {
    let plan = post(system.admin, "/dry-run?path=/v1/completions", &prompt()).await;
    assert_eq!(plan.status, 200, "{}", plan.text());
    let decode = &plan.json()["decode"];
    (decode["chosen"].as_str().unwrap().to_owned(), decode["held"]["blocks"].as_u64().unwrap())
}

/// Publishes the events until the dry run returns this engine and number: messages before the subscription are lost.
async fn until(system: &TestRouter, publisher: &mut Publisher, events: &Value, wanted: (&str, u64)) {
    let begun = Instant::now();
    loop {
        publisher.publish(events).await;
        let found = chosen(system).await;
        if (found.0.as_str(), found.1) == wanted {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{found:?}, not {wanted:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn two_engines(of_b: &str) -> (FakeEngine, FakeEngine, TestRouter) {
    let (a, b) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    decode:\n      \
         policy: prefix_aware\n      engines:\n        - url: {}\n        - {{url: '{}', kv_events: {of_b}}}\n",
        a.url(),
        b.url()
    );
    let system = TestRouter::of(&yaml).await;
    (a, b, system)
}

#[tokio::test]
async fn a_prompt_of_tokens_goes_to_the_engine_that_reports_its_blocks() {
    let mut publisher = Publisher::at(0).await;
    let (a, b, system) = two_engines(&format!("{{port: {}, topic: kv}}", publisher.port)).await;
    let b_is = b.address.to_string();
    let first = json!([stored(&[u64::MAX - 5, 12], None, &[1, 2, 3, 4, 5, 6, 7, 8])]);
    until(&system, &mut publisher, &first, (&b_is, 2)).await;
    until(&system, &mut publisher, &json!([stored(&[13], Some(12), &[9, 10, 11, 12])]), (&b_is, 3)).await;
    assert_eq!(post(system.address, "/v1/completions", &prompt()).await.status, 200);
    assert_eq!((a.received().len(), b.received().len()), (0, 1));
    let removed = json!([{"type": "BlockRemoved", "block_hashes": [13], "medium": "GPU", "group_idx": 0}]);
    until(&system, &mut publisher, &removed, (&b_is, 2)).await;
    // A salted prompt belongs to another tenant: engines hash its blocks differently.
    let mut salted = prompt();
    salted["cache_salt"] = json!("s");
    let plan = post(system.admin, "/dry-run?path=/v1/completions", &salted).await.json();
    let held = &plan["decode"]["held"];
    assert_eq!((&held["blocks"], &held["of_blocks"]), (&json!(0), &json!(3)));
    // A gap: a message was lost, so the known blocks are discarded.
    publisher.sequence += 7;
    publisher.publish(&json!([{"type": "BlockRemoved", "block_hashes": [99]}])).await;
    let begun = Instant::now();
    while chosen(&system).await.1 != 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the gap is not noticed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    until(&system, &mut publisher, &first, (&b_is, 2)).await;
    publisher.publish(&json!([["AllBlocksCleared"]])).await;
    let begun = Instant::now();
    while chosen(&system).await.1 != 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the cache is not cleared");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn only_full_attention_blocks_hit_and_ignored_events_are_counted() {
    let mut publisher = Publisher::at(0).await;
    let (_a, b, system) = two_engines(&format!("{{port: {}, topic: kv}}", publisher.port)).await;
    let b_is = b.address.to_string();
    // A model of two cache groups, which use the same hashes for the same tokens.
    let group = |index: u64, kind: &str, tokens: &[u32]| {
        let mut event = stored(&[1, 2, 3], None, tokens);
        (event["group_idx"], event["kv_cache_spec_kind"]) = (json!(index), json!(kind));
        event
    };
    let all: Vec<u32> = (1..=12).collect();
    until(&system, &mut publisher, &json!([group(1, "full_attention", &all)]), (&b_is, 3)).await;
    // The window moves; then one event with an unknown layout and one with a known layout follow.
    let mut pairs = stored(&[4], Some(3), &[]);
    pairs["token_ids"] = json!([[13, 14], [14, 15], [15, 16], [16, 17]]);
    let moved = json!({"type": "BlockRemoved", "block_hashes": [1, 2, 3], "medium": "GPU", "group_idx": 0});
    let removed = json!({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 1});
    publisher.publish(&json!([group(0, "sliding_window", &all), moved, pairs, removed])).await;
    let of = |reason: &str| {
        format!("baton_router_kv_events_left_out_total{{engine=\"{b_is}\",reason=\"{reason}\"}}")
    };
    system.counts(&of("attention"), 2.0).await;
    system.counts(&of("malformed"), 1.0).await;
    assert_eq!(chosen(&system).await, (b_is.clone(), 2), "the malformed event cost itself");
    let gaps = format!("baton_router_kv_events_gaps_total{{engine=\"{b_is}\"}}");
    assert_eq!(system.metric(&gaps).await, 0.0);
    let plan = post(system.admin, "/dry-run?path=/v1/completions", &prompt()).await.json();
    let expected = json!({"attention": 2, "malformed": 1});
    assert_eq!(plan["decode"]["held"]["kv_events_left_out"], expected, "{plan}");
    let engines = crate::harness::client::get(system.admin, "/engines").await.json();
    let listed = engines["engines"].as_array().unwrap().iter().find(|engine| engine["engine"] == b_is);
    assert_eq!(listed.unwrap()["kv_events"]["left_out"], expected);
}

#[tokio::test]
async fn a_returning_engine_is_subscribed_again() {
    let publisher = Publisher::at(0).await;
    let port = publisher.port;
    drop(publisher);
    // No publisher is running at first.
    let (_a, b, system) = two_engines(&format!("{{port: {port}}}")).await;
    let b_is = b.address.to_string();
    let events = json!([["BlockStored", [1, 2], null, [1, 2, 3, 4, 5, 6, 7, 8], 4, null]]);
    for _ in 0..2 {
        let mut publisher = Publisher::at(port).await;
        until(&system, &mut publisher, &events, (&b_is, 2)).await;
        publisher.socket.close().await;
    }
}

#[tokio::test]
async fn events_of_an_engine_that_connects_to_the_router_are_received() {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = probe.local_addr().unwrap().port();
    drop(probe);
    let (_a, b, system) = two_engines(&format!("{{port: {port}, bind: 127.0.0.1}}")).await;
    let mut socket = PubSocket::new();
    let begun = Instant::now();
    while socket.connect(&format!("tcp://127.0.0.1:{port}")).await.is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the router does not listen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut publisher = Publisher { socket, sequence: 0, port };
    let events = json!([stored(&[1], None, &[1, 2, 3, 4])]);
    until(&system, &mut publisher, &events, (&b.address.to_string(), 1)).await;
}

async fn connected(port: u16) -> PubSocket {
    let mut socket = PubSocket::new();
    let begun = Instant::now();
    while socket.connect(&format!("tcp://127.0.0.1:{port}")).await.is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the router does not listen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    socket
}

#[tokio::test]
async fn a_silent_publisher_does_not_block_a_newer_one() {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = probe.local_addr().unwrap().port();
    drop(probe);
    let (_a, b, system) = two_engines(&format!("{{port: {port}, bind: 127.0.0.1}}")).await;
    let b_is = b.address.to_string();
    let mut silent = Publisher { socket: connected(port).await, sequence: 40, port };
    until(&system, &mut silent, &json!([stored(&[1], None, &[1, 2, 3, 4])]), (&b_is, 1)).await;
    // The first publisher's connection stays open without further messages.
    let mut newer = Publisher { socket: connected(port).await, sequence: 0, port };
    let both = json!([stored(&[1, 2], None, &[1, 2, 3, 4, 5, 6, 7, 8])]);
    until(&system, &mut newer, &both, (&b_is, 2)).await;
    drop(silent);
}

#[tokio::test]
async fn the_state_of_a_subscription_is_reported() {
    let mut publisher = Publisher::at(0).await;
    let (a, b, system) = two_engines(&format!("{{port: {}, topic: kv}}", publisher.port)).await;
    let b_is = b.address.to_string();
    let first = json!([stored(&[11, 12], None, &[1, 2, 3, 4, 5, 6, 7, 8])]);
    until(&system, &mut publisher, &first, (&b_is, 2)).await;
    let of = |name: &str| format!("baton_router_kv_events_{name}{{engine=\"{b_is}\"}}");
    system.counts(&of("connected"), 1.0).await;
    system.counts(&of("blocks"), 2.0).await;
    assert!(system.metric(&of("batches_total")).await >= 1.0);
    publisher.sequence += 7;
    publisher.publish(&json!([["AllBlocksCleared"]])).await;
    system.counts(&of("gaps_total"), 1.0).await;
    system.counts(&of("blocks"), 0.0).await;
    let engines = crate::harness::client::get(system.admin, "/engines").await.json();
    let events = |address: &str| {
        let engines = engines["engines"].as_array().unwrap();
        engines.iter().find(|engine| engine["engine"] == address).unwrap()["kv_events"].clone()
    };
    let of_b = events(&b_is);
    assert_eq!(of_b["publisher"], format!("127.0.0.1:{}", publisher.port));
    assert_eq!((&of_b["connected"], &of_b["gaps"], &of_b["blocks"]), (&json!(true), &json!(1), &json!(0)));
    assert!(events(&a.address.to_string()).is_null(), "no subscription");
    publisher.socket.close().await;
    system.counts(&of("connected"), 0.0).await;
}
