//! The side channel of vLLM engines: leases and block ids. vLLM's own workers move the bytes.
//!
//! A read transfers the block ids of the lease. The consumer compares them with those of its request. Other ids mean
//! that the request names blocks that this lease does not have, and the load fails (invariant 8).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, ReadOrder, StopFlag, TransportError};
use baton_connector::{BlockId, KvLayout};
use baton_connector_channel::batching::{ReadBatching, ReadExtent};
use baton_connector_channel::handshake::{self, Credentials};
use baton_connector_channel::socket::{ChannelError, ChannelSocket};
use baton_connector_channel::{
    ClientOptions, ConnectError, Connection, Delivery, Dial, GrantedRead, Secret, Serve, Server,
    ServerOptions, Service, dial,
};
use baton_connector_leases::rank::{LeasedRank, RankMemory};
use baton_connector_leases::service::LeaseService;
use sha2::{Digest, Sha256};
use socket2::{Domain, Protocol, Socket, Type};

/// The transport's name in proofs and logs.
const NAME: &str = "vllm";

/// Block ids per message. The region of a core has blocks of one byte.
const BATCHING: ReadBatching = ReadBatching { batch_bytes: 4_096 };

/// The reason of a load whose ids are not those of the lease.
pub(crate) const FORGED: &str = "other blocks than those of the lease";

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1_024;

/// The region of a core, which has no blocks of its own: both ends of a read only compare its block size.
pub(crate) fn empty_region() -> Region {
    Region::allocate(1, 1)
}

/// What names a producer to NIXL: a consumer's workers read from this engine.
pub(crate) struct NixlName<'a> {
    /// vLLM's engine id, which NIXL's handshake compares.
    pub(crate) engine_id: &'a str,
    /// Port of NIXL's own side channel.
    pub(crate) port: u16,
    /// Tensor-parallel ranks.
    pub(crate) ranks: usize,
}

/// The fingerprint that the handshake compares. A handoff that names another engine to NIXL than to this channel is
/// refused.
pub(crate) fn fingerprint(layout: u64, nixl: &NixlName<'_>) -> u64 {
    let text = format!("{layout:016x} {} {} {}", nixl.port, nixl.ranks, nixl.engine_id);
    let digest = Sha256::digest(text.as_bytes());
    u64::from_be_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
}

/// Binds the side channel's address. It accepts no connection before [`serve`].
///
/// # Errors
/// A system error.
pub(crate) fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.port() != 0 {
        socket.set_reuse_address(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Begins to accept consumers with this fingerprint.
///
/// # Errors
/// A system error.
pub(crate) fn serve(
    socket: Socket,
    leases: Arc<LeaseService>,
    fingerprint: u64,
    secret: Option<&Secret>,
) -> io::Result<Server> {
    socket.listen(BACKLOG)?;
    let memory = BlockNames { fingerprint, region: empty_region() };
    let producer: Arc<dyn Producer> = Arc::new(LeasedRank::new(leases, memory));
    let options = ServerOptions { secret: secret.cloned(), ..ServerOptions::default() };
    let services: Vec<Arc<dyn Serve>> = vec![Arc::new(BlockNameService)];
    Server::start(socket, producer, services, options)
}

/// The memory of a producer whose bytes the channel does not move.
struct BlockNames {
    fingerprint: u64,
    region: Region,
}

impl RankMemory for BlockNames {
    fn fingerprint(&self, _shape: u64) -> u64 {
        self.fingerprint
    }

    fn layout(&self) -> Option<KvLayout> {
        None
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn download_blocks(&self, _blocks: &[BlockId]) -> Result<(), TransportError> {
        Ok(())
    }
}

/// Sends the block ids of a lease.
struct BlockNameService;

impl Serve for BlockNameService {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check_socket(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        BATCHING.deliver(socket, granted)
    }
}

/// Connects to producers, and compares the block ids of a lease with those of the order.
#[derive(Debug, Default)]
pub(crate) struct BlockNameDialer;

impl Dial for BlockNameDialer {
    const NAME: &'static str = NAME;
    type Context = ();

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<()>, ConnectError> {
        let socket = dial(peer.address, options.connect_timeout, stop)?;
        socket.set_tcp_nodelay(true).map_err(ConnectError::unreachable)?;
        let mut socket = ChannelSocket::new(socket, options.silence).map_err(ConnectError::unreachable)?;
        let credentials = Credentials {
            secret: options.secret.as_ref(),
            transport: NAME,
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
        _landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let extent = ReadExtent::of(order, region).ok_or(ChannelError::Unexpected)?;
        let (mut forged, bytes) = (false, order.bytes(region.block_bytes()));
        let answer = BATCHING.receive(&mut connection.socket, extent, bytes, stop, |at, ids| {
            forged |= !Iterator::eq(ids, order.into[at].iter().map(|block| block.0));
            Ok(())
        })?;
        // The connection is in step: all ids were received.
        Ok(answer.and_then(|()| if forged { Err(TransportError::Refused(FORGED.into())) } else { Ok(()) }))
    }
}
