//! The request rate of calm, storm and faults, and how calibration chose it.

use serde::{Deserialize, Serialize};

/// Clients that measure the capacity of the deployment.
pub(crate) const CALIBRATION_CLIENTS: usize = 8;

/// How the rate was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RateSource {
    /// `--rate`.
    Asked,
    /// Half of the measured capacity.
    Half,
    /// The maximum without `--rate`; half of the capacity is more.
    AtMost,
    /// The minimum; half of the capacity is less.
    AtLeast,
}

/// The result of calibration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CalibratedRate {
    /// Requests per second that [`CALIBRATION_CLIENTS`] clients complete, each one request at a time.
    pub(crate) able_per_s: f64,
    /// Requests per second in calm, storm and faults.
    pub(crate) rate_per_s: f64,
    pub(crate) chosen: RateSource,
    /// How long a client that stalls in a phase reads nothing, ms: the configured time, or less if the engines have no
    /// room.
    pub(crate) stall_ms: f64,
    /// Tokens that such a client requests.
    pub(crate) stall_max_tokens: u32,
}
