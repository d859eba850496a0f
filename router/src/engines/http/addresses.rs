//! Resolution of an engine's name. The resolver's last good answer stays in use until a newer one comes.
//!
//! The system's resolver is used because it follows the host's configuration (`/etc/hosts`, search domains, other
//! name sources). It caches nothing, and a resolver library caches an answer only for its time to live. Neither
//! helps while a name server fails. So the last good answer is stored here, without a library.
//!
//! ```text
//! get ─┬─ the answer is fresh ──────────────────────▶ it
//!      ├─ it is older ── look up, in a task ────────▶ it, at once
//!      └─ there is none yet ── look up ─────────────▶ the first one
//! ```
//!
//! Invariants: one lookup of a name at a time, and [`LOOKUPS_MAX`] of all names. A failure replaces no answer.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::Semaphore;

use crate::metrics::log_limiter::LogLimiter;

/// An answer is fresh for this time, so that many connections at once cause one lookup.
const LOOKUP_TTL: Duration = Duration::from_secs(1);
/// The system's resolver blocks a thread while it waits for a server. The runtime has at most 512 blocking threads
/// for all uses.
const LOOKUPS_MAX: usize = 64;

/// The known addresses of a name.
pub(crate) type ResolvedAddrs = Arc<[SocketAddr]>;
/// Looks up a name.
type LookupFn = fn(Arc<str>, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
type PendingLookup = Shared<BoxFuture<'static, Result<ResolvedAddrs, Arc<io::Error>>>>;

/// The addresses of one name.
#[derive(Debug)]
pub(crate) struct Addresses {
    host: Arc<str>,
    port: u16,
    lookup: LookupFn,
    state: Arc<Mutex<ResolverState>>,
}

#[derive(Debug, Default)]
struct ResolverState {
    addresses: Option<(ResolvedAddrs, Instant)>,
    pending: Option<PendingLookup>,
    log_limiter: Arc<LogLimiter>,
}

impl Addresses {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self::with_lookup(host, port, resolve)
    }

    fn with_lookup(host: &str, port: u16, lookup: LookupFn) -> Self {
        let state = Arc::<Mutex<ResolverState>>::default();
        Self { host: host.into(), port, lookup, state }
    }

    /// The addresses to connect to.
    ///
    /// # Errors
    /// The resolver's error, if it never returned an answer.
    ///
    /// # Cancel safety
    /// A lookup continues.
    pub(crate) async fn get(&self) -> Result<ResolvedAddrs, Arc<io::Error>> {
        if let Ok(ip) = self.host.parse::<IpAddr>() {
            return Ok(Arc::new([SocketAddr::new(ip, self.port)]));
        }
        let pending = {
            let mut state = lock(&self.state);
            match &state.addresses {
                Some((addresses, at)) if at.elapsed() < LOOKUP_TTL => return Ok(Arc::clone(addresses)),
                Some((addresses, _)) => {
                    let addresses = Arc::clone(addresses);
                    drop(self.start_lookup(&mut state));
                    return Ok(addresses);
                }
                None => self.start_lookup(&mut state),
            }
        };
        pending.await
    }

    /// The answer of a lookup that ends after this call, if it differs from `tried`. To `tried` no connection
    /// could be made: the engine may have moved.
    ///
    /// # Cancel safety
    /// A lookup continues.
    pub(super) async fn new_addresses(&self, tried: &ResolvedAddrs) -> Option<ResolvedAddrs> {
        if self.host.parse::<IpAddr>().is_ok() {
            return None;
        }
        let pending = self.start_lookup(&mut lock(&self.state));
        pending.await.ok().filter(|addresses| addresses != tried)
    }

    /// The pending lookup, or a new one.
    fn start_lookup(&self, state: &mut ResolverState) -> PendingLookup {
        if let Some(pending) = &state.pending {
            return pending.clone();
        }
        let (host, port, lookup) = (Arc::clone(&self.host), self.port, self.lookup);
        let (shared_state, log_limiter) = (Arc::clone(&self.state), Arc::clone(&state.log_limiter));
        let pending = async move {
            static LOOKUPS: Semaphore = Semaphore::const_new(LOOKUPS_MAX);
            let _permit = LOOKUPS.acquire().await;
            let answer = lookup(Arc::clone(&host), port).await;
            let answer = match answer {
                Ok(addresses) if addresses.is_empty() => Err(io::Error::from(io::ErrorKind::NotFound)),
                answer => answer,
            };
            let mut state = lock(&shared_state);
            state.pending = None;
            match answer {
                Ok(addresses) => {
                    let addresses: ResolvedAddrs = addresses.into();
                    state.addresses = Some((Arc::clone(&addresses), Instant::now()));
                    Ok(addresses)
                }
                Err(error) => {
                    if let Some(held_back) = log_limiter.allow() {
                        let kept = state.addresses.is_some();
                        tracing::warn!(
                            event = "engine_name_unresolved", name = &*host, %error, kept, held_back,
                            "cannot resolve the engine's name"
                        );
                    }
                    Err(Arc::new(error))
                }
            }
        };
        let pending = pending.boxed().shared();
        state.pending = Some(pending.clone());
        // A lookup continues when no connection waits for it any more.
        tokio::spawn(pending.clone().map(drop));
        pending
    }
}

