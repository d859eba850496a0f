//! One engine from the router's view: its HTTP client, health, load, known caches, membership in pools and
//! listeners; and the memory of bodies.

pub(crate) mod body_budget;
pub(crate) mod caches;
pub(crate) mod discovery_sources;
pub(crate) mod fleet;
pub(crate) mod health;
pub(crate) mod http;
pub(crate) mod listeners;
pub(crate) mod pool_members;
pub(crate) mod prefill_times;
pub(crate) mod presence;
pub(crate) mod probe;
pub(crate) mod protocol;
pub(crate) mod redact;
