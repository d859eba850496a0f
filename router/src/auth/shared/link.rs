//! The connection to the server: one for all requests, made and tested in the background.
//!
//! ```text
//!   Down ── connected, and three answers in time ─▶ Up ── the connection broke, or three failures in a row ─▶ Down
//!    └── backoff, 0.1 to 5 s
//! ```
//!
//! Failures within one `timeout_ms` count once: requests that wait together fail together, in one short stall.
//!
//! A request never connects and never tests: while the link is down, it learns that without a wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo, RedisError, ScriptInvocation};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use super::bounded_stream::BoundedStream;
use super::protocol;
use super::terms::SharedLimitsTerms;
use crate::metrics::tenants::SharedResult;
use crate::tls::service::dial;

/// Time for a connection with its handshakes and tests. No request waits for it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Failures in a row after which requests do without the server: it costs them at most so many timeouts.
const FAILURES_MAX: u32 = 3;
/// Answers in time before requests use a connection.
const TESTS: u32 = 3;
/// Commands that may wait for the socket. Further ones wait for room, within their timeout.
const UNSENT_MAX: usize = 1024;
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A connection that lasted this long was a good one, and the next backoff begins at the minimum.
const STABLE: Duration = Duration::from_secs(10);

/// The link of a router to the server.
pub(super) struct StoreLink {
    /// `None`: down.
    current: ArcSwapOption<Connected>,
    failures: Mutex<FailureRow>,
    /// The time within which failures count once: that of a question.
    window: Duration,
}

/// Failures in a row. Pure.
#[derive(Debug, Default)]
struct FailureRow {
    count: u32,
    /// The latest failure that was counted.
    latest: Option<Instant>,
}

impl FailureRow {
    /// Counts a failure, unless another one was counted within the window. Returns whether the link is given up.
    fn add(&mut self, now: Instant, window: Duration) -> bool {
        if self.latest.is_none_or(|latest| now.saturating_duration_since(latest) >= window) {
            self.count = self.count.saturating_add(1);
            self.latest = Some(now);
        }
        self.count >= FAILURES_MAX
    }
}

/// A connection, and the task that reads and writes it.
pub(super) struct Connected {
    pub connection: MultiplexedConnection,
    /// The connection has ended, or requests have given it up.
    over: Arc<Notify>,
    _driver: AbortOnDropHandle<()>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Timeout,
    #[error("no answer within {0} ms")]
    Slow(u128),
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    #[error("the server refuses: {0}")]
    Server(String),
}

impl StoreLink {
    /// A link that is down. `window`: the time of a question.
    pub(super) fn new(window: Duration) -> Self {
        Self { current: ArcSwapOption::empty(), failures: Mutex::default(), window }
    }

    /// Asks the server, for a request. An error has been counted as a failure of the link.
    ///
    /// # Errors
    /// The result to count.
    pub(super) async fn ask(
        &self,
        invocation: &ScriptInvocation<'static>,
        timeout: Duration,
    ) -> Result<Vec<i64>, SharedResult> {
        let Some(connected) = self.current.load_full() else { return Err(SharedResult::Unavailable) };
        let mut connection = connected.connection.clone();
        let asked = tokio::time::timeout(timeout, invocation.invoke_async::<Vec<i64>>(&mut connection)).await;
        match asked {
            Ok(Ok(reply)) => {
                *self.failures.lock() = FailureRow::default();
                Ok(reply)
            }
            Ok(Err(error)) => {
                self.fail(&connected, &error);
                Err(SharedResult::Error)
            }
            Err(_elapsed) => {
                self.count_failure(&connected);
                Err(SharedResult::Timeout)
            }
        }
    }

    /// Counts an error of a connection. A lost connection is not tried again.
    pub(super) fn fail(&self, connected: &Arc<Connected>, error: &RedisError) {
        if error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error() {
            self.take_down(connected);
        } else {
            self.count_failure(connected);
        }
    }

    /// Counts an answer that was late or made no sense.
    pub(super) fn count_failure(&self, connected: &Arc<Connected>) {
        let is_over = self.failures.lock().add(Instant::now(), self.window);
        if is_over {
            self.take_down(connected);
        }
    }

    /// No request uses the connection from now on.
    fn take_down(&self, connected: &Arc<Connected>) {
        self.current.compare_and_swap(connected, None);
        connected.over.notify_one();
    }

