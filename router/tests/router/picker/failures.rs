//! Errors of engines and sidecars: which engine of a request loses its place in the choice, and how it returns.

use std::net::SocketAddr;

use crate::harness::client::get;
use crate::harness::engine::{Action, FakeEngine};
use crate::picker::gateway::{TestPicker, completion, pool, response_fields};

/// The header by which a sidecar names the leg that failed.
const FAILED_LEG: &str = "x-baton-failed-leg";

/// Addresses at which nothing listens: a check of an ejected engine fails.
fn engines() -> [SocketAddr; 2] {
    [7001, 7002].map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
}

/// A request of this sender, answered with a head of these fields. Returns the engine that got it.
async fn answered(picker: &TestPicker, sender: &str, fields: &[(&str, &str)]) -> String {
    let mut stream = picker.request(&[("authorization", sender)], &completion("p")).await;
    let choice = stream.choice().await;
    stream.body().await;
    stream.send(response_fields(fields, true)).await;
    stream.reply().await;
    choice.destination
}

async fn breaker(picker: &TestPicker, engine: SocketAddr, leg: &str) -> String {
    let all = get(picker.admin, "/engines").await.json();
    let engines = all["engines"].as_array().expect("a list").clone();
    let one = engines.into_iter().find(|one| one["engine"] == engine.to_string()).expect("it is listed");
    one["legs"][leg]["breaker"].as_str().expect("a state").to_owned()
}

#[tokio::test]
async fn an_engine_that_its_sidecar_cannot_reach_gets_no_further_request() {
    let all = engines();
    let model = format!("    decode: {}", pool(&all, "round_robin", None));
    let picker = TestPicker::start(&model, "").await;
    let ready = "baton_router_pool_ready_engines{model=\"m\",leg=\"decode\"}";
    // An engine that is full, or that the gateway could not connect to.
    answered(&picker, "a", &[(":status", "503")]).await;
    answered(&picker, "b", &[(":status", "503")]).await;
    picker.counts(ready, 2.0).await;
    let dead = answered(&picker, "a", &[(":status", "503"), (FAILED_LEG, "decode")]).await;
    picker.counts(ready, 1.0).await;
    for _ in 0..4 {
        let (destination, _stream) = picker.destination("p").await;
        assert_ne!(destination, dead);
    }
}

#[tokio::test]
async fn an_error_of_the_prefill_leg_is_no_fault_of_the_decode_engine() {
    let [p, d] = engines();
    let model = format!(
        "    prefill: {}\n    decode: {}",
        pool(&[p], "round_robin", None),
        pool(&[d], "round_robin", None)
    );
    let health = "health: {active: {interval_ms: 0}, breaker: {failures: 2, cool_down_ms: 600000, \
                  cool_down_max_ms: 600000}}\n";
    let picker = TestPicker::start(&model, health).await;
    for sender in ["a", "b"] {
        answered(&picker, sender, &[(":status", "502"), (FAILED_LEG, "prefill")]).await;
    }
    assert_eq!(breaker(&picker, p, "prefill").await, "open");
    assert_eq!(breaker(&picker, d, "decode").await, "closed");
    // Other sidecars and engines name no leg.
    for sender in ["a", "b"] {
        answered(&picker, sender, &[(":status", "502")]).await;
    }
    assert_eq!(breaker(&picker, d, "decode").await, "open");
}

#[tokio::test]
async fn an_engine_that_works_again_is_used_as_before() {
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let model = format!("    decode: {}", pool(&[engine.address], "round_robin", None));
    let health = "health: {active: {interval_ms: 0}, breaker: {cool_down_ms: 1, cool_down_max_ms: 1}}\n";
    let picker = TestPicker::start(&model, health).await;
    answered(&picker, "a", &[(":status", "503"), (FAILED_LEG, "decode")]).await;
    let begun = std::time::Instant::now();
    // The sidecar itself answers the check at the end of the cool-down.
    while breaker(&picker, engine.address, "decode").await != "half_open" {
        assert!(begun.elapsed().as_secs() < 10, "it is not on trial");
    }
    // The sidecar refuses this request itself.
    answered(&picker, "a", &[(":status", "403")]).await;
    assert_eq!(breaker(&picker, engine.address, "decode").await, "half_open");
    answered(&picker, "a", &[(":status", "200")]).await;
    assert_eq!(breaker(&picker, engine.address, "decode").await, "closed");
}

/// The gateway may have sent the request to another endpoint.
#[tokio::test]
async fn with_fallbacks_a_response_shows_nothing_of_the_first_engine() {
    let all = engines();
    let model = format!("    decode: {}", pool(&all, "round_robin", None));
    let picker = TestPicker::start(&model, "picker: {fallbacks: 1}\n").await;
    answered(&picker, "a", &[(":status", "503"), (FAILED_LEG, "decode")]).await;
    picker.counts("baton_router_pool_ready_engines{model=\"m\",leg=\"decode\"}", 2.0).await;
}

#[tokio::test]
async fn successes_between_failures_keep_an_engine_in_use() {
    let [d, _] = engines();
    let model = format!("    decode: {}", pool(&[d], "round_robin", None));
    let health = "health: {active: {interval_ms: 0}, breaker: {failures: 2, cool_down_ms: 600000, \
                  cool_down_max_ms: 600000}}\n";
    let picker = TestPicker::start(&model, health).await;
    for sender in ["a", "b", "c", "d"] {
        answered(&picker, sender, &[(":status", "500")]).await;
        answered(&picker, sender, &[(":status", "200")]).await;
    }
    assert_eq!(breaker(&picker, d, "decode").await, "closed");
    for sender in ["a", "b"] {
        answered(&picker, sender, &[(":status", "500")]).await;
    }
    assert_eq!(breaker(&picker, d, "decode").await, "open");
}
