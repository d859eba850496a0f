//! API keys and tenants: authentication, the fields that engines receive, and the responses at a limit.

use baton_router::{NewKey, Router, RouterConfig};
use serde_json::{Value, json};

use crate::harness::client::{Client, ClientResponse, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::{TestRouter, await_requests};
use crate::operations::health::{error_body, standing, stands};

/// One prefill engine, one decode engine, two keys of two tenants.
struct KeyedRouter {
    p: FakeEngine,
    d: FakeEngine,
    system: TestRouter,
    a: String,
    b: String,
}

/// `of_a` and `of_b` are further fields of the keys, `auth` of `auth`, `top` of the file.
async fn keyed(action: Action, of_a: &str, of_b: &str, auth: &str, top: &str) -> KeyedRouter {
    let (a, b) = (NewKey::make(), NewKey::make());
    let (p, d) = (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(action).await);
    let key = |id: &str, key: &NewKey, more: &str| {
        format!("    - {{id: {id}, hash: '{}', tenant: tenant-{id}{more}}}\n", key.hash)
    };
    let top = format!("auth:\n{auth}  keys:\n{}{}{top}", key("a", &a, of_a), key("b", &b, of_b));
    let system = TestRouter::with(&[&p], &[&d], "", &top).await;
    KeyedRouter { p, d, system, a: a.key, b: b.key }
}

impl KeyedRouter {
    async fn post(&self, key: &str, body: &Value) -> ClientResponse {
        let mut client = self.posted(key, body).await;
        client.answer().await
    }

    async fn posted(&self, key: &str, body: &Value) -> Client {
        let mut client = Client::connect(self.system.address).await;
        let headers = format!("Authorization: Bearer {key}\r\n");
        client.post_bytes("/v1/completions", &headers, body.to_string().as_bytes()).await;
        client
    }
}

#[tokio::test]
async fn without_a_valid_key_nothing_reaches_an_engine_and_no_body_is_read() {
    let k = keyed(Action::Whole(1), "", ", expires: '2020-01-01'", "", "").await;
    let not_a_hash = format!("{}0", k.a);
    for header in [
        String::new(),
        "Authorization: Bearer\r\n".into(),
        "Authorization: Bearer sk-baton-guess\r\n".into(),
        format!("Authorization: Basic {}\r\n", k.a),
        format!("Authorization: Bearer {not_a_hash}\r\n"),
        format!("Authorization: Bearer {}\r\n", k.b),
        format!("Authorization: Bearer {0}\r\nAuthorization: Bearer {0}\r\n", k.a),
    ] {
        let mut client = Client::connect(k.system.address).await;
        // The body never arrives and is not awaited.
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{header}content-length: 1000\r\n\r\n");
        client.send(head.as_bytes()).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.code()), (401, "invalid_api_key".to_owned()), "{header}");
        assert!(client.is_closed().await);
    }
    for path in ["/v1/models", "/v1/models/m", "/tokenize"] {
        let mut client = Client::connect(k.system.address).await;
        let method = if path == "/tokenize" { "POST" } else { "GET" };
        client.send(format!("{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await;
        assert_eq!(client.answer().await.status, 401, "{path}");
    }
    assert_eq!(get(k.system.address, "/health").await.status, 200, "probes need no key");
    assert!(k.p.all().is_empty() && k.d.all().is_empty());
    k.system.counts("baton_router_unauthorized_total{reason=\"expired\"}", 1.0).await;
}

#[tokio::test]
async fn a_valid_key_is_accepted_and_not_forwarded() {
    let k = keyed(Action::Whole(1), "", "", "", "").await;
    assert_eq!(k.post(&k.a, &completion(false)).await.status, 200);
    for request in [k.p.received(), k.d.received()].concat() {
        assert!(request.headers.get("authorization").is_none());
        assert!(!format!("{:?} {}", request.headers, request.body).contains(&k.a));
    }
    k.system.counts("baton_router_tenant_requests_total{tenant=\"tenant-a\"}", 1.0).await;
}

#[tokio::test]
async fn an_engine_gets_its_own_key_and_not_the_clients() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "engine-key\n").unwrap();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    decode: {{engines: \
         [{{url: '{}', api_key_file: '{}'}}]}}\n",
        d.url(),
        file.display()
    ))
    .await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", "Authorization: Bearer client\r\n", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(d.received()[0].headers["authorization"], "Bearer engine-key");
    assert_eq!(d.received()[0].headers.get_all("authorization").iter().count(), 1);
}

