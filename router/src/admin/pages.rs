//! What is looked up when somebody asks: the configuration in effect, the engines, and the samples of `/metrics` that
//! are not counted as they happen.

use serde_json::{Value, json};

use super::Answer;
use crate::metrics::{IN_FLIGHT, Leg, POOL, READY, STANDINGS, Scrape};
use crate::shared::Shared;

/// The configuration in effect. Secrets are not written into it.
pub(super) fn config(shared: &Shared) -> Answer {
    let generation = shared.generation();
    let config = serde_json::to_value(&generation.config).unwrap_or(Value::Null);
    Answer::json(json!({"generation": generation.number, "config": config}))
}

/// Samples that are looked up.
pub(super) fn look_up(shared: &Shared, scrape: &mut Scrape) {
    for engine in shared.fleet.engines() {
        scrape.put(&IN_FLIGHT, &[engine.authority()], engine.load() as f64);
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
