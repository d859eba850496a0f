//! Discovery sources: their endpoints, and the last good result of each source. Data only: the tasks that query
//! them are in `process::discovery`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::config::{
    DiscoverConfig, DnsConfig, EndpointsFileConfig, EngineUrl, InferencePoolConfig, KubernetesConfig,
    PortName, RouterConfig,
};
use crate::metrics::DiscoveryMetrics;

/// Maximum endpoints of one source: as many as a pool may list.
pub(crate) const ENDPOINTS_MAX: usize = 4096;

/// A source of engines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DiscoverySource {
    Dns(DnsConfig),
    File(EndpointsFileConfig),
    Kubernetes(KubernetesConfig),
    InferencePool(InferencePoolConfig),
}

/// A discovered engine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Endpoint {
    pub url: EngineUrl,
    /// `None`: the template's.
    pub weight: Option<u32>,
    pub labels: BTreeMap<String, String>,
}

/// The last good result of every source in use.
#[derive(Default)]
pub(crate) struct DiscoverySources {
    sources: Mutex<BTreeMap<DiscoverySource, SourceStatus>>,
    changed: Notify,
}

struct SourceStatus {
    /// Ordered by URL. `None`: no result yet.
    endpoints: Option<Arc<[Endpoint]>>,
    /// Since when the source fails, with the error; `None` while it works.
    failing: Option<(Instant, String)>,
    metrics: DiscoveryMetrics,
}

impl DiscoverySource {
    /// The sources of one pool.
    pub(crate) fn of(config: &DiscoverConfig) -> impl Iterator<Item = Self> + use<> {
        let dns = config.dns.clone().map(Self::Dns);
        let file = config.file.clone().map(Self::File);
        let kubernetes = config.kubernetes.clone().map(Self::Kubernetes);
        let pool = config.inference_pool.clone().map(Self::InferencePool);
        dns.into_iter().chain(file).chain(kubernetes).chain(pool)
    }

    /// The distinct sources of all pools.
    pub(crate) fn all(config: &RouterConfig) -> BTreeSet<Self> {
        let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
        pools.filter_map(|pool| pool.discover.as_ref()).flat_map(Self::of).collect()
    }
}

impl fmt::Display for DiscoverySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(config) => write!(f, "dns:{}:{}", config.host, config.port),
            Self::File(config) => write!(f, "file:{}", config.path.display()),
            Self::InferencePool(config) => {
                let namespace = config.namespace.as_deref().unwrap_or_default();
                write!(f, "inference_pool:{namespace}/{}", config.name)
            }
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

impl DiscoverySources {
    /// Records the result of one query.
    pub(crate) fn record(&self, source: &DiscoverySource, result: Result<Vec<Endpoint>, String>) {
        let mut sources = self.lock();
        // The configuration no longer has this source.
        let Some(entry) = sources.get_mut(source) else { return };
        match result {
            Ok(mut endpoints) => {
                endpoints.sort();
                endpoints.dedup_by(|a, b| a.url == b.url);
                if endpoints.len() > ENDPOINTS_MAX {
                    tracing::warn!(
                        event = "endpoints_ignored", %source, endpoints = endpoints.len(),
                        limit = ENDPOINTS_MAX, "too many endpoints discovered, the rest are ignored"
                    );
                    endpoints.truncate(ENDPOINTS_MAX);
                }
                if entry.failing.take().is_some() {
                    tracing::info!(event = "discovery_recovered", %source, "discovery recovered");
                }
                entry.metrics.endpoints.set(endpoints.len() as f64);
                if entry.endpoints.as_deref() != Some(endpoints.as_slice()) {
                    tracing::info!(
                        event = "endpoints_discovered", %source, endpoints = endpoints.len(),
                        "endpoints discovered"
                    );
                    entry.endpoints = Some(endpoints.into());
                    self.changed.notify_one();
                }
            }
            Err(error) => {
                entry.metrics.failures.increment(1);
                let kept = entry.endpoints.as_ref().map_or(0, |endpoints| endpoints.len());
                if entry.failing.as_ref().is_none_or(|(_, before)| *before != error) {
                    tracing::warn!(
                        event = "discovery_failed", %source, %error, kept,
                        "discovery failed, last endpoints kept"
                    );
                }
                let since = entry.failing.take().map_or_else(Instant::now, |(since, _)| since);
                entry.failing = Some((since, error));
            }
        }
    }

    /// The last good result of a source.
    pub(crate) fn of(&self, source: &DiscoverySource) -> Option<Arc<[Endpoint]>> {
        self.lock().get(source)?.endpoints.clone()
    }

    /// Called when the configuration may have other sources.
    pub(crate) fn configuration_changed(&self) {
        self.changed.notify_one();
    }

    /// Waits until a source has other endpoints, or the configuration may have other sources.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The state of every source, for `/config`.
    pub(crate) fn report(&self) -> Vec<Value> {
        let sources = self.lock();
        let report = sources.iter().map(|(source, status)| {
            json!({
                "source": source.to_string(),
                "endpoints": status.endpoints.as_ref().map(|endpoints| endpoints.len()),
                "failing_seconds": status.failing.as_ref().map(|(since, _)| since.elapsed().as_secs()),
                "error": status.failing.as_ref().map(|(_, error)| error),
            })
        });
        report.collect()
    }

    /// Calls `each` with the time for which each source has failed; 0 while it works.
    pub(crate) fn each_stale(&self, mut each: impl FnMut(&str, Duration)) {
        // Sources that differ only in their interval have one name, and so one series: the worst of them.
        let mut stale = BTreeMap::<String, Duration>::new();
        for (source, status) in self.lock().iter() {
            let failing = status.failing.as_ref().map_or(Duration::ZERO, |(since, _)| since.elapsed());
            let worst = stale.entry(source.to_string()).or_default();
            *worst = failing.max(*worst);
        }
        stale.iter().for_each(|(source, failing)| each(source, *failing));
    }

    /// Keeps the results of the sources in use only.
    pub(crate) fn retain(&self, in_use: &BTreeSet<DiscoverySource>) {
        self.lock().retain(|source, _| in_use.contains(source));
    }

    /// Adds a source without a result yet.
    pub(crate) fn insert(&self, source: DiscoverySource, metrics: DiscoveryMetrics) {
        self.lock().insert(source, SourceStatus { endpoints: None, failing: None, metrics });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiscoverySource, SourceStatus>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
