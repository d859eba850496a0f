//! How many bytes of clients' bodies the router holds, in sum, and of engines' whole answers. Each is bounded by itself;
//! thousands of them at once must not fill the memory either.
//!
//! A body is counted as it arrives, so a client that announces much and sends nothing takes nothing from others.
//! What does not fit is refused at once: waiting would let slow uploads hold each other up, all of them half done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A budget. Shared by all requests; bodies and answers have one each, so that slow readers keep no request out.
#[derive(Debug, Default)]
pub(crate) struct BodyBudget(AtomicUsize);

/// What one request holds of it, given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Arc<BodyBudget>,
    bytes: usize,
}

/// What a request holds, and what all of them together may.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    pub held: &'a mut Held,
    pub total_bytes: usize,
}

/// The budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spent;

impl BodyBudget {
    /// Bytes that are held now.
    pub(crate) fn held(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// A request's share, empty at first.
    pub(crate) fn begin(self: &Arc<Self>) -> Held {
        Held { budget: Arc::clone(self), bytes: 0 }
    }
}

impl Held {
    /// Holds so many bytes in all, as far as it does not hold them already.
    ///
    /// # Errors
    /// [`Spent`] if the sum would exceed `limit`; then nothing more was taken.
    pub(crate) fn grow_to(&mut self, bytes: usize, limit: usize) -> Result<(), Spent> {
        self.take(bytes.saturating_sub(self.bytes), limit)
    }

    fn take(&mut self, bytes: usize, limit: usize) -> Result<(), Spent> {
        let before = self.budget.0.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        if before.saturating_add(bytes) > limit {
            self.budget.0.fetch_sub(bytes, Ordering::Relaxed);
            self.bytes -= bytes;
            return Err(Spent);
        }
        Ok(())
    }
}

impl Share<'_> {
    /// Whether so many bytes would fit now.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        (self.held.budget.held() as u64).saturating_add(bytes) <= self.total_bytes as u64
    }

    /// Takes so many more.
    ///
    /// # Errors
    /// [`Spent`] if the sum would exceed the limit; then nothing was taken.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), Spent> {
        self.held.take(bytes, self.total_bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_never_exceeds_the_limit_and_everything_comes_back() {
        let budget = Arc::<BodyBudget>::default();
        let (mut a, mut b) = (budget.begin(), budget.begin());
        assert_eq!(a.take(60, 100), Ok(()));
        assert_eq!(b.take(41, 100), Err(Spent));
        let share = Share { held: &mut b, total_bytes: 100 };
        assert!(share.fits(40) && !share.fits(41) && !share.fits(u64::MAX));
        assert_eq!(b.take(40, 100), Ok(()));
        assert_eq!(budget.held(), 100);
        drop(a);
        assert_eq!(budget.held(), 40);
        assert_eq!(b.take(usize::MAX / 2, 100), Err(Spent));
        drop(b);
        let mut c = budget.begin();
        assert_eq!(
            (c.grow_to(70, 100), c.grow_to(50, 100), c.grow_to(101, 100)),
            (Ok(()), Ok(()), Err(Spent))
        );
        assert_eq!(budget.held(), 70);
        drop(c);
        assert_eq!(budget.held(), 0);
    }
}
