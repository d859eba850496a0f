//! The guarantees, one function each. See `mod.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::lease::{CloseCause, LeaseTerms};
use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, ReadOrder, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader};

use super::producer::contents;
use super::{GatePoint, TestProducer, TransportHarness};

/// Starts the harness of a producer.
pub type Start<'a> = &'a dyn Fn(Arc<TestProducer>) -> Box<dyn TransportHarness>;

const BLOCK: usize = 4096;
const READER: Reader = reader(7);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);
static GO: AtomicBool = AtomicBool::new(false);

const fn reader(consumer: u64) -> Reader {
    Reader::sole(consumer)
}

fn order(handle: Handle, reader: Reader, first: usize, into: &[u32]) -> ReadOrder {
    let into = into.iter().map(|&b| BlockId(b)).collect();
    ReadOrder { handle, reader, part: Part::Blocks { first }, into }
}

/// A producer of 64 blocks of 4 KiB, and its harness.
fn started(start: Start<'_>, terms: LeaseTerms) -> (Arc<TestProducer>, Box<dyn TransportHarness>) {
    let producer = TestProducer::new(64, BLOCK, terms);
    let harness = start(Arc::clone(&producer));
    (producer, harness)
}

/// A producer with blocks of at least a batch, so that a read of a few blocks takes several batches.
fn started_with_large_blocks(
    start: Start<'_>,
    terms: LeaseTerms,
) -> (Arc<TestProducer>, Box<dyn TransportHarness>) {
    let producer = TestProducer::new(8, 2 << 20, terms);
    let harness = start(Arc::clone(&producer));
    (producer, harness)
}

fn landed(region: &Region, into: &[u32], from: &[u32]) {
    for (&here, &there) in into.iter().zip(from) {
        let (found, sent) = (region.read_block(BlockId(here)), contents(there, region.block_bytes()));
        assert!(found == sent, "block {there} of the producer in block {here} of the consumer");
    }
}

/// A number generator for tables: xorshift, seeded by the test.
struct TestRng(u64);

impl TestRng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    /// `count` different numbers below `n`, in any order.
    fn table(&mut self, n: usize, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in 0..count {
            let other = i + self.below(n - i);
            all.swap(i, other);
        }
        all.truncate(count);
        all
    }
}

pub fn blocks_arrive_byte_by_byte_in_the_order_of_the_table(start: Start<'_>) {
    for (seed, block_bytes) in [(1, 1), (2, 100), (3, 4096), (4, 16 << 10), (5, 300_001), (6, (1 << 20) + 1)]
    {
        let blocks = (6_usize << 20).div_ceil(block_bytes).clamp(3, 700);
        let producer = TestProducer::new(blocks, block_bytes, LeaseTerms::default());
        let harness = start(Arc::clone(&producer));
        let region = Region::allocate(blocks, block_bytes);
        let mut rng = TestRng(seed);
        for _ in 0..4 {
            let count = 1 + rng.below(blocks);
            let (from, into) = (rng.table(blocks, count), rng.table(blocks, count));
            let handle = producer.lease(&from, 1);
            let order = order(handle, READER, 0, &into);
            harness.transport().read(&harness.peer(), &order, &region, &GO).expect("a live lease");
            assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Valid));
            landed(&region, &into, &from);
        }
        assert_eq!(producer.closed_leases().iter().filter(|s| s.cause == CloseCause::Fetched).count(), 4);
    }
}

pub fn landed_blocks_are_reported(start: Start<'_>) {
    for (block_bytes, blocks) in [(4096, 700), ((1 << 20) + 1, 5)] {
        let producer = TestProducer::new(blocks, block_bytes, LeaseTerms::default());
        let harness = start(Arc::clone(&producer));
        let (region, mut rng) = (Region::allocate(blocks, block_bytes), TestRng(9));
        let (from, into) = (rng.table(blocks, blocks), rng.table(blocks, blocks));
        let order = order(producer.lease(&from, 1), READER, 0, &into);
        let (mut reported, mut times) = (Vec::new(), 0);
        let read = harness.transport().read_with(&harness.peer(), &order, &region, &GO, &mut |now| {
            times += 1;
            for block in now {
                let (found, sent) = (region.read_block(*block), contents(from[reported.len()], block_bytes));
                assert!(found == sent, "block {} is reported before it has landed", block.0);
                reported.push(*block);
            }
        });
        assert_eq!(read, Ok(()));
        // Either all blocks are reported, and not all at the end, or none if they land in a device's memory.
        let all = reported == order.into && times > 1;
        assert!(reported.is_empty() || all, "{times} times, of {reported:?}");
        landed(&region, &into, &from);
    }
}

