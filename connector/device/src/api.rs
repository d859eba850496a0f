//! A device's pool, as this crate needs it.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;

use baton_connector::BlockId;
use baton_connector::region::Region;

use crate::offer::{DeviceId, HANDLE_BYTES, Offer};
use crate::runs::Run;

/// An engine's KV pool in the memory of its device. Called from any number of threads at once.
pub trait DevicePool: Debug + Send + Sync {
    /// What another process of this host needs to open it. Asked once, when the engine begins to serve.
    ///
    /// # Errors
    /// Why it cannot be exported; its blocks then travel through host memory.
    fn export(&self) -> io::Result<Export>;

    /// Opens another engine's pool for copies into this one. The offer was decoded and is hostile all the same: that the
    /// memory is as large as it says is checked here.
    ///
    /// # Errors
    /// Why it cannot be read from this device; the peer's blocks then travel through host memory.
    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>>;

    /// Every byte of a read has landed in these blocks. Not said of a read that failed: what it left behind is garbage.
    fn landed(&self, blocks: &[BlockId]);
}

/// Another engine's pool, opened. Closed when dropped, which nobody does while a copy from it is under way.
pub trait Opened: Debug + Send + Sync {
    /// Copies, and waits until everything has landed. The runs lie inside the offered pool and inside the consumer's, whose
    /// host side is `region`. When this returns, whatever it returns, nothing writes into the landing blocks any more.
    ///
    /// # Errors
    /// The device's; the landing blocks then hold garbage.
    fn copy(&self, runs: &[Run], region: &Region) -> io::Result<()>;
}

/// What opens a pool.
#[derive(Debug)]
pub struct Export {
    /// Whose memory it is in.
    pub device: DeviceId,
    /// The device's own token. Whoever has it can open the pool.
    pub handle: [u8; HANDLE_BYTES],
    /// Travels beside it.
    pub descriptor: Option<OwnedFd>,
}
