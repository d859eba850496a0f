//! The kernels' own code on this CPU. The machine's C++ compiler compiles the CUDA C++ sources together with
//! `emulation.cpp`, which implements CUDA's threads and the PTX instructions of the kernels.
#![allow(unsafe_code, reason = "loads and calls what was compiled; see each block")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::DirBuilder;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SoftwareMemory;
use baton_engine::compute::cuda::copy_pieces::{self, CopyCommand, CopyPiece};
use baton_engine::compute::cuda::device::{DeviceSlice, Launch};
use baton_engine::compute::cuda::kernels::{self, KernelTarget};

/// Why kernels cannot be emulated.
#[derive(Debug, thiserror::Error)]
pub enum EmulationError {
    /// There is no C++ compiler.
    #[error("no C++ compiler was found: looked for {0} (settable as CXX)")]
    NoCompiler(String),
    /// The sources do not compile.
    #[error("the emulation does not compile: {0}")]
    Compile(String),
    /// A file cannot be written or loaded.
    #[error("{what}: {source}")]
    System {
        /// The file.
        what: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Declaration of dynamic shared memory in kernels.
const DYNAMIC_SHARED: &str = "extern __shared__ __align__(16) unsigned char shared[];";

/// The complete source of a library that runs the kernels on this CPU.
fn source(target: &KernelTarget, stages: usize) -> String {
    // An array without a size is not a valid variable there.
    let bodies = kernels::bodies(target).replace(DYNAMIC_SHARED, "unsigned char* shared = shared_memory;");
    let own = target.kernels();
    let names = own.iter().map(|kernel| kernel.label()).chain([kernels::COPY_KERNEL]);
    let exported: String = names.map(|name| format!("EMULATE({name})\n")).collect();
    let exported = format!("EMULATE_BEGIN\n{exported}EMULATE_END\n");
    let emulation = kernels::lines("emulation.cpp", include_str!("emulation.cpp"));
    emulation + &kernels::definitions(target, stages) + &bodies + &exported
}

/// `baton_emulate` of `emulation.cpp`.
type EmulateFn = unsafe extern "C" fn(*const c_char, *const u32, u32, u32, *mut *mut c_void) -> c_int;

/// The address of a slice, which has been checked.
fn address(buffers: &mut [Option<SoftwareMemory>], slice: &DeviceSlice) -> u64 {
    let memory = buffers[slice.buffer.0 as usize].as_mut().expect("it was checked");
    memory.bytes.address(slice.offset)
}

/// Kernels for one target, compiled for this CPU. Never unloaded.
pub struct Emulation(EmulateFn);

impl Emulation {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// [`EmulationError`].
    pub fn new(target: &KernelTarget, stages: usize) -> Result<Self, EmulationError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("baton-emulation-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        let system = |what: &Path| {
            let what = what.display().to_string();
            |source| EmulationError::System { what, source }
        };
        // A new folder with access for this user only, so that no other user can put a library there.
        DirBuilder::new().mode(0o700).create(&folder).map_err(system(&folder))?;
        let loaded = Self::build(&folder, &source(target, stages));
        // A loaded library does not need its file.
        std::fs::remove_dir_all(&folder).map_err(system(&folder))?;
        loaded
    }

    fn build(folder: &Path, source: &str) -> Result<Self, EmulationError> {
        let (text, library) = (folder.join("kernels.cpp"), folder.join("kernels.so"));
        std::fs::write(&text, source)
            .map_err(|error| EmulationError::System { what: text.display().to_string(), source: error })?;
        let own = std::env::var_os("CXX").map(PathBuf::from);
        let compilers: Vec<_> = own.into_iter().chain(["c++", "g++", "clang++"].map(PathBuf::from)).collect();
        for compiler in &compilers {
            let arguments = ["-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-o"];
            let Ok(output) = Command::new(compiler).args(arguments).args([&library, &text]).output() else {
                continue;
            };
            if !output.status.success() {
                return Err(EmulationError::Compile(String::from_utf8_lossy(&output.stderr).into_owned()));
            }
            return Self::load(&library);
        }
        let names: Vec<_> = compilers.iter().map(|compiler| compiler.display().to_string()).collect();
        Err(EmulationError::NoCompiler(names.join(", ")))
    }

    fn load(library: &Path) -> Result<Self, EmulationError> {
        let path = CString::new(library.as_os_str().as_bytes()).expect("a path has no zero byte");
        // SAFETY: the library was just compiled from Baton's own source, and runs no code when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let symbol = match handle.is_null() {
            true => std::ptr::null_mut(),
            // SAFETY: the handle is open, the name a C string.
            false => unsafe { libc::dlsym(handle, c"baton_emulate".as_ptr()) },
        };
        if symbol.is_null() {
            let source = std::io::Error::other("cannot be loaded");
            return Err(EmulationError::System { what: library.display().to_string(), source });
        }
        // SAFETY: the source defines this function with this signature.
        Ok(Self(unsafe { std::mem::transmute::<*mut c_void, EmulateFn>(symbol) }))
    }

