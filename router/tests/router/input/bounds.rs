//! The bounds of `limits`, `timeouts` and `attempts` that no other test covers.

use std::time::Duration;

use serde_json::json;
use socket2::{Domain, Socket, Type};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";

fn in_trouble() -> Action {
    Action::Refuse(500, json!({"error": {"message": "x"}}))
}

async fn three(action: &Action) -> [FakeEngine; 3] {
    [
        FakeEngine::always(action.clone()).await,
        FakeEngine::always(action.clone()).await,
        FakeEngine::always(action.clone()).await,
    ]
}

fn total_requests(engines: &[FakeEngine]) -> usize {
    engines.iter().map(|engine| engine.received().len()).sum()
}

#[tokio::test]
async fn attempts_bound_the_engines_of_a_request() {
    for allowed in 1..=3 {
        let prefill = FakeEngine::always(Action::Lease(Some(1))).await;
        let [a, b, c] = three(&in_trouble()).await;
        let top = format!("attempts: {{decode: {allowed}}}");
        let system = TestRouter::with(&[&prefill], &[&a, &b, &c], "", &top).await;
        assert_eq!(post(system.address, PATH, &completion(false)).await.status / 100, 5);
        assert_eq!(total_requests(&[a, b, c]), allowed, "decode");

        let answers = FakeEngine::always(Action::Whole(1)).await;
        let [a, b, c] = three(&in_trouble()).await;
        let top = format!("attempts: {{prefill: {allowed}}}");
        let system = TestRouter::with(&[&a, &b, &c], &[&answers], "", &top).await;
        assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200, "the fallback");
        assert_eq!(total_requests(&[a, b, c]), allowed, "prefill");
    }
}

#[tokio::test]
async fn a_settlement_is_tried_as_often_as_attempts_allow() {
    let prefill = FakeEngine::always(Action::Lease(Some(1))).await;
    prefill.verbs_answer(500);
    let decode = FakeEngine::always(Action::Refuse(400, json!({"error": {"message": "x"}}))).await;
    let system = TestRouter::with(&[&prefill], &[&decode], "", "attempts: {settle: 3}").await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 400);
    system.counts("baton_router_settlements_total{result=\"failed\"}", 1.0).await;
    assert_eq!(prefill.releases().len(), 3);
}

#[tokio::test]
async fn a_temporary_404_does_not_disable_the_verbs_of_an_engine() {
    let prefill = FakeEngine::always(Action::Lease(Some(1))).await;
    let decode = FakeEngine::always(Action::Refuse(400, json!({"error": {"message": "x"}}))).await;
    let system = TestRouter::with(&[&prefill], &[&decode], "", "attempts: {settle: 16}").await;
    let confirmed = |times| system.counts("baton_router_settlements_total{result=\"confirmed\"}", times);
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 400);
    confirmed(1.0).await;
    prefill.verbs_answer(404);
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 400);
    eventually("the release is repeated", || prefill.releases().len() >= 3).await;
    prefill.verbs_answer(0);
    confirmed(2.0).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 400);
    confirmed(3.0).await;
}

#[tokio::test]
async fn requests_that_end_together_are_settled_in_turn_and_a_drain_waits_for_all() {
    const CLIENTS: usize = 16;
    let prefill = FakeEngine::always(Action::Lease(Some(1))).await;
    let decode = FakeEngine::always(Action::Hang).await;
    let top = "limits: {settlements: 4}\ndrain_timeout_ms: 50";
    let mut system = TestRouter::with(&[&prefill], &[&decode], "", top).await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(false)).await;
        clients.push(client);
    }
    eventually("all are being decoded", || decode.received().len() == CLIENTS).await;
    // All requests are cut at once: each needs an abort and a release.
    system.shut_down();
    system.stopped().await;
    assert_eq!((decode.aborts().len(), prefill.releases().len()), (CLIENTS, CLIENTS));
    drop(clients);
}

