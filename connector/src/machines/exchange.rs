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
//! any state but Done ─ client gone, dropped ─▶ Done
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
//!
//! Invariants:
//! - Exactly one [`Step::ended`] is `Some` in the life of an exchange. After it nothing is pending, except the release
//!   of a handle that an aborted prefill still delivers.
//! - Each settlement is returned at most once.
//! - Every event is allowed in every state. An event that does not fit returns [`EventEffect::Ignored`].
//!
//! The table of every state and event is a golden file, `connector/tests/golden/exchange.txt`.

mod timeline;

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
    Decoding(Attempt, Option<PrefillLease>),
    /// A decode engine accepted the request; no byte of the response has arrived yet.
    Accepted(Attempt, Option<PrefillLease>),
    /// The response is forwarded to the client.
    Streaming(Attempt, Option<PrefillLease>),
    /// Ended.
    Done(Outcome),
}

crate::labelled! {
    /// The phase of a request, as metrics name it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Phase {
        /// Before the prefill is sent.
        Queue => "queue",
        /// While a prefill engine works.
        Prefill => "prefill",
        /// Between the prefill engine's reply and the decode request.
        Gap => "gap",
        /// While a decode engine works, before the first byte of the response.
        DecodePreFirst => "decode_pre_first",
        /// While the response is forwarded.
        DecodeStream => "decode_stream",
    }
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The complete response was forwarded.
    Completed,
    /// A prefill engine refused the request because of its content; any other engine would too.
    PrefillRefused,
    /// The router did not admit the request: its queue was full, or the wait too long.
    NotAdmitted,
    /// A leg had no usable engine: none is known, or all are drained or ejected.
    NoEngine,
    /// Every prefill attempt failed, and recomputing on the decode engine is not configured.
    PrefillExhausted,
    /// A decode engine refused the request because of its content; any other engine would too.
    DecodeRefused,
    /// No decode engine accepted the request.
    DecodeExhausted,
    /// The decode engine failed in the middle of the response.
    StreamBroken,
    /// The client disconnected.
    ClientGone(Phase),
    /// The router dropped the request: shutdown, or a defect of the router.
    Dropped(Phase),
}

/// How a leg failed, and therefore what the engine may still be doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The engine never received the request.
    NotReached,
    /// The engine responded with an error. It keeps nothing.
    Answered,
    /// Silence or a broken connection. The engine may still be working.
    Unknown,
    /// A prefill reply without a usable handoff, with its handle if that could be read.
    Unusable(Option<Handle>),
}

/// What can happen to an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The router does not admit the request: its queue is full, or the wait too long.
    NotAdmitted,
    /// A leg of the request has no usable engine, and waiting would not help.
    NoEngine,
    /// The prefill is sent to an engine.
    PrefillSent(Attempt),
    /// The prefill engine opened a lease.
    PrefillLeased(Attempt, Option<Handle>),
    /// The prefill engine replied without a lease; the decode engine computes everything.
    PrefillEmpty(Attempt),
    /// The prefill engine refused the request because of its content.
    PrefillRefused(Attempt),
    /// The prefill attempt failed.
    PrefillFailed(Attempt, Failure),
    /// No prefill is sent, or no further one.
    PrefillSkipped,
    /// The request is sent to a decode engine.
    DecodeSent(Attempt),
    /// The decode engine accepted the request: the head of a successful response is here.
    DecodeAccepted(Attempt),
    /// The decode engine refused the request because of its content.
    DecodeRefused(Attempt),
    /// The prefill that opened the current lease before its end has ended normally.
    PrefillEnded(Attempt),
    /// The decode attempt failed before the first byte of the response.
    DecodeFailed(Attempt, Failure),
    /// The first byte of the response.
    FirstChunk(Attempt),
    /// The response is complete.
    StreamEnded(Attempt),
    /// The decode engine died, or fell silent, in the middle of the response.
    StreamBroken(Attempt),
    /// As `StreamBroken`, but another decode engine continues. It recomputes everything it needs.
    StreamCut(Attempt),
    /// No decode engine can use the handoff: the lease is released, and the prompt is recomputed.
    HandoffUnusable,
    /// No engine is left to try, or the retry budget is spent.
    Exhausted,
    /// As `Exhausted`, with the cause that the release carries.
    ExhaustedFor(SettlementCause),
    /// The client closed its connection.
    ClientGone,
    /// The router's context of this request was dropped.
    Dropped,
}

