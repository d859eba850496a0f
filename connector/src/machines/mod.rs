//! The state machines: leases, fetches, tiers and the router's exchange. They decide and do no I/O.

pub mod exchange;
pub mod fetch;
pub mod gather;
pub mod lease;
pub mod ledger;
pub mod multi;
pub mod offload;
pub mod replies;
