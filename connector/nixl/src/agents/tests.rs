//! The end of an agent, step by step, with simulated agents that write late.

use std::io;
use std::sync::atomic::AtomicBool;

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::*;
use crate::api::{ReadDescriptor, Segment};
use crate::simulated::{Mode, Simulated, SimulatedLibrary, host, metadata};

const BLOCK: usize = 64;

/// A producer's agent with a pool of eight blocks that contain nines, and its offer.
struct ProducerAgent {
    pool: Region,
    offer: Offer,
    _agent: Box<dyn Agent>,
}

impl ProducerAgent {
    #[allow(unsafe_code, reason = "registering a pool; the block states why it is sound")]
    fn new(library: &Arc<Simulated>, name: &str) -> Self {
        let pool = Region::allocate(8, BLOCK);
        (0..8).for_each(|block| pool.write_block(BlockId(block), &[9; BLOCK]));
        let agent = SimulatedLibrary(Arc::clone(library)).agent(name, AgentRole::Target).expect("an agent");
        let base = pool.block_ptr(BlockId(0));
        // SAFETY: the pool is dropped with this value, and nothing reads it then.
        unsafe { agent.register(host(base.expose_provenance(), 8 * BLOCK)) }.expect("memory");
        let metadata = agent.metadata().expect("metadata");
        let base = base.addr() as u64;
        let (segment, name) = (Segment::Host, name.into());
        let offer = Offer { segment, block_bytes: BLOCK as u64, blocks: 8, base, name, metadata };
        Self { pool, offer, _agent: agent }
    }
}

/// Posts a read of the producer's block 0 into the region's block `into`.
#[allow(unsafe_code, reason = "posting a read; the block states why it is sound")]
fn post(guard: &AgentGuard, producer: &ProducerAgent, region: &Region, into: u32) -> TransferRequest {
    let (from, into) = (producer.pool.block_ptr(BlockId(0)).addr(), region.block_ptr(BlockId(into)).addr());
    let request =
        prepare(guard, &producer.offer.name, ReadDescriptor { from, into, len: BLOCK }).expect("it fits");
    // SAFETY: only the test uses these blocks.
    unsafe { guard.agent().post(&request) }.expect("it begins");
    request
}

fn prepare(guard: &AgentGuard, peer: &str, piece: ReadDescriptor) -> Result<TransferRequest, NixlError> {
    guard.agent().prepare(peer, Segment::Host, Segment::Host, &[piece])
}

fn acquire(agents: &Agents, remote: &RemoteAgent, region: &Region) -> Result<AgentGuard, NixlError> {
    agents.acquire(remote, &LocalPool::Host(region.clone())).map(|(guard, _)| guard)
}

fn agents(library: &Arc<Simulated>) -> Arc<Agents> {
    Agents::new(Arc::new(SimulatedLibrary(Arc::clone(library))), None)
}

fn refused<T>(result: Result<T, NixlError>) -> String {
    result.err().expect("a refusal").to_string()
}

#[test]
fn a_retired_agent_and_its_quarantined_blocks_stay_until_its_last_transfer() {
    let library = Simulated::new();
    let (producer, region, agents) =
        (ProducerAgent::new(&library, "p"), Region::allocate(4, BLOCK), agents(&library));
    let remote = agents.remote(producer.offer.clone()).expect("an offer");
    library.mode(Mode::InFlight);
    let (lost, healthy) =
        (acquire(&agents, &remote, &region).expect("one"), acquire(&agents, &remote, &region).expect("two"));
    let request = post(&lost, &producer, &region, 1);
    let other = post(&healthy, &producer, &region, 2);
    let returned = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            lost.quarantine(request);
            returned.store(true, Ordering::Release);
        });
        // Later reads get a new agent as soon as the first is retired.
        let begun = Instant::now();
        while agents.created() < 2 {
            assert!(begun.elapsed() < Duration::from_secs(20), "no new agent");
            drop(acquire(&agents, &remote, &region).expect("another agent"));
        }
        assert!(!returned.load(Ordering::Acquire), "a turn of the old agent is left");
        assert!(!healthy.may_post(Duration::ZERO) && healthy.may_post(Duration::from_secs(3600)));
        // The reason for the wait: the bytes of the failed read still arrive.
        assert_eq!(library.deliver(), 2 * BLOCK);
        assert_eq!(region.read_block(BlockId(1)), [9; BLOCK]);
        healthy.agent().release(other);
        drop(healthy);
        waiting.join().expect("no panic");
    });
    assert!(returned.load(Ordering::Acquire));
    assert_eq!(library.agents(), 2, "the producer's and the new one");
}

