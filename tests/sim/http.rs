//! An engine's HTTP side: requests become submissions, events become replies, and the end of a connection aborts its
//! request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::fetch::Fetch;
use baton_connector::{Handle, Handoff};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::engine_core::mailbox::LegFilter;
use baton_engine::engine_core::{Deadlines, EngineEnv, SeqEvent, Submission};
use baton_engine::sampling::SamplingParams;
use baton_engine::scheduler::sequence::{FinishReason, NewSequence, Purpose, SeqId, StopRule};
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

use crate::engine::FINGERPRINT;
use crate::messages::{ClientRequest, Msg};
use crate::net::{ConnId, Packet, Side};
use crate::setup::{Mutation, SECOND};
use crate::sim::Sim;

/// Maximum time of a shutdown.
const SHUTDOWN: Duration = Duration::from_secs(8);

/// One request that an engine serves.
pub struct EngineRequest {
    produces: bool,
    events: Receiver<(u32, SeqEvent)>,
    /// Sequences that have not ended, by choice.
    open: Vec<(u32, SeqId)>,
    accepted: bool,
    /// The lease that is open while the prefill computes.
    lent: Option<Handle>,
}

impl Sim {
    pub fn engine_receives(&mut self, engine: usize, conn: ConnId, side: Side, packet: Packet) {
        self.engine(engine);
        match (side, packet) {
            (Side::Caller, packet) => self.engine_answered(engine, conn, packet),
            (Side::Callee, Packet::End) => {
                self.hung_up(engine, conn);
                self.reader_hung_up(engine, conn);
            }
            (Side::Callee, Packet::Message(msg)) => match msg {
                Msg::Prefill(ask) => self.take_prefill(engine, conn, &ask),
                Msg::Decode(ask, handoff) => self.take_decode(engine, conn, &ask, handoff),
                Msg::ReleaseVerb(handle, reason) => {
                    self.release(engine, handle, reason);
                    self.send(conn, Side::Callee, Msg::Done);
                }
                Msg::AbortVerb(request, legs) => {
                    let world = self.engine(engine).world();
                    if legs != LegFilter::Decode {
                        let now = world.time();
                        world.ledger.release_request(&request, "aborted", now);
                    }
                    self.engine(engine).mail.aborts.push((request, legs));
                    self.after_ledger(engine);
                    self.poke(engine);
                    self.send(conn, Side::Callee, Msg::Done);
                }
                other => self.producer_receives(engine, conn, other),
            },
        }
    }

    fn refuses(&mut self, engine: usize) -> Option<u16> {
        if self.engines[engine].closing {
            return Some(503);
        }
        let one_in = self.engines[engine].setup.refuses_one_in;
        if one_in == 0 || !self.engines[engine].dice.one_in(one_in) {
            return None;
        }
        self.counts.refused += 1;
        Some(*self.engines[engine].dice.pick(&[400, 404, 500, 503]))
    }

    fn take_prefill(&mut self, engine: usize, conn: ConnId, ask: &Arc<ClientRequest>) {
        if let Some(status) = self.refuses(engine) {
            return self.send(conn, Side::Callee, Msg::Prefilled(Err(status)));
        }
        if self.engines[engine].mail.submissions.len() >= self.engines[engine].setup.max_waiting {
            self.counts.queue_full += 1;
            return self.send(conn, Side::Callee, Msg::Prefilled(Err(503)));
        }
        let (outbox, events) = tokio::sync::mpsc::channel(4);
        let purpose = Purpose::Produce { consumers: 1, early: self.setup.early };
        let mut sequence = self.sequence(engine, ask, purpose);
        sequence.stop.max_new = 1;
        let front = EngineRequest {
            produces: true,
            events,
            open: vec![(0, sequence.id)],
            accepted: false,
            lent: None,
        };
        let arrived = self.engine(engine).world().now();
        let (sampling, deadlines) = (SamplingParams::default(), self.deadlines(engine, arrived));
        let submission = Submission {
            sequence,
            sampling,
            grammar: None,
            index: 0,
            tag: None,
            outbox,
            target: None,
            arrived,
            deadlines,
        };
        self.engines[engine].mail.submissions.push_back(submission);
        self.engines[engine].fronts.insert(conn, front);
        self.poke(engine);
    }

