//! The reports of a fetch to the step loop, with scripted transports.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use baton_connector::layout::KvDtype;
use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::transport::{StopFlag, Verdict};
use baton_connector::{Epoch, Handle, Handoff, KvLayout, RequestId};

use baton_connector_device::{ImportedPool, Offer, PoolExport};

use super::*;
use crate::compute::cuda::device::{HostRun, PoolMemory};

/// The script of a transport's reads; the other calls are answered here.
trait ReadScript: Send + Sync + 'static {
    fn read(&self, peer: SocketAddr, order: &ReadOrder, stop: &StopFlag) -> Result<(), TransportError>;

    /// Blocks that are reported as landed before the end of the read.
    fn landed_early(&self, _: &ReadOrder, _: &Region) -> Vec<BlockId> {
        Vec::new()
    }

    fn verdict(&self, _: Reader) -> Result<Verdict, TransportError> {
        Ok(Verdict::Valid)
    }
}

/// The reports that the step loop has received.
type StepLoopReports = Vec<(SeqId, Event)>;
/// The calls of a transport other than reads.
type TransportCalls = Vec<(&'static str, Reader)>;

/// Records the calls other than reads.
struct ScriptedTransport<R> {
    reads: R,
    asked: Mutex<TransportCalls>,
}

impl<R: ReadScript> Transport for ScriptedTransport<R> {
    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        self.reads.landed_early(order, region).into_iter().for_each(|block| landed(&[block]));
        self.reads.read(peer.address, order, stop)
    }

    fn finish(&self, _: &Peer, _: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        lock(&self.asked).push(("finish", reader));
        self.reads.verdict(reader)
    }

    fn give_up(&self, _: &Peer, _: Handle, reader: Reader) -> Result<(), TransportError> {
        lock(&self.asked).push(("give up", reader));
        Ok(())
    }

    fn release(&self, _: &Peer, _: Handle, _: &str) -> Result<ReleaseReply, TransportError> {
        Ok(ReleaseReply::Released)
    }

    fn leave(&self, _: &Peer, _: Handle, _: u64, _: &str) -> Result<ReleaseReply, TransportError> {
        Ok(ReleaseReply::Released)
    }

    fn heartbeat(&self, _: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        Ok(vec![HeartbeatReply::Gone; handles.len()])
    }
}

/// A cache of four heads in this many ranks, blocks of 4 tokens.
fn geometry(ranks: usize) -> Geometry {
    let whole = KvLayout { layers: 1, kv_heads: 4, head_dim: 2, block_tokens: 4, dtype: KvDtype::F32 };
    Geometry::new(whole, ranks).expect("ranks that divide the heads")
}

/// A handoff of seven tokens from an engine of this many ranks, rank r at port 100 + r.
fn target(ranks: u16) -> FetchTarget {
    let handoff = Handoff {
        handle: Handle(1),
        epoch: Epoch(2),
        engine_id: "p".into(),
        request: RequestId::new("r").expect("an id"),
        host: "127.0.0.1".into(),
        ports: (100..100 + ranks).collect(),
        blocks: vec![BlockId(0), BlockId(1)],
        block_tokens: 4,
        tokens: 7,
        lease_left: Some(Duration::from_secs(1)),
        layout: 3,
        prompt: 4,
        cached: 0,
        consumers: 1,
        growing: false,
    };
    FetchTarget::new(&handoff, 5)
}

/// A consumer of `ranks` ranks with one worker each.
struct FetchBench<R> {
    workers: FetchWorkers,
    threads: Vec<JoinHandle<()>>,
    mailbox: Arc<Mailbox>,
    transport: Arc<ScriptedTransport<R>>,
}

impl<R: ReadScript> FetchBench<R> {
    fn new(ranks: usize, reads: R) -> Self {
        Self::with(ranks, reads, |_| None)
    }

