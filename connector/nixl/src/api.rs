//! NIXL as this crate needs it. Two implementations: the library's C interface, and the tests' simulated agents, which
//! have the library's traps.
#![allow(unsafe_code)] // the two calls that hand memory to a transfer are unsafe to call; nothing is dereferenced here

use std::fmt::{self, Debug};

/// Why a call of NIXL failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NIXL: {0}")]
pub struct NixlError(pub Box<str>);

/// What an agent is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It reads, and makes progress when it is asked how a request stands.
    Initiator,
    /// It is read from, and makes progress by itself.
    Target,
}

/// How a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Bytes may still be written into the landing memory.
    InFlight,
    /// Everything is there, and nothing more is written.
    Done,
}

/// What kind of memory an address is of. NIXL is told for each side of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// Host memory.
    Host,
    /// Memory of a CUDA device, by the number that it has in its process.
    Cuda(u32),
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => write!(f, "host memory"),
            Self::Cuda(ordinal) => write!(f, "memory of CUDA device {ordinal}"),
        }
    }
}

/// Memory that an agent may be given. Only host memory can be touched at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Memory {
    /// What it is.
    pub segment: Segment,
    /// Its first byte.
    pub base: usize,
    /// Bytes.
    pub len: usize,
}

/// One contiguous part of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its address in the producer's process.
    pub from: usize,
    /// Its address in this process.
    pub into: usize,
    /// Bytes.
    pub len: usize,
}

/// A prepared request of one agent. Opaque; given back by [`Agent::release`].
#[derive(Debug, PartialEq, Eq)]
pub struct Request(pub u64);

/// A NIXL library.
pub trait Library: Debug + Send + Sync {
    /// Where it was found.
    fn origin(&self) -> &str;

    /// Makes an agent with the UCX backend. No two agents of a cluster may have one name. May take half a second.
    ///
    /// # Errors
    /// [`NixlError`].
    fn agent(&self, name: &str, side: Side) -> Result<Box<dyn Agent>, NixlError>;
}

/// One agent. Its end (drop) ends every transfer of it: afterwards nothing writes into its memory.
pub trait Agent: Send + Sync {
    /// Registers memory for reads from it and into it.
    ///
    /// # Errors
    /// [`NixlError`].
    ///
    /// # Safety
    /// The memory is there, and of that kind, until the agent has been dropped.
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError>;

    /// What another agent needs to read from this one's registered memory.
    ///
    /// # Errors
    /// [`NixlError`].
    fn metadata(&self) -> Result<Vec<u8>, NixlError>;

    /// Whose metadata this says to be, as far as that can be told without loading it.
    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        let _ = metadata;
        None
    }

    /// Makes another agent known by its metadata and returns its name.
    ///
    /// # Errors
    /// [`NixlError`].
    fn add(&self, metadata: &[u8]) -> Result<String, NixlError>;

    /// Forgets another agent. Not while a request to it is in flight.
    fn remove(&self, peer: &str);

    /// Prepares a read of another agent's memory `from` one kind `into` one of ours. Nothing moves yet.
    ///
    /// # Errors
    /// [`NixlError`].
    fn prepare(
        &self,
        peer: &str,
        from: Segment,
        into: Segment,
        pieces: &[Piece],
    ) -> Result<Request, NixlError>;

    /// Starts a read, and may do all of it. **An error does not mean that nothing is in flight.**
    ///
    /// # Errors
    /// [`NixlError`].
    ///
    /// # Safety
    /// The pieces' memory belongs to nobody else until this, or [`Self::status`], has said [`State::Done`], or the
    /// agent has been dropped.
    unsafe fn post(&self, request: &Request) -> Result<State, NixlError>;

    /// How a read stands. **An error does not mean that nothing is in flight.**
    ///
    /// # Errors
    /// [`NixlError`].
    fn status(&self, request: &Request) -> Result<State, NixlError>;

    /// Gives a request back. **Does not end it.**
    fn release(&self, request: Request);
}