    fn take_decode(
        &mut self,
        engine: usize,
        conn: ConnId,
        ask: &Arc<ClientRequest>,
        handoff: Option<Box<Handoff>>,
    ) {
        let mut target = handoff.as_ref().map(|handoff| {
            let consumer = self.engines[engine].dice.roll();
            FetchTarget::new(handoff, consumer)
        });
        if let Some(target) = target.as_mut().filter(|_| !self.setup.naive_router) {
            target.leave_to_router(self.engines[engine].policy());
        }
        let full = self.engines[engine].mail.submissions.len() + ask.choices as usize
            > self.engines[engine].setup.max_waiting.max(4);
        let refused = self.refuses(engine).or(full.then_some(503));
        if let Some(status) = refused {
            // A refusal that holds for every engine releases the lease. A refusal of this engine only leaves the lease
            // to the router.
            if let Some(target) = target.filter(|target| !(status == 503 && target.survives_refusal())) {
                self.notify(engine, target, "consumer_rejected");
            }
            return self.send(conn, Side::Callee, Msg::Refused(status));
        }
        if let Some(handoff) = &handoff {
            let ours = handoff.layout == FINGERPRINT
                && handoff.tokens == ask.prompt.len()
                && handoff.prompt == baton_engine::blocks::hash::prompt_fingerprint(&ask.prompt);
            if !ours {
                self.wrong("I8: a handoff of another prompt".into());
            }
        }
        let choices = ask.choices;
        let (outbox, events) = tokio::sync::mpsc::channel((ask.max_new + 2) * choices as usize);
        let policy = self.engines[engine].policy();
        let mut purpose = match target {
            Some(_) => Some(Purpose::Consume(Fetch::new(policy))),
            None => Some(Purpose::Plain),
        };
        let arrived = self.engine(engine).world().now();
        let deadlines = self.deadlines(engine, arrived);
        let (mut open, mut leader) = (Vec::new(), None);
        for index in 0..choices {
            let mut sequence = self.sequence(engine, ask, purpose.take().unwrap_or(Purpose::Plain));
            sequence.follows = leader;
            sequence.admitted_with_first = index > 0;
            leader = leader.or(Some(sequence.id));
            open.push((index, sequence.id));
            let submission = Submission {
                tag: None,
                sequence,
                sampling: SamplingParams::default(),
                grammar: None,
                index,
                outbox: outbox.clone(),
                target: target.take(),
                arrived,
                deadlines,
            };
            self.engines[engine].mail.submissions.push_back(submission);
        }
        let front = EngineRequest { produces: false, events, open, accepted: false, lent: None };
        self.engines[engine].fronts.insert(conn, front);
        self.poke(engine);
    }

    /// Until when a request must have its first token, and all of them. In some runs every fourth one has little time.
    fn deadlines(&self, engine: usize, now: Instant) -> Deadlines {
        let engine = &self.engines[engine];
        if !self.setup.options.has_deadlines || !engine.next_sequence.is_multiple_of(4) {
            return Deadlines::default();
        }
        let after = |steps: u64| Some(now + Duration::from_micros(steps * engine.setup.step.1));
        Deadlines { first_token: after(3), whole: after(3 + engine.next_sequence % 16) }
    }

    pub fn sequence(&mut self, engine: usize, ask: &ClientRequest, purpose: Purpose) -> NewSequence {
        let engine = &mut self.engines[engine];
        engine.next_sequence += 1;
        NewSequence {
            id: SeqId(engine.next_sequence),
            request: ask.request.clone(),
            prompt: ask.prompt.clone(),
            stop: StopRule { max_new: ask.max_new, stop_ids: Vec::new(), min_new: 0 },
            purpose,
            follows: None,
            admitted_with_first: false,
            cache_salt: None,
            adapter: None,
            prompt_logprobs: None,
            // A few values, so that some sequences are more urgent than others.
            priority: (engine.next_sequence % 3) as i32,
        }
    }

    /// The peer closed a request's connection: aborts the request.
    fn hung_up(&mut self, engine: usize, conn: ConnId) {
        let Some(mut front) = self.engines[engine].fronts.remove(&conn) else { return };
        for (_, id) in &front.open {
            self.engines[engine].mail.endings.push((*id, FinishReason::Abort));
        }
        // Releases the lease of a handle that is still in the mailbox, because no client can receive it. After an early
        // lease the end of the prefill has no receiver either.
        while let Ok((_, event)) = front.events.try_recv() {
            self.drop_handle(engine, event);
        }
        if let Some(handle) = front.lent {
            self.engine(engine).world().release(handle, "client_gone");
            self.after_ledger(engine);
        }
        self.poke(engine);
    }

    fn drop_handle(&mut self, engine: usize, event: SeqEvent) {
        let handoff = match event {
            SeqEvent::Finished(end) => end.handoff,
            SeqEvent::EarlyHandoff(handoff) => Some(handoff),
            _ => None,
        };
        if let Some(handoff) = handoff {
            self.engine(engine).world().release(handoff.handle, "client_gone");
            self.after_ledger(engine);
        }
    }

