//! The possible steps of a state, and the conditions that a state must satisfy.

use std::fmt;

use baton_connector::exchange::State as Exchanging;
use baton_connector::fetch::State as Fetching;
use baton_connector::ledger::LiveSnapshot;

use crate::bounds::Bounds;
use crate::consumer::{self, Block, Phase, Worker};
use crate::messages::{Loss, Message};
use crate::mutations::Mutation;
use crate::names::{LeaseName, ROUNDS, ReaderName, Req, shown};
use crate::producer::{Content, PrefillJob, has_clock, name};
use crate::system::{SystemModel, WorkingState};

/// One possible step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A message arrives, and its receiver admits it or not.
    Arrive(Message, AdmissionChoice),
    // Faults.
    ArriveTwice(Message),
    Lose(Message),
    Silence(Req),
    /// A transfer breaks off.
    ReadBreaks(u8, Req, u8),
    /// P has granted or answered, and its reply is lost.
    AnswerLost(u8, Req, u8),
    AskTwice(u8, Req, u8),
    /// A lease expires while it is in use. The lease of the other request can be renewed just before.
    RunsOutEarly(u8, Option<Req>),
    /// The router stops waiting for a prefill that still computes after an early lease.
    PrefillSilence(Req),
    AgesPass(u8),
    CrashPrefill(u8),
    CrashDecode(u8, MailFate),
    CrashRouter(MailFate),
    // Restarts.
    RestartPrefill(u8),
    RestartDecode(u8),
    RestartRouter,
    // The router and its clients.
    AskPrefill(Req, u8),
    AskDecode(Req, u8),
    SkipPrefill(Req),
    NotAdmitted(Req),
    GiveUp(Req),
    HandoffSpent(Req),
    /// The router gives up a decode engine whose blocks will not be computed.
    ProducerFailed(Req),
    ClientCancels(Req),
    // P.
    Start(u8, Req),
    OpenLeaseEarly(u8, Req),
    Finish(u8, Req),
    EndPrefill(u8, Req),
    TakeMail(u8, Req),
    TimePasses(u8),
    // D.
    Schedule(u8, Req),
    FindCached(u8, Req),
    AskToRead(u8, Req, u8),
    /// A block that the worker waits for has been computed, or will not be.
    AskAgain(u8, Req, u8),
    Copy(u8, Req, u8),
    StopRead(u8, Req, u8),
    AskVerdict(u8, Req, u8),
    Heartbeat(u8, Req),
    FirstToken(u8, Req),
    Complete(u8, Req),
}

/// What happens to messages in the memory of an actor that crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MailFate {
    /// The message was already on its way and still arrives.
    Arrives,
    Lost,
}

/// An engine's admission of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionChoice {
    Takes,
    TooFull,
    Refuses,
}

impl SystemModel {
    /// All possible steps of a state. An error means that the state is not allowed, or that a run may not end in it.
    pub(crate) fn list(&mut self, scene: &WorkingState, into: &mut Vec<Step>) -> Result<(), String> {
        self.arrivals(scene, into);
        if !scene.router_up {
            into.push(Step::RestartRouter);
        }
        for req in 0..self.bounds.requests {
            self.at_router(scene, req, into);
        }
        for p in 0..self.bounds.prefill {
            self.at_producer(scene, p, into);
        }
        for d in 0..self.bounds.decode {
            self.at_consumer(scene, d, into);
        }
        if into.is_empty() {
            // Every step that needs no waiting has been taken.
            self.check_no_lease_left(scene)?;
            for p in 0..self.bounds.prefill {
                let view = self.producers.view(scene.prefill[usize::from(p)]);
                let lends = view.ledger.live.iter().any(has_clock);
                if lends && !self.bounds.has(Mutation::NoExpiry) {
                    into.push(Step::TimePasses(p));
                }
            }
            if into.is_empty() {
                return self.everything_is_free(scene);
            }
        }
        // Optional steps: a run must end well without them.
        for req in (0..self.bounds.requests).filter(|_| self.bounds.clients_cancel && scene.router_up) {
            let view = self.routers.view(scene.router[usize::from(req)]);
            into.extend((view.has_begun() && !view.is_over()).then_some(Step::ClientCancels(req)));
        }
        if scene.faults_left > 0 {
            self.faults(scene, into);
        }
        Ok(())
    }

