//! One connection on the producer's side: requests in, answers and blocks out.
//!
//! The reader of a lease is bound to the connection that serves it: when the connection ends before the
//! reader has said that it is done, the read has failed. `Done` may come over another connection.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::slice::Cut;
use baton_connector::transport::{Producer, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};

use crate::handshake::{self, TurnedAway};
use crate::link::{Link, LinkError, Until};
use crate::scatter::Spans;
use crate::server::Shared;
use crate::source::{Batch, Source, batches};
use crate::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply, Request, WireError};

/// A connection that asks for nothing is closed after this long.
const IDLE: Duration = Duration::from_secs(120);

/// How often an idle connection's thread looks up. Shutdown does not wait for it: it closes the socket.
const IDLE_SLICE: Duration = Duration::from_secs(5);

/// Which connection serves which read. The lock is held across the producer's answer, so that the end of one
/// connection cannot fail a read that another one has just begun.
#[derive(Debug, Default)]
pub(crate) struct OpenReads(Mutex<HashMap<(Handle, Reader), u64>>);

impl OpenReads {
    fn lock(&self) -> MutexGuard<'_, HashMap<(Handle, Reader), u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(
        &self,
        producer: &dyn Producer,
        connection: u64,
        (handle, reader): (Handle, Reader),
        (first, count): (usize, usize),
    ) -> Result<Vec<BlockId>, TransportError> {
        let mut open = self.lock();
        let blocks = producer.read_begun(handle, reader, first, count)?;
        open.insert((handle, reader), connection);
        Ok(blocks)
    }

    fn done(&self, producer: &dyn Producer, handle: Handle, reader: Reader) -> Verdict {
        let mut open = self.lock();
        open.remove(&(handle, reader));
        producer.read_done(handle, reader)
    }

    fn failed(&self, producer: &dyn Producer, handle: Handle, reader: Reader) {
        let mut open = self.lock();
        open.remove(&(handle, reader));
        producer.read_failed(handle, reader);
    }

    fn forget(&self, handle: Handle, reader: Reader) {
        self.lock().remove(&(handle, reader));
    }

    /// The connection has ended: what it served has failed.
    pub(crate) fn connection_ended(&self, producer: &dyn Producer, connection: u64) {
        self.lock().retain(|(handle, reader), serving| {
            if *serving == connection {
                producer.read_failed(*handle, *reader);
            }
            *serving != connection
        });
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("in its handshake: {0}")]
    Handshake(#[from] TurnedAway),
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Serves one connection until it ends.
///
/// # Errors
/// Why it ended, unless it fell idle between two requests.
pub(crate) fn serve(link: &mut Link, connection: u64, shared: &Shared) -> Result<(), Ended> {
    let producer = &*shared.producer;
    let secret = shared.options.secret.as_ref();
    handshake::answer(link, secret, producer.epoch(), producer.fingerprint(), &shared.stop)?;
    while request_comes(link, shared)? {
        let request = receive(link, shared)?;
        let until = Until::stopped(&shared.stop);
        let reply = match request {
            Request::Read { handle, reader, first, count } => {
                let range = (first as usize, count as usize);
                send_part(link, connection, shared, (handle, reader), Wanted::Blocks(range))?;
                continue;
            }
            Request::Slice { handle, reader, tokens, heads } => {
                let cut = Cut {
                    tokens: tokens.0 as usize..tokens.1 as usize,
                    heads: usize::from(heads.0)..usize::from(heads.1),
                };
                send_part(link, connection, shared, (handle, reader), Wanted::Slice(cut))?;
                continue;
            }
            Request::Done { handle, reader } => {
                Reply::Verdict(shared.open_reads.done(producer, handle, reader))
            }
            Request::Failed { handle, reader } => {
                shared.open_reads.failed(producer, handle, reader);
                Reply::Noted
            }
            Request::Release { handle, reason } => Reply::Released(producer.release(handle, &reason)),
            Request::Leave { handle, consumer, reason } => {
                Reply::Released(producer.leave(handle, consumer, &reason))
            }
            Request::Heartbeat { handles } => {
                Reply::Renewed(handles.into_iter().map(|handle| producer.heartbeat(handle)).collect())
            }
        };
        link.send(&reply.encode(), until)?;
    }
    Ok(())
}

/// Waits for the next request; false when the connection has been idle for too long.
fn request_comes(link: &Link, shared: &Shared) -> Result<bool, LinkError> {
    let since = Instant::now();
    while since.elapsed() < IDLE {
        if shared.stop.load(Ordering::Acquire) {
            return Err(LinkError::Stopped);
        }
        if link.readable_within(IDLE_SLICE).map_err(LinkError::Io)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn receive(link: &mut Link, shared: &Shared) -> Result<Request, LinkError> {
    let until = Until::deadline(&shared.stop, Instant::now() + link.silence());
    let mut header = [0; HEADER_BYTES];
    link.receive(&mut header, until)?;
    let header = Header::decode(header);
    let mut payload = vec![0; header.control_len()?];
    link.receive(&mut payload, until)?;
    Ok(Request::decode(header.kind, &payload)?)
}

/// What a read asks for.
enum Wanted {
    /// First entry of the table, and number of entries.
    Blocks((usize, usize)),
    Slice(Cut),
}

/// Answers a read: granted and the bytes in batches, or gone, or refused.
fn send_part(
    link: &mut Link,
    connection: u64,
    shared: &Shared,
    (handle, reader): (Handle, Reader),
    wanted: Wanted,
) -> Result<(), LinkError> {
    let producer = &*shared.producer;
    let region = producer.region();
    let until = Until::stopped(&shared.stop);
    let refuse = |link: &mut Link, why: &str| link.send(&Reply::Refused(why.into()).encode(), until);
    let range = match &wanted {
        Wanted::Blocks(range) => *range,
        Wanted::Slice(cut) => match producer.layout() {
            None => return refuse(link, "only whole blocks are served here"),
            Some(layout) => match cut.check(&layout) {
                Err(error) => return refuse(link, &error.to_string()),
                Ok(()) => {
                    let entries = cut.entries(&layout);
                    (entries.start, entries.len())
                }
            },
        },
    };
    let blocks = match shared.open_reads.begin(producer, connection, (handle, reader), range) {
        Ok(blocks) => blocks,
        Err(TransportError::Gone) => {
            shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
            return link.send(&Reply::Gone.encode(), until);
        }
        Err(TransportError::Refused(why)) => return refuse(link, &why),
        Err(other) => return refuse(link, &other.to_string()),
    };
    let source = match wanted {
        Wanted::Blocks(_) => Source::Blocks { region, blocks: &blocks },
        Wanted::Slice(cut) => {
            let layout = producer.layout().expect("it was looked at above");
            Source::Slice { region, blocks: &blocks, cut, layout }
        }
    };
    shared.stats.reads.fetch_add(1, Ordering::Relaxed);
    let count = u32::try_from(blocks.len()).map_err(|_| LinkError::Wire(WireError::Kind(KIND_BATCH)))?;
    let granted = Reply::Granted { count, bytes: source.granted_bytes() }.encode();
    let live = || producer.read_live(handle, reader);
    let complete = Reply::Complete.encode();
    let mut batches = batches(source.parts()).peekable();
    // Frames that go out with the next batch, in front of it.
    let mut front = granted;
    while let Some(batch) = batches.next() {
        if !live() {
            link.send(&front, until)?;
            return break_off(link, shared, (handle, reader), 0);
        }
        let Batch { parts, bytes } = batch;
        front.extend(Header { kind: KIND_BATCH, len: bytes }.encode());
        let end: &[u8] = if batches.peek().is_some() { &[] } else { &complete };
        let mut spans = Spans::with_capacity(parts.len() + 2);
        spans.push_bytes(&front);
        source.gather(parts, &mut spans);
        spans.push_bytes(end);
        match link.send_spans(&mut spans, until, live) {
            Ok(()) => {}
            // Every block has left the pool while the lease was live; only the end is still to be said.
            Err(LinkError::LeaseEnded) if spans.left() <= end.len() => {
                link.send(&end[end.len() - spans.left()..], until)?;
            }
            Err(LinkError::LeaseEnded) => {
                let owed = spans.left() - end.len();
                let unsaid = owed.saturating_sub(bytes);
                link.send(&front[front.len() - unsaid..], until)?;
                return break_off(link, shared, (handle, reader), owed - unsaid);
            }
            Err(error) => return Err(error),
        }
        shared.stats.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        front.clear();
    }
    Ok(())
}

/// Ends a read whose lease has ended: fills up the batch with zeros, so that the connection stays in step, and
/// says that it is gone.
fn break_off(
    link: &mut Link,
    shared: &Shared,
    (handle, reader): (Handle, Reader),
    owed: usize,
) -> Result<(), LinkError> {
    static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
    shared.open_reads.forget(handle, reader);
    shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
    let until = Until::stopped(&shared.stop);
    let mut left = owed;
    while left > 0 {
        let part = left.min(ZEROS.len());
        link.send(&ZEROS[..part], until)?;
        left -= part;
    }
    link.send(&Reply::Gone.encode(), until)
}
