//! Properties of simulated SGLang engines beside those of every simulated engine, and SGLang's waits.

use std::time::Duration;

use super::super::faults::Fault;
use super::super::plan::FleetPlan;

/// Whether engines notify each other of a leg's end without success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum AbortExchange {
    /// As SGLang 0.5.23: both engines send and acknowledge aborts
    #[default]
    Current,
    /// As older versions: no message, a peer waits for its timeout
    Old,
}

/// Maximum data-parallel ranks of an engine.
const RANKS_MAX: usize = 64;
/// Limits of the time scale. A smaller one would put waits below the resolution of timers.
const SCALE_MIN: f64 = 0.000_1;
const SCALE_MAX: f64 = 10.0;
/// The port of SGLang's bootstrap server, for requests without `bootstrap_port`.
pub(super) const BOOTSTRAP_PORT: u16 = 8998;

/// A fleet of SGLang engines.
#[derive(Clone, Debug)]
pub struct SglangPlan {
    /// Numbers, speeds, limits, ports and faults. Dialect, lease and heartbeats have no effect.
    pub fleet: FleetPlan,
    /// Data-parallel ranks of each engine (`--dp-size`). Each has a pool.
    pub ranks: usize,
    /// Whether engines exchange aborts.
    pub aborts: AbortExchange,
    /// Factor of SGLang's waits.
    pub time_scale: f64,
    /// The first prefill engine's bootstrap port. Each further one has the next port. 0 for free ports.
    pub bootstrap_port: u16,
}

impl SglangPlan {
    /// A fleet with one rank per engine and SGLang's waits.
    #[must_use]
    pub fn new(fleet: FleetPlan) -> Self {
        Self { fleet, ranks: 1, aborts: AbortExchange::default(), time_scale: 1.0, bootstrap_port: 0 }
    }

    /// Checks all numbers, and that SGLang engines have the faults.
    ///
    /// # Errors
    /// A description of the problem.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            return Err(format!("{} data-parallel ranks are not between 1 and {RANKS_MAX}", self.ranks));
        }
        if !(SCALE_MIN..=SCALE_MAX).contains(&self.time_scale) {
            return Err(format!(
                "a time scale of {} is not between {SCALE_MIN} and {SCALE_MAX}",
                self.time_scale
            ));
        }
        if usize::from(self.bootstrap_port) + self.fleet.prefill > usize::from(u16::MAX) + 1 {
            return Err(format!("there are not so many ports after {}", self.bootstrap_port));
        }
        for fault in &self.fleet.faults {
            if matches!(fault.fault, Fault::StrandsGap | Fault::DoubleFree | Fault::StaleBlocks) {
                return Err(format!("fault `{fault}` concerns leases, and SGLang has none"));
            }
        }
        self.fleet.check()
    }

    pub(super) fn waits(&self) -> Waits {
        let scaled = |seconds: f64| Duration::from_secs_f64(seconds * self.time_scale);
        Waits {
            bootstrap: scaled(300.0),
            waiting: scaled(300.0),
            ack: scaled(30.0),
            heartbeat: scaled(5.0),
            poll: scaled(4.0),
            stream_abort: scaled(2.0),
            health: scaled(1.0),
        }
    }
}

/// SGLang's waits, scaled. Source: `environ.py` and `tokenizer_manager.py` of 0.5.23.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    /// P waits for D's page indices (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`).
    pub bootstrap: Duration,
    /// D waits for the KV cache (`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`).
    pub waiting: Duration,
    /// D keeps the pages of an aborted transfer for P's acknowledgement.
    pub ack: Duration,
    /// Between two of D's requests to P's bootstrap server.
    pub heartbeat: Duration,
    /// Between two looks at a client that has received no byte (`SGLANG_REQUEST_STATE_WAIT_TIMEOUT`).
    pub poll: Duration,
    /// From the end of a stream's connection to the abort.
    pub stream_abort: Duration,
    /// The least duration of `/health`.
    pub health: Duration,
}