    /// The connection in use.
    pub(super) fn connected(&self) -> Option<Arc<Connected>> {
        self.current.load_full()
    }

    /// Requests use the connection from now on.
    pub(super) fn put_up(&self, connected: Arc<Connected>) {
        *self.failures.lock() = FailureRow::default();
        self.current.store(Some(connected));
    }

    /// Returns when the connection has ended or was given up.
    pub(super) async fn went_down(&self, connected: &Arc<Connected>) {
        connected.over.notified().await;
        self.take_down(connected);
    }
}

/// Makes a connection and tests it.
///
/// # Errors
/// [`LinkError`].
pub(super) async fn connect(terms: &SharedLimitsTerms) -> Result<Arc<Connected>, LinkError> {
    let connected = async {
        let address = &terms.address;
        let stream = dial(&address.host, address.port, terms.tls.as_ref()).await?;
        let mut info = RedisConnectionInfo::default()
            .set_db(address.database.into())
            .set_protocol(ProtocolVersion::RESP2)
            .set_skip_set_lib_name();
        if let Some(user) = &address.user {
            info = info.set_username(user);
        }
        if let Some(password) = &terms.password {
            info = info.set_password(password);
        }
        // The callers bound the time.
        let config =
            AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(UNSENT_MAX);
        let stream = BoundedStream::new(stream);
        let made = MultiplexedConnection::new_with_config(&info, stream, config).await;
        let (mut connection, driver) = made.map_err(server_error)?;
        let over = Arc::new(Notify::new());
        let ended = Arc::clone(&over);
        let driver = AbortOnDropHandle::new(tokio::spawn(async move {
            driver.await;
            ended.notify_one();
        }));
        for script in protocol::scripts() {
            script.prepare_invoke().load_async(&mut connection).await.map_err(server_error)?;
        }
        // A script that may write: a server that is read-only or refuses scripts is of no use.
        let test = protocol::renewal(&format!("{}:test", terms.prefix), std::iter::empty());
        for _ in 0..TESTS {
            let answer = test.invoke_async::<Vec<i64>>(&mut connection);
            let answer = tokio::time::timeout(terms.timeout, answer).await;
            answer.map_err(|_| LinkError::Slow(terms.timeout.as_millis()))?.map_err(server_error)?;
        }
        Ok(Arc::new(Connected { connection, over, _driver: driver }))
    };
    tokio::time::timeout(CONNECT_TIMEOUT, connected).await.unwrap_or(Err(LinkError::Timeout))
}

/// The kind of an error. Its text comes from the server and may contain the password that was refused.
fn server_error(error: RedisError) -> LinkError {
    LinkError::Server(error.code().map_or_else(|| format!("{:?}", error.kind()), str::to_owned))
}

/// The pauses between connections, with jitter, so that routers do not return together.
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: BACKOFF_MIN }
    }

    /// A connection has ended that was in use for this time.
    pub(super) fn ended(&mut self, lasted: Duration) {
        if lasted >= STABLE {
            self.next = BACKOFF_MIN;
        }
    }

    /// The pause before the next connection. `fraction` is a random number from 0 to 1.
    pub(super) fn pause(&mut self, fraction: f64) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(BACKOFF_MAX);
        pause.mul_f64(0.5 + fraction / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_within_one_timeout_count_once() {
        let (window, start) = (Duration::from_millis(20), Instant::now());
        let mut row = FailureRow::default();
        for stall in 1..FAILURES_MAX {
            // A hundred requests wait for the same answer.
            let since = start + window * stall;
            assert!((0..100).all(|n| !row.add(since + window * n / 101, window)), "stall {stall}");
            assert_eq!(row.count, stall);
        }
        assert!(row.add(start + window * FAILURES_MAX, window), "three timeouts in a row");
    }

    #[test]
    fn pauses_double_until_a_connection_was_stable() {
        let mut backoff = Backoff::new();
        let mut pauses = || (0..8).map(|_| backoff.pause(1.0).as_millis()).collect::<Vec<_>>();
        assert_eq!(pauses(), [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        backoff.ended(STABLE - Duration::from_millis(1));
        assert_eq!(backoff.pause(0.0).as_millis(), 2500, "it flaps");
        backoff.ended(STABLE);
        assert_eq!(backoff.pause(0.0).as_millis(), 50);
    }
}
