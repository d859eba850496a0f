//! Every endpoint: the requests at the engines, with unchanged bytes of the client, and unsupported endpoints.

use serde_json::json;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, event};
use crate::harness::system::TestRouter;
use crate::operations::health::{error_body, standing, stands};

#[tokio::test]
async fn a_response_is_prefilled_and_decoded_streamed_or_not() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::scripted(vec![Action::Whole(5), Action::Stream(3)]).await;
    let system = TestRouter::with(&[&p], &[&d], "    responses: native", "").await;
    let mut body = json!({"model": "alias", "input": "hello", "max_output_tokens": 8, "store": true, "own": {"x": 1.50}});
    assert_eq!(post(system.address, "/v1/responses", &body).await.status, 200);
    body["stream"] = json!(true);
    let mut client = Client::connect(system.address).await;
    client.post("/v1/responses", &body).await;
    assert_eq!(client.head().await.0, 200);
    let mut all = String::new();
    while let Some(chunk) = client.chunk().await {
        all.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(all.starts_with(&event(0)) && !all.contains("error"), "{all}");
    for sent in p.received() {
        assert_eq!((sent.path.as_str(), &sent.body["max_output_tokens"]), ("/v1/responses", &json!(1)));
        assert_eq!((&sent.body["stream"], &sent.body["store"]), (&json!(false), &json!(false)));
        assert_eq!((&sent.body["model"], sent.body.get("max_tokens")), (&json!("m"), None));
        assert_eq!(sent.body["kv_transfer_params"]["do_remote_decode"], true);
    }
    for sent in d.received() {
        assert_eq!((&sent.body["max_output_tokens"], &sent.body["own"]), (&json!(8), &json!({"x": 1.5})));
        assert_eq!(sent.body["kv_transfer_params"]["do_remote_prefill"], true);
    }
    let missing = post(system.address, "/v1/responses", &json!({"model": "m"})).await;
    assert_eq!((missing.status, missing.json()["error"]["param"].as_str()), (400, Some("input")));
    let long = post(system.address, "/v1/responses", &json!({"input": "x", "max_output_tokens": -1})).await;
    assert!(long.text().contains("max_output_tokens"), "{}", long.text());
}

#[tokio::test]
async fn engine_specific_fields_reach_both_legs_unchanged() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(2)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "structured_outputs": {"regex": "a+"},
    });
    assert_eq!(post(system.address, "/v1/chat/completions", &body).await.status, 200);
    for sent in p.received().into_iter().chain(d.received()) {
        for (name, value) in body.as_object().unwrap() {
            assert_eq!(&sent.body[name.as_str()], value, "{name}");
        }
    }
}

#[tokio::test]
async fn embeddings_and_scores_go_to_one_engine_with_every_field() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for path in ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"] {
        let body =
            r#"{"model":"alias","input":["a","b"],"dimensions":3,"number":0.10000000000000000555,"rid":"x"}"#;
        let mut client = Client::connect(system.address).await;
        client.post_bytes(path, "", body.as_bytes()).await;
        assert_eq!(client.answer().await.status, 200, "{path}");
        let sent = d.received().pop().unwrap();
        assert_eq!(sent.path, path);
        assert_eq!(
            String::from_utf8(sent.raw.to_vec()).unwrap(),
            r#"{"model":"m","input":["a","b"],"dimensions":3,"number":0.10000000000000000555}"#
        );
    }
    let odd = post(system.address, "/v1/embeddings", &json!({"model": 7, "input": "x"})).await;
    assert_eq!(odd.status, 400);
    let other = post(system.address, "/v1/embeddings", &json!({"model": "other", "input": "x"})).await;
    assert_eq!((other.status, other.code().as_str()), (404, "model_not_found"));
}

