//! A decode engine: the product's [`Fetch`] and [`Gatherer`], and the parts of step loop, fetch workers and server
//! around them.
//!
//! A read is one-sided, as over shared memory. Once it was granted, the worker copies the current content of P's block
//! at any time, without a check of the lease. A transport that checks before every batch has fewer behaviours.

use baton_connector::BlockId;
use baton_connector::fetch::{
    Action, Event, FailureKind, Fetch, FetchActions, LoadFailurePolicy, ReleaseReason, State, Verification,
};
use baton_connector::gather::{self, Gatherer};

use crate::bounds::Bounds;
use crate::mutations::Mutation;
use crate::names::{BOTH, LeaseName, ROUNDS, Renaming, Req};
use crate::state_table::Actor;

/// A decode engine's admission of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DecodeAdmission {
    Take,
    /// Without capacity, or draining: another engine may accept it.
    TooFull,
    /// No engine accepts it.
    Refuse,
}

/// The producer's reply to the request to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReadReply {
    Granted(BlockId),
    /// Granted, but the producer still computes the block.
    NotYet(BlockId),
    Gone,
    Refused,
    Unreachable,
}

/// The content of the landing block after the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CopyResult {
    Good,
    Stale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ConsumerInput {
    Decode(Req, Option<LeaseName>, DecodeAdmission),
    /// The scheduler has a block for the request.
    Schedule(Req),
    /// The scheduler finds the whole prompt in the cache.
    FindCached(Req),
    ReadReplied(Req, u8, ReadReply),
    /// A worker has copied, and has not read a stop flag that was set meanwhile.
    Copied(Req, u8, CopyResult),
    /// A worker reads the stop flag of its read, or the connection breaks.
    ReadEnds(Req, u8),
    /// A worker requests the verdict.
    AskVerdict(Req, u8),
    Verdict(Req, u8, Verification),
    /// A heartbeat's reply was "gone".
    LeaseGone(Req),
    Abort(Req),
    HangUp(Req),
    /// The engine generates the first token.
    FirstToken(Req),
    Finish(Req),
    Crash,
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ConsumerOutput {
    Accepted(Req),
    Refused(Req),
    TooFull(Req),
    LoadFailed(Req),
    Complete(Req),
    /// An open call gets no complete reply any more.
    Broken(Req),
    BrokenStream(Req),
    /// Release the lease by a notice that repeats until it is answered.
    Notice(LeaseName),
    /// This rank's reader leaves, or its connection is closed.
    ReaderDeparts(Req, u8, LeaseName),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Block {
    None,
    Landing,
    Active,
}

/// One rank's fetch worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Worker {
    Idle,
    /// The worker has a job and has not sent its request to read.
    Ready,
    /// Granted before the block is computed: the worker waits until the producer has computed it.
    Waiting(BlockId),
    /// Granted: the worker may write into the landing block at any time.
    Granted(BlockId),
    Copied(CopyResult),
    /// The request for the verdict is on its way.
    Asking(CopyResult),
    Over,
    Answered(CopyResult, Verification),
}

/// The phase of a decode without a fetch, or after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Fetching,
    /// Waits for a block, without a handoff.
    Waiting,
    Running,
    Speaking,
    /// The request has ended, its transfer has not.
    Removed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeJob {
    pub phase: Phase,
    pub lease: Option<LeaseName>,
    pub fetch: Option<State>,
    pub block: Block,
    pub stop: bool,
    pub gather: Option<gather::State>,
    pub workers: [Worker; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConsumerView {
    pub alive: bool,
    pub life: u8,
    pub jobs: [Option<DecodeJob>; 4],
    pub aborted_early: [bool; 4],
}

/// The decode engine of the module's documentation.
pub(crate) struct Consumer {
    bounds: Bounds,
    fetches: [Option<Fetch>; 4],
    gathers: [Option<Gatherer>; 4],
    view: ConsumerView,
}

impl ConsumerView {
    /// Free blocks.
    pub(crate) fn free(&self, bounds: &Bounds) -> usize {
        let held = self.jobs.iter().flatten().filter(|job| job.block != Block::None).count();
        usize::from(bounds.decode_blocks) - held
    }
}

impl DecodeJob {
    /// Whether a worker may still write into the landing block.
    fn is_written(&self) -> bool {
        self.workers
            .iter()
            .any(|worker| matches!(worker, Worker::Ready | Worker::Waiting(_) | Worker::Granted(_)))
    }

    /// Whether nothing of the request is left to do.
    fn is_over(&self) -> bool {
        let busy = |worker: &Worker| !matches!(worker, Worker::Idle | Worker::Over | Worker::Answered(..));
        self.phase == Phase::Removed && self.block == Block::None && !self.workers.iter().any(busy)
    }
}

impl Consumer {
    fn job(&mut self, req: Req) -> &mut DecodeJob {
        self.view.jobs[usize::from(req)].as_mut().expect("the event is about a job")
    }

    fn apply(&mut self, req: Req, event: Event, outputs: &mut Vec<ConsumerOutput>) -> Result<(), String> {
        let Some(fetch) = &mut self.fetches[usize::from(req)] else { return Ok(()) };
        let actions = fetch.apply(event);
        self.carry_out(req, actions, outputs)
    }

    fn carry_out(
        &mut self,
        req: Req,
        actions: FetchActions,
        outputs: &mut Vec<ConsumerOutput>,
    ) -> Result<(), String> {
        let ranks = usize::from(self.bounds.ranks);
        for action in actions {
            let removed = self.job(req).phase == Phase::Removed;
            match action {
                Action::StartRead => {
                    self.job(req).workers[..ranks].fill(Worker::Ready);
                    self.gathers[usize::from(req)] = Some(Gatherer::new(ranks));
                }
                Action::StopRead => self.job(req).stop = true,
                // Workers request verdicts themselves, and heartbeats follow the fetch's state.
                Action::AskVerdict | Action::StopHeartbeat => {}
                Action::Land => self.land(req)?,
                Action::FreeLanding => {
                    let job = self.job(req);
                    if job.is_written() {
                        return Err(
                            "a landing block is freed while a transfer may write into it (invariant 3)"
                                .into(),
                        );
                    }
                    if std::mem::replace(&mut job.block, Block::None) != Block::Landing {
                        return Err("a landing block is freed twice (invariant 2)".into());
                    }
                }
                Action::ReleaseAtProducer(reason) => {
                    let left_to_router = reason == ReleaseReason::LoadFailed
                        && self.bounds.policy == LoadFailurePolicy::Fail
                        && !self.bounds.foreign_router;
                    let lease = self.job(req).lease.expect("it fetches");
                    if !left_to_router && !self.bounds.has(Mutation::SilentRefusal) {
                        outputs.push(ConsumerOutput::Notice(lease));
                    }
                }
                Action::Recompute | Action::Fail(_) if removed => {}
                Action::Recompute => self.job(req).phase = Phase::Waiting,
                Action::Fail(_) => {
                    self.job(req).phase = Phase::Removed;
                    outputs.push(ConsumerOutput::LoadFailed(req));
                }
            }
        }
        Ok(())
    }

    fn land(&mut self, req: Req) -> Result<(), String> {
        let job = self.job(req);
        if job.phase == Phase::Removed {
            return Err("blocks land for a request that is over (invariant 6)".into());
        }
        let stale = job.workers.iter().any(|worker| {
            matches!(
                worker,
                Worker::Answered(CopyResult::Stale, _)
                    | Worker::Copied(CopyResult::Stale)
                    | Worker::Asking(CopyResult::Stale)
            )
        });
        if stale {
            return Err("stale bytes reach a forward pass: a wrong answer (invariant 3)".into());
        }
        job.block = Block::Active;
        job.phase = Phase::Running;
        Ok(())
    }

    /// All requests that an abort by this request's name ends.
    fn same_name(&self, req: Req) -> impl Iterator<Item = Req> + use<> {
        let one_name = self.bounds.has(Mutation::OneNameForBothRounds);
        ROUNDS.into_iter().filter(move |&other| other == req || one_name && other == req ^ 2)
    }

    fn decode(
        &mut self,
        req: Req,
        lease: Option<LeaseName>,
        how: DecodeAdmission,
        outputs: &mut Vec<ConsumerOutput>,
    ) -> Result<(), String> {
        let silent = self.bounds.has(Mutation::SilentRefusal);
        let notice = |outputs: &mut Vec<ConsumerOutput>| {
            outputs.extend(lease.filter(|_| !silent).map(ConsumerOutput::Notice));
        };
        match how {
            DecodeAdmission::Take
                if self.same_name(req).any(|other| self.view.aborted_early[usize::from(other)]) =>
            {
                if !self.view.aborted_early[usize::from(req)] {
                    return Err("a request is aborted that was not given up".into());
                }
                // Aborted before it arrived. The caller has closed the connection, so the response has no receiver.
                notice(outputs);
                outputs.push(ConsumerOutput::Refused(req));
            }
            DecodeAdmission::Take => {
                self.fetches[usize::from(req)] = lease.map(|_| Fetch::new(self.bounds.policy));
                let phase = if lease.is_some() { Phase::Fetching } else { Phase::Waiting };
                self.view.jobs[usize::from(req)] = Some(DecodeJob {
                    phase,
                    lease,
                    fetch: None,
                    block: Block::None,
                    stop: false,
                    gather: None,
                    workers: [Worker::Idle; 2],
                });
            }
            DecodeAdmission::TooFull => {
                // A router that settles itself sends the same handoff to another engine.
                if self.bounds.foreign_router {
                    notice(outputs);
                }
                outputs.push(ConsumerOutput::TooFull(req));
            }
            DecodeAdmission::Refuse => {
                notice(outputs);
                outputs.push(ConsumerOutput::Refused(req));
            }
        }
        Ok(())
    }

    fn schedule(&mut self, req: Req, outputs: &mut Vec<ConsumerOutput>) -> Result<(), String> {
        let job = self.job(req);
        if job.phase == Phase::Waiting {
            job.block = Block::Active;
            job.phase = Phase::Running;
            return Ok(());
        }
        job.block = Block::Landing;
        self.apply(req, Event::Admitted, outputs)?;
        self.apply(req, Event::BlocksReserved, outputs)
    }

    /// Handles a worker's report. The gatherer decides what the report means for the fetch.
    fn report(
        &mut self,
        req: Req,
        rank: u8,
        event: gather::Event,
        outputs: &mut Vec<ConsumerOutput>,
    ) -> Result<(), String> {
        let Some(gather) = &mut self.gathers[usize::from(req)] else { return Ok(()) };
        for action in gather.apply(rank.into(), event).iter() {
            match action {
                gather::Action::StopOthers => self.job(req).stop = true,
                gather::Action::Transfer(Ok(())) => self.apply(req, Event::TransferDone, outputs)?,
                gather::Action::Transfer(Err(kind)) => {
                    self.apply(req, Event::TransferFailed(kind), outputs)?
                }
                gather::Action::Verdict(answer) => {
                    let unchecked =
                        self.bounds.has(Mutation::VerdictNotChecked) && answer == Verification::Gone;
                    self.apply(
                        req,
                        Event::Verdict(if unchecked { Verification::Valid } else { answer }),
                        outputs,
                    )?;
                }
            }
        }
        Ok(())
    }

    fn worker_fails(
        &mut self,
        req: Req,
        rank: u8,
        kind: FailureKind,
        outputs: &mut Vec<ConsumerOutput>,
    ) -> Result<(), String> {
        let job = self.job(req);
        let was = std::mem::replace(&mut job.workers[usize::from(rank)], Worker::Over);
        if matches!(was, Worker::Waiting(_) | Worker::Granted(_)) {
            let lease = job.lease.expect("it reads");
            outputs.push(ConsumerOutput::ReaderDeparts(req, rank, lease));
        }
        self.report(req, rank, gather::Event::Failed(kind), outputs)
    }

    fn verdict(
        &mut self,
        req: Req,
        rank: u8,
        answer: Verification,
        outputs: &mut Vec<ConsumerOutput>,
    ) -> Result<(), String> {
        let job = self.job(req);
        let Worker::Asking(bytes) = job.workers[usize::from(rank)] else { return Ok(()) };
        job.workers[usize::from(rank)] = Worker::Answered(bytes, answer);
        if answer == Verification::Unknown {
            let lease = job.lease.expect("it reads");
            outputs.push(ConsumerOutput::ReaderDeparts(req, rank, lease));
        }
        self.report(req, rank, gather::Event::Verdict(answer), outputs)
    }

    /// Ends a decode, if it has not ended. Returns whether it had not.
    fn remove(&mut self, req: Req, outputs: &mut Vec<ConsumerOutput>) -> Result<bool, String> {
        let live = self.view.jobs[usize::from(req)].as_ref().is_some_and(|job| job.phase != Phase::Removed);
        if !live {
            return Ok(false);
        }
        let job = self.job(req);
        let was = std::mem::replace(&mut job.phase, Phase::Removed);
        match was {
            Phase::Fetching => self.apply(req, Event::Abort, outputs)?,
            Phase::Running | Phase::Speaking => job.block = Block::None,
            Phase::Waiting | Phase::Removed => {}
        }
        if self.bounds.has(Mutation::LandingFreedAtOnce) {
            self.job(req).block = Block::None;
        }
        Ok(true)
    }

    fn crash(&mut self, outputs: &mut Vec<ConsumerOutput>) {
        for req in ROUNDS {
            let Some(job) = self.view.jobs[usize::from(req)] else { continue };
            match job.phase {
                Phase::Fetching | Phase::Waiting | Phase::Running => {
                    outputs.push(ConsumerOutput::Broken(req))
                }
                Phase::Speaking => outputs.push(ConsumerOutput::BrokenStream(req)),
                Phase::Removed => {}
            }
            for rank in BOTH {
                let reads = matches!(
                    job.workers[usize::from(rank)],
                    Worker::Waiting(_) | Worker::Granted(_) | Worker::Copied(_) | Worker::Asking(_)
                );
                if let (true, Some(lease)) = (reads, job.lease) {
                    outputs.push(ConsumerOutput::ReaderDeparts(req, rank, lease));
                }
            }
        }
        let life = self.view.life + 1;
        *self = Self::born(&self.bounds);
        self.view.alive = false;
        self.view.life = life;
    }

    fn take_input(&mut self, input: ConsumerInput, outputs: &mut Vec<ConsumerOutput>) -> Result<(), String> {
        match input {
            ConsumerInput::Decode(req, lease, how) => self.decode(req, lease, how, outputs)?,
            ConsumerInput::Schedule(req) => self.schedule(req, outputs)?,
            ConsumerInput::FindCached(req) => {
                self.job(req).block = Block::Landing;
                self.apply(req, Event::AlreadyCached, outputs)?;
            }
            ConsumerInput::ReadReplied(req, rank, reply) => match reply {
                ReadReply::Granted(block) => {
                    self.job(req).workers[usize::from(rank)] = Worker::Granted(block)
                }
                ReadReply::NotYet(block) => self.job(req).workers[usize::from(rank)] = Worker::Waiting(block),
                ReadReply::Gone => self.worker_fails(req, rank, FailureKind::Gone, outputs)?,
                ReadReply::Refused => self.worker_fails(req, rank, FailureKind::Refused, outputs)?,
                ReadReply::Unreachable => self.worker_fails(req, rank, FailureKind::Unreachable, outputs)?,
            },
            ConsumerInput::Copied(req, rank, bytes) => {
                let job = self.job(req);
                if job.block != Block::Landing {
                    return Err("a transfer writes into a block that was given back (invariant 3)".into());
                }
                job.workers[usize::from(rank)] = Worker::Copied(bytes);
                self.report(req, rank, gather::Event::Done, outputs)?;
            }
            ConsumerInput::ReadEnds(req, rank) => {
                self.worker_fails(req, rank, FailureKind::Transfer, outputs)?
            }
            ConsumerInput::AskVerdict(req, rank) => {
                let worker = &mut self.job(req).workers[usize::from(rank)];
                let Worker::Copied(bytes) = *worker else { unreachable!("it has copied") };
                *worker = Worker::Asking(bytes);
            }
            ConsumerInput::Verdict(req, rank, answer) => {
                if self.view.jobs[usize::from(req)].is_some() {
                    self.verdict(req, rank, answer, outputs)?;
                }
            }
            ConsumerInput::LeaseGone(req) => {
                if self.view.jobs[usize::from(req)].is_some_and(|job| job.phase == Phase::Fetching) {
                    self.apply(req, Event::LeaseGone, outputs)?;
                }
            }
            ConsumerInput::Abort(req) => {
                let lives = |other: Req| {
                    self.view.jobs[usize::from(other)].is_some_and(|job| job.phase != Phase::Removed)
                };
                if self.same_name(req).any(|other| other != req && lives(other)) {
                    return Err("a request is aborted that was not given up".into());
                }
                if !self.remove(req, outputs)? {
                    self.view.aborted_early[usize::from(req)] = true;
                }
            }
            ConsumerInput::HangUp(req) => drop(self.remove(req, outputs)?),
            ConsumerInput::FirstToken(req) => {
                self.job(req).phase = Phase::Speaking;
                outputs.push(ConsumerOutput::Accepted(req));
            }
            ConsumerInput::Finish(req) => {
                let job = self.job(req);
                job.phase = Phase::Removed;
                job.block = Block::None;
                outputs.push(ConsumerOutput::Complete(req));
            }
            ConsumerInput::Crash => self.crash(outputs),
            ConsumerInput::Restart => self.view.alive = true,
        }
        Ok(())
    }
}

impl Actor for Consumer {
    type Input = ConsumerInput;
    type Output = ConsumerOutput;
    type View = ConsumerView;

    fn born(bounds: &Bounds) -> Self {
        let view = ConsumerView { alive: true, life: 0, jobs: [None; 4], aborted_early: [false; 4] };
        Self { bounds: *bounds, fetches: [const { None }; 4], gathers: [const { None }; 4], view }
    }

    fn live(&mut self, input: ConsumerInput, outputs: &mut Vec<ConsumerOutput>) -> Result<(), String> {
        self.take_input(input, outputs)?;
        for req in ROUNDS.map(usize::from) {
            let Some(job) = &mut self.view.jobs[req] else { continue };
            if matches!(job.phase, Phase::Waiting | Phase::Running | Phase::Speaking) {
                // The handoff is not used any more, but a worker may still run.
                self.fetches[req] = None;
            }
            job.fetch = self.fetches[req].as_ref().map(Fetch::state);
            job.gather = self.gathers[req].as_ref().map(Gatherer::state);
            if job.is_over() {
                self.view.jobs[req] = None;
                self.fetches[req] = None;
                self.gathers[req] = None;
            }
        }
        Ok(())
    }

    fn view(&self) -> ConsumerView {
        self.view.clone()
    }

    fn renamed(input: ConsumerInput, by: Renaming) -> ConsumerInput {
        match input {
            ConsumerInput::Decode(req, lease, how) => {
                ConsumerInput::Decode(by.req(req), lease.map(|lease| lease.renamed(by)), how)
            }
            ConsumerInput::Schedule(req) => ConsumerInput::Schedule(by.req(req)),
            ConsumerInput::FindCached(req) => ConsumerInput::FindCached(by.req(req)),
            ConsumerInput::ReadReplied(req, rank, reply) => {
                ConsumerInput::ReadReplied(by.req(req), rank, reply)
            }
            ConsumerInput::Copied(req, rank, bytes) => ConsumerInput::Copied(by.req(req), rank, bytes),
            ConsumerInput::ReadEnds(req, rank) => ConsumerInput::ReadEnds(by.req(req), rank),
            ConsumerInput::AskVerdict(req, rank) => ConsumerInput::AskVerdict(by.req(req), rank),
            ConsumerInput::Verdict(req, rank, answer) => ConsumerInput::Verdict(by.req(req), rank, answer),
            ConsumerInput::LeaseGone(req) => ConsumerInput::LeaseGone(by.req(req)),
            ConsumerInput::Abort(req) => ConsumerInput::Abort(by.req(req)),
            ConsumerInput::HangUp(req) => ConsumerInput::HangUp(by.req(req)),
            ConsumerInput::FirstToken(req) => ConsumerInput::FirstToken(by.req(req)),
            ConsumerInput::Finish(req) => ConsumerInput::Finish(by.req(req)),
            ConsumerInput::Crash | ConsumerInput::Restart => input,
        }
    }
}
