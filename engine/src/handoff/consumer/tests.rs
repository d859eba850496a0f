//! One producer says nothing; another must not notice.

use std::sync::mpsc;
use std::time::Duration;

use baton_connector::fetch::Event;
use baton_connector::layout::KvDtype;
use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{ReadOrder, StopFlag, Verdict};
use baton_connector::{Epoch, Handle, Handoff, Reader, RequestId};

use super::*;

/// Ports of this many producers say nothing, from 1 on.
const SILENT: u16 = 3;
const HEALTHY: u16 = 100;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Calls to some producers never come back until the end of the test; the others are written down.
struct Half {
    heard: mpsc::SyncSender<&'static str>,
    over: (Mutex<bool>, std::sync::Condvar),
}

impl Half {
    fn call(&self, peer: &Peer, what: &'static str) -> Result<(), TransportError> {
        if peer.address.port() == HEALTHY {
            // Who does not listen any more needs to hear nothing.
            let _ = self.heard.try_send(what);
            return Ok(());
        }
        let mut over = self.over.0.lock().expect("no panic");
        while !*over {
            over = self.over.1.wait(over).expect("no panic");
        }
        Err(TransportError::Transfer("silence".into()))
    }
}

impl Transport for Half {
    fn read(&self, peer: &Peer, _: &ReadOrder, _: &Region, _: &StopFlag) -> Result<(), TransportError> {
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
fn producers_that_say_nothing_delay_no_read_no_heartbeat_and_no_notice_of_another() {
    let (heard, hearing) = mpsc::sync_channel(1_000);
    let transport = Arc::new(Half { heard, over: Default::default() });
    let mailbox = Arc::new(Mailbox::new(1));
    let whole = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, block_tokens: 16, dtype: KvDtype::F32 };
    let geometry = Geometry::new(whole, 1).expect("one rank");
    let cache = OwnCache { geometry, regions: vec![Region::allocate(1, whole.block_bytes())], port: None };
    let peers = Peers::start(
        Arc::clone(&transport) as _,
        cache,
        Arc::clone(&mailbox),
        Arc::new(EngineMetrics::new("m")),
        4,
    )
    .expect("threads");
    // Far more than there are threads, and before anything of the healthy one.
    for number in 0..40 {
        let silent = target(1 + (number % u64::from(SILENT)) as u16, u128::from(number));
        peers.keep_alive(SeqId(number), &silent);
        peers.read(SeqId(number), &silent, 0, vec![BlockId(0)]);
        peers.release(&silent, "test");
    }
    let healthy = target(HEALTHY, 1_000);
    for number in 100..110 {
        peers.keep_alive(SeqId(number), &healthy);
        peers.read(SeqId(number), &healthy, 0, vec![BlockId(0)]);
        peers.release(&healthy, "test");
    }
    let mut counts = std::collections::HashMap::new();
    let enough = |counts: &std::collections::HashMap<&str, usize>| {
        ["read", "release"].iter().all(|what| counts.get(what) == Some(&10))
            && counts.contains_key("heartbeat")
    };
    while !enough(&counts) {
        let what = hearing.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("heard only {counts:?}"));
        *counts.entry(what).or_default() += 1;
    }
    let mut landed = Vec::new();
    while landed.len() < 10 {
        let mail = mailbox.wait(Some(Instant::now() + PATIENCE));
        landed.extend(mail.fetches.into_iter().filter(|(_, event)| matches!(event, Event::Verdict(_))));
    }
    assert!(landed.iter().all(|(id, _)| id.0 >= 100), "{landed:?}");
    *transport.over.0.lock().expect("no panic") = true;
    transport.over.1.notify_all();
    peers.shutdown(Instant::now());
}
