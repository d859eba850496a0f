//! The one who asks: engines for their health and load, and pools for their outliers. One task per router.
//!
//! A new engine is asked at once, one in use every `active.interval_ms`, one that is left out when its cool-down is over. No
//! client's request is spent on an engine of which it is not known that somebody answers there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::Time;
use tokio::task::JoinSet;

use super::outlier::{Sample, outliers};
use super::{EngineLoad, Reading};
use crate::alive::{self, NotAsked};
use crate::generation::Generation;
use crate::metrics::Leg;
use crate::shared::Shared;
use crate::upstream::{Engine, Outgoing};

/// Questions in flight; more wait for one of them.
const ASKING_MAX: usize = 256;
/// The longest time without a look at every engine.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Metrics of an engine are not read beyond this.
const METRICS_BYTES_MAX: usize = 4 << 20;

/// Runs for as long as the router does.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut asking = JoinSet::new();
    let (mut load_due, mut outliers_due) = (Time::ZERO, Time::ZERO);
    loop {
        let generation = shared.generation();
        let config = &generation.config.health;
        let now = super::now();
        let mut next = now.after(LOOK_EVERY);
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
        for engine in shared.fleet.engines() {
            let jitter = jitter();
            let (ask, again) = engine.judge(|health, now, terms| {
                let ask = health.tick(now, jitter, terms);
                (ask, health.due())
            });
            next = again.map_or(next, |again| next.min(again));
            if ask {
                place(&mut asking).await;
                let engine = Arc::clone(&engine);
                asking.spawn(async move {
                    let asked = alive::asked_for_health(&engine, within).await;
                    engine.judge(|health, now, terms| match asked {
                        Ok(answer) => health.told(answer, now, terms),
                        Err(NotAsked) => health.not_asked(now, terms),
                    });
                });
            }
            if read_load {
                place(&mut asking).await;
                asking.spawn(read_load_of(engine, within));
            }
        }
        if compare {
            eject_outliers(&generation);
        }
        drop(generation);
        while asking.try_join_next().is_some() {}
        tokio::select! {
            () = shared.fleet.wake.notified() => {}
            () = tokio::time::sleep(next.since(super::now())) => {}
        }
    }
}

async fn place(asking: &mut JoinSet<()>) {
    if asking.len() >= ASKING_MAX {
        asking.join_next().await;
    }
}

/// 0.8 to 1.2, so that routers that started together do not ask together.
fn jitter() -> f64 {
    let mut byte = [0_u8];
    getrandom::fill(&mut byte).expect("the kernel's random numbers are there from boot on");
    0.8 + f64::from(byte[0]) / 255.0 * 0.4
}

async fn read_load_of(engine: Arc<Engine>, within: Duration) {
    let question = Outgoing::get("/metrics");
    let asked_with = engine.ours();
    let asked = async { engine.call(&question, |_| {}).await?.whole(METRICS_BYTES_MAX).await };
    let Ok(Ok(answer)) = tokio::time::timeout(within, asked).await else { return };
    let text = String::from_utf8_lossy(&answer.body);
    if let Some(load) = EngineLoad::read(&text, Instant::now()).filter(|_| answer.status.is_success()) {
        engine.set_reading(Reading::new(load, [asked_with, engine.ours()]));
    }
}

fn eject_outliers(generation: &Generation) {
    let terms = generation.config.health.outlier_terms();
    for leg in [Leg::Prefill, Leg::Decode] {
        // An engine may be in the pools of several models; its answers are taken once.
        let mut samples: HashMap<*const Engine, Sample> = HashMap::new();
        for model in generation.models.list() {
            let engines = model.pool(leg).engines();
            let sample = |engine: &Arc<Engine>| {
                *samples.entry(Arc::as_ptr(engine)).or_insert_with(|| engine.health().sample(leg))
            };
            let pool: Vec<Sample> = engines.iter().map(sample).collect();
            let worst = outliers(&pool, &terms);
            for (at, engine) in engines.iter().enumerate() {
                if worst.contains(&at) {
                    let Sample { answers, failures, .. } = pool[at];
                    tracing::warn!(
                        engine = engine.authority(),
                        leg = leg.label(),
                        answers,
                        failures,
                        "an engine is far worse than its pool's others and is left out for a while"
                    );
                    engine.judge(|health, now, terms| health.eject(leg, now, terms));
                } else {
                    engine.judge(|health, _, _| health.behaved(leg));
                }
            }
        }
    }
}
