//! The exchange: a router's side of one request, and the settlements that are pending in each state.
//!
//! ```text
//! Choosing ─ not admitted, no engine ─▶ Done
//! Choosing ─ prefill sent ─▶ Prefilling(P) ─ leased ─▶ ReadyToDecode(lease) ─ decode sent ─▶ Decoding(D)
//!    │ ▲                        │ refused ─▶ Done         ▲ │                                  │ │ │
//!    │ └── failed ───────────────┘                        │ └─ exhausted ─▶ Done               │ │ └ refused ─▶ Done
//!    ├─ prefill skipped ─▶ ReadyToDecode(none)            └── failed: same lease ──────────────┘ │
//!    └◀─ handoff unusable: released, recomputed ── ReadyToDecode(lease)                          │
//!                                           Done ◀─ ended, broken ─ Streaming ◀─ first chunk ─ Accepted(D)
//!        ReadyToDecode(none) ◀─ cut: another decode engine continues ──┴─────────────────────────┘
//! Accepted(D) ─ failed before the first chunk ─▶ ReadyToDecode(lease): some engines report a failure only then
//! Decoding(D), Accepted(D), without a prefill ─ declined ─▶ Choosing: D has cached too little of the prompt
//! any state but Done ─ client gone, dropped ─▶ Done
//!
//! Both legs at once, for protocols whose decode engine needs no reply of the prefill engine:
//! Prefilling(P) ─ decode sent ─▶ Decoding(D, P computes) ─ P answered ─▶ Decoding(D), then as above
//!    Choosing ◀── P or D failed before the first chunk: the other leg is aborted ──┘
//! ```
//!
//! A settlement is pending while an engine may work or keep blocks for the request. The end of the request executes it:
//!
//! | state | pending |
//! |---|---|
//! | Prefilling(P) | abort to P; a handle that still arrives is released |
//! | ReadyToDecode(lease of P) | release to P |
//! | Decoding(D) | abort to D and release to P: D may not have admitted the request yet |
//! | Accepted(D), Streaming(D) | abort to D, which settles with P; if D itself broke, release to P too |
//! | the last three while P computes | abort to D and abort to P |
//!
//! Invariants:
//! - Exactly one [`Step::ended`] is `Some` in the life of an exchange. After it nothing is pending, with two exceptions:
//!   the release of a handle that an aborted prefill still delivers, and the abort of a prefill that falls silent after
//!   its pair's response is complete.
//! - Each settlement is returned at most once.
//! - Every event is allowed in every state. An event that does not fit returns [`EventEffect::Ignored`].
//!
//! The table of every state and event is a golden file, `connector/tests/golden/exchange.txt`.

mod event;
mod timeline;

pub use event::{Event, Failure, Outcome, Phase, SettlementCause};
pub use timeline::{Span, Timeline};

use crate::{Handle, Time};

/// Aborted prefill attempts of one request whose reply can still arrive.
pub const ABORTED_PREFILLS_MAX: usize = 16;

/// One try of one leg. The owner numbers them and maps each number to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u16);

/// The lease of a prefill engine. `handle` is `None` if the engine gives none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefillLease {
    /// The attempt whose engine holds the lease.
    pub attempt: Attempt,
    /// The handle of the lease.
    pub handle: Option<Handle>,
}

/// The prefill half of a request whose decode engine has the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefillHalf {
    /// It holds nothing.
    Ended,
    /// It holds blocks under a lease.
    Leased(PrefillLease),
    /// Both legs were sent at once, and the prefill engine has not answered yet.
    Computing(Attempt),
}

impl From<Option<PrefillLease>> for PrefillHalf {
    fn from(lease: Option<PrefillLease>) -> Self {
        lease.map_or(Self::Ended, Self::Leased)
    }
}

impl PrefillHalf {
    /// The lease, if any.
    #[must_use]
    pub fn lease(self) -> Option<PrefillLease> {
        match self {
            Self::Leased(lease) => Some(lease),
            Self::Ended | Self::Computing(_) => None,
        }
    }

    fn is_computing(self, attempt: Attempt) -> bool {
        self == Self::Computing(attempt)
    }
}

