//! The consumer's side: connects to the producer, receives its offer, and lets NIXL read granted blocks into the
//! landing blocks.
#![allow(unsafe_code, reason = "posting a read; the block states why it is sound")]

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::batching::{ReadBatching, ReadExtent};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::{Client, ClientOptions, ConnectError, Connection, Dial, dial};

use crate::agents::{AgentGuard, Agents, RemoteAgent};
use crate::api::{Library, NixlError, ReadDescriptor, Segment, TransferState};
use crate::descriptors::{LandingPool, descriptors};
use crate::offer::{DEVICE_BYTES, HEAD_BYTES, Offer, OfferHeader, decode_device_header};
use crate::pool::{DevicePool, LocalPool};
use crate::{BATCHING, DESCRIPTORS_MAX, DEVICE_NAME, NAME};

/// A request that is not over after its post is polled without a pause for this long. A copy within a host takes less.
const SPIN: Duration = Duration::from_micros(50);

/// Pause between two polls after that.
const POLL_PAUSE: Duration = Duration::from_micros(50);

/// The NIXL transport. Any number of threads may use it at once; each call has its own connection, and all share one
/// agent.
///
/// The handshake fails with a producer that does not serve NIXL.
pub type NixlTransport = Client<NixlDialer>;

/// The NIXL transport from device to device. The handshake fails with a producer without a device of the same kind, and
/// with every producer if NIXL refuses the pool of this device.
pub type NixlDeviceTransport = Client<NixlDeviceDialer>;

/// A transport over this library.
#[must_use]
pub fn transport(library: Arc<dyn Library>, options: ClientOptions) -> NixlTransport {
    Client::with_dialer(NixlDialer { agents: Agents::new(library, None) }, options)
}

/// A transport over this library whose blocks land in this pool.
#[must_use]
pub fn device_transport(
    library: Arc<dyn Library>,
    pool: Arc<dyn DevicePool>,
    options: ClientOptions,
) -> NixlDeviceTransport {
    let agents = Agents::new(library, Some(Arc::clone(&pool)));
    Client::with_dialer(NixlDeviceDialer { agents, pool }, options)
}

/// Connects to producers over NIXL.
#[derive(Debug)]
pub struct NixlDialer {
    agents: Arc<Agents>,
}

/// Connects to producers' devices over NIXL.
#[derive(Debug)]
pub struct NixlDeviceDialer {
    agents: Arc<Agents>,
    pool: Arc<dyn DevicePool>,
}

impl NixlDialer {
    /// Agents created so far: one more than were retired because of a request without an observed end.
    #[must_use]
    pub fn agents_made(&self) -> u64 {
        self.agents.created()
    }
}

impl NixlDeviceDialer {
    /// Agents created so far: one more than were retired because of a request without an observed end.
    #[must_use]
    pub fn agents_made(&self) -> u64 {
        self.agents.created()
    }
}

/// The data of a connection: the producer's agent, and the batching of reads.
#[derive(Debug)]
pub struct NixlContext(Arc<RemoteAgent>, ReadBatching);

impl Dial for NixlDialer {
    const NAME: &'static str = NAME;
    type Context = NixlContext;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<NixlContext>, ConnectError> {
        let mut socket = open_channel(options, peer, NAME, Service::Nixl, stop)?;
        let until = deadline(&socket, stop);
        let offer = receive_offer(&mut socket, Segment::Host, until)?;
        let remote = self.agents.remote(offer).map_err(ConnectError::unreachable)?;
        Ok(Connection { socket, context: NixlContext(remote, BATCHING) })
    }

    fn receive(
        &self,
        connection: &mut Connection<NixlContext>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let pool = LocalPool::Host(region.clone());
        receive_batches(&self.agents, &pool, connection, order, region, stop, landed)
    }
}

impl Dial for NixlDeviceDialer {
    const NAME: &'static str = DEVICE_NAME;
    type Context = NixlContext;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<NixlContext>, ConnectError> {
        let mut socket = open_channel(options, peer, DEVICE_NAME, Service::NixlDevice, stop)?;
        let (until, mut kind) = (deadline(&socket, stop), [0; DEVICE_BYTES]);
        socket.receive(&mut kind, until)?;
        let (theirs, batch_bytes) = decode_device_header(kind).map_err(ConnectError::unreachable)?;
        let offer = receive_offer(&mut socket, theirs, until)?;
        let ours = self.pool.memory().map_err(ConnectError::unreachable)?.segment;
        if !matches!((theirs, ours), (Segment::Host, Segment::Host) | (Segment::Cuda(_), Segment::Cuda(_))) {
            let why = format!("the producer's pool is in {theirs}, and ours in {ours}");
            return Err(ConnectError::unreachable(why));
        }
        let remote = self.agents.remote(offer).map_err(ConnectError::unreachable)?;
        Ok(Connection { socket, context: NixlContext(remote, ReadBatching { batch_bytes }) })
    }