    /// The same, if the region of rank 0 mirrors this device's memory.
    fn with(ranks: usize, reads: R, shared_pool: impl FnOnce(&Region) -> Option<Arc<SharedKvPool>>) -> Self {
        let transport = Arc::new(ScriptedTransport { reads, asked: Mutex::default() });
        let mailbox = Arc::new(Mailbox::new(1));
        let geometry = geometry(ranks);
        let region = |_| Region::allocate(2, geometry.shard().block_bytes());
        let regions: Vec<_> = geometry.each_rank().map(region).collect();
        let shared_pool = shared_pool(&regions[0]);
        let cache = LocalCache { geometry, regions, shared_pool };
        let metrics = Arc::new(EngineMetrics::new("m"));
        let (workers, threads) =
            FetchWorkers::start(Arc::clone(&transport) as _, cache, Arc::clone(&mailbox), metrics, 1)
                .expect("threads");
        Self { workers, threads, mailbox, transport }
    }

    fn read(&self, id: u64, from_ranks: u16) {
        self.workers.read(SeqId(id), target(from_ranks), 0, &[BlockId(0), BlockId(1)]);
    }

    /// Waits for the first report, ends the workers, and returns all reports and calls.
    fn end(self) -> (StepLoopReports, TransportCalls) {
        let mut events = self.mailbox.wait(None).fetches;
        while !lock(&self.workers.0.runs).is_empty() {
            std::thread::yield_now();
        }
        self.workers.close();
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        events.extend(self.mailbox.collect().fetches);
        let asked = lock(&self.transport.asked).clone();
        (events, asked)
    }
}

/// Reads without delay.
struct InstantReads {
    /// Raises the stop flag, as when a request ends while the last bytes arrive.
    given_up: bool,
    verdict: Result<Verdict, TransportError>,
}

impl ReadScript for InstantReads {
    fn read(&self, _: SocketAddr, _: &ReadOrder, stop: &StopFlag) -> Result<(), TransportError> {
        stop.store(self.given_up, Ordering::Release);
        Ok(())
    }

    fn verdict(&self, _: Reader) -> Result<Verdict, TransportError> {
        self.verdict.clone()
    }
}

const SEQ: SeqId = SeqId(1);
const BROKEN: Event = Event::TransferFailed(FailureKind::Transfer);

/// The reports of a read over one link, and the calls of the transport.
fn read(given_up: bool, verdict: Result<Verdict, TransportError>) -> (Vec<Event>, Vec<&'static str>) {
    let bench = FetchBench::new(1, InstantReads { given_up, verdict });
    bench.read(1, 1);
    let (events, asked) = bench.end();
    (events.into_iter().map(|(_, event)| event).collect(), asked.into_iter().map(|(what, _)| what).collect())
}

#[test]
fn a_read_that_succeeds_is_verified() {
    let (events, asked) = read(false, Ok(Verdict::Valid));
    assert_eq!(events, [Event::TransferDone, Event::Verdict(Verification::Valid)]);
    assert_eq!(asked, ["finish"]);
}

#[test]
fn a_read_cancelled_at_its_last_bytes_is_reported_to_the_producer() {
    let (events, asked) = read(true, Ok(Verdict::Valid));
    assert_eq!(events, [BROKEN]);
    assert_eq!(asked, ["give up"]);
}

#[test]
fn a_read_whose_verdict_never_comes_is_given_up_at_the_producer() {
    let (events, asked) = read(false, Err(TransportError::Transfer("silence".into())));
    assert_eq!(events, [Event::TransferDone, Event::Verdict(Verification::Unknown)]);
    assert_eq!(asked, ["finish", "give up"]);
}

#[test]
fn a_fetch_over_several_links_is_one_transfer_and_one_verdict() {
    for (theirs, ours, links) in [(1, 2, 2), (2, 1, 2), (2, 2, 2), (4, 2, 4), (2, 4, 4)] {
        let bench = FetchBench::new(ours, InstantReads { given_up: false, verdict: Ok(Verdict::Valid) });
        bench.read(1, theirs);
        let (events, mut asked) = bench.end();
        assert_eq!(events, [(SEQ, Event::TransferDone), (SEQ, Event::Verdict(Verification::Valid))]);
        asked.sort_unstable();
        let all = (0..links).map(|n| ("finish", Reader { consumer: 5, of: links, rank: Rank(n) }));
        assert!(asked.iter().copied().eq(all), "from {theirs} ranks to {ours}: {asked:?}");
    }
}