    /// Without a fault no block may need the clock to become free.
    fn check_no_lease_left(&self, scene: &WorkingState) -> Result<(), String> {
        let lent = scene.prefill.iter().any(|&p| !self.producers.view(p).ledger.live.is_empty());
        if lent && scene.faults_left == self.bounds.faults {
            return Err(
                "nothing went wrong, every process is alive and done, and blocks are still leased".into()
            );
        }
        Ok(())
    }

    /// Invariant 5.
    fn everything_is_free(&self, scene: &WorkingState) -> Result<(), String> {
        let require = |what: bool, why: &str| {
            if what { Ok(()) } else { Err(format!("at the end {why} (invariant 5)")) }
        };
        for id in scene.prefill {
            let view = self.producers.view(id);
            require(view.ledger.live.is_empty(), "a lease is left that never ends")?;
            require(view.jobs == [PrefillJob::None; 4], "a prefill engine still tracks a request")?;
            require(
                view.blocks.iter().all(|&content| content == Content::Free),
                "a prefill engine lacks a block",
            )?;
        }
        for id in scene.decode {
            let view = self.consumers.view(id);
            require(
                view.free(&self.bounds) == usize::from(self.bounds.decode_blocks),
                "a decode engine lacks a block",
            )?;
            require(view.jobs == [None; 4], "a decode engine still tracks a request")?;
        }
        for req in 0..self.bounds.requests {
            require(self.routers.view(scene.router[usize::from(req)]).is_over(), "a request has no outcome")?;
        }
        require(scene.net.is_empty(), "a message is undelivered")
    }

    fn arrivals(&mut self, scene: &WorkingState, into: &mut Vec<Step>) {
        for (at, &number) in scene.net.iter().enumerate() {
            // Two messages of the same kind have the same effect.
            if scene.net[..at].contains(&number) || self.waits(scene, number) {
                continue;
            }
            let message = self.messages.get(number);
            into.push(Step::Arrive(message, AdmissionChoice::Takes));
            if self.bounds.refusals && matches!(message, Message::Prefill(..) | Message::Decode(..)) {
                into.extend(
                    [AdmissionChoice::TooFull, AdmissionChoice::Refuses]
                        .map(|mood| Step::Arrive(message, mood)),
                );
            }
        }
    }

    /// The rounds that engines can receive.
    fn rounds(&self) -> impl Iterator<Item = Req> + use<> {
        let Bounds { requests, recompute, resume, .. } = self.bounds;
        ROUNDS.into_iter().filter(move |&req| req & 1 < requests && (req < 2 || recompute || resume))
    }

    fn waits(&self, scene: &WorkingState, number: u16) -> bool {
        let message = self.messages.get(number);
        scene.net.iter().any(|&other| message.waits_for(self.messages.get(other)))
    }

    fn at_router(&self, scene: &WorkingState, req: Req, into: &mut Vec<Step>) {
        let view = self.routers.view(scene.router[usize::from(req)]);
        if !scene.router_up || view.is_over() {
            return;
        }
        let waits_in_vain = view.failed
            && matches!(view.exchange.state(), Exchanging::Decoding(..) | Exchanging::Accepted(..));
        into.extend(waits_in_vain.then_some(Step::ProducerFailed(req)));
        let (prefill, decode) = (0..self.bounds.prefill, 0..self.bounds.decode);
        match view.exchange.state() {
            Exchanging::Choosing => {
                let mut untried: Vec<_> = prefill
                    .map(|p| view.round << 1 | p)
                    .filter(|&p| !view.prefill_sent[usize::from(p)])
                    .collect();
                if view.round == 1 && self.bounds.fallback {
                    untried.clear();
                }
                if untried.is_empty() {
                    into.push(if self.bounds.fallback { Step::SkipPrefill(req) } else { Step::GiveUp(req) });
                }
                // Engines may lack capacity at any choice.
                into.push(Step::NotAdmitted(req));
                into.extend(untried.into_iter().map(|p| Step::AskPrefill(req, p)));
            }
            Exchanging::ReadyToDecode(lent) => {
                let untried: Vec<_> = decode
                    .map(|d| view.round << 1 | d)
                    .filter(|&d| !view.decode_sent[usize::from(d)])
                    .collect();
                // After some failures no other engine is tried.
                let spent = view.spent && view.round == 0 && lent.is_some() && self.bounds.recompute;
                if spent {
                    into.push(Step::HandoffSpent(req));
                } else if untried.is_empty() {
                    into.push(Step::GiveUp(req));
                }
                into.extend(untried.into_iter().map(|d| Step::AskDecode(req, d)));
            }
            _ => {}
        }
    }

