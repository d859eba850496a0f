//! The exchange: a router's side of one request, and what each engine is still owed at every moment.
//!
//! ```text
//! Choosing ─ not admitted ─▶ Done
//! Choosing ─ prefill sent ─▶ Prefilling(P) ─ replied ─▶ Held(lent) ─ decode sent ─▶ Decoding(D)
//!    │ ▲                        │ refused ─▶ Done        ▲ │                           │ │ │
//!    │ └── failed ──────────────┘                        │ └─ gave up ─▶ Done          │ │ └ refused ─▶ Done
//!    ├─ prefill skipped ─▶ Held(nothing)                 └── failed: same handoff ─────┘ │
//!    └◀─ handoff spent: released, computed anew ── Held(lent)                            │
//!                                   Done ◀─ ended, broken ─ Streaming ◀─ first chunk ─ Accepted(D)
//!                           Held(nothing) ◀─ cut: another decode engine goes on ──┴──────────┘
//! Accepted(D) ─ failed before it said anything ─▶ Held(lent): some engines admit a request and tell of it only then
//! any state but Done ─ client gone, dropped ─▶ Done
//! ```
//!
//! A debt is armed by what an engine may be doing for us and settled by whatever ends the request:
//!
//! | state | owed |
//! |---|---|
//! | Prefilling(P) | abort to P; a handle that still arrives is released |
//! | Held(lent by P) | release to P |
//! | Decoding(D) | abort to D and release to P: D may not have admitted the request yet |
//! | Accepted(D), Streaming(D) | abort to D, which settles with P; if D itself broke, release to P too |
//!
//! Invariants:
//! - Exactly one [`Step::ended`] is `Some` in the life of an exchange, and nothing is owed after it, except
//!   the release of a handle that an abandoned prefill still delivers.
//! - Each debt is settled at most once.
//! - Every event is allowed in every state; one that does not fit is ignored and says so.
//!
//! The table of every state and event is a golden file, `connector/tests/golden/exchange.txt`.

mod timeline;

pub use timeline::{Span, Timeline};

use crate::{Handle, Time};

/// Prefill attempts of one request that may have been abandoned while their reply could still come.
pub const ABANDONED_MAX: usize = 16;

/// One try of one leg; the shell numbers them and knows which engine each number means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u16);

/// What a prefill engine keeps for us. `handle` is `None` from engines that give none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lent {
    /// The attempt whose engine lends.
    pub by: Attempt,
    /// The lease's name.
    pub handle: Option<Handle>,
}

/// Where an exchange stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// No engine works on the request.
    Choosing,
    /// A prefill engine has the request.
    Prefilling(Attempt),
    /// Ready for a decode engine, with the handoff or with none (the decode engine computes everything).
    Held(Option<Lent>),
    /// A decode engine has the request and has not said whether it takes it.
    Decoding(Attempt, Option<Lent>),
    /// A decode engine took the request; no byte of the answer has come yet.
    Accepted(Attempt, Option<Lent>),
    /// The answer is being passed on.
    Streaming(Attempt, Option<Lent>),
    /// Over.
    Done(Outcome),
}

/// The part of a request's life, as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Before a prefill engine was asked.
    Queue,
    /// While a prefill engine works.
    Prefill,
    /// Between the prefill engine's reply and a decode engine.
    Gap,
    /// While a decode engine works, before the first byte of the answer.
    DecodePreFirst,
    /// While the answer is passed on.
    DecodeStream,
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The whole answer was passed on.
    Completed,
    /// A prefill engine refused the request itself; another would too.
    PrefillRefused,
    /// The router did not let it in: its queue was full, or the wait too long.
    NotAdmitted,
    /// A leg had no engine that could be asked: none is known, or all are drained or out.
    NoEngine,
    /// No prefill engine that was asked did it, and computing it elsewhere is not configured.
    PrefillExhausted,
    /// A decode engine refused the request itself; another would too.
    DecodeRefused,
    /// No decode engine could be had.
    DecodeExhausted,
    /// The decode engine ended in the middle of the answer.
    StreamBroken,
    /// The client left.
    ClientGone(Phase),
    /// The router gave the request up: shutdown, or a defect of its own.
    Dropped(Phase),
}

