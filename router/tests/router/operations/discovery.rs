//! Engines that are discovered: by DNS name, by a file, by a simulated Kubernetes API.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";

fn yaml(decode: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    decode: {decode}\n"
    )
}

async fn answers() -> FakeEngine {
    FakeEngine::always(Action::Whole(1)).await
}

async fn status(system: &TestRouter) -> u16 {
    post(system.address, PATH, &completion(false)).await.status
}

/// Waits until the decode pool has this many members.
async fn members(system: &TestRouter, count: usize) {
    system.counts("baton_router_pool_engines{model=\"m\",leg=\"decode\"}", count as f64).await;
}

#[tokio::test]
async fn engines_are_found_by_name() {
    let engine = answers().await;
    let port = engine.address.port();
    let system =
        TestRouter::of(&yaml(&format!("{{discover: {{dns: {{host: localhost, port: {port}}}}}}}"))).await;
    let begun = std::time::Instant::now();
    // The pool is empty until the first response; then it has every address of the name.
    while status(&system).await != 200 {
        assert!(begun.elapsed().as_secs() < 10, "the name is not found");
    }
    assert!(!engine.received().is_empty());
}

#[tokio::test]
async fn a_pool_that_is_only_discovered_may_start_empty() {
    let discover = "{discover: {file: {path: /no/such/file, refresh_ms: 100}}}";
    let system = TestRouter::of(&yaml(discover)).await;
    let answer = post(system.address, PATH, &completion(false)).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    system.counts("baton_router_discovery_failures_total{source=\"file:/no/such/file\"}", 1.0).await;
    let config = get(system.admin, "/config").await.json();
    assert!(config["discovery"][0]["error"].is_string(), "{config}");
    assert!(config["discovery"][0]["endpoints"].is_null(), "{config}");
}

