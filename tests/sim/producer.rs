//! The producer's side of a transport, over the real ledger: the checks before a byte is sent.

use std::time::Duration;

use baton_connector::lease::CloseCause;
use baton_connector::ledger::{ClosedLease, HeartbeatReply};
use baton_connector::limits::DRAIN_DEADLINE;
use baton_connector::transport::{Readiness, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader};
use baton_engine::engine_core::EngineEnv;

use crate::messages::{Msg, Node};
use crate::net::{ConnId, Side};
use crate::setup::{Mutation, SECOND};
use crate::sim::{Event, Sim};

/// Maximum delay of a timer.
const TICK: u64 = 1_000;

/// One read that is being served. It is bound to its connection until the reader reports its end.
pub struct ServedRead {
    handle: Handle,
    reader: Reader,
    /// The read's first entry in the lease's table.
    first: usize,
    blocks: Vec<BlockId>,
    /// The reader copies the announced blocks itself.
    taken: bool,
    sent: usize,
    /// The read breaks off after this many blocks.
    breaks_after: Option<usize>,
}

impl Sim {
    /// Handles a consumer's message.
    pub fn producer_receives(&mut self, engine: usize, conn: ConnId, msg: Msg) {
        let world = self.engine(engine).world();
        let (now, ours) = (world.time(), world.epoch());
        let reply = match msg {
            Msg::Read { epoch, handle, reader, first, count } => {
                return self.begin_read(engine, conn, epoch, (handle, reader), (first, count));
            }
            Msg::ReadDone { epoch, handle, reader } if epoch == ours => {
                let naive = self.mutated(Mutation::ReleaseDoesNotDrain);
                let verdict = self.engine(engine).world().ledger.finish_read(handle, reader, now);
                self.engines[engine].serving.retain(|_, s| (s.handle, s.reader) != (handle, reader));
                Msg::Verdict(verdict == Verdict::Valid || naive)
            }
            Msg::ReadGivenUp { epoch, handle, reader } if epoch == ours => {
                world.ledger.fail_read(handle, reader, now);
                self.engines[engine].serving.retain(|_, s| (s.handle, s.reader) != (handle, reader));
                Msg::Done
            }
            Msg::Release { epoch, handle, reason } if epoch == ours => {
                self.release(engine, handle, reason);
                Msg::Done
            }
            Msg::Heartbeat { epoch, handle } if epoch == ours => match world.ledger.heartbeat(handle, now) {
                HeartbeatReply::Renewed => {
                    world.renewed(handle);
                    Msg::Renewed
                }
                HeartbeatReply::Gone => Msg::Gone,
            },
            // The epoch is one of an earlier process.
            _ => Msg::Gone,
        };
        self.after_ledger(engine);
        self.send(conn, Side::Callee, reply);
    }

    /// Releases a lease, for every path on which a release arrives.
    pub fn release(&mut self, engine: usize, handle: Handle, reason: &'static str) {
        if self.mutated(Mutation::ReleaseDoesNotDrain) {
            let readers: Vec<Reader> = {
                let serving = self.engines[engine].serving.values();
                serving.filter(|s| s.handle == handle).map(|s| s.reader).collect()
            };
            let world = self.engine(engine).world();
            let now = world.time();
            readers.into_iter().for_each(|reader| world.ledger.fail_read(handle, reader, now));
        }
        self.engine(engine).world().release(handle, reason);
        self.after_ledger(engine);
    }

    fn begin_read(
        &mut self,
        engine: usize,
        conn: ConnId,
        epoch: Epoch,
        (handle, reader): (Handle, Reader),
        (first, count): (usize, usize),
    ) {
        let world = self.engine(engine).world();
        let (now, ours) = (world.time(), world.epoch());
        if epoch != ours {
            return self.send(conn, Side::Callee, Msg::Gone);
        }
        let granted = world.ledger.begin_read(handle, reader, first, count, now);
        self.after_ledger(engine);
        use baton_connector::ledger::ReadError;
        let blocks = match granted {
            Ok(blocks) => blocks,
            Err(ReadError::Gone) => return self.send(conn, Side::Callee, Msg::Gone),
            Err(ReadError::Range { .. } | ReadError::Busy) => {
                return self.send(conn, Side::Callee, Msg::NotServed);
            }
        };
        let truncate = self.setup.truncate_one_in;
        let breaks_after = (truncate > 0 && !self.calm_now() && self.dice.one_in(truncate))
            .then(|| self.dice.below(blocks.len() as u64) as usize);
        let consumer = self.net.conns[conn.0].end(Side::Caller).0;
        let taken = self.same_host(Node::Engine(engine), consumer);
        let grows = self.is_unready(engine, handle, reader, first + count);
        let serving =
            ServedRead { handle, reader, first, blocks: blocks.clone(), taken, sent: 0, breaks_after };
        self.engines[engine].serving.insert(conn, serving);
        self.send(conn, Side::Callee, Msg::Granted(blocks));
        if !taken || grows {
            self.batch_later(engine, conn);
        } else {
            self.send(conn, Side::Callee, Msg::Final(count));
        }
    }

