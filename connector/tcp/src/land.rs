//! The consumer's side: connects, and receives batches straight into the landing blocks.

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::link::{Link, LinkError};
use baton_connector_channel::patience::Patience;
use baton_connector_channel::scatter::Spans;
use baton_connector_channel::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach, dial};

use crate::source::{Batch, Target, batches};
use crate::tune;

/// Blocks over TCP. Used from any number of threads at once; each call has its own connection.
pub type TcpTransport = Client<Tcp>;

/// How a producer is reached over TCP.
#[derive(Debug, Default)]
pub struct Tcp;

impl Reach for Tcp {
    const NAME: &'static str = "tcp";
    type Kept = ();

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<()>, NotAdmitted> {
        let socket = dial(peer.address, options.connect_timeout, stop)?;
        tune(&socket).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials = Credentials {
            secret: options.secret.as_ref(),
            transport: Self::NAME,
            service: Service::OfListener,
        };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        Ok(Connection { link, kept: () })
    }

    fn receive(
        &self,
        connection: &mut Connection<()>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError> {
        let link = &mut connection.link;
        let mut patience = Patience::new(link, order.bytes(region.block_bytes()), stop);
        let mut header = [0; HEADER_BYTES];
        link.receive(&mut header, patience.until())?;
        let target = Target { region, order };
        for Batch { parts, bytes } in batches(target.parts()) {
            patience.outlast(link, &mut header)?;
            let Header { kind, len } = Header::decode(header);
            if kind != KIND_BATCH {
                // "Complete" before the last batch is not an answer.
                return last_word(header)?.map_or_else(|gone| Ok(Err(gone)), |()| Err(LinkError::Unexpected));
            }
            if len != bytes {
                return Err(LinkError::Unexpected);
            }
            let mut spans = Spans::with_capacity(parts.len() + 1);
            target.scatter(parts.clone(), &mut spans);
            // The next header comes with this batch: one system call less.
            spans.push_buffer(&mut header);
            link.receive_spans(&mut spans, patience.until())?;
            if let Part::Blocks { .. } = order.part {
                landed(&order.into[parts]);
            }
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
