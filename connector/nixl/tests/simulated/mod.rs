//! Simulated NIXL agents in one process, with the hazards of the real library. Requests can write after their release,
//! and failed posts can still write. Agents do not notice the end of a peer, and read memory without a check of its
//! content. The test chooses the behaviour of transfers ([`Mode`]). Device memory is host memory that was registered as
//! a device's. The two kinds do not match each other.

// Several tests compile this file, and each uses a part of it.
#![allow(unsafe_code, unreachable_pub, dead_code, reason = "several test crates include this file")]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_connector_nixl::api::{
    Agent, AgentRole, Library, Memory, NixlError, ReadDescriptor, Segment, TransferRequest, TransferState,
};

/// Longest wait for a state.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The behaviour of posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Posts complete before they return.
    Done,
    /// Posts stay in flight until [`Simulated::deliver`].
    InFlight,
    /// Posts fail, and [`Simulated::deliver`] still writes their bytes.
    Failed,
    /// Posts are in flight, and their status is a failure. [`Simulated::deliver`] still writes their bytes.
    FailedLater,
}

/// A simulated library.
#[derive(Debug, Default)]
pub struct Simulated {
    state: Mutex<SimulatedState>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct SimulatedState {
    mode: Option<Mode>,
    /// Registered memory, by agent name.
    agents: HashMap<String, Vec<Memory>>,
    requests: HashMap<u64, PendingRequest>,
    next: u64,
    made: usize,
    most_pieces: usize,
    most_bytes: usize,
    hides_owner: bool,
    without_cuda: bool,
    device_bytes: usize,
}

#[derive(Debug)]
struct PendingRequest {
    /// The reading agent.
    agent: String,
    pieces: Vec<ReadDescriptor>,
    posted: bool,
    done: bool,
    mode: Mode,
}

impl Simulated {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn state(&self) -> MutexGuard<'_, SimulatedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the behaviour of later posts.
    pub fn mode(&self, mode: Mode) {
        self.state().mode = Some(mode);
    }

    /// Hides the owner of metadata from now on, until the metadata is loaded.
    pub fn hides_owner(&self) {
        self.state().hides_owner = true;
    }

    /// Refuses to register device memory from now on, as a UCX without CUDA does.
    pub fn without_cuda(&self) {
        self.state().without_cuda = true;
    }

    /// Accepts device memory again.
    pub fn with_cuda(&self) {
        self.state().without_cuda = false;
    }

    /// Bytes of the requests from device to device.
    pub fn device_bytes(&self) -> usize {
        self.state().device_bytes
    }

    /// Writes the bytes of every posted request of a live agent, failed and released requests included.
    pub fn deliver(&self) -> usize {
        let mut state = self.state();
        let SimulatedState { agents, requests, .. } = &mut *state;
        let late = requests.values_mut().filter(|request| request.posted && !request.done);
        let late = late.filter(|request| agents.contains_key(&request.agent));
        late.map(|request| {
            request.done = true;
            copy(&request.pieces)
        })
        .sum()
    }

    /// Waits until a request is in flight.
    pub fn await_posted(&self) {
        let in_flight = |state: &mut SimulatedState| !state.requests.values().any(|r| r.posted && !r.done);
        let (_state, timeout) =
            self.moved.wait_timeout_while(self.state(), TEST_TIMEOUT, in_flight).expect("no panic");
        assert!(!timeout.timed_out(), "no request in flight");
    }

    /// Live agents.
    pub fn agents(&self) -> usize {
        self.state().agents.len()
    }

    /// Agents created so far.
    pub fn made(&self) -> usize {
        self.state().made
    }

    /// The largest request so far: descriptors, and bytes.
    pub fn largest(&self) -> (usize, usize) {
        let state = self.state();
        (state.most_pieces, state.most_bytes)
    }
}

fn copy(pieces: &[ReadDescriptor]) -> usize {
    for piece in pieces {
        let (from, into) = (
            std::ptr::with_exposed_provenance(piece.from),
            std::ptr::with_exposed_provenance_mut(piece.into),
        );
        // SAFETY: memory that both agents registered in this process, and that the tests keep. Other threads may use
        // these plain bytes at the same time, as with the real library.
        unsafe { std::ptr::copy::<u8>(from, into, piece.len) };
    }
    pieces.iter().map(|piece| piece.len).sum()
}

struct SimulatedAgent {
    library: Arc<Simulated>,
    name: String,
    /// Peers, with the memory of their metadata.
    peers: Mutex<HashMap<String, Vec<Memory>>>,
}

fn error<T>(why: impl Into<Box<str>>) -> Result<T, NixlError> {
    Err(NixlError(why.into()))
}

/// A simulated library as the transport's [`Library`].
#[derive(Debug)]
pub struct SimulatedLibrary(pub Arc<Simulated>);

impl Library for SimulatedLibrary {
    fn origin(&self) -> &str {
        "simulated"
    }