#[tokio::test]
async fn one_tenant_cannot_eject_the_only_engine_and_two_can() {
    let breaker = "{failures: 2, cool_down_ms: 600000, cool_down_max_ms: 600000}";
    let top = format!("health: {{active: {{interval_ms: 0}}, breaker: {breaker}}}");
    let k = keyed(Action::Refuse(500, error_body("x")), "", "", "", &top).await;
    for _ in 0..5 {
        assert_eq!(k.post(&k.a, &completion(false)).await.status, 502);
    }
    assert_eq!(standing(&k.system, &k.d, "decode").await, "usable");
    // From the same address; no engine receives a client's credentials.
    assert_eq!(k.post(&k.b, &completion(false)).await.status, 502);
    stands(&k.system, &k.d, "decode", "ejected").await;
}

#[tokio::test]
async fn tenants_get_salts_that_no_client_can_choose() {
    let k = keyed(Action::Whole(1), "", "", "", "cluster_secret: 0123456789abcdef").await;
    let with = |salt: Value| {
        let mut body = completion(false);
        if !salt.is_null() {
            body["cache_salt"] = salt;
        }
        body
    };
    let mut salts = Vec::new();
    for (key, body) in [
        (&k.a, with(Value::Null)),
        (&k.a, with(Value::Null)),
        (&k.b, with(Value::Null)),
        (&k.a, with(json!("x"))),
        (&k.b, with(json!("x"))),
    ] {
        assert_eq!(k.post(key, &body).await.status, 200);
        let (p, d) = (k.p.received().pop().unwrap(), k.d.received().pop().unwrap());
        assert_eq!(p.body["cache_salt"], d.body["cache_salt"], "the same on both legs");
        salts.push(p.body["cache_salt"].as_str().unwrap().to_owned());
    }
    assert_eq!(salts[0], salts[1]);
    let distinct: std::collections::BTreeSet<_> = salts.iter().collect();
    assert_eq!(distinct.len(), 4, "{salts:?}");
    // A client that copies another tenant's salt from an engine's log gets a salt of its own.
    assert_eq!(k.post(&k.b, &with(json!(salts[0]))).await.status, 200);
    let copied = k.d.received().pop().unwrap().body["cache_salt"].as_str().unwrap().to_owned();
    assert!(!salts.contains(&copied));
}

#[tokio::test]
async fn the_salts_of_two_routers_with_one_secret_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("salt");
    std::fs::write(&file, "a secret of many bytes\n").unwrap();
    let auth = format!("  cache_salt_file: '{}'\n", file.display());
    let mut salts = Vec::new();
    for _ in 0..2 {
        let k = keyed(Action::Whole(1), "", "", &auth, "").await;
        assert_eq!(k.post(&k.a, &completion(false)).await.status, 200);
        salts.push(k.d.received()[0].body["cache_salt"].clone());
    }
    assert_eq!(salts[0], salts[1]);
    std::fs::write(&file, "short\n").unwrap();
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, decode: {{engines: [{{url: \
         'http://127.0.0.1:1'}}]}}}}]\nauth:\n{auth}"
    );
    let refused = Router::bind(RouterConfig::from_yaml(&yaml, "t").unwrap()).await.err().unwrap();
    assert!(refused.to_string().contains("16 bytes"), "{refused}");
}

#[tokio::test]
async fn a_key_sees_and_uses_only_its_models() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let key = NewKey::make();
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - {{name: m, aliases: [alias], decode: \
         {{engines: [{{url: '{0}'}}]}}}}\n  - {{name: secret, decode: {{engines: [{{url: '{0}'}}]}}}}\nauth:\n  \
         keys: [{{id: a, hash: '{1}', tenant: t, models: [alias]}}]\n",
        d.url(),
        key.hash
    ))
    .await;
    let ask = async |method: &str, path: &str, body: &str| {
        let mut client = Client::connect(system.address).await;
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n", key.key);
        client.send(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes()).await;
        client.answer().await
    };
    let models = ask("GET", "/v1/models", "").await.json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect();
    assert_eq!(names, ["m", "alias"]);
    assert_eq!(ask("GET", "/v1/models/secret", "").await.status, 403);
    for (model, status) in [("m", 200), ("alias", 200), ("secret", 403), ("unknown", 404)] {
        let body = json!({"model": model, "prompt": "x", "max_tokens": 1}).to_string();
        let answer = ask("POST", "/v1/completions", &body).await;
        assert_eq!(answer.status, status, "{model}: {}", answer.text());
        let answer = ask("POST", "/tokenize", &json!({"model": model, "prompt": "x"}).to_string()).await;
        assert_eq!(answer.status, status, "{model}: {}", answer.text());
    }
    let refused =
        ask("POST", "/v1/completions", &json!({"model": "secret", "prompt": "x"}).to_string()).await;
    assert_eq!(refused.code(), "model_not_allowed");
    assert_eq!(d.received().len(), 2);
}

