//! The consumer's side: reads and messages about leases, over pooled connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::limits::HEARTBEAT_HANDLES_MAX;
use baton_connector::region::Region;
use baton_connector::transport::{
    Part, Peer, ReadOrder, SILENCE, StopFlag, Transport, TransportError, Verdict,
};
use baton_connector::{BlockId, Handle, Reader};

use crate::Secret;
use crate::connection::Connection;
use crate::handshake::ConnectError;
use crate::pool::ConnectionPool;
use crate::socket::{ChannelError, ChannelSocket, WaitLimit};
use crate::wire::{HEADER_BYTES, Header, Reply, Request};

/// The stop flag of messages about leases, which is never raised: they are short, and `silence` bounds them.
static NEVER: AtomicBool = AtomicBool::new(false);

/// How a consumer connects.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The cluster's secret. Needed for every producer beyond this machine.
    pub secret: Option<Secret>,
    /// Longest wait for a connection to be accepted.
    pub connect_timeout: Duration,
    /// A producer that is silent for this long within a handshake, an answer or a read has failed.
    pub silence: Duration,
    /// Maximum number of idle connections per producer.
    pub connections_per_peer_max: usize,
    /// An idle connection is closed after this time.
    pub idle_timeout: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            secret: None,
            connect_timeout: Duration::from_secs(2),
            silence: SILENCE,
            connections_per_peer_max: 8,
            idle_timeout: Duration::from_secs(60),
        }
    }
}

/// The consumer's side of a transport: connects to a producer and receives granted blocks.
pub trait Dial: Sized + Send + Sync {
    /// The transport's name: in proofs, logs and metrics.
    const NAME: &'static str;

    /// The transport's data of each connection.
    type Context: Send;

    /// Connects and performs the handshake. Bounded by [`ClientOptions::connect_timeout`] and
    /// [`ClientOptions::silence`].
    ///
    /// # Errors
    /// [`ConnectError`].
    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Self::Context>, ConnectError>;

    /// Receives the blocks of a granted read. The inner error is an answer of the producer: the connection is still in
    /// step. After the return, the transport no longer writes into the landing blocks. `landed` is that of
    /// [`Transport::read_with`].
    ///
    /// # Errors
    /// [`ChannelError`]: the connection is out of step and is closed, and the read has failed.
    fn receive(
        &self,
        connection: &mut Connection<Self::Context>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError>;
}

/// [`Transport`] over a side channel. Any number of threads may use it at once; each call has its own connection.
#[derive(Debug)]
pub struct Client<D: Dial> {
    dialer: D,
    options: ClientOptions,
    pool: ConnectionPool<D::Context>,
}

/// Why an exchange broke off, and how far it got.
struct ExchangeError {
    error: ChannelError,
    /// Whether the peer had begun to answer.
    answered: bool,
}

impl<D: Dial> Client<D> {
    /// A transport without connections. It connects on demand.
    #[must_use]
    pub fn new(options: ClientOptions) -> Self
    where
        D: Default,
    {
        Self::with_dialer(D::default(), options)
    }

    /// As [`Self::new`], with a dialer.
    #[must_use]
    pub fn with_dialer(dialer: D, options: ClientOptions) -> Self {
        let pool = ConnectionPool::new(options.connections_per_peer_max, options.idle_timeout);
        Self { dialer, options, pool }
    }

    /// The dialer.
    pub fn dialer(&self) -> &D {
        &self.dialer
    }

    /// Number of idle connections.
    #[must_use]
    pub fn idle_connections(&self) -> usize {
        self.pool.len()
    }

    /// Connects to this producer unless there is an idle connection, which the next call uses.
    ///
    /// # Errors
    /// [`ConnectError`] if the connection fails.
    pub fn ensure_connected(&self, peer: &Peer, stop: &StopFlag) -> Result<(), ConnectError> {
        if !self.pool.has(peer) {
            let connection = self.dialer.connect(&self.options, peer, stop)?;
            self.pool.put(peer, connection);
        }
        Ok(())
    }

    /// Runs one exchange over an idle connection, or over a new one if the peer closed the idle one before its answer.
    /// Every request may be repeated.
    fn exchange<T>(
        &self,
        peer: &Peer,
        stop: &StopFlag,
        mut run: impl FnMut(&mut Connection<D::Context>) -> Result<T, ExchangeError>,
    ) -> Result<T, TransportError> {
        let transport_error = |error| match error {
            ChannelError::Stopped => TransportError::Stopped,
            other => TransportError::Transfer(other.to_string().into()),
        };
        if let Some(mut connection) = self.pool.take(peer) {
            match run(&mut connection) {
                Ok(result) => {
                    self.pool.put(peer, connection);
                    return Ok(result);
                }
                Err(ExchangeError { error: ChannelError::Closed, answered: false }) => {}
                Err(ExchangeError { error, .. }) => return Err(transport_error(error)),
            }
        }
        let mut connection =
            self.dialer.connect(&self.options, peer, stop).map_err(|why| why.into_transport_error(peer))?;
        let result = run(&mut connection).map_err(|broken| transport_error(broken.error))?;
        self.pool.put(peer, connection);
        Ok(result)
    }

    /// Sends a request and waits for the reply.
    fn ask(&self, peer: &Peer, request: &Request) -> Result<Reply, TransportError> {
        let frame = request.encode();
        self.exchange(peer, &NEVER, |connection| ask(&mut connection.socket, &frame, &NEVER))
    }
}

impl<D: Dial> Transport for Client<D> {
    fn carrier(&self, _peer: &Peer) -> &'static str {
        D::NAME
    }

