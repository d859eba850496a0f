//! The sockets of one rank, and the tasks that serve their connections.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::{EventEndpoint, KvEventsConfig};
use super::connection::serve_subscriber;
use super::replay::serve_replays;
use super::shared_log::SharedLog;
use super::zmtp::{SocketKind, ZmtpError};

/// Limit of the connections of one socket: more than routers of one fleet. A further one is closed at once.
const CONNECTIONS_MAX: usize = 64;
/// Timeout of a connection to a subscriber.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two tries, doubled up to the maximum.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Pause after the system refused a connection, usually for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// TCP keepalive of a silent connection: idle time, interval and number of probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;

/// The sockets of one rank, bound before the model is loaded.
pub struct EventSockets {
    /// With the port that was taken.
    endpoint: EventEndpoint,
    /// None: the engine connects.
    listener: Option<std::net::TcpListener>,
    replay: Option<(EventEndpoint, std::net::TcpListener)>,
}

impl EventSockets {
    /// Binds the sockets of a rank. `own`: the address of the HTTP server, for `*`.
    ///
    /// # Errors
    /// An endpoint that cannot be used, with its reason.
    pub fn bind(config: &KvEventsConfig, rank: usize, own: IpAddr) -> Result<Self, String> {
        let endpoint = config.endpoint.of_rank(rank).map_err(|error| error.to_string())?;
        let (listener, endpoint) = match endpoint.address(own) {
            Some(address) => {
                let (listener, port) = listen(address)?;
                (Some(listener), endpoint.at_port(port))
            }
            None => (None, endpoint),
        };
        let mut replay = None;
        if let Some(first) = &config.replay_endpoint {
            let endpoint = first.of_rank(rank).map_err(|error| error.to_string())?;
            let address = endpoint.address(own).expect("a replay endpoint listens");
            let (listener, port) = listen(address)?;
            replay = Some((endpoint.at_port(port), listener));
        }
        Ok(Self { endpoint, listener, replay })
    }

    /// Where the rank publishes, with the port that was taken.
    #[must_use]
    pub fn endpoint(&self) -> &EventEndpoint {
        &self.endpoint
    }

    /// Where the rank replays.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&EventEndpoint> {
        self.replay.as_ref().map(|(endpoint, _)| endpoint)
    }

    /// Serves the sockets by tasks until `stop`, in the context of a runtime.
    pub(super) fn serve(
        self,
        tasks: &TaskTracker,
        stop: &CancellationToken,
        log: &Arc<SharedLog>,
    ) -> std::io::Result<()> {
        let tasks_of =
            |kind| SocketTasks { kind, tasks: tasks.clone(), stop: stop.clone(), log: Arc::clone(log) };
        match (self.listener, self.endpoint) {
            (Some(listener), _) => {
                let listener = TcpListener::from_std(listener)?;
                tasks.spawn(tasks_of(SocketKind::Publisher).accept(listener));
            }
            (None, EventEndpoint::Connect { host, port }) => {
                tasks.spawn(connect(host, port, stop.clone(), Arc::clone(log)));
            }
            (None, EventEndpoint::Listen { .. }) => unreachable!("it has a listener"),
        }
        if let Some((_, listener)) = self.replay {
            let listener = TcpListener::from_std(listener)?;
            tasks.spawn(tasks_of(SocketKind::Replay).accept(listener));
        }
        Ok(())
    }
}

fn listen(address: SocketAddr) -> Result<(std::net::TcpListener, u16), String> {
    let bound = std::net::TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    });
    bound.map_err(|error| format!("listen on {address}: {error}"))
}

/// The connections of one listening socket.
struct SocketTasks {
    kind: SocketKind,
    tasks: TaskTracker,
    stop: CancellationToken,
    log: Arc<SharedLog>,
}

impl SocketTasks {
    async fn accept(self, listener: TcpListener) {
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let accepted = tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(event = "kv_event_accept_failed", %error, "cannot accept subscribers of KV events");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // Without a permit the connection is closed.
            if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
                let (kind, stop, log) = (self.kind, self.stop.clone(), Arc::clone(&self.log));
                self.tasks.spawn(async move {
                    let _permit = permit;
                    report(serve(stream, kind, &stop, log).await);
                });
            }
        }
    }
}

async fn serve(
    stream: TcpStream,
    kind: SocketKind,
    stop: &CancellationToken,
    log: Arc<SharedLog>,
) -> Result<(), ZmtpError> {
    keep_alive(&stream)?;
    match kind {
        // It ends by itself when the log is closed.
        SocketKind::Publisher => serve_subscriber(stream, log).await,
        SocketKind::Replay => tokio::select! {
            () = stop.cancelled() => Ok(()),
            ended = serve_replays(stream, log) => ended,
        },
    }
}

/// Connects to a subscriber that listens, again and again.
async fn connect(host: String, port: u16, stop: CancellationToken, log: Arc<SharedLog>) {
    let mut pause = PAUSE;
    while !log.is_closed() {
        let dial = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((host.as_str(), port)));
        let dialled = tokio::select! {
            () = stop.cancelled() => return,
            dialled = dial => dialled,
        };
        let stream = dialled.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        match stream {
            Ok(stream) => {
                pause = PAUSE;
                report(serve(stream, SocketKind::Publisher, &stop, Arc::clone(&log)).await);
            }
            Err(error) => {
                pause = (pause * 2).min(PAUSE_MAX);
                report(Err(error.into()));
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// A subscriber may be silent for hours. A host that is gone does not answer keepalives.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_EVERY);
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TRIES))
}

fn report(ended: Result<(), ZmtpError>) {
    if let Err(error) = ended {
        tracing::debug!(event = "kv_event_connection_ended", %error, "a connection for KV events ended");
    }
}
