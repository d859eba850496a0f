//! The handshake: both ends prove that they know the cluster's secret. Then the producer compares the epoch and the
//! layout, before it accepts requests.
//!
//! ```text
//! Hello   magic 8 │ version 2 │ secret? 1 │ service 1 │ nonce 32 │ epoch 8 │ layout 8  60 bytes
//! Welcome magic 8 │ version 2 │ secret? 1 │ status 1 │ nonce 32 │ proof 32            76 bytes
//! Proof   proof 32
//! Result  status 1
//! ```
//!
//! A proof is HMAC-SHA256 over a role, the transport's name, the Hello and the head of the Welcome. The role prevents
//! the replay of one end's proof to the same end. The name prevents the use of a recorded proof with another transport,
//! which may expose more. A listener may serve several transports, and the service field selects one. A producer
//! refuses an unknown service before any proof. Without a secret, which is allowed only within one machine, proofs are
//! zeros.
//!
//! During a rotation an end may accept two secrets. The last eight bytes of the Hello's nonce are a code of the other
//! bytes. They select the producer's secret, or else its current one. The consumer answers with the secret of the
//! Welcome's proof. So two ends agree if the current secret of one is accepted by the other.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::Secret;
use crate::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector::Epoch;
use baton_connector::transport::{Peer, TransportError};

const MAGIC: [u8; 8] = *b"BATON-KV";
const VERSION: u16 = 2;
const NONCE_BYTES: usize = 32;
/// The random bytes of a Hello's nonce. Its other bytes select the secret: 64 bits, so that no two secrets collide.
const RANDOM_BYTES: usize = NONCE_BYTES - 8;
const PROOF_BYTES: usize = 32;
const HELLO_BYTES: usize = 8 + 2 + 1 + 1 + NONCE_BYTES + 8 + 8;
const WELCOME_HEAD_BYTES: usize = 8 + 2 + 1 + 1 + NONCE_BYTES;
const WELCOME_BYTES: usize = WELCOME_HEAD_BYTES + PROOF_BYTES;

const PRODUCER: &[u8] = b"baton-kv producer";
const CONSUMER: &[u8] = b"baton-kv consumer";
const SELECTION: &[u8] = b"baton-kv secret";

const ADMITTED: u8 = 0;
const GONE: u8 = 1;
const LAYOUT_MISMATCH: u8 = 2;
const UNAUTHENTICATED: u8 = 3;
const BUSY: u8 = 4;
const VERSION_MISMATCH: u8 = 5;
const NOT_SERVED: u8 = 6;
/// [`ADMITTED`] with another service than the listener's own. A producer without the service field answers every Hello
/// with [`ADMITTED`].
const ADMITTED_WITH_SERVICE: u8 = 7;

/// The transport of a listener that a consumer requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The listener's own transport.
    ListenerDefault,
    /// NIXL: block ids and an agent's metadata instead of bytes.
    Nixl,
    /// Device memory: block ids, and an offer that opens the pool on the device.
    Device,
    /// NIXL, for a pool in device memory.
    NixlDevice,
}

impl Service {
    const ALL: [Self; 4] = [Self::ListenerDefault, Self::Nixl, Self::Device, Self::NixlDevice];

    fn byte(self) -> u8 {
        match self {
            Self::ListenerDefault => 0,
            Self::Nixl => 1,
            Self::Device => 2,
            Self::NixlDevice => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|service| service.byte() == byte)
    }

    /// The status of a Welcome that admits this service.
    fn welcome_status(self) -> u8 {
        if self == Self::ListenerDefault { ADMITTED } else { ADMITTED_WITH_SERVICE }
    }
}

/// Why a producer refused a consumer.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The peer uses another protocol.
    #[error("not a baton consumer")]
    BadMagic,
    /// The peer uses another version of this protocol.
    #[error("the consumer uses protocol version {0}, expected {VERSION}")]
    Version(u16),
    /// The consumer has no secret, or another one.
    #[error("the consumer did not prove that it knows the cluster secret")]
    Unauthenticated,
    /// The producer does not serve the requested transport.
    #[error("the consumer requested a transport that this engine does not serve")]
    Service,
    /// The consumer requested another engine start.
    #[error("the consumer requested another epoch")]
    Epoch,
    /// The consumer has another model, or another shape.
    #[error("the consumer's blocks have another layout")]
    Layout,
    /// The connection broke or fell silent.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The system returned no random numbers.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// Why a consumer was not admitted, or did not trust the producer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The caller raised the stop flag.
    #[error("stopped")]
    Stopped,
    /// The producer has another epoch.
    #[error("the producer has another epoch")]
    Gone,
    /// The producer's blocks have another layout.
    #[error("the producer's blocks have another layout")]
    Layout,
    /// The peer accepted the connection and stayed silent.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// The producer could not be reached, or did not prove its identity.
    #[error("{0}")]
    Unreachable(Box<str>),
}

