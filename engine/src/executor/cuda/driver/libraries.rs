//! Finding NVIDIA's libraries at run time, and saying what is missing.
//!
//! The loader's own search comes first (`LD_LIBRARY_PATH`, the system's cache), then the folders of `folders`. A
//! library found there is loaded by its path and stays loaded, so that later look-ups by name find it. Every symbol that
//! is used is looked for before the first call: a driver that is too old is an error with a name in it.
#![allow(unsafe_code)] // loads shared libraries; see each block

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::super::device::DeviceError;

/// Names folders with NVIDIA's libraries, separated by colons, looked into before all others.
pub const FOLDER_VARIABLE: &str = "BATON_CUDA_LIBRARIES";

/// One library.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Library {
    /// For people.
    pub(in super::super) name: &'static str,
    /// File names, newest first.
    files: &'static [&'static str],
    /// Files beside it that it opens by name.
    companions: &'static [&'static str],
    /// Symbols that are used.
    symbols: &'static [&'static str],
}

/// The driver's own library.
pub(in super::super) const DRIVER: Library = Library {
    name: "the NVIDIA driver (libcuda)",
    files: &["libcuda.so.1", "libcuda.so"],
    companions: &[],
    symbols: &[
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuCtxSetCurrent",
        "cuMemGetInfo_v2",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemsetD8_v2",
        "cuMemsetD8Async",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuModuleLoadData",
        "cuModuleUnload",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
        "cuLaunchKernelEx",
        "cuStreamCreate",
        "cuStreamDestroy_v2",
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuEventElapsedTime_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
        "cuGraphExecDestroy",
        "cuGraphLaunch",
        "cuGetErrorName",
    ],
};

/// The run-time compiler.
pub(in super::super) const NVRTC: Library = Library {
    name: "NVIDIA's run-time compiler (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    companions: &["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so.12.9", "libnvrtc-builtins.so.12.8"],
    symbols: &[
        "nvrtcVersion",
        "nvrtcCreateProgram",
        "nvrtcCompileProgram",
        "nvrtcDestroyProgram",
        "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog",
        "nvrtcGetCUBINSize",
        "nvrtcGetCUBIN",
    ],
};

/// The matrix library.
pub(in super::super) const BLAS: Library = Library {
    name: "NVIDIA's matrix library (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    companions: &[],
    symbols: &[
        "cublasLtCreate",
        "cublasLtDestroy",
        "cublasLtMatmulDescCreate",
        "cublasLtMatmulDescDestroy",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatrixLayoutCreate",
        "cublasLtMatrixLayoutDestroy",
        "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulPreferenceDestroy",
        "cublasLtMatmulPreferenceSetAttribute",
        "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmul",
    ],
};

/// Where libraries are looked for beside the loader's own places.
fn folders() -> Vec<PathBuf> {
    let own = std::env::var_os(FOLDER_VARIABLE);
    let own: Vec<PathBuf> = own.map(|folders| std::env::split_paths(&folders).collect()).unwrap_or_default();
    let usual = [
        "/usr/local/cuda/lib64",
        "/usr/local/nvidia/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/wsl/lib",
    ];
    own.into_iter().chain(usual.map(PathBuf::from)).collect()
}

/// Loads a library and keeps it; it is then found by name.
///
/// # Errors
/// [`DeviceError::Library`] when it is nowhere, [`DeviceError::Absent`] when it is too old.
pub(in super::super) fn load(library: &Library) -> Result<(), DeviceError> {
    let folders = folders();
    let by_loader = library.files.iter().find_map(|file| open(Path::new(file)));
    let handle = by_loader.or_else(|| {
        let places = folders.iter().flat_map(|folder| library.files.iter().map(|file| folder.join(file)));
        places.filter(|path| path.is_file()).find_map(|path| {
            let beside = library.companions.iter().map(|companion| path.with_file_name(companion));
            // One of several versions is there; without it the compiler says so itself.
            let _ = beside.filter(|path| path.is_file()).filter_map(|path| open(&path)).count();
            open(&path)
        })
    });
    let Some(handle) = handle else {
        let shown: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        return Err(DeviceError::Library {
            library: library.name,
            names: library.files.join(", "),
            places: format!(
                "the loader's path (LD_LIBRARY_PATH), {} (also settable as {FOLDER_VARIABLE})",
                shown.join(", ")
            ),
        });
    };
    let missing = library.symbols.iter().find(|symbol| !has(handle, symbol));
    match missing {
        None => Ok(()),
        Some(symbol) => Err(DeviceError::Absent(format!(
            "{} has no {symbol}: it is too old; CUDA 12.8 or newer is needed",
            library.name
        ))),
    }
}

/// An open library. It is never closed.
#[derive(Clone, Copy)]
struct Open(*mut libc::c_void);

fn open(path: &Path) -> Option<Open> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the path is a C string. What a library does when it is loaded is the system's: these are the names of
    // NVIDIA's libraries, in places that only the machine's owner writes to.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!handle.is_null()).then_some(Open(handle))
}

fn has(library: Open, symbol: &str) -> bool {
    let Ok(symbol) = CString::new(symbol) else { return false };
    // SAFETY: the handle is open, and the symbol's address is only compared with null.
    !unsafe { libc::dlsym(library.0, symbol.as_ptr()) }.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_where_it_was_looked_for() {
        let nowhere =
            Library { name: "nothing", files: &["libnothing-at-all.so.9"], companions: &[], symbols: &[] };
        let error = load(&nowhere).unwrap_err().to_string();
        for word in ["nothing", "libnothing-at-all.so.9", "LD_LIBRARY_PATH", "/usr/local/cuda/lib64"] {
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_library_that_is_too_old_is_named_with_what_it_lacks() {
        let old =
            Library { name: "the C library", files: &["libc.so.6"], companions: &[], symbols: &["cuInit"] };
        let error = load(&old).unwrap_err().to_string();
        assert!(error.contains("the C library has no cuInit"), "{error}");
        assert!(load(&Library { symbols: &["malloc"], ..old }).is_ok());
    }
}
