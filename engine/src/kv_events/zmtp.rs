//! The engine's half of ZMTP 3.0 (rfc.zeromq.org/spec/23), as far as PUB and ROUTER sockets need it, over any stream.
//!
//! ```text
//! greeting ⇄ greeting    READY ⇄ READY    then frames
//! ```
//!
//! A peer's frame length is checked before any allocation. Peers only subscribe or ask for a replay, so their frames
//! are short.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Limit of a peer's frame: a topic, a number, or the properties of a socket.
const FRAME_BYTES_MAX: u64 = 1 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    /// The connection broke, or the peer did not answer or read in time.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer does not use ZMTP 3.
    #[error("the peer does not use ZMTP 3 without security")]
    Greeting,
    /// The peer's socket does not fit.
    #[error("the peer's socket does not fit: {0:?}")]
    Socket(String),
    /// A frame is larger than any request.
    #[error("a frame of {0} bytes")]
    TooLarge(u64),
    /// A message is no request.
    #[error("not a request for a replay")]
    Request,
}

/// An own socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketKind {
    /// Sends messages to subscribers.
    Publisher,
    /// Answers requests for replays.
    Replay,
}

impl SocketKind {
    fn name(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Replay => "ROUTER",
        }
    }

    fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Self::Publisher => matches!(peer, b"SUB" | b"XSUB"),
            Self::Replay => matches!(peer, b"REQ" | b"DEALER" | b"ROUTER"),
        }
    }
}

/// One frame of a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PeerFrame {
    pub(super) is_command: bool,
    /// More frames of the message follow.
    pub(super) more: bool,
    pub(super) body: Vec<u8>,
}

/// Performs the handshake.
pub(super) async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    own: SocketKind,
) -> Result<(), ZmtpError> {
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
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(own.name().len() as u8);
    ready.extend_from_slice(own.name().as_bytes());
    let mut frame = Vec::new();
    put_frame(&mut frame, COMMAND, &ready);
    stream.write_all(&frame).await?;
    let peer = read_frame(stream).await?;
    let kind = socket_type(&peer.body).filter(|_| peer.is_command).unwrap_or_default();
    if own.accepts(kind) {
        Ok(())
    } else {
        Err(ZmtpError::Socket(String::from_utf8_lossy(&kind[..kind.len().min(16)]).into_owned()))
    }
}

/// The property `Socket-Type` of a READY command.
fn socket_type(ready: &[u8]) -> Option<&[u8]> {
    let mut rest = ready.strip_prefix(b"\x05READY")?;
    while let Some((&length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(length))?;
        let (size, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*size) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
    None
}

/// Reads one frame.
///
/// # Cancel safety
/// None. After a cancelled call the connection is unusable.
pub(super) async fn read_frame<S: AsyncRead + Unpin>(stream: &mut S) -> Result<PeerFrame, ZmtpError> {
    let flags = stream.read_u8().await?;
    let length = match flags & LONG {
        0 => u64::from(stream.read_u8().await?),
        _ => stream.read_u64().await?,
    };
    if length > FRAME_BYTES_MAX {
        return Err(ZmtpError::TooLarge(length));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).await?;
    Ok(PeerFrame { is_command: flags & COMMAND != 0, more: flags & MORE != 0, body })
}

/// Appends a message of these frames.
pub(super) fn put_message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (at, frame) in frames.iter().enumerate() {
        put_frame(out, if at + 1 < frames.len() { MORE } else { 0 }, frame);
    }
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.extend([flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// The answer to a PING command; `None` for any other command.
pub(super) fn pong(command: &[u8]) -> Option<Vec<u8>> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut body = b"\x04PONG".to_vec();
    // A context has at most 16 bytes.
    body.extend_from_slice(&context[..context.len().min(16)]);
    let mut frame = Vec::new();
    put_frame(&mut frame, COMMAND, &body);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greeting of a libzmq peer.
    fn greeting(mechanism: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, 3, 1);
        bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
        bytes
    }

    const SUB: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB";
    /// libzmq's DEALER also sends its identity.
    const DEALER: &[u8] = b"\x04\x29\x05READY\x08Identity\0\0\0\0\x0bSocket-Type\0\0\0\x06DEALER";

    async fn shake(own: SocketKind, sent: &[&[u8]]) -> Result<Vec<u8>, ZmtpError> {
        let (mut local, mut peer) = tokio::io::duplex(1 << 16);
        peer.write_all(&sent.concat()).await.expect("there is room");
        peer.shutdown().await.expect("it can be closed");
        shake_hands(&mut local, own).await?;
        drop(local);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).await?;
        Ok(received)
    }

    async fn refused(own: SocketKind, sent: &[&[u8]]) -> ZmtpError {
        shake(own, sent).await.expect_err("refused")
    }

    #[tokio::test]
    async fn a_subscriber_and_a_replay_client_are_accepted() {
        let sent = shake(SocketKind::Publisher, &[&greeting(b"NULL"), SUB]).await.expect("accepted");
        assert_eq!(sent[64..], *b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
        let sent = shake(SocketKind::Replay, &[&greeting(b"NULL"), DEALER]).await.expect("accepted");
        assert_eq!(sent[64..], *b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER");
    }

    #[tokio::test]
    async fn other_peers_and_frames_beyond_the_bound_are_refused() {
        use SocketKind::Publisher;
        let (null, curve) = (greeting(b"NULL"), greeting(b"CURVE"));
        let http =
            b"GET /metrics HTTP/1.1\r\nhost: engine\r\naccept: text/plain\r\nuser-agent: scraper\r\n\r\n";
        assert!(matches!(refused(Publisher, &[http]).await, ZmtpError::Greeting));
        assert!(matches!(refused(Publisher, &[&curve, SUB]).await, ZmtpError::Greeting));
        let wrong = refused(Publisher, &[&null, DEALER]).await;
        assert!(matches!(wrong, ZmtpError::Socket(kind) if kind == "DEALER"));
        assert!(matches!(refused(SocketKind::Replay, &[&null, SUB]).await, ZmtpError::Socket(_)));
        assert!(matches!(refused(Publisher, &[&null, b"\x00\x01\x00"]).await, ZmtpError::Socket(_)));
        // A property that is longer than its command.
        let cut = b"\x04\x16\x05READY\x0bSocket-Type\0\0\0\xff";
        assert!(matches!(refused(Publisher, &[&null, cut]).await, ZmtpError::Socket(_)));
        let huge = b"\x06\x7f\xff\xff\xff\xff\xff\xff\xff";
        assert!(matches!(refused(Publisher, &[&null, huge]).await, ZmtpError::TooLarge(_)));
        assert!(matches!(refused(Publisher, &[&null[..20]]).await, ZmtpError::Io(_)));
    }

    #[test]
    fn messages_have_frames_of_either_length() {
        let mut out = Vec::new();
        put_message(&mut out, &[b"kv", &[7; 256]]);
        let long = [&[2, 0, 0, 0, 0, 0, 0, 1, 0][..], &[7; 256]].concat();
        assert_eq!(out, [b"\x01\x02kv", &long[..]].concat());
        assert_eq!(pong(b"\x04PING\0\x0actx"), Some(b"\x04\x08\x04PONGctx".to_vec()));
        assert_eq!((pong(b"\x04PING\0"), pong(b"\x05READY")), (None, None));
    }
}