impl ConnectError {
    /// An [`Self::Unreachable`] with this reason.
    pub fn unreachable(why: impl ToString) -> Self {
        Self::Unreachable(why.to_string().into())
    }

    /// The error of the transport.
    #[must_use]
    pub fn into_transport_error(self, peer: &Peer) -> TransportError {
        match self {
            Self::Stopped => TransportError::Stopped,
            Self::Gone => TransportError::Gone,
            Self::Layout => TransportError::Refused(self.to_string().into()),
            Self::Silent(_) | Self::Unreachable(_) => {
                TransportError::Handshake(peer.address, self.to_string().into())
            }
        }
    }
}

impl From<ChannelError> for ConnectError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Stopped => Self::Stopped,
            ChannelError::Silent(silence) => Self::Silent(silence),
            other => Self::unreachable(other),
        }
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], getrandom::Error> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce)?;
    Ok(nonce)
}

/// The secret that both ends prove to know, and the transport of the proof.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// The cluster's secret, if any.
    pub secret: Option<&'a Secret>,
    /// The transport's name.
    pub transport: &'static str,
    /// The service number of this transport.
    pub service: Service,
}

impl Credentials<'_> {
    fn proof(&self, role: &[u8], hello: &[u8], head: &[u8]) -> [u8; PROOF_BYTES] {
        let parts = [role, self.transport.as_bytes(), hello, head];
        self.secret.map_or([0; PROOF_BYTES], |secret| secret.authenticate(&parts))
    }

    /// The accepted secret of this proof. Compares in constant time.
    fn maker_of(&self, role: &[u8], hello: &[u8], head: &[u8], proof: &[u8; PROOF_BYTES]) -> Option<Secret> {
        let parts = [role, self.transport.as_bytes(), hello, head];
        self.secret.and_then(|secret| secret.maker_of(&parts, proof))
    }

    /// The nonce of a Hello, which selects the current secret.
    fn selecting_nonce(&self) -> Result<[u8; NONCE_BYTES], getrandom::Error> {
        let mut nonce = nonce()?;
        let (random, selection) = nonce.split_at_mut(RANDOM_BYTES);
        if let Some(secret) = self.secret {
            selection
                .copy_from_slice(&secret.authenticate(&[SELECTION, random])[..NONCE_BYTES - RANDOM_BYTES]);
        }
        Ok(nonce)
    }

    /// The accepted secret that the nonce of a Hello selects.
    fn selected_by(&self, nonce: &[u8]) -> Option<Secret> {
        let (random, selection) = nonce.split_at(RANDOM_BYTES);
        self.secret.and_then(|secret| secret.maker_of(&[SELECTION, random], selection))
    }
}

fn head(secret: bool, status: u8, nonce: [u8; NONCE_BYTES]) -> [u8; WELCOME_HEAD_BYTES] {
    let mut head = [0; WELCOME_HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..10].copy_from_slice(&VERSION.to_le_bytes());
    (head[10], head[11]) = (u8::from(secret), status);
    head[12..].copy_from_slice(&nonce);
    head
}

fn version(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[8], bytes[9]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes of a fixed message"))
}

/// The Welcome of a producer at its connection limit, for a socket that is closed right after.
pub(crate) fn busy_welcome() -> [u8; WELCOME_BYTES] {
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head(false, BUSY, [0; NONCE_BYTES]));
    welcome
}

