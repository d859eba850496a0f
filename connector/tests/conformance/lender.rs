//! A producer for tests: the real ledger behind a lock, the real pool memory, and a gate in the middle of
//! every read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{Grant, HeartbeatReply, Ledger, ReadRefusal, ReleaseReply, Settled};
use baton_connector::region::Region;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Reader, RequestId, Time};

/// Longest that a test waits for a state.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where a read stops and waits for [`Lender::open_gate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Nowhere.
    Nowhere,
    /// When the lease is looked at for this time, counted from 1.
    Look(u64),
}

/// See the module.
pub struct Lender {
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
    at: At,
    looks: u64,
    waiting: usize,
    failed: Vec<Reader>,
}

impl Lender {
    /// A pool in which no two blocks, and no two words of a block, are equal.
    pub fn new(blocks: usize, block_bytes: usize, terms: LeaseTerms) -> Arc<Self> {
        Self::with_layout(blocks, block_bytes, None, terms)
    }

    /// The same with blocks of a shape, so that slices of them can be read.
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
        let gate = Gate { at: At::Nowhere, looks: 0, waiting: 0, failed: Vec::new() };
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

    /// Lends blocks to `consumers` consumers.
    pub fn lend(&self, blocks: &[u32], consumers: usize) -> Handle {
        let grant = self.grant(blocks, consumers);
        let handle = grant.handle;
        self.ledger.lock().unwrap().open(grant, self.now()).expect("a free ledger");
        handle
    }

    fn grant(&self, blocks: &[u32], consumers: usize) -> Grant {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let handle = Handle(u128::from(n) << 64 | 0xdead_beef);
        let request = RequestId::new(&format!("r{n}")).expect("a test id");
        Grant { handle, request, blocks: blocks.iter().map(|&b| BlockId(b)).collect(), expected: consumers }
    }

    /// Lends blocks that are still computed: what the others hold is garbage until they are final.
    pub fn lend_growing(&self, blocks: &[u32], ready: usize) -> Handle {
        let grant = self.grant(blocks, 1);
        let handle = grant.handle;
        for &block in &grant.blocks[ready..] {
            self.region.write_block(block, &vec![0xee; self.region.block_bytes()]);
        }
        self.ledger.lock().unwrap().open_growing(grant, ready, self.now()).expect("a free ledger");
        handle
    }

    /// Computes what these blocks hold, and says that the first `ready` of their lease are final.
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

    /// The next read stops there. Also lets go of whoever waits.
    pub fn gate(&self, at: At) {
        let mut gate = self.gate.lock().unwrap();
        (gate.at, gate.looks) = (at, 0);
        self.moved.notify_all();
    }

    /// Whoever waits goes on, and nobody waits any more.
    pub fn open_gate(&self) {
        self.gate(At::Nowhere);
    }

    /// Waits until a read stands at the gate.
    pub fn await_gate(&self) {
        self.wait_for("a read at the gate", |gate| gate.waiting > 0);
    }

    /// Waits until the producer knows that this reader's connection has ended.
    pub fn await_failed(&self, reader: Reader) {
        self.wait_for("a failed read", |gate| gate.failed.contains(&reader));
    }

    /// Waits until somebody reads this lease.
    pub fn await_reader(&self, handle: Handle) {
        let unread = |ledger: &mut Ledger| {
            let live = ledger.portrait(self.now()).live;
            live.iter().all(|live| live.handle != handle || live.lease.reading.is_empty())
        };
        let ledger = self.ledger.lock().unwrap();
        let (_ledger, timeout) = self.grown.wait_timeout_while(ledger, PATIENCE, unread).unwrap();
        assert!(!timeout.timed_out(), "nobody reads within {PATIENCE:?}");
    }

    fn wait_for(&self, what: &str, state: impl Fn(&Gate) -> bool) {
        let gate = self.gate.lock().unwrap();
        let (_gate, timeout) = self.moved.wait_timeout_while(gate, PATIENCE, |gate| !state(gate)).unwrap();
        assert!(!timeout.timed_out(), "no {what} within {PATIENCE:?}");
    }

    /// Leases that have ended since the last call.
    pub fn settled(&self) -> Vec<Settled> {
        let mut ledger = self.ledger.lock().unwrap();
        ledger.tick(self.now());
        ledger.take_settled()
    }

    pub fn live_leases(&self) -> usize {
        self.ledger.lock().unwrap().len()
    }
}

/// What block `block` of a lender holds.
pub fn contents(block: u32, block_bytes: usize) -> Vec<u8> {
    (0..block_bytes).map(|i| (block as usize * 31 + i + (i >> 8) * 7 + (i >> 16) * 13) as u8).collect()
}

impl Producer for Lender {
    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn fingerprint(&self) -> u64 {
        0x1a70
    }

    fn layout(&self) -> Option<KvLayout> {
        self.layout
    }

    fn read_begun(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        let begun = self.ledger.lock().unwrap().read_begun(handle, reader, first, count, self.now());
        self.grown.notify_all();
        begun.map_err(|refusal| match refusal {
            ReadRefusal::Gone => TransportError::Gone,
            ReadRefusal::Range { .. } | ReadRefusal::Busy => {
                TransportError::Refused(format!("{refusal:?}").into())
            }
        })
    }

    fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        let mut gate = self.gate.lock().unwrap();
        gate.looks += 1;
        if gate.at == At::Look(gate.looks) {
            gate.waiting += 1;
            self.moved.notify_all();
            let at = gate.at;
            gate = self.moved.wait_while(gate, |gate| gate.at == at).unwrap();
            gate.waiting -= 1;
        }
        drop(gate);
        let mut ledger = self.ledger.lock().unwrap();
        ledger.tick(self.now());
        ledger.read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        if !self.read_live(handle, reader) {
            return Readiness::Gone;
        }
        let unready = |ledger: &mut Ledger| ledger.readiness(handle, reader, upto) == Readiness::NotYet;
        let ledger = self.ledger.lock().unwrap();
        let (ledger, _) = self.grown.wait_timeout_while(ledger, within, unready).unwrap();
        ledger.readiness(handle, reader, upto)
    }

    fn read_done(&self, handle: Handle, reader: Reader) -> Verdict {
        self.ledger.lock().unwrap().read_done(handle, reader, self.now())
    }

    fn read_failed(&self, handle: Handle, reader: Reader) {
        self.ledger.lock().unwrap().read_failed(handle, reader, self.now());
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
