//! The handshake: both ends prove that they know the cluster's secret, then the producer compares the epoch
//! and the layout before it listens to anything else.
//!
//! ```text
//! Hello   magic 8 │ version 2 │ secret? 1 │ service 1 │ nonce 32 │ epoch 8 │ layout 8  60 bytes
//! Welcome magic 8 │ version 2 │ secret? 1 │ status 1 │ nonce 32 │ proof 32            76 bytes
//! Proof   proof 32
//! Result  status 1
//! ```
//!
//! A proof is HMAC-SHA256 over a role, the transport's name, the Hello and the head of the Welcome. The role keeps
//! one end's proof from being played back to it; the name keeps a proof that was overheard on one transport from
//! opening another, which may show more. A listener may serve several transports: the service says which is wanted,
//! and a producer that does not serve it says so before anything is proved. Without a secret, which is allowed within one machine only, proofs are
//! zeros and nothing is proved.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use baton_connector::Epoch;
use baton_connector::transport::{Peer, TransportError};
use hmac::Mac;

use crate::Secret;
use crate::link::{Link, LinkError, Until};

const MAGIC: [u8; 8] = *b"BATON-KV";
const VERSION: u16 = 2;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const HELLO_BYTES: usize = 8 + 2 + 1 + 1 + NONCE_BYTES + 8 + 8;
const WELCOME_HEAD_BYTES: usize = 8 + 2 + 1 + 1 + NONCE_BYTES;
const WELCOME_BYTES: usize = WELCOME_HEAD_BYTES + PROOF_BYTES;

const PRODUCER: &[u8] = b"baton-kv producer";
const CONSUMER: &[u8] = b"baton-kv consumer";

const GO_ON: u8 = 0;
const GONE: u8 = 1;
const OTHER_LAYOUT: u8 = 2;
const NO_PROOF: u8 = 3;
const BUSY: u8 = 4;
const OTHER_VERSION: u8 = 5;
const NOT_SERVED: u8 = 6;
/// [`GO_ON`], where something else than the listener's own service was asked for. One who does not know of services
/// says [`GO_ON`] to every Hello.
const GO_ON_WITH_SERVICE: u8 = 7;

/// Which of a listener's transports a consumer wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The one that the listener is for.
    OfListener,
    /// NIXL: block ids and an agent's metadata instead of bytes.
    Nixl,
    /// A device's memory: block ids, and what opens the pool on the device.
    Device,
    /// NIXL, for a pool in a device's memory.
    NixlDevice,
}

impl Service {
    const ALL: [Self; 4] = [Self::OfListener, Self::Nixl, Self::Device, Self::NixlDevice];

    fn byte(self) -> u8 {
        match self {
            Self::OfListener => 0,
            Self::Nixl => 1,
            Self::Device => 2,
            Self::NixlDevice => 3,
        }
    }

    fn known(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|service| service.byte() == byte)
    }

    /// What the Welcome says when it is served.
    fn welcome(self) -> u8 {
        if self == Self::OfListener { GO_ON } else { GO_ON_WITH_SERVICE }
    }
}

/// Why a producer did not let a consumer in.
#[derive(Debug, thiserror::Error)]
pub enum TurnedAway {
    /// Whatever it speaks, it is not this.
    #[error("not a baton consumer")]
    Stranger,
    /// Another version of this.
    #[error("the consumer uses protocol version {0}, expected {VERSION}")]
    Version(u16),
    /// No secret, or another one.
    #[error("the consumer did not prove that it knows the cluster secret")]
    Unproved,
    /// A transport that is not served here.
    #[error("the consumer requested a transport that this engine does not serve")]
    Service,
    /// An engine start that is over.
    #[error("the consumer requested another epoch")]
    Epoch,
    /// Another model, or another shape.
    #[error("the consumer's blocks have another layout")]
    Layout,
    /// The connection broke or fell silent.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The system has none.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// Why a consumer was not let in, or did not trust who answered.
#[derive(Debug, thiserror::Error)]
pub enum NotAdmitted {
    /// The caller raised the stop flag.
    #[error("stopped")]
    Stopped,
    /// The producer has another epoch.
    #[error("the producer has another epoch")]
    Gone,
    /// The producer's blocks have another layout.
    #[error("the producer's blocks have another layout")]
    Layout,
    /// Somebody is there and says nothing.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// Nobody is there, or nobody who proved who he is.
    #[error("{0}")]
    Absent(Box<str>),
}

impl NotAdmitted {
    /// Nobody is there, or nobody to be trusted, for this reason.
    pub fn absent(why: impl ToString) -> Self {
        Self::Absent(why.to_string().into())
    }

