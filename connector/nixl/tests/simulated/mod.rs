//! Agents without NIXL that have its traps, in one process: requests that go on writing after they were given back,
//! posts that fail and still write, peers that nobody knows to be gone, memory that is read whatever it holds. What a
//! transfer does is the test's to say. A device's memory is host memory that was registered as a device's; nothing finds
//! the one where the other was registered.

// Compiled into several tests, of which each uses a part.
#![allow(unsafe_code, unreachable_pub, dead_code)]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_connector_nixl::api::{Agent, Library, Memory, NixlError, Piece, Request, Segment, Side, State};

/// Longest that a test waits for a state.
const PATIENCE: Duration = Duration::from_secs(20);

/// What becomes of posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They are done when they return.
    Done,
    /// They stay in flight until [`Simulated::deliver`].
    Held,
    /// They fail, and what they were to read still comes with [`Simulated::deliver`].
    Failed,
    /// They are in flight, and fail when they are asked for; bytes still come.
    FailedLater,
}

/// A simulated library.
#[derive(Debug, Default)]
pub struct Simulated {
    world: Mutex<World>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct World {
    mode: Option<Mode>,
    /// Memory by agent name, as its metadata says.
    agents: HashMap<String, Vec<Memory>>,
    requests: HashMap<u64, Pending>,
    next: u64,
    made: usize,
    most_pieces: usize,
    most_bytes: usize,
    secretive: bool,
    without_cuda: bool,
    device_bytes: usize,
}

#[derive(Debug)]
struct Pending {
    /// The agent that reads.
    agent: String,
    pieces: Vec<Piece>,
    posted: bool,
    done: bool,
    mode: Mode,
}

impl Simulated {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What posts do from now on.
    pub fn mode(&self, mode: Mode) {
        self.world().mode = Some(mode);
    }

    /// From now on nobody can tell whose metadata it is without loading it.
    pub fn secretive(&self) {
        self.world().secretive = true;
    }

    /// From now on no agent takes a device's memory, as with a UCX that was built without CUDA.
    pub fn without_cuda(&self) {
        self.world().without_cuda = true;
    }

    /// From now on every agent takes it.
    pub fn with_cuda(&self) {
        self.world().without_cuda = false;
    }

    /// Bytes that were asked for from device to device.
    pub fn device_bytes(&self) -> usize {
        self.world().device_bytes
    }

    /// Lets every posted request of an agent that lives write its bytes: also those that failed or were given back.
    pub fn deliver(&self) -> usize {
        let mut world = self.world();
        let World { agents, requests, .. } = &mut *world;
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
        let in_flight = |world: &mut World| !world.requests.values().any(|r| r.posted && !r.done);
        let (_world, timeout) =
            self.moved.wait_timeout_while(self.world(), PATIENCE, in_flight).expect("no panic");
        assert!(!timeout.timed_out(), "no request in flight");
    }

    /// Agents that live.
    pub fn agents(&self) -> usize {
        self.world().agents.len()
    }

    /// Agents ever made.
    pub fn made(&self) -> usize {
        self.world().made
    }

    /// The largest request so far: descriptors, and bytes.
    pub fn largest(&self) -> (usize, usize) {
        let world = self.world();
        (world.most_pieces, world.most_bytes)
    }
}

fn copy(pieces: &[Piece]) -> usize {
    for piece in pieces {
        let (from, into) = (
            std::ptr::with_exposed_provenance(piece.from),
            std::ptr::with_exposed_provenance_mut(piece.into),
        );
        // SAFETY: memory that both agents registered, in this process, and that the tests keep; as with the real
        // library, somebody else may use it at the same time, and these are plain bytes.
        unsafe { std::ptr::copy::<u8>(from, into, piece.len) };
    }
    pieces.iter().map(|piece| piece.len).sum()
}

struct SimulatedAgent {
    library: Arc<Simulated>,
    name: String,
    /// Peers, with the memory that their metadata says.
    peers: Mutex<HashMap<String, Vec<Memory>>>,
}

fn error<T>(why: impl Into<Box<str>>) -> Result<T, NixlError> {
    Err(NixlError(why.into()))
}

/// Handles on a library are what the transport takes.
#[derive(Debug)]
pub struct Handle(pub Arc<Simulated>);

impl Library for Handle {
    fn origin(&self) -> &str {
        "simulated"
    }

