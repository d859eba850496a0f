//! Discovery of engines that the configuration does not list.
//!
//! ```text
//! dns ────────┐  Ok(endpoints)                                    debounce
//! file ───────┼──────────────▶ DiscoverySources ─▶ PoolMembers ──────────▶ Shared::refresh ─▶ next revision
//! kubernetes ─┘  Err: counted,                     static + found + template
//!                the last result stays
//! ```
//!
//! Invariants:
//! - A failing source changes nothing: its last good result stays for as long as the configuration names it.
//! - Until a new source has its first result, a pool keeps the members that it had.
//! - An endpoint without usable terms (`https://` without `engine_tls`) is ignored. The others are members.
//! - A result has at most [`crate::engines::discovery_sources::ENDPOINTS_MAX`] endpoints. Invalid endpoints are
//!   skipped and logged.
//! - The tasks of sources that no pool names any more are stopped. Two pools that name the same source share it.

mod dns;
mod file;
pub(super) mod inference_pool;
mod kubernetes;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use crate::engines::discovery_sources::DiscoverySource;
use crate::state::shared::Shared;

/// Changes within this time become one revision.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Pause before a failed revision is tried again, doubled up to the maximum.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Follows the sources of the configuration in effect, until it is dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut following: BTreeMap<DiscoverySource, AbortOnDropHandle<()>> = BTreeMap::new();
    loop {
        let in_use = DiscoverySource::all(&shared.generation().config);
        following.retain(|source, _| in_use.contains(source));
        shared.installer.sources.retain(&in_use);
        for source in in_use {
            if following.contains_key(&source) {
                continue;
            }
            let metrics = shared.metrics.discovery(&source.to_string());
            shared.installer.sources.insert(source.clone(), metrics);
            let task = tokio::spawn(follow(source.clone(), Arc::clone(&shared)));
            following.insert(source, AbortOnDropHandle::new(task));
        }
        shared.installer.sources.changed().await;
        tokio::time::sleep(DEBOUNCE).await;
        let mut pause = RETRY;
        while !shared.refresh() {
            // The next try includes results that arrive meanwhile.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }
}

/// Queries one source repeatedly, and records its results.
async fn follow(source: DiscoverySource, shared: Arc<Shared>) {
    let report = |result| shared.installer.sources.record(&source, result);
    match &source {
        DiscoverySource::Dns(config) => dns::follow(config, &dns::SystemResolver, report).await,
        DiscoverySource::File(config) => file::follow(config, report).await,
        DiscoverySource::Kubernetes(config) => kubernetes::follow(config, report).await,
        DiscoverySource::InferencePool(config) => inference_pool::follow(config, report).await,
    }
}
