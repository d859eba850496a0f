//! One connection on the producer's side: requests in, answers out, and blocks as the transport moves them.
//!
//! The reader of a lease is bound to the connection that serves it: when the connection ends before the
//! reader has said that it is done, the read has failed. `Done` may come over another connection.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::slice::Cut;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Handle, KvLayout, Reader};

use socket2::Socket;

use crate::handshake::{self, Credentials, Service, TurnedAway};
use crate::link::{self, Link, LinkError, Until};
use crate::server::Shared;
use crate::wire::{HEADER_BYTES, Header, Reply, Request};

/// A connection that asks for nothing is closed after this long.
const IDLE: Duration = Duration::from_secs(120);

/// How often a reader hears that its blocks are still computed, at the least.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// How often an idle connection's thread looks up. Shutdown does not wait for it: it closes the socket.
const IDLE_SLICE: Duration = Duration::from_secs(5);

/// How a transport greets consumers and delivers granted blocks.
pub trait Serve: Send + Sync + 'static {
    /// The transport's name: in proofs and logs.
    fn name(&self) -> &'static str;

    /// What a consumer asks for to be served by this, where a listener serves several.
    fn service(&self) -> Service {
        Service::OfListener
    }

    /// Where readers find the blocks.
    fn source(&self) -> Source {
        Source::Region
    }

    /// Looks at a fresh connection before a byte is read: sets its options, and turns away whom the system says
    /// does not belong here.
    ///
    /// # Errors
    /// Why the connection is closed again.
    fn meet(&self, socket: &Socket) -> io::Result<()>;

    /// Says what a consumer needs to know before its first read.
    ///
    /// # Errors
    /// [`LinkError`]; the connection ends.
    fn admitted(&self, link: &mut Link, producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        let _ = (link, producer, until);
        Ok(())
    }

    /// Says "granted" and delivers the blocks, or as many of them as leave while the lease is live. Asks
    /// [`Granted::live`] before every batch.
    ///
    /// # Errors
    /// [`LinkError`]; the connection ends, and the read has failed.
    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError>;
}

/// Where the bytes of granted blocks are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the producer's region: host memory, whose bytes are made what was lent ([`Producer::in_region`]) first.
    Region,
    /// Elsewhere: in the memory of the device that computed them.
    Device,
}

/// How the delivery of a read ended, with the connection in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivered {
    /// Everything has left, or may be taken.
    Whole,
    /// The lease ended before that, and the reader has been told.
    LeaseEnded,
}

/// A read that the ledger has granted.
pub struct Granted<'a> {
    shared: &'a Shared,
    handle: Handle,
    reader: Reader,
    /// Entry of the lease's table that the read begins with.
    first: usize,
    blocks: Vec<BlockId>,
    slice: Option<(Cut, KvLayout)>,
    source: Source,
    /// So many of the blocks are in the region, where they are read there.
    in_region: Cell<usize>,
}

