//! Benchmarks of whole systems under load: router, gateways, endpoints, fleets, simulated engines.

pub mod compare;
pub mod fleet;
pub mod router;
pub mod serve;
pub mod sim;