/// State of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// No engine works on the request.
    #[default]
    Choosing,
    /// A prefill engine has the request.
    Prefilling(Attempt),
    /// Ready for a decode engine. Without a lease the decode engine computes everything.
    ReadyToDecode(Option<PrefillLease>),
    /// A decode engine has the request and has not accepted it yet.
    Decoding(Attempt, PrefillHalf),
    /// A decode engine accepted the request; no byte of the response has arrived yet.
    Accepted(Attempt, PrefillHalf),
    /// The response is forwarded to the client.
    Streaming(Attempt, PrefillHalf),
    /// Ended.
    Done(Outcome),
}

/// One command to an engine that the owner of the exchange executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// Abort the prefill. The owner still reads its reply, which may hold the only copy of the handle.
    AbortPrefill(Attempt),
    /// Release the lease.
    ReleasePrefill(PrefillLease, SettlementCause),
    /// Abort the decode.
    AbortDecode(Attempt),
}

/// The outcome of one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Settlements to execute now, each exactly once.
    pub settlements: Vec<Settlement>,
    /// Set exactly once per exchange.
    pub ended: Option<Outcome>,
    /// Whether the event had an effect.
    pub effect: EventEffect,
}

/// Whether an event had an effect in the current state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventEffect {
    /// The event moved the exchange, or was a late reply that is settled now.
    Applied,
    /// The event was late, repeated, or of another attempt.
    Ignored,
}

/// The exchange of one request. [`Exchange::pending_settlements`] returns what its owner must execute at its end. The
/// owner's `Drop` applies [`Event::Dropped`] and executes the settlements of that step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Exchange {
    state: State,
    /// Prefills that were aborted and whose reply may still bring a handle.
    aborted_prefills: Vec<Attempt>,
    /// The prefill of a completed pair, if it has not answered yet.
    unanswered: Option<Attempt>,
    timeline: Timeline,
}

impl Exchange {
    /// The exchange of a new request.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When each phase began.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Records that the prefill still computes after its early handoff. Its span ends with [`Event::PrefillEnded`].
    pub fn computes_on(&mut self) {
        self.timeline.computes_on = true;
    }

