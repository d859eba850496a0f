//! Replays: a client asks for all kept messages from a number on, and gets them with an end marker, as from vLLM.
//!
//! ```text
//! request  [empty, number]            answers  [empty, topic, number, payload] …, [empty, empty, -1, empty]
//! ```

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::connection::{HANDSHAKE_TIMEOUT, timed_out, write_all};
use super::shared_log::SharedLog;
use super::zmtp::{self, SocketKind, ZmtpError, put_message, read_frame, shake_hands};

/// The number of the end marker: vLLM's -1.
const END_SEQUENCE: [u8; 8] = (-1_i64).to_be_bytes();

/// Serves one client until its connection ends. A message that is no request ends it too, so that a client with
/// another form does not wait for an answer.
pub(super) async fn serve_replays<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    log: Arc<SharedLog>,
) -> Result<(), ZmtpError> {
    let mut stream = stream;
    let handshake = timeout(HANDSHAKE_TIMEOUT, shake_hands(&mut stream, SocketKind::Replay));
    handshake.await.map_err(|_| timed_out())??;
    loop {
        let mut from = read_request(&mut stream).await?;
        // Messages that are published meanwhile belong to the next replay, so that this one ends.
        let end = log.end();
        let mut buffer = Vec::new();
        while let Some(message) = log.replay(from).filter(|message| message.sequence < end) {
            buffer.clear();
            let number = message.sequence.to_be_bytes();
            put_message(&mut buffer, &[b"", log.topic(), &number, &message.payload]);
            write_all(&mut stream, &buffer).await?;
            from = message.sequence + 1;
        }
        buffer.clear();
        put_message(&mut buffer, &[b"", b"", &END_SEQUENCE, b""]);
        write_all(&mut stream, &buffer).await?;
    }
}

/// The first number of the next request.
async fn read_request<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> Result<u64, ZmtpError> {
    let mut delimited = false;
    loop {
        let frame = read_frame(stream).await?;
        if frame.is_command {
            if let Some(answer) = zmtp::pong(&frame.body) {
                write_all(stream, &answer).await?;
            }
            continue;
        }
        match (delimited, frame.more, <[u8; 8]>::try_from(frame.body.as_slice())) {
            (false, true, Err(_)) if frame.body.is_empty() => delimited = true,
            (true, false, Ok(number)) => return Ok(u64::from_be_bytes(number)),
            _ => return Err(ZmtpError::Request),
        }
    }
}