pub fn a_read_starts_at_any_entry_of_the_table(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let region = Region::allocate(64, BLOCK);
    let handle = producer.lease(&[9, 8, 7, 6, 5], 1);
    let order = order(handle, READER, 3, &[0, 1]);
    harness.transport().read(&harness.peer(), &order, &region, &GO).expect("a live lease");
    landed(&region, &[0, 1], &[6, 5]);
}

pub fn neighbours_and_strangers_in_memory_arrive_alike(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let region = Region::allocate(64, BLOCK);
    let from = [3, 4, 5, 20, 19, 18, 40, 41, 0, 63];
    let into = [10, 11, 12, 13, 50, 49, 48, 2, 1, 0];
    let order = order(producer.lease(&from, 1), READER, 0, &into);
    harness.transport().read(&harness.peer(), &order, &region, &GO).expect("a live lease");
    landed(&region, &into, &from);
    let untouched = (0..64_u32).filter(|b| !into.contains(b));
    for block in untouched {
        assert!(region.read_block(BlockId(block)).iter().all(|&byte| byte == 0), "block {block} was written");
    }
}

pub fn a_closed_lease_is_gone(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), harness.peer());
    let region = Region::allocate(64, BLOCK);
    let handle = producer.lease(&[1, 2], 1);
    assert_eq!(
        transport.heartbeat(&peer, &[handle, Handle(5)]),
        Ok(vec![HeartbeatReply::Renewed, HeartbeatReply::Gone])
    );
    assert_eq!(transport.release(&peer, handle, "client_gone"), Ok(ReleaseReply::Released));
    assert_eq!(transport.release(&peer, handle, "client_gone"), Ok(ReleaseReply::Already));
    assert_eq!(transport.release(&peer, Handle(5), "client_gone"), Ok(ReleaseReply::Unknown));
    let gone = transport.read(&peer, &order(handle, READER, 0, &[0, 1]), &region, &GO);
    assert_eq!(gone, Err(TransportError::Gone));
    assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Gone));
    assert_eq!(transport.heartbeat(&peer, &[handle]), Ok(vec![HeartbeatReply::Gone]));
    assert_eq!(&*producer.closed_leases()[0].reason, "client_gone");
}

pub fn a_lease_that_ends_in_mid_read_is_gone_and_so_is_its_verdict(start: Start<'_>) {
    let terms = LeaseTerms { drain: Duration::ZERO, ..LeaseTerms::default() };
    let (producer, harness) = started_with_large_blocks(start, terms);
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1, 2, 3], 1);
    producer.gate(GatePoint::Look(3));
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            harness.transport().read(&harness.peer(), &order(handle, READER, 0, &[4, 5, 6, 7]), &region, &GO)
        });
        producer.await_gate();
        let reply = harness.transport().release(&harness.peer(), handle, "gone");
        assert_eq!(reply, Ok(ReleaseReply::Draining), "with no time to drain");
        producer.open_gate();
        assert_eq!(read.join().unwrap(), Err(TransportError::Gone));
    });
    assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Gone));
    assert_eq!(producer.closed_leases().len(), 1);
    // The connection of the failed read can still be used.
    let next = producer.lease(&[5], 1);
    harness
        .transport()
        .read(&harness.peer(), &order(next, READER, 0, &[0]), &region, &GO)
        .expect("a live lease");
    landed(&region, &[0], &[5]);
}

pub fn a_lease_that_is_released_in_mid_read_is_drained_and_valid(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1, 2, 3], 1);
    producer.gate(GatePoint::Look(3));
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            harness.transport().read(&harness.peer(), &order(handle, READER, 0, &[4, 5, 6, 7]), &region, &GO)
        });
        producer.await_gate();
        assert_eq!(harness.transport().release(&harness.peer(), handle, "late"), Ok(ReleaseReply::Draining));
        producer.open_gate();
        assert_eq!(read.join().unwrap(), Ok(()));
    });
    assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Valid));
    landed(&region, &[4, 5, 6, 7], &[0, 1, 2, 3]);
    assert_eq!(producer.closed_leases()[0].cause, CloseCause::Fetched);
}

