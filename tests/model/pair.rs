//! Protocols that send both legs at once: the product's [`Exchange`], with SGLang's prefill and decode engines or with
//! vLLM's that push.
//!
//! One router, up to two prefill engines, two decode engines and two requests of up to two pairs each. D registers its
//! pages at P, P writes into them and answers then. All messages arrive in any order, except on one connection. An
//! abort by `rid` is repeated, so it is lost only with its engine's process.
//!
//! Faults, each of which costs one of [`Bounds::faults`]: a connection breaks, an engine is silent, a leg fails at its
//! engine, P's answer does not come, an engine or the router crashes.
//!
//! Invariants of every state: a write lands only in pages that belong to its own pair. An abort ends only legs that
//! were given up. No leg is aborted twice, and no late reply ends anything. Each request has one outcome. Without a
//! fault no engine needs a timeout to end its half of a pair that was given up. At the end of every run no engine works
//! and no page is held; after a fault of a push a page of D may be.
//!
//! Time passes only when no other step is possible: the timeouts of the router, and those of the engines (P waits 300 s
//! for a registration, D 300 s for the write and 30 s for P's ACK). P reports a failure only after its writes have
//! ended. Rooms of different pairs differ; a planted bug shows the consequence of a room that is used twice. Resumed
//! streams are left out: they have one leg.
//!
//! | file | what it is |
//! |---|---|
//! | `pair/router.rs` | the router's side of one request |
//! | `pair/engines.rs` | P and D |
//! | `pair/state.rs` | both halves of each pair, and the messages |
//!
//! [`Exchange`]: baton_connector::exchange::Exchange

mod engines;
mod router;
mod state;

use std::fmt;

use crate::bounds::Bounds;
use crate::explore::Model;
use crate::mutations::Mutation;
use crate::state_table::StateTable;
use crate::steps::AdmissionChoice;
use router::{Call, PairInput, PairOutput, PairRouter};
use state::{ATTEMPTS, DecodeHalf, Leg, Message, PAIRS, Pair, PairState, PrefillHalf, Process};

/// The request of a pair.
fn request(pair: u8) -> u8 {
    pair / ATTEMPTS as u8
}

/// The number of a pair within its request.
fn number(pair: u8) -> u8 {
    pair % ATTEMPTS as u8
}