#[tokio::test]
async fn a_file_of_engines_is_followed_through_a_switch_of_links_and_its_loss() {
    let (a, b, listed) = (answers().await, answers().await, answers().await);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("one"), format!("- {}\n- not an engine\n", a.url())).unwrap();
    let two =
        json!({"endpoints": [{"name": "b", "address": "127.0.0.1", "port": b.address.port().to_string()}]});
    std::fs::write(at("two"), two.to_string()).unwrap();
    symlink("one", at("engines")).unwrap();
    let system = TestRouter::of(&yaml(&format!(
        "{{policy: round_robin, engines: [{{url: '{}'}}], discover: {{file: {{path: '{}', refresh_ms: 100}}}}}}",
        listed.url(),
        at("engines").display()
    )))
    .await;
    let until = async |found: &FakeEngine, lost: &FakeEngine| {
        let begun = std::time::Instant::now();
        loop {
            let engines = get(system.admin, "/engines").await.text();
            let member = |engine: &FakeEngine| {
                let engines: Value = serde_json::from_str(&engines).unwrap();
                let list = engines["engines"].as_array().unwrap().clone();
                let of = list.iter().find(|e| e["engine"] == engine.address.to_string());
                of.is_some_and(|e| e["pools"].as_array().is_some_and(|pools| !pools.is_empty()))
            };
            if member(found) && !member(lost) && member(&listed) {
                return;
            }
            assert!(begun.elapsed().as_secs() < 10, "{engines}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    until(&a, &b).await;
    symlink("two", at("next")).unwrap();
    std::fs::rename(at("next"), at("engines")).unwrap();
    until(&b, &a).await;
    for _ in 0..4 {
        assert_eq!(status(&system).await, 200);
    }
    assert_eq!((b.received().len(), listed.received().len()), (2, 2));
    // A missing or invalid file is ignored: its last valid content stays in effect.
    std::fs::remove_file(at("engines")).unwrap();
    let failures =
        format!("baton_router_discovery_failures_total{{source=\"file:{}\"}}", at("engines").display());
    system.counts(&failures, 1.0).await;
    std::fs::write(at("engines"), "[").unwrap();
    system.counts(&failures, 2.0).await;
    until(&b, &a).await;
    let config = get(system.admin, "/config").await.json();
    assert_eq!(
        (&config["generation"], &config["revision"]),
        (&json!(1), &json!(2)),
        "one configuration, revised"
    );
}

#[tokio::test]
async fn a_pool_keeps_its_engines_until_a_new_source_has_answered() {
    let (old, new) = (answers().await, answers().await);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines");
    let listed = format!("{{engines: [{{url: '{}'}}]}}", old.url());
    let system = TestRouter::of(&yaml(&listed)).await;
    let discover = format!("{{discover: {{file: {{path: '{}', refresh_ms: 100}}}}}}", file.display());
    let next = baton_router::RouterConfig::from_yaml(&yaml(&discover), "next.yaml").unwrap();
    system.reload.install(next).unwrap();
    assert_eq!(status(&system).await, 200);
    assert_eq!(old.received().len(), 1);
    std::fs::write(&file, format!("[{}]", new.url())).unwrap();
    system.counts("baton_router_config_revision", 1.0).await;
    assert_eq!(status(&system).await, 200);
    assert_eq!((old.received().len(), new.received().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_while_engines_are_found_and_lost_under_load() {
    const CHANGES: usize = 12;
    let engines = [answers().await, answers().await, answers().await];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines");
    let write = |left_out: usize| {
        let listed: Vec<_> =
            engines.iter().enumerate().filter(|(at, _)| *at != left_out).map(|(_, e)| e.url()).collect();
        let next = folder.path().join("next");
        std::fs::write(&next, format!("[{}]", listed.join(", "))).unwrap();
        std::fs::rename(&next, &file).unwrap();
    };
    write(0);
    let discover = format!("{{discover: {{file: {{path: '{}', refresh_ms: 100}}}}}}", file.display());
    let system = TestRouter::of(&yaml(&discover)).await;
    members(&system, 2).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (address, stop) = (system.address, Arc::clone(&stop));
        clients.spawn(async move {
            let (mut client, mut answered) = (Client::connect(address).await, 0_usize);
            while !stop.load(Ordering::Relaxed) {
                client.post(PATH, &completion(false)).await;
                let answer = client.answer().await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                answered += 1;
            }
            answered
        });
    }
    let first = get(system.admin, "/config").await.json()["revision"].as_u64().unwrap();
    for change in 1..=CHANGES {
        write(change % engines.len());
        system.counts("baton_router_config_revision", (first + change as u64) as f64).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut answered = 0;
    while let Some(client) = clients.join_next().await {
        answered += client.unwrap();
    }
    assert!(answered >= 100, "{answered} answers are too few to say anything");
    assert!(engines.iter().all(|engine| !engine.received().is_empty()), "each had its time");
    system.settled().await;
}

#[tokio::test]
async fn discovered_engines_have_the_templates_settings() {
    let engine = answers().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines");
    std::fs::write(&file, format!("[{}, {{url: 'http://127.0.0.1:1', labels: {{zone: b}}}}]", engine.url()))
        .unwrap();
    let system = TestRouter::of(&yaml(&format!(
        "{{select: {{zone: a}}, discover: {{file: {{path: '{}'}}, template: {{labels: {{zone: a}}, weight: 7}}}}}}",
        file.display()
    )))
    .await;
    members(&system, 1).await;
    assert_eq!(status(&system).await, 200);
    let engines = get(system.admin, "/engines").await.json();
    assert_eq!(engines["engines"][0]["pools"][0]["weight"], 7, "{engines}");
}

/// The parts of the Kubernetes API that a watcher uses.
#[derive(Clone, Default)]
pub(crate) struct FakeKubernetes(Arc<Mutex<FakeKubernetesState>>);

#[derive(Default)]
struct FakeKubernetesState {
    /// By the plural name of the kind.
    objects: BTreeMap<&'static str, Vec<Value>>,
    watches: Vec<(String, mpsc::Sender<Option<Value>>)>,
    requests: Vec<String>,
}

type WatchFrame = Result<Frame<Bytes>, std::io::Error>;

struct WatchBody(mpsc::Receiver<Option<Value>>);

impl hyper::body::Body for WatchBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<WatchFrame>> {
        self.0.poll_recv(context).map(|event| match event? {
            Some(event) => Some(Ok(Frame::data(format!("{event}\n").into()))),
            None => Some(Err(std::io::Error::other("the connection broke"))),
        })
    }
}

fn slice(name: &str, engines: &[(&FakeEngine, Value)]) -> Value {
    let endpoint = |(engine, conditions): &(&FakeEngine, Value)| json!({"addresses": [engine.address.ip().to_string()], "conditions": conditions});
    let port = engines.first().map_or(1, |(engine, _)| engine.address.port());
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "namespace": "serving", "resourceVersion": "7"},
        "endpoints": engines.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [{"name": "http", "port": port}],
    })
}

impl FakeKubernetes {
    pub(crate) async fn start(&self) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, api) = (listener.local_addr().unwrap(), self.clone());
        let serving = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let api = api.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| {
                        let answer = api.answer(&request);
                        async move { Ok::<_, Infallible>(answer) }
                    });
                    let served = hyper::server::conn::http1::Builder::new();
                    let _ = served.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        (address, serving)
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<BoxBody<Bytes, std::io::Error>> {
        let mut state = self.0.lock().unwrap();
        let uri = request.uri().to_string();
        let watches = uri.contains("watch=true");
        state.requests.push(uri);
        let body = if watches {
            let (sender, receiver) = mpsc::channel(16);
            let uri = state.requests.last().cloned().unwrap_or_default();
            state.watches.push((uri, sender));
            WatchBody(receiver).boxed()
        } else {
            let path = request.uri().path();
            let (version, kind, plural) = KINDS.into_iter().find(|kind| path.ends_with(kind.2)).unwrap();
            let items = state.objects.get(plural).cloned().unwrap_or_default();
            let list = json!({
                "apiVersion": version, "kind": format!("{kind}List"),
                "metadata": {"resourceVersion": "7"}, "items": items,
            });
            Full::new(Bytes::from(list.to_string())).map_err(|never| match never {}).boxed()
        };
        let mut response = Response::new(body);
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        response
    }

    fn set(&self, slices: Vec<Value>) {
        self.set_objects("endpointslices", slices);
    }

    pub(crate) fn set_objects(&self, plural: &'static str, objects: Vec<Value>) {
        self.0.lock().unwrap().objects.insert(plural, objects);
    }

    /// Sends an event to every watch; `None` breaks their connections.
    fn send(&self, event: Option<&Value>) {
        self.send_to("", event);
    }

    /// Sends an event to the watches whose address contains `part`.
    pub(crate) fn send_to(&self, part: &str, event: Option<&Value>) {
        let mut state = self.0.lock().unwrap();
        state.watches.retain(|(uri, watch)| !uri.contains(part) || watch.try_send(event.cloned()).is_ok());
    }

    async fn watched(&self) {
        self.watched_at("").await;
    }

    /// Waits for a watch whose address contains `part`.
    pub(crate) async fn watched_at(&self, part: &str) {
        let has_one = || self.0.lock().unwrap().watches.iter().any(|(uri, _)| uri.contains(part));
        crate::harness::engine::eventually("a watch", has_one).await;
    }
}

