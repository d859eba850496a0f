//! Streams of a GPU with their priorities, and waits for their work.
#![allow(unsafe_code, reason = "calls into the driver; see each block")]

use cudarc::driver::sys;

use super::{bounded_wait, check};
use crate::compute::cuda::device::{DeviceError, Priority};

/// Creates a stream in the current context that is independent of the legacy default one.
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

/// The driver's number of a priority. Higher priorities are smaller numbers.
fn number(priority: Priority, (least, greatest): (i32, i32)) -> i32 {
    match priority {
        Priority::Steps => greatest,
        Priority::Copies => least,
    }
}

/// Whether a query's result means that work is over.
fn is_over(call: &'static str, answer: sys::CUresult) -> Result<bool, DeviceError> {
    match answer {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => check(call, other).map(|()| true),
    }
}

/// Waits until an event is reached, and calls `meanwhile` before each poll.
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
    let poll = || {
        meanwhile();
        // SAFETY: the caller's contract.
        is_over("cuEventQuery", unsafe { sys::cuEventQuery(event) })
    };
    bounded_wait::wait(what, bounded_wait::WORK_MAX, poll)
}

/// Waits until all work of a stream is over.
///
/// # Errors
/// [`DeviceError::Call`], [`DeviceError::Hung`].
///
/// # Safety
/// The stream is one of the current context, or null for the default one.
pub(super) unsafe fn await_all(what: &'static str, stream: sys::CUstream) -> Result<(), DeviceError> {
    // SAFETY: the caller's contract.
    let poll = || is_over("cuStreamQuery", unsafe { sys::cuStreamQuery(stream) });
    bounded_wait::wait(what, bounded_wait::WORK_MAX, poll)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_go_before_copies_in_the_drivers_numbers() {
        // The ranges of an H200, and of a device without priorities.
        for range in [(0, -5), (0, 0)] {
            let (steps, copies) = (number(Priority::Steps, range), number(Priority::Copies, range));
            assert_eq!((copies, steps), range);
        }
    }

    #[test]
    fn a_query_returns_whether_work_has_ended() {
        assert!(is_over("cuEventQuery", sys::CUresult::CUDA_SUCCESS).unwrap());
        assert!(!is_over("cuEventQuery", sys::CUresult::CUDA_ERROR_NOT_READY).unwrap());
    }
}
