//! What the answers to `GET /health` say of an engine in the long run. Pure.
//!
//! ```text
//! Up ── `unhealthy` bad answers in a row ──▶ Down
//! Up ◀── `healthy` good answers in a row ─── Down
//! ```
//!
//! An engine nobody has asked yet is up: a router that has just started does not refuse its first requests.

/// How many answers in a row change the mind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Good ones, for an engine that is down.
    pub healthy: u32,
    /// Bad ones, for an engine that is up.
    pub unhealthy: u32,
}

/// One engine's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Checks {
    down: bool,
    /// Answers in a row that speak against what is believed.
    against: u32,
}

impl Checks {
    pub(crate) fn is_down(&self) -> bool {
        self.down
    }

    /// One more answer.
    pub(crate) fn answered(&mut self, good: bool, terms: &Terms) {
        if good != self.down {
            self.against = 0;
            return;
        }
        self.against += 1;
        if self.against >= if self.down { terms.healthy } else { terms.unhealthy } {
            *self = Self { down: !self.down, against: 0 };
        }
    }

    /// Nobody asks any more: what was believed is worth nothing.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_changes_its_mind_exactly_when_the_last_answers_in_a_row_say_so() {
        let terms = Terms { healthy: 2, unhealthy: 3 };
        for answers in 0..1_u32 << 12 {
            let (mut checks, mut down) = (Checks::default(), false);
            let mut run: (bool, u32) = (true, 0);
            for at in 0..12 {
                let good = answers >> at & 1 == 1;
                run = if run.0 == good { (good, run.1 + 1) } else { (good, 1) };
                checks.answered(good, &terms);
                down = match run {
                    (true, times) if times >= terms.healthy => false,
                    (false, times) if times >= terms.unhealthy => true,
                    _ => down,
                };
                assert_eq!(checks.is_down(), down, "{answers:b} at {at}");
            }
        }
    }
}