    /// What a transport says of it.
    #[must_use]
    pub fn of(self, peer: &Peer) -> TransportError {
        match self {
            Self::Stopped => TransportError::Stopped,
            Self::Gone => TransportError::Gone,
            Self::Layout => TransportError::Refused(self.to_string().into()),
            Self::Silent(_) | Self::Absent(_) => {
                TransportError::Handshake(peer.address, self.to_string().into())
            }
        }
    }
}

impl From<LinkError> for NotAdmitted {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Stopped => Self::Stopped,
            LinkError::Silent(silence) => Self::Silent(silence),
            other => Self::absent(other),
        }
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], getrandom::Error> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce)?;
    Ok(nonce)
}

/// What both ends prove that they know, and for which transport.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// The cluster's secret, if there is one.
    pub secret: Option<&'a Secret>,
    /// The transport's name.
    pub transport: &'static str,
    /// How a listener of several transports finds this one.
    pub service: Service,
}

impl Credentials<'_> {
    fn proof(&self, role: &[u8], hello: &[u8], head: &[u8]) -> [u8; PROOF_BYTES] {
        let parts = [role, self.transport.as_bytes(), hello, head];
        self.secret.map_or([0; PROOF_BYTES], |secret| secret.mac(&parts).finalize().into_bytes().into())
    }

    /// Compares in constant time.
    fn proved(&self, role: &[u8], hello: &[u8], head: &[u8], proof: &[u8]) -> bool {
        let parts = [role, self.transport.as_bytes(), hello, head];
        self.secret.is_none_or(|secret| secret.mac(&parts).verify_slice(proof).is_ok())
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

/// The whole refusal of a producer that has no room, for a socket that is closed right after.
pub(crate) fn busy() -> [u8; WELCOME_BYTES] {
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head(false, BUSY, [0; NONCE_BYTES]));
    welcome
}

/// The producer's side; says which service was asked for. Takes at most `silence` in all, however slowly the bytes
/// trickle in. `credentials` has those of what is served here.
///
/// # Errors
/// [`TurnedAway`]; the connection is to be closed.
pub(crate) fn answer<'a>(
    link: &mut Link,
    credentials: impl Fn(Service) -> Option<Credentials<'a>>,
    (epoch, fingerprint): (Epoch, u64),
    stop: &AtomicBool,
) -> Result<Service, TurnedAway> {
    let until = Until::deadline(stop, Instant::now() + link.silence());
    let own = Service::ALL.into_iter().find_map(&credentials);
    let with_secret = own.is_some_and(|own| own.secret.is_some());
    let mut hello = [0; HELLO_BYTES];
    // The first twelve bytes decide: a stranger that sends less than a whole Hello is not waited for.
    link.receive(&mut hello[..12], until)?;
    if hello[..8] != MAGIC {
        return Err(TurnedAway::Stranger);
    }
    let nonce = nonce().map_err(TurnedAway::Random)?;
    let refuse = |link: &mut Link, status| {
        let mut welcome = [0; WELCOME_BYTES];
        welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head(with_secret, status, nonce));
        link.send(&welcome, until)
    };
    if version(&hello) != VERSION {
        refuse(link, OTHER_VERSION)?;
        return Err(TurnedAway::Version(version(&hello)));
    }
    link.receive(&mut hello[12..], until)?;
    if (hello[10] != 0) != with_secret {
        refuse(link, NO_PROOF)?;
        return Err(TurnedAway::Unproved);
    }
    let service = Service::known(hello[11]);
    let Some((service, credentials)) = service.and_then(|service| Some((service, credentials(service)?)))
    else {
        refuse(link, NOT_SERVED)?;
        return Err(TurnedAway::Service);
    };
    let head = head(with_secret, service.welcome(), nonce);
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..WELCOME_HEAD_BYTES].copy_from_slice(&head);
    welcome[WELCOME_HEAD_BYTES..].copy_from_slice(&credentials.proof(PRODUCER, &hello, &head));
    link.send(&welcome, until)?;

    let mut theirs = [0; PROOF_BYTES];
    link.receive(&mut theirs, until)?;
    let (status, result) = if !credentials.proved(CONSUMER, &hello, &head, &theirs) {
        (NO_PROOF, Err(TurnedAway::Unproved))
    } else if u64_at(&hello, 44) != epoch.0 {
        (GONE, Err(TurnedAway::Epoch))
    } else if u64_at(&hello, 52) != fingerprint {
        (OTHER_LAYOUT, Err(TurnedAway::Layout))
    } else {
        (GO_ON, Ok(service))
    };
    link.send(&[status], until)?;
    result
}

