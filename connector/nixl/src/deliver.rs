//! The producer's side: an agent that knows the pool, and which of its blocks a reader may take.

use std::io;
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::grants::Grants;
use baton_connector_channel::handshake::Service;
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Delivered, Granted, Serve, Source};
use socket2::Socket;

use crate::agents::unique_name;
use crate::api::{Agent, Library, NixlError, Side};
use crate::offer::{Offer, announce};
use crate::pool::{DevicePool, Own};
use crate::{DEVICE_NAME, GRANTS, NAME};

/// What serves a pool's blocks by NIXL, for a side channel's listener: the pool is registered with an agent of its own,
/// which lives as long as this.
///
/// # Errors
/// [`NixlError`]: the pool then travels otherwise.
pub fn producer(library: &dyn Library, region: &Region) -> Result<Arc<dyn Serve>, NixlError> {
    Ok(Arc::new(Offering::of(library, Own::Host(region.clone()), GRANTS)?))
}

/// The same for a pool in a device's own memory, which nobody copies to the host first. Served beside [`producer`] of its
/// host side, which is for consumers whose pool is in host memory. `batch_bytes` is [`crate::DEVICE_BATCH_BYTES`] but in
/// tests.
///
/// # Errors
/// [`NixlError`]: the pool then travels through host memory.
pub fn device_producer(
    library: &dyn Library,
    pool: Arc<dyn DevicePool>,
    batch_bytes: usize,
) -> Result<Arc<dyn Serve>, NixlError> {
    Ok(Arc::new(Offering::of(library, Own::Device(pool), Grants { batch_bytes })?))
}

/// The agent, and after it the pool that it knows: dropped in this order.
struct Offering {
    offer: Vec<u8>,
    grants: Grants,
    _agent: Box<dyn Agent>,
    pool: Own,
}

impl Offering {
    #[allow(unsafe_code)] // registering the pool; it says why it is sound
    fn of(library: &dyn Library, pool: Own, grants: Grants) -> Result<Self, NixlError> {
        let memory = pool.memory()?;
        pool.enter()?;
        let name = unique_name("p")?;
        let agent = library.agent(&name, Side::Target)?;
        // SAFETY: all of the pool, as it says itself; it is dropped after the agent.
        unsafe { agent.register(memory) }?;
        let offer = Offer {
            segment: memory.segment,
            block_bytes: pool.region().block_bytes() as u64,
            blocks: pool.region().blocks() as u64,
            base: memory.base as u64,
            name,
            metadata: agent.metadata()?,
        };
        let rest =
            offer.encode().ok_or_else(|| NixlError("name or metadata of the agent is too long".into()))?;
        let offer = match &pool {
            Own::Host(_) => rest,
            Own::Device(_) => [&announce(memory.segment, grants.batch_bytes)[..], &rest].concat(),
        };
        Ok(Self { offer, grants, _agent: agent, pool })
    }
}

impl Serve for Offering {
    fn name(&self) -> &'static str {
        match self.pool {
            Own::Host(_) => NAME,
            Own::Device(_) => DEVICE_NAME,
        }
    }

    fn service(&self) -> Service {
        match self.pool {
            Own::Host(_) => Service::Nixl,
            Own::Device(_) => Service::NixlDevice,
        }
    }

    fn source(&self) -> Source {
        match self.pool {
            Own::Host(_) => Source::Region,
            Own::Device(_) => Source::Device,
        }
    }

    fn meet(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)
    }

    fn admitted(&self, link: &mut Link, _producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        link.send(&self.offer, until)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        self.grants.deliver(link, granted)
    }
}

impl Drop for Offering {
    fn drop(&mut self) {
        // For the agent's end, which is next. A device that is lost has nothing to end.
        let _ = self.pool.enter();
    }
}
