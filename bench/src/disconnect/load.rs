//! How much is asked of the deployment in calm, storm and faults, and what that is of what it can do.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::analyse::{Facts, ms};
use super::dist::Dist;
use super::raw::ActKind;

/// Clients that show how much the deployment can do.
pub(crate) const CALIBRATION_CLIENTS: usize = 8;
/// Of what the deployment can do, so much is asked for by default.
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
    /// Half of what the deployment can do.
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
}

/// The load of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Load {
    #[serde(flatten)]
    pub(crate) rate: Rate,
    /// How long after they were due requests of calm and storm were begun, ms: what the benchmark itself was late by.
    pub(crate) late_ms: Dist,
}

impl Rate {
    /// `asked`: what `--rate` says.
    pub(crate) fn of(able_per_s: f64, asked: Option<f64>) -> Self {
        let half = able_per_s * SHARE;
        let (rate_per_s, chosen) = match asked {
            Some(rate) => (rate, Chosen::Asked),
            None if half > RATE_MAX => (RATE_MAX, Chosen::AtMost),
            None if half >= RATE_MIN => (half, Chosen::Half),
            // Also of a deployment of which nothing came in time.
            None => (RATE_MIN, Chosen::AtLeast),
        };
        Self { able_per_s, rate_per_s, chosen }
    }
}

impl Load {
    pub(super) fn of(facts: &Facts) -> Option<Self> {
        let is_load =
            |act: &str| facts.act(act).is_some_and(|act| matches!(act.what, ActKind::Calm | ActKind::Storm));
        let calls = facts.calls.iter().filter(|call| call.retries.is_none() && is_load(&call.act));
        let late: Vec<f64> = calls.map(|call| ms(call.began_us.saturating_sub(call.due_us))).collect();
        Some(Self { rate: facts.rate?, late_ms: Dist::of(&late) })
    }
}

/// For people.
impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rate { able_per_s, rate_per_s, chosen } = self.rate;
        let why = match chosen {
            Chosen::Asked => "as asked for; ",
            Chosen::Half => "half of what it can do: ",
            Chosen::AtMost => "the most without `--rate`; ",
            Chosen::AtLeast => "the least without `--rate`; ",
        };
        write!(
            f,
            "{rate_per_s:.1} requests/s in calm and storm, {why}{CALIBRATION_CLIENTS} clients at once got {able_per_s:.1} requests/s done"
        )?;
        if self.late_ms.n > 0 {
            let Dist { p50, p99, .. } = self.late_ms;
            write!(f, "; they began {p50:.2} ms after they were due (p50), {p99:.2} ms (p99)")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(Rate::of(able, asked), Rate { able_per_s: able, rate_per_s: rate, chosen });
        }
    }
}
