//! One engine as the router sees it: its HTTP client, health, load, known caches, membership in pools, listeners,
//! and the memory of bodies.

pub(crate) mod body_budget;
pub(crate) mod caches;
pub(crate) mod endpoints;
pub(crate) mod fleet;
pub(crate) mod health;
pub(crate) mod http;
pub(crate) mod listeners;
pub(crate) mod liveness;
pub(crate) mod membership;
pub(crate) mod presence;
pub(crate) mod redact;
