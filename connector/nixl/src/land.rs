//! The consumer's side: finds the producer, learns what it offers, and has NIXL read granted blocks into the landing
//! blocks.
#![allow(unsafe_code)] // posting a read; it says why it is sound

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, StopFlag, TransportError};
use baton_connector_channel::grants::Wanted;
use baton_connector_channel::handshake::{self, Credentials, Service};
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::{Client, ClientOptions, Connection, NotAdmitted, Reach, dial};

use crate::agents::{Agents, Remote, Turn};
use crate::api::{Library, NixlError, Piece, State};
use crate::offer::{HEAD_BYTES, Head, Offer};
use crate::pieces::pieces;
use crate::{DESCRIPTORS_MAX, GRANTS, NAME};

/// A request that is not over after its post is asked for without a pause for this long: a copy within a host takes
/// less.
const BUSY: Duration = Duration::from_micros(50);

/// Pause between two questions after that.
const PAUSE: Duration = Duration::from_micros(50);

/// Blocks by NIXL. Used from any number of threads at once; each call has its own connection, and all share one agent.
///
/// A producer that does not serve NIXL is a handshake that failed.
pub type NixlTransport = Client<Nixl>;

/// A transport over this library.
#[must_use]
pub fn transport(library: Arc<dyn Library>, options: ClientOptions) -> NixlTransport {
    Client::with(Nixl { agents: Agents::new(library) }, options)
}

/// How a producer is reached by NIXL.
#[derive(Debug)]
pub struct Nixl {
    agents: Arc<Agents>,
}

impl Nixl {
    /// Agents made so far: one more than were ended because of a request whose end was not seen.
    #[must_use]
    pub fn agents_made(&self) -> u64 {
        self.agents.made()
    }
}

/// What a connection keeps: who is at its other end.
#[derive(Debug)]
pub struct Kept(Arc<Remote>);

impl Reach for Nixl {
    const NAME: &'static str = NAME;
    type Kept = Kept;

    fn connect(
        &self,
        options: &ClientOptions,
        peer: &Peer,
        stop: &StopFlag,
    ) -> Result<Connection<Kept>, NotAdmitted> {
        let socket = dial(peer.address, options.connect_timeout, stop)?;
        socket.set_tcp_nodelay(true).map_err(NotAdmitted::absent)?;
        let mut link = Link::new(socket, options.silence).map_err(NotAdmitted::absent)?;
        let credentials =
            Credentials { secret: options.secret.as_ref(), transport: NAME, service: Service::Nixl };
        handshake::introduce(&mut link, credentials, peer, stop)?;
        let offer = receive_offer(&mut link, stop)?;
        let remote = self.agents.remote(offer).map_err(NotAdmitted::absent)?;
        Ok(Connection { link, kept: Kept(remote) })
    }

    fn receive(
        &self,
        connection: &mut Connection<Kept>,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<Result<(), TransportError>, LinkError> {
        let (link, remote) = (&mut connection.link, &connection.kept.0);
        let wanted = Wanted::of(order, region).ok_or(LinkError::Unexpected)?;
        if remote.offer.block_bytes != wanted.block_bytes as u64 {
            return Err(LinkError::Unexpected);
        }
        let silence = link.silence();
        let mut turn = Some(self.agents.turn(remote, region).map_err(failed)?);
        let bytes = order.bytes(region.block_bytes());
        GRANTS.receive(link, wanted, bytes, stop, |blocks, ids| {
            let pieces =
                pieces(order, region, &remote.offer, blocks, ids).map_err(|_| LinkError::Unexpected)?;
            for part in pieces.chunks(DESCRIPTORS_MAX) {
                let using = turn.take().expect("a batch that fails is the last");
                turn = Some(read(using, &remote.offer, part, silence)?);
            }
            Ok(())
        })
    }
}

/// One request, to its end. Gives the turn back only when that was seen.
fn read(turn: Turn, offer: &Offer, pieces: &[Piece], silence: Duration) -> Result<Turn, LinkError> {
    if !turn.may_go_on(silence) {
        return Err(failed(NixlError("the agent is being replaced".into())));
    }
    let agent = turn.agent();
    let request = agent.prepare(&offer.name, pieces).map_err(failed)?;
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
    tracing::warn!(peer = offer.name, error = %failure, "a NIXL read did not end; its blocks wait until its agent has");
    turn.quarantine(request);
    Err(failure)
}

fn failed(error: NixlError) -> LinkError {
    LinkError::Io(io::Error::other(error))
}

/// What an admitted consumer is sent first.
fn receive_offer(link: &mut Link, stop: &StopFlag) -> Result<Offer, LinkError> {
    let until = Until::deadline(stop, Instant::now() + link.silence());
    let refused = |why| LinkError::Io(io::Error::new(io::ErrorKind::InvalidData, why));
    let mut head = [0; HEAD_BYTES];
    link.receive(&mut head, until)?;
    let head = Head::decode(head).map_err(refused)?;
    let mut rest = vec![0; head.rest_bytes()];
    link.receive(&mut rest, until)?;
    head.complete(&rest).map_err(refused)
}