/// Version, kind and plural name of the objects.
const KINDS: [(&str, &str, &str); 3] = [
    ("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
    ("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    ("v1", "Pod", "pods"),
];

/// A kubeconfig for this API.
pub(crate) fn kubeconfig(address: SocketAddr) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u, namespace: other}}}}]\n"
    )
}

#[tokio::test]
async fn the_endpoint_slices_of_a_service_are_watched_through_410_and_broken_watches() {
    let (a, b) = (answers().await, answers().await);
    let api = FakeKubernetes::default();
    api.set(vec![slice("s-1", &[(&a, json!({"ready": true}))])]);
    let (address, serving) = api.start().await;
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, self::kubeconfig(address)).unwrap();
    let system = TestRouter::of(&yaml(&format!(
        "{{policy: round_robin, discover: {{kubernetes: {{namespace: serving, service: decode, selector: {{team: x}}, port: http, \
         kubeconfig_file: '{}'}}}}}}",
        kubeconfig.display()
    )))
    .await;
    members(&system, 1).await;
    assert_eq!(status(&system).await, 200);
    let uri = api.0.lock().unwrap().requests[0].clone();
    assert!(uri.starts_with("/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices?"), "{uri}");
    assert!(uri.contains("kubernetes.io%2Fservice-name%3Ddecode%2Cteam%3Dx"), "{uri}");

    // One more slice; then an engine of it terminates.
    api.watched().await;
    api.send(Some(&json!({"type": "ADDED", "object": slice("s-2", &[(&b, json!({"ready": true}))])})));
    members(&system, 2).await;
    let ends = json!({"ready": false, "serving": true, "terminating": true});
    api.send(Some(&json!({"type": "MODIFIED", "object": slice("s-2", &[(&b, ends)])})));
    members(&system, 1).await;

    // The version is too old: everything is listed again, and has changed meanwhile.
    api.set(vec![slice("s-1", &[(&a, json!({}))]), slice("s-3", &[(&b, json!({}))])]);
    let gone = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "too old resource version", "reason": "Expired", "code": 410});
    api.send(Some(&json!({"type": "ERROR", "object": gone})));
    members(&system, 2).await;

    // A broken watch is started again.
    let before = api.0.lock().unwrap().requests.len();
    api.send(None);
    crate::harness::engine::eventually("another watch", || {
        let state = api.0.lock().unwrap();
        state.requests.len() > before && !state.watches.is_empty()
    })
    .await;
    api.watched().await;
    api.send(Some(&json!({"type": "DELETED", "object": slice("s-1", &[])})));
    members(&system, 1).await;

    // Without the API the last engines stay.
    serving.abort();
    api.send(None);
    let series = "baton_router_discovery_failures_total";
    let begun = std::time::Instant::now();
    while system.metric(series).await == 0.0 {
        assert!(begun.elapsed().as_secs() < 20, "the end is not noticed");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    members(&system, 1).await;
    assert_eq!(status(&system).await, 200);
}