#[test]
fn a_fetch_whose_links_do_not_all_have_a_valid_verdict_is_not_valid() {
    struct OneEndedLease;
    impl ReadScript for OneEndedLease {
        fn read(&self, _: SocketAddr, _: &ReadOrder, _: &StopFlag) -> Result<(), TransportError> {
            Ok(())
        }
        fn verdict(&self, reader: Reader) -> Result<Verdict, TransportError> {
            Ok(if reader.rank == Rank(1) { Verdict::Gone } else { Verdict::Valid })
        }
    }
    let bench = FetchBench::new(2, OneEndedLease);
    bench.read(1, 2);
    let (events, _) = bench.end();
    // The order of the two links decides whether the other one was still reading.
    let gone = [(SEQ, Event::TransferDone), (SEQ, Event::Verdict(Verification::Gone))];
    assert!(events == gone || events == [(SEQ, Event::TransferFailed(FailureKind::Gone))], "{events:?}");
}

/// The producer's rank at port 100 never answers; others do `other`.
struct SilentRank(fn() -> Result<(), TransportError>);

impl ReadScript for SilentRank {
    #[allow(clippy::disallowed_methods, reason = "a producer that says nothing")]
    fn read(&self, peer: SocketAddr, _: &ReadOrder, stop: &StopFlag) -> Result<(), TransportError> {
        if peer.port() != 100 {
            return (self.0)();
        }
        while !stop.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(TransportError::Stopped)
    }
}

#[test]
fn a_link_that_fails_ends_the_one_that_waits_for_a_silent_rank() {
    let bench = FetchBench::new(2, SilentRank(|| Err(TransportError::Gone)));
    bench.read(1, 2);
    let (events, asked) = bench.end();
    assert_eq!(events, [(SEQ, Event::TransferFailed(FailureKind::Gone))]);
    assert_eq!(asked, []);
}

#[test]
fn a_worker_that_is_lost_ends_its_fetch_and_serves_the_next() {
    let bench = FetchBench::new(2, SilentRank(|| panic!("a worker of rank 1 is lost")));
    for id in [1, 2] {
        bench.read(id, 2);
    }
    while lock(&bench.workers.0.runs).len() > 1 {
        std::thread::yield_now();
    }
    let (mut events, _) = bench.end();
    events.sort_by_key(|(id, _)| *id);
    assert_eq!(events, [(SEQ, BROKEN), (SeqId(2), BROKEN)]);
}

#[test]
fn a_fetch_given_up_behind_a_silent_producer_is_over_at_once() {
    for ranks in [1, 2] {
        let bench = FetchBench::new(ranks, SilentRank(|| Ok(())));
        bench.read(1, 1);
        bench.read(2, 1);
        bench.workers.stop(SeqId(2));
        assert_eq!(bench.mailbox.wait(None).fetches, [(SeqId(2), BROKEN)]);
        bench.workers.stop(SEQ);
        let (events, _) = bench.end();
        assert_eq!(events, [(SEQ, BROKEN)]);
    }
}

#[test]
fn a_handoff_whose_ranks_do_not_fit_this_model_is_refused_before_anything_is_read() {
    let bench = FetchBench::new(2, SilentRank(|| Ok(())));
    bench.read(1, 3);
    let (events, asked) = bench.end();
    assert_eq!((events, asked), (vec![(SEQ, Event::TransferFailed(FailureKind::Refused))], vec![]));
}

/// A device's memory of two blocks, and what becomes of copies into it.
#[derive(Debug)]
struct TwoBlockPool {
    copies: Arc<Mutex<Vec<Vec<HostRun>>>>,
    works: bool,
}

