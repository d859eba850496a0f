//! Simulated SGLang prefill and decode engines, after SGLang 0.5.23.
//!
//! ```text
//!  router ─ one body to both, with bootstrap_host, bootstrap_port, bootstrap_room ─┬─▶ P   server ─▶ generate ─▶ rank
//!                                                                                 └─▶ D   server ─▶ generate ─▶ rank
//!  D ── GET /route, GET /health ─▶ P's bootstrap server (prefills, bootstrap)
//!  D ◀── one line of JSON per message, to the rank's address from /route (links, message) ──▶ P
//! ```
//!
//! P and D have no memory in common. They find each other by the bootstrap address in the body, so they may be
//! processes of their own. Pairing, pages, aborts and timeouts are in [`rank`], without I/O.
//!
//! Two rules of SGLang's source that a router meets:
//! - A refusal of the HTTP server (400, 503) precedes the scheduler, and an abort of a `rid` that has not arrived has no
//!   effect. The peer is not notified of either.
//! - P notifies D of its end if D's page indices have arrived. D notifies P as soon as it knows P's address.
//!
//! Speeds, pools, faults, texts and the event log are those of the other simulated engines ([`super`]).

mod body;
mod bootstrap;
mod engine;
mod generate;
mod links;
mod message;
mod pages;
mod plan;
mod prefills;
mod rank;
mod rooms;
mod server;

pub use plan::{AbortExchange, SglangPlan};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use baton_connector::Epoch;
use baton_connector_leases::event_log::EventLog;

use super::role::Role;
use engine::{SglangEngine, SglangIdentity};
use server::SglangListeners;

/// SGLang engines, each on its own thread. Dropping stops them.
pub struct SglangFleet {
    plan: SglangPlan,
    members: Vec<Mutex<SglangMember>>,
}

/// A running or dead engine.
struct SglangMember {
    role: Role,
    number: usize,
    address: SocketAddr,
    bootstrap: Option<SocketAddr>,
    runs: Option<(Arc<SglangEngine>, JoinHandle<()>)>,
}

impl SglangMember {
    fn stop(&mut self) {
        if let Some((engine, thread)) = self.runs.take() {
            engine.stop.cancel();
            // A panic was already printed to standard error.
            let _ = thread.join();
        }
    }
}

fn listen(at: SocketAddr, role: Role, number: usize) -> io::Result<std::net::TcpListener> {
    crate::sim::instant::listen(at).map_err(|error| {
        let text = format!("cannot listen on {at}, for {} engine {number}: {error}", role.label());
        io::Error::new(error.kind(), text)
    })
}

impl SglangFleet {
    /// Starts every engine on loopback, on the plan's ports or on free ones.
    ///
    /// # Errors
    /// If the plan is invalid, or no port or thread is available.
    pub fn start(plan: SglangPlan) -> io::Result<Self> {
        plan.check().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let mut fleet = Self { plan, members: Vec::new() };
        let port = |first: u16, number: usize| if first == 0 { 0 } else { first + number as u16 };
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        for (at, (role, number)) in fleet.plan.fleet.all().collect::<Vec<_>>().into_iter().enumerate() {
            let address = local(port(fleet.plan.fleet.port, at));
            let bootstrap = (role == Role::Prefill).then(|| local(port(fleet.plan.bootstrap_port, number)));
            let member = fleet.run(role, number, address, bootstrap)?;
            fleet.members.push(Mutex::new(member));
        }
        Ok(fleet)
    }

