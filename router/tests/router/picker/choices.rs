//! What is chosen: policies, subset hints, fallbacks, prefill engines, fields of clients.

use std::net::SocketAddr;

use crate::harness::client::get;
use crate::picker::gateway::{
    DESTINATION, GatewayStream, TestPicker, completion, head, piece, pool, response_head, response_piece,
};

/// Addresses of engines. No connection is made to them: health checks are off.
fn engines(count: u16) -> Vec<SocketAddr> {
    (1..=count).map(|n| SocketAddr::from(([127, 0, 0, 1], 7000 + n))).collect()
}

#[tokio::test]
async fn header_and_metadata_name_the_engine_and_the_body_goes_back_whole() {
    let all = engines(1);
    let picker = TestPicker::of(&all, "round_robin", None).await;
    let prompt = "x".repeat(200_000);
    let mut stream = picker.stream().await;
    stream
        .send(head(&[(DESTINATION, "10.9.9.9:1"), ("x-prefiller-host-port", "10.9.9.9:1")], None, false))
        .await;
    let body = completion(&prompt);
    for part in body.as_bytes().chunks(36_000) {
        stream.send(piece(part, false)).await;
    }
    stream.send(piece(b"", true)).await;
    let choice = stream.choice().await;
    assert_eq!(choice.destination, all[0].to_string(), "the client's own value is overwritten");
    assert_eq!(choice.metadata, choice.destination);
    assert!(choice.removed.iter().any(|name| name == "x-prefiller-host-port"), "{choice:?}");
    let sent: serde_json::Value = serde_json::from_slice(&stream.body().await).unwrap();
    assert_eq!(sent, serde_json::from_str::<serde_json::Value>(&body).unwrap());
    stream.respond("200").await;
    picker.settled().await;
    picker.counts("baton_picker_requests_total{outcome=\"forwarded\"}", 1.0).await;
}

#[tokio::test]
async fn policies_choose_as_in_the_router() {
    let all = engines(3);
    let picker = TestPicker::of(&all, "round_robin", None).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (destination, mut stream) = picker.destination("p").await;
        stream.body().await;
        stream.respond("200").await;
        seen.push(destination);
    }
    seen.sort();
    assert_eq!(seen, all.iter().map(ToString::to_string).collect::<Vec<_>>());
    // The least loaded engine: a stream that stays open counts as a request there.
    let picker = TestPicker::of(&all, "least_load", None).await;
    let (first, _open) = picker.destination("p").await;
    let (second, _open_too) = picker.destination("p").await;
    let (third, _open_as_well) = picker.destination("p").await;
    let mut seen = vec![first, second, third];
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 3);
}

#[tokio::test]
async fn a_prompt_returns_to_the_engine_that_has_its_prefix() {
    let all = engines(4);
    let picker = TestPicker::of(&all, "prefix_aware", None).await;
    let prompt = "a conversation that is long enough for several chunks ".repeat(40);
    let (first, mut stream) = picker.destination(&prompt).await;
    stream.body().await;
    stream.respond("200").await;
    for turn in 0..3 {
        let (next, mut stream) = picker.destination(&format!("{prompt} and turn {turn}")).await;
        assert_eq!(next, first);
        stream.body().await;
        stream.respond("200").await;
    }
    // The coordinator's question for a cached prefix.
    let conditional = [("prefer", "if-available")];
    let mut stream = picker.request(&conditional, &completion(&prompt)).await;
    assert_eq!(stream.choice().await.destination, first);
    let mut stream = picker.request(&conditional, &completion(&"unknown ".repeat(200))).await;
    assert_eq!(stream.refusal().await.0, 412);
}

async fn with_subset(picker: &TestPicker, subset: &str) -> GatewayStream {
    let mut stream = picker.stream().await;
    stream.send(head(&[], Some(subset), false)).await;
    stream.send(piece(completion("p").as_bytes(), true)).await;
    stream
}

#[tokio::test]
async fn a_subset_restricts_the_choice_and_an_empty_one_refuses() {
    let all = engines(4);
    let picker = TestPicker::of(&all, "round_robin", None).await;
    for _ in 0..3 {
        let mut stream = with_subset(&picker, &format!("10.0.0.1:1, {}", all[2])).await;
        assert_eq!(stream.choice().await.destination, all[2].to_string());
    }
    for empty in ["", "10.0.0.1:1"] {
        let mut stream = with_subset(&picker, empty).await;
        let (status, headers, _) = stream.refusal().await;
        assert_eq!(status, 503, "{empty}");
        assert!(
            headers.contains_key("retry-after") && headers.contains_key("x-llm-d-request-dropped-reason")
        );
    }
    picker.counts("baton_picker_requests_total{outcome=\"unavailable\"}", 2.0).await;
}

#[tokio::test]
async fn fallbacks_follow_the_choice_only_if_configured() {
    let all = engines(3);
    let model = format!("    decode: {}", pool(&all, "round_robin", None));
    let picker = TestPicker::start(&model, "picker: {fallbacks: 2}\n").await;
    let (destination, _stream) = picker.destination("p").await;
    let mut named: Vec<_> = destination.split(',').map(str::to_owned).collect();
    assert_eq!(named.len(), 3, "{destination}");
    named.sort();
    assert_eq!(named, all.iter().map(ToString::to_string).collect::<Vec<_>>());
    let mut stream = with_subset(&picker, &format!("{},{}", all[0], all[1])).await;
    assert_eq!(stream.choice().await.destination.split(',').count(), 2, "inside the subset");
}