crate::labelled! {
    /// Why a lease is released: the `reason` of `POST /kv/release`, and a metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum SettlementCause {
        /// The client disconnected.
        ClientGone => "client_gone",
        /// A decode engine refused the request because of its content.
        DecodeRefused => "decode_refused",
        /// No decode engine could be reached.
        DecodeUnreachable => "decode_unreachable",
        /// Every decode attempt failed, and no decode engine is left.
        DecodeFailed => "decode_failed",
        /// The remaining decode engines had no capacity for as long as the request could wait.
        DecodeBusy => "decode_busy",
        /// The deadline of the request passed.
        OutOfTime => "out_of_time",
        /// The decode engine failed in the middle of the response.
        DecodeBroken => "decode_broken",
        /// The handoff could not be handed on.
        Unusable => "unusable_handoff",
        /// The reply arrived after the router had aborted the attempt.
        Late => "late_reply",
        /// The router dropped the request.
        RouterShutdown => "router_shutdown",
    }
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
            State::Decoding(on, lease) => {
                std::iter::once(Settlement::AbortDecode(on)).chain(release(lease)).collect()
            }
            State::Accepted(on, _) | State::Streaming(on, _) => vec![Settlement::AbortDecode(on)],
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
        use State as S;
        match (self.state, event) {
            (S::Choosing, E::PrefillSent(to)) if !self.aborted_prefills.contains(&to) => {
                self.enter(S::Prefilling(to))
            }
            (S::Choosing, E::PrefillSkipped) => self.enter(S::ReadyToDecode(None)),
            (S::Choosing, E::NotAdmitted) => {
                self.end(Outcome::NotAdmitted, SettlementCause::DecodeUnreachable)
            }
            (S::Choosing, E::NoEngine) => self.end(Outcome::NoEngine, SettlementCause::DecodeUnreachable),
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

            (S::ReadyToDecode(lease), E::DecodeSent(to)) => self.enter(S::Decoding(to, lease)),
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

            (S::Decoding(on, lease), E::DecodeAccepted(by)) if on == by => self.enter(S::Accepted(on, lease)),
            (S::Decoding(on, lease) | S::Accepted(on, lease), E::DecodeRefused(by)) if on == by => {
                self.state = S::ReadyToDecode(lease);
                self.end(Outcome::DecodeRefused, SettlementCause::DecodeRefused)
            }
            // Also after acceptance: some engines report a failure only in the response.
            (S::Decoding(on, lease) | S::Accepted(on, lease), E::DecodeFailed(by, failure)) if on == by => {
                self.state = S::ReadyToDecode(lease);
                applied(match failure {
                    Failure::Unknown => vec![Settlement::AbortDecode(by)],
                    Failure::NotReached | Failure::Answered | Failure::Unusable(_) => Vec::new(),
                })
            }

            (
                S::ReadyToDecode(Some(lease))
                | S::Decoding(_, Some(lease))
                | S::Accepted(_, Some(lease))
                | S::Streaming(_, Some(lease)),
                E::PrefillEnded(by),
            ) if lease.attempt == by => applied(Vec::new()),

            (S::Accepted(on, lease), E::FirstChunk(by)) if on == by => self.enter(S::Streaming(on, lease)),
            (S::Accepted(on, _) | S::Streaming(on, _), E::StreamEnded(by)) if on == by => {
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
            State::Prefilling(_) => Some(Phase::Prefill),
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
        for settlement in &settlements {
            if let Settlement::AbortPrefill(on) = settlement {
                self.track_aborted_prefill(*on);
            }
        }
        self.state = State::Done(outcome);
        Step { ended: Some(outcome), ..applied(settlements) }
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

fn applied(settlements: Vec<Settlement>) -> Step {
    Step { settlements, ended: None, effect: EventEffect::Applied }
}

fn ignored() -> Step {
    Step { settlements: Vec::new(), ended: None, effect: EventEffect::Ignored }
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
