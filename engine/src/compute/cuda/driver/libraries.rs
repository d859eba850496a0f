//! Finds NVIDIA's libraries at run time and reports missing ones.
//!
//! The loader's own search comes first (`LD_LIBRARY_PATH`, the system's cache), then the folders of `folders`, then the
//! folders of wheels from PyPI: an installed PyTorch includes both libraries. No Python is run for that. A library
//! found there is loaded by its path and stays loaded, so that later look-ups by name find it. Every symbol is looked
//! up before the first call, so that a driver that is too old gives an error with the symbol's name.
#![allow(unsafe_code, reason = "loads shared libraries; see each block")]

use std::collections::HashSet;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cudarc::driver::sys;

use super::super::device::DeviceError;
use super::check;

/// Names folders with NVIDIA's libraries, separated by colons, searched before all others.
pub const FOLDER_VARIABLE: &str = "BATON_CUDA_LIBRARIES";

/// One library.
#[derive(Clone, Copy, Debug)]
pub(in crate::compute::cuda) struct Library {
    /// The name in errors.
    pub(in crate::compute::cuda) name: &'static str,
    /// File names, newest first.
    files: &'static [&'static str],
    /// Prefix of the names of files beside it that the library opens by name.
    companions: Option<&'static str>,
    /// Its folders in wheels, below a folder of Python's packages.
    wheels: &'static [&'static str],
    /// Symbols that Baton calls.
    symbols: &'static [&'static str],
}

/// The driver's own library.
pub(in crate::compute::cuda) const DRIVER: Library = Library {
    name: "the NVIDIA driver (libcuda)",
    files: &["libcuda.so.1", "libcuda.so"],
    companions: None,
    wheels: &[],
    symbols: &[
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceGetUuid_v2",
        "cuDeviceCanAccessPeer",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuCtxSetCurrent",
        "cuMemGetInfo_v2",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemGetAddressRange_v2",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
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
        "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority",
        "cuStreamDestroy_v2",
        "cuStreamQuery",
        "cuStreamWaitEvent",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventElapsedTime_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
        "cuGraphExecDestroy",
        "cuGraphLaunch",
        "cuGetErrorName",
    ],
};

