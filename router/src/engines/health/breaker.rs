//! The circuit breaker of one engine and leg. Pure: time comes in as an argument.
//!
//! ```text
//!          `failures` troubles in a row,
//!          or one that proves itself (no connection, silence)
//! Closed ─────────────────────────────▶ Open(until) ── until has come ──▶ Asking
//!   ▲                                     ▲  ▲                              │ │
//!   │                                     │  └──────── no answer ───────────┘ │ an answer to GET /health
//!   └─ an answer ── Trial ── a failure ───┘                                   │
//!                     ▲───────────────────────────────────────────────────────┘
//! Open, Asking, Trial ─ the head of an answer, where it had been unreachable or silent ─▶ Closed
//! ```
//!
//! Each return to `Open` doubles the cool-down, up to a bound. In `Trial` one request at a time is let through.
//!
//! Invariants:
//! - Only `Closed` and `Trial` let requests through.
//! - A breaker that is not `Closed` leaves that state only by an answer of the engine itself.
//! - Troubles that no other engine disproved trip it only when they come from more than one source in turn; the same
//!   holds of a trial.
//! - The head of an answer forgets no failures: an engine that breaks every stream sends all of their heads.

use std::time::Duration;

use baton_connector::Time;

/// Rounds after which the cool-down grows no more.
const ROUND_MAX: u32 = 16;

/// When it trips, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Troubles in a row that trip it.
    pub failures: u32,
    /// The first cool-down.
    pub cool_down: Duration,
    /// The longest.
    pub cool_down_max: Duration,
}

/// What went wrong at an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sign {
    /// No connection.
    Unreachable,
    /// Its name has no address, and never had one.
    Nameless,
    /// It answers nothing, not even whether it lives.
    Silent,
    /// It answered 5xx, or broke off. Another engine served the same request, so it was not the request's fault.
    Trouble,
    /// The same, but nobody else was asked: a request of this source may be at fault.
    Suspect(u64),
}

/// Why it is not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Why {
    /// No connection.
    Unreachable,
    /// Its name has no address.
    Nameless,
    /// It answers nothing.
    Silent,
    /// It fails requests.
    Failing,
}

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Requests pass.
    Closed {
        /// Troubles in a row.
        failures: u32,
        /// The source of the last one that may have been its request's fault.
        source: Option<u64>,
    },
    /// Nothing passes until then.
    Open { until: Time, round: u32, why: Why },
    /// The engine is being asked whether it lives.
    Asking { round: u32, why: Why },
    /// It lives; one request at a time shows whether it works.
    Trial {
        round: u32,
        why: Why,
        /// The source of the last failure that may have been its request's fault.
        source: Option<u64>,
    },
}

/// What can happen to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    /// The engine answered a request, well and to the end.
    Answered,
    /// It sent the head of an answer, or refused a request: somebody is there.
    Spoke,
    /// It did not.
    Failed(Sign),
    /// Time has passed.
    Tick,
    /// It answered the question whether it lives.
    Lives,
    /// It did not.
    Mute,
}

/// One breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Breaker {
    state: State,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: CLOSED }
    }
}

const CLOSED: State = State::Closed { failures: 0, source: None };

impl Breaker {
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// When a [`Event::Tick`] will move it.
    pub(crate) fn due(&self) -> Option<Time> {
        match self.state {
            State::Open { until, .. } => Some(until),
            State::Closed { .. } | State::Asking { .. } | State::Trial { .. } => None,
        }
    }

