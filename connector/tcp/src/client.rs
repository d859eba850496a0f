//! The consumer's side: reads blocks into landing blocks, and sends messages about leases.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::limits::HEARTBEAT_HANDLES_MAX;
use baton_connector::region::Region;
use baton_connector::transport::{
    Part, Peer, ReadOrder, SILENCE, StopFlag, Transport, TransportError, Verdict,
};
use baton_connector::{Handle, Reader};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Secret;
use crate::handshake;
use crate::link::{self, Link, LinkError, SLICE, Until};
use crate::pool::Pool;
use crate::scatter::Spans;
use crate::source::{Batch, Target, batches};
use crate::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply, Request};

/// Messages about leases are short and bounded by `silence`; nobody stops them.
static NEVER: AtomicBool = AtomicBool::new(false);

/// How a consumer connects.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The cluster's secret. Needed for every producer beyond loopback.
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

/// [`Transport`] over TCP. Used from any number of threads at once; each call has its own connection.
#[derive(Debug)]
pub struct TcpTransport {
    options: ClientOptions,
    pool: Pool,
}

/// How far an exchange got when it broke off.
struct Broken {
    error: LinkError,
    /// Whether the peer had begun to answer.
    answered: bool,
}

impl TcpTransport {
    /// A transport without connections; they are made when they are needed.
    #[must_use]
    pub fn new(options: ClientOptions) -> Self {
        let pool = Pool::new(options.connections_per_peer_max, options.idle);
        Self { options, pool }
    }

    /// Closes connections that have been idle for too long. Each call that keeps a connection does so too; an
    /// owner whose calls have ceased may call this now and then.
    pub fn sweep(&self) {
        self.pool.sweep();
    }

    /// Connections that are kept and idle.
    #[must_use]
    pub fn idle_connections(&self) -> usize {
        self.pool.len()
    }

    fn connect(&self, peer: &Peer, stop: &StopFlag) -> Result<Link, TransportError> {
        let failed = |error: io::Error| TransportError::Handshake(peer.address, error.to_string().into());
        let socket = Socket::new(Domain::for_address(peer.address), Type::STREAM, Some(Protocol::TCP))
            .map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        match socket.connect(&peer.address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
                let deadline = Instant::now() + self.options.connect_timeout;
                while !link::wait(socket.as_fd(), libc::POLLOUT, SLICE).map_err(failed)? {
                    if stop.load(Ordering::Acquire) {
                        return Err(TransportError::Stopped);
                    }
                    if Instant::now() >= deadline {
                        return Err(failed(io::ErrorKind::TimedOut.into()));
                    }
                }
                socket.take_error().map_err(failed)?.map_or(Ok(()), |error| Err(failed(error)))?;
            }
            Err(error) => return Err(failed(error)),
        }
        let mut link = Link::new(socket.into(), self.options.silence).map_err(failed)?;
        handshake::introduce(&mut link, self.options.secret.as_ref(), peer, stop)?;
        Ok(link)
    }

    /// Runs one exchange over a kept connection, or over a new one if the kept one turns out to be stale: the
    /// peer closed it before it began to answer. Every request may be repeated.
    fn exchange<R>(
        &self,
        peer: &Peer,
        stop: &StopFlag,
        mut run: impl FnMut(&mut Link) -> Result<R, Broken>,
    ) -> Result<R, TransportError> {
        let broke_off = |error| match error {
            LinkError::Stopped => TransportError::Stopped,
            other => TransportError::Transfer(other.to_string().into()),
        };
        if let Some(mut link) = self.pool.take(peer) {
            match run(&mut link) {
                Ok(result) => {
                    self.pool.put(peer, link);
                    return Ok(result);
                }
                Err(Broken { error: LinkError::Closed, answered: false }) => {}
                Err(Broken { error, .. }) => return Err(broke_off(error)),
            }
        }
        let mut link = self.connect(peer, stop)?;
        let result = run(&mut link).map_err(|broken| broke_off(broken.error))?;
        self.pool.put(peer, link);
        Ok(result)
    }

    /// Asks, and waits for the answer.
    fn ask(&self, peer: &Peer, request: &Request) -> Result<Reply, TransportError> {
        let frame = request.encode();
        self.exchange(peer, &NEVER, |link| ask(link, &frame, &NEVER))
    }
}

impl Transport for TcpTransport {
    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        let refused = |why: &str| TransportError::Refused(why.into());
        let request = request(order).map_err(|why| refused(&why))?;
        let target = Target { region, order };
        let (parts, granted_bytes) = target.granted();
        let frame = request.encode();
        if stop.load(Ordering::Acquire) {
            return Err(TransportError::Stopped);
        }
        self.exchange(peer, stop, |link| match ask(link, &frame, stop)? {
            Reply::Granted { count, bytes } => {
                let fits = count as usize == parts && bytes == granted_bytes;
                let landed =
                    if fits { receive_parts(link, &target, stop) } else { Err(LinkError::Unexpected) };
                landed.map_err(|error| Broken { error, answered: true })
            }
            Reply::Gone => Ok(Err(TransportError::Gone)),
            Reply::Refused(why) => Ok(Err(TransportError::Refused(why))),
            Reply::Complete | Reply::Verdict(_) | Reply::Noted | Reply::Released(_) | Reply::Renewed(_) => {
                Err(unexpected())
            }
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
    const MANY: &str = "no table has so many entries";
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
            let head = |at: usize| u16::try_from(at).map_err(|_| "no model has so many heads");
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

/// Receives the batches of a granted read. The inner error is an answer: the link is still in step.
fn receive_parts(
    link: &mut Link,
    target: &Target<'_>,
    stop: &StopFlag,
) -> Result<Result<(), TransportError>, LinkError> {
    let until = Until::stopped(stop);
    let mut header = [0; HEADER_BYTES];
    link.receive(&mut header, until)?;
    for Batch { parts, bytes } in batches(target.parts()) {
        let Header { kind, len } = Header::decode(header);
        if kind != KIND_BATCH {
            // "Complete" before the last batch is not an answer.
            return last_word(header)?.map_or_else(|gone| Ok(Err(gone)), |()| Err(LinkError::Unexpected));
        }
        if len != bytes {
            return Err(LinkError::Unexpected);
        }
        let mut spans = Spans::with_capacity(parts.len() + 1);
        target.scatter(parts, &mut spans);
        // The next header comes with this batch: one system call less.
        spans.push_buffer(&mut header);
        link.receive_spans(&mut spans, until)?;
    }
    last_word(header)
}

/// What a producer says instead of a batch, or after the last one.
fn last_word(header: [u8; HEADER_BYTES]) -> Result<Result<(), TransportError>, LinkError> {
    let Header { kind, len } = Header::decode(header);
    if len != 0 {
        return Err(LinkError::Unexpected);
    }
    match Reply::decode(kind, &[])? {
        Reply::Complete => Ok(Ok(())),
        Reply::Gone => Ok(Err(TransportError::Gone)),
        _ => Err(LinkError::Unexpected),
    }
}