fn shown(pair: u8) -> String {
    format!("r{}'s pair {}", request(pair) + 1, number(pair) + 1)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PairStep {
    /// The router takes one step for a request.
    Router(u8, PairInput),
    Arrive(u8, Message, AdmissionChoice),
    /// The receiver is down, or the writer.
    Lost(u8, Message),
    Allocate(u8),
    Write(u8),
    Accept(u8),
    Complete(u8),
    Restart(Leg, u8),
    /// P's wait for a registration, D's wait for the write, or D's wait for the ACK ends.
    EngineTimeout(u8, Leg),
    /// An abort that is repeated.
    ArriveTwice(u8, Leg),
    // Faults.
    Break(u8, Leg),
    Silence(u8, Leg),
    Fail(u8, Leg),
    /// The blocks land, and P's answer does not come.
    Stuck(u8),
    Crash(Leg, u8),
    CrashRouter,
}

impl PairStep {
    fn is_fault(self) -> bool {
        matches!(
            self,
            Self::Break(..)
                | Self::Silence(..)
                | Self::Fail(..)
                | Self::Stuck(_)
                | Self::Crash(..)
                | Self::CrashRouter
        )
    }
}

pub(crate) struct PairModel {
    bounds: Bounds,
    routers: StateTable<PairRouter>,
}

impl PairModel {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self { bounds, routers: StateTable::new(bounds) }
    }

    fn router(&self, state: &PairState, request: u8) -> &PairRouter {
        self.routers.view(state.routers[usize::from(request)])
    }

    fn call(&self, state: &PairState, pair: u8, leg: Leg) -> Call {
        self.router(state, request(pair)).call(number(pair), leg)
    }

    fn at_router(&self, state: &PairState, req: u8, into: &mut Vec<PairStep>) {
        let view = self.router(state, req);
        let mut push = |input| into.push(PairStep::Router(req, input));
        if view.is_over() {
            return;
        }
        if view.grace {
            return push(PairInput::GraceEnds);
        }
        if view.is_sending() {
            push(PairInput::SendDecode);
        }
        if !view.is_between_pairs() {
            return;
        }
        let mut may_send = false;
        if view.sent.len() < ATTEMPTS {
            for prefill in self.candidates(state, view, Leg::Prefill) {
                for decode in self.candidates(state, view, Leg::Decode) {
                    may_send = true;
                    push(PairInput::Send([prefill, decode]));
                }
            }
        }
        // Engines may lack capacity at any choice.
        push(PairInput::NotAdmitted);
        if !may_send || !view.sent.is_empty() {
            push(PairInput::GiveUp);
        }
    }

    /// Engines that have not failed the request. If every decode engine has, one of them is tried again. Engines without
    /// any leg are alike, so one of them stands for all.
    fn candidates(&self, state: &PairState, view: &PairRouter, leg: Leg) -> Vec<u8> {
        let engines = if leg == Leg::Prefill { self.bounds.prefill } else { self.bounds.decode };
        let unused = (0..engines).find(|&engine| state.at_engine(leg, engine).next().is_none());
        let failed = view.failed[leg as usize];
        let again = leg == Leg::Decode && (0..engines).all(|engine| failed[usize::from(engine)]);
        (0..engines)
            .filter(|&engine| again || !failed[usize::from(engine)])
            .filter(|&engine| state.at_engine(leg, engine).next().is_some() || unused == Some(engine))
            .collect()
    }

    fn arrivals(&self, state: &PairState, at: u8, into: &mut Vec<PairStep>) {
        for message in state.get(at).mail.next() {
            let to = match message {
                Message::Request(leg) | Message::Close(leg) | Message::Abort(leg) => Some(leg),
                Message::Register | Message::AbortRoom => Some(Leg::Prefill),
                Message::AbortAck | Message::TransferFailed => Some(Leg::Decode),
                Message::Reply(..) | Message::FirstChunk | Message::StreamEnd(_) | Message::Write => None,
            };
            // A reply is read once both legs are sent.
            let unsent = [state::Reply::NotReached, state::Reply::Broken];
            if matches!(message, Message::Reply(Leg::Prefill, reply) if !unsent.contains(&reply))
                && self.router(state, request(at)).is_sending()
                && !self.router(state, request(at)).has_given_up(number(at))
            {
                continue;
            }
            let up = to.is_none_or(|leg| state.process(at, leg).up);
            if !up {
                into.push(PairStep::Lost(at, message));
                continue;
            }
            into.push(PairStep::Arrive(at, message, AdmissionChoice::Takes));
            if message == Message::Write && !state.get(at).prefill.works() {
                into.push(PairStep::Lost(at, message));
            }
            let may_refuse = |leg| leg == Leg::Decode || !self.bounds.pushes;
            if self.bounds.refusals && matches!(message, Message::Request(leg) if may_refuse(leg)) {
                into.extend(
                    [AdmissionChoice::TooFull, AdmissionChoice::Refuses]
                        .map(|choice| PairStep::Arrive(at, message, choice)),
                );
            }
        }
    }

    fn at_engines(&self, state: &PairState, at: u8, into: &mut Vec<PairStep>) {
        let pair = state.get(at);
        into.extend((pair.prefill == PrefillHalf::Computing).then_some(PairStep::Write(at)));
        match pair.decode {
            DecodeHalf::Queued if self.free_page(state, at).is_some() => into.push(PairStep::Allocate(at)),
            DecodeHalf::Written(_) => into.push(PairStep::Accept(at)),
            DecodeHalf::Streaming(_) => into.push(PairStep::Complete(at)),
            _ => {}
        }
    }

    /// Timeouts, when no other step is possible.
    fn timeouts(&self, state: &PairState, into: &mut Vec<PairStep>) {
        for at in state.sent() {
            let pair = state.get(at);
            if pair.prefill == PrefillHalf::Waiting {
                into.push(PairStep::EngineTimeout(at, Leg::Prefill));
            }
            // The router waits for D for less time than a lease lives.
            if pair.prefill == PrefillHalf::Leased && self.router(state, request(at)).has_given_up(number(at))
            {
                into.push(PairStep::EngineTimeout(at, Leg::Prefill));
            }
            if matches!(pair.decode, DecodeHalf::Registered(_) | DecodeHalf::Aborted(_))
                && !self.bounds.pushes
            {
                into.push(PairStep::EngineTimeout(at, Leg::Decode));
            }
            for leg in Leg::BOTH {
                if self.hears_silence(state, at, leg) {
                    into.push(PairStep::Router(request(at), PairInput::Silence(number(at), leg)));
                }
            }
        }
    }

    /// Whether the router waits for an engine.
    fn hears_silence(&self, state: &PairState, at: u8, leg: Leg) -> bool {
        let view = self.router(state, request(at));
        match view.call(number(at), leg) {
            Call::Followed => !self.bounds.has(Mutation::SilentPrefillIsLeft),
            Call::Open => !view.grace && !view.is_sending() && !view.has_given_up(number(at)),
            Call::None | Call::Abandoned | Call::Ended => false,
        }
    }

    fn faults(&self, state: &PairState, into: &mut Vec<PairStep>) {
        for at in state.sent() {
            let pair = state.get(at);
            for leg in Leg::BOTH {
                let awaited = self.call(state, at, leg).is_awaited();
                into.extend(self.hears_silence(state, at, leg).then_some(PairStep::Silence(at, leg)));
                into.extend((awaited && !self.is_broken(pair, leg)).then_some(PairStep::Break(at, leg)));
                let fails = match leg {
                    Leg::Prefill => matches!(pair.prefill, PrefillHalf::Waiting | PrefillHalf::Computing),
                    Leg::Decode => matches!(pair.decode, DecodeHalf::Queued | DecodeHalf::Registered(_)),
                };
                into.extend(fails.then_some(PairStep::Fail(at, leg)));
                let process = state.process(at, leg);
                if process.up {
                    let crash = PairStep::Crash(leg, pair.engines[leg as usize]);
                    into.extend((!into.contains(&crash)).then_some(crash));
                }
            }
            let writes = pair.prefill == PrefillHalf::Writing { ended: false, ack: false };
            let answers = writes && pair.mail.has(Message::Write) && !self.bounds.pushes;
            into.extend(answers.then_some(PairStep::Stuck(at)));
        }
        let up = !self.router(state, 0).crashed;
        into.extend((up && state.sent().next().is_some()).then_some(PairStep::CrashRouter));
    }

    fn is_broken(&self, pair: &Pair, leg: Leg) -> bool {
        pair.mail.has(Message::Reply(leg, state::Reply::Broken))
            || leg == Leg::Decode && pair.mail.has(Message::StreamEnd(crate::router::StreamEnd::Broken))
    }

    /// Without a fault no engine needs a timeout to end what was given up.
    fn check_rest(&self, state: &PairState) -> Result<(), String> {
        let waits = state.sent().any(|at| {
            self.router(state, request(at)).has_given_up(number(at))
                && Leg::BOTH.into_iter().any(|leg| state.get(at).works(leg))
                // The lease of a push, whose D has not registered.
                && (state.get(at).prefill != PrefillHalf::Leased || state.get(at).works(Leg::Decode))
        });
        if waits && state.faults_left == self.bounds.faults {
            return Err("nothing went wrong, and an engine still works for a pair that was given up".into());
        }
        Ok(())
    }

    /// The end of a run.
    fn check_end(&self, state: &PairState) -> Result<(), String> {
        for at in state.sent() {
            let may_hold = self.bounds.pushes && state.faults_left < self.bounds.faults;
            let legs = if may_hold { &Leg::BOTH[..1] } else { &Leg::BOTH };
            if legs.iter().any(|&leg| state.get(at).works(leg)) {
                return Err("at the end an engine still works for a request (invariant 5)".into());
            }
            if !state.get(at).mail.is_empty() {
                return Err("at the end a message is undelivered".into());
            }
        }
        if (0..self.bounds.requests).any(|req| !self.router(state, req).is_over()) {
            return Err("at the end a request has no outcome (invariant 6)".into());
        }
        Ok(())
    }

    fn step_router(&mut self, state: &mut PairState, req: u8, input: PairInput) -> Result<(), String> {
        let (next, outputs) = self.routers.apply(state.routers[usize::from(req)], input)?;
        state.routers[usize::from(req)] = next;
        for &output in &*outputs {
            match output {
                PairOutput::Send(number, leg) => {
                    let engines = self.router(state, req).sent[usize::from(number)];
                    let pair = &mut state.pairs[usize::from(req) * ATTEMPTS + usize::from(number)];
                    let pair = pair.get_or_insert(Pair { engines, ..Pair::default() });
                    pair.mail.send(Message::Request(leg));
                }
                PairOutput::Abort(number, leg) => {
                    state.pair(req * ATTEMPTS as u8 + number).mail.send(Message::Abort(leg));
                }
                PairOutput::Close(number, leg) => {
                    let mail = &mut state.pair(req * ATTEMPTS as u8 + number).mail;
                    mail.send(Message::Close(leg));
                    if leg == Leg::Decode {
                        // The connection's other direction ends as well.
                        mail.replies[Leg::Decode as usize] = None;
                        mail.stream_end = None;
                        mail.take(Message::FirstChunk);
                    }
                }
            }
        }
        Ok(())
    }

    fn arrive(
        &mut self,
        state: &mut PairState,
        at: u8,
        message: Message,
        choice: AdmissionChoice,
    ) -> Result<(), String> {
        let input = match message {
            Message::Reply(leg, reply) => PairInput::Answered(number(at), leg, reply),
            Message::FirstChunk => PairInput::FirstChunk(number(at)),
            Message::StreamEnd(end) => PairInput::StreamEnded(number(at), end),
            Message::Write => return self.land(state, at, false),
            _ => return self.receive(state, at, message, choice),
        };
        if self.router(state, request(at)).crashed {
            return Ok(());
        }
        self.step_router(state, request(at), input)
    }

    /// The connection of a leg breaks. The engine sees its end.
    fn break_connection(&self, state: &mut PairState, at: u8, leg: Leg) {
        let request = Message::Request(leg);
        if state.get(at).mail.has(request) {
            state.pair(at).mail.take(request);
        } else if state.get(at).works(leg) {
            state.pair(at).mail.send(Message::Close(leg));
        }
        self.cut(state, at, leg);
    }
}

