//! The consumer's side: finds the producer, opens its pool, and lets this engine's device copy granted blocks into the
//! landing blocks.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, StopFlag, TransportError};
use baton_connector::{BlockId, Epoch};
use baton_connector_channel::batching::{ReadBatching, ReadExtent};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::socket::{ChannelError, ChannelSocket};
use baton_connector_channel::{Client, ClientOptions, ConnectError, Connection, Dial};
use baton_connector_shm::{PeerProof, check_peer, connect, descriptor};

use crate::NAME;
use crate::api::{DevicePool, ImportedPool};
use crate::offer::{HANDLE_BYTES, OFFER_BYTES, Offer};
use crate::runs::runs;

/// The transport to producers whose device this engine's device can read. Any number of threads may use it at once;
/// each call has its own connection. All connections to one producer share one opened pool, which lasts as long as they
/// do.
///
/// The handshake fails with a producer on another host, without a device, or on a device that cannot be read.
pub type DeviceTransport = Client<DeviceDialer>;

/// A transport whose blocks land in this pool.
#[must_use]
pub fn transport(pool: Arc<dyn DevicePool>, options: ClientOptions) -> DeviceTransport {
    Client::with_dialer(DeviceDialer { pool, remotes: Mutex::default() }, options)
}

/// Connects to producers with a device on this host.
#[derive(Debug)]
pub struct DeviceDialer {
    pool: Arc<dyn DevicePool>,
    /// One pool per producer with a connection. The connections bound their number.
    remotes: Mutex<HashMap<PoolKey, Weak<RemotePool>>>,
}

type PoolKey = (Epoch, [u8; 16], [u8; HANDLE_BYTES]);

/// A producer's pool.
#[derive(Debug)]
struct RemotePool {
    offer: Offer,
    pool: Box<dyn ImportedPool>,
}

/// The data of a connection: the producer's pool.
#[derive(Debug)]
pub struct DeviceContext(Arc<RemotePool>);

impl DeviceDialer {
    /// Number of producers' pools that are open now.
    #[must_use]
    pub fn open_pools(&self) -> usize {
        let remotes = self.remotes.lock().unwrap_or_else(PoisonError::into_inner);
        remotes.values().filter(|remote| remote.strong_count() > 0).count()
    }

    /// The pool of an offer: that of other connections, or a newly opened one. The lock is held during the opening, so
    /// that two connections do not open a pool twice.
    fn remote(&self, epoch: Epoch, offer: Offer, descriptor: Option<OwnedFd>) -> io::Result<Arc<RemotePool>> {
        let key = (epoch, offer.process, offer.handle);
        let mut remotes = self.remotes.lock().unwrap_or_else(PoisonError::into_inner);
        remotes.retain(|_, remote| remote.strong_count() > 0);
        let known = remotes.get(&key).and_then(Weak::upgrade).filter(|remote| remote.offer == offer);
        if let Some(remote) = known {
            return Ok(remote);
        }
        let remote = Arc::new(RemotePool { pool: self.pool.open(&offer, descriptor)?, offer });
        remotes.insert(key, Arc::downgrade(&remote));
        Ok(remote)
    }
}

impl Dial for DeviceDialer {
    const NAME: &'static str = NAME;
    type Context = DeviceContext;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<DeviceContext>, ConnectError> {
        let socket = connect(peer, options.connect_timeout, stop)?;
        let proof = PeerProof::of(options.secret.as_ref());
        check_peer(socket.as_fd(), proof).map_err(ConnectError::unreachable)?;
        let mut socket = ChannelSocket::new(socket, options.silence).map_err(ConnectError::unreachable)?;
        let credentials =
            Credentials { secret: options.secret.as_ref(), transport: NAME, service: Service::Device };
        handshake::initiate(&mut socket, credentials, peer, stop)?;
        let (offer, descriptor) = receive_offer(&mut socket, stop)?;
        let remote = self.remote(peer.epoch, offer, descriptor).map_err(ConnectError::unreachable)?;
        Ok(Connection { socket, context: DeviceContext(remote) })
    }

    fn receive(
        &self,
        connection: &mut Connection<DeviceContext>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let (socket, remote) = (&mut connection.socket, &*connection.context.0);
        let extent = ReadExtent::of(order, region).ok_or(ChannelError::Unexpected)?;
        if remote.offer.pool.block_bytes != extent.block_bytes as u64 {
            return Err(ChannelError::Unexpected);
        }
        let batch_bytes = usize::try_from(remote.offer.batch_bytes).map_err(|_| ChannelError::Unexpected)?;
        let bytes = order.bytes(region.block_bytes());
        let landed = ReadBatching { batch_bytes }.receive(socket, extent, bytes, stop, |blocks, ids| {
            let runs =
                runs(order, region, &remote.offer, blocks, ids).map_err(|_| ChannelError::Unexpected)?;
            remote.pool.copy(&runs, region).map_err(ChannelError::Io)
        })?;
        if landed.is_ok() {
            self.pool.landed(&order.into);
        }
        Ok(landed)
    }
}

/// Receives the offer, which a producer sends first to an admitted consumer.
fn receive_offer(
    socket: &mut ChannelSocket,
    stop: &StopFlag,
) -> Result<(Offer, Option<OwnedFd>), ChannelError> {
    let refused = |why| ChannelError::Io(io::Error::new(io::ErrorKind::InvalidData, why));
    let mut bytes = [0; OFFER_BYTES];
    let descriptor = descriptor::receive_all(socket, &mut bytes, stop)?;
    let offer = Offer::decode(bytes).map_err(refused)?;
    if offer.descriptor != descriptor.is_some() {
        return Err(ChannelError::Unexpected);
    }
    Ok((offer, descriptor))
}
