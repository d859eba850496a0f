//! Where pools find engines that the configuration does not list.
//!
//! ```text
//! dns ────────┐  Ok(endpoints)                                debounce
//! file ───────┼──────────────▶ Answers ─▶ membership (pure) ─────────▶ Shared::refresh ─▶ next revision
//! kubernetes ─┘  Err: counted,            static + found + template
//!                the last answer stays
//! ```
//!
//! Invariants:
//! - A source that fails changes nothing: its last good answer stays for as long as the configuration names it.
//! - Until a new source has answered for the first time, a pool keeps the members that it had.
//! - An endpoint that cannot be talked to (`https://` without `engine_tls`) is left out; the others are members.
//! - An answer has at most [`crate::engines::endpoints::ENDPOINTS_MAX`] endpoints; what is not an endpoint is skipped and logged.
//! - The tasks of sources that no pool names any more are stopped. Two pools that name the same source share it.

mod dns;
mod file;
mod kubernetes;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use crate::engines::endpoints::Source;
use crate::state::shared::Shared;

/// Changes that come this close together become one revision.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Until a revision that could not be put into effect is tried again, doubled up to the longest.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Follows the sources that the configuration in effect names, until it is dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut following: BTreeMap<Source, AbortOnDropHandle<()>> = BTreeMap::new();
    loop {
        let wanted = Source::all(&shared.generation().config);
        following.retain(|source, _| wanted.contains(source));
        shared.answers.retain(&wanted);
        for source in wanted {
            if following.contains_key(&source) {
                continue;
            }
            let metrics = shared.metrics.discovery(&source.to_string());
            shared.answers.insert(source.clone(), metrics);
            let task = tokio::spawn(follow(source.clone(), Arc::clone(&shared)));
            following.insert(source, AbortOnDropHandle::new(task));
        }
        shared.answers.changed().await;
        tokio::time::sleep(DEBOUNCE).await;
        let mut pause = RETRY;
        while !shared.refresh() {
            // What is found meanwhile is in the next try.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }
}

/// Asks one source again and again, and reports what it answers.
async fn follow(source: Source, shared: Arc<Shared>) {
    let tell = |answer| shared.answers.take(&source, answer);
    match &source {
        Source::Dns(config) => dns::follow(config, &dns::System, tell).await,
        Source::File(config) => file::follow(config, tell).await,
        Source::Kubernetes(config) => kubernetes::follow(config, tell).await,
    }
}
