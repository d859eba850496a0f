//! The router's side of one request: the product's [`Exchange`], and around it what its shell knows: whom it has asked,
//! and which calls are still open.

use baton_connector::Time;
use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Outcome, Settlement, State};

use crate::bounds::Bounds;
use crate::cast::Party;
use crate::names::{LeaseName, Renaming};

/// What a prefill engine's answer says, or that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Prefilled {
    Lent(LeaseName),
    /// Lent, and it computes on: the answer's end is still to come.
    Lending(LeaseName),
    Empty,
    Refused,
    TooFull,
    NotReached,
    Broken,
}

/// What a decode engine's answer says, or that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Decoded {
    Accepted,
    Refused,
    TooFull,
    LoadFailed,
    NotReached,
    Broken,
}

/// How an accepted answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Streamed {
    Complete,
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    AskPrefill(u8),
    SkipPrefill,
    /// There is no room for it, now or in time.
    NotAdmitted,
    GiveUp,
    Prefilled(u8, Prefilled),
    /// The end of an answer that had lent before: well, or not.
    PrefillEnds(u8, bool),
    /// What the decode engine waits for will not come.
    ProducerFailed,
    /// The prefill engine that computes on has been silent for too long.
    PrefillSilence,
    AskDecode(u8),
    Decoded(u8, Decoded),
    Streamed(u8, Streamed),
    /// No decode engine can use the handoff: it goes back, and the prompt is computed anew.
    HandoffSpent,
    ClientLeaves,
    /// An engine has been silent for too long.
    Silence,
    /// The router dies, and its connections with it.
    Crash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    Prefill(u8),
    Decode(u8, Option<LeaseName>),
    AbortPrefill(u8),
    Release(LeaseName),
    AbortDecode(u8),
    /// A connection that was open is closed.
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
    /// 1 when the prompt is computed anew, also for the rest of a stream.
    pub round: u8,
    /// A decode engine could not use the handoff.
    pub spent: bool,
    pub asked_prefill: [bool; 4],
    pub asked_decode: [bool; 4],
    /// Calls that have not been answered; those to prefill engines are read on after the request has ended.
    pub open_prefill: [bool; 4],
    pub open_decode: [bool; 4],
    /// The prefill engine that has lent and computes on, whose answer's end is waited for.
    pub computing: Option<u8>,
    /// It will not end well.
    pub failed: bool,
    /// Debts that were paid: aborts of prefill, releases, aborts of decode, by engine.
    paid: [[bool; 4]; 3],
    ends: u8,
}

/// Engines are numbered as asked by this request: the engine in the lowest bit, and above it the round.
fn prefill(p: u8) -> Attempt {
    Attempt(u16::from(p))
}

fn decode(d: u8) -> Attempt {
    Attempt(DECODES + u16::from(d))
}

/// The first attempt of a decode.
const DECODES: u16 = 4;

impl Router {
    /// Whether anybody has asked it for anything yet.
    pub(crate) fn has_begun(&self) -> bool {
        self.asked_prefill.iter().chain(&self.asked_decode).any(|&asked| asked)
            || self.exchange.state() != State::Choosing
    }

    pub(crate) fn is_over(&self) -> bool {
        self.crashed || self.exchange.outcome().is_some()
    }

    /// The lease whose handoff it passes on.
    fn handoff(&self) -> Option<LeaseName> {
        match self.exchange.state() {
            State::Held(lent) | State::Decoding(_, lent) => {
                lent.and_then(|lent| lent.handle).map(LeaseName::of)
            }
            _ => None,
        }
    }