    fn agent(&self, name: &str, _side: AgentRole) -> Result<Box<dyn Agent>, NixlError> {
        let mut state = self.0.state();
        state.made += 1;
        assert!(state.agents.insert(name.to_owned(), Vec::new()).is_none(), "two agents of one name");
        let library = Arc::clone(&self.0);
        Ok(Box::new(SimulatedAgent { library, name: name.to_owned(), peers: Mutex::default() }))
    }
}

impl Drop for SimulatedAgent {
    fn drop(&mut self) {
        // Requests of an ended agent write no more.
        self.library.state().agents.remove(&self.name);
    }
}

fn covered(memory: &[Memory], segment: Segment, at: usize, len: usize) -> bool {
    let inside = |memory: &Memory| at >= memory.base && at + len <= memory.base + memory.len;
    memory.iter().any(|memory| memory.segment == segment && inside(memory))
}

/// Host memory.
pub fn host(base: usize, len: usize) -> Memory {
    Memory { segment: Segment::Host, base, len }
}

/// The name and the memory, as text.
pub fn metadata(name: &str, memory: &[Memory]) -> Vec<u8> {
    let text = |Memory { segment, base, len }: &Memory| match segment {
        Segment::Host => format!("{base}+{len}+host"),
        Segment::Cuda(ordinal) => format!("{base}+{len}+{ordinal}"),
    };
    let memory: Vec<_> = memory.iter().map(text).collect();
    format!("simulated|{name}|{}", memory.join(",")).into_bytes()
}

fn parse(metadata: &[u8]) -> Option<(String, Vec<Memory>)> {
    let mut parts = std::str::from_utf8(metadata).ok()?.strip_prefix("simulated|")?.split('|');
    let (name, memory) = (parts.next()?, parts.next()?);
    let region = |text: &str| {
        let mut parts = text.split('+');
        let (base, len) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let segment = match parts.next()? {
            "host" => Segment::Host,
            ordinal => Segment::Cuda(ordinal.parse().ok()?),
        };
        Some(Memory { segment, base, len })
    };
    Some((name.to_owned(), memory.split(',').map(region).collect::<Option<_>>()?))
}

impl Agent for SimulatedAgent {
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError> {
        let mut state = self.library.state();
        if state.without_cuda && memory.segment != Segment::Host {
            return error("register_mem failed with -3");
        }
        state.agents.get_mut(&self.name).expect("it lives").push(memory);
        Ok(())
    }

    fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        Ok(metadata(&self.name, &self.library.state().agents[&self.name]))
    }

    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        let text = std::str::from_utf8(metadata).ok()?.strip_prefix("simulated|")?;
        text.split('|').next().filter(|_| !self.library.state().hides_owner)
    }

    fn add(&self, metadata: &[u8]) -> Result<String, NixlError> {
        let Some((name, memory)) = parse(metadata) else { return error("mismatch") };
        let mut peers = self.peers.lock().expect("no panic");
        if peers.get(&name).is_some_and(|known| *known != memory) {
            return error("not allowed");
        }
        peers.insert(name.clone(), memory);
        Ok(name)
    }

    fn remove(&self, peer: &str) {
        self.peers.lock().expect("no panic").remove(peer);
    }

    fn prepare(
        &self,
        peer: &str,
        from: Segment,
        into: Segment,
        pieces: &[ReadDescriptor],
    ) -> Result<TransferRequest, NixlError> {
        let peers = self.peers.lock().expect("no panic");
        let Some(theirs) = peers.get(peer) else { return error("not found") };
        let mut state = self.library.state();
        let ours = &state.agents[&self.name];
        // As in the library, only the metadata is checked.
        let known = |piece: &ReadDescriptor| {
            covered(theirs, from, piece.from, piece.len) && covered(ours, into, piece.into, piece.len)
        };
        if pieces.is_empty() || !pieces.iter().all(known) {
            return error("not found");
        }
        // Overlapping descriptors would write a landing block twice.
        let landing: HashSet<usize> = pieces.iter().map(|piece| piece.into).collect();
        assert_eq!(landing.len(), pieces.len());
        state.most_pieces = state.most_pieces.max(pieces.len());
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        state.most_bytes = state.most_bytes.max(bytes);
        if matches!((from, into), (Segment::Cuda(_), Segment::Cuda(_))) {
            state.device_bytes += bytes;
        }
        state.next += 1;
        let (id, mode) = (state.next, state.mode.unwrap_or(Mode::Done));
        let agent = self.name.clone();
        state
            .requests
            .insert(id, PendingRequest { agent, pieces: pieces.to_vec(), posted: false, done: false, mode });
        Ok(TransferRequest(id))
    }

    unsafe fn post(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        let mut state = self.library.state();
        let pending = state.requests.get_mut(&request.0).expect("a request of this agent");
        pending.posted = true;
        let answer = match pending.mode {
            Mode::Done => {
                pending.done = true;
                copy(&pending.pieces);
                Ok(TransferState::Done)
            }
            Mode::InFlight | Mode::FailedLater => Ok(TransferState::InFlight),
            Mode::Failed => error("disconnected"),
        };
        self.library.moved.notify_all();
        answer
    }

    fn status(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        let state = self.library.state();
        let pending = &state.requests[&request.0];
        match (pending.done, pending.mode) {
            (true, _) => Ok(TransferState::Done),
            (false, Mode::FailedLater) => error("disconnected"),
            (false, _) => Ok(TransferState::InFlight),
        }
    }

    fn release(&self, request: TransferRequest) {
        let mut state = self.library.state();
        // A request in flight stays in the table: its bytes can still be written.
        if state.requests.get(&request.0).is_some_and(|pending| pending.done || !pending.posted) {
            state.requests.remove(&request.0);
        }
    }
}
