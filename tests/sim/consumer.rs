//! A decode engine's calls to producers, in virtual time: reads on a bounded number of workers, heartbeats, and release
//! notices. Notices repeat until they are answered or the lease is past its expiry.

use std::collections::{BTreeMap, VecDeque};

use baton_connector::fetch::{Event as Report, FailureKind, Verification};
use baton_connector::limits::{HEARTBEATS_PER_LEASE, RENEWAL_DURATIONS_MAX};
use baton_connector::{BlockId, Handle};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::scheduler::sequence::SeqId;

use crate::device;
use crate::engine::EngineAction;
use crate::messages::{Msg, Node, Purpose};
use crate::net::{ConnId, Packet, Side};
use crate::setup::{Mutation, SECOND};
use crate::sim::{Event, Micros, Sim};

/// A producer that is silent for this long has failed.
const SILENCE: Micros = 5 * SECOND;
const PAUSE_FIRST: Micros = SECOND / 20;
const PAUSE_MAX: Micros = 2 * SECOND;

/// One read.
pub struct ReadJob {
    target: FetchTarget,
    first: usize,
    into: Vec<BlockId>,
    stop: bool,
    conn: Option<ConnId>,
    /// Blocks that have arrived.
    got: usize,
    /// Shared memory: blocks that may be copied, and whether one is being copied.
    allowed: usize,
    copying: bool,
    /// Shared memory: the producer's blocks, and its mapped pool.
    mapped: Option<(Vec<BlockId>, device::SharedMemory)>,
}

struct ReleaseNotice {
    target: FetchTarget,
    reason: &'static str,
    due: Micros,
    pause: Micros,
    give_up: Micros,
    in_flight: bool,
}

struct Heartbeat {
    target: FetchTarget,
    interval: Micros,
    due: Micros,
    /// After this time the engine gives the handoff up if its read has not begun.
    until: Micros,
}

#[derive(Default)]
pub struct SimConsumer {
    waiting: VecDeque<SeqId>,
    pub jobs: BTreeMap<SeqId, ReadJob>,
    running: usize,
    /// A read's own connection, while another connection carries the request for its verdict.
    kept: BTreeMap<SeqId, ConnId>,
    heartbeats: BTreeMap<SeqId, Heartbeat>,
    notices: BTreeMap<u64, ReleaseNotice>,
    next_notice: u64,
    timer: Option<Micros>,
}

impl SimConsumer {
    fn kept(&mut self, id: SeqId, conn: ConnId) {
        self.kept.insert(id, conn);
    }

    pub fn idle(&self) -> bool {
        self.jobs.is_empty() && self.heartbeats.is_empty() && self.notices.is_empty()
    }
}

/// The engine that listens on a port.
fn engine_at(port: u16) -> Node {
    Node::Engine(usize::from(port - 5600))
}