    fn agent(&self, name: &str, _side: Side) -> Result<Box<dyn Agent>, NixlError> {
        let mut world = self.0.world();
        world.made += 1;
        assert!(world.agents.insert(name.to_owned(), Vec::new()).is_none(), "two agents of one name");
        let library = Arc::clone(&self.0);
        Ok(Box::new(SimulatedAgent { library, name: name.to_owned(), peers: Mutex::default() }))
    }
}

impl Drop for SimulatedAgent {
    fn drop(&mut self) {
        // With its end nothing of it is written any more.
        self.library.world().agents.remove(&self.name);
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
        let mut world = self.library.world();
        if world.without_cuda && memory.segment != Segment::Host {
            return error("register_mem failed with -3");
        }
        world.agents.get_mut(&self.name).expect("it lives").push(memory);
        Ok(())
    }

    fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        Ok(metadata(&self.name, &self.library.world().agents[&self.name]))
    }

    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        let text = std::str::from_utf8(metadata).ok()?.strip_prefix("simulated|")?;
        text.split('|').next().filter(|_| !self.library.world().secretive)
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
        pieces: &[Piece],
    ) -> Result<Request, NixlError> {
        let peers = self.peers.lock().expect("no panic");
        let Some(theirs) = peers.get(peer) else { return error("not found") };
        let mut world = self.library.world();
        let ours = &world.agents[&self.name];
        // Like the library: against what the metadata says, and against nothing else.
        let known = |piece: &Piece| {
            covered(theirs, from, piece.from, piece.len) && covered(ours, into, piece.into, piece.len)
        };
        if pieces.is_empty() || !pieces.iter().all(known) {
            return error("not found");
        }
        // A descriptor over another one's landing memory would be written twice.
        let landing: HashSet<usize> = pieces.iter().map(|piece| piece.into).collect();
        assert_eq!(landing.len(), pieces.len());
        world.most_pieces = world.most_pieces.max(pieces.len());
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        world.most_bytes = world.most_bytes.max(bytes);
        if matches!((from, into), (Segment::Cuda(_), Segment::Cuda(_))) {
            world.device_bytes += bytes;
        }
        world.next += 1;
        let (id, mode) = (world.next, world.mode.unwrap_or(Mode::Done));
        let agent = self.name.clone();
        world
            .requests
            .insert(id, Pending { agent, pieces: pieces.to_vec(), posted: false, done: false, mode });
        Ok(Request(id))
    }

    unsafe fn post(&self, request: &Request) -> Result<State, NixlError> {
        let mut world = self.library.world();
        let pending = world.requests.get_mut(&request.0).expect("a request of this agent");
        pending.posted = true;
        let answer = match pending.mode {
            Mode::Done => {
                pending.done = true;
                copy(&pending.pieces);
                Ok(State::Done)
            }
            Mode::Held | Mode::FailedLater => Ok(State::InFlight),
            Mode::Failed => error("disconnected"),
        };
        self.library.moved.notify_all();
        answer
    }

    fn status(&self, request: &Request) -> Result<State, NixlError> {
        let world = self.library.world();
        let pending = &world.requests[&request.0];
        match (pending.done, pending.mode) {
            (true, _) => Ok(State::Done),
            (false, Mode::FailedLater) => error("disconnected"),
            (false, _) => Ok(State::InFlight),
        }
    }

    fn release(&self, request: Request) {
        let mut world = self.library.world();
        // One that is in flight is forgotten by its owner and by nobody else.
        if world.requests.get(&request.0).is_some_and(|pending| pending.done || !pending.posted) {
            world.requests.remove(&request.0);
        }
    }
}