#[test]
fn agents_that_do_not_end_are_bounded() {
    let library = Simulated::new();
    let (producer, region, agents) =
        (ProducerAgent::new(&library, "p"), Region::allocate(8, BLOCK), agents(&library));
    let remote = agents.remote(producer.offer.clone()).expect("an offer");
    library.mode(Mode::InFlight);
    thread::scope(|scope| {
        let mut held = Vec::new();
        for n in 0..RETIRED_MAX {
            let keeps = acquire(&agents, &remote, &region).expect("room for one more");
            let lost = acquire(&agents, &remote, &region).expect("room for one more");
            let request = post(&lost, &producer, &region, n as u32);
            scope.spawn(move || lost.quarantine(request));
            let begun = Instant::now();
            while keeps.may_post(Duration::ZERO) {
                assert!(begun.elapsed() < Duration::from_secs(20), "not retired");
            }
            held.push(keeps);
        }
        let full = refused(acquire(&agents, &remote, &region));
        assert!(full.contains("too many agents"), "{full}");
        drop(held);
    });
    drop(acquire(&agents, &remote, &region).expect("all are gone"));
    assert_eq!(library.deliver(), 0, "and so is what they were to write");
}

#[test]
fn metadata_of_another_agent_is_refused_without_harm_to_reads() {
    let library = Simulated::new();
    let (p, hostile) = (ProducerAgent::new(&library, "p"), ProducerAgent::new(&library, "hostile"));
    let (region, agents) = (Region::allocate(4, BLOCK), agents(&library));
    let remote = agents.remote(p.offer.clone()).expect("an offer");
    let guard = acquire(&agents, &remote, &region).expect("it is known");
    let forged = Offer { metadata: p.offer.metadata.clone(), ..hostile.offer.clone() };
    assert!(refused(agents.remote(forged)).contains("another agent"));
    let request = post(&guard, &p, &region, 3);
    guard.agent().release(request);
    assert_eq!(region.read_block(BlockId(3)), [9; BLOCK]);
}

#[test]
fn mismatched_metadata_is_refused_and_its_agent_is_loaded_again() {
    let library = Simulated::new();
    library.hides_owner();
    let (p, hostile) = (ProducerAgent::new(&library, "p"), ProducerAgent::new(&library, "hostile"));
    let (region, agents) = (Region::allocate(4, BLOCK), agents(&library));
    let remote = agents.remote(p.offer.clone()).expect("an offer");
    drop(acquire(&agents, &remote, &region).expect("it is known"));
    // The offer has its own name and the metadata of the other agent.
    let forged = Offer { metadata: p.offer.metadata.clone(), ..hostile.offer.clone() };
    assert!(refused(agents.remote(forged)).contains("another agent"));
    // The offer has the name of the other agent.
    let forged = Offer { name: "p".into(), ..hostile.offer.clone() };
    assert!(refused(agents.remote(forged)).contains("another producer"));
    let garbage = Offer { metadata: b"garbage".to_vec(), ..hostile.offer.clone() };
    assert!(agents.remote(garbage).is_err());
    library.mode(Mode::Done);
    let guard = acquire(&agents, &remote, &region).expect("still known");
    let request = post(&guard, &p, &region, 3);
    guard.agent().release(request);
    assert_eq!(region.read_block(BlockId(3)), [9; BLOCK]);
}

