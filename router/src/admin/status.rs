//! Values that are read on request: the configuration in effect, the engines, and the samples of `/metrics` that
//! are not counted as they happen.

use hyper::StatusCode;
use serde_json::{Value, json};

use super::{AdminRequest, AdminResponse};
use crate::admin::{dry_run, explain};
use crate::metrics::{IN_FLIGHT, Leg, POOL, READY, STALE, STANDINGS, Scrape, kv_events};
use crate::state::shared::Shared;

/// The configuration in effect, without secrets.
pub(super) fn config(shared: &Shared) -> AdminResponse {
    let generation = shared.generation();
    let config = serde_json::to_value(&generation.config).unwrap_or(Value::Null);
    AdminResponse::json(json!({
        "generation": generation.version.number,
        "revision": generation.version.revision,
        "reloads": shared.installer.reloads.report(),
        "discovery": shared.installer.sources.report(),
        "config": config,
    }))
}

/// Requests listed without a `limit` in the query.
const LISTED_REQUESTS_DEFAULT: usize = 1000;

/// The requests in flight, the oldest first.
pub(super) fn requests(shared: &Shared, query: &str) -> AdminResponse {
    let limit = query
        .split('&')
        .find_map(|part| part.strip_prefix("limit=")?.parse().ok())
        .unwrap_or(LISTED_REQUESTS_DEFAULT);
    let (now, list) = (shared.now(), shared.in_flight.table.list());
    let listed: Vec<_> = list
        .iter()
        .take(limit)
        .map(|entry| {
            let [prefill, decode] = entry.engines();
            json!({
                "request_id": entry.id.as_str(),
                "model": entry.model.get().map(|model| &model.name),
                "phase": entry.phase(),
                "age_seconds": now.since(entry.begun).as_secs_f64(),
                "prefill_engine": prefill.as_deref().map(|engine| engine.authority()),
                "decode_engine": decode.as_deref().map(|engine| engine.authority()),
            })
        })
        .collect();
    AdminResponse::json(json!({"in_flight": list.len(), "requests": listed}))
}

/// Collects the samples that are read at scrape time.
pub(super) fn collect_samples(shared: &Shared, scrape: &mut Scrape) {
    shared.installer.sources.each_stale(|source, stale| scrape.put(&STALE, &[source], stale.as_secs_f64()));
    shared.in_flight.table.look_up(shared.now(), scrape);
    for engine in shared.fleet.engines() {
        scrape.put(&IN_FLIGHT, &[engine.authority()], engine.load(None) as f64);
        if let Some(subscriptions) = shared.fleet.subscriptions.of(&engine) {
            kv_events::look_up(scrape, engine.authority(), &subscriptions);
        }
        for leg in Leg::BOTH {
            let standing = engine.health().standing(leg).label();
            scrape.put(&STANDINGS, &[engine.authority(), leg.label(), standing], 1.0);
        }
    }
    for model in shared.generation().models.list() {
        for (leg, pool) in [(Leg::Prefill, &model.prefill), (Leg::Decode, &model.decode)] {
            let labels = [model.name.as_str(), leg.label()];
            let ready = pool.in_use();
            scrape.put(&POOL, &labels, pool.members().len() as f64);
            scrape.put(&READY, &labels, ready as f64);
        }
    }
}

/// Explains the decisions about a request.
pub(super) fn explain(shared: &Shared, id: &str) -> AdminResponse {
    match explain::find_requests(&shared.explanations, id) {
        Some(page) => AdminResponse::json(page),
        None => {
            AdminResponse::error(StatusCode::NOT_FOUND, &explain::not_found_message(&shared.explanations))
        }
    }
}

/// Decides where a client's request would go. The query has its path and its tenant; its headers are those of this
/// request.
pub(super) fn dry_run(shared: &Shared, request: &AdminRequest) -> AdminResponse {
    let path = request.query.split('&').find_map(|part| part.strip_prefix("path="));
    let path = path.unwrap_or("/v1/chat/completions").replace("%2F", "/").replace("%2f", "/");
    let tenant = request.query.split('&').find_map(|part| part.strip_prefix("tenant="));
    match dry_run::dry_run(
        &path,
        &request.body,
        &request.headers,
        &shared.generation(),
        &shared.fleet.subscriptions,
        tenant,
    ) {
        Ok(page) => AdminResponse::json(page),
        Err(refused) => {
            let status = StatusCode::from_u16(refused.status).unwrap_or(StatusCode::BAD_REQUEST);
            AdminResponse::error(status, &refused.message)
        }
    }
}