impl Model for PairModel {
    type State = PairState;
    type Step = PairStep;

    fn start(&mut self) -> PairState {
        let engines = [[Process { up: true, life: 0 }; 2]; 2];
        PairState { routers: [0; 2], pairs: [None; PAIRS], engines, faults_left: self.bounds.faults }
    }

    fn steps(&mut self, state: PairState, into: &mut Vec<PairStep>) -> Result<(), String> {
        for req in 0..self.bounds.requests {
            // The requests are alike, so the first one begins.
            if req == 0 || !self.router(&state, 0).sent.is_empty() || self.router(&state, 0).is_over() {
                self.at_router(&state, req, into);
            }
        }
        for at in state.sent() {
            self.arrivals(&state, at, into);
            self.at_engines(&state, at, into);
        }
        for leg in Leg::BOTH {
            // The writes of a process end long before another one takes its place.
            let writes =
                |engine| state.at_engine(leg, engine).any(|at| state.get(at).mail.has(Message::Write));
            let down = (0..2).filter(|&engine| {
                let up = state.engines[leg as usize][usize::from(engine)].up;
                !up && (leg == Leg::Decode || !writes(engine))
            });
            into.extend(down.map(|engine| PairStep::Restart(leg, engine)));
        }
        if into.is_empty() {
            self.check_rest(&state)?;
            self.timeouts(&state, into);
            if into.is_empty() {
                return self.check_end(&state);
            }
        }
        // Optional steps: a run must end well without them.
        for at in state.sent() {
            let repeated =
                |leg: &Leg| state.get(at).mail.has(Message::Abort(*leg)) && state.process(at, *leg).up;
            into.extend(Leg::BOTH.into_iter().filter(repeated).map(|leg| PairStep::ArriveTwice(at, leg)));
        }
        for req in 0..self.bounds.requests {
            let view = self.router(&state, req);
            if self.bounds.clients_cancel && !view.sent.is_empty() && !view.is_over() {
                into.push(PairStep::Router(req, PairInput::Dropped));
                into.extend((!view.grace).then_some(PairStep::Router(req, PairInput::ClientGone)));
            }
        }
        if state.faults_left > 0 {
            self.faults(&state, into);
        }
        Ok(())
    }