/// Waits for longer than the bound on silence.
#[allow(clippy::disallowed_methods, reason = "that nothing happens for so long is what is tested")]
fn outwait_silence(harness: &dyn TransportHarness) {
    thread::sleep(harness.silence() * 3 / 2);
}

pub fn blocks_that_are_still_computed_are_waited_for(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease_growing(&[0, 1, 2, 3], 1);
    let reported = AtomicUsize::new(0);
    let count = || reported.load(Ordering::Acquire);
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            let order = order(handle, READER, 0, &[4, 5, 6, 7]);
            harness.transport().read_with(&harness.peer(), &order, &region, &GO, &mut |blocks| {
                reported.fetch_add(blocks.len(), Ordering::AcqRel);
            })
        });
        for (block, ready) in [(1, 2), (2, 3)] {
            outwait_silence(&*harness);
            assert!(!read.is_finished(), "it waits for what is computed");
            producer.compute(handle, &[block], ready);
        }
        outwait_silence(&*harness);
        assert!(!read.is_finished(), "one block is missing");
        let early = count();
        producer.compute(handle, &[3], 3);
        assert!(producer.seal(handle));
        assert_eq!(read.join().unwrap(), Ok(()));
        assert!(count() == 0 || (early > 0 && count() == 4), "{early} early of {}", count());
    });
    landed(&region, &[4, 5, 6, 7], &[0, 1, 2, 3]);
    assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Valid));
    assert_eq!(producer.closed_leases()[0].cause, CloseCause::Fetched);
}

pub fn a_prefill_that_ends_early_is_gone_and_its_reader_is_not_waited_for(start: Start<'_>) {
    let terms = LeaseTerms { drain: Duration::from_secs(600), ..LeaseTerms::default() };
    let (producer, harness) = started_with_large_blocks(start, terms);
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease_growing(&[0, 1, 2, 3], 2);
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            harness.transport().read(&harness.peer(), &order(handle, READER, 0, &[4, 5, 6, 7]), &region, &GO)
        });
        producer.await_reader(handle);
        assert_eq!(
            harness.transport().release(&harness.peer(), handle, "aborted"),
            Ok(ReleaseReply::Draining)
        );
        assert_eq!(read.join().unwrap(), Err(TransportError::Gone));
    });
    assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Gone));
    assert_eq!(producer.closed_leases().len(), 1, "the reader has said that it is quiet");
    let next = producer.lease(&[5], 1);
    harness
        .transport()
        .read(&harness.peer(), &order(next, READER, 0, &[0]), &region, &GO)
        .expect("a live lease");
    landed(&region, &[0], &[5]);
}

pub fn no_read_is_valid_before_the_prefill_is_done(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let region = Region::allocate(64, BLOCK);
    let handle = producer.lease_growing(&[1, 2, 3], 2);
    let first = order(handle, READER, 0, &[0, 1]);
    harness.transport().read(&harness.peer(), &first, &region, &GO).expect("what is final can be read");
    landed(&region, &[0, 1], &[1, 2]);
    assert_eq!(harness.transport().finish(&harness.peer(), handle, READER), Ok(Verdict::Gone));
    // The producer notices a reader that stops while it waits.
    let (all, stop) = (order(handle, READER, 0, &[0, 1, 2]), AtomicBool::new(false));
    thread::scope(|scope| {
        let read = scope.spawn(|| harness.transport().read(&harness.peer(), &all, &region, &stop));
        producer.await_reader(handle);
        stop.store(true, Ordering::Release);
        assert_eq!(read.join().unwrap(), Err(TransportError::Stopped));
    });
    producer.await_failed(READER);
    let released = harness.transport().release(&harness.peer(), handle, "aborted");
    assert_eq!(released, Ok(ReleaseReply::Released));
}

pub fn another_epoch_is_gone(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), Peer { epoch: Epoch(1), ..harness.peer() });
    let region = Region::allocate(64, BLOCK);
    let handle = producer.lease(&[1], 1);
    let read = transport.read(&peer, &order(handle, READER, 0, &[0]), &region, &GO);
    assert_eq!(read, Err(TransportError::Gone));
    assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Gone));
    assert_eq!(transport.heartbeat(&peer, &[handle]), Ok(vec![HeartbeatReply::Gone]));
    assert_eq!(transport.release(&peer, handle, "x"), Ok(ReleaseReply::Already));
    assert_eq!(producer.live_leases(), 1, "a handle of another epoch names nothing here");
}

