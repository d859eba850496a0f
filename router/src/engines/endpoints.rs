//! What discovery sources return: endpoints, and the last good answer of each source. Data only; the tasks that ask
//! are in `process::discovery`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::config::{
    DiscoverConfig, DnsConfig, EndpointsFileConfig, EngineUrl, KubernetesConfig, PortName, RouterConfig,
};
use crate::metrics::DiscoveryMetrics;

/// Endpoints of one source; as many as a pool may list.
pub(crate) const ENDPOINTS_MAX: usize = 4096;

/// Where engines are looked up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Dns(DnsConfig),
    File(EndpointsFileConfig),
    Kubernetes(KubernetesConfig),
}

/// An engine that was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Endpoint {
    pub url: EngineUrl,
    /// `None`: the template's.
    pub weight: Option<u32>,
    pub labels: BTreeMap<String, String>,
}

/// The last good answer of every source in use.
#[derive(Default)]
pub(crate) struct Answers {
    known: Mutex<BTreeMap<Source, Answer>>,
    changed: Notify,
}

struct Answer {
    /// Ordered by URL. `None`: it has not answered yet.
    endpoints: Option<Arc<[Endpoint]>>,
    /// Since when it has failed; `None` while it works.
    failing: Option<(Instant, String)>,
    metrics: DiscoveryMetrics,
}

impl Source {
    /// The sources of one pool.
    pub(crate) fn of(config: &DiscoverConfig) -> impl Iterator<Item = Self> + use<> {
        let dns = config.dns.clone().map(Self::Dns);
        let file = config.file.clone().map(Self::File);
        let kubernetes = config.kubernetes.clone().map(Self::Kubernetes);
        dns.into_iter().chain(file).chain(kubernetes)
    }

    /// The sources of every pool, each once.
    pub(crate) fn all(config: &RouterConfig) -> BTreeSet<Self> {
        let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
        pools.filter_map(|pool| pool.discover.as_ref()).flat_map(Self::of).collect()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(config) => write!(f, "dns:{}:{}", config.host, config.port),
            Self::File(config) => write!(f, "file:{}", config.path.display()),
            Self::Kubernetes(config) => {
                let namespace = config.namespace.as_deref().unwrap_or_default();
                write!(f, "kubernetes:{namespace}/{}", config.service.as_deref().unwrap_or("*"))?;
                match &config.port {
                    PortName::Number(port) => write!(f, ":{port}")?,
                    PortName::Name(port) => write!(f, ":{port}")?,
                }
                let labels: Vec<_> =
                    config.selector.iter().map(|(name, value)| format!("{name}={value}")).collect();
                if labels.is_empty() { Ok(()) } else { write!(f, "?{}", labels.join(",")) }
            }
        }
    }
}

impl Answers {
    /// What a source says now, or that it failed.
    pub(crate) fn take(&self, source: &Source, answer: Result<Vec<Endpoint>, String>) {
        let mut known = self.lock();
        // Nobody names it any more.
        let Some(entry) = known.get_mut(source) else { return };
        match answer {
            Ok(mut endpoints) => {
                endpoints.sort();
                endpoints.dedup_by(|a, b| a.url == b.url);
                if endpoints.len() > ENDPOINTS_MAX {
                    tracing::warn!(%source, endpoints = endpoints.len(), limit = ENDPOINTS_MAX, "too many endpoints discovered, the rest are ignored");
                    endpoints.truncate(ENDPOINTS_MAX);
                }
                if entry.failing.take().is_some() {
                    tracing::info!(%source, "discovery recovered");
                }
                entry.metrics.endpoints.set(endpoints.len() as f64);
                if entry.endpoints.as_deref() != Some(endpoints.as_slice()) {
                    tracing::info!(%source, endpoints = endpoints.len(), "endpoints discovered");
                    entry.endpoints = Some(endpoints.into());
                    self.changed.notify_one();
                }
            }
            Err(error) => {
                entry.metrics.failures.increment(1);
                let kept = entry.endpoints.as_ref().map_or(0, |endpoints| endpoints.len());
                if entry.failing.as_ref().is_none_or(|(_, before)| *before != error) {
                    tracing::warn!(%source, %error, kept, "discovery failed, last endpoints kept");
                }
                let since = entry.failing.take().map_or_else(Instant::now, |(since, _)| since);
                entry.failing = Some((since, error));
            }
        }
    }

    /// The last good answer of a source.
    pub(crate) fn of(&self, source: &Source) -> Option<Arc<[Endpoint]>> {
        self.lock().get(source)?.endpoints.clone()
    }

    /// The configuration may name other sources now.
    pub(crate) fn renamed(&self) {
        self.changed.notify_one();
    }

    /// Waits until a source has other endpoints, or the configuration may name other sources.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Every source, for people.
    pub(crate) fn report(&self) -> Vec<Value> {
        let known = self.lock();
        let told = known.iter().map(|(source, answer)| {
            json!({
                "source": source.to_string(),
                "endpoints": answer.endpoints.as_ref().map(|endpoints| endpoints.len()),
                "failing_seconds": answer.failing.as_ref().map(|(since, _)| since.elapsed().as_secs()),
                "error": answer.failing.as_ref().map(|(_, error)| error),
            })
        });
        told.collect()
    }

    /// For how long each source has failed; 0 while it works.
    pub(crate) fn each_stale(&self, mut each: impl FnMut(&str, Duration)) {
        // Sources that differ only in how often they are asked have one name: one series, the worst of them.
        let mut stale = BTreeMap::<String, Duration>::new();
        for (source, answer) in self.lock().iter() {
            let failing = answer.failing.as_ref().map_or(Duration::ZERO, |(since, _)| since.elapsed());
            let worst = stale.entry(source.to_string()).or_default();
            *worst = failing.max(*worst);
        }
        stale.iter().for_each(|(source, failing)| each(source, *failing));
    }

    /// Keeps the answers of the `wanted` sources only.
    pub(crate) fn retain(&self, wanted: &BTreeSet<Source>) {
        self.lock().retain(|source, _| wanted.contains(source));
    }

    /// Adds a source that has not answered yet.
    pub(crate) fn insert(&self, source: Source, metrics: DiscoveryMetrics) {
        self.lock().insert(source, Answer { endpoints: None, failing: None, metrics });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Source, Answer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