#[tokio::test]
async fn limits_are_reported_in_headers_and_enforced_with_429() {
    let limits = ", limits: {requests_per_minute: 2, tokens_per_minute: 1000}";
    let k = keyed(Action::Whole(1), limits, "", "", "").await;
    let first = k.post(&k.a, &completion(false)).await;
    assert_eq!(first.status, 200);
    assert_eq!(first.header("x-ratelimit-limit-requests"), Some("2"));
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("1"));
    assert!(first.header("x-ratelimit-reset-requests").unwrap().ends_with('s'));
    let left: u64 = first.header("x-ratelimit-remaining-tokens").unwrap().parse().unwrap();
    assert!((950..1000).contains(&left), "{left}: eight tokens and a short prompt");
    assert_eq!(k.post(&k.a, &completion(true)).await.header("x-ratelimit-remaining-requests"), Some("0"));
    let refused = k.post(&k.a, &completion(false)).await;
    assert_eq!((refused.status, refused.code()), (429, "rate_limit_exceeded".to_owned()));
    let after: u64 = refused.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((20_000..=30_000).contains(&after), "{after}");
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    let other = k.post(&k.b, &completion(false)).await;
    assert_eq!((other.status, other.header("x-ratelimit-limit-requests")), (200, None));
    assert_eq!(k.d.received().len(), 3);
}

#[tokio::test]
async fn a_request_that_can_never_fit_is_not_retryable() {
    let k = keyed(Action::Whole(1), ", limits: {tokens_per_minute: 100}", "", "", "").await;
    let large = json!({"model": "m", "prompt": "x", "max_tokens": 1000});
    let refused = k.post(&k.a, &large).await;
    assert_eq!((refused.status, refused.header("x-should-retry")), (429, Some("false")));
    assert_eq!(k.post(&k.a, &completion(false)).await.status, 200, "nothing was taken");
}

#[tokio::test]
async fn the_limits_of_a_tenant_hold_for_all_its_keys_together() {
    let (a, b) = (NewKey::make(), NewKey::make());
    let d = FakeEngine::always(Action::WholeGated(1)).await;
    let top = format!(
        "auth:\n  tenants: [{{name: t, weight: 2, limits: {{concurrent_requests: 1}}}}]\n  keys:\n    - {{id: a, hash: \
         '{}', tenant: t}}\n    - {{id: b, hash: '{}', tenant: t}}",
        a.hash, b.hash
    );
    let system = TestRouter::with(&[], &[&d], "", &top).await;
    let post = async |key: &NewKey| {
        let mut client = Client::connect(system.address).await;
        let headers = format!("Authorization: Bearer {}\r\n", key.key);
        client.post_bytes("/v1/completions", &headers, completion(false).to_string().as_bytes()).await;
        client
    };
    let mut first = post(&a).await;
    await_requests(&d, 1).await;
    let refused = post(&b).await.answer().await;
    assert_eq!((refused.status, refused.code()), (429, "rate_limit_exceeded".to_owned()));
    assert!(refused.text().contains("this tenant"));
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
    system.settled().await;
    d.open_gate();
    assert_eq!(post(&b).await.answer().await.status, 200, "its place is free again");
}

#[tokio::test]
async fn a_priority_is_bounded_by_the_key_towards_engines_too() {
    let k = keyed(Action::Whole(1), ", priority_max: high", ", priority_max: normal", "", "").await;
    let body = json!({"model": "m", "prompt": "x", "max_tokens": 1, "priority": -9});
    assert_eq!((k.post(&k.a, &body).await.status, k.post(&k.b, &body).await.status), (200, 200));
    assert_eq!(k.d.received()[0].body["priority"], -9);
    assert!(k.d.received()[1].body.get("priority").is_none());
}

