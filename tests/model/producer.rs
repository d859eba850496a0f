//! A prefill engine: the product's [`Ledger`], and around it what step loop and server do with it: jobs, blocks, and
//! aborts that wait in the mailbox until the step in flight is over.
//!
//! Its blocks carry whose content is in them; that is how a stale read is told from a good one.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_connector::lease::{Cause, LeaseTerms, State};
use baton_connector::ledger::{
    Grant, HeartbeatReply, Ledger, LedgerPortrait, LivePortrait, ReadRefusal, ReleaseReply,
};
use baton_connector::limits::TOMBSTONE_KEPT;
use baton_connector::transport::{Readiness, Verdict};
use baton_connector::{BlockId, Handle, Rank, Reader, RequestId, Time};

use crate::bounds::Bounds;
use crate::cast::Party;
use crate::mutations::Mutation;
use crate::names::{LeaseName, Local, ROUNDS, ReaderName, Renaming, Req};

/// Lease terms in microseconds. Only their order matters: a lease can run out at any moment (see `world.rs`).
const TERMS: LeaseTerms =
    LeaseTerms { duration: Duration::from_micros(1_000), drain: Duration::from_micros(100) };

/// What a prefill engine says to a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Admission {
    Take,
    TooFull,
    Refuse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    Prefill(Req, Admission),
    /// A block is free for a job that waits.
    Start(Req),
    /// It is lent while it is computed.
    LendEarly(Req),
    /// The forward pass is over.
    Finish(Req),
    /// The step loop hears that a lease has ended before its prefill.
    EndPrefill(Req),
    /// Abort by name: the lease desk at once, the step loop by mail.
    Abort(Req),
    TakeMail(Req),
    /// The caller's connection has ended before the answer.
    HangUp(Req),
    Release(Local),
    ReadBegun(Local, ReaderName),
    /// Whether what a reader was granted can be read by now.
    IsReady(Local, ReaderName),
    ReadDone(Local, ReaderName),
    ReadFailed(Local, ReaderName),
    Heartbeat(Local),
    /// Until the next deadline. The lease of one request can be renewed just before, so that another's runs out first.
    TimePasses(Option<Req>),
    /// So long that every tombstone is forgotten.
    AgesPass,
    Crash,
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    Lent(Req, Local),
    /// The head of an answer whose prefill computes on, and its end: sealed, or not.
    Lending(Req, Local),
    Ends(Req, Option<Local>),
    Empty(Req),
    TooFull(Req),
    Refused(Req),
    Granted(BlockId),
    /// Granted, but its content is not final.
    NotYet(BlockId),
    Ready,
    /// The lease is over, or never was here.
    Gone,
    Busy,
    Valid,
    Renewed,
    /// A call that was open will never be answered.
    Broken(Req),
}

/// Where the prefill of one request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Job {
    None,
    Waiting,
    Running(BlockId),
    /// Lent while it runs.
    Lending(BlockId),
}

/// What is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Content {
    /// Nobody's: may be written at any time.
    Free,
    /// What a forward pass is writing.
    Unfinished(Local),
    Of(Local),
}

