//! Token ids of texts and chats from engines, and the blocks of KV events that they name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use baton_router::{NewKey, RouterConfig};
use serde_json::{Value, json};

use super::kv_events::{Publisher, stored};
use crate::harness::client::{Client, DISCONNECT_KINDS, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::TestRouter;

const CHAT: &str = "/v1/chat/completions";
const RENDER: &str = "/v1/chat/completions/render";
const TOKENIZE: &str = "/tokenize";

fn chat(text: &str) -> Value {
    json!({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]})
}

fn ids(count: u32) -> Vec<u32> {
    (1..=count).collect()
}

/// An engine that tells these ids at one path and refuses the others with 403 or 404.
async fn engine(path: &'static str, reply: Value) -> FakeEngine {
    FakeEngine::always(Action::Whole(1)).await.with_rule(move |request| {
        if request.path == "/v1/messages" {
            return Some(Action::Json(json!({"type": "message", "content": [], "stop_reason": "end_turn"})));
        }
        let other = [(RENDER, 403), (TOKENIZE, 404), ("/v1/messages/render", 403)];
        let status = other.iter().find(|(other, _)| *other == request.path)?.1;
        Some(if request.path == path {
            Action::Json(reply.clone())
        } else {
            Action::Refuse(status, json!({"error": "Scale-out endpoints are disabled"}))
        })
    })
}

/// A router with these keys of `tokenize` in front of engines with further YAML each.
async fn router(engines: &[(&FakeEngine, &str)], tokenize: &str, top: &str) -> TestRouter {
    let tokenize = if tokenize.contains("min_bytes") {
        tokenize.to_owned()
    } else {
        format!(", min_bytes: 0{tokenize}")
    };
    let list: Vec<_> =
        engines.iter().map(|(engine, keys)| format!("{{url: '{}'{keys}}}", engine.url())).collect();
    TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  \
         - name: m\n    aliases: [alias]\n    tokenize: {{from: engine{tokenize}}}\n    decode: {{policy: \
         prefix_aware, engines: [{}]}}\n{top}",
        list.join(", ")
    ))
    .await
}

async fn results(system: &TestRouter, result: &str, count: f64) {
    system.counts(&format!("baton_router_tokenize_total{{model=\"m\",result=\"{result}\"}}"), count).await;
}

