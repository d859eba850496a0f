//! A silent producer must not delay another one.

use std::sync::mpsc;
use std::time::Duration;

use baton_connector::fetch::Event;
use baton_connector::layout::KvDtype;
use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{ReadOrder, StopFlag, Verdict};
use baton_connector::{Epoch, Handle, Handoff, Reader, RequestId};

use super::*;

/// Producers at this many ports, from 1 on, never answer.
const SILENT: u16 = 3;
const HEALTHY: u16 = 100;
/// Longer than any step of this test.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls to some producers do not return until the end of the test; the others are recorded.
struct HalfSilentTransport {
    calls: mpsc::SyncSender<&'static str>,
    over: (Mutex<bool>, std::sync::Condvar),
}

impl HalfSilentTransport {
    fn call(&self, peer: &Peer, what: &'static str) -> Result<(), TransportError> {
        if peer.address.port() == HEALTHY {
            // A full or closed channel drops the record.
            let _ = self.calls.try_send(what);
            return Ok(());
        }
        let mut over = self.over.0.lock().expect("no panic");
        while !*over {
            over = self.over.1.wait(over).expect("no panic");
        }
        Err(TransportError::Transfer("silence".into()))
    }
}

impl Transport for HalfSilentTransport {
    fn read_with(
        &self,
        peer: &Peer,
        _: &ReadOrder,
        _: &Region,
        _: &StopFlag,
        _: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        self.call(peer, "read")
    }

    fn finish(&self, _: &Peer, _: Handle, _: Reader) -> Result<Verdict, TransportError> {
        Ok(Verdict::Valid)
    }

    fn release(&self, peer: &Peer, _: Handle, _: &str) -> Result<ReleaseReply, TransportError> {
        self.call(peer, "release").map(|()| ReleaseReply::Released)
    }

    fn leave(&self, peer: &Peer, _: Handle, _: u64, _: &str) -> Result<ReleaseReply, TransportError> {
        self.call(peer, "leave").map(|()| ReleaseReply::Released)
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        self.call(peer, "heartbeat").map(|()| vec![HeartbeatReply::Renewed; handles.len()])
    }
}

fn target(port: u16, handle: u128) -> FetchTarget {
    let handoff = Handoff {
        handle: Handle(handle),
        epoch: Epoch(2),
        engine_id: "p".into(),
        request: RequestId::new("r").expect("an id"),
        host: "127.0.0.1".into(),
        ports: vec![port],
        blocks: vec![BlockId(0)],
        block_tokens: 16,
        tokens: 2,
        lease_left: Some(Duration::from_secs(30)),
        layout: 3,
        prompt: 4,
        cached: 0,
        consumers: 1,
        growing: false,
    };
    FetchTarget::new(&handoff, 5)
}

#[test]
fn silent_producers_delay_no_read_heartbeat_or_notice_of_another() {
    let (calls, received) = mpsc::sync_channel(1_000);
    let transport = Arc::new(HalfSilentTransport { calls, over: Default::default() });
    let mailbox = Arc::new(Mailbox::new(1));
    let whole = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, block_tokens: 16, dtype: KvDtype::F32 };
    let geometry = Geometry::new(whole, 1).expect("one rank");
    let cache =
        LocalCache { geometry, regions: vec![Region::allocate(1, whole.block_bytes())], shared_pool: None };
    let consumer = HandoffConsumer::start(
        Arc::clone(&transport) as _,
        cache,
        Arc::clone(&mailbox),
        Arc::new(EngineMetrics::new("m")),
        4,
    )
    .expect("threads");
    // Far more than there are threads, and before all calls to the healthy producer.
    for number in 0..40 {
        let silent = target(1 + (number % u64::from(SILENT)) as u16, u128::from(number));
        consumer.keep_alive(SeqId(number), &silent);
        consumer.read(SeqId(number), &silent, 0, vec![BlockId(0)]);
        consumer.release(&silent, "test");
    }
    let healthy = target(HEALTHY, 1_000);
    for number in 100..110 {
        consumer.keep_alive(SeqId(number), &healthy);
        consumer.read(SeqId(number), &healthy, 0, vec![BlockId(0)]);
        consumer.release(&healthy, "test");
    }
    let mut counts = std::collections::HashMap::new();
    let enough = |counts: &std::collections::HashMap<&str, usize>| {
        ["read", "release"].iter().all(|what| counts.get(what) == Some(&10))
            && counts.contains_key("heartbeat")
    };
    while !enough(&counts) {
        let what = received.recv_timeout(TEST_TIMEOUT).unwrap_or_else(|_| panic!("received only {counts:?}"));
        *counts.entry(what).or_default() += 1;
    }
    let mut landed = Vec::new();
    while landed.len() < 10 {
        let mail = mailbox.wait(Some(Instant::now() + TEST_TIMEOUT));
        landed.extend(mail.fetches.into_iter().filter(|(_, event)| matches!(event, Event::Verdict(_))));
    }
    assert!(landed.iter().all(|(id, _)| id.0 >= 100), "{landed:?}");
    *transport.over.0.lock().expect("no panic") = true;
    transport.over.1.notify_all();
    consumer.shutdown(Instant::now());
}

#[test]
fn a_consumer_for_refusals_has_no_thread_before_its_first_notice_and_delivers_that() {
    let (calls, received) = mpsc::sync_channel(10);
    let transport = Arc::new(HalfSilentTransport { calls, over: Default::default() });
    let (mailbox, metrics) = (Arc::new(Mailbox::new(1)), Arc::new(EngineMetrics::new("m")));
    let consumer = HandoffConsumer::for_refusals(transport, mailbox, metrics);
    let running = || consumer.threads.lock().expect("no panic").len();
    assert_eq!(running(), 0);
    for (number, threads) in [(1, notices::THREADS + 1), (2, notices::THREADS + 1)] {
        consumer.release(&target(HEALTHY, number), "test");
        assert_eq!((received.recv_timeout(TEST_TIMEOUT), running()), (Ok("release"), threads));
    }
    consumer.stop_read(SeqId(1));
    consumer.shutdown(Instant::now() + TEST_TIMEOUT);
    assert_eq!(running(), 0, "its threads have ended");
}
