//! A successful request: P, then D, then the relayed response.

use serde_json::json;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, event, handoff};
use crate::harness::system::TestRouter;

#[tokio::test]
async fn a_request_is_prefilled_by_one_engine_and_decoded_by_another() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(20)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let body = json!({"model": "alias", "prompt": "hello", "max_tokens": 8, "min_tokens": 2, "mystery": 1});
    let answer = post(system.address, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["text"], "t".repeat(20));
    let (asked_p, asked_d) = (p.received(), d.received());
    let (to_p, to_d) = (&asked_p[0], &asked_d[0]);
    assert_eq!((&to_p.body["max_tokens"], &to_p.body["stream"]), (&json!(1), &json!(false)));
    assert_eq!(to_p.body["kv_transfer_params"]["do_remote_decode"], true);
    assert!(to_p.body.get("min_tokens").is_none());
    assert_eq!((&to_d.body["max_tokens"], &to_d.body["min_tokens"]), (&json!(8), &json!(2)));
    assert_eq!(to_d.body["kv_transfer_params"], handoff(Some(7)), "the handoff travels unopened");
    for sent in [to_p, to_d] {
        assert_eq!((&sent.body["model"], &sent.body["mystery"]), (&json!("m"), &json!(1)));
    }
    let id = to_p.headers["x-request-id"].to_str().unwrap();
    assert_eq!(to_d.headers["x-request-id"], id, "one id on both legs");
    assert_eq!(answer.header("x-request-id"), Some(id));
    system.settled().await;
    assert!(p.releases().is_empty() && p.aborts().is_empty() && d.aborts().is_empty());
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn a_stream_is_passed_on_event_by_event() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::StreamGated(5)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    let (status, head) = client.head().await;
    assert_eq!(status, 200);
    assert!(head.to_ascii_lowercase().contains("text/event-stream"), "{head}");
    assert_eq!(client.event().await, Some(event(0)), "with the head");
    for n in 1..5 {
        d.open_gate();
        assert_eq!(client.event().await, Some(event(n)), "before the next one is made");
    }
    assert_eq!(client.event().await.as_deref(), Some("data: [DONE]\n\n"));
    assert_eq!(client.event().await, None);
    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    assert_eq!(client.head().await.0, 200, "the connection is used again");
}

#[tokio::test]
async fn a_clients_own_request_id_is_echoed_and_never_used() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&d], "", "cluster_secret: 0123456789abcdef").await;
    let mut client = Client::connect(system.address).await;
    let headers = "X-Request-Id: mine-1\r\nAuthorization: Bearer k\r\nX-Data-Parallel-Rank: 3\r\n\
                   X-Baton-Cluster-Secret: guess\r\nX-Prefiller-Host-Port: a:1\r\n";
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", headers, body.as_bytes()).await;
    let answer = client.answer().await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    for sent in [&p.received()[0], &d.received()[0]] {
        assert_ne!(sent.headers["x-request-id"], "mine-1");
        assert_eq!(sent.headers["authorization"], "Bearer k");
        assert_eq!(sent.headers["x-baton-cluster-secret"], "0123456789abcdef");
        assert_eq!(sent.headers.get_all("x-baton-cluster-secret").iter().count(), 1);
        assert!(sent.headers.get("x-data-parallel-rank").is_none());
        assert!(sent.headers.get("x-prefiller-host-port").is_none());
    }
}

#[tokio::test]
async fn without_a_handoff_the_decode_engine_computes_the_prompt() {
    let p = FakeEngine::always(Action::Reply(serde_json::Value::Null)).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    assert!(d.received()[0].body.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn several_prompts_at_once_are_computed_by_a_decode_engine_alone() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let body = json!({"model": "m", "prompt": ["a", "b"], "max_tokens": 4});
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 200);
    assert!(p.received().is_empty());
    assert!(d.received()[0].body.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn requests_for_prompt_logprobs_run_on_a_decode_engine_alone() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let message = json!([{"role": "user", "content": "x"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a", "prompt_logprobs": 0})),
        ("/v1/completions", json!({"prompt": "a", "echo": true, "logprobs": 0, "stream": true})),
        ("/v1/chat/completions", json!({"messages": message, "prompt_logprobs": 3})),
        (
            "/v1/chat/completions",
            json!({"messages": message, "echo": true, "logprobs": true, "top_logprobs": 2}),
        ),
    ] {
        assert_eq!(post(system.address, path, &body).await.status, 200, "{body}");
    }
    assert!(p.received().is_empty());
    assert!(d.received().iter().all(|request| request.body.get("kv_transfer_params").is_none()));
    let series = "baton_router_disagg_decisions_total{decision=\"decode_only\",reason=\"prompt_logprobs\"}";
    system.counts(series, 4.0).await;
    let streamed = json!({"prompt": "a", "prompt_logprobs": 1, "stream": true});
    let refused = post(system.address, "/v1/completions", &streamed).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("prompt_logprobs")));
    for body in [
        json!({"prompt": "a", "prompt_logprobs": null, "stream": true}),
        json!({"prompt": "a", "logprobs": 1, "echo": false}),
    ] {
        assert_eq!(post(system.address, "/v1/completions", &body).await.status, 200, "{body}");
    }
    assert_eq!((p.received().len(), d.received().len()), (2, 6));
}

#[tokio::test]
async fn models_health_version_and_tokenize_are_answered() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let models = get(system.address, "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "m");
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect();
    assert_eq!(names, ["m", "alias"], "every name, as vLLM lists them");
    let alias = get(system.address, "/v1/models/alias").await.json();
    assert_eq!((&alias["id"], &alias["root"]), (&json!("alias"), &json!("m")));
    assert_eq!(get(system.address, "/v1/models/other").await.code(), "model_not_found");
    assert_eq!(get(system.address, "/health").await.status, 200);
    assert!(get(system.address, "/version").await.json()["version"].is_string());
    let body = json!({"model": "alias", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}});
    let answer = post(system.address, "/tokenize", &body).await;
    assert_eq!((answer.status, &answer.json()["path"]), (200, &json!("/tokenize")));
    let passed = d.all().pop().unwrap();
    assert_eq!((&passed.body["model"], passed.body.get("kv_transfer_params")), (&json!("m"), None));
    assert_eq!(post(system.address, "/v1/models", &json!({})).await.status, 405);
    assert_eq!(get(system.address, "/nowhere").await.code(), "not_found");
    assert_eq!(get(system.admin, "/ready").await.status, 200);
}

#[tokio::test]
async fn bodies_far_over_64_kib_reach_both_engines_whole() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(3 << 20)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    for bytes in [200 << 10, 5 << 20] {
        let body = json!({"model": "m", "prompt": "x".repeat(bytes), "max_tokens": 1});
        let answer = post(system.address, "/v1/completions", &body).await;
        assert_eq!((answer.status, answer.body.len() > 3 << 20), (200, true));
        for sent in [p.received().pop().unwrap(), d.received().pop().unwrap()] {
            assert_eq!(sent.body["prompt"].as_str().map(str::len), Some(bytes));
        }
    }
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_gets_it() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.send(head.as_bytes()).await;
    let begun = std::time::Instant::now();
    client.send(body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    assert!(begun.elapsed().as_secs() < 5);
}
