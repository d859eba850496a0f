//! Machine code on a GPU, and launches of it. It stays loaded while the device or an owner of its pool may launch.
#![allow(unsafe_code, reason = "calls into the driver; see each block")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::check;
use crate::compute::cuda::copy_pieces::{self, CopyCommand, CopyPiece};
use crate::compute::cuda::device::{DeviceError, Kernel};
use crate::compute::cuda::kernels::{COPY_KERNEL, KernelTarget};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct DriverModule {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    copies: sys::CUfunction,
    /// Whether a kernel may begin while the one before it still runs.
    overlaps: bool,
}

// SAFETY: the driver's handles may be used from any thread, and by several at once if each thread's current context is
// theirs; nothing here changes after loading.
unsafe impl Send for DriverModule {}
// SAFETY: as above.
unsafe impl Sync for DriverModule {}

/// A launch's size.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchSize {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

impl DriverModule {
    /// Loads machine code, in the current context.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub(super) fn load(
        device: sys::CUdevice,
        cubin: &[u8],
        target: &KernelTarget,
        overlaps: bool,
    ) -> Result<(Arc<Self>, HashMap<Kernel, sys::CUfunction>), DeviceError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid; the context is released when the module is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        // From here on the destructor frees everything.
        let nothing = std::ptr::null_mut();
        let mut loaded = Self { device, context, module: nothing, copies: std::ptr::null_mut(), overlaps };
        let image: *const c_void = cubin.as_ptr().cast();
        // SAFETY: the image is a complete cubin, made by the compiler or verified by its checksum.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut loaded.module, image) })?;
        let mut functions = HashMap::new();
        for kernel in target.kernels() {
            functions.insert(kernel, loaded.function(kernel.label())?);
        }
        loaded.copies = loaded.function(COPY_KERNEL)?;
        Ok((Arc::new(loaded), functions))
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction, DeviceError> {
        let name = CString::new(name).expect("names of kernels have no zero byte");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name a C string.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        Ok(function)
    }

    /// Launches a function of this module. The function may begin before the previous kernel has ended, if the device
    /// supports that: kernels wait for their inputs (`ptx.cu`).
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    ///
    /// # Safety
    /// `parameters` are those of the function, and the memory behind its pointers stays until it has run.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        function: sys::CUfunction,
        on: sys::CUstream,
        size: LaunchSize,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = size.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: size.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: size.shared_bytes,
            hStream: on,
            attrs: &raw mut overlap,
            numAttrs: u32::from(self.overlaps),
        };
        // SAFETY: the function is one of a loaded module; the rest is the caller's contract.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), std::ptr::null_mut())
        };
        check(name, launched)
    }

    /// Enqueues copies within this device.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    ///
    /// # Safety
    /// Every piece is in memory of this device that stays until the copies are over, and no two of them overlap.
    pub(super) unsafe fn copy(
        &self,
        on: sys::CUstream,
        pieces: impl IntoIterator<Item = CopyPiece>,
    ) -> Result<(), DeviceError> {
        copy_pieces::cut(pieces, |part| match part {
            CopyCommand::Alone(CopyPiece { from, into, bytes }) => {
                // SAFETY: the caller's contract.
                check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(into, from, bytes, on) })
            }
            CopyCommand::Together(mut pieces, grid) => {
                let size = LaunchSize { grid, threads: copy_pieces::THREADS, shared_bytes: 0 };
                let mut parameters = [std::ptr::from_mut(&mut *pieces).cast()];
                // SAFETY: the caller's contract; the kernel has this one parameter, which the driver reads before the
                // call returns.
                unsafe { self.launch(COPY_KERNEL, self.copies, on, size, &mut parameters) }
            }
        })
    }
}

impl Drop for DriverModule {
    fn drop(&mut self) {
        // SAFETY: loaded once and unloaded once, when no owner is left; every owner has waited for its launches. Errors
        // are ignored.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            if !self.module.is_null() {
                let _ = sys::cuModuleUnload(self.module);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
