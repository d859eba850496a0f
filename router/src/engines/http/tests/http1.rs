//! Tests of a connection with bytes that an engine could send.

use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::reply_head::BYTES_MAX as HEAD_BYTES_MAX;
use super::*;

/// Accepts all bytes, and completes a flush only at the second poll, as TLS can.
#[derive(Default)]
struct SlowFlushStream {
    flushes: usize,
}

impl AsyncRead for SlowFlushStream {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for SlowFlushStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flushes += 1;
        if self.flushes == 1 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct ScriptedEngine {
    connection: Http1<DuplexStream>,
    far: DuplexStream,
}

fn engine() -> ScriptedEngine {
    let (near, far) = duplex(1 << 20);
    let mut connection = Http1::new(near);
    connection
        .begin(b"POST / HTTP/1.1\r\n\r\n".to_vec(), &[Bytes::from_static(b"ab"), Bytes::from_static(b"c")]);
    ScriptedEngine { connection, far }
}

impl ScriptedEngine {
    async fn head(&mut self) -> Result<ReplyHead, ConnectionError> {
        poll_fn(|context| self.connection.poll_head(context)).await
    }

    async fn body(&mut self) -> Result<Vec<u8>, ConnectionError> {
        let mut body = Vec::new();
        while let Some(piece) = poll_fn(|context| self.connection.poll_piece(context)).await {
            body.extend_from_slice(&piece?);
        }
        Ok(body)
    }
}

/// The reply that a client of the connection reads, however the bytes are split.
async fn answer(bytes: &[u8]) -> Result<(u16, Vec<u8>, bool), ConnectionError> {
    let mut engine = engine();
    engine.far.write_all(bytes).await.expect("there is room");
    let head = engine.head().await?;
    let body = engine.body().await?;
    Ok((head.status.as_u16(), body, engine.connection.is_ready()))
}

#[tokio::test]
async fn a_request_arrives_whole_and_in_order() {
    let mut engine = engine();
    engine.far.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.expect("there is room");
    assert_eq!(engine.head().await.expect("a head").status, 200);
    let mut seen = [0; 22];
    engine.far.read_exact(&mut seen).await.expect("it was sent");
    assert_eq!(&seen, b"POST / HTTP/1.1\r\n\r\nabc");
}

#[tokio::test]
async fn a_request_arrives_whole_however_little_the_socket_takes_at_once() {
    for room in [1, 5, 17, 18, 19, 20, 64] {
        let (near, mut far) = duplex(room);
        let mut connection = Http1::new(near);
        for _ in 0..2 {
            let body = [Bytes::from_static(b"ab"), Bytes::new(), Bytes::from_static(b"c")];
            connection.begin(b"POST / HTTP/1.1\r\n\r\n".to_vec(), &body);
            let reply = async {
                let mut seen = [0; 22];
                far.read_exact(&mut seen).await.expect("it was sent");
                assert_eq!(&seen, b"POST / HTTP/1.1\r\n\r\nabc", "{room}");
                far.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.expect("it is read");
            };
            let (head, ()) = tokio::join!(poll_fn(|context| connection.poll_head(context)), reply);
            assert_eq!(head.expect("a head").status, 200);
            assert!(connection.is_ready() && connection.head.is_empty(), "nothing is kept of a sent head");
        }
    }
}

#[tokio::test]
async fn a_response_ends_as_framed() {
    for (bytes, status, body, again) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"[..], 200, &b"ok"[..], true),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok", true),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", true),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b"", true),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: Close\r\n\r\nok", 200, b"ok", false),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200", 200, b"ok", false),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok", false),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
            200,
            b"ok",
            true,
        ),
        (b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\nx", 404, b"", false),
    ] {
        let text = String::from_utf8_lossy(bytes);
        let seen = answer(bytes).await.unwrap_or_else(|lost| panic!("{text}: {lost}"));
        assert_eq!(seen, (status, body.to_vec(), again), "{text}");
    }
}

#[tokio::test]
async fn an_answer_that_can_be_read_in_two_ways_is_refused() {
    for bytes in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok"[..],
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2,2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000000000\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        &[b'x'; HEAD_BYTES_MAX],
    ] {
        let seen = answer(bytes).await;
        assert!(
            matches!(seen, Err(ConnectionError::Malformed(_))),
            "{}: {seen:?}",
            String::from_utf8_lossy(bytes)
        );
    }
}

