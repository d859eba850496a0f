//! A pool of the software device: memory that another process can map, and that other threads copy from and to.
//!
//! A GPU lets all of them work at once. Here they alternate with the device under a lock. An access to bytes that the
//! device has not been waited for is rejected, as within the device.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, OnceLock};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_device::{CopyRun, DevicePool, ImportedPool, Offer, PoolExport, SoftwarePool};
use baton_connector_nixl::api::{Memory, Segment};

use super::InjectedFaults;
use super::memory::{AccessLog, lock};
use baton_engine::compute::cuda::device::{DeviceError, HostRun, PoolMemory};
use baton_engine::compute::shared_pool::shared_pool;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct SharedMemoryPool {
    /// One block, as large as the pool.
    region: Region,
    /// Locked during work on the bytes.
    work: Arc<Mutex<()>>,
    /// Accesses of the device that no thread has waited for yet.
    pub(super) shadow: Arc<Mutex<AccessLog>>,
    /// The device's flag.
    hangs: Arc<AtomicBool>,
    copy_gate: Arc<OnceLock<CopyGate>>,
}

/// Where each copy from a pool waits for a test.
#[derive(Debug)]
pub struct CopyGate {
    /// Receives one message when a copy arrives.
    pub arrived: SyncSender<()>,
    /// Lets one copy pass with each message.
    pub passes: Mutex<Receiver<()>>,
}

impl CopyGate {
    fn wait(&self) {
        self.arrived.send(()).expect("the test waits");
        lock(&self.passes).recv().expect("the test lets the copy pass");
    }
}

impl SharedMemoryPool {
    pub(super) fn zeroed(bytes: usize, work: Arc<Mutex<()>>, faults: &InjectedFaults) -> Self {
        let (hangs, copy_gate) = (Arc::clone(&faults.hangs), Arc::clone(&faults.copy_gate));
        Self { region: shared_pool(1, bytes.max(1)), work, shadow: Arc::default(), hangs, copy_gate }
    }

    pub(super) fn bytes(&self) -> usize {
        self.region.block_bytes()
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.region.block_ptr(BlockId(0))
    }

    /// Whether the device has been waited for: it no longer writes the bytes that are read here, and no longer touches
    /// the bytes that are written here.
    fn check(&self, range: Range<usize>, write: bool) -> Result<(), String> {
        if range.end > self.bytes() || range.start > range.end {
            return Err(format!("bytes {range:?} of a pool of {}", self.bytes()));
        }
        match lock(&self.shadow).is_settled(range.start, range.end, write) {
            true => Ok(()),
            false => Err(format!("bytes {range:?} of a pool are copied while the device may still use them")),
        }
    }
}

impl PoolMemory for SharedMemoryPool {
    fn export(&self) -> io::Result<PoolExport> {
        SoftwarePool::over(self.region.clone()).export()
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        let opened = SoftwarePool::over(self.region.clone()).open(offer, descriptor)?;
        Ok(Box::new(SoftwarePeerPool { opened, pool: self.clone() }))
    }

    /// The library's copies take no lock and are not checked. Their blocks are leased or reserved.
    fn place(&self) -> io::Result<Memory> {
        Ok(Memory { segment: Segment::Host, base: self.base().expose_provenance(), len: self.bytes() })
    }

    fn copy_out(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError> {
        self.copy_gate.get().into_iter().for_each(CopyGate::wait);
        let _working = lock(&self.work);
        super::wait("a copy of KV blocks", &self.hangs)?;
        runs.iter().try_for_each(|run| {
            self.check(run.pool..run.pool + run.bytes, false).map_err(DeviceError::Undefined)?;
            super::memory::copy_out(self, run, host);
            Ok(())
        })
    }

    fn copy_in(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError> {
        let _working = lock(&self.work);
        super::wait("a copy of KV blocks", &self.hangs)?;
        runs.iter().try_for_each(|run| {
            self.check(run.pool..run.pool + run.bytes, true).map_err(DeviceError::Undefined)?;
            super::memory::copy_in(self, run, host);
            Ok(())
        })
    }
}

/// Another process's pool, whose blocks are copied into this pool.
#[derive(Debug)]
struct SoftwarePeerPool {
    opened: Box<dyn ImportedPool>,
    pool: SharedMemoryPool,
}

impl ImportedPool for SoftwarePeerPool {
    fn copy(&self, runs: &[CopyRun], _mirror: &Region) -> io::Result<()> {
        let _working = lock(&self.pool.work);
        super::wait("a copy of KV blocks", &self.pool.hangs).map_err(io::Error::other)?;
        for run in runs {
            let range = run.into..run.into.saturating_add(run.len);
            self.pool.check(range, true).map_err(io::Error::other)?;
        }
        self.opened.copy(runs, &self.pool.region)
    }
}
