//! Reloads under load: no request fails, and every lease is released.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_router::{ConfigFile, RouterConfig};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";
const RELOADS: usize = 1000;

fn pool(engines: &[&FakeEngine], policy: &str) -> String {
    let urls: Vec<_> = engines.iter().map(|e| format!("{{url: '{}'}}", e.url())).collect();
    format!("{{policy: {policy}, engines: [{}]}}", urls.join(", "))
}

fn yaml(prefill: &[&FakeEngine], decode: &[&FakeEngine], policy: &str, top: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    prefill: {}\n    decode: {}\n{top}\n",
        pool(prefill, policy),
        pool(decode, policy)
    )
}

fn config(text: &str) -> RouterConfig {
    RouterConfig::from_yaml(text, "test.yaml").unwrap_or_else(|error| panic!("{error}\n{text}"))
}

async fn effective(system: &TestRouter) -> Value {
    get(system.admin, "/config").await.json()
}

/// A router that watches a file.
async fn following(file: &Path) -> (TestRouter, mpsc::Sender<()>, AbortOnDropHandle<()>) {
    let (file, config) = ConfigFile::load(file).unwrap();
    let system = TestRouter::running(config).await;
    let (sender, requests) = mpsc::channel(1);
    let reload = system.reload.clone();
    let following = tokio::spawn(async move { reload.follow(file, requests).await });
    (system, sender, AbortOnDropHandle::new(following))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_over_a_thousand_reloads_under_load() {
    let leasing_engine = || FakeEngine::always(Action::Lease(Some(7)));
    let prefills = [leasing_engine().await, leasing_engine().await, leasing_engine().await];
    let actions =
        || (0..20_000).map(|n| if n % 2 == 0 { Action::Stream(6) } else { Action::Whole(64) }).collect();
    let mut decodes = Vec::new();
    for _ in 0..3 {
        decodes.push(FakeEngine::scripted(actions()).await);
    }
    let [p0, p1, p2] = &prefills;
    let [d0, d1, d2] = decodes.as_slice() else { unreachable!("three were made") };
    // Pools shrink, grow and exchange members; limits, policies and timeouts change with them.
    let versions: Vec<RouterConfig> = [
        yaml(&[p0, p1, p2], &[d0, d1, d2], "round_robin", ""),
        yaml(&[p0], &[d1], "least_load", "attempts: {decode: 1}"),
        yaml(&[p1, p2], &[d2, d0], "random", "limits: {in_flight: 100, settlements: 10}"),
        yaml(&[], &[d0, d1], "power_of_two", "timeouts: {engine_idle_ms: 0}"),
        yaml(&[p2], &[d0, d1, d2], "consistent_hash", "cluster_secret: 0123456789abcdef"),
    ]
    .iter()
    .map(|text| config(text))
    .collect();
    let system = TestRouter::of(&yaml(&[p0], &[d0], "round_robin", "")).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..6 {
        let (address, stop) = (system.address, Arc::clone(&stop));
        clients.spawn(async move {
            let (mut client, mut answered) = (Client::connect(address).await, 0_usize);
            while !stop.load(Ordering::Relaxed) {
                let stream = (answered + number) % 2 == 0;
                client.post(PATH, &completion(stream)).await;
                let answer = client.answer().await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                let text = answer.text();
                let whole = text.ends_with("data: [DONE]\n\n") && text.contains("\"token\":5")
                    || text.contains(&"t".repeat(64));
                assert!(whole && !text.contains("error"), "{text}");
                answered += 1;
            }
            answered
        });
    }
    for n in 0..RELOADS {
        let number = system.reload.install(versions[n % versions.len()].clone()).unwrap();
        assert_eq!(number, n as u64 + 2);
        // Reloads and requests take turns on two threads.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut answered = 0;
    while let Some(client) = clients.join_next().await {
        answered += client.unwrap();
    }
    assert!(answered >= RELOADS, "{answered} answers are too few to say anything");
    system.settled().await;
    for engine in prefills.iter().chain(&decodes) {
        assert!(engine.releases().is_empty() && engine.aborts().is_empty(), "every lease was fetched");
    }
    system.counts("baton_router_config_generation", RELOADS as f64 + 1.0).await;
    system.counts("baton_router_config_reloads_total{result=\"accepted\"}", RELOADS as f64).await;
}

#[tokio::test]
async fn a_removed_engine_finishes_its_requests_and_is_dropped() {
    let (p, old) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::StreamGated(2)).await);
    let new = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::of(&yaml(&[&p], &[&old], "round_robin", "")).await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(true)).await;
    old.open_gate();
    assert_eq!(client.head().await.0, 200);
    system.reload.install(config(&yaml(&[], &[&new], "round_robin", ""))).unwrap();
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    assert_eq!((old.received().len(), new.received().len()), (1, 1), "new requests go to the new engine");
    // The running request continues to its end.
    let mut text = Vec::new();
    old.open_gate();
    while let Some(chunk) = client.chunk().await {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\"token\":1") && text.ends_with("data: [DONE]\n\n"), "{text}");
    system.settled().await;
    old.wait("its connections are closed", |old| old.open() == 0).await;
    p.wait("its connections are closed", |p| p.open() == 0).await;
    let gone = format!("engine=\"{}\"", old.address);
    let begun = std::time::Instant::now();
    while get(system.admin, "/metrics").await.text().contains(&gone) {
        assert!(begun.elapsed().as_secs() < 10, "its series stay");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn settlements_are_made_at_an_engine_after_its_removal() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let old = FakeEngine::always(Action::StreamGated(2)).await;
    let new = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::of(&yaml(&[&p], &[&old], "round_robin", "")).await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(true)).await;
    old.wait("it has the request", |old| old.received().len() == 1).await;
    system.reload.install(config(&yaml(&[], &[&new], "round_robin", ""))).unwrap();
    client.hang_up(crate::harness::client::DisconnectKind::Rst);
    old.wait("the abort", |old| old.aborts().len() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn a_changed_file_takes_effect_after_any_kind_of_replacement() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let text = |tries: u32| {
        yaml(&[], &[&d], "round_robin", &format!("reload: {{poll_ms: 5}}\nattempts: {{settle: {tries}}}"))
    };
    let folder = tempfile::tempdir().unwrap();
    // A mounted ConfigMap of Kubernetes: file -> ..data/file, ..data -> ..1, and `..data` is replaced by a rename.
    for version in ["..1", "..2"] {
        std::fs::create_dir(folder.path().join(version)).unwrap();
    }
    std::fs::write(folder.path().join("..1/router.yaml"), text(1)).unwrap();
    std::fs::write(folder.path().join("..2/router.yaml"), text(2)).unwrap();
    symlink("..1", folder.path().join("..data")).unwrap();
    let file = folder.path().join("router.yaml");
    symlink("..data/router.yaml", &file).unwrap();
    let (system, _reload, _following) = following(&file).await;
    let generation = |number: f64| system.counts("baton_router_config_generation", number);
    generation(1.0).await;

    symlink("..2", folder.path().join("..tmp")).unwrap();
    std::fs::rename(folder.path().join("..tmp"), folder.path().join("..data")).unwrap();
    generation(2.0).await;
    assert_eq!(effective(&system).await["config"]["attempts"]["settle"], 2);

    // An editor: a new file replaces the old one.
    std::fs::write(folder.path().join("new"), text(3)).unwrap();
    std::fs::rename(folder.path().join("new"), &file).unwrap();
    generation(3.0).await;
    // Another editor: the file is removed and created again.
    std::fs::remove_file(&file).unwrap();
    system.counts("baton_router_config_last_reload_successful", 0.0).await;
    std::fs::write(&file, text(4)).unwrap();
    generation(4.0).await;
    // Written in place.
    std::fs::write(&file, text(5)).unwrap();
    generation(5.0).await;
    assert_eq!(effective(&system).await["config"]["attempts"]["settle"], 5);
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
}