#[tokio::test]
async fn data_of_one_read_is_one_piece_and_the_buffer_is_released() {
    let mut engine = engine();
    let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    engine.far.write_all(head).await.expect("there is room");
    engine.head().await.expect("a head");
    engine.far.write_all(b"2\r\nab\r\n1\r\nc\r\n").await.expect("there is room");
    let piece = poll_fn(|context| engine.connection.poll_piece(context)).await;
    assert_eq!(piece.expect("a piece").expect("of data"), "abc");
    assert_eq!(engine.connection.waiting.capacity(), 0);
    assert!(!engine.connection.is_ended() && !engine.connection.is_ready());
}

#[tokio::test]
async fn a_piece_holds_no_memory_but_its_own() {
    for (with_head, later, pieces) in [
        (
            &b"HTTP/1.1 200 OK\r\nx-long: 0123456789\r\ncontent-length: 6\r\n\r\nabc"[..],
            &b"def"[..],
            ["abc", "def"],
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\nc",
            b"de\r\n0\r\n\r\n",
            ["abc", "de"],
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1",
            b"0\r\n0123456789abcdef\r\n",
            ["abc", "0123456789abcdef"],
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", b"d", ["abc", "d"]),
    ] {
        let mut engine = engine();
        engine.far.write_all(with_head).await.expect("there is room");
        engine.head().await.expect("a head");
        for expected in pieces {
            let piece = poll_fn(|context| engine.connection.poll_piece(context)).await;
            let piece = piece.expect("a piece").expect("of data");
            assert_eq!(piece, expected);
            assert_eq!(piece.try_into_mut().expect("a sole owner").capacity(), expected.len());
            engine.far.write_all(later).await.expect("there is room");
        }
    }
}

#[tokio::test]
async fn a_connection_end_before_the_head_is_distinct_from_a_later_one() {
    for (bytes, before) in [
        (&b""[..], true),
        (b"HTTP/1.1 200 OK\r\ncontent-le", false),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", false),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", false),
    ] {
        let mut engine = engine();
        engine.far.write_all(bytes).await.expect("there is room");
        drop(engine.far);
        engine.far = duplex(1).0;
        let seen = match engine.head().await {
            Err(lost) => lost,
            Ok(_) => engine.body().await.expect_err("it has no end"),
        };
        assert_eq!(matches!(seen, ConnectionError::Unanswered), before, "{seen:?}");
        assert_eq!(matches!(seen, ConnectionError::Ended), !before, "{seen:?}");
        assert!(!engine.connection.is_ready());
    }
}

#[tokio::test]
async fn an_answer_without_a_length_ends_with_its_connection() {
    let mut engine = engine();
    engine.far.write_all(b"HTTP/1.1 200 OK\r\n\r\nuntil the end").await.expect("there is room");
    drop(engine.far);
    engine.far = duplex(1).0;
    engine.head().await.expect("a head");
    assert_eq!(engine.body().await.expect("a body"), b"until the end");
    assert!(!engine.connection.is_ready());
}

#[tokio::test]
async fn an_engine_may_answer_before_it_has_read_everything() {
    let (near, mut far) = duplex(64);
    let mut connection = Http1::new(near);
    connection.begin(b"POST / HTTP/1.1\r\n\r\n".to_vec(), &[Bytes::from(vec![b'x'; 4096])]);
    far.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").await.expect("there is room");
    let head = poll_fn(|context| connection.poll_head(context)).await.expect("a head");
    assert_eq!(head.status, 413);
    assert!(!connection.is_ready(), "the rest of the request would be taken for the next one");
}

#[test]
fn a_request_is_flushed_until_it_is_on_its_way_and_no_longer() {
    let mut connection = Http1::new(SlowFlushStream::default());
    connection.begin(b"POST / HTTP/1.1\r\n\r\n".to_vec(), &[Bytes::from_static(b"abc")]);
    let mut context = Context::from_waker(Waker::noop());
    for flushes in [1, 2, 2] {
        assert!(connection.poll_head(&mut context).is_pending());
        assert_eq!(connection.stream.flushes, flushes);
    }
    connection.begin(b"POST / HTTP/1.1\r\n\r\n".to_vec(), &[]);
    assert!(connection.poll_head(&mut context).is_pending());
    assert_eq!(connection.stream.flushes, 3, "the next request is flushed as well");
}
