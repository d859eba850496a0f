//! The state machines: leases, fetches, tiers and the router's exchange. Each decides, and nothing acts.

pub mod exchange;
pub mod fetch;
pub mod gather;
pub mod lease;
pub mod ledger;
pub mod multi;
pub mod offload;
pub mod replies;