    fn take(&mut self, mut state: PairState, step: PairStep) -> Result<PairState, String> {
        state.faults_left -= u8::from(step.is_fault());
        match step {
            PairStep::Router(req, input) => self.step_router(&mut state, req, input)?,
            PairStep::Silence(at, leg) => {
                self.step_router(&mut state, request(at), PairInput::Silence(number(at), leg))?;
            }
            PairStep::Arrive(at, message, choice) => {
                state.pair(at).mail.take(message);
                self.arrive(&mut state, at, message, choice)?;
            }
            PairStep::ArriveTwice(at, leg) => {
                self.arrive(&mut state, at, Message::Abort(leg), AdmissionChoice::Takes)?;
            }
            PairStep::Lost(at, message) => {
                state.pair(at).mail.take(message);
                if let Message::Request(leg) = message
                    && self.call(&state, at, leg).is_read()
                {
                    state.pair(at).mail.send(Message::Reply(leg, state::Reply::NotReached));
                }
            }
            PairStep::Allocate(at) => self.allocate(&mut state, at),
            PairStep::Write(at) if self.bounds.pushes => self.computed(&mut state, at),
            PairStep::Write(at) => self.begin_write(state.pair(at)),
            PairStep::Accept(at) => self.accept(&mut state, at),
            PairStep::Complete(at) => self.complete(&mut state, at),
            PairStep::Restart(leg, engine) => {
                let process = &mut state.engines[leg as usize][usize::from(engine)];
                *process = Process { up: true, life: process.life + 1 };
            }
            PairStep::EngineTimeout(at, Leg::Decode)
                if matches!(state.get(at).decode, DecodeHalf::Aborted(_)) =>
            {
                state.pair(at).decode = DecodeHalf::Over;
            }
            PairStep::EngineTimeout(at, Leg::Prefill) if state.get(at).prefill == PrefillHalf::Leased => {
                state.pair(at).prefill = PrefillHalf::Over;
            }
            PairStep::EngineTimeout(at, leg) | PairStep::Fail(at, leg) => self.fail(&mut state, at, leg),
            PairStep::Break(at, leg) => self.break_connection(&mut state, at, leg),
            PairStep::Stuck(at) => {
                state.pair(at).mail.take(Message::Write);
                self.land(&mut state, at, true)?;
            }
            PairStep::Crash(leg, engine) => self.crash(&mut state, leg, engine),
            PairStep::CrashRouter => {
                for req in 0..self.bounds.requests {
                    self.step_router(&mut state, req, PairInput::Crash)?;
                }
            }
        }
        Ok(state)
    }
}