/// Waits until the dry run of a prompt of token ids names this many held blocks.
async fn held(system: &TestRouter, publisher: &mut Publisher, events: &Value, query: &str, blocks: u64) {
    let begun = Instant::now();
    loop {
        publisher.publish(events).await;
        let path = format!("/dry-run?path=/v1/completions{query}");
        let plan = post(system.admin, &path, &json!({"model": "m", "prompt": ids(13)})).await;
        let found = plan.json()["decode"]["held"]["blocks"].as_u64();
        if found == Some(blocks) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", plan.text());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn paths(engine: &FakeEngine) -> Vec<String> {
    engine.all().into_iter().map(|request| request.path).collect()
}

#[tokio::test]
async fn a_chat_goes_to_the_engine_that_reports_its_blocks() {
    let mut publisher = Publisher::at(0).await;
    let rendered = json!({"request_id": "r", "token_ids": ids(13), "sampling_params": {}});
    let (a, b) = (engine(RENDER, rendered.clone()).await, engine(RENDER, rendered).await);
    let events = format!(", kv_events: {{port: {}, topic: kv}}", publisher.port);
    let system = router(&[(&a, ""), (&b, &events)], "", "").await;
    let first = json!([stored(&[11, 12], None, &ids(8))]);
    held(&system, &mut publisher, &first, "", 2).await;
    for _ in 0..2 {
        assert_eq!(post(system.address, CHAT, &chat("hello")).await.status, 200);
    }
    let generated = |engine: &FakeEngine| paths(engine).iter().filter(|path| *path == CHAT).count();
    assert_eq!((generated(&a), generated(&b)), (0, 2));
    let series = "baton_router_decisions_total{model=\"m\",reason=\"holds_blocks\"}";
    system.counts(series, 2.0).await;
    // The second request is equal, so no engine is asked.
    results(&system, "engine", 1.0).await;
    results(&system, "cache", 1.0).await;
    assert_eq!(paths(&a).iter().chain(&paths(&b)).filter(|path| *path == RENDER).count(), 1);
    assert_eq!(system.metric("baton_router_tokenize_seconds_count{model=\"m\"}").await, 1.0);
}

#[tokio::test]
async fn the_form_that_an_engine_has_is_learned() {
    let engine = engine(TOKENIZE, json!({"count": 3, "max_model_len": 9, "tokens": [7, 8, 9]})).await;
    let system = router(&[(&engine, "")], "", "").await;
    let body = |text: &str| {
        let mut body = chat(text);
        (body["model"], body["tools"]) =
            (json!("alias"), json!([{"type": "function", "function": {"name": "f"}}]));
        (body["chat_template_kwargs"], body["temperature"]) = (json!({"thinking": false}), json!(0));
        body
    };
    for text in ["one", "two", "three"] {
        assert_eq!(post(system.address, CHAT, &body(text)).await.status, 200);
    }
    results(&system, "engine", 3.0).await;
    let asked: Vec<_> = engine.all().into_iter().filter(|request| request.path != CHAT).collect();
    let asked_paths: Vec<_> = asked.iter().map(|request| request.path.as_str()).collect();
    assert_eq!(asked_paths, [RENDER, TOKENIZE, TOKENIZE, TOKENIZE], "the missing path is remembered");
    // The whole request is rendered; `/tokenize` gets the fields that change tokens.
    let (render, tokenize) = (&asked[0].body, &asked[1].body);
    assert_eq!(
        (&render["model"], &render["temperature"], &render["stream"]),
        (&json!("m"), &json!(0), &json!(false))
    );
    let mut names: Vec<_> = tokenize.as_object().expect("an object").keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["chat_template_kwargs", "messages", "model", "tools"]);
    // A text has one form.
    let text = json!({"model": "m", "prompt": "a text", "add_special_tokens": false, "max_tokens": 3});
    assert_eq!(post(system.address, "/v1/completions", &text).await.status, 200);
    let last = engine.all().into_iter().rfind(|request| request.path == TOKENIZE).expect("it is asked");
    assert_eq!(last.body, json!({"model": "m", "prompt": "a text", "add_special_tokens": false}));
    // Messages are rendered, or asked about as the chat that they are.
    let message =
        json!({"model": "m", "max_tokens": 3, "system": "s", "messages": [{"role": "user", "content": "x"}]});
    assert_eq!(post(system.address, "/v1/messages", &message).await.status, 200);
    let last = engine.all().into_iter().rfind(|request| request.path == TOKENIZE).expect("it is asked");
    assert_eq!(last.body["messages"][0], json!({"role": "system", "content": "s"}));
    results(&system, "engine", 5.0).await;
}

