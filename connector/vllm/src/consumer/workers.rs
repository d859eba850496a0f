//! The exchanges with producers, on worker threads, over kept connections.
//!
//! A read is open at the producer until "done", bound to its connection. All exchanges with one producer use one
//! connection, one after another. If the connection breaks, the producer counts the read as failed and keeps the lease.
//! "Done" is then answered with gone, and the read is opened again before the second try: a lease never reopens, so a
//! lease that grants a read now was live all the time.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, Transport, TransportError, Verdict};
use baton_connector::{Handle, Reader};
use baton_connector_channel::{Client, ClientOptions, Secret};
use baton_connector_leases::lease_span;

use super::loads::{Hold, LEASE_OVER, LoadTable, LoadVerdict, ReadProgress, UNREACHABLE};
use super::queues::{Job, JobKind, Notice, NoticeKind, PickedKind, PickedTask};
use super::target::{LoadTarget, ProducerKey};
use crate::channel::{BlockNameDialer, FORGED, empty_region};
use crate::metrics::{CoreMetrics, UNDELIVERED};

/// Idle connections of one producer. An open read is bound to its connection, so they are kept for long.
const CONNECTIONS_MAX: usize = 64;
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// One exchange, ready to run.
#[derive(Debug)]
pub(super) struct Exchange {
    producer: ProducerKey,
    address: Option<SocketAddr>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Job(Job),
    /// Loads and their handles.
    Renewals(Vec<(u64, Handle)>),
    Notice(Notice),
}

/// The answer of a producer.
#[derive(Debug)]
pub(super) struct Answer {
    address: Option<SocketAddr>,
    result: TaskResult,
}