    /// Moves it by one event.
    pub(crate) fn apply(&mut self, event: Event, now: Time, terms: &Terms) {
        use Event as E;
        use State as S;
        self.state = match (self.state, event) {
            (S::Closed { .. } | S::Trial { .. }, E::Answered) => CLOSED,
            // An engine that was not there, or said nothing, has disproved it.
            (S::Open { why, .. } | S::Asking { why, .. }, E::Answered | E::Spoke) if why != Why::Failing => {
                CLOSED
            }
            (S::Trial { why, .. }, E::Spoke) if why != Why::Failing => CLOSED,
            (state @ (S::Open { .. } | S::Asking { .. }), E::Answered) => state,
            (state, E::Spoke) => state,

            (S::Closed { failures, source }, E::Failed(sign)) => {
                closed_failed(failures, source, sign, now, terms)
            }
            // Whoever sends what no engine can serve does not keep it out of the others' reach.
            (S::Trial { round, why, source }, E::Failed(Sign::Suspect(from)))
                if source.is_none_or(|source| source == from) =>
            {
                S::Trial { round, why, source: Some(from) }
            }
            (S::Trial { round, .. }, E::Failed(sign)) => open(round + 1, why(sign), now, terms),
            // What is worse than was known: silence is not tried out, as everything else is when nobody is left.
            (S::Open { until, round, .. }, E::Failed(Sign::Silent)) => {
                S::Open { until, round, why: Why::Silent }
            }
            (S::Asking { round, .. }, E::Failed(Sign::Silent)) => S::Asking { round, why: Why::Silent },
            (state @ (S::Open { .. } | S::Asking { .. }), E::Failed(_)) => state,

            (S::Open { until, round, why }, E::Tick) if until <= now => S::Asking { round, why },
            (state, E::Tick) => state,

            (S::Asking { round, why }, E::Lives) => S::Trial { round, why, source: None },
            (S::Asking { round, why }, E::Mute) => open(round + 1, why, now, terms),
            (state @ (S::Closed { .. } | S::Open { .. } | S::Trial { .. }), E::Lives | E::Mute) => state,
        };
    }
}

fn closed_failed(failures: u32, source: Option<u64>, sign: Sign, now: Time, terms: &Terms) -> State {
    let (counted, source) = match sign {
        Sign::Unreachable | Sign::Nameless | Sign::Silent => return open(0, why(sign), now, terms),
        Sign::Trouble => (true, source),
        // One source alone proves nothing: it may send what no engine can serve.
        Sign::Suspect(from) => (source != Some(from), Some(from)),
    };
    let failures = failures + u32::from(counted);
    if failures >= terms.failures {
        return open(0, Why::Failing, now, terms);
    }
    State::Closed { failures, source }
}

fn open(round: u32, why: Why, now: Time, terms: &Terms) -> State {
    let round = round.min(ROUND_MAX);
    let cool_down = terms.cool_down.saturating_mul(1 << round).min(terms.cool_down_max);
    State::Open { until: now.after(cool_down), round, why }
}

fn why(sign: Sign) -> Why {
    match sign {
        Sign::Unreachable => Why::Unreachable,
        Sign::Nameless => Why::Nameless,
        Sign::Silent => Why::Silent,
        Sign::Trouble | Sign::Suspect(_) => Why::Failing,
    }
}

impl Why {
    /// For people.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Nameless => "its name has no address",
            Self::Silent => "silent",
            Self::Failing => "failing",
        }
    }
}

impl State {
    /// For people.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Closed { .. } => "closed",
            Self::Open { .. } => "open",
            Self::Asking { .. } => "asking",
            Self::Trial { .. } => "half_open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms =
        Terms { failures: 3, cool_down: Duration::from_secs(1), cool_down_max: Duration::from_secs(4) };
    const ALL: [Event; 10] = [
        Event::Answered,
        Event::Spoke,
        Event::Failed(Sign::Unreachable),
        Event::Failed(Sign::Silent),
        Event::Failed(Sign::Trouble),
        Event::Failed(Sign::Suspect(1)),
        Event::Failed(Sign::Suspect(2)),
        Event::Tick,
        Event::Lives,
        Event::Mute,
    ];

    fn after(events: &[Event]) -> Breaker {
        let mut breaker = Breaker::default();
        for (at, event) in (0..).zip(events) {
            breaker.apply(*event, Time::ZERO.after(Duration::from_secs(at)), &TERMS);
        }
        breaker
    }

    fn passes(state: State) -> bool {
        matches!(state, State::Closed { .. } | State::Trial { .. })
    }

