//! The memory of a whole answer that is held for its client, counted among all of them.

use super::ExchangeDriver;
use crate::engines::body_budget::{Held, Spent};

impl ExchangeDriver {
    /// Counts the room of a whole answer that is held. `share` is empty until the first call: most answers are one piece
    /// and hold no more than a read brings.
    ///
    /// # Errors
    /// [`Spent`]: other answers have all of it.
    pub(crate) fn hold_answer(&self, share: &mut Option<Held>, room: usize) -> Result<(), Spent> {
        let share = share.get_or_insert_with(|| self.shared.held_answers.begin());
        share.grow_to(room, self.generation.config.limits.body_bytes_total)
    }
}