    fn at_producer(&self, scene: &WorkingState, p: u8, into: &mut Vec<Step>) {
        let view = self.producers.view(scene.prefill[usize::from(p)]);
        if !view.alive {
            return into.push(Step::RestartPrefill(p));
        }
        for req in self.rounds() {
            match view.jobs[usize::from(req)] {
                PrefillJob::None => {}
                PrefillJob::Waiting => {
                    into.extend(view.blocks.contains(&Content::Free).then_some(Step::Start(p, req)))
                }
                PrefillJob::Running(_) => {
                    into.push(Step::Finish(p, req));
                    // A recomputation gets no early lease, and neither does an aborted request.
                    let known = view.ledger.released_early.contains(&name(req));
                    into.extend(
                        (self.bounds.early && req < 2 && !known).then_some(Step::OpenLeaseEarly(p, req)),
                    );
                }
                PrefillJob::Lending(_) => {
                    into.push(Step::Finish(p, req));
                    into.extend(view.ended_early[usize::from(req)].then_some(Step::EndPrefill(p, req)));
                }
            }
            into.extend(view.mail[usize::from(req)].then_some(Step::TakeMail(p, req)));
        }
    }

    fn at_consumer(&self, scene: &WorkingState, d: u8, into: &mut Vec<Step>) {
        let view = self.consumers.view(scene.decode[usize::from(d)]);
        if !view.alive {
            return into.push(Step::RestartDecode(d));
        }
        for req in self.rounds() {
            let Some(job) = &view.jobs[usize::from(req)] else { continue };
            match job.phase {
                Phase::Fetching | Phase::Waiting
                    if job.block == Block::None && view.free(&self.bounds) > 0 =>
                {
                    into.push(Step::Schedule(d, req));
                    if self.bounds.cached && job.fetch == Some(Fetching::Queued) {
                        into.push(Step::FindCached(d, req));
                    }
                }
                Phase::Running => into.push(Step::FirstToken(d, req)),
                Phase::Speaking => into.push(Step::Complete(d, req)),
                Phase::Fetching | Phase::Waiting | Phase::Removed => {}
            }
            // A heartbeat changes nothing before that. `RunsOutEarly` covers lost heartbeats.
            if job.fetch == Some(Fetching::Queued) && self.lease_is_over(scene, job.lease) {
                into.push(Step::Heartbeat(d, req));
            }
            self.at_workers(scene, (d, req), job, into);
        }
    }

    /// Whether a lease's prefill still computes, and neither has failed.
    fn grows(&self, scene: &WorkingState, lease: LeaseName) -> bool {
        let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
        let ours = |live: &LiveSnapshot| {
            !has_clock(live)
                && live.ready == 0
                && view.blocks[live.blocks[0].index()].owner() == Some(lease.local.tag())
        };
        view.alive && view.life == lease.local.life && view.ledger.live.iter().any(ours)
    }

    /// Whether a heartbeat's reply would be "gone" for the first time.
    fn lease_is_over(&self, scene: &WorkingState, lease: Option<LeaseName>) -> bool {
        lease.is_some_and(|lease| {
            let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
            let is_notified = |number: &u16| matches!(self.messages.get(*number), Message::LeaseGone(reader) if reader.req == lease.local.req);
            let over = view.ledger.live.iter().all(|live| live.blocks.iter().all(|block| {
                view.blocks[block.index()].owner() != Some(lease.local.tag())
            }));
            view.alive && view.life == lease.local.life && over && !scene.net.iter().any(is_notified)
        })
    }

    fn at_workers(
        &self,
        scene: &WorkingState,
        (d, req): (u8, Req),
        job: &consumer::DecodeJob,
        into: &mut Vec<Step>,
    ) {
        for rank in 0..self.bounds.ranks {
            match job.workers[usize::from(rank)] {
                Worker::Ready if job.stop => into.push(Step::StopRead(d, req, rank)),
                Worker::Ready => into.push(Step::AskToRead(d, req, rank)),
                Worker::Waiting(_) if job.stop => into.push(Step::StopRead(d, req, rank)),
                Worker::Waiting(_) => {
                    let grows = self.grows(scene, job.lease.expect("it reads"));
                    into.extend((!grows).then_some(Step::AskAgain(d, req, rank)));
                }
                Worker::Granted(_) => {
                    into.push(Step::Copy(d, req, rank));
                    into.extend(job.stop.then_some(Step::StopRead(d, req, rank)));
                }
                Worker::Copied(_) => into.push(Step::AskVerdict(d, req, rank)),
                Worker::Idle | Worker::Asking(_) | Worker::Answered(..) | Worker::Over => {}
            }
        }
    }

