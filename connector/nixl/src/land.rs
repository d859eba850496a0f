//! The consumer's side: finds the producer, learns what it offers, and has NIXL read granted blocks into the landing
//! blocks.
#![allow(unsafe_code)] // posting a read; it says why it is sound

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::grants::{Grants, Wanted};
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach, dial};

use crate::agents::{Agents, Remote, Turn};
use crate::api::{Library, NixlError, Piece, Segment, State};
use crate::offer::{DEVICE_BYTES, HEAD_BYTES, Head, Offer, announced};
use crate::pieces::pieces;
use crate::pool::{DevicePool, Own};
use crate::{DESCRIPTORS_MAX, DEVICE_NAME, GRANTS, NAME};

/// A request that is not over after its post is asked for without a pause for this long: a copy within a host takes
/// less.
const BUSY: Duration = Duration::from_micros(50);

/// Pause between two questions after that.
const PAUSE: Duration = Duration::from_micros(50);

/// Blocks by NIXL. Used from any number of threads at once; each call has its own connection, and all share one agent.
///
/// A producer that does not serve NIXL is a handshake that failed.
pub type NixlTransport = Client<Nixl>;

/// The same, from a producer's device into ours. A producer that is not on a device of our kind is a handshake that failed,
/// and so are all where NIXL does not take our pool.
pub type NixlDeviceTransport = Client<NixlDevice>;

/// A transport over this library.
#[must_use]
pub fn transport(library: Arc<dyn Library>, options: ClientOptions) -> NixlTransport {
    Client::with(Nixl { agents: Agents::new(library, None) }, options)
}

/// A transport over this library that lands in this pool.
#[must_use]
pub fn device_transport(
    library: Arc<dyn Library>,
    pool: Arc<dyn DevicePool>,
    options: ClientOptions,
) -> NixlDeviceTransport {
    let agents = Agents::new(library, Some(Arc::clone(&pool)));
    Client::with(NixlDevice { agents, pool }, options)
}

/// How a producer is reached by NIXL.
#[derive(Debug)]
pub struct Nixl {
    agents: Arc<Agents>,
}

/// How a producer's device is.
#[derive(Debug)]
pub struct NixlDevice {
    agents: Arc<Agents>,
    pool: Arc<dyn DevicePool>,
}

impl Nixl {
    /// Agents made so far: one more than were ended because of a request whose end was not seen.
    #[must_use]
    pub fn agents_made(&self) -> u64 {
        self.agents.made()
    }
}

impl NixlDevice {
    /// Agents made so far: one more than were ended because of a request whose end was not seen.
    #[must_use]
    pub fn agents_made(&self) -> u64 {
        self.agents.made()
    }
}

/// What a connection keeps: who is at its other end, and how reads are cut.
#[derive(Debug)]
pub struct Kept(Arc<Remote>, Grants);

impl Reach for Nixl {
    const NAME: &'static str = NAME;
    type Kept = Kept;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let mut link = admitted(options, peer, (NAME, Service::Nixl), stop)?;
        let until = deadline(&link, stop);
        let offer = receive_offer(&mut link, Segment::Host, until)?;
        let remote = self.agents.remote(offer).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(remote, GRANTS) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError> {
        let pool = Own::Host(region.clone());
        land(&self.agents, &pool, connection, (order, region), stop, landed)
    }
}

impl Reach for NixlDevice {
    const NAME: &'static str = DEVICE_NAME;
    type Kept = Kept;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let mut link = admitted(options, peer, (DEVICE_NAME, Service::NixlDevice), stop)?;
        let (until, mut kind) = (deadline(&link, stop), [0; DEVICE_BYTES]);
        link.receive(&mut kind, until)?;
        let (theirs, batch_bytes) = announced(kind).map_err(NotAdmitted::absent)?;
        let offer = receive_offer(&mut link, theirs, until)?;
        let ours = self.pool.memory().map_err(NotAdmitted::absent)?.segment;
        if !matches!((theirs, ours), (Segment::Host, Segment::Host) | (Segment::Cuda(_), Segment::Cuda(_))) {
            let why = format!("the producer's pool is in {theirs}, and ours in {ours}");
            return Err(NotAdmitted::absent(why));
        }
        let remote = self.agents.remote(offer).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(remote, Grants { batch_bytes }) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<Result<(), TransportError>, LinkError> {
        let first = BlockId(0);
        if region.block_ptr(first) != self.pool.region().block_ptr(first) {
            return Err(failed(NixlError("the read target is not the device's pool".into())));
        }
        let pool = Own::Device(Arc::clone(&self.pool));
        let landed = land(&self.agents, &pool, connection, (order, region), stop, &mut |_| ())?;
        if landed.is_ok() {
            self.pool.landed(&order.into);
        }
        Ok(landed)
    }
}