    /// Runs a launch whose slices have been checked to be in their buffers.
    pub(super) fn run(&self, buffers: &mut [Option<SoftwareMemory>], launch: &Launch) -> Result<(), String> {
        let values = launch.args.iter().map(|arg| arg.bits(|slice| Ok(address(buffers, slice))));
        let mut values = values.collect::<Result<Vec<u64>, String>>()?;
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let size = (launch.grid, launch.threads, launch.shared_bytes);
        // SAFETY: the parameters are those of the kernel, in eight bytes each, as for a GPU; the buffers stay in place
        // during the call. A kernel that reaches beyond a slice does so here too: this is a check that is run by hand,
        // and never by a server.
        unsafe { self.call(launch.kernel.label(), size, &mut pointers) }
    }

    /// Copies pieces as a GPU does. The caller has checked their slices. Returns the number of launches.
    pub(super) fn copy(
        &self,
        buffers: &mut [Option<SoftwareMemory>],
        pieces: &[(DeviceSlice, DeviceSlice)],
    ) -> Result<u64, String> {
        let piece = |(from, into): &(DeviceSlice, DeviceSlice)| {
            let (from, into, bytes) = (address(buffers, from), address(buffers, into), from.bytes);
            CopyPiece { from, into, bytes }
        };
        let pieces: Vec<_> = pieces.iter().map(piece).collect();
        let mut launches = 0;
        copy_pieces::cut(pieces, |part| match part {
            CopyCommand::Alone(CopyPiece { from, into, bytes }) => {
                let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
                let into = std::ptr::with_exposed_provenance_mut::<u8>(into as usize);
                // SAFETY: in buffers that stay in place during the call.
                unsafe { into.copy_from(from, bytes) };
                Ok(())
            }
            CopyCommand::Together(mut pieces, grid) => {
                launches += 1;
                let mut parameters = [std::ptr::from_mut(&mut *pieces).cast()];
                // SAFETY: as above; the kernel has this one parameter.
                unsafe { self.call(kernels::COPY_KERNEL, (grid, copy_pieces::THREADS, 0), &mut parameters) }
            }
        })?;
        Ok(launches)
    }

    /// # Safety
    /// The parameters are those of the kernel, and the memory behind its pointers stays during the call.
    unsafe fn call(
        &self,
        kernel: &str,
        (grid, threads, shared_bytes): ([u32; 3], u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<(), String> {
        let name = CString::new(kernel).expect("names of kernels have no zero byte");
        // SAFETY: the caller's contract.
        let unknown =
            unsafe { (self.0)(name.as_ptr(), grid.as_ptr(), threads, shared_bytes, parameters.as_mut_ptr()) };
        if unknown == 0 { Ok(()) } else { Err(format!("{kernel} is not in the emulation")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::compute::cuda::device::Element;
    use baton_engine::compute::cuda::kernels::KernelFeatures;

    #[test]
    fn emulated_sources_declare_no_shared_memory_without_a_size() {
        for element in [Element::F32, Element::Bf16] {
            for features in [KernelFeatures::NONE, KernelFeatures::ALL] {
                let target = KernelTarget { features, ..KernelTarget::plain(element, 64) };
                let is_declared = kernels::bodies(&target).contains(DYNAMIC_SHARED);
                assert_eq!(is_declared, element == Element::Bf16);
                assert!(!source(&target, 3).contains("extern __shared__"));
            }
        }
    }
}