#[tokio::test]
async fn settlements_beyond_the_limit_wait_and_beyond_the_queue_are_counted_and_dropped() {
    let prefill = FakeEngine::always(Action::Lease(Some(1))).await;
    prefill.verbs_answer(1);
    let decode = FakeEngine::always(Action::Refuse(400, json!({"error": {"message": "x"}}))).await;
    let system =
        TestRouter::with(&[&prefill], &[&decode], "", "limits: {settlements: 2, in_flight: 1}").await;
    for _ in 0..5 {
        while post(system.address, PATH, &completion(false)).await.status != 400 {}
    }
    system.counts("baton_router_settlements_total{result=\"refused\"}", 1.0).await;
    system.counts("baton_router_settlements_in_flight", 2.0).await;
    system.counts("baton_router_settlements_waiting", 2.0).await;
}

#[tokio::test]
async fn a_connection_beyond_the_limit_waits_for_its_turn() {
    let decode = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&decode], "", "limits: {connections: 1}").await;
    let mut first = Client::connect(system.address).await;
    first.post(PATH, &completion(false)).await;
    assert_eq!(first.answer().await.status, 200);
    let mut second = Client::connect(system.address).await;
    second.post(PATH, &completion(false)).await;
    // The first client is served before and after; the second one only after the first has disconnected.
    first.post(PATH, &completion(false)).await;
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(decode.received().len(), 2);
    first.hang_up(crate::harness::client::DisconnectKind::Fin);
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(decode.received().len(), 3);
}

#[tokio::test]
async fn connections_to_engines_are_kept_for_as_long_as_they_may_be_idle() {
    for (idle_ms, made) in [(0, 3), (3_600_000, 1)] {
        let decode = FakeEngine::always(Action::Whole(1)).await;
        let top = format!("timeouts: {{engine_idle_ms: {idle_ms}}}");
        let system = TestRouter::with(&[], &[&decode], "    protocol: vllm", &top).await;
        for _ in 0..3 {
            assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
        }
        assert_eq!(decode.connections(), made, "{idle_ms}");
    }
}

/// An address with a full accept queue, where no connection can be made.
fn a_black_hole() -> (Socket, Vec<Socket>, std::net::SocketAddr) {
    let new = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let listener = new();
    listener.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let waiting = (0..4).map(|_| {
        let socket = new();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address.into());
        socket
    });
    (listener, waiting.collect(), address)
}

#[tokio::test]
async fn an_engine_that_takes_no_connection_is_given_up_after_the_connect_timeout() {
    let (_listener, _waiting, hole) = a_black_hole();
    let live = FakeEngine::always(Action::Whole(1)).await;
    let model = format!("      engines: [{{url: 'http://{hole}'}}, {{url: '{}'}}]", live.url());
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\ntimeouts: {{connect_ms: 100}}\nmodels:\n  - name: m\n    \
         decode:\n      policy: round_robin\n{model}\n"
    );
    let system = TestRouter::of(&yaml).await;
    for _ in 0..2 {
        assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    }
    assert_eq!(live.received().len(), 2);
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_disconnected() {
    let decode = FakeEngine::always(Action::Whole(64 << 20)).await;
    let system = TestRouter::with(&[], &[&decode], "", "timeouts: {client_stall_ms: 100}").await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    eventually("the engine is aborted", || !decode.aborts().is_empty()).await;
    system.settled().await;
    drop(client);
    tokio::time::timeout(Duration::from_secs(10), system.settled()).await.unwrap();
}

#[tokio::test]
async fn the_first_line_of_the_cluster_secrets_file_is_sent_to_engines() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, "0123456789abcdef\nnot this line\n").unwrap();
    let decode = FakeEngine::always(Action::Whole(1)).await;
    let top = format!("cluster_secret_file: {}", file.display());
    let system = TestRouter::with(&[], &[&decode], "", &top).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    assert_eq!(decode.received()[0].headers["x-baton-cluster-secret"], "0123456789abcdef");
}
