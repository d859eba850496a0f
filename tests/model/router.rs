//! The router's side of one request: the product's [`Exchange`], and the state of the I/O around it. This is which
//! engines got a leg, and which calls are still open.

use baton_connector::Time;
use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Outcome, Settlement, State};

use crate::bounds::Bounds;
use crate::names::{LeaseName, Renaming};
use crate::state_table::Actor;

/// A prefill engine's response, or its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum PrefillReply {
    Lent(LeaseName),
    /// An early lease. The response's end follows.
    Lending(LeaseName),
    Empty,
    Refused,
    TooFull,
    NotReached,
    Broken,
}

/// A decode engine's response, or its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum DecodeReply {
    Accepted,
    Refused,
    TooFull,
    LoadFailed,
    NotReached,
    Broken,
}

/// How an accepted response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum StreamEnd {
    Complete,
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RouterInput {
    AskPrefill(u8),
    SkipPrefill,
    /// No engine has capacity within the time limit.
    NotAdmitted,
    GiveUp,
    Prefilled(u8, PrefillReply),
    /// The end of a response after an early lease: well, or not.
    PrefillEnds(u8, bool),
    /// The blocks that the decode engine waits for will not be computed.
    ProducerFailed,
    /// The prefill engine that still computes has been silent for too long.
    PrefillSilence,
    AskDecode(u8),
    Decoded(u8, DecodeReply),
    Streamed(u8, StreamEnd),
    /// No decode engine can use the handoff: it is released, and the prompt is recomputed.
    HandoffSpent,
    ClientCancels,
    /// An engine has been silent for too long.
    Silence,
    /// The router crashes, and its connections end.
    Crash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RouterOutput {
    Prefill(u8),
    Decode(u8, Option<LeaseName>),
    AbortPrefill(u8),
    Release(LeaseName),
    AbortDecode(u8),
    /// The router closes an open connection.
    HangUpPrefill(u8),
    HangUpDecode(u8),
}

/// One request at the router.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Router {
    pub exchange: Exchange,
    pub crashed: bool,
    /// A stream that breaks is resumed.
    resume: bool,
    /// 1 when the prompt is recomputed, also for the rest of a stream.
    pub round: u8,
    /// A decode engine could not use the handoff.
    pub spent: bool,
    pub prefill_sent: [bool; 4],
    pub decode_sent: [bool; 4],
    /// Calls without a complete response. Those to prefill engines are read on after the request has ended.
    pub open_prefill: [bool; 4],
    pub open_decode: [bool; 4],
    /// The prefill engine with an early lease whose response has not ended.
    pub computing: Option<u8>,
    /// This prefill will not end well.
    pub failed: bool,
    /// Settlements that were made: aborts of prefill, releases, aborts of decode, by engine.
    settled: [[bool; 4]; 3],
    ends: u8,
}

/// The request's number of an engine: the engine in the lowest bit, and above it the round.
fn prefill(p: u8) -> Attempt {
    Attempt(u16::from(p))
}

fn decode(d: u8) -> Attempt {
    Attempt(DECODES + u16::from(d))
}

/// The first attempt of a decode.
const DECODES: u16 = 4;

impl Router {
    /// Whether any engine has got a leg of this request.
    pub(crate) fn has_begun(&self) -> bool {
        self.prefill_sent.iter().chain(&self.decode_sent).any(|&sent| sent)
            || self.exchange.state() != State::Choosing
    }

    pub(crate) fn is_over(&self) -> bool {
        self.crashed || self.exchange.outcome().is_some()
    }

    /// The lease of the current handoff.
    fn handoff(&self) -> Option<LeaseName> {
        match self.exchange.state() {
            State::ReadyToDecode(lent) => lent.and_then(|lent| lent.handle).map(LeaseName::of),
            State::Decoding(_, half) => half.lease().and_then(|lent| lent.handle).map(LeaseName::of),
            _ => None,
        }
    }

    fn apply(&mut self, event: Event, outputs: &mut Vec<RouterOutput>) -> Result<(), String> {
        // The request does not wait for a prefill whose handoff it has given up.
        let given_up = matches!(event, Event::HandoffUnusable | Event::StreamCut(_));
        let step = self.exchange.apply(event, Time::ZERO);
        let outcome = self.exchange.outcome();
        if given_up || outcome.is_some() {
            self.failed = false;
            if let Some(p) = self.computing.take().filter(|_| outcome != Some(Outcome::Completed)) {
                self.open_prefill[usize::from(p)] = false;
                outputs.push(RouterOutput::HangUpPrefill(p));
            }
        }
        for settlement in step.settlements {
            self.settle(settlement, outputs)?;
        }
        self.ends += u8::from(step.ended.is_some());
        if self.ends > 1 {
            return Err("a request has two outcomes (invariant 6)".into());
        }
        if self.exchange.outcome().is_some() && self.ends == 0 {
            return Err("a request is over without an outcome (invariant 6)".into());
        }
        Ok(())
    }