pub fn another_layout_is_refused(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let peer = Peer { fingerprint: 1, ..harness.peer() };
    let order = order(producer.lease(&[1], 1), READER, 0, &[0]);
    let read = harness.transport().read(&peer, &order, &Region::allocate(64, BLOCK), &GO);
    assert!(matches!(read, Err(TransportError::Refused(_))), "{read:?}");
}

pub fn a_range_outside_the_table_is_refused_and_the_next_read_works(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let region = Region::allocate(64, BLOCK);
    let handle = producer.lease(&[1, 2], 1);
    for (first, into) in [(0_usize, &[0_u32, 1, 2][..]), (2, &[0]), (usize::MAX, &[0]), (0, &[])] {
        let read =
            harness.transport().read(&harness.peer(), &order(handle, READER, first, into), &region, &GO);
        assert!(matches!(read, Err(TransportError::Refused(_))), "{first} {into:?}: {read:?}");
    }
    harness
        .transport()
        .read(&harness.peer(), &order(handle, READER, 0, &[0, 1]), &region, &GO)
        .expect("in range");
    landed(&region, &[0, 1], &[1, 2]);
}

pub fn a_raised_stop_flag_ends_the_read_soon_and_for_good(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1, 2, 3], 1);
    let stop = AtomicBool::new(false);
    producer.gate(GatePoint::Look(3));
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            harness.transport().read(
                &harness.peer(),
                &order(handle, READER, 0, &[4, 5, 6, 7]),
                &region,
                &stop,
            )
        });
        producer.await_gate();
        let raised = Instant::now();
        stop.store(true, Ordering::Release);
        assert_eq!(read.join().unwrap(), Err(TransportError::Stopped));
        assert!(raised.elapsed() < Duration::from_secs(1), "{:?}", raised.elapsed());
    });
    // From here on the blocks belong to another request. The producer continues to send.
    for block in 4..8 {
        region.write_block(BlockId(block), &vec![0xee; 2 << 20]);
    }
    producer.open_gate();
    producer.await_failed(READER);
    for block in 4..8 {
        assert!(region.read_block(BlockId(block)).iter().all(|&byte| byte == 0xee), "written after the stop");
    }
    let read =
        harness.transport().read(&harness.peer(), &order(handle, reader(8), 0, &[4, 5, 6, 7]), &region, &GO);
    assert_eq!(read, Ok(()), "another engine may still fetch");
}

pub fn a_producer_that_dies_in_mid_read_is_an_error(start: Start<'_>) {
    let (producer, mut harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1, 2, 3], 1);
    producer.gate(GatePoint::Look(3));
    let (transport, peer) = (harness.transport(), harness.peer());
    thread::scope(|scope| {
        let read =
            scope.spawn(|| transport.read(&peer, &order(handle, READER, 0, &[4, 5, 6, 7]), &region, &GO));
        producer.await_gate();
        let killing = scope.spawn(move || harness.kill());
        let read = read.join().unwrap();
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
        producer.open_gate();
        killing.join().unwrap();
    });
    assert!(transport.finish(&peer, handle, READER).is_err());
    assert!(transport.heartbeat(&peer, &[handle]).is_err());
}

pub fn a_silent_producer_is_an_error_within_the_bound(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1, 2, 3], 1);
    producer.gate(GatePoint::Look(3));
    let begun = Instant::now();
    let read =
        harness.transport().read(&harness.peer(), &order(handle, READER, 0, &[4, 5, 6, 7]), &region, &GO);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    assert!(begun.elapsed() < harness.silence() + SLACK, "{:?}", begun.elapsed());
    producer.open_gate();
    producer.await_failed(READER);
}

