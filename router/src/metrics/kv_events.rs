//! Engines that tell of their caches: whether they are heard, and what is known of them.

use super::page::Scrape;
use super::registry::Family;
use crate::engines::caches::kv_events::Told;

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
