//! The bits that a core raises for its Python half: what [`crate::ops::Op::Take`] and [`crate::ops::Op::Pool`] will
//! find. And the engine's drain, which the Python half reports to callers of the HTTP port.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Leases have ended.
pub(crate) const ENDED: u32 = 1;
/// Requests must be aborted.
pub(crate) const ABORTS: u32 = 2;
/// Producers have answered about loads that were pending.
pub(crate) const VERDICTS: u32 = 4;
/// A reader of `/debug/kv` waits for the blocks by state.
pub(crate) const POOL: u32 = 8;
/// The core is stopping. The bit stays.
pub(crate) const STOPPING: u32 = 16;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// Written under the lock of `announced`, read without it.
    bits: AtomicU32,
    /// Bits that a wait has returned since they were raised.
    announced: Mutex<u32>,
    raised: Condvar,
    /// True from the begin of the drain.
    draining: watch::Sender<bool>,
}

impl Signals {
    /// Raises a bit. Its data must be in place.
    pub(crate) fn raise(&self, bit: u32) {
        let announced = self.lock();
        let before = self.bits.fetch_or(bit, Ordering::AcqRel);
        drop(announced);
        if before & bit != bit {
            self.raised.notify_all();
        }
    }

    /// Clears bits, before their data is taken. A bit that is raised meanwhile is announced again.
    pub(crate) fn clear(&self, bits: u32) {
        let mut announced = self.lock();
        self.bits.fetch_and(!bits, Ordering::AcqRel);
        *announced &= !bits;
    }

    /// The raised bits.
    pub(crate) fn pending(&self) -> u32 {
        self.bits.load(Ordering::Acquire)
    }

    /// Waits for a bit that no wait has returned yet, and returns all raised bits. Returns at once while stopping.
    pub(crate) fn wait(&self, timeout: Duration) -> u32 {
        let until = Instant::now() + timeout;
        let mut announced = self.lock();
        loop {
            let bits = self.pending();
            let left = until.saturating_duration_since(Instant::now());
            if bits & !*announced != 0 || bits & STOPPING != 0 || left.is_zero() {
                *announced |= bits;
                return bits;
            }
            announced = self.raised.wait_timeout(announced, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The engine takes no new request from now on.
    pub(crate) fn begin_drain(&self) {
        self.draining.send_replace(true);
    }

    /// Whether the engine drains, now or within this time.
    pub(crate) async fn drains_within(&self, timeout: Duration) -> bool {
        let mut draining = self.draining.subscribe();
        tokio::time::timeout(timeout, draining.wait_for(|draining| *draining)).await.is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_bit_is_announced_once_until_it_is_cleared() {
        let (signals, short) = (Signals::default(), Duration::from_millis(1));
        assert_eq!(signals.wait(short), 0);
        signals.raise(ENDED);
        assert_eq!((signals.pending(), signals.wait(Duration::from_secs(60))), (ENDED, ENDED));
        signals.raise(ENDED);
        let begun = Instant::now();
        assert_eq!(signals.wait(short), ENDED);
        assert!(begun.elapsed() >= short, "it was announced before");
        signals.clear(ENDED | ABORTS);
        assert_eq!(signals.pending(), 0);
        signals.raise(ENDED);
        signals.raise(POOL);
        assert_eq!(signals.wait(Duration::from_secs(60)), ENDED | POOL);
        signals.raise(STOPPING);
        for _ in 0..2 {
            assert_eq!(signals.wait(Duration::from_secs(60)) & STOPPING, STOPPING);
        }
    }

    #[test]
    fn a_waiter_is_woken() {
        let signals = std::sync::Arc::new(Signals::default());
        let waiting = {
            let signals = std::sync::Arc::clone(&signals);
            std::thread::spawn(move || signals.wait(Duration::from_secs(60)))
        };
        signals.raise(VERDICTS);
        assert_eq!(waiting.join().expect("no panic"), VERDICTS);
    }

    #[tokio::test]
    async fn a_caller_waits_for_the_drain() {
        let signals = Signals::default();
        let mut waiting = pin!(signals.drains_within(Duration::from_secs(10)));
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Pending);
        signals.begin_drain();
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(true));
    }
}
