//! Messages between engines: one line of JSON each, in order, on one connection per direction.
//!
//! As with SGLang's ZMQ sockets, a sender does not wait, and does not learn whether a message has arrived. Messages to
//! an engine that does not listen are dropped.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
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
    runtime: tokio::runtime::Handle,
    stop: CancellationToken,
}

impl PeerLinks {
    pub(super) fn new(runtime: tokio::runtime::Handle, stop: CancellationToken) -> Self {
        Self { links: Mutex::default(), runtime, stop }
    }

    /// Sends a message, or drops it.
    pub(super) fn send(&self, to: SocketAddr, envelope: Envelope) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if !links.contains_key(&to) && links.len() >= LINKS_MAX {
            return;
        }
        let link = links.entry(to).or_insert_with(|| {
            let (sender, queued) = mpsc::channel(QUEUED_MAX);
            let stop = self.stop.clone();
            self.runtime.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = write(to, queued) => {}
                }
            });
            sender
        });
        // A full queue drops the message.
        let _ = link.try_send(envelope);
    }
}

/// Writes messages until the engine ends.
async fn write(to: SocketAddr, mut queued: mpsc::Receiver<Envelope>) {
    let mut connection: Option<TcpStream> = None;
    while let Some(envelope) = queued.recv().await {
        let mut line = serde_json::to_vec(&envelope).expect("numbers and texts are JSON");
        line.push(b'\n');
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
            if matches!(tokio::time::timeout(SEND_WITHIN, sends).await, Ok(Ok(()))) {
                break;
            }
            connection = None;
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

/// Accepts connections and gives each to a task of its own, until `stop`. Then every task ends.
pub(in crate::sim::engines) async fn accept<F>(
    listener: std::net::TcpListener,
    stop: &CancellationToken,
    serve: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors: wait until some are closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        connections.spawn(serve(stream));
        while connections.try_join_next().is_some() {}
    }
}
