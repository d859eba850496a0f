//! The consumer's side: asks for reads and sends messages about leases, over kept connections.

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
use crate::handshake::NotAdmitted;
use crate::link::{Link, LinkError, Until};
use crate::pool::Pool;
use crate::wire::{HEADER_BYTES, Header, Reply, Request};

/// Messages about leases are short and bounded by `silence`; nobody stops them.
static NEVER: AtomicBool = AtomicBool::new(false);

/// How a consumer connects.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The cluster's secret. Needed for every producer beyond this machine.
    pub secret: Option<Secret>,
    /// Longest wait for a connection to be accepted.
    pub connect_timeout: Duration,
    /// A producer that is silent this long within a handshake, an answer or a read has failed.
    pub silence: Duration,
    /// Connections per producer that are kept while nobody uses them.
    pub connections_per_peer_max: usize,
    /// A kept connection is closed after this long without use.
    pub idle: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            secret: None,
            connect_timeout: Duration::from_secs(2),
            silence: SILENCE,
            connections_per_peer_max: 8,
            idle: Duration::from_secs(60),
        }
    }
}

/// A connection whose two ends know each other.
#[derive(Debug)]
pub struct Connection<K> {
    /// Where both talk.
    pub link: Link,
    /// What the transport keeps beside it.
    pub kept: K,
}

/// How a transport reaches a producer, and how granted blocks land.
pub trait Reach: Sized + Send + Sync {
    /// The transport's name: in proofs, logs and metrics.
    const NAME: &'static str;

    /// What it keeps for each connection.
    type Kept: Send;

    /// Connects and introduces itself. Bounded by [`ClientOptions::connect_timeout`] and
    /// [`ClientOptions::silence`].
    ///
    /// # Errors
    /// [`NotAdmitted`].
    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Self::Kept>, NotAdmitted>;

    /// Lets the blocks of a granted read land. The inner error is an answer: the connection is still in step.
    /// When this returns, nothing writes into the landing blocks any more. `landed` is [`Transport::read_telling`]'s.
    ///
    /// # Errors
    /// [`LinkError`]: the connection is out of step and is closed, and the read has failed.
    fn receive(
        &self,
        connection: &mut Connection<Self::Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError>;
}

/// [`Transport`] over a side channel. Used from any number of threads at once; each call has its own connection.
#[derive(Debug)]
pub struct Client<R: Reach> {
    reach: R,
    options: ClientOptions,
    pool: Pool<R::Kept>,
}

/// How far an exchange got when it broke off.
struct Broken {
    error: LinkError,
    /// Whether the peer had begun to answer.
    answered: bool,
}

impl<R: Reach> Client<R> {
    /// A transport without connections; they are made when they are needed.
    #[must_use]
    pub fn new(options: ClientOptions) -> Self
    where
        R: Default,
    {
        Self::with(R::default(), options)
    }

    /// As [`Self::new`], with a way to reach producers that needs more than a default.
    #[must_use]
    pub fn with(reach: R, options: ClientOptions) -> Self {
        let pool = Pool::new(options.connections_per_peer_max, options.idle);
        Self { reach, options, pool }
    }

    /// The way that producers are reached.
    pub fn way(&self) -> &R {
        &self.reach
    }

    /// Connections that are kept and idle.
    #[must_use]
    pub fn idle_connections(&self) -> usize {
        self.pool.len()
    }

    /// Makes sure of a connection to this producer, and keeps it for the next call.
    ///
    /// # Errors
    /// [`NotAdmitted`]: why there is none.
    pub fn reach(&self, peer: &Peer, stop: &StopFlag) -> Result<(), NotAdmitted> {
        if !self.pool.has(peer) {
            let connection = self.reach.connect(&self.options, peer, stop)?;
            self.pool.put(peer, connection);
        }
        Ok(())
    }

    /// Runs one exchange over a kept connection, or over a new one if the kept one turns out to be stale: the
    /// peer closed it before it began to answer. Every request may be repeated.
    fn exchange<T>(
        &self,
        peer: &Peer,
        stop: &StopFlag,
        mut run: impl FnMut(&mut Connection<R::Kept>) -> Result<T, Broken>,
    ) -> Result<T, TransportError> {
        let broke_off = |error| match error {
            LinkError::Stopped => TransportError::Stopped,
            other => TransportError::Transfer(other.to_string().into()),
        };
        if let Some(mut connection) = self.pool.take(peer) {
            match run(&mut connection) {
                Ok(result) => {
                    self.pool.put(peer, connection);
                    return Ok(result);
                }
                Err(Broken { error: LinkError::Closed, answered: false }) => {}
                Err(Broken { error, .. }) => return Err(broke_off(error)),
            }
        }
        let mut connection = self.reach.connect(&self.options, peer, stop).map_err(|why| why.of(peer))?;
        let result = run(&mut connection).map_err(|broken| broke_off(broken.error))?;
        self.pool.put(peer, connection);
        Ok(result)
    }

