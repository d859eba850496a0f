//! The vocabulary of the tests with real processes: `tests/e2e/` and `tests/faults/` share it.
//!
//! A test says what it waits for: a state within a time. It never takes the passing of time for a state.

#![allow(dead_code, unused_imports)] // each of the test targets that share it uses its own part

mod ask;
mod books;
mod cluster;
mod http;
mod process;
mod proxy;

pub(crate) use ask::{Ask, MODEL};
pub(crate) use books::{Books, digests, metric};
pub(crate) use cluster::{Cluster, Engine};
pub(crate) use http::{Answer, Call, HangUp, Reply, Stream};
pub(crate) use process::{Process, Signal, ends, signal};
pub(crate) use proxy::{End, Fault, Proxy};

use std::time::{Duration, Instant};

/// Within this time of a client's leaving, every block it held must be back.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(1);

/// For states that must come, but whose time is not the point. Generous: tests share a machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Looks again and again until `look` finds what it looks for.
///
/// # Panics
/// After `within`, with what was found last.
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

/// Between two looks.
#[allow(clippy::disallowed_methods)] // a retry pause: the state is what is waited for
fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}