    fn faults(&mut self, scene: &WorkingState, into: &mut Vec<Step>) {
        for (at, &number) in scene.net.iter().enumerate() {
            let message = self.messages.get(number);
            if scene.net[..at].contains(&number) {
                continue;
            }
            if message.loss() != Loss::Impossible {
                into.push(Step::Lose(message));
            }
            if message.is_repeated() && !self.waits(scene, number) {
                into.push(Step::ArriveTwice(message));
            }
        }
        for req in 0..self.bounds.requests {
            let view = self.routers.view(scene.router[usize::from(req)]);
            let waits = !matches!(
                view.exchange.state(),
                Exchanging::Choosing | Exchanging::ReadyToDecode(_) | Exchanging::Done(_)
            );
            into.extend((scene.router_up && !view.is_over() && waits).then_some(Step::Silence(req)));
            let computing = scene.router_up && view.computing.is_some();
            into.extend(computing.then_some(Step::PrefillSilence(req)));
        }
        for p in 0..self.bounds.prefill {
            let view = self.producers.view(scene.prefill[usize::from(p)]);
            if view.alive {
                into.push(Step::CrashPrefill(p));
                let ledger = &view.ledger;
                let clocks = ledger.live.iter().filter(|live| has_clock(live)).count();
                into.extend((clocks > 0).then_some(Step::RunsOutEarly(p, None)));
                if clocks > 1 {
                    into.extend(self.rounds().map(|req| Step::RunsOutEarly(p, Some(req))));
                }
                let remembers = !ledger.ended.is_empty() || !ledger.released_early.is_empty();
                into.extend(remembers.then_some(Step::AgesPass(p)));
            }
        }
        for d in 0..self.bounds.decode {
            self.faults_of_consumer(scene, d, into);
        }
        if scene.router_up {
            into.extend([MailFate::Arrives, MailFate::Lost].map(Step::CrashRouter));
        }
    }

    fn faults_of_consumer(&self, scene: &WorkingState, d: u8, into: &mut Vec<Step>) {
        let view = self.consumers.view(scene.decode[usize::from(d)]);
        if !view.alive {
            return;
        }
        into.push(Step::CrashDecode(d, MailFate::Lost));
        // Without a notice in flight both cases are the same.
        if scene.net.iter().any(|&number| self.messages.get(number).is_of_decode(d)) {
            into.push(Step::CrashDecode(d, MailFate::Arrives));
        }
        for req in self.rounds() {
            let Some(job) = &view.jobs[usize::from(req)] else { continue };
            for rank in 0..self.bounds.ranks {
                match job.workers[usize::from(rank)] {
                    Worker::Ready => into.push(Step::AnswerLost(d, req, rank)),
                    Worker::Waiting(_) | Worker::Granted(_) => into.push(Step::ReadBreaks(d, req, rank)),
                    Worker::Copied(_) => into.push(Step::AskTwice(d, req, rank)),
                    Worker::Idle | Worker::Asking(_) | Worker::Answered(..) | Worker::Over => {}
                }
            }
        }
    }

    /// The reader's name at P.
    pub(crate) fn reader(&self, scene: &WorkingState, d: u8, req: Req, rank: u8) -> ReaderName {
        ReaderName { d, life: self.consumers.view(scene.decode[usize::from(d)]).life, req, rank }
    }
}