fn resolve(host: Arc<str>, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
    async move { Ok(tokio::net::lookup_host((&*host, port)).await?.collect()) }.boxed()
}

fn lock(state: &Mutex<ResolverState>) -> MutexGuard<'_, ResolverState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

    use super::*;

    fn at(port: u16) -> ResolvedAddrs {
        Arc::new([SocketAddr::from(([10, 0, 0, 1], port))])
    }

    /// Makes the last answer stale.
    fn age(addresses: &Addresses) {
        let mut state = lock(&addresses.state);
        let (addresses, _) = state.addresses.take().expect("an answer");
        state.addresses = Some((addresses, Instant::now() - LOOKUP_TTL));
    }

    /// Waits until no lookup is pending.
    async fn looked(addresses: &Addresses) {
        while lock(&addresses.state).pending.is_some() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_last_resolved_address_is_used_while_the_resolver_fails() {
        static ANSWER: AtomicU16 = AtomicU16::new(1);
        let lookup: LookupFn = |_, _| {
            let answer = match ANSWER.load(Ordering::SeqCst) {
                0 => Err(io::Error::other("SERVFAIL")),
                port => Ok(at(port).to_vec()),
            };
            std::future::ready(answer).boxed()
        };
        let addresses = Addresses::with_lookup("engine", 8000, lookup);
        assert_eq!(addresses.get().await.expect("an answer"), at(1));
        ANSWER.store(0, Ordering::SeqCst);
        for _ in 0..3 {
            age(&addresses);
            assert_eq!(addresses.get().await.expect("the last good one"), at(1));
            looked(&addresses).await;
        }
        assert_eq!(addresses.new_addresses(&at(1)).await, None, "a failure is no new address");
        ANSWER.store(2, Ordering::SeqCst);
        age(&addresses);
        assert_eq!(
            addresses.get().await.expect("the last good one"),
            at(1),
            "nothing waits for the resolver"
        );
        looked(&addresses).await;
        assert_eq!(addresses.get().await.expect("the new one"), at(2));
        ANSWER.store(3, Ordering::SeqCst);
        assert_eq!(
            addresses.new_addresses(&at(2)).await,
            Some(at(3)),
            "it is asked again where nothing answered"
        );
        assert_eq!(addresses.get().await.expect("the new one"), at(3));
    }

    #[tokio::test]
    async fn a_hanging_resolver_is_called_once_and_the_last_address_stays_in_use() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let lookup: LookupFn = |_, _| match ASKED.fetch_add(1, Ordering::SeqCst) {
            0 => std::future::ready(Ok(at(1).to_vec())).boxed(),
            _ => std::future::pending().boxed(),
        };
        let addresses = Addresses::with_lookup("engine", 8000, lookup);
        assert_eq!(addresses.get().await.expect("an answer"), at(1));
        age(&addresses);
        for _ in 0..100 {
            assert_eq!(addresses.get().await.expect("the last good one"), at(1));
        }
        tokio::task::yield_now().await;
        assert_eq!(ASKED.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_name_that_was_never_found_is_a_failure_and_an_address_needs_no_resolver() {
        let fails: LookupFn = |_, _| std::future::ready(Err(io::Error::other("NXDOMAIN"))).boxed();
        assert!(Addresses::with_lookup("engine", 8000, fails).get().await.is_err());
        let none: LookupFn = |_, _| std::future::ready(Ok(Vec::new())).boxed();
        assert!(Addresses::with_lookup("engine", 8000, none).get().await.is_err());
        let address = Addresses::with_lookup("10.0.0.1", 8, fails);
        assert_eq!(address.get().await.expect("it is one"), at(8));
        assert_eq!(address.new_addresses(&at(8)).await, None);
    }
}
