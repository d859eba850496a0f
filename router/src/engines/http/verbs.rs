//! Settlement verbs: which of them an engine supports, and the address at which it answers them.
//!
//! Support is learnt from replies. A missing verb is remembered for a minute only: the reply may have come from a proxy,
//! or from an engine that was still starting. Everything is forgotten when another process answers at the address. Its
//! signs are a refused connection, a handoff of another epoch, and handles that appear or disappear.
//!
//! An engine may answer verbs and snapshot queries at a control address of its own (`control_url`). A failure there
//! shows nothing about the engine's health.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::{Epoch, Handle};
use hyper::header::HeaderValue;

use super::activity::EngineActivity;
use super::connection::{DialTerms, IdleConnections, Purpose, is_local_error};
use super::head::EngineRequestHead;
use super::{
    Addresses, CallError, Connection, ConnectionError, ConnectionTerms, Engine, EngineRequest, Reply,
    ReplyHead,
};
use crate::config::{EngineHttp2, EngineUrl};
use crate::engines::protocol::Verb;

/// Time for which an engine gets no request for a missing verb. Each check costs one settlement a useless request.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Whether an engine supports a verb or an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    Present,
    Missing,
}

/// The identity of a lease, as its producer returned it. Stock engines return none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseIdentity {
    pub handle: Option<Handle>,
    pub epoch: Option<Epoch>,
}

/// The learnt values with their times; empty at first.
#[derive(Debug, Default)]
pub(crate) struct VerbSupport {
    known: Mutex<[Option<(bool, Instant)>; 2]>,
    /// The process that sent the last handoff: 0 before the first, then [`LeaseIdentity::process`].
    process: AtomicU64,
}

impl LeaseIdentity {
    /// Differs between processes: without a handle, with one, or by the epoch.
    fn process(self) -> u64 {
        self.epoch.map_or(1 + u64::from(self.handle.is_some()), |Epoch(epoch)| epoch.max(3))
    }
}

impl VerbSupport {
    /// Whether the engine supports a verb, if known.
    pub(crate) fn has(&self, verb: Verb, now: Instant) -> Option<bool> {
        let known = self.known()[verb as usize];
        let is_fresh =
            |(has, since): &(bool, Instant)| *has || now.saturating_duration_since(*since) < RECHECK_INTERVAL;
        known.filter(is_fresh).map(|(has, _)| has)
    }

    pub(crate) fn learn(&self, verb: Verb, support: Support, now: Instant) {
        self.known()[verb as usize] = Some((support == Support::Present, now));
    }

    /// Forgets which verbs are missing: the process that answers next may be of another version.
    pub(crate) fn forget_missing(&self) {
        self.known().iter_mut().for_each(|known| *known = known.filter(|(has, _)| *has));
    }

    /// Forgets everything, because another process may answer at the engine's address: of another version, or another
    /// kind of engine.
    pub(crate) fn forget(&self) {
        *self.known() = Default::default();
    }

    /// Records a handoff of the engine. Everything is forgotten if the one before was of another process.
    pub(crate) fn received_handoff(&self, of: LeaseIdentity) {
        let process = of.process();
        // The usual case takes no lock and writes nothing.
        let before = self.process.load(Ordering::Relaxed);
        if before != process {
            self.process.store(process, Ordering::Relaxed);
            if before != 0 {
                self.forget();
            }
        }
    }

    /// Whether its last handoff had a handle; `None` before the first.
    pub(crate) fn returns_handles(&self) -> Option<bool> {
        let process = self.process.load(Ordering::Relaxed);
        let without = LeaseIdentity::default().process();
        (process != 0).then_some(process != without)
    }

    fn known(&self) -> MutexGuard<'_, [Option<(bool, Instant)>; 2]> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The control address of an engine, with idle connections to it.
pub(super) struct ControlAddress {
    url: EngineUrl,
    host: HeaderValue,
    addresses: Addresses,
    idle: Arc<IdleConnections>,
    /// Not the engine's own: a reply here is no sign of life of the engine.
    activity: Arc<EngineActivity>,
}

impl ControlAddress {
    pub(super) fn new(url: &EngineUrl) -> Self {
        Self {
            url: url.clone(),
            host: HeaderValue::from_str(&url.authority()).expect("an EngineUrl is printable ASCII"),
            addresses: Addresses::new(url.host(), url.port()),
            idle: Arc::default(),
            activity: Arc::default(),
        }
    }

