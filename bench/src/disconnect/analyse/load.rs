//! The load of a run: the request rate, and the delays of the benchmark itself.

use std::fmt;

use serde::Serialize;

use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::run_data::RunData;
use crate::disconnect::analyse::units::{format_ms, us_to_ms};
use crate::disconnect::record::rate::{CALIBRATION_CLIENTS, CalibratedRate, RateSource};
use crate::disconnect::record::raw::{CallRecord, SegmentKind};

/// The load of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RunLoad {
    #[serde(flatten)]
    pub(crate) rate: CalibratedRate,
    /// Delay between due time and start of calm requests, ms: the delay of the benchmark itself.
    pub(crate) late_calm_ms: Dist,
    /// The same of storm requests.
    pub(crate) late_storm_ms: Dist,
}

impl RunLoad {
    pub(crate) fn of(data: &RunData) -> Option<Self> {
        let late = |what: SegmentKind| {
            let ours = |call: &&CallRecord| {
                call.retries.is_none()
                    && data.segment(&call.segment).is_some_and(|segment| segment.what == what)
            };
            let calls = data.calls.iter().filter(ours);
            Dist::of(
                &calls.map(|call| us_to_ms(call.began_us.saturating_sub(call.due_us))).collect::<Vec<_>>(),
            )
        };
        let (late_calm_ms, late_storm_ms) = (late(SegmentKind::Calm), late(SegmentKind::Storm));
        Some(Self { rate: data.rate?, late_calm_ms, late_storm_ms })
    }
}

/// The text for reports.
impl fmt::Display for RunLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CalibratedRate { able_per_s, rate_per_s, chosen, .. } = self.rate;
        let why = match chosen {
            RateSource::Asked => "as configured",
            RateSource::Half => "half of that",
            RateSource::AtMost => "the most without `--rate`",
            RateSource::AtLeast => "the least without `--rate`",
        };
        write!(
            f,
            "{CALIBRATION_CLIENTS} sequential clients reach {able_per_s:.1} requests/s; calm and storm send {rate_per_s:.1} requests/s, {why}"
        )?;
        let (calm, storm) = (&self.late_calm_ms, &self.late_storm_ms);
        if calm.n.min(storm.n) > 0 {
            let [calm_p50, calm_p99, storm_p50, storm_p99] =
                [calm.p50, calm.p99, storm.p50, storm.p99].map(format_ms);
            write!(
                f,
                "; start after the due time: {calm_p50} (p50), {calm_p99} (p99) in the calm and {storm_p50}, {storm_p99} in the storm"
            )?;
        }
        Ok(())
    }
}
