//! Health checks and load queries of engines, and the outlier detection of pools. One task per router.
//!
//! A new engine is checked at once, an engine in rotation every `active.interval_ms`, and an ejected one when its
//! cool-down is over. So no client's request tests an engine that may not respond.
//! [`crate::engines::health::timers`] orders the engines: a check costs the same in a large fleet.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::Time;
use tokio::task::JoinSet;

use crate::engines::health::outlier::{OutlierSample, outliers};
use crate::engines::health::{EngineLoad, LoadReading};
use crate::engines::http::{Engine, EngineRequest};
use crate::legs::liveness;
use crate::message::random;
use crate::metrics::Leg;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// Maximum probes and queries in flight.
const PROBES_MAX: usize = 256;
/// Maximum time until a changed configuration or a stale load takes effect.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum bytes of an engine's metrics.
const METRICS_BYTES_MAX: usize = 4 << 20;

/// Runs until it is dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut probes = JoinSet::new();
    let (mut load_due, mut outliers_due, mut stale_due) = (Time::ZERO, Time::ZERO, Time::ZERO);
    loop {
        let generation = shared.generation();
        let config = &generation.config.health;
        let now = crate::engines::health::now();
        let mut next = now.after(CHECK_INTERVAL);
        let mut due = |at: &mut Time, every_ms: u64| {
            let every = Duration::from_millis(every_ms);
            if every.is_zero() {
                return false;
            }
            // The first time is a whole interval after the start.
            let is_due = *at != Time::ZERO && *at <= now;
            if is_due || *at == Time::ZERO {
                *at = now.after(every);
            }
            next = next.min(*at);
            is_due
        };
        let read_load = due(&mut load_due, config.load.interval_ms);
        let compare = due(&mut outliers_due, config.outlier.interval_ms);
        let within = Duration::from_millis(config.active.timeout_ms);
        while let Some(id) = shared.fleet.timers.take(now) {
            let Some(engine) = shared.fleet.by_id(id) else { continue };
            let probe = engine.update_health(|health, now, terms| health.tick(now, jitter, terms));
            engine.arm();
            if probe {
                wait_for_slot(&mut probes).await;
                probes.spawn(async move {
                    // The path of the probe depends on the protocol.
                    engine.recheck_protocol().await;
                    let result = liveness::probe(&engine, within).await;
                    engine.update_health(|health, now, terms| health.record_probe(result, now, terms));
                });
            }
        }
        if read_load {
            for engine in shared.fleet.engines() {
                wait_for_slot(&mut probes).await;
                probes.spawn(read_load_of(engine, within));
            }
        }
        if config.load.interval_ms > 0 && stale_due <= now {
            stale_due = now.after(CHECK_INTERVAL);
            // No event of its engine marks a reading as stale.
            shared.fleet.engines().iter().for_each(|engine| engine.changed());
        }
        if compare {
            eject_outliers(&generation);
        }
        drop(generation);
        while probes.try_join_next().is_some() {}
        next = shared.fleet.timers.next().map_or(next, |due| next.min(due));
        tokio::select! {
            () = shared.fleet.timers.sooner() => {}
            () = tokio::time::sleep(next.since(crate::engines::health::now())) => {}
        }
    }
}

async fn wait_for_slot(probes: &mut JoinSet<()>) {
    if probes.len() >= PROBES_MAX {
        probes.join_next().await;
    }
}

/// 0.8 to 1.2, so that routers that started together do not probe together.
fn jitter() -> f64 {
    0.8 + random::fraction() * 0.4
}

async fn read_load_of(engine: Arc<Engine>, within: Duration) {
    let request = EngineRequest::get(engine.protocol().load_path());
    let own_before = engine.own_requests();
    let reply = async { engine.call(&request, |_| {}).await?.read_whole(METRICS_BYTES_MAX).await };
    let Ok(Ok(reply)) = tokio::time::timeout(within, reply).await else { return };
    let text = String::from_utf8_lossy(&reply.body);
    if let Some(load) = EngineLoad::read(&text, Instant::now()).filter(|_| reply.status.is_success()) {
        engine.set_reading(LoadReading::new(load, [own_before, engine.own_requests()]));
    }
}

fn eject_outliers(generation: &Generation) {
    let terms = generation.config.health.outlier_terms();
    for leg in [Leg::Prefill, Leg::Decode] {
        // An engine may be in the pools of several models. Its sample is taken once.
        let mut samples: HashMap<*const Engine, OutlierSample> = HashMap::new();
        for model in generation.models.list() {
            let engines = model.pool(leg).engines();
            let sample = |engine: &Arc<Engine>| {
                *samples.entry(Arc::as_ptr(engine)).or_insert_with(|| engine.health().sample(leg))
            };
            let pool: Vec<OutlierSample> = engines.iter().map(sample).collect();
            let worst: HashSet<usize> = outliers(&pool, &terms).into_iter().collect();
            for (at, engine) in engines.iter().enumerate() {
                if worst.contains(&at) {
                    let OutlierSample { answers, failures, .. } = pool[at];
                    tracing::warn!(
                        event = "engine_ejected",
                        engine = engine.authority(),
                        leg = leg.label(),
                        answers,
                        failures,
                        "engine ejected"
                    );
                    engine.update_health(|health, now, terms| health.eject(leg, now, terms));
                } else {
                    engine.update_health(|health, _, _| health.reduce_ejections(leg));
                }
            }
        }
    }
}