    fn is_unready(&mut self, engine: usize, handle: Handle, reader: Reader, upto: usize) -> bool {
        let ledger = &self.engine(engine).world().ledger;
        ledger.readiness(handle, reader, upto) == Readiness::NotYet && !self.mutated(Mutation::SentTooSoon)
    }

    fn batch_later(&mut self, engine: usize, conn: ConnId) {
        let (low, high) = self.engines[engine].setup.block_copy;
        let takes = self.engines[engine].dice.between(low, high);
        if takes > 100_000 {
            self.counts.slow_reads += 1;
        }
        self.later(Node::Engine(engine), takes, Event::Batch(engine, conn));
    }

    /// Sends the next block, if the lease is still live.
    pub fn send_batch(&mut self, engine: usize, conn: ConnId) {
        self.engine(engine);
        if !self.net.conns[conn.0].is_open(Side::Callee) {
            return;
        }
        let Some(serving) = self.engines[engine].serving.get_mut(&conn) else { return };
        let (handle, reader, at) = (serving.handle, serving.reader, serving.sent);
        if serving.breaks_after == Some(at) {
            // The read was cut off, or damage was detected. The consumer receives the end of the connection.
            let damaged = self.dice.percent(50);
            if damaged {
                self.counts.corrupted += 1
            } else {
                self.counts.truncated += 1
            }
            self.close(conn, Side::Callee);
            return self.reader_hung_up(engine, conn);
        }
        let block = serving.blocks[at];
        let (upto, taken) = (serving.first + at + 1, serving.taken);
        if self.is_unready(engine, handle, reader, upto) {
            self.counts.unready += 1;
            self.send(conn, Side::Callee, Msg::NotYet);
            return self.later(Node::Engine(engine), SECOND / 4, Event::Batch(engine, conn));
        }
        let too_soon = self.mutated(Mutation::SentTooSoon);
        let ledger = &self.engine(engine).world().ledger;
        let live = ledger.is_read_live(handle, reader);
        if !live || ledger.readiness(handle, reader, upto) == Readiness::Gone && !too_soon {
            // A draining reader waits for the message that nothing is read any more.
            if !live {
                self.engines[engine].serving.remove(&conn);
            }
            return self.send(conn, Side::Callee, Msg::Gone);
        }
        let serving = self.engines[engine].serving.get_mut(&conn).expect("found above");
        serving.sent += 1;
        let all = serving.sent == serving.blocks.len();
        if taken {
            self.send(conn, Side::Callee, Msg::Final(at + 1));
            if !all {
                self.batch_later(engine, conn);
            }
            return;
        }
        let contents = {
            let memory = &self.engines[engine].memory;
            memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner).block(block).to_vec()
        };
        self.send(conn, Side::Callee, Msg::Block(at, contents));
        if all {
            self.send(conn, Side::Callee, Msg::AllSent);
        } else {
            self.batch_later(engine, conn);
        }
    }

    /// A reader's connection has ended before the read ended.
    pub fn reader_hung_up(&mut self, engine: usize, conn: ConnId) {
        if let Some(serving) = self.engines[engine].serving.remove(&conn) {
            let world = self.engine(engine).world();
            let now = world.time();
            world.ledger.fail_read(serving.handle, serving.reader, now);
            self.after_ledger(engine);
        }
    }

    /// Sends the blocks of ended leases to the core, which frees them.
    pub fn settled(&mut self, engine: usize, settled: Vec<ClosedLease>) {
        let stopped = self.engines[engine].was_paused;
        for lease in &settled {
            let world = self.engine(engine).world();
            let (now, expiry) = (world.time().0, world.expiries.remove(&lease.handle));
            // A stopped process could not check its clock, and a growing lease has no expiry.
            let latest = expiry.unwrap_or(now) + DRAIN_DEADLINE.as_micros() as u64 + TICK;
            if now > latest && !stopped {
                let late = Duration::from_micros(now - latest);
                self.wrong(format!(
                    "I4: the lease of {} ended {late:?} after its last moment",
                    lease.request
                ));
            }
            let reading = self.engines[engine].serving.iter().any(|(conn, serving)| {
                serving.handle == lease.handle && self.net.conns[conn.0].is_open(Side::Callee)
            });
            // Only the drain deadline may free blocks under a reader.
            let least = match lease.cause {
                CloseCause::Fetched => Duration::MAX,
                CloseCause::Released => DRAIN_DEADLINE,
                CloseCause::Expired => DRAIN_DEADLINE + Duration::from_micros(self.setup.lease),
            };
            if reading && lease.lifetime < least {
                let (cause, held) = (lease.cause, lease.lifetime);
                self.wrong(format!("I3: freed after {held:?} ({cause:?}) while a reader reads"));
            }
        }
        if self.mutated(Mutation::GivenBackTwice) {
            let again = settled.iter().map(|lease| ClosedLease {
                handle: lease.handle,
                request: lease.request.clone(),
                blocks: lease.blocks.clone(),
                cause: lease.cause,
                reason: lease.reason.clone(),
                lifetime: lease.lifetime,
                readers: lease.readers,
            });
            let again: Vec<_> = again.collect();
            self.engines[engine].mail.settled.extend(again);
        }
        self.engines[engine].mail.settled.extend(settled);
    }
}
