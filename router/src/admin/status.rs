//! What is looked up when somebody asks: the configuration in effect, the engines, and the samples of `/metrics` that
//! are not counted as they happen.

use hyper::StatusCode;
use serde_json::{Value, json};

use super::{Answer, Asked};
use crate::admin::{dry_run, explain};
use crate::metrics::{IN_FLIGHT, Leg, POOL, READY, STALE, STANDINGS, Scrape, kv_events};
use crate::state::shared::Shared;

/// The configuration in effect. Secrets are not written into it.
pub(super) fn config(shared: &Shared) -> Answer {
    let generation = shared.generation();
    let config = serde_json::to_value(&generation.config).unwrap_or(Value::Null);
    Answer::json(json!({
        "generation": generation.number,
        "revision": generation.revision,
        "reloads": shared.reloads.report(),
        "discovery": shared.answers.report(),
        "config": config,
    }))
}

/// Requests that are listed when nothing else is asked for.
const LISTED: usize = 1000;

/// The requests in flight, the oldest first.
pub(super) fn requests(shared: &Shared, query: &str) -> Answer {
    let limit = query.split('&').find_map(|part| part.strip_prefix("limit=")?.parse().ok()).unwrap_or(LISTED);
    let (now, list) = (shared.now(), shared.in_flight_table.list());
    let told: Vec<_> = list
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
    Answer::json(json!({"in_flight": list.len(), "requests": told}))
}

/// Samples that are looked up.
pub(super) fn look_up(shared: &Shared, scrape: &mut Scrape) {
    shared.answers.each_stale(|source, stale| scrape.put(&STALE, &[source], stale.as_secs_f64()));
    shared.in_flight_table.look_up(shared.now(), scrape);
    for engine in shared.fleet.engines() {
        scrape.put(&IN_FLIGHT, &[engine.authority()], engine.load(None) as f64);
        if let Some((_, told)) = shared.fleet.subscriptions.of(engine.id()) {
            kv_events::look_up(scrape, engine.authority(), &told);
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

/// Why a request went where it went.
pub(super) fn explain(shared: &Shared, id: &str) -> Answer {
    match explain::page(&shared.explain, id) {
        Some(page) => Answer::json(page),
        None => Answer::error(StatusCode::NOT_FOUND, &explain::unknown(&shared.explain)),
    }
}

/// Where a client's request would go. Its path and its tenant are in the query; its headers are those of the question.
pub(super) fn dry_run(shared: &Shared, asked: &Asked) -> Answer {
    let path = asked.query.split('&').find_map(|part| part.strip_prefix("path="));
    let path = path.unwrap_or("/v1/chat/completions").replace("%2F", "/").replace("%2f", "/");
    let tenant = asked.query.split('&').find_map(|part| part.strip_prefix("tenant="));
    match dry_run::dry_run(
        &path,
        &asked.body,
        &asked.headers,
        &shared.generation(),
        &shared.fleet.subscriptions,
        tenant,
    ) {
        Ok(page) => Answer::json(page),
        Err(refused) => {
            let status = StatusCode::from_u16(refused.status).unwrap_or(StatusCode::BAD_REQUEST);
            Answer::error(status, &refused.message)
        }
    }
}