/// How a leg failed, which says what the engine may still be doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The engine never saw the request.
    NotReached,
    /// The engine answered that it cannot; it keeps nothing.
    Answered,
    /// Silence or a broken connection; the engine may still be working.
    Unknown,
    /// A prefill reply that cannot be handed on, with its handle if that much could be read.
    Unusable(Option<Handle>),
}

/// What can happen to an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The router does not let it in: there is no room, now or in time.
    NotAdmitted,
    /// A leg that it needs has no engine that could be asked, whatever the wait.
    NoEngine,
    /// A prefill engine is being asked.
    PrefillSent(Attempt),
    /// It lends its blocks.
    PrefillLent(Attempt, Option<Handle>),
    /// It answered and lends nothing; the decode engine computes everything.
    PrefillEmpty(Attempt),
    /// It refused the request itself.
    PrefillRefused(Attempt),
    /// It failed.
    PrefillFailed(Attempt, Failure),
    /// No prefill engine is asked (any more).
    PrefillSkipped,
    /// A decode engine is being asked.
    DecodeSent(Attempt),
    /// It took the request: the head of a good answer is here.
    DecodeAccepted(Attempt),
    /// It refused the request itself.
    DecodeRefused(Attempt),
    /// The prefill whose handoff is held, or was handed on, has ended as it should: it lent before that.
    PrefillEnded(Attempt),
    /// It failed before it took the request.
    DecodeFailed(Attempt, Failure),
    /// The first byte of the answer.
    FirstChunk(Attempt),
    /// The answer is complete.
    StreamEnded(Attempt),
    /// The decode engine died, or fell silent, in the middle of the answer.
    StreamBroken(Attempt),
    /// The same, and another decode engine is to compute the rest, and what it needs for that, alone.
    StreamCut(Attempt),
    /// No decode engine can use the handoff: it goes back, and the prompt is computed anew.
    HandoffSpent,
    /// No engine is left to try, or the budget is spent.
    GaveUp,
    /// The same, for a reason that the shell knows: what a release says.
    GaveUpFor(Cause),
    /// The client closed its connection.
    ClientGone,
    /// The router's context of this request went away.
    Dropped,
}

/// Why a lease is given up; the `reason` of `POST /kv/release` and a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The client left.
    ClientGone,
    /// A decode engine refused the request itself.
    DecodeRefused,
    /// No decode engine could be had.
    DecodeUnreachable,
    /// Decode engines were asked and failed the request, and none is left.
    DecodeFailed,
    /// The decode engines that are left had no room for as long as the request could wait.
    DecodeBusy,
    /// The request has taken longer than it may.
    OutOfTime,
    /// The decode engine ended in the middle of the answer.
    DecodeBroken,
    /// The handoff could not be handed on.
    Unusable,
    /// The reply came after the router had given up.
    Late,
    /// The router gave the request up.
    RouterShutdown,
}

/// One debt that the shell now pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// Stop the prefill. Its connection is read on: a reply on the wire is the only copy of the handle.
    AbortPrefill(Attempt),
    /// Give the lease back.
    ReleasePrefill(Lent, Cause),
    /// Stop the decode.
    AbortDecode(Attempt),
}

/// The outcome of one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Debts to pay now, each exactly once.
    pub settle: Vec<Settlement>,
    /// Set exactly once per exchange.
    pub ended: Option<Outcome>,
    /// Whether the event meant anything here.
    pub fit: Fit,
}

/// Whether an event meant anything in the state it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It moved the exchange, or was a late reply that is being settled.
    Applied,
    /// It was late, repeated, or about another attempt.
    Ignored,
}

/// One request's exchange. Whoever owns it owes what [`Exchange::owed`] says; its end is an event like any
/// other, so the owner's `Drop` applies [`Event::Dropped`] and pays.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Exchange {
    state: State,
    /// Prefills that were aborted and whose reply may still bring a handle.
    abandoned: Vec<Attempt>,
    timeline: Timeline,
}

impl Default for Exchange {
    fn default() -> Self {
        Self::new()
    }
}

