//! Limits on the memory of clients' bodies and of engines' whole replies, in sum. Each body has a limit of its
//! own, but thousands of them at once must not fill the memory either.
//!
//! A body is counted as it arrives, so a client that announces much and sends nothing takes nothing from others. A
//! body that does not fit is refused at once: with a wait, slow uploads could block each other, all of them half
//! done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A budget, shared by all requests. Bodies and replies have separate budgets, so that slow readers keep no
/// request out.
#[derive(Debug, Default)]
pub(crate) struct BodyBudget(AtomicUsize);

/// The part of the budget that one request holds. Dropping it frees the part.
#[derive(Debug)]
pub(crate) struct BodyReservation {
    budget: Arc<BodyBudget>,
    bytes: usize,
}

/// One request's reservation, with the limit of all reservations together.
#[derive(Debug)]
pub(crate) struct BudgetShare<'a> {
    pub reservation: &'a mut BodyReservation,
    pub total_bytes: usize,
}

/// The budget is exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetExhausted;

impl BodyBudget {
    /// Bytes that are reserved now.
    pub(crate) fn reserved_bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// An empty reservation for a request.
    pub(crate) fn new_reservation(self: &Arc<Self>) -> BodyReservation {
        BodyReservation { budget: Arc::clone(self), bytes: 0 }
    }
}

impl BodyReservation {
    /// Grows the reservation to `bytes` in total, unless it has as many.
    ///
    /// # Errors
    /// [`BudgetExhausted`] if the sum would exceed `limit`. Nothing was taken.
    pub(crate) fn grow_to(&mut self, bytes: usize, limit: usize) -> Result<(), BudgetExhausted> {
        self.take(bytes.saturating_sub(self.bytes), limit)
    }

    fn take(&mut self, bytes: usize, limit: usize) -> Result<(), BudgetExhausted> {
        let before = self.budget.0.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        if before.saturating_add(bytes) > limit {
            self.budget.0.fetch_sub(bytes, Ordering::Relaxed);
            self.bytes -= bytes;
            return Err(BudgetExhausted);
        }
        Ok(())
    }
}

impl BudgetShare<'_> {
    /// Whether so many bytes fit now.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        (self.reservation.budget.reserved_bytes() as u64).saturating_add(bytes) <= self.total_bytes as u64
    }

    /// Takes so many more bytes.
    ///
    /// # Errors
    /// [`BudgetExhausted`] if the sum would exceed the limit. Nothing was taken.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        self.reservation.take(bytes, self.total_bytes)
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_stays_within_the_limit_and_is_released() {
        let budget = Arc::<BodyBudget>::default();
        let (mut a, mut b) = (budget.new_reservation(), budget.new_reservation());
        assert_eq!(a.take(60, 100), Ok(()));
        assert_eq!(b.take(41, 100), Err(BudgetExhausted));
        let share = BudgetShare { reservation: &mut b, total_bytes: 100 };
        assert!(share.fits(40) && !share.fits(41) && !share.fits(u64::MAX));
        assert_eq!(b.take(40, 100), Ok(()));
        assert_eq!(budget.reserved_bytes(), 100);
        drop(a);
        assert_eq!(budget.reserved_bytes(), 40);
        assert_eq!(b.take(usize::MAX / 2, 100), Err(BudgetExhausted));
        drop(b);
        let mut c = budget.new_reservation();
        assert_eq!(
            (c.grow_to(70, 100), c.grow_to(50, 100), c.grow_to(101, 100)),
            (Ok(()), Ok(()), Err(BudgetExhausted))
        );
        assert_eq!(budget.reserved_bytes(), 70);
        drop(c);
        assert_eq!(budget.reserved_bytes(), 0);
    }
}
