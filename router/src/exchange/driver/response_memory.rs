//! The memory of a buffered whole response, within the budget of all of them.

use super::ExchangeDriver;
use crate::engines::body_budget::{BodyReservation, BudgetExhausted};

impl ExchangeDriver {
    /// Reserves memory for a buffered response. `reservation` is empty until the first call: most responses are one
    /// chunk and hold no more than one read.
    ///
    /// # Errors
    /// [`BudgetExhausted`]: other responses use the whole budget.
    pub(crate) fn reserve_response_memory(
        &self,
        reservation: &mut Option<BodyReservation>,
        capacity: usize,
    ) -> Result<(), BudgetExhausted> {
        let reservation =
            reservation.get_or_insert_with(|| self.shared.limits.response_bodies.new_reservation());
        reservation.grow_to(capacity, self.generation.config.limits.body_bytes_total)
    }
}
