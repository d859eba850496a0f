//! Engines that tell of their caches: whether they are heard, and what is known of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::page::Scrape;
use super::registry::Family;

static CONNECTED: Family = Family::gauge(
    "baton_router_kv_events_connected",
    &["engine"],
    "1 while the router is connected to an engine's publisher of KV events. No sample: none is configured.",
);
static BATCHES: Family = Family::counter(
    "baton_router_kv_events_batches_total",
    &["engine"],
    "Messages with KV events received from an engine.",
);
static GAPS: Family = Family::counter(
    "baton_router_kv_events_gaps_total",
    &["engine"],
    "Times that messages were lost or unreadable; the router then discards the engine's known blocks.",
);
static BLOCKS: Family = Family::gauge(
    "baton_router_kv_events_blocks",
    &["engine"],
    "KV blocks that an engine holds, according to its events.",
);

static LEFT_OUT: Family = Family::counter(
    "baton_router_kv_events_left_out_total",
    &["engine", "reason"],
    "Events ignored in whole or in part: malformed, attention, tier, extra_keys, parent, bound, type.",
);

pub(super) static FAMILIES: &[&Family] = &[&CONNECTED, &BATCHES, &GAPS, &BLOCKS, &LEFT_OUT];

/// Looks up what became of a subscription.
pub(crate) fn look_up(scrape: &mut Scrape, engine: &str, told: &Told) {
    scrape.put(&CONNECTED, &[engine], f64::from(u8::from(told.is_connected())));
    // Counts stay far below 2^53.
    scrape.put(&BATCHES, &[engine], told.batches() as f64);
    scrape.put(&GAPS, &[engine], told.gaps() as f64);
    scrape.put(&BLOCKS, &[engine], told.blocks() as f64);
    for (why, count) in told.left_out() {
        scrape.put(&LEFT_OUT, &[engine, why.label()], count as f64);
    }
}

/// What has become of a subscription.
#[derive(Debug, Default)]
pub(crate) struct Told {
    connected: AtomicBool,
    batches: AtomicU64,
    gaps: AtomicU64,
    blocks: AtomicU64,
    left_out: [AtomicU64; LeftOut::ALL.len()],
    /// The subscription is over: nothing that comes changes anything any more.
    over: AtomicBool,
}

impl Told {
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

    /// The subscription is over. Happens before [`Self::is_over`] returns true.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Whether a publisher is listened to now.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Messages that came, since the subscription began.
    pub(crate) fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Times that something was missed or could not be read, and everything was forgotten.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// Blocks that the engine is known to hold.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }
}

impl Told {
    /// Events that change nothing of what is known, by why; only what has been seen.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = (LeftOut, u64)> + '_ {
        let counts = self.left_out.iter().map(|count| count.load(Ordering::Relaxed));
        LeftOut::ALL.into_iter().zip(counts).filter(|(_, count)| *count > 0)
    }

    /// The same as an object: a reason's label to its count.
    pub(crate) fn left_out_json(&self) -> serde_json::Value {
        self.left_out().map(|(why, count)| (why.label().to_owned(), serde_json::Value::from(count))).collect()
    }

    /// Counts an event that was left out; whether it is the first of its kind.
    pub(crate) fn leave_out(&self, why: LeftOut) -> bool {
        self.left_out[why as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Whether the subscription is over.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

/// Why an event does not change what is known of an engine's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftOut {
    Malformed,
    /// Blocks of a cache group without full attention.
    Attention,
    /// Blocks on another medium than the device, or on another host.
    Tier,
    /// Blocks with a salt, an adapter or an image in their key.
    ExtraKeys,
    /// Blocks whose parent is not known, so that their prompt is not.
    Parent,
    /// Blocks over `prefix_index.chunks_per_engine`.
    Bound,
    /// An event of a type that the router does not know.
    Type,
}

impl LeftOut {
    pub(crate) const ALL: [Self; 7] = [
        Self::Malformed,
        Self::Attention,
        Self::Tier,
        Self::ExtraKeys,
        Self::Parent,
        Self::Bound,
        Self::Type,
    ];

    /// As metrics, logs and explanations have it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Attention => "attention",
            Self::Tier => "tier",
            Self::ExtraKeys => "extra_keys",
            Self::Parent => "parent",
            Self::Bound => "bound",
            Self::Type => "type",
        }
    }

    /// Whether the engine's cache can serve prompts that the router does not know of, and an operator can change that.
    pub(crate) fn is_a_surprise(self) -> bool {
        matches!(self, Self::Malformed | Self::Attention | Self::Bound)
    }
}
