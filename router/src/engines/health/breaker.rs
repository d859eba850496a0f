//! The circuit breaker of one engine and leg. Pure: the time is an argument.
//!
//! ```text
//!          `failures` failures in a row,
//!          or one that is a proof (no connection, no reply)
//! Closed ─────────────────────────────▶ Open(until) ─── until is over ───▶ Probing
//!   ▲                                     ▲  ▲                              │ │
//!   │                                     │  └───────── no reply ───────────┘ │ a reply to GET /health
//!   └─ a reply ── Trial ── a failure ─────┘                                   │
//!                     ▲───────────────────────────────────────────────────────┘
//! Open, Probing, Trial ─ a response head, where the reason was unreachable or unresponsive ─▶ Closed
//! ```
//!
//! Each return to `Open` doubles the cool-down, up to a bound. In `Trial` one request at a time passes.
//!
//! Invariants:
//! - Only `Closed` and `Trial` let requests pass.
//! - A breaker that is not `Closed` leaves that state only by a reply of the engine itself.
//! - Failures that no other engine disproved trip the breaker only when they come from more than one source in
//!   turn. The same holds for a trial.
//! - A response head resets no failures: an engine that breaks every stream sends all of their heads.

use std::time::Duration;

use baton_connector::Time;

/// Rounds after which the cool-down stops growing.
const ROUND_MAX: u32 = 16;

/// When a breaker trips, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BreakerTerms {
    /// Failures in a row that trip the breaker.
    pub failures: u32,
    /// The first cool-down.
    pub cool_down: Duration,
    /// The longest cool-down.
    pub cool_down_max: Duration,
}

/// The kind of an engine's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FailureKind {
    /// No connection.
    Unreachable,
    /// The engine's name has no address, and never had one.
    Unresolved,
    /// The engine sends nothing, and does not answer probes.
    Unresponsive,
    /// The engine sent 5xx or broke off. Another engine served the same request, so the request was not at fault.
    EngineFault,
    /// The same, but no other engine was tried: a request of this source may be at fault.
    PossibleFault(u64),
}

/// Why a breaker is not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BreakerReason {
    /// No connection.
    Unreachable,
    /// The engine's name has no address.
    Unresolved,
    /// The engine sends nothing.
    Unresponsive,
    /// The engine fails requests.
    Failing,
}

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BreakerState {
    /// Requests pass.
    Closed {
        /// Failures in a row.
        failures: u32,
        /// The source of the last failure that may have been its request's fault.
        source: Option<u64>,
    },
    /// No request passes until then.
    Open { until: Time, round: u32, reason: BreakerReason },
    /// A liveness probe is in progress.
    Probing { round: u32, reason: BreakerReason },
    /// The engine is alive. One request at a time shows whether it works.
    Trial {
        round: u32,
        reason: BreakerReason,
        /// The source of the last failure that may have been its request's fault.
        source: Option<u64>,
    },
}

/// Events of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BreakerEvent {
    /// The engine completed a request.
    Completed,
    /// The engine sent a response head or refused a request, so it is reachable.
    Responded,
    /// The engine failed a request.
    Failed(FailureKind),
    /// Time has passed.
    Tick,
    /// The liveness probe had a reply.
    ProbeSucceeded,
    /// The liveness probe failed.
    ProbeFailed,
}

/// One breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Breaker {
    state: BreakerState,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: CLOSED }
    }
}

const CLOSED: BreakerState = BreakerState::Closed { failures: 0, source: None };

impl Breaker {
    pub(crate) fn state(&self) -> BreakerState {
        self.state
    }

    /// When a [`BreakerEvent::Tick`] will change the state.
    pub(crate) fn due(&self) -> Option<Time> {
        match self.state {
            BreakerState::Open { until, .. } => Some(until),
            BreakerState::Closed { .. } | BreakerState::Probing { .. } | BreakerState::Trial { .. } => None,
        }
    }