impl Exchange {
    /// A request for which nothing has been done yet.
    #[must_use]
    pub fn new() -> Self {
        Self { state: State::Choosing, abandoned: Vec::new(), timeline: Timeline::default() }
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When each phase began.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The prefill that has just lent computes on: its span ends with [`Event::PrefillEnded`].
    pub fn computes_on(&mut self) {
        self.timeline.computes_on = true;
    }

    /// How it ended, once it has.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// What would have to be settled if the request ended now, for `cause`.
    #[must_use]
    pub fn owed(&self, cause: Cause) -> Vec<Settlement> {
        let release = |lent: Option<Lent>| lent.map(|lent| Settlement::ReleasePrefill(lent, cause));
        match self.state {
            State::Choosing | State::Done(_) => Vec::new(),
            State::Prefilling(on) => vec![Settlement::AbortPrefill(on)],
            State::Held(lent) => release(lent).into_iter().collect(),
            State::Decoding(on, lent) => {
                std::iter::once(Settlement::AbortDecode(on)).chain(release(lent)).collect()
            }
            State::Accepted(on, _) | State::Streaming(on, _) => vec![Settlement::AbortDecode(on)],
        }
    }

    /// Moves the exchange by one event and says what its owner must pay now.
    pub fn apply(&mut self, event: Event, now: Time) -> Step {
        let step = self.transition(event);
        self.stamp(event, &step, now);
        step
    }

    fn transition(&mut self, event: Event) -> Step {
        use Event as E;
        use State as S;
        match (self.state, event) {
            (S::Choosing, E::PrefillSent(to)) if !self.abandoned.contains(&to) => self.go(S::Prefilling(to)),
            (S::Choosing, E::PrefillSkipped) => self.go(S::Held(None)),
            (S::Choosing, E::NotAdmitted) => self.end(Outcome::NotAdmitted, Cause::DecodeUnreachable),
            (S::Choosing, E::NoEngine) => self.end(Outcome::NoEngine, Cause::DecodeUnreachable),
            (S::Choosing | S::Prefilling(_), E::GaveUp | E::GaveUpFor(_)) => {
                self.end(Outcome::PrefillExhausted, Cause::DecodeUnreachable)
            }

            (S::Prefilling(on), E::PrefillLent(by, handle)) if on == by => {
                self.go(S::Held(Some(Lent { by, handle })))
            }
            (S::Prefilling(on), E::PrefillEmpty(by)) if on == by => self.go(S::Held(None)),
            (S::Prefilling(on), E::PrefillRefused(by)) if on == by => {
                self.state = S::Done(Outcome::PrefillRefused);
                Step { ended: Some(Outcome::PrefillRefused), ..applied(Vec::new()) }
            }
            (S::Prefilling(on), E::PrefillFailed(by, failure)) if on == by => {
                self.state = S::Choosing;
                self.prefill_failed(by, failure)
            }

            (S::Held(lent), E::DecodeSent(to)) => self.go(S::Decoding(to, lent)),
            (S::Held(Some(lent)), E::HandoffSpent) => {
                self.state = S::Choosing;
                applied(vec![Settlement::ReleasePrefill(lent, Cause::Unusable)])
            }
            (S::Held(_) | S::Decoding(..), E::GaveUp) => {
                self.end(Outcome::DecodeExhausted, Cause::DecodeUnreachable)
            }
            (S::Held(_) | S::Decoding(..), E::GaveUpFor(cause)) => self.end(Outcome::DecodeExhausted, cause),

            (S::Decoding(on, lent), E::DecodeAccepted(by)) if on == by => self.go(S::Accepted(on, lent)),
            (S::Decoding(on, lent) | S::Accepted(on, lent), E::DecodeRefused(by)) if on == by => {
                self.state = S::Held(lent);
                self.end(Outcome::DecodeRefused, Cause::DecodeRefused)
            }
            // Also one that took it and failed before it said anything: some tell of it only then.
            (S::Decoding(on, lent) | S::Accepted(on, lent), E::DecodeFailed(by, failure)) if on == by => {
                self.state = S::Held(lent);
                applied(match failure {
                    Failure::Unknown => vec![Settlement::AbortDecode(by)],
                    Failure::NotReached | Failure::Answered | Failure::Unusable(_) => Vec::new(),
                })
            }

            (
                S::Held(Some(lent))
                | S::Decoding(_, Some(lent))
                | S::Accepted(_, Some(lent))
                | S::Streaming(_, Some(lent)),
                E::PrefillEnded(by),
            ) if lent.by == by => applied(Vec::new()),

            (S::Accepted(on, lent), E::FirstChunk(by)) if on == by => self.go(S::Streaming(on, lent)),
            (S::Accepted(on, _) | S::Streaming(on, _), E::StreamEnded(by)) if on == by => {
                self.state = S::Done(Outcome::Completed);
                Step { ended: Some(Outcome::Completed), ..applied(Vec::new()) }
            }
            (S::Accepted(on, lent) | S::Streaming(on, lent), E::StreamBroken(by)) if on == by => {
                // The decode engine can no longer settle with the prefill engine: as before it was admitted.
                self.state = S::Decoding(on, lent);
                self.end(Outcome::StreamBroken, Cause::DecodeBroken)
            }
            (S::Accepted(on, lent) | S::Streaming(on, lent), E::StreamCut(by)) if on == by => {
                // As if the request ended for this engine; the rest needs nothing of the first prefill.
                self.state = S::Decoding(on, lent);
                let settle = self.owed(Cause::DecodeBroken);
                self.state = S::Held(None);
                applied(settle)
            }
            (S::Accepted(on, lent) | S::Streaming(on, lent), E::GaveUp) => {
                self.state = S::Decoding(on, lent);
                self.end(Outcome::StreamBroken, Cause::DecodeBroken)
            }
            (S::Accepted(on, lent) | S::Streaming(on, lent), E::GaveUpFor(cause)) => {
                self.state = S::Decoding(on, lent);
                self.end(Outcome::StreamBroken, cause)
            }

            (S::Done(_), E::ClientGone | E::Dropped) => ignored(),
            (_, E::ClientGone) => {
                let phase = self.phase().expect("only a live exchange gets here");
                self.end(Outcome::ClientGone(phase), Cause::ClientGone)
            }
            (_, E::Dropped) => {
                let phase = self.phase().expect("only a live exchange gets here");
                self.end(Outcome::Dropped(phase), Cause::RouterShutdown)
            }

            // A reply of a prefill that was given up: the handle it brings goes back, whatever else goes on.
            (_, E::PrefillLent(by, handle)) => self.late(by, Some(handle)),
            (_, E::PrefillFailed(by, Failure::Unusable(handle))) => self.late(by, Some(handle)),
            (_, E::PrefillEmpty(by) | E::PrefillRefused(by) | E::PrefillFailed(by, _)) => self.late(by, None),

            (
                _,
                E::NotAdmitted
                | E::NoEngine
                | E::PrefillEnded(_)
                | E::PrefillSent(_)
                | E::PrefillSkipped
                | E::DecodeSent(_)
                | E::DecodeAccepted(_)
                | E::DecodeRefused(_)
                | E::DecodeFailed(..)
                | E::FirstChunk(_)
                | E::StreamEnded(_)
                | E::StreamBroken(_)
                | E::StreamCut(_)
                | E::HandoffSpent
                | E::GaveUp
                | E::GaveUpFor(_),
            ) => ignored(),
        }
    }

    /// The part of its life it is in; `None` once it is over.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        match self.state {
            State::Choosing => Some(Phase::Queue),
            State::Prefilling(_) => Some(Phase::Prefill),
            State::Held(_) => Some(Phase::Gap),
            State::Decoding(..) | State::Accepted(..) => Some(Phase::DecodePreFirst),
            State::Streaming(..) => Some(Phase::DecodeStream),
            State::Done(_) => None,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        applied(Vec::new())
    }

