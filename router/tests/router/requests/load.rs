//! Many clients on kept connections: none of their requests may fail.

use crate::harness::client::{Client, completion};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_clients_on_kept_connections_see_no_failure() {
    const CLIENTS: usize = 8;
    const REQUESTS: usize = 150;
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let actions = (0..CLIENTS * REQUESTS / 2).flat_map(|_| [Action::Stream(3), Action::Whole(100)]);
    let d = FakeEngine::scripted(actions.collect()).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let address = system.address;
        clients.spawn(async move {
            let mut client = Client::connect(address).await;
            for n in 0..REQUESTS {
                client.post("/v1/completions", &completion(n % 2 == 0)).await;
                let answer = client.answer().await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert!(!answer.text().contains("error"), "{}", answer.text());
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    system.settled().await;
    assert_eq!(p.received().len(), CLIENTS * REQUESTS);
    assert!(p.aborts().is_empty() && p.releases().is_empty() && d.aborts().is_empty());
    for engine in [&p, &d] {
        let made = engine.connections();
        assert!(made <= 2 * CLIENTS, "connections to engines are kept: {made}");
    }
    let done = (CLIENTS * REQUESTS) as f64;
    system.counts("baton_router_requests_total{outcome=\"completed\"}", done).await;
}
