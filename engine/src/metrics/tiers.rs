//! The contents and counts of the offload tiers, per tier.

use metrics::{Counter, Gauge, Label};

use super::Registrar;
use crate::offload::{OffloadCounts, OffloadFault, Tier, TierCounts};

/// The metrics of one tier.
struct OneTierMetrics {
    blocks: Gauge,
    capacity: Gauge,
    stored: Counter,
    stored_bytes: Counter,
    loaded: Counter,
    loaded_bytes: Counter,
    evicted: Counter,
}

impl OneTierMetrics {
    fn publish(&self, counts: TierCounts, block_bytes: u64) {
        self.blocks.set(counts.blocks as f64);
        self.capacity.set(counts.capacity as f64);
        self.stored.absolute(counts.stored);
        self.stored_bytes.absolute(counts.stored * block_bytes);
        self.loaded.absolute(counts.loaded);
        self.loaded_bytes.absolute(counts.loaded * block_bytes);
        self.evicted.absolute(counts.evicted);
    }
}

/// The metrics of all tiers of one engine core.
pub struct TierMetrics {
    block_bytes: u64,
    host: OneTierMetrics,
    disk: OneTierMetrics,
    hit_tokens: Counter,
    not_stored: Counter,
    not_written: Counter,
    faults: [Counter; OffloadFault::ALL.len()],
    disk_suspended: Gauge,
}

impl TierMetrics {
    pub(super) fn new(make: &Registrar<'_>, block_bytes: usize) -> Self {
        let of_tier = |tier: Tier| {
            let counter = |name, help| make.counter_labelled(name, help, &[Label::new("tier", tier.label())]);
            let gauge = |name, help| make.gauge_labelled(name, help, &[Label::new("tier", tier.label())]);
            OneTierMetrics {
                blocks: gauge("baton_kv_offload_blocks", "Blocks in a tier."),
                capacity: gauge("baton_kv_offload_capacity_blocks", "Blocks that a tier can hold."),
                stored: counter("baton_kv_offload_stored_blocks_total", "Blocks copied into a tier."),
                stored_bytes: counter("baton_kv_offload_stored_bytes_total", "Bytes copied into a tier."),
                loaded: counter(
                    "baton_kv_offload_loaded_blocks_total",
                    "Blocks copied from a tier to the device.",
                ),
                loaded_bytes: counter(
                    "baton_kv_offload_loaded_bytes_total",
                    "Bytes copied from a tier to the device.",
                ),
                evicted: counter("baton_kv_offload_evicted_blocks_total", "Blocks evicted from a tier."),
            }
        };
        let skipped =
            "Full blocks not stored in a tier: no slot or worker was free, or the disk is suspended.";
        let skipped = |tier: Tier| {
            make.counter_with("baton_kv_offload_skipped_blocks_total", skipped, "tier", tier.label())
        };
        let failed = "Failed copies between tiers, by fault. No request fails because of them.";
        Self {
            block_bytes: block_bytes as u64,
            host: of_tier(Tier::Host),
            disk: of_tier(Tier::Disk),
            hit_tokens: make.counter(
                "baton_kv_offload_hit_tokens_total",
                "Prompt tokens loaded from a tier instead of computed.",
            ),
            not_stored: skipped(Tier::Host),
            not_written: skipped(Tier::Disk),
            faults: OffloadFault::ALL.map(|fault| {
                make.counter_with("baton_kv_offload_failures_total", failed, "fault", fault.label())
            }),
            disk_suspended: make
                .gauge("baton_kv_offload_disk_suspended", "1 while a failing disk is suspended."),
        }
    }

    /// Publishes the state of the tiers, after each step.
    pub fn publish(&self, counts: &OffloadCounts) {
        self.host.publish(counts.host, self.block_bytes);
        self.disk.publish(counts.disk, self.block_bytes);
        self.hit_tokens.absolute(counts.hit_tokens);
        self.not_stored.absolute(counts.not_stored);
        self.not_written.absolute(counts.not_written);
        for (counter, count) in self.faults.iter().zip(counts.faults) {
            counter.absolute(count);
        }
        self.disk_suspended.set(f64::from(u8::from(counts.disk_suspended)));
    }
}
