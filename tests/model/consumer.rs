//! A decode engine: the product's [`Fetch`] and [`Gather`], and around them what step loop, fetch workers and server do
//! with them.
//!
//! A read is one-sided, as over shared memory: once it was granted the worker copies whatever is in P's block, whenever
//! it gets to it, and nobody asks whether the lease is still live. A transport that asks before every batch does less.

use baton_connector::BlockId;
use baton_connector::fetch::{
    Action, Actions, Answer, Event, FailureKind, Fetch, LoadFailurePolicy, Reason, State,
};
use baton_connector::gather::{self, Gather};

use crate::bounds::Bounds;
use crate::cast::Party;
use crate::mutations::Mutation;
use crate::names::{BOTH, LeaseName, ROUNDS, Renaming, Req};

/// What a decode engine says to a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Admission {
    Take,
    /// Full, or draining: another engine may take it.
    TooFull,
    /// No engine would take it.
    Refuse,
}

/// How the producer answered the request to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Asked {
    Granted(BlockId),
    /// Granted, but the producer still computes it.
    NotYet(BlockId),
    Gone,
    Refused,
    Unreachable,
}

/// What is in the landing block after the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bytes {
    Good,
    Stale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    Decode(Req, Option<LeaseName>, Admission),
    /// The scheduler has a block for it.
    Schedule(Req),
    /// The scheduler finds all of its prompt in the cache.
    FindCached(Req),
    ReadAsked(Req, u8, Asked),
    /// A worker has copied, and has not seen a stop flag that was raised meanwhile.
    Copied(Req, u8, Bytes),
    /// A worker sees that its read is to stop, or its connection breaks.
    ReadEnds(Req, u8),
    /// A worker asks for the verdict.
    AskVerdict(Req, u8),
    Verdict(Req, u8, Answer),
    /// A heartbeat was answered "gone".
    LeaseGone(Req),
    Abort(Req),
    HangUp(Req),
    /// The first token.
    Speak(Req),
    Finish(Req),
    Crash,
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    Accepted(Req),
    Refused(Req),
    TooFull(Req),
    LoadFailed(Req),
    Complete(Req),
    /// A call that was open will never be answered, or not to its end.
    Broken(Req),
    BrokenStream(Req),
    /// Release the lease: a notice, repeated until it is answered.
    Notice(LeaseName),
    /// This rank's reader gives up, or its connection is closed.
    ReaderLeaves(Req, u8, LeaseName),
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
    /// It has a job and has not asked.
    Ready,
    /// Granted what is not computed yet: it waits for the producer's word.
    Waiting(BlockId),
    /// Granted: it may write into the landing block at any time.
    Granted(BlockId),
    Copied(Bytes),
    /// The verdict is on its way.
    Asking(Bytes),
    Over,
    Answered(Bytes, Answer),
}

