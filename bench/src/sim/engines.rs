//! Simulated engines with vLLM's prefill/decode protocol and a model of time and blocks, without computation. For
//! measurements and tests of gateways and clients.
//!
//! ```text
//!  FleetPlan ─▶ SimFleet ─┬▶ Engine: a thread each ─▶ server ─▶ generate ─▶ Core (steps, blocks, leases) ─▶ event log
//!                         └▶ EngineDirectory: a decode engine finds the producer of its handoff and reads its blocks
//! ```
//!
//! A response depends on the contents of the blocks that were read (`text`). A read of freed blocks therefore gives
//! another text with status 200, as on real engines. Speeds, limits, dialect and faults are in [`EnginePlan`].
//! Events are in each engine's event log (`/debug/kv/events`), in both dialects.

mod caching;
mod core;
mod debug_pages;
mod engine;
mod faults;
mod generate;
mod handoff;
mod http;
mod leases;
mod plan;
mod pool;
mod role;
mod server;
mod sglang;
#[cfg(test)]
mod tests;
mod text;

pub use caching::{CacheCounts, CachingEngine, CachingPlan};
pub use faults::{Fault, FaultAt};
pub use plan::{Dialect, EnginePlan, FleetPlan, LoadFailure};
pub use role::Role;
pub use sglang::{AbortExchange, SglangFleet, SglangPlan};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use baton_connector_leases::event_log::EventLog;
use engine::{Engine, EngineDirectory};

/// Engines that find each other, each on its own thread. Dropping stops them.
pub struct SimFleet {
    plan: FleetPlan,
    peers: Arc<EngineDirectory>,
    members: Vec<Mutex<FleetMember>>,
}

/// A running or dead engine.
struct FleetMember {
    role: Role,
    number: usize,
    address: SocketAddr,
    runs: Option<(Arc<Engine>, JoinHandle<()>)>,
}

impl FleetMember {
    fn stop(&mut self, peers: &EngineDirectory) {
        if let Some((engine, thread)) = self.runs.take() {
            peers.remove(&engine.id);
            engine.stop.cancel();
            // A panic was already printed to standard error.
            let _ = thread.join();
        }
    }
}

impl SimFleet {
    /// Starts every engine on loopback, on the plan's ports or on free ones.
    ///
    /// # Errors
    /// If the plan is invalid, or no port or thread is available.
    pub fn start(plan: FleetPlan) -> io::Result<Self> {
        plan.check().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let mut fleet = Self { plan, peers: Arc::default(), members: Vec::new() };
        for (at, (role, number)) in fleet.plan.all().collect::<Vec<_>>().into_iter().enumerate() {
            let port = if fleet.plan.port == 0 { 0 } else { fleet.plan.port + at as u16 };
            let member = fleet.run(role, number, SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
            fleet.members.push(Mutex::new(member));
        }
        Ok(fleet)
    }

    fn run(&self, role: Role, number: usize, at: SocketAddr) -> io::Result<FleetMember> {
        let listener = crate::sim::instant::listen(at).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot listen on {at}, for {} engine {number}: {error}", role.label()),
            )
        })?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let plan = self.plan.of(role, number);
        let dies = plan.faults.dies;
        let engine = Engine::new(plan, role, number, address, &self.peers, runtime.handle().clone());
        let (runs, peers) = (Arc::clone(&engine), Arc::clone(&self.peers));
        let name = format!("sim-{}-{number}", role.label());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let ends = async {
                match dies {
                    Some(after) => tokio::time::sleep(after).await,
                    None => std::future::pending().await,
                }
            };
            runtime.block_on(async {
                let driven = tokio::spawn(Arc::clone(&runs).run());
                tokio::select! {
                    () = server::serve(listener, Arc::clone(&runs)) => {}
                    () = ends => {}
                }
                peers.remove(&runs.id);
                runs.stop.cancel();
                // A panic was already printed to standard error.
                let _ = driven.await;
            });
        })?;
        Ok(FleetMember { role, number, address, runs: Some((engine, thread)) })
    }

    fn member(&self, role: Role, number: usize) -> io::Result<&Mutex<FleetMember>> {
        let first = match role {
            Role::Prefill => 0,
            Role::Decode => self.plan.prefill,
        };
        let there = match role {
            Role::Prefill => self.plan.prefill,
            Role::Decode => self.plan.decode,
        };
        let none = || io::Error::new(io::ErrorKind::NotFound, format!("no engine {}-{number}", role.label()));
        self.members.get(first + number).filter(|_| number < there).ok_or_else(none)
    }

    fn addresses(&self, role: Role) -> Vec<SocketAddr> {
        let members = self.members.iter().map(|member| member.lock().unwrap_or_else(PoisonError::into_inner));
        members.filter(|member| member.role == role).map(|member| member.address).collect()
    }

    /// Addresses of the prefill engines.
    #[must_use]
    pub fn prefill(&self) -> Vec<SocketAddr> {
        self.addresses(Role::Prefill)
    }

    /// Addresses of the decode engines.
    #[must_use]
    pub fn decode(&self) -> Vec<SocketAddr> {
        self.addresses(Role::Decode)
    }

    /// The plan of the fleet.
    #[must_use]
    pub fn plan(&self) -> &FleetPlan {
        &self.plan
    }

    /// An engine's event log. `None` if the engine is dead or does not exist.
    #[must_use]
    pub fn log(&self, role: Role, number: usize) -> Option<Arc<EventLog>> {
        let member = self.member(role, number).ok()?.lock().unwrap_or_else(PoisonError::into_inner);
        member.runs.as_ref().map(|(engine, _)| Arc::clone(&engine.log))
    }

    /// Ends an engine at once, with its connections and leases.
    ///
    /// # Errors
    /// If there is no such engine.
    pub fn kill(&self, role: Role, number: usize) -> io::Result<()> {
        let mut member = self.member(role, number)?.lock().unwrap_or_else(PoisonError::into_inner);
        member.stop(&self.peers);
        Ok(())
    }

    /// Starts an engine again at its address, with empty blocks and another epoch.
    ///
    /// # Errors
    /// If there is no such engine, or its port is taken.
    pub fn restart(&self, role: Role, number: usize) -> io::Result<()> {
        let mut member = self.member(role, number)?.lock().unwrap_or_else(PoisonError::into_inner);
        member.stop(&self.peers);
        *member = self.run(member.role, member.number, member.address)?;
        Ok(())
    }

    /// A configuration of the router for these engines.
    #[must_use]
    pub fn router_yaml(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let list = |addresses: Vec<SocketAddr>| {
            let urls: Vec<_> =
                addresses.iter().map(|address| format!("{{url: 'http://{address}'}}")).collect();
            urls.join(", ")
        };
        let (prefill, decode) = (list(self.prefill()), list(self.decode()));
        let name = &self.plan.engine.model;
        let prefill =
            if prefill.is_empty() { prefill } else { format!("    prefill: {{engines: [{prefill}]}}\n") };
        format!(
            "listen: {listen}\nadmin: {{listen: '{admin}'}}\nmodels:\n  - name: {name}\n{prefill}    decode: {{engines: [{decode}]}}\n"
        )
    }
}

impl Drop for SimFleet {
    fn drop(&mut self) {
        for member in &self.members {
            member.lock().unwrap_or_else(PoisonError::into_inner).stop(&self.peers);
        }
    }
}

/// A random number, from the seed of hash maps.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
