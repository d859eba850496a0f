//! A GPU's pool for others: other threads of this process, and other processes by CUDA IPC.
//!
//! Every call works on a stream of its own, which lets steps go first, and waits for it, within a bound: after a copy that hung
//! nothing is copied any more, and nothing that it may still write is freed. A handle is for a whole allocation and can be opened by every
//! process of our user on this host, and not by the one that made it. The driver keeps exported memory for as long as
//! somebody has it open, also past the end of its process; freeing it before that is undefined, so an exported pool is
//! left to the end of the process.
#![allow(unsafe_code)] // calls into the driver; see each block

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_device::{DeviceId, Export, Kind, Offer, Opened, Run};
use baton_connector_nixl::api::{Memory, Segment};
use cudarc::driver::sys;

use super::module::Module;
use super::{check, patience, stream};
use crate::compute::cuda::device::{DeviceError, HostRun, PoolMemory, Priority};
use crate::compute::cuda::pieces::Piece;

/// A stream, and the event at its end.
#[derive(Debug)]
struct Lane {
    stream: sys::CUstream,
    event: sys::CUevent,
}

/// One allocation of device memory.
#[derive(Debug)]
pub(super) struct CudaPool {
    device: sys::CUdevice,
    uuid: [u8; 16],
    context: sys::CUcontext,
    module: Arc<Module>,
    address: sys::CUdeviceptr,
    bytes: usize,
    exported: AtomicBool,
    /// As many as there were copies at the same time; those are bounded by their threads.
    lanes: Mutex<Vec<Lane>>,
    /// Host memory that was page-locked for its copies.
    pinned: Mutex<Vec<Region>>,
    /// A copy was not over in time.
    hung: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `bind` sees to, and by
// one at a time, as a lane is taken out of its lock.
unsafe impl Send for CudaPool {}
// SAFETY: as above.
unsafe impl Sync for CudaPool {}

/// In io's words, for transports.
fn refused(error: DeviceError) -> io::Error {
    io::Error::other(error)
}

fn unsupported(why: String) -> io::Error {
    io::Error::new(ErrorKind::Unsupported, why)
}

fn uuid_of(device: sys::CUdevice) -> Result<[u8; 16], DeviceError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the out-parameter is valid.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// The driver's number of a device.
fn ordinal_of(device: sys::CUdevice) -> Result<u32, DeviceError> {
    let mut count = 0;
    // SAFETY: the out-parameter is valid.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    for ordinal in 0..count {
        let mut found = 0;
        // SAFETY: the out-parameter is valid.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut found, ordinal) })?;
        if found == device {
            return Ok(ordinal.unsigned_abs());
        }
    }
    Err(DeviceError::Undefined(format!("no device {device}: the driver reports {count} devices")))
}

/// Where an allocation begins, and its bytes, from an address inside.
fn range_of(address: sys::CUdeviceptr) -> Result<(sys::CUdeviceptr, usize), DeviceError> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the out-parameters are valid.
    let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) };
    check("cuMemGetAddressRange", found)?;
    Ok((base, bytes))
}

impl CudaPool {
    /// Takes over an allocation.
    ///
    /// # Errors
    /// [`DeviceError::Call`]; the allocation is still the caller's.
    pub(super) fn over(
        device: sys::CUdevice,
        module: Arc<Module>,
        address: sys::CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, DeviceError> {
        let uuid = uuid_of(device)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid; the context is released when the pool is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        let (exported, hung) = (AtomicBool::new(false), AtomicBool::new(false));
        let (lanes, pinned) = (Mutex::default(), Mutex::default());
        Ok(Self { device, uuid, context, module, address, bytes, exported, lanes, pinned, hung })
    }

    /// Whether a copy was not over in time.
    pub(super) fn has_hung(&self) -> bool {
        self.hung.load(Ordering::Acquire)
    }

    fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn lane(&self) -> Result<Lane, DeviceError> {
        if let Some(lane) = self.lanes.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(lane);
        }
        let (stream, mut event) = (stream::create(Priority::Copies)?, std::ptr::null_mut());
        let untimed = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the out-parameter is valid; a stream without an event is destroyed again.
        unsafe {
            let made = check("cuEventCreate", sys::cuEventCreate(&raw mut event, untimed));
            if let Err(error) = made {
                let _ = sys::cuStreamDestroy_v2(stream);
                return Err(error);
            }
        }
        Ok(Lane { stream, event })
    }