#[tokio::test]
async fn an_invalid_file_is_reported_and_changes_nothing() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let good = yaml(&[], &[&d], "round_robin", "reload: {poll_ms: 5}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, &good).unwrap();
    let (system, _reload, _following) = following(&file).await;
    std::fs::write(&file, good.replace("models:", "modles:")).unwrap();
    system.counts("baton_router_config_reloads_total{result=\"rejected\"}", 1.0).await;
    system.counts("baton_router_config_last_reload_successful", 0.0).await;
    let status = effective(&system).await;
    assert_eq!(
        (&status["generation"], &status["reloads"]["last"]["result"]),
        (&1.into(), &"rejected".into())
    );
    let error = status["reloads"]["last"]["error"].as_str().unwrap();
    assert!(error.contains(":3:1: unknown key `modles`, did you mean `models`?"), "{error}");
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    // A missing file named in the configuration is an error; once it exists, the configuration takes effect.
    let secret = folder.path().join("secret");
    std::fs::write(&file, format!("{good}cluster_secret_file: {}\n", secret.display())).unwrap();
    system.counts("baton_router_config_reloads_total{result=\"rejected\"}", 2.0).await;
    std::fs::write(&secret, "0123456789abcdef").unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
    system.counts("baton_router_config_last_reload_successful", 1.0).await;
}

