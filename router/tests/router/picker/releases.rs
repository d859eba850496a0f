//! When an engine's place is free again: at the end of the response, at a cancel, at a reset, and in the queue.

use std::net::SocketAddr;

use crate::picker::gateway::{
    GatewayStream, TestPicker, completion, connect, head, piece, pool, response_head, response_piece,
    response_trailers, trailers,
};

const ENGINE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7001);

/// One engine with one place.
async fn one_place(top: &str) -> TestPicker {
    TestPicker::start(&format!("    decode: {}", pool(&[ENGINE], "round_robin", Some(1))), top).await
}

async fn waiting(picker: &TestPicker, priority: &str, requests: f64) {
    picker.counts(&format!("baton_router_queue_requests{{priority=\"{priority}\"}}"), requests).await;
}

/// Takes the place; the next request waits.
async fn taken(picker: &TestPicker) -> (GatewayStream, GatewayStream) {
    let (_, mut holder) = picker.destination("first").await;
    holder.body().await;
    let next = picker.request(&[], &completion("second")).await;
    waiting(picker, "normal", 1.0).await;
    (holder, next)
}

#[tokio::test]
async fn the_end_of_a_response_frees_the_place_however_it_ends() {
    for end in ["body", "trailers", "head", "closed"] {
        let picker = one_place("").await;
        let (mut holder, mut next) = taken(&picker).await;
        match end {
            "body" => holder.respond("200").await,
            "trailers" => {
                holder.send(response_head("200", false)).await;
                holder.reply().await;
                holder.send(response_piece(b"x", false)).await;
                holder.reply().await;
                waiting(&picker, "normal", 1.0).await;
                holder.send(response_trailers()).await;
                holder.reply().await;
            }
            "head" => {
                holder.send(response_head("204", true)).await;
                holder.reply().await;
            }
            // A gateway that sends no response messages closes the stream at the end of the request.
            _ => holder.close(),
        }
        assert_eq!(next.choice().await.destination, ENGINE.to_string(), "{end}");
        drop((holder, next));
        picker.settled().await;
    }
}

#[tokio::test]
async fn a_cancel_frees_the_place_before_and_during_the_response_and_in_the_queue() {
    let picker = one_place("").await;
    let (holder, mut next) = taken(&picker).await;
    // The gateway resets the stream as soon as its client leaves.
    drop(holder);
    next.choice().await;
    next.body().await;
    next.send(response_head("200", false)).await;
    next.reply().await;
    let mut third = picker.request(&[], &completion("third")).await;
    let fourth = picker.request(&[], &completion("fourth")).await;
    waiting(&picker, "normal", 2.0).await;
    drop(fourth);
    waiting(&picker, "normal", 1.0).await;
    drop(next);
    third.choice().await;
    drop(third);
    picker.settled().await;
    picker.counts("baton_picker_requests_total{outcome=\"client_gone\"}", 1.0).await;
    picker.counts("baton_picker_requests_total{outcome=\"forwarded\"}", 3.0).await;
}

#[tokio::test]
async fn a_request_that_ends_before_its_choice_costs_no_tokens() {
    let key = baton_router::NewKey::make();
    let limits = "limits: {tokens_per_minute: 100}";
    let auth = format!("auth: {{keys: [{{id: a, hash: '{}', tenant: t, {limits}}}]}}\n", key.hash);
    let picker = one_place(&auth).await;
    let bearer = format!("Bearer {}", key.key);
    let headers = [("authorization", bearer.as_str())];
    let mut holder = picker.request(&headers, &completion("p")).await;
    holder.choice().await;
    holder.body().await;
    // More than half of the limit, so that two of them never fit.
    let large = serde_json::json!({"model": "m", "prompt": "x".repeat(150), "max_tokens": 20}).to_string();
    for gateway_answers in [false, true, false] {
        let mut waits = picker.request(&headers, &large).await;
        waiting(&picker, "normal", 1.0).await;
        if gateway_answers {
            waits.send(response_head("504", false)).await;
            waits.reply().await;
        }
        drop(waits);
        waiting(&picker, "normal", 0.0).await;
    }
}

#[tokio::test]
async fn a_gateway_that_disappears_frees_all_its_places() {
    let picker = one_place("").await;
    let mut lost = GatewayStream::open(connect(picker.address).await).await;
    lost.send(head(&[], None, false)).await;
    lost.send(piece(completion("p").as_bytes(), true)).await;
    lost.choice().await;
    let mut next = picker.request(&[], &completion("second")).await;
    waiting(&picker, "normal", 1.0).await;
    // The only stream of its connection: the connection closes with it.
    drop(lost);
    next.choice().await;
}

#[tokio::test]
async fn a_response_of_the_gateway_itself_ends_a_wait() {
    let picker = one_place("").await;
    let (_holder, mut next) = taken(&picker).await;
    next.send(response_head("504", false)).await;
    next.reply().await;
    waiting(&picker, "normal", 0.0).await;
    next.send(response_piece(b"timeout", true)).await;
    assert_eq!(next.body().await, b"timeout");
    assert!(next.next().await.unwrap().is_none());
    picker.counts("baton_picker_requests_total{outcome=\"client_gone\"}", 1.0).await;
}

#[tokio::test]
async fn a_full_queue_sheds_with_a_reason_and_an_objective_goes_first() {
    let picker = one_place("queue: {requests: 2}\npicker: {objectives: {chat: high, batch: low}}\n").await;
    let (_, mut holder) = picker.destination("first").await;
    holder.body().await;
    let objective = "x-gateway-inference-objective";
    let mut batch = picker.request(&[(objective, "batch")], &completion("b")).await;
    waiting(&picker, "low", 1.0).await;
    let mut chat = picker.request(&[(objective, "chat")], &completion("c")).await;
    waiting(&picker, "high", 1.0).await;
    let (status, headers, error) = picker.request(&[], &completion("x")).await.refusal().await;
    assert_eq!(status, 429);
    assert_eq!(headers["x-llm-d-request-dropped-reason"], error["error"]["code"].as_str().unwrap());
    assert!(headers.contains_key("retry-after"));
    holder.respond("200").await;
    chat.choice().await;
    waiting(&picker, "low", 1.0).await;
    drop(chat);
    batch.choice().await;
}

#[tokio::test]
async fn fairness_ids_share_the_queue() {
    let picker = one_place("queue: {tenant_requests: 1}\n").await;
    let (_, mut holder) = picker.destination("first").await;
    holder.body().await;
    let id = "x-gateway-inference-fairness-id";
    let _a = picker.request(&[(id, "a")], &completion("1")).await;
    waiting(&picker, "normal", 1.0).await;
    let (status, ..) = picker.request(&[(id, "a")], &completion("2")).await.refusal().await;
    assert_eq!(status, 429, "one id has its share only");
    let _b = picker.request(&[(id, "b")], &completion("3")).await;
    waiting(&picker, "normal", 2.0).await;
}

#[tokio::test]
async fn request_trailers_end_a_request_too() {
    let picker = one_place("").await;
    let mut stream = picker.stream().await;
    stream.send(head(&[], None, false)).await;
    stream.send(piece(completion("p").as_bytes(), false)).await;
    stream.send(trailers()).await;
    stream.choice().await;
    stream.reply().await;
    let reply = stream.reply().await;
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
    assert!(matches!(reply.response, Some(Response::RequestTrailers(_))), "{reply:?}");
}
