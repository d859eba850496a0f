//! A GPU's pool for other threads of this process, and for other processes by CUDA IPC.
//!
//! Every call uses a low-priority stream of its own and waits for it within a bound. After a copy that hung, nothing is
//! copied any more, and no memory that it may still write is freed. A handle is for a whole allocation. Every process
//! of the same user on this host can open it, except the process that created it. The driver keeps exported memory
//! while a process has it open, also past the end of its owner. Freeing it before that is undefined, so an exported
//! pool is kept until the end of the process.
#![allow(unsafe_code, reason = "calls into the driver; see each block")]

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_device::{CopyRun, DeviceId, DeviceKind, ImportedPool, Offer, PoolExport};
use baton_connector_nixl::api::{Memory, Segment};
use cudarc::driver::sys;

use super::module::DriverModule;
use super::{bounded_wait, check, stream};
use crate::compute::cuda::copy_pieces::CopyPiece;
use crate::compute::cuda::device::{DeviceError, HostRun, PoolMemory, Priority};

/// A stream, and the event at its end.
#[derive(Debug)]
struct CopyStream {
    stream: sys::CUstream,
    event: sys::CUevent,
}

/// One allocation of device memory.
#[derive(Debug)]
pub(super) struct CudaPool {
    device: sys::CUdevice,
    uuid: [u8; 16],
    context: sys::CUcontext,
    module: Arc<DriverModule>,
    address: sys::CUdeviceptr,
    bytes: usize,
    exported: AtomicBool,
    /// Idle streams. Their number is bounded by the number of copying threads.
    streams: Mutex<Vec<CopyStream>>,
    /// Host memory that was page-locked for its copies.
    pinned: Mutex<Vec<Region>>,
    /// A copy was not over in time.
    hung: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `bind` ensures, and
// by one thread at a time, because a stream is taken out of its lock.
unsafe impl Send for CudaPool {}
// SAFETY: as above.
unsafe impl Sync for CudaPool {}

/// Converts an error for transports.
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

/// Start and size of the allocation that contains an address.
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
        module: Arc<DriverModule>,
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
        let (streams, pinned) = (Mutex::default(), Mutex::default());
        Ok(Self { device, uuid, context, module, address, bytes, exported, streams, pinned, hung })
    }

    /// Whether a copy was not over in time.
    pub(super) fn has_hung(&self) -> bool {
        self.hung.load(Ordering::Acquire)
    }

    fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn take_stream(&self) -> Result<CopyStream, DeviceError> {
        if let Some(taken) = self.streams.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(taken);
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
        Ok(CopyStream { stream, event })
    }

    /// Enqueues copies and waits until the last of them has landed. No copy is in flight when this returns, unless one
    /// has hung.
    fn copy(&self, enqueue: impl Fn(sys::CUstream) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        const WHAT: &str = "a copy of KV blocks";
        if self.has_hung() {
            return Err(DeviceError::Hung {
                what: "an earlier copy of KV blocks",
                waited: bounded_wait::WORK_MAX,
            });
        }
        self.bind()?;
        let taken = self.take_stream()?;
        let result = enqueue(taken.stream).and_then(|()| {
            // SAFETY: both handles belong to the taken stream, which no other thread has.
            unsafe {
                check("cuEventRecord", sys::cuEventRecord(taken.event, taken.stream))?;
                stream::await_event(WHAT, taken.event, &mut || ())
            }
        });
        let result = match result {
            // Work that was enqueued before the failure may still run. If this wait fails too, the context is lost, and
            // none of its work runs any more. SAFETY: as above.
            Err(DeviceError::Call { .. }) => match unsafe { stream::await_all(WHAT, taken.stream) } {
                Err(hung @ DeviceError::Hung { .. }) => Err(hung),
                _ => result,
            },
            other => other,
        };
        if matches!(result, Err(DeviceError::Hung { .. })) {
            // The stream is not reused.
            self.hung.store(true, Ordering::Release);
        } else {
            self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(taken);
        }
        result
    }

    /// Copies between the pool and host memory. If a copy hangs, the host memory is never freed, because the copy may
    /// still access it.
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

    /// Whether this pool's device can copy from another one.
    fn reaches(&self, theirs: DeviceId) -> io::Result<()> {
        if theirs.kind != DeviceKind::Cuda {
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
    fn export(&self) -> io::Result<PoolExport> {
        self.bind().map_err(refused)?;
        // A handle opens an allocation from its first byte, so the pool must be a whole allocation.
        let (base, bytes) = range_of(self.address).map_err(refused)?;
        if base != self.address || bytes < self.bytes {
            return Err(unsupported("the pool is a part of a larger allocation".into()));
        }
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the out-parameter is valid, and the address is an allocation of this pool.
        let made = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) };
        check("cuIpcGetMemHandle", made).map_err(refused)?;
        self.exported.store(true, Ordering::Release);
        let device = DeviceId { kind: DeviceKind::Cuda, uuid: self.uuid };
        Ok(PoolExport { device, handle: handle.reserved.map(|byte| byte as u8), descriptor: None })
    }

    fn open(&self, offer: &Offer, _descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        self.bind().map_err(refused)?;
        self.reaches(offer.device)?;
        let wanted = offer.pool.bytes().ok_or(io::Error::from(ErrorKind::InvalidData))?;
        let handle = sys::CUipcMemHandle { reserved: offer.handle.map(|byte| byte as _) };
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the out-parameter is valid. The driver returns an error for a handle without an allocation.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, lazily) };
        check("cuIpcOpenMemHandle", opened).map_err(refused)?;
        // Closes the memory again if it does not match the offer.
        let is_here = offer.device.uuid == self.uuid;
        let opened = CudaPeerPool { ours: Arc::clone(self), address, bytes: wanted, is_here };
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
            // SAFETY: inside the pool and inside the host memory, as was checked; both live until the copies are over.
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
            // SAFETY: the memory stays in place while `self` keeps the region, and is unregistered before.
            let result = unsafe { sys::cuMemHostRegister_v2(host.block_ptr(BlockId(0)).cast(), bytes, 0) };
            check("cuMemHostRegister", result)
        });
        match locked {
            Ok(()) => self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(host.clone()),
            Err(error) => {
                tracing::warn!(
                    event = "host_tier_not_page_locked", %error, bytes,
                    "host tier not page-locked, block copies are slower"
                );
            }
        }
    }
}