#[tokio::test]
async fn without_ids_the_request_goes_on_and_the_reason_is_counted() {
    let status = Arc::new(AtomicU16::new(0));
    let answer = Arc::clone(&status);
    let rule = move |request: &ReceivedRequest| {
        (request.path == RENDER).then(|| match answer.load(Ordering::SeqCst) {
            0 => Action::Hang,
            1 => Action::Close,
            200 => Action::Json(json!({"token_ids": vec![1; 40_000]})),
            status => Action::Refuse(status, json!({"error": "x"})),
        })
    };
    let engine = FakeEngine::always(Action::Whole(1)).await.with_rule(rule);
    let hasty = router(&[(&engine, "")], ", timeout_ms: 20", "").await;
    assert_eq!(post(hasty.address, CHAT, &chat("late")).await.status, 200);
    results(&hasty, "late", 1.0).await;
    let system = router(&[(&engine, "")], ", timeout_ms: 10000", "").await;
    let ask = async |body: Value, result: &str, count: f64| {
        assert_eq!(post(system.address, CHAT, &body).await.status, 200);
        results(&system, result, count).await;
    };
    status.store(400, Ordering::SeqCst);
    ask(chat("refused"), "refused", 1.0).await;
    let image = json!([{"type": "image_url", "image_url": {"url": "https://h/x.png"}}]);
    let mut seen = chat("");
    seen["messages"][0]["content"] = image;
    ask(seen, "not_text", 1.0).await;
    status.store(200, Ordering::SeqCst);
    ask(chat("more ids than bytes"), "malformed", 1.0).await;
    status.store(503, Ordering::SeqCst);
    ask(chat("full"), "failed", 1.0).await;
    status.store(1, Ordering::SeqCst);
    ask(chat("broken"), "failed", 2.0).await;
    // The third failure in a row: the engine is not asked for a second.
    ask(chat("paused"), "no_engine", 1.0).await;
    let asked = || paths(&engine).iter().filter(|path| *path == RENDER).count();
    let before = asked();
    ask(chat("still paused"), "no_engine", 2.0).await;
    assert_eq!(asked(), before);
    // A prompt that is token ids needs none.
    let given = json!({"model": "m", "prompt": [1, 2, 3], "max_tokens": 2});
    assert_eq!(post(system.address, "/v1/completions", &given).await.status, 200);
    results(&system, "client", 1.0).await;
    assert_eq!(paths(&engine).iter().filter(|path| *path == CHAT).count(), 8);
}

