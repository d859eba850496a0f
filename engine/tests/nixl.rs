//! Which transport an engine takes when it was told to use NIXL, with simulated agents: the best that both ends have,
//! and another one for a while when NIXL meets a producer and cannot read from it.

#[path = "../../connector/tests/conformance/mod.rs"]
#[allow(unused_imports, unused_macros, dead_code)]
// the transports' vocabulary; its cases run with each transport
mod conformance;
#[path = "../../connector/nixl/tests/simulated/mod.rs"]
mod simulated;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Reader};
use baton_connector_tcp::{ClientOptions, ServerOptions};
use baton_engine::transport::{FoundNixl, KvTransport, SideChannel, consumer};
use conformance::Lender;
use simulated::{Handle, Mode, Simulated};

const BLOCK: usize = 4096;
static GO: AtomicBool = AtomicBool::new(false);

/// Memory of this process alone: there is no shared memory to fall back on.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

struct Pair {
    lender: Arc<Lender>,
    transport: Arc<dyn Transport>,
    peer: Peer,
    region: Region,
    _side: SideChannel,
}

impl Pair {
    fn new(there: &FoundNixl, here: &FoundNixl) -> Self {
        let lender = Lender::new(16, BLOCK, LeaseTerms::default());
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it listens");
        let producer: Arc<dyn Producer> = Arc::clone(&lender) as _;
        let options = ServerOptions::default();
        let side = SideChannel::start((KvTransport::Nixl, there), listener, &producer, None, &options);
        let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
        let transport = consumer(KvTransport::Nixl, here, None, &ClientOptions::default());
        Self { lender, transport, peer, region: pool(16, BLOCK), _side: side.expect("loopback") }
    }

    fn read(&self) -> Result<(), TransportError> {
        let (reader, into) = (Reader::sole(1), vec![BlockId(4), BlockId(9)]);
        let handle = self.lender.lend(&[1, 2], 1);
        let order = ReadOrder { handle, reader, part: Part::Blocks { first: 0 }, into };
        self.transport.read(&self.peer, &order, &self.region, &GO)?;
        assert_eq!(self.transport.finish(&self.peer, handle, reader), Ok(Verdict::Valid));
        for (here, there) in [(4, 1), (9, 2)] {
            let lent = self.lender.region().read_block(BlockId(there));
            assert!(self.region.read_block(BlockId(here)) == lent, "block {there}");
        }
        Ok(())
    }

    fn carrier(&self) -> &'static str {
        self.transport.carrier(&self.peer)
    }
}

fn found(library: &Arc<Simulated>) -> FoundNixl {
    FoundNixl::Here(Arc::new(Handle(Arc::clone(library))))
}

#[test]
fn nixl_is_taken_where_both_engines_have_it() {
    let library = Simulated::new();
    let pair = Pair::new(&found(&library), &found(&library));
    assert_eq!((pair.read(), pair.carrier()), (Ok(()), "nixl"));
    assert!(library.largest().1 > 0, "it moved the bytes");
}

#[test]
fn without_it_on_either_side_something_else_is_taken_and_the_first_read_works() {
    let library = Simulated::new();
    for (there, here) in [
        (found(&library), FoundNixl::Missing),
        (FoundNixl::Missing, found(&library)),
        (FoundNixl::Missing, FoundNixl::Missing),
    ] {
        let pair = Pair::new(&there, &here);
        assert_eq!((pair.read(), pair.carrier()), (Ok(()), "tcp"), "{there:?} {here:?}");
        assert_eq!(library.largest(), (0, 0));
    }
}

#[test]
fn a_producer_that_nixl_meets_and_cannot_read_costs_one_read_and_no_more() {
    let library = Simulated::new();
    let pair = Pair::new(&found(&library), &found(&library));
    library.mode(Mode::Failed);
    let read = pair.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    for _ in 0..3 {
        assert_eq!((pair.read(), pair.carrier()), (Ok(()), "tcp"));
    }
    assert_eq!(library.deliver(), 0, "what failed writes nothing any more");
}