/// The producer's side. Returns the requested service, and takes at most `silence` in all. `credentials` returns the
/// credentials of a served transport.
///
/// # Errors
/// [`HandshakeError`]; the caller closes the connection.
pub(crate) fn accept<'a>(
    socket: &mut ChannelSocket,
    credentials: impl Fn(Service) -> Option<Credentials<'a>>,
    epoch: Epoch,
    fingerprint: u64,
    stop: &AtomicBool,
) -> Result<Service, HandshakeError> {
    let until = WaitLimit::deadline(stop, Instant::now() + socket.silence());
    let own = Service::ALL.into_iter().find_map(&credentials);
    let with_secret = own.is_some_and(|own| own.secret.is_some());
    let mut hello = [0; HELLO_BYTES];
    // The first twelve bytes are checked first, so that a foreign protocol with a shorter message is refused at once.
    socket.receive(&mut hello[..12], until)?;
    if hello[..8] != MAGIC {
        return Err(HandshakeError::BadMagic);
    }
    let nonce = nonce().map_err(HandshakeError::Random)?;
    let refuse = |socket: &mut ChannelSocket, status| {
        let mut welcome = [0; WELCOME_BYTES];
        welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head(with_secret, status, nonce));
        socket.send(&welcome, until)
    };
    if version(&hello) != VERSION {
        refuse(socket, VERSION_MISMATCH)?;
        return Err(HandshakeError::Version(version(&hello)));
    }
    socket.receive(&mut hello[12..], until)?;
    if (hello[10] != 0) != with_secret {
        refuse(socket, UNAUTHENTICATED)?;
        return Err(HandshakeError::Unauthenticated);
    }
    let service = Service::from_byte(hello[11]);
    let Some((service, credentials)) = service.and_then(|service| Some((service, credentials(service)?)))
    else {
        refuse(socket, NOT_SERVED)?;
        return Err(HandshakeError::Service);
    };
    let selected = credentials.selected_by(&hello[12..44]);
    let credentials = Credentials { secret: selected.as_ref().or(credentials.secret), ..credentials };
    let head = head(with_secret, service.welcome_status(), nonce);
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head);
    welcome[WELCOME_HEAD_BYTES..].copy_from_slice(&credentials.proof(PRODUCER, &hello, &head));
    socket.send(&welcome, until)?;

    let mut theirs = [0; PROOF_BYTES];
    socket.receive(&mut theirs, until)?;
    let proven = credentials.maker_of(CONSUMER, &hello, &head, &theirs).is_some();
    let (status, result) = if proven != with_secret {
        (UNAUTHENTICATED, Err(HandshakeError::Unauthenticated))
    } else if u64_at(&hello, 44) != epoch.0 {
        (GONE, Err(HandshakeError::Epoch))
    } else if u64_at(&hello, 52) != fingerprint {
        (LAYOUT_MISMATCH, Err(HandshakeError::Layout))
    } else {
        (ADMITTED, Ok(service))
    };
    socket.send(&[status], until)?;
    result
}

/// The consumer's side. Takes at most `silence` in all.
///
/// # Errors
/// [`ConnectError`]; the caller closes the connection.
pub fn initiate(
    socket: &mut ChannelSocket,
    credentials: Credentials<'_>,
    peer: &Peer,
    stop: &AtomicBool,
) -> Result<(), ConnectError> {
    let until = WaitLimit::deadline(stop, Instant::now() + socket.silence());
    let nonce = credentials.selecting_nonce().map_err(ConnectError::unreachable)?;
    let with_secret = credentials.secret.is_some();
    let mut hello = [0; HELLO_BYTES];
    hello[..WELCOME_HEAD_BYTES].copy_from_slice(&head(with_secret, credentials.service.byte(), nonce));
    hello[44..52].copy_from_slice(&peer.epoch.0.to_le_bytes());
    hello[52..60].copy_from_slice(&peer.fingerprint.to_le_bytes());
    socket.send(&hello, until)?;

    let mut welcome = [0; WELCOME_BYTES];
    socket.receive(&mut welcome, until)?;
    let (head, theirs) = welcome.split_last_chunk().expect("a Welcome ends with a proof");
    if head[..8] != MAGIC {
        return Err(ConnectError::unreachable("not a baton producer"));
    }
    match head[11] {
        status if status == credentials.service.welcome_status() => {}
        ADMITTED | ADMITTED_WITH_SERVICE | NOT_SERVED => {
            return Err(ConnectError::unreachable("the producer does not serve this transport"));
        }
        BUSY => return Err(ConnectError::unreachable("the producer has no connection free")),
        VERSION_MISMATCH => {
            return Err(ConnectError::unreachable(format!(
                "the producer uses protocol version {}, expected {VERSION}",
                version(head)
            )));
        }
        _ => {
            return Err(ConnectError::unreachable(
                "the producer and this engine do not share a cluster secret",
            ));
        }
    }
    let shared = (head[10] != 0) == with_secret;
    let maker = credentials.maker_of(PRODUCER, &hello, head, theirs);
    if version(head) != VERSION || !shared || maker.is_some() != with_secret {
        return Err(ConnectError::unreachable("the producer did not prove that it knows the cluster secret"));
    }
    let credentials = Credentials { secret: maker.as_ref(), ..credentials };
    socket.send(&credentials.proof(CONSUMER, &hello, head), until)?;

    let mut status = [0];
    socket.receive(&mut status, until)?;
    match status[0] {
        ADMITTED => Ok(()),
        GONE => Err(ConnectError::Gone),
        LAYOUT_MISMATCH => Err(ConnectError::Layout),
        _ => Err(ConnectError::unreachable("the producer does not accept this engine's cluster secret")),
    }
}

