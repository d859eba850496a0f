//! The interface to a device's pool.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_channel::copy_runs::CopyRun;

use crate::offer::{DeviceId, HANDLE_BYTES, Offer};

/// An engine's KV pool in the memory of its device. Any number of threads may call it at once.
pub trait DevicePool: Debug + Send + Sync {
    /// The data with which another process of this host opens the pool. Called once, when the engine starts to serve.
    ///
    /// # Errors
    /// Why the pool cannot be exported. Its blocks are then sent through host memory.
    fn export(&self) -> io::Result<PoolExport>;

    /// Opens another engine's pool for copies into this one. The offer is decoded, but not trusted: the implementation
    /// checks the size of the memory.
    ///
    /// # Errors
    /// Why this device cannot read the pool. The peer's blocks are then sent through host memory.
    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>>;

    /// Reports that every byte of a read has landed in these blocks. Not called for a failed read.
    fn landed(&self, blocks: &[BlockId]);
}

/// Another engine's pool, opened. The drop closes it. It is not dropped during a copy from it.
pub trait ImportedPool: Debug + Send + Sync {
    /// Copies, and waits until everything has landed. The runs are inside the offered pool and inside the consumer's
    /// pool, whose host side is `region`. After the return, with any result, nothing writes into the landing blocks.
    ///
    /// # Errors
    /// That of the device. The content of the landing blocks is then undefined.
    fn copy(&self, runs: &[CopyRun], region: &Region) -> io::Result<()>;
}

/// The data with which another process opens a pool.
#[derive(Debug)]
pub struct PoolExport {
    /// The device of the memory.
    pub device: DeviceId,
    /// The device's token. It permits opening the pool.
    pub handle: [u8; HANDLE_BYTES],
    /// A descriptor to send with the token, if the device needs one.
    pub descriptor: Option<OwnedFd>,
}
