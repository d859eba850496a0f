//! Subscriptions to engines' KV events: connections, messages and known blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Value, json};

use super::page::Scrape;
use super::registry::families;

families! {
    gauge CONNECTED("baton_router_kv_events_connected", ["engine"]):
        "1 while the router is connected to every publisher of an engine's KV events, one per data-parallel rank. No \
         sample: none is configured.";
    counter BATCHES("baton_router_kv_events_batches_total", ["engine"]):
        "Messages with KV events received from an engine.";
    counter GAPS("baton_router_kv_events_gaps_total", ["engine"]):
        "Times that messages were lost or unreadable; the router then discards the engine's known blocks.";
    gauge BLOCKS("baton_router_kv_events_blocks", ["engine"]):
        "KV blocks that an engine holds, according to its events.";
    counter LEFT_OUT("baton_router_kv_events_left_out_total", ["engine", "reason"]):
        "Events ignored in whole or in part: malformed, attention, tier, extra_keys, parent, bound, type.";
}

/// The subscriptions to one engine: one per data-parallel rank.
pub(crate) struct EngineSubscriptions(Vec<(String, Arc<SubscriptionStats>)>);

impl EngineSubscriptions {
    /// Of these publishers; `None` without any.
    pub(crate) fn new(publishers: Vec<(String, Arc<SubscriptionStats>)>) -> Option<Self> {
        (!publishers.is_empty()).then_some(Self(publishers))
    }

    /// The subscriptions as JSON; counts are those of all ranks.
    pub(crate) fn json(&self) -> Value {
        let publishers: Vec<&str> = self.0.iter().map(|(publisher, _)| publisher.as_str()).collect();
        json!({
            "publisher": publishers.join(", "),
            "connected": self.is_connected(),
            "batches": self.sum(SubscriptionStats::batches),
            "gaps": self.sum(SubscriptionStats::gaps),
            "blocks": self.sum(SubscriptionStats::blocks),
            "left_out": self.ignored_json(),
        })
    }

    /// The ignored events as an object with the reasons' labels as names.
    pub(crate) fn ignored_json(&self) -> Value {
        self.ignored().map(|(reason, count)| (reason.label().to_owned(), Value::from(count))).collect()
    }

    /// Whether every publisher is connected.
    fn is_connected(&self) -> bool {
        self.0.iter().all(|(_, stats)| stats.is_connected())
    }

    fn sum(&self, of: impl Fn(&SubscriptionStats) -> u64) -> u64 {
        self.0.iter().map(|(_, stats)| of(stats)).sum()
    }

    /// Counts of ignored events by reason, without reasons that did not occur.
    fn ignored(&self) -> impl Iterator<Item = (IgnoredEventReason, u64)> + '_ {
        let counts = IgnoredEventReason::ALL.map(|reason| (reason, self.sum(|stats| stats.ignored(reason))));
        counts.into_iter().filter(|(_, count)| *count > 0)
    }
}

/// Adds the statistics of an engine's subscriptions to the scrape.
pub(crate) fn look_up(scrape: &mut Scrape, engine: &str, of: &EngineSubscriptions) {
    scrape.put(&CONNECTED, &[engine], f64::from(u8::from(of.is_connected())));
    // Counts stay far below 2^53.
    scrape.put(&BATCHES, &[engine], of.sum(SubscriptionStats::batches) as f64);
    scrape.put(&GAPS, &[engine], of.sum(SubscriptionStats::gaps) as f64);
    scrape.put(&BLOCKS, &[engine], of.sum(SubscriptionStats::blocks) as f64);
    for (reason, count) in of.ignored() {
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

    /// Ignored events with this reason.
    fn ignored(&self, reason: IgnoredEventReason) -> u64 {
        self.ignored[reason as usize].load(Ordering::Relaxed)
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
        /// Blocks on another host.
        Tier => "tier",
        /// Blocks with an image, embeddings or an unnamed adapter in their key.
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
