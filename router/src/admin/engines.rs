//! `GET /engines`: the state of every engine and the reasons; `POST /engines/HOST:PORT/drain` and `/undrain`.
//!
//! An operator's order overrides the configuration, survives reloads and an engine's absence, and ends with the
//! process.

use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;
use hyper::header::{HeaderValue, RETRY_AFTER};
use serde_json::{Map, Value, json};

use super::AdminResponse;
use crate::engines::fleet::OrdersTransferredError;
use crate::engines::health::OperatorOrder;
use crate::engines::http::Engine;
use crate::engines::protocol::Verb;
use crate::metrics::Leg;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// All engines that some pool names, as JSON.
pub(super) fn list(shared: &Shared) -> Value {
    let generation = shared.generation();
    let mut engines: Vec<_> = shared.fleet.engines();
    engines.sort_unstable_by(|a, b| a.authority().cmp(b.authority()));
    let engines: Vec<Value> = engines.iter().map(|engine| describe(engine, shared, &generation)).collect();
    json!({"generation": generation.version.number, "engines": engines})
}

fn describe(engine: &Arc<Engine>, shared: &Shared, generation: &Generation) -> Value {
    let (health, now) = (engine.health().snapshot(), Instant::now());
    let terms = engine.health_terms();
    let load = engine.reading(Instant::now).map(|reading| {
        let load = reading.reported;
        let age_ms = u64::try_from(load.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        json!({"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "age_ms": age_ms})
    });
    let kv_events = shared.fleet.subscriptions.of(engine).map(|subscriptions| subscriptions.json());
    let (mut pools, mut legs) = (Vec::new(), Map::new());
    for model in generation.models.list() {
        for leg in Leg::BOTH {
            let mut members = model.pool(leg).members().iter().filter(|m| Arc::ptr_eq(&m.engine, engine));
            let Some(member) = members.next() else { continue };
            let ranks = 1 + members.count();
            pools.push(
                json!({"model": model.name, "leg": leg.label(), "weight": member.weight, "ranks": ranks}),
            );
            let (standing, breaker) = (health.standing(leg, &terms).label(), health.breaker(leg).label());
            legs.insert(leg.label().to_owned(), json!({"standing": standing, "breaker": breaker}));
        }
    }
    json!({
        "engine": engine.authority(),
        "url": engine.url(),
        "control_url": engine.control_url(),
        "pools": pools,
        "legs": legs,
        "reasons": health.reasons(&terms),
        "known": engine.is_known(),
        "in_flight": engine.load(None),
        "load": load,
        "kv_events": kv_events,
        "handles": engine.verbs().returns_handles(),
        "verbs": {"abort": engine.verbs().has(Verb::Abort, now), "release": engine.verbs().has(Verb::Release, now)},
    })
}

/// Applies an operator's order to the engine of that name: `HOST:PORT`, or its whole URL.
pub(super) fn apply_order(shared: &Shared, name: &str, verb: &str) -> AdminResponse {
    let order = match verb {
        "drain" => OperatorOrder::Drain,
        "undrain" => OperatorOrder::Undrain,
        _ => return AdminResponse::error(StatusCode::NOT_FOUND, "unknown order, expected drain or undrain"),
    };
    let name = name.replace("%3A", ":").replace("%3a", ":").replace("%2F", "/").replace("%2f", "/");
    let name = name.trim_end_matches('/');
    let is_it = |engine: &Arc<Engine>| engine.authority() == name || engine.url().to_string() == name;
    let Some(engine) = shared.fleet.engines().into_iter().find(is_it) else {
        return AdminResponse::error(StatusCode::NOT_FOUND, "there is no such engine; /engines lists them");
    };
    if let Err(OrdersTransferredError) = shared.fleet.apply_order(&engine, order) {
        let why = "not changed: another router has taken over this one's sockets; retry the request";
        let again = vec![(RETRY_AFTER, HeaderValue::from_static("1"))];
        return AdminResponse::error(StatusCode::SERVICE_UNAVAILABLE, why).with_headers(again);
    }
    tracing::info!(
        event = "operator_order_received",
        engine = engine.authority(),
        ?order,
        "operator order received"
    );
    AdminResponse::json(describe(&engine, shared, &shared.generation()))
}
