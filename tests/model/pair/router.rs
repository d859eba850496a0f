//! The router's side of one request whose legs are sent at once: the product's [`Exchange`], and the calls around it as
//! `router/src/exchange/driver/pair.rs` and `router/src/legs/settle/pending_prefill.rs` make them.

use baton_connector::Time;
use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Settlement, SettlementCause, State};

use super::state::{ATTEMPTS, Leg, Reply};
use crate::bounds::Bounds;
use crate::mutations::Mutation;
use crate::names::Renaming;
use crate::router::StreamEnd;
use crate::state_table::Actor;

/// A call to one leg's engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    #[default]
    None,
    /// The request waits for it.
    Open,
    /// The response has begun without the prefill engine's reply. A task of its own reads that reply.
    Followed,
    /// The leg was aborted. Its reply is still read until the connection is closed.
    Abandoned,
    Ended,
}

impl Call {
    /// Whether a reply has a reader.
    pub(crate) fn is_read(self) -> bool {
        matches!(self, Self::Open | Self::Followed | Self::Abandoned)
    }

    /// Whether silence of the engine has an effect.
    pub(crate) fn is_awaited(self) -> bool {
        matches!(self, Self::Open | Self::Followed)
    }
}

/// The first number is that of the pair within its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairInput {
    /// A pair begins at these two engines. The prefill leg is sent.
    Send([u8; 2]),
    /// The prefill leg is on the wire, so the decode leg is sent too.
    SendDecode,
    NotAdmitted,
    GiveUp,
    Answered(u8, Leg, Reply),
    /// The prefill engine's own error has not arrived shortly after the decode engine's.
    GraceEnds,
    FirstChunk(u8),
    StreamEnded(u8, StreamEnd),
    /// The engine has been silent for too long.
    Silence(u8, Leg),
    ClientGone,
    Dropped,
    /// The router's process crashes, and its connections end.
    Crash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairOutput {
    Send(u8, Leg),
    Abort(u8, Leg),
    Close(u8, Leg),
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PairRouter {
    pub exchange: Exchange,
    pub crashed: bool,
    /// The engines of each pair, by leg.
    pub sent: Vec<[u8; 2]>,
    /// Engines that failed the request, by leg.
    pub failed: [[bool; 2]; 2],
    pub calls: [[Call; 2]; ATTEMPTS],
    /// The decode engine answered with an error that may only report the prefill engine's.
    pub grace: bool,
    /// The aborts that were sent.
    pub settled: [[bool; 2]; ATTEMPTS],
    /// vLLM push: D may hold a page that only P's write frees.
    ends_by_write: [bool; ATTEMPTS],
    pushes: bool,
    ends: u8,
    mutation: Option<Mutation>,
}

fn attempt(pair: u8, leg: Leg) -> Attempt {
    Attempt(u16::from(pair) << 1 | leg as u16)
}

fn failure(reply: Reply) -> Failure {
    match reply {
        Reply::NotReached => Failure::NotReached,
        Reply::Broken => Failure::Unknown,
        Reply::Done | Reply::Refused | Reply::Failed => Failure::Answered,
    }
}

impl PairRouter {
    pub(crate) fn is_over(&self) -> bool {
        self.crashed || self.exchange.outcome().is_some()
    }

    /// Whether the decode leg is due.
    pub(crate) fn is_sending(&self) -> bool {
        matches!(self.exchange.state(), State::Prefilling(_))
    }

    pub(crate) fn call(&self, pair: u8, leg: Leg) -> Call {
        self.calls[usize::from(pair)][leg as usize]
    }

    /// Whether the request needs this pair no more.
    pub(crate) fn has_given_up(&self, pair: u8) -> bool {
        self.is_over() || usize::from(pair) + 1 < self.sent.len() || self.is_between_pairs()
    }

    /// Whether no pair is under way.
    pub(crate) fn is_between_pairs(&self) -> bool {
        matches!(self.exchange.state(), State::Choosing | State::ReadyToDecode(_))
    }

    /// Whether the router has aborted the leg, or has lost its memory.
    pub(crate) fn has_aborted(&self, pair: u8, leg: Leg) -> bool {
        self.crashed || self.settled[usize::from(pair)][leg as usize]
    }

    fn set_call(&mut self, pair: u8, leg: Leg, call: Call) {
        self.calls[usize::from(pair)][leg as usize] = call;
    }

    /// The engine is not used for this request again.
    fn exclude(&mut self, pair: u8, leg: Leg) {
        let engine = self.sent[usize::from(pair)][leg as usize];
        self.failed[leg as usize][usize::from(engine)] = true;
    }

    fn apply(&mut self, event: Event, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        let step = self.exchange.apply(event, Time::ZERO);
        let forgotten = match (self.mutation, event) {
            (
                Some(Mutation::FailedPrefillLeavesDecode),
                Event::PrefillFailed(..) | Event::PrefillRefused(_),
            ) => Some(Leg::Decode),
            (
                Some(Mutation::FailedDecodeLeavesPrefill),
                Event::DecodeFailed(..) | Event::DecodeRefused(_),
            ) => Some(Leg::Prefill),
            _ => None,
        };
        for settlement in step.settlements.iter().filter(|_| self.pushes) {
            if let Settlement::AbortDecode(Attempt(number)) = settlement {
                self.ends_by_write[usize::from(number >> 1)] = true;
            }
        }
        for settlement in step.settlements {
            self.settle(settlement, forgotten, outputs)?;
        }
        self.ends += u8::from(step.ended.is_some());
        if self.ends > 1 {
            return Err("a request has two outcomes (invariant 6)".into());
        }
        if self.exchange.outcome().is_some() {
            if self.ends == 0 {
                return Err("a request is over without an outcome (invariant 6)".into());
            }
            (self.failed, self.grace) = ([[false; 2]; 2], false);
        }
        Ok(())
    }

    fn settle(
        &mut self,
        settlement: Settlement,
        forgotten: Option<Leg>,
        outputs: &mut Vec<PairOutput>,
    ) -> Result<(), String> {
        let (Attempt(number), leg) = match settlement {
            Settlement::AbortPrefill(attempt) => (attempt, Leg::Prefill),
            Settlement::AbortDecode(attempt) => (attempt, Leg::Decode),
            // Stock vLLM has no release.
            Settlement::ReleasePrefill(..) if self.pushes => return Ok(()),
            Settlement::ReleasePrefill(..) => return Err("a lease is released, and there is none".into()),
        };
        let pair = (number >> 1) as u8;
        if std::mem::replace(&mut self.settled[usize::from(pair)][leg as usize], true) {
            return Err(format!("a leg is aborted twice: {settlement:?}"));
        }
        if forgotten == Some(leg) {
            return Ok(());
        }
        let aborts = self.mutation == Some(Mutation::PushedPrefillIsAborted);
        if leg == Leg::Prefill && self.ends_by_write[usize::from(pair)] && !aborts {
            // It runs to its end.
            if self.call(pair, leg).is_awaited() {
                self.set_call(pair, leg, Call::Abandoned);
            }
            return Ok(());
        }
        if !self.pushes {
            outputs.push(PairOutput::Abort(pair, leg));
        }
        if self.call(pair, leg).is_awaited() {
            outputs.push(PairOutput::Close(pair, leg));
            self.set_call(pair, leg, if leg == Leg::Prefill { Call::Abandoned } else { Call::Ended });
        }
        Ok(())
    }

    fn prefilled(&mut self, pair: u8, reply: Reply, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        let by = attempt(pair, Leg::Prefill);
        let event = match reply {
            Reply::Done if self.pushes => Event::PrefillLeased(by, None),
            Reply::Done => Event::PrefillEmpty(by),
            Reply::Refused => Event::PrefillRefused(by),
            Reply::Failed | Reply::NotReached | Reply::Broken => Event::PrefillFailed(by, failure(reply)),
        };
        let call = self.call(pair, Leg::Prefill);
        self.set_call(pair, Leg::Prefill, Call::Ended);
        match call {
            Call::Open if self.grace && reply == Reply::Done => self.end_grace(outputs),
            // During the grace the decode engine's error counts as a report of this one.
            Call::Open => {
                self.grace = false;
                if reply != Reply::Done {
                    self.exclude(pair, Leg::Prefill);
                }
                self.apply(event, outputs)
            }
            Call::Followed | Call::Abandoned => {
                self.apply(event, outputs)?;
                let may_abort = |output: &PairOutput| {
                    call == Call::Followed && *output == PairOutput::Abort(pair, Leg::Prefill)
                };
                match outputs.iter().find(|output| !may_abort(output)) {
                    Some(output) => Err(format!("a late reply brings {output:?}")),
                    None => Ok(()),
                }
            }
            Call::None | Call::Ended => {
                self.set_call(pair, Leg::Prefill, call);
                Ok(())
            }
        }
    }

    fn decoded(&mut self, pair: u8, reply: Reply, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        // The call was dropped, so its reply has no receiver.
        if self.call(pair, Leg::Decode) != Call::Open || self.has_given_up(pair) {
            self.set_call(pair, Leg::Decode, Call::Ended);
            return Ok(());
        }
        let is_prefill_open = self.call(pair, Leg::Prefill) == Call::Open;
        match reply {
            Reply::Done => {
                let by = attempt(pair, Leg::Decode);
                self.apply(Event::DecodeAccepted(by), outputs)?;
                if is_prefill_open {
                    // From now on a failure of the prefill ends nothing.
                    self.set_call(pair, Leg::Prefill, Call::Followed);
                    self.apply(Event::FirstChunk(by), outputs)?;
                }
                Ok(())
            }
            Reply::Failed if is_prefill_open => {
                self.set_call(pair, Leg::Decode, Call::Ended);
                self.grace = true;
                Ok(())
            }
            Reply::Refused | Reply::Failed | Reply::NotReached | Reply::Broken => {
                self.set_call(pair, Leg::Decode, Call::Ended);
                self.fail_decode(pair, reply, outputs)
            }
        }
    }

    fn fail_decode(&mut self, pair: u8, reply: Reply, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        let by = attempt(pair, Leg::Decode);
        self.exclude(pair, Leg::Decode);
        let event = match reply {
            Reply::Refused => Event::DecodeRefused(by),
            _ => Event::DecodeFailed(by, failure(reply)),
        };
        self.apply(event, outputs)
    }

    fn end_grace(&mut self, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        self.grace = false;
        let pair = (self.sent.len() - 1) as u8;
        self.fail_decode(pair, Reply::Failed, outputs)
    }

    fn silence(&mut self, pair: u8, leg: Leg, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        let by = attempt(pair, leg);
        match (leg, self.exchange.state()) {
            (Leg::Prefill, _) => {
                if self.call(pair, leg) == Call::Open {
                    self.exclude(pair, leg);
                }
                // The call is still open: its abort reads the reply.
                self.apply(Event::PrefillFailed(by, Failure::Unknown), outputs)
            }
            (Leg::Decode, State::Decoding(..)) => self.fail_decode(pair, Reply::Broken, outputs),
            (Leg::Decode, _) => self.apply(Event::StreamBroken(by), outputs),
        }
    }

    fn crash(&mut self, outputs: &mut Vec<PairOutput>) {
        for (pair, calls) in self.calls.iter().enumerate() {
            for leg in Leg::BOTH {
                // A call that is abandoned is closed already.
                if calls[leg as usize].is_awaited() {
                    outputs.push(PairOutput::Close(pair as u8, leg));
                }
            }
        }
        // The router forgets everything and aborts nothing any more.
        let sent = std::mem::take(&mut self.sent);
        *self = Self { crashed: true, sent, ..Self::new(self.mutation, self.pushes) };
    }

    fn new(mutation: Option<Mutation>, pushes: bool) -> Self {
        Self {
            exchange: Exchange::new(),
            crashed: false,
            sent: Vec::new(),
            failed: Default::default(),
            calls: Default::default(),
            grace: false,
            settled: Default::default(),
            ends_by_write: [false; ATTEMPTS],
            pushes,
            ends: 0,
            mutation,
        }
    }
}

impl Actor for PairRouter {
    type Input = PairInput;
    type Output = PairOutput;
    type View = Self;

    fn born(bounds: &Bounds) -> Self {
        Self::new(bounds.mutation, bounds.pushes)
    }

    fn live(&mut self, input: PairInput, outputs: &mut Vec<PairOutput>) -> Result<(), String> {
        match input {
            PairInput::Send(engines) => {
                if let State::ReadyToDecode(Some(_)) = self.exchange.state() {
                    // A handoff belongs to one pair.
                    self.apply(Event::HandoffUnusable, outputs)?;
                }
                let pair = self.sent.len() as u8;
                self.sent.push(engines);
                self.set_call(pair, Leg::Prefill, Call::Open);
                outputs.push(PairOutput::Send(pair, Leg::Prefill));
                self.apply(Event::PrefillSent(attempt(pair, Leg::Prefill)), outputs)?;
                if !self.is_sending() {
                    return Err("the exchange ignores a pair that is sent".into());
                }
                Ok(())
            }
            PairInput::SendDecode => {
                let pair = (self.sent.len() - 1) as u8;
                self.set_call(pair, Leg::Decode, Call::Open);
                outputs.push(PairOutput::Send(pair, Leg::Decode));
                self.apply(Event::DecodeSent(attempt(pair, Leg::Decode)), outputs)
            }
            PairInput::NotAdmitted if matches!(self.exchange.state(), State::ReadyToDecode(Some(_))) => {
                self.apply(Event::ExhaustedFor(SettlementCause::DecodeBusy), outputs)
            }
            PairInput::NotAdmitted => self.apply(Event::NotAdmitted, outputs),
            PairInput::GiveUp if self.sent.is_empty() => self.apply(Event::NoEngine, outputs),
            PairInput::GiveUp => self.apply(Event::ExhaustedFor(SettlementCause::DecodeFailed), outputs),
            PairInput::Answered(pair, Leg::Prefill, reply) => self.prefilled(pair, reply, outputs),
            PairInput::Answered(pair, Leg::Decode, reply) => self.decoded(pair, reply, outputs),
            PairInput::GraceEnds => self.end_grace(outputs),
            PairInput::FirstChunk(pair) | PairInput::StreamEnded(pair, _)
                if self.call(pair, Leg::Decode) != Call::Open =>
            {
                Ok(())
            }
            PairInput::FirstChunk(pair) => self.apply(Event::FirstChunk(attempt(pair, Leg::Decode)), outputs),
            PairInput::StreamEnded(pair, how) => {
                self.set_call(pair, Leg::Decode, Call::Ended);
                let by = attempt(pair, Leg::Decode);
                self.apply(
                    match how {
                        StreamEnd::Complete => Event::StreamEnded(by),
                        StreamEnd::Broken => Event::StreamBroken(by),
                    },
                    outputs,
                )
            }
            PairInput::Silence(pair, leg) => self.silence(pair, leg, outputs),
            PairInput::ClientGone => self.apply(Event::ClientGone, outputs),
            PairInput::Dropped => self.apply(Event::Dropped, outputs),
            PairInput::Crash => {
                self.crash(outputs);
                Ok(())
            }
        }
    }

    fn view(&self) -> Self {
        self.clone()
    }

    fn renamed(input: PairInput, _: Renaming) -> PairInput {
        input
    }
}