#[tokio::test]
async fn engines_that_schedule_by_priority_get_one_within_the_keys_bounds() {
    let (high, low) = (NewKey::make(), NewKey::make());
    let (p, d) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Whole(1)).await);
    let keys = format!(
        "auth:\n  keys:\n    - {{id: a, hash: '{}', tenant: a, priority_max: high}}\n    - {{id: b, hash: '{}', tenant: b, priority_max: low}}\n",
        high.hash, low.hash
    );
    let system = TestRouter::with(&[&p], &[&d], "    priority_scheduling: true\n", &keys).await;
    let asked = [
        (&high, "", json!(-9), -9),
        (&high, "x-priority: low\r\n", json!(-9), 1),
        (&low, "x-priority: -9\r\n", json!(-9), 1),
        (&low, "", json!(null), 1),
        (&low, "", json!("first"), 1),
        (&high, "", json!(null), 0),
    ];
    for (key, header, priority, _) in &asked {
        let body = json!({"model": "m", "prompt": "x", "max_tokens": 1, "priority": priority});
        let mut client = Client::connect(system.address).await;
        let headers = format!("Authorization: Bearer {}\r\n{header}", key.key);
        client.post_bytes("/v1/completions", &headers, body.to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    }
    for (at, (_, _, _, expected)) in asked.iter().enumerate() {
        for engine in [&p, &d] {
            assert_eq!(engine.received()[at].body["priority"], *expected, "request {at}");
        }
    }
}

#[tokio::test]
async fn every_api_of_engines_that_schedule_by_priority_gets_the_keys_own() {
    let low = NewKey::make();
    let reply = json!({"id": "chatcmpl-7", "type": "message", "content": [], "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1}});
    let d = FakeEngine::always(Action::Json(reply)).await;
    let keys =
        format!("auth:\n  keys:\n    - {{id: a, hash: '{}', tenant: a, priority_max: low}}\n", low.hash);
    let model = "    messages: native\n    priority_scheduling: true\n";
    let system = TestRouter::with(&[], &[&d], model, &keys).await;
    let message = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]});
    let input = json!({"model": "m", "input": "x", "priority": -9});
    let text = json!({"model": "m", "prompt": "x"});
    for (path, body, expected) in [
        ("/v1/messages", &message, Some(json!(1))),
        ("/v1/embeddings", &input, Some(json!(1))),
        ("/v1/score", &input, Some(json!(1))),
        ("/pooling", &input, Some(json!(1))),
        ("/tokenize", &text, None),
    ] {
        let mut client = Client::connect(system.address).await;
        let headers = format!("Authorization: Bearer {}\r\n", low.key);
        client.post_bytes(path, &headers, body.to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200, "{path}");
        let sent = d.all().pop().unwrap();
        assert_eq!((sent.path.as_str(), sent.body.get("priority")), (path, expected.as_ref()));
    }
}

#[tokio::test]
async fn the_keys_file_is_read_again_and_a_bad_one_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.yaml");
    let (a, b) = (NewKey::make(), NewKey::make());
    let write = |text: String| {
        std::fs::write(dir.path().join("new"), text).unwrap();
        std::fs::rename(dir.path().join("new"), &file).unwrap();
    };
    let entry = |key: &NewKey| format!("keys:\n{}", key.entry("a", "t"));
    write(entry(&a));
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system =
        TestRouter::with(&[], &[&d], "", &format!("auth: {{keys_file: '{}'}}", file.display())).await;
    let status = async |key: &NewKey| {
        let mut client = Client::connect(system.address).await;
        let headers = format!("Authorization: Bearer {}\r\n", key.key);
        client.post_bytes("/v1/completions", &headers, completion(false).to_string().as_bytes()).await;
        client.answer().await.status
    };
    assert_eq!((status(&a).await, status(&b).await), (200, 401));
    write(entry(&b));
    system.counts("baton_router_keys_reloads_total{result=\"ok\"}", 1.0).await;
    assert_eq!((status(&a).await, status(&b).await), (401, 200));
    write("keys: [{id: x}]".to_owned());
    system.counts("baton_router_keys_reloads_total{result=\"failed\"}", 1.0).await;
    assert_eq!((status(&a).await, status(&b).await), (401, 200));
}

