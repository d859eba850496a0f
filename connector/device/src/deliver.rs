//! The producer's side: what opens the pool, and which of its blocks a reader may copy.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::grants::Grants;
use baton_connector_channel::handshake::Service;
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Delivered, Granted, Serve, Source};
use baton_connector_shm::{Pool, pass};
use socket2::Socket;

use crate::NAME;
use crate::api::DevicePool;
use crate::offer::{OFFER_BYTES, Offer, process};

/// What serves a pool's blocks from its device, for the listener of shared memory
/// ([`baton_connector_shm::ShmServer::start_beside`]). `region` is the pool's host side, which says how it is cut;
/// `batch_bytes` is [`crate::BATCH_BYTES`] but in tests.
///
/// # Errors
/// Why the pool cannot be exported; its blocks then travel through host memory.
pub fn producer(
    pool: Arc<dyn DevicePool>,
    region: &Region,
    batch_bytes: usize,
) -> io::Result<Arc<dyn Serve>> {
    let export = pool.export()?;
    let offer = Offer {
        device: export.device,
        process: process()?,
        batch_bytes: batch_bytes as u64,
        pool: Pool { block_bytes: region.block_bytes() as u64, blocks: region.blocks() as u64 },
        handle: export.handle,
        descriptor: export.descriptor.is_some(),
    };
    Ok(Arc::new(Offering {
        offer: offer.encode(),
        descriptor: export.descriptor,
        grants: Grants { batch_bytes },
        _pool: pool,
    }))
}

/// The offer, and the pool that stays for as long as it is made.
struct Offering {
    offer: [u8; OFFER_BYTES],
    descriptor: Option<OwnedFd>,
    grants: Grants,
    _pool: Arc<dyn DevicePool>,
}

impl Serve for Offering {
    fn name(&self) -> &'static str {
        NAME
    }

    fn service(&self) -> Service {
        Service::Device
    }

    fn source(&self) -> Source {
        Source::Device
    }

    /// The listener is shared memory's, which looks at a connection before it is known what it wants.
    fn meet(&self, socket: &Socket) -> io::Result<()> {
        let _ = socket;
        Ok(())
    }

    fn admitted(&self, link: &mut Link, _producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        let Some(descriptor) = &self.descriptor else { return link.send(&self.offer, until) };
        pass::send_all(link, &self.offer, descriptor.as_fd(), until)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        self.grants.deliver(link, granted)
    }
}