    /// Enqueues copies and waits until the last of them has landed. When this returns, none is under way, unless one has
    /// hung.
    fn copy(&self, enqueue: impl Fn(sys::CUstream) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        const WHAT: &str = "a copy of KV blocks";
        if self.has_hung() {
            return Err(DeviceError::Hung {
                what: "an earlier copy of KV blocks",
                waited: patience::WORK_MAX,
            });
        }
        self.bind()?;
        let lane = self.lane()?;
        let result = enqueue(lane.stream).and_then(|()| {
            // SAFETY: both handles are the lane's, which nobody else has.
            unsafe {
                check("cuEventRecord", sys::cuEventRecord(lane.event, lane.stream))?;
                stream::await_event(WHAT, lane.event, &mut || ())
            }
        });
        let result = match result {
            // What was enqueued before the failure may still run. If even this fails the context is lost, and nothing of it
            // runs any more.
            // SAFETY: as above.
            Err(DeviceError::Call { .. }) => match unsafe { stream::await_all(WHAT, lane.stream) } {
                Err(hung @ DeviceError::Hung { .. }) => Err(hung),
                _ => result,
            },
            other => other,
        };
        if matches!(result, Err(DeviceError::Hung { .. })) {
            // Its lane is nobody's any more.
            self.hung.store(true, Ordering::Release);
        } else {
            self.lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        }
        result
    }

    /// Copies between the pool and host memory, which is kept for good if they hang: they may still touch it.
    fn copy_with(
        &self,
        runs: &[HostRun],
        host: &Region,
        enqueue: impl Fn(sys::CUdeviceptr, *mut u8, usize, sys::CUstream) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let room = host.blocks() * host.block_bytes();
        if let Some(run) = runs.iter().find(|run| !run.is_inside(self.bytes, room)) {
            return Err(DeviceError::Undefined(format!("{run:?} of a pool of {} and {room}", self.bytes)));
        }
        let base = host.block_ptr(BlockId(0));
        let copied = self.copy(|stream| {
            runs.iter().try_for_each(|run| {
                enqueue(self.address + run.pool as u64, base.wrapping_add(run.host), run.bytes, stream)
            })
        });
        if matches!(copied, Err(DeviceError::Hung { .. })) {
            std::mem::forget(host.clone());
        }
        copied
    }

    /// Whether our device can copy from this one.
    fn reaches(&self, theirs: DeviceId) -> io::Result<()> {
        if theirs.kind != Kind::Cuda {
            return Err(unsupported(format!("the producer's device ({theirs}) is not a CUDA device")));
        }
        if theirs.uuid == self.uuid {
            return Ok(());
        }
        let mut count = 0;
        // SAFETY: the out-parameter is valid.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) }).map_err(refused)?;
        for ordinal in 0..count {
            let (mut device, mut can) = (0, 0);
            // SAFETY: the out-parameters are valid.
            unsafe {
                check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal)).map_err(refused)?;
                if uuid_of(device).map_err(refused)? != theirs.uuid {
                    continue;
                }
                let asked = sys::cuDeviceCanAccessPeer(&raw mut can, self.device, device);
                check("cuDeviceCanAccessPeer", asked).map_err(refused)?;
            }
            return match can {
                0 => Err(unsupported(format!("there is no peer access from this device to {theirs}"))),
                _ => Ok(()),
            };
        }
        Err(unsupported(format!("{theirs} is not visible to this process")))
    }
}

