//! Ends of streams and connections, frame by frame: what each means for the requests on them.

use tokio::net::TcpListener;

use crate::harness::client::{Client, completion};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::raw_http2::{GOAWAY, HEADERS, PING, RST_STREAM, RawHttp2};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";
const EVENT: &str = "data: {\"token\":0}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const CANCEL: u32 = 8;
const INTERNAL_ERROR: u32 = 2;
const REFUSED_STREAM: u32 = 7;

/// A router in front of this address and of further engines, in this order.
async fn router(listener: &TcpListener, more: &[&FakeEngine], top: &str) -> TestRouter {
    let urls = more.iter().map(|engine| engine.url());
    let first = format!("http://{}", listener.local_addr().unwrap());
    let engines: Vec<_> = std::iter::once(first).chain(urls).map(|url| format!("{{url: '{url}'}}")).collect();
    TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         models: [{{name: m, protocol: vllm, http2: on, decode: {{policy: round_robin, engines: [{}]}}}}]\n{top}\n",
        engines.join(", ")
    ))
    .await
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

async fn sent(system: &TestRouter) -> Client {
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(true)).await;
    client
}

/// Two streams of one connection that have sent a head and an event, and their clients.
async fn two_streams(system: &TestRouter, engine: &mut RawHttp2, first: Client) -> [(u32, Client); 2] {
    let mut clients = Vec::new();
    for client in [Some(first), None] {
        let mut client = match client {
            Some(client) => client,
            None => sent(system).await,
        };
        let stream = engine.request().await;
        engine.head(stream).await;
        engine.data(stream, EVENT, false).await;
        assert_eq!(client.head().await.0, 200);
        assert_eq!(client.event().await.as_deref(), Some(EVENT));
        clients.push((stream, client));
    }
    clients.try_into().ok().expect("two")
}

#[tokio::test]
async fn a_request_that_an_engine_does_not_begin_before_it_closes_is_sent_again() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let [(one, mut first), (three, mut second)] = two_streams(&system, &mut engine, first).await;
    let mut third = sent(&system).await;
    let five = engine.request().await;
    assert_eq!([one, three, five], [1, 3, 5]);
    engine.go_away(three).await;
    let mut next = RawHttp2::accept(&listener, &[]).await;
    let again = next.request().await;
    next.head(again).await;
    next.data(again, DONE, true).await;
    assert!(third.answer().await.text().ends_with(DONE));
    // Those that the engine has begun continue.
    for (stream, client) in [(one, &mut first), (three, &mut second)] {
        engine.data(stream, DONE, true).await;
        assert_eq!(client.event().await.as_deref(), Some(DONE));
    }
    assert!(engine.until(GOAWAY).await.payload.len() >= 8);
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 3.0).await;
}

#[tokio::test]
async fn a_refused_stream_counts_as_not_reached() {
    let listener = listener().await;
    let other = FakeEngine::always(Action::Stream(1)).await;
    let system = router(&listener, &[&other], "").await;
    let mut clients = vec![sent(&system).await, sent(&system).await];
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let stream = engine.request().await;
    engine.reset(stream, REFUSED_STREAM).await;
    for client in &mut clients {
        assert!(client.answer().await.text().ends_with(DONE));
    }
    assert_eq!(other.received().len(), 2);
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 2.0).await;
}

#[tokio::test]
async fn a_connection_that_breaks_ends_all_its_streams() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let streams = two_streams(&system, &mut engine, first).await;
    drop(engine);
    for (_, mut client) in streams {
        let error = client.event().await.expect("an error");
        assert!(error.contains("\"error\""), "{error}");
    }
    system.settled().await;
}

/// The engine has the request: a replay would compute it twice under one id.
#[tokio::test]
async fn a_request_on_a_busy_connection_that_breaks_is_not_sent_again() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let _streams = two_streams(&system, &mut engine, first).await;
    let mut third = sent(&system).await;
    engine.request().await;
    drop(engine);
    assert_eq!(third.answer().await.status, 502);
    assert_eq!(system.metric("baton_router_engine_replays_total").await, 0.0);
}

#[tokio::test]
async fn a_request_on_a_connection_that_was_idle_is_sent_again() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let mut first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let stream = engine.request().await;
    engine.head(stream).await;
    engine.data(stream, DONE, true).await;
    assert!(first.answer().await.text().ends_with(DONE));
    system.settled().await;
    let mut second = sent(&system).await;
    engine.request().await;
    drop(engine);
    let mut next = RawHttp2::accept(&listener, &[]).await;
    let again = next.request().await;
    next.head(again).await;
    next.data(again, DONE, true).await;
    assert!(second.answer().await.text().ends_with(DONE));
    assert_eq!(system.metric("baton_router_engine_replays_total").await, 1.0);
}

