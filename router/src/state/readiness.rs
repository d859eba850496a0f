//! Whether this router accepts requests: `GET /ready` of both listeners.

use std::sync::atomic::Ordering;

use super::generation::Generation;
use super::shared::Shared;

/// Whether the router accepts requests and has engines for them.
///
/// # Errors
/// The reason.
pub(crate) fn readiness(shared: &Shared) -> Result<(), &'static str> {
    if shared.draining.load(Ordering::Relaxed) {
        return Err("draining");
    }
    if is_ready(&shared.generation()) { Ok(()) } else { Err("no engine") }
}

/// Whether the models that `/ready` waits for have a usable decode engine whose health is known.
fn is_ready(generation: &Generation) -> bool {
    use crate::config::Ready;
    let mut usable = generation.models.list().iter().map(|model| model.decode.is_ready());
    match generation.config.health.ready {
        Ready::Always => true,
        Ready::AnyModel => usable.any(|usable| usable),
        Ready::EveryModel => usable.all(|usable| usable),
    }
}
