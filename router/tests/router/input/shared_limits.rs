//! Limits shared through a server that answers, is slow, fails, or sends what it should not.

use std::net::SocketAddr;

use baton_router::{NewKey, RouterConfig};
use serde_json::{Value, json};

use crate::harness::client::{Client, ClientResponse, DISCONNECT_KINDS, completion, get};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::store::{StoreAnswer, TestStore};
use crate::harness::system::TestRouter;

const LIMITS: &str = "{requests_per_minute: 2, tokens_per_minute: 1000, concurrent_requests: 5}";

/// A router with one limited key of one limited tenant, and one key without limits.
struct SharedRouter {
    store: TestStore,
    d: FakeEngine,
    system: TestRouter,
    limited: NewKey,
    free: NewKey,
    yaml: String,
}

/// `terms` are further keys of `shared_limits`.
async fn with_store(store: TestStore, d: FakeEngine, terms: &str) -> SharedRouter {
    with_store_at(store.address, store, d, terms).await
}

/// As [`with_store`], with a server at another address.
async fn with_store_at(address: SocketAddr, store: TestStore, d: FakeEngine, terms: &str) -> SharedRouter {
    let (limited, free) = (NewKey::make(), NewKey::make());
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - \
         name: m\n    decode: {{engines: [{{url: '{}'}}]}}\nauth:\n  keys:\n    - {{id: a, hash: '{}', tenant: t, limits: \
         {LIMITS}}}\n    - {{id: b, hash: '{}', tenant: free}}\n  tenants: [{{name: t, limits: {LIMITS}}}]\n  \
         shared_limits: {{url: 'redis://{}', timeout_ms: 500{terms}}}\n",
        d.url(),
        limited.hash,
        free.hash,
        address,
    );
    let system = TestRouter::of(&yaml).await;
    SharedRouter { store, d, system, limited, free, yaml }
}

async fn standard(answer: StoreAnswer, terms: &str) -> SharedRouter {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let router = with_store(TestStore::start(StoreAnswer::Taken(1)).await, d, terms).await;
    router.is_up(1.0).await;
    router.store.answers(answer);
    router
}

impl SharedRouter {
    async fn posted(&self, key: &NewKey) -> Client {
        let mut client = Client::connect(self.system.address).await;
        let headers = format!("Authorization: Bearer {}\r\n", key.key);
        client.post_bytes("/v1/completions", &headers, completion(false).to_string().as_bytes()).await;
        client
    }

    async fn post(&self) -> ClientResponse {
        self.posted(&self.limited).await.answer().await
    }

    async fn is_up(&self, up: f64) {
        self.system.counts("baton_router_shared_limits_up", up).await;
    }

    async fn counts(&self, result: &str, times: f64) {
        self.system.counts(&format!("baton_router_shared_limits_total{{result=\"{result}\"}}"), times).await;
    }

    async fn corrected(&self, result: &str, times: f64) {
        let series = format!("baton_router_shared_limits_corrections_total{{result=\"{result}\"}}");
        self.system.counts(&series, times).await;
    }
}

fn code(answer: &ClientResponse) -> (u16, String) {
    (answer.status, answer.code())
}

#[tokio::test]
async fn a_request_takes_key_and_tenant_in_one_question_and_ends_its_lease() {
    let router = standard(StoreAnswer::Taken(30_000_000), ", prefix: p").await;
    let answer = router.post().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(
        answer.header("x-ratelimit-remaining-requests"),
        Some("1"),
        "of the server, not of the router"
    );
    assert_eq!(answer.header("x-ratelimit-reset-tokens"), Some("30s"));
    router.corrected("sent", 1.0).await;
    let questions = router.store.commands("EVALSHA");
    let [requests, tokens] = &questions[..] else { panic!("two questions: {questions:?}") };
    let names = &requests[3..7];
    let tag = &names[0][..names[0].find('}').unwrap() + 1];
    assert!(tag.starts_with("p:{") && names.iter().all(|name| name.starts_with(tag)), "{names:?}");
    let kinds = names.iter().map(|name| name.rsplit(':').next().unwrap()).collect::<Vec<_>>();
    assert_eq!(kinds, ["requests", "requests", "concurrent", "concurrent"]);
    assert!(names[0] != names[1] && names[2] != names[3]);
    assert_eq!(
        (&requests[7..9], &requests[10..]),
        (&["1", "2"].map(String::from)[..], &["30000", "2", "2", "5", "5"].map(String::from)[..])
    );
    assert_eq!(
        (tokens[2].as_str(), tokens[5].as_str()),
        ("2", "23"),
        "eight tokens, and a quarter of 59 bytes"
    );
    let released = router.store.commands("ZREM");
    assert_eq!(released.len(), 2);
    assert!(
        released.iter().all(|words| words[2] == requests[9] && names[2..].contains(&words[1])),
        "{released:?}"
    );
    router.counts("taken", 2.0).await;
}

