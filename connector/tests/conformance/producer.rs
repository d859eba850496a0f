//! A producer for tests: the real ledger behind a lock, the real pool memory, and a gate in every read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{ClosedLease, HeartbeatReply, LeaseSpec, Ledger, ReadError, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Reader, RequestId, Time};

/// Longest wait for a state.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Where a read stops and waits for [`TestProducer::open_gate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatePoint {
    /// Nowhere.
    Nowhere,
    /// At this check of the lease, counted from 1.
    Look(u64),
}

/// A producer with leases of its own.
pub struct TestProducer {
    ledger: Mutex<Ledger>,
    region: Region,
    layout: Option<KvLayout>,
    start: Instant,
    epoch: Epoch,
    next: AtomicU64,
    gate: Mutex<Gate>,
    moved: Condvar,
    /// The ledger has changed.
    grown: Condvar,
}

struct Gate {
    at: GatePoint,
    looks: u64,
    waiting: usize,
    failed: Vec<Reader>,
}

impl TestProducer {
    /// A pool in which no two blocks, and no two words of a block, are equal.
    pub fn new(blocks: usize, block_bytes: usize, terms: LeaseTerms) -> Arc<Self> {
        Self::with_layout(blocks, block_bytes, None, terms)
    }

    /// The same with a block layout, so that slices can be read.
    pub fn shaped(blocks: usize, layout: KvLayout, terms: LeaseTerms) -> Arc<Self> {
        Self::with_layout(blocks, layout.block_bytes(), Some(layout), terms)
    }

    fn with_layout(
        blocks: usize,
        block_bytes: usize,
        layout: Option<KvLayout>,
        terms: LeaseTerms,
    ) -> Arc<Self> {
        let region = crate::pool(blocks, block_bytes);
        for block in 0..blocks as u32 {
            region.write_block(BlockId(block), &contents(block, block_bytes));
        }
        let gate = Gate { at: GatePoint::Nowhere, looks: 0, waiting: 0, failed: Vec::new() };
        Arc::new(Self {
            ledger: Mutex::new(Ledger::new(terms)),
            region,
            layout,
            start: Instant::now(),
            epoch: Epoch(0xba70),
            next: AtomicU64::new(1),
            gate: Mutex::new(gate),
            moved: Condvar::new(),
            grown: Condvar::new(),
        })
    }

    pub fn now(&self) -> Time {
        Time::ZERO.after(self.start.elapsed())
    }

    /// Leases blocks to `consumers` consumers.
    pub fn lease(&self, blocks: &[u32], consumers: usize) -> Handle {
        let spec = self.spec(blocks, consumers);
        let handle = spec.handle;
        self.ledger.lock().unwrap().open(spec, self.now()).expect("a free ledger");
        handle
    }

    fn spec(&self, blocks: &[u32], consumers: usize) -> LeaseSpec {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let handle = Handle(u128::from(n) << 64 | 0xdead_beef);
        let request = RequestId::new(&format!("r{n}")).expect("a test id");
        LeaseSpec {
            handle,
            request,
            blocks: blocks.iter().map(|&b| BlockId(b)).collect(),
            expected: consumers,
        }
    }

    /// Leases blocks that are still computed. Blocks after the first `ready` contain garbage until they are final.
    pub fn lease_growing(&self, blocks: &[u32], ready: usize) -> Handle {
        let spec = self.spec(blocks, 1);
        let handle = spec.handle;
        for &block in &spec.blocks[ready..] {
            self.region.write_block(block, &vec![0xee; self.region.block_bytes()]);
        }
        self.ledger.lock().unwrap().open_growing(spec, ready, self.now()).expect("a free ledger");
        handle
    }

    /// Computes these blocks, and marks the first `ready` blocks of their lease as final.
    pub fn compute(&self, handle: Handle, blocks: &[u32], ready: usize) {
        for &block in blocks {
            self.region.write_block(BlockId(block), &contents(block, self.region.block_bytes()));
        }
        self.ledger.lock().unwrap().grow(handle, ready);
        self.grown.notify_all();
    }

    /// The prefill is done.
    pub fn seal(&self, handle: Handle) -> bool {
        let sealed = self.ledger.lock().unwrap().seal(handle, self.now());
        self.grown.notify_all();
        sealed
    }

    /// Stops the next read at this point. Releases the waiting reads.
    pub fn gate(&self, at: GatePoint) {
        let mut gate = self.gate.lock().unwrap();
        (gate.at, gate.looks) = (at, 0);
        self.moved.notify_all();
    }

