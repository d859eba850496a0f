//! HTTP/2 by hand: floods, broken framing and abused headers. Each ends its stream or its connection, and no engine
//! receives a request.

use std::time::Duration;

use crate::harness::client::{completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::http2::{
    ACK, COMPLETION, CONTINUATION, DATA, END_HEADERS, END_STREAM, FrameClient, GOAWAY, HEADERS, PING,
    PREFACE, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE, block, frame,
};
use crate::harness::system::TestRouter;

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const ENHANCE_YOUR_CALM: u32 = 11;

async fn system(top: &str) -> (FakeEngine, TestRouter) {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", top).await;
    (d, system)
}

/// The head of a request to generate, with these fields instead of those of the same names, or after them.
fn with(changed: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    let is_changed = |name: &str| changed.iter().any(|(other, _)| *other == name);
    let mut fields: Vec<_> = COMPLETION.into_iter().filter(|(name, _)| !is_changed(name)).collect();
    let pseudo = changed.iter().filter(|(name, _)| name.starts_with(':'));
    fields.splice(0..0, pseudo.copied());
    fields.extend(changed.iter().filter(|(name, _)| !name.starts_with(':')));
    fields
}

#[tokio::test]
async fn floods_end_their_connection_and_no_other() {
    let (d, system) = system("").await;
    let open = frame(HEADERS, END_HEADERS, 1, &block(&COMPLETION));
    let many = |frame: Vec<u8>, times: usize| frame.repeat(times);
    for (what, flood) in [
        ("settings", many(frame(SETTINGS, 0, 0, &[]), 5_000)),
        ("pings", many(frame(PING, 0, 0, &[7; 8]), 5_000)),
        ("answers to no ping", many(frame(PING, ACK, 0, &[7; 8]), 50)),
        ("priorities", many(frame(PRIORITY, 0, 3, &[0, 0, 0, 1, 16]), 5_000)),
        ("window updates", many(frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]), 5_000)),
        ("unknown frames", many(frame(0xbe, 0, 0, b"grease"), 5_000)),
        ("empty data", [open.clone(), many(frame(DATA, 0, 1, &[]), 5_000)].concat()),
        (
            "continuations",
            [frame(HEADERS, 0, 1, &block(&COMPLETION)), many(frame(CONTINUATION, 0, 1, &[]), 5_000)].concat(),
        ),
        (
            "continuations with headers",
            [
                frame(HEADERS, 0, 1, &block(&COMPLETION)),
                many(frame(CONTINUATION, 0, 1, &block(&[("x-a", &"b".repeat(8_000))])), 50),
            ]
            .concat(),
        ),
    ] {
        let before = system.metric("baton_router_http2_closed_total{reason=\"flood\"}").await;
        let mut client = FrameClient::connect(system.address, &[]).await;
        client.flood(&flood).await;
        assert_eq!(client.go_away().await, Some(ENHANCE_YOUR_CALM), "{what}");
        system.counts("baton_router_http2_closed_total{reason=\"flood\"}", before + 1.0).await;
    }
    system.settled().await;
    assert!(d.received().is_empty());
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

#[tokio::test]
async fn a_rapid_reset_is_bounded_and_strands_nothing() {
    let p = FakeEngine::always(Action::Hang).await;
    let d = FakeEngine::always(Action::Hang).await;
    let system =
        TestRouter::with(&[&p], &[&d], "", "limits: {streams: 64}\ntimeouts: {settle_ms: 200}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let mut flood = Vec::new();
    for stream in (1..4_000).step_by(2) {
        flood.extend(frame(HEADERS, END_HEADERS, stream, &block(&COMPLETION)));
        flood.extend(frame(DATA, END_STREAM, stream, completion(true).to_string().as_bytes()));
        flood.extend(frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]));
    }
    client.flood(&flood).await;
    assert_eq!(client.go_away().await, Some(ENHANCE_YOUR_CALM));
    system.settled().await;
    let begun = p.received().len();
    assert!(begun <= 200, "{begun} requests reached an engine");
    p.wait("every request is cut", |p| p.cut() == begun).await;
    assert!(d.received().is_empty());
}

