//! The consumer's side: connects, and receives batches directly into the landing blocks.

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::scatter::Spans;
use baton_connector_channel::socket::{ChannelError, ChannelSocket};
use baton_connector_channel::timeouts::ChannelTimeouts;
use baton_connector_channel::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};
use baton_connector_channel::{Client, ClientOptions, ConnectError, Connection, Dial, dial};

use crate::source::{Batch, ReadTarget, batches};
use crate::tune;

/// The TCP transport. Any number of threads may use it at once; each call has its own connection.
pub type TcpTransport = Client<TcpDialer>;

/// Connects to producers over TCP.
#[derive(Debug, Default)]
pub struct TcpDialer;

impl Dial for TcpDialer {
    const NAME: &'static str = "tcp";
    type Context = ();

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<()>, ConnectError> {
        let socket = dial(peer.address, options.connect_timeout, stop)?;
        tune(&socket).map_err(ConnectError::unreachable)?;
        let mut socket = ChannelSocket::new(socket, options.silence).map_err(ConnectError::unreachable)?;
        let credentials = Credentials {
            secret: options.secret.as_ref(),
            transport: Self::NAME,
            service: Service::ListenerDefault,
        };
        handshake::initiate(&mut socket, credentials, peer, stop)?;
        Ok(Connection { socket, context: () })
    }

    fn receive(
        &self,
        connection: &mut Connection<()>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let socket = &mut connection.socket;
        let mut timeouts = ChannelTimeouts::new(socket, order.bytes(region.block_bytes()), stop);
        let mut header = [0; HEADER_BYTES];
        socket.receive(&mut header, timeouts.wait_limit())?;
        let target = ReadTarget { region, order };
        for Batch { parts, bytes } in batches(target.parts()) {
            timeouts.skip_not_yet(socket, &mut header)?;
            let Header { kind, len } = Header::decode(header);
            if kind != KIND_BATCH {
                // "Complete" before the last batch is not an answer.
                return end_of_batches(header)?
                    .map_or_else(|gone| Ok(Err(gone)), |()| Err(ChannelError::Unexpected));
            }
            if len != bytes {
                return Err(ChannelError::Unexpected);
            }
            let mut spans = Spans::with_capacity(parts.len() + 1);
            target.scatter(parts.clone(), &mut spans);
            // The next header is received with this batch, which saves a system call.
            spans.push_buffer(&mut header);
            socket.receive_spans(&mut spans, timeouts.wait_limit())?;
            if let Part::Blocks { .. } = order.part {
                landed(&order.into[parts]);
            }
        }
        end_of_batches(header)
    }
}

/// The frame that a producer sends instead of a batch, or after the last one.
fn end_of_batches(header: [u8; HEADER_BYTES]) -> Result<Result<(), TransportError>, ChannelError> {
    let Header { kind, len } = Header::decode(header);
    if len != 0 {
        return Err(ChannelError::Unexpected);
    }
    match Reply::decode(kind, &[])? {
        Reply::Complete => Ok(Ok(())),
        Reply::Gone => Ok(Err(TransportError::Gone)),
        _ => Err(ChannelError::Unexpected),
    }
}