pub fn eight_consumers_read_at_once(start: Start<'_>) {
    let producer = TestProducer::new(256, 16 << 10, LeaseTerms::default());
    let harness = start(Arc::clone(&producer));
    let (transport, peer) = (harness.transport(), harness.peer());
    let shared = producer.lease(&(0..128).rev().collect::<Vec<_>>(), 8);
    thread::scope(|scope| {
        for consumer in 0..8_u32 {
            let (transport, peer, producer) = (&transport, &peer, &producer);
            scope.spawn(move || {
                let region = Region::allocate(256, 16 << 10);
                let (me, mut rng) = (reader(u64::from(consumer)), TestRng(u64::from(consumer) + 1));
                for _ in 0..5 {
                    let (from, into) = (rng.table(256, 100), rng.table(256, 100));
                    let own = producer.lease(&from, 1);
                    transport.read(peer, &order(own, me, 0, &into), &region, &GO).expect("a live lease");
                    assert_eq!(transport.finish(peer, own, me), Ok(Verdict::Valid));
                    landed(&region, &into, &from);
                }
                let into = rng.table(256, 128);
                transport.read(peer, &order(shared, me, 0, &into), &region, &GO).expect("a live lease");
                assert_eq!(transport.finish(peer, shared, me), Ok(Verdict::Valid));
                landed(&region, &into, &(0..128).rev().collect::<Vec<_>>());
            });
        }
    });
    assert_eq!(producer.closed_leases().iter().filter(|s| s.cause == CloseCause::Fetched).count(), 41);
    assert_eq!(producer.live_leases(), 0);
}

pub fn a_repeated_done_is_valid_and_a_strangers_is_not(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), harness.peer());
    let handle = producer.lease(&[1, 2], 1);
    let region = Region::allocate(64, BLOCK);
    assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Gone), "it has read nothing");
    transport.read(&peer, &order(handle, READER, 0, &[1, 2]), &region, &GO).expect("a live lease");
    for _ in 0..3 {
        assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Valid));
    }
    assert_eq!(transport.finish(&peer, handle, reader(8)), Ok(Verdict::Gone));
}

pub fn heartbeats_and_releases_do_not_wait_behind_a_read(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), harness.peer());
    let region = Region::allocate(8, 2 << 20);
    let (long, other) = (producer.lease(&[0, 1, 2, 3], 1), producer.lease(&[4], 1));
    producer.gate(GatePoint::Look(3));
    thread::scope(|scope| {
        let read =
            scope.spawn(|| transport.read(&peer, &order(long, READER, 0, &[4, 5, 6, 7]), &region, &GO));
        producer.await_gate();
        assert_eq!(transport.heartbeat(&peer, &[long, other]), Ok(vec![HeartbeatReply::Renewed; 2]));
        assert_eq!(transport.release(&peer, other, "x"), Ok(ReleaseReply::Released));
        producer.open_gate();
        assert_eq!(read.join().unwrap(), Ok(()));
    });
}

pub fn a_reader_that_gives_up_does_not_hold_a_release(start: Start<'_>) {
    let (producer, harness) = started(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), harness.peer());
    let handle = producer.lease(&[1, 2], 1);
    let region = Region::allocate(64, BLOCK);
    transport.read(&peer, &order(handle, READER, 0, &[1, 2]), &region, &GO).expect("a live lease");
    assert_eq!(transport.give_up(&peer, handle, READER), Ok(()));
    assert_eq!(transport.release(&peer, handle, "consumer_aborted"), Ok(ReleaseReply::Released));
    assert_eq!(producer.closed_leases()[0].blocks, [BlockId(1), BlockId(2)]);
}

pub fn a_read_that_breaks_off_is_known_to_the_producer(start: Start<'_>) {
    let (producer, harness) = started_with_large_blocks(start, LeaseTerms::default());
    let region = Region::allocate(8, 2 << 20);
    let handle = producer.lease(&[0, 1], 1);
    let stop = AtomicBool::new(false);
    producer.gate(GatePoint::Look(2));
    thread::scope(|scope| {
        let read = scope.spawn(|| {
            harness.transport().read(&harness.peer(), &order(handle, READER, 0, &[4, 5]), &region, &stop)
        });
        producer.await_gate();
        stop.store(true, Ordering::Release);
        assert!(read.join().unwrap().is_err());
    });
    producer.open_gate();
    producer.await_failed(READER);
    assert_eq!(
        harness.transport().release(&harness.peer(), handle, "consumer_aborted"),
        Ok(ReleaseReply::Released),
        "there is no reader to wait for"
    );
}

/// An idle connection may also keep the producer's shared memory mapped.
pub fn a_dead_producer_leaves_no_connection(start: Start<'_>) {
    let (_, mut harness) = started(start, LeaseTerms::default());
    let (transport, peer) = (harness.transport(), harness.peer());
    transport.heartbeat(&peer, &[Handle(1)]).expect("an answer");
    transport.sweep();
    assert_eq!(harness.idle_connections(), 1, "a living producer's connection is used again");
    harness.kill();
    let begun = std::time::Instant::now();
    while harness.idle_connections() > 0 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "its connection is kept");
        transport.sweep();
    }
}