impl Sim {
    pub fn carry_out(&mut self, engine: usize, task: EngineAction) {
        match task {
            EngineAction::KeepAlive(id, target) => {
                let interval =
                    (target.lease().as_micros() as u64 / u64::from(HEARTBEATS_PER_LEASE)).max(20_000);
                let lease = target.lease().as_micros().min(u128::from(u64::MAX >> 8)) as u64;
                let until = self.now + lease * u64::from(RENEWAL_DURATIONS_MAX);
                let heartbeat = Heartbeat { target, interval, due: self.now, until };
                self.engines[engine].peers.heartbeats.insert(id, heartbeat);
                self.set_peers_timer(engine);
            }
            EngineAction::StopRenewing(id) => drop(self.engines[engine].peers.heartbeats.remove(&id)),
            EngineAction::Read(id, target, first, into) => {
                let job = ReadJob {
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
            EngineAction::StopRead(id) => self.stop_read(engine, id),
            EngineAction::Release(target, reason) => self.notify(engine, target, reason),
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
        // The worker reads the stop flag between two system calls and writes until then.
        let until_seen = self.dice.between(1, 30_000);
        self.later(Node::Engine(engine), until_seen, Event::StopSeen(engine, id.0));
    }

    /// A fetch worker reads the stop flag of its read.
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

    /// The read has ended, and nothing writes any more. Its worker takes the next one.
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

    /// Handles a reply, or the end of a connection that this engine opened.
    pub fn engine_answered(&mut self, engine: usize, conn: ConnId, packet: Packet) {
        let purpose = self.net.conns[conn.0].purpose.clone();
        let Packet::Message(msg) = packet else {
            return self.engine_call_failed(engine, conn);
        };
        match purpose {
            Purpose::Read(seq) => self.read_answered(engine, conn, SeqId(seq), msg),
            Purpose::Verdict(seq) => {
                self.close(conn, Side::Caller);
                let answer = match msg {
                    Msg::Verdict(true) => Verification::Valid,
                    Msg::Verdict(false) | Msg::Gone => Verification::Gone,
                    _ => Verification::Unknown,
                };
                self.verdict(engine, SeqId(seq), answer);
            }
            Purpose::Notice(notice) => {
                self.close(conn, Side::Caller);
                self.engines[engine].peers.notices.remove(&notice);
            }
            Purpose::Heartbeat(seq) => {
                self.close(conn, Side::Caller);
                if matches!(msg, Msg::Gone) && self.engines[engine].peers.heartbeats.contains_key(&SeqId(seq))
                {
                    self.report(engine, SeqId(seq), Report::LeaseGone);
                }
            }
            Purpose::GiveUp | Purpose::Ghost => self.close(conn, Side::Caller),
            Purpose::Ask(_) | Purpose::Prefill(..) | Purpose::Decode(..) | Purpose::Settle(_) => {
                unreachable!("engines do not ask that")
            }
        }
    }

    /// Handles a call of this engine that broke off or timed out.
    pub fn engine_call_failed(&mut self, engine: usize, conn: ConnId) {
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Read(seq) if self.engines[engine].peers.jobs.contains_key(&SeqId(seq)) => {
                self.job_over(engine, SeqId(seq), Report::TransferFailed(FailureKind::Transfer));
            }
            Purpose::Verdict(seq) => self.verdict(engine, SeqId(seq), Verification::Unknown),
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
            Msg::AllSent if job.got == job.into.len() => self.finish_read(engine, conn, id),
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

    /// Writes bytes into a landing block. Bytes may arrive in no other block (invariant 3).
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

    /// Shared memory: the reader copies without the producer. Nothing checks the lease meanwhile.
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
            Some(conn) if all => self.finish_read(engine, conn, id),
            _ if more => self.copy_later(engine, id),
            _ => {}
        }
    }

    /// All bytes have arrived: requests the verdict.
    fn finish_read(&mut self, engine: usize, conn: ConnId, id: SeqId) {
        let job = &self.engines[engine].peers.jobs[&id];
        let target = job.target.clone();
        if job.stop {
            self.job_over(engine, id, Report::TransferFailed(FailureKind::Transfer));
            return self.give_up(engine, &target);
        }
        self.report(engine, id, Report::TransferDone);
        if self.mutated(Mutation::VerdictSkipped) {
            self.close(conn, Side::Caller);
            return self.verdict(engine, id, Verification::Valid);
        }
        let ask = Msg::ReadDone { epoch: target.epoch(), handle: target.handle(), reader: target.reader() };
        let there = engine_at(target.port());
        match self.connect(Node::Engine(engine), there, Purpose::Verdict(id.0)) {
            Some(asking) => {
                // The read's own connection stays open: the reader is bound to it until the read is done.
                self.engines[engine].peers.jobs.get_mut(&id).expect("it runs").conn = Some(asking);
                self.net.conns[conn.0].purpose = Purpose::GiveUp;
                self.engines[engine].peers.kept(id, conn);
                self.watch_silence(asking, SILENCE);
                self.send(asking, Side::Caller, ask);
            }
            None => {
                self.close(conn, Side::Caller);
                self.verdict(engine, id, Verification::Unknown);
            }
        }
    }

    fn verdict(&mut self, engine: usize, id: SeqId, answer: Verification) {
        let Some(job) = self.engines[engine].peers.jobs.get(&id) else { return };
        let target = job.target.clone();
        if let Some(conn) = self.engines[engine].peers.kept.remove(&id) {
            self.close(conn, Side::Caller);
        }
        match answer {
            Verification::Valid => self.counts.landed += 1,
            Verification::Gone | Verification::Unknown => self.counts.gone += 1,
        }
        self.job_over(engine, id, Report::Verdict(answer));
        if answer == Verification::Unknown {
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

    /// Releases a lease at its producer. The notice repeats until it is answered or the lease has expired.
    pub fn notify(&mut self, engine: usize, target: FetchTarget, reason: &'static str) {
        if self.mutated(Mutation::ReleasesNotSent) {
            return;
        }
        let give_up = self.now + target.lease().as_micros().min(u128::from(u64::MAX / 4)) as u64;
        let peers = &mut self.engines[engine].peers;
        peers.next_notice += 1;
        let notice =
            ReleaseNotice { target, reason, due: self.now, pause: PAUSE_FIRST, give_up, in_flight: false };
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
        let heartbeats = peers.heartbeats.values().map(|heartbeat| heartbeat.due);
        let notices = peers.notices.values().filter(|notice| !notice.in_flight).map(|notice| notice.due);
        let Some(due) = heartbeats.chain(notices).min() else { return };
        let at = due.max(now + 1);
        if peers.timer.is_none_or(|set| set > at || set <= now) {
            peers.timer = Some(at);
            self.later(Node::Engine(engine), at - now, Event::PeersTimer(engine));
        }
    }

    pub fn peers_timer(&mut self, engine: usize) {
        let now = self.now;
        let peers = &mut self.engines[engine].peers;
        // An earlier timer was set since.
        if peers.timer.is_none_or(|set| set > now) {
            return;
        }
        peers.timer = None;
        let over: Vec<SeqId> =
            peers.heartbeats.iter().filter(|(_, b)| b.until <= now).map(|(id, _)| *id).collect();
        let mut heartbeats = Vec::new();
        for heartbeat in peers.heartbeats.values_mut().filter(|heartbeat| heartbeat.until <= now) {
            // The limit does not apply to a read that has begun.
            heartbeat.until = Micros::MAX;
        }
        for (id, heartbeat) in &mut peers.heartbeats {
            if heartbeat.due <= now {
                heartbeat.due = now + heartbeat.interval;
                heartbeats.push((*id, heartbeat.target.clone()));
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
        for (id, target) in heartbeats {
            let msg = Msg::Heartbeat { epoch: target.epoch(), handle: target.handle() };
            self.call(engine, &target, Purpose::Heartbeat(id.0), msg);
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