#[tokio::test]
async fn one_tenant_with_many_waiting_requests_does_not_hold_another_up() {
    let (a, b) = (NewKey::make(), NewKey::make());
    let d = FakeEngine::always(Action::WholeGated(1)).await;
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, decode: {{engines: [{{url: '{}', \
         max_in_flight: 1}}]}}}}]\nauth:\n  keys:\n    - {{id: a, hash: '{}', tenant: a}}\n    - {{id: b, hash: '{}', \
         tenant: b}}\n",
        d.url(),
        a.hash,
        b.hash
    ))
    .await;
    let post = async |key: &NewKey, prompt: &str| {
        let mut client = Client::connect(system.address).await;
        let body = json!({"model": "m", "prompt": prompt, "max_tokens": 8}).to_string();
        let headers = format!("Authorization: Bearer {}\r\n", key.key);
        client.post_bytes("/v1/completions", &headers, body.as_bytes()).await;
        client
    };
    let mut clients = vec![post(&a, "a").await];
    await_requests(&d, 1).await;
    for _ in 0..20 {
        clients.push(post(&a, "a").await);
    }
    system.counts("baton_router_queue_requests{priority=\"normal\"}", 20.0).await;
    clients.push(post(&b, "b").await);
    system.counts("baton_router_queue_requests{priority=\"normal\"}", 21.0).await;
    d.open_gate();
    d.open_gate();
    eventually("three have the request", || d.received().len() == 3).await;
    assert!(
        d.received().iter().any(|request| request.body["prompt"] == "b"),
        "after one turn of the other at most"
    );
    (0..20).for_each(|_| d.open_gate());
    for mut client in clients {
        assert_eq!(client.answer().await.status, 200);
    }
}

#[tokio::test]
async fn invalid_keys_are_reported() {
    let key = NewKey::make();
    let entry = |id: &str| format!("{{id: {id}, hash: '{}', tenant: t}}", key.hash);
    let yaml = |auth: &str| {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, decode: {{engines: [{{url: \
             'http://127.0.0.1:1'}}]}}}}]\nauth: {auth}\n"
        )
    };
    for (auth, word) in [
        ("{keys: [{id: a, hash: 'sha256:00', tenant: t}]}".to_owned(), "64 hexadecimal"),
        ("{keys: [{id: a, hash: 'md5:00', tenant: t}]}".to_owned(), "sha256:"),
        (format!("{{keys: [{{id: a, hash: '{}', tenant: t, expires: soon}}]}}", key.hash), "UTC"),
        (format!("{{keys: [{{id: a, hash: '{}', tenant: t, priority_max: urgent}}]}}", key.hash), "urgent"),
    ] {
        let message = RouterConfig::from_yaml(&yaml(&auth), "r.yaml").expect_err(&auth).to_string();
        assert!(message.starts_with("r.yaml:4:") && message.contains(word), "{message}");
    }
    for (auth, word) in [
        (format!("{{keys: [{}, {}]}}", entry("a"), entry("b")), "hash of another key"),
        (format!("{{keys: [{}, {}]}}", entry("a"), entry("a")), "given twice"),
        ("{tenants: [{name: t}, {name: t}]}".to_owned(), "given twice"),
        ("{certificates: [{name: c, tenant: t}, {name: c, tenant: u}]}".to_owned(), "given twice"),
        ("{keys_file: no/such.yaml}".to_owned(), "no/such.yaml"),
    ] {
        let config = RouterConfig::from_yaml(&yaml(&auth), "r.yaml").unwrap();
        let message = Router::bind(config).await.err().expect(&auth).to_string();
        assert!(message.contains(word), "{message}");
    }
}

