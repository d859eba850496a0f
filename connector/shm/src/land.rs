//! The consumer's side: finds the producer, maps its pool, and copies granted blocks into the landing blocks.
#![allow(unsafe_code)] // the copy; it says why it is sound

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::slice::Slice;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, TransportError};
use baton_connector::{BlockId, Epoch};
use baton_connector_channel::grants::{Grants, Wanted};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::link::{Link, LinkError};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach};
use socket2::Socket;

use crate::mapping::{FileId, Mapping, Passed};
use crate::pass;
use crate::place::{self, Proof};
use crate::pool::{POOL_BYTES, Pool};

pub(crate) const NAME: &str = "shm";

/// Between two looks at the lease: about 0.2 ms of copying.
pub(crate) const GRANTS: Grants = Grants { batch_bytes: 1 << 20 };

/// Pause before a connection is tried again that found the producer's queue full.
const RETRY: Duration = Duration::from_millis(10);

/// Blocks of producers on this host. Used from any number of threads at once; each call has its own connection,
/// and all connections to one producer share one mapping of its pool, which lasts as long as they.
///
/// A producer of another host, or of another network namespace, is not found: that is a handshake that failed.
pub type ShmTransport = Client<Shm>;

/// How a producer on this host is reached.
#[derive(Debug, Default)]
pub struct Shm {
    /// One per producer as long as there is a connection to it; those bound it.
    mappings: Mutex<HashMap<(Epoch, FileId), Weak<Mapping>>>,
}

impl Reach for Shm {
    const NAME: &'static str = NAME;
    type Kept = Kept;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let socket = connect(peer, options.connect_timeout, stop)?;
        let proof = if options.secret.is_some() { Proof::Secret } else { Proof::None };
        place::check(socket.as_fd(), proof).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials =
            Credentials { secret: options.secret.as_ref(), transport: NAME, service: Service::OfListener };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        let (pool, passed) = receive_pool(&mut link, stop)?;
        let mapping = self.mapping(peer.epoch, pool, &passed).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(mapping) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError> {
        let mapping = &*connection.kept.0;
        let wanted = Wanted::of(order, region).ok_or(LinkError::Unexpected)?;
        if mapping.pool().block_bytes != wanted.block_bytes as u64 {
            return Err(LinkError::Unexpected);
        }
        let bytes = order.bytes(region.block_bytes());
        GRANTS.receive(&mut connection.link, wanted, bytes, stop, |blocks, ids| match &order.part {
            Part::Blocks { .. } => {
                let into = &order.into[blocks];
                copy_blocks(mapping, ids, region, into)?;
                landed(into);
                Ok(())
            }
            Part::Slice(slice) => blocks
                .zip(ids)
                .try_for_each(|(index, from)| copy_piece(mapping, from, slice, index, region, &order.into)),
        })
    }
}

/// Copies blocks from a mapping into a region. Neighbours on both sides are one copy.
fn copy_blocks(
    mapping: &Mapping,
    from: impl Iterator<Item = u32>,
    region: &Region,
    into: &[BlockId],
) -> Result<(), LinkError> {
    let len = region.block_bytes();
    let mut run: Option<(*const u8, *mut u8, usize)> = None;
    for (from, &into) in from.zip(into) {
        let from = mapping.block(from).ok_or(LinkError::Unexpected)?;
        let into = region.block_ptr(into);
        run = match run {
            Some((start, landing, bytes))
                if start.wrapping_add(bytes) == from && landing.wrapping_add(bytes) == into =>
            {
                Some((start, landing, bytes + len))
            }
            other => {
                copy(other);
                Some((from, into, len))
            }
        };
    }
    copy(run);
    Ok(())
}

/// Copies what a slice takes of one of the producer's blocks: its piece `index`, which lies in block `from`.
fn copy_piece(
    mapping: &Mapping,
    from: u32,
    slice: &Slice,
    index: usize,
    region: &Region,
    into: &[BlockId],
) -> Result<(), LinkError> {
    let block = mapping.block(from).ok_or(LinkError::Unexpected)?;
    for (source, target) in slice.copies(&slice.cut.piece(&slice.producer, index)) {
        let landing = region.block_ptr(into[target.entry]);
        copy(Some((block.wrapping_add(source.offset), landing.wrapping_add(target.offset), source.len)));
    }
    Ok(())
}

