//! The memory of an engine's metrics without a scraper, in bytes.

#![allow(unsafe_code, reason = "a counting allocator needs it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use baton_connector::lease::CloseCause;
use baton_connector::ledger::ClosedLease;
use baton_connector::{Handle, RequestId};
use baton_engine::blocks::pool::BlockUsage;
use baton_engine::metrics::EngineMetrics;
use baton_engine::offload::OffloadCounts;
use baton_engine::scheduler::SchedulerLoad;
use baton_engine::scheduler::sequence::FinishReason;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

struct CountingAllocator;

fn count(bytes: isize) {
    HELD.set(HELD.get() + bytes);
}

// SAFETY: every call is forwarded unchanged; the counter belongs to the thread and does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller meets the requirements of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes.cast_signed() - layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Every counted event, once.
fn everything(metrics: &EngineMetrics) {
    let moment = Duration::from_millis(3);
    metrics.publish(BlockUsage { total: 4, free: 4, ..BlockUsage::default() }, SchedulerLoad::default(), 0);
    metrics.first_token(moment, 10, 4, 2);
    metrics.handed_off(10);
    metrics.next_token(moment);
    metrics.finished(FinishReason::Stop, moment);
    metrics.transfer(moment, 4096);
    metrics.transfer_failed();
    metrics.carried("tcp", 4096);
    metrics.load_failed("recompute");
    metrics.lease_opened(2);
    metrics.early_lease();
    metrics.lease_settled(&ClosedLease {
        handle: Handle(1),
        request: RequestId::new("r").expect("a name"),
        blocks: Vec::new(),
        cause: CloseCause::Expired,
        reason: CloseCause::Expired.label().into(),
        lifetime: moment,
        readers: (0, 1),
    });
    metrics.notice("aborted", "released");
    metrics.early_rejection("invalid");
    metrics.cache_config(16, 4);
    metrics.tiers(4096).publish(&OffloadCounts::default());
}

#[test]
fn metrics_that_are_never_scraped_hold_no_more_after_400_000_tokens() {
    let metrics = EngineMetrics::new("demo");
    everything(&metrics);
    let held = HELD.get();
    for request in 0..400 {
        everything(&metrics);
        for _ in 0..1_000 {
            metrics.next_token(Duration::from_millis(request));
        }
    }
    assert_eq!(HELD.get() - held, 0, "bytes");
    let page = metrics.render();
    let counted = "vllm:inter_token_latency_seconds_count{model_name=\"demo\",engine=\"0\"} 400401\n";
    assert!(page.contains(counted), "{page}");
}
