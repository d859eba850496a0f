//! `control_url`: an engine that answers verbs and snapshot queries at another address than requests.

use baton_router::RouterConfig;
use serde_json::json;

use crate::harness::client::{Client, DisconnectKind, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::TestRouter;

const HANDLE: u128 = 0xabc;
const SECRET: &str = "0123456789abcdef";

fn yaml(p: &FakeEngine, control: &FakeEngine, d: &FakeEngine) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         cluster_secret: {SECRET}\ntimeouts: {{settle_ms: 300}}\n\
         models: [{{name: m, prefill: {{engines: [{{url: '{}', control_url: '{}'}}]}}, \
         decode: {{engines: [{{url: '{}'}}]}}}}]",
        p.url(),
        control.url(),
        d.url()
    )
}

/// An engine that lacks all verbs at its own address.
async fn front_end(action: Action) -> FakeEngine {
    FakeEngine::always(action).await.without_verbs()
}

async fn refusing() -> FakeEngine {
    FakeEngine::always(Action::Refuse(400, json!({"error": {"message": "x"}}))).await
}

fn is_control(request: &ReceivedRequest) -> bool {
    !request.path.starts_with("/v1/") && request.path != "/metrics"
}

#[tokio::test]
async fn releases_go_to_the_control_address_with_the_secret_and_follow_a_reload() {
    let (p, d) = (front_end(Action::Lease(Some(HANDLE))).await, refusing().await);
    let (first, second) = (FakeEngine::always(Action::Hang).await, FakeEngine::always(Action::Hang).await);
    let system = TestRouter::of(&yaml(&p, &first, &d)).await;
    for times in 1..=3 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
        system.settled().await;
        assert_eq!(first.releases().len(), times);
    }
    assert_eq!(first.connections(), 1, "its connection is kept");
    assert_eq!(first.releases()[0], (format!("{HANDLE:032x}"), "decode_refused".to_owned()));
    assert!(first.all().iter().all(|request| request.headers["x-baton-cluster-secret"] == SECRET));
    let next = RouterConfig::from_yaml(&yaml(&p, &second, &d), "test.yaml").unwrap();
    system.reload.install(next).unwrap();
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
    system.settled().await;
    assert_eq!((first.releases().len(), second.releases().len()), (3, 1));
    assert!(!p.all().iter().any(is_control), "only requests go to the engine's own address");
}

#[tokio::test]
async fn aborts_go_to_the_control_address() {
    let (p, d) = (front_end(Action::Hang).await, FakeEngine::always(Action::Whole(1)).await);
    let control = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::of(&yaml(&p, &control, &d)).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    p.wait("it prefills", |p| p.received().len() == 1).await;
    client.hang_up(DisconnectKind::Fin);
    control.wait("the abort", |control| control.aborts().len() == 1).await;
    system.settled().await;
    assert_eq!(control.aborts(), [p.received()[0].headers["x-request-id"].to_str().unwrap()]);
    assert!(!p.all().iter().any(is_control));
    system.counts("baton_router_settlements_total{result=\"confirmed\"}", 1.0).await;
}

#[tokio::test]
async fn snapshots_are_read_at_the_control_address() {
    let (p, d) = (front_end(Action::Hang).await, FakeEngine::always(Action::Hang).await);
    let control = FakeEngine::always(Action::Hang).await.with_rule(|request| {
        let blocks = json!({"total": 100, "free": 100});
        (request.path == "/debug/kv")
            .then(|| Action::Json(json!({"blocks": blocks, "engine": {"role": "prefill"}})))
    });
    let system = TestRouter::of(&yaml(&p, &control, &d)).await;
    let snapshot = get(system.admin, "/debug/kv").await.json();
    let engines = snapshot["engines"].as_array().unwrap();
    let view = engines.iter().find(|engine| engine["engine"] == p.address.to_string()).unwrap();
    assert_eq!((&view["source"], &view["blocks_total"]), (&json!("debug_kv"), &json!(100)), "{snapshot:#}");
    assert!(!p.all().iter().any(is_control), "its own address has only the metrics");
    assert!(control.all().iter().all(|request| request.path.starts_with("/debug/kv")));
    let listed = get(system.admin, "/engines").await.json();
    let control_of = |of: &FakeEngine| {
        let mut engines = listed["engines"].as_array().unwrap().iter();
        engines.find(|engine| engine["engine"] == of.address.to_string()).unwrap()["control_url"].clone()
    };
    assert_eq!((control_of(&p), control_of(&d)), (json!(control.url()), json!(null)), "{listed:#}");
}

#[tokio::test]
async fn a_control_address_without_a_listener_costs_the_engine_nothing() {
    let (p, d) = (front_end(Action::Lease(Some(HANDLE))).await, refusing().await);
    let control = FakeEngine::always(Action::Hang).await;
    let yaml = yaml(&p, &control, &d) + "\nattempts: {settle: 1}\n";
    let address = control.address;
    control.die().await;
    let system = TestRouter::of(&yaml).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
    system.counts("baton_router_settlements_total{result=\"failed\"}", 1.0).await;
    assert_eq!(crate::operations::health::standing(&system, &p, "prefill").await, "usable");
    let _control = FakeEngine::back_at(address, Action::Hang).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
    system.counts("baton_router_settlements_total{result=\"confirmed\"}", 1.0).await;
}

#[test]
fn contradictory_or_insecure_control_addresses_are_refused() {
    let with = |prefill: &str, decode: &str| {
        let yaml = format!(
            "models:\n  - name: m\n    prefill: {{engines: [{{url: 'http://a:1'{prefill}}}]}}\n    \
             decode: {{engines: [{{url: 'http://b:1'}}, {{url: 'http://a:1'{decode}}}]}}\n"
        );
        RouterConfig::from_yaml(&yaml, "router.yaml")
    };
    let control = |url: &str| format!(", control_url: '{url}'");
    for decode in [String::new(), control("http://a:7600")] {
        assert!(with(&control("http://a:7600"), &decode).is_ok(), "{decode}");
    }
    for (prefill, decode, expected) in [
        (control("http://a:7600"), control("http://a:7601"), "the same engine has another `control_url` at"),
        (control("a:7600"), String::new(), "`a:7600` must start with http:// or https://"),
        (
            control("https://a:7600"),
            String::new(),
            "engines[0].control_url`: `https://a:7600` needs `engine_tls.ca`",
        ),
    ] {
        let message = with(&prefill, &decode).expect_err(expected).to_string();
        assert!(message.contains(expected) && message.lines().count() == 1, "{expected}: {message}");
    }
    let found = "models:\n  - name: m\n    decode:\n      discover:\n        dns: {host: d, port: 1}\n        \
                 template: {control_url: 'http://a:1'}\n";
    let message = RouterConfig::from_yaml(found, "router.yaml").expect_err("no template has one").to_string();
    assert!(message.contains("control_url"), "{message}");
}
