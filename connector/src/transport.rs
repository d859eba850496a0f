//! The two traits of a transport. A consumer calls [`Transport`]. A transport's serving side calls [`Producer`] before
//! it sends a byte.
//!
//! Calls block their thread: the engine runs them on its fetch workers, never on the step loop. A transport adds no
//! guarantee of its own. Liveness comes from the lease, and validity from [`Transport::finish`]. Its verdict confirms
//! that the lease was live for the whole read, and read bytes are not used before it (invariant 3).

use std::net::SocketAddr;
use std::time::Duration;

use crate::machines::ledger::{HeartbeatReply, ReleaseReply};
pub use crate::machines::replies::{Readiness, TransportError, Verdict};
use crate::memory::region::Region;
use crate::memory::slice::Slice;
use crate::{BlockId, Epoch, Handle, KvLayout, Reader};

/// A producer's side channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The address on which its transport listens.
    pub address: SocketAddr,
    /// The producer's epoch in the handoff.
    pub epoch: Epoch,
    /// The fingerprint of model, shape, number of ranks and rank, which must match before a byte is read
    /// ([`crate::memory::slice::Geometry::rank_fingerprint`]).
    pub fingerprint: u64,
}

/// One read: part of a lease's block table, into landing blocks.
#[derive(Clone, Debug)]
pub struct ReadOrder {
    /// The lease.
    pub handle: Handle,
    /// The reader.
    pub reader: Reader,
    /// The part of the lease's blocks.
    pub part: Part,
    /// The landing blocks: for [`Part::Blocks`] in the order of the lease's block table, for [`Part::Slice`] in the
    /// order of the tokens.
    pub into: Vec<BlockId>,
}

/// The part of a lease's blocks that a read transfers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// One whole block per landing block, copied byte for byte.
    Blocks {
        /// First entry of the lease's block table to read. The consumer already has the blocks before it.
        first: usize,
    },
    /// Some heads of some tokens, because ranks or block sizes differ.
    Slice(Box<Slice>),
}

impl ReadOrder {
    /// Bytes of the transfer; `block_bytes` is the size of the consumer's blocks.
    #[must_use]
    pub fn bytes(&self, block_bytes: usize) -> usize {
        match &self.part {
            Part::Blocks { .. } => self.into.len() * block_bytes,
            Part::Slice(slice) => slice.range.bytes(&slice.producer),
        }
    }
}

/// A stop flag that a reading thread checks between system calls.
pub type StopFlag = std::sync::atomic::AtomicBool;

/// The consumer's side of a transport.
pub trait Transport: Send + Sync {
    /// The name of the transport that moves a peer's blocks, for logs and metrics. It may differ by peer.
    fn carrier(&self, peer: &Peer) -> &'static str {
        let _ = peer;
        "other"
    }

    /// Reads blocks directly into `region`. After the return, with any result, the transport no longer writes into the
    /// landing blocks.
    ///
    /// The transport calls `landed` on this thread with whole blocks, each once and in the order of
    /// [`ReadOrder::into`]. The caller can copy these to a device while others are transferred. The transport reports
    /// either all blocks or none. It reports none of a slice read, or if it lands outside `region`. Landed blocks are
    /// not valid before [`Self::finish`] confirms them, and the read may still fail.
    ///
    /// # Errors
    /// Any [`TransportError`]. The content of the landing blocks is then undefined.
    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError>;

    /// As [`Self::read_with`], without reports of landed blocks.
    ///
    /// # Errors
    /// As [`Self::read_with`].
    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        self.read_with(peer, order, region, stop, &mut |_| ())
    }

    /// Reports to the producer that this reader has everything, and returns whether the bytes may be used.
    ///
    /// # Errors
    /// A [`TransportError`] other than `Gone` means that the verdict is unknown: treat it as [`Verdict::Gone`].
    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError>;

    /// Reports to the producer that this reader discards what it has read. A release then does not wait for this reader
    /// until the drain deadline. Idempotent. Needed only after a successful [`Self::read`]: a failed one is reported by
    /// the transport.
    ///
    /// # Errors
    /// When the producer could not be reached. The blocks are then freed later.
    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        let _ = (peer, handle, reader);
        Ok(())
    }

    /// Ends a lease early. Idempotent: the caller repeats it until it gets an answer or the lease has expired.
    ///
    /// # Errors
    /// When the producer could not be reached. An answer of any kind is a success.
    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError>;

    /// Reports that one of a lease's consumers does not read any more. The last one ends the lease. Idempotent, and
    /// repeated like [`Self::release`].
    ///
    /// # Errors
    /// When the producer could not be reached. An answer of any kind is a success.
    fn leave(
        &self,
        peer: &Peer,
        handle: Handle,
        consumer: u64,
        reason: &str,
    ) -> Result<ReleaseReply, TransportError>;

    /// Renews leases; one reply per handle, in order.
    ///
    /// # Errors
    /// When the producer could not be reached.
    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError>;

    /// Closes connections to peers that are idle for long or have ended, and with them the mapped memory of a dead
    /// producer. The owner calls this about once per second.
    fn sweep(&self) {}
}

/// An engine rank, as the serving side of a transport uses it. The transport calls it from its own threads. The answers
/// come from the lease ledger and never wait for the step loop.
pub trait Producer: Send + Sync {
    /// The engine's epoch.
    fn epoch(&self) -> Epoch;

    /// The fingerprint that a consumer must match: [`Peer::fingerprint`].
    fn fingerprint(&self) -> u64;

    /// The layout of this rank's blocks; `None` if only whole blocks are served.
    fn layout(&self) -> Option<KvLayout> {
        None
    }

    /// Opens a read of `count` blocks from entry `first` of the lease's table and returns their ids.
    ///
    /// # Errors
    /// [`TransportError::Gone`] or [`TransportError::Refused`].
    fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError>;

    /// Whether the lease still serves this reader. The transport checks this before every batch of blocks.
    fn is_read_live(&self, handle: Handle, reader: Reader) -> bool;

    /// Whether the first `upto` entries of the lease's table may be sent to this reader. Waits at most `within` for
    /// blocks that are not computed yet. Only a producer of growing leases returns [`Readiness::NotYet`].
    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let _ = (upto, within);
        if self.is_read_live(handle, reader) { Readiness::Ready } else { Readiness::Gone }
    }

    /// Ends a read that has every byte.
    fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict;

    /// Ends a read whose connection broke, or that the reader abandoned.
    fn fail_read(&self, handle: Handle, reader: Reader);

    /// Ends the lease early.
    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply;

    /// Records that one of the lease's consumers does not read any more.
    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply;

    /// Renews the lease.
    fn heartbeat(&self, handle: Handle) -> HeartbeatReply;

    /// The rank's memory.
    fn region(&self) -> &Region;

    /// Copies granted blocks from the device's memory into [`Self::region`], unless the copy there is up to date. The
    /// transport calls this before every batch that it reads from the region, and only for computed blocks. The call
    /// blocks its thread during the copy.
    ///
    /// # Errors
    /// [`TransportError::Refused`] if the copy fails.
    fn download_blocks(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        let _ = blocks;
        Ok(())
    }
}

/// A side channel that is silent for this long within a read or an exchange of messages has failed.
pub const SILENCE: Duration = Duration::from_secs(5);