/// The consumer's side. Takes at most `silence` in all.
///
/// # Errors
/// [`NotAdmitted`]; the connection is to be closed.
pub fn introduce(
    link: &mut Link,
    credentials: Credentials<'_>,
    peer: &Peer,
    stop: &AtomicBool,
) -> Result<(), NotAdmitted> {
    let until = Until::deadline(stop, Instant::now() + link.silence());
    let nonce = nonce().map_err(NotAdmitted::absent)?;
    let with_secret = credentials.secret.is_some();
    let mut hello = [0; HELLO_BYTES];
    hello[..WELCOME_HEAD_BYTES].copy_from_slice(&head(with_secret, credentials.service.byte(), nonce));
    hello[44..52].copy_from_slice(&peer.epoch.0.to_le_bytes());
    hello[52..60].copy_from_slice(&peer.fingerprint.to_le_bytes());
    link.send(&hello, until)?;

    let mut welcome = [0; WELCOME_BYTES];
    link.receive(&mut welcome, until)?;
    let (head, theirs) = welcome.split_at(WELCOME_HEAD_BYTES);
    if head[..8] != MAGIC {
        return Err(NotAdmitted::absent("not a baton producer"));
    }
    match head[11] {
        status if status == credentials.service.welcome() => {}
        GO_ON | GO_ON_WITH_SERVICE | NOT_SERVED => {
            return Err(NotAdmitted::absent("the producer does not serve this transport"));
        }
        BUSY => return Err(NotAdmitted::absent("the producer has no connection free")),
        OTHER_VERSION => {
            return Err(NotAdmitted::absent(format!(
                "the producer uses protocol version {}, expected {VERSION}",
                version(head)
            )));
        }
        _ => return Err(NotAdmitted::absent("the producer and this engine do not share a cluster secret")),
    }
    let shared = (head[10] != 0) == with_secret;
    if version(head) != VERSION || !shared || !credentials.proved(PRODUCER, &hello, head, theirs) {
        return Err(NotAdmitted::absent("the producer did not prove that it knows the cluster secret"));
    }
    link.send(&credentials.proof(CONSUMER, &hello, head), until)?;

    let mut status = [0];
    link.receive(&mut status, until)?;
    match status[0] {
        GO_ON => Ok(()),
        GONE => Err(NotAdmitted::Gone),
        OTHER_LAYOUT => Err(NotAdmitted::Layout),
        _ => Err(NotAdmitted::absent("the producer does not accept this engine's cluster secret")),
    }
}

const _: () = assert!(HELLO_BYTES == 60 && WELCOME_BYTES == 76);

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    /// Both sides of a handshake, the consumer's with a transport of this name.
    fn meet(
        here: &'static str,
        (there, service): (&'static str, Service),
    ) -> (Result<Service, TurnedAway>, Result<(), NotAdmitted>) {
        let secret = Secret::new(b"a secret of the cluster").expect("long enough");
        let go = AtomicBool::new(false);
        let (producer, consumer) = UnixStream::pair().expect("a pair");
        let link = |socket: UnixStream| {
            Link::new(OwnedFd::from(socket).into(), Duration::from_secs(5)).expect("a socket")
        };
        let (mut producer, mut consumer) = (link(producer), link(consumer));
        let served = |service| {
            let transport = if service == Service::Nixl { "nixl" } else { here };
            let offered = here == "both" || service == Service::OfListener;
            offered.then_some(Credentials { secret: Some(&secret), transport, service })
        };
        let peer = Peer { address: ([127, 0, 0, 1], 1).into(), epoch: Epoch(1), fingerprint: 2 };
        thread::scope(|scope| {
            let answered = scope.spawn(|| {
                let result = answer(&mut producer, served, (Epoch(1), 2), &go);
                drop(producer);
                result
            });
            let wanted = Credentials { secret: Some(&secret), transport: there, service };
            let introduced = introduce(&mut consumer, wanted, &peer, &go);
            drop(consumer);
            (answered.join().expect("no panic"), introduced)
        })
    }

    #[test]
    fn a_proof_for_one_transport_opens_no_other() {
        let own = Service::OfListener;
        assert!(matches!(meet("tcp", ("tcp", own)), (Ok(Service::OfListener), Ok(()))));
        let (answered, introduced) = meet("shm", ("tcp", own));
        assert!(answered.is_err() && matches!(introduced, Err(NotAdmitted::Absent(_))), "{introduced:?}");
    }

    #[test]
    fn one_listener_serves_several_transports_and_says_which_it_does_not() {
        assert!(matches!(meet("both", ("both", Service::OfListener)), (Ok(Service::OfListener), Ok(()))));
        assert!(matches!(meet("both", ("nixl", Service::Nixl)), (Ok(Service::Nixl), Ok(()))));
        let (answered, introduced) = meet("tcp", ("nixl", Service::Nixl));
        assert!(matches!(answered, Err(TurnedAway::Service)), "{answered:?}");
        assert!(matches!(introduced, Err(NotAdmitted::Absent(_))), "{introduced:?}");
        let (answered, introduced) = meet("both", ("tcp", Service::Nixl));
        assert!(answered.is_err() && introduced.is_err(), "another transport's proof");
    }
}
