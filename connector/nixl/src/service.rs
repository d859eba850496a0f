//! The producer's side: an agent with the registered pool, and the ids of the blocks that a reader may read.

use std::io;
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::batching::ReadBatching;
use baton_connector_channel::handshake::Service;
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::{BlockSource, Delivery, GrantedRead, Serve};
use socket2::Socket;

use crate::agents::unique_name;
use crate::api::{Agent, AgentRole, Library, NixlError};
use crate::offer::{Offer, encode_device_header};
use crate::pool::{DevicePool, LocalPool};
use crate::{BATCHING, DEVICE_NAME, NAME};

/// A service that serves a pool's blocks over NIXL, for a side channel's listener. The pool is registered with an agent
/// of its own, which lives as long as the service.
///
/// # Errors
/// [`NixlError`]: other transports then send the blocks.
pub fn producer(library: &dyn Library, region: &Region) -> Result<Arc<dyn Serve>, NixlError> {
    Ok(Arc::new(NixlService::of(library, LocalPool::Host(region.clone()), BATCHING)?))
}

/// The same for a pool in device memory, without a copy to the host. It is served next to [`producer`] of the pool's
/// host side, which is for consumers with a pool in host memory. `batch_bytes` is [`crate::DEVICE_BATCH_BYTES`], except
/// in tests.
///
/// # Errors
/// [`NixlError`]: the blocks are then sent through host memory.
pub fn device_producer(
    library: &dyn Library,
    pool: Arc<dyn DevicePool>,
    batch_bytes: usize,
) -> Result<Arc<dyn Serve>, NixlError> {
    Ok(Arc::new(NixlService::of(library, LocalPool::Device(pool), ReadBatching { batch_bytes })?))
}

/// The agent and its pool, which are dropped in this order.
struct NixlService {
    offer: Vec<u8>,
    batching: ReadBatching,
    _agent: Box<dyn Agent>,
    pool: LocalPool,
}

impl NixlService {
    #[allow(unsafe_code, reason = "registering the pool; the block states why it is sound")]
    fn of(library: &dyn Library, pool: LocalPool, batching: ReadBatching) -> Result<Self, NixlError> {
        let memory = pool.memory()?;
        pool.enter()?;
        let name = unique_name("p")?;
        let agent = library.agent(&name, AgentRole::Target)?;
        // SAFETY: the memory of the whole pool, which is dropped after the agent.
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
            LocalPool::Host(_) => rest,
            LocalPool::Device(_) => {
                [&encode_device_header(memory.segment, batching.batch_bytes)[..], &rest].concat()
            }
        };
        Ok(Self { offer, batching, _agent: agent, pool })
    }
}

impl Serve for NixlService {
    fn name(&self) -> &'static str {
        match self.pool {
            LocalPool::Host(_) => NAME,
            LocalPool::Device(_) => DEVICE_NAME,
        }
    }

    fn service(&self) -> Service {
        match self.pool {
            LocalPool::Host(_) => Service::Nixl,
            LocalPool::Device(_) => Service::NixlDevice,
        }
    }

    fn source(&self) -> BlockSource {
        match self.pool {
            LocalPool::Host(_) => BlockSource::Region,
            LocalPool::Device(_) => BlockSource::Device,
        }
    }

    fn check_socket(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)
    }

    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        _producer: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        socket.send(&self.offer, until)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        self.batching.deliver(socket, granted)
    }
}

impl Drop for NixlService {
    fn drop(&mut self) {
        // The drop of the agent follows and needs the device. Errors of a lost device are ignored.
        let _ = self.pool.enter();
    }
}
