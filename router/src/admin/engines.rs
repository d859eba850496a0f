//! `GET /engines`: what every engine is given and why; `POST /engines/HOST:PORT/drain` and `/undrain`.
//!
//! An operator's word goes before the configuration's, survives reloads, and ends with the process.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Value, json};

use super::Answer;
use crate::generation::Generation;
use crate::health::Order;
use crate::metrics::Leg;
use crate::shared::Shared;
use crate::upstream::{Engine, Verb};

/// Every engine that some pool names, as JSON.
pub(super) fn list(shared: &Shared) -> Value {
    let generation = shared.generation();
    let mut engines: Vec<_> = shared.fleet.engines();
    engines.sort_unstable_by(|a, b| a.authority().cmp(b.authority()));
    let engines: Vec<Value> = engines.iter().map(|engine| one(engine, &generation)).collect();
    json!({"generation": generation.number, "engines": engines})
}

fn one(engine: &Arc<Engine>, generation: &Generation) -> Value {
    let health = engine.health().snapshot();
    let terms = engine.health_terms();
    let load = engine.reported_load().map(|load| {
        let age_ms = u64::try_from(load.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        json!({"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "age_ms": age_ms})
    });
    let legs = [Leg::Prefill, Leg::Decode].into_iter().filter_map(|leg| {
        let serves =
            |m: &&Arc<crate::models::Model>| m.pool(leg).engines().iter().any(|e| Arc::ptr_eq(e, engine));
        let models: Vec<_> =
            generation.models.list().iter().filter(serves).map(|m| m.name.as_str()).collect();
        let standing = health.standing(leg, &terms).label();
        let state = json!({"standing": standing, "breaker": health.breaker(leg).label(), "models": models});
        (!models.is_empty()).then(|| (leg.label().to_owned(), state))
    });
    json!({
        "url": engine.url(),
        "legs": legs.collect::<serde_json::Map<_, _>>(),
        "reasons": health.reasons(&terms),
        "in_flight": engine.load(),
        "load": load,
        "verbs": {"abort": engine.verbs().has(Verb::Abort), "release": engine.verbs().has(Verb::Release)},
    })
}

/// Carries out a verb at the engine of that name: `HOST:PORT`, or its whole URL.
pub(super) fn order(shared: &Shared, name: &str, verb: &str) -> Answer {
    let order = match verb {
        "drain" => Order::Drain,
        "undrain" => Order::Undrain,
        _ => return Answer::error(StatusCode::NOT_FOUND, "an engine can be drained and undrained"),
    };
    let name = name.replace("%3A", ":").replace("%3a", ":").replace("%2F", "/").replace("%2f", "/");
    let name = name.strip_prefix("http://").unwrap_or(&name);
    let Some(engine) = shared.fleet.engines().into_iter().find(|engine| engine.authority() == name) else {
        return Answer::error(StatusCode::NOT_FOUND, "there is no such engine; /engines lists them");
    };
    engine.judge(|health, _, _| health.order(order));
    tracing::info!(engine = engine.authority(), ?order, "an operator's order");
    Answer::json(one(&engine, &shared.generation()))
}

/// Whether the models that `/ready` waits for have a decode engine in use.
pub(super) fn is_ready(generation: &Generation) -> bool {
    use crate::config::Ready;
    let mut usable = generation.models.list().iter().map(|model| model.decode.in_use() > 0);
    match generation.config.health.ready {
        Ready::Always => true,
        Ready::AnyModel => usable.any(|usable| usable),
        Ready::EveryModel => usable.all(|usable| usable),
    }
}
