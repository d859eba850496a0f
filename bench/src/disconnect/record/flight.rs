//! What is in flight at a moment, by phase, and what of that a fault is to meet.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::disconnect::plan::phase::Phase;

/// Requests at least that a fault is to meet where nobody tells in which phase they are.
const OPEN_WANTED: u64 = 2;

/// Requests whose clients are there, and which are not over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InFlight {
    #[serde(rename = "in_flight")]
    pub(crate) requests: u64,
    /// How many of them are in each phase; empty where engines do not tell.
    #[serde(default)]
    pub(crate) phases: BTreeMap<Phase, u64>,
}

/// What has to be in flight when something breaks, for what that does to requests to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wanted {
    /// The prefill engine computes.
    Prefill,
    /// Tokens of an answer have come, and more are to come.
    Stream,
    /// Both.
    PrefillAndStream,
    /// Some requests, in whatever phases.
    Open,
}

/// What a fault had waited for when it struck, and what was known of it then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Struck {
    pub(crate) wanted: Wanted,
    pub(crate) waited_us: u64,
    pub(crate) known: InFlight,
}

impl InFlight {
    /// One more request, in this phase as far as anybody tells.
    pub(crate) fn add(&mut self, phase: Option<Phase>) {
        self.requests += 1;
        if let Some(phase) = phase {
            *self.phases.entry(phase).or_default() += 1;
        }
    }

    /// In words: `2 prefill, 1 mid-stream`.
    pub(crate) fn by_phase(&self) -> String {
        let of = self.phases.iter().map(|(phase, count)| format!("{count} {}", phase.label()));
        of.collect::<Vec<_>>().join(", ")
    }
}

impl Wanted {
    /// It is there.
    pub(crate) fn is_in(self, flight: &InFlight) -> bool {
        let any = |phase: Phase| flight.phases.contains_key(&phase);
        match self {
            Self::Prefill => any(Phase::Prefill),
            Self::Stream => any(Phase::Stream),
            Self::PrefillAndStream => any(Phase::Prefill) && any(Phase::Stream),
            Self::Open => flight.requests >= OPEN_WANTED,
        }
    }

    /// What it says of a fault that did not meet it.
    pub(crate) fn missed(self) -> &'static str {
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
            let is_in = |wanted: Wanted| wanted.is_in(&flight);
            assert_eq!((is_in(Wanted::Prefill), is_in(Wanted::Stream)), (prefills, streams), "{there:?}");
            let both = prefills && streams;
            assert_eq!((is_in(Wanted::PrefillAndStream), is_in(Wanted::Open)), (both, open), "{there:?}");
        }
        assert_eq!(flight(&[stream, prefill, None, stream]).by_phase(), "1 prefill, 2 mid-stream");
    }
}