    fn tell(&mut self, event: Event, says: &mut Vec<Output>) -> Result<(), String> {
        // Whoever gives a handoff up does not wait for its prefill.
        let given_up = matches!(event, Event::HandoffSpent | Event::StreamCut(_));
        let step = self.exchange.apply(event, Time::ZERO);
        let outcome = self.exchange.outcome();
        if given_up || outcome.is_some() {
            self.failed = false;
            if let Some(p) = self.computing.take().filter(|_| outcome != Some(Outcome::Completed)) {
                self.open_prefill[usize::from(p)] = false;
                says.push(Output::HangUpPrefill(p));
            }
        }
        for debt in step.settle {
            self.pay(debt, says)?;
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

    fn pay(&mut self, debt: Settlement, says: &mut Vec<Output>) -> Result<(), String> {
        let (kind, engine, output) = match debt {
            Settlement::AbortPrefill(Attempt(p)) => (0, p as u8, Output::AbortPrefill(p as u8)),
            Settlement::ReleasePrefill(lent, _) => {
                let lease = LeaseName::of(lent.handle.expect("our engines give handles"));
                (1, lent.by.0 as u8, Output::Release(lease))
            }
            Settlement::AbortDecode(Attempt(d)) => {
                // The call is dropped, which cuts its connection; the abort by name is what must arrive.
                self.open_decode[usize::from(d - DECODES)] = false;
                (2, (d - DECODES) as u8, Output::AbortDecode((d - DECODES) as u8))
            }
        };
        if std::mem::replace(&mut self.paid[kind][usize::from(engine)], true) {
            return Err(format!("a debt is settled twice: {debt:?}"));
        }
        says.push(output);
        Ok(())
    }

    fn prefilled(&mut self, p: u8, what: Prefilled) -> Event {
        self.open_prefill[usize::from(p)] = matches!(what, Prefilled::Lending(_));
        let by = prefill(p);
        match what {
            Prefilled::Lent(lease) | Prefilled::Lending(lease) => {
                Event::PrefillLent(by, Some(lease.handle()))
            }
            Prefilled::Empty => Event::PrefillEmpty(by),
            Prefilled::Refused => Event::PrefillRefused(by),
            Prefilled::TooFull => Event::PrefillFailed(by, Failure::Answered),
            Prefilled::NotReached => Event::PrefillFailed(by, Failure::NotReached),
            Prefilled::Broken => Event::PrefillFailed(by, Failure::Unknown),
        }
    }

    fn decoded(&mut self, d: u8, what: Decoded) -> Event {
        self.open_decode[usize::from(d)] &= what == Decoded::Accepted;
        self.spent |= what == Decoded::LoadFailed;
        let by = decode(d);
        match what {
            Decoded::Accepted => Event::DecodeAccepted(by),
            Decoded::Refused => Event::DecodeRefused(by),
            Decoded::TooFull | Decoded::LoadFailed => Event::DecodeFailed(by, Failure::Answered),
            Decoded::NotReached => Event::DecodeFailed(by, Failure::NotReached),
            Decoded::Broken => Event::DecodeFailed(by, Failure::Unknown),
        }
    }

    /// A prefill has lent early: its end is waited for by the request that takes the handoff, and by nobody else.
    fn lent_early(&mut self, p: u8, says: &mut Vec<Output>) {
        match self.exchange.state() {
            State::Held(Some(lent)) if lent.by == prefill(p) => self.computing = Some(p),
            _ => {
                self.open_prefill[usize::from(p)] = false;
                says.push(Output::HangUpPrefill(p));
            }
        }
    }

    /// What it does when its engine says nothing for too long.
    fn silence(&mut self) -> Option<Event> {
        match self.exchange.state() {
            State::Prefilling(on) => Some(Event::PrefillFailed(on, Failure::Unknown)),
            // It has said nothing of the answer: another engine gets the same handoff.
            State::Decoding(on, _) | State::Accepted(on, _) => {
                Some(Event::DecodeFailed(on, Failure::Unknown))
            }
            State::Streaming(on, _) => Some(self.broken(on)),
            State::Choosing | State::Held(_) | State::Done(_) => None,
        }
    }

    /// An answer broke off: the rest is asked of another engine, once and under a new name, or the request is over.
    fn broken(&mut self, by: Attempt) -> Event {
        if !self.resume || self.round > 0 {
            return Event::StreamBroken(by);
        }
        self.round = 1;
        Event::StreamCut(by)
    }

    fn crash(&mut self, says: &mut Vec<Output>) {
        for p in (0..4).filter(|&p| self.open_prefill[usize::from(p)]) {
            says.push(Output::HangUpPrefill(p));
        }
        for d in (0..4).filter(|&d| self.open_decode[usize::from(d)]) {
            says.push(Output::HangUpDecode(d));
        }
        // Nothing is remembered and nothing is settled any more.
        let asked = (self.asked_prefill, self.asked_decode);
        *self = Self { crashed: true, asked_prefill: asked.0, asked_decode: asked.1, ..Self::born_empty() };
    }

    fn born_empty() -> Self {
        Self {
            exchange: Exchange::new(),
            crashed: false,
            resume: false,
            round: 0,
            spent: false,
            asked_prefill: [false; 4],
            asked_decode: [false; 4],
            open_prefill: [false; 4],
            open_decode: [false; 4],
            computing: None,
            failed: false,
            paid: [[false; 4]; 3],
            ends: 0,
        }
    }
}

impl Party for Router {
    type Input = Input;
    type Output = Output;
    type View = Self;

    fn born(bounds: &Bounds) -> Self {
        Self { resume: bounds.resume, ..Self::born_empty() }
    }

    fn live(&mut self, input: Input, says: &mut Vec<Output>) -> Result<(), String> {
        let event = match input {
            Input::AskPrefill(p) => {
                self.asked_prefill[usize::from(p)] = true;
                self.open_prefill[usize::from(p)] = true;
                says.push(Output::Prefill(p));
                Event::PrefillSent(prefill(p))
            }
            Input::SkipPrefill => Event::PrefillSkipped,
            Input::NotAdmitted => Event::NotAdmitted,
            Input::GiveUp => Event::GaveUp,
            Input::Prefilled(p, what @ Prefilled::Lending(_)) => {
                let event = self.prefilled(p, what);
                self.tell(event, says)?;
                self.lent_early(p, says);
                return Ok(());
            }
            Input::Prefilled(p, what) => self.prefilled(p, what),
            Input::PrefillEnds(p, well) => {
                self.open_prefill[usize::from(p)] = false;
                let waited = self.computing.take_if(|computing| *computing == p).is_some();
                if !well {
                    self.failed |= waited;
                    return Ok(());
                }
                Event::PrefillEnded(prefill(p))
            }
            Input::PrefillSilence => {
                let p = self.computing.take().expect("it waits for a prefill");
                self.open_prefill[usize::from(p)] = false;
                self.failed = true;
                says.push(Output::HangUpPrefill(p));
                return Ok(());
            }
            Input::ProducerFailed => {
                (self.failed, self.spent) = (false, true);
                match self.exchange.state() {
                    State::Decoding(on, _) | State::Accepted(on, _) => {
                        Event::DecodeFailed(on, Failure::Unknown)
                    }
                    _ => unreachable!("a decode engine waits for it"),
                }
            }
            Input::AskDecode(d) => {
                self.asked_decode[usize::from(d)] = true;
                self.open_decode[usize::from(d)] = true;
                says.push(Output::Decode(d, self.handoff()));
                Event::DecodeSent(decode(d))
            }
            // The call was dropped: nobody reads what comes.
            Input::Decoded(d, _) | Input::Streamed(d, _) if !self.open_decode[usize::from(d)] => {
                return Ok(());
            }
            Input::Decoded(d, what) => self.decoded(d, what),
            Input::Streamed(d, how) => {
                self.open_decode[usize::from(d)] = false;
                match how {
                    Streamed::Complete => {
                        self.tell(Event::FirstChunk(decode(d)), says)?;
                        Event::StreamEnded(decode(d))
                    }
                    Streamed::Broken => self.broken(decode(d)),
                }
            }
            Input::HandoffSpent => {
                self.round = 1;
                Event::HandoffSpent
            }
            Input::ClientLeaves => Event::ClientGone,
            Input::Silence => self.silence().expect("it waits for an engine"),
            Input::Crash => {
                self.crash(says);
                return Ok(());
            }
        };
        self.tell(event, says)
    }

    fn view(&self) -> Self {
        self.clone()
    }

    fn renamed(input: Input, by: Renaming) -> Input {
        match input {
            Input::AskPrefill(p) => Input::AskPrefill(by.prefill(p)),
            Input::Prefilled(p, Prefilled::Lent(lease)) => {
                Input::Prefilled(by.prefill(p), Prefilled::Lent(lease.renamed(by)))
            }
            Input::Prefilled(p, Prefilled::Lending(lease)) => {
                Input::Prefilled(by.prefill(p), Prefilled::Lending(lease.renamed(by)))
            }
            Input::Prefilled(p, what) => Input::Prefilled(by.prefill(p), what),
            Input::PrefillEnds(p, well) => Input::PrefillEnds(by.prefill(p), well),
            Input::AskDecode(d) => Input::AskDecode(by.decode(d)),
            Input::Decoded(d, what) => Input::Decoded(by.decode(d), what),
            Input::Streamed(d, how) => Input::Streamed(by.decode(d), how),
            Input::SkipPrefill
            | Input::NotAdmitted
            | Input::GiveUp
            | Input::HandoffSpent
            | Input::ClientLeaves
            | Input::Silence
            | Input::ProducerFailed
            | Input::PrefillSilence
            | Input::Crash => input,
        }
    }
}
