//! The conformance suite of the NIXL transport with simulated agents. `real.rs` runs it with the real library.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod harness;
mod simulated;

use std::sync::Arc;

use baton_connector::region::Region;
use conformance::{TestProducer, TransportHarness};
use simulated::{Simulated, SimulatedLibrary};

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    harness::NixlHarness::start(Arc::new(SimulatedLibrary(Simulated::new())), producer)
}

transport_conformance!(start);