impl Step {
    /// The kind of fault.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::ArriveTwice(_) | Self::AskTwice(..) => "repeated",
            Self::Lose(_) => "lost",
            Self::Silence(_) | Self::PrefillSilence(_) => "silence",
            Self::ReadBreaks(..) | Self::AnswerLost(..) => "broken read",
            Self::RunsOutEarly(..) => "early",
            Self::AgesPass(_) => "ages",
            Self::CrashPrefill(_) => "crash of P",
            Self::CrashDecode(..) => "crash of D",
            Self::CrashRouter(_) => "crash of the router",
            _ => "none",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = |p: u8| format!("P{}", p + 1);
        let d = |d: u8| format!("D{}", d + 1);
        let r = shown;
        match *self {
            Self::Arrive(message, AdmissionChoice::Takes) => write!(f, "{message}"),
            Self::Arrive(message, mood) => write!(f, "{message}, which answers: {mood:?}"),
            Self::ArriveTwice(message) => write!(f, "FAULT repeated: {message}"),
            Self::Lose(message) => write!(f, "FAULT lost: {message}"),
            Self::Silence(req) => write!(f, "FAULT the router waits no longer for {}", r(req)),
            Self::ReadBreaks(at, req, rank) => {
                write!(f, "FAULT {}'s read for {} breaks off (rank {rank})", d(at), r(req))
            }
            Self::AnswerLost(at, req, rank) => {
                write!(f, "FAULT {} may read for {}, but does not hear it (rank {rank})", d(at), r(req))
            }
            Self::AskTwice(at, req, rank) => {
                write!(f, "FAULT repeated: {} says \"done\" for {} (rank {rank})", d(at), r(req))
            }
            Self::RunsOutEarly(at, None) => write!(f, "FAULT at {} a lease or a drain runs out", p(at)),
            Self::RunsOutEarly(at, Some(req)) => {
                write!(f, "FAULT at {} a lease or a drain runs out, but that of {} is renewed", p(at), r(req))
            }
            Self::PrefillSilence(req) => {
                write!(f, "FAULT the router waits no longer for the end of the prefill of {}", r(req))
            }
            Self::AgesPass(at) => write!(f, "FAULT {} forgets what has ended", p(at)),
            Self::CrashPrefill(at) => write!(f, "FAULT {} dies", p(at)),
            Self::CrashDecode(at, memory) => write!(f, "FAULT {} dies; its notices: {memory:?}", d(at)),
            Self::CrashRouter(memory) => write!(f, "FAULT the router dies; its messages: {memory:?}"),
            Self::RestartPrefill(at) => write!(f, "{} starts again", p(at)),
            Self::RestartDecode(at) => write!(f, "{} starts again", d(at)),
            Self::RestartRouter => write!(f, "the router starts again"),
            Self::AskPrefill(req, at) => write!(f, "the router chooses {} for {}", p(at & 1), r(req)),
            Self::AskDecode(req, at) => write!(f, "the router chooses {} for {}", d(at & 1), r(req)),
            Self::SkipPrefill(req) => write!(f, "the router does without a prefill engine for {}", r(req)),
            Self::HandoffSpent(req) => write!(f, "the router has {} recomputed", r(req)),
            Self::ProducerFailed(req) => {
                write!(f, "the router gives the decode of {} up: its prefill has failed", r(req))
            }
            Self::NotAdmitted(req) => write!(f, "the router has no room for {}", r(req)),
            Self::GiveUp(req) => write!(f, "the router gives {} up", r(req)),
            Self::ClientCancels(req) => write!(f, "the client of {} leaves", r(req)),
            Self::Start(at, req) => write!(f, "{} starts {}", p(at), r(req)),
            Self::OpenLeaseEarly(at, req) => write!(f, "{} lends {} while it computes it", p(at), r(req)),
            Self::Finish(at, req) => write!(f, "{} finishes {}", p(at), r(req)),
            Self::EndPrefill(at, req) => {
                write!(f, "{}'s step loop hears that the lease of {} has ended", p(at), r(req))
            }
            Self::TakeMail(at, req) => write!(f, "{}'s step loop hears of the abort of {}", p(at), r(req)),
            Self::TimePasses(at) => write!(f, "time passes at {}", p(at)),
            Self::Schedule(at, req) => write!(f, "{} has a block for {}", d(at), r(req)),
            Self::FindCached(at, req) => write!(f, "{} has the prompt of {} cached", d(at), r(req)),
            Self::AskToRead(at, req, rank) => {
                write!(f, "{} asks to read for {} (rank {rank})", d(at), r(req))
            }
            Self::AskAgain(at, req, rank) => {
                write!(f, "{} hears what became of what it waits for, for {} (rank {rank})", d(at), r(req))
            }
            Self::Copy(at, req, rank) => write!(f, "{} copies for {} (rank {rank})", d(at), r(req)),
            Self::StopRead(at, req, rank) => {
                write!(f, "{} stops its read for {} (rank {rank})", d(at), r(req))
            }
            Self::AskVerdict(at, req, rank) => {
                write!(f, "{} says \"done\" for {} (rank {rank})", d(at), r(req))
            }
            Self::Heartbeat(at, req) => write!(f, "{} beats for {}", d(at), r(req)),
            Self::FirstToken(at, req) => write!(f, "{} has the first token of {}", d(at), r(req)),
            Self::Complete(at, req) => write!(f, "{} finishes {}", d(at), r(req)),
        }
    }
}