#[tokio::test]
async fn a_reset_by_the_engine_ends_one_stream() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let [(one, mut first), (three, mut second)] = two_streams(&system, &mut engine, first).await;
    engine.reset(one, INTERNAL_ERROR).await;
    let error = first.event().await.expect("an error");
    assert!(error.contains("\"error\""), "{error}");
    // Before the head it is an error of the engine, too, and no reason to send the request again.
    let mut third = sent(&system).await;
    let five = engine.request().await;
    engine.reset(five, INTERNAL_ERROR).await;
    assert_eq!(third.answer().await.status, 502);
    engine.data(three, DONE, true).await;
    assert_eq!(second.event().await.as_deref(), Some(DONE));
    system.settled().await;
}

#[tokio::test]
async fn an_end_without_the_rest_of_the_body_is_an_error() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let [(one, mut first), _second] = two_streams(&system, &mut engine, first).await;
    // NO_ERROR shows a complete reply only after its end.
    engine.reset(one, 0).await;
    let error = first.event().await.expect("an error");
    assert!(error.contains("\"error\""), "{error}");
}

#[tokio::test]
async fn a_cancel_sends_a_reset_with_the_reason_cancel() {
    let listener = listener().await;
    let system = router(&listener, &[], "").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let [(_, first), (three, second)] = two_streams(&system, &mut engine, first).await;
    second.hang_up(crate::harness::client::DisconnectKind::Fin);
    let reset = engine.until(RST_STREAM).await;
    assert_eq!((reset.stream, reset.payload.as_slice()), (three, &CANCEL.to_be_bytes()[..]));
    // Frames that cross the reset are no error.
    for _ in 0..2_000 {
        engine.data(three, EVENT, false).await;
    }
    let mut third = sent(&system).await;
    let five = engine.request().await;
    engine.head(five).await;
    engine.data(five, DONE, true).await;
    assert!(third.answer().await.text().ends_with(DONE), "the connection is in use");
    drop(first);
}

#[tokio::test]
async fn interim_heads_are_skipped_and_bounded_and_trailers_end_a_stream() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let mut client = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let stream = engine.request().await;
    engine.early_hints(stream).await;
    engine.early_hints(stream).await;
    engine.head(stream).await;
    engine.data(stream, DONE, false).await;
    engine.trailers(stream).await;
    assert!(client.answer().await.text().ends_with(DONE));
    let mut client = sent(&system).await;
    let stream = engine.request().await;
    for _ in 0..20 {
        engine.early_hints(stream).await;
    }
    assert_eq!(engine.until(RST_STREAM).await.stream, stream);
    assert_eq!(client.answer().await.status, 502);
}

#[tokio::test]
async fn a_head_beyond_the_bound_ends_one_stream() {
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let first = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    let [(_, mut first), (three, mut second)] = two_streams(&system, &mut engine, first).await;
    let mut third = sent(&system).await;
    let five = engine.request().await;
    engine.long_head(five).await;
    assert_eq!(third.answer().await.status, 502);
    engine.data(three, DONE, true).await;
    assert_eq!(second.event().await.as_deref(), Some(DONE));
    engine.data(1, DONE, true).await;
    assert_eq!(first.event().await.as_deref(), Some(DONE));
}

#[tokio::test]
async fn a_body_waits_for_the_engines_window_and_a_command_does_not() {
    // The engine's window for each stream is empty at first.
    let listener = listener().await;
    let system = router(&listener, &[], "attempts: {decode: 1}").await;
    let client = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[(4, 0)]).await;
    let head = engine.until(HEADERS).await;
    client.hang_up(crate::harness::client::DisconnectKind::Fin);
    let reset = engine.until(RST_STREAM).await;
    assert_eq!(reset.stream, head.stream, "the cancel does not wait for the body");
    let mut command = RawHttp2::accept(&listener, &[]).await;
    let abort = command.request().await;
    command.head(abort).await;
    command.data(abort, "{}", true).await;
}

#[tokio::test]
async fn a_silent_connection_is_pinged_and_closed_without_an_answer() {
    let listener = listener().await;
    let top = "attempts: {decode: 1}\ntimeouts: {engine_lost_ms: 1000}";
    let system = router(&listener, &[], top).await;
    let mut client = sent(&system).await;
    let mut engine = RawHttp2::accept(&listener, &[]).await;
    engine.request().await;
    let ping = engine.until(PING).await;
    engine.send(PING, 1, 0, &ping.payload).await;
    let again = engine.until(PING).await;
    assert_eq!(again.flags, 0, "an answer keeps the connection");
    while engine.frame().await.is_some() {}
    assert_eq!(client.answer().await.status, 502);
}

#[tokio::test]
async fn an_engine_without_settings_is_not_reached() {
    let listener = listener().await;
    let address = listener.local_addr().unwrap();
    let other = FakeEngine::always(Action::Stream(1)).await;
    let system = router(&listener, &[&other], "").await;
    let served = tokio::spawn(async move {
        let engine = RawHttp2::accept(&listener, &[(3, 0)]).await;
        // It allows no stream and closes.
        drop(engine);
        drop(listener);
    });
    let mut clients = vec![sent(&system).await, sent(&system).await];
    for client in &mut clients {
        assert!(client.answer().await.text().ends_with(DONE), "{address}");
    }
    eventually("it was tried", || served.is_finished()).await;
}
