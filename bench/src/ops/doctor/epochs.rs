//! Whether the engines are, in the end, those that were looked at in the beginning, and those that the routers reach.
//!
//! An engine that was started anew meanwhile has lost its leases and its books: what was seen before and what was seen
//! after say nothing together, and its blocks are "back" because all of them are.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::checkup::Checkup;
use super::look::{Engine, PATIENCE, ROUTER_PATIENCE};
use crate::common::http_client::{Origin, WebError};

/// A router's view is kept for a second: one that differs may be from before.
const LOOK_AGAIN: Duration = Duration::from_millis(1_500);

/// What changes when an engine is started anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// It says so itself.
    Epoch(String),
    /// A stock engine's `process_start_time_seconds`, in milliseconds.
    Started(u64),
}

impl Run {
    /// What a page of an engine's says, `/debug/kv` or `/debug/kv/events`.
    pub(super) fn told(page: &Value) -> Option<Self> {
        page["engine"]["epoch"].as_str().map(|epoch| Self::Epoch(epoch.to_owned()))
    }

    /// What it says now; `None` where it says nothing that would change.
    pub(super) async fn of(origin: &Origin) -> Result<Option<Self>, WebError> {
        for page in ["/debug/kv", "/debug/kv/events?after=latest"] {
            match origin.get_json(page, PATIENCE).await {
                Ok(page) => {
                    if let Some(run) = Self::told(&page) {
                        return Ok(Some(run));
                    }
                }
                // A stock engine has no such page.
                Err(error) if error.status().is_some_and(|status| status.is_client_error()) => {}
                Err(error) => return Err(error),
            }
        }
        let samples = match origin.samples(PATIENCE).await {
            Ok(samples) => samples,
            Err(error) if error.status().is_some_and(|status| status.is_client_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let started = samples.sum("process_start_time_seconds", &[]);
        Ok(started.map(|seconds| Self::Started((seconds * 1e3) as u64)))
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Epoch(epoch) => write!(f, "epoch {epoch}"),
            Self::Started(ms) => write!(f, "started at {:.3} s", *ms as f64 / 1e3),
        }
    }
}

/// Asks every engine again, and every router.
pub(super) async fn again(engines: &[Engine], admins: &[Origin], checkup: &mut Checkup) {
    let mut same = BTreeMap::new();
    for engine in engines.iter().filter(|engine| engine.up) {
        let Some(before) = &engine.run else {
            checkup.skip("epoch", &engine.name, "it has no epoch: a restart would not be noticed");
            continue;
        };
        match Run::of(&engine.origin).await {
            Ok(Some(now)) if now == *before => {
                same.insert(engine.name.as_str(), before);
            }
            Ok(now) => {
                let now = now.map_or_else(|| "unknown".to_owned(), |now| now.to_string());
                let told = format!(
                    "{before} before, {now} now: it restarted during the examination, or several engines share this \
                     address"
                );
                checkup.fail("epoch", &engine.name, told);
            }
            Err(error) => {
                let told = format!("{before} before, unknown now: {error}");
                checkup.fail("epoch", &engine.name, told);
            }
        }
    }
    let mut agree = 0;
    for admin in admins {
        agree += compared(admin, &same, checkup).await;
    }
    if !same.is_empty() && !checkup.has_failed_any("epoch") {
        let one = same.len() == 1;
        let those = if one { "the engine".to_owned() } else { format!("{} engines", same.len()) };
        let to = if agree > 0 { "; the routers reach the same" } else { "" };
        checkup.ok("epoch", "", format!("{those} did not restart{to}"));
    }
}

/// What a router says of engines that are as they were. How many it agrees on.
async fn compared(admin: &Origin, same: &BTreeMap<&str, &Run>, checkup: &mut Checkup) -> usize {
    let mut told = view(admin).await;
    if told.iter().any(|(name, to_it)| differs(same, name, to_it)) {
        tokio::time::sleep(LOOK_AGAIN).await;
        told = view(admin).await;
    }
    let mut agree = 0;
    for (name, to_it) in &told {
        match same.get(name.as_str()) {
            Some(run) if differs(same, name, to_it) => {
                let told = format!(
                    "{run} from here, {to_it} from the router at {}: it reaches another engine",
                    admin.authority()
                );
                checkup.fail("epoch", name, told);
            }
            Some(Run::Epoch(_)) => agree += 1,
            _ => {}
        }
    }
    agree
}

fn differs(same: &BTreeMap<&str, &Run>, name: &str, to_it: &Run) -> bool {
    same.get(name).is_some_and(|run| matches!(run, Run::Epoch(_)) && **run != *to_it)
}

/// The epochs that a router's view has. That it does not answer is told by other checks.
async fn view(admin: &Origin) -> Vec<(String, Run)> {
    let Ok(books) = admin.get_json("/debug/kv", ROUTER_PATIENCE).await else { return Vec::new() };
    let engines = books["engines"].as_array().into_iter().flatten();
    let told = engines.filter_map(|engine| Some((engine["engine"].as_str()?, engine["epoch"].as_str()?)));
    told.map(|(name, epoch)| (name.to_owned(), Run::Epoch(epoch.to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::checkup::Terms;
    use super::*;
    use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, Role, SimFleet};

    #[test]
    fn an_engine_that_was_started_anew_meanwhile_is_named() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        for dialect in [Dialect::Baton, Dialect::Vllm] {
            let plan = FleetPlan::new(1, 1, EnginePlan { dialect, ..EnginePlan::default() });
            let fleet = SimFleet::start(plan).expect("a fleet starts on loopback");
            let addresses = [fleet.prefill()[0].to_string(), fleet.decode()[0].to_string()];
            runtime.block_on(async {
                let mut engines = Vec::new();
                for address in &addresses {
                    let mut engine = Engine::at(Origin::parse(address).expect("an address"));
                    engine.up = true;
                    engine.run = Run::of(&engine.origin).await.expect("it answers");
                    assert!(matches!(engine.run, Some(Run::Epoch(_))), "{:?}", engine.run);
                    engines.push(engine);
                }
                let examined = async || {
                    let mut checkup = Checkup::new(Terms::default());
                    checkup.saw();
                    again(&engines, &[], &mut checkup).await;
                    checkup
                };
                let well = examined().await;
                assert!(well.text().contains("2 engines did not restart"), "{}", well.text());
                fleet.restart(Role::Decode, 0).expect("its port is free again");
                let anew = examined().await;
                assert!(anew.has_failed("epoch", &addresses[1]), "{}", anew.text());
                assert!(!anew.has_failed("epoch", &addresses[0]), "{}", anew.text());
                fleet.kill(Role::Prefill, 0).expect("it runs");
                assert!(
                    examined().await.has_failed("epoch", &addresses[0]),
                    "one that is gone is not the same"
                );
            });
        }
    }

    #[test]
    fn a_router_that_reaches_another_engine_differs() {
        let (ours, theirs) = (Run::Epoch("a".to_owned()), Run::Epoch("b".to_owned()));
        let stock = Run::Started(1_000);
        let same = BTreeMap::from([("e:1", &ours), ("stock:1", &stock)]);
        assert!(!differs(&same, "e:1", &ours) && differs(&same, "e:1", &theirs));
        assert!(!differs(&same, "stock:1", &theirs), "one that we know by another sign is not compared");
        assert!(!differs(&same, "f:1", &theirs), "nor one that we did not reach");
    }
}