#[tokio::test]
async fn passthrough_requests_are_charged_and_their_priority_is_bounded() {
    let limits = ", limits: {tokens_per_minute: 100}, priority_max: normal";
    let k = keyed(Action::Whole(1), limits, ", priority_max: high", "", "").await;
    let ask = async |key: &str, path: &str, input: usize| {
        let mut client = Client::connect(k.system.address).await;
        let headers = format!("Authorization: Bearer {key}\r\n");
        let body = json!({"model": "m", "input": "x".repeat(input), "prompt": "x", "priority": -9});
        client.post_bytes(path, &headers, body.to_string().as_bytes()).await;
        client.answer().await
    };
    let first = ask(&k.a, "/v1/embeddings", 200).await;
    let left: u64 = first.header("x-ratelimit-remaining-tokens").unwrap().parse().unwrap();
    assert!(first.status == 200 && (20..=50).contains(&left), "{left}");
    let refused = ask(&k.a, "/pooling", 200).await;
    assert_eq!((refused.status, refused.code()), (429, "rate_limit_exceeded".to_owned()));
    assert_eq!(ask(&k.a, "/tokenize", 0).await.status, 200);
    assert_eq!(ask(&k.b, "/v1/embeddings", 200).await.status, 200);
    let bodies = k.d.all().into_iter().map(|request| request.body).collect::<Vec<_>>();
    assert_eq!(bodies.len(), 3, "nothing of what was refused");
    let priorities = bodies.iter().map(|body| body.get("priority").cloned()).collect::<Vec<_>>();
    assert_eq!(priorities, [None, None, Some(json!(-9))]);
    assert!(bodies[0]["cache_salt"].is_string() && bodies[0]["cache_salt"] != bodies[2]["cache_salt"]);
    assert!(bodies[1].get("cache_salt").is_none(), "no tokenizer has a cache");
}

#[tokio::test]
async fn a_request_that_reached_no_engine_costs_no_tokens() {
    let (key, both) = (NewKey::make(), FakeEngine::always(Action::Whole(1)).await);
    // The reserved place fills the pool: the request is refused when its prefill engine is chosen.
    let engine = format!("{{engines: [{{url: '{}', max_in_flight: 1}}]}}", both.url());
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         auth: {{keys: [{{id: a, hash: '{}', tenant: t, limits: {{tokens_per_minute: 100}}}}]}}\n\
         models: [{{name: m, fallback: none, prefill: {engine}, decode: {engine}}}]\n",
        key.hash
    ))
    .await;
    let headers = format!("Authorization: Bearer {}\r\n", key.key);
    let body = json!({"model": "m", "prompt": "x".repeat(150), "max_tokens": 20}).to_string();
    for _ in 0..6 {
        let mut client = Client::connect(system.address).await;
        client.post_bytes("/v1/completions", &headers, body.as_bytes()).await;
        let refused = client.answer().await;
        assert_eq!((refused.status, refused.code()), (429, "overloaded".to_owned()), "{}", refused.text());
    }
    assert!(both.all().is_empty());
}

#[tokio::test]
async fn the_cost_beyond_the_estimate_is_charged_at_the_end() {
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 1500, "total_tokens": 1505});
    let k = keyed(
        Action::Json(json!({"choices": [], "usage": usage})),
        ", limits: {tokens_per_minute: 1000}",
        "",
        "",
        "",
    )
    .await;
    let mut client = Client::connect(k.system.address).await;
    let headers = format!("Authorization: Bearer {}\r\n", k.a);
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}).to_string();
    client.post_bytes("/v1/chat/completions", &headers, chat.as_bytes()).await;
    let first = client.answer().await;
    let left: u64 = first.header("x-ratelimit-remaining-tokens").unwrap().parse().unwrap();
    assert!(first.status == 200 && (700..744).contains(&left), "{left}: 256 and the prompt");
    // The same connection: the first request has ended.
    client.post_bytes("/v1/chat/completions", &headers, chat.as_bytes()).await;
    let refused = client.answer().await;
    assert_eq!((refused.status, refused.code()), (429, "rate_limit_exceeded".to_owned()));
    let after: u64 = refused.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((30_000..=60_000).contains(&after), "{after}: half a minute's worth is missing");
}

#[tokio::test]
async fn an_engine_that_refuses_the_routers_key_is_skipped_as_misconfigured() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "engine-key\n").unwrap();
    let refuses = FakeEngine::always(Action::Refuse(401, json!({"error": "Unauthorized"}))).await;
    let serves = FakeEngine::always(Action::Whole(1)).await;
    let first = format!("{{url: '{}', api_key_file: '{}'}}", refuses.url(), file.display());
    let yaml = |others: &str| {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - \
             name: m\n    decode: {{policy: round_robin, engines: [{first}{others}]}}\n"
        )
    };
    let alone = TestRouter::of(&yaml("")).await;
    let answer = post(alone.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "misconfigured"));
    alone.counts("baton_router_misconfigured_total{leg=\"decode\"}", 1.0).await;
    let both = TestRouter::of(&yaml(&format!(", {{url: '{}'}}", serves.url()))).await;
    for _ in 0..2 {
        assert_eq!(post(both.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(serves.received().len(), 2);
    assert!(refuses.received().len() > 1, "it got requests, and its refusal was not forwarded");
}