    fn run(
        &self,
        role: Role,
        number: usize,
        at: SocketAddr,
        bootstrap: Option<SocketAddr>,
    ) -> io::Result<SglangMember> {
        let listeners = SglangListeners {
            api: listen(at, role, number)?,
            peers: listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), role, number)?,
            bootstrap: bootstrap.map(|at| listen(at, role, number)).transpose()?,
        };
        let address = listeners.api.local_addr()?;
        let bootstrap = listeners.bootstrap.as_ref().map(std::net::TcpListener::local_addr).transpose()?;
        let epoch = super::random();
        let identity = SglangIdentity {
            role,
            id: format!("sglang-{}-{number}-{epoch:016x}", role.label()),
            epoch: Epoch(epoch),
            address,
            peer_address: listeners.peers.local_addr()?,
            bootstrap,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let plan = self.plan.fleet.of(role, number);
        let dies = plan.faults.dies;
        let engine = SglangEngine::new(&self.plan, plan, identity, runtime.handle().clone());
        let runs = Arc::clone(&engine);
        let name = format!("sglang-{}-{number}", role.label());
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
                    () = server::serve(listeners, Arc::clone(&runs)) => {}
                    () = ends => {}
                }
                runs.stop.cancel();
                // A panic was already printed to standard error.
                let _ = driven.await;
            });
        })?;
        Ok(SglangMember { role, number, address, bootstrap, runs: Some((engine, thread)) })
    }

    fn member(&self, role: Role, number: usize) -> io::Result<&Mutex<SglangMember>> {
        let found = self.members.iter().find(|member| {
            let member = member.lock().unwrap_or_else(PoisonError::into_inner);
            (member.role, member.number) == (role, number)
        });
        let none = || io::Error::new(io::ErrorKind::NotFound, format!("no engine {}-{number}", role.label()));
        found.ok_or_else(none)
    }

    fn each<T>(&self, role: Role, of: impl Fn(&SglangMember) -> Option<T>) -> Vec<T> {
        let members = self.members.iter().map(|member| member.lock().unwrap_or_else(PoisonError::into_inner));
        members.filter(|member| member.role == role).filter_map(|member| of(&member)).collect()
    }

    /// Addresses of the prefill engines.
    #[must_use]
    pub fn prefill(&self) -> Vec<SocketAddr> {
        self.each(Role::Prefill, |member| Some(member.address))
    }

    /// Addresses of the decode engines.
    #[must_use]
    pub fn decode(&self) -> Vec<SocketAddr> {
        self.each(Role::Decode, |member| Some(member.address))
    }

    /// Addresses of the prefill engines' bootstrap servers.
    #[must_use]
    pub fn bootstrap(&self) -> Vec<SocketAddr> {
        self.each(Role::Prefill, |member| member.bootstrap)
    }

    /// An engine's event log. `None` if the engine is dead or does not exist.
    #[must_use]
    pub fn log(&self, role: Role, number: usize) -> Option<Arc<EventLog>> {
        let member = self.member(role, number).ok()?.lock().unwrap_or_else(PoisonError::into_inner);
        member.runs.as_ref().map(|(engine, _)| Arc::clone(&engine.log))
    }

    /// Ends an engine at once, with its connections.
    ///
    /// # Errors
    /// If there is no such engine.
    pub fn kill(&self, role: Role, number: usize) -> io::Result<()> {
        self.member(role, number)?.lock().unwrap_or_else(PoisonError::into_inner).stop();
        Ok(())
    }

    /// Starts an engine again at its addresses, with empty pages and another epoch.
    ///
    /// # Errors
    /// If there is no such engine, or a port is taken.
    pub fn restart(&self, role: Role, number: usize) -> io::Result<()> {
        let mut member = self.member(role, number)?.lock().unwrap_or_else(PoisonError::into_inner);
        member.stop();
        *member = self.run(role, number, member.address, member.bootstrap)?;
        Ok(())
    }

    /// A configuration of the router for these engines.
    #[must_use]
    pub fn router_yaml(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let prefill = self.each(Role::Prefill, |member| {
            let (at, port) = (member.address, member.bootstrap?.port());
            Some(format!("{{url: 'http://{at}', bootstrap_host: 127.0.0.1, bootstrap_port: {port}}}"))
        });
        let decode = self.each(Role::Decode, |member| Some(format!("{{url: 'http://{}'}}", member.address)));
        let (name, prefill, decode) = (&self.plan.fleet.engine.model, prefill.join(", "), decode.join(", "));
        format!(
            "listen: {listen}\nadmin: {{listen: '{admin}'}}\nmodels:\n  - name: {name}\n    protocol: sglang\n    \
             prefill: {{engines: [{prefill}]}}\n    decode: {{engines: [{decode}]}}\n"
        )
    }
}

impl Drop for SglangFleet {
    fn drop(&mut self) {
        for member in &self.members {
            member.lock().unwrap_or_else(PoisonError::into_inner).stop();
        }
    }
}
