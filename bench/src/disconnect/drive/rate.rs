//! How much is asked of the deployment in calm, storm and faults, and what that is of what it can do.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::{Facts, ms};
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::record::raw::{ActKind, CallRecord};
use crate::disconnect::report;

/// Clients that show how much the deployment can do.
pub(crate) const CALIBRATION_CLIENTS: usize = 8;
/// Of what these get done, so much is asked for by default.
const SHARE: f64 = 0.5;
/// Requests a second, at most, unless somebody says otherwise: a client on the same machine must not be what is measured.
const RATE_MAX: f64 = 150.0;
/// And at least.
const RATE_MIN: f64 = 1.0;

/// How a rate was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Chosen {
    /// `--rate` says so.
    Asked,
    /// Half of what these clients got done.
    Half,
    /// That would be more than is asked for without `--rate`.
    AtMost,
    /// That would be less.
    AtLeast,
}

/// What calibration found, and what is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rate {
    /// Requests a second that [`CALIBRATION_CLIENTS`] clients got done, each asking one after another.
    pub(crate) able_per_s: f64,
    /// Requests a second in calm, storm and faults.
    pub(crate) rate_per_s: f64,
    pub(crate) chosen: Chosen,
    /// How long clients that stall in a phase read nothing, ms: what was asked for, or what there is room for.
    pub(crate) stall_ms: f64,
    /// Tokens that they ask for.
    pub(crate) stall_max_tokens: u32,
}

/// The load of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Load {
    #[serde(flatten)]
    pub(crate) rate: Rate,
    /// How long after they were due requests of the calm began, ms: what the benchmark itself was late by.
    pub(crate) late_calm_ms: Dist,
    /// And those of the storm.
    pub(crate) late_storm_ms: Dist,
}

impl Rate {
    /// `asked`: what `--rate` says.
    pub(crate) fn of(able_per_s: f64, asked: Option<f64>, stall: Stall) -> Self {
        let half = able_per_s * SHARE;
        let (rate_per_s, chosen) = match asked {
            Some(rate) => (rate, Chosen::Asked),
            None if half > RATE_MAX => (RATE_MAX, Chosen::AtMost),
            None if half >= RATE_MIN => (half, Chosen::Half),
            // Also of a deployment of which nothing came in time.
            None => (RATE_MIN, Chosen::AtLeast),
        };
        let (stall_ms, stall_max_tokens) = (stall.hold.as_secs_f64() * 1e3, stall.max_tokens);
        Self { able_per_s, rate_per_s, chosen, stall_ms, stall_max_tokens }
    }
}

impl Load {
    pub(crate) fn of(facts: &Facts) -> Option<Self> {
        let late = |what: ActKind| {
            let ours = |call: &&CallRecord| {
                call.retries.is_none() && facts.act(&call.act).is_some_and(|act| act.what == what)
            };
            let calls = facts.calls.iter().filter(ours);
            Dist::of(&calls.map(|call| ms(call.began_us.saturating_sub(call.due_us))).collect::<Vec<_>>())
        };
        let (late_calm_ms, late_storm_ms) = (late(ActKind::Calm), late(ActKind::Storm));
        Some(Self { rate: facts.rate?, late_calm_ms, late_storm_ms })
    }
}

/// For people.
impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rate { able_per_s, rate_per_s, chosen, .. } = self.rate;
        let why = match chosen {
            Chosen::Asked => "as configured",
            Chosen::Half => "half of that",
            Chosen::AtMost => "the most without `--rate`",
            Chosen::AtLeast => "the least without `--rate`",
        };
        write!(
            f,
            "{CALIBRATION_CLIENTS} sequential clients reach {able_per_s:.1} requests/s; calm and storm send {rate_per_s:.1} requests/s, {why}"
        )?;
        let (calm, storm) = (&self.late_calm_ms, &self.late_storm_ms);
        if calm.n.min(storm.n) > 0 {
            write!(
                f,
                "; start after the due time: {} (p50), {} (p99) in the calm and {}, {} in the storm",
                report::ms(calm.p50),
                report::ms(calm.p99),
                report::ms(storm.p50),
                report::ms(storm.p99)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_rate_is_half_of_what_can_be_done_within_bounds_or_what_was_asked_for() {
        for (able, asked, rate, chosen) in [
            (100.0, None, 50.0, Chosen::Half),
            (301.0, None, 150.0, Chosen::AtMost),
            (300.0, None, 150.0, Chosen::Half),
            (1.5, None, 1.0, Chosen::AtLeast),
            (0.0, None, 1.0, Chosen::AtLeast),
            (100.0, Some(400.0), 400.0, Chosen::Asked),
        ] {
            let found = Rate::of(able, asked, Stall::usual(48, Duration::from_millis(500)));
            assert_eq!((found.able_per_s, found.rate_per_s, found.chosen), (able, rate, chosen));
            assert_eq!((found.stall_ms, found.stall_max_tokens), (500.0, 48));
        }
    }
}
