//! One engine: its address, its properties and its incarnation.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use crate::common::http_client::{ServiceClient, WebError};

/// A component that does not respond within this time counts as unreachable.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// One engine.
pub(super) struct EngineInfo {
    pub(super) service: ServiceClient,
    pub(super) name: String,
    /// The engine responds and accepts the credentials.
    pub(super) up: bool,
    /// `prefill`, `decode`, `both` or `standalone`; `None` for a stock engine.
    pub(super) role: Option<String>,
    pub(super) version: Option<String>,
    pub(super) run: Option<Incarnation>,
    pub(super) models: BTreeSet<String>,
    pub(super) layout: Option<String>,
    /// vLLM with Baton's connector.
    pub(super) has_connector: bool,
    pub(super) block_size: Option<u64>,
    /// The engine has an event log.
    pub(super) events: bool,
    /// Pools of the routers that contain the engine.
    pub(super) pools: BTreeSet<EnginePool>,
}

/// A pool of a router.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EnginePool {
    pub(super) model: String,
    pub(super) leg: String,
}

/// Identifies one start of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incarnation {
    /// The epoch that the engine reports.
    Epoch(String),
    /// `process_start_time_seconds` of a stock engine, in milliseconds.
    Started(u64),
}

impl EngineInfo {
    /// An engine that was not inspected yet.
    pub(super) fn at(service: ServiceClient) -> Self {
        Self {
            name: service.authority().to_owned(),
            service,
            up: false,
            role: None,
            version: None,
            run: None,
            models: BTreeSet::new(),
            layout: None,
            has_connector: false,
            block_size: None,
            events: false,
            pools: BTreeSet::new(),
        }
    }
}

impl Incarnation {
    /// From a page of an engine: `/debug/kv` or `/debug/kv/events`.
    pub(super) fn from_page(page: &Value) -> Option<Self> {
        page["engine"]["epoch"].as_str().map(|epoch| Self::Epoch(epoch.to_owned()))
    }

    /// The current incarnation; `None` if the engine reports neither epoch nor start time.
    pub(super) async fn of(service: &ServiceClient) -> Result<Option<Self>, WebError> {
        for page in ["/debug/kv", "/debug/kv/events?after=latest"] {
            match service.get_json(page, PATIENCE).await {
                Ok(page) => {
                    if let Some(run) = Self::from_page(&page) {
                        return Ok(Some(run));
                    }
                }
                // A stock engine has no such page.
                Err(error) if error.status().is_some_and(|status| status.is_client_error()) => {}
                Err(error) => return Err(error),
            }
        }
        let samples = match service.samples(PATIENCE).await {
            Ok(samples) => samples,
            Err(error) if error.status().is_some_and(|status| status.is_client_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let started = samples.sum("process_start_time_seconds", &[]);
        Ok(started.map(|seconds| Self::Started((seconds * 1e3) as u64)))
    }
}

impl std::fmt::Display for Incarnation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Epoch(epoch) => write!(f, "epoch {epoch}"),
            Self::Started(ms) => write!(f, "started at {:.3} s", *ms as f64 / 1e3),
        }
    }
}
