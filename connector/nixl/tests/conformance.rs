//! NIXL keeps the promises of every transport: with simulated agents here, with the real library in `real.rs`.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod simulated;
mod wire;

use std::sync::Arc;

use baton_connector::region::Region;
use conformance::{Lender, Wire};
use simulated::{Handle, Simulated};

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    wire::Agents::start(Arc::new(Handle(Simulated::new())), lender)
}

transport_conformance!(start);
