//! `GET /debug/kv`: blocks by state, requests by phase, leases by age and state; the sums over all cores, and each
//! core by itself. `GET /debug/kv/events`: the event log.

use std::sync::Arc;

use baton_connector_leases::event_log::EventPage;
use baton_connector_leases::service::oldest_leases;
use baton_openai::ApiError;
use baton_openai::cluster::EventQuery;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};

use super::Frontend;
use super::access::authorize;
use super::reply::{self, Reply};
use crate::offload::{OffloadCounts, OffloadFault, TierCounts};
use crate::run::rank::DpRank;

/// The members that are summed over the cores.
const SUMMED: [&str; 5] = ["blocks", "requests", "leases", "offload", "steps"];

/// See the module's documentation.
pub(super) fn debug_kv(frontend: &Frontend, request: &Request<Incoming>) -> Result<Reply, ApiError> {
    authorize(frontend, request.headers())?;
    let cores: Vec<Value> = frontend.cores.iter().map(|core| rank_status(core)).collect();
    let mut body = cores[0].clone();
    for core in &cores[1..] {
        for part in SUMMED {
            add(&mut body[part], &core[part]);
        }
        if body["failed"].is_null() {
            body["failed"] = core["failed"].clone();
        }
        let leases = core["oldest_leases"].as_array().into_iter().flatten().cloned();
        body["oldest_leases"].as_array_mut().into_iter().for_each(|all| all.extend(leases.clone()));
    }
    // The sums belong to no rank.
    if let Some(body) = body.as_object_mut() {
        body.remove("rank");
    }
    body["engine"] = json!({
        "role": frontend.role.label(), "model": frontend.model.name,
        "epoch": frontend.cores[0].leases.epoch().to_string(), "data_parallel_size": cores.len(),
        "batch_invariant": frontend.batch_invariant,
    });
    body["cores"] = Value::Array(cores);
    Ok(reply::json(StatusCode::OK, body.to_string()))
}

/// Adds counts, also those in objects. A flag is true if it is true of one core.
fn add(sum: &mut Value, count: &Value) {
    match sum {
        Value::Object(parts) => parts.iter_mut().for_each(|(name, sum)| add(sum, &count[name.as_str()])),
        Value::Bool(so) => *so |= count.as_bool().unwrap_or(false),
        Value::Number(number) => {
            *sum = Value::from(number.as_u64().unwrap_or(0) + count.as_u64().unwrap_or(0));
        }
        Value::Null | Value::String(_) | Value::Array(_) => {}
    }
}

fn rank_status(core: &DpRank) -> Value {
    let status = core.status.snapshot();
    let leases = core.leases.view();
    let (usage, load, counts) = (status.usage, status.load, core.leases.counts());
    json!({
        "rank": core.rank,
        "blocks": {
            "total": usage.total, "free": usage.free, "cached": usage.cached, "active": usage.active,
            "leased": usage.leased, "landing": usage.landing, "storing": usage.storing,
        },
        "requests": {
            "waiting": load.waiting, "running": load.running, "fetching": load.fetching, "loading": load.loading,
            "stopping": load.stopping,
        },
        "leases": {"live": leases.len(), "opened": counts.opened, "late": counts.late, "unknown": counts.unknown},
        "oldest_leases": oldest_leases(&leases),
        "offload": load.tiers.map(|tiers| offload(load.offloading, &tiers)),
        "steps": status.steps,
        "failed": status.failed,
    })
}

/// `GET /debug/kv/events?after=SEQ&wait_ms=MS&limit=N`: the events after number `after` (0: the oldest retained;
/// `latest`: none, but the latest number), as soon as there is one or after `wait_ms`.
pub(super) async fn events(frontend: Arc<Frontend>, request: Request<Incoming>) -> Result<Reply, ApiError> {
    authorize(&frontend, request.headers())?;
    let query = EventQuery::parse(request.uri().query().unwrap_or_default())?;
    let log = &frontend.log;
    let page = match query.after {
        None => EventPage { next: log.latest(), lost: 0, events: Vec::new() },
        Some(after) => log.page_within(after, query.limit, query.wait).await,
    };
    let leases = &frontend.cores[0].leases;
    let body = json!({
        "engine": {"epoch": leases.epoch().to_string(), "role": frontend.role.label(), "model": frontend.model.name},
        "now_us": log.now_us(), "next": page.next, "lost": page.lost, "events": page.events,
    });
    Ok(reply::json(StatusCode::OK, body.to_string()))
}

/// The contents and counts of the tiers.
fn offload(in_flight: usize, counts: &OffloadCounts) -> Value {
    let tier = |tier: TierCounts| {
        json!({
            "blocks": tier.blocks, "capacity": tier.capacity, "stored": tier.stored, "loaded": tier.loaded,
            "evicted": tier.evicted,
        })
    };
    let faults = OffloadFault::ALL
        .iter()
        .zip(counts.faults)
        .map(|(fault, count)| (fault.label().to_owned(), count.into()));
    json!({
        "in_flight": in_flight, "host": tier(counts.host), "disk": tier(counts.disk),
        "hit_tokens": counts.hit_tokens, "not_stored": counts.not_stored, "not_written": counts.not_written,
        "disk_suspended": counts.disk_suspended, "failures": Value::Object(faults.collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_cores_are_summed_at_every_depth() {
        let core = |blocks: u64, suspended: bool| {
            let host = TierCounts { blocks: blocks as usize, stored: 2, ..TierCounts::default() };
            offload(
                1,
                &OffloadCounts {
                    host,
                    disk_suspended: suspended,
                    faults: [blocks; 8],
                    ..OffloadCounts::default()
                },
            )
        };
        let mut sum = core(3, false);
        add(&mut sum, &core(4, true));
        assert_eq!(
            (&sum["in_flight"], &sum["host"]["blocks"], &sum["host"]["stored"]),
            (&2.into(), &7.into(), &4.into())
        );
        assert_eq!((&sum["failures"]["io"], &sum["disk_suspended"]), (&7.into(), &true.into()));
        let mut none = Value::Null;
        add(&mut none, &Value::Null);
        assert_eq!(none, Value::Null, "without tiers there is nothing to add");
    }
}
