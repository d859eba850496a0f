//! The record of an engine's replies to `GET /health`. Pure.
//!
//! ```text
//! Up ── `unhealthy` bad replies in a row ──▶ Down
//! Up ◀── `healthy` good replies in a row ─── Down
//! ```
//!
//! An engine without any check is up, so a router that has just started refuses no requests.

/// Replies in a row that change the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckTerms {
    /// Good replies, for an engine that is down.
    pub healthy: u32,
    /// Bad replies, for an engine that is up.
    pub unhealthy: u32,
}

/// One engine's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CheckRecord {
    is_down: bool,
    /// Replies in a row that contradict the current value.
    contrary: u32,
}

impl CheckRecord {
    pub(crate) fn is_down(&self) -> bool {
        self.is_down
    }

    /// Records one reply.
    pub(crate) fn answered(&mut self, good: bool, terms: &CheckTerms) {
        if good != self.is_down {
            self.contrary = 0;
            return;
        }
        self.contrary += 1;
        if self.contrary >= if self.is_down { terms.healthy } else { terms.unhealthy } {
            *self = Self { is_down: !self.is_down, contrary: 0 };
        }
    }

    /// Resets the record when checks are disabled.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_changes_exactly_after_the_configured_consecutive_results() {
        let terms = CheckTerms { healthy: 2, unhealthy: 3 };
        for answers in 0..1_u32 << 12 {
            let (mut checks, mut down) = (CheckRecord::default(), false);
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
