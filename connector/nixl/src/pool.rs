//! The pools that agents know: in host memory, or in a device's own.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use baton_connector::BlockId;
use baton_connector::region::Region;

use crate::api::{Memory, NixlError, Segment};

/// An engine's KV pool in the memory of its device, as this crate needs it. Called from any number of threads at once.
pub trait DevicePool: Debug + Send + Sync {
    /// Where it lies, which never changes. Once this was asked other processes may have it open for as long as they live,
    /// so it is not freed before this process ends.
    ///
    /// # Errors
    /// Why nobody else can read it; its blocks then travel through host memory.
    fn memory(&self) -> io::Result<Memory>;

    /// The pool's host side, which says how it is cut.
    fn region(&self) -> &Region;

    /// Makes the device the calling thread's, as calls of NIXL and UCX want it.
    ///
    /// # Errors
    /// The device's.
    fn enter(&self) -> io::Result<()>;

    /// Every byte of a read has landed in these blocks. Not said of a read that failed: what it left behind is garbage.
    fn landed(&self, blocks: &[BlockId]);
}

/// A pool of this engine.
#[derive(Clone, Debug)]
pub(crate) enum Own {
    Host(Region),
    Device(Arc<dyn DevicePool>),
}

impl Own {
    /// Where all of it lies, and room for as many blocks as it has.
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

    /// How it is cut.
    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Host(region) => region,
            Self::Device(device) => device.region(),
        }
    }

    /// Before the calling thread calls NIXL.
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
