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
use baton_connector_channel::handshake::{self, Credentials};
use baton_connector_channel::link::{self, Link, LinkError, Until};
use baton_connector_channel::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach};
use socket2::Socket;

use crate::grants::{POOL_BYTES, Pool, batch_blocks, block_ids, copied, is_told};
use crate::mapping::{FileId, Mapping, Passed};
use crate::pass;
use crate::place::{self, Proof};

pub(crate) const NAME: &str = "shm";

/// Pause before a connection is tried again that found the producer's queue full.
const RETRY: Duration = Duration::from_millis(10);

/// Blocks of producers on this host. Used from any number of threads at once; each call has its own connection,
/// and all connections to one producer share one mapping of its pool, which lasts as long as they.
///
/// A producer of another host, or of another network namespace, is not found: that is a handshake that failed.
pub type ShmTransport = Client<Shm>;

/// How a producer on this host is reached.
#[derive(Debug)]
pub struct Shm {
    /// One per producer as long as there is a connection to it; those bound it.
    mappings: Mutex<HashMap<(Epoch, FileId), Weak<Mapping>>>,
}

impl Reach for Shm {
    const NAME: &'static str = NAME;
    type Kept = Kept;

    fn new(_options: &ClientOptions) -> Self {
        Self { mappings: Mutex::default() }
    }

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let socket = connected(peer, options.connect_timeout, stop)?;
        let proof = if options.secret.is_some() { Proof::Secret } else { Proof::None };
        place::check(socket.as_fd(), proof).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials = Credentials { secret: options.secret.as_ref(), transport: NAME };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        let (pool, passed) = receive_pool(&mut link, stop).map_err(|error| match error {
            LinkError::Stopped => NotAdmitted::Stopped,
            LinkError::Silent(silence) => NotAdmitted::Silent(silence),
            other => NotAdmitted::absent(other),
        })?;
        let mapping = self.mapping(peer.epoch, pool, &passed).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(mapping) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<Result<(), TransportError>, LinkError> {
        let (link, mapping) = (&mut connection.link, &*connection.kept.0);
        // Blocks of the producer that are read, and the sizes that both sides' blocks must have.
        let (count, theirs, ours) = match &order.part {
            Part::Blocks { .. } => (order.into.len(), region.block_bytes(), region.block_bytes()),
            Part::Slice(slice) => {
                let count = slice.cut.entries(&slice.producer).len();
                (count, slice.producer.block_bytes(), slice.consumer.block_bytes())
            }
        };
        if mapping.pool().block_bytes != theirs as u64 || region.block_bytes() != ours {
            return Err(LinkError::Unexpected);
        }
        let allowed = link::longest_read(link.silence(), order.bytes(region.block_bytes()));
        let until = Until::deadline(stop, Instant::now() + allowed);
        let per_batch = batch_blocks(theirs);
        let batches = count.div_ceil(per_batch);
        let mut payload = Vec::new();
        for (at, first) in (0..count).step_by(per_batch).enumerate() {
            let blocks = first..count.min(first + per_batch);
            let mut header = [0; HEADER_BYTES];
            link.receive(&mut header, until)?;
            let Header { kind, len } = Header::decode(header);
            if kind != KIND_BATCH {
                return gone(kind, len);
            }
            if len != 4 * blocks.len() {
                return Err(LinkError::Unexpected);
            }
            payload.resize(len, 0);
            link.receive(&mut payload, until)?;
            if stop.load(Ordering::Acquire) {
                return Err(LinkError::Stopped);
            }
            match &order.part {
                Part::Blocks { .. } => {
                    copy_blocks(mapping, block_ids(&payload), region, &order.into[blocks])?;
                }
                Part::Slice(slice) => {
                    for (index, from) in blocks.zip(block_ids(&payload)) {
                        copy_piece(mapping, from, slice, index, region, &order.into)?;
                    }
                }
            }
            if is_told(at, batches) {
                link.send(&copied(), until)?;
            }
        }
        Ok(Ok(()))
    }
}

/// What a producer says instead of a batch.
fn gone(kind: u8, len: usize) -> Result<Result<(), TransportError>, LinkError> {
    match (len, Reply::decode(kind, &[])?) {
        (0, Reply::Gone) => Ok(Err(TransportError::Gone)),
        _ => Err(LinkError::Unexpected),
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

/// A socket to whoever listens under the peer's name.
fn connected(peer: &Peer, timeout: Duration, stop: &StopFlag) -> Result<Socket, NotAdmitted> {
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
    let begun = Instant::now();
    let until = Until::deadline(stop, begun + link.silence());
    let mut bytes = [0; POOL_BYTES];
    let mut filled = 0;
    let mut descriptor = None;
    while filled < POOL_BYTES {
        match pass::receive(link.as_fd(), &mut bytes[filled..]) {
            Ok((0, _)) => return Err(LinkError::Closed),
            Ok((received, mut descriptors)) => {
                filled += received;
                if descriptors.len() > 1 || (descriptor.is_some() && !descriptors.is_empty()) {
                    return Err(LinkError::Unexpected);
                }
                descriptor = descriptor.or(descriptors.pop());
            }
            Err(error) => link::transient(error)?,
        }
        link.check(until, begun)?;
    }
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
        let shm = Shm::new(&ClientOptions::default());
        let map = |memory| shm.mapping(Epoch(1), pool, &passed(memory)).expect("it fits");
        let (first, second, third) = (map(&memory), map(&memory), map(&other));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &third));
        drop((first, second, third));
        drop(map(&memory));
        assert_eq!(shm.mappings.lock().expect("no panic").len(), 1, "what nobody uses is forgotten");
    }
}
