//! Malformed HTTP: one response each, then the connection is closed, and no engine receives a request.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

const TIMEOUT: Duration = Duration::from_secs(10);
const BODY: &str = r#"{"model":"m","prompt":"hello","max_tokens":8}"#;

/// Bytes and the expected response.
struct RawCase {
    what: &'static str,
    bytes: Vec<u8>,
    status: u16,
}

fn case(what: &'static str, bytes: impl Into<Vec<u8>>, status: u16) -> RawCase {
    RawCase { what, bytes: bytes.into(), status }
}

/// A request to generate with these header lines instead of the usual ones.
fn with(headers: &str, body: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\n{headers}\r\n{body}")
}

/// A valid request with further header lines.
fn and(headers: &str) -> String {
    with(&format!("host: x\r\ncontent-length: {}\r\n{headers}", BODY.len()), BODY)
}

fn chunked(body: &str) -> String {
    with("host: x\r\ntransfer-encoding: chunked\r\n", body)
}

/// A second request that must never be served.
const HIDDEN: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 45\r\n\r\n{\"model\":\"m\",\"prompt\":\"hidden\",\"max_tokens\":8}";

fn framing() -> Vec<RawCase> {
    let length = BODY.len();
    let both = |first: &str, second: &str| {
        with(&format!("host: x\r\n{first}\r\n{second}\r\n"), &format!("0\r\n\r\n{HIDDEN}"))
    };
    let coding = |line: &str| with(&format!("host: x\r\n{line}\r\n"), &format!("0\r\n\r\n{HIDDEN}"));
    let sized = |value: &str| with(&format!("host: x\r\ncontent-length: {value}\r\n"), BODY);
    let whole = format!("{length:x}\r\n{BODY}\r\n0\r\n\r\n");
    vec![
        case("CL.TE", both("content-length: 6", "transfer-encoding: chunked"), 400),
        case("TE.CL", both("transfer-encoding: chunked", "content-length: 4"), 400),
        case(
            "CL.TE with the right length",
            both(&format!("content-length: {}", 5 + HIDDEN.len()), "Transfer-Encoding: chunked"),
            400,
        ),
        case("TE.TE, two headers", both("transfer-encoding: chunked", "transfer-encoding: identity"), 400),
        case("TE.TE, the same twice", both("transfer-encoding: chunked", "transfer-encoding: chunked"), 400),
        case("a list of codings", coding("transfer-encoding: gzip, chunked"), 400),
        case("chunked not last", coding("transfer-encoding: chunked, gzip"), 400),
        case("chunked twice in one header", coding("transfer-encoding: chunked, chunked"), 400),
        case("an unknown coding", coding("transfer-encoding: xchunked"), 400),
        case("identity", coding("transfer-encoding: identity"), 400),
        case("a quoted coding", coding("transfer-encoding: \"chunked\""), 400),
        case("a coding with a parameter", coding("transfer-encoding: chunked;a=b"), 400),
        case("a vertical tab in front of the coding", coding("transfer-encoding: \x0bchunked"), 400),
        case("an empty coding", coding("transfer-encoding:"), 400),
        case("a space before the colon", coding("transfer-encoding : chunked"), 400),
        case("a tab before the colon", coding("transfer-encoding\t: chunked"), 400),
        case("a folded coding", coding("transfer-encoding:\r\n chunked"), 400),
        case("a coding hidden behind a fold", coding("x: y\r\n transfer-encoding: chunked"), 400),
        case("a coding behind a bare carriage return", coding("x: y\rtransfer-encoding: chunked"), 400),
        case("a coding behind a bare line feed", coding("x: y\ntransfer-encoding: chunked"), 400),
        case(
            "an underscore is another header",
            with("host: x\r\ntransfer_encoding: chunked\r\nconnection: close\r\n", ""),
            400,
        ),
        case(
            "two lengths",
            with(&format!("host: x\r\ncontent-length: {length}\r\ncontent-length: 5\r\n"), BODY),
            400,
        ),
        case(
            "the same length twice",
            with(&format!("host: x\r\ncontent-length: {length}\r\ncontent-length: {length}\r\n"), BODY),
            400,
        ),
        case("a list of lengths", sized(&format!("{length}, {length}")), 400),
        case("a signed length", sized(&format!("+{length}")), 400),
        case("a negative length", sized("-1"), 400),
        case("a length in hexadecimal", sized("0x2d"), 400),
        case("a length that overflows 64 bits", sized("18446744073709551661"), 400),
        case("a length with a fraction", sized("45.0"), 400),
        case("a length with a space in it", sized("4 5"), 400),
        case("an empty length", sized(""), 400),
        case("a length over the limit", sized("40000000"), 413),
        case("a chunk extension without a name", chunked(&whole.replacen("\r\n", ";\r\n", 1)), 400),
        case(
            "a quote across lines in a chunk extension",
            chunked(&whole.replacen("\r\n", ";a=\"\r\n\"\r\n", 1)),
            400,
        ),
        case("an endless chunk extension", chunked(&format!("{length:x};{}", "a".repeat(70_000))), 400),
        case("a chunk extension with a line feed", chunked(&whole.replacen("\r\n", ";\n\r\n", 1)), 400),
        case("a space behind a chunk's size", chunked(&whole.replacen("\r\n", " \r\n", 1)), 400),
        case("a chunk's size that is none", chunked("zz\r\n"), 400),
        case("a chunk's size with a prefix", chunked(&format!("0x{whole}")), 400),
        case("a negative chunk", chunked("-1\r\n"), 400),
        case("a chunk's size that overflows", chunked("ffffffffffffffff1\r\n"), 400),
        case("a chunk's size with too many zeros", chunked(&format!("0000000000{whole}")), 400),
        case("a chunk that is longer than it says", chunked(&format!("2\r\n{BODY}\r\n0\r\n\r\n")), 400),
        case("chunks with bare line feeds", chunked(&whole.replace("\r\n", "\n")), 400),
        case("a chunk over the limit", chunked("2625a01\r\n"), 413),
        case("a folded trailer", chunked(&whole.replace("0\r\n\r\n", "0\r\nx-a: b\r\n c\r\n\r\n")), 400),
        case("a request as a trailer", chunked(&whole.replace("0\r\n\r\n", &format!("0\r\n{HIDDEN}"))), 400),
        case(
            "a trailer with a length",
            chunked(&whole.replace("0\r\n\r\n", "0\r\ncontent-length: 9\r\n\r\n")),
            400,
        ),
        case(
            "chunks in HTTP/1.0",
            format!("POST /v1/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{whole}"),
            400,
        ),
    ]
}

fn heads() -> Vec<RawCase> {
    let line = |line: &str| format!("{line}\r\nhost: x\r\n\r\n");
    let many: String = (0..101).map(|n| format!("x-{n}: y\r\n")).collect();
    vec![
        case("a bare line feed ends a line", "GET /health HTTP/1.1\nhost: x\n\n", 400),
        case("a bare carriage return ends a line", "GET /health HTTP/1.1\rhost: x\r\r", 400),
        case("no request line", "\r\n\r\n", 400),
        case("two empty lines before a request", format!("\r\n\r\n{}", and("")), 400),
        case("a bare line feed before a request", format!("\n{}", and("")), 400),
        case("a folded header", and("x-a: b\r\n c\r\n"), 400),
        case("a header folded by a tab", and("x-a: b\r\n\tc\r\n"), 400),
        case("a header without a name", and(": b\r\n"), 400),
        case("a header without a colon", and("x-a\r\n"), 400),
        case("a space in a header's name", and("x a: b\r\n"), 400),
        case("NUL in a header's name", and("x\0a: b\r\n"), 400),
        case("NUL in a header's value", and("x-a: b\0c\r\n"), 400),
        case("a control byte in a header's value", and("x-a: b\x01c\r\n"), 400),
        case("DEL in a header's value", and("x-a: b\x7fc\r\n"), 400),
        case("no Host", with(&format!("content-length: {}\r\n", BODY.len()), BODY), 400),
        case("two Hosts", and("host: y\r\n"), 400),
        case("the same Host twice", and("Host: x\r\n"), 400),
        case("an empty Host", with("host:\r\ncontent-length: 45\r\n", BODY), 400),
        case("a Host with a path", with("host: x/y\r\ncontent-length: 45\r\n", BODY), 400),
        case("a Host with credentials", with("host: a@x\r\ncontent-length: 45\r\n", BODY), 400),
        case("a list of Hosts", with("host: x, y\r\ncontent-length: 45\r\n", BODY), 400),
        case("the target names another host", with("host: x\r\n", "").replace("/v1", "http://y/v1"), 400),
        case("the target has another scheme", with("host: x\r\n", "").replace("/v1", "ftp://x/v1"), 400),
        case("the target is no path", line("GET health HTTP/1.1"), 400),
        case("the target is a host", line("GET x:80 HTTP/1.1"), 400),
        case("a space in the target", line("GET /hea lth HTTP/1.1"), 400),
        case("two spaces behind the method", line("GET  /health HTTP/1.1"), 400),
        case("a tab in the request line", line("GET\t/health\tHTTP/1.1"), 400),
        case("NUL in the target", line("GET /hea\0lth HTTP/1.1"), 400),
        case("a byte beyond ASCII in the target", line("GET /h\u{e9}alth HTTP/1.1"), 400),
        case("a fragment in the target", line("GET /health#a HTTP/1.1"), 400),
        case("a method in small letters", line("get /health HTTP/1.1"), 400),
        case("a method that is no token", line("GE(T /health HTTP/1.1"), 400),
        case("no version", "GET /health\r\n\r\n", 400),
        case("HTTP/0.9", "GET /\r\n", 400),
        case("an odd version", line("GET /health HTTP/1.10"), 400),
        case("a version in small letters", line("GET /health http/1.1"), 400),
        case("HTTP/2 without its preface", line("GET /health HTTP/2.0"), 505),
        case("HTTP/1.2", line("GET /health HTTP/1.2"), 505),
        case("TLS", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03".to_vec(), 400),
        case("CONNECT", line("CONNECT x:80 HTTP/1.1"), 405),
        case("TRACE", line("TRACE /health HTTP/1.1"), 405),
        case("an unknown expectation", and("expect: 200-maybe\r\n"), 417),
        case("two expectations", and("expect: 100-continue\r\nexpect: 100-continue\r\n"), 400),
        case("too many headers", and(&many), 431),
        case("a header that is too large", and(&format!("x-a: {}\r\n", "b".repeat(40_000))), 431),
        case("a head without an end", format!("GET /health HTTP/1.1\r\nx-a: {}", "b".repeat(40_000)), 431),
        case("a path that is too long", line(&format!("GET /{} HTTP/1.1", "a".repeat(9_000))), 414),
        case("a path without an end", format!("GET /{}", "a".repeat(20_000)), 414),
        case(
            "an upgrade with a request behind it",
            format!(
                "GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n{HIDDEN}"
            ),
            404,
        ),
        case(
            "an upgrade to HTTP/2 with frames behind it",
            "GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            404,
        ),
        case(
            "a request behind the connection's last",
            format!("GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n{HIDDEN}"),
            404,
        ),
        case(
            "a request inside the body of one that is refused",
            format!("POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{HIDDEN}", HIDDEN.len()),
            404,
        ),
        case(
            "a body where none belongs",
            format!(
                "GET /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{HIDDEN}",
                HIDDEN.len()
            ),
            404,
        ),
    ]
}

/// Correctly framed bodies with invalid content. The connection may stay open after these.
fn bodies() -> Vec<RawCase> {
    let json = |body: &[u8]| {
        let mut bytes = with(&format!("host: x\r\ncontent-length: {}\r\n", body.len()), "").into_bytes();
        bytes.extend_from_slice(body);
        bytes
    };
    let field = |value: &str| json(format!(r#"{{"model":"m","prompt":"x","x":{value}}}"#).as_bytes());
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let wide = format!("[{}]", vec!["0"; 1_000_000].join(","));
    vec![
        case("another kind of body", and("content-type: text/plain\r\n"), 415),
        case("a form", and("content-type: application/x-www-form-urlencoded\r\n"), 415),
        case("two kinds of body", and("content-type: application/json\r\ncontent-type: text/xml\r\n"), 415),
        case("a compressed body", and("content-encoding: gzip\r\n"), 415),
        case("an empty body", with("host: x\r\n", ""), 400),
        case("no JSON", json(b"hello"), 400),
        case("JSON that is cut off", json(b"{\"model\":\"m\",\"prompt\":\"x\""), 400),
        case("two values", json(br#"{"model":"m","prompt":"x"}{}"#), 400),
        case("a byte order mark", json(b"\xef\xbb\xbf{\"model\":\"m\",\"prompt\":\"x\"}"), 400),
        case("UTF-16", json(b"{\0\"\0a\0\"\0:\x001\0}\0"), 400),
        case("invalid UTF-8", json(b"{\"model\":\"m\",\"prompt\":\"\xff\xfe\"}"), 400),
        case("an overlong slash", json(b"{\"model\":\"m\",\"prompt\":\"\xc0\xaf\"}"), 400),
        case("a surrogate in UTF-8", json(b"{\"model\":\"m\",\"prompt\":\"\xed\xa0\x80\"}"), 400),
        case("half a surrogate pair", field(r#""\ud800""#), 400),
        case("the other half", field(r#""\udc00""#), 400),
        case("a control byte in a string", field("\"a\nb\""), 400),
        case("NaN", field("NaN"), 400),
        case("Infinity", field("-Infinity"), 400),
        case("a number beyond every float", field("1e400"), 400),
        case("a number with a leading zero", field("01"), 400),
        case("a comment", field("/* */ 1"), 400),
        case("a name twice", json(br#"{"model":"m","prompt":"x","prompt":"y"}"#), 400),
        case(
            "a name twice, once with an escape",
            json(br#"{"model":"m","prompt":"x","pr\u006fmpt":"y"}"#),
            400,
        ),
        case("10,000 levels", field(&deep), 400),
        case(
            "a prompt of 1,000,000 odd ids",
            json(format!(r#"{{"model":"m","prompt":{}}}"#, wide.replace("0]", "-1]")).as_bytes()),
            400,
        ),
        case(
            "5,000 fields",
            json(
                format!(
                    "{{\"model\":\"m\",\"prompt\":\"x\"{}}}",
                    (0..5_000).map(|n| format!(",\"f{n}\":0")).collect::<String>()
                )
                .as_bytes(),
            ),
            400,
        ),
    ]
}

/// Sends the bytes and reads until the router closes the connection.
async fn exchange(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = tokio::time::timeout(TIMEOUT, stream.write_all(bytes)).await.expect("the router reads");
    let mut all = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let read = tokio::time::timeout(TIMEOUT, stream.read(&mut piece)).await;
        match read.expect("the router answers and closes") {
            Ok(0) | Err(_) => return all,
            Ok(bytes) => all.extend_from_slice(&piece[..bytes]),
        }
    }
}

/// The status of the only response in these bytes.
fn only_answer(what: &str, bytes: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{what}: no answer: {text}"));
    let status: u16 = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap();
    let length = head
        .to_ascii_lowercase()
        .split("content-length: ")
        .nth(1)
        .map(|rest| rest.lines().next().unwrap().to_owned());
    let length: usize = length.unwrap_or_else(|| panic!("{what}: {head}")).trim().parse().unwrap();
    assert_eq!(body.len(), length, "{what}: one whole answer and nothing else: {text}");
    let json: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{what}: {text}"));
    assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string(), "{what}: {text}");
    assert!(!text.contains("127.0.0.1"), "{what}: an address: {text}");
    assert!(text.len() < 2_000, "{what}: an error is no echo");
    status
}

#[tokio::test]
async fn every_odd_request_gets_one_refusal_and_reaches_no_engine() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let (framing, heads) = (framing(), heads());
    assert!(framing.len() + heads.len() >= 60, "the suite has shrunk");
    for RawCase { what, bytes, status } in framing.into_iter().chain(heads) {
        eprintln!("{what}");
        let answer = exchange(system.address, &bytes).await;
        assert_eq!(only_answer(what, &answer), status, "{what}: {}", String::from_utf8_lossy(&answer));
    }
    assert!(p.all().is_empty() && d.all().is_empty(), "an engine received a request");
    assert_eq!((p.connections(), d.connections()), (0, 0), "an engine was connected to");
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

#[tokio::test]
async fn every_odd_body_gets_one_refusal_and_reaches_no_engine() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    for RawCase { what, bytes, status } in bodies() {
        let mut client = Client::connect(system.address).await;
        client.send(&bytes).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, status, "{what}: {}", answer.text());
        answer.code();
    }
    assert_eq!((p.connections(), d.connections()), (0, 0), "an engine was connected to");
}

#[tokio::test]
async fn a_body_of_exactly_the_limit_is_served_and_one_byte_more_is_not() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes: 4096}").await;
    let body = |bytes: usize| {
        let empty = r#"{"model":"m","max_tokens":1,"prompt":""}"#.len();
        format!(r#"{{"model":"m","max_tokens":1,"prompt":"{}"}}"#, "x".repeat(bytes - empty))
    };
    for (bytes, status) in [(4096, 200), (4097, 413)] {
        let body = body(bytes);
        let mut client = Client::connect(system.address).await;
        client.post_bytes("/v1/completions", "", body.as_bytes()).await;
        assert_eq!(client.answer().await.status, status, "{bytes}");
        let mut client = Client::connect(system.address).await;
        let (first, second) = body.split_at(1000);
        let chunks = format!("{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n", first.len(), second.len());
        client.send(chunked(&chunks).as_bytes()).await;
        assert_eq!(client.answer().await.status, status, "{bytes} in chunks");
    }
}

#[tokio::test]
async fn a_truncated_body_is_refused_with_any_framing() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for bytes in [with("host: x\r\ncontent-length: 100\r\n", BODY), chunked("2d\r\n{\"model\"")] {
        let mut stream = TcpStream::connect(system.address).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
        assert_eq!(only_answer("cut off", &answer), 400);
    }
    assert_eq!(d.connections(), 0);
}

#[tokio::test]
async fn a_slow_head_is_408_and_a_large_one_431() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system =
        TestRouter::with(&[], &[&d], "", "timeouts: {head_ms: 100}\nlimits: {head_bytes: 1024}").await;
    let answer = exchange(system.address, b"GET /health HTTP/1.1\r\nhost: x\r\nx-a:").await;
    assert_eq!(only_answer("a head that stops", &answer), 408);
    let large = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-a: {}\r\n\r\n", "b".repeat(1024));
    assert_eq!(only_answer("a large head", &exchange(system.address, large.as_bytes()).await), 431);
    let mut stream = TcpStream::connect(system.address).await.unwrap();
    let (mut read, mut write) = stream.split();
    let slowly = async {
        // One byte at a time, forever: the time limit is that of the head, not of a byte.
        for byte in b"GET /health HTTP/1.1\r\nhost: x\r\n".iter().chain(std::iter::repeat(&b'x')) {
            if write.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut answer = Vec::new();
    let answered = async { tokio::time::timeout(TIMEOUT, read.read_to_end(&mut answer)).await };
    tokio::select! { () = slowly => {}, answered = answered => drop(answered.expect("closed in time")) }
    assert_eq!(only_answer("a head byte by byte", &answer), 408);
    assert_eq!(d.connections(), 0);
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed_in_time() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {client_idle_ms: 100}").await;
    assert!(exchange(system.address, b"").await.is_empty(), "no request was sent");
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    assert_eq!(client.answer().await.status, 200);
    assert!(client.is_closed().await, "after its last answer too");
}

#[tokio::test]
async fn thousands_of_slow_clients_do_not_delay_others() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut slow = Vec::new();
    for n in 0..2_000 {
        let mut stream = TcpStream::connect(system.address).await.unwrap();
        let begun: &[u8] = match n % 3 {
            0 => b"",
            1 => b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a",
            _ => b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 45\r\n\r\n{",
        };
        stream.write_all(begun).await.unwrap();
        slow.push(stream);
        if n % 100 == 0 {
            assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        }
    }
    for _ in 0..20 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(get(system.address, "/health").await.status, 200);
    assert!(d.received().iter().all(|request| request.body["prompt"] == "hello"));
    drop(slow);
}

#[tokio::test]
async fn a_chunked_body_of_many_small_pieces_is_served_and_the_connection_used_again() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    for _ in 0..2 {
        client.send(chunked("").as_bytes()).await;
        for byte in BODY.bytes() {
            client.send(format!("1\r\n{}\r\n", char::from(byte)).as_bytes()).await;
        }
        client.send(b"0\r\n\r\n").await;
        assert_eq!(client.answer().await.status, 200);
    }
    assert_eq!(d.received().len(), 2);
}

#[tokio::test]
async fn an_upgrade_header_is_ignored_and_the_request_served() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client
        .send(
            and("connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n").as_bytes(),
        )
        .await;
    assert_eq!(client.answer().await.status, 200);
    assert!(d.received().iter().all(|request| !request.headers.contains_key("upgrade")));
}

#[tokio::test]
async fn a_request_id_that_is_none_is_neither_echoed_nor_passed_on() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    for lines in [
        "x-request-id: with space\r\n".to_owned(),
        "x-request-id: \r\n".to_owned(),
        format!("x-request-id: {}\r\n", "a".repeat(20_000)),
        "x-request-id: caf\u{e9}\r\n".to_owned(),
        "x-request-id: one\r\nx-request-id: two\r\n".to_owned(),
    ] {
        let mut client = Client::connect(system.address).await;
        client.send(and(&lines).as_bytes()).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 200, "{lines:.60}");
        let echoed = answer.header("x-request-id").unwrap().to_owned();
        assert_eq!(echoed.len(), 36, "one of ours: {echoed}");
        assert_eq!(d.received().pop().unwrap().headers["x-request-id"], echoed.as_str());
    }
}
