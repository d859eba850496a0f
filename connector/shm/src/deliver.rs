//! The producer's side: who may have the pool's descriptor, and which blocks a reader may copy.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Delivered, Granted, Serve, Server, ServerOptions, ServerStats};
use socket2::Socket;

use crate::land::GRANTS;
use crate::memory::SharedMemory;
use crate::pass;
use crate::place::{self, Proof};
use crate::pool::Pool;

/// Lets consumers of this host read the blocks of one producer, until it is shut down or dropped.
pub struct ShmServer(Server);

impl ShmServer {
    /// Starts to serve on a listener of [`crate::listen`].
    ///
    /// # Errors
    /// `Unsupported` when the producer's pool does not lie in [`SharedMemory`]; otherwise the system's.
    pub fn start(listener: Socket, producer: Arc<dyn Producer>, options: ServerOptions) -> io::Result<Self> {
        Self::start_beside(listener, producer, Vec::new(), options)
    }

    /// As [`Self::start`], and serves consumers of other transports on the same listener: each asks for its
    /// [`Serve::service`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_beside(
        listener: Socket,
        producer: Arc<dyn Producer>,
        others: Vec<Arc<dyn Serve>>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        if shared(producer.region()).is_none() {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                "the pool's memory is private to this process",
            ));
        }
        let proof = if options.secret.is_some() { Proof::Secret } else { Proof::None };
        let mut services: Vec<Arc<dyn Serve>> = vec![Arc::new(Tables { proof })];
        services.extend(others);
        Ok(Self(Server::start(listener, producer, services, options)?))
    }

    /// What it has done so far. Bytes are those that readers were allowed to copy.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.0.stats()
    }

    /// Stops to listen, closes every connection and waits for its thread. Reads in flight have then failed. Who has
    /// mapped the pool keeps the mapping, and no verdict.
    pub fn shutdown(self) {
        self.0.shutdown();
    }
}

fn shared(region: &Region) -> Option<&SharedMemory> {
    (region.memory() as &dyn Any).downcast_ref()
}

/// Granted, and the block ids in batches.
struct Tables {
    proof: Proof,
}

impl Serve for Tables {
    fn name(&self) -> &'static str {
        crate::land::NAME
    }

    fn meet(&self, socket: &Socket) -> io::Result<()> {
        place::check(socket.as_fd(), self.proof)
    }

    fn admitted(&self, link: &mut Link, producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        let region = producer.region();
        let memory = shared(region).ok_or(LinkError::Unexpected)?;
        let pool = Pool { block_bytes: region.block_bytes() as u64, blocks: region.blocks() as u64 };
        pass::send_all(link, &pool.encode(), memory.readers(), until)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        GRANTS.deliver(link, granted)
    }
}
