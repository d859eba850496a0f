//! The subscriber's half of ZMTP 3.0 (rfc.zeromq.org/spec/23), as far as a SUB socket needs it, over any stream.
//!
//! ```text
//! greeting ⇄ greeting    READY ⇄ READY    ─▶ subscription    ◀─ message ◀─ message …
//! ```
//!
//! It is implemented here because a peer's frame length must be checked before any allocation.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum bytes of one frame. A message of vLLM with 512 blocks of 128 tokens is below 1 MiB.
const FRAME_BYTES_MAX: u64 = 16 << 20;
/// Maximum frames of one message. Events have three.
const FRAMES_MAX: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection to a publisher ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    /// The connection broke.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer does not use ZMTP 3.
    #[error("the peer does not use ZMTP 3 without security")]
    Greeting,
    /// The peer is no publisher.
    #[error("the peer is not a PUB socket")]
    NotAPublisher,
    /// The engine names no publisher.
    #[error(transparent)]
    Source(#[from] super::sources::SourceError),
    /// A message is larger than any event.
    #[error("a frame of {0} bytes or a message of too many frames")]
    TooLarge(u64),
}

/// A subscribed publisher.
pub(super) struct PublisherConnection<S> {
    stream: S,
}

impl<S: AsyncRead + AsyncWrite + Unpin> PublisherConnection<S> {
    /// Performs the handshake and subscribes to all topics that begin with `topic`.
    pub(super) async fn subscribe(mut stream: S, topic: &[u8]) -> Result<Self, ZmtpError> {
        let mut local_greeting = [0_u8; 64];
        (local_greeting[0], local_greeting[9], local_greeting[10]) = (0xff, 0x7f, 3);
        local_greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&local_greeting).await?;
        let mut peer_greeting = [0_u8; 64];
        stream.read_exact(&mut peer_greeting).await?;
        let null = peer_greeting[12..32].starts_with(b"NULL\0");
        if peer_greeting[0] != 0xff || peer_greeting[9] & 1 == 0 || peer_greeting[10] < 3 || !null {
            return Err(ZmtpError::Greeting);
        }
        stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB").await?;
        let mut publisher = Self { stream };
        let (flags, ready) = publisher.frame().await?;
        let contains = |word: &[u8]| ready.windows(word.len()).any(|window| window == word);
        if flags & COMMAND == 0 || !ready.starts_with(b"\x05READY") || !contains(b"PUB") {
            return Err(ZmtpError::NotAPublisher);
        }
        let length = u8::try_from(topic.len() + 1).map_err(|_| ZmtpError::TooLarge(topic.len() as u64))?;
        let mut subscription = vec![0, length, 1];
        subscription.extend_from_slice(topic);
        publisher.stream.write_all(&subscription).await?;
        Ok(publisher)
    }

    /// The next message's frames.
    ///
    /// # Cancel safety
    /// None. After a cancelled call the connection is unusable.
    pub(super) async fn message(&mut self) -> Result<Vec<Vec<u8>>, ZmtpError> {
        let mut frames = Vec::new();
        let mut bytes = 0;
        loop {
            let (flags, frame) = self.frame().await?;
            if flags & COMMAND != 0 {
                self.answer(&frame).await?;
                continue;
            }
            bytes += frame.len() as u64;
            if bytes > FRAME_BYTES_MAX || frames.len() == FRAMES_MAX {
                return Err(ZmtpError::TooLarge(bytes));
            }
            frames.push(frame);
            if flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }

    /// Answers a PING with its context. Other commands have no effect on a subscriber.
    async fn answer(&mut self, command: &[u8]) -> Result<(), ZmtpError> {
        let Some(context) = command.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) else {
            return Ok(());
        };
        // A context has at most 16 bytes.
        let context = &context[..context.len().min(16)];
        let mut pong = vec![COMMAND, 5 + u8::try_from(context.len()).expect("at most 16")];
        pong.extend_from_slice(b"\x04PONG");
        pong.extend_from_slice(context);
        Ok(self.stream.write_all(&pong).await?)
    }

    async fn frame(&mut self) -> Result<(u8, Vec<u8>), ZmtpError> {
        let flags = self.stream.read_u8().await?;
        let long = flags & LONG != 0;
        let length =
            if long { self.stream.read_u64().await? } else { u64::from(self.stream.read_u8().await?) };
        if length > FRAME_BYTES_MAX {
            return Err(ZmtpError::TooLarge(length));
        }
        // Memory grows with the received bytes, not with the announced length.
        let mut frame = Vec::new();
        let read = (&mut self.stream).take(length).read_to_end(&mut frame).await?;
        if read as u64 != length {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        Ok((flags, frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(mechanism: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, 3, 1);
        bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
        bytes
    }

    const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

    /// Subscribes to a publisher that sends these bytes, and returns the first message or the error.
    async fn receive(sent: &[&[u8]]) -> Result<Vec<Vec<u8>>, ZmtpError> {
        let (local, mut peer) = tokio::io::duplex(1 << 16);
        peer.write_all(&sent.concat()).await.expect("there is room");
        peer.shutdown().await.expect("it can be closed");
        PublisherConnection::subscribe(local, b"kv").await?.message().await
    }

    #[tokio::test]
    async fn messages_are_read_in_frames_of_either_length() {
        let long = [&[2, 0, 0, 0, 0, 0, 0, 1, 0][..], &[7; 256]].concat();
        let sent = [&greeting(b"NULL")[..], READY, b"\x04\x06\x05HELLO", b"\x01\x02kv", &long];
        let frames = receive(&sent).await.expect("a message");
        assert_eq!(frames, [b"kv".to_vec(), vec![7; 256]]);
    }

    #[tokio::test]
    async fn a_peer_that_is_no_publisher_or_exceeds_a_bound_is_dropped() {
        let good = greeting(b"NULL");
        let many = [b"\x01\x00".as_slice(); 20].concat();
        let huge = b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff";
        let pull = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PULL";
        assert!(matches!(receive(&[b"HTTP/1.1 400 Bad Request", &[0; 64]]).await, Err(ZmtpError::Greeting)));
        assert!(matches!(receive(&[&greeting(b"CURVE")]).await, Err(ZmtpError::Greeting)));
        assert!(matches!(receive(&[&good, pull]).await, Err(ZmtpError::NotAPublisher)));
        assert!(matches!(receive(&[&good, READY, huge]).await, Err(ZmtpError::TooLarge(_))));
        assert!(matches!(receive(&[&good, READY, &many]).await, Err(ZmtpError::TooLarge(_))));
        assert!(matches!(receive(&[&good, READY, b"\x00\x09cut"]).await, Err(ZmtpError::Io(_))));
        assert!(matches!(receive(&[&good[..20]]).await, Err(ZmtpError::Io(_))));
    }
}
