//! The prefill engines that requests have named, in a bounded table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_openai::ApiError;

use super::options::SidecarOptions;
use super::secret::ClusterSecret;
use super::too_many_prefillers;
use crate::config::{EngineTemplate, EngineUrl, PolicyConfig, PoolConfig, ReleaseMode};
use crate::engines::http::ConnectionTerms;
use crate::engines::protocol::learned::ProtocolTerms;
use crate::metrics::Leg;
use crate::routing::models::PrefillSource;
use crate::routing::pool::{Pool, PoolMember, PrefixTracking};
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// Engines in the table, as many as in llm-d's sidecar. Each has connections, health and metrics of its own.
const PREFILLERS_MAX: usize = 1024;
/// Time without a request after which an engine is forgotten, longer than a usual pause of a conversation.
const IDLE: Duration = Duration::from_secs(600);

/// A prefill engine that requests have named.
pub(crate) struct Prefiller {
    pub pool: PrefillSource,
}

#[derive(Default)]
pub(super) struct Prefillers(Mutex<Table<Arc<Prefiller>>>);

/// Values by the address of an engine, with the time of their last use.
struct Table<T>(HashMap<EngineUrl, (T, Instant)>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Table<T> {
    fn get(&mut self, url: &EngineUrl, now: Instant) -> Option<&T> {
        let (value, used_at) = self.0.get_mut(url)?;
        *used_at = now;
        Some(value)
    }

    /// Inserts a value. A full table first loses the value that is unused for the longest time.
    ///
    /// # Errors
    /// Every value is in use.
    fn insert(
        &mut self,
        url: EngineUrl,
        value: T,
        now: Instant,
        is_used: impl Fn(&T) -> bool,
    ) -> Result<(), T> {
        if self.0.len() >= PREFILLERS_MAX {
            let unused = self.0.iter().filter(|(_, (value, _))| !is_used(value));
            let Some(oldest) = unused.min_by_key(|(_, (_, used_at))| *used_at).map(|(url, _)| url.clone())
            else {
                return Err(value);
            };
            self.0.remove(&oldest);
        }
        self.0.insert(url, (value, now));
        Ok(())
    }

    fn remove_idle(&mut self, now: Instant, is_used: impl Fn(&T) -> bool) {
        self.0.retain(|_, (value, used_at)| is_used(value) || now.duration_since(*used_at) < IDLE);
    }
}

/// Whether a request in flight has the engine in its model.
fn is_used(prefiller: &Arc<Prefiller>) -> bool {
    Arc::strong_count(prefiller) > 1 || Arc::strong_count(&prefiller.pool.engines) > 1
}

impl Prefillers {
    /// The engine at an address, from the table or new.
    ///
    /// # Errors
    /// 429 if the table is full of engines in use; 400 if TLS cannot check the host's name.
    pub(super) fn get(
        &self,
        url: EngineUrl,
        options: &SidecarOptions,
        secret: Option<&ClusterSecret>,
        shared: &Shared,
        generation: &Generation,
    ) -> Result<Arc<Prefiller>, ApiError> {
        let now = Instant::now();
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = table.get(&url, now) {
            return Ok(Arc::clone(known));
        }
        let new = Arc::new(Prefiller::new(&url, options, shared, generation)?);
        // Under the lock of the table, so that a secret that changes meanwhile reaches the new engine.
        if let Some(secret) = secret {
            new.apply_secret(&url, options, secret);
        }
        match table.insert(url, Arc::clone(&new), now, is_used) {
            Ok(()) => Ok(new),
            Err(_full) => Err(too_many_prefillers()),
        }
    }

    /// Gives the cluster's secret to the engines that get it.
    pub(super) fn apply_secret(&self, options: &SidecarOptions, secret: &ClusterSecret) {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.0.iter().for_each(|(url, (known, _))| known.apply_secret(url, options, secret));
    }

    pub(super) fn remove_idle(&self, now: Instant) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove_idle(now, is_used);
    }
}

impl Prefiller {
    fn new(
        url: &EngineUrl,
        options: &SidecarOptions,
        shared: &Shared,
        generation: &Generation,
    ) -> Result<Self, ApiError> {
        let mut config = EngineTemplate::default().engine(url.clone());
        config.bootstrap_port = options.bootstrap_port();
        let tls = generation.engine_tls.as_ref().filter(|_| url.is_tls());
        let tls = tls
            .map(|tls| tls.named(url))
            .transpose()
            .map_err(|error| ApiError::invalid(super::headers::PREFILLER, error.to_string()))?;
        let terms = ConnectionTerms {
            tls,
            release: ReleaseMode::default(),
            protocol: ProtocolTerms::new(options.protocol(), &config),
            ..generation.terms.of(url).clone()
        };
        let engine = shared.fleet.engine(url, &terms);
        let pool = PoolConfig::default();
        let member = Arc::new(PoolMember::new(&config, engine, None, &pool, &[], None));
        let (health, caches) = (&generation.config.health, &shared.fleet.known_caches);
        let policy = PolicyConfig::default();
        let pool = Pool::new(Leg::Prefill, vec![member], &policy, health, caches, PrefixTracking::ByPolicy);
        Ok(Self { pool: PrefillSource::new(pool) })
    }

    fn apply_secret(&self, url: &EngineUrl, options: &SidecarOptions, secret: &ClusterSecret) {
        if options.gets_secret(url) {
            self.pool.engines.members().iter().for_each(|member| member.engine.set_secret(secret.value()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(n: usize) -> EngineUrl {
        format!("http://p{n}:1").parse().expect("an address")
    }

    #[test]
    fn a_full_table_forgets_the_engine_that_is_unused_for_the_longest_time() {
        let (mut table, start) = (Table::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for n in 0..PREFILLERS_MAX {
            assert!(table.insert(url(n), n, at(n as u64), |_| false).is_ok());
        }
        assert_eq!(table.get(&url(1), at(5000)), Some(&1));
        let is_used = |n: &usize| *n == 0;
        assert!(table.insert(url(9999), 9999, at(5001), is_used).is_ok());
        assert_eq!(table.0.len(), PREFILLERS_MAX);
        let known = |n: usize| table.0.contains_key(&url(n));
        assert!(known(0) && known(1) && !known(2) && known(3) && known(9999));
        assert_eq!(table.insert(url(8888), 8888, at(5002), |_| true), Err(8888), "all are in use");
    }

    #[test]
    fn an_engine_without_requests_is_forgotten_after_a_while() {
        let (mut table, now) = (Table::default(), Instant::now());
        for n in 0..3 {
            assert!(table.insert(url(n), n, now, |_| false).is_ok());
        }
        assert_eq!(table.get(&url(2), now + IDLE), Some(&2));
        table.remove_idle(now + IDLE, |n| *n == 1);
        assert_eq!(table.0.keys().filter(|known| **known == url(0)).count(), 0);
        assert_eq!(table.0.len(), 2, "one is in use, and one was used meanwhile");
    }
}