#[tokio::test]
async fn resets_of_requests_that_ran_are_the_clients_leaving() {
    let d = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::with(&[], &[&d], "", "").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    for (at, stream) in (1..160).step_by(2).enumerate() {
        client.post(stream, &completion(true)).await;
        d.wait("the request", |d| d.received().len() == at + 1).await;
        client.frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]).await;
        d.wait("the cut", |d| d.cut() == at + 1).await;
    }
    client.frame(PING, 0, 0, &[1; 8]).await;
    assert_eq!(client.until(PING).await.payload, [1; 8], "the connection is open");
    system.settled().await;
}

/// A client must be able to read so many bytes of responses without another update.
async fn widen(client: &mut FrameClient) {
    client.frame(WINDOW_UPDATE, 0, 0, &(1_u32 << 28).to_be_bytes()).await;
}

/// A gateway's clients with a wrong key or path: what they still upload belongs to streams that the router has reset.
#[tokio::test]
async fn refused_uploads_end_no_other_stream_of_their_connection() {
    const REFUSED: u32 = 1_500;
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    widen(&mut client).await;
    client.post(1, &completion(true)).await;
    d.wait("the request", |d| d.received().len() == 1).await;
    let head = block(&with(&[(":path", "/nowhere")]));
    let refused: Vec<u32> = (1..=REFUSED).map(|at| 2 * at + 1).collect();
    for streams in refused.chunks(100) {
        for stream in streams {
            client.frame(HEADERS, END_HEADERS, *stream, &head).await;
        }
        for _ in streams {
            assert_eq!(client.until(RST_STREAM).await.error(), 0, "an answer, and then no more of the body");
        }
    }
    for stream in &refused {
        client.frame(DATA, 0, *stream, &[b'x'; 300]).await;
    }
    client.frame(PING, 0, 0, &[1; 8]).await;
    assert_eq!(client.until(PING).await.payload, [1; 8], "the connection is open");
    d.open_gate();
    let (data, reset) = client.rest(1).await;
    assert!(data.ends_with(b"data: [DONE]\n\n") && reset.is_none(), "the other stream goes on");
    system.settled().await;
}

#[tokio::test]
async fn a_connection_with_many_requests_is_drained_in_order() {
    const REQUESTS: u32 = 10_000;
    let (_d, system) = system("").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    widen(&mut client).await;
    let head = block(&with(&[(":method", "GET"), (":path", "/health")]));
    let streams: Vec<u32> = (0..REQUESTS).map(|at| 2 * at + 1).collect();
    let (mut ends, mut drains) = (0, None);
    for batch in streams.chunks(100) {
        let frames: Vec<_> = batch
            .iter()
            .flat_map(|stream| frame(HEADERS, END_HEADERS | END_STREAM, *stream, &head))
            .collect();
        client.write(&frames).await;
        let until = ends + batch.len();
        while ends < until {
            let next = client.next().await.expect("every request is answered");
            if next.kind == GOAWAY {
                assert!(until == streams.len() && drains.is_none(), "only with the last requests");
                drains = Some(next.error());
            }
            ends += usize::from(next.flags & END_STREAM != 0 && matches!(next.kind, DATA | HEADERS));
        }
    }
    let code = match drains {
        Some(code) => code,
        None => client.until(GOAWAY).await.error(),
    };
    assert_eq!(code, 0, "no error");
}

