//! The admin listener's responses, access control and formats.

use serde_json::Value;

use crate::harness::client::{Client, DisconnectKind, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

async fn sent(system: &TestRouter, text: &str) -> crate::harness::client::ClientResponse {
    let mut client = Client::connect(system.admin).await;
    client.send(text.as_bytes()).await;
    client.answer().await
}

#[tokio::test]
async fn every_path_has_its_methods_and_errors_are_json() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "cluster_secret: 0123456789abcdef").await;
    for path in ["/", "/health", "/ready", "/metrics", "/config", "/engines", "/requests"] {
        assert_eq!(get(system.admin, path).await.status, 200, "{path}");
        let wrong = post(system.admin, path, &Value::Null).await;
        assert_eq!((wrong.status, wrong.header("allow")), (405, Some("GET")), "{path}");
        assert_eq!(wrong.json()["error"]["code"], 405, "{path}");
    }
    let forgotten = get(system.admin, &format!("/engines/{}/drain", d.address)).await;
    assert_eq!((forgotten.status, forgotten.header("allow")), (405, Some("POST")));
    let missing = get(system.admin, "/nowhere").await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &Value::from(404)));
    let config = get(system.admin, "/config?pretty").await;
    assert!(config.text().contains("\n  \"generation\": 1"), "{}", config.text());
    assert!(!config.text().contains("0123456789abcdef"), "the secret is not shown");
    let engines = get(system.admin, "/engines").await.json();
    assert_eq!(engines["engines"][0]["engine"], d.address.to_string());
    assert_eq!(engines["engines"][0]["pools"][0]["leg"], "decode");
    let large = "POST /config HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000000\r\n\r\n";
    assert_eq!(sent(&system, large).await.status, 413);
}

#[tokio::test]
async fn the_metrics_page_has_the_requested_format() {
    let d = FakeEngine::always(Action::StreamGated(3)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    client.head().await;
    client.chunk().await.unwrap();
    for _ in 1..3 {
        d.open_gate();
        client.chunk().await.unwrap();
    }
    while client.chunk().await.is_some() {}
    system.settled().await;
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\",code=\"2xx\"}", 1.0).await;
    for count in [
        "baton_router_time_to_first_token_seconds_count{model=\"m\",streaming=\"true\"}".to_owned(),
        "baton_router_request_duration_seconds_count{model=\"m\"}".to_owned(),
        "baton_router_decode_seconds_count{model=\"m\"}".to_owned(),
        "baton_router_queue_seconds_count{model=\"m\"}".to_owned(),
        format!("baton_router_engine_requests_total{{engine=\"{}\",leg=\"decode\"}}", d.address),
        format!("baton_router_engine_response_seconds_count{{engine=\"{}\",leg=\"decode\"}}", d.address),
        format!("baton_router_engine_connect_seconds_count{{engine=\"{}\"}}", d.address),
        "baton_router_pool_ready_engines{model=\"m\",leg=\"decode\"}".to_owned(),
        "baton_router_build_info".to_owned(),
    ] {
        assert_eq!(system.metric(&count).await, 1.0, "{count}");
    }
    assert!(system.metric("baton_router_inter_token_latency_seconds_count").await >= 2.0);
    assert!(system.metric("baton_router_response_body_bytes_total").await > 60.0);
    assert!(system.metric("process_resident_memory_bytes").await > 1e6);
    assert!(
        system.metric("process_open_fds").await > 3.0
            && system.metric("process_start_time_seconds").await > 1e9
    );
    let plain = get(system.admin, "/metrics").await;
    assert!(plain.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let open = sent(
        &system,
        "GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: application/openmetrics-text\r\n\r\n",
    )
    .await;
    assert!(open.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(open.text().ends_with("# EOF\n") && open.text().contains("# TYPE baton_router_requests counter"));
}

#[tokio::test]
async fn requests_in_flight_are_listed_with_their_phase_and_engines() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    let list = get(system.admin, "/requests").await.json();
    let request = &list["requests"][0];
    assert_eq!((&list["in_flight"], &request["model"]), (&Value::from(1), &Value::from("m")), "{list}");
    assert_eq!(request["phase"], "decode_pre_first");
    assert_eq!(request["prefill_engine"], p.address.to_string());
    assert_eq!(request["decode_engine"], d.address.to_string());
    assert_eq!(request["request_id"], d.received()[0].headers["x-request-id"].to_str().unwrap());
    assert!(request["age_seconds"].as_f64().unwrap() > 0.0);
    assert!(system.metric("baton_router_inflight_request_age_seconds").await > 0.0);
    assert_eq!(get(system.admin, "/requests?limit=0").await.json()["requests"].as_array().unwrap().len(), 0);
    client.hang_up(DisconnectKind::Fin);
    system.settled().await;
    assert_eq!(get(system.admin, "/requests").await.json()["in_flight"], 0);
    assert_eq!(system.metric("baton_router_inflight_request_age_seconds").await, 0.0);

    let mut slow = Client::connect(system.address).await;
    slow.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{").await;
    system.counts("baton_router_requests_in_flight", 1.0).await;
    assert_eq!(get(system.admin, "/requests").await.json()["requests"][0]["phase"], "intake");
}

#[tokio::test]
async fn server_timing_is_sent_only_if_configured() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.header("server-timing"), None);
    let system = TestRouter::with(&[&p], &[&d], "", "telemetry: {server_timing: true}").await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    let timing = answer.header("server-timing").unwrap_or_else(|| panic!("{}", answer.head));
    for phase in ["prefill;dur=", "gap;dur=", "accept;dur="] {
        assert!(timing.contains(phase), "{timing}");
    }
}

