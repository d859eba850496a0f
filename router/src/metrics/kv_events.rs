//! Engines that tell of their caches: whether they are heard, and what is known of them.

use super::page::Scrape;
use super::registry::Family;
use crate::kv_events::Told;

static CONNECTED: Family = Family::gauge(
    "baton_router_kv_events_connected",
    &["engine"],
    "1 while the publisher of an engine's KV events is listened to. No sample: none is configured.",
);
static BATCHES: Family = Family::counter(
    "baton_router_kv_events_batches_total",
    &["engine"],
    "Messages of KV events that came from an engine since it is listened to.",
);
static GAPS: Family = Family::counter(
    "baton_router_kv_events_gaps_total",
    &["engine"],
    "Times that messages were missed, or one could not be read: what the engine had told was forgotten.",
);
static BLOCKS: Family = Family::gauge(
    "baton_router_kv_events_blocks",
    &["engine"],
    "KV blocks that an engine is known to hold by what it told.",
);

static LEFT_OUT: Family = Family::counter(
    "baton_router_kv_events_left_out_total",
    &["engine", "reason"],
    "Events that were left out, or of which a part was: malformed, attention, tier, extra_keys, parent, bound, type.",
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
