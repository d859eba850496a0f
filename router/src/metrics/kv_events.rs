//! Subscriptions to engines' KV events: connections, messages and known blocks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::page::Scrape;
use super::registry::families;

families! {
    gauge CONNECTED("baton_router_kv_events_connected", ["engine"]):
        "1 while the router is connected to an engine's publisher of KV events. No sample: none is configured.";
    counter BATCHES("baton_router_kv_events_batches_total", ["engine"]):
        "Messages with KV events received from an engine.";
    counter GAPS("baton_router_kv_events_gaps_total", ["engine"]):
        "Times that messages were lost or unreadable; the router then discards the engine's known blocks.";
    gauge BLOCKS("baton_router_kv_events_blocks", ["engine"]):
        "KV blocks that an engine holds, according to its events.";
    counter LEFT_OUT("baton_router_kv_events_left_out_total", ["engine", "reason"]):
        "Events ignored in whole or in part: malformed, attention, tier, extra_keys, parent, bound, type.";
}

/// Adds the statistics of a subscription to the scrape.
pub(crate) fn look_up(scrape: &mut Scrape, engine: &str, stats: &SubscriptionStats) {
    scrape.put(&CONNECTED, &[engine], f64::from(u8::from(stats.is_connected())));
    // Counts stay far below 2^53.
    scrape.put(&BATCHES, &[engine], stats.batches() as f64);
    scrape.put(&GAPS, &[engine], stats.gaps() as f64);
    scrape.put(&BLOCKS, &[engine], stats.blocks() as f64);
    for (reason, count) in stats.ignored() {
        scrape.put(&LEFT_OUT, &[engine, reason.label()], count as f64);
    }
}

/// Statistics of a subscription.
#[derive(Debug, Default)]
pub(crate) struct SubscriptionStats {
    connected: AtomicBool,
    batches: AtomicU64,
    gaps: AtomicU64,
    blocks: AtomicU64,
    ignored: [AtomicU64; IgnoredEventReason::ALL.len()],
    /// The subscription has ended: later messages have no effect.
    ended: AtomicBool,
}

impl SubscriptionStats {
    /// Sets whether a publisher is connected now.
    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    /// Counts a message.
    pub(crate) fn count_batch(&self) {
        self.batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts lost or unreadable messages.
    pub(crate) fn count_gap(&self) {
        self.gaps.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the number of blocks that the engine holds.
    pub(crate) fn set_blocks(&self, blocks: usize) {
        self.blocks.store(blocks as u64, Ordering::Relaxed);
    }

    /// Ends the subscription; [`Self::has_ended`] returns true from now on.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether a publisher is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Messages received since the subscription began.
    pub(crate) fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Times that messages were lost or unreadable and the known blocks were discarded.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// Blocks that the engine is known to hold.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Counts of ignored events by reason, without reasons that did not occur.
    pub(crate) fn ignored(&self) -> impl Iterator<Item = (IgnoredEventReason, u64)> + '_ {
        let counts = self.ignored.iter().map(|count| count.load(Ordering::Relaxed));
        IgnoredEventReason::ALL.into_iter().zip(counts).filter(|(_, count)| *count > 0)
    }

    /// The same counts as an object with the reasons' labels as names.
    pub(crate) fn ignored_json(&self) -> serde_json::Value {
        self.ignored()
            .map(|(reason, count)| (reason.label().to_owned(), serde_json::Value::from(count)))
            .collect()
    }

    /// Counts an ignored event; returns whether it is the first with this reason.
    pub(crate) fn count_ignored(&self, reason: IgnoredEventReason) -> bool {
        self.ignored[reason as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Whether the subscription has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

baton_connector::labelled! {
    /// Why an event is ignored.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum IgnoredEventReason {
        Malformed => "malformed",
        /// Blocks of a cache group without full attention.
        Attention => "attention",
        /// Blocks on another medium than the device, or on another host.
        Tier => "tier",
        /// Blocks with a salt, an adapter or an image in their key.
        ExtraKeys => "extra_keys",
        /// Blocks whose parent, and so whose prompt, is unknown.
        Parent => "parent",
        /// Blocks over `prefix_index.chunks_per_engine`.
        Bound => "bound",
        /// An event of an unknown type.
        Type => "type",
    }
}

impl IgnoredEventReason {
    /// Whether the engine's cache can serve prompts that the router does not know, and an operator can change that.
    pub(crate) fn hides_cached_blocks(self) -> bool {
        matches!(self, Self::Malformed | Self::Attention | Self::Bound)
    }
}
