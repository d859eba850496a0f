//! Pools of software devices: host memory that another process can map, in the place of a GPU's.
#![allow(unsafe_code)] // the copy; it says why it is sound

use std::any::Any;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_shm::{Mapping, Passed, SharedMemory};

use crate::api::{DevicePool, Export, Opened};
use crate::offer::{DeviceId, HANDLE_BYTES, Kind, Offer};
use crate::runs::Run;

/// A pool whose device memory is a region's own. What lands, lands in the region that a read names.
#[derive(Clone, Debug)]
pub struct Software(Region);

impl Software {
    /// Of software devices there is one for each host.
    pub const DEVICE: DeviceId = DeviceId { kind: Kind::Software, uuid: [0; 16] };

    /// A pool in this region.
    #[must_use]
    pub fn over(region: Region) -> Self {
        Self(region)
    }
}

impl DevicePool for Software {
    fn export(&self) -> io::Result<Export> {
        let memory: Option<&SharedMemory> = (self.0.memory() as &dyn Any).downcast_ref();
        let memory =
            memory.ok_or(io::Error::new(ErrorKind::Unsupported, "the memory is private to this process"))?;
        let descriptor = memory.readers().try_clone_to_owned()?;
        Ok(Export { device: Self::DEVICE, handle: [0; HANDLE_BYTES], descriptor: Some(descriptor) })
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        if offer.device != Self::DEVICE {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                format!("{} is another device", offer.device),
            ));
        }
        let descriptor = descriptor.ok_or(io::Error::from(ErrorKind::InvalidData))?;
        Ok(Box::new(Mapped(Passed::new(descriptor).map(offer.pool)?)))
    }

    fn landed(&self, _blocks: &[BlockId]) {}
}

#[derive(Debug)]
struct Mapped(Mapping);

impl Opened for Mapped {
    fn copy(&self, runs: &[Run], region: &Region) -> io::Result<()> {
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
            // SAFETY: inside the mapped pool and inside the region, both alive. They are different mappings, so they do
            // not overlap in addresses. The landing blocks are nobody else's until the read is over (invariant 3). The
            // source is leased; if it is written all the same, because the lease has ended, the bytes are torn, and the
            // verdict keeps them from being used.
            unsafe { std::ptr::copy_nonoverlapping(from.add(run.from), into.add(run.into), run.len) };
        }
        Ok(())
    }
}
