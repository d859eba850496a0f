//! The consumer's side: connects, and receives batches straight into the landing blocks.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::handshake::{self, Credentials};
use baton_connector_channel::link::{self, Link, LinkError, SLICE, Until};
use baton_connector_channel::scatter::Spans;
use baton_connector_channel::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach};
use socket2::{Domain, Protocol, Socket, Type};

use crate::source::{Batch, Target, batches};
use crate::tune;

/// Blocks over TCP. Used from any number of threads at once; each call has its own connection.
pub type TcpTransport = Client<Tcp>;

/// How a producer is reached over TCP.
#[derive(Debug)]
pub struct Tcp;

impl Reach for Tcp {
    const NAME: &'static str = "tcp";
    type Kept = ();

    fn new(_options: &ClientOptions) -> Self {
        Self
    }

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<()>, NotAdmitted> {
        let socket = Socket::new(Domain::for_address(peer.address), Type::STREAM, Some(Protocol::TCP))
            .map_err(NotAdmitted::absent)?;
        socket.set_nonblocking(true).map_err(NotAdmitted::absent)?;
        match socket.connect(&peer.address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
                let deadline = Instant::now() + options.connect_timeout;
                while !link::wait(socket.as_fd(), libc::POLLOUT, SLICE).map_err(NotAdmitted::absent)? {
                    if stop.load(Ordering::Acquire) {
                        return Err(NotAdmitted::Stopped);
                    }
                    if Instant::now() >= deadline {
                        return Err(NotAdmitted::absent(io::Error::from(io::ErrorKind::TimedOut)));
                    }
                }
                let failed = socket.take_error().map_err(NotAdmitted::absent)?;
                failed.map_or(Ok(()), |error| Err(NotAdmitted::absent(error)))?;
            }
            Err(error) => return Err(NotAdmitted::absent(error)),
        }
        tune(&socket).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials = Credentials { secret: options.secret.as_ref(), transport: Self::NAME };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        Ok(Connection { link, kept: () })
    }

    fn receive(
        &self,
        connection: &mut Connection<()>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<Result<(), TransportError>, LinkError> {
        let link = &mut connection.link;
        let allowed = link::longest_read(link.silence(), order.bytes(region.block_bytes()));
        let until = Until::deadline(stop, Instant::now() + allowed);
        let mut header = [0; HEADER_BYTES];
        link.receive(&mut header, until)?;
        let target = Target { region, order };
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
