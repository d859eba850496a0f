//! KV events of real engines: a subscriber of another implementation knows exactly the blocks of each rank, by name,
//! on the device and in the tiers.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use baton_engine::kv_events::KvEventsConfig;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use zeromq::{Socket, SocketRecv, SubSocket};

use super::digests::digests_of_rank;
use crate::data_parallel::at;
use crate::harness::cluster::{BLOCK, LLAMA, Node, greedy, options, prompt, with};
use crate::requests::adapters::serve;
use crate::tiers::{SMALL_POOL, host, rested};

/// Longer than any message takes on a loaded machine.
const WITHIN: Duration = Duration::from_secs(60);
/// A message that has not arrived by then is looked for later.
const AGAIN: Duration = Duration::from_millis(20);

fn publishing(change: impl Fn(&mut EngineOptions)) -> Node {
    let mut options = options(LLAMA, Role::Both);
    let config = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:0"}"#;
    options.kv_events = KvEventsConfig::parse(config).expect("valid");
    options.kv_blocks = Some(SMALL_POOL);
    change(&mut options);
    Node::start(options)
}

/// What a router knows of one rank.
struct Subscriber {
    socket: SubSocket,
    runtime: Runtime,
    rank: usize,
    /// The number of the last message.
    last: Option<u64>,
    device: BTreeSet<u64>,
    /// Blocks on the host and on the disk.
    tiers: BTreeSet<(String, u64)>,
    stored: Vec<Value>,
}

impl Subscriber {
    /// Subscribes where the engine says. The subscription begins some time later.
    fn connect(node: &Node, rank: usize) -> Self {
        let sources = node.get("/kv_event_sources").ok();
        let endpoint = sources[rank.to_string()]["endpoint"].as_str().expect("an endpoint");
        let endpoint = endpoint.replace('*', "127.0.0.1");
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        let mut socket = SubSocket::new();
        runtime.block_on(async {
            socket.connect(&endpoint).await.expect("the engine listens");
            socket.subscribe("").await.expect("subscribed");
        });
        let (device, tiers, stored) = Default::default();
        Self { socket, runtime, rank, last: None, device, tiers, stored }
    }

    /// Subscribes, and begins with an empty cache.
    fn new(node: &Node, rank: usize) -> Self {
        let mut subscriber = Self::connect(node, rank);
        let deadline = Instant::now() + WITHIN;
        // Messages before the subscription are lost.
        while subscriber.last.is_none() {
            node.forget();
            subscriber.drain();
            assert!(Instant::now() < deadline, "no message arrives");
        }
        subscriber
    }

    /// Applies the messages that have arrived.
    fn drain(&mut self) {
        loop {
            let socket = &mut self.socket;
            let received = self.runtime.block_on(async { tokio::time::timeout(AGAIN, socket.recv()).await });
            let Ok(message) = received else { return };
            let frames = message.expect("a message").into_vec();
            let [topic, number, payload] = &frames[..] else { panic!("{} frames", frames.len()) };
            assert!(topic.is_empty());
            let number = u64::from_be_bytes(number.as_ref().try_into().expect("eight bytes"));
            assert!(self.last.is_none_or(|last| number == last + 1), "no message is lost");
            self.last = Some(number);
            self.apply(&rmp_serde::from_slice(payload).expect("MessagePack"));
        }
    }

    fn apply(&mut self, batch: &Value) {
        assert!(batch[0].as_f64().is_some_and(|at| at > 1.7e9), "{batch}");
        assert_eq!(batch[2], self.rank);
        for event in batch[1].as_array().expect("events") {
            let names = event["block_hashes"].as_array().into_iter().flatten();
            let names: Vec<u64> = names.map(|name| name.as_u64().expect("a number")).collect();
            let medium = event["medium"].as_str().unwrap_or_default().to_owned();
            match (event["type"].as_str().expect("a type"), medium.as_str()) {
                ("BlockStored", "GPU") => {
                    assert_eq!(event["block_size"], BLOCK);
                    assert_eq!(event["token_ids"].as_array().map(Vec::len), Some(names.len() * BLOCK));
                    assert_eq!(event["extra_keys"].as_array().map(Vec::len), Some(names.len()));
                    let parent = event["parent_block_hash"].as_u64();
                    assert!(parent.is_none_or(|parent| self.device.contains(&parent)), "{event}");
                    self.device.extend(names);
                    self.stored.push(event.clone());
                }
                ("BlockStored", _) => {
                    for name in names {
                        assert!(self.device.contains(&name), "its tokens are known: {event}");
                        assert!(self.tiers.insert((medium.clone(), name)), "announced once: {event}");
                    }
                }
                ("BlockRemoved", "GPU") => {
                    assert!(names.iter().all(|name| self.device.remove(name)), "it was stored: {event}");
                }
                ("BlockRemoved", _) => {
                    let mut names = names.into_iter();
                    assert!(names.all(|name| self.tiers.remove(&(medium.clone(), name))), "{event}");
                }
                ("AllBlocksCleared", _) => {
                    self.device.clear();
                    self.tiers.clear();
                }
                other => panic!("{other:?}: {event}"),
            }
        }
    }

    /// Applies messages until the condition is true.
    #[track_caller]
    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + WITHIN;
        loop {
            self.drain();
            if condition(self) {
                return;
            }
            assert!(Instant::now() < deadline, "not in time: {what}");
        }
    }
}

/// The names of a rank's cached blocks: the last eight bytes of their hashes.
fn cached(node: &Node, rank: usize) -> BTreeSet<u64> {
    let name = |hash: &String| u64::from_str_radix(&hash[48..], 16).expect("hexadecimal");
    digests_of_rank(node, rank).keys().map(name).collect()
}

