//! The consumer's agent: the peers it knows, the pools it lands in, and how it ends.
//!
//! ```text
//! live ──▶ live            a read begins (a turn), posts, and ends
//!   │
//!   └ a request failed, or was not over in time: its reader waits, its landing blocks with it
//!        ▼
//!     retired ─────────▶ gone       when no other turn is left: peers removed, requests released, the agent dropped
//!        new turns go to a new agent; turns in flight end as they would, or after a grace at their next batch
//! ```
//!
//! Invariants:
//! - A request whose end nobody has seen lives until its agent is gone, and its reader waits as long (invariant 3).
//! - An agent ends only when nobody calls it any more, and before the pools that it knows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::limits::RANKS_MAX;

use crate::api::{Agent, Library, Memory, NixlError, Request, Side};
use crate::offer::Offer;
use crate::pool::{DevicePool, Own};

/// Agents that are retired and not gone yet, at most; while there are so many, nothing is read.
const RETIRED_MAX: usize = 4;

/// Pools that one agent knows, at most: one for each rank of an engine's cache.
const POOLS_MAX: usize = RANKS_MAX;

/// Producers that one agent knows, at most.
const PEERS_MAX: usize = 1_024;

/// A device's pool that NIXL has not taken is shown to it again after this long, and after twice as long each time that it is
/// not taken again: each try makes an agent, which may take half a second. What refused it may pass (device memory that
/// others held, a driver that came up late), or may not (a UCX without CUDA).
const UNABLE_FIRST: Duration = Duration::from_secs(10);
const UNABLE_MAX: Duration = Duration::from_secs(640);

/// The agents of one consumer: the live one, and those that are ending.
#[derive(Debug)]
pub(crate) struct Agents {
    library: Arc<dyn Library>,
    /// The pool that all reads land in, where it is a device's. Others are met as they come.
    device: Option<Own>,
    state: Mutex<State>,
    /// Agents made so far.
    made: AtomicU64,
    retired: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct State {
    live: Option<Arc<Live>>,
    /// NIXL has not taken the device's pool.
    unable: Option<Unable>,
    /// Producers with a connection, by their agents' names.
    peers: HashMap<String, Weak<Remote>>,
}

/// Why NIXL has not taken the device's pool, and until when that is the answer.
#[derive(Debug)]
struct Unable {
    why: NixlError,
    until: Instant,
    pause: Duration,
}

/// A producer's agent, as long as there is a connection to it.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) offer: Offer,
    agents: Weak<Agents>,
}

/// One agent of ours.
struct Live {
    turns: Mutex<Turns>,
    gone: Condvar,
    retired: Arc<AtomicU64>,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Live")
    }
}

struct Turns {
    /// `None` when it is gone, or going.
    body: Option<Arc<Body>>,
    active: usize,
    retired: Option<Instant>,
    /// Requests that nobody has seen the end of.
    abandoned: Vec<Request>,
    gone: bool,
}

/// The agent and what must outlive it: the fields are dropped in this order.
struct Body {
    agent: Box<dyn Agent>,
    pools: Mutex<Vec<(Memory, Own)>>,
    /// Names that it has been given.
    known: Mutex<Vec<String>>,
}

/// The right to use an agent for one read.
pub(crate) struct Turn {
    live: Arc<Live>,
    body: Option<Arc<Body>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(why: &str) -> NixlError {
    NixlError(why.into())
}

impl Body {
    /// Registers a pool, once, and says where it lies.
    #[allow(unsafe_code)] // registering a pool; it says why it is sound
    fn land_in(&self, pool: &Own) -> Result<Memory, NixlError> {
        let memory = pool.memory()?;
        let mut pools = lock(&self.pools);
        if pools.iter().any(|(known, _)| *known == memory) {
            return Ok(memory);
        }
        if pools.len() >= POOLS_MAX {
            return Err(error("too many pools"));
        }
        // SAFETY: all of the pool, as it says itself; a clone stays with the agent and is dropped after it.
        unsafe { self.agent.register(memory) }?;
        pools.push((memory, pool.clone()));
        Ok(memory)
    }

    /// Before the calling thread ends the agent. Nothing can be done about a device that is lost.
    fn enter(&self) {
        lock(&self.pools).iter().for_each(|(_, pool)| drop(pool.enter()));
    }
}

impl Agents {
    /// For reads into `device`'s pool, or into any pools in host memory.
    pub(crate) fn new(library: Arc<dyn Library>, device: Option<Arc<dyn DevicePool>>) -> Arc<Self> {
        Arc::new(Self {
            library,
            device: device.map(Own::Device),
            state: Mutex::default(),
            made: AtomicU64::new(0),
            retired: Arc::new(AtomicU64::new(0)),
        })
    }

