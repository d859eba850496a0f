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
    // A control address with TLS cannot be read.
    let (inventory, checkup) = inspected(&[], &front, json!("https://core:7600")).await;
    let seen = inventory.engines.iter().map(|engine| (engine.service.control_authority(), engine.up));
    assert_eq!(seen.collect::<Vec<_>>(), [(front.as_str(), true)], "{}", checkup.text());
    let skipped = "is observed at its own address: control_url \"https://core:7600\" is not http://HOST:PORT";
    assert!(checkup.text().contains(skipped), "{}", checkup.text());
}

#[tokio::test]
async fn an_engine_with_handles_and_without_verbs_is_found() {
    let front = serve(&[("/health", json!({})), ("/version", json!({})), ("/v1/models", json!({}))]).await;
    for (handles, fails) in [(json!(true), true), (json!(false), false), (Value::Null, false)] {
        let listed = json!({"engine": front, "url": format!("http://{front}"), "handles": handles});
        let admin = serve(&[("/engines", json!({"engines": [listed]}))]).await;
        let (inventory, mut checkup) = inspected(&[], &front, Value::Null).await;
        missing_verbs(&[ServiceClient::parse(&admin).expect("an address")], &inventory, &mut checkup).await;
        assert_eq!(checkup.has_failed("engine", &front), fails, "{handles}: {}", checkup.text());
    }
}

#[test]
fn an_engine_with_tls_is_checked_through_the_router_only() {
    let (mut engines, mut checkup) = (KnownEngines::new(), Checkup::new(CheckupOptions::default()));
    let legs = json!({"decode": {"standing": "ejected"}});
    let listed = json!({"engine": "core:1", "url": "https://core:1", "legs": legs});
    known_engine(&listed, &mut engines, &mut checkup);
    assert!(engines.is_empty() && checkup.text().contains("uses TLS: checked through the router only"));
    assert!(checkup.has_failed("standing", "core:1"), "{}", checkup.text());
    // An engine of the options is at that address in plain text.
    let service = Some(ServiceClient::engine("core:1").expect("an engine"));
    engines.insert("core:1".to_owned(), KnownEngine { service, ..KnownEngine::default() });
    known_engine(&listed, &mut engines, &mut checkup);
    assert_eq!(engines.len(), 1);
    assert_eq!(checkup.text().matches("uses TLS").count(), 1, "{}", checkup.text());
}

#[tokio::test]
async fn an_open_address_is_found_at_the_url_and_at_the_control_address() {
    let open = serve(&[("/debug/kv", json!({}))]).await;
    let (other, closed) = (serve(&[("/debug/kv", json!({}))]).await, serve(&[]).await);
    // The same listener by an address that is not loopback.
    let [far_open, far_other, far_closed] =
        [&open, &other, &closed].map(|address| address.replace("127.0.0.1", "0.0.0.0"));
    let open_at = |addresses: &str| format!("any client can release its blocks at {addresses}: ");
    for (option, expected) in [
        (open.clone(), String::new()),
        (format!("{open},{other}"), String::new()),
        (format!("{far_closed},{open}"), "answers no /debug/kv beyond loopback".to_owned()),
        (format!("{far_open},{open}"), open_at(&far_open)),
        (format!("{far_open},{far_closed}"), open_at(&far_open)),
        (format!("{far_closed},{far_open}"), open_at(&far_open)),
        (format!("{far_open},{far_other}"), open_at(&format!("{far_open} and {far_other}"))),
    ] {
        let engine = EngineInfo::at(ServiceClient::engine(&option).expect("an engine"));
        let mut checkup = Checkup::new(CheckupOptions::default());
        check_authentication(&engine, &mut checkup).await;
        let text = checkup.text();
        assert_eq!(text.contains("exposure"), !expected.is_empty(), "{option}: {text}");
        assert!(text.contains(&expected), "{option}: {text}");
    }
}