    /// Applies one event.
    pub(crate) fn apply(&mut self, event: BreakerEvent, now: Time, terms: &BreakerTerms) {
        use BreakerEvent as E;
        use BreakerState as S;
        self.state = match (self.state, event) {
            (S::Closed { .. } | S::Trial { .. }, E::Completed) => CLOSED,
            // A reply disproves that the engine is unreachable or unresponsive.
            (S::Open { reason, .. } | S::Probing { reason, .. }, E::Completed | E::Responded)
                if reason != BreakerReason::Failing =>
            {
                CLOSED
            }
            (S::Trial { reason, .. }, E::Responded) if reason != BreakerReason::Failing => CLOSED,
            (state @ (S::Open { .. } | S::Probing { .. }), E::Completed) => state,
            (state, E::Responded) => state,

            (S::Closed { failures, source }, E::Failed(kind)) => {
                closed_failed(failures, source, kind, now, terms)
            }
            // A source that sends requests which no engine can serve does not keep the engine from other sources.
            (S::Trial { round, reason, source }, E::Failed(FailureKind::PossibleFault(from)))
                if source.is_none_or(|source| source == from) =>
            {
                S::Trial { round, reason, source: Some(from) }
            }
            (S::Trial { round, .. }, E::Failed(kind)) => open(round + 1, reason_of(kind), now, terms),
            // Silence overrides the earlier reason. A silent engine gets no trial request, even if no other engine
            // is left.
            (S::Open { until, round, .. }, E::Failed(FailureKind::Unresponsive)) => {
                S::Open { until, round, reason: BreakerReason::Unresponsive }
            }
            (S::Probing { round, .. }, E::Failed(FailureKind::Unresponsive)) => {
                S::Probing { round, reason: BreakerReason::Unresponsive }
            }
            (state @ (S::Open { .. } | S::Probing { .. }), E::Failed(_)) => state,

            (S::Open { until, round, reason }, E::Tick) if until <= now => S::Probing { round, reason },
            (state, E::Tick) => state,

            (S::Probing { round, reason }, E::ProbeSucceeded) => S::Trial { round, reason, source: None },
            (S::Probing { round, reason }, E::ProbeFailed) => open(round + 1, reason, now, terms),
            (
                state @ (S::Closed { .. } | S::Open { .. } | S::Trial { .. }),
                E::ProbeSucceeded | E::ProbeFailed,
            ) => state,
        };
    }
}

fn closed_failed(
    failures: u32,
    source: Option<u64>,
    kind: FailureKind,
    now: Time,
    terms: &BreakerTerms,
) -> BreakerState {
    let (counted, source) = match kind {
        FailureKind::Unreachable | FailureKind::Unresolved | FailureKind::Unresponsive => {
            return open(0, reason_of(kind), now, terms);
        }
        FailureKind::EngineFault => (true, source),
        // One source alone proves nothing: it may send requests which no engine can serve.
        FailureKind::PossibleFault(from) => (source != Some(from), Some(from)),
    };
    let failures = failures + u32::from(counted);
    if failures >= terms.failures {
        return open(0, BreakerReason::Failing, now, terms);
    }
    BreakerState::Closed { failures, source }
}

fn open(round: u32, reason: BreakerReason, now: Time, terms: &BreakerTerms) -> BreakerState {
    let round = round.min(ROUND_MAX);
    let cool_down = terms.cool_down.saturating_mul(1 << round).min(terms.cool_down_max);
    BreakerState::Open { until: now.after(cool_down), round, reason }
}

fn reason_of(kind: FailureKind) -> BreakerReason {
    match kind {
        FailureKind::Unreachable => BreakerReason::Unreachable,
        FailureKind::Unresolved => BreakerReason::Unresolved,
        FailureKind::Unresponsive => BreakerReason::Unresponsive,
        FailureKind::EngineFault | FailureKind::PossibleFault(_) => BreakerReason::Failing,
    }
}

impl BreakerReason {
    /// The reason as text, for `/engines` and logs.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Unresolved => "its name has no address",
            Self::Unresponsive => "silent",
            Self::Failing => "failing",
        }
    }
}