    #[test]
    fn in_every_order_of_seven_events_only_an_answer_of_the_engine_ends_a_cool_down() {
        let mut seen = std::collections::HashSet::from([(Breaker::default(), 0_u64)]);
        for _ in 0..7 {
            let mut next = std::collections::HashSet::new();
            for (before, second) in &seen {
                for event in ALL {
                    let now = Time::ZERO.after(Duration::from_secs(*second));
                    let mut breaker = *before;
                    breaker.apply(event, now, &TERMS);
                    let by_an_answer = matches!(event, Event::Answered | Event::Spoke | Event::Lives);
                    if !passes(before.state()) && passes(breaker.state()) {
                        assert!(by_an_answer, "{before:?} {event:?} {breaker:?}");
                    }
                    if passes(before.state()) && !passes(breaker.state()) {
                        assert!(matches!(event, Event::Failed(_)), "{before:?} {event:?} {breaker:?}");
                    }
                    if let State::Open { until, .. } = breaker.state() {
                        let was_open = matches!(before.state(), State::Open { .. });
                        let cool_down = until.since(now);
                        assert!(was_open || cool_down >= TERMS.cool_down, "{before:?} {event:?}");
                        assert!(cool_down <= TERMS.cool_down_max, "{before:?} {event:?}");
                    }
                    if let State::Closed { failures, .. } = breaker.state() {
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
    fn one_source_alone_never_trips_it_however_often_it_fails() {
        let breaker = after(&[Event::Failed(Sign::Suspect(7)); 100]);
        assert_eq!(breaker.state(), State::Closed { failures: 1, source: Some(7) });
        let turns = [1, 2, 1].map(|source| Event::Failed(Sign::Suspect(source)));
        assert!(matches!(after(&turns).state(), State::Open { why: Why::Failing, .. }));
    }

    #[test]
    fn an_answer_in_between_starts_the_count_again() {
        let trouble = Event::Failed(Sign::Trouble);
        let breaker = after(&[trouble, trouble, Event::Answered, trouble, trouble]);
        assert_eq!(breaker.state(), State::Closed { failures: 2, source: None });
    }

    #[test]
    fn the_head_of_an_answer_forgets_no_failures() {
        let turns = [1, 2, 1].map(|source| [Event::Spoke, Event::Failed(Sign::Suspect(source))]);
        assert!(matches!(after(&turns.concat()).state(), State::Open { why: Why::Failing, .. }));
        let mut back = after(&[Event::Failed(Sign::Unreachable)]);
        back.apply(Event::Spoke, Time::ZERO, &TERMS);
        assert_eq!(back, Breaker::default(), "one that could not be reached is there");
    }

    #[test]
    fn one_source_alone_fails_no_trial() {
        let trouble = [Event::Failed(Sign::Trouble); 3];
        let mut breaker = after(&trouble);
        let now = breaker.due().expect("it is open");
        breaker.apply(Event::Tick, now, &TERMS);
        breaker.apply(Event::Lives, now, &TERMS);
        for _ in 0..10 {
            breaker.apply(Event::Failed(Sign::Suspect(7)), now, &TERMS);
        }
        let trial = State::Trial { round: 0, why: Why::Failing, source: Some(7) };
        assert_eq!(breaker.state(), trial);
        breaker.apply(Event::Spoke, now, &TERMS);
        assert_eq!(breaker.state(), trial, "a head is not yet an answer");
        let mut disproved = breaker;
        disproved.apply(Event::Failed(Sign::Suspect(8)), now, &TERMS);
        assert!(matches!(disproved.state(), State::Open { round: 1, .. }));
        breaker.apply(Event::Answered, now, &TERMS);
        assert_eq!(breaker, Breaker::default());
    }

    #[test]
    fn each_failed_trial_doubles_the_cool_down_up_to_its_bound() {
        let mut breaker = after(&[Event::Failed(Sign::Unreachable)]);
        let mut now = Time::ZERO;
        let mut waited = Vec::new();
        for _ in 0..4 {
            let until = breaker.due().expect("it is open");
            waited.push(until.since(now).as_secs());
            now = until;
            breaker.apply(Event::Tick, now, &TERMS);
            breaker.apply(Event::Lives, now, &TERMS);
            assert!(passes(breaker.state()));
            breaker.apply(Event::Failed(Sign::Trouble), now, &TERMS);
        }
        assert_eq!(waited, [1, 2, 4, 4]);
    }

    #[test]
    fn an_engine_that_fails_requests_is_not_let_back_in_by_an_old_request_that_ends_well() {
        let tripped = after(&[Event::Failed(Sign::Trouble); 3]);
        let mut late = tripped;
        late.apply(Event::Answered, Time::ZERO, &TERMS);
        assert_eq!(late, tripped);
        let mut back = after(&[Event::Failed(Sign::Silent)]);
        back.apply(Event::Answered, Time::ZERO, &TERMS);
        assert_eq!(back, Breaker::default(), "one that was silent has spoken");
    }
}
