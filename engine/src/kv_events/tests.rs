//! A publisher with subscribers of another implementation: the crate `zeromq`.

use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use metrics::{Counter, Gauge};
use serde_json::Value;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::{EventPublisher, EventSender, EventSockets, KvEventMetrics, KvEventsConfig, RankBlocks};
use crate::blocks::cache_events::{CacheEvent, CacheMedium};
use crate::blocks::hash::BlockHash;

/// Longer than any message takes on a loaded machine.
const WITHIN: Duration = Duration::from_secs(60);
/// Pause between two messages that no subscriber may have received.
const AGAIN: Duration = Duration::from_millis(20);

fn start(config: &str, rank: usize) -> (EventSender, EventPublisher) {
    let config = KvEventsConfig::parse(config).expect("valid").expect("enabled");
    let sockets = EventSockets::bind(&config, rank, IpAddr::from([127, 0, 0, 1])).expect("free ports");
    let metrics =
        KvEventMetrics { published: Counter::noop(), dropped: Counter::noop(), subscribers: Gauge::noop() };
    EventPublisher::start("kv-events", &config, sockets, RankBlocks { rank, block_tokens: 4 }, metrics)
        .expect("it starts")
}

/// An endpoint that the publisher reports, on loopback.
fn endpoint(publisher: &EventPublisher, field: &str) -> String {
    publisher.source()[field].as_str().expect("an endpoint").replace('*', "127.0.0.1")
}

fn removed(number: u64) -> CacheEvent {
    let mut hash = [0; 32];
    hash[24..].copy_from_slice(&number.to_be_bytes());
    CacheEvent::Removed { medium: CacheMedium::Device, hashes: vec![BlockHash(hash)] }
}

/// A message: topic, number, batch.
fn parsed(frames: &[Bytes]) -> (String, u64, Value) {
    let [topic, number, payload] = frames else { panic!("{} frames", frames.len()) };
    let number = u64::from_be_bytes(number.as_ref().try_into().expect("eight bytes"));
    (
        String::from_utf8_lossy(topic).into_owned(),
        number,
        rmp_serde::from_slice(payload).expect("MessagePack"),
    )
}

async fn receive(subscriber: &mut SubSocket) -> (String, u64, Value) {
    let message = tokio::time::timeout(WITHIN, subscriber.recv()).await.expect("in time").expect("a message");
    parsed(&message.into_vec())
}

/// Sends messages until the subscription counts. Returns the first received one, and how many were sent.
async fn first(sender: &mut EventSender, subscriber: &mut SubSocket) -> ((String, u64, Value), u64) {
    for sent in 1.. {
        sender.send(vec![removed(sent)]);
        if let Ok(message) = tokio::time::timeout(AGAIN, subscriber.recv()).await {
            return (parsed(&message.expect("a message").into_vec()), sent);
        }
        assert!(sent < 3_000, "no message arrives");
    }
    unreachable!("the loop ends by a result")
}

#[tokio::test]
async fn subscribers_get_numbered_messages_and_a_replay_repeats_them() {
    let config = r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0",
        "topic": "kv"}"#;
    let (mut sender, publisher) = start(config, 3);
    let at = endpoint(&publisher, "endpoint");
    // A scraper at the wrong port disturbs no subscriber.
    let scraper = std::net::TcpStream::connect(at.trim_start_matches("tcp://"));
    scraper.and_then(|mut stream| stream.write_all(&[b'G'; 100])).expect("it is accepted");
    let (mut subscriber, mut other) = (SubSocket::new(), SubSocket::new());
    for (socket, topic) in [(&mut subscriber, "kv"), (&mut other, "another topic")] {
        socket.connect(&at).await.expect("it listens");
        socket.subscribe(topic).await.expect("subscribed");
    }
    let ((topic, begun, batch), mut sent) = first(&mut sender, &mut subscriber).await;
    assert_eq!((topic.as_str(), &batch[2]), ("kv", &Value::from(3)), "{batch}");
    for _ in 0..50 {
        sent += 1;
        sender.send(vec![removed(sent)]);
    }
    for number in begun + 1..sent {
        let (_, received, batch) = receive(&mut subscriber).await;
        assert_eq!(received, number);
        let event = &batch[1][0];
        assert_eq!(
            (&event["type"], &event["block_hashes"][0]),
            (&"BlockRemoved".into(), &(number + 1).into())
        );
    }
    assert!(tokio::time::timeout(AGAIN, other.recv()).await.is_err(), "it has another topic");
    let mut replay = DealerSocket::new();
    replay.connect(&endpoint(&publisher, "replay_endpoint")).await.expect("it listens");
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&(sent - 10).to_be_bytes()));
    replay.send(request).await.expect("sent");
    for number in sent - 10..sent {
        let message = tokio::time::timeout(WITHIN, replay.recv()).await.expect("in time").expect("a message");
        let (topic, received, batch) = parsed(&message.into_vec()[1..]);
        assert_eq!((topic.as_str(), received), ("kv", number));
        assert_eq!(batch[1][0]["block_hashes"][0], Value::from(number + 1));
    }
    let end = tokio::time::timeout(WITHIN, replay.recv()).await.expect("in time").expect("the end marker");
    let frames: Vec<_> = end.into_vec().iter().map(|frame| frame.to_vec()).collect();
    assert_eq!(frames, [Vec::new(), Vec::new(), vec![0xff; 8], Vec::new()]);
}

#[tokio::test]
async fn an_engine_that_connects_delivers_its_last_messages_before_it_ends() {
    let mut subscriber = SubSocket::new();
    let listening = subscriber.bind("tcp://127.0.0.1:0").await.expect("a free port").to_string();
    subscriber.subscribe("").await.expect("subscribed");
    let config = format!(r#"{{"enable_kv_cache_events": true, "endpoint": "{listening}"}}"#);
    let (mut sender, publisher) = start(&config, 0);
    let ((_, begun, _), mut sent) = first(&mut sender, &mut subscriber).await;
    for _ in 0..100 {
        sent += 1;
        sender.send(vec![removed(sent)]);
    }
    drop(sender);
    publisher.join();
    for number in begun + 1..sent {
        assert_eq!(receive(&mut subscriber).await.1, number);
    }
}

#[test]
fn each_rank_binds_its_own_ports_and_a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port();
    let config = format!(r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}"#);
    let config = KvEventsConfig::parse(&config).expect("valid").expect("enabled");
    let own = IpAddr::from([127, 0, 0, 1]);
    let error = EventSockets::bind(&config, 0, own).err().expect("refused");
    assert!(error.starts_with(&format!("listen on 127.0.0.1:{port}: ")), "{error}");
    let free = KvEventsConfig::parse(r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}"#);
    let free = free.expect("valid").expect("enabled");
    let ranks = [0, 1].map(|rank| EventSockets::bind(&free, rank, own).expect("free ports"));
    assert_ne!(ranks[0].endpoint(), ranks[1].endpoint());
}