#[tokio::test]
async fn referenced_files_count_as_content_of_the_configuration() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let (file, secret) = (folder.path().join("router.yaml"), folder.path().join("secret"));
    std::fs::write(&secret, "0123456789abcdef").unwrap();
    let top = format!("reload: {{poll_ms: 5}}\ncluster_secret_file: {}", secret.display());
    std::fs::write(&file, yaml(&[], &[&d], "round_robin", &top)).unwrap();
    let (system, _reload, _following) = following(&file).await;
    std::fs::write(&secret, "fedcba9876543210").unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    assert_eq!(d.received()[0].headers["x-baton-cluster-secret"], "fedcba9876543210");
}

#[tokio::test]
async fn without_polling_the_file_is_read_on_request() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let text = yaml(&[], &[&d], "round_robin", "reload: {poll_ms: 0}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, &text).unwrap();
    let (system, reload, _following) = following(&file).await;
    reload.send(()).await.unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
    std::fs::write(&file, text.replace("poll_ms: 0", "poll_ms: 0}\nattempts: {settle: 9")).unwrap();
    reload.send(()).await.unwrap();
    system.counts("baton_router_config_generation", 3.0).await;
    assert_eq!(effective(&system).await["config"]["attempts"]["settle"], 9);
}

#[tokio::test]
async fn changes_that_need_a_restart_are_reported_and_the_rest_applies() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let text = yaml(&[], &[&d], "round_robin", "");
    let system = TestRouter::of(&text).await;
    let next = text.replace("listen: 127.0.0.1:0\n", "listen: 127.0.0.1:9\nattempts: {settle: 9}\n");
    system.reload.install(config(&next)).unwrap();
    let status = effective(&system).await;
    assert_eq!(status["reloads"]["needs_restart"], serde_json::json!(["listen"]));
    assert_eq!(status["config"]["attempts"]["settle"], 9);
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    system.reload.install(config(&text)).unwrap();
    assert_eq!(effective(&system).await["reloads"]["needs_restart"], serde_json::json!([]));
}