    /// # Cancel safety
    /// Dropping the future cuts the connection.
    async fn call(&self, engine: &Arc<Engine>, request: &EngineRequest) -> Result<Reply, CallError> {
        let terms = engine.connections.terms.load_full();
        let reply = |head, connection| {
            Reply::new(head, connection, Arc::clone(engine)).with_pool(Arc::clone(&self.idle))
        };
        if let Some(mut idle) = self.idle.take(terms.idle_timeout, Purpose::Command, Instant::now()) {
            match self.send(&mut idle, &terms, request).await {
                Ok(head) => return Ok(reply(head, idle)),
                // The connection was closed before. Verbs and queries can be repeated.
                Err(ConnectionError::Unanswered | ConnectionError::GoingAway) => {}
                Err(error) => return Err(CallError::of(error)),
            }
        }
        let dial = async {
            let addresses = self.addresses.get().await.map_err(|_| CallError::NotConnected)?;
            let own = terms.control.as_ref().filter(|control| control.url == self.url);
            let tls = own.and_then(|control| control.tls.as_ref());
            if self.url.is_tls() && tls.is_none() {
                // The terms are those of another address: a reload is in progress. No secret is sent in clear.
                return Err(CallError::NotConnected);
            }
            // In clear text the setting is for the engine's own address.
            let http2 = if tls.is_some() { terms.http2 } else { EngineHttp2::Off };
            let dial = DialTerms { tls, http2, lost_after: terms.lost_after };
            let dialled = Connection::dial(&addresses, dial, &self.activity).await;
            dialled.map_err(|error| {
                if error.kind() == std::io::ErrorKind::ConnectionRefused {
                    engine.verbs.forget_missing();
                }
                match is_local_error(&error) {
                    true => CallError::OutOfResources(error),
                    false => CallError::NotConnected,
                }
            })
        };
        let dialled = tokio::time::timeout(terms.connect_timeout, dial).await;
        let mut fresh = dialled.unwrap_or(Err(CallError::NotConnected))?;
        self.idle.share(&fresh, Purpose::Command);
        match self.send(&mut fresh, &terms, request).await {
            Ok(head) => Ok(reply(head, fresh)),
            Err(error) => Err(CallError::of(error)),
        }
    }

    async fn send(
        &self,
        connection: &mut Connection,
        terms: &ConnectionTerms,
        request: &EngineRequest,
    ) -> Result<ReplyHead, ConnectionError> {
        let (secret, api_key) = (terms.secret.as_ref(), terms.api_key.as_ref());
        let head = EngineRequestHead { host: &self.host, secret, api_key, request };
        connection.begin(&head, request.pieces())?;
        connection.send(false).await
    }

    /// The idle connections.
    pub(super) fn idle(&self) -> &IdleConnections {
        &self.idle
    }
}

impl Engine {
    /// Sends a verb or a snapshot query: to the engine's control address, if it has one.
    ///
    /// # Cancel safety
    /// Dropping the future cuts the connection.
    pub(crate) async fn call_control(self: &Arc<Self>, request: &EngineRequest) -> Result<Reply, CallError> {
        match self.connections.control.load_full() {
            Some(control) => control.call(self, request).await,
            None => self.call(request, |_| {}).await,
        }
    }

    /// The control address; `None` if it is the engine's own address.
    pub(crate) fn control_url(&self) -> Option<EngineUrl> {
        self.connections.control.load_full().map(|control| control.url.clone())
    }

    /// Replaces the control address if it has changed. The verbs at the new one are not known yet.
    pub(super) fn set_control(&self, url: Option<&EngineUrl>) {
        let current = self.connections.control.load_full();
        if current.as_deref().map(|control| &control.url) != url {
            self.connections.control.store(url.map(|url| Arc::new(ControlAddress::new(url))));
            self.verbs.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(now: Instant) -> VerbSupport {
        let verbs = VerbSupport::default();
        verbs.learn(Verb::Abort, Support::Missing, now);
        verbs.learn(Verb::Release, Support::Present, now);
        verbs
    }

    #[test]
    fn a_missing_verb_is_cached_for_a_minute_and_a_present_one_until_the_engine_is_another() {
        let now = Instant::now();
        assert_eq!(VerbSupport::default().has(Verb::Abort, now), None);
        let verbs = learnt(now);
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(verbs.has(Verb::Abort, later(59)), Some(false));
        assert_eq!(verbs.has(Verb::Abort, later(60)), None, "it is asked again");
        assert_eq!(verbs.has(Verb::Release, later(1 << 20)), Some(true));
        verbs.learn(Verb::Abort, Support::Missing, later(60));
        assert_eq!(verbs.has(Verb::Abort, later(119)), Some(false));
        verbs.forget_missing();
        assert_eq!(verbs.has(Verb::Abort, later(119)), None, "the next process may have it");
        assert_eq!(verbs.has(Verb::Release, now), Some(true), "one refused connection shows no other engine");
        verbs.forget();
        assert_eq!(verbs.has(Verb::Release, now), None);
    }

    #[test]
    fn support_is_forgotten_when_handoffs_are_of_another_process() {
        let now = Instant::now();
        let of = |handle: Option<u128>, epoch: Option<u64>| LeaseIdentity {
            handle: handle.map(Handle),
            epoch: epoch.map(Epoch),
        };
        let (stock, bare) = (of(None, None), of(Some(7), None));
        let (old, new) = (of(Some(7), Some(1 << 40)), of(Some(8), Some(1 << 41)));
        for (before, after, forgets) in [
            (stock, stock, false),
            (bare, bare, false),
            (old, LeaseIdentity { handle: Some(Handle(9)), ..old }, false),
            (stock, bare, true),
            (bare, stock, true),
            (old, new, true),
            (stock, old, true),
            (old, stock, true),
        ] {
            let verbs = learnt(now);
            assert_eq!(verbs.returns_handles(), None);
            verbs.received_handoff(before);
            assert_eq!(verbs.returns_handles(), Some(before.handle.is_some()));
            assert_eq!(verbs.has(Verb::Release, now), Some(true), "the first handoff is no change");
            verbs.received_handoff(after);
            let expected = if forgets { (None, None) } else { (Some(false), Some(true)) };
            let known = (verbs.has(Verb::Abort, now), verbs.has(Verb::Release, now));
            assert_eq!(known, expected, "{before:?} {after:?}");
        }
    }
}