    /// Releases the waiting reads; later reads do not wait.
    pub fn open_gate(&self) {
        self.gate(GatePoint::Nowhere);
    }

    /// Waits until a read has reached the gate.
    pub fn await_gate(&self) {
        self.wait_for("a read at the gate", |gate| gate.waiting > 0);
    }

    /// Waits until the producer has noticed the end of this reader's connection.
    pub fn await_failed(&self, reader: Reader) {
        self.wait_for("a failed read", |gate| gate.failed.contains(&reader));
    }

    /// Waits until this lease has a reader.
    pub fn await_reader(&self, handle: Handle) {
        let unread = |ledger: &mut Ledger| {
            let live = ledger.snapshot(self.now()).live;
            live.iter().all(|live| live.handle != handle || live.lease.reading.is_empty())
        };
        let ledger = self.ledger.lock().unwrap();
        let (_ledger, timeout) = self.grown.wait_timeout_while(ledger, TEST_TIMEOUT, unread).unwrap();
        assert!(!timeout.timed_out(), "no reader within {TEST_TIMEOUT:?}");
    }

    fn wait_for(&self, what: &str, state: impl Fn(&Gate) -> bool) {
        let gate = self.gate.lock().unwrap();
        let (_gate, timeout) =
            self.moved.wait_timeout_while(gate, TEST_TIMEOUT, |gate| !state(gate)).unwrap();
        assert!(!timeout.timed_out(), "no {what} within {TEST_TIMEOUT:?}");
    }

    /// Leases that have ended since the last call.
    pub fn closed_leases(&self) -> Vec<ClosedLease> {
        let mut ledger = self.ledger.lock().unwrap();
        ledger.tick(self.now());
        ledger.take_closed()
    }

    pub fn live_leases(&self) -> usize {
        self.ledger.lock().unwrap().len()
    }
}

/// The content of block `block` of a producer.
pub fn contents(block: u32, block_bytes: usize) -> Vec<u8> {
    (0..block_bytes).map(|i| (block as usize * 31 + i + (i >> 8) * 7 + (i >> 16) * 13) as u8).collect()
}

impl Producer for TestProducer {
    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn fingerprint(&self) -> u64 {
        0x1a70
    }

    fn layout(&self) -> Option<KvLayout> {
        self.layout
    }

    fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        let begun = self.ledger.lock().unwrap().begin_read(handle, reader, first, count, self.now());
        self.grown.notify_all();
        begun.map_err(|error| match error {
            ReadError::Gone => TransportError::Gone,
            ReadError::Range { .. } | ReadError::Busy => TransportError::Refused(format!("{error:?}").into()),
        })
    }

    fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        let mut gate = self.gate.lock().unwrap();
        gate.looks += 1;
        if gate.at == GatePoint::Look(gate.looks) {
            gate.waiting += 1;
            self.moved.notify_all();
            let at = gate.at;
            gate = self.moved.wait_while(gate, |gate| gate.at == at).unwrap();
            gate.waiting -= 1;
        }
        drop(gate);
        let mut ledger = self.ledger.lock().unwrap();
        ledger.tick(self.now());
        ledger.is_read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        if !self.is_read_live(handle, reader) {
            return Readiness::Gone;
        }
        let unready = |ledger: &mut Ledger| ledger.readiness(handle, reader, upto) == Readiness::NotYet;
        let ledger = self.ledger.lock().unwrap();
        let (ledger, _) = self.grown.wait_timeout_while(ledger, within, unready).unwrap();
        ledger.readiness(handle, reader, upto)
    }

    fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
        self.ledger.lock().unwrap().finish_read(handle, reader, self.now())
    }

    fn fail_read(&self, handle: Handle, reader: Reader) {
        self.ledger.lock().unwrap().fail_read(handle, reader, self.now());
        self.gate.lock().unwrap().failed.push(reader);
        self.moved.notify_all();
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let mut ledger = self.ledger.lock().unwrap();
        let reply = ledger.release(handle, reason, self.now());
        ledger.take_unfinished();
        self.grown.notify_all();
        reply
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        self.ledger.lock().unwrap().leave(handle, consumer, reason, self.now())
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        self.ledger.lock().unwrap().heartbeat(handle, self.now())
    }

    fn region(&self) -> &Region {
        &self.region
    }
}
