//! Streams of a GPU, with their priorities, and what has become of their work.
#![allow(unsafe_code)] // calls into the driver; see each block

use cudarc::driver::sys;

use super::{check, patience};
use crate::compute::cuda::device::{DeviceError, Priority};

/// A stream in the current context, apart from the legacy default one.
///
/// # Errors
/// [`DeviceError::Call`].
pub(super) fn create(priority: Priority) -> Result<sys::CUstream, DeviceError> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the out-parameters are valid.
    let asked = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
    check("cuCtxGetStreamPriorityRange", asked)?;
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    let priority = number(priority, (least, greatest));
    // SAFETY: the out-parameter is valid.
    let made = unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority) };
    check("cuStreamCreateWithPriority", made)?;
    Ok(stream)
}

/// The driver's number; greater priorities are smaller numbers.
fn number(priority: Priority, (least, greatest): (i32, i32)) -> i32 {
    match priority {
        Priority::Steps => greatest,
        Priority::Copies => least,
    }
}

/// Whether a query's answer says that work is over.
fn is_over(call: &'static str, answer: sys::CUresult) -> Result<bool, DeviceError> {
    match answer {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => check(call, other).map(|()| true),
    }
}

/// Waits until an event is reached, and calls `meanwhile` before each look.
///
/// # Errors
/// [`DeviceError::Call`], [`DeviceError::Hung`].
///
/// # Safety
/// The event is one of the current context.
pub(super) unsafe fn await_event(
    what: &'static str,
    event: sys::CUevent,
    meanwhile: &mut dyn FnMut(),
) -> Result<(), DeviceError> {
    let look = || {
        meanwhile();
        // SAFETY: as the caller promises.
        is_over("cuEventQuery", unsafe { sys::cuEventQuery(event) })
    };
    patience::wait(what, patience::WORK_MAX, look)
}

/// Waits until all work of a stream is over.
///
/// # Errors
/// [`DeviceError::Call`], [`DeviceError::Hung`].
///
/// # Safety
/// The stream is one of the current context, or null for the default one.
pub(super) unsafe fn await_all(what: &'static str, stream: sys::CUstream) -> Result<(), DeviceError> {
    // SAFETY: as the caller promises.
    let look = || is_over("cuStreamQuery", unsafe { sys::cuStreamQuery(stream) });
    patience::wait(what, patience::WORK_MAX, look)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_go_before_copies_in_the_drivers_numbers() {
        // As an H200 answers, and a device without priorities.
        for range in [(0, -5), (0, 0)] {
            let (steps, copies) = (number(Priority::Steps, range), number(Priority::Copies, range));
            assert_eq!((copies, steps), range);
        }
    }

    #[test]
    fn a_query_says_whether_work_is_over() {
        assert!(is_over("cuEventQuery", sys::CUresult::CUDA_SUCCESS).unwrap());
        assert!(!is_over("cuEventQuery", sys::CUresult::CUDA_ERROR_NOT_READY).unwrap());
    }
}
