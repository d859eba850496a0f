//! A prefill engine: the product's [`Ledger`], and the parts of step loop and server around it. These are jobs, blocks,
//! and aborts that wait in the mailbox until the current step ends.
//!
//! Each block carries the name of its content, which distinguishes a stale read from a good one.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_connector::lease::{CloseCause, LeaseTerms, State};
use baton_connector::ledger::{
    HeartbeatReply, LeaseSpec, Ledger, LedgerSnapshot, LiveSnapshot, ReadError, ReleaseReply,
};
use baton_connector::limits::TOMBSTONE_TTL;
use baton_connector::transport::{Readiness, Verdict};
use baton_connector::{BlockId, Handle, Rank, Reader, RequestId, Time};

use crate::bounds::Bounds;
use crate::mutations::Mutation;
use crate::names::{LeaseName, LocalLease, ROUNDS, ReaderName, Renaming, Req};
use crate::state_table::Actor;

/// Lease terms in microseconds. Only their order matters: a lease can expire at any moment (see `system.rs`).
const TERMS: LeaseTerms =
    LeaseTerms { duration: Duration::from_micros(1_000), drain: Duration::from_micros(100) };

/// A prefill engine's admission of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PrefillAdmission {
    Take,
    TooFull,
    Refuse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ProducerInput {
    Prefill(Req, PrefillAdmission),
    /// A block is free for a waiting job.
    Start(Req),
    /// An early lease is opened.
    OpenLeaseEarly(Req),
    /// The forward pass has ended.
    Finish(Req),
    /// The step loop receives the end of a lease that ended before its prefill.
    EndPrefill(Req),
    /// Abort by name: at once in the lease service, by mailbox in the step loop.
    Abort(Req),
    TakeMail(Req),
    /// The caller's connection has ended before the response.
    HangUp(Req),
    Release(LocalLease),
    ReadBegun(LocalLease, ReaderName),
    /// Whether the granted block of a reader can be read by now.
    IsReady(LocalLease, ReaderName),
    ReadDone(LocalLease, ReaderName),
    ReadFailed(LocalLease, ReaderName),
    Heartbeat(LocalLease),
    /// Until the next deadline. The lease of one request can be renewed just before, so that another lease expires
    /// first.
    TimePasses(Option<Req>),
    /// Long enough to forget every tombstone.
    AgesPass,
    Crash,
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ProducerOutput {
    Lent(Req, LocalLease),
    /// The head of a response whose prefill continues, and its end: sealed, or not.
    Lending(Req, LocalLease),
    Ends(Req, Option<LocalLease>),
    Empty(Req),
    TooFull(Req),
    Refused(Req),
    Granted(BlockId),
    /// Granted, but the block's content is not final.
    NotYet(BlockId),
    Ready,
    /// The lease has ended, or is not one of this producer.
    Gone,
    Busy,
    Valid,
    Renewed,
    /// An open call gets no reply any more.
    Broken(Req),
}

/// The state of one request's prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PrefillJob {
    None,
    Waiting,
    Running(BlockId),
    /// Leased while it runs.
    Lending(BlockId),
}

/// The content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Content {
    /// Not held: may be written at any time.
    Free,
    /// A forward pass is writing the block.
    Unfinished(LocalLease),
    Of(LocalLease),
}