#[tokio::test]
async fn small_requests_and_those_beyond_the_bound_go_on_without_ids() {
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let engine = engine.with_rule(|request| (request.path == RENDER).then_some(Action::WholeGated(1)));
    let system = router(&[(&engine, "")], ", timeout_ms: 10000, concurrent: 1", "").await;
    let mut waiting = Client::connect(system.address).await;
    waiting.post(CHAT, &chat("waits for its ids")).await;
    engine.wait("the question arrives", |engine| paths(engine).contains(&RENDER.to_owned())).await;
    assert_eq!(post(system.address, CHAT, &chat("another")).await.status, 200);
    results(&system, "busy", 1.0).await;
    engine.open_gate();
    assert_eq!(waiting.answer().await.status, 200);
    let small = router(&[(&engine, "")], ", min_bytes: 100000", "").await;
    assert_eq!(post(small.address, CHAT, &chat("x")).await.status, 200);
    results(&small, "small", 1.0).await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_wait_for_its_ids() {
    for how in DISCONNECT_KINDS {
        let engine = FakeEngine::always(Action::Whole(1)).await;
        let engine = engine.with_rule(|request| (request.path == RENDER).then_some(Action::Hang));
        let system = router(&[(&engine, "")], ", timeout_ms: 10000", "").await;
        let mut client = Client::connect(system.address).await;
        client.post(CHAT, &chat("the client leaves")).await;
        engine.wait("the question arrives", |engine| paths(engine).contains(&RENDER.to_owned())).await;
        client.hang_up(how);
        engine.wait("the question is cut", |engine| engine.cut() == 1).await;
        system.counts("baton_router_requests_in_flight", 0.0).await;
        assert!(!paths(&engine).contains(&CHAT.to_owned()), "no engine computes");
    }
}

#[tokio::test]
async fn blocks_of_a_tenant_are_found_by_the_salt_that_the_router_sets() {
    let mut publisher = Publisher::at(0).await;
    let rendered = json!({"token_ids": ids(13)});
    let (a, b) = (engine(RENDER, rendered.clone()).await, engine(RENDER, rendered).await);
    let keys = [NewKey::make(), NewKey::make()];
    let top = format!(
        "auth: {{keys: [{{id: a, hash: '{}', tenant: t}}, {{id: b, hash: '{}', tenant: u}}]}}\n",
        keys[0].hash, keys[1].hash
    );
    let events = format!(", kv_events: {{port: {}, topic: kv}}", publisher.port);
    let system = router(&[(&a, ""), (&b, &events)], "", &top).await;
    let send = async |key: &NewKey| {
        let mut client = Client::connect(system.address).await;
        let authorization = format!("Authorization: Bearer {}\r\n", key.key);
        client.post_bytes(CHAT, &authorization, chat("x").to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    };
    send(&keys[0]).await;
    let salt = [&a, &b].iter().flat_map(|engine| engine.all()).find(|request| request.path == CHAT);
    let salt = salt.expect("one engine generates").body["cache_salt"].clone();
    // vLLM's extra keys: the salt is in the first block only.
    let mut event = stored(&[11, 12], None, &ids(8));
    event["extra_keys"] = json!([[salt], null]);
    held(&system, &mut publisher, &json!([event]), "&tenant=t", 2).await;
    let prompt = json!({"model": "m", "prompt": ids(13)});
    let of_other = post(system.admin, "/dry-run?path=/v1/completions&tenant=u", &prompt).await;
    assert_eq!(of_other.json()["decode"]["held"]["blocks"], 0, "another tenant's");
    let before = paths(&b).iter().filter(|path| *path == CHAT).count();
    send(&keys[0]).await;
    assert_eq!(paths(&b).iter().filter(|path| *path == CHAT).count(), before + 1);
    system.counts("baton_router_decisions_total{model=\"m\",reason=\"holds_blocks\"}", 1.0).await;
    // Another tenant's equal request is no hit in the cache of ids.
    results(&system, "cache", 1.0).await;
    send(&keys[1]).await;
    results(&system, "engine", 2.0).await;
}

#[tokio::test]
async fn blocks_of_an_adapter_are_found_by_the_name_of_its_model() {
    let mut publisher = Publisher::at(0).await;
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let events = format!(", kv_events: {{port: {}, topic: kv}}", publisher.port);
    let system = router(&[(&engine, &events)], "", "").await;
    let mut event = stored(&[21, 22], None, &ids(8));
    (event["lora_name"], event["lora_id"]) = (json!("m"), json!(1));
    event["extra_keys"] = json!([["m"], ["m"]]);
    held(&system, &mut publisher, &json!([event]), "", 2).await;
}

#[tokio::test]
async fn an_adapter_of_the_engines_list_is_not_compared_with_the_blocks_of_its_base() {
    let mut publisher = Publisher::at(0).await;
    let engine = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        (request.path == "/v1/models").then(|| {
            Action::Json(json!({"data": [{"id": "base", "parent": null}, {"id": "m", "parent": "base"}]}))
        })
    });
    let events = format!(", kv_events: {{port: {}, topic: kv}}", publisher.port);
    let system = router(&[(&engine, &events)], "", "").await;
    let of_base = json!([stored(&[21, 22], None, &ids(8))]);
    let begun = Instant::now();
    loop {
        publisher.publish(&of_base).await;
        let reported = get(system.admin, "/engines").await.json()["engines"][0]["kv_events"]["blocks"] == 2;
        if reported && paths(&engine).contains(&"/v1/models".to_owned()) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "the list is not read");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    held(&system, &mut publisher, &of_base, "", 0).await;
    let mut own = stored(&[31, 32, 33], None, &ids(12));
    (own["lora_name"], own["lora_id"]) = (json!("m"), json!(1));
    own["extra_keys"] = json!([["m"], ["m"], ["m"]]);
    held(&system, &mut publisher, &json!([own]), "", 3).await;
}

/// vLLM's reply with a publisher per rank.
fn sources(ports: &[u16]) -> Value {
    let source = |port: &u16| {
        json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{port}"),
            "replay_endpoint": null, "topic": "kv"})
    };
    ports.iter().enumerate().map(|(rank, port)| (rank.to_string(), source(port))).collect()
}

