//! Benchmarks of whole systems under load: router, gateways, endpoints, fleets, simulated engines.

pub mod compare;
pub mod fleet;
pub mod picker;
pub mod prefix;
pub mod router;
pub mod serve;
pub mod sim;