impl Content {
    /// Whose it is.
    pub(crate) fn owner(self) -> Option<Local> {
        match self {
            Self::Free => None,
            Self::Unfinished(owner) | Self::Of(owner) => Some(owner),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View {
    pub alive: bool,
    pub life: u8,
    pub jobs: [Job; 4],
    pub mail: [bool; 4],
    pub blocks: Vec<Content>,
    pub ledger: LedgerPortrait,
    opened: u8,
    given_up: [bool; 4],
    valid: BTreeSet<ReaderName>,
    /// Leases that have ended before their prefill, of which the step loop has not heard.
    pub ended_early: [bool; 4],
    /// Of those, whose block nobody but the step loop holds.
    back_early: [bool; 4],
    blocks_of: [Option<BlockId>; 4],
}

/// See the module's documentation.
pub(crate) struct Producer {
    bounds: Bounds,
    now: Time,
    ledger: Ledger,
    view: View,
}

impl Producer {
    fn handle(&self, lease: Local) -> Handle {
        let Local { life, req, nth } = lease;
        if self.bounds.has(Mutation::EarlierEpochAccepted) {
            return Handle(u128::from(nth) + 1);
        }
        Handle(u128::from(u32::from_be_bytes([0, life, req, nth])) + 1)
    }

    /// The one lease that this life opens for a request.
    fn own(&self, req: Req) -> Local {
        Local { life: self.view.life, req, nth: 0 }
    }

    fn free_block(&self) -> Option<BlockId> {
        let at = self.view.blocks.iter().position(|&content| content == Content::Free)?;
        Some(BlockId(at as u32))
    }

    fn start(&mut self, req: Req) -> Job {
        match self.free_block() {
            Some(block) => {
                self.view.blocks[block.index()] = Content::Unfinished(self.own(req));
                Job::Running(block)
            }
            None => Job::Waiting,
        }
    }

    fn free(&mut self, block: BlockId, owner: Local) -> Result<(), String> {
        let owner = owner.tag();
        let content = &mut self.view.blocks[block.index()];
        if content.owner() != Some(owner) {
            return Err(format!("block {} is freed twice (invariant 2)", block.0));
        }
        *content = Content::Free;
        Ok(())
    }

    /// Ends a job that has not finished; says which.
    fn drop_job(&mut self, req: Req) -> Result<Job, String> {
        let job = std::mem::replace(&mut self.view.jobs[usize::from(req)], Job::None);
        match job {
            Job::Running(block) => self.free(block, self.own(req))?,
            Job::Lending(block) => {
                self.view.given_up[usize::from(req)] = true;
                self.ledger.release(self.handle(self.own(req)), "unfinished", self.now);
                self.let_go(req, block)?;
            }
            Job::None | Job::Waiting => {}
        }
        Ok(job)
    }

    /// The prefill of a lease is over: its block is the lease's alone, or nobody's.
    fn let_go(&mut self, req: Req, block: BlockId) -> Result<(), String> {
        self.view.ended_early[usize::from(req)] = false;
        let is_back = std::mem::take(&mut self.view.back_early[usize::from(req)]);
        if is_back || self.bounds.has(Mutation::EndOfPrefillFreesUnderAReader) {
            self.free(block, self.own(req))?;
        }
        Ok(())
    }

    fn lend_early(&mut self, req: Req, says: &mut Vec<Output>) -> Result<(), String> {
        let Job::Running(block) = self.view.jobs[usize::from(req)] else { unreachable!("only what runs") };
        let lease = self.own(req);
        let grant =
            Grant { handle: self.handle(lease), request: name(req), blocks: vec![block], expected: 1 };
        if self.ledger.open_growing(grant, 0, self.now).is_ok() {
            if self.view.given_up[usize::from(req)] {
                return Err("a lease is opened for a request that was given up before it finished".into());
            }
            if self.bounds.has(Mutation::ReadyBeforeComputed) {
                self.ledger.grow(self.handle(lease), 1);
            }
            self.view.jobs[usize::from(req)] = Job::Lending(block);
            says.push(Output::Lending(req, lease));
        }
        Ok(())
    }

    /// All of what was lent early is computed.
    fn seal(&mut self, req: Req, block: BlockId, says: &mut Vec<Output>) -> Result<(), String> {
        let lease = self.own(req);
        self.now = self.now.after(Duration::from_micros(1));
        self.view.blocks[block.index()] = Content::Of(lease);
        let forgets = self.bounds.has(Mutation::NeverSealed);
        let sealed = forgets || self.ledger.seal(self.handle(lease), self.now);
        says.push(Output::Ends(req, sealed.then_some(lease)));
        self.let_go(req, block)
    }

    fn finish(&mut self, req: Req, says: &mut Vec<Output>) -> Result<(), String> {
        let job = std::mem::replace(&mut self.view.jobs[usize::from(req)], Job::None);
        let block = match job {
            Job::Running(block) => block,
            Job::Lending(block) => return self.seal(req, block, says),
            Job::None | Job::Waiting => unreachable!("only what runs finishes"),
        };
        self.view.blocks[block.index()] = Content::Of(self.own(req));
        let lease = Local { nth: self.view.opened, ..self.own(req) };
        // Leases opened one after the other are due one after the other.
        self.now = self.now.after(Duration::from_micros(1));
        let grant = Grant {
            handle: self.handle(lease),
            request: name(req),
            blocks: vec![block],
            // One consumer, with a link for each of its ranks.
            expected: 1,
        };
        match self.ledger.open(grant, self.now) {
            Ok(_) if self.view.given_up[usize::from(req)] => {
                return Err("a lease is opened for a request that was given up before it finished".into());
            }
            Ok(_) => {
                // Handles are random; only where that is what is broken they are counted.
                self.view.opened += u8::from(self.bounds.has(Mutation::EarlierEpochAccepted));
                self.view.blocks_of[usize::from(req)] =
                    self.bounds.has(Mutation::AbortIsASecondFinish).then_some(block);
                says.push(Output::Lent(req, lease));
            }
            Err(refused) => {
                self.free(refused.grant.blocks[0], lease)?;
                says.push(Output::Empty(req));
            }
        }
        Ok(())
    }

    fn abort(&mut self, req: Req) {
        self.view.mail[usize::from(req)] = true;
        self.view.given_up[usize::from(req)] = true;
        let known = self.ledger.view(self.now).iter().any(|lease| lease.request == name(req));
        let forgets = self.bounds.has(Mutation::NoTombstone) && !known;
        let deaf = self.bounds.has(Mutation::AbortIsDeafAfterFinish) && known;
        if !forgets && !deaf {
            self.ledger.release_request(&name(req), "aborted", self.now);
        }
    }

    fn release(&mut self, lease: Local) -> Result<(), String> {
        if lease.life == self.view.life {
            self.view.given_up[usize::from(lease.req)] = true;
        }
        let elsewhere = self.bounds.has(Mutation::EarlierEpochAccepted) && lease.life != self.view.life;
        if elsewhere || self.bounds.has(Mutation::AbortIsDeafAfterFinish) {
            return Ok(());
        }
        if self.bounds.has(Mutation::ReleaseByRequestId) {
            // Both requests have been given one name by their client.
            for req in ROUNDS {
                self.ledger.release_request(&name(req), "released", self.now);
            }
            return Ok(());
        }
        let reply = self.ledger.release(self.handle(lease), "released", self.now);
        if self.bounds.has(Mutation::AbortFreesUnderAReader) && reply == ReleaseReply::Draining {
            let live = self.ledger.portrait(self.now).live;
            let handle = self.handle(lease);
            let blocks = live.into_iter().find(|live| live.handle == handle).expect("it drains").blocks;
            self.free(blocks[0], lease)?;
        }
        Ok(())
    }

    fn reader(&self, reader: ReaderName) -> Reader {
        let ReaderName { d, life, req, rank } = reader;
        let consumer = u64::from(u32::from_be_bytes([0, d, life, req]));
        Reader { consumer, of: self.bounds.ranks.into(), rank: Rank(rank.into()) }
    }

    fn read_done(&mut self, lease: Local, reader: ReaderName, says: &mut Vec<Output>) {
        let handle = self.handle(lease);
        let verdict = self.ledger.read_done(handle, self.reader(reader), self.now);
        if self.bounds.has(Mutation::ReadersAreCounted) && self.view.valid.contains(&reader) {
            // A repetition is taken for the consumer's next link.
            let rank = Rank(u16::from((reader.rank + 1) % self.bounds.ranks));
            let another = Reader { rank, ..self.reader(reader) };
            if self.ledger.read_begun(handle, another, 0, 1, self.now).is_ok() {
                self.ledger.read_done(handle, another, self.now);
            }
        }
        if verdict == Verdict::Valid {
            self.view.valid.insert(reader);
        }
        says.push(if verdict == Verdict::Valid { Output::Valid } else { Output::Gone });
    }

    /// Blocks of ended leases go back, for a reason that there was.
    fn settle(&mut self) -> Result<(), String> {
        for handle in self.ledger.take_unfinished() {
            let req = LeaseName::of(handle).local.req;
            let computes = matches!(self.view.jobs[usize::from(req)], Job::Lending(_));
            self.view.ended_early[usize::from(req)] = computes;
        }
        for settled in self.ledger.take_settled() {
            let counted = self.bounds.has(Mutation::EarlierEpochAccepted);
            let req = if counted {
                u8::from(settled.request == name(1))
            } else {
                LeaseName::of(settled.handle).local.req
            };
            // A step that still writes into it holds it, too.
            if self.view.jobs[usize::from(req)] == Job::Lending(settled.blocks[0]) {
                self.view.back_early[usize::from(req)] = true;
            } else {
                self.free(settled.blocks[0], self.own(req))?;
            }
            let readers = self.view.valid.iter().filter(|reader| reader.req == req).count();
            match settled.cause {
                // A stale read is worth more as a trace than the acknowledgement that comes just before it.
                Cause::Fetched if self.bounds.has(Mutation::EarlierEpochAccepted) => {}
                Cause::Fetched if readers < usize::from(self.bounds.ranks) => {
                    return Err(format!(
                        "a lease closes as fetched after {readers} of {} readers (invariant 7)",
                        self.bounds.ranks
                    ));
                }
                Cause::Released if !self.view.given_up[usize::from(req)] => {
                    return Err("a lease is released that nobody gave up".into());
                }
                Cause::Fetched | Cause::Released | Cause::Expired => {}
            }
        }
        Ok(())
    }

    /// Invariant 1: every block is free, or held by exactly one job or lease.
    fn check(&self) -> Result<(), String> {
        let portrait = self.ledger.portrait(self.now);
        let lent: Vec<_> = portrait.live.iter().flat_map(|live| live.blocks.iter().copied()).collect();
        let running = self.view.jobs.iter().filter_map(|job| match job {
            Job::Running(block) => Some(*block),
            // As one with its lease.
            Job::Lending(block) => Some(*block).filter(|block| !lent.contains(block)),
            Job::None | Job::Waiting => None,
        });
        let mut held: Vec<_> = running.chain(lent.iter().copied()).collect();
        held.sort();
        let taken = (0..self.view.blocks.len()).filter(|&at| self.view.blocks[at] != Content::Free);
        let taken: Vec<_> = taken.map(|at| BlockId(at as u32)).collect();
        if held != taken {
            return Err(format!("blocks {held:?} are held, but {taken:?} are not free (invariant 1)"));
        }
        Ok(())
    }

    fn crash(&mut self, says: &mut Vec<Output>) {
        for req in ROUNDS.into_iter().filter(|&req| self.view.jobs[usize::from(req)] != Job::None) {
            let lends = matches!(self.view.jobs[usize::from(req)], Job::Lending(_));
            says.push(if lends { Output::Ends(req, None) } else { Output::Broken(req) });
        }
        let life = self.view.life + 1;
        *self = Self::born(&self.bounds);
        self.view.alive = false;
        self.view.life = life;
    }

    fn hear(&mut self, input: Input, says: &mut Vec<Output>) -> Result<(), String> {
        match input {
            Input::Prefill(req, Admission::Take) => {
                if self.ledger.was_released_early(&name(req)) {
                    says.push(Output::Empty(req));
                } else {
                    self.view.jobs[usize::from(req)] = self.start(req);
                }
            }
            Input::Prefill(req, Admission::TooFull) => says.push(Output::TooFull(req)),
            Input::Prefill(req, Admission::Refuse) => says.push(Output::Refused(req)),
            Input::Start(req) => self.view.jobs[usize::from(req)] = self.start(req),
            Input::LendEarly(req) => self.lend_early(req, says)?,
            Input::Finish(req) => self.finish(req, says)?,
            Input::EndPrefill(req) => {
                self.drop_job(req)?;
                says.push(Output::Ends(req, None));
            }
            Input::Abort(req) => self.abort(req),
            Input::TakeMail(req) => {
                self.view.mail[usize::from(req)] = false;
                match self.drop_job(req)? {
                    Job::Lending(_) => says.push(Output::Ends(req, None)),
                    Job::Waiting | Job::Running(_) => says.push(Output::Empty(req)),
                    Job::None => {
                        if let Some(block) = self.view.blocks_of[usize::from(req)].take() {
                            self.free(block, self.own(req))?;
                        }
                    }
                }
            }
            Input::HangUp(req) => drop(self.drop_job(req)?),
            Input::Release(lease) => self.release(lease)?,
            Input::ReadBegun(lease, _) | Input::ReadDone(lease, _) | Input::IsReady(lease, _)
                if !self.knows_epoch(lease) =>
            {
                says.push(Output::Gone);
            }
            Input::IsReady(lease, reader) => {
                says.push(match self.ledger.readiness(self.handle(lease), self.reader(reader), 1) {
                    Readiness::Ready => Output::Ready,
                    Readiness::NotYet => return Err("a reader asks before anything has changed".into()),
                    Readiness::Gone => Output::Gone,
                });
            }
            Input::ReadBegun(lease, reader) => {
                let read = self.ledger.read_begun(self.handle(lease), self.reader(reader), 0, 1, self.now);
                let ready = self.ledger.readiness(self.handle(lease), self.reader(reader), 1);
                says.push(match read {
                    Ok(blocks) if ready == Readiness::NotYet => Output::NotYet(blocks[0]),
                    Ok(blocks) => Output::Granted(blocks[0]),
                    Err(ReadRefusal::Gone) => Output::Gone,
                    Err(ReadRefusal::Busy) => Output::Busy,
                    Err(ReadRefusal::Range { .. }) => return Err("a block table lost a block".into()),
                });
            }
            Input::ReadDone(lease, reader) => self.read_done(lease, reader, says),
            Input::ReadFailed(lease, reader) => {
                self.ledger.read_failed(self.handle(lease), self.reader(reader), self.now);
            }
            Input::Heartbeat(lease) => {
                let reply = self.ledger.heartbeat(self.handle(lease), self.now);
                says.push(if reply == HeartbeatReply::Renewed { Output::Renewed } else { Output::Gone });
            }
            Input::TimePasses(renewed) => self.time_passes(renewed),
            Input::AgesPass => {
                for _ in 0..2 {
                    self.now = self.now.after(TOMBSTONE_KEPT);
                    self.ledger.tick(self.now);
                    self.settle()?;
                }
                self.view.given_up = [false; 4];
                self.view.valid.clear();
            }
            Input::Crash => self.crash(says),
            Input::Restart => self.view.alive = true,
        }
        Ok(())
    }

    fn time_passes(&mut self, renewed: Option<Req>) {
        let live = self.ledger.portrait(self.now).live;
        let next = |live: &[LivePortrait]| {
            live.iter()
                .filter(|live| has_clock(live))
                .map(|live| live.lease.left)
                .min()
                .expect("a lease is live")
        };
        if let Some(req) = renewed {
            self.now = self.now.after(next(&live).saturating_sub(Duration::from_micros(1)));
            for live in live.iter().filter(|live| live.request == name(req)) {
                self.ledger.heartbeat(live.handle, self.now);
            }
        }
        let live = self.ledger.portrait(self.now).live;
        self.now = self.now.after(next(&live));
        self.ledger.tick(self.now);
    }

    /// The handshake of a transport: whether a handoff is of this life.
    fn knows_epoch(&self, lease: Local) -> bool {
        lease.life == self.view.life || self.bounds.has(Mutation::EarlierEpochAccepted)
    }
}

impl Party for Producer {
    type Input = Input;
    type Output = Output;
    type View = View;

    fn born(bounds: &Bounds) -> Self {
        let view = View {
            alive: true,
            life: 0,
            jobs: [Job::None; 4],
            mail: [false; 4],
            blocks: vec![Content::Free; usize::from(bounds.prefill_blocks)],
            ledger: LedgerPortrait::default(),
            opened: 0,
            given_up: [false; 4],
            valid: BTreeSet::new(),
            ended_early: [false; 4],
            back_early: [false; 4],
            blocks_of: [None; 4],
        };
        Self { bounds: *bounds, now: Time::ZERO, ledger: Ledger::new(TERMS), view }
    }

    fn live(&mut self, input: Input, says: &mut Vec<Output>) -> Result<(), String> {
        self.hear(input, says)?;
        self.settle()?;
        self.check()
    }

    fn view(&self) -> View {
        View { ledger: self.ledger.portrait(self.now), ..self.view.clone() }
    }

    fn renamed(input: Input, by: Renaming) -> Input {
        match input {
            Input::Prefill(req, admission) => Input::Prefill(by.req(req), admission),
            Input::Start(req) => Input::Start(by.req(req)),
            Input::LendEarly(req) => Input::LendEarly(by.req(req)),
            Input::Finish(req) => Input::Finish(by.req(req)),
            Input::EndPrefill(req) => Input::EndPrefill(by.req(req)),
            Input::Abort(req) => Input::Abort(by.req(req)),
            Input::TakeMail(req) => Input::TakeMail(by.req(req)),
            Input::HangUp(req) => Input::HangUp(by.req(req)),
            Input::Release(lease) => Input::Release(lease.renamed(by)),
            Input::ReadBegun(lease, reader) => Input::ReadBegun(lease.renamed(by), reader.renamed(by)),
            Input::IsReady(lease, reader) => Input::IsReady(lease.renamed(by), reader.renamed(by)),
            Input::ReadDone(lease, reader) => Input::ReadDone(lease.renamed(by), reader.renamed(by)),
            Input::ReadFailed(lease, reader) => Input::ReadFailed(lease.renamed(by), reader.renamed(by)),
            Input::Heartbeat(lease) => Input::Heartbeat(lease.renamed(by)),
            Input::TimePasses(renewed) => Input::TimePasses(renewed.map(|req| by.req(req))),
            Input::AgesPass | Input::Crash | Input::Restart => input,
        }
    }
}

/// Whether time ends it.
pub(crate) fn has_clock(live: &LivePortrait) -> bool {
    live.lease.state != State::Growing
}

pub(crate) fn name(req: Req) -> RequestId {
    RequestId::new(["r1", "r2", "r1-2", "r2-2"][usize::from(req)]).expect("an id")
}
