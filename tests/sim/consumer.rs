//! A decode engine's dealings with producers, under virtual time: reads on a bounded number of workers, heartbeats,
//! and release notices that are repeated until they are answered or the lease is past its expiry.

use std::collections::{BTreeMap, VecDeque};

use baton_connector::fetch::{Answer, Event as Report, FailureKind};
use baton_connector::limits::{HEARTBEATS_PER_LEASE, RENEWED_FOR_MAX};
use baton_connector::{BlockId, Handle};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::scheduler::sequence::SeqId;

use crate::device;
use crate::engine::Todo;
use crate::net::{ConnId, Parcel, Side};
use crate::setup::{Mutation, SECOND};
use crate::sim::{Event, Micros, Sim};
use crate::words::{Msg, Node, Purpose};

/// A producer that is silent so long has failed.
const SILENCE: Micros = 5 * SECOND;
const PAUSE_FIRST: Micros = SECOND / 20;
const PAUSE_MAX: Micros = 2 * SECOND;

/// One read.
pub struct Job {
    target: FetchTarget,
    first: usize,
    into: Vec<BlockId>,
    stop: bool,
    conn: Option<ConnId>,
    /// Blocks that have arrived.
    got: usize,
    /// Shared memory: blocks that may be taken, and whether one is being copied.
    allowed: usize,
    copying: bool,
    /// Shared memory: the producer's blocks, and its pool as it was mapped.
    mapped: Option<(Vec<BlockId>, device::Shared)>,
}

struct Notice {
    target: FetchTarget,
    reason: &'static str,
    due: Micros,
    pause: Micros,
    give_up: Micros,
    in_flight: bool,
}

struct Beat {
    target: FetchTarget,
    interval: Micros,
    due: Micros,
    /// From then on it is given up if its read has not begun.
    until: Micros,
}

#[derive(Default)]
pub struct Peers {
    waiting: VecDeque<SeqId>,
    pub jobs: BTreeMap<SeqId, Job>,
    running: usize,
    /// A read's own connection, while its verdict is asked for over another one.
    kept: BTreeMap<SeqId, ConnId>,
    beats: BTreeMap<SeqId, Beat>,
    notices: BTreeMap<u64, Notice>,
    next_notice: u64,
    timer: Option<Micros>,
}

impl Peers {
    fn kept(&mut self, id: SeqId, conn: ConnId) {
        self.kept.insert(id, conn);
    }

    pub fn idle(&self) -> bool {
        self.jobs.is_empty() && self.beats.is_empty() && self.notices.is_empty()
    }
}

/// Which engine listens on a port.
fn engine_at(port: u16) -> Node {
    Node::Engine(usize::from(port - 5600))
}

impl Sim {
    pub fn carry_out(&mut self, engine: usize, task: Todo) {
        match task {
            Todo::KeepAlive(id, target) => {
                let interval =
                    (target.lease().as_micros() as u64 / u64::from(HEARTBEATS_PER_LEASE)).max(20_000);
                let lease = target.lease().as_micros().min(u128::from(u64::MAX >> 8)) as u64;
                let until = self.now + lease * u64::from(RENEWED_FOR_MAX);
                let beat = Beat { target, interval, due: self.now, until };
                self.engines[engine].peers.beats.insert(id, beat);
                self.set_peers_timer(engine);
            }
            Todo::LetGo(id) => drop(self.engines[engine].peers.beats.remove(&id)),
            Todo::Read(id, target, first, into) => {
                let job = Job {
                    target,
                    first,
                    into,
                    stop: false,
                    conn: None,
                    got: 0,
                    allowed: 0,
                    copying: false,
                    mapped: None,
                };
                let peers = &mut self.engines[engine].peers;
                peers.jobs.insert(id, job);
                peers.waiting.push_back(id);
                self.next_job(engine);
            }
            Todo::StopRead(id) => self.stop_read(engine, id),
            Todo::Release(target, reason) => self.notify(engine, target, reason),
        }
    }

    fn stop_read(&mut self, engine: usize, id: SeqId) {
        let peers = &mut self.engines[engine].peers;
        if let Some(at) = peers.waiting.iter().position(|waiting| *waiting == id) {
            peers.waiting.remove(at);
            peers.jobs.remove(&id);
            return self.report(engine, id, Report::TransferFailed(FailureKind::Transfer));
        }
        let Some(job) = peers.jobs.get_mut(&id) else { return };
        job.stop = true;
        // The worker looks at the flag between two system calls: until then it goes on writing.
        let until_seen = self.dice.between(1, 30_000);
        self.later(Node::Engine(engine), until_seen, Event::StopSeen(engine, id.0));
    }