fn copy(run: Option<(*const u8, *mut u8, usize)>) {
    if let Some((from, into, bytes)) = run {
        // SAFETY: blocks, or runs inside a block, of the mapping and of the region, both alive: the numbers of the
        // blocks and their sizes were checked, and the runs of a slice that was checked stay inside blocks of its
        // layouts. They are different mappings, so they do not overlap in addresses (a consumer of its own blocks
        // lands elsewhere in its pool). The landing blocks are nobody else's until the read is over (invariant 3). The source is leased:
        // if it is written all the same, because the lease has ended, the bytes are torn, and the verdict keeps
        // them from being used; they are plain bytes, so no value of them is invalid.
        unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
    }
}

/// What a connection keeps: the producer's pool.
#[derive(Debug)]
pub struct Kept(Arc<Mapping>);

impl Shm {
    /// The mapping of a pool: the one that other connections use, or a new one.
    fn mapping(&self, epoch: Epoch, pool: Pool, passed: &Passed) -> std::io::Result<Arc<Mapping>> {
        let key = (epoch, passed.id()?);
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        mappings.retain(|_, mapping| mapping.strong_count() > 0);
        let known = mappings.get(&key).and_then(Weak::upgrade).filter(|mapping| mapping.pool() == pool);
        if let Some(mapping) = known {
            return Ok(mapping);
        }
        let mapping = Arc::new(passed.map(pool)?);
        mappings.insert(key, Arc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// A socket to whoever listens under the peer's name. Who that is, and whether it is believed, is not known yet
/// ([`crate::meet`], and the handshake).
///
/// # Errors
/// [`NotAdmitted`]: nobody listens there, on this host and in this network namespace.
pub fn connect(peer: &Peer, timeout: Duration, stop: &StopFlag) -> Result<Socket, NotAdmitted> {
    let address = place::address(peer.epoch, peer.address.port()).map_err(NotAdmitted::absent)?;
    let socket = place::socket().map_err(NotAdmitted::absent)?;
    socket.set_nonblocking(true).map_err(NotAdmitted::absent)?;
    let deadline = Instant::now() + timeout;
    loop {
        match socket.connect(&address) {
            Ok(()) => return Ok(socket),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(NotAdmitted::absent(error)),
        }
        // Its queue is full, and for that there is nothing to wait on.
        thread::park_timeout(RETRY);
        if stop.load(Ordering::Acquire) {
            return Err(NotAdmitted::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(NotAdmitted::Silent(timeout));
        }
    }
}

/// What an admitted consumer is sent first.
fn receive_pool(link: &mut Link, stop: &StopFlag) -> Result<(Pool, Passed), LinkError> {
    let mut bytes = [0; POOL_BYTES];
    let descriptor = pass::receive_all(link, &mut bytes, stop)?;
    let descriptor = descriptor.ok_or(LinkError::Unexpected)?;
    Ok((Pool::decode(bytes), Passed::new(descriptor)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;

    #[test]
    fn connections_to_one_producer_share_one_mapping() {
        let (memory, other) =
            (SharedMemory::zeroed(8192).expect("memory"), SharedMemory::zeroed(8192).expect("memory"));
        let passed =
            |memory: &SharedMemory| Passed::new(memory.readers().try_clone_to_owned().expect("a descriptor"));
        let pool = Pool { block_bytes: 4096, blocks: 2 };
        let shm = Shm::default();
        let map = |memory| shm.mapping(Epoch(1), pool, &passed(memory)).expect("it fits");
        let (first, second, third) = (map(&memory), map(&memory), map(&other));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &third));
        drop((first, second, third));
        drop(map(&memory));
        assert_eq!(shm.mappings.lock().expect("no panic").len(), 1, "what nobody uses is forgotten");
    }
}