    /// Agents made so far: one more than were lost.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// The producer that made this offer: the one that other connections know, or a new one.
    pub(crate) fn remote(self: &Arc<Self>, offer: Offer) -> Result<Arc<Remote>, NixlError> {
        let mut state = lock(&self.state);
        state.peers.retain(|_, remote| remote.strong_count() > 0);
        if let Some(known) = state.peers.get(&offer.name).and_then(Weak::upgrade) {
            // It may be the last one by now, and its drop takes the lock.
            drop(state);
            // A name stands for one agent; its metadata and pool do not change while it lives.
            let same = known.offer == offer;
            return if same { Ok(known) } else { Err(error("another producer has this agent's name")) };
        }
        if state.peers.len() >= PEERS_MAX {
            return Err(error("too many producers at once"));
        }
        self.begin(&mut state)?.know(&offer)?;
        let remote = Arc::new(Remote { offer, agents: Arc::downgrade(self) });
        state.peers.insert(remote.offer.name.clone(), Arc::downgrade(&remote));
        Ok(remote)
    }

    /// The live agent, for one read from `remote` into `pool`: it knows both. And where the pool lies.
    pub(crate) fn turn(&self, remote: &Remote, pool: &Own) -> Result<(Turn, Memory), NixlError> {
        let mut state = lock(&self.state);
        let turn = self.begin(&mut state)?;
        turn.know(&remote.offer)?;
        let memory = turn.body().land_in(pool)?;
        Ok((turn, memory))
    }

    /// A turn of the live agent. That may be retired between two looks at it: then there is a next one, until too many wait
    /// for their end.
    fn begin(&self, state: &mut State) -> Result<Turn, NixlError> {
        loop {
            if let Some(turn) = self.live(state)?.turn() {
                return Ok(turn);
            }
        }
    }

    fn live(&self, state: &mut State) -> Result<Arc<Live>, NixlError> {
        self.device.as_ref().map_or(Ok(()), Own::enter)?;
        if let Some(live) = state.live.as_ref().filter(|live| lock(&live.turns).retired.is_none()) {
            return Ok(Arc::clone(live));
        }
        state.live = None;
        if self.retired.load(Ordering::Acquire) >= RETIRED_MAX as u64 {
            return Err(error("too many agents wait for the end of their transfers"));
        }
        if let Some(unable) = state.unable.as_ref().filter(|unable| Instant::now() < unable.until) {
            return Err(unable.why.clone());
        }
        let agent = self.library.agent(&unique_name("d")?, Side::Initiator)?;
        let body = Body { agent, pools: Mutex::default(), known: Mutex::default() };
        if let Some(device) = &self.device {
            // Before it meets anybody: whoever is met is read from.
            let before = state.unable.take();
            body.land_in(device).inspect_err(|why| {
                let pause = before.map_or(UNABLE_FIRST, |before| (2 * before.pause).min(UNABLE_MAX));
                state.unable = Some(Unable { why: why.clone(), until: Instant::now() + pause, pause });
            })?;
        }
        let turns = Turns {
            body: Some(Arc::new(body)),
            active: 0,
            retired: None,
            abandoned: Vec::new(),
            gone: false,
        };
        let live =
            Live { turns: Mutex::new(turns), gone: Condvar::new(), retired: Arc::clone(&self.retired) };
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::clone(state.live.insert(Arc::new(live))))
    }
}

/// A name that no other agent has.
pub(crate) fn unique_name(side: &str) -> Result<String, NixlError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|why| NixlError(format!("no random numbers: {why}").into()))?;
    Ok(format!("baton-{side}-{:032x}", u128::from_le_bytes(random)))
}

impl Drop for Remote {
    fn drop(&mut self) {
        let Some(agents) = self.agents.upgrade() else { return };
        let state = lock(&agents.state);
        // A new connection may have brought it back already.
        if state.peers.get(&self.offer.name).is_some_and(|remote| remote.strong_count() > 0) {
            return;
        }
        // Whoever reads from it has a connection, so nothing of it is in flight.
        if let Some(turn) = state.live.as_ref().and_then(Live::turn) {
            turn.body().enter();
            turn.forget(&self.offer.name);
        }
    }
}