    fn settle(&mut self, settlement: Settlement, outputs: &mut Vec<RouterOutput>) -> Result<(), String> {
        let (kind, engine, output) = match settlement {
            Settlement::AbortPrefill(Attempt(p)) => (0, p as u8, RouterOutput::AbortPrefill(p as u8)),
            Settlement::ReleasePrefill(lent, _) => {
                let lease = LeaseName::of(lent.handle.expect("our engines give handles"));
                (1, lent.attempt.0 as u8, RouterOutput::Release(lease))
            }
            Settlement::AbortDecode(Attempt(d)) => {
                // Dropping the call cuts its connection. The abort by name must still arrive.
                self.open_decode[usize::from(d - DECODES)] = false;
                (2, (d - DECODES) as u8, RouterOutput::AbortDecode((d - DECODES) as u8))
            }
        };
        if std::mem::replace(&mut self.settled[kind][usize::from(engine)], true) {
            return Err(format!("a settlement is made twice: {settlement:?}"));
        }
        outputs.push(output);
        Ok(())
    }

    fn prefilled(&mut self, p: u8, what: PrefillReply) -> Event {
        self.open_prefill[usize::from(p)] = matches!(what, PrefillReply::Lending(_));
        let by = prefill(p);
        match what {
            PrefillReply::Lent(lease) | PrefillReply::Lending(lease) => {
                Event::PrefillLeased(by, Some(lease.handle()))
            }
            PrefillReply::Empty => Event::PrefillEmpty(by),
            PrefillReply::Refused => Event::PrefillRefused(by),
            PrefillReply::TooFull => Event::PrefillFailed(by, Failure::Answered),
            PrefillReply::NotReached => Event::PrefillFailed(by, Failure::NotReached),
            PrefillReply::Broken => Event::PrefillFailed(by, Failure::Unknown),
        }
    }

    fn decoded(&mut self, d: u8, what: DecodeReply) -> Event {
        self.open_decode[usize::from(d)] &= what == DecodeReply::Accepted;
        self.spent |= what == DecodeReply::LoadFailed;
        let by = decode(d);
        match what {
            DecodeReply::Accepted => Event::DecodeAccepted(by),
            DecodeReply::Refused => Event::DecodeRefused(by),
            DecodeReply::TooFull | DecodeReply::LoadFailed => Event::DecodeFailed(by, Failure::Answered),
            DecodeReply::NotReached => Event::DecodeFailed(by, Failure::NotReached),
            DecodeReply::Broken => Event::DecodeFailed(by, Failure::Unknown),
        }
    }

    /// A prefill has an early lease. Only the request that uses the handoff waits for the prefill's end.
    fn early_lease_opened(&mut self, p: u8, outputs: &mut Vec<RouterOutput>) {
        match self.exchange.state() {
            State::ReadyToDecode(Some(lent)) if lent.attempt == prefill(p) => self.computing = Some(p),
            _ => {
                self.open_prefill[usize::from(p)] = false;
                outputs.push(RouterOutput::HangUpPrefill(p));
            }
        }
    }

    /// The router's reaction to a silent engine.
    fn silence(&mut self) -> Option<Event> {
        match self.exchange.state() {
            State::Prefilling(on) => Some(Event::PrefillFailed(on, Failure::Unknown)),
            // No byte of the response has arrived: another engine gets the same handoff.
            State::Decoding(on, _) | State::Accepted(on, _) => {
                Some(Event::DecodeFailed(on, Failure::Unknown))
            }
            State::Streaming(on, _) => Some(self.broken(on)),
            State::Choosing | State::ReadyToDecode(_) | State::Done(_) => None,
        }
    }

    /// A response broke off. Another engine continues it, once and under a new name, or the request ends.
    fn broken(&mut self, by: Attempt) -> Event {
        if !self.resume || self.round > 0 {
            return Event::StreamBroken(by);
        }
        self.round = 1;
        Event::StreamCut(by)
    }

    fn crash(&mut self, outputs: &mut Vec<RouterOutput>) {
        for p in (0..4).filter(|&p| self.open_prefill[usize::from(p)]) {
            outputs.push(RouterOutput::HangUpPrefill(p));
        }
        for d in (0..4).filter(|&d| self.open_decode[usize::from(d)]) {
            outputs.push(RouterOutput::HangUpDecode(d));
        }
        // The router forgets everything and settles nothing any more.
        let sent = (self.prefill_sent, self.decode_sent);
        *self = Self { crashed: true, prefill_sent: sent.0, decode_sent: sent.1, ..Self::born_empty() };
    }

    fn born_empty() -> Self {
        Self {
            exchange: Exchange::new(),
            crashed: false,
            resume: false,
            round: 0,
            spent: false,
            prefill_sent: [false; 4],
            decode_sent: [false; 4],
            open_prefill: [false; 4],
            open_decode: [false; 4],
            computing: None,
            failed: false,
            settled: [[false; 4]; 3],
            ends: 0,
        }
    }
}

