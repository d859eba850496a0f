//! The consumer's agent: its peers, its pools, and its end.
//!
//! ```text
//! live ──▶ live            a read begins (with a guard), posts, and ends
//!   │
//!   └ a request failed, or was not over in time: its reader waits, its landing blocks with it
//!        ▼
//!     retired ─────────▶ gone       when no other guard is left: peers removed, requests released, the agent dropped
//!        new guards are of a new agent; reads in flight end normally, or after a grace period at their next batch
//! ```
//!
//! Invariants:
//! - A request without an observed end lives until its agent is gone, and its reader waits as long (invariant 3).
//! - An agent ends only after its last call, and before its pools.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::limits::RANKS_MAX;

use crate::api::{Agent, AgentRole, Library, Memory, NixlError, TransferRequest};
use crate::offer::Offer;
use crate::pool::{DevicePool, LocalPool};

/// Maximum number of retired agents that are not gone yet. At the limit all reads fail.
const RETIRED_MAX: usize = 4;

/// Maximum number of pools of one agent: one for each rank of an engine's cache.
const POOLS_MAX: usize = RANKS_MAX;

/// Maximum number of producers of one agent.
const PEERS_MAX: usize = 1_024;

/// Pause before NIXL is asked again to register a device's pool that it has refused. The pause doubles with each
/// failure, because each try makes an agent, which may take half a second. The cause may be temporary (device memory in
/// use, a driver that starts late) or permanent (a UCX without CUDA).
const REGISTRATION_RETRY_FIRST: Duration = Duration::from_secs(10);
const REGISTRATION_RETRY_MAX: Duration = Duration::from_secs(640);

/// The agents of one consumer: the live one, and those that are ending.
#[derive(Debug)]
pub(crate) struct Agents {
    library: Arc<dyn Library>,
    /// The device's pool, if all reads land there. Host pools are registered on demand.
    device: Option<LocalPool>,
    state: Mutex<AgentTable>,
    /// Agents created so far.
    created: AtomicU64,
    retired: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct AgentTable {
    live: Option<Arc<LiveAgent>>,
    /// Set when NIXL has refused the device's pool.
    registration_failure: Option<RegistrationFailure>,
    /// Producers with a connection, by their agents' names.
    peers: HashMap<String, Weak<RemoteAgent>>,
}

/// Why NIXL has refused the device's pool, and until when no further try is made.
#[derive(Debug)]
struct RegistrationFailure {
    why: NixlError,
    until: Instant,
    pause: Duration,
}

/// A producer's agent. It lasts as long as a connection to it.
#[derive(Debug)]
pub(crate) struct RemoteAgent {
    pub(crate) offer: Offer,
    agents: Weak<Agents>,
}

/// One agent of this engine.
struct LiveAgent {
    state: Mutex<AgentState>,
    gone: Condvar,
    retired: Arc<AtomicU64>,
}

impl std::fmt::Debug for LiveAgent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LiveAgent")
    }
}

struct AgentState {
    /// `None` when the agent is gone or ends.
    resources: Option<Arc<AgentResources>>,
    active: usize,
    retired: Option<Instant>,
    /// Requests without an observed end.
    quarantined: Vec<TransferRequest>,
    gone: bool,
}

/// The agent and its pools, which must outlive it: the fields are dropped in this order.
struct AgentResources {
    agent: Box<dyn Agent>,
    pools: Mutex<Vec<(Memory, LocalPool)>>,
    /// Names of the added peers.
    peers: Mutex<Vec<String>>,
}

/// The right to use an agent for one read.
pub(crate) struct AgentGuard {
    live: Arc<LiveAgent>,
    resources: Option<Arc<AgentResources>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(why: &str) -> NixlError {
    NixlError(why.into())
}

impl AgentResources {
    /// Registers a pool once, and returns its memory.
    #[allow(unsafe_code, reason = "registering a pool; the block states why it is sound")]
    fn register_pool(&self, pool: &LocalPool) -> Result<Memory, NixlError> {
        let memory = pool.memory()?;
        let mut pools = lock(&self.pools);
        if pools.iter().any(|(known, _)| *known == memory) {
            return Ok(memory);
        }
        if pools.len() >= POOLS_MAX {
            return Err(error("too many pools"));
        }
        // SAFETY: the memory of the whole pool. A clone of the pool stays with the agent and is dropped after it.
        unsafe { self.agent.register(memory) }?;
        pools.push((memory, pool.clone()));
        Ok(memory)
    }

