//! One connection on the producer's side: receives requests, sends replies, and lets the transport deliver blocks.
//!
//! The reader of a lease is bound to the connection that serves it. If the connection ends before the reader's `Done`,
//! the read has failed. `Done` may arrive over another connection.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::slice::SliceRange;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Handle, KvLayout, Reader};

use socket2::Socket;

use crate::Secret;
use crate::handshake::{self, Credentials, HandshakeError, Service};
use crate::socket::{self, ChannelError, ChannelSocket, WaitLimit};
use crate::wire::{HEADER_BYTES, Header, Reply, Request};

/// A connection without requests is closed after this time.
const IDLE: Duration = Duration::from_secs(120);

/// Longest interval between two [`Reply::NotYet`] to a waiting reader.
const NOT_YET_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which the thread of an idle connection wakes. Shutdown closes the socket and does not wait for it.
const IDLE_SLICE: Duration = Duration::from_secs(5);

/// The producer's side of a transport: admits consumers and delivers granted blocks.
pub trait Serve: Send + Sync + 'static {
    /// The transport's name: in proofs and logs.
    fn name(&self) -> &'static str;

    /// The service that a consumer requests to use this transport.
    fn service(&self) -> Service {
        Service::ListenerDefault
    }

    /// The memory from which blocks are read.
    fn source(&self) -> BlockSource {
        BlockSource::Region
    }

    /// Checks a new connection before a byte is read: sets its options, and refuses peers by their credentials at the
    /// operating system.
    ///
    /// # Errors
    /// The reason for which the connection is closed.
    fn check_socket(&self, socket: &Socket) -> io::Result<()>;

    /// Sends the transport's data that a consumer needs before its first read.
    ///
    /// # Errors
    /// [`ChannelError`]; the connection ends.
    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        producer: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        let _ = (socket, producer, until);
        Ok(())
    }

    /// Sends "granted" and delivers the blocks while the lease is live. The transport checks
    /// [`GrantedRead::await_ready`] before every batch.
    ///
    /// # Errors
    /// [`ChannelError`]; the connection ends, and the read has failed.
    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError>;
}

/// The memory from which granted blocks are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSource {
    /// The producer's region in host memory, into which blocks are copied first ([`Producer::download_blocks`]).
    Region,
    /// The memory of the device that computed the blocks.
    Device,
}

/// How the delivery of a read ended, with the connection in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Every block is sent, or may be copied.
    Complete,
    /// The lease ended before that, and the reader was notified.
    LeaseEnded,
}

/// A read that the ledger has granted.
pub struct GrantedRead<'a> {
    shared: &'a ServerState,
    read: ReadId,
    /// First entry of the lease's table that is read.
    first: usize,
    blocks: Vec<BlockId>,
    slice: Option<(SliceRange, KvLayout)>,
    source: BlockSource,
    /// Number of blocks that are up to date in the region, for [`BlockSource::Region`].
    downloaded: Cell<usize>,
}