#[tokio::test]
async fn broken_framing_ends_the_connection() {
    let (d, system) = system("").await;
    let open = frame(HEADERS, END_HEADERS | END_STREAM, 5, &block(&COMPLETION));
    let protocol = [PROTOCOL_ERROR].as_slice();
    let head = |field| frame(HEADERS, END_HEADERS, 1, &block(&with(&[field])));
    for (what, bytes, errors) in [
        ("an even stream", frame(HEADERS, END_HEADERS, 2, &block(&COMPLETION)), protocol),
        ("stream 0", frame(HEADERS, END_HEADERS, 0, &block(&COMPLETION)), protocol),
        ("a stream twice", [open.clone(), open.clone()].concat(), &[PROTOCOL_ERROR, STREAM_CLOSED]),
        (
            "a stream below the last",
            [open.clone(), frame(HEADERS, END_HEADERS, 3, &block(&COMPLETION))].concat(),
            protocol,
        ),
        ("data of no stream", frame(DATA, 0, 9, b"x"), protocol),
        ("data on stream 0", frame(DATA, 0, 0, b"x"), protocol),
        ("a continuation of nothing", frame(CONTINUATION, END_HEADERS, 1, &[]), protocol),
        (
            "a frame inside a block",
            [frame(HEADERS, 0, 1, &block(&COMPLETION)), frame(PING, 0, 0, &[0; 8])].concat(),
            protocol,
        ),
        ("a push", frame(5, END_HEADERS, 1, &[0, 0, 0, 2]), protocol),
        ("a frame that is too large", frame(DATA, 0, 1, &vec![0; 20_000]), &[FRAME_SIZE_ERROR]),
        ("a ping of the wrong size", frame(PING, 0, 0, &[0; 7]), &[PROTOCOL_ERROR, FRAME_SIZE_ERROR]),
        ("settings of the wrong size", frame(SETTINGS, 0, 0, &[0; 5]), &[PROTOCOL_ERROR, FRAME_SIZE_ERROR]),
        ("padding beyond the frame", [open.clone(), frame(DATA, 8, 7, &[9, 1])].concat(), protocol),
        ("an update by 0", frame(WINDOW_UPDATE, 0, 0, &[0; 4]), protocol),
        (
            "an update beyond the largest window",
            frame(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]),
            &[FLOW_CONTROL_ERROR],
        ),
        ("a broken block", frame(HEADERS, END_HEADERS, 1, &[0xff; 40]), protocol),
        ("a name in upper case", head(("X-Upper", "a")), protocol),
        ("a space in a name", head(("x a", "b")), protocol),
        ("NUL in a value", head(("x-a", "b\0c")), protocol),
        ("a line end in a value", head(("x-a", "b\r\nc: d")), protocol),
    ] {
        let mut client = FrameClient::connect(system.address, &[]).await;
        client.flood(&bytes).await;
        let error = client.go_away().await;
        assert!(error.is_some_and(|error| errors.contains(&error)), "{what}: {error:?} {errors:?}");
    }
    let mut client = FrameClient::silent(system.address).await;
    client.write(&[PREFACE, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"].concat()).await;
    assert!(client.go_away().await.is_some());
    system.settled().await;
    assert_eq!(d.received().len(), 0);
}

#[tokio::test]
async fn abused_headers_reset_their_stream_only() {
    let (d, system) = system("").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let mut stream = 1;
    for fields in [
        with(&[(":method", "POST"), (":method", "GET")]),
        with(&[(":path", "/v1/completions"), (":path", "/health")]),
        with(&[(":path", "")]),
        with(&[(":status", "200")]),
        with(&[(":protocol", "websocket")]),
        with(&[("connection", "close")]),
        with(&[("keep-alive", "timeout=5")]),
        with(&[("proxy-connection", "close")]),
        with(&[("transfer-encoding", "chunked")]),
        with(&[("upgrade", "h2c")]),
        with(&[("te", "gzip")]),
        with(&[("content-length", "-1")]),
        with(&[("content-length", "1"), ("content-length", "2")]),
        [with(&[]), vec![(":path", "/health")]].concat(),
        COMPLETION[1..].to_vec(),
        [&COMPLETION[..1], &COMPLETION[2..]].concat(),
        [&COMPLETION[..3], &COMPLETION[4..]].concat(),
    ] {
        client.frame(HEADERS, END_HEADERS, stream, &block(&fields)).await;
        let (data, reset) = client.rest(stream).await;
        assert_eq!((data.len(), reset), (0, Some(PROTOCOL_ERROR)), "{fields:?}");
        stream += 2;
    }
    for (what, fields, code) in [
        ("another host", with(&[("host", "evil")]), "malformed_request"),
        ("two hosts", with(&[("host", "localhost"), ("host", "localhost")]), "malformed_request"),
        ("no host", with(&[])[..2].iter().chain(&with(&[])[3..]).copied().collect(), "malformed_request"),
        ("a user", with(&[(":authority", "u@localhost")]), "malformed_request"),
        ("another scheme", with(&[(":scheme", "ftp")]), "malformed_request"),
        ("two equal lengths", with(&[("content-length", "9"), ("content-length", "9")]), "malformed_request"),
        ("spaces around a value", with(&[("x-a", " b")]), "malformed_request"),
        ("TRACE", with(&[(":method", "TRACE")]), "method_not_allowed"),
        ("CONNECT", vec![(":method", "CONNECT"), (":authority", "x:443")], "method_not_allowed"),
        ("another expectation", with(&[("expect", "200-maybe")]), "expectation_failed"),
    ] {
        let before = system.metric("baton_router_malformed_heads_total").await;
        client.frame(HEADERS, END_HEADERS, stream, &block(&fields)).await;
        let (data, reset) = client.rest(stream).await;
        let body: serde_json::Value = serde_json::from_slice(&data).unwrap();
        assert_eq!((body["error"]["code"].as_str(), reset), (Some(code), None), "{what}");
        system.counts("baton_router_malformed_heads_total", before + 1.0).await;
        stream += 2;
    }
    assert!(d.all().is_empty());
    client.post(stream, &completion(false)).await;
    assert!(client.rest(stream).await.0.starts_with(b"{"), "the connection goes on");
    system.settled().await;
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused() {
    let (d, system) = system("limits: {head_bytes: 4096}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let value = "b".repeat(4096);
    let mut fields = COMPLETION.to_vec();
    fields.push(("x-a", &value));
    client.frame(HEADERS, END_HEADERS, 1, &block(&fields)).await;
    let body: serde_json::Value = serde_json::from_slice(&client.rest(1).await.0).unwrap();
    assert_eq!(body["error"]["code"], "head_too_large");
    let many: Vec<_> = COMPLETION.into_iter().chain(vec![("a", ""); 101]).collect();
    client.frame(HEADERS, END_HEADERS, 3, &block(&many)).await;
    let body: serde_json::Value = serde_json::from_slice(&client.rest(3).await.0).unwrap();
    assert_eq!(body["error"]["code"], "head_too_large");
    // Beyond the announced size, `h2` answers 431 without a body.
    let value = "b".repeat(9_000);
    fields[5] = ("x-a", &value);
    client.frame(HEADERS, END_HEADERS, 5, &block(&fields)).await;
    assert_eq!(client.rest(5).await.0.len(), 0);
    let path = format!("/{}", "p".repeat(3_000));
    client
        .frame(
            HEADERS,
            END_HEADERS,
            7,
            &block(&[COMPLETION[0], COMPLETION[1], COMPLETION[2], (":path", &path)]),
        )
        .await;
    let body: serde_json::Value = serde_json::from_slice(&client.rest(7).await.0).unwrap();
    assert!(body["error"]["code"].is_string() && body["error"]["code"] != "head_too_large", "{body}");
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn a_head_that_does_not_end_is_cut_in_time() {
    let (d, system) = system("timeouts: {head_ms: 200}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    client.frame(HEADERS, 0, 1, &block(&COMPLETION)).await;
    assert_eq!(client.go_away().await, Some(ENHANCE_YOUR_CALM));
    system.counts("baton_router_http2_closed_total{reason=\"slow_head\"}", 1.0).await;
    // The preface is a head, too: HTTP/1's answer to a slow one.
    let mut client = FrameClient::silent(system.address).await;
    client.write(&PREFACE[..20]).await;
    assert_eq!(client.go_away().await, None);
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn bodies_match_their_length_and_trailers_are_dropped() {
    let (d, system) = system("timeouts: {body_ms: 500}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let body = completion(false).to_string();
    for (stream, length) in [(1, body.len() - 1), (3, body.len() + 1)] {
        let length = length.to_string();
        let fields: Vec<_> = COMPLETION.into_iter().chain([("content-length", length.as_str())]).collect();
        client.frame(HEADERS, END_HEADERS, stream, &block(&fields)).await;
        client.frame(DATA, END_STREAM, stream, body.as_bytes()).await;
        assert_eq!(client.rest(stream).await.1, Some(PROTOCOL_ERROR));
    }
    client.frame(HEADERS, END_HEADERS, 5, &block(&COMPLETION)).await;
    client.frame(DATA, 0, 5, body.as_bytes()).await;
    client
        .frame(HEADERS, END_HEADERS | END_STREAM, 5, &block(&[("x-checksum", "1"), ("authorization", "x")]))
        .await;
    assert!(client.rest(5).await.0.starts_with(b"{"));
    assert_eq!(d.received().len(), 1);
    assert!(!d.received()[0].headers.contains_key("x-checksum"));
    // Trailers that do not end the stream.
    client.frame(HEADERS, END_HEADERS, 9, &block(&COMPLETION)).await;
    client.frame(DATA, 0, 9, body.as_bytes()).await;
    client.frame(HEADERS, END_HEADERS, 9, &block(&[("x-a", "b")])).await;
    assert_eq!(client.rest(9).await.1, Some(PROTOCOL_ERROR));
    // A body that stays incomplete.
    client.frame(HEADERS, END_HEADERS, 11, &block(&COMPLETION)).await;
    client.frame(DATA, 0, 11, b"{").await;
    let late: serde_json::Value = serde_json::from_slice(&client.rest(11).await.0).unwrap();
    assert_eq!(late["error"]["code"], "request_timeout");
    system.settled().await;
    assert_eq!(d.received().len(), 1);
}

#[tokio::test]
async fn more_streams_than_the_limit_are_refused() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {streams: 2}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let settings = client.until(SETTINGS).await;
    let streams = settings.payload.chunks(6).find(|pair| pair[..2] == [0, 3]).unwrap();
    assert_eq!(streams[2..], [0, 0, 0, 2]);
    for stream in [1, 3] {
        client.post(stream, &completion(true)).await;
    }
    d.wait("both requests", |d| d.received().len() == 2).await;
    client.post(5, &completion(true)).await;
    let refused = client.until(RST_STREAM).await;
    assert_eq!((refused.stream, refused.error()), (5, 7));
    d.open_gate();
    d.open_gate();
    for _ in 0..2 {
        let (mut data, mut ended) = (Vec::new(), false);
        while !ended {
            let frame = client.until(DATA).await;
            ended = frame.flags & END_STREAM != 0;
            data.extend_from_slice(&frame.payload);
        }
    }
    system.settled().await;
    assert_eq!(d.received().len(), 2);
}

#[tokio::test]
async fn a_closed_window_holds_no_decode_place() {
    let d = FakeEngine::scripted(vec![Action::StreamGated(5), Action::Stream(2_000)]).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {client_stall_ms: 300}").await;
    // SETTINGS_INITIAL_WINDOW_SIZE 0: every stream begins closed.
    let mut client = FrameClient::connect(system.address, &[(4, 0)]).await;
    client.post(1, &completion(true)).await;
    d.wait("the first request", |d| d.received().len() == 1).await;
    d.open_gate();
    client.post(3, &completion(true)).await;
    client.frame(WINDOW_UPDATE, 0, 3, &[0, 1, 0, 0]).await;
    let (mut reset, mut data, mut ended) = (None, Vec::new(), false);
    while reset.is_none() || !ended {
        let frame = client.next().await.expect("the connection stays open");
        match (frame.kind, frame.stream) {
            (RST_STREAM, 1) => reset = Some(frame.error()),
            (DATA, 3) => {
                data.extend_from_slice(&frame.payload);
                ended = frame.flags & END_STREAM != 0;
            }
            (DATA, _) => panic!("a closed window"),
            _ => {}
        }
    }
    assert!(data.ends_with(b"data: [DONE]\n\n"));
    d.wait("the stalled request is cut", |d| d.cut() == 1).await;
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"client_gone\"}", 1.0).await;
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 1.0).await;
}

#[tokio::test]
async fn a_client_that_never_acknowledges_the_drain_is_closed() {
    let (_d, system) = system("timeouts: {client_idle_ms: 200}").await;
    let mut client = FrameClient::connect(system.address, &[]).await;
    let begun = std::time::Instant::now();
    assert_eq!(client.until(GOAWAY).await.error(), 0);
    assert_eq!(client.go_away().await, None);
    assert!(begun.elapsed() < Duration::from_secs(8));
}