#[tokio::test]
async fn a_remote_prefill_is_a_header_for_the_sidecar() {
    let all = engines(2);
    let model = format!(
        "    prefill: {}\n    decode: {}",
        pool(&all[..1], "round_robin", None),
        pool(&all[1..], "round_robin", None)
    );
    let picker = TestPicker::start(&model, "").await;
    let mut stream = picker.request(&[], &completion("p")).await;
    let choice = stream.choice().await;
    assert_eq!(choice.destination, all[1].to_string());
    assert_eq!(choice.headers["x-prefiller-host-port"], all[0].to_string());
    // One handoff is one sequence of blocks.
    let several = r#"{"model": "m", "prompt": ["a", "b"]}"#;
    let choice = picker.request(&[], several).await.choice().await;
    assert!(!choice.headers.contains_key("x-prefiller-host-port"));
    assert!(choice.removed.iter().any(|name| name == "x-prefiller-host-port"));
    // The prefill engine's place is free with the response's head, the decode engine's with its end.
    let in_flight =
        |engine: SocketAddr| format!("baton_router_engine_requests_in_flight{{engine=\"{engine}\"}}");
    picker.counts(&in_flight(all[0]), 1.0).await;
    stream.body().await;
    stream.send(response_head("200", false)).await;
    stream.reply().await;
    picker.counts(&in_flight(all[0]), 0.0).await;
    picker.counts(&in_flight(all[1]), 1.0).await;
    stream.send(response_piece(b"", true)).await;
    stream.body().await;
    picker.counts(&in_flight(all[1]), 0.0).await;
}

#[tokio::test]
async fn internal_fields_of_a_client_reach_no_engine_and_names_are_replaced() {
    let all = engines(1);
    let picker = TestPicker::of(&all, "round_robin", None).await;
    let body = r#"{"model": "alias", "prompt": "p", "stream": true, "kv_transfer_params": {"remote_host": "evil"},
        "request_id": "r", "mystery": [1]}"#;
    let mut stream = picker.request(&[], body).await;
    stream.choice().await;
    let sent: serde_json::Value = serde_json::from_slice(&stream.body().await).unwrap();
    assert_eq!(sent, serde_json::json!({"model": "m", "prompt": "p", "stream": true, "mystery": [1]}));
    // The gateway's model replaces the client's, also one that is not served.
    let body = r#"{"model": "of a route", "prompt": "p"}"#;
    let mut stream = picker.request(&[("x-gateway-model-name-rewrite", "alias")], body).await;
    stream.choice().await;
    let sent: serde_json::Value = serde_json::from_slice(&stream.body().await).unwrap();
    assert_eq!(sent["model"], "m");
    let mut stream = picker.request(&[], body).await;
    assert_eq!(stream.refusal().await.0, 404);
}

#[tokio::test]
async fn headers_and_types_by_which_a_client_would_reach_past_the_picker_are_removed_or_refused() {
    let picker = TestPicker::of(&engines(1), "round_robin", None).await;
    let of_router = ["x-override-bootstrap-host", "x-override-rid", "x-baton-router-settles"];
    let headers = of_router.map(|name| (name, "1"));
    let choice = picker.request(&headers, &completion("p")).await.choice().await;
    for name in of_router {
        assert!(choice.removed.iter().any(|removed| removed == name), "{name}: {choice:?}");
    }
    // Servers differ in the line that they use.
    let repeated = [("content-type", "text/plain"), ("content-type", "application/json")];
    let (status, ..) = picker.request(&repeated, &completion("p")).await.refusal().await;
    assert_eq!(status, 415);
}

#[tokio::test]
async fn a_request_without_a_body_goes_to_an_engine_and_an_unknown_path_to_none() {
    let all = engines(1);
    let picker = TestPicker::of(&all, "round_robin", None).await;
    let mut stream = picker.stream().await;
    stream.send(head(&[(":method", "GET"), (":path", "/v1/models?x=1")], None, true)).await;
    assert_eq!(stream.choice().await.destination, all[0].to_string());
    for (method, path, status) in
        [("POST", "/kv/release", 404), ("POST", "/abort_requests", 404), ("GET", "/v1/completions", 405)]
    {
        let mut stream = picker.stream().await;
        stream.send(head(&[(":method", method), (":path", path)], None, true)).await;
        assert_eq!(stream.refusal().await.0, status, "{path}");
    }
}

#[tokio::test]
async fn keys_are_checked_and_stay_with_the_picker() {
    let all = engines(1);
    let model = format!("    decode: {}", pool(&all, "round_robin", None));
    let new = baton_router::NewKey::make();
    let top = format!(
        "auth:\n  keys:\n{}\n",
        new.entry("k", "t").lines().map(|line| format!("    {line}\n")).collect::<String>()
    );
    let picker = TestPicker::start(&model, &top).await;
    let mut stream = picker.request(&[], &completion("p")).await;
    assert_eq!(stream.refusal().await.0, 401);
    let bearer = format!("Bearer {}", new.key);
    let mut stream = picker.request(&[("authorization", &bearer)], &completion("p")).await;
    let choice = stream.choice().await;
    assert!(choice.removed.iter().any(|name| name == "authorization"), "{choice:?}");
    let sent: serde_json::Value = serde_json::from_slice(&stream.body().await).unwrap();
    assert!(sent["cache_salt"].is_string(), "the tenant's salt: {sent}");
}

#[tokio::test]
async fn a_choice_is_explained() {
    let all = engines(2);
    let picker = TestPicker::of(&all, "least_load", None).await;
    let mut stream = picker.request(&[("x-request-id", "mine")], &completion("p")).await;
    let choice = stream.choice().await;
    let explained = get(picker.admin, "/explain/mine").await.text();
    assert!(explained.contains(&choice.destination), "{explained}");
}