impl BreakerState {
    /// The state as text, for `/engines`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Closed { .. } => "closed",
            Self::Open { .. } => "open",
            Self::Probing { .. } => "asking",
            Self::Trial { .. } => "half_open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: BreakerTerms = BreakerTerms {
        failures: 3,
        cool_down: Duration::from_secs(1),
        cool_down_max: Duration::from_secs(4),
    };
    const ALL: [BreakerEvent; 10] = [
        BreakerEvent::Completed,
        BreakerEvent::Responded,
        BreakerEvent::Failed(FailureKind::Unreachable),
        BreakerEvent::Failed(FailureKind::Unresponsive),
        BreakerEvent::Failed(FailureKind::EngineFault),
        BreakerEvent::Failed(FailureKind::PossibleFault(1)),
        BreakerEvent::Failed(FailureKind::PossibleFault(2)),
        BreakerEvent::Tick,
        BreakerEvent::ProbeSucceeded,
        BreakerEvent::ProbeFailed,
    ];

    fn after(events: &[BreakerEvent]) -> Breaker {
        let mut breaker = Breaker::default();
        for (at, event) in (0..).zip(events) {
            breaker.apply(*event, Time::ZERO.after(Duration::from_secs(at)), &TERMS);
        }
        breaker
    }

    fn passes(state: BreakerState) -> bool {
        matches!(state, BreakerState::Closed { .. } | BreakerState::Trial { .. })
    }

    #[test]
    fn in_every_order_of_seven_events_only_a_response_ends_a_cool_down() {
        let mut seen = std::collections::HashSet::from([(Breaker::default(), 0_u64)]);
        for _ in 0..7 {
            let mut next = std::collections::HashSet::new();
            for (before, second) in &seen {
                for event in ALL {
                    let now = Time::ZERO.after(Duration::from_secs(*second));
                    let mut breaker = *before;
                    breaker.apply(event, now, &TERMS);
                    let by_an_answer = matches!(
                        event,
                        BreakerEvent::Completed | BreakerEvent::Responded | BreakerEvent::ProbeSucceeded
                    );
                    if !passes(before.state()) && passes(breaker.state()) {
                        assert!(by_an_answer, "{before:?} {event:?} {breaker:?}");
                    }
                    if passes(before.state()) && !passes(breaker.state()) {
                        assert!(matches!(event, BreakerEvent::Failed(_)), "{before:?} {event:?} {breaker:?}");
                    }
                    if let BreakerState::Open { until, .. } = breaker.state() {
                        let was_open = matches!(before.state(), BreakerState::Open { .. });
                        let cool_down = until.since(now);
                        assert!(was_open || cool_down >= TERMS.cool_down, "{before:?} {event:?}");
                        assert!(cool_down <= TERMS.cool_down_max, "{before:?} {event:?}");
                    }
                    if let BreakerState::Closed { failures, .. } = breaker.state() {
                        assert!(failures < TERMS.failures);
                    }
                    next.insert((breaker, second + 1));
                }
            }
            seen = next;
        }
        assert!(seen.len() > 20, "{}", seen.len());
    }

    #[test]
    fn failures_of_one_source_never_open_the_breaker() {
        let breaker = after(&[BreakerEvent::Failed(FailureKind::PossibleFault(7)); 100]);
        assert_eq!(breaker.state(), BreakerState::Closed { failures: 1, source: Some(7) });
        let turns = [1, 2, 1].map(|source| BreakerEvent::Failed(FailureKind::PossibleFault(source)));
        assert!(matches!(after(&turns).state(), BreakerState::Open { reason: BreakerReason::Failing, .. }));
    }

    #[test]
    fn an_answer_in_between_starts_the_count_again() {
        let trouble = BreakerEvent::Failed(FailureKind::EngineFault);
        let breaker = after(&[trouble, trouble, BreakerEvent::Completed, trouble, trouble]);
        assert_eq!(breaker.state(), BreakerState::Closed { failures: 2, source: None });
    }

    #[test]
    fn a_response_head_does_not_reset_the_failures() {
        let turns = [1, 2, 1].map(|source| {
            [BreakerEvent::Responded, BreakerEvent::Failed(FailureKind::PossibleFault(source))]
        });
        assert!(matches!(
            after(&turns.concat()).state(),
            BreakerState::Open { reason: BreakerReason::Failing, .. }
        ));
        let mut back = after(&[BreakerEvent::Failed(FailureKind::Unreachable)]);
        back.apply(BreakerEvent::Responded, Time::ZERO, &TERMS);
        assert_eq!(back, Breaker::default(), "one that could not be reached is there");
    }

    #[test]
    fn one_source_alone_fails_no_trial() {
        let trouble = [BreakerEvent::Failed(FailureKind::EngineFault); 3];
        let mut breaker = after(&trouble);
        let now = breaker.due().expect("it is open");
        breaker.apply(BreakerEvent::Tick, now, &TERMS);
        breaker.apply(BreakerEvent::ProbeSucceeded, now, &TERMS);
        for _ in 0..10 {
            breaker.apply(BreakerEvent::Failed(FailureKind::PossibleFault(7)), now, &TERMS);
        }
        let trial = BreakerState::Trial { round: 0, reason: BreakerReason::Failing, source: Some(7) };
        assert_eq!(breaker.state(), trial);
        breaker.apply(BreakerEvent::Responded, now, &TERMS);
        assert_eq!(breaker.state(), trial, "a head is not yet an answer");
        let mut disproved = breaker;
        disproved.apply(BreakerEvent::Failed(FailureKind::PossibleFault(8)), now, &TERMS);
        assert!(matches!(disproved.state(), BreakerState::Open { round: 1, .. }));
        breaker.apply(BreakerEvent::Completed, now, &TERMS);
        assert_eq!(breaker, Breaker::default());
    }

    #[test]
    fn each_failed_trial_doubles_the_cool_down_up_to_its_bound() {
        let mut breaker = after(&[BreakerEvent::Failed(FailureKind::Unreachable)]);
        let mut now = Time::ZERO;
        let mut waited = Vec::new();
        for _ in 0..4 {
            let until = breaker.due().expect("it is open");
            waited.push(until.since(now).as_secs());
            now = until;
            breaker.apply(BreakerEvent::Tick, now, &TERMS);
            breaker.apply(BreakerEvent::ProbeSucceeded, now, &TERMS);
            assert!(passes(breaker.state()));
            breaker.apply(BreakerEvent::Failed(FailureKind::EngineFault), now, &TERMS);
        }
        assert_eq!(waited, [1, 2, 4, 4]);
    }

    #[test]
    fn an_old_success_closes_only_a_breaker_opened_by_silence() {
        let tripped = after(&[BreakerEvent::Failed(FailureKind::EngineFault); 3]);
        let mut late = tripped;
        late.apply(BreakerEvent::Completed, Time::ZERO, &TERMS);
        assert_eq!(late, tripped);
        let mut back = after(&[BreakerEvent::Failed(FailureKind::Unresponsive)]);
        back.apply(BreakerEvent::Completed, Time::ZERO, &TERMS);
        assert_eq!(back, Breaker::default(), "a response closes a breaker that silence opened");
    }
}