impl Drop for CudaPool {
    fn drop(&mut self) {
        let pinned = std::mem::take(self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner));
        if *self.hung.get_mut() {
            // A copy may still write to it, and unregistering would wait for the copy without a bound.
            std::mem::forget(pinned);
            return;
        }
        // SAFETY: the pool has no other owner, and every copy is over. Errors are ignored.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            for taken in self.streams.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _ = sys::cuEventDestroy_v2(taken.event);
                let _ = sys::cuStreamDestroy_v2(taken.stream);
            }
            for region in &pinned {
                let _ = sys::cuMemHostUnregister(region.block_ptr(BlockId(0)).cast());
            }
            if *self.exported.get_mut() {
                // Another process may have it open, and releasing the context might free it.
                return;
            }
            let _ = sys::cuMemFree_v2(self.address);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Another process's pool.
#[derive(Debug)]
struct CudaPeerPool {
    ours: Arc<CudaPool>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// Whether it is on the same device as this process's pool.
    is_here: bool,
}

impl ImportedPool for CudaPeerPool {
    fn copy(&self, runs: &[CopyRun], _mirror: &Region) -> io::Result<()> {
        let inside = |at: usize, len: usize, all: usize| at.checked_add(len).is_some_and(|end| end <= all);
        let fits = |run: &CopyRun| {
            inside(run.from, run.len, self.bytes) && inside(run.into, run.len, self.ours.bytes)
        };
        if !runs.iter().all(fits) {
            return Err(io::Error::from(ErrorKind::InvalidInput));
        }
        let pieces = runs.iter().map(|run| CopyPiece {
            from: self.address + run.from as u64,
            into: self.ours.address + run.into as u64,
            bytes: run.len,
        });
        let copied = self.ours.copy(|stream| match self.is_here {
            // SAFETY: the pieces are inside this pool and inside the peer's, which stays open until the copies are
            // over. No other code uses the landing blocks until the read is over (invariant 3). A read of bytes that
            // the peer rewrites gets no verdict and is discarded.
            true => unsafe { self.ours.module.copy(stream, pieces.clone()) },
            false => pieces.clone().try_for_each(|piece| {
                let CopyPiece { from, into, bytes } = piece;
                // SAFETY: as above.
                let result = unsafe { sys::cuMemcpyDtoDAsync_v2(into, from, bytes, stream) };
                check("cuMemcpyDtoDAsync", result)
            }),
        });
        copied.map_err(refused)
    }
}

impl Drop for CudaPeerPool {
    fn drop(&mut self) {
        if self.ours.has_hung() {
            // The hung copy may be from this pool.
            return;
        }
        // SAFETY: opened once, closed once; every copy from it is over.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.ours.context);
            let _ = sys::cuIpcCloseMemHandle(self.address);
        }
    }
}
