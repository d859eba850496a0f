//! Pools of software devices: host memory that another process can map, in place of GPU memory.
#![allow(unsafe_code, reason = "the copy; the block states why it is sound")]

use std::any::Any;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_channel::copy_runs::CopyRun;
use baton_connector_shm::{PoolDescriptor, PoolMapping, SharedMemory};

use crate::api::{DevicePool, ImportedPool, PoolExport};
use crate::offer::{DeviceId, DeviceKind, HANDLE_BYTES, Offer};

/// A pool whose device memory is the memory of a region. Reads land in the region of the read.
#[derive(Clone, Debug)]
pub struct SoftwarePool(Region);

impl SoftwarePool {
    /// The software device, of which each host has one.
    pub const DEVICE: DeviceId = DeviceId { kind: DeviceKind::Software, uuid: [0; 16] };

    /// A pool in this region.
    #[must_use]
    pub fn over(region: Region) -> Self {
        Self(region)
    }
}

impl DevicePool for SoftwarePool {
    fn export(&self) -> io::Result<PoolExport> {
        let memory: Option<&SharedMemory> = (self.0.memory() as &dyn Any).downcast_ref();
        let memory =
            memory.ok_or(io::Error::new(ErrorKind::Unsupported, "the memory is private to this process"))?;
        let descriptor = memory.read_only().try_clone_to_owned()?;
        Ok(PoolExport { device: Self::DEVICE, handle: [0; HANDLE_BYTES], descriptor: Some(descriptor) })
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        if offer.device != Self::DEVICE {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                format!("{} is another device", offer.device),
            ));
        }
        let descriptor = descriptor.ok_or(io::Error::from(ErrorKind::InvalidData))?;
        Ok(Box::new(SoftwareMapping(PoolDescriptor::new(descriptor).map(offer.pool)?)))
    }

    fn landed(&self, _blocks: &[BlockId]) {}
}

#[derive(Debug)]
struct SoftwareMapping(PoolMapping);

impl ImportedPool for SoftwareMapping {
    fn copy(&self, runs: &[CopyRun], region: &Region) -> io::Result<()> {
        let outside = || io::Error::from(ErrorKind::InvalidInput);
        let theirs = self.0.pool().bytes().ok_or_else(outside)?;
        let ours = region.blocks() * region.block_bytes();
        let fits = |at: usize, len: usize, all: usize| at.checked_add(len).is_some_and(|end| end <= all);
        let from = self.0.block(0).ok_or_else(outside)?;
        let into = region.block_ptr(BlockId(0));
        for run in runs {
            if !fits(run.from, run.len, theirs) || !fits(run.into, run.len, ours) {
                return Err(outside());
            }
            // SAFETY: inside the mapped pool and inside the region, both alive. The two are different mappings, so
            // their addresses do not overlap. Only this read uses the landing blocks until its end (invariant 3). The
            // source is leased. After the end of the lease it may be written, and the copy may be torn. The verdict
            // prevents its use.
            unsafe { std::ptr::copy_nonoverlapping(from.add(run.from), into.add(run.into), run.len) };
        }
        Ok(())
    }
}
