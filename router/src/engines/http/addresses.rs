//! Where an engine's name leads. The resolver's last good answer stays in use for as long as no newer one comes.
//!
//! The system's resolver is asked, because it knows what the host is configured with (`/etc/hosts`, search domains, other
//! sources of names). It keeps nothing, and a resolver library keeps an answer for its time to live only: neither helps
//! while a name server fails. So the last good answer is kept here, and no library is needed.
//!
//! ```text
//! get ─┬─ the answer is fresh ───────────────▶ it
//!      ├─ it is older ── look up, aside ─────▶ it, at once
//!      └─ there is none yet ── look up ──────▶ the first one
//! ```
//!
//! Invariants: one lookup of a name at a time, and [`LOOKUPS_MAX`] of all names; a failure replaces no answer.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::Semaphore;

use crate::metrics::log_limiter::Seldom;

/// An answer is not asked for again within this time, so that many connections at once are one question.
const FRESH: Duration = Duration::from_secs(1);
/// The system's resolver holds a thread while it waits for a server that does not answer. The threads of the runtime that
/// may wait are 512, for everything.
const LOOKUPS_MAX: usize = 64;

/// The addresses of a name, as far as they are known.
pub(crate) type Found = Arc<[SocketAddr]>;
/// Asks a resolver for a name.
type Look = fn(Arc<str>, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
type Looking = Shared<BoxFuture<'static, Result<Found, Arc<io::Error>>>>;

/// One name's.
#[derive(Debug)]
pub(crate) struct Addresses {
    host: Arc<str>,
    port: u16,
    look: Look,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    found: Option<(Found, Instant)>,
    looking: Option<Looking>,
    trouble: Arc<Seldom>,
}

impl Addresses {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self::asking(host, port, system)
    }

    fn asking(host: &str, port: u16, look: Look) -> Self {
        let known = Arc::<Mutex<Known>>::default();
        Self { host: host.into(), port, look, known }
    }

    /// The addresses to connect to.
    ///
    /// # Errors
    /// The resolver's own, where it has never had an answer.
    ///
    /// # Cancel safety
    /// A lookup goes on.
    pub(crate) async fn get(&self) -> Result<Found, Arc<io::Error>> {
        if let Ok(ip) = self.host.parse::<IpAddr>() {
            return Ok(Arc::new([SocketAddr::new(ip, self.port)]));
        }
        let looking = {
            let mut known = lock(&self.known);
            match &known.found {
                Some((found, at)) if at.elapsed() < FRESH => return Ok(Arc::clone(found)),
                Some((found, _)) => {
                    let found = Arc::clone(found);
                    drop(self.look(&mut known));
                    return Ok(found);
                }
                None => self.look(&mut known),
            }
        };
        looking.await
    }

    /// The answer of a lookup that ends after this call, if it differs from `tried`, to which no connection could be made:
    /// the engine may have moved.
    ///
    /// # Cancel safety
    /// A lookup goes on.
    pub(super) async fn moved_from(&self, tried: &Found) -> Option<Found> {
        if self.host.parse::<IpAddr>().is_ok() {
            return None;
        }
        let looking = self.look(&mut lock(&self.known));
        looking.await.ok().filter(|found| found != tried)
    }

    /// The lookup that is on its way, or a new one.
    fn look(&self, known: &mut Known) -> Looking {
        if let Some(looking) = &known.looking {
            return looking.clone();
        }
        let (host, port, look) = (Arc::clone(&self.host), self.port, self.look);
        let (known_later, trouble) = (Arc::clone(&self.known), Arc::clone(&known.trouble));
        let looking = async move {
            static LOOKUPS: Semaphore = Semaphore::const_new(LOOKUPS_MAX);
            let _place = LOOKUPS.acquire().await;
            let answer = look(Arc::clone(&host), port).await;
            let answer = match answer {
                Ok(found) if found.is_empty() => Err(io::Error::from(io::ErrorKind::NotFound)),
                answer => answer,
            };
            let mut known = lock(&known_later);
            known.looking = None;
            match answer {
                Ok(found) => {
                    let found: Found = found.into();
                    known.found = Some((Arc::clone(&found), Instant::now()));
                    Ok(found)
                }
                Err(error) => {
                    if let Some(held_back) = trouble.due() {
                        let kept = known.found.is_some();
                        tracing::warn!(name = &*host, %error, kept, held_back, "cannot resolve the engine's name");
                    }
                    Err(Arc::new(error))
                }
            }
        };
        let looking = looking.boxed().shared();
        known.looking = Some(looking.clone());
        // It goes on when a connection is not waited for any longer.
        tokio::spawn(looking.clone().map(drop));
        looking
    }
}

fn system(host: Arc<str>, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
    async move { Ok(tokio::net::lookup_host((&*host, port)).await?.collect()) }.boxed()
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

    use super::*;

    fn at(port: u16) -> Found {
        Arc::new([SocketAddr::from(([10, 0, 0, 1], port))])
    }

    /// Makes the last answer old.
    fn age(addresses: &Addresses) {
        let mut known = lock(&addresses.known);
        let (found, _) = known.found.take().expect("an answer");
        known.found = Some((found, Instant::now() - FRESH));
    }

    /// Waits until no lookup is on its way.
    async fn looked(addresses: &Addresses) {
        while lock(&addresses.known).looking.is_some() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_last_good_address_stays_in_use_while_the_resolver_fails() {
        static ANSWER: AtomicU16 = AtomicU16::new(1);
        let look: Look = |_, _| {
            let answer = match ANSWER.load(Ordering::SeqCst) {
                0 => Err(io::Error::other("SERVFAIL")),
                port => Ok(at(port).to_vec()),
            };
            std::future::ready(answer).boxed()
        };
        let addresses = Addresses::asking("engine", 8000, look);
        assert_eq!(addresses.get().await.expect("an answer"), at(1));
        ANSWER.store(0, Ordering::SeqCst);
        for _ in 0..3 {
            age(&addresses);
            assert_eq!(addresses.get().await.expect("the last good one"), at(1));
            looked(&addresses).await;
        }
        assert_eq!(addresses.moved_from(&at(1)).await, None, "a failure is no new address");
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
            addresses.moved_from(&at(2)).await,
            Some(at(3)),
            "it is asked again where nothing answered"
        );
        assert_eq!(addresses.get().await.expect("the new one"), at(3));
    }

    #[tokio::test]
    async fn a_resolver_that_hangs_is_asked_once_and_keeps_nothing_from_its_last_good_answer() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let look: Look = |_, _| match ASKED.fetch_add(1, Ordering::SeqCst) {
            0 => std::future::ready(Ok(at(1).to_vec())).boxed(),
            _ => std::future::pending().boxed(),
        };
        let addresses = Addresses::asking("engine", 8000, look);
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
        let fails: Look = |_, _| std::future::ready(Err(io::Error::other("NXDOMAIN"))).boxed();
        assert!(Addresses::asking("engine", 8000, fails).get().await.is_err());
        let none: Look = |_, _| std::future::ready(Ok(Vec::new())).boxed();
        assert!(Addresses::asking("engine", 8000, none).get().await.is_err());
        let address = Addresses::asking("10.0.0.1", 8, fails);
        assert_eq!(address.get().await.expect("it is one"), at(8));
        assert_eq!(address.moved_from(&at(8)).await, None);
    }
}