#[tokio::test]
async fn keys_are_followed_where_they_are_used_and_cost_no_new_version() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let (file, keys) = (folder.path().join("router.yaml"), folder.path().join("keys.yaml"));
    let hash = baton_router::NewKey::make().hash;
    let key = |id: &str| format!("keys: [{{id: {id}, hash: '{hash}', tenant: t}}]\n");
    std::fs::write(&keys, key("a")).unwrap();
    let top = format!("reload: {{poll_ms: 5}}\nauth: {{keys_file: '{}'}}", keys.display());
    std::fs::write(&file, yaml(&[], &[&d], "round_robin", &top)).unwrap();
    let (system, reload, _following) = following(&file).await;
    std::fs::write(&keys, key("a-longer-name")).unwrap();
    system.counts("baton_router_keys_reloads_total{result=\"ok\"}", 1.0).await;
    std::fs::write(&keys, "keys: 7").unwrap();
    system.counts("baton_router_keys_reloads_total{result=\"failed\"}", 1.0).await;
    // Only a requested reload reads all files and fails.
    assert_eq!(system.metric("baton_router_config_generation").await, 1.0);
    assert_eq!(system.metric("baton_router_config_reloads_total").await, 0.0);
    reload.send(()).await.unwrap();
    system.counts("baton_router_config_reloads_total{result=\"rejected\"}", 1.0).await;
    // A configuration that was rejected because of its keys is read again when they change.
    std::fs::write(&keys, key("b")).unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
}

#[tokio::test]
async fn without_polling_keys_are_read_on_request() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let (file, keys) = (folder.path().join("router.yaml"), folder.path().join("keys.yaml"));
    let new = baton_router::NewKey::make();
    std::fs::write(&keys, "keys: []").unwrap();
    let top = format!("reload: {{poll_ms: 0}}\nauth: {{keys_file: '{}'}}", keys.display());
    std::fs::write(&file, yaml(&[], &[&d], "round_robin", &top)).unwrap();
    let (system, reload, _following) = following(&file).await;
    std::fs::write(&keys, format!("keys: [{{id: a, hash: '{}', tenant: t}}]", new.hash)).unwrap();
    let status = async || {
        let mut client = Client::connect(system.address).await;
        let head = format!("authorization: Bearer {}\r\n", new.key);
        client.post_bytes(PATH, &head, completion(false).to_string().as_bytes()).await;
        client.answer().await.status
    };
    assert_eq!(status().await, 401);
    reload.send(()).await.unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
    assert_eq!(status().await, 200);
    assert_eq!(system.metric("baton_router_keys_reloads_total").await, 0.0, "not reloaded without a request");
}

/// A pipe that nothing reads, in a folder.
fn a_pipe() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    (folder, pipe)
}

#[tokio::test]
async fn a_pipe_without_a_reader_delays_no_request_or_reload() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let good = yaml(&[], &[&d], "round_robin", "reload: {poll_ms: 5}");
    let folder = tempfile::tempdir().unwrap();
    let (_folder, pipe) = a_pipe();
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, &good).unwrap();
    let (system, _reload, _following) = following(&file).await;
    for (key, rejected) in
        [("access_log: {enabled: true, path: PIPE}", 1.0), ("cluster_secret_file: PIPE", 2.0)]
    {
        let key = key.replace("PIPE", &pipe.display().to_string());
        std::fs::write(&file, format!("{good}{key}\n")).unwrap();
        system.counts("baton_router_config_reloads_total{result=\"rejected\"}", rejected).await;
        assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    }
    let error = effective(&system).await["reloads"]["last"]["error"].as_str().unwrap().to_owned();
    assert!(error.contains("regular file"), "{error}");
    std::fs::write(&file, format!("{good}attempts: {{settle: 2}}\n")).unwrap();
    system.counts("baton_router_config_generation", 2.0).await;
    // Once a reader exists, the pipe is a normal log. Opened for both directions, it does not wait for a writer.
    let reader = std::fs::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let reader = std::thread::spawn(|| std::io::BufRead::lines(std::io::BufReader::new(reader)).next());
    std::fs::write(&file, format!("{good}access_log: {{enabled: true, path: {}}}\n", pipe.display()))
        .unwrap();
    system.counts("baton_router_config_generation", 3.0).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    let line = reader.join().unwrap().unwrap().unwrap();
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["status"], 200, "{line}");
}
