//! SGLang's engines, as far as the two halves of a pair concern each other: rooms, pages, the write, and the ends of
//! both halves (SGLang 0.5.23, `sglang/srt/disaggregation`).
//!
//! | event | P | D |
//! |---|---|---|
//! | request | waits for D's registration | waits for a page and registers it |
//! | abort, connection ends | ends after a running write, and tells D | frees its page, or keeps it until P's ACK |
//! | ABORT from D | ends, and acknowledges once no write runs | |
//! | failure of P | | ends, and frees its page |
//!
//! An engine that never got the other half's registration cannot tell it anything. A process that starts again knows no
//! room, and a write to an earlier process of D fails.
//!
//! With vLLM push ([`Bounds::pushes`]) P computes and answers without a registration, and writes once it has both. There
//! is no abort by id. D keeps the page of an aborted request until the write, and nothing tells it that none comes. So a
//! refusal by P is left out: it costs D's page.
//!
//! [`Bounds::pushes`]: crate::bounds::Bounds::pushes

use super::PairModel;
use super::state::{DecodeHalf, Leg, Message, Pair, PairState, PrefillHalf, Reply, Target};
use crate::mutations::Mutation;
use crate::router::StreamEnd;
use crate::steps::AdmissionChoice;

/// The cause of a leg's end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Aborted,
    /// The connection is closed, so the leg has no answer.
    Closed,
    Failed,
}

impl PairModel {
    /// The number of a room. A pair has a room of its own.
    fn room(&self, pair: u8) -> u8 {
        if self.bounds.has(Mutation::RoomIsReused) { super::request(pair) } else { pair }
    }

    /// The id by which both engines know a pair.
    fn rid(&self, pair: u8) -> String {
        let (request, number) = (super::request(pair), super::number(pair));
        match number {
            0 if self.bounds.has(Mutation::RidIsAPrefix) => format!("r{request}"),
            _ => format!("r{request}-p{number}"),
        }
    }

    /// Answers a call that is still read.
    fn reply(&self, state: &mut PairState, at: u8, leg: Leg, reply: Reply) {
        let call = self.router(state, super::request(at)).call(super::number(at), leg);
        let mail = &mut state.pair(at).mail;
        if call.is_read() && mail.replies[leg as usize].is_none() {
            mail.send(Message::Reply(leg, reply));
        }
    }

    /// The message of another process arrives at a leg's engine, which is up.
    pub(super) fn receive(
        &mut self,
        state: &mut PairState,
        at: u8,
        message: Message,
        choice: AdmissionChoice,
    ) -> Result<(), String> {
        match message {
            Message::Request(leg) => self.admit(state, at, leg, choice),
            Message::Close(leg) => self.end(state, at, leg, End::Closed),
            Message::Abort(leg) => return self.abort(state, at, leg),
            Message::Register => self.register(state, at),
            Message::AbortRoom => self.abort_room(state, at),
            Message::AbortAck => {
                if let DecodeHalf::Aborted(_) = state.get(at).decode {
                    state.pair(at).decode = DecodeHalf::Over;
                }
            }
            Message::TransferFailed => match state.get(at).decode {
                DecodeHalf::Registered(_) => {
                    state.pair(at).decode = DecodeHalf::Over;
                    self.reply(state, at, Leg::Decode, Reply::Failed);
                }
                DecodeHalf::Aborted(_) => state.pair(at).decode = DecodeHalf::Over,
                _ => {}
            },
            Message::Write | Message::Reply(..) | Message::FirstChunk | Message::StreamEnd(_) => {
                unreachable!("no engine receives it")
            }
        }
        Ok(())
    }

    fn admit(&self, state: &mut PairState, at: u8, leg: Leg, choice: AdmissionChoice) {
        let refusal = match choice {
            AdmissionChoice::Takes => None,
            AdmissionChoice::TooFull => Some(Reply::Failed),
            AdmissionChoice::Refuses => Some(Reply::Refused),
        };
        let pair = state.pair(at);
        match (leg, refusal) {
            (Leg::Prefill, Some(_)) => pair.prefill = PrefillHalf::Over,
            (Leg::Prefill, None) if pair.prefill == PrefillHalf::Early || self.bounds.pushes => {
                pair.prefill = PrefillHalf::Computing;
            }
            (Leg::Prefill, None) => pair.prefill = PrefillHalf::Waiting,
            (Leg::Decode, Some(_)) => pair.decode = DecodeHalf::Over,
            (Leg::Decode, None) => pair.decode = DecodeHalf::Queued,
        }
        if let Some(reply) = refusal {
            self.reply(state, at, leg, reply);
        }
    }

    /// The scheduler ends every leg whose `rid` begins with the given one.
    fn abort(&self, state: &mut PairState, at: u8, leg: Leg) -> Result<(), String> {
        let rid = self.rid(at);
        let engine = state.get(at).engines[leg as usize];
        for other in state.at_engine(leg, engine) {
            if !state.get(other).works(leg) || !self.rid(other).starts_with(&rid) {
                continue;
            }
            if !self.router(state, super::request(other)).has_aborted(super::number(other), leg) {
                return Err(format!(
                    "the abort of {} ends the {leg:?} leg of {}, which was not given up",
                    super::shown(at),
                    super::shown(other)
                ));
            }
            self.end(state, other, leg, End::Aborted);
        }
        Ok(())
    }

