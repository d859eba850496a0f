//! A producer's side of the leases, for every engine that lends KV blocks.
//!
//! `baton-connector` decides, and this crate adds the lock, the clock and the log. It has no sockets and starts no
//! threads. The engine's pool, metrics and step loop are behind [`service::LeaseOwner`].
//!
//! A module imports its own layer and lower ones. Bottom first:
//!
//! | layer | contents |
//! |---|---|
//! | [`lease_span!`] | the span of log lines about one lease |
//! | [`event_log`] | each request's events, from arrival to the last freed block |
//! | [`service`] | the ledger behind a lock, served off the step loop |
//! | [`rank`] | one KV rank: its memory, and the leases that all ranks share |

pub mod event_log;
mod log_span;
pub mod rank;
pub mod service;
