//! What moves blocks between engines, as two traits: [`Transport`] is what a consumer calls, [`Producer`]
//! is what a transport's serving side asks before it lets a byte out.
//!
//! Calls block their thread: the engine runs them on its fetch workers, never on the step loop. A transport
//! adds no promise of its own. Liveness comes from the lease, and validity from [`Transport::finish`]: bytes
//! that were read are not used before the producer has said that the lease was live for the whole read
//! (invariant 3).

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
    /// Where its transport listens.
    pub address: SocketAddr,
    /// The epoch it had when it made the handoff.
    pub epoch: Epoch,
    /// What both ends must agree about before a byte is read: model, shape, and which rank of which cut this is
    /// ([`crate::memory::slice::Geometry::rank_fingerprint`]).
    pub fingerprint: u64,
}

/// One read: part of a lease's block table, into landing blocks.
#[derive(Clone, Debug)]
pub struct ReadOrder {
    /// The lease.
    pub handle: Handle,
    /// Who reads.
    pub reader: Reader,
    /// What it reads.
    pub part: Part,
    /// Where it goes: for [`Part::Blocks`] in the order of the lease's block table, for [`Part::Slice`] in the
    /// order of the tokens.
    pub into: Vec<BlockId>,
}

/// Which part of a lease's blocks a read is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// As many whole blocks as there are landing blocks: a block there is, byte for byte, a block here.
    Blocks {
        /// First entry of the lease's block table to read (blocks before it are already here).
        first: usize,
    },
    /// Some heads of some tokens: ranks or block sizes differ.
    Slice(Box<Slice>),
}

impl ReadOrder {
    /// Bytes that move: `block_bytes` is the size of the consumer's own blocks.
    #[must_use]
    pub fn bytes(&self, block_bytes: usize) -> usize {
        match &self.part {
            Part::Blocks { .. } => self.into.len() * block_bytes,
            Part::Slice(slice) => slice.cut.bytes(&slice.producer),
        }
    }
}

/// A stop flag that a reading thread looks at between system calls.
pub type StopFlag = std::sync::atomic::AtomicBool;

/// The consumer's side of a transport.
pub trait Transport: Send + Sync {
    /// The name of what carries a peer's blocks, for logs and metrics; it may differ from peer to peer.
    fn carrier(&self, peer: &Peer) -> &'static str {
        let _ = peer;
        "other"
    }

    /// Reads blocks straight into `region`. When this returns, whatever it returns, nothing writes into the
    /// landing blocks any more.
    ///
    /// # Errors
    /// Any [`TransportError`]; the landing blocks then hold garbage.
    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError>;

    /// As [`Self::read`]. `landed` hears on this thread of whole blocks that have landed, each once and in the order of
    /// [`ReadOrder::into`], so that they can be brought on while others are still on their way: of all of them, or of none
    /// where the read is of slices or the transport lands elsewhere than in `region`. What they hold is not valid before
    /// [`Self::finish`] has said so, and the read may still fail.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_telling(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        let _ = landed;
        self.read(peer, order, region, stop)
    }

    /// Tells the producer that this reader has everything, and learns whether it may use it.
    ///
    /// # Errors
    /// A [`TransportError`] other than `Gone` means that nobody knows: treat it as [`Verdict::Gone`].
    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError>;

    /// Tells the producer that this reader will not use what it has read, so that a release need not wait for
    /// it until the drain deadline. Idempotent. Only needed after a [`Self::read`] that succeeded: one that
    /// failed says so by itself.
    ///
    /// # Errors
    /// When the producer could not be reached; nothing is lost but time.
    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        let _ = (peer, handle, reader);
        Ok(())
    }

    /// Ends a lease early. Idempotent; the caller repeats it until it is answered or the lease is past expiry.
    ///
    /// # Errors
    /// When the producer could not be reached. An answer of any kind is a success.
    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError>;

    /// Says that one of a lease's several consumers will not read (any more); the last one ends the lease.
    /// Idempotent, and repeated like [`Self::release`].
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

    /// Lets go of what is kept of peers that have not been asked for anything in a while, or that are no more:
    /// connections, and with them a dead producer's memory. Its owner calls it every second or so.
    fn sweep(&self) {}
}

/// What a transport's serving side asks of the engine rank it serves. Called from the transport's own threads;
/// answers come from the lease ledger and never wait for the step loop.
pub trait Producer: Send + Sync {
    /// The engine's epoch.
    fn epoch(&self) -> Epoch;

    /// What a consumer must agree with: [`Peer::fingerprint`].
    fn fingerprint(&self) -> u64;

    /// The layout of this rank's blocks; `None` where only whole blocks are served.
    fn layout(&self) -> Option<KvLayout> {
        None
    }

    /// Opens a read of `count` blocks from entry `first` of the lease's table and returns their ids.
    ///
    /// # Errors
    /// [`TransportError::Gone`] or [`TransportError::Refused`].
    fn read_begun(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError>;

    /// Whether the lease still lets this reader read. Asked before every batch of blocks goes out.
    fn read_live(&self, handle: Handle, reader: Reader) -> bool;

    /// Whether this reader may be sent the first `upto` entries of the lease's table. Waits for those that are not
    /// computed yet, for so long. Only a producer that lends what it still computes says [`Readiness::NotYet`].
    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let _ = (upto, within);
        if self.read_live(handle, reader) { Readiness::Ready } else { Readiness::Gone }
    }

    /// The reader says that it has everything.
    fn read_done(&self, handle: Handle, reader: Reader) -> Verdict;

    /// The reader's connection broke, or it gave up.
    fn read_failed(&self, handle: Handle, reader: Reader);

    /// Ends the lease early.
    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply;

    /// One of the lease's consumers will not read (any more).
    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply;

    /// Renews the lease.
    fn heartbeat(&self, handle: Handle) -> HeartbeatReply;

    /// The rank's memory.
    fn region(&self) -> &Region;

    /// Makes the bytes of granted blocks in [`Self::region`] those that were lent, where the engine computes in a
    /// device's own memory and has not copied them yet. Called before every batch that is read there, and only for
    /// blocks that are computed; blocks its thread for as long as a copy takes.
    ///
    /// # Errors
    /// [`TransportError::Refused`]: the device does not give them.
    fn in_region(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        let _ = blocks;
        Ok(())
    }
}

/// A side channel that stays silent this long within a read or an exchange of messages has failed.
pub const SILENCE: Duration = Duration::from_secs(5);
