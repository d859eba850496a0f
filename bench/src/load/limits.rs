//! What a client puts up with.

use std::time::Duration;

/// Bytes of an answer's head; what openai-python's HTTP library reads at most is 100 KiB.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// Header lines of an answer.
pub(super) const HEADERS_MAX: usize = 100;
/// Bytes of the line that begins a chunk, with extensions.
pub(super) const CHUNK_LINE_BYTES_MAX: usize = 4 << 10;
/// Bytes of one event. The largest that engines send is a chunk with the log probabilities of a whole step.
pub(super) const EVENT_BYTES_MAX: usize = 4 << 20;
/// Characters of an error's message that are kept.
pub(super) const MESSAGE_CHARS_MAX: usize = 500;
/// Bytes that are read in one go.
pub(super) const READ_BYTES: usize = 16 << 10;
/// Bytes that are thrown away so that a close is a FIN and no RST, at most.
pub(super) const DRAIN_BYTES_MAX: usize = 4 << 20;
/// A client that will stop reading has a receive buffer of so many bytes, so that the other side notices.
pub(super) const STALL_BUFFER_BYTES: u32 = 4 << 10;
/// How long the end of a whole answer's framing is waited for, so that its connection can be kept.
pub(super) const FRAMING_WAIT: Duration = Duration::from_millis(100);
/// Connections that are kept for later calls.
pub(super) const KEPT_MAX: usize = 4 << 10;

/// The bounds of one call.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Until the connection is there, TLS included.
    pub(crate) connect: Duration,
    /// From the beginning to the end of the call.
    pub(crate) total: Duration,
    /// Without a byte, once the request is sent; what the timeout of openai-python means.
    pub(crate) silence: Option<Duration>,
    /// Bytes of an answer's body.
    pub(crate) answer_bytes: usize,
}

impl Default for Limits {
    /// As openai-python has them (5 s to connect, 600 s without a byte), and an hour in all.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            total: Duration::from_secs(3_600),
            silence: Some(Duration::from_secs(600)),
            answer_bytes: 64 << 20,
        }
    }
}

const _: () = {
    // An event has to fit into what is read at most, and a head into a few reads.
    assert!(EVENT_BYTES_MAX <= 64 << 20);
    assert!(HEAD_BYTES_MAX >= READ_BYTES);
};