#[derive(Debug)]
enum TaskResult {
    Read(Result<(), &'static str>),
    Verdict(LoadVerdict),
    Renewed(Result<Vec<HeartbeatReply>, TransportError>),
    Delivered(Result<&'static str, TransportError>),
}

/// Takes the next exchange. Jobs of loads that are gone are settled without one.
pub(super) fn next_exchange(table: &mut LoadTable, now: Instant) -> Option<Exchange> {
    loop {
        let PickedTask { producer, address, kind } = table.queues.pick(now)?;
        let task = match kind {
            PickedKind::Job(job) => settle_broken(table, job, now).map(Task::Job),
            PickedKind::Renewals(numbers) => renewals(table, &producer, &numbers, now),
            PickedKind::Notice(notice) => Some(Task::Notice(notice)),
        };
        match task {
            Some(task) => return Some(Exchange { producer, address, task }),
            None => table.queues.put_back(&producer),
        }
    }
}

/// Settles a verdict without an exchange if the read of the load was not granted; else returns the job.
fn settle_broken(table: &mut LoadTable, mut job: Job, now: Instant) -> Option<Job> {
    // Of a load that has ended meanwhile nothing is asked.
    let read = table.loads.get(&job.load)?.read;
    job.opened = read == ReadProgress::Open;
    let ReadProgress::Broken(reason) = read else { return Some(job) };
    let verdict = LoadVerdict::gone(reason);
    match &job.kind {
        JobKind::Begin => {}
        JobKind::Finish(id) => table.finish_answered(job.load, id, verdict, now),
        JobKind::Confirm(id) => table.settle(id, verdict, now),
    }
    None
}

/// The loads that are still renewed, scheduled for the next time.
fn renewals(table: &mut LoadTable, producer: &ProducerKey, numbers: &[u64], now: Instant) -> Option<Task> {
    let mut members = Vec::with_capacity(numbers.len());
    for number in numbers {
        let Some(load) = table.loads.get_mut(number).filter(|load| !matches!(load.hold, Hold::Gone(_)))
        else {
            continue;
        };
        if load.renews(now) {
            members.push((*number, load.target.handle));
            let due = now + load.interval();
            table.queues.renew(producer, due, *number);
        } else {
            tracing::warn!(
                parent: lease_span!(load.target.handle), event = "handoff_wait_expired",
                "handoff given up, no free blocks in time"
            );
        }
    }
    (!members.is_empty()).then_some(Task::Renewals(members))
}

/// Applies an answer. `metrics` counts notices.
pub(super) fn apply(
    table: &mut LoadTable,
    exchange: Exchange,
    answer: Answer,
    metrics: &CoreMetrics,
    now: Instant,
) {
    let Exchange { producer, task, .. } = exchange;
    match (task, answer.result) {
        (Task::Job(job), TaskResult::Read(result)) => {
            if let Some(load) = table.loads.get_mut(&job.load) {
                match result {
                    Ok(()) => load.read = ReadProgress::Open,
                    Err(reason) if REFUSALS.contains(&reason) => {
                        (load.read, load.hold) = (ReadProgress::Broken(reason), Hold::Gone(reason));
                    }
                    // Asked again with "done".
                    Err(_) => load.read = ReadProgress::None,
                }
            }
        }
        (Task::Job(job), TaskResult::Verdict(verdict)) => {
            if let Some(load) = table.loads.get_mut(&job.load).filter(|_| verdict.reason == LEASE_OVER) {
                load.hold = Hold::Gone(LEASE_OVER);
            }
            match &job.kind {
                JobKind::Finish(id) => table.finish_answered(job.load, id, verdict, now),
                JobKind::Confirm(id) => table.settle(id, verdict, now),
                JobKind::Begin => {}
            }
        }
        (Task::Renewals(members), TaskResult::Renewed(replies)) => renewed(table, &members, replies),
        (Task::Notice(notice), TaskResult::Delivered(Ok(label))) => {
            table.queues.delivered(&producer, now);
            if notice.kind == NoticeKind::Leave {
                metrics.notice(&notice.reason, label);
            }
        }
        (Task::Notice(notice), TaskResult::Delivered(Err(error))) => {
            let given_up = table.queues.not_delivered(&producer, notice, now);
            given_up.iter().for_each(|reason| metrics.notice(reason, UNDELIVERED));
            if !given_up.is_empty() {
                tracing::warn!(
                    event = "release_notices_expired", %error, given_up = given_up.len(),
                    "release notices not delivered before lease expiry"
                );
            }
        }
        (task, result) => unreachable!("{task:?} was answered by {result:?}"),
    }
    table.queues.release(&producer, answer.address);
}

fn renewed(
    table: &mut LoadTable,
    members: &[(u64, Handle)],
    replies: Result<Vec<HeartbeatReply>, TransportError>,
) {
    let hold_of = |reply: Option<&HeartbeatReply>| match reply {
        Some(HeartbeatReply::Renewed) => Some(Hold::Live),
        Some(HeartbeatReply::Gone) => Some(Hold::Gone(LEASE_OVER)),
        None => None,
    };
    let refused = matches!(replies, Err(TransportError::Refused(_)));
    let replies = replies.unwrap_or_default();
    for (at, (number, _)) in members.iter().enumerate() {
        let Some(load) = table.loads.get_mut(number) else { continue };
        let hold = if refused { Some(Hold::Gone("refused")) } else { hold_of(replies.get(at)) };
        if let Some(hold) = hold.filter(|_| !matches!(load.hold, Hold::Gone(_))) {
            load.hold = hold;
        }
    }
}

/// Runs exchanges, without the table.
pub(super) struct Caller {
    client: Client<BlockNameDialer>,
    region: Region,
    /// Without a cluster secret only producers of this host are called.
    loopback_only: bool,
    stop: StopFlag,
}

impl Caller {
    /// A caller without connections.
    pub(super) fn new(secret: Option<&Secret>) -> Self {
        let options = ClientOptions {
            secret: secret.cloned(),
            connections_per_peer_max: CONNECTIONS_MAX,
            idle_timeout: IDLE_TIMEOUT,
            ..ClientOptions::default()
        };
        Self {
            client: Client::new(options),
            region: empty_region(),
            loopback_only: secret.is_none(),
            stop: StopFlag::new(false),
        }
    }

    /// Ends reads in progress and all later ones.
    pub(super) fn stop(&self) {
        self.stop.store(true, std::sync::atomic::Ordering::Release);
    }

    /// Closes connections that producers have closed.
    pub(super) fn sweep(&self) {
        self.client.sweep();
    }

    /// Runs one exchange. Blocks its thread for at most the channel's bound on silence, a few times.
    pub(super) fn run(&self, exchange: &Exchange) -> Answer {
        let peer = self.peer(&exchange.producer, exchange.address);
        let result = match &exchange.task {
            Task::Job(job) => match &job.kind {
                JobKind::Begin => TaskResult::Read(peer.as_ref().map_err(word).and_then(|peer| {
                    self.begin(peer, &job.target, job.consumer).map_err(|error| word(&error))
                })),
                JobKind::Finish(_) => {
                    TaskResult::Verdict(verdict(peer.clone().and_then(|peer| self.finish(&peer, job))))
                }
                JobKind::Confirm(_) => {
                    TaskResult::Verdict(verdict(peer.clone().and_then(|peer| self.confirm(&peer, job))))
                }
            },
            Task::Renewals(members) => {
                let handles: Vec<_> = members.iter().map(|(_, handle)| *handle).collect();
                TaskResult::Renewed(peer.clone().and_then(|peer| self.client.heartbeat(&peer, &handles)))
            }
            Task::Notice(notice) => {
                let delivered = peer.clone().and_then(|peer| self.deliver(&peer, notice));
                TaskResult::Delivered(match delivered {
                    // The producer has ended, or this engine may not call it: a repetition changes nothing.
                    Err(TransportError::Gone | TransportError::Refused(_)) => Ok("gone"),
                    other => other,
                })
            }
        };
        let reason = match &result {
            TaskResult::Read(Err(reason)) => *reason,
            TaskResult::Verdict(verdict) => verdict.reason,
            TaskResult::Renewed(Err(error)) | TaskResult::Delivered(Err(error)) => word(error),
            TaskResult::Read(Ok(())) | TaskResult::Renewed(Ok(_)) | TaskResult::Delivered(Ok(_)) => "",
        };
        // A name may have another address later.
        let answered = reason != UNREACHABLE && reason != TRANSFER;
        let address = peer.ok().map(|peer| peer.address).filter(|_| answered);
        Answer { address, result }
    }

    /// The producer's side channel.
    fn peer(&self, producer: &ProducerKey, known: Option<SocketAddr>) -> Result<Peer, TransportError> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], producer.port));
        let address = match known {
            Some(address) => address,
            None => {
                let mut found = (&*producer.host, producer.port)
                    .to_socket_addrs()
                    .map_err(|error| TransportError::Handshake(nowhere, error.to_string().into()))?;
                found
                    .next()
                    .ok_or_else(|| TransportError::Handshake(nowhere, "the name has no address".into()))?
            }
        };
        if self.loopback_only && !address.ip().is_loopback() {
            let why = "a producer on another host needs a cluster secret";
            return Err(TransportError::Refused(why.into()));
        }
        Ok(Peer { address, epoch: producer.epoch, fingerprint: producer.fingerprint })
    }

    /// Opens the read of the whole lease, and compares its block ids with those of the handoff.
    fn begin(&self, peer: &Peer, target: &LoadTarget, consumer: u64) -> Result<(), TransportError> {
        let (handle, reader) = (target.handle, Reader::sole(consumer));
        let part = Part::Blocks { first: 0 };
        let order = ReadOrder { handle, reader, part, into: target.blocks.to_vec() };
        let result = self.client.read(peer, &order, &self.region, &self.stop);
        if let Err(TransportError::Refused(why)) = &result
            && **why == *FORGED
        {
            tracing::warn!(
                parent: lease_span!(handle), event = "handoff_blocks_differ", producer = %peer.address,
                "handoff names other blocks than its lease"
            );
            // The read is open at the producer. If this is lost, the lease expires.
            let _ = self.client.give_up(peer, handle, reader);
        }
        result
    }

    /// Reports the end of the read. Its block ids are compared before.
    fn finish(&self, peer: &Peer, job: &Job) -> Result<Verdict, TransportError> {
        let (handle, reader) = (job.target.handle, Reader::sole(job.consumer));
        if job.opened && self.client.finish(peer, handle, reader)? == Verdict::Valid {
            return Ok(Verdict::Valid);
        }
        // The connection of the read may have ended, and the lease may be live: see the module's documentation.
        self.begin(peer, &job.target, job.consumer)?;
        self.client.finish(peer, handle, reader)
    }

    /// Learns whether the lease is live. The block ids of its read are compared before.
    fn confirm(&self, peer: &Peer, job: &Job) -> Result<Verdict, TransportError> {
        if !job.opened {
            self.begin(peer, &job.target, job.consumer)?;
        }
        let replies = self.client.heartbeat(peer, &[job.target.handle])?;
        Ok(if replies == [HeartbeatReply::Renewed] { Verdict::Valid } else { Verdict::Gone })
    }

    fn deliver(&self, peer: &Peer, notice: &Notice) -> Result<&'static str, TransportError> {
        let Notice { handle, consumer, kind, reason, .. } = notice;
        let (handle, reader) = (*handle, Reader::sole(*consumer));
        match kind {
            NoticeKind::Done => self.client.finish(peer, handle, reader).map(|_| "done"),
            NoticeKind::GiveUp => self.client.give_up(peer, handle, reader).map(|()| "done"),
            NoticeKind::Leave if notice.several_consumers => {
                self.client.leave(peer, handle, *consumer, reason).map(ReleaseReply::label)
            }
            NoticeKind::Leave => self.client.release(peer, handle, reason).map(ReleaseReply::label),
        }
    }
}

/// Words of answers that a repetition does not change.
const REFUSALS: [&str; 3] = [LEASE_OVER, "forged", "refused"];

/// The word of an exchange that broke off, or that the producer did not answer.
const TRANSFER: &str = "transfer";

/// The word of an error, for verdicts.
fn word(error: &TransportError) -> &'static str {
    match error {
        TransportError::Gone => LEASE_OVER,
        TransportError::Refused(why) if **why == *FORGED => "forged",
        TransportError::Refused(_) => "refused",
        TransportError::Handshake(..) => UNREACHABLE,
        TransportError::Transfer(_) => TRANSFER,
        TransportError::Stopped => "stopped",
    }
}

fn verdict(answer: Result<Verdict, TransportError>) -> LoadVerdict {
    match answer {
        Ok(Verdict::Valid) => LoadVerdict::VALID,
        Ok(Verdict::Gone) => LoadVerdict::gone(LEASE_OVER),
        Err(error) => LoadVerdict::gone(word(&error)),
    }
}