    /// A fetch worker sees the stop flag of its read.
    pub fn stop_seen(&mut self, engine: usize, seq: u64) {
        let id = SeqId(seq);
        let Some(conn) = self.engines[engine].peers.jobs.get(&id).and_then(|job| job.conn) else { return };
        if matches!(self.net.conns[conn.0].purpose, Purpose::Read(_)) {
            self.close(conn, Side::Caller);
            self.job_over(engine, id, Report::TransferFailed(FailureKind::Transfer));
        }
    }

    fn next_job(&mut self, engine: usize) {
        let peers = &mut self.engines[engine].peers;
        if peers.running >= self.engines[engine].setup.fetch_workers {
            return;
        }
        let peers = &mut self.engines[engine].peers;
        let Some(id) = peers.waiting.pop_front() else { return };
        peers.running += 1;
        let job = &peers.jobs[&id];
        let read = Msg::Read {
            epoch: job.target.epoch(),
            handle: job.target.handle(),
            reader: job.target.reader(),
            first: job.first,
            count: job.into.len(),
        };
        let there = engine_at(job.target.port());
        match self.connect(Node::Engine(engine), there, Purpose::Read(id.0)) {
            Some(conn) => {
                self.engines[engine].peers.jobs.get_mut(&id).expect("it runs").conn = Some(conn);
                self.watch_silence(conn, SILENCE);
                self.send(conn, Side::Caller, read);
            }
            None => self.job_over(engine, id, Report::TransferFailed(FailureKind::Unreachable)),
        }
    }

    /// The read is over, well or not; nothing writes any more. Its worker takes the next one.
    fn job_over(&mut self, engine: usize, id: SeqId, report: Report) {
        let peers = &mut self.engines[engine].peers;
        if peers.jobs.remove(&id).is_some() {
            peers.running -= 1;
        }
        self.report(engine, id, report);
        self.next_job(engine);
    }

    fn report(&mut self, engine: usize, id: SeqId, report: Report) {
        self.engines[engine].mail.fetches.push((id, report));
        self.poke(engine);
    }

    /// An answer, or the end of a connection that this engine opened.
    pub fn engine_answered(&mut self, engine: usize, conn: ConnId, parcel: Parcel) {
        let purpose = self.net.conns[conn.0].purpose.clone();
        let Parcel::Message(msg) = parcel else {
            return self.engine_call_failed(engine, conn);
        };
        match purpose {
            Purpose::Read(seq) => self.read_answered(engine, conn, SeqId(seq), msg),
            Purpose::Verdict(seq) => {
                self.close(conn, Side::Caller);
                let answer = match msg {
                    Msg::Verdict(true) => Answer::Valid,
                    Msg::Verdict(false) | Msg::Gone => Answer::Gone,
                    _ => Answer::Unknown,
                };
                self.verdict(engine, SeqId(seq), answer);
            }
            Purpose::Notice(notice) => {
                self.close(conn, Side::Caller);
                self.engines[engine].peers.notices.remove(&notice);
            }
            Purpose::Beat(seq) => {
                self.close(conn, Side::Caller);
                if matches!(msg, Msg::Gone) && self.engines[engine].peers.beats.contains_key(&SeqId(seq)) {
                    self.report(engine, SeqId(seq), Report::LeaseGone);
                }
            }
            Purpose::GiveUp | Purpose::Ghost => self.close(conn, Side::Caller),
            Purpose::Ask(_) | Purpose::Prefill(..) | Purpose::Decode(..) | Purpose::Settle(_) => {
                unreachable!("engines do not ask that")
            }
        }
    }