#[tokio::test]
async fn a_refusal_of_the_server_is_a_429_of_this_key_or_tenant() {
    let router = standard(StoreAnswer::Numbers(vec![2, 4_000_000]), "").await;
    let answer = router.post().await;
    assert_eq!(code(&answer), (429, "rate_limit_exceeded".to_owned()));
    assert_eq!(answer.header("retry-after"), Some("4"));
    assert!(answer.text().contains("this tenant may use 2 requests per minute"), "{}", answer.text());
    router.store.answers(StoreAnswer::Numbers(vec![-3, 0]));
    let answer = router.post().await;
    assert!(
        answer.text().contains("this API key has reached its limit of requests in flight"),
        "{}",
        answer.text()
    );
    router.counts("refused", 2.0).await;
    router.system.counts("baton_router_rate_limited_total{limit=\"requests\"}", 1.0).await;
    router.system.counts("baton_router_rate_limited_total{limit=\"concurrent\"}", 1.0).await;
    assert!(router.d.received().is_empty());
    assert!(router.store.commands("ZREM").is_empty(), "nothing was taken");
}

#[tokio::test]
async fn a_key_without_limits_asks_nothing() {
    let router = standard(StoreAnswer::Silence, "").await;
    for _ in 0..5 {
        assert_eq!(router.posted(&router.free).await.answer().await.status, 200);
    }
    assert!(router.store.commands("EVALSHA").is_empty());
    router.is_up(1.0).await;
}

#[tokio::test]
async fn unused_tokens_are_returned_and_further_ones_charged() {
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 93, "total_tokens": 100});
    let reply = json!({"choices": [{"index": 0, "text": "abc", "finish_reason": "stop"}], "usage": usage});
    let d = FakeEngine::always(Action::Json(reply)).await;
    let router = with_store(TestStore::start(StoreAnswer::Taken(1)).await, d, "").await;
    router.is_up(1.0).await;
    assert_eq!(router.post().await.status, 200);
    router.corrected("sent", 2.0).await;
    let corrections = |verb: &str| {
        let calls = router.store.commands("EVALSHA").into_iter();
        calls.filter(|words| words[5] == verb).map(|words| words[6].clone()).collect::<Vec<_>>()
    };
    assert_eq!(corrections("charge"), ["77"], "100 were used, 23 were taken");
    // No engine receives the next request.
    let drained = format!("/engines/{}/drain", router.d.address);
    let mut client = Client::connect(router.system.admin).await;
    client.post(&drained, &Value::Null).await;
    client.answer().await;
    let refused = router.post().await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    router.corrected("sent", 4.0).await;
    assert_eq!(corrections("give"), ["23"]);
}

#[tokio::test]
async fn a_silent_server_costs_three_timeouts_and_then_nothing() {
    let router = standard(StoreAnswer::Silence, ", on_failure: allow_local").await;
    // Two questions of the first request time out, and one of the second.
    for _ in 0..2 {
        assert_eq!(router.post().await.status, 200, "the router's own limits apply");
    }
    router.counts("timeout", 3.0).await;
    let limited = router.post().await;
    assert_eq!(
        code(&limited),
        (429, "rate_limit_exceeded".to_owned()),
        "two requests per minute of this router"
    );
    router.counts("timeout", 3.0).await;
    router.counts("unavailable", 2.0).await;
    assert_eq!(get(router.system.address, "/ready").await.status, 200);
}

#[tokio::test]
async fn a_server_that_dies_and_returns_is_used_again() {
    let router = standard(StoreAnswer::Taken(1), ", on_failure: refuse").await;
    let address = router.store.stop().await;
    router.system.counts("baton_router_shared_limits_up", 0.0).await;
    let router = SharedRouter { store: TestStore::at(address, StoreAnswer::Taken(1)).await, ..router };
    router.is_up(1.0).await;
    assert_eq!(router.post().await.status, 200);
    // Two questions. Corrections may follow.
    assert!(router.store.commands("EVALSHA").len() >= 2);
}