    fn end(&self, state: &mut PairState, at: u8, leg: Leg, end: End) {
        if !state.get(at).works(leg) {
            return;
        }
        match leg {
            Leg::Prefill => self.end_prefill(state, at),
            Leg::Decode => self.end_decode(state, at),
        }
        if end != End::Closed {
            self.reply(state, at, leg, Reply::Failed);
        }
    }

    fn end_prefill(&self, state: &mut PairState, at: u8) {
        let pair = state.pair(at);
        let target = pair.target.pair;
        match &mut pair.prefill {
            PrefillHalf::Writing { ended, .. } => *ended = true,
            PrefillHalf::Leased => {}
            half => {
                let registered = *half == PrefillHalf::Computing && !self.bounds.pushes;
                *half = PrefillHalf::Over;
                if registered {
                    state.pair(target).mail.send(Message::TransferFailed);
                }
            }
        }
    }

    fn end_decode(&self, state: &mut PairState, at: u8) {
        let at_once = self.bounds.has(Mutation::PagesGivenAwayAtOnce);
        let pair = state.pair(at);
        pair.decode = match pair.decode {
            DecodeHalf::Registered(page) if self.bounds.pushes => DecodeHalf::Aborted(page),
            DecodeHalf::Registered(page) => {
                pair.mail.send(Message::AbortRoom);
                if at_once { DecodeHalf::Over } else { DecodeHalf::Aborted(page) }
            }
            DecodeHalf::Aborted(page) => DecodeHalf::Aborted(page),
            _ => DecodeHalf::Over,
        };
    }

    /// D reserves a page and sends it to P.
    pub(super) fn allocate(&self, state: &mut PairState, at: u8) {
        let page = self.free_page(state, at).expect("only with a free page");
        let life = state.process(at, Leg::Decode).life;
        let pair = state.pair(at);
        pair.registered = Target { pair: at, page, life };
        pair.decode = DecodeHalf::Registered(page);
        pair.mail.send(Message::Register);
    }

    /// A free page of a pair's D.
    pub(super) fn free_page(&self, state: &PairState, at: u8) -> Option<u8> {
        (0..self.bounds.decode_blocks).find(|&page| self.owner(state, at, page).is_none())
    }

    /// The pair to which a page belongs, at the D of the pair `at`.
    fn owner(&self, state: &PairState, at: u8, page: u8) -> Option<u8> {
        let engine = state.get(at).engines[Leg::Decode as usize];
        state.at_engine(Leg::Decode, engine).find(|&other| state.get(other).decode.page() == Some(page))
    }

    /// vLLM push: P has the prompt's blocks, and answers. It writes them if D has registered.
    pub(super) fn computed(&self, state: &mut PairState, at: u8) {
        self.reply(state, at, Leg::Prefill, Reply::Done);
        let pair = state.pair(at);
        if pair.has_target {
            self.begin_write(pair);
        } else {
            pair.prefill = PrefillHalf::Leased;
        }
    }

    pub(super) fn begin_write(&self, pair: &mut Pair) {
        pair.prefill = PrefillHalf::Writing { ended: false, ack: false };
        pair.mail.send(Message::Write);
    }

    /// vLLM push: P finds its prefill by the request's id.
    fn register_push(&self, state: &mut PairState, at: u8) {
        let pair = state.pair(at);
        pair.target = pair.registered;
        match pair.prefill {
            PrefillHalf::Leased => self.begin_write(pair),
            PrefillHalf::None => (pair.prefill, pair.has_target) = (PrefillHalf::Early, true),
            PrefillHalf::Computing => pair.has_target = true,
            // The prefill is over, and D is not told.
            _ => {}
        }
    }

    fn register(&self, state: &mut PairState, from: u8) {
        if self.bounds.pushes {
            return self.register_push(state, from);
        }
        let room = self.room(from);
        let engine = state.get(from).engines[Leg::Prefill as usize];
        let waiting = state
            .at_engine(Leg::Prefill, engine)
            .find(|&other| self.room(other) == room && state.get(other).prefill == PrefillHalf::Waiting);
        let target = state.get(from).registered;
        let pair = state.pair(waiting.unwrap_or(from));
        match pair.prefill {
            PrefillHalf::Waiting => pair.prefill = PrefillHalf::Computing,
            PrefillHalf::None => pair.prefill = PrefillHalf::Early,
            _ => return,
        }
        pair.target = target;
    }