    /// The outcome, once the exchange has ended.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        if let State::Done(outcome) = self.state { Some(outcome) } else { None }
    }

    /// The settlements that an end of the request would return now, for `cause`.
    #[must_use]
    pub fn pending_settlements(&self, cause: SettlementCause) -> Vec<Settlement> {
        let release =
            |lease: Option<PrefillLease>| lease.map(|lease| Settlement::ReleasePrefill(lease, cause));
        match self.state {
            State::Choosing | State::Done(_) => Vec::new(),
            State::Prefilling(on) => vec![Settlement::AbortPrefill(on)],
            State::ReadyToDecode(lease) => release(lease).into_iter().collect(),
            State::Decoding(on, prefill) => {
                std::iter::once(Settlement::AbortDecode(on)).chain(end_prefill(prefill, cause)).collect()
            }
            State::Accepted(on, prefill) | State::Streaming(on, prefill) => {
                let computes = prefill.lease().is_none();
                let prefill = end_prefill(prefill, cause).filter(|_| computes);
                std::iter::once(Settlement::AbortDecode(on)).chain(prefill).collect()
            }
        }
    }

    /// Applies one event and returns the settlements that the owner must execute now.
    pub fn apply(&mut self, event: Event, now: Time) -> Step {
        let step = self.transition(event);
        self.record_time(event, &step, now);
        step
    }

    fn transition(&mut self, event: Event) -> Step {
        use Event as E;
        use PrefillHalf as P;
        use State as S;
        match (self.state, event) {
            // Also for the next pair, after the decode engine of an answered prefill failed.
            (S::Choosing | S::ReadyToDecode(None), E::PrefillSent(to))
                if !self.aborted_prefills.contains(&to) =>
            {
                self.enter(S::Prefilling(to))
            }
            // Both legs at once.
            (S::Prefilling(on), E::DecodeSent(to)) => self.enter(S::Decoding(to, P::Computing(on))),
            (S::Choosing, E::PrefillSkipped) => self.enter(S::ReadyToDecode(None)),
            // Also after a decode engine that got the request before any prefill engine and failed.
            (S::Choosing | S::ReadyToDecode(None), E::NotAdmitted) => {
                self.end(Outcome::NotAdmitted, SettlementCause::DecodeUnreachable)
            }
            (S::Choosing | S::ReadyToDecode(None), E::NoEngine) => {
                self.end(Outcome::NoEngine, SettlementCause::DecodeUnreachable)
            }
            // Every pair failed, the last one at its decode engine.
            (S::Choosing, E::ExhaustedFor(cause @ SettlementCause::DecodeFailed)) => {
                self.end(Outcome::DecodeExhausted, cause)
            }
            (S::Choosing | S::Prefilling(_), E::Exhausted | E::ExhaustedFor(_)) => {
                self.end(Outcome::PrefillExhausted, SettlementCause::DecodeUnreachable)
            }

            (S::Prefilling(on), E::PrefillLeased(by, handle)) if on == by => {
                self.enter(S::ReadyToDecode(Some(PrefillLease { attempt: by, handle })))
            }
            (S::Prefilling(on), E::PrefillEmpty(by)) if on == by => self.enter(S::ReadyToDecode(None)),
            (S::Prefilling(on), E::PrefillRefused(by)) if on == by => {
                self.state = S::Done(Outcome::PrefillRefused);
                Step { ended: Some(Outcome::PrefillRefused), ..applied(Vec::new()) }
            }
            (S::Prefilling(on), E::PrefillFailed(by, failure)) if on == by => {
                self.state = S::Choosing;
                self.prefill_failed(by, failure)
            }

            (S::ReadyToDecode(lease), E::DecodeSent(to)) => self.enter(S::Decoding(to, lease.into())),
            (S::ReadyToDecode(Some(lease)), E::HandoffUnusable) => {
                self.state = S::Choosing;
                applied(vec![Settlement::ReleasePrefill(lease, SettlementCause::Unusable)])
            }
            (S::ReadyToDecode(_) | S::Decoding(..), E::Exhausted) => {
                self.end(Outcome::DecodeExhausted, SettlementCause::DecodeUnreachable)
            }
            (S::ReadyToDecode(_) | S::Decoding(..), E::ExhaustedFor(cause)) => {
                self.end(Outcome::DecodeExhausted, cause)
            }

            (S::Decoding(on, prefill), E::DecodeAccepted(by)) if on == by => {
                self.enter(S::Accepted(on, prefill))
            }
            (S::Decoding(on, prefill) | S::Accepted(on, prefill), E::DecodeRefused(by)) if on == by => {
                // The decode engine has ended, so the prefill half is all that is left.
                self.state = match prefill {
                    P::Computing(prefill) => S::Prefilling(prefill),
                    P::Ended | P::Leased(_) => S::ReadyToDecode(prefill.lease()),
                };
                self.end(Outcome::DecodeRefused, SettlementCause::DecodeRefused)
            }
            (S::Decoding(on, P::Ended) | S::Accepted(on, P::Ended), E::DecodeDeclined(by)) if on == by => {
                self.enter(S::Choosing)
            }
            // Also after acceptance: some engines report a failure only in the response.
            (S::Decoding(on, prefill) | S::Accepted(on, prefill), E::DecodeFailed(by, failure))
                if on == by =>
            {
                let mut settlements = match failure {
                    Failure::Unknown => vec![Settlement::AbortDecode(by)],
                    Failure::NotReached | Failure::Answered | Failure::Unusable(_) => Vec::new(),
                };
                self.state = S::ReadyToDecode(prefill.lease());
                if let P::Computing(prefill) = prefill {
                    // The next pair is a new one.
                    self.state = S::Choosing;
                    self.track_aborted_prefill(prefill);
                    settlements.push(Settlement::AbortPrefill(prefill));
                }
                applied(settlements)
            }

            // Answers of the prefill half of a pair.
            (S::Decoding(on, half), E::PrefillLeased(..) | E::PrefillEmpty(_)) if answers(half, event) => {
                self.enter(S::Decoding(on, answered(event)))
            }
            (S::Accepted(on, half), E::PrefillLeased(..) | E::PrefillEmpty(_)) if answers(half, event) => {
                self.enter(S::Accepted(on, answered(event)))
            }
            (S::Streaming(on, half), E::PrefillLeased(..) | E::PrefillEmpty(_)) if answers(half, event) => {
                self.enter(S::Streaming(on, answered(event)))
            }
            (S::Decoding(on, half) | S::Accepted(on, half), E::PrefillRefused(by))
                if half.is_computing(by) =>
            {
                self.state = S::Decoding(on, P::Ended);
                self.end(Outcome::PrefillRefused, SettlementCause::DecodeUnreachable)
            }
            (S::Decoding(on, half) | S::Accepted(on, half), E::PrefillFailed(by, failure))
                if half.is_computing(by) =>
            {
                // The blocks that the decode engine waits for do not arrive.
                self.state = S::Choosing;
                let mut step = self.prefill_failed(by, failure);
                step.settlements.insert(0, Settlement::AbortDecode(on));
                step
            }
            // The response has begun, so the decode engine has all blocks.
            (S::Streaming(on, half), E::PrefillRefused(by)) if half.is_computing(by) => {
                self.enter(S::Streaming(on, P::Ended))
            }
            (S::Streaming(on, half), E::PrefillFailed(by, failure)) if half.is_computing(by) => {
                self.state = S::Streaming(on, P::Ended);
                self.prefill_failed(by, failure)
            }

            (
                S::ReadyToDecode(Some(lease))
                | S::Decoding(_, P::Leased(lease))
                | S::Accepted(_, P::Leased(lease))
                | S::Streaming(_, P::Leased(lease)),
                E::PrefillEnded(by),
            ) if lease.attempt == by => applied(Vec::new()),

            (S::Accepted(on, lease), E::FirstChunk(by)) if on == by => self.enter(S::Streaming(on, lease)),
            (S::Accepted(on, half) | S::Streaming(on, half), E::StreamEnded(by)) if on == by => {
                if let P::Computing(prefill) = half {
                    self.unanswered = Some(prefill);
                }
                self.state = S::Done(Outcome::Completed);
                Step { ended: Some(Outcome::Completed), ..applied(Vec::new()) }
            }
            (S::Accepted(on, lease) | S::Streaming(on, lease), E::StreamBroken(by)) if on == by => {
                // The decode engine can no longer settle with the prefill engine: as before its acceptance.
                self.state = S::Decoding(on, lease);
                self.end(Outcome::StreamBroken, SettlementCause::DecodeBroken)
            }
            (S::Accepted(on, lease) | S::Streaming(on, lease), E::StreamCut(by)) if on == by => {
                // As if the request ended for this engine. The continuation does not use the first prefill.
                self.state = S::Decoding(on, lease);
                let settlements = self.pending_settlements(SettlementCause::DecodeBroken);
                self.track_aborts(&settlements);
                self.state = S::ReadyToDecode(None);
                applied(settlements)
            }
            (S::Accepted(on, lease) | S::Streaming(on, lease), E::Exhausted) => {
                self.state = S::Decoding(on, lease);
                self.end(Outcome::StreamBroken, SettlementCause::DecodeBroken)
            }
            (S::Accepted(on, lease) | S::Streaming(on, lease), E::ExhaustedFor(cause)) => {
                self.state = S::Decoding(on, lease);
                self.end(Outcome::StreamBroken, cause)
            }

            (S::Done(_), E::ClientGone | E::Dropped) => ignored(),
            (_, E::ClientGone) => {
                let phase = self.phase().expect("only a live exchange gets here");
                self.end(Outcome::ClientGone(phase), SettlementCause::ClientGone)
            }
            (_, E::Dropped) => {
                let phase = self.phase().expect("only a live exchange gets here");
                self.end(Outcome::Dropped(phase), SettlementCause::RouterShutdown)
            }

            (S::Done(_), E::PrefillLeased(by, _) | E::PrefillEmpty(by) | E::PrefillRefused(by))
                if self.unanswered == Some(by) =>
            {
                // The decode engine has read all blocks.
                self.unanswered = None;
                applied(Vec::new())
            }
            (S::Done(_), E::PrefillFailed(by, failure)) if self.unanswered == Some(by) => {
                self.unanswered = None;
                self.prefill_failed(by, failure)
            }

            // A late reply of an aborted prefill: its handle is released, in any state.
            (_, E::PrefillLeased(by, handle)) => self.settle_late_reply(by, Some(handle)),
            (_, E::PrefillFailed(by, Failure::Unusable(handle))) => self.settle_late_reply(by, Some(handle)),
            (_, E::PrefillEmpty(by) | E::PrefillRefused(by) | E::PrefillFailed(by, _)) => {
                self.settle_late_reply(by, None)
            }

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
                | E::DecodeDeclined(_)
                | E::FirstChunk(_)
                | E::StreamEnded(_)
                | E::StreamBroken(_)
                | E::StreamCut(_)
                | E::HandoffUnusable
                | E::Exhausted
                | E::ExhaustedFor(_),
            ) => ignored(),
        }
    }

    /// Current phase; `None` once the exchange has ended.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        match self.state {
            State::Choosing => Some(Phase::Queue),
            State::Prefilling(_)
            | State::Decoding(_, PrefillHalf::Computing(_))
            | State::Accepted(_, PrefillHalf::Computing(_)) => Some(Phase::Prefill),
            State::ReadyToDecode(_) => Some(Phase::Gap),
            State::Decoding(..) | State::Accepted(..) => Some(Phase::DecodePreFirst),
            State::Streaming(..) => Some(Phase::DecodeStream),
            State::Done(_) => None,
        }
    }

    fn enter(&mut self, state: State) -> Step {
        self.state = state;
        applied(Vec::new())
    }

    fn end(&mut self, outcome: Outcome, cause: SettlementCause) -> Step {
        let settlements = self.pending_settlements(cause);
        self.track_aborts(&settlements);
        self.state = State::Done(outcome);
        Step { ended: Some(outcome), ..applied(settlements) }
    }

    fn track_aborts(&mut self, settlements: &[Settlement]) {
        for settlement in settlements {
            if let Settlement::AbortPrefill(on) = settlement {
                self.track_aborted_prefill(*on);
            }
        }
    }

    fn prefill_failed(&mut self, by: Attempt, failure: Failure) -> Step {
        applied(match failure {
            Failure::NotReached | Failure::Answered => Vec::new(),
            Failure::Unknown => {
                self.track_aborted_prefill(by);
                vec![Settlement::AbortPrefill(by)]
            }
            Failure::Unusable(handle) => {
                let lease = PrefillLease { attempt: by, handle };
                vec![Settlement::ReleasePrefill(lease, SettlementCause::Unusable)]
            }
        })
    }

    fn track_aborted_prefill(&mut self, attempt: Attempt) {
        if self.aborted_prefills.len() == ABORTED_PREFILLS_MAX {
            self.aborted_prefills.remove(0);
        }
        self.aborted_prefills.push(attempt);
    }

    fn settle_late_reply(&mut self, by: Attempt, leased: Option<Option<Handle>>) -> Step {
        let Some(at) = self.aborted_prefills.iter().position(|&a| a == by) else {
            return ignored();
        };
        self.aborted_prefills.remove(at);
        let release =
            |handle| Settlement::ReleasePrefill(PrefillLease { attempt: by, handle }, SettlementCause::Late);
        applied(leased.map(release).into_iter().collect())
    }

    fn record_time(&mut self, event: Event, step: &Step, now: Time) {
        if step.effect == EventEffect::Ignored {
            return;
        }
        let line = &mut self.timeline;
        match event {
            Event::PrefillSent(_) => drop(line.prefill_sent.get_or_insert(now)),
            Event::PrefillLeased(..) | Event::PrefillEmpty(_) => drop(line.prefilled.get_or_insert(now)),
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
            | Event::DecodeDeclined(_)
            | Event::StreamEnded(_)
            | Event::StreamBroken(_)
            | Event::StreamCut(_)
            | Event::HandoffUnusable
            | Event::Exhausted
            | Event::ExhaustedFor(_)
            | Event::ClientGone
            | Event::Dropped => {}
        }
        if step.ended.is_some() {
            line.ended = Some(now);
        }
    }
}

/// The settlement that ends the prefill half of a request in decode.
fn end_prefill(half: PrefillHalf, cause: SettlementCause) -> Option<Settlement> {
    match half {
        PrefillHalf::Ended => None,
        PrefillHalf::Leased(lease) => Some(Settlement::ReleasePrefill(lease, cause)),
        PrefillHalf::Computing(on) => Some(Settlement::AbortPrefill(on)),
    }
}

/// Whether a reply is that of the prefill half.
fn answers(half: PrefillHalf, event: Event) -> bool {
    matches!(event, Event::PrefillLeased(by, _) | Event::PrefillEmpty(by) if half.is_computing(by))
}

/// The prefill half after its reply.
fn answered(event: Event) -> PrefillHalf {
    match event {
        Event::PrefillLeased(attempt, handle) => PrefillHalf::Leased(PrefillLease { attempt, handle }),
        _ => PrefillHalf::Ended,
    }
}

fn applied(settlements: Vec<Settlement>) -> Step {
    Step { settlements, ended: None, effect: EventEffect::Applied }
}

fn ignored() -> Step {
    Step { settlements: Vec::new(), ended: None, effect: EventEffect::Ignored }
}
