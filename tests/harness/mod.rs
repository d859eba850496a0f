//! The shared code of tests with real processes, used by `tests/e2e/`, `tests/faults/` and `tests/deploy/`.
//!
//! A test waits for a state within a time limit, never for a time.

#![allow(dead_code, unused_imports, reason = "each test target that includes this module uses a part of it")]

mod cluster;
mod engine_snapshot;
mod generate_request;
mod http;
mod process;
mod proxy;

pub(crate) use cluster::{Cluster, Engine};
pub(crate) use engine_snapshot::{EngineSnapshot, digests, metric};
pub(crate) use generate_request::{GenerateRequest, MODEL};
pub(crate) use http::{HangUp, PendingCall, Reply, Response, Stream};
pub(crate) use process::{Process, Signal, ends, signal};
pub(crate) use proxy::{CloseKind, LinkFault, Proxy};

use std::time::{Duration, Instant};

/// Within this time after a client disconnects, all of its blocks must be free.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(1);

/// Limit for states whose time is not under test. Generous, because tests share a machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Repeats `look` until it succeeds.
///
/// # Panics
/// After `within`, with the last error.
pub(crate) fn eventually<T>(within: Duration, what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match look() {
            Ok(found) => return found,
            Err(last) if begun.elapsed() > within => {
                panic!("not within {within:?}: {what}\nlast seen: {last}")
            }
            Err(_) => pause(),
        }
    }
}

/// The pause between two looks.
#[allow(clippy::disallowed_methods, reason = "a retry pause: the test waits for a state")]
fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}
