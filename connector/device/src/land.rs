//! The consumer's side: finds the producer, opens its pool, and has our device copy granted blocks into the landing
//! blocks.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, StopFlag, TransportError};
use baton_connector::{BlockId, Epoch};
use baton_connector_channel::grants::{Grants, Wanted};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::link::{Link, LinkError};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach};
use baton_connector_shm::{connect, meet, pass};

use crate::NAME;
use crate::api::{DevicePool, Opened};
use crate::offer::{HANDLE_BYTES, OFFER_BYTES, Offer};
use crate::runs::runs;

/// Blocks of producers whose device ours can read. Used from any number of threads at once; each call has its own
/// connection, and all connections to one producer share one opened pool, which lasts as long as they.
///
/// A producer of another host, on no device, or on one that ours cannot read, is a handshake that failed.
pub type DeviceTransport = Client<Device>;

/// A transport that lands in this pool.
#[must_use]
pub fn transport(pool: Arc<dyn DevicePool>, options: ClientOptions) -> DeviceTransport {
    Client::with(Device { pool, opened: Mutex::default() }, options)
}

/// How a producer's device is reached.
#[derive(Debug)]
pub struct Device {
    pool: Arc<dyn DevicePool>,
    /// One per producer as long as there is a connection to it; those bound it.
    opened: Mutex<HashMap<Key, Weak<Remote>>>,
}

type Key = (Epoch, [u8; 16], [u8; HANDLE_BYTES]);

/// A producer's pool.
#[derive(Debug)]
struct Remote {
    offer: Offer,
    opened: Box<dyn Opened>,
}

/// What a connection keeps: the producer's pool.
#[derive(Debug)]
pub struct Kept(Arc<Remote>);

impl Device {
    /// Pools of producers that are open now.
    #[must_use]
    pub fn open_pools(&self) -> usize {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.values().filter(|remote| remote.strong_count() > 0).count()
    }

    /// The pool of an offer: the one that other connections use, or opened now. The lock is held meanwhile, so that two
    /// connections do not open it twice.
    fn remote(&self, epoch: Epoch, offer: Offer, descriptor: Option<OwnedFd>) -> io::Result<Arc<Remote>> {
        let key = (epoch, offer.process, offer.handle);
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|_, remote| remote.strong_count() > 0);
        let known = opened.get(&key).and_then(Weak::upgrade).filter(|remote| remote.offer == offer);
        if let Some(remote) = known {
            return Ok(remote);
        }
        let remote = Arc::new(Remote { opened: self.pool.open(&offer, descriptor)?, offer });
        opened.insert(key, Arc::downgrade(&remote));
        Ok(remote)
    }
}

impl Reach for Device {
    const NAME: &'static str = NAME;
    type Kept = Kept;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let socket = connect(peer, options.connect_timeout, stop)?;
        meet(socket.as_fd(), options.secret.is_some()).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials =
            Credentials { secret: options.secret.as_ref(), transport: NAME, service: Service::Device };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        let (offer, descriptor) = receive_offer(&mut link, stop).map_err(|error| match error {
            LinkError::Stopped => NotAdmitted::Stopped,
            LinkError::Silent(silence) => NotAdmitted::Silent(silence),
            other => NotAdmitted::absent(other),
        })?;
        let remote = self.remote(peer.epoch, offer, descriptor).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(remote) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError> {
        let (link, remote) = (&mut connection.link, &*connection.kept.0);
        let wanted = Wanted::of(order, region).ok_or(LinkError::Unexpected)?;
        if remote.offer.pool.block_bytes != wanted.block_bytes as u64 {
            return Err(LinkError::Unexpected);
        }
        let batch_bytes = usize::try_from(remote.offer.batch_bytes).map_err(|_| LinkError::Unexpected)?;
        let bytes = order.bytes(region.block_bytes());
        let landed = Grants { batch_bytes }.receive(link, wanted, bytes, stop, |blocks, ids| {
            let runs = runs(order, region, &remote.offer, blocks, ids).map_err(|_| LinkError::Unexpected)?;
            remote.opened.copy(&runs, region).map_err(LinkError::Io)
        })?;
        if landed.is_ok() {
            self.pool.landed(&order.into);
        }
        Ok(landed)
    }
}

/// What an admitted consumer is sent first.
fn receive_offer(link: &mut Link, stop: &StopFlag) -> Result<(Offer, Option<OwnedFd>), LinkError> {
    let refused = |why| LinkError::Io(io::Error::new(io::ErrorKind::InvalidData, why));
    let mut bytes = [0; OFFER_BYTES];
    let descriptor = pass::receive_all(link, &mut bytes, stop)?;
    let offer = Offer::decode(bytes).map_err(refused)?;
    if offer.descriptor != descriptor.is_some() {
        return Err(LinkError::Unexpected);
    }
    Ok((offer, descriptor))
}
