//! Limits of a client.

use std::time::Duration;

/// Bytes of a response head. The HTTP library of openai-python reads at most 100 KiB.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// Header lines of a response.
pub(super) const HEADERS_MAX: usize = 100;
/// Bytes of the line that begins a chunk, with extensions.
pub(super) const CHUNK_LINE_BYTES_MAX: usize = 4 << 10;
/// Bytes of one event. The largest that engines send is a chunk with the log probabilities of a whole step.
pub(super) const EVENT_BYTES_MAX: usize = 4 << 20;
/// Characters that are kept of an error message.
pub(super) const MESSAGE_CHARS_MAX: usize = 500;
/// Bytes per read.
pub(super) const READ_BYTES: usize = 16 << 10;
/// Maximum bytes that are discarded so that a close is a FIN and no RST.
pub(super) const DRAIN_BYTES_MAX: usize = 4 << 20;
/// Receive buffer in bytes of a client that will stop reading. It is small so that the server notices.
pub(super) const STALL_BUFFER_BYTES: u32 = 4 << 10;
/// How long a client waits for the end of a complete response's framing, to keep the connection.
pub(super) const FRAMING_WAIT: Duration = Duration::from_millis(100);
/// Maximum of idle connections.
pub(super) const KEPT_MAX: usize = 4 << 10;

/// Limits of one call.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// To connect, including TLS.
    pub(crate) connect: Duration,
    /// From the beginning to the end of the call.
    pub(crate) total: Duration,
    /// Without a byte, after the request is sent, as the timeout of openai-python.
    pub(crate) silence: Option<Duration>,
    /// Bytes of a response body.
    pub(crate) answer_bytes: usize,
}

impl Default for Limits {
    /// As openai-python (5 s to connect, 600 s without a byte), and one hour in total.
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
    // An event must fit into the maximum body, and a head into a few reads.
    assert!(EVENT_BYTES_MAX <= 64 << 20);
    assert!(HEAD_BYTES_MAX >= READ_BYTES);
};