    fn abort_room(&self, state: &mut PairState, from: u8) {
        let room = self.room(from);
        let engine = state.get(from).engines[Leg::Prefill as usize];
        let mut writes = false;
        for other in state.at_engine(Leg::Prefill, engine).filter(|&other| self.room(other) == room) {
            let pair = state.pair(other);
            match &mut pair.prefill {
                PrefillHalf::Writing { ack, .. } => (*ack, writes) = (true, true),
                half @ (PrefillHalf::Waiting | PrefillHalf::Computing) => {
                    *half = PrefillHalf::Over;
                    self.reply(state, other, Leg::Prefill, Reply::Failed);
                }
                // The registration is forgotten.
                half @ PrefillHalf::Early => *half = PrefillHalf::None,
                PrefillHalf::None | PrefillHalf::Leased | PrefillHalf::Stuck | PrefillHalf::Over => {}
            }
        }
        if !writes {
            state.pair(from).mail.send(Message::AbortAck);
        }
    }

    /// The blocks land in D's page, and P tells D.
    pub(super) fn land(&self, state: &mut PairState, at: u8, stuck: bool) -> Result<(), String> {
        let Target { pair: to, page, life } = state.get(at).target;
        let decode = state.process(to, Leg::Decode);
        let reached = decode.up && decode.life == life;
        if reached {
            let owner = self.owner(state, to, page);
            if owner != Some(at) {
                let whose = owner.map_or("were given away".to_owned(), |owner| {
                    format!("belong to {}", super::shown(owner))
                });
                return Err(format!("a write of {} lands in pages that {whose}", super::shown(at)));
            }
        }
        let PrefillHalf::Writing { ended, ack } = state.get(at).prefill else {
            // P has crashed and tells nothing.
            return Ok(());
        };
        let pair = state.pair(at);
        pair.prefill = PrefillHalf::Over;
        if self.bounds.pushes {
            pair.decode = match pair.decode {
                DecodeHalf::Registered(page) if reached => DecodeHalf::Written(page),
                DecodeHalf::Aborted(_) if reached => DecodeHalf::Over,
                half => half,
            };
            return Ok(());
        }
        if ended || ack || !reached {
            if reached {
                let message = if ack { Message::AbortAck } else { Message::TransferFailed };
                state.pair(to).mail.send(message);
            }
            self.reply(state, at, Leg::Prefill, Reply::Failed);
            return Ok(());
        }
        if let DecodeHalf::Registered(page) = pair.decode {
            pair.decode = DecodeHalf::Written(page);
        }
        if stuck {
            pair.prefill = PrefillHalf::Stuck;
        } else {
            self.reply(state, at, Leg::Prefill, Reply::Done);
        }
        Ok(())
    }

    /// D begins its response with P's token.
    pub(super) fn accept(&self, state: &mut PairState, at: u8) {
        let DecodeHalf::Written(page) = state.get(at).decode else { unreachable!("only with the blocks") };
        state.pair(at).decode = DecodeHalf::Streaming(page);
        self.reply(state, at, Leg::Decode, Reply::Done);
        if state.get(at).mail.has(Message::Reply(Leg::Decode, Reply::Done)) {
            state.pair(at).mail.send(Message::FirstChunk);
        }
    }

    pub(super) fn complete(&self, state: &mut PairState, at: u8) {
        state.pair(at).decode = DecodeHalf::Over;
        let call = self.router(state, super::request(at)).call(super::number(at), Leg::Decode);
        let mail = &mut state.pair(at).mail;
        if call.is_read() && mail.stream_end.is_none() {
            mail.send(Message::StreamEnd(StreamEnd::Complete));
        }
    }

    /// A leg fails at its engine, or its engine's own timeout passes.
    pub(super) fn fail(&self, state: &mut PairState, at: u8, leg: Leg) {
        self.end(state, at, leg, End::Failed);
    }

    pub(super) fn crash(&self, state: &mut PairState, leg: Leg, engine: u8) {
        state.engines[leg as usize][usize::from(engine)].up = false;
        for at in state.at_engine(leg, engine) {
            if state.get(at).works(leg) {
                self.cut(state, at, leg);
            }
            let pair = state.pair(at);
            match leg {
                Leg::Prefill if pair.prefill == PrefillHalf::Early => {
                    (pair.prefill, pair.has_target) = (PrefillHalf::None, false);
                }
                Leg::Prefill if pair.prefill.works() => pair.prefill = PrefillHalf::Over,
                Leg::Decode if pair.decode.works() => pair.decode = DecodeHalf::Over,
                Leg::Prefill | Leg::Decode => {}
            }
        }
    }

    /// The router sees that the connection of a leg breaks.
    pub(super) fn cut(&self, state: &mut PairState, at: u8, leg: Leg) {
        let call = self.router(state, super::request(at)).call(super::number(at), leg);
        if !call.is_read() {
            return;
        }
        let pair = state.pair(at);
        let streams = leg == Leg::Decode
            && (matches!(pair.decode, DecodeHalf::Streaming(_)) || pair.mail.stream_end.is_some());
        if streams {
            pair.mail.send(Message::StreamEnd(StreamEnd::Broken));
        } else {
            pair.mail.send(Message::Reply(leg, Reply::Broken));
        }
    }
}
