//! The protocol of an engine: configured, or learned from its `/server_info`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use crate::config::{EngineConfig, ProtocolSetting};
use crate::engines::protocol::{ProtocolKind, PushIdentity, ServerInfo};

/// Time after a failed query until the next one.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How an engine is configured.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ProtocolTerms {
    pub setting: ProtocolSetting,
    /// The host of the bootstrap server as other engines reach it, if it is not the engine's own.
    pub bootstrap_host: Option<String>,
    pub bootstrap_port: Option<u16>,
    /// Data-parallel ranks.
    pub ranks: u16,
}

impl ProtocolTerms {
    pub(crate) fn new(setting: ProtocolSetting, engine: &EngineConfig) -> Self {
        Self {
            setting,
            bootstrap_host: engine.bootstrap_host.clone(),
            bootstrap_port: engine.bootstrap_port,
            ranks: engine.data_parallel_size,
        }
    }
}

/// What an engine's `/server_info` showed, until another process may answer at its address.
#[derive(Debug, Default)]
pub(crate) struct LearnedProtocol {
    /// Read by every request.
    state: ArcSwap<Learned>,
    /// Where decode engines register with a pushing prefill engine, by data-parallel rank.
    identities: Mutex<HashMap<Option<u16>, Arc<PushIdentity>>>,
    /// How often a rank's identity has changed without a refused connection.
    identity_changes: AtomicU32,
    /// Held by the task that queries.
    pub(crate) query_lock: tokio::sync::Mutex<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Learned {
    kind: Option<ProtocolKind>,
    /// The protocol of the process before, which counts until the new process has answered.
    before: Option<ProtocolKind>,
    learned_at: Option<Instant>,
    bootstrap_port: Option<u16>,
    failed_at: Option<Instant>,
}

/// Changes of an identity after which its engine counts as several processes behind one address. A pair then cannot know
/// which of them gets the prefill leg.
const IDENTITY_CHANGES_MAX: u32 = 2;
/// Age at which an answer that may be a proxy's is checked again.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Most data-parallel ranks whose identities are kept.
const IDENTITIES_MAX: usize = 256;

impl LearnedProtocol {
    /// The protocol under these terms; `None` if it is not known yet.
    pub(crate) fn kind(&self, terms: &ProtocolTerms) -> Option<ProtocolKind> {
        ProtocolKind::configured(terms.setting).or_else(|| {
            let learned = self.state.load();
            learned.kind.or(learned.before)
        })
    }

    /// The port of the bootstrap server, if it is known.
    pub(crate) fn bootstrap_port(&self, terms: &ProtocolTerms) -> Option<u16> {
        terms.bootstrap_port.or_else(|| self.state.load().bootstrap_port)
    }

    /// Whether `/server_info` has to be queried. The time is only read if an earlier query has failed.
    pub(crate) fn is_query_due(&self, terms: &ProtocolTerms, now: impl FnOnce() -> Instant) -> bool {
        let learned = self.state.load();
        let wanted = match terms.setting {
            ProtocolSetting::Auto => true,
            ProtocolSetting::Sglang => terms.bootstrap_port.is_none(),
            ProtocolSetting::Vllm | ProtocolSetting::VllmStore => false,
        };
        let has_failed = |at: Instant| now().saturating_duration_since(at) < RETRY_INTERVAL;
        wanted && learned.kind.is_none() && !learned.failed_at.is_some_and(has_failed)
    }

    /// Whether an answer without SGLang's `/server_info` has to be checked again. A proxy may have sent it while the
    /// engine started.
    pub(crate) fn is_recheck_due(&self, terms: &ProtocolTerms, now: Instant) -> bool {
        let learned = self.state.load();
        let is_old = |at: Instant| now.saturating_duration_since(at) >= RECHECK_INTERVAL;
        terms.setting == ProtocolSetting::Auto
            && learned.kind == Some(ProtocolKind::Vllm)
            && learned.learned_at.is_none_or(is_old)
    }