impl Granted<'_> {
    /// The blocks, in the order of the read.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// What of them was asked for, and the layout of a block; `None` when it was whole blocks.
    #[must_use]
    pub fn slice(&self) -> Option<(&Cut, &KvLayout)> {
        self.slice.as_ref().map(|(cut, layout)| (cut, layout))
    }

    /// The pool they lie in.
    #[must_use]
    pub fn region(&self) -> &Region {
        self.shared.producer.region()
    }

    /// Whether the lease still lets this reader read.
    #[must_use]
    pub fn live(&self) -> bool {
        self.shared.producer.read_live(self.handle, self.reader)
    }

    /// Waits until the first `upto` blocks of the read are computed; false when the lease lets this reader read no more.
    /// `front` are frames that the reader has not been sent yet: they go out with the first sign of life, if there
    /// is one.
    ///
    /// # Errors
    /// [`LinkError`]; the connection ends, and the read has failed.
    pub fn await_ready(&self, link: &mut Link, front: &mut Vec<u8>, upto: usize) -> Result<bool, LinkError> {
        let mut signed = None;
        loop {
            let producer = &self.shared.producer;
            match producer.await_ready(self.handle, self.reader, self.first + upto, link::SLICE) {
                Readiness::Ready => return self.bring(upto).map(|()| true),
                Readiness::Gone => return Ok(false),
                Readiness::NotYet => {}
            }
            if self.shared.stop.load(Ordering::Acquire) {
                return Err(LinkError::Stopped);
            }
            if link.is_closed() {
                return Err(LinkError::Closed);
            }
            // Both ends of a cluster bear the same silence.
            let due = SIGN_OF_LIFE.min(link.silence() / 3);
            if signed.is_none_or(|signed: Instant| signed.elapsed() >= due) {
                front.extend(Reply::NotYet.encode());
                link.send(front, self.until())?;
                front.clear();
                signed = Some(Instant::now());
            }
        }
    }

    /// Has the first `upto` blocks of the read in the region, where they are read there.
    fn bring(&self, upto: usize) -> Result<(), LinkError> {
        let from = self.in_region.get();
        if self.source == Source::Region && from < upto {
            let brought = self.shared.producer.in_region(&self.blocks[from..upto]);
            brought.map_err(|why| LinkError::Io(io::Error::other(why.to_string())))?;
            self.in_region.set(upto);
        }
        Ok(())
    }

    /// What ends a wait: the server's own end.
    #[must_use]
    pub fn until(&self) -> Until<'_> {
        Until::stopped(&self.shared.stop)
    }

    /// What announces the delivery: one whole frame.
    ///
    /// # Panics
    /// Never: a handoff has fewer blocks than 2³².
    #[must_use]
    pub fn announcement(&self) -> Vec<u8> {
        let count = u32::try_from(self.blocks.len()).expect("BLOCKS_PER_HANDOFF_MAX fits into 32 bits");
        let bytes = self.slice().map_or(self.region().block_bytes(), |(cut, layout)| cut.bytes(layout));
        Reply::Granted { count, bytes: bytes as u64 }.encode()
    }

    /// Counts bytes of blocks that have left, or may be taken.
    pub fn count(&self, bytes: usize) {
        self.shared.stats.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

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

    /// Whether a read that was granted on this connection may still be under way.
    pub(crate) fn in_flight(&self, producer: &dyn Producer, connection: u64) -> bool {
        let open = self.lock();
        let mut ours = open.iter().filter(|(_, serving)| **serving == connection);
        ours.any(|((handle, reader), _)| producer.read_live(*handle, *reader))
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
    #[error("handshake failed: {0}")]
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
    let named = |service| shared.services.iter().position(|serve| serve.service() == service);
    let credentials = |service| {
        let serve = &shared.services[named(service)?];
        Some(Credentials { secret: shared.options.secret.as_ref(), transport: serve.name(), service })
    };
    let expected = (producer.epoch(), producer.fingerprint());
    let service = handshake::answer(link, credentials, expected, &shared.stop)?;
    if !shared.take_place(connection) {
        return Ok(());
    }
    let serve = &*shared.services[named(service).expect("it was served a moment ago")];
    serve.admitted(link, producer, Until::stopped(&shared.stop))?;
    while request_comes(link, connection, shared)? {
        shared.begins(connection);
        let request = receive(link, shared)?;
        let until = Until::stopped(&shared.stop);
        let reply = match request {
            Request::Read { handle, reader, first, count } => {
                let range = (first as usize, count as usize);
                answer_read(link, connection, (shared, serve), (handle, reader), Wanted::Blocks(range))?;
                continue;
            }
            Request::Slice { handle, reader, tokens, heads } => {
                let cut = Cut {
                    tokens: tokens.0 as usize..tokens.1 as usize,
                    heads: usize::from(heads.0)..usize::from(heads.1),
                };
                answer_read(link, connection, (shared, serve), (handle, reader), Wanted::Slice(cut))?;
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

/// Waits for the next request; false when the connection has been idle for too long. One whose reader has not said
/// yet how its read ended is not idle: the lease bounds it.
fn request_comes(link: &Link, connection: u64, shared: &Shared) -> Result<bool, LinkError> {
    let since = Instant::now();
    shared.rests(connection, since);
    while since.elapsed() < IDLE || shared.open_reads.in_flight(&*shared.producer, connection) {
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

/// The entries of the block table, and what of them if not all.
type Checked = ((usize, usize), Option<(Cut, KvLayout)>);

impl Wanted {
    fn checked(self, producer: &dyn Producer) -> Result<Checked, String> {
        match self {
            Self::Blocks(range) => Ok((range, None)),
            Self::Slice(cut) => {
                let layout = producer.layout().ok_or("only whole blocks are served here")?;
                cut.check(&layout).map_err(|error| error.to_string())?;
                let entries = cut.entries(&layout);
                Ok(((entries.start, entries.len()), Some((cut, layout))))
            }
        }
    }
}

/// Answers a read: granted, and then it is the transport's; or gone, or refused.
fn answer_read(
    link: &mut Link,
    connection: u64,
    (shared, serve): (&Shared, &dyn Serve),
    (handle, reader): (Handle, Reader),
    wanted: Wanted,
) -> Result<(), LinkError> {
    let producer = &*shared.producer;
    let until = Until::stopped(&shared.stop);
    let refuse = |link: &mut Link, why: &str| link.send(&Reply::Refused(why.into()).encode(), until);
    let (range, slice) = match wanted.checked(producer) {
        Ok(checked) => checked,
        Err(why) => return refuse(link, &why),
    };
    let first = range.0;
    let blocks = match shared.open_reads.begin(producer, connection, (handle, reader), range) {
        Ok(blocks) => blocks,
        Err(TransportError::Gone) => {
            shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
            return link.send(&Reply::Gone.encode(), until);
        }
        Err(TransportError::Refused(why)) => return refuse(link, &why),
        Err(other) => return refuse(link, &other.to_string()),
    };
    shared.stats.reads.fetch_add(1, Ordering::Relaxed);
    let (source, in_region) = (serve.source(), Cell::new(0));
    let granted = Granted { shared, handle, reader, first, blocks, slice, source, in_region };
    if serve.deliver(link, &granted)? == Delivered::LeaseEnded {
        // A lease that drains waits for this reader, who says that it has failed or closes the connection.
        if !producer.read_live(handle, reader) {
            shared.open_reads.forget(handle, reader);
        }
        shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
