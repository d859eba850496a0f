//! The consumer's side: finds the producer, maps its pool, and copies granted blocks into the landing blocks.
#![allow(unsafe_code, reason = "the copy; the block states why it is sound")]

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
use baton_connector_channel::batching::{ReadBatching, ReadExtent};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::socket::{ChannelError, ChannelSocket};
use baton_connector_channel::{Client, ClientOptions, ConnectError, Connection, Dial};
use socket2::Socket;

use crate::descriptor;
use crate::mapping::{FileId, PoolDescriptor, PoolMapping};
use crate::peer::{self, PeerProof};
use crate::pool::{POOL_BYTES, PoolShape};

pub(crate) const NAME: &str = "shm";

/// The batch between two checks of the lease: about 0.2 ms of copying.
pub(crate) const BATCHING: ReadBatching = ReadBatching { batch_bytes: 1 << 20 };

/// Pause before another connection attempt when the producer's queue is full.
const RETRY: Duration = Duration::from_millis(10);

/// The transport to producers on this host. Any number of threads may use it at once; each call has its own connection.
/// All connections to one producer share one mapping of its pool, which lasts as long as they do.
///
/// For a producer on another host, or in another network namespace, the handshake fails.
pub type ShmTransport = Client<ShmDialer>;

/// Connects to producers on this host.
#[derive(Debug, Default)]
pub struct ShmDialer {
    /// One mapping per producer with a connection. The connections bound their number.
    mappings: Mutex<HashMap<(Epoch, FileId), Weak<PoolMapping>>>,
}

impl Dial for ShmDialer {
    const NAME: &'static str = NAME;
    type Context = ShmContext;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<ShmContext>, ConnectError> {
        let socket = connect(peer, options.connect_timeout, stop)?;
        let proof = PeerProof::of(options.secret.as_ref());
        peer::check_peer(socket.as_fd(), proof).map_err(ConnectError::unreachable)?;
        let mut socket = ChannelSocket::new(socket, options.silence).map_err(ConnectError::unreachable)?;
        let credentials = Credentials {
            secret: options.secret.as_ref(),
            transport: NAME,
            service: Service::ListenerDefault,
        };
        handshake::initiate(&mut socket, credentials, peer, stop)?;
        let (pool, descriptor) = receive_pool(&mut socket, stop)?;
        let mapping = self.mapping(peer.epoch, pool, &descriptor).map_err(ConnectError::unreachable)?;
        Ok(Connection { socket, context: ShmContext(mapping) })
    }