#[tokio::test]
async fn embeddings_in_bytes_keep_content_type_and_metadata() {
    // Larger than the buffer for generated responses.
    let bytes: Vec<u8> = (0..3_u32 << 20).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let metadata = r#"{"data":[{"shape":[2]}],"usage":{"prompt_tokens":3}}"#;
    let headers = vec![("content-type", "application/octet-stream"), ("metadata", metadata), ("x-own", "1")];
    let d = FakeEngine::always(Action::Bytes(headers, bytes.clone())).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let body = json!({"model": "m", "input": "a", "encoding_format": "bytes"});
    let answer = post(system.address, "/v1/embeddings", &body).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/octet-stream")));
    assert_eq!((answer.header("metadata"), answer.header("x-own")), (Some(metadata), None));
    assert!(answer.body == bytes);
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"passed\",code=\"2xx\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn embedding_failures_count_against_the_engine() {
    let broken = FakeEngine::always(Action::Refuse(500, error_body("x"))).await;
    let good = FakeEngine::always(Action::Whole(1)).await;
    let top = "health: {active: {interval_ms: 0}, breaker: {failures: 3, cool_down_ms: 60000, cool_down_max_ms: 60000}}";
    let system = TestRouter::with(&[], &[&broken, &good], "", top).await;
    let body = json!({"model": "m", "input": "a"});
    for _ in 0..12 {
        assert_eq!(post(system.address, "/v1/embeddings", &body).await.status, 200);
    }
    assert_eq!(broken.received().len(), 3);
    assert_eq!(standing(&system, &broken, "decode").await, "ejected");
    let failed = format!("baton_router_engine_errors_total{{engine=\"{}\",leg=\"decode\"}}", broken.address);
    system.counts(&failed, 3.0).await;
    // No engine is left: the request fails, and its error names its model.
    let address = good.address;
    good.die().await;
    let refused = post(system.address, "/v1/embeddings", &body).await;
    assert!(refused.status >= 502, "{}", refused.status);
    system.counts("baton_router_requests_total{model=\"m\",outcome=\"decode_exhausted\"}", 1.0).await;
    let good = FakeEngine::back_at(address, Action::Whole(1)).await;
    assert_eq!(post(system.address, "/v1/embeddings", &body).await.status, 200, "it is there again");
    stands(&system, &good, "decode", "usable").await;
}

#[tokio::test]
async fn an_embedding_takes_no_longer_than_its_model_allows() {
    let d = FakeEngine::always(Action::Hang).await;
    for (bounds, status) in [("request_ms: 100", 504), ("decode_first_byte_ms: 100", 504)] {
        let more = format!("    timeouts: {{{bounds}}}");
        let system = TestRouter::with(&[], &[&d], &more, "attempts: {decode: 1}").await;
        let refused = post(system.address, "/v1/embeddings", &json!({"model": "m", "input": "a"})).await;
        assert_eq!(refused.status, status, "{bounds}: {}", refused.text());
        system.settled().await;
    }
}

#[tokio::test]
async fn the_clients_numbers_are_forwarded_digit_for_digit() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let body = r#"{"model":"m","prompt":"a\u00e9\/","temperature":0.10000000000000000555,"x": [1E2, 12345678901234567890123]}"#;
    let mut client = Client::connect(system.address).await;
    client.post_bytes("/v1/completions", "", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    for sent in [p.received(), d.received()].concat() {
        let raw = String::from_utf8(sent.raw.to_vec()).unwrap();
        let as_it_came = r#""prompt":"a\u00e9\/","temperature":0.10000000000000000555,"x": [1E2, 12345678901234567890123]}"#;
        assert!(raw.ends_with(as_it_came), "{raw}");
        assert_eq!(sent.headers["content-length"], raw.len().to_string().as_str());
    }
}

#[tokio::test]
async fn heads_and_options_are_answered_and_unknown_paths_are_not() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.send(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let (status, head) = client.head().await;
    assert_eq!(status, 200);
    assert!(head.to_ascii_lowercase().contains("content-length: 15"), "{head}");
    client.send(b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("allow")), (200, Some("POST, OPTIONS")));
    for path in [
        "/",
        "/v1",
        "/v1/completions/",
        "/V1/completions",
        "/v1//completions",
        "/kv/release",
        "/abort_requests",
    ] {
        let answer = get(system.address, path).await;
        assert_eq!((answer.status, answer.code().as_str()), (404, "not_found"), "{path}");
    }
    client.post("/v1/completions", &completion(false)).await;
    assert_eq!(client.answer().await.status, 200, "the connection lives on");
}

