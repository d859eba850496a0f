//! Calls to a scripted server on loopback that records how its client disconnected.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::call::{CallStage, TokenUsage};
use super::request::PreparedRequest;
use super::rng::Rng;
use super::*;

/// Maximum wait of a test. Waits are normally far shorter.
const PATIENCE: Duration = Duration::from_secs(20);

/// A step of the server after it has read a request.
#[derive(Clone)]
enum ServerStep {
    Write(Vec<u8>),
    /// Waits until the client disconnects and records how.
    Watch,
    /// Writes continuously until the client disconnects, and records how.
    Flood,
    /// Waits until the test cancels the token.
    Wait(CancellationToken),
    /// Records the client's half-close and continues.
    SeeEnd,
    Close,
}

/// How a client disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientEnd {
    Fin,
    Rst,
    /// The client read nothing for a while, then reset.
    StalledThenRst,
}

struct ScriptedServer {
    address: SocketAddr,
    seen: mpsc::Receiver<ClientEnd>,
    /// Heads and bodies of the requests.
    requests: mpsc::Receiver<String>,
}

impl ScriptedServer {
    /// Request n is answered by script n, and later requests by the last. Any number of connections is accepted.
    async fn start(scripts: Vec<Vec<ServerStep>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (report, seen) = mpsc::channel(64);
        let (note, requests) = mpsc::channel(64);
        let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (report, note, scripts, count) =
                    (report.clone(), note.clone(), scripts.clone(), count.clone());
                tokio::spawn(async move {
                    let mut stream = stream;
                    let mut pending = Vec::new();
                    while let Some(request) = request(&mut stream, &mut pending).await {
                        let _ = note.send(request).await;
                        let nth = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        let script = &scripts[nth.min(scripts.len() - 1)];
                        if !serve(&mut stream, script, &report).await {
                            return;
                        }
                    }
                });
            }
        });
        Self { address, seen, requests }
    }

    async fn client(&self, limits: Limits, connections: Connections) -> Client {
        let target = Target::parse(&format!("http://{}", self.address)).expect("a target");
        Client::open(target, limits, connections).await.expect("an address")
    }

    async fn client_end(&mut self) -> Option<ClientEnd> {
        tokio::time::timeout(PATIENCE, self.seen.recv()).await.expect("the server sees it")
    }
}

/// One request with a body. `None` at the end.
async fn request(stream: &mut TcpStream, pending: &mut Vec<u8>) -> Option<String> {
    loop {
        let text = String::from_utf8_lossy(pending).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
            let length: usize = length.parse().ok()?;
            if body.len() >= length {
                pending.clear();
                return Some(text);
            }
        }
        if stream.read_buf(pending).await.ok()? == 0 {
            return None;
        }
    }
}

/// Whether the connection remains open.
async fn serve(stream: &mut TcpStream, script: &[ServerStep], report: &mpsc::Sender<ClientEnd>) -> bool {
    for step in script {
        match step {
            ServerStep::Write(bytes) => {
                if stream.write_all(bytes).await.is_err() {
                    return false;
                }
            }
            ServerStep::Watch | ServerStep::SeeEnd => {
                let seen = match stream.read(&mut [0; 64]).await {
                    Ok(0) => ClientEnd::Fin,
                    Ok(_) => panic!("bytes after the request"),
                    Err(error) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                        ClientEnd::Rst
                    }
                };
                let _ = report.send(seen).await;
                if matches!(step, ServerStep::Watch) {
                    return false;
                }
            }
            ServerStep::Flood => {
                let event = event("flood").repeat(64);
                let mut stalled = false;
                loop {
                    match tokio::time::timeout(Duration::from_millis(50), stream.write_all(&event)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => break,
                        Err(_) => stalled = true,
                    }
                }
                let _ = report.send(if stalled { ClientEnd::StalledThenRst } else { ClientEnd::Rst }).await;
                return false;
            }
            ServerStep::Wait(until) => until.cancelled().await,
            ServerStep::Close => return false,
        }
    }
    true
}

const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r-7\r\nconnection: close\r\n\r\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

fn event(text: &str) -> Vec<u8> {
    let json = serde_json::json!({"choices": [{"index": 0, "text": text, "finish_reason": null}]});
    format!("data: {json}\n\n").into_bytes()
}

