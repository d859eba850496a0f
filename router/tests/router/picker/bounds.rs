//! Bounds on what a gateway may send, protocol errors, health services and the drain.

use std::net::SocketAddr;

use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProtocolConfiguration};
use tonic::Code;
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::engine::{Action, FakeEngine};
use crate::picker::gateway::{
    TestPicker, completion, connect, head, piece, pool, response_head, response_piece, trailers,
};

const ENGINE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7001);

async fn picker(top: &str) -> TestPicker {
    TestPicker::start(&format!("    decode: {}", pool(&[ENGINE], "round_robin", None)), top).await
}

#[tokio::test]
async fn an_oversized_body_is_refused_at_its_excess_and_a_declared_one_at_once() {
    let picker = picker("limits: {body_bytes: 2048}\n").await;
    let mut stream = picker.stream().await;
    stream.send(head(&[("content-length", "4096")], None, false)).await;
    assert_eq!(stream.refusal().await.0, 413);
    let mut stream = picker.stream().await;
    stream.send(head(&[], None, false)).await;
    for _ in 0..3 {
        stream.send(piece(&[b'x'; 1000], false)).await;
    }
    assert_eq!(stream.refusal().await.0, 413);
    picker.settled().await;
}

#[tokio::test]
async fn bodies_have_one_budget_that_is_free_again_after_each() {
    let picker = picker("limits: {body_bytes: 2000000, body_bytes_total: 2000000}\n").await;
    let mut holder = picker.stream().await;
    holder.send(head(&[], None, false)).await;
    holder.send(piece(&vec![b' '; 1_500_000], false)).await;
    picker.counts("baton_router_body_bytes", 1_500_000.0).await;
    let mut other = picker.stream().await;
    other.send(head(&[], None, false)).await;
    other.send(piece(&vec![b' '; 1_000_000], false)).await;
    assert_eq!(other.refusal().await.0, 429);
    holder.send(piece(completion("p").as_bytes(), true)).await;
    holder.choice().await;
    assert!(holder.body().await.len() > 40);
    // The stream is still open: its body is not held any more.
    picker.counts("baton_router_body_bytes", 0.0).await;
}

#[tokio::test]
async fn a_slow_request_is_refused_after_its_time() {
    let picker = picker("timeouts: {body_ms: 50}\n").await;
    let mut stream = picker.stream().await;
    stream.send(head(&[], None, false)).await;
    stream.send(piece(b"{", false)).await;
    assert_eq!(stream.refusal().await.0, 408);
    // A stream without any message ends, too.
    let mut silent = picker.stream().await;
    assert_eq!(silent.refusal().await.0, 408);
}

#[tokio::test]
async fn a_large_head_is_refused_and_so_are_more_requests_than_the_limit() {
    let picker = picker("limits: {head_bytes: 4096, in_flight: 1}\n").await;
    let large = "x".repeat(5000);
    let mut stream = picker.stream().await;
    stream.send(head(&[("x-large", &large)], None, false)).await;
    assert_eq!(stream.refusal().await.0, 400);
    let (_, open) = picker.destination("p").await;
    // The second stream waits in HTTP/2, because the connection may have one; another connection is refused.
    let mut stream = crate::picker::gateway::GatewayStream::open(connect(picker.address).await).await;
    stream.send(head(&[], None, false)).await;
    let (status, headers, _) = stream.refusal().await;
    assert_eq!(status, 429);
    assert!(headers.contains_key("retry-after"));
    drop(open);
    picker.settled().await;
}

