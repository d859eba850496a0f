//! The producer's side: sends the offer that opens the pool, and the ids of the blocks that a reader may copy.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::batching::ReadBatching;
use baton_connector_channel::handshake::Service;
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::{BlockSource, Delivery, GrantedRead, Serve};
use baton_connector_shm::{PoolShape, descriptor};
use socket2::Socket;

use crate::NAME;
use crate::api::DevicePool;
use crate::offer::{OFFER_BYTES, Offer, process_id};

/// A service that serves a pool's blocks from its device, for the listener of shared memory
/// ([`baton_connector_shm::ShmServer::start_with_services`]). `region` is the pool's host side and defines its shape.
/// `batch_bytes` is [`crate::BATCH_BYTES`], except in tests.
///
/// # Errors
/// Why the pool cannot be exported. Its blocks are then sent through host memory.
pub fn producer(
    pool: Arc<dyn DevicePool>,
    region: &Region,
    batch_bytes: usize,
) -> io::Result<Arc<dyn Serve>> {
    let export = pool.export()?;
    let offer = Offer {
        device: export.device,
        process: process_id()?,
        batch_bytes: batch_bytes as u64,
        pool: PoolShape { block_bytes: region.block_bytes() as u64, blocks: region.blocks() as u64 },
        handle: export.handle,
        descriptor: export.descriptor.is_some(),
    };
    Ok(Arc::new(DeviceService {
        offer: offer.encode(),
        descriptor: export.descriptor,
        batching: ReadBatching { batch_bytes },
        _pool: pool,
    }))
}

/// The offer, and the pool, which must stay as long as the offer is made.
struct DeviceService {
    offer: [u8; OFFER_BYTES],
    descriptor: Option<OwnedFd>,
    batching: ReadBatching,
    _pool: Arc<dyn DevicePool>,
}

impl Serve for DeviceService {
    fn name(&self) -> &'static str {
        NAME
    }

    fn service(&self) -> Service {
        Service::Device
    }

    fn source(&self) -> BlockSource {
        BlockSource::Device
    }

    /// No check: the listener of shared memory checks a connection before the consumer requests a service.
    fn check_socket(&self, socket: &Socket) -> io::Result<()> {
        let _ = socket;
        Ok(())
    }

    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        _producer: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        let Some(descriptor) = &self.descriptor else { return socket.send(&self.offer, until) };
        descriptor::send_all(socket, &self.offer, descriptor.as_fd(), until)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        self.batching.deliver(socket, granted)
    }
}