const _: () = assert!(HELLO_BYTES == 60 && WELCOME_BYTES == 76);

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    /// Runs both sides of a handshake, the consumer's with the second transport name.
    fn handshake(
        here: &'static str,
        (there, service): (&'static str, Service),
    ) -> (Result<Service, HandshakeError>, Result<(), ConnectError>) {
        let secret = Secret::new(b"a secret of the cluster").expect("long enough");
        handshake_with([&secret; 2], here, (there, service))
    }

    /// As [`handshake`], with the secrets of producer and consumer.
    fn handshake_with(
        [ours, theirs]: [&Secret; 2],
        here: &'static str,
        (there, service): (&'static str, Service),
    ) -> (Result<Service, HandshakeError>, Result<(), ConnectError>) {
        let go = AtomicBool::new(false);
        let (producer, consumer) = UnixStream::pair().expect("a pair");
        let socket = |stream: UnixStream| {
            ChannelSocket::new(OwnedFd::from(stream).into(), Duration::from_secs(5)).expect("a socket")
        };
        let (mut producer, mut consumer) = (socket(producer), socket(consumer));
        let served = |service| {
            let transport = if service == Service::Nixl { "nixl" } else { here };
            let offered = here == "both" || service == Service::ListenerDefault;
            offered.then_some(Credentials { secret: Some(ours), transport, service })
        };
        let peer = Peer { address: ([127, 0, 0, 1], 1).into(), epoch: Epoch(1), fingerprint: 2 };
        thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let result = accept(&mut producer, served, peer.epoch, peer.fingerprint, &go);
                drop(producer);
                result
            });
            let requested = Credentials { secret: Some(theirs), transport: there, service };
            let initiated = initiate(&mut consumer, requested, &peer, &go);
            drop(consumer);
            (accepted.join().expect("no panic"), initiated)
        })
    }

    #[test]
    fn a_proof_is_valid_for_one_transport_only() {
        let own = Service::ListenerDefault;
        assert!(matches!(handshake("tcp", ("tcp", own)), (Ok(Service::ListenerDefault), Ok(()))));
        let (accepted, initiated) = handshake("shm", ("tcp", own));
        assert!(accepted.is_err() && matches!(initiated, Err(ConnectError::Unreachable(_))), "{initiated:?}");
    }

    #[test]
    fn two_ends_agree_if_one_accepts_the_current_secret_of_the_other() {
        let secret = |text: &str| Secret::new(text.as_bytes()).expect("long enough");
        let (old, new) = (secret("the previous secret"), secret("the current secret"));
        let both = new.clone().with_previous(b"the previous secret").expect("long enough");
        let swapped = old.clone().with_previous(b"the current secret").expect("long enough");
        let own = ("tcp", Service::ListenerDefault);
        for ends in [
            [&old, &both],
            [&both, &old],
            [&both, &both],
            [&new, &both],
            [&both, &new],
            [&both, &swapped],
            [&swapped, &both],
        ] {
            let (accepted, initiated) = handshake_with(ends, "tcp", own);
            assert!(accepted.is_ok() && initiated.is_ok(), "{accepted:?} {initiated:?}");
        }
        let others =
            secret("the secret of others").with_previous(b"and its previous one").expect("long enough");
        for ends in [[&old, &new], [&new, &old], [&both, &others], [&others, &both]] {
            let (accepted, initiated) = handshake_with(ends, "tcp", own);
            assert!(accepted.is_err(), "{accepted:?}");
            assert!(matches!(initiated, Err(ConnectError::Unreachable(_))), "{initiated:?}");
        }
    }

    #[test]
    fn one_listener_serves_several_transports_and_rejects_the_others() {
        assert!(matches!(
            handshake("both", ("both", Service::ListenerDefault)),
            (Ok(Service::ListenerDefault), Ok(()))
        ));
        assert!(matches!(handshake("both", ("nixl", Service::Nixl)), (Ok(Service::Nixl), Ok(()))));
        let (accepted, initiated) = handshake("tcp", ("nixl", Service::Nixl));
        assert!(matches!(accepted, Err(HandshakeError::Service)), "{accepted:?}");
        assert!(matches!(initiated, Err(ConnectError::Unreachable(_))), "{initiated:?}");
        let (accepted, initiated) = handshake("both", ("tcp", Service::Nixl));
        assert!(accepted.is_err() && initiated.is_err(), "another transport's proof");
    }
}