    fn sweep(&self) {
        self.pool.sweep();
    }

    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        let refused = |why: &str| TransportError::Refused(why.into());
        let request = read_request(order).map_err(|why| refused(&why))?;
        let (parts, part_bytes) = match &order.part {
            Part::Blocks { .. } => (order.into.len(), region.block_bytes()),
            Part::Slice(slice) => {
                (slice.range.entries(&slice.producer).len(), slice.range.bytes(&slice.producer))
            }
        };
        let frame = request.encode();
        if stop.load(Ordering::Acquire) {
            return Err(TransportError::Stopped);
        }
        self.exchange(peer, stop, |connection| match ask(&mut connection.socket, &frame, stop)? {
            Reply::Granted { count, bytes } => {
                let fits = (count as usize, bytes) == (parts, part_bytes as u64);
                let result = if fits {
                    self.dialer.receive(connection, order, region, stop, landed)
                } else {
                    Err(ChannelError::Unexpected)
                };
                let result = result.map_err(|error| ExchangeError { error, answered: true })?;
                if result == Err(TransportError::Gone) {
                    // The lease may be draining. Then it waits for the end of this read.
                    let failed = Request::Failed { handle: order.handle, reader: order.reader };
                    ask(&mut connection.socket, &failed.encode(), stop)?;
                }
                Ok(result)
            }
            Reply::Gone => Ok(Err(TransportError::Gone)),
            Reply::Refused(why) => Ok(Err(TransportError::Refused(why))),
            Reply::Complete
            | Reply::NotYet
            | Reply::Verdict(_)
            | Reply::Noted
            | Reply::Released(_)
            | Reply::Renewed(_) => Err(unexpected()),
        })?
    }

    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        match self.ask(peer, &Request::Done { handle, reader }) {
            Ok(Reply::Verdict(verdict)) => Ok(verdict),
            Err(TransportError::Gone) => Ok(Verdict::Gone),
            other => Err(unexpected_reply(other)),
        }
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        match self.ask(peer, &Request::Failed { handle, reader }) {
            Ok(Reply::Noted) | Err(TransportError::Gone) => Ok(()),
            other => Err(unexpected_reply(other)),
        }
    }

    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError> {
        match self.ask(peer, &Request::Release { handle, reason: reason.into() }) {
            Ok(Reply::Released(reply)) => Ok(reply),
            // The engine of the lease has ended, and its blocks with it.
            Err(TransportError::Gone) => Ok(ReleaseReply::Already),
            other => Err(unexpected_reply(other)),
        }
    }

    fn leave(
        &self,
        peer: &Peer,
        handle: Handle,
        consumer: u64,
        reason: &str,
    ) -> Result<ReleaseReply, TransportError> {
        match self.ask(peer, &Request::Leave { handle, consumer, reason: reason.into() }) {
            Ok(Reply::Released(reply)) => Ok(reply),
            Err(TransportError::Gone) => Ok(ReleaseReply::Already),
            other => Err(unexpected_reply(other)),
        }
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        let mut replies = Vec::with_capacity(handles.len());
        for part in handles.chunks(HEARTBEAT_HANDLES_MAX) {
            match self.ask(peer, &Request::Heartbeat { handles: part.to_vec() }) {
                Ok(Reply::Renewed(renewed)) if renewed.len() == part.len() => replies.extend(renewed),
                Err(TransportError::Gone) => replies.extend(part.iter().map(|_| HeartbeatReply::Gone)),
                other => return Err(unexpected_reply(other)),
            }
        }
        Ok(replies)
    }
}

/// The error for an unexpected reply.
fn unexpected_reply(reply: Result<Reply, TransportError>) -> TransportError {
    match reply {
        Ok(_) => TransportError::Transfer(ChannelError::Unexpected.to_string().into()),
        Err(error) => error,
    }
}

fn unexpected() -> ExchangeError {
    ExchangeError { error: ChannelError::Unexpected, answered: true }
}

/// Sends one request and receives its reply.
fn ask(socket: &mut ChannelSocket, frame: &[u8], stop: &AtomicBool) -> Result<Reply, ExchangeError> {
    let unanswered = |error| ExchangeError { error, answered: false };
    let broken = |error| ExchangeError { error, answered: true };
    socket.send(frame, WaitLimit::stopped(stop)).map_err(unanswered)?;
    let until = WaitLimit::deadline(stop, Instant::now() + socket.silence());
    let mut header = [0; HEADER_BYTES];
    socket.receive(&mut header, until).map_err(unanswered)?;
    let header = Header::decode(header);
    let mut payload = vec![0; header.control_len().map_err(|error| broken(error.into()))?];
    socket.receive(&mut payload, until).map_err(broken)?;
    Reply::decode(header.kind, &payload).map_err(|error| broken(error.into()))
}

/// The request of an order.
fn read_request(order: &ReadOrder) -> Result<Request, String> {
    const MANY: &str = "entry of the block table exceeds 32 bits";
    let (handle, reader) = (order.handle, order.reader);
    match &order.part {
        Part::Blocks { first } => {
            let first = u32::try_from(*first).map_err(|_| MANY)?;
            Ok(Request::Read {
                handle,
                reader,
                first,
                count: u32::try_from(order.into.len()).map_err(|_| MANY)?,
            })
        }
        Part::Slice(slice) => {
            slice.check(order.into.len()).map_err(|error| error.to_string())?;
            let token = |at: usize| u32::try_from(at).map_err(|_| MANY);
            let head = |at: usize| u16::try_from(at).map_err(|_| "number of heads exceeds 16 bits");
            let (tokens, heads) = (&slice.range.tokens, &slice.range.heads);
            Ok(Request::Slice {
                handle,
                reader,
                tokens: (token(tokens.start)?, token(tokens.end)?),
                heads: (head(heads.start)?, head(heads.end)?),
            })
        }
    }
}