/// Where a decode stands when it does not fetch (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Fetching,
    /// Without a handoff, for a block.
    Waiting,
    Running,
    Speaking,
    /// Off the books; its transfer comes to rest.
    Struck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub phase: Phase,
    pub lease: Option<LeaseName>,
    pub fetch: Option<State>,
    pub block: Block,
    pub stop: bool,
    pub gather: Option<gather::State>,
    pub workers: [Worker; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View {
    pub alive: bool,
    pub life: u8,
    pub jobs: [Option<Job>; 4],
    pub aborted_early: [bool; 4],
}

/// See the module's documentation.
pub(crate) struct Consumer {
    bounds: Bounds,
    fetches: [Option<Fetch>; 4],
    gathers: [Option<Gather>; 4],
    view: View,
}

impl View {
    /// Blocks that nobody has.
    pub(crate) fn free(&self, bounds: &Bounds) -> usize {
        let held = self.jobs.iter().flatten().filter(|job| job.block != Block::None).count();
        usize::from(bounds.decode_blocks) - held
    }
}

impl Job {
    /// Whether a worker may still write into the landing block.
    fn is_written(&self) -> bool {
        self.workers
            .iter()
            .any(|worker| matches!(worker, Worker::Ready | Worker::Waiting(_) | Worker::Granted(_)))
    }

    /// Whether nothing of it is left to do.
    fn is_over(&self) -> bool {
        let busy = |worker: &Worker| !matches!(worker, Worker::Idle | Worker::Over | Worker::Answered(..));
        self.phase == Phase::Struck && self.block == Block::None && !self.workers.iter().any(busy)
    }
}

impl Consumer {
    fn job(&mut self, req: Req) -> &mut Job {
        self.view.jobs[usize::from(req)].as_mut().expect("the event is about a job")
    }

    fn tell(&mut self, req: Req, event: Event, says: &mut Vec<Output>) -> Result<(), String> {
        let Some(fetch) = &mut self.fetches[usize::from(req)] else { return Ok(()) };
        let actions = fetch.apply(event);
        self.carry_out(req, actions, says)
    }

    fn carry_out(&mut self, req: Req, actions: Actions, says: &mut Vec<Output>) -> Result<(), String> {
        let ranks = usize::from(self.bounds.ranks);
        for action in actions {
            let struck = self.job(req).phase == Phase::Struck;
            match action {
                Action::StartRead => {
                    self.job(req).workers[..ranks].fill(Worker::Ready);
                    self.gathers[usize::from(req)] = Some(Gather::new(ranks));
                }
                Action::StopRead => self.job(req).stop = true,
                // Workers ask by themselves; heartbeats follow the fetch's state.
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
                    let left_to_router = reason == Reason::LoadFailed
                        && self.bounds.policy == LoadFailurePolicy::Fail
                        && !self.bounds.foreign_router;
                    let lease = self.job(req).lease.expect("it fetches");
                    if !left_to_router && !self.bounds.has(Mutation::SilentRefusal) {
                        says.push(Output::Notice(lease));
                    }
                }
                Action::Recompute | Action::Fail(_) if struck => {}
                Action::Recompute => self.job(req).phase = Phase::Waiting,
                Action::Fail(_) => {
                    self.job(req).phase = Phase::Struck;
                    says.push(Output::LoadFailed(req));
                }
            }
        }
        Ok(())
    }

    fn land(&mut self, req: Req) -> Result<(), String> {
        let job = self.job(req);
        if job.phase == Phase::Struck {
            return Err("blocks land for a request that is over (invariant 6)".into());
        }
        let stale = job.workers.iter().any(|worker| {
            matches!(
                worker,
                Worker::Answered(Bytes::Stale, _)
                    | Worker::Copied(Bytes::Stale)
                    | Worker::Asking(Bytes::Stale)
            )
        });
        if stale {
            return Err("stale bytes reach a forward pass: a wrong answer (invariant 3)".into());
        }
        job.block = Block::Active;
        job.phase = Phase::Running;
        Ok(())
    }

    /// All that an abort of this request's name is about.
    fn same_name(&self, req: Req) -> impl Iterator<Item = Req> + use<> {
        let one_name = self.bounds.has(Mutation::OneNameForBothRounds);
        ROUNDS.into_iter().filter(move |&other| other == req || one_name && other == req ^ 2)
    }

    fn decode(
        &mut self,
        req: Req,
        lease: Option<LeaseName>,
        how: Admission,
        says: &mut Vec<Output>,
    ) -> Result<(), String> {
        let silent = self.bounds.has(Mutation::SilentRefusal);
        let notice = |says: &mut Vec<Output>| {
            says.extend(lease.filter(|_| !silent).map(Output::Notice));
        };
        match how {
            Admission::Take
                if self.same_name(req).any(|other| self.view.aborted_early[usize::from(other)]) =>
            {
                if !self.view.aborted_early[usize::from(req)] {
                    return Err("a request is aborted that nobody gave up".into());
                }
                // Given up before it arrived. The caller has hung up: nobody reads the answer.
                notice(says);
                says.push(Output::Refused(req));
            }
            Admission::Take => {
                self.fetches[usize::from(req)] = lease.map(|_| Fetch::new(self.bounds.policy));
                let phase = if lease.is_some() { Phase::Fetching } else { Phase::Waiting };
                self.view.jobs[usize::from(req)] = Some(Job {
                    phase,
                    lease,
                    fetch: None,
                    block: Block::None,
                    stop: false,
                    gather: None,
                    workers: [Worker::Idle; 2],
                });
            }
            Admission::TooFull => {
                // A router that settles itself takes the same handoff elsewhere.
                if self.bounds.foreign_router {
                    notice(says);
                }
                says.push(Output::TooFull(req));
            }
            Admission::Refuse => {
                notice(says);
                says.push(Output::Refused(req));
            }
        }
        Ok(())
    }

    fn schedule(&mut self, req: Req, says: &mut Vec<Output>) -> Result<(), String> {
        let job = self.job(req);
        if job.phase == Phase::Waiting {
            job.block = Block::Active;
            job.phase = Phase::Running;
            return Ok(());
        }
        job.block = Block::Landing;
        self.tell(req, Event::Admitted, says)?;
        self.tell(req, Event::BlocksReserved, says)
    }

    /// A rank's worker reports; what that means for the fetch is the gatherer's to say.
    fn report(
        &mut self,
        req: Req,
        rank: u8,
        event: gather::Event,
        says: &mut Vec<Output>,
    ) -> Result<(), String> {
        let Some(gather) = &mut self.gathers[usize::from(req)] else { return Ok(()) };
        for action in gather.apply(rank.into(), event).iter() {
            match action {
                gather::Action::StopOthers => self.job(req).stop = true,
                gather::Action::Transfer(Ok(())) => self.tell(req, Event::TransferDone, says)?,
                gather::Action::Transfer(Err(kind)) => self.tell(req, Event::TransferFailed(kind), says)?,
                gather::Action::Verdict(answer) => {
                    let unchecked = self.bounds.has(Mutation::VerdictNotChecked) && answer == Answer::Gone;
                    self.tell(req, Event::Verdict(if unchecked { Answer::Valid } else { answer }), says)?;
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
        says: &mut Vec<Output>,
    ) -> Result<(), String> {
        let job = self.job(req);
        let was = std::mem::replace(&mut job.workers[usize::from(rank)], Worker::Over);
        if matches!(was, Worker::Waiting(_) | Worker::Granted(_)) {
            let lease = job.lease.expect("it reads");
            says.push(Output::ReaderLeaves(req, rank, lease));
        }
        self.report(req, rank, gather::Event::Failed(kind), says)
    }

    fn verdict(&mut self, req: Req, rank: u8, answer: Answer, says: &mut Vec<Output>) -> Result<(), String> {
        let job = self.job(req);
        let Worker::Asking(bytes) = job.workers[usize::from(rank)] else { return Ok(()) };
        job.workers[usize::from(rank)] = Worker::Answered(bytes, answer);
        if answer == Answer::Unknown {
            let lease = job.lease.expect("it reads");
            says.push(Output::ReaderLeaves(req, rank, lease));
        }
        self.report(req, rank, gather::Event::Verdict(answer), says)
    }

    /// Takes a decode off the books, if it is on them.
    fn strike(&mut self, req: Req, says: &mut Vec<Output>) -> Result<bool, String> {
        let live = self.view.jobs[usize::from(req)].as_ref().is_some_and(|job| job.phase != Phase::Struck);
        if !live {
            return Ok(false);
        }
        let job = self.job(req);
        let was = std::mem::replace(&mut job.phase, Phase::Struck);
        match was {
            Phase::Fetching => self.tell(req, Event::Abort, says)?,
            Phase::Running | Phase::Speaking => job.block = Block::None,
            Phase::Waiting | Phase::Struck => {}
        }
        if self.bounds.has(Mutation::LandingFreedAtOnce) {
            self.job(req).block = Block::None;
        }
        Ok(true)
    }

    fn crash(&mut self, says: &mut Vec<Output>) {
        for req in ROUNDS {
            let Some(job) = self.view.jobs[usize::from(req)] else { continue };
            match job.phase {
                Phase::Fetching | Phase::Waiting | Phase::Running => says.push(Output::Broken(req)),
                Phase::Speaking => says.push(Output::BrokenStream(req)),
                Phase::Struck => {}
            }
            for rank in BOTH {
                let reads = matches!(
                    job.workers[usize::from(rank)],
                    Worker::Waiting(_) | Worker::Granted(_) | Worker::Copied(_) | Worker::Asking(_)
                );
                if let (true, Some(lease)) = (reads, job.lease) {
                    says.push(Output::ReaderLeaves(req, rank, lease));
                }
            }
        }
        let life = self.view.life + 1;
        *self = Self::born(&self.bounds);
        self.view.alive = false;
        self.view.life = life;
    }

    fn hear(&mut self, input: Input, says: &mut Vec<Output>) -> Result<(), String> {
        match input {
            Input::Decode(req, lease, how) => self.decode(req, lease, how, says)?,
            Input::Schedule(req) => self.schedule(req, says)?,
            Input::FindCached(req) => {
                self.job(req).block = Block::Landing;
                self.tell(req, Event::AlreadyHere, says)?;
            }
            Input::ReadAsked(req, rank, asked) => match asked {
                Asked::Granted(block) => self.job(req).workers[usize::from(rank)] = Worker::Granted(block),
                Asked::NotYet(block) => self.job(req).workers[usize::from(rank)] = Worker::Waiting(block),
                Asked::Gone => self.worker_fails(req, rank, FailureKind::Gone, says)?,
                Asked::Refused => self.worker_fails(req, rank, FailureKind::Refused, says)?,
                Asked::Unreachable => self.worker_fails(req, rank, FailureKind::Unreachable, says)?,
            },
            Input::Copied(req, rank, bytes) => {
                let job = self.job(req);
                if job.block != Block::Landing {
                    return Err("a transfer writes into a block that was given back (invariant 3)".into());
                }
                job.workers[usize::from(rank)] = Worker::Copied(bytes);
                self.report(req, rank, gather::Event::Done, says)?;
            }
            Input::ReadEnds(req, rank) => self.worker_fails(req, rank, FailureKind::Transfer, says)?,
            Input::AskVerdict(req, rank) => {
                let worker = &mut self.job(req).workers[usize::from(rank)];
                let Worker::Copied(bytes) = *worker else { unreachable!("it has copied") };
                *worker = Worker::Asking(bytes);
            }
            Input::Verdict(req, rank, answer) => {
                if self.view.jobs[usize::from(req)].is_some() {
                    self.verdict(req, rank, answer, says)?;
                }
            }
            Input::LeaseGone(req) => {
                if self.view.jobs[usize::from(req)].is_some_and(|job| job.phase == Phase::Fetching) {
                    self.tell(req, Event::LeaseGone, says)?;
                }
            }
            Input::Abort(req) => {
                let lives = |other: Req| {
                    self.view.jobs[usize::from(other)].is_some_and(|job| job.phase != Phase::Struck)
                };
                if self.same_name(req).any(|other| other != req && lives(other)) {
                    return Err("a request is aborted that nobody gave up".into());
                }
                if !self.strike(req, says)? {
                    self.view.aborted_early[usize::from(req)] = true;
                }
            }
            Input::HangUp(req) => drop(self.strike(req, says)?),
            Input::Speak(req) => {
                self.job(req).phase = Phase::Speaking;
                says.push(Output::Accepted(req));
            }
            Input::Finish(req) => {
                let job = self.job(req);
                job.phase = Phase::Struck;
                job.block = Block::None;
                says.push(Output::Complete(req));
            }
            Input::Crash => self.crash(says),
            Input::Restart => self.view.alive = true,
        }
        Ok(())
    }
}

impl Party for Consumer {
    type Input = Input;
    type Output = Output;
    type View = View;

    fn born(bounds: &Bounds) -> Self {
        let view = View { alive: true, life: 0, jobs: [None; 4], aborted_early: [false; 4] };
        Self { bounds: *bounds, fetches: [const { None }; 4], gathers: [const { None }; 4], view }
    }

    fn live(&mut self, input: Input, says: &mut Vec<Output>) -> Result<(), String> {
        self.hear(input, says)?;
        for req in ROUNDS.map(usize::from) {
            let Some(job) = &mut self.view.jobs[req] else { continue };
            if matches!(job.phase, Phase::Waiting | Phase::Running | Phase::Speaking) {
                // The handoff is of no interest any more, but a worker may be.
                self.fetches[req] = None;
            }
            job.fetch = self.fetches[req].as_ref().map(Fetch::state);
            job.gather = self.gathers[req].as_ref().map(Gather::state);
            if job.is_over() {
                self.view.jobs[req] = None;
                self.fetches[req] = None;
                self.gathers[req] = None;
            }
        }
        Ok(())
    }

    fn view(&self) -> View {
        self.view.clone()
    }

    fn renamed(input: Input, by: Renaming) -> Input {
        match input {
            Input::Decode(req, lease, how) => {
                Input::Decode(by.req(req), lease.map(|lease| lease.renamed(by)), how)
            }
            Input::Schedule(req) => Input::Schedule(by.req(req)),
            Input::FindCached(req) => Input::FindCached(by.req(req)),
            Input::ReadAsked(req, rank, asked) => Input::ReadAsked(by.req(req), rank, asked),
            Input::Copied(req, rank, bytes) => Input::Copied(by.req(req), rank, bytes),
            Input::ReadEnds(req, rank) => Input::ReadEnds(by.req(req), rank),
            Input::AskVerdict(req, rank) => Input::AskVerdict(by.req(req), rank),
            Input::Verdict(req, rank, answer) => Input::Verdict(by.req(req), rank, answer),
            Input::LeaseGone(req) => Input::LeaseGone(by.req(req)),
            Input::Abort(req) => Input::Abort(by.req(req)),
            Input::HangUp(req) => Input::HangUp(by.req(req)),
            Input::Speak(req) => Input::Speak(by.req(req)),
            Input::Finish(req) => Input::Finish(by.req(req)),
            Input::Crash | Input::Restart => input,
        }
    }
}