#[test]
fn metadata_that_covers_less_than_the_pool_ends_reads_before_a_byte_moves() {
    let library = Simulated::new();
    let mut producer = ProducerAgent::new(&library, "p");
    let base = producer.pool.block_ptr(BlockId(4)).addr();
    producer.offer.metadata = metadata("p", &[host(base, BLOCK)]);
    let (region, agents) = (Region::allocate(4, BLOCK), agents(&library));
    let remote = agents.remote(producer.offer.clone()).expect("an offer");
    let guard = acquire(&agents, &remote, &region).expect("it is known");
    let (from, into) = (producer.pool.block_ptr(BlockId(0)).addr(), region.block_ptr(BlockId(0)).addr());
    assert!(prepare(&guard, "p", ReadDescriptor { from, into, len: BLOCK }).is_err());
    assert_eq!(agents.created(), 1, "nothing was in flight");
}

#[test]
fn a_producer_is_dropped_with_its_last_connection_and_may_reconnect() {
    let library = Simulated::new();
    let (producer, region, agents) =
        (ProducerAgent::new(&library, "p"), Region::allocate(4, BLOCK), agents(&library));
    let first = agents.remote(producer.offer.clone()).expect("an offer");
    let second = agents.remote(producer.offer.clone()).expect("the same offer");
    assert!(Arc::ptr_eq(&first, &second));
    drop(first);
    let guard = acquire(&agents, &second, &region).expect("still known");
    let piece = ReadDescriptor {
        from: producer.pool.block_ptr(BlockId(0)).addr(),
        into: region.block_ptr(BlockId(0)).addr(),
        len: BLOCK,
    };
    let request = prepare(&guard, "p", piece).expect("known");
    guard.agent().release(request);
    drop(second);
    assert!(prepare(&guard, "p", piece).is_err(), "forgotten");
    drop(guard);
    let again = agents.remote(producer.offer.clone()).expect("an offer");
    let guard = acquire(&agents, &again, &region).expect("known again");
    assert!(prepare(&guard, "p", piece).is_ok());
}

/// Host memory in place of device memory.
#[derive(Debug)]
struct FakeDevicePool(Region);

impl DevicePool for FakeDevicePool {
    fn memory(&self) -> io::Result<Memory> {
        let base = self.0.block_ptr(BlockId(0)).expose_provenance();
        Ok(Memory { segment: Segment::Cuda(0), base, len: self.0.blocks() * BLOCK })
    }

    fn region(&self) -> &Region {
        &self.0
    }

    fn enter(&self) -> io::Result<()> {
        Ok(())
    }

    fn landed(&self, _: &[BlockId]) {}
}

#[test]
fn a_devices_pool_that_was_not_taken_is_shown_again_after_a_pause_that_grows() {
    let library = Simulated::new();
    library.without_cuda();
    let producer = ProducerAgent::new(&library, "p");
    let device = Arc::new(FakeDevicePool(Region::allocate(4, BLOCK)));
    let agents = Agents::new(Arc::new(SimulatedLibrary(Arc::clone(&library))), Some(device));
    let passes = || {
        let mut state = lock(&agents.state);
        let failure = state.registration_failure.as_mut().expect("it was not taken");
        failure.until = Instant::now();
        failure.pause
    };
    let mut pauses = Vec::new();
    for tries in 1..=9 {
        for _ in 0..3 {
            let why = refused(agents.remote(producer.offer.clone()));
            assert!(why.contains("register_mem"), "{why}");
        }
        assert_eq!(library.made(), 1 + tries, "the producer's agent, and one for each pause");
        pauses.push(passes().as_secs());
    }
    assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 640, 640]);
    library.with_cuda();
    agents.remote(producer.offer.clone()).expect("NIXL takes the pool now");
    assert!(lock(&agents.state).registration_failure.is_none());
    assert_eq!(agents.created(), 1);
}