#[tokio::test]
async fn the_publishers_of_all_ranks_are_those_that_the_engine_reports() {
    let mut publishers = [Publisher::at(0).await, Publisher::at(0).await];
    let reply = sources(&publishers.each_ref().map(|publisher| publisher.port));
    let engine = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(move |request| (request.path == "/kv_event_sources").then(|| Action::Json(reply.clone())));
    let system = router(&[(&engine, ", data_parallel_size: 2, kv_events: {}")], "", "").await;
    held(&system, &mut publishers[1], &json!([stored(&[11, 12], None, &ids(8))]), "", 2).await;
    // Three blocks at rank 0 are another cache.
    held(&system, &mut publishers[0], &json!([stored(&[11, 12, 13], None, &ids(12))]), "", 3).await;
    let body = json!({"model": "m", "prompt": ids(13), "max_tokens": 1});
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 200);
    let sent = engine.all().into_iter().rfind(|request| request.path == "/v1/completions");
    assert_eq!(sent.expect("it is sent").headers["x-data-parallel-rank"], "0");
    let engines = get(system.admin, "/engines").await.json();
    let events = &engines["engines"][0]["kv_events"];
    let authority = engine.address;
    let publisher = format!("{authority}/kv_event_sources#0, {authority}/kv_event_sources#1");
    assert_eq!((&events["publisher"], &events["connected"]), (&json!(publisher), &json!(true)), "{events}");
    assert_eq!(events["blocks"], 5, "of both ranks");
}

#[tokio::test]
async fn rank_n_publishes_at_the_configured_port_plus_n() {
    let (first, mut second) = loop {
        let first = Publisher::at(0).await;
        let next = std::net::TcpListener::bind(("127.0.0.1", first.port.wrapping_add(1)));
        if next.map(drop).is_ok() && first.port < u16::MAX {
            let port = first.port + 1;
            break (first, Publisher::at(port).await);
        }
    };
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let events = format!(", data_parallel_size: 2, kv_events: {{port: {}}}", first.port);
    let system = router(&[(&engine, &events)], "", "").await;
    held(&system, &mut second, &json!([stored(&[11, 12], None, &ids(8))]), "", 2).await;
    let body = json!({"model": "m", "prompt": ids(13), "max_tokens": 1});
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 200);
    let sent = engine.all().into_iter().rfind(|request| request.path == "/v1/completions");
    assert_eq!(sent.expect("it is sent").headers["x-data-parallel-rank"], "1");
}

#[tokio::test]
async fn an_engine_that_reports_another_host_is_not_subscribed() {
    let engine = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        let reply = json!({"0": {"endpoint": "tcp://192.0.2.1:5557", "publisher": "zmq"}});
        (request.path == "/kv_event_sources").then(|| Action::Json(reply.clone()))
    });
    let system = router(&[(&engine, ", kv_events: {}")], "", "").await;
    let asked =
        |engine: &FakeEngine| paths(engine).iter().filter(|path| *path == "/kv_event_sources").count();
    engine.wait("it is asked again", |engine| asked(engine) >= 2).await;
    let authority = engine.address;
    let series = format!("baton_router_kv_events_connected{{engine=\"{authority}\"}}");
    assert_eq!(system.metric(&series).await, 0.0);
}

#[test]
fn ranks_without_a_port_of_their_own_are_refused() {
    let problem = |engines: &str| {
        let yaml = format!("models:\n  - name: m\n    decode: {{engines: [{engines}]}}\n");
        RouterConfig::from_yaml(&yaml, "router.yaml").err().map(|problem| problem.to_string())
    };
    let engine = |n: u8, ranks: u16, port: u16| {
        let events = format!("{{port: {port}, bind: 127.0.0.1}}");
        format!("{{url: 'http://e{n}:1', data_parallel_size: {ranks}, kv_events: {events}}}")
    };
    let both = |first: String, second: String| problem(&format!("{first}, {second}"));
    assert_eq!(both(engine(1, 4, 5000), engine(2, 4, 5004)), None);
    let meets = both(engine(1, 4, 5000), engine(2, 4, 5003)).expect("port 5003 is taken");
    assert!(meets.contains("each engine needs a port of its own"), "{meets}");
    let beyond = problem(&engine(1, 4, 65_533)).expect("there is no port 65536");
    assert!(beyond.contains("has no port 65533 + N for each of its ranks"), "{beyond}");
    let without = problem("{url: 'http://e:1', kv_events: {bind: 127.0.0.1}}").expect("no port");
    assert!(without.contains("`kv_events.bind` needs `kv_events.port`"), "{without}");
}
