//! One subscriber: its subscriptions are read while messages are written.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::shared_log::SharedLog;
use super::zmtp::{self, PeerFrame, SocketKind, ZmtpError, put_message, read_frame, shake_hands};

/// Timeout of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a peer may read nothing of a message. A stopped process keeps its connection; it is closed then.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers to PINGs that wait to be written. Further PINGs are not answered.
const PONGS_MAX: usize = 4;

/// A change by a peer's frame.
enum PeerRequest {
    Subscribe,
    Cancel,
    Pong(Vec<u8>),
    Other,
}

/// Counts a subscriber until it is dropped.
struct SubscriberGuard<'a>(&'a SharedLog);

impl<'a> SubscriberGuard<'a> {
    fn new(log: &'a SharedLog) -> Self {
        log.metrics().subscribers.increment(1.0);
        Self(log)
    }
}

impl Drop for SubscriberGuard<'_> {
    fn drop(&mut self) {
        self.0.metrics().subscribers.decrement(1.0);
    }
}

/// Serves one subscriber until its connection ends, or until the log is closed and the subscriber has all messages.
pub(super) async fn serve_subscriber<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    log: Arc<SharedLog>,
) -> Result<(), ZmtpError> {
    let mut stream = stream;
    let handshake = timeout(HANDSHAKE_TIMEOUT, shake_hands(&mut stream, SocketKind::Publisher));
    handshake.await.map_err(|_| timed_out())??;
    let _counted = SubscriberGuard::new(&log);
    let (reader, writer) = tokio::io::split(stream);
    let (subscriptions, subscribed) = watch::channel(0);
    let (pongs, answers) = mpsc::channel(PONGS_MAX);
    tokio::select! {
        ended = read_requests(reader, log.topic(), subscriptions, pongs) => ended,
        ended = write_messages(writer, &log, subscribed, answers) => ended,
    }
}

/// The subscriptions that match the topic are counted, and no others are kept.
async fn read_requests<S: AsyncRead + Unpin>(
    mut reader: ReadHalf<S>,
    topic: &[u8],
    subscriptions: watch::Sender<usize>,
    pongs: mpsc::Sender<Vec<u8>>,
) -> Result<(), ZmtpError> {
    loop {
        let frame = read_frame(&mut reader).await?;
        match request(&frame, topic) {
            PeerRequest::Subscribe => subscriptions.send_modify(|count| *count = count.saturating_add(1)),
            PeerRequest::Cancel => subscriptions.send_modify(|count| *count = count.saturating_sub(1)),
            PeerRequest::Pong(answer) => drop(pongs.try_send(answer)),
            PeerRequest::Other => {}
        }
    }
}

/// ZMTP 3.0 subscribes by a message whose first byte is 1 or 0, ZMTP 3.1 by commands.
fn request(frame: &PeerFrame, topic: &[u8]) -> PeerRequest {
    let is_cancel = match (frame.is_command, frame.body.as_slice()) {
        (false, [1, prefix @ ..]) if topic.starts_with(prefix) => false,
        (false, [0, prefix @ ..]) if topic.starts_with(prefix) => true,
        (true, body) => {
            if let Some(answer) = zmtp::pong(body) {
                return PeerRequest::Pong(answer);
            }
            let matches =
                |command: &[u8]| body.strip_prefix(command).is_some_and(|prefix| topic.starts_with(prefix));
            if matches(b"\x09SUBSCRIBE") {
                false
            } else if matches(b"\x06CANCEL") {
                true
            } else {
                return PeerRequest::Other;
            }
        }
        (false, _) => return PeerRequest::Other,
    };
    if is_cancel { PeerRequest::Cancel } else { PeerRequest::Subscribe }
}

/// Writes each message from the subscription on. A subscriber that is too far behind misses messages.
async fn write_messages<S: AsyncWrite + Unpin>(
    mut writer: WriteHalf<S>,
    log: &SharedLog,
    mut subscribed: watch::Receiver<usize>,
    mut pongs: mpsc::Receiver<Vec<u8>>,
) -> Result<(), ZmtpError> {
    let mut changes = log.changes();
    // The number of the next message; none while there is no subscription.
    let mut from = None;
    let mut buffer = Vec::new();
    loop {
        // Marked as seen before the log is read: a later change ends the wait below.
        let is_closed = changes.borrow_and_update().is_closed;
        let is_subscribed = *subscribed.borrow_and_update() > 0;
        from = if is_subscribed { from.or_else(|| Some(log.begin())) } else { None };
        buffer.clear();
        while let Ok(answer) = pongs.try_recv() {
            buffer.extend_from_slice(&answer);
        }
        if let Some(message) = from.and_then(|from| log.next(from)) {
            put_message(&mut buffer, &[log.topic(), &message.sequence.to_be_bytes(), &message.payload]);
            from = Some(message.sequence + 1);
        } else if is_closed {
            return Ok(());
        }
        if !buffer.is_empty() {
            write_all(&mut writer, &buffer).await?;
            continue;
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return Ok(()) },
            changed = subscribed.changed() => if changed.is_err() { return Ok(()) },
            answer = pongs.recv() => match answer {
                Some(answer) => write_all(&mut writer, &answer).await?,
                None => return Ok(()),
            },
        }
    }
}

/// Writes bytes to a peer that reads.
pub(super) async fn write_all<S: AsyncWrite + Unpin>(writer: &mut S, bytes: &[u8]) -> Result<(), ZmtpError> {
    Ok(timeout(WRITE_TIMEOUT, writer.write_all(bytes)).await.map_err(|_| timed_out())??)
}

pub(super) fn timed_out() -> ZmtpError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(is_command: bool, body: &[u8]) -> PeerFrame {
        PeerFrame { is_command, more: false, body: body.to_vec() }
    }

    #[test]
    fn subscriptions_of_both_versions_count_if_they_match_the_topic() {
        let of = |is_command: bool, body: &[u8]| request(&frame(is_command, body), b"kv");
        assert!(matches!(of(false, b"\x01kv"), PeerRequest::Subscribe));
        assert!(matches!(of(false, b"\x01"), PeerRequest::Subscribe), "an empty prefix matches all");
        assert!(matches!(of(false, b"\x00k"), PeerRequest::Cancel));
        assert!(matches!(of(true, b"\x09SUBSCRIBEkv"), PeerRequest::Subscribe));
        assert!(matches!(of(true, b"\x06CANCELk"), PeerRequest::Cancel));
        assert!(matches!(of(true, b"\x04PING\0\x0a"), PeerRequest::Pong(_)));
        for other in [b"\x01kv-events".as_slice(), b"\x01x", b"\x02kv", b""] {
            assert!(matches!(of(false, other), PeerRequest::Other), "{other:?}");
        }
        for other in [b"\x09SUBSCRIBEx".as_slice(), b"\x05HELLO", b""] {
            assert!(matches!(of(true, other), PeerRequest::Other), "{other:?}");
        }
    }
}