impl Actor for Router {
    type Input = RouterInput;
    type Output = RouterOutput;
    type View = Self;

    fn born(bounds: &Bounds) -> Self {
        Self { resume: bounds.resume, ..Self::born_empty() }
    }

    fn live(&mut self, input: RouterInput, outputs: &mut Vec<RouterOutput>) -> Result<(), String> {
        let event = match input {
            RouterInput::AskPrefill(p) => {
                self.prefill_sent[usize::from(p)] = true;
                self.open_prefill[usize::from(p)] = true;
                outputs.push(RouterOutput::Prefill(p));
                Event::PrefillSent(prefill(p))
            }
            RouterInput::SkipPrefill => Event::PrefillSkipped,
            RouterInput::NotAdmitted => Event::NotAdmitted,
            RouterInput::GiveUp => Event::Exhausted,
            RouterInput::Prefilled(p, what @ PrefillReply::Lending(_)) => {
                let event = self.prefilled(p, what);
                self.apply(event, outputs)?;
                self.early_lease_opened(p, outputs);
                return Ok(());
            }
            RouterInput::Prefilled(p, what) => self.prefilled(p, what),
            RouterInput::PrefillEnds(p, well) => {
                self.open_prefill[usize::from(p)] = false;
                let waited = self.computing.take_if(|computing| *computing == p).is_some();
                if !well {
                    self.failed |= waited;
                    return Ok(());
                }
                Event::PrefillEnded(prefill(p))
            }
            RouterInput::PrefillSilence => {
                let p = self.computing.take().expect("it waits for a prefill");
                self.open_prefill[usize::from(p)] = false;
                self.failed = true;
                outputs.push(RouterOutput::HangUpPrefill(p));
                return Ok(());
            }
            RouterInput::ProducerFailed => {
                (self.failed, self.spent) = (false, true);
                match self.exchange.state() {
                    State::Decoding(on, _) | State::Accepted(on, _) => {
                        Event::DecodeFailed(on, Failure::Unknown)
                    }
                    _ => unreachable!("a decode engine waits for it"),
                }
            }
            RouterInput::AskDecode(d) => {
                self.decode_sent[usize::from(d)] = true;
                self.open_decode[usize::from(d)] = true;
                outputs.push(RouterOutput::Decode(d, self.handoff()));
                Event::DecodeSent(decode(d))
            }
            // The call was dropped, so its response has no receiver.
            RouterInput::Decoded(d, _) | RouterInput::Streamed(d, _) if !self.open_decode[usize::from(d)] => {
                return Ok(());
            }
            RouterInput::Decoded(d, what) => self.decoded(d, what),
            RouterInput::Streamed(d, how) => {
                self.open_decode[usize::from(d)] = false;
                match how {
                    StreamEnd::Complete => {
                        self.apply(Event::FirstChunk(decode(d)), outputs)?;
                        Event::StreamEnded(decode(d))
                    }
                    StreamEnd::Broken => self.broken(decode(d)),
                }
            }
            RouterInput::HandoffSpent => {
                self.round = 1;
                Event::HandoffUnusable
            }
            RouterInput::ClientCancels => Event::ClientGone,
            RouterInput::Silence => self.silence().expect("it waits for an engine"),
            RouterInput::Crash => {
                self.crash(outputs);
                return Ok(());
            }
        };
        self.apply(event, outputs)
    }

    fn view(&self) -> Self {
        self.clone()
    }

    fn renamed(input: RouterInput, by: Renaming) -> RouterInput {
        match input {
            RouterInput::AskPrefill(p) => RouterInput::AskPrefill(by.prefill(p)),
            RouterInput::Prefilled(p, PrefillReply::Lent(lease)) => {
                RouterInput::Prefilled(by.prefill(p), PrefillReply::Lent(lease.renamed(by)))
            }
            RouterInput::Prefilled(p, PrefillReply::Lending(lease)) => {
                RouterInput::Prefilled(by.prefill(p), PrefillReply::Lending(lease.renamed(by)))
            }
            RouterInput::Prefilled(p, what) => RouterInput::Prefilled(by.prefill(p), what),
            RouterInput::PrefillEnds(p, well) => RouterInput::PrefillEnds(by.prefill(p), well),
            RouterInput::AskDecode(d) => RouterInput::AskDecode(by.decode(d)),
            RouterInput::Decoded(d, what) => RouterInput::Decoded(by.decode(d), what),
            RouterInput::Streamed(d, how) => RouterInput::Streamed(by.decode(d), how),
            RouterInput::SkipPrefill
            | RouterInput::NotAdmitted
            | RouterInput::GiveUp
            | RouterInput::HandoffSpent
            | RouterInput::ClientCancels
            | RouterInput::Silence
            | RouterInput::ProducerFailed
            | RouterInput::PrefillSilence
            | RouterInput::Crash => input,
        }
    }
}
