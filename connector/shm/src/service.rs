//! The producer's side: sends the pool's descriptor to admitted consumers, and the ids of the blocks that a reader may
//! copy.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::{Delivery, GrantedRead, Serve, Server, ServerOptions, ServerStats};
use socket2::Socket;

use crate::descriptor;
use crate::dialer::BATCHING;
use crate::memory::SharedMemory;
use crate::peer::{self, PeerProof};
use crate::pool::PoolShape;

/// Lets consumers of this host read the blocks of one producer, until it is shut down or dropped.
pub struct ShmServer(Server);

impl ShmServer {
    /// Starts to serve on a listener of [`crate::listen`].
    ///
    /// # Errors
    /// `Unsupported` if the producer's pool is not in [`SharedMemory`]; otherwise a system error.
    pub fn start(listener: Socket, producer: Arc<dyn Producer>, options: ServerOptions) -> io::Result<Self> {
        Self::start_with_services(listener, producer, Vec::new(), options)
    }

    /// As [`Self::start`], and serves other transports on the same listener, by their [`Serve::service`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_services(
        listener: Socket,
        producer: Arc<dyn Producer>,
        others: Vec<Arc<dyn Serve>>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        if shared_memory(producer.region()).is_none() {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                "the pool's memory is private to this process",
            ));
        }
        let proof = PeerProof::of(options.secret.as_ref());
        let mut services: Vec<Arc<dyn Serve>> = vec![Arc::new(ShmService { proof })];
        services.extend(others);
        Ok(Self(Server::start(listener, producer, services, options)?))
    }

    /// The counters so far. `bytes` are those that readers were allowed to copy.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.0.stats()
    }

    /// Stops listening, closes every connection and waits for its thread. Reads in flight have then failed. Consumers
    /// keep their mappings of the pool, but get no verdict.
    pub fn shutdown(self) {
        self.0.shutdown();
    }
}

fn shared_memory(region: &Region) -> Option<&SharedMemory> {
    (region.memory() as &dyn Any).downcast_ref()
}

/// Sends "granted", and the block ids in batches.
struct ShmService {
    proof: PeerProof,
}

impl Serve for ShmService {
    fn name(&self) -> &'static str {
        crate::dialer::NAME
    }

    fn check_socket(&self, socket: &Socket) -> io::Result<()> {
        peer::check_peer(socket.as_fd(), self.proof)
    }

    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        producer: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        let region = producer.region();
        let memory = shared_memory(region).ok_or(ChannelError::Unexpected)?;
        let pool = PoolShape { block_bytes: region.block_bytes() as u64, blocks: region.blocks() as u64 };
        descriptor::send_all(socket, &pool.encode(), memory.read_only(), until)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        BATCHING.deliver(socket, granted)
    }
}