impl GrantedRead<'_> {
    /// The blocks, in the order of the read.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The requested slice, and the layout of a block; `None` for whole blocks.
    #[must_use]
    pub fn slice(&self) -> Option<(&SliceRange, &KvLayout)> {
        self.slice.as_ref().map(|(range, layout)| (range, layout))
    }

    /// The pool of the blocks.
    #[must_use]
    pub fn region(&self) -> &Region {
        self.shared.producer.region()
    }

    /// Whether the lease still serves this reader.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.shared.producer.is_read_live(self.read.handle, self.read.reader)
    }

    /// Waits until the first `upto` blocks of the read are computed; false when the lease no longer serves this reader.
    /// `front` contains unsent frames. The first [`Reply::NotYet`], if any, is sent together with them.
    ///
    /// # Errors
    /// [`ChannelError`]; the connection ends, and the read has failed.
    pub fn await_ready(
        &self,
        socket: &mut ChannelSocket,
        front: &mut Vec<u8>,
        upto: usize,
    ) -> Result<bool, ChannelError> {
        let mut sent = None;
        loop {
            let (producer, ReadId { handle, reader }) = (&self.shared.producer, self.read);
            match producer.await_ready(handle, reader, self.first + upto, socket::SLICE) {
                Readiness::Ready => return self.download(upto).map(|()| true),
                Readiness::Gone => return Ok(false),
                Readiness::NotYet => {}
            }
            if self.shared.stop.load(Ordering::Acquire) {
                return Err(ChannelError::Stopped);
            }
            if socket.is_closed() {
                return Err(ChannelError::Closed);
            }
            // All engines of a cluster have the same bound on silence.
            let due = NOT_YET_INTERVAL.min(socket.silence() / 3);
            if sent.is_none_or(|sent: Instant| sent.elapsed() >= due) {
                front.extend(Reply::NotYet.encode());
                socket.send(front, self.wait_limit())?;
                front.clear();
                sent = Some(Instant::now());
            }
        }
    }

    /// Brings the first `upto` blocks of the read up to date in the region, for [`BlockSource::Region`].
    fn download(&self, upto: usize) -> Result<(), ChannelError> {
        let from = self.downloaded.get();
        if self.source == BlockSource::Region && from < upto {
            let downloaded = self.shared.producer.download_blocks(&self.blocks[from..upto]);
            downloaded.map_err(|why| ChannelError::Io(io::Error::other(why.to_string())))?;
            self.downloaded.set(upto);
        }
        Ok(())
    }

    /// The limit of a wait: the shutdown of the server.
    #[must_use]
    pub fn wait_limit(&self) -> WaitLimit<'_> {
        WaitLimit::stopped(&self.shared.stop)
    }

    /// The "granted" frame, which precedes the delivery.
    ///
    /// # Panics
    /// Never: a handoff has fewer blocks than 2³².
    #[must_use]
    pub fn granted_frame(&self) -> Vec<u8> {
        let count = u32::try_from(self.blocks.len()).expect("BLOCKS_PER_HANDOFF_MAX fits into 32 bits");
        let bytes = self.slice().map_or(self.region().block_bytes(), |(range, layout)| range.bytes(layout));
        Reply::Granted { count, bytes: bytes as u64 }.encode()
    }

    /// Counts bytes of blocks that are sent, or that the consumer may copy.
    pub fn count_bytes(&self, bytes: usize) {
        self.shared.stats.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A read: the lease, and who reads its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ReadId {
    handle: Handle,
    reader: Reader,
}

/// The connection of each open read. The lock is held across the call of the producer. Otherwise the end of one
/// connection could fail a read that another one has just begun.
#[derive(Debug, Default)]
pub(crate) struct OpenReads(Mutex<HashMap<ReadId, u64>>);

impl OpenReads {
    fn lock(&self) -> MutexGuard<'_, HashMap<ReadId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(
        &self,
        producer: &dyn Producer,
        connection: u64,
        read: ReadId,
        entries: TableRange,
    ) -> Result<Vec<BlockId>, TransportError> {
        let mut open = self.lock();
        let blocks = producer.begin_read(read.handle, read.reader, entries.first, entries.count)?;
        open.insert(read, connection);
        Ok(blocks)
    }

    fn done(&self, producer: &dyn Producer, read: ReadId) -> Verdict {
        let mut open = self.lock();
        open.remove(&read);
        producer.finish_read(read.handle, read.reader)
    }

    fn failed(&self, producer: &dyn Producer, read: ReadId) {
        let mut open = self.lock();
        open.remove(&read);
        producer.fail_read(read.handle, read.reader);
    }

    /// Whether a read of this connection may still be in flight.
    pub(crate) fn in_flight(&self, producer: &dyn Producer, connection: u64) -> bool {
        let open = self.lock();
        let mut own = open.iter().filter(|(_, serving)| **serving == connection);
        own.any(|(read, _)| producer.is_read_live(read.handle, read.reader))
    }

    fn forget(&self, read: ReadId) {
        self.lock().remove(&read);
    }

    /// Fails the open reads of an ended connection.
    pub(crate) fn connection_ended(&self, producer: &dyn Producer, connection: u64) {
        self.lock().retain(|read, serving| {
            if *serving == connection {
                producer.fail_read(read.handle, read.reader);
            }
            *serving != connection
        });
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("handshake failed: {0}")]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

#[derive(Debug, Default)]
pub(crate) struct ServerCounters {
    pub(crate) rejected: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) handshakes_failed: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) reads_gone: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// The shared state of one server's threads, without its connections.
pub(crate) struct ServerState {
    pub(crate) producer: Arc<dyn Producer>,
    /// The services that a consumer can request. The first is the listener's own.
    pub(crate) services: Vec<Arc<dyn Serve>>,
    pub(crate) secret: Option<Secret>,
    pub(crate) stop: AtomicBool,
    pub(crate) open_reads: OpenReads,
    pub(crate) stats: ServerCounters,
}

impl ServerState {
    /// The listener's own service.
    pub(crate) fn listener_service(&self) -> &dyn Serve {
        &*self.services[0]
    }
}

/// The connections of one server, by their numbers.
pub(crate) trait ConnectionTable {
    /// Claims a slot for a connection after its handshake; `false` when no slot is free.
    fn claim_slot(&self, id: u64) -> bool;

    /// Records that a connection waits for a request.
    fn mark_idle(&self, id: u64, since: Instant);

    /// Records that a connection has a request.
    fn mark_busy(&self, id: u64);
}

