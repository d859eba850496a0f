//! Requests in flight, by phase, and the condition that a fault waits for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::disconnect::plan::phase::Phase;

/// Requests that have to be in flight for a fault if the engines do not report phases.
const OPEN_WANTED: u64 = 2;

/// Requests that have not ended and whose clients are connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InFlight {
    #[serde(rename = "in_flight")]
    pub(crate) requests: u64,
    /// Requests by phase; empty if the engines do not report phases.
    #[serde(default)]
    pub(crate) phases: BTreeMap<Phase, u64>,
}

/// The requests that have to be in flight before a fault is injected, so that its effect shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultCondition {
    /// A request in prefill.
    Prefill,
    /// A stream with some of its tokens.
    Stream,
    /// A request in prefill and such a stream.
    PrefillAndStream,
    /// Requests in any phase.
    Open,
}

/// The condition that a fault waited for, and the known requests in flight at its injection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FaultContext {
    pub(crate) wanted: FaultCondition,
    pub(crate) waited_us: u64,
    pub(crate) known: InFlight,
}

impl InFlight {
    /// Adds a request, with its phase if it is known.
    pub(crate) fn add(&mut self, phase: Option<Phase>) {
        self.requests += 1;
        if let Some(phase) = phase {
            *self.phases.entry(phase).or_default() += 1;
        }
    }

    /// As text: `2 prefill, 1 mid-stream`.
    pub(crate) fn by_phase(&self) -> String {
        let of = self.phases.iter().map(|(phase, count)| format!("{count} {}", phase.label()));
        of.collect::<Vec<_>>().join(", ")
    }
}

impl FaultCondition {
    /// Whether these requests meet the condition.
    pub(crate) fn is_met_by(self, flight: &InFlight) -> bool {
        let any = |phase: Phase| flight.phases.contains_key(&phase);
        match self {
            Self::Prefill => any(Phase::Prefill),
            Self::Stream => any(Phase::Stream),
            Self::PrefillAndStream => any(Phase::Prefill) && any(Phase::Stream),
            Self::Open => flight.requests >= OPEN_WANTED,
        }
    }

    /// The text for a fault that did not meet the condition.
    pub(crate) fn missed_label(self) -> &'static str {
        match self {
            Self::Prefill => "no request in prefill",
            Self::Stream => "no request in mid-stream",
            Self::PrefillAndStream => "not both a request in prefill and one in mid-stream",
            Self::Open => "fewer than two requests",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_when_what_it_is_to_meet_is_there() {
        let flight = |phases: &[Option<Phase>]| {
            let mut flight = InFlight::default();
            phases.iter().for_each(|phase| flight.add(*phase));
            flight
        };
        let [prefill, stream, unary, gap] =
            [Phase::Prefill, Phase::Stream, Phase::Unary, Phase::Gap].map(Some);
        for (there, prefills, streams, open) in [
            (&[][..], false, false, false),
            (&[gap], false, false, false),
            (&[prefill], true, false, false),
            (&[unary], false, false, false),
            (&[None, None], false, false, true),
            (&[prefill, gap, stream], true, true, true),
        ] {
            let flight = flight(there);
            assert_eq!(flight.requests, there.len() as u64);
            let is_in = |wanted: FaultCondition| wanted.is_met_by(&flight);
            assert_eq!(
                (is_in(FaultCondition::Prefill), is_in(FaultCondition::Stream)),
                (prefills, streams),
                "{there:?}"
            );
            let both = prefills && streams;
            assert_eq!(
                (is_in(FaultCondition::PrefillAndStream), is_in(FaultCondition::Open)),
                (both, open),
                "{there:?}"
            );
        }
        assert_eq!(flight(&[stream, prefill, None, stream]).by_phase(), "1 prefill, 2 mid-stream");
    }
}
