//! `GET /debug/kv`, `GET /debug/kv/events` and `GET /metrics`, in the form of Baton's engine.

use baton_connector_leases::event_log::EventPage;
use baton_connector_leases::service::oldest_leases;
use baton_openai::cluster::EventQuery;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};

use super::{HttpContext, Reply, json as json_reply};
use crate::metrics::Levels;
use crate::pool::PoolReading;

/// Blocks of a reading by state: free, cached, active, leased, landing. They add up to the pool (invariant 1).
fn blocks(context: &HttpContext, reading: &PoolReading) -> [usize; 5] {
    let PoolReading { counts, leased, .. } = reading;
    let (total, mut used) = (context.config.identity.blocks, 0);
    // Counts of one moment fit. A wrong one must not hide the others.
    let mut fit = |count: usize| {
        let count = count.min(total - used);
        used += count;
        count
    };
    let [free, cached, leased, landing] = [counts.free, counts.cached, *leased, counts.landing].map(&mut fit);
    [free, cached, total - used, leased, landing]
}

/// Blocks by state, requests by phase, leases by age and state.
pub(super) async fn debug_kv(context: &HttpContext) -> Reply {
    let reading = context.pool.fresh(&context.signals).await;
    let [free, cached, active, leased, landing] = blocks(context, &reading);
    let (leases, counts) = (context.producer.view(), context.producer.counts());
    let (loads, _, _) = context.consumer.counts();
    let identity = &context.config.identity;
    let rank = json!({
        "rank": identity.rank,
        "blocks": {
            "total": identity.blocks, "free": free, "cached": cached, "active": active, "leased": leased,
            "landing": landing, "storing": 0,
        },
        "blocks_age_ms": reading.at.elapsed().as_millis() as u64,
        "requests": {
            "waiting": reading.counts.waiting, "running": reading.counts.running, "fetching": loads,
            "loading": 0, "stopping": 0,
        },
        "leases": {"live": leases.len(), "opened": counts.opened, "late": counts.late, "unknown": counts.unknown},
        "oldest_leases": oldest_leases(&leases),
        "offload": null,
        "steps": null,
        "failed": null,
    });
    let mut body = rank.clone();
    body["engine"] = json!({
        "role": identity.role, "model": identity.model, "epoch": context.epoch.to_string(),
        "data_parallel_size": 1, "batch_invariant": false, "engine": identity.engine,
        "engine_id": identity.engine_id, "block_tokens": identity.block_tokens,
        "channel_host": context.config.channel_host,
    });
    body["cores"] = Value::Array(vec![rank]);
    json_reply(StatusCode::OK, body.to_string())
}

/// `?after=SEQ&wait_ms=MS&limit=N`: the events after number `after` (0: the oldest retained; `latest`: none, but the
/// latest number), as soon as there is one or after `wait_ms`.
pub(super) async fn events(context: &HttpContext, query: &EventQuery) -> Reply {
    let log = &context.log;
    let page = match query.after {
        None => EventPage { next: log.latest(), lost: 0, events: Vec::new() },
        Some(after) => log.page_within(after, query.limit, query.wait).await,
    };
    let identity = &context.config.identity;
    let body = json!({
        "engine": {"epoch": context.epoch.to_string(), "role": identity.role, "model": identity.model},
        "now_us": log.now_us(), "next": page.next, "lost": page.lost, "events": page.events,
    });
    json_reply(StatusCode::OK, body.to_string())
}

/// The metrics, in Prometheus' text format.
pub(super) fn metrics(context: &HttpContext) -> Reply {
    let (reading, counts) = (context.pool.latest(), context.producer.counts());
    let levels = Levels {
        leases: context.producer.live(),
        late: counts.late + counts.unknown,
        blocks: blocks(context, &reading),
    };
    let mut reply = json_reply(StatusCode::OK, context.metrics.render(&levels));
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    reply.headers_mut().insert(CONTENT_TYPE, text);
    reply
}