fn last_event() -> Vec<u8> {
    let json = serde_json::json!({
        "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    });
    format!("data: {json}\n\n").into_bytes()
}

fn stream() -> Vec<u8> {
    [HEAD, &event("a"), b": keep-alive\n\n", &event("b"), &event("c"), &last_event(), DONE].concat()
}

fn chunked(keep: bool) -> Vec<u8> {
    let body = [event("a"), event("b"), last_event(), DONE.to_vec()].concat();
    let connection = if keep { "keep-alive" } else { "close" };
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: {connection}\r\n\r\n"
    );
    let mut bytes = head.into_bytes();
    for part in body.chunks(37) {
        bytes.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}

fn ask() -> PreparedRequest {
    CompletionSpec::new(Endpoint::Completions, "m", &Prompt::Text("hello".to_owned()), 3).prepare()
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("it ends") })
}

/// One call to a server with one script.
async fn one(
    script: Vec<ServerStep>,
    leave: CancelTrigger,
    manner: DisconnectKind,
) -> (Call, ScriptedServer) {
    let server = ScriptedServer::start(vec![script]).await;
    let client = server.client(Limits::default(), Connections::Fresh).await;
    (client.call(&ask(), &leave, manner).await, server)
}

#[test]
fn a_stream_is_read_whole_with_all_its_times() {
    run(async {
        for answer in [stream(), chunked(false)] {
            let (call, mut server) = one(
                vec![ServerStep::Write(answer), ServerStep::Close],
                CancelTrigger::Never,
                DisconnectKind::Fin,
            )
            .await;
            assert_eq!(call.outcome, CallOutcome::Done, "{call:?}");
            assert!(call.text.starts_with("ab") && call.tokens.len() == call.text.len(), "{call:?}");
            assert_eq!(call.finish_reason.as_deref(), Some("length"));
            let usage = TokenUsage { prompt_tokens: 5, completion_tokens: 3, cached_tokens: Some(2) };
            assert_eq!((call.usage, call.completion_tokens()), (Some(usage), 3));
            let times =
                [Some(call.began), call.connected, call.sent, call.head, call.tokens.first().copied()];
            assert!(times.windows(2).all(|pair| pair[0] <= pair[1]), "{call:?}");
            assert!(
                call.tokens.is_sorted() && call.tokens.last() <= Some(&call.ended) && call.left.is_none()
            );
            let request = server.requests.recv().await.expect("it was asked");
            let (head, body) = request.split_once("\r\n\r\n").expect("a head");
            assert!(head.starts_with("POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:"), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
            assert_eq!(
                (&body["prompt"], &body["stream_options"]["include_usage"]),
                (&"hello".into(), &true.into())
            );
        }
        let (call, _) = one(
            vec![ServerStep::Write(stream()), ServerStep::Close],
            CancelTrigger::Never,
            DisconnectKind::Fin,
        )
        .await;
        assert_eq!(call.request_id.as_deref(), Some("r-7"));
    });
}

#[test]
fn an_answer_in_pieces_of_any_size_is_the_same_answer() {
    run(async {
        let answer = chunked(false);
        // A cut every few bytes is sufficient: other cuts are tested without sockets.
        for cut in (0..answer.len()).step_by(7) {
            let gate = CancellationToken::new();
            let script = vec![
                ServerStep::Write(answer[..cut].to_vec()),
                ServerStep::Wait(gate.clone()),
                ServerStep::Write(answer[cut..].to_vec()),
                ServerStep::Close,
            ];
            let server = ScriptedServer::start(vec![script]).await;
            let client = server.client(Limits::default(), Connections::Fresh).await;
            let ask = ask();
            let (call, ()) =
                tokio::join!(client.call(&ask, &CancelTrigger::Never, DisconnectKind::Fin), async {
                    // The first part is on its way, and most likely read.
                    tokio::task::yield_now().await;
                    gate.cancel();
                });
            assert_eq!((call.outcome, call.text.as_str()), (CallOutcome::Done, "ab"), "{cut}");
        }
    });
}

#[test]
fn the_server_sees_each_kind_of_disconnect() {
    run(async {
        let begun = || vec![ServerStep::Write([HEAD, &event("a"), &event("b")].concat()), ServerStep::Watch];
        for (manner, seen) in [(DisconnectKind::Fin, ClientEnd::Fin), (DisconnectKind::Rst, ClientEnd::Rst)] {
            for leave in [
                CancelTrigger::AfterTokens(1),
                CancelTrigger::AfterTokens(2),
                CancelTrigger::WhenOrAfterTokens(CancellationToken::new(), 2),
                CancelTrigger::After(Duration::from_millis(20)),
            ] {
                let (call, mut server) = one(begun(), leave.clone(), manner).await;
                assert_eq!(call.outcome, CallOutcome::Left, "{manner:?} {leave:?}: {call:?}");
                assert_eq!(server.client_end().await, Some(seen), "{manner:?} {leave:?}");
                assert!(call.left >= call.sent && call.left <= Some(call.ended), "{call:?}");
                if let CancelTrigger::AfterTokens(tokens) | CancelTrigger::WhenOrAfterTokens(_, tokens) =
                    leave
                {
                    assert_eq!(call.tokens.len(), tokens);
                }
            }
            // Before any byte of the response.
            for tokens in [None, Some(1)] {
                let token = CancellationToken::new();
                let leave = tokens.map_or(CancelTrigger::When(token.clone()), |tokens| {
                    CancelTrigger::WhenOrAfterTokens(token.clone(), tokens)
                });
                let mut server = ScriptedServer::start(vec![vec![ServerStep::Watch]]).await;
                let client = server.client(Limits::default(), Connections::Fresh).await;
                let ask = ask();
                let (call, request) = tokio::join!(client.call(&ask, &leave, manner), async {
                    let request = server.requests.recv().await;
                    token.cancel();
                    request
                });
                assert!(
                    request.is_some() && call.outcome == CallOutcome::Left && call.head.is_none(),
                    "{call:?}"
                );
                assert_eq!(server.client_end().await, Some(seen), "{manner:?}");
            }
        }
    });
}

#[test]
fn a_half_close_is_seen_and_the_answer_is_still_read() {
    run(async {
        let first = ServerStep::Write([HEAD, &event("a"), &event("b")].concat());
        let rest = ServerStep::Write([&event("c")[..], &last_event(), DONE].concat());
        let script = vec![first.clone(), ServerStep::SeeEnd, rest, ServerStep::Close];
        let (call, mut server) = one(script, CancelTrigger::AfterTokens(1), DisconnectKind::HalfClose).await;
        assert_eq!(server.client_end().await, Some(ClientEnd::Fin));
        assert_eq!((&call.outcome, call.text.as_str()), (&CallOutcome::Done, "abc"), "{call:?}");
        assert!(call.left.is_some() && call.left < Some(call.ended));
        // A server that closes because of the half-close.
        let (call, _) = one(
            vec![first, ServerStep::SeeEnd, ServerStep::Close],
            CancelTrigger::AfterTokens(1),
            DisconnectKind::HalfClose,
        )
        .await;
        assert_eq!((&call.outcome, call.text.as_str()), (&CallOutcome::Left, "ab"), "{call:?}");
    });
}

#[test]
fn a_stalled_client_blocks_the_writer() {
    run(async {
        let script = vec![ServerStep::Write([HEAD, &event("a")].concat()), ServerStep::Flood];
        let manner = DisconnectKind::Stall { hold: Duration::from_millis(600) };
        let (call, mut server) = one(script, CancelTrigger::AfterTokens(1), manner).await;
        assert_eq!(server.client_end().await, Some(ClientEnd::StalledThenRst));
        let held = call.left.map(|left| call.ended.since(left));
        assert!(call.outcome == CallOutcome::Left && held >= Some(Duration::from_millis(600)), "{call:?}");
    });
}

#[test]
fn each_error_has_its_outcome() {
    run(async {
        let body = r#"{"error":{"message":"full","type":"overloaded","code":"queue"}}"#;
        let head = format!("HTTP/1.1 429 No\r\nretry-after: 3\r\ncontent-length: {}\r\n\r\n", body.len());
        let refusal = format!("{head}{body}").into_bytes();
        let (call, _) =
            one(vec![ServerStep::Write(refusal)], CancelTrigger::Never, DisconnectKind::Fin).await;
        let expected = CallOutcome::Refused {
            status: 429,
            code: Some("queue".into()),
            kind: Some("overloaded".into()),
            message: "full".into(),
        };
        assert_eq!((call.outcome, call.retry_after), (expected, Some(Duration::from_secs(3))));

        let failure =
            [HEAD, &event("a"), b"data: {\"error\":{\"message\":\"lost\",\"code\":\"gone\"}}\n\n", DONE]
                .concat();
        let (call, _) =
            one(vec![ServerStep::Write(failure)], CancelTrigger::Never, DisconnectKind::Fin).await;
        assert!(
            matches!(&call.outcome, CallOutcome::Failed { code: Some(code), .. } if code == "gone"),
            "{call:?}"
        );

        let body = |call: &Call| matches!(&call.outcome, CallOutcome::Broken { stage: CallStage::Body, .. });
        let cut = [HEAD, &event("a")].concat();
        let (call, _) =
            one(vec![ServerStep::Write(cut), ServerStep::Close], CancelTrigger::Never, DisconnectKind::Fin)
                .await;
        assert!(body(&call) && call.text == "a", "{call:?}");
        let garbage = [HEAD, b"data: {nonsense\n\n"].concat();
        let (call, _) = one(
            vec![ServerStep::Write(garbage), ServerStep::Watch],
            CancelTrigger::Never,
            DisconnectKind::Fin,
        )
        .await;
        assert!(body(&call), "{call:?}");

        let (call, _) = one(vec![ServerStep::Close], CancelTrigger::Never, DisconnectKind::Fin).await;
        assert!(matches!(call.outcome, CallOutcome::Broken { stage: CallStage::Head, .. }), "{call:?}");
        let closed =
            TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("an address");
        let target = Target::parse(&closed.to_string()).expect("a target");
        let client = Client::open(target, Limits::default(), Connections::Fresh).await.expect("an address");
        let call = client.call(&ask(), &CancelTrigger::Never, DisconnectKind::Fin).await;
        assert!(matches!(call.outcome, CallOutcome::Broken { stage: CallStage::Connect, .. }), "{call:?}");
    });
}

#[test]
fn hostile_answers_end_a_call() {
    run(async {
        let endless = [b"HTTP/1.1 200 OK\r\nx: ".to_vec(), vec![b'a'; 1 << 20]].concat();
        let huge = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n".to_vec();
        let long_event = [HEAD, b"data: ", &vec![b'a'; 5 << 20]].concat();
        for (name, bytes) in [("head", endless), ("chunk", huge), ("event", long_event)] {
            let (call, _) = one(
                vec![ServerStep::Write(bytes), ServerStep::Watch],
                CancelTrigger::Never,
                DisconnectKind::Fin,
            )
            .await;
            assert!(matches!(call.outcome, CallOutcome::Broken { .. }), "{name}: {call:?}");
        }
        let server =
            ScriptedServer::start(vec![vec![ServerStep::Write(HEAD.to_vec()), ServerStep::Flood]]).await;
        let limits = Limits { answer_bytes: 1 << 20, ..Limits::default() };
        let call = server
            .client(limits, Connections::Fresh)
            .await
            .call(&ask(), &CancelTrigger::Never, DisconnectKind::Fin)
            .await;
        assert!(
            matches!(call.outcome, CallOutcome::Broken { stage: CallStage::Body, .. }),
            "no end: {:?}",
            call.outcome
        );
    });
}

#[test]
fn a_silent_endpoint_is_given_up_in_every_stage() {
    run(async {
        let short = Some(Duration::from_millis(100));
        let silence = Limits { silence: short, ..Limits::default() };
        let total = Limits { total: Duration::from_millis(100), ..Limits::default() };
        for limits in [silence, total] {
            for (bytes, stage) in
                [(Vec::new(), CallStage::Head), ([HEAD, &event("a")].concat(), CallStage::Body)]
            {
                let mut server =
                    ScriptedServer::start(vec![vec![ServerStep::Write(bytes), ServerStep::Watch]]).await;
                let client = server.client(limits.clone(), Connections::Fresh).await;
                let call = client.call(&ask(), &CancelTrigger::Never, DisconnectKind::Rst).await;
                assert_eq!(call.outcome, CallOutcome::TimedOut { stage });
                assert!(call.left.is_some() && call.e2e() >= Duration::from_millis(100));
                assert_eq!(server.client_end().await, Some(ClientEnd::Fin), "an SDK closes");
            }
        }
    });
}

#[test]
fn a_connection_is_kept_while_it_is_good() {
    run(async {
        let answer = || vec![ServerStep::Write(chunked(true))];
        // The connection closes after the third response, without an announcement.
        let ends = vec![ServerStep::Write(chunked(true)), ServerStep::Close];
        let server = ScriptedServer::start(vec![answer(), answer(), ends, answer()]).await;
        let client = server.client(Limits::default(), Connections::Kept).await;
        let mut fresh = Vec::new();
        for _ in 0..5 {
            let call = client.call(&ask(), &CancelTrigger::Never, DisconnectKind::Fin).await;
            assert_eq!(call.outcome, CallOutcome::Done, "{call:?}");
            fresh.push(call.connected.is_some());
        }
        assert_eq!(fresh, [true, false, false, true, false]);
        // A cancelled connection is not kept.
        let call = client.call(&ask(), &CancelTrigger::AfterTokens(1), DisconnectKind::Fin).await;
        assert_eq!((call.outcome, call.connected), (CallOutcome::Left, None));
        let call = client.call(&ask(), &CancelTrigger::Never, DisconnectKind::Fin).await;
        assert!(call.is_done() && call.connected.is_some());
    });
}

#[test]
fn retries_follow_the_options_and_are_reported() {
    run(async {
        let busy = b"HTTP/1.1 503 Busy\r\nretry-after-ms: 5\r\ncontent-length: 0\r\n\r\n".to_vec();
        let scripts = vec![
            vec![ServerStep::Write(busy)],
            vec![ServerStep::Close],
            vec![ServerStep::Write(chunked(false))],
        ];
        let mut server = ScriptedServer::start(scripts).await;
        let client = server.client(Limits::default(), Connections::Fresh).await;
        let attempts = RetryLimit(2)
            .call(&client, &ask(), &CancelTrigger::Never, DisconnectKind::Fin, &mut Rng::new(1))
            .await;
        let attempts = attempts.expect("good headers");
        assert_eq!(attempts.len(), 3, "{attempts:?}");
        assert!(matches!(attempts[0].outcome, CallOutcome::Refused { status: 503, .. }));
        assert!(matches!(attempts[1].outcome, CallOutcome::Broken { stage: CallStage::Head, .. }));
        assert!(
            attempts[2].is_done() && attempts[1].began.since(attempts[0].ended) >= Duration::from_millis(5)
        );
        for count in ["0", "1", "2"] {
            let request = server.requests.recv().await.expect("a request");
            assert!(request.contains(&format!("x-stainless-retry-count: {count}\r\n")), "{request}");
        }
    });
}

#[test]
fn damaged_responses_are_errors() {
    let mut rng = Rng::new(9);
    let whole = [chunked(true), stream()];
    for round in 0..4_000 {
        let mut bytes = whole[round % 2].clone();
        for _ in 0..=rng.below(4) {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(4) {
                0 => bytes[at] = rng.next() as u8,
                1 => bytes.truncate(at + 1),
                2 => bytes.insert(at, b"\r\n:0f,\"{}"[rng.below(9) as usize]),
                _ => drop(bytes.remove(at.min(bytes.len() - 1))),
            }
            if bytes.is_empty() {
                break;
            }
        }
        let (mut reader, mut events, mut read) = (
            super::transport::framing::ResponseReader::new(1 << 16),
            super::transport::sse::Events::default(),
            0,
        );
        'answer: for part in bytes.chunks(1 + rng.below(64) as usize) {
            if reader.feed(part, events.buffer()).is_err() {
                break;
            }
            while let Ok(Some(event)) = events.next() {
                read += event.len();
                if reply::ReplyContent::read(event).is_err() {
                    break 'answer;
                }
            }
        }
        assert!(read <= bytes.len(), "nothing comes out that did not go in");
    }
}