    /// Makes the devices current on the calling thread, before it ends the agent. Errors of a lost device are ignored.
    fn enter(&self) {
        lock(&self.pools).iter().for_each(|(_, pool)| drop(pool.enter()));
    }
}

impl Agents {
    /// The agents for reads into `device`'s pool, or into any pools in host memory.
    pub(crate) fn new(library: Arc<dyn Library>, device: Option<Arc<dyn DevicePool>>) -> Arc<Self> {
        Arc::new(Self {
            library,
            device: device.map(LocalPool::Device),
            state: Mutex::default(),
            created: AtomicU64::new(0),
            retired: Arc::new(AtomicU64::new(0)),
        })
    }

    /// Agents created so far: one more than were retired.
    pub(crate) fn created(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    /// The producer of this offer: that of other connections, or a new one.
    pub(crate) fn remote(self: &Arc<Self>, offer: Offer) -> Result<Arc<RemoteAgent>, NixlError> {
        let mut table = lock(&self.state);
        table.peers.retain(|_, remote| remote.strong_count() > 0);
        if let Some(known) = table.peers.get(&offer.name).and_then(Weak::upgrade) {
            // This may be the last reference by now, and its drop takes the lock.
            drop(table);
            // A name identifies one agent, whose metadata and pool do not change during its life.
            let same = known.offer == offer;
            return if same { Ok(known) } else { Err(error("another producer has this agent's name")) };
        }
        if table.peers.len() >= PEERS_MAX {
            return Err(error("too many producers at once"));
        }
        self.acquire_live(&mut table)?.add_peer(&offer)?;
        let remote = Arc::new(RemoteAgent { offer, agents: Arc::downgrade(self) });
        table.peers.insert(remote.offer.name.clone(), Arc::downgrade(&remote));
        Ok(remote)
    }

    /// The live agent with `remote` and `pool` added, for one read, and the memory of the pool.
    pub(crate) fn acquire(
        &self,
        remote: &RemoteAgent,
        pool: &LocalPool,
    ) -> Result<(AgentGuard, Memory), NixlError> {
        let mut table = lock(&self.state);
        let guard = self.acquire_live(&mut table)?;
        guard.add_peer(&remote.offer)?;
        let memory = guard.resources().register_pool(pool)?;
        Ok((guard, memory))
    }

    /// A guard of the live agent. If the agent is retired meanwhile, a new one is made, until too many are retired.
    fn acquire_live(&self, table: &mut AgentTable) -> Result<AgentGuard, NixlError> {
        loop {
            if let Some(guard) = self.live(table)?.acquire() {
                return Ok(guard);
            }
        }
    }

    fn live(&self, table: &mut AgentTable) -> Result<Arc<LiveAgent>, NixlError> {
        self.device.as_ref().map_or(Ok(()), LocalPool::enter)?;
        if let Some(live) = table.live.as_ref().filter(|live| lock(&live.state).retired.is_none()) {
            return Ok(Arc::clone(live));
        }
        table.live = None;
        if self.retired.load(Ordering::Acquire) >= RETIRED_MAX as u64 {
            return Err(error("too many agents wait for the end of their transfers"));
        }
        if let Some(failure) =
            table.registration_failure.as_ref().filter(|failure| Instant::now() < failure.until)
        {
            return Err(failure.why.clone());
        }
        let agent = self.library.agent(&unique_name("d")?, AgentRole::Initiator)?;
        let resources = AgentResources { agent, pools: Mutex::default(), peers: Mutex::default() };
        if let Some(device) = &self.device {
            // The pool is registered before the first peer is added, because reads may start then.
            let before = table.registration_failure.take();
            resources.register_pool(device).inspect_err(|why| {
                let pause = before.map_or(REGISTRATION_RETRY_FIRST, |before| {
                    (2 * before.pause).min(REGISTRATION_RETRY_MAX)
                });
                table.registration_failure =
                    Some(RegistrationFailure { why: why.clone(), until: Instant::now() + pause, pause });
            })?;
        }
        let state = AgentState {
            resources: Some(Arc::new(resources)),
            active: 0,
            retired: None,
            quarantined: Vec::new(),
            gone: false,
        };
        let live =
            LiveAgent { state: Mutex::new(state), gone: Condvar::new(), retired: Arc::clone(&self.retired) };
        self.created.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::clone(table.live.insert(Arc::new(live))))
    }
}

/// A unique name for an agent.
pub(crate) fn unique_name(side: &str) -> Result<String, NixlError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|why| NixlError(format!("no random numbers: {why}").into()))?;
    Ok(format!("baton-{side}-{:032x}", u128::from_le_bytes(random)))
}

impl Drop for RemoteAgent {
    fn drop(&mut self) {
        let Some(agents) = self.agents.upgrade() else { return };
        let table = lock(&agents.state);
        // A new connection may have added the producer again.
        if table.peers.get(&self.offer.name).is_some_and(|remote| remote.strong_count() > 0) {
            return;
        }
        // Every read has a connection to the producer, so no request to it is in flight.
        if let Some(guard) = table.live.as_ref().and_then(LiveAgent::acquire) {
            guard.resources().enter();
            guard.remove_peer(&self.offer.name);
        }
    }
}