impl Content {
    /// The lease to which the content belongs.
    pub(crate) fn owner(self) -> Option<LocalLease> {
        match self {
            Self::Free => None,
            Self::Unfinished(owner) | Self::Of(owner) => Some(owner),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProducerView {
    pub alive: bool,
    pub life: u8,
    pub jobs: [PrefillJob; 4],
    pub mail: [bool; 4],
    pub blocks: Vec<Content>,
    pub ledger: LedgerSnapshot,
    opened: u8,
    given_up: [bool; 4],
    valid: BTreeSet<ReaderName>,
    /// Leases that have ended before their prefill, and whose end the step loop has not received.
    pub ended_early: [bool; 4],
    /// Those of them whose block only the step loop holds.
    back_early: [bool; 4],
    blocks_of: [Option<BlockId>; 4],
}

/// The prefill engine of the module's documentation.
pub(crate) struct Producer {
    bounds: Bounds,
    now: Time,
    ledger: Ledger,
    view: ProducerView,
}

impl Producer {
    fn handle(&self, lease: LocalLease) -> Handle {
        let LocalLease { life, req, nth } = lease;
        if self.bounds.has(Mutation::EarlierEpochAccepted) {
            return Handle(u128::from(nth) + 1);
        }
        Handle(u128::from(u32::from_be_bytes([0, life, req, nth])) + 1)
    }

    /// The one lease that this process opens for a request.
    fn own(&self, req: Req) -> LocalLease {
        LocalLease { life: self.view.life, req, nth: 0 }
    }

    fn free_block(&self) -> Option<BlockId> {
        let at = self.view.blocks.iter().position(|&content| content == Content::Free)?;
        Some(BlockId(at as u32))
    }

    fn start(&mut self, req: Req) -> PrefillJob {
        match self.free_block() {
            Some(block) => {
                self.view.blocks[block.index()] = Content::Unfinished(self.own(req));
                PrefillJob::Running(block)
            }
            None => PrefillJob::Waiting,
        }
    }

    fn free(&mut self, block: BlockId, owner: LocalLease) -> Result<(), String> {
        let owner = owner.tag();
        let content = &mut self.view.blocks[block.index()];
        if content.owner() != Some(owner) {
            return Err(format!("block {} is freed twice (invariant 2)", block.0));
        }
        *content = Content::Free;
        Ok(())
    }

    /// Ends a job that has not finished, and returns it.
    fn drop_job(&mut self, req: Req) -> Result<PrefillJob, String> {
        let job = std::mem::replace(&mut self.view.jobs[usize::from(req)], PrefillJob::None);
        match job {
            PrefillJob::Running(block) => self.free(block, self.own(req))?,
            PrefillJob::Lending(block) => {
                self.view.given_up[usize::from(req)] = true;
                self.ledger.release(self.handle(self.own(req)), "unfinished", self.now);
                self.end_hold(req, block)?;
            }
            PrefillJob::None | PrefillJob::Waiting => {}
        }
        Ok(job)
    }

    /// The prefill of a lease has ended: only the lease holds the block now, or nothing does.
    fn end_hold(&mut self, req: Req, block: BlockId) -> Result<(), String> {
        self.view.ended_early[usize::from(req)] = false;
        let is_back = std::mem::take(&mut self.view.back_early[usize::from(req)]);
        if is_back || self.bounds.has(Mutation::EndOfPrefillFreesUnderAReader) {
            self.free(block, self.own(req))?;
        }
        Ok(())
    }

    fn open_lease_early(&mut self, req: Req, outputs: &mut Vec<ProducerOutput>) -> Result<(), String> {
        let PrefillJob::Running(block) = self.view.jobs[usize::from(req)] else {
            unreachable!("only what runs")
        };
        let lease = self.own(req);
        let grant =
            LeaseSpec { handle: self.handle(lease), request: name(req), blocks: vec![block], expected: 1 };
        if self.ledger.open_growing(grant, 0, self.now).is_ok() {
            if self.view.given_up[usize::from(req)] {
                return Err("a lease is opened for a request that was given up before it finished".into());
            }
            if self.bounds.has(Mutation::ReadyBeforeComputed) {
                self.ledger.grow(self.handle(lease), 1);
            }
            self.view.jobs[usize::from(req)] = PrefillJob::Lending(block);
            outputs.push(ProducerOutput::Lending(req, lease));
        }
        Ok(())
    }

    /// All blocks of an early lease are computed.
    fn seal(&mut self, req: Req, block: BlockId, outputs: &mut Vec<ProducerOutput>) -> Result<(), String> {
        let lease = self.own(req);
        self.now = self.now.after(Duration::from_micros(1));
        self.view.blocks[block.index()] = Content::Of(lease);
        let forgets = self.bounds.has(Mutation::NeverSealed);
        let sealed = forgets || self.ledger.seal(self.handle(lease), self.now);
        outputs.push(ProducerOutput::Ends(req, sealed.then_some(lease)));
        self.end_hold(req, block)
    }

    fn finish(&mut self, req: Req, outputs: &mut Vec<ProducerOutput>) -> Result<(), String> {
        let job = std::mem::replace(&mut self.view.jobs[usize::from(req)], PrefillJob::None);
        let block = match job {
            PrefillJob::Running(block) => block,
            PrefillJob::Lending(block) => return self.seal(req, block, outputs),
            PrefillJob::None | PrefillJob::Waiting => unreachable!("only what runs finishes"),
        };
        self.view.blocks[block.index()] = Content::Of(self.own(req));
        let lease = LocalLease { nth: self.view.opened, ..self.own(req) };
        // Deadlines have the order in which leases were opened.
        self.now = self.now.after(Duration::from_micros(1));
        let grant = LeaseSpec {
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
                // Handles are random. They are counted only where this is the planted bug.
                self.view.opened += u8::from(self.bounds.has(Mutation::EarlierEpochAccepted));
                self.view.blocks_of[usize::from(req)] =
                    self.bounds.has(Mutation::AbortIsASecondFinish).then_some(block);
                outputs.push(ProducerOutput::Lent(req, lease));
            }
            Err(refused) => {
                self.free(refused.spec.blocks[0], lease)?;
                outputs.push(ProducerOutput::Empty(req));
            }
        }
        Ok(())
    }

    fn abort(&mut self, req: Req) {
        self.view.mail[usize::from(req)] = true;
        self.view.given_up[usize::from(req)] = true;
        let known = self.ledger.view(self.now).iter().any(|lease| lease.request == name(req));
        let forgets = self.bounds.has(Mutation::NoTombstone) && !known;
        let ignored = self.bounds.has(Mutation::AbortIgnoredAfterFinish) && known;
        if !forgets && !ignored {
            self.ledger.release_request(&name(req), "aborted", self.now);
        }
    }

    fn release(&mut self, lease: LocalLease) -> Result<(), String> {
        if lease.life == self.view.life {
            self.view.given_up[usize::from(lease.req)] = true;
        }
        let elsewhere = self.bounds.has(Mutation::EarlierEpochAccepted) && lease.life != self.view.life;
        if elsewhere || self.bounds.has(Mutation::AbortIgnoredAfterFinish) {
            return Ok(());
        }
        if self.bounds.has(Mutation::ReleaseByRequestId) {
            // The client gave both requests one name.
            for req in ROUNDS {
                self.ledger.release_request(&name(req), "released", self.now);
            }
            return Ok(());
        }
        let reply = self.ledger.release(self.handle(lease), "released", self.now);
        if self.bounds.has(Mutation::AbortFreesUnderAReader) && reply == ReleaseReply::Draining {
            let live = self.ledger.snapshot(self.now).live;
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

    fn finish_read(&mut self, lease: LocalLease, reader: ReaderName, outputs: &mut Vec<ProducerOutput>) {
        let handle = self.handle(lease);
        let verdict = self.ledger.finish_read(handle, self.reader(reader), self.now);
        if self.bounds.has(Mutation::ReadersAreCounted) && self.view.valid.contains(&reader) {
            // The ledger takes a repetition for the consumer's next link.
            let rank = Rank(u16::from((reader.rank + 1) % self.bounds.ranks));
            let another = Reader { rank, ..self.reader(reader) };
            if self.ledger.begin_read(handle, another, 0, 1, self.now).is_ok() {
                self.ledger.finish_read(handle, another, self.now);
            }
        }
        if verdict == Verdict::Valid {
            self.view.valid.insert(reader);
        }
        outputs.push(if verdict == Verdict::Valid { ProducerOutput::Valid } else { ProducerOutput::Gone });
    }

    /// Frees the blocks of ended leases, after a check of the reason.
    fn settle(&mut self) -> Result<(), String> {
        for handle in self.ledger.take_unfinished() {
            let req = LeaseName::of(handle).local.req;
            let computes = matches!(self.view.jobs[usize::from(req)], PrefillJob::Lending(_));
            self.view.ended_early[usize::from(req)] = computes;
        }
        for settled in self.ledger.take_closed() {
            let counted = self.bounds.has(Mutation::EarlierEpochAccepted);
            let req = if counted {
                u8::from(settled.request == name(1))
            } else {
                LeaseName::of(settled.handle).local.req
            };
            // A step that still writes into the block holds it, too.
            if self.view.jobs[usize::from(req)] == PrefillJob::Lending(settled.blocks[0]) {
                self.view.back_early[usize::from(req)] = true;
            } else {
                self.free(settled.blocks[0], self.own(req))?;
            }
            let readers = self.view.valid.iter().filter(|reader| reader.req == req).count();
            match settled.cause {
                // A stale read is a better trace than the acknowledgement just before it.
                CloseCause::Fetched if self.bounds.has(Mutation::EarlierEpochAccepted) => {}
                CloseCause::Fetched if readers < usize::from(self.bounds.ranks) => {
                    return Err(format!(
                        "a lease closes as fetched after {readers} of {} readers (invariant 7)",
                        self.bounds.ranks
                    ));
                }
                CloseCause::Released if !self.view.given_up[usize::from(req)] => {
                    return Err("a lease is released that was not given up".into());
                }
                CloseCause::Fetched | CloseCause::Released | CloseCause::Expired => {}
            }
        }
        Ok(())
    }

    /// Invariant 1: every block is free, or held by exactly one job or lease.
    fn check(&self) -> Result<(), String> {
        let portrait = self.ledger.snapshot(self.now);
        let lent: Vec<_> = portrait.live.iter().flat_map(|live| live.blocks.iter().copied()).collect();
        let running = self.view.jobs.iter().filter_map(|job| match job {
            PrefillJob::Running(block) => Some(*block),
            // The job and its lease count as one holder.
            PrefillJob::Lending(block) => Some(*block).filter(|block| !lent.contains(block)),
            PrefillJob::None | PrefillJob::Waiting => None,
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

    fn crash(&mut self, outputs: &mut Vec<ProducerOutput>) {
        for req in ROUNDS.into_iter().filter(|&req| self.view.jobs[usize::from(req)] != PrefillJob::None) {
            let lends = matches!(self.view.jobs[usize::from(req)], PrefillJob::Lending(_));
            outputs.push(if lends { ProducerOutput::Ends(req, None) } else { ProducerOutput::Broken(req) });
        }
        let life = self.view.life + 1;
        *self = Self::born(&self.bounds);
        self.view.alive = false;
        self.view.life = life;
    }

    fn take_input(&mut self, input: ProducerInput, outputs: &mut Vec<ProducerOutput>) -> Result<(), String> {
        match input {
            ProducerInput::Prefill(req, PrefillAdmission::Take) => {
                if self.ledger.was_released_early(&name(req)) {
                    outputs.push(ProducerOutput::Empty(req));
                } else {
                    self.view.jobs[usize::from(req)] = self.start(req);
                }
            }
            ProducerInput::Prefill(req, PrefillAdmission::TooFull) => {
                outputs.push(ProducerOutput::TooFull(req))
            }
            ProducerInput::Prefill(req, PrefillAdmission::Refuse) => {
                outputs.push(ProducerOutput::Refused(req))
            }
            ProducerInput::Start(req) => self.view.jobs[usize::from(req)] = self.start(req),
            ProducerInput::OpenLeaseEarly(req) => self.open_lease_early(req, outputs)?,
            ProducerInput::Finish(req) => self.finish(req, outputs)?,
            ProducerInput::EndPrefill(req) => {
                self.drop_job(req)?;
                outputs.push(ProducerOutput::Ends(req, None));
            }
            ProducerInput::Abort(req) => self.abort(req),
            ProducerInput::TakeMail(req) => {
                self.view.mail[usize::from(req)] = false;
                match self.drop_job(req)? {
                    PrefillJob::Lending(_) => outputs.push(ProducerOutput::Ends(req, None)),
                    PrefillJob::Waiting | PrefillJob::Running(_) => outputs.push(ProducerOutput::Empty(req)),
                    PrefillJob::None => {
                        if let Some(block) = self.view.blocks_of[usize::from(req)].take() {
                            self.free(block, self.own(req))?;
                        }
                    }
                }
            }
            ProducerInput::HangUp(req) => drop(self.drop_job(req)?),
            ProducerInput::Release(lease) => self.release(lease)?,
            ProducerInput::ReadBegun(lease, _)
            | ProducerInput::ReadDone(lease, _)
            | ProducerInput::IsReady(lease, _)
                if !self.knows_epoch(lease) =>
            {
                outputs.push(ProducerOutput::Gone);
            }
            ProducerInput::IsReady(lease, reader) => {
                outputs.push(match self.ledger.readiness(self.handle(lease), self.reader(reader), 1) {
                    Readiness::Ready => ProducerOutput::Ready,
                    Readiness::NotYet => return Err("a reader asks before anything has changed".into()),
                    Readiness::Gone => ProducerOutput::Gone,
                });
            }
            ProducerInput::ReadBegun(lease, reader) => {
                let read = self.ledger.begin_read(self.handle(lease), self.reader(reader), 0, 1, self.now);
                let ready = self.ledger.readiness(self.handle(lease), self.reader(reader), 1);
                outputs.push(match read {
                    Ok(blocks) if ready == Readiness::NotYet => ProducerOutput::NotYet(blocks[0]),
                    Ok(blocks) => ProducerOutput::Granted(blocks[0]),
                    Err(ReadError::Gone) => ProducerOutput::Gone,
                    Err(ReadError::Busy) => ProducerOutput::Busy,
                    Err(ReadError::Range { .. }) => return Err("a block table lost a block".into()),
                });
            }
            ProducerInput::ReadDone(lease, reader) => self.finish_read(lease, reader, outputs),
            ProducerInput::ReadFailed(lease, reader) => {
                self.ledger.fail_read(self.handle(lease), self.reader(reader), self.now);
            }
            ProducerInput::Heartbeat(lease) => {
                let reply = self.ledger.heartbeat(self.handle(lease), self.now);
                outputs.push(if reply == HeartbeatReply::Renewed {
                    ProducerOutput::Renewed
                } else {
                    ProducerOutput::Gone
                });
            }
            ProducerInput::TimePasses(renewed) => self.time_passes(renewed),
            ProducerInput::AgesPass => {
                for _ in 0..2 {
                    self.now = self.now.after(TOMBSTONE_TTL);
                    self.ledger.tick(self.now);
                    self.settle()?;
                }
                self.view.given_up = [false; 4];
                self.view.valid.clear();
            }
            ProducerInput::Crash => self.crash(outputs),
            ProducerInput::Restart => self.view.alive = true,
        }
        Ok(())
    }

    fn time_passes(&mut self, renewed: Option<Req>) {
        let live = self.ledger.snapshot(self.now).live;
        let next = |live: &[LiveSnapshot]| {
            live.iter()
                .filter(|live| has_clock(live))
                .map(|live| live.lease.remaining)
                .min()
                .expect("a lease is live")
        };
        if let Some(req) = renewed {
            self.now = self.now.after(next(&live).saturating_sub(Duration::from_micros(1)));
            for live in live.iter().filter(|live| live.request == name(req)) {
                self.ledger.heartbeat(live.handle, self.now);
            }
        }
        let live = self.ledger.snapshot(self.now).live;
        self.now = self.now.after(next(&live));
        self.ledger.tick(self.now);
    }

    /// The handshake of a transport: whether a handoff has this process's epoch.
    fn knows_epoch(&self, lease: LocalLease) -> bool {
        lease.life == self.view.life || self.bounds.has(Mutation::EarlierEpochAccepted)
    }
}

impl Actor for Producer {
    type Input = ProducerInput;
    type Output = ProducerOutput;
    type View = ProducerView;

    fn born(bounds: &Bounds) -> Self {
        let view = ProducerView {
            alive: true,
            life: 0,
            jobs: [PrefillJob::None; 4],
            mail: [false; 4],
            blocks: vec![Content::Free; usize::from(bounds.prefill_blocks)],
            ledger: LedgerSnapshot::default(),
            opened: 0,
            given_up: [false; 4],
            valid: BTreeSet::new(),
            ended_early: [false; 4],
            back_early: [false; 4],
            blocks_of: [None; 4],
        };
        Self { bounds: *bounds, now: Time::ZERO, ledger: Ledger::new(TERMS), view }
    }

    fn live(&mut self, input: ProducerInput, outputs: &mut Vec<ProducerOutput>) -> Result<(), String> {
        self.take_input(input, outputs)?;
        self.settle()?;
        self.check()
    }

    fn view(&self) -> ProducerView {
        ProducerView { ledger: self.ledger.snapshot(self.now), ..self.view.clone() }
    }

    fn renamed(input: ProducerInput, by: Renaming) -> ProducerInput {
        match input {
            ProducerInput::Prefill(req, admission) => ProducerInput::Prefill(by.req(req), admission),
            ProducerInput::Start(req) => ProducerInput::Start(by.req(req)),
            ProducerInput::OpenLeaseEarly(req) => ProducerInput::OpenLeaseEarly(by.req(req)),
            ProducerInput::Finish(req) => ProducerInput::Finish(by.req(req)),
            ProducerInput::EndPrefill(req) => ProducerInput::EndPrefill(by.req(req)),
            ProducerInput::Abort(req) => ProducerInput::Abort(by.req(req)),
            ProducerInput::TakeMail(req) => ProducerInput::TakeMail(by.req(req)),
            ProducerInput::HangUp(req) => ProducerInput::HangUp(by.req(req)),
            ProducerInput::Release(lease) => ProducerInput::Release(lease.renamed(by)),
            ProducerInput::ReadBegun(lease, reader) => {
                ProducerInput::ReadBegun(lease.renamed(by), reader.renamed(by))
            }
            ProducerInput::IsReady(lease, reader) => {
                ProducerInput::IsReady(lease.renamed(by), reader.renamed(by))
            }
            ProducerInput::ReadDone(lease, reader) => {
                ProducerInput::ReadDone(lease.renamed(by), reader.renamed(by))
            }
            ProducerInput::ReadFailed(lease, reader) => {
                ProducerInput::ReadFailed(lease.renamed(by), reader.renamed(by))
            }
            ProducerInput::Heartbeat(lease) => ProducerInput::Heartbeat(lease.renamed(by)),
            ProducerInput::TimePasses(renewed) => ProducerInput::TimePasses(renewed.map(|req| by.req(req))),
            ProducerInput::AgesPass | ProducerInput::Crash | ProducerInput::Restart => input,
        }
    }
}

/// Whether time ends the lease.
pub(crate) fn has_clock(live: &LiveSnapshot) -> bool {
    live.lease.state != State::Growing
}

pub(crate) fn name(req: Req) -> RequestId {
    RequestId::new(["r1", "r2", "r1-2", "r2-2"][usize::from(req)]).expect("an id")
}