    /// Records an answer: `None` for an engine without SGLang's `/server_info`.
    pub(crate) fn learn(&self, info: Option<ServerInfo>, now: Instant) {
        self.state.store(Arc::new(Learned {
            kind: Some(if info.is_some() { ProtocolKind::Sglang } else { ProtocolKind::Vllm }),
            before: None,
            learned_at: Some(now),
            bootstrap_port: info.and_then(|info| info.bootstrap_port),
            failed_at: None,
        }));
    }

    /// Records that there was no answer.
    pub(crate) fn failed(&self, now: Instant) {
        self.state.rcu(|learned| Learned { failed_at: Some(now), ..**learned });
    }

    /// The identity of a pushing engine's rank; `None` also if several processes answer there.
    pub(crate) fn identity(&self, rank: Option<u16>) -> Option<Arc<PushIdentity>> {
        let is_one = self.identity_changes.load(Ordering::Relaxed) < IDENTITY_CHANGES_MAX;
        self.identities().get(&rank).filter(|_| is_one).cloned()
    }

    /// Records the identity in a reply.
    pub(crate) fn set_identity(&self, rank: Option<u16>, identity: PushIdentity) {
        let mut identities = self.identities();
        if identities.get(&rank).is_some_and(|known| **known != identity) {
            self.identity_changes.fetch_add(1, Ordering::Relaxed);
        }
        if identities.get(&rank).is_none_or(|known| **known != identity)
            && (identities.len() < IDENTITIES_MAX || identities.contains_key(&rank))
        {
            identities.insert(rank, Arc::new(identity));
        }
    }

    /// Forgets the identity of a rank: its process may have been replaced.
    pub(crate) fn forget_identity(&self, rank: Option<u16>) {
        self.identities().remove(&rank);
    }

    /// Forgets everything: another process may answer at the engine's address.
    pub(crate) fn forget(&self) {
        self.state.rcu(|learned| Learned { before: learned.kind.or(learned.before), ..Learned::default() });
        self.identities().clear();
        self.identity_changes.store(0, Ordering::Relaxed);
    }

    fn identities(&self) -> MutexGuard<'_, HashMap<Option<u16>, Arc<PushIdentity>>> {
        self.identities.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(setting: ProtocolSetting, bootstrap_port: Option<u16>) -> ProtocolTerms {
        ProtocolTerms { setting, bootstrap_port, ..ProtocolTerms::default() }
    }

    #[test]
    fn an_engine_is_queried_only_for_what_the_configuration_leaves_open() {
        let (now, learned) = (Instant::now(), LearnedProtocol::default());
        let due = |setting, port| learned.is_query_due(&terms(setting, port), || now);
        assert!(due(ProtocolSetting::Auto, None) && due(ProtocolSetting::Sglang, None));
        assert!(!due(ProtocolSetting::Sglang, Some(1)) && !due(ProtocolSetting::Vllm, None));
        learned.failed(now);
        assert!(!due(ProtocolSetting::Auto, None));
        assert!(learned.is_query_due(&terms(ProtocolSetting::Auto, None), || now + RETRY_INTERVAL));
    }

    #[test]
    fn a_learned_protocol_lasts_until_another_process_may_answer() {
        let learned = LearnedProtocol::default();
        let auto = terms(ProtocolSetting::Auto, None);
        assert_eq!(learned.kind(&auto), None);
        let now = Instant::now();
        learned.learn(Some(ServerInfo { bootstrap_port: Some(9_000) }), now);
        assert_eq!(
            (learned.kind(&auto), learned.bootstrap_port(&auto)),
            (Some(ProtocolKind::Sglang), Some(9_000))
        );
        assert_eq!(learned.kind(&terms(ProtocolSetting::Vllm, None)), Some(ProtocolKind::Vllm));
        assert_eq!(learned.bootstrap_port(&terms(ProtocolSetting::Auto, Some(7))), Some(7));
        learned.forget();
        assert_eq!((learned.kind(&auto), learned.bootstrap_port(&auto)), (Some(ProtocolKind::Sglang), None));
        assert!(learned.is_query_due(&auto, || now), "the protocol before is a guess");
        learned.learn(None, now);
        assert_eq!(learned.kind(&auto), Some(ProtocolKind::Vllm));
        assert!(!learned.is_recheck_due(&auto, now) && learned.is_recheck_due(&auto, now + RECHECK_INTERVAL));
    }
}