impl PoolMemory for TwoBlockPool {
    fn export(&self) -> std::io::Result<PoolExport> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> std::io::Result<Box<dyn ImportedPool>> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn copy_out(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        unreachable!("nothing is leased")
    }

    fn copy_in(&self, runs: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        lock(&self.copies).push(runs.to_vec());
        let failed = || DeviceError::Call { call: "copy", what: "scripted failure".into() };
        self.works.then_some(()).ok_or_else(failed)
    }
}

/// Records the number of copies at the time of the verdict.
struct LandedReads {
    early: usize,
    copies: Arc<Mutex<Vec<Vec<HostRun>>>>,
    at_verdict: Arc<AtomicUsize>,
}

impl ReadScript for LandedReads {
    fn landed_early(&self, order: &ReadOrder, _: &Region) -> Vec<BlockId> {
        order.into[..self.early].to_vec()
    }

    fn read(&self, _: SocketAddr, _: &ReadOrder, _: &StopFlag) -> Result<(), TransportError> {
        assert_eq!(lock(&self.copies).len(), self.early, "early blocks are uploaded during the read");
        Ok(())
    }

    fn verdict(&self, _: Reader) -> Result<Verdict, TransportError> {
        self.at_verdict.store(lock(&self.copies).len(), Ordering::Release);
        Ok(Verdict::Valid)
    }
}

/// The reports of a fetch into a device's blocks, the calls of its transport, and the bytes of each copy to the
/// device. The copies are counted at the verdict.
fn onto_device(early: usize, from_ranks: u16, works: bool) -> (Vec<Event>, Vec<&'static str>, Vec<usize>) {
    let (copies, at_verdict) = (Arc::default(), Arc::default());
    let reads = LandedReads { early, copies: Arc::clone(&copies), at_verdict: Arc::clone(&at_verdict) };
    let memory = TwoBlockPool { copies: Arc::clone(&copies), works };
    let bench = FetchBench::with(1, reads, |region| {
        let pool = SharedKvPool::new(Arc::new(memory), region.clone());
        pool.reserve(&[BlockId(0), BlockId(1)]);
        Some(Arc::new(pool))
    });
    bench.read(1, from_ranks);
    let (events, asked) = bench.end();
    let copied: Vec<usize> =
        lock(&copies).iter().map(|runs| runs.iter().map(|run| run.bytes).sum()).collect();
    let at_verdict = at_verdict.load(Ordering::Acquire);
    assert!(
        at_verdict == copied.len() || !works,
        "{at_verdict} of {copied:?} when the verdict was asked for"
    );
    (
        events.into_iter().map(|(_, event)| event).collect(),
        asked.into_iter().map(|(what, _)| what).collect(),
        copied,
    )
}

#[test]
fn landed_blocks_are_on_the_device_before_the_step_loop_is_notified() {
    let valid = vec![Event::TransferDone, Event::Verdict(Verification::Valid)];
    let block = geometry(1).shard().block_bytes();
    // Neighbours are one copy; each block is copied once.
    for (early, copied) in [(0, vec![2 * block]), (1, vec![block, block]), (2, vec![block, block])] {
        assert_eq!(
            onto_device(early, 1, true),
            (valid.clone(), vec!["finish"], copied),
            "{early} landed early"
        );
    }
    // Each block contains slices of two links: it is complete after the second.
    let (events, asked, copied) = onto_device(0, 2, true);
    assert_eq!((events, asked.len(), copied), (valid, 2, vec![2 * block]));
}

#[test]
fn a_failed_upload_fails_the_fetch_and_ends_the_read_at_the_producer() {
    for early in [0, 2] {
        let (events, asked, copies) = onto_device(early, 1, false);
        assert_eq!((events, asked), (vec![BROKEN], vec!["give up"]));
        assert_eq!(copies.len(), early + 1, "tried once more at the end");
    }
}
