//! Test fixtures: clients, scripted engines, a router under test, a collector.

pub(crate) mod client;
pub(crate) mod collector;
pub(crate) mod engine;
pub(crate) mod http2;
pub(crate) mod issuer;
pub(crate) mod raw_http2;
pub(crate) mod serve;
pub(crate) mod store;
pub(crate) mod system;
pub(crate) mod tokens;
