//! Machine code on a GPU, and launches of it. It stays loaded for as long as somebody may launch: the device, and whoever has
//! its pool.
#![allow(unsafe_code)] // calls into the driver; see each block

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::check;
use crate::compute::cuda::device::{DeviceError, Element, Kernel};
use crate::compute::cuda::kernels::COPY_KERNEL;
use crate::compute::cuda::pieces::{self, Part, Piece};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Module {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    copies: sys::CUfunction,
    /// Whether a kernel may begin while the one before it still runs.
    overlaps: bool,
}

// SAFETY: the driver's handles may be used from any thread, and by several at once where that thread's current context is
// theirs; nothing here is changed after it was loaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A launch's size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

impl Module {
    /// Loads machine code, in the current context.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub(super) fn load(
        device: sys::CUdevice,
        cubin: &[u8],
        element: Element,
        overlaps: bool,
    ) -> Result<(Arc<Self>, HashMap<Kernel, sys::CUfunction>), DeviceError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid; the context is released when the module is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        // From here on the destructor gives everything back.
        let nothing = std::ptr::null_mut();
        let mut loaded = Self { device, context, module: nothing, copies: std::ptr::null_mut(), overlaps };
        let image: *const c_void = cubin.as_ptr().cast();
        // SAFETY: the image is a whole cubin, as the compiler made it or as its checksum says.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut loaded.module, image) })?;
        let mut functions = HashMap::new();
        for kernel in Kernel::all(element) {
            functions.insert(*kernel, loaded.function(kernel.name())?);
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

    /// Launches a function of this module. It may begin before the kernel before it has ended, where the device can: kernels
    /// wait for what they read (`ptx.cu`).
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    ///
    /// # Safety
    /// `parameters` are those of the function, and what its pointers reach is there until it has run.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        function: sys::CUfunction,
        on: sys::CUstream,
        size: Size,
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
        // SAFETY: the function is one of a loaded module; the rest is the caller's promise.
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
    /// Every piece is in memory of this device that is there until the copies are over, and no two of them overlap.
    pub(super) unsafe fn copy(
        &self,
        on: sys::CUstream,
        pieces: impl IntoIterator<Item = Piece>,
    ) -> Result<(), DeviceError> {
        pieces::cut(pieces, |part| match part {
            Part::Alone(Piece { from, into, bytes }) => {
                // SAFETY: as the caller promises.
                check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(into, from, bytes, on) })
            }
            Part::Together(mut pieces, grid) => {
                let size = Size { grid, threads: pieces::THREADS, shared_bytes: 0 };
                let mut parameters = [std::ptr::from_mut(&mut *pieces).cast()];
                // SAFETY: as the caller promises; the kernel has this one parameter, which the driver reads before the call
                // returns.
                unsafe { self.launch(COPY_KERNEL, self.copies, on, size, &mut parameters) }
            }
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once, when nobody can launch any more and whoever did has waited. Errors are of no use
        // here.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            if !self.module.is_null() {
                let _ = sys::cuModuleUnload(self.module);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