    fn receive(
        &self,
        connection: &mut Connection<NixlContext>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let first = BlockId(0);
        if region.block_ptr(first) != self.pool.region().block_ptr(first) {
            return Err(failed(NixlError("the read target is not the device's pool".into())));
        }
        let pool = LocalPool::Device(Arc::clone(&self.pool));
        let landed = receive_batches(&self.agents, &pool, connection, order, region, stop, &mut |_| ())?;
        if landed.is_ok() {
            self.pool.landed(&order.into);
        }
        Ok(landed)
    }
}

/// Connects to a producer that serves this transport and proves the secret.
fn open_channel(
    options: &ClientOptions,
    peer: &Peer,
    transport: &'static str,
    service: Service,
    stop: &StopFlag,
) -> Result<ChannelSocket, ConnectError> {
    let socket = dial(peer.address, options.connect_timeout, stop)?;
    socket.set_tcp_nodelay(true).map_err(ConnectError::unreachable)?;
    let mut socket = ChannelSocket::new(socket, options.silence).map_err(ConnectError::unreachable)?;
    let credentials = Credentials { secret: options.secret.as_ref(), transport, service };
    handshake::initiate(&mut socket, credentials, peer, stop)?;
    Ok(socket)
}

/// Reads the granted batches into a pool of the same shape as `region`.
fn receive_batches(
    agents: &Agents,
    pool: &LocalPool,
    connection: &mut Connection<NixlContext>,
    order: &ReadOrder,
    region: &Region,
    stop: &StopFlag,
    landed: &mut dyn FnMut(&[BlockId]),
) -> Result<Result<(), TransportError>, ChannelError> {
    let (socket, NixlContext(remote, batching)) = (&mut connection.socket, &connection.context);
    let extent = ReadExtent::of(order, region).ok_or(ChannelError::Unexpected)?;
    if remote.offer.block_bytes != extent.block_bytes as u64 {
        return Err(ChannelError::Unexpected);
    }
    let silence = socket.silence();
    let (guard, memory) = agents.acquire(remote, pool).map_err(failed)?;
    let mut guard = Some(guard);
    let bytes = order.bytes(region.block_bytes());
    batching.receive(socket, extent, bytes, stop, |blocks, ids| {
        let landing = LandingPool { region, base: memory.base };
        let descriptors = descriptors(order, landing, &remote.offer, blocks.clone(), ids);
        let descriptors = descriptors.map_err(|_| ChannelError::Unexpected)?;
        for part in descriptors.chunks(DESCRIPTORS_MAX) {
            let using = guard.take().expect("a batch that fails is the last");
            guard = Some(read(using, &remote.offer, memory.segment, part, silence)?);
        }
        if let Part::Blocks { .. } = order.part {
            landed(&order.into[blocks]);
        }
        Ok(())
    })
}

/// Runs one request to its end. Returns the guard only if the end was observed.
fn read(
    guard: AgentGuard,
    offer: &Offer,
    into: Segment,
    descriptors: &[ReadDescriptor],
    silence: Duration,
) -> Result<AgentGuard, ChannelError> {
    if !guard.may_post(silence) {
        return Err(failed(NixlError("the agent is being replaced".into())));
    }
    let agent = guard.agent();
    let request = agent.prepare(&offer.name, offer.segment, into, descriptors).map_err(failed)?;
    let posted = Instant::now();
    // SAFETY: the descriptors are in landing blocks of a registered pool. Only this read uses them until its return
    // (invariant 3), and it returns only after "done" or when the agent is gone.
    let mut state = unsafe { agent.post(&request) };
    let failure = loop {
        match state {
            Ok(TransferState::Done) => {
                agent.release(request);
                return Ok(guard);
            }
            Ok(TransferState::InFlight) if posted.elapsed() >= silence => {
                break ChannelError::Silent(silence);
            }
            Ok(TransferState::InFlight) => {}
            Err(error) => break failed(error),
        }
        if posted.elapsed() < SPIN {
            std::hint::spin_loop();
        } else {
            thread::park_timeout(POLL_PAUSE);
        }
        state = agent.status(&request);
    };
    tracing::warn!(
        event = "nixl_blocks_quarantined", agent = offer.name, error = %failure,
        "NIXL read not completed, blocks quarantined until its agent ends"
    );
    guard.quarantine(request);
    Err(failure)
}

fn failed(error: NixlError) -> ChannelError {
    ChannelError::Io(io::Error::other(error))
}

fn deadline<'a>(socket: &ChannelSocket, stop: &'a StopFlag) -> WaitLimit<'a> {
    WaitLimit::deadline(stop, Instant::now() + socket.silence())
}

/// Receives the offer of a pool in this kind of memory.
fn receive_offer(
    socket: &mut ChannelSocket,
    segment: Segment,
    until: WaitLimit<'_>,
) -> Result<Offer, ChannelError> {
    let refused = |why| ChannelError::Io(io::Error::new(io::ErrorKind::InvalidData, why));
    let mut head = [0; HEAD_BYTES];
    socket.receive(&mut head, until)?;
    let head = OfferHeader::decode(segment, head).map_err(refused)?;
    let mut rest = vec![0; head.rest_bytes()];
    socket.receive(&mut rest, until)?;
    head.complete(&rest).map_err(refused)
}