impl PoolMemory for Arc<CudaPool> {
    fn export(&self) -> io::Result<Export> {
        self.bind().map_err(refused)?;
        // A handle opens an allocation from its first byte, so the pool must be that and nothing else.
        let (base, bytes) = range_of(self.address).map_err(refused)?;
        if base != self.address || bytes < self.bytes {
            return Err(unsupported("the pool is a part of a larger allocation".into()));
        }
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the out-parameter is valid, the address an allocation of ours.
        let made = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) };
        check("cuIpcGetMemHandle", made).map_err(refused)?;
        self.exported.store(true, Ordering::Release);
        let device = DeviceId { kind: Kind::Cuda, uuid: self.uuid };
        Ok(Export { device, handle: handle.reserved.map(|byte| byte as u8), descriptor: None })
    }

    fn open(&self, offer: &Offer, _descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        self.bind().map_err(refused)?;
        self.reaches(offer.device)?;
        let wanted = offer.pool.bytes().ok_or(io::Error::from(ErrorKind::InvalidData))?;
        let handle = sys::CUipcMemHandle { reserved: offer.handle.map(|byte| byte as _) };
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the out-parameter is valid. A handle of no allocation is an error of the driver's.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, lazily) };
        check("cuIpcOpenMemHandle", opened).map_err(refused)?;
        // Closes it again if it is not what was said.
        let is_here = offer.device.uuid == self.uuid;
        let opened = OpenedPool { ours: Arc::clone(self), address, bytes: wanted, is_here };
        let (base, bytes) = range_of(address).map_err(refused)?;
        if base != address || bytes < wanted {
            let why = format!("the producer's memory of {bytes} bytes is shorter than its pool of {wanted}");
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        Ok(Box::new(opened))
    }

    fn place(&self) -> io::Result<Memory> {
        let ordinal = ordinal_of(self.device).map_err(refused)?;
        let base = usize::try_from(self.address).map_err(io::Error::other)?;
        self.exported.store(true, Ordering::Release);
        Ok(Memory { segment: Segment::Cuda(ordinal), base, len: self.bytes })
    }

    fn enter(&self) -> io::Result<()> {
        self.bind().map_err(refused)
    }

    fn copy_out(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError> {
        self.copy_with(runs, host, |pool, host, bytes, stream| {
            // SAFETY: inside the pool and inside the host memory, as was checked, both alive until the copies have been
            // waited for.
            let result = unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), pool, bytes, stream) };
            check("cuMemcpyDtoHAsync", result)
        })
    }

    fn copy_in(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError> {
        self.copy_with(runs, host, |pool, host, bytes, stream| {
            // SAFETY: as above.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(pool, host.cast_const().cast(), bytes, stream) };
            check("cuMemcpyHtoDAsync", result)
        })
    }

    fn pin(&self, host: &Region) {
        let bytes = host.blocks() * host.block_bytes();
        let locked = self.bind().and_then(|()| {
            // SAFETY: the memory stays where it is while `self` keeps the region, and is unregistered before.
            let result = unsafe { sys::cuMemHostRegister_v2(host.block_ptr(BlockId(0)).cast(), bytes, 0) };
            check("cuMemHostRegister", result)
        });
        match locked {
            Ok(()) => self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(host.clone()),
            Err(error) => {
                tracing::warn!(%error, bytes, "host tier not page-locked, block copies are slower");
            }
        }
    }
}

impl Drop for CudaPool {
    fn drop(&mut self) {
        let pinned = std::mem::take(self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner));
        if *self.hung.get_mut() {
            // A copy may still write into it, and giving back would wait for it without a bound.
            std::mem::forget(pinned);
            return;
        }
        // SAFETY: nobody has the pool any more, and every copy was waited for. Errors are of no use here.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            for lane in self.lanes.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _ = sys::cuEventDestroy_v2(lane.event);
                let _ = sys::cuStreamDestroy_v2(lane.stream);
            }
            for region in &pinned {
                let _ = sys::cuMemHostUnregister(region.block_ptr(BlockId(0)).cast());
            }
            if *self.exported.get_mut() {
                // Another process may have it open; and releasing the context might free it.
                return;
            }
            let _ = sys::cuMemFree_v2(self.address);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Another process's pool.
#[derive(Debug)]
struct OpenedPool {
    ours: Arc<CudaPool>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// On the same device as ours.
    is_here: bool,
}

impl Opened for OpenedPool {
    fn copy(&self, runs: &[Run], _mirror: &Region) -> io::Result<()> {
        let inside = |at: usize, len: usize, all: usize| at.checked_add(len).is_some_and(|end| end <= all);
        let fits =
            |run: &Run| inside(run.from, run.len, self.bytes) && inside(run.into, run.len, self.ours.bytes);
        if !runs.iter().all(fits) {
            return Err(io::Error::from(ErrorKind::InvalidInput));
        }
        let pieces = runs.iter().map(|run| Piece {
            from: self.address + run.from as u64,
            into: self.ours.address + run.into as u64,
            bytes: run.len,
        });
        // SAFETY (of both): inside our pool and inside theirs, which stays open until the copies have been waited for. The
        // landing blocks are nobody else's until the read is over (invariant 3); what is torn in the source has no verdict.
        let copied = self.ours.copy(|stream| match self.is_here {
            true => unsafe { self.ours.module.copy(stream, pieces.clone()) },
            false => pieces.clone().try_for_each(|piece| {
                let result =
                    unsafe { sys::cuMemcpyDtoDAsync_v2(piece.into, piece.from, piece.bytes, stream) };
                check("cuMemcpyDtoDAsync", result)
            }),
        });
        copied.map_err(refused)
    }
}

impl Drop for OpenedPool {
    fn drop(&mut self) {
        if self.ours.has_hung() {
            // Perhaps one from here.
            return;
        }
        // SAFETY: opened once, closed once; every copy from it was waited for.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.ours.context);
            let _ = sys::cuIpcCloseMemHandle(self.address);
        }
    }
}
