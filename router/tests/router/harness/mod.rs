//! Test fixtures: clients, scripted engines, a router under test, a collector.

pub(crate) mod client;
pub(crate) mod collector;
pub(crate) mod engine;
pub(crate) mod system;
pub(crate) mod tokens;