    fn receive(
        &self,
        connection: &mut Connection<ShmContext>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let mapping = &*connection.context.0;
        let extent = ReadExtent::of(order, region).ok_or(ChannelError::Unexpected)?;
        if mapping.pool().block_bytes != extent.block_bytes as u64 {
            return Err(ChannelError::Unexpected);
        }
        let bytes = order.bytes(region.block_bytes());
        BATCHING.receive(&mut connection.socket, extent, bytes, stop, |blocks, ids| match &order.part {
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

/// Copies blocks from a mapping into a region. Blocks that are adjacent on both sides are one copy.
fn copy_blocks(
    mapping: &PoolMapping,
    from: impl Iterator<Item = u32>,
    region: &Region,
    into: &[BlockId],
) -> Result<(), ChannelError> {
    let len = region.block_bytes();
    let mut run: Option<(*const u8, *mut u8, usize)> = None;
    for (from, &into) in from.zip(into) {
        let from = mapping.block(from).ok_or(ChannelError::Unexpected)?;
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

/// Copies piece `index` of a slice from the producer's block `from`.
fn copy_piece(
    mapping: &PoolMapping,
    from: u32,
    slice: &Slice,
    index: usize,
    region: &Region,
    into: &[BlockId],
) -> Result<(), ChannelError> {
    let block = mapping.block(from).ok_or(ChannelError::Unexpected)?;
    for (source, target) in slice.copies(&slice.range.piece(&slice.producer, index)) {
        let landing = region.block_ptr(into[target.entry]);
        copy(Some((block.wrapping_add(source.offset), landing.wrapping_add(target.offset), source.len)));
    }
    Ok(())
}

fn copy(run: Option<(*const u8, *mut u8, usize)>) {
    if let Some((from, into, bytes)) = run {
        // SAFETY: blocks, or runs inside a block, of the mapping and of the region, both alive. The block numbers and
        // sizes were checked, and the runs of a checked slice stay inside blocks of its layouts. The two are different
        // mappings, so their addresses do not overlap (a consumer of its own blocks lands elsewhere in its pool). Only
        // this read uses the landing blocks until its end (invariant 3). The source is leased. After the end of the
        // lease it may be written, and the copy may be torn. The verdict prevents its use, and every value of plain
        // bytes is valid.
        unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
    }
}

/// The data of a connection: the producer's pool.
#[derive(Debug)]
pub struct ShmContext(Arc<PoolMapping>);

impl ShmDialer {
    /// The mapping of a pool: that of other connections, or a new one.
    fn mapping(
        &self,
        epoch: Epoch,
        pool: PoolShape,
        descriptor: &PoolDescriptor,
    ) -> std::io::Result<Arc<PoolMapping>> {
        let key = (epoch, descriptor.id()?);
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        mappings.retain(|_, mapping| mapping.strong_count() > 0);
        let known = mappings.get(&key).and_then(Weak::upgrade).filter(|mapping| mapping.pool() == pool);
        if let Some(mapping) = known {
            return Ok(mapping);
        }
        let mapping = Arc::new(descriptor.map(pool)?);
        mappings.insert(key, Arc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// A socket to the listener with the peer's name. The caller must still check the peer ([`crate::check_peer`] and the
/// handshake).
///
/// # Errors
/// [`ConnectError`] without such a listener on this host and in this network namespace.
pub fn connect(peer: &Peer, timeout: Duration, stop: &StopFlag) -> Result<Socket, ConnectError> {
    let address = peer::address(peer.epoch, peer.address.port()).map_err(ConnectError::unreachable)?;
    let socket = peer::socket().map_err(ConnectError::unreachable)?;
    socket.set_nonblocking(true).map_err(ConnectError::unreachable)?;
    let deadline = Instant::now() + timeout;
    loop {
        match socket.connect(&address) {
            Ok(()) => return Ok(socket),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(ConnectError::unreachable(error)),
        }
        // The listener's queue is full, and there is no event to wait for.
        thread::park_timeout(RETRY);
        if stop.load(Ordering::Acquire) {
            return Err(ConnectError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(ConnectError::Silent(timeout));
        }
    }
}

/// Receives the pool, which a producer sends first to an admitted consumer.
fn receive_pool(
    socket: &mut ChannelSocket,
    stop: &StopFlag,
) -> Result<(PoolShape, PoolDescriptor), ChannelError> {
    let mut bytes = [0; POOL_BYTES];
    let descriptor = descriptor::receive_all(socket, &mut bytes, stop)?;
    let descriptor = descriptor.ok_or(ChannelError::Unexpected)?;
    Ok((PoolShape::decode(bytes), PoolDescriptor::new(descriptor)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;

    #[test]
    fn connections_to_one_producer_share_one_mapping() {
        let (memory, other) =
            (SharedMemory::zeroed(8192).expect("memory"), SharedMemory::zeroed(8192).expect("memory"));
        let passed = |memory: &SharedMemory| {
            PoolDescriptor::new(memory.read_only().try_clone_to_owned().expect("a descriptor"))
        };
        let pool = PoolShape { block_bytes: 4096, blocks: 2 };
        let shm = ShmDialer::default();
        let map = |memory| shm.mapping(Epoch(1), pool, &passed(memory)).expect("it fits");
        let (first, second, third) = (map(&memory), map(&memory), map(&other));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &third));
        drop((first, second, third));
        drop(map(&memory));
        assert_eq!(shm.mappings.lock().expect("no panic").len(), 1, "unused mappings are removed");
    }
}
