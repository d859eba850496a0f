//! The producer's side: who may have the pool's descriptor, and which blocks a reader may copy.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector_channel::link::{self, Link, LinkError, SLICE, Until};
use baton_connector_channel::wire::{HEADER_BYTES, Header, Reply};
use baton_connector_channel::{Delivered, Granted, Serve, Server, ServerOptions, ServerStats};
use socket2::Socket;

use crate::grants::{KIND_COPIED, Pool, WINDOW, batch, batch_blocks, tells_owed};
use crate::memory::SharedMemory;
use crate::pass;
use crate::place::{self, Proof};

/// Lets consumers of this host read the blocks of one producer, until it is shut down or dropped.
pub struct ShmServer(Server);

impl ShmServer {
    /// Starts to serve on a listener of [`crate::listen`].
    ///
    /// # Errors
    /// `Unsupported` when the producer's pool does not lie in [`SharedMemory`]; otherwise the system's.
    pub fn start(listener: Socket, producer: Arc<dyn Producer>, options: ServerOptions) -> io::Result<Self> {
        if shared(producer.region()).is_none() {
            return Err(io::Error::new(ErrorKind::Unsupported, "the pool is memory of this process alone"));
        }
        let proof = if options.secret.is_some() { Proof::Secret } else { Proof::None };
        Ok(Self(Server::start(listener, producer, Arc::new(Tables { proof }), options)?))
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
        let begun = Instant::now();
        loop {
            match pass::send(link.as_fd(), &pool.encode(), memory.readers()) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    link::transient(error)?;
                    link::wait(link.as_fd(), libc::POLLOUT, SLICE).map_err(LinkError::Io)?;
                    link.check(until, begun)?;
                }
            }
        }
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        let block_bytes = granted.region().block_bytes();
        let per_batch = batch_blocks(block_bytes);
        let batches = granted.blocks().len().div_ceil(per_batch);
        // Frames that go out with the next batch, in front of it.
        let mut front = granted.announcement();
        let mut heard = 0;
        for (at, blocks) in granted.blocks().chunks(per_batch).enumerate() {
            let live = if at >= WINDOW { copied_one(link, granted, &mut heard)? } else { true };
            if !live || !granted.live() {
                front.extend(Reply::Gone.encode());
                link.send(&front, granted.until())?;
                for _ in 0..tells_owed(at, batches, heard) {
                    receive_copied(link, granted)?;
                }
                return Ok(Delivered::LeaseEnded);
            }
            front.extend(batch(blocks));
            link.send(&front, granted.until())?;
            granted.count(blocks.len() * block_bytes);
            front.clear();
        }
        Ok(Delivered::Whole)
    }
}

/// Waits until the reader has copied one more batch. A silent one is waited for as long as the lease lasts: it may
/// be a stopped process that copies on when it is continued, and until then the blocks must stay. False when the
/// lease has ended.
fn copied_one(link: &mut Link, granted: &Granted<'_>, heard: &mut usize) -> Result<bool, LinkError> {
    while !link.readable_within(SLICE).map_err(LinkError::Io)? {
        link.check(granted.until(), Instant::now())?;
        if !granted.live() {
            return Ok(false);
        }
    }
    receive_copied(link, granted)?;
    *heard += 1;
    Ok(true)
}

fn receive_copied(link: &mut Link, granted: &Granted<'_>) -> Result<(), LinkError> {
    let mut header = [0; HEADER_BYTES];
    link.receive(&mut header, granted.until())?;
    let is_it = Header::decode(header) == Header { kind: KIND_COPIED, len: 0 };
    if is_it { Ok(()) } else { Err(LinkError::Unexpected) }
}