impl fmt::Display for PairStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let engine =
            |leg: &Leg, at: &u8| format!("{}{}", if *leg == Leg::Prefill { 'P' } else { 'D' }, at + 1);
        let s = |pair: &u8| shown(*pair);
        match self {
            Self::Router(req, PairInput::Send([p, d])) => {
                write!(f, "the router sends r{} to P{} and D{}", req + 1, p + 1, d + 1)
            }
            Self::Router(req, input) => write!(f, "the router, for r{}: {input:?}", req + 1),
            Self::Arrive(at, message, AdmissionChoice::Takes) => {
                write!(f, "of {} arrives: {message:?}", s(at))
            }
            Self::Arrive(at, message, choice) => {
                write!(f, "of {} arrives: {message:?}, and the engine {choice:?}", s(at))
            }
            Self::Lost(at, message) => write!(f, "of {} is lost, as an engine is down: {message:?}", s(at)),
            Self::Allocate(at) => write!(f, "D registers a page for {}", s(at)),
            Self::Write(at) => write!(f, "P writes the blocks of {}", s(at)),
            Self::Accept(at) => write!(f, "D begins the response of {}", s(at)),
            Self::Complete(at) => write!(f, "D completes the response of {}", s(at)),
            Self::Restart(leg, at) => write!(f, "{} starts again", engine(leg, at)),
            Self::EngineTimeout(at, leg) => write!(f, "the {leg:?} engine of {} waits no longer", s(at)),
            Self::ArriveTwice(at, leg) => write!(f, "of {} arrives, and is repeated: Abort({leg:?})", s(at)),
            Self::Break(at, leg) => write!(f, "FAULT the {leg:?} connection of {} breaks", s(at)),
            Self::Silence(at, leg) => write!(f, "FAULT the {leg:?} engine of {} counts as silent", s(at)),
            Self::Fail(at, leg) => write!(f, "FAULT the {leg:?} leg of {} fails at its engine", s(at)),
            Self::Stuck(at) => write!(f, "FAULT the blocks of {} land, and P does not answer", s(at)),
            Self::Crash(leg, at) => write!(f, "FAULT {} crashes", engine(leg, at)),
            Self::CrashRouter => write!(f, "FAULT the router crashes"),
        }
    }
}
