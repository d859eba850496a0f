//! Engines whose front end has no `/debug/kv`: stock vLLM with Baton's connector, without the plugin.

use serde_json::json;

use super::super::checkup::CheckupOptions;
use super::*;
use crate::common::test_server::serve;
use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, SimFleet};

/// Inspects the engines of these options, behind a router that lists the front end with this `control_url`.
async fn inspected(options: &[String], front: &str, control: Value) -> (Inventory, Checkup) {
    let listed = json!({"engine": front, "url": format!("http://{front}"), "control_url": control});
    let admin = serve(&[
        ("/config", json!({"generation": 1, "config": {}})),
        ("/engines", json!({"engines": [listed]})),
        ("/metrics", json!("")),
    ])
    .await;
    let engines = options.iter().map(|option| ServiceClient::engine(option).expect("an engine"));
    let targets = DoctorTargets {
        endpoint: None,
        url: "https://router:1".to_owned(),
        admins: vec![ServiceClient::parse(&admin).expect("an address")],
        engines: engines.collect(),
        secret: None,
        model: None,
    };
    let mut checkup = Checkup::new(CheckupOptions::default());
    (inspect(&targets, &mut checkup).await, checkup)
}

#[tokio::test]
async fn an_engine_is_read_at_its_control_address() {
    let plan = EnginePlan { dialect: Dialect::Baton, ..EnginePlan::default() };
    let fleet = SimFleet::start(FleetPlan::new(1, 1, plan)).expect("a fleet starts on loopback");
    let front = serve(&[
        ("/health", json!({})),
        ("/version", json!({"version": "front"})),
        ("/v1/models", json!({"data": [{"id": "m"}]})),
        ("/metrics", json!("")),
    ])
    .await;
    let core = format!("http://{}", fleet.prefill()[0]);
    let both = format!("{front},{core}");
    for (options, control, follows) in [
        (vec![], Value::Null, false),
        (vec![], json!(core), true),
        (vec![front.clone()], json!(core), true),
        (vec![both], Value::Null, true),
    ] {
        let (inventory, checkup) = inspected(&options, &front, control).await;
        let [engine] = &inventory.engines[..] else { panic!("one engine: {}", checkup.text()) };
        assert_eq!((engine.name.as_str(), engine.version.as_deref()), (front.as_str(), Some("front")));
        let seen = (engine.up, engine.events, engine.role.as_deref());
        assert_eq!(seen, (true, follows, follows.then_some("prefill")), "{}", checkup.text());
        assert_eq!(matches!(engine.run, Some(Incarnation::Epoch(_))), follows, "{}", checkup.text());
    }
    let (inventory, checkup) = inspected(&[], &front, json!("https://core:7600")).await;
    assert!(inventory.engines.is_empty(), "its event log cannot be read: {}", checkup.text());
    assert!(checkup.text().contains("https://core:7600 is not an address that can be checked"));
}
