//! The interface to NIXL. There are two implementations: the library's C interface, and the simulated agents of the
//! tests, which have the hazards of the library.
#![allow(
    unsafe_code,
    reason = "the two calls that pass memory to a transfer are unsafe to call; nothing is dereferenced here"
)]

use std::fmt::{self, Debug};

use baton_connector_channel::copy_runs::CopyRun;

/// Why a call of NIXL failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NIXL: {0}")]
pub struct NixlError(pub Box<str>);

/// The role of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentRole {
    /// The agent reads, and makes progress when a request is polled.
    Initiator,
    /// Other agents read from this one, which makes progress on a thread of its own.
    Target,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// Bytes may still be written into the landing memory.
    InFlight,
    /// Every byte has landed, and nothing more is written.
    Done,
}

/// The kind of memory of an address. NIXL needs it for each side of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// Host memory.
    Host,
    /// Memory of a CUDA device, with the number of the device in its process.
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

/// Memory to register with an agent. Only host memory can be accessed at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Memory {
    /// The kind of memory.
    pub segment: Segment,
    /// Address of the first byte.
    pub base: usize,
    /// Length in bytes.
    pub len: usize,
}

/// One contiguous part of a read: the address in the producer's process, the address in this process, and the length.
pub type ReadDescriptor = CopyRun;

/// A prepared request of one agent. Opaque; released by [`Agent::release`].
#[derive(Debug, PartialEq, Eq)]
pub struct TransferRequest(pub u64);

/// A NIXL library.
pub trait Library: Debug + Send + Sync {
    /// The path of the library.
    fn origin(&self) -> &str;

    /// Creates an agent with the UCX backend. Agents of a cluster must have different names. May take half a second.
    ///
    /// # Errors
    /// [`NixlError`].
    fn agent(&self, name: &str, side: AgentRole) -> Result<Box<dyn Agent>, NixlError>;
}

/// One agent. Its drop ends all of its transfers: afterwards nothing writes into its memory.
pub trait Agent: Send + Sync {
    /// Registers memory for reads from it and into it.
    ///
    /// # Errors
    /// [`NixlError`].
    ///
    /// # Safety
    /// The memory must exist, and be of that kind, until the agent is dropped.
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError>;

    /// The data with which another agent reads from this one's registered memory.
    ///
    /// # Errors
    /// [`NixlError`].
    fn metadata(&self) -> Result<Vec<u8>, NixlError>;

    /// The agent name in metadata, if it can be determined without loading the metadata.
    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        let _ = metadata;
        None
    }

    /// Adds another agent by its metadata and returns its name.
    ///
    /// # Errors
    /// [`NixlError`].
    fn add(&self, metadata: &[u8]) -> Result<String, NixlError>;

    /// Removes another agent. Not allowed while a request to it is in flight.
    fn remove(&self, peer: &str);

    /// Prepares a read from another agent's memory of kind `from` into this agent's memory of kind `into`. Transfers
    /// nothing yet.
    ///
    /// # Errors
    /// [`NixlError`].
    fn prepare(
        &self,
        peer: &str,
        from: Segment,
        into: Segment,
        descriptors: &[ReadDescriptor],
    ) -> Result<TransferRequest, NixlError>;

    /// Starts a read, and may complete it. **An error does not mean that nothing is in flight.**
    ///
    /// # Errors
    /// [`NixlError`].
    ///
    /// # Safety
    /// The memory of the descriptors must not be used otherwise until this call or [`Self::status`] returns
    /// [`TransferState::Done`], or the agent is dropped.
    unsafe fn post(&self, request: &TransferRequest) -> Result<TransferState, NixlError>;

    /// The state of a read. **An error does not mean that nothing is in flight.**
    ///
    /// # Errors
    /// [`NixlError`].
    fn status(&self, request: &TransferRequest) -> Result<TransferState, NixlError>;

    /// Releases a request. **Does not end it.**
    fn release(&self, request: TransferRequest);
}
