//! Compiles kernels to machine code with NVIDIA's run-time compiler. It needs neither a GPU nor a toolkit.
#![allow(unsafe_code, reason = "calls into the compiler; see each block")]

use std::ffi::{CStr, CString};

use cudarc::nvrtc::sys;

use super::device::DeviceError;
use super::driver::libraries;

/// Result of a compilation.
#[derive(Clone, Debug)]
pub struct Compilation {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// The assembler's report for each kernel.
    pub usage: Vec<KernelUsage>,
}

/// Resources of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelUsage {
    /// The name in the source.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: usize,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Bytes of registers that a thread spills to memory.
    pub spill_bytes: usize,
}

/// The compiler's version.
///
/// # Errors
/// [`DeviceError::Library`] without a compiler.
pub fn version() -> Result<(i32, i32), DeviceError> {
    libraries::load(&libraries::NVRTC)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the symbol was found, and the out-parameters are valid.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
    Ok((major, minor))
}

/// The compiler's name for a compute capability. From 9.0 on it selects the instructions of exactly that chip.
#[must_use]
pub fn arch((major, minor): (i32, i32)) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

/// Compiles a source.
///
/// # Errors
/// [`DeviceError::Library`] without a compiler, [`DeviceError::Compile`] with its log.
pub fn compile(source: &str, arch: &str) -> Result<Compilation, DeviceError> {
    libraries::load(&libraries::NVRTC)?;
    let text = |text: &str| CString::new(text).expect("sources and options have no zero byte");
    let (source, name) = (text(source), text("kernels.cu"));
    let options =
        [text(&format!("--gpu-architecture={arch}")), text("--std=c++17"), text("--ptxas-options=-v")];
    let pointers = options.each_ref().map(|option| option.as_ptr());
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: symbols were found; strings end with zero and live until the calls return; buffers have the sizes that
    // the compiler returned.
    unsafe {
        let created = sys::nvrtcCreateProgram(
            &raw mut program.0,
            source.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        );
        check("nvrtcCreateProgram", created)?;
        let count = i32::try_from(pointers.len()).expect("a few options");
        let compiled = sys::nvrtcCompileProgram(program.0, count, pointers.as_ptr());
        let log = program.log()?;
        if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(DeviceError::Compile { arch: arch.into(), log: format!("{compiled:?}\n{log}") });
        }
        let mut size = 0;
        check("nvrtcGetCUBINSize", sys::nvrtcGetCUBINSize(program.0, &raw mut size))?;
        let mut cubin = vec![0_u8; size];
        check("nvrtcGetCUBIN", sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()))?;
        Ok(Compilation { cubin, usage: usage(&log) })
    }
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> Result<String, DeviceError> {
        let mut size = 0;
        // SAFETY: the program was created; the buffer has the size that the compiler returned plus one byte, which
        // stays zero.
        unsafe {
            check("nvrtcGetProgramLogSize", sys::nvrtcGetProgramLogSize(self.0, &raw mut size))?;
            let mut log = vec![0_u8; size + 1];
            check("nvrtcGetProgramLog", sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()))?;
            let log = CStr::from_bytes_until_nul(&log).expect("it ends with a zero");
            Ok(log.to_string_lossy().into_owned())
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was created and is destroyed once.
            let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<(), DeviceError> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(DeviceError::Call { call, what: format!("{other:?}") }),
    }
}

/// Parses the assembler's report.
fn usage(log: &str) -> Vec<KernelUsage> {
    let number_before = |line: &str, word: &str| {
        let before = &line[..line.find(word)?];
        before.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse::<usize>().ok()
    };
    let mut all: Vec<KernelUsage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(KernelUsage { kernel, ..KernelUsage::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        if let Some(stores) = number_before(line, " bytes spill stores") {
            last.spill_bytes = stores + number_before(line, " bytes spill loads").unwrap_or(0);
        }
        if let Some((_, rest)) = line.split_once("Used ") {
            last.registers = number_before(rest, " registers").unwrap_or(0);
            last.shared_bytes = number_before(rest, " bytes smem").unwrap_or(0);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_report_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'choose' for 'sm_90a'\n\
            ptxas info    : Function properties for choose\n\
            ptxas         .     8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 10272 bytes smem\n\
            ptxas info    : Compiling entry function 'embed' for 'sm_90a'\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 16 registers, used 0 barriers\n";
        let of = |kernel: &str, registers, shared_bytes, spill_bytes| KernelUsage {
            kernel: kernel.into(),
            registers,
            shared_bytes,
            spill_bytes,
        };
        assert_eq!(usage(log), [of("choose", 32, 10272, 20), of("embed", 16, 0, 0)]);
    }

    #[test]
    fn chips_with_instructions_of_their_own_are_named_for_them() {
        assert_eq!([(8, 0), (8, 6), (9, 0), (10, 0)].map(arch), ["sm_80", "sm_86", "sm_90a", "sm_100a"]);
    }
}
