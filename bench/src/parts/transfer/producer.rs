//! A minimal producer: the real ledger behind a lock, and a filled pool.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{HeartbeatReply, LeaseSpec, Ledger, ReadError, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Producer, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader, RequestId, Time};
use baton_connector_shm::shared_pool;

pub(crate) struct BenchProducer {
    ledger: Mutex<Ledger>,
    region: Region,
    start: Instant,
    next: AtomicU64,
}

impl BenchProducer {
    /// With a pool in which neighbouring blocks differ.
    pub(super) fn new(blocks: usize, block_bytes: usize) -> io::Result<Self> {
        let region = shared_pool(blocks, block_bytes)?;
        let mut bytes: Vec<u8> = (0..block_bytes).map(|i| (i ^ (i >> 8)) as u8).collect();
        for block in 0..blocks {
            bytes[..8].copy_from_slice(&(block as u64).to_le_bytes());
            region.write_block(BlockId(block as u32), &bytes);
        }
        Ok(Self::over(region))
    }

    /// With a pool that the caller fills.
    pub(crate) fn over(region: Region) -> Self {
        let ledger = Mutex::new(Ledger::new(LeaseTerms::default()));
        Self { ledger, region, start: Instant::now(), next: AtomicU64::new(1) }
    }

    fn ledger(&self) -> (MutexGuard<'_, Ledger>, Time) {
        let now = Time::ZERO.after(self.start.elapsed());
        (self.ledger.lock().unwrap_or_else(PoisonError::into_inner), now)
    }

    /// Opens a lease of these blocks for one reader.
    pub(crate) fn open_lease(&self, blocks: &[BlockId]) -> Handle {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let request = RequestId::new(&n.to_string()).expect("digits are a request id");
        let handle = Handle(u128::from(n));
        let (mut ledger, now) = self.ledger();
        drop(ledger.take_closed());
        let grant = LeaseSpec { handle, request, blocks: blocks.to_vec(), expected: 1 };
        ledger.open(grant, now).expect("one lease at a time fits");
        handle
    }

    pub(super) fn live_leases(&self) -> usize {
        self.ledger().0.len()
    }
}

impl Producer for BenchProducer {
    fn epoch(&self) -> Epoch {
        // The name of the shared memory. The process id makes it unique.
        Epoch(std::process::id().into())
    }

    fn fingerprint(&self) -> u64 {
        1
    }

    fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        let (mut ledger, now) = self.ledger();
        ledger.begin_read(handle, reader, first, count, now).map_err(|refusal| match refusal {
            ReadError::Gone => TransportError::Gone,
            other => TransportError::Refused(format!("{other:?}").into()),
        })
    }

    fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        let (mut ledger, now) = self.ledger();
        ledger.tick(now);
        ledger.is_read_live(handle, reader)
    }

    fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
        let (mut ledger, now) = self.ledger();
        ledger.finish_read(handle, reader, now)
    }

    fn fail_read(&self, handle: Handle, reader: Reader) {
        let (mut ledger, now) = self.ledger();
        ledger.fail_read(handle, reader, now);
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let (mut ledger, now) = self.ledger();
        ledger.release(handle, reason, now)
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        let (mut ledger, now) = self.ledger();
        ledger.leave(handle, consumer, reason, now)
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        let (mut ledger, now) = self.ledger();
        ledger.heartbeat(handle, now)
    }

    fn region(&self) -> &Region {
        &self.region
    }
}