    fn end(&mut self, outcome: Outcome, cause: Cause) -> Step {
        let settle = self.owed(cause);
        for debt in &settle {
            if let Settlement::AbortPrefill(on) = debt {
                self.abandon(*on);
            }
        }
        self.state = State::Done(outcome);
        Step { ended: Some(outcome), ..applied(settle) }
    }

    fn prefill_failed(&mut self, by: Attempt, failure: Failure) -> Step {
        applied(match failure {
            Failure::NotReached | Failure::Answered => Vec::new(),
            Failure::Unknown => {
                self.abandon(by);
                vec![Settlement::AbortPrefill(by)]
            }
            Failure::Unusable(handle) => {
                vec![Settlement::ReleasePrefill(Lent { by, handle }, Cause::Unusable)]
            }
        })
    }

    fn abandon(&mut self, attempt: Attempt) {
        if self.abandoned.len() == ABANDONED_MAX {
            self.abandoned.remove(0);
        }
        self.abandoned.push(attempt);
    }

    fn late(&mut self, by: Attempt, lent: Option<Option<Handle>>) -> Step {
        let Some(at) = self.abandoned.iter().position(|&a| a == by) else {
            return ignored();
        };
        self.abandoned.remove(at);
        let release = |handle| Settlement::ReleasePrefill(Lent { by, handle }, Cause::Late);
        applied(lent.map(release).into_iter().collect())
    }