#[tokio::test]
async fn with_refuse_a_silent_server_is_a_503_for_keys_with_limits() {
    let router = standard(StoreAnswer::Silence, ", on_failure: refuse").await;
    for _ in 0..4 {
        let refused = router.post().await;
        assert_eq!(code(&refused), (503, "unavailable".to_owned()));
        assert!(refused.header("retry-after").is_some());
    }
    router.counts("timeout", 3.0).await;
    router.counts("unavailable", 1.0).await;
    assert_eq!(router.posted(&router.free).await.answer().await.status, 200);
    assert!(router.d.received().len() == 1);
    router.system.settled().await;
}

#[tokio::test]
async fn answers_that_make_no_sense_are_failures() {
    let flood = [b"$100000000\r\n".to_vec(), vec![b'x'; 1 << 20]].concat();
    for (answer, result) in [
        (StoreAnswer::Bytes(b"-OOM command not allowed\r\n".to_vec()), "error"),
        (StoreAnswer::Bytes(b"-WRONGTYPE x\r\n".to_vec()), "error"),
        (StoreAnswer::Bytes(b"$3\r\nabc\r\n".to_vec()), "error"),
        (StoreAnswer::Bytes(b"*1\r\n$1\r\nx\r\n".to_vec()), "error"),
        (StoreAnswer::Bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()), "error"),
        (StoreAnswer::Bytes(flood), "error"),
        (StoreAnswer::Numbers(vec![0, 1]), "error"),
        (StoreAnswer::Numbers(vec![9, 1]), "error"),
        (StoreAnswer::Numbers(vec![1, i64::MAX]), "error"),
    ] {
        let router = standard(answer.clone(), "").await;
        assert_eq!(router.post().await.status, 200, "{answer:?}");
        let series = format!("baton_router_shared_limits_total{{result=\"{result}\"}}");
        assert!(router.system.metric(&series).await >= 1.0, "{answer:?}");
        // It is given up after three failures at most.
        for _ in 0..2 {
            router.post().await;
        }
        assert!(router.system.metric(&series).await <= 6.0, "{answer:?}");
    }
}

#[tokio::test]
async fn a_lease_of_a_client_that_leaves_ends_in_every_way() {
    let d = FakeEngine::always(Action::Hang).await;
    let router = with_store(TestStore::start(StoreAnswer::Taken(1)).await, d, "").await;
    router.is_up(1.0).await;
    for (n, how) in DISCONNECT_KINDS.into_iter().enumerate() {
        let client = router.posted(&router.limited).await;
        eventually("the engine has it", || router.d.received().len() == n + 1).await;
        client.hang_up(how);
        eventually("the lease ends", || router.store.commands("ZREM").len() == 2 * (n + 1)).await;
    }
    router.system.settled().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_a_question_ends_its_lease() {
    let router = standard(StoreAnswer::Taken(1), ", on_failure: refuse").await;
    let disconnects = "baton_router_disconnects_total{phase=\"queue\"}";
    let asked = async |questions: usize| {
        eventually("the server is asked", || router.store.commands("EVALSHA").len() == questions).await;
    };
    let released = async |sets: usize| {
        eventually("the lease ends", || router.store.commands("ZREM").len() == sets).await;
    };
    // In the second question, for the tokens of the body. The first one was answered before the body came.
    let body = completion(false).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer \
         {}\r\ncontent-length: {}\r\n\r\n",
        router.limited.key,
        body.len()
    );
    let mut client = Client::connect(router.system.address).await;
    client.send(head.as_bytes()).await;
    router.counts("taken", 1.0).await;
    router.store.answers(StoreAnswer::Silence);
    client.send(body.as_bytes()).await;
    asked(2).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    router.system.counts(disconnects, 1.0).await;
    released(2).await;
    // In the first question.
    let client = router.posted(&router.limited).await;
    asked(3).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    router.system.counts(disconnects, 2.0).await;
    released(4).await;
    router.system.settled().await;
    assert!(router.d.received().is_empty());
}