    /// Asks, and waits for the answer.
    fn ask(&self, peer: &Peer, request: &Request) -> Result<Reply, TransportError> {
        let frame = request.encode();
        self.exchange(peer, &NEVER, |connection| ask(&mut connection.link, &frame, &NEVER))
    }
}

impl<R: Reach> Transport for Client<R> {
    fn carrier(&self, _peer: &Peer) -> &'static str {
        R::NAME
    }

    fn sweep(&self) {
        self.pool.sweep();
    }

    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        self.read_telling(peer, order, region, stop, &mut |_| ())
    }

    fn read_telling(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        let refused = |why: &str| TransportError::Refused(why.into());
        let request = request(order).map_err(|why| refused(&why))?;
        let (parts, part_bytes) = match &order.part {
            Part::Blocks { .. } => (order.into.len(), region.block_bytes()),
            Part::Slice(slice) => {
                (slice.cut.entries(&slice.producer).len(), slice.cut.bytes(&slice.producer))
            }
        };
        let frame = request.encode();
        if stop.load(Ordering::Acquire) {
            return Err(TransportError::Stopped);
        }
        self.exchange(peer, stop, |connection| match ask(&mut connection.link, &frame, stop)? {
            Reply::Granted { count, bytes } => {
                let fits = (count as usize, bytes) == (parts, part_bytes as u64);
                let result = if fits {
                    self.reach.receive(connection, order, region, stop, landed)
                } else {
                    Err(LinkError::Unexpected)
                };
                let result = result.map_err(|error| Broken { error, answered: true })?;
                if result == Err(TransportError::Gone) {
                    // The lease may be draining, and then it waits to hear that nothing reads any more.
                    let failed = Request::Failed { handle: order.handle, reader: order.reader };
                    ask(&mut connection.link, &failed.encode(), stop)?;
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
            other => Err(unfit(other)),
        }
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        match self.ask(peer, &Request::Failed { handle, reader }) {
            Ok(Reply::Noted) | Err(TransportError::Gone) => Ok(()),
            other => Err(unfit(other)),
        }
    }

    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError> {
        match self.ask(peer, &Request::Release { handle, reason: reason.into() }) {
            Ok(Reply::Released(reply)) => Ok(reply),
            // The engine that made the lease has ended, and its blocks with it.
            Err(TransportError::Gone) => Ok(ReleaseReply::Already),
            other => Err(unfit(other)),
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
            other => Err(unfit(other)),
        }
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        let mut replies = Vec::with_capacity(handles.len());
        for part in handles.chunks(HEARTBEAT_HANDLES_MAX) {
            match self.ask(peer, &Request::Heartbeat { handles: part.to_vec() }) {
                Ok(Reply::Renewed(renewed)) if renewed.len() == part.len() => replies.extend(renewed),
                Err(TransportError::Gone) => replies.extend(part.iter().map(|_| HeartbeatReply::Gone)),
                other => return Err(unfit(other)),
            }
        }
        Ok(replies)
    }
}

/// The error of an exchange that should have had another answer.
fn unfit(reply: Result<Reply, TransportError>) -> TransportError {
    match reply {
        Ok(_) => TransportError::Transfer(LinkError::Unexpected.to_string().into()),
        Err(error) => error,
    }
}

fn unexpected() -> Broken {
    Broken { error: LinkError::Unexpected, answered: true }
}

/// One question and its answer.
fn ask(link: &mut Link, frame: &[u8], stop: &AtomicBool) -> Result<Reply, Broken> {
    let unanswered = |error| Broken { error, answered: false };
    let broken = |error| Broken { error, answered: true };
    link.send(frame, Until::stopped(stop)).map_err(unanswered)?;
    let until = Until::deadline(stop, Instant::now() + link.silence());
    let mut header = [0; HEADER_BYTES];
    link.receive(&mut header, until).map_err(unanswered)?;
    let header = Header::decode(header);
    let mut payload = vec![0; header.control_len().map_err(|error| broken(error.into()))?];
    link.receive(&mut payload, until).map_err(broken)?;
    Reply::decode(header.kind, &payload).map_err(|error| broken(error.into()))
}

/// The question for what an order wants.
fn request(order: &ReadOrder) -> Result<Request, String> {
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
            let (tokens, heads) = (&slice.cut.tokens, &slice.cut.heads);
            Ok(Request::Slice {
                handle,
                reader,
                tokens: (token(tokens.start)?, token(tokens.end)?),
                heads: (head(heads.start)?, head(heads.end)?),
            })
        }
    }
}
