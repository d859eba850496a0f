//! Bounded waits for a GPU. The driver's own waits have no bound: work that hangs without an error would block its
//! thread and the blocks that it writes forever. Examples are a peer's device that is lost during a copy, and a kernel
//! that does not end.

use std::thread;
use std::time::{Duration, Instant};

use crate::compute::cuda::device::DeviceError;

/// Longest time of any work. The longest legitimate work is a step of 65,535 prompt tokens, a few seconds for a large
/// model. Copies take milliseconds.
pub(super) const WORK_MAX: Duration = Duration::from_secs(60);

/// Spinning, as in the driver's own wait, for work that is over soon: a decode step takes milliseconds, and a wake-up
/// costs part of that.
const SPIN: Duration = Duration::from_millis(1);
/// After this time a slightly later detection does not matter.
const YIELD: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Polls until work is over, for at most `bound`.
///
/// # Errors
/// Errors of `is_over`, and [`DeviceError::Hung`].
pub(super) fn wait(
    what: &'static str,
    bound: Duration,
    mut is_over: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<(), DeviceError> {
    let begun = Instant::now();
    while !is_over()? {
        match begun.elapsed() {
            waited if waited >= bound => return Err(DeviceError::Hung { what, waited }),
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < YIELD => thread::yield_now(),
            _ => thread::park_timeout(POLL_INTERVAL),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_work_counts_as_hung_and_failed_work_keeps_its_error() {
        let mut looks = 0;
        let over_at_last = || {
            looks += 1;
            Ok(looks == 5)
        };
        assert!(wait("a copy", WORK_MAX, over_at_last).is_ok());
        assert_eq!(looks, 5);
        let hung = wait("a copy", Duration::ZERO, || Ok(false)).unwrap_err();
        assert!(matches!(hung, DeviceError::Hung { what: "a copy", .. }), "{hung}");
        // Work that is over counts, even after the bound.
        assert!(wait("a copy", Duration::ZERO, || Ok(true)).is_ok());
        let lost = || Err(DeviceError::Call { call: "cuEventQuery", what: "lost".into() });
        assert!(matches!(wait("a copy", WORK_MAX, lost), Err(DeviceError::Call { .. })));
    }
}