    /// Forwards the core's events to the clients' connections.
    pub fn pump_fronts(&mut self, engine: usize) {
        let conns: Vec<ConnId> = self.engines[engine].fronts.keys().copied().collect();
        for conn in conns {
            while let Some(front) = self.engines[engine].fronts.get_mut(&conn) {
                match front.events.try_recv() {
                    Ok((choice, event)) => self.front_event(engine, conn, choice, event),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        // Every sequence has ended and has emitted its end. Otherwise the client would wait forever.
                        let waiting = front.open.len();
                        if waiting > 0 {
                            self.wrong(format!("I6: {waiting} sequences ended without a word"));
                        }
                        self.engines[engine].fronts.remove(&conn);
                    }
                }
            }
        }
    }

    fn front_event(&mut self, engine: usize, conn: ConnId, choice: u32, event: SeqEvent) {
        let front = &self.engines[engine].fronts[&conn];
        let Some(id) = front.open.iter().find(|(index, _)| *index == choice).map(|(_, id)| *id) else {
            return self.wrong(format!("I6: choice {choice} spoke after its end: {event:?}"));
        };
        if let SeqEvent::Finished(end) = &event {
            let booked = self.engine(engine).world().ended(id);
            if booked.is_some_and(|reason| reason != end.reason) {
                let sent = end.reason;
                return self.wrong(format!("I6: the event log has {booked:?}, the HTTP side got {sent:?}"));
            }
        }
        let front = self.engines[engine].fronts.get_mut(&conn).expect("it has just spoken");
        let last =
            !matches!(event, SeqEvent::EarlyHandoff(_) | SeqEvent::Started { .. } | SeqEvent::Token(..));
        if last {
            front.open.retain(|(index, _)| *index != choice);
        }
        if front.produces {
            let lent = front.lent;
            let answer = match event {
                SeqEvent::Started { .. } | SeqEvent::Token(..) => return,
                SeqEvent::EarlyHandoff(handoff) => {
                    front.lent = Some(handoff.handle);
                    self.counts.early_leases += 1;
                    return self.send(conn, Side::Callee, Msg::Prefilled(Ok(Some(handoff))));
                }
                SeqEvent::Finished(end) if end.reason == FinishReason::Abort => Err(503),
                SeqEvent::Finished(end) => Ok(end.handoff),
                SeqEvent::DeadEnd(_) => Err(400),
                SeqEvent::TimedOut(_) => {
                    self.counts.timed_out += 1;
                    Err(504)
                }
                SeqEvent::Refused(_) | SeqEvent::LoadFailed(_) | SeqEvent::Unavailable(_) => Err(503),
            };
            self.engines[engine].fronts.remove(&conn);
            if lent.is_some() {
                return self.send(conn, Side::Callee, Msg::PrefillOver(answer.map(drop)));
            }
            if !self.net.conns[conn.0].is_open(Side::Callee)
                && let Ok(Some(handoff)) = &answer
            {
                self.engine(engine).world().release(handoff.handle, "client_gone");
            }
            return self.send(conn, Side::Callee, Msg::Prefilled(answer));
        }
        let accepted = std::mem::replace(&mut front.accepted, true);
        let done = front.open.is_empty();
        match event {
            SeqEvent::Started { .. } if !accepted => self.send(conn, Side::Callee, Msg::Accepted),
            SeqEvent::Started { .. } => {}
            SeqEvent::EarlyHandoff(_) => self.wrong("a sequence without a lease reported one".into()),
            SeqEvent::Token(sampled, _) => {
                self.send(conn, Side::Callee, Msg::Chunk { choice, token: sampled.token });
            }
            SeqEvent::Finished(end) if end.reason == FinishReason::Abort => {
                self.fail_front(engine, conn, 503)
            }
            SeqEvent::Finished(_) => {
                if done {
                    self.engines[engine].fronts.remove(&conn);
                    self.send(conn, Side::Callee, Msg::Decoded);
                }
            }
            SeqEvent::DeadEnd(_) => self.fail_front(engine, conn, 400),
            SeqEvent::TimedOut(_) => {
                self.counts.timed_out += 1;
                self.fail_front(engine, conn, 504);
            }
            SeqEvent::Refused(_) => {
                self.counts.queue_full += 1;
                self.fail_front(engine, conn, 503);
            }
            SeqEvent::LoadFailed(_) | SeqEvent::Unavailable(_) => self.fail_front(engine, conn, 503),
        }
    }

    /// Fails the whole response, because one choice has failed.
    fn fail_front(&mut self, engine: usize, conn: ConnId, status: u16) {
        if let Some(front) = self.engines[engine].fronts.remove(&conn) {
            for (_, id) in front.open {
                self.engines[engine].mail.endings.push((id, FinishReason::Abort));
            }
            self.poke(engine);
        }
        self.send(conn, Side::Callee, Msg::Refused(status));
    }

    /// Refuses new work. Running requests may end.
    pub fn drain_engine(&mut self, engine: usize) {
        let engine_mut = self.engine(engine);
        if engine_mut.core.is_none() || engine_mut.closing {
            return;
        }
        engine_mut.closing = true;
        let deadline = engine_mut.world().now() + SHUTDOWN;
        engine_mut.mail.closing = Some(deadline);
        self.counts.drained += 1;
        self.poke(engine);
    }

    /// The step loop has ended. The process ends when its notices are delivered or its time is up.
    pub fn shut_down(&mut self, engine: usize) {
        let fronts: Vec<_> = self.engines[engine].fronts.keys().copied().collect();
        if !fronts.is_empty() {
            return self.wrong("I6: an engine ended while front ends wait".into());
        }
        self.crash_engine(engine, false, 2 * SECOND);
    }

    pub fn mutated(&self, mutation: Mutation) -> bool {
        self.setup.mutation == mutation
    }
}