#[tokio::test]
async fn messages_out_of_order_end_the_stream_with_an_error() {
    let picker = picker("").await;
    let whole = || vec![head(&[], None, false), piece(completion("p").as_bytes(), true)];
    let after = |message: ProcessingRequest| whole().into_iter().chain([message]).collect::<Vec<_>>();
    let orders: Vec<(&str, Vec<ProcessingRequest>)> = vec![
        ("a body first", vec![piece(b"{}", true)]),
        ("trailers first", vec![trailers()]),
        ("a response body first", vec![response_piece(b"x", false)]),
        ("two heads", vec![head(&[], None, false), head(&[], None, false)]),
        ("a head after the request", after(head(&[], None, true))),
        ("a body after its end", after(piece(b"x", false))),
        ("trailers after the end", after(trailers())),
        ("a response body without a head", after(response_piece(b"x", false))),
        ("two response heads", vec![response_head("200", false), response_head("200", false)]),
        ("no content", vec![ProcessingRequest::default()]),
    ];
    for (name, messages) in orders {
        let mut stream = picker.stream().await;
        for message in messages {
            stream.send(message).await;
        }
        let error = loop {
            match stream.next().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{name}: accepted"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.code(), Code::InvalidArgument, "{name}");
    }
    picker.settled().await;
    picker.counts("baton_picker_requests_total{outcome=\"protocol_error\"}", 10.0).await;
}

#[tokio::test]
async fn a_gateway_without_the_body_gets_the_setting_in_its_error() {
    let picker = picker("").await;
    let mut stream = picker.stream().await;
    let mut message = head(&[], None, false);
    message.protocol_config = Some(ProtocolConfiguration::default());
    stream.send(message).await;
    let error = stream.next().await.expect_err("refused");
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("FULL_DUPLEX_STREAMED"), "{error}");
}

async fn check(address: SocketAddr, service: &str) -> Result<i32, Code> {
    let mut client = HealthClient::new(connect(address).await);
    let request = HealthCheckRequest { service: service.to_owned() };
    client.check(request).await.map(|reply| reply.into_inner().status).map_err(|status| status.code())
}

#[tokio::test]
async fn health_services_follow_the_engines_and_the_drain() {
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let model = format!("    decode: {}", pool(&[engine.address], "round_robin", None));
    let picker =
        TestPicker::start(&model, "health: {active: {interval_ms: 20}}\ndrain_delay_ms: 60000\n").await;
    let serving = ServingStatus::Serving as i32;
    let until = |service: &'static str, wanted: bool| {
        let address = picker.health;
        async move {
            let begun = std::time::Instant::now();
            while (check(address, service).await == Ok(serving)) != wanted {
                assert!(begun.elapsed().as_secs() < 10, "{service} is not {wanted}");
            }
        }
    };
    for service in ["liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""] {
        until(service, true).await;
        assert_eq!(check(picker.address, service).await, Ok(serving), "on the gateways' listener too");
    }
    assert_eq!(check(picker.health, "other").await, Err(Code::NotFound));
    picker.shutdown.cancel();
    until("readiness", false).await;
    assert_eq!(check(picker.health, "liveness").await, Ok(serving));
    // Streams are still accepted for the delay.
    let (destination, _stream) = picker.destination("p").await;
    assert_eq!(destination, engine.address.to_string());
}

#[tokio::test]
async fn a_drain_waits_for_open_streams() {
    let mut picker = picker("").await;
    let (_, mut stream) = picker.destination("p").await;
    stream.body().await;
    picker.shutdown.cancel();
    stream.respond("200").await;
    let running = std::mem::replace(&mut picker.running, tokio::spawn(async {}));
    tokio::time::timeout(std::time::Duration::from_secs(10), running).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_engine_without_health_gets_no_request() {
    let engine = FakeEngine::always(Action::Whole(1)).await;
    let all = [engine.address, ENGINE];
    let model = format!("    decode: {}", pool(&all, "round_robin", None));
    // Nothing listens at the second address.
    let picker = TestPicker::start(&model, "health: {active: {interval_ms: 20}}\n").await;
    picker.counts("baton_router_pool_ready_engines{model=\"m\",leg=\"decode\"}", 1.0).await;
    for _ in 0..4 {
        let (destination, _stream) = picker.destination("p").await;
        assert_eq!(destination, engine.address.to_string());
    }
}
