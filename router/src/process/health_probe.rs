//! The one who asks: engines for their health and load, and pools for their outliers. One task per router.
//!
//! A new engine is asked at once, one in use every `active.interval_ms`, one that is left out when its cool-down is over. No
//! client's request is spent on an engine that may not answer. Which engine is next is
//! kept by [`crate::engines::health::timers`]: a check costs the same in a large fleet.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::Time;
use tokio::task::JoinSet;

use crate::engines::health::outlier::{Sample, outliers};
use crate::engines::health::{EngineLoad, Reading};
use crate::engines::http::{Engine, Outgoing};
use crate::legs::liveness;
use crate::metrics::Leg;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// Questions in flight; more wait for one of them.
const ASKING_MAX: usize = 256;
/// The longest time until a changed configuration is noticed, and an engine's load that has grown stale.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Metrics of an engine are not read beyond this.
const METRICS_BYTES_MAX: usize = 4 << 20;

/// Runs for as long as the router does.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut asking = JoinSet::new();
    let (mut load_due, mut outliers_due, mut stale_due) = (Time::ZERO, Time::ZERO, Time::ZERO);
    loop {
        let generation = shared.generation();
        let config = &generation.config.health;
        let now = crate::engines::health::now();
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
        while let Some(id) = shared.fleet.timers.take(now) {
            let Some(engine) = shared.fleet.by_id(id) else { continue };
            let ask = engine.judge(|health, now, terms| health.tick(now, jitter, terms));
            engine.arm();
            if ask {
                place(&mut asking).await;
                asking.spawn(async move {
                    let pulse = liveness::ask(&engine, within).await;
                    engine.judge(|health, now, terms| health.told(pulse, now, terms));
                });
            }
        }
        if read_load {
            for engine in shared.fleet.engines() {
                place(&mut asking).await;
                asking.spawn(read_load_of(engine, within));
            }
        }
        if config.load.interval_ms > 0 && stale_due <= now {
            stale_due = now.after(LOOK_EVERY);
            // That a reading is too old is no event of its engine.
            shared.fleet.engines().iter().for_each(|engine| engine.changed());
        }
        if compare {
            eject_outliers(&generation);
        }
        drop(generation);
        while asking.try_join_next().is_some() {}
        next = shared.fleet.timers.next().map_or(next, |due| next.min(due));
        tokio::select! {
            () = shared.fleet.timers.sooner() => {}
            () = tokio::time::sleep(next.since(crate::engines::health::now())) => {}
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
            let worst: HashSet<usize> = outliers(&pool, &terms).into_iter().collect();
            for (at, engine) in engines.iter().enumerate() {
                if worst.contains(&at) {
                    let Sample { answers, failures, .. } = pool[at];
                    tracing::warn!(
                        engine = engine.authority(),
                        leg = leg.label(),
                        answers,
                        failures,
                        "engine ejected"
                    );
                    engine.judge(|health, now, terms| health.eject(leg, now, terms));
                } else {
                    engine.judge(|health, _, _| health.behaved(leg));
                }
            }
        }
    }
}