#[tokio::test]
async fn an_unsupported_endpoint_is_reported_as_unsupported() {
    let bare = br#"{"detail":"Not Found"}"#.to_vec();
    let d = FakeEngine::always(Action::Answer(404, vec![("content-type", "application/json")], bare)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for (path, body) in [
        ("/v1/embeddings", json!({"model": "m", "input": "a"})),
        ("/v1/chat/completions", json!({"model": "m", "messages": [{"role": "user", "content": "a"}]})),
    ] {
        let refused = post(system.address, path, &body).await;
        assert_eq!((refused.status, refused.code().as_str()), (404, "unsupported_endpoint"), "{path}");
        assert!(refused.text().contains("the engines of this model"), "{}", refused.text());
    }
    stands(&system, &d, "decode", "usable").await;
    for path in ["/v1/moderations", "/v1/audio/speech", "/v1/responses/resp_1"] {
        let refused = post(system.address, path, &json!({"model": "m"})).await;
        assert_eq!((refused.status, refused.code().as_str()), (404, "unsupported_endpoint"), "{path}");
    }
    let typed = post(system.address, "/v1/completionss", &json!({})).await;
    assert_eq!((typed.status, typed.code().as_str()), (404, "not_found"));
    assert_eq!(d.received().len(), 2);
}

#[tokio::test]
async fn a_models_name_is_encoded_as_the_sdks_do_and_slashes_get_a_hint() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let yaml = format!(
        "listen: 127.0.0.1:0\nmodels:\n  - {{name: 'org/tiny: 1', decode: {{engines: [{{url: '{}'}}]}}}}\n",
        d.url()
    );
    let system = TestRouter::of(&yaml).await;
    for name in ["org%2Ftiny%3A%201", "org/tiny:%201", "org%2ftin%79:%201"] {
        let card = get(system.address, &format!("/v1/models/{name}")).await;
        assert_eq!((card.status, &card.json()["id"]), (200, &json!("org/tiny: 1")), "{name}");
    }
    for (name, status) in [("org%2Ftiny", 404), ("a%2", 400), ("a%zz", 400), ("%ff", 400)] {
        assert_eq!(get(system.address, &format!("/v1/models/{name}")).await.status, status, "{name}");
    }
    for path in ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions"] {
        let refused = post(system.address, path, &json!({})).await;
        assert_eq!(refused.status, 404, "{path}");
        assert!(refused.text().contains("did you mean /v1/chat/completions?"), "{}", refused.text());
    }
}

#[tokio::test]
async fn a_models_card_has_the_least_context_of_its_engines_queried_once_a_minute() {
    let with_context = |length: u64| {
        Action::Json(json!({"data": [{"id": "x", "max_model_len": 9}, {"id": "m", "max_model_len": length}]}))
    };
    let (p, d) = (FakeEngine::always(with_context(40)).await, FakeEngine::always(with_context(64)).await);
    let silent = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::start(&[&p], &[&d, &silent]).await;
    for _ in 0..3 {
        let models = get(system.address, "/v1/models").await.json();
        let lengths: Vec<_> =
            models["data"].as_array().unwrap().iter().map(|card| card["max_model_len"].clone()).collect();
        assert_eq!(lengths, [json!(40), json!(40)], "the model and its alias");
        assert_eq!(get(system.address, "/v1/models/alias").await.json()["max_model_len"], 40);
    }
    assert_eq!([&p, &d, &silent].map(FakeEngine::model_lists), [1, 1, 1], "and not waited for again");
    // An engine that does not report its context length.
    let unsaid = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&unsaid]).await;
    let card = get(system.address, "/v1/models/m").await.json();
    assert_eq!((&card["id"], card.get("max_model_len")), (&json!("m"), None));
}