#[tokio::test]
async fn an_unreachable_endpoint_is_left_out_without_delay() {
    let (a, b) = (answers().await, answers().await);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("key"), "an-engine-key\n").unwrap();
    std::fs::write(at("secret"), "0123456789abcdef\n").unwrap();
    std::fs::write(at("engines"), format!("['https://unknown:1', '{}']", a.url())).unwrap();
    let text = yaml(&format!(
        "{{policy: round_robin, discover: {{file: {{path: '{}', refresh_ms: 100}}, template: {{api_key_file: '{}'}}}}}}\n\
         cluster_secret_file: '{}'",
        at("engines").display(),
        at("key").display(),
        at("secret").display()
    ));
    let system = TestRouter::of(&text).await;
    members(&system, 1).await;
    assert_eq!(status(&system).await, 200);
    let again = baton_router::RouterConfig::from_yaml(&text, "again.yaml").unwrap();
    system.reload.install(again).expect("what was discovered does not make a configuration wrong");
    assert_eq!(status(&system).await, 200);
    // A change of members does not read the files that were valid at the start.
    std::fs::remove_file(at("key")).unwrap();
    std::fs::remove_file(at("secret")).unwrap();
    std::fs::write(at("engines"), format!("['https://unknown:1', '{}', '{}']", a.url(), b.url())).unwrap();
    members(&system, 2).await;
    for _ in 0..4 {
        assert_eq!(status(&system).await, 200);
    }
    assert_eq!(b.received()[0].headers["authorization"], "Bearer an-engine-key");
}

#[tokio::test]
async fn sources_of_one_service_with_other_ports_and_selectors_have_series_of_their_own() {
    let source = |selector: &str, port: &str| {
        format!(
            "{{discover: {{kubernetes: {{namespace: s, service: e, selector: {{{selector}}}, port: {port}, \
             kubeconfig_file: /no/such/file}}}}}}"
        )
    };
    let text = format!("{}    prefill: {}\n", yaml(&source("role: d", "http")), source("role: p", "8000"));
    let system = TestRouter::of(&text).await;
    for name in ["kubernetes:s/e:http?role=d", "kubernetes:s/e:8000?role=p"] {
        let failures = format!("baton_router_discovery_failures_total{{source=\"{name}\"}}");
        let begun = std::time::Instant::now();
        while system.metric(&failures).await < 1.0 {
            assert!(begun.elapsed().as_secs() < 20, "{name}");
        }
    }
}