/// Serves one connection until it ends.
///
/// # Errors
/// Why the connection ended, unless it was idle for too long.
pub(crate) fn serve(
    socket: &mut ChannelSocket,
    connection: u64,
    shared: &ServerState,
    table: &dyn ConnectionTable,
) -> Result<(), ServeError> {
    let producer = &*shared.producer;
    let named = |service| shared.services.iter().position(|serve| serve.service() == service);
    let credentials = |service| {
        let serve = &shared.services[named(service)?];
        Some(Credentials { secret: shared.secret.as_ref(), transport: serve.name(), service })
    };
    let (epoch, fingerprint) = (producer.epoch(), producer.fingerprint());
    let service = handshake::accept(socket, credentials, epoch, fingerprint, &shared.stop)?;
    if !table.claim_slot(connection) {
        return Ok(());
    }
    let serve = &*shared.services[named(service).expect("it was served a moment ago")];
    serve.send_offer(socket, producer, WaitLimit::stopped(&shared.stop))?;
    while await_request(socket, connection, shared, table)? {
        table.mark_busy(connection);
        let request = receive(socket, shared)?;
        let until = WaitLimit::stopped(&shared.stop);
        let reply = match request {
            Request::Read { handle, reader, first, count } => {
                let entries = TableRange { first: first as usize, count: count as usize };
                let (read, request) = (ReadId { handle, reader }, ReadRequest::Blocks(entries));
                answer_read(socket, connection, shared, serve, read, request)?;
                continue;
            }
            Request::Slice { handle, reader, tokens, heads } => {
                let range = SliceRange {
                    tokens: tokens.0 as usize..tokens.1 as usize,
                    heads: usize::from(heads.0)..usize::from(heads.1),
                };
                let (read, request) = (ReadId { handle, reader }, ReadRequest::Slice(range));
                answer_read(socket, connection, shared, serve, read, request)?;
                continue;
            }
            Request::Done { handle, reader } => {
                Reply::Verdict(shared.open_reads.done(producer, ReadId { handle, reader }))
            }
            Request::Failed { handle, reader } => {
                shared.open_reads.failed(producer, ReadId { handle, reader });
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
        socket.send(&reply.encode(), until)?;
    }
    Ok(())
}

/// Waits for the next request; false when the connection has been idle for too long. A connection with an open read is
/// not idle: the lease bounds the read.
fn await_request(
    socket: &ChannelSocket,
    connection: u64,
    shared: &ServerState,
    table: &dyn ConnectionTable,
) -> Result<bool, ChannelError> {
    let since = Instant::now();
    table.mark_idle(connection, since);
    while since.elapsed() < IDLE || shared.open_reads.in_flight(&*shared.producer, connection) {
        if shared.stop.load(Ordering::Acquire) {
            return Err(ChannelError::Stopped);
        }
        if socket.readable_within(IDLE_SLICE).map_err(ChannelError::Io)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn receive(socket: &mut ChannelSocket, shared: &ServerState) -> Result<Request, ChannelError> {
    let until = WaitLimit::deadline(&shared.stop, Instant::now() + socket.silence());
    let mut header = [0; HEADER_BYTES];
    socket.receive(&mut header, until)?;
    let header = Header::decode(header);
    let mut payload = vec![0; header.control_len()?];
    socket.receive(&mut payload, until)?;
    Ok(Request::decode(header.kind, &payload)?)
}

/// The requested part of a lease.
enum ReadRequest {
    Blocks(TableRange),
    Slice(SliceRange),
}

/// Entries of a lease's block table.
struct TableRange {
    first: usize,
    count: usize,
}

/// A read request whose entries are known.
struct ResolvedRead {
    entries: TableRange,
    /// `None` if the blocks are read whole.
    slice: Option<(SliceRange, KvLayout)>,
}

impl ReadRequest {
    fn resolve(self, producer: &dyn Producer) -> Result<ResolvedRead, String> {
        match self {
            Self::Blocks(entries) => Ok(ResolvedRead { entries, slice: None }),
            Self::Slice(range) => {
                let layout = producer.layout().ok_or("only whole blocks are served here")?;
                range.check(&layout).map_err(|error| error.to_string())?;
                let entries = range.entries(&layout);
                let entries = TableRange { first: entries.start, count: entries.len() };
                Ok(ResolvedRead { entries, slice: Some((range, layout)) })
            }
        }
    }
}

/// Answers a read request: grants it and lets the transport deliver, or replies gone or refused.
fn answer_read(
    socket: &mut ChannelSocket,
    connection: u64,
    shared: &ServerState,
    serve: &dyn Serve,
    read: ReadId,
    request: ReadRequest,
) -> Result<(), ChannelError> {
    let producer = &*shared.producer;
    let until = WaitLimit::stopped(&shared.stop);
    let refuse =
        |socket: &mut ChannelSocket, why: &str| socket.send(&Reply::Refused(why.into()).encode(), until);
    let ResolvedRead { entries, slice } = match request.resolve(producer) {
        Ok(resolved) => resolved,
        Err(why) => return refuse(socket, &why),
    };
    let first = entries.first;
    let blocks = match shared.open_reads.begin(producer, connection, read, entries) {
        Ok(blocks) => blocks,
        Err(TransportError::Gone) => {
            shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
            return socket.send(&Reply::Gone.encode(), until);
        }
        Err(TransportError::Refused(why)) => return refuse(socket, &why),
        Err(other) => return refuse(socket, &other.to_string()),
    };
    shared.stats.reads.fetch_add(1, Ordering::Relaxed);
    let (source, downloaded) = (serve.source(), Cell::new(0));
    let granted = GrantedRead { shared, read, first, blocks, slice, source, downloaded };
    if serve.deliver(socket, &granted)? == Delivery::LeaseEnded {
        // A draining lease waits for this reader, which reports its failure or closes the connection.
        if !granted.is_live() {
            shared.open_reads.forget(read);
        }
        shared.stats.reads_gone.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
