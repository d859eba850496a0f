//! Waiting for a GPU, with a bound. The driver's own waits have none: work that hangs without an error (a peer's device that is
//! lost in the middle of a copy, a kernel that does not end) would hold its thread, and the blocks it writes, for ever.

use std::thread;
use std::time::{Duration, Instant};

use crate::compute::cuda::device::DeviceError;

/// Longest that work may take. The longest of all is a step of 65,535 prompt tokens, a few seconds of a large model; copies take
/// milliseconds.
pub(super) const WORK_MAX: Duration = Duration::from_secs(60);

/// As the driver waits by itself, for what is over soon: a decode step takes milliseconds, and to be woken costs some of them.
const SPIN: Duration = Duration::from_millis(1);
/// After this it matters to nobody whether it is noticed a little later.
const YIELD: Duration = Duration::from_millis(50);
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// Looks again and again whether work is over, for at most `bound`.
///
/// # Errors
/// What looking says, and [`DeviceError::Hung`].
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
            _ => thread::park_timeout(LOOK_AGAIN),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_over_in_time_has_hung_and_what_fails_says_so_itself() {
        let mut looks = 0;
        let over_at_last = || {
            looks += 1;
            Ok(looks == 5)
        };
        assert!(wait("a copy", WORK_MAX, over_at_last).is_ok());
        assert_eq!(looks, 5);
        let hung = wait("a copy", Duration::ZERO, || Ok(false)).unwrap_err();
        assert!(matches!(hung, DeviceError::Hung { what: "a copy", .. }), "{hung}");
        // Who has waited too long and finds it over takes it.
        assert!(wait("a copy", Duration::ZERO, || Ok(true)).is_ok());
        let lost = || Err(DeviceError::Call { call: "cuEventQuery", what: "lost".into() });
        assert!(matches!(wait("a copy", WORK_MAX, lost), Err(DeviceError::Call { .. })));
    }
}
