//! The producer's side: an agent that knows the pool, and which of its blocks a reader may take.

use std::io;
use std::sync::Arc;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::handshake::Service;
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Delivered, Granted, Serve};
use socket2::Socket;

use crate::agents::unique_name;
use crate::api::{Agent, Library, NixlError, Side};
use crate::offer::Offer;
use crate::{GRANTS, NAME};

/// What serves a pool's blocks by NIXL, for a side channel's listener: the pool is registered with an agent of its own,
/// which lives as long as this.
///
/// # Errors
/// [`NixlError`]: the pool then travels otherwise.
pub fn producer(library: &dyn Library, region: &Region) -> Result<Arc<dyn Serve>, NixlError> {
    Ok(Arc::new(Offering::of(library, region)?))
}

/// The agent, and after it the pool that it knows: dropped in this order.
struct Offering {
    offer: Vec<u8>,
    _agent: Box<dyn Agent>,
    _pool: Region,
}

impl Offering {
    #[allow(unsafe_code)] // registering the pool; it says why it is sound
    fn of(library: &dyn Library, region: &Region) -> Result<Self, NixlError> {
        let name = unique_name("p")?;
        let agent = library.agent(&name, Side::Target)?;
        let base = region.block_ptr(BlockId(0));
        let (block_bytes, blocks) = (region.block_bytes(), region.blocks());
        // SAFETY: the pool's own memory; the clone below is dropped after the agent.
        unsafe { agent.register(base, blocks * block_bytes) }?;
        let offer = Offer {
            block_bytes: block_bytes as u64,
            blocks: blocks as u64,
            base: base.addr() as u64,
            name,
            metadata: agent.metadata()?,
        };
        let offer = offer.encode().ok_or_else(|| NixlError("metadata that no consumer would read".into()))?;
        Ok(Self { offer, _agent: agent, _pool: region.clone() })
    }
}

impl Serve for Offering {
    fn name(&self) -> &'static str {
        NAME
    }

    fn service(&self) -> Service {
        Service::Nixl
    }

    fn meet(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)
    }

    fn admitted(&self, link: &mut Link, _producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        link.send(&self.offer, until)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        GRANTS.deliver(link, granted)
    }
}
