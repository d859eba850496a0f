//! Every engine the router knows, by its address. What an engine has become in use (connections, load, health)
//! outlives the configuration that names it, for as long as some generation or request still holds it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::admission::Freed;
use crate::config::{EngineUrl, PrefixIndexConfig};
use crate::kv_events::Subscriptions;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::upstream::{Bells, Engine, Terms};

/// The engines.
pub(crate) struct Fleet {
    /// Those that tell of their caches.
    pub subscriptions: Subscriptions,
    /// What their caches hold, as far as is known.
    pub memory: Arc<Memory>,
    metrics: Arc<Metrics>,
    engines: Mutex<HashMap<EngineUrl, Arc<Engine>>>,
    /// Rung when an engine's health wants looking after; see `health/active.rs`.
    pub wake: Arc<Notify>,
    /// Told whenever an engine may be able to take a request again.
    pub freed: Arc<Freed>,
}

impl Fleet {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let bounds = PrefixIndexConfig::default();
        let memory = Arc::new(Memory::new(bounds.chunks_per_engine, bounds.chunks_total));
        Self {
            subscriptions: Subscriptions::default(),
            memory,
            metrics,
            engines: Mutex::default(),
            wake: Arc::default(),
            freed: Arc::default(),
        }
    }

    /// What counts the engines.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The engine at an address. One that is asked for twice is one engine: its load and its connections are
    /// counted together. The terms are those of the last who asked.
    pub(crate) fn engine(&self, url: &EngineUrl, terms: &Terms) -> Arc<Engine> {
        let mut engines = self.lock();
        if let Some(engine) = engines.get(url) {
            engine.set_terms(terms.clone());
            return Arc::clone(engine);
        }
        let metrics = self.metrics.engine(&url.authority());
        let bells = Bells { wake: Arc::clone(&self.wake), freed: Arc::clone(&self.freed) };
        let engine = Arc::new(Engine::new(url.clone(), terms.clone(), bells, metrics));
        engines.insert(url.clone(), Arc::clone(&engine));
        engine
    }

    /// Every engine once.
    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        self.lock().values().cloned().collect()
    }

    /// Forgets engines that no generation and no request holds.
    pub(crate) fn prune(&self) {
        self.lock().retain(|_, engine| {
            let kept = Arc::strong_count(engine) > 1;
            if !kept {
                self.memory.forget(engine.id());
            }
            kept
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<EngineUrl, Arc<Engine>>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