/// The run-time compiler.
pub(in crate::compute::cuda) const NVRTC: Library = Library {
    name: "NVIDIA's run-time compiler (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    companions: Some("libnvrtc-builtins.so."),
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
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
pub(in crate::compute::cuda) const BLAS: Library = Library {
    name: "NVIDIA's matrix library (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    companions: None,
    wheels: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
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

/// The folders that are searched in addition to the loader's own places.
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

/// Python installations that may have packages: the active environments, the first one of `PATH`, the user's, the
/// system's.
fn pythons() -> Vec<PathBuf> {
    let of = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    // The folder of `python3` is `bin`, beside `lib`. A link into another environment is not followed, as in Python.
    let first = std::env::split_paths(&path).find(|folder| folder.join("python3").is_file());
    let first = first.and_then(|bin| Some(bin.parent()?.to_owned()));
    let user = of("HOME").map(|home| home.join(".local"));
    let known = [of("VIRTUAL_ENV"), of("CONDA_PREFIX"), first, user].into_iter().flatten();
    known.chain(["/usr/local", "/usr"].map(PathBuf::from)).collect()
}

/// Folders of Python's packages below these, without duplicates.
fn packages(pythons: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for python in pythons {
        for lib in ["lib", "lib64"] {
            let versions = entries(&python.join(lib), "python3");
            let both = |version: PathBuf| ["site-packages", "dist-packages"].map(|name| version.join(name));
            found.extend(versions.into_iter().flat_map(both).filter(|folder| folder.is_dir()));
        }
    }
    // `lib64` is often a link to `lib`.
    let mut met = HashSet::new();
    found.retain(|folder| folder.canonicalize().is_ok_and(|real| met.insert(real)));
    found
}

/// A folder's entries whose names begin with `start`, in order.
fn entries(folder: &Path, start: &str) -> Vec<PathBuf> {
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| starts_with(name, start));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<_> = entries.filter(named).collect();
    found.sort();
    found
}

fn starts_with(name: &OsStr, start: &str) -> bool {
    name.as_bytes().starts_with(start.as_bytes())
}

/// Loads a library and keeps it loaded. It is then found by name.
///
/// # Errors
/// [`DeviceError::Library`] when it is not found, [`DeviceError::Absent`] when it is too old.
pub(in crate::compute::cuda) fn load(library: &Library) -> Result<(), DeviceError> {
    // Searches packages only for libraries that wheels contain.
    let packages = if library.wheels.is_empty() { Vec::new() } else { packages(&pythons()) };
    load_from(library, &folders(), &packages)
}

fn load_from(library: &Library, folders: &[PathBuf], packages: &[PathBuf]) -> Result<(), DeviceError> {
    let by_loader = library.files.iter().find_map(|file| open(Path::new(file)));
    let wheels = packages.iter().flat_map(|packages| library.wheels.iter().map(|wheel| packages.join(wheel)));
    let handle = by_loader.or_else(|| {
        let folders = folders.iter().cloned().chain(wheels);
        let places = folders.flat_map(|folder| library.files.iter().map(move |file| folder.join(file)));
        places.filter(|path| path.is_file()).find_map(|path| {
            if let (Some(start), Some(folder)) = (library.companions, path.parent()) {
                // Without the companion the compiler reports an error itself.
                let _ = entries(folder, start).iter().filter_map(|path| open(path)).count();
            }
            open(&path)
        })
    });
    let Some(handle) = handle else {
        return Err(DeviceError::Library {
            library: library.name,
            names: library.files.join(", "),
            places: places(library, folders, packages),
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

/// The places that were searched, for errors.
fn places(library: &Library, folders: &[PathBuf], packages: &[PathBuf]) -> String {
    let shown = |folders: &[PathBuf]| {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        folders.join(", ")
    };
    let wheels = match (library.wheels, packages) {
        ([], _) => String::new(),
        (wheels, []) => {
            format!(", and {} of Python's packages (none found)", wheels.join(" and "))
        }
        (wheels, packages) => format!(", and {} in {}", wheels.join(" and "), shown(packages)),
    };
    let folders = shown(folders);
    format!("the loader's path (LD_LIBRARY_PATH), {folders}{wheels} (also settable as {FOLDER_VARIABLE})")
}

/// The driver's version and CUDA's, for reports: `580.159, CUDA 13.0`.
pub(super) fn driver_version() -> Option<String> {
    let mut version = 0;
    load(&DRIVER).ok()?;
    // SAFETY: the symbol was found, the out-parameter is valid.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) }).ok()?;
    let cuda = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    // The page of the kernel module; a container may not have it.
    let page = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Some(module_version(&page).map_or(cuda.clone(), |module| format!("{module}, {cuda}")))
}

/// The first word of the page that is a version.
fn module_version(page: &str) -> Option<&str> {
    let is_version =
        |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    page.lines().next()?.split_whitespace().find(is_version)
}

/// An open library. It is never closed.
#[derive(Clone, Copy)]
struct OpenLibrary(*mut libc::c_void);

fn open(path: &Path) -> Option<OpenLibrary> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the path is a C string. Loading runs the library's initializers: these are the names of NVIDIA's
    // libraries, in places that only the machine's owner writes to.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!handle.is_null()).then_some(OpenLibrary(handle))
}

fn has(library: OpenLibrary, symbol: &str) -> bool {
    let Ok(symbol) = CString::new(symbol) else { return false };
    // SAFETY: the handle is open, and the symbol's address is only compared with null.
    !unsafe { libc::dlsym(library.0, symbol.as_ptr()) }.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    const C_LIBRARY: Library = Library {
        name: "the C library",
        files: &["libc.so.6"],
        companions: None,
        wheels: &[],
        symbols: &["malloc"],
    };

    #[test]
    fn a_missing_library_is_named_with_its_search_paths() {
        let nowhere =
            Library { files: &["libnothing-at-all.so.9"], wheels: &["nvidia/nothing/lib"], ..C_LIBRARY };
        let folders = [PathBuf::from("/usr/local/cuda/lib64")];
        let error = |packages: &[PathBuf]| load_from(&nowhere, &folders, packages).unwrap_err().to_string();
        for word in ["libnothing-at-all.so.9", "LD_LIBRARY_PATH", "/usr/local/cuda/lib64", FOLDER_VARIABLE] {
            assert!(error(&[]).contains(word), "{}", error(&[]));
        }
        assert!(error(&[]).contains("nvidia/nothing/lib of Python's packages (none found)"));
        let packages = ["/nowhere/lib/python3.11/site-packages".into()];
        assert!(error(&packages).contains("nvidia/nothing/lib in /nowhere/lib/python3.11/site-packages"));
    }

    /// A temporary folder of one test.
    struct TestRoot(PathBuf);

    impl TestRoot {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("baton-libraries-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&root).unwrap();
            Self(root)
        }
    }

    impl Drop for TestRoot {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn a_library_of_a_wheel_is_found_last() {
        let root = TestRoot::new("wheel");
        let site = root.0.join("lib/python3.11/site-packages");
        let wheel = site.join("nvidia/cu13/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        std::os::unix::fs::symlink("lib", root.0.join("lib64")).unwrap();
        let packages = packages(std::slice::from_ref(&root.0));
        assert_eq!(packages, [site], "and not again as lib64");
        // Any library that exists on every system works here.
        let c = std::fs::read_to_string("/proc/self/maps").unwrap();
        let c =
            c.lines().find_map(|line| line.split(' ').next_back().filter(|path| path.contains("/libc.so")));
        let c = c.expect("the tests use the C library");
        let library = Library {
            files: &["libbaton-test-of-wheels.so.9"],
            wheels: &["nvidia/nothing/lib", "nvidia/cu13/lib"],
            ..C_LIBRARY
        };
        assert!(load_from(&library, &[], &packages).is_err(), "it is not there yet");
        std::os::unix::fs::symlink(c, wheel.join(library.files[0])).unwrap();
        assert!(load_from(&Library { wheels: &[], ..library }, &[], &packages).is_err());
        load_from(&library, &[], &packages).unwrap();
        // A folder from the variable comes first.
        let named = root.0.join("named");
        std::fs::create_dir_all(&named).unwrap();
        std::fs::write(named.join(library.files[0]), "no library").unwrap();
        load_from(&library, &[named], &packages).expect("one that cannot be opened is passed over");
    }

    #[test]
    fn every_driver_symbol_is_resolved_before_the_first_call() {
        let sources = [
            include_str!("../driver.rs"),
            include_str!("blas.rs"),
            include_str!("libraries.rs"),
            include_str!("module.rs"),
            include_str!("pool.rs"),
            include_str!("stream.rs"),
        ];
        let mut calls = HashSet::new();
        for source in sources {
            for rest in source.split("::cu").skip(1).filter(|rest| rest.starts_with(char::is_uppercase)) {
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if rest[name.len()..].starts_with('(') {
                    calls.insert(format!("cu{name}"));
                }
            }
        }
        assert!(calls.len() > 40, "{calls:?}");
        let mut missing: Vec<_> =
            calls.iter().filter(|call| !DRIVER.symbols.contains(&call.as_str())).collect();
        missing.sort();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn the_drivers_version_is_read() {
        let page = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (root@host)\n\
            GCC version:  gcc version 12.3.0\n";
        assert_eq!(module_version(page), Some("580.159.03"));
        assert_eq!(module_version(""), None);
    }

    #[test]
    fn a_library_that_is_too_old_is_named_with_what_it_lacks() {
        let old = Library { symbols: &["cuInit"], ..C_LIBRARY };
        let error = load(&old).unwrap_err().to_string();
        assert!(error.contains("the C library has no cuInit"), "{error}");
        assert!(load(&C_LIBRARY).is_ok());
    }
}