#[tokio::test]
async fn leases_of_several_sets_are_renewed_together() {
    let d = FakeEngine::always(Action::Hang).await;
    let router = with_store(TestStore::start(StoreAnswer::Taken(1)).await, d, "").await;
    router.is_up(1.0).await;
    let _client = router.posted(&router.limited).await;
    eventually("the engine has it", || router.d.received().len() == 1).await;
    let address = router.store.stop().await;
    router.system.counts("baton_router_shared_limits_up", 0.0).await;
    // The restarted server has lost the leases of key and tenant. It answers neither renewal.
    let store = TestStore::at(address, StoreAnswer::SilentRenewals).await;
    eventually("both renewals arrive without an answer", || {
        let renewals = store.commands("EVALSHA").into_iter();
        let mut sets: Vec<_> = renewals.map(|words| words[3].clone()).collect();
        sets.dedup();
        sets.len() == 2 && sets.iter().all(|set| set.ends_with(":concurrent"))
    })
    .await;
}

#[tokio::test]
async fn a_reload_keeps_the_connection_unless_its_terms_change() {
    let router = standard(StoreAnswer::Taken(1), "").await;
    for (drain_ms, timeout_ms, connections) in [(1, 500, 1), (2, 501, 2)] {
        let next = router.yaml.replace("timeout_ms: 500", &format!("timeout_ms: {timeout_ms}"));
        let next = RouterConfig::from_yaml(&format!("{next}drain_timeout_ms: {drain_ms}\n"), "t").unwrap();
        router.system.reload.install(next).unwrap();
        eventually("the server has the connection", || router.store.connections() == connections).await;
        router.is_up(1.0).await;
        assert_eq!(router.post().await.status, 200);
    }
    router.counts("taken", 4.0).await;
}

/// A real server. `BATON_VALKEY` names its program: valkey-server, or redis-server.
struct RealStore {
    process: std::process::Child,
    address: SocketAddr,
}

impl RealStore {
    async fn start(address: SocketAddr) -> Self {
        let program = std::env::var("BATON_VALKEY").expect("BATON_VALKEY names a server");
        let mut command = std::process::Command::new(program);
        command.args(["--bind", "127.0.0.1", "--save", "", "--port", &address.port().to_string()]);
        let process = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        let begun = std::time::Instant::now();
        while tokio::net::TcpStream::connect(address).await.is_err() {
            assert!(begun.elapsed().as_secs() < 10, "the server does not listen");
            tokio::task::yield_now().await;
        }
        Self { process, address }
    }
}

impl Drop for RealStore {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
#[ignore = "needs a server: BATON_VALKEY=/usr/bin/valkey-server"]
async fn two_routers_share_the_limits_of_a_real_server_that_dies_and_returns() {
    let address = TestStore::start(StoreAnswer::Silence).await.stop().await;
    let real = RealStore::start(address).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let store = TestStore::start(StoreAnswer::Silence).await;
    let one = with_store_at(real.address, store, d, "").await;
    let next = RouterConfig::from_yaml(&one.yaml, "t").unwrap();
    let two = TestRouter::running(next).await;
    let up = "baton_router_shared_limits_up";
    one.is_up(1.0).await;
    two.counts(up, 1.0).await;
    let ask = async |address| {
        let mut client = Client::connect(address).await;
        let headers = format!("Authorization: Bearer {}\r\n", one.limited.key);
        client.post_bytes("/v1/completions", &headers, completion(false).to_string().as_bytes()).await;
        client.answer().await
    };
    // Two requests per minute, of both routers together.
    let statuses = [ask(one.system.address).await, ask(two.address).await, ask(one.system.address).await];
    assert_eq!(statuses.each_ref().map(|answer| answer.status), [200, 200, 429], "{}", statuses[2].text());
    let wait: u64 = statuses[2].header("retry-after").unwrap().parse().unwrap();
    assert!((28..=30).contains(&wait), "{wait}");
    assert_eq!(ask(two.address).await.status, 429);
    drop(real);
    one.is_up(0.0).await;
    two.counts(up, 0.0).await;
    // The first router has counted a request of its own.
    assert_eq!([ask(one.system.address).await.status, ask(one.system.address).await.status], [200, 429]);
    let _real = RealStore::start(address).await;
    one.is_up(1.0).await;
    two.counts(up, 1.0).await;
    let statuses = [ask(two.address).await, ask(one.system.address).await, ask(two.address).await];
    assert_eq!(statuses.map(|answer| answer.status), [200, 200, 429]);
}