    /// A call of this engine broke off, or was not answered in time.
    pub fn engine_call_failed(&mut self, engine: usize, conn: ConnId) {
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Read(seq) if self.engines[engine].peers.jobs.contains_key(&SeqId(seq)) => {
                self.job_over(engine, SeqId(seq), Report::TransferFailed(FailureKind::Transfer));
            }
            Purpose::Verdict(seq) => self.verdict(engine, SeqId(seq), Answer::Unknown),
            Purpose::Notice(notice) => self.notice_failed(engine, notice),
            _ => {}
        }
    }

    fn read_answered(&mut self, engine: usize, conn: ConnId, id: SeqId, msg: Msg) {
        let Some(job) = self.engines[engine].peers.jobs.get_mut(&id) else { return };
        match msg {
            Msg::Granted(blocks) => {
                let there = self.net.conns[conn.0].end(Side::Callee).0;
                if self.same_host(Node::Engine(engine), there) {
                    let Node::Engine(producer) = there else { unreachable!("producers are engines") };
                    let memory = std::sync::Arc::clone(&self.engines[producer].memory);
                    let job = self.engines[engine].peers.jobs.get_mut(&id).expect("found above");
                    job.mapped = Some((blocks, memory));
                }
            }
            Msg::Final(upto) => {
                job.allowed = job.allowed.max(upto);
                if !job.copying && job.got < job.allowed {
                    self.copy_later(engine, id);
                }
            }
            Msg::Block(at, contents) => {
                let block = job.into[at];
                job.got += 1;
                self.land(engine, block, &contents);
            }
            Msg::AllSent if job.got == job.into.len() => self.read_done(engine, conn, id),
            Msg::AllSent | Msg::NotServed => {
                self.close(conn, Side::Caller);
                self.job_over(engine, id, Report::TransferFailed(FailureKind::Refused));
            }
            Msg::Gone => {
                self.close(conn, Side::Caller);
                self.job_over(engine, id, Report::TransferFailed(FailureKind::Gone));
            }
            _ => {}
        }
    }

    /// Bytes arrive in a landing block. They may only ever arrive in one (invariant 3).
    pub fn land(&mut self, engine: usize, block: BlockId, contents: &[device::Slot]) {
        let core = self.engines[engine].core.as_ref().expect("it reads");
        if !core.is_landing(block) {
            return self.wrong(format!("I3: a transfer writes into block {}, which is not landing", block.0));
        }
        let mut memory =
            self.engines[engine].memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        memory.write(block, contents);
    }

    fn copy_later(&mut self, engine: usize, id: SeqId) {
        if let Some(job) = self.engines[engine].peers.jobs.get_mut(&id) {
            job.copying = true;
        }
        let (low, high) = self.engines[engine].setup.block_copy;
        let takes = self.engines[engine].dice.between(low, high);
        self.later(Node::Engine(engine), takes, Event::CopyBlock(engine, id.0));
    }

    /// Shared memory: the reader copies by itself; nobody looks at the lease meanwhile.
    pub fn copy_block(&mut self, engine: usize, seq: u64) {
        let id = SeqId(seq);
        let Some(job) = self.engines[engine].peers.jobs.get_mut(&id) else { return };
        let Some((blocks, memory)) = &job.mapped else { return };
        let (from, into) = (blocks[job.got], job.into[job.got]);
        let contents = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner).block(from).to_vec();
        job.got += 1;
        job.copying = false;
        let (all, conn, more) = (job.got == job.into.len(), job.conn, job.got < job.allowed);
        self.land(engine, into, &contents);
        match conn {
            Some(conn) if all => self.read_done(engine, conn, id),
            _ if more => self.copy_later(engine, id),
            _ => {}
        }
    }

    /// Every byte is here: was the lease live all the time?
    fn read_done(&mut self, engine: usize, conn: ConnId, id: SeqId) {
        let job = &self.engines[engine].peers.jobs[&id];
        let target = job.target.clone();
        if job.stop {
            self.job_over(engine, id, Report::TransferFailed(FailureKind::Transfer));
            return self.give_up(engine, &target);
        }
        self.report(engine, id, Report::TransferDone);
        if self.mutated(Mutation::VerdictNotAsked) {
            self.close(conn, Side::Caller);
            return self.verdict(engine, id, Answer::Valid);
        }
        let ask = Msg::ReadDone { epoch: target.epoch(), handle: target.handle(), reader: target.reader() };
        let there = engine_at(target.port());
        match self.connect(Node::Engine(engine), there, Purpose::Verdict(id.0)) {
            Some(asking) => {
                // The read's own connection stays: the reader is bound to it until it is done.
                self.engines[engine].peers.jobs.get_mut(&id).expect("it runs").conn = Some(asking);
                self.net.conns[conn.0].purpose = Purpose::GiveUp;
                self.engines[engine].peers.kept(id, conn);
                self.watch_silence(asking, SILENCE);
                self.send(asking, Side::Caller, ask);
            }
            None => {
                self.close(conn, Side::Caller);
                self.verdict(engine, id, Answer::Unknown);
            }
        }
    }

    fn verdict(&mut self, engine: usize, id: SeqId, answer: Answer) {
        let Some(job) = self.engines[engine].peers.jobs.get(&id) else { return };
        let target = job.target.clone();
        if let Some(conn) = self.engines[engine].peers.kept.remove(&id) {
            self.close(conn, Side::Caller);
        }
        match answer {
            Answer::Valid => self.counts.landed += 1,
            Answer::Gone | Answer::Unknown => self.counts.gone += 1,
        }
        self.job_over(engine, id, Report::Verdict(answer));
        if answer == Answer::Unknown {
            self.give_up(engine, &target);
        }
    }

    fn give_up(&mut self, engine: usize, target: &FetchTarget) {
        let (epoch, handle, reader) = (target.epoch(), target.handle(), target.reader());
        let there = engine_at(target.port());
        if let Some(conn) = self.connect(Node::Engine(engine), there, Purpose::GiveUp) {
            self.watch_silence(conn, SILENCE);
            self.send(conn, Side::Caller, Msg::ReadGivenUp { epoch, handle, reader });
        }
    }

    /// Releases a lease at its producer, until that is answered or past expiry.
    pub fn notify(&mut self, engine: usize, target: FetchTarget, reason: &'static str) {
        if self.mutated(Mutation::ReleasesNotSent) {
            return;
        }
        let give_up = self.now + target.lease().as_micros().min(u128::from(u64::MAX / 4)) as u64;
        let peers = &mut self.engines[engine].peers;
        peers.next_notice += 1;
        let notice = Notice { target, reason, due: self.now, pause: PAUSE_FIRST, give_up, in_flight: false };
        peers.notices.insert(peers.next_notice, notice);
        self.set_peers_timer(engine);
    }

    fn notice_failed(&mut self, engine: usize, number: u64) {
        let now = self.now;
        let peers = &mut self.engines[engine].peers;
        let Some(notice) = peers.notices.get_mut(&number) else { return };
        if now >= notice.give_up {
            peers.notices.remove(&number);
            return;
        }
        notice.in_flight = false;
        notice.due = now + notice.pause;
        notice.pause = (notice.pause * 2).min(PAUSE_MAX);
        self.set_peers_timer(engine);
    }

    fn set_peers_timer(&mut self, engine: usize) {
        let now = self.now;
        let peers = &mut self.engines[engine].peers;
        let beats = peers.beats.values().map(|beat| beat.due);
        let notices = peers.notices.values().filter(|notice| !notice.in_flight).map(|notice| notice.due);
        let Some(due) = beats.chain(notices).min() else { return };
        let at = due.max(now + 1);
        if peers.timer.is_none_or(|set| set > at || set <= now) {
            peers.timer = Some(at);
            self.later(Node::Engine(engine), at - now, Event::PeersTimer(engine));
        }
    }

    pub fn peers_timer(&mut self, engine: usize) {
        let now = self.now;
        let peers = &mut self.engines[engine].peers;
        // An earlier one was set since.
        if peers.timer.is_none_or(|set| set > now) {
            return;
        }
        peers.timer = None;
        let over: Vec<SeqId> =
            peers.beats.iter().filter(|(_, b)| b.until <= now).map(|(id, _)| *id).collect();
        let mut beats = Vec::new();
        for beat in peers.beats.values_mut().filter(|beat| beat.until <= now) {
            // It means nothing to a read that has begun.
            beat.until = Micros::MAX;
        }
        for (id, beat) in &mut peers.beats {
            if beat.due <= now {
                beat.due = now + beat.interval;
                beats.push((*id, beat.target.clone()));
            }
        }
        let mut notices = Vec::new();
        for (number, notice) in &mut peers.notices {
            if notice.due <= now && !notice.in_flight {
                notice.in_flight = true;
                notices.push((*number, notice.target.clone(), notice.reason));
            }
        }
        for id in over {
            self.report(engine, id, Report::LeaseGone);
        }
        for (id, target) in beats {
            let msg = Msg::Heartbeat { epoch: target.epoch(), handle: target.handle() };
            self.call(engine, &target, Purpose::Beat(id.0), msg);
        }
        for (number, target, reason) in notices {
            let (epoch, handle): (_, Handle) = (target.epoch(), target.handle());
            let sent =
                self.call(engine, &target, Purpose::Notice(number), Msg::Release { epoch, handle, reason });
            if !sent {
                self.notice_failed(engine, number);
            }
        }
        self.set_peers_timer(engine);
    }

    fn call(&mut self, engine: usize, target: &FetchTarget, purpose: Purpose, msg: Msg) -> bool {
        let there = engine_at(target.port());
        let Some(conn) = self.connect(Node::Engine(engine), there, purpose) else { return false };
        self.watch_silence(conn, SILENCE);
        self.send(conn, Side::Caller, msg);
        true
    }
}