    fn stamp(&mut self, event: Event, step: &Step, now: Time) {
        if step.fit == Fit::Ignored {
            return;
        }
        let line = &mut self.timeline;
        match event {
            Event::PrefillSent(_) => drop(line.prefill_sent.get_or_insert(now)),
            Event::PrefillLent(..) | Event::PrefillEmpty(_) => drop(line.prefilled.get_or_insert(now)),
            Event::PrefillEnded(_) => line.prefill_ended = Some(now),
            Event::DecodeSent(_) => drop(line.decode_sent.get_or_insert(now)),
            Event::DecodeAccepted(_) => drop(line.accepted.get_or_insert(now)),
            Event::FirstChunk(_) => drop(line.first_chunk.get_or_insert(now)),
            Event::NotAdmitted
            | Event::NoEngine
            | Event::PrefillSkipped
            | Event::PrefillRefused(_)
            | Event::PrefillFailed(..)
            | Event::DecodeRefused(_)
            | Event::DecodeFailed(..)
            | Event::StreamEnded(_)
            | Event::StreamBroken(_)
            | Event::StreamCut(_)
            | Event::HandoffSpent
            | Event::GaveUp
            | Event::GaveUpFor(_)
            | Event::ClientGone
            | Event::Dropped => {}
        }
        if step.ended.is_some() {
            line.ended = Some(now);
        }
    }
}

fn applied(settle: Vec<Settlement>) -> Step {
    Step { settle, ended: None, fit: Fit::Applied }
}

fn ignored() -> Step {
    Step { settle: Vec::new(), ended: None, fit: Fit::Ignored }
}

impl Phase {
    /// Every phase, in order.
    pub const ALL: [Self; 5] =
        [Self::Queue, Self::Prefill, Self::Gap, Self::DecodePreFirst, Self::DecodeStream];

    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Prefill => "prefill",
            Self::Gap => "gap",
            Self::DecodePreFirst => "decode_pre_first",
            Self::DecodeStream => "decode_stream",
        }
    }
}

impl Outcome {
    /// The metric label, without the phase.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::NotAdmitted => "not_admitted",
            Self::NoEngine => "no_engine",
            Self::PrefillRefused => "prefill_refused",
            Self::PrefillExhausted => "prefill_exhausted",
            Self::DecodeRefused => "decode_refused",
            Self::DecodeExhausted => "decode_exhausted",
            Self::StreamBroken => "stream_broken",
            Self::ClientGone(_) => "client_gone",
            Self::Dropped(_) => "dropped",
        }
    }
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 10] = [
        Self::ClientGone,
        Self::DecodeRefused,
        Self::DecodeUnreachable,
        Self::DecodeFailed,
        Self::DecodeBusy,
        Self::OutOfTime,
        Self::DecodeBroken,
        Self::Unusable,
        Self::Late,
        Self::RouterShutdown,
    ];

    /// The `reason` of a release, and the metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::ClientGone => "client_gone",
            Self::DecodeRefused => "decode_refused",
            Self::DecodeUnreachable => "decode_unreachable",
            Self::DecodeFailed => "decode_failed",
            Self::DecodeBusy => "decode_busy",
            Self::OutOfTime => "out_of_time",
            Self::DecodeBroken => "decode_broken",
            Self::Unusable => "unusable_handoff",
            Self::Late => "late_reply",
            Self::RouterShutdown => "router_shutdown",
        }
    }
}