impl LiveAgent {
    /// A guard; `None` if the agent is retired.
    fn acquire(self: &Arc<Self>) -> Option<AgentGuard> {
        let mut state = lock(&self.state);
        let resources = state.resources.clone().filter(|_| state.retired.is_none())?;
        state.active += 1;
        Some(AgentGuard { live: Arc::clone(self), resources: Some(resources) })
    }

    /// Ends the agent if it is retired and has no guard. A thread of its own does this, because NIXL may take long and
    /// the read of the last guard is over.
    fn end_if_unused(self: &Arc<Self>, state: &mut AgentState) {
        if state.retired.is_none() || state.active > 0 {
            return;
        }
        let Some(resources) = state.resources.take() else { return };
        let requests = std::mem::take(&mut state.quarantined);
        let live = Arc::clone(self);
        let end = move || {
            resources.enter();
            // In this order NIXL neither crashes nor writes a byte afterwards.
            lock(&resources.peers).iter().for_each(|peer| resources.agent.remove(peer));
            requests.into_iter().for_each(|request| resources.agent.release(request));
            // The last reference: a guard drops its own before it decrements `active`.
            drop(resources);
            lock(&live.state).gone = true;
            live.retired.fetch_sub(1, Ordering::AcqRel);
            live.gone.notify_all();
        };
        if let Err(why) = thread::Builder::new().name("nixl-retire".into()).spawn(end) {
            // The drop of the closure has just ended the agent, without removing peers and requests first.
            tracing::error!(
                event = "nixl_thread_not_started", error = %why,
                "cannot start the thread that ends a NIXL agent"
            );
            state.gone = true;
            self.retired.fetch_sub(1, Ordering::AcqRel);
            self.gone.notify_all();
        }
    }
}

impl Drop for LiveAgent {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(state.quarantined.is_empty(), "a request without its reader");
    }
}

impl AgentGuard {
    fn resources(&self) -> &AgentResources {
        self.resources.as_ref().expect("present until the guard's end")
    }

    pub(crate) fn agent(&self) -> &dyn Agent {
        &*self.resources().agent
    }

    /// Whether a further batch may be posted: on a retired agent only within `grace`.
    pub(crate) fn may_post(&self, grace: Duration) -> bool {
        lock(&self.live.state).retired.is_none_or(|since| since.elapsed() < grace)
    }

    fn add_peer(&self, offer: &Offer) -> Result<(), NixlError> {
        let resources = self.resources();
        let mut peers = lock(&resources.peers);
        if peers.contains(&offer.name) {
            return Ok(());
        }
        // Loading another producer's metadata could change that producer's memory during its reads.
        let owner = resources.agent.owner(&offer.metadata);
        if owner.is_some_and(|owner| owner != offer.name) {
            return Err(error("the metadata belongs to another agent"));
        }
        let name = resources.agent.add(&offer.metadata)?;
        if name != offer.name {
            // The owner is known only after the load. The other producer, if any, is added again by its next read.
            resources.agent.remove(&name);
            peers.retain(|other| *other != name);
            return Err(error("the metadata belongs to another agent"));
        }
        peers.push(name);
        Ok(())
    }

    fn remove_peer(&self, name: &str) {
        let resources = self.resources();
        let mut peers = lock(&resources.peers);
        if let Some(at) = peers.iter().position(|other| other == name) {
            peers.swap_remove(at);
            resources.agent.remove(name);
        }
    }

    /// Retires the agent because of a request without an observed end. Returns when the agent is gone, and nothing can
    /// write into the landing memory any more.
    pub(crate) fn quarantine(mut self, request: TransferRequest) {
        self.resources = None;
        let live = Arc::clone(&self.live);
        let mut state = lock(&live.state);
        state.quarantined.push(request);
        if state.retired.is_none() {
            state.retired = Some(Instant::now());
            live.retired.fetch_add(1, Ordering::AcqRel);
        }
        drop(state);
        // This may be the last guard, for which the end of the agent waits.
        drop(self);
        let state = lock(&live.state);
        // Without a time limit: the blocks must not be reused before that.
        drop(live.gone.wait_while(state, |state| !state.gone).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for AgentGuard {
    fn drop(&mut self) {
        self.resources = None;
        let mut state = lock(&self.live.state);
        state.active -= 1;
        self.live.end_if_unused(&mut state);
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        let table = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = table.live.take() {
            // Reads hold the transport, so no read is in flight.
            let resources = lock(&live.state).resources.take();
            resources.iter().for_each(|resources| resources.enter());
        }
    }
}

#[cfg(test)]
mod tests;