impl Live {
    /// `None` when it is retired.
    fn turn(self: &Arc<Self>) -> Option<Turn> {
        let mut turns = lock(&self.turns);
        let body = turns.body.clone().filter(|_| turns.retired.is_none())?;
        turns.active += 1;
        Some(Turn { live: Arc::clone(self), body: Some(body) })
    }

    /// Ends the agent when it is retired and nobody uses it. On a thread of its own: how long NIXL takes is NIXL's
    /// business, and whoever was the last to use it has a read that is over.
    fn end_if_unused(self: &Arc<Self>, turns: &mut Turns) {
        if turns.retired.is_none() || turns.active > 0 {
            return;
        }
        let Some(body) = turns.body.take() else { return };
        let requests = std::mem::take(&mut turns.abandoned);
        let live = Arc::clone(self);
        let end = move || {
            body.enter();
            // This order was measured: no crash, and no byte afterwards.
            lock(&body.known).iter().for_each(|peer| body.agent.remove(peer));
            requests.into_iter().for_each(|request| body.agent.release(request));
            // The only one left: turns give theirs back before they are counted out.
            drop(body);
            lock(&live.turns).gone = true;
            live.retired.fetch_sub(1, Ordering::AcqRel);
            live.gone.notify_all();
        };
        if let Err(why) = thread::Builder::new().name("nixl-retire".into()).spawn(end) {
            // What was to be ended went with the closure: its drop has just ended the agent, without the courtesies.
            tracing::error!(error = %why, "cannot start the thread that ends a NIXL agent");
            turns.gone = true;
            self.retired.fetch_sub(1, Ordering::AcqRel);
            self.gone.notify_all();
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let turns = self.turns.get_mut().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(turns.abandoned.is_empty(), "a request without its reader");
    }
}

impl Turn {
    fn body(&self) -> &Body {
        self.body.as_ref().expect("it is given back at the end of the turn")
    }

    pub(crate) fn agent(&self) -> &dyn Agent {
        &*self.body().agent
    }

    /// Whether a further batch may be posted: an agent that is retired is given `grace`.
    pub(crate) fn may_go_on(&self, grace: Duration) -> bool {
        lock(&self.live.turns).retired.is_none_or(|since| since.elapsed() < grace)
    }

    fn know(&self, offer: &Offer) -> Result<(), NixlError> {
        let body = self.body();
        let mut known = lock(&body.known);
        if known.contains(&offer.name) {
            return Ok(());
        }
        // Loading it could change what is known of another producer, under its reads.
        let owner = body.agent.owner(&offer.metadata);
        if owner.is_some_and(|owner| owner != offer.name) {
            return Err(error("the metadata belongs to another agent"));
        }
        let name = body.agent.add(&offer.metadata)?;
        if name != offer.name {
            // What it was is known too late: the other producer, if there is one, is read anew.
            body.agent.remove(&name);
            known.retain(|other| *other != name);
            return Err(error("the metadata belongs to another agent"));
        }
        known.push(name);
        Ok(())
    }

    fn forget(&self, name: &str) {
        let body = self.body();
        let mut known = lock(&body.known);
        if let Some(at) = known.iter().position(|other| other == name) {
            known.swap_remove(at);
            body.agent.remove(name);
        }
    }

    /// Retires the agent because of a request whose end was not seen, and returns when nothing can write into its
    /// landing memory any more: when the agent is gone.
    pub(crate) fn quarantine(mut self, request: Request) {
        self.body = None;
        let live = Arc::clone(&self.live);
        let mut turns = lock(&live.turns);
        turns.abandoned.push(request);
        if turns.retired.is_none() {
            turns.retired = Some(Instant::now());
            live.retired.fetch_add(1, Ordering::AcqRel);
        }
        drop(turns);
        // Its end may be what the agent's end waits for.
        drop(self);
        let turns = lock(&live.turns);
        // As long as it takes: these blocks are nobody else's until then.
        drop(live.gone.wait_while(turns, |turns| !turns.gone).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.body = None;
        let mut turns = lock(&self.live.turns);
        turns.active -= 1;
        self.live.end_if_unused(&mut turns);
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = state.live.take() {
            // Reads hold the transport, so nobody reads any more.
            let body = lock(&live.turns).body.take();
            body.iter().for_each(|body| body.enter());
        }
    }
}

#[cfg(test)]
mod tests;