#[test]
fn a_subscriber_knows_exactly_the_cached_blocks_of_each_rank() {
    let node = publishing(|options| options.data_parallel_size = 2);
    for rank in 0..2 {
        let mut subscriber = Subscriber::new(&node, rank);
        for seed in 0..12 {
            // The prompts need more blocks than the pool has. Every second one continues the one before it.
            let body = greedy(&prompt(seed / 2, 41 + seed as usize), 2);
            at(&node, &rank.to_string(), "/v1/completions", &body).ok();
        }
        subscriber.until("its blocks are those of the engine", |known| {
            !known.device.is_empty() && known.device == cached(&node, rank)
        });
        let sent = subscriber.stored.iter().map(|event| event["token_ids"].as_array().map_or(0, Vec::len));
        assert!(sent.sum::<usize>() > SMALL_POOL * BLOCK, "blocks were evicted meanwhile");
        node.forget();
        subscriber.until("its cache is cleared", |known| known.device.is_empty());
    }
    let published = node.metric("baton_kv_events_published_total");
    assert!(published > 4.0, "{published}");
    assert_eq!(node.metric("baton_kv_events_dropped_total"), 0.0);
}

#[test]
fn a_stored_block_has_the_tokens_and_the_salt_of_its_prompt() {
    let node = publishing(|_| {});
    let mut subscriber = Subscriber::new(&node, 0);
    let tokens = prompt(1, 3 * BLOCK + 1);
    at(&node, "0", "/v1/completions", &with(&greedy(&tokens, 1), "cache_salt", json!("tenant"))).ok();
    subscriber.until("three blocks", |known| known.device.len() == 3);
    let all = |field: &str| -> Vec<Value> {
        let lists = subscriber.stored.iter().filter_map(|event| event[field].as_array());
        lists.flatten().cloned().collect()
    };
    let (ids, keys) = (all("token_ids"), all("extra_keys"));
    assert_eq!(ids, tokens[..3 * BLOCK].iter().map(|token| Value::from(*token)).collect::<Vec<_>>());
    assert_eq!(keys, [json!(["tenant"]), Value::Null, Value::Null]);
    assert_eq!(subscriber.stored[0]["parent_block_hash"], Value::Null);
}

#[test]
fn a_stored_block_of_an_adapter_has_its_name() {
    let node = publishing(|options| serve(options, &[("chat", "llama3-other"), ("sql", "llama3-all")]));
    let mut subscriber = Subscriber::new(&node, 0);
    let body = greedy(&prompt(1, 2 * BLOCK + 1), 1);
    at(&node, "0", "/v1/completions", &body).ok();
    let salted = with(&body, "cache_salt", json!("tenant"));
    at(&node, "0", "/v1/completions", &with(&salted, "model", json!("sql"))).ok();
    subscriber.until("two blocks of each", |known| known.device.len() == 4);
    let stored = &subscriber.stored;
    assert_eq!((&stored[0]["lora_id"], &stored[0]["lora_name"]), (&Value::Null, &Value::Null));
    let of_adapter: Vec<_> = stored.iter().filter(|event| event["lora_name"] == "sql").collect();
    assert!(!of_adapter.is_empty() && of_adapter.iter().all(|event| event["lora_id"] == 2));
    let keys = of_adapter.iter().filter_map(|event| event["extra_keys"].as_array());
    let keys: Vec<Value> = keys.flatten().cloned().collect();
    assert_eq!(keys, [json!(["sql", "tenant"]), json!(["sql"])]);
}

#[test]
fn a_later_subscriber_learns_a_cached_prompt_when_it_is_used_again() {
    let node = publishing(|_| {});
    let mut early = Subscriber::new(&node, 0);
    let body = greedy(&prompt(7, 41), 1);
    let ask = || at(&node, "0", "/v1/completions", &body).ok();
    ask();
    early.until("five blocks", |known| known.device.len() == 5);
    let mut late = Subscriber::connect(&node, 0);
    let deadline = Instant::now() + WITHIN;
    while late.device != early.device {
        ask();
        late.drain();
        assert!(Instant::now() < deadline, "it does not learn the blocks");
    }
    // Both know them now, so a further use is no event.
    early.drain();
    let published = node.metric("baton_kv_events_published_total");
    ask();
    assert_eq!(node.metric("baton_kv_events_published_total"), published);
}

#[test]
fn copies_on_the_host_are_announced_and_outlive_those_of_the_device() {
    let node = publishing(|options| host(options, 1));
    let mut subscriber = Subscriber::new(&node, 0);
    for seed in 0..8 {
        at(&node, "0", "/v1/completions", &greedy(&prompt(100 + seed, 45), 1)).ok();
        rested(&node);
    }
    let on_host = node.kv()["offload"]["host"]["blocks"].as_u64().expect("a count") as usize;
    assert!(on_host > SMALL_POOL, "more than the pool has: {on_host}");
    subscriber.until("the copies are known", |known| known.tiers.len() == on_host);
    assert!(subscriber.tiers.iter().all(|(medium, _)| medium == "CPU"));
    subscriber.until("the device has fewer", |known| known.device == cached(&node, 0));
}

#[test]
fn an_engine_without_events_reports_no_source() {
    let node = Node::start(options(LLAMA, Role::Both));
    assert_eq!(node.get("/kv_event_sources").ok(), json!({}));
    assert_eq!(node.post("/kv_event_sources", &json!({})).status, 405);
    assert!(!node.get("/metrics").text.contains("baton_kv_events"), "no series without events");
}
