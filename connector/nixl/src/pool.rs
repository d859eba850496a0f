//! The pools of agents, in host memory or in device memory.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use baton_connector::BlockId;
use baton_connector::region::Region;

use crate::api::{Memory, NixlError, Segment};

/// An engine's KV pool in the memory of its device. Any number of threads may call it at once.
pub trait DevicePool: Debug + Send + Sync {
    /// The memory of the pool, which never changes. After this call other processes may have it open for their whole
    /// life. So the pool is not freed before the end of this process.
    ///
    /// # Errors
    /// Why other processes cannot read the pool. Its blocks are then sent through host memory.
    fn memory(&self) -> io::Result<Memory>;

    /// The pool's host side, which defines its shape.
    fn region(&self) -> &Region;

    /// Makes the device current on the calling thread, as NIXL and UCX require.
    ///
    /// # Errors
    /// That of the device.
    fn enter(&self) -> io::Result<()>;

    /// Reports that every byte of a read has landed in these blocks. Not called for a failed read.
    fn landed(&self, blocks: &[BlockId]);
}

/// A pool of this engine.
#[derive(Clone, Debug)]
pub(crate) enum LocalPool {
    Host(Region),
    Device(Arc<dyn DevicePool>),
}

impl LocalPool {
    /// The memory of the pool, which is at least as large as its blocks.
    pub(crate) fn memory(&self) -> Result<Memory, NixlError> {
        let pool = self.region();
        let len = pool.blocks() * pool.block_bytes();
        match self {
            Self::Host(region) => {
                let base = region.block_ptr(BlockId(0)).expose_provenance();
                Ok(Memory { segment: Segment::Host, base, len })
            }
            Self::Device(device) => {
                let memory = device.memory().map_err(refused)?;
                let fits =
                    memory.base != 0 && memory.len >= len && memory.base.checked_add(memory.len).is_some();
                fits.then_some(memory).ok_or_else(|| {
                    NixlError(
                        format!("the device holds {} bytes of a pool of {len} bytes", memory.len).into(),
                    )
                })
            }
        }
    }

    /// The host side, which defines the shape.
    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Host(region) => region,
            Self::Device(device) => device.region(),
        }
    }

    /// Makes the device, if any, current on the calling thread, before a call of NIXL.
    pub(crate) fn enter(&self) -> Result<(), NixlError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(device) => device.enter().map_err(refused),
        }
    }
}

fn refused(why: io::Error) -> NixlError {
    NixlError(why.to_string().into())
}
