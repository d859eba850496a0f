//! The routing headers: lists, forbidden and malformed engines, data-parallel ranks.

use serde_json::json;

use super::{TestSidecar, free_ports, named};
use crate::harness::client::{Client, get};
use crate::harness::engine::{Action, FakeEngine};

async fn lease() -> FakeEngine {
    FakeEngine::always(Action::Lease(Some(7))).await
}

#[tokio::test]
async fn the_first_engine_of_a_list_prefills() {
    let (p, other, d) = (lease().await, lease().await, FakeEngine::always(Action::Whole(1)).await);
    let sidecar = TestSidecar::beside(&d).await;
    let (first, second) = (p.address, other.address);
    for headers in [
        format!("x-prefiller-host-port: {first},{second}\r\n"),
        format!("x-prefiller-host-port: {first}\r\nX-Prefiller-Host-Port: {second}\r\n"),
        format!("x-prefiller-host-port: http://{first}\r\n"),
    ] {
        assert_eq!(sidecar.complete(&headers).await.status, 200, "{headers}");
    }
    assert_eq!((p.received().len(), other.all().len()), (3, 0));
}

#[tokio::test]
async fn with_sampling_every_engine_of_a_list_prefills() {
    let (p, other, d) = (lease().await, lease().await, FakeEngine::always(Action::Whole(1)).await);
    let sidecar = TestSidecar::with(&d, "enable-prefiller-sampling: true").await;
    let headers = format!("x-prefiller-host-port: {}, {}\r\n", p.address, other.address);
    // 2^-99 that one engine gets none.
    for _ in 0..100 {
        assert_eq!(sidecar.complete(&headers).await.status, 200);
        if !p.received().is_empty() && !other.received().is_empty() {
            return;
        }
    }
    panic!("one engine got all requests");
}

#[tokio::test]
async fn an_engine_outside_the_list_is_forbidden_and_gets_nothing() {
    let (p, d) = (lease().await, FakeEngine::always(Action::Whole(1)).await);
    let sidecar = TestSidecar::with(&d, "allow-prefiller: [10.0.0.0/8, localhost]").await;
    let answer = sidecar.complete(&named(&p)).await;
    assert_eq!(answer.status, 403, "{}", answer.text());
    assert!(!answer.text().contains(&p.address.to_string()));
    assert_eq!((p.connections(), d.connections()), (0, 0));
    let by_name = format!("x-prefiller-host-port: localhost:{}\r\n", p.address.port());
    assert_eq!(sidecar.complete(&by_name).await.status, 200);
    // The pool is not known outside a cluster, so no engine is allowed.
    let sidecar = TestSidecar::with(&d, "enable-ssrf-protection: true\ninference-pool: ns/pool").await;
    assert_eq!(sidecar.complete(&named(&p)).await.status, 403);
    assert_eq!(sidecar.complete("").await.status, 200);
}

#[tokio::test]
async fn a_malformed_engine_is_the_clients_error() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let sidecar = TestSidecar::beside(&d).await;
    for wrong in ["host", "h:0", "h:1/path", "user@h:1", "h:1?x", "https://h:1", "h:70000"] {
        let answer = sidecar.complete(&format!("x-prefiller-host-port: {wrong}\r\n")).await;
        assert_eq!(answer.status, 400, "{wrong}");
    }
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn each_rank_has_a_listener_and_the_first_one_also_follows_the_header() {
    let base = free_ports(2);
    let engines = [
        FakeEngine::at(([127, 0, 0, 1], base).into(), Action::Whole(1)).await,
        FakeEngine::at(([127, 0, 0, 1], base + 1).into(), Action::Whole(1)).await,
    ];
    let sidecar = TestSidecar::at_port(base, 2, "").await;
    let port = sidecar.address.port();
    let received = || [engines[0].received().len(), engines[1].received().len()];
    assert_eq!(sidecar.complete("").await.status, 200);
    assert_eq!(received(), [1, 0]);
    let mut second = Client::connect((sidecar.address.ip(), port + 1).into()).await;
    second.post("/v1/completions", &json!({"model": "m", "prompt": "x"})).await;
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(received(), [1, 1]);
    let to = |port: u16| format!("x-data-parallel-host-port: 10.0.0.9:{port}\r\n");
    assert_eq!(sidecar.complete(&to(port + 1)).await.status, 200);
    assert_eq!(received(), [1, 2]);
    for unknown in [to(port + 2), to(port - 1), "x-data-parallel-host-port: x\r\n".to_owned()] {
        assert_eq!(sidecar.complete(&unknown).await.status, 400, "{unknown}");
    }
    assert_eq!(received(), [1, 2]);
    // Passed requests reach the engine of their listener.
    let answer = get((sidecar.address.ip(), port + 1).into(), "/v1/models").await;
    assert_eq!((answer.status, engines[1].model_lists()), (200, 1));
}