/// A connection to a producer that serves this and knows our secret.
fn admitted(
    options: &ClientOptions,
    peer: &Peer,
    (transport, service): (&'static str, Service),
    stop: &StopFlag,
) -> Result<Link, NotAdmitted> {
    let socket = dial(peer.address, options.connect_timeout, stop)?;
    socket.set_tcp_nodelay(true).map_err(NotAdmitted::absent)?;
    let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
    let credentials = Credentials { secret: options.secret.as_ref(), transport, service };
    handshake::introduce(&mut link, credentials, peer, stop)?;
    Ok(link)
}

/// Reads what is granted into a pool that is cut like `region`.
fn land(
    agents: &Agents,
    pool: &Own,
    connection: &mut Connection<Kept>,
    (order, region): (&ReadOrder, &Region),
    stop: &StopFlag,
    landed: &mut dyn FnMut(&[BlockId]),
) -> Result<Result<(), TransportError>, LinkError> {
    let (link, Kept(remote, grants)) = (&mut connection.link, &connection.kept);
    let wanted = Wanted::of(order, region).ok_or(LinkError::Unexpected)?;
    if remote.offer.block_bytes != wanted.block_bytes as u64 {
        return Err(LinkError::Unexpected);
    }
    let silence = link.silence();
    let (turn, memory) = agents.turn(remote, pool).map_err(failed)?;
    let mut turn = Some(turn);
    let bytes = order.bytes(region.block_bytes());
    grants.receive(link, wanted, bytes, stop, |blocks, ids| {
        let landing = (region, memory.base);
        let pieces = pieces(order, landing, &remote.offer, blocks.clone(), ids);
        let pieces = pieces.map_err(|_| LinkError::Unexpected)?;
        for part in pieces.chunks(DESCRIPTORS_MAX) {
            let using = turn.take().expect("a batch that fails is the last");
            turn = Some(read(using, &remote.offer, memory.segment, part, silence)?);
        }
        if let Part::Blocks { .. } = order.part {
            landed(&order.into[blocks]);
        }
        Ok(())
    })
}

/// One request, to its end. Gives the turn back only when that was seen.
fn read(
    turn: Turn,
    offer: &Offer,
    into: Segment,
    pieces: &[Piece],
    silence: Duration,
) -> Result<Turn, LinkError> {
    if !turn.may_go_on(silence) {
        return Err(failed(NixlError("the agent is being replaced".into())));
    }
    let agent = turn.agent();
    let request = agent.prepare(&offer.name, offer.segment, into, pieces).map_err(failed)?;
    let posted = Instant::now();
    // SAFETY: the pieces lie in landing blocks of a pool that the agent knows, which are this read's alone until it
    // returns (invariant 3), and it returns only after "done" or when the agent is gone.
    let mut state = unsafe { agent.post(&request) };
    let failure = loop {
        match state {
            Ok(State::Done) => {
                agent.release(request);
                return Ok(turn);
            }
            Ok(State::InFlight) if posted.elapsed() >= silence => break LinkError::Silent(silence),
            Ok(State::InFlight) => {}
            Err(error) => break failed(error),
        }
        if posted.elapsed() < BUSY {
            std::hint::spin_loop();
        } else {
            thread::park_timeout(PAUSE);
        }
        state = agent.status(&request);
    };
    tracing::warn!(peer = offer.name, error = %failure, "NIXL read not completed, blocks quarantined until its agent ends");
    turn.quarantine(request);
    Err(failure)
}

fn failed(error: NixlError) -> LinkError {
    LinkError::Io(io::Error::other(error))
}

fn deadline<'a>(link: &Link, stop: &'a StopFlag) -> Until<'a> {
    Until::deadline(stop, Instant::now() + link.silence())
}

/// What an admitted consumer is sent, of a pool in this kind of memory.
fn receive_offer(link: &mut Link, segment: Segment, until: Until<'_>) -> Result<Offer, LinkError> {
    let refused = |why| LinkError::Io(io::Error::new(io::ErrorKind::InvalidData, why));
    let mut head = [0; HEAD_BYTES];
    link.receive(&mut head, until)?;
    let head = Head::decode(segment, head).map_err(refused)?;
    let mut rest = vec![0; head.rest_bytes()];
    link.receive(&mut rest, until)?;
    head.complete(&rest).map_err(refused)
}