#[tokio::test]
async fn every_answer_has_a_request_id_and_a_hostile_one_is_replaced() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let long = "x".repeat(2000);
    for (path, body) in [
        ("/v1/completions", "{}"),
        ("/v1/completions", "not json"),
        ("/v1/nowhere", "{}"),
        ("/health", ""),
        ("/tokenize", "{}"),
        ("/v1/completions", "{\"model\":\"m\",\"prompt\":\"x\"}"),
    ] {
        for hostile in ["a b", "\u{1}", long.as_str(), ""] {
            let mut client = Client::connect(system.address).await;
            client.post_bytes(path, &format!("x-request-id: {hostile}\r\n"), body.as_bytes()).await;
            let answer = client.answer().await;
            // Bytes that are no HTTP are refused before the request has an id.
            if hostile == "\u{1}" && answer.status == 400 && answer.header("x-request-id").is_none() {
                continue;
            }
            let id =
                answer.header("x-request-id").unwrap_or_else(|| panic!("{path} {body}: {}", answer.head));
            assert_eq!(id.len(), 36, "{path}: {id}");
        }
        let mut client = Client::connect(system.address).await;
        client.post_bytes(path, "x-request-id: mine\r\n", body.as_bytes()).await;
        assert_eq!(client.answer().await.header("x-request-id"), Some("mine"), "{path}");
    }
}

#[tokio::test]
async fn no_page_of_another_site_reaches_the_admin_listener() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let verb = format!("POST /engines/{}/drain HTTP/1.1\r\ncontent-length: 0\r\n", d.address);
    for lines in [
        "host: localhost\r\norigin: https://evil.test",
        "host: localhost\r\nsec-fetch-site: cross-site",
        "host: evil.test",
    ] {
        let refused = sent(&system, &format!("{verb}{lines}\r\n\r\n")).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (403, &Value::from(403)), "{lines}");
    }
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200, "not drained");
    assert_eq!(sent(&system, &format!("{verb}host: localhost:8081\r\n\r\n")).await.status, 200);
}

#[tokio::test]
async fn only_the_body_of_a_dry_run_is_read() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes: 2048}").await;
    // Answered although the body never arrives.
    let head = "HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000\r\n\r\n";
    assert_eq!(sent(&system, &format!("GET /config {head}")).await.status, 200);
    assert_eq!(sent(&system, &format!("POST /engines/{}/drain {head}", d.address)).await.status, 200);
    assert_eq!(sent(&system, &format!("POST /engines/{}/undrain {head}", d.address)).await.status, 200);
    let large = serde_json::json!({"model": "m", "prompt": "x".repeat(3000)});
    assert_eq!(post(system.admin, "/dry-run?path=/v1/completions", &large).await.status, 413);
    let small = serde_json::json!({"model": "m", "prompt": "x".repeat(1000)});
    assert_eq!(post(system.admin, "/dry-run?path=/v1/completions", &small).await.status, 200);
}
