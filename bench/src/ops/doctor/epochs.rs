//! Whether the engines restarted during the examination, and whether the routers reach the same engines.
//!
//! A restarted engine has lost its leases and its state. Observations before and after a restart do not belong
//! together, and all blocks are free only because of the restart.

use std::collections::BTreeMap;
use std::time::Duration;

use super::checkup::Checkup;
use super::engine::{EngineInfo, Incarnation};
use super::inventory::ROUTER_PATIENCE;
use crate::common::http_client::ServiceClient;

/// A router caches its view for a second. A view that differs may be outdated.
const LOOK_AGAIN: Duration = Duration::from_millis(1_500);

/// Queries every engine again, and every router.
pub(super) async fn check_epochs(engines: &[EngineInfo], admins: &[ServiceClient], checkup: &mut Checkup) {
    let mut same = BTreeMap::new();
    for engine in engines.iter().filter(|engine| engine.up) {
        let Some(before) = &engine.run else {
            checkup.skip("epoch", &engine.name, "it has no epoch: a restart would not be noticed");
            continue;
        };
        match Incarnation::of(&engine.service).await {
            Ok(Some(now)) if now == *before => {
                same.insert(engine.name.as_str(), before);
            }
            Ok(now) => {
                let now = now.map_or_else(|| "unknown".to_owned(), |now| now.to_string());
                let message = format!(
                    "{before} before, {now} now: it restarted during the examination, or several engines share this \
                     address"
                );
                checkup.fail("epoch", &engine.name, message);
            }
            Err(error) => {
                let message = format!("{before} before, unknown now: {error}");
                checkup.fail("epoch", &engine.name, message);
            }
        }
    }
    let mut agree = 0;
    for admin in admins {
        agree += compare(admin, &same, checkup).await;
    }
    if !same.is_empty() && !checkup.has_failed_any("epoch") {
        let one = same.len() == 1;
        let those = if one { "the engine".to_owned() } else { format!("{} engines", same.len()) };
        let to = if agree > 0 { "; the routers reach the same" } else { "" };
        checkup.ok("epoch", "", format!("{those} did not restart{to}"));
    }
}

/// Compares a router's view of engines that did not restart. Returns the number of engines that match.
async fn compare(admin: &ServiceClient, same: &BTreeMap<&str, &Incarnation>, checkup: &mut Checkup) -> usize {
    let mut reported = view(admin).await;
    if reported.iter().any(|(name, to_it)| differs(same, name, to_it)) {
        tokio::time::sleep(LOOK_AGAIN).await;
        reported = view(admin).await;
    }
    let mut agree = 0;
    for (name, to_it) in &reported {
        match same.get(name.as_str()) {
            Some(run) if differs(same, name, to_it) => {
                let message = format!(
                    "{run} from here, {to_it} from the router at {}: it reaches another engine",
                    admin.authority()
                );
                checkup.fail("epoch", name, message);
            }
            Some(Incarnation::Epoch(_)) => agree += 1,
            _ => {}
        }
    }
    agree
}

fn differs(same: &BTreeMap<&str, &Incarnation>, name: &str, to_it: &Incarnation) -> bool {
    same.get(name).is_some_and(|run| matches!(run, Incarnation::Epoch(_)) && **run != *to_it)
}

/// The epochs in a router's view. Other checks report a router that does not respond.
async fn view(admin: &ServiceClient) -> Vec<(String, Incarnation)> {
    let Ok(page) = admin.get_json("/debug/kv", ROUTER_PATIENCE).await else { return Vec::new() };
    let engines = page["engines"].as_array().into_iter().flatten();
    let reported = engines.filter_map(|engine| Some((engine["engine"].as_str()?, engine["epoch"].as_str()?)));
    reported.map(|(name, epoch)| (name.to_owned(), Incarnation::Epoch(epoch.to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::checkup::CheckupOptions;
    use super::*;
    use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, Role, SimFleet};

    #[test]
    fn an_engine_that_restarted_during_the_check_is_named() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        for dialect in [Dialect::Baton, Dialect::Vllm] {
            let plan = FleetPlan::new(1, 1, EnginePlan { dialect, ..EnginePlan::default() });
            let fleet = SimFleet::start(plan).expect("a fleet starts on loopback");
            let addresses = [fleet.prefill()[0].to_string(), fleet.decode()[0].to_string()];
            runtime.block_on(async {
                let mut engines = Vec::new();
                for address in &addresses {
                    let mut engine = EngineInfo::at(ServiceClient::parse(address).expect("an address"));
                    engine.up = true;
                    engine.run = Incarnation::of(&engine.service).await.expect("it answers");
                    assert!(matches!(engine.run, Some(Incarnation::Epoch(_))), "{:?}", engine.run);
                    engines.push(engine);
                }
                let examined = async || {
                    let mut checkup = Checkup::new(CheckupOptions::default());
                    checkup.mark_reachable();
                    check_epochs(&engines, &[], &mut checkup).await;
                    checkup
                };
                let well = examined().await;
                assert!(well.text().contains("2 engines did not restart"), "{}", well.text());
                fleet.restart(Role::Decode, 0).expect("its port is free again");
                let restarted = examined().await;
                assert!(restarted.has_failed("epoch", &addresses[1]), "{}", restarted.text());
                assert!(!restarted.has_failed("epoch", &addresses[0]), "{}", restarted.text());
                fleet.kill(Role::Prefill, 0).expect("it runs");
                assert!(
                    examined().await.has_failed("epoch", &addresses[0]),
                    "one that is gone is not the same"
                );
            });
        }
    }

    #[test]
    fn an_engine_with_another_epoch_behind_the_router_is_reported() {
        let (ours, theirs) = (Incarnation::Epoch("a".to_owned()), Incarnation::Epoch("b".to_owned()));
        let stock = Incarnation::Started(1_000);
        let same = BTreeMap::from([("e:1", &ours), ("stock:1", &stock)]);
        assert!(!differs(&same, "e:1", &ours) && differs(&same, "e:1", &theirs));
        assert!(!differs(&same, "stock:1", &theirs), "one that we know by another sign is not compared");
        assert!(!differs(&same, "f:1", &theirs), "nor one that we did not reach");
    }
}
