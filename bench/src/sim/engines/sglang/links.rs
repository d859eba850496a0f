//! Messages between engines: one line of JSON each, in order, on one connection per direction.
//!
//! As with SGLang's ZMQ sockets, a sender does not wait, and does not learn whether a message has arrived. It learns
//! only that no engine listens.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::message::Envelope;

/// Maximum messages that wait for one engine, as ZMQ's default. Further ones are dropped.
const QUEUED_MAX: usize = 1_000;
/// Maximum engines with a connection. Messages to further ones are dropped.
const LINKS_MAX: usize = 256;
/// Maximum bytes of a message: page indices and contents of 64 Ki pages.
const MESSAGE_BYTES_MAX: u64 = 4 << 20;
/// Timeout of a connection attempt and of a write.
const SEND_WITHIN: Duration = Duration::from_secs(1);

/// The connections of one engine to others.
pub(super) struct PeerLinks {
    links: Mutex<HashMap<SocketAddr, mpsc::Sender<Envelope>>>,
    undelivered: UndeliveredSender,
    runtime: tokio::runtime::Handle,
    stop: CancellationToken,
}

/// Messages to engines that do not listen.
pub(super) type UndeliveredSender = mpsc::Sender<(SocketAddr, Envelope)>;

impl PeerLinks {
    pub(super) fn new(
        runtime: tokio::runtime::Handle,
        stop: CancellationToken,
    ) -> (Self, mpsc::Receiver<(SocketAddr, Envelope)>) {
        let (undelivered, receiver) = mpsc::channel(QUEUED_MAX);
        (Self { links: Mutex::default(), undelivered, runtime, stop }, receiver)
    }

    /// Sends a message, or drops it.
    pub(super) fn send(&self, to: SocketAddr, envelope: Envelope) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if !links.contains_key(&to) && links.len() >= LINKS_MAX {
            return;
        }
        let link = links.entry(to).or_insert_with(|| {
            let (sender, queued) = mpsc::channel(QUEUED_MAX);
            let (stop, undelivered) = (self.stop.clone(), self.undelivered.clone());
            self.runtime.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = write(to, queued, &undelivered) => {}
                }
            });
            sender
        });
        // A full queue drops the message.
        let _ = link.try_send(envelope);
    }
}

/// Writes messages until the engine ends.
async fn write(to: SocketAddr, mut queued: mpsc::Receiver<Envelope>, undelivered: &UndeliveredSender) {
    let mut connection: Option<TcpStream> = None;
    while let Some(envelope) = queued.recv().await {
        let mut line = serde_json::to_vec(&envelope).expect("numbers and texts are JSON");
        line.push(b'\n');
        let mut sent = false;
        // The peer may have restarted since the last message.
        for _ in 0..2 {
            let sends = async {
                if connection.as_ref().is_some_and(is_closed) {
                    connection = None;
                }
                let stream = match &mut connection {
                    Some(stream) => stream,
                    None => {
                        let stream = TcpStream::connect(to).await?;
                        stream.set_nodelay(true)?;
                        connection.insert(stream)
                    }
                };
                stream.write_all(&line).await
            };
            sent = matches!(tokio::time::timeout(SEND_WITHIN, sends).await, Ok(Ok(())));
            if sent {
                break;
            }
            connection = None;
        }
        if !sent {
            // A full queue drops the report. The leg then ends by its timeout.
            let _ = undelivered.try_send((to, envelope));
        }
    }
}

/// Whether the receiver has closed a connection on which it sends nothing.
fn is_closed(stream: &TcpStream) -> bool {
    let blocks = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    !stream.try_read(&mut [0]).is_err_and(|error| blocks(&error))
}

/// Reads messages of one connection until it ends or a line is no message.
pub(super) async fn read(stream: TcpStream, deliver: impl Fn(Envelope)) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut bounded = (&mut reader).take(MESSAGE_BYTES_MAX);
        if !matches!(bounded.read_until(b'\n', &mut line).await, Ok(1..)) {
            return;
        }
        let Ok(envelope) = serde_json::from_slice(&line) else { return };
        deliver(envelope);
    }
}
