//! The client of one endpoint: makes calls and disconnects as specified.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls_pki_types::ServerName;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use super::call::{Call, CallOutcome, CallStage};
use super::clock::Moment;
use super::far_host::FarHost;
use super::limits::{FRAMING_WAIT, KEPT_MAX, Limits};
use super::reply::{ReplyContent, ReplyError};
use super::request::PreparedRequest;
use super::target::{Scheme, Target, TargetError};
use super::transport::connection::{Connection, Dial};
use super::transport::framing::ResponseReader;
use super::transport::sse::Events;
use super::transport::tls::{self, TlsPeer};

/// When a client disconnects.
#[derive(Clone, Debug, Default)]
pub(crate) enum CancelTrigger {
    /// The client stays to the end.
    #[default]
    Never,
    /// This long after the request's last byte was sent.
    After(Duration),
    /// With this number of events with text. 0: with the head of a response of status 2xx.
    AfterTokens(usize),
    /// When the token is cancelled, at any stage.
    When(CancellationToken),
    /// When the token is cancelled, or after this number of events with text.
    WhenOrAfterTokens(CancellationToken, usize),
}

/// How a client disconnects. See [`super::transport::connection`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DisconnectKind {
    #[default]
    Fin,
    Rst,
    /// Sends FIN and reads on until the response or the connection ends.
    HalfClose,
    /// Reads nothing for this time, then resets. The connection has a small receive buffer from its beginning.
    Stall {
        hold: Duration,
    },
    /// The client's host disappears, without FIN or RST. Requires a far host: [`Client::with_far`].
    Vanish,
}

/// Which connection a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connections {
    /// A new connection for each call.
    Fresh,
    /// A connection of an earlier complete call, if one is open.
    Kept,
}

/// Makes calls to one endpoint. Clones share connections.
#[derive(Clone)]
pub(crate) struct Client {
    shared: Arc<ClientInner>,
}

#[derive(Clone)]
struct ClientInner {
    target: Target,
    limits: Limits,
    addresses: Vec<SocketAddr>,
    tls: Option<TlsPeer>,
    /// The host from which clients vanish, and the target's address as seen from there.
    far: Option<(Arc<FarHost>, [SocketAddr; 1])>,
    connections: Connections,
    /// At most [`KEPT_MAX`]. The last used is taken first.
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl Client {
    /// Resolves the target's address and loads the trusted certificates. No connection is made.
    ///
    /// # Errors
    /// If either fails.
    pub(crate) async fn open(
        target: Target,
        limits: Limits,
        connections: Connections,
    ) -> Result<Self, TargetError> {
        let found = tokio::net::lookup_host((target.host.as_str(), target.port)).await;
        let addresses = found.map_err(|error| TargetError::Resolve(target.authority(), error))?.collect();
        let tls = match target.scheme {
            Scheme::Http => None,
            Scheme::Https => {
                let name =
                    ServerName::try_from(target.host.clone()).map_err(|_| TargetError::Url(target.url()))?;
                Some(TlsPeer { connector: tls::connector(target.ca_file.as_deref())?, name })
            }
        };
        let (idle, far) = (Arc::default(), None);
        Ok(Self { shared: Arc::new(ClientInner { target, limits, addresses, tls, far, connections, idle }) })
    }

    pub(crate) fn target(&self) -> &Target {
        &self.shared.target
    }

    /// A client of the same endpoint with other limits and its own connections.
    pub(crate) fn within(&self, limits: Limits, connections: Connections) -> Self {
        let (idle, same) = (Arc::default(), ClientInner::clone(&self.shared));
        Self { shared: Arc::new(ClientInner { limits, connections, idle, ..same }) }
    }

    /// A client of the same endpoint with a host from which clients can vanish.
    ///
    /// # Errors
    /// If the endpoint cannot be reached from that host.
    pub(crate) async fn with_far(&self, host: Arc<FarHost>) -> Result<Self, String> {
        let there = host.reach(&self.shared.addresses).await?;
        let (far, idle, same) = (Some((host, [there])), Arc::default(), ClientInner::clone(&self.shared));
        Ok(Self { shared: Arc::new(ClientInner { far, idle, ..same }) })
    }

    /// Makes one call.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn call(
        &self,
        ask: &PreparedRequest,
        leave: &CancelTrigger,
        manner: DisconnectKind,
    ) -> Call {
        let mut call = Call::begin();
        let deadline = Instant::now() + self.shared.limits.total;
        let request = self.request(ask);
        let kept = match manner {
            DisconnectKind::Stall { .. } | DisconnectKind::Vanish => None,
            DisconnectKind::Fin | DisconnectKind::Rst | DisconnectKind::HalfClose => self.shared.take_idle(),
        };
        let was_kept = kept.is_some();
        let mut course =
            ActiveCall { shared: &self.shared, leave, manner, deadline, call: &mut call, raw: None };
        course.run(&request, kept).await;
        // The server may have closed a kept connection while the request was sent. Every HTTP client sends the
        // request again in this case.
        let unanswered = matches!(
            course.call.outcome,
            CallOutcome::Broken { stage: CallStage::Send | CallStage::Head, .. }
        );
        if was_kept && unanswered && course.call.head.is_none() {
            course.call.sent_again = true;
            course.run(&request, None).await;
        }
        call
    }

    /// Requests JSON that is no completion.
    ///
    /// # Errors
    /// If there is no JSON.
    pub(crate) async fn json(&self, ask: &PreparedRequest) -> Result<serde_json::Value, String> {
        let (mut call, mut body) = (Call::begin(), Vec::new());
        let deadline = Instant::now() + self.shared.limits.total;
        let (leave, manner) = (&CancelTrigger::Never, DisconnectKind::Fin);
        let raw = Some(&mut body);
        let mut course = ActiveCall { shared: &self.shared, leave, manner, deadline, call: &mut call, raw };
        course.run(&self.request(ask), None).await;
        let url = format!("{}{}", self.shared.target.url(), ask.path);
        if !call.is_done() {
            return Err(format!("{url}: {}", call.outcome));
        }
        serde_json::from_slice(&body).map_err(|error| format!("{url}: not JSON: {error}"))
    }

    fn request(&self, ask: &PreparedRequest) -> Vec<u8> {
        let Target { prefix, headers, .. } = &self.shared.target;
        let method = if ask.body.is_some() { "POST" } else { "GET" };
        let authority = self.shared.target.authority();
        let mut head = format!("{method} {prefix}{} HTTP/1.1\r\nhost: {authority}\r\n{AGENT}", ask.path);
        if let Some(body) = &ask.body {
            head.push_str("content-type: application/json\r\n");
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        if self.shared.connections == Connections::Fresh {
            head.push_str("connection: close\r\n");
        }
        for (name, value) in headers.iter().chain(ask.headers()) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        [head.as_bytes(), ask.body.as_deref().unwrap_or_default()].concat()
    }
}

impl ClientInner {
    /// An idle connection that is still open.
    fn take_idle(&self) -> Option<Connection> {
        let mut kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| kept.pop()).find(Connection::is_quiet)
    }

    fn return_idle(&self, connection: Connection) {
        let mut kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_MAX {
            kept.push(connection);
        }
    }
}

impl CancelTrigger {
    /// Returns when it is time to disconnect. Never returns if the trigger depends on what was read, or is
    /// [`Self::Never`].
    async fn due(&self, sent: Option<Moment>) {
        match (self, sent) {
            (Self::When(token) | Self::WhenOrAfterTokens(token, _), _) => token.cancelled().await,
            (Self::After(after), Some(sent)) => sleep_until(sent.plus(*after).instant().into()).await,
            (Self::Never | Self::AfterTokens(_) | Self::After(_), _) => pending().await,
        }
    }

    fn is_due_after(&self, call: &Call) -> bool {
        let begun = call.status.is_some_and(|status| (200..300).contains(&status));
        match self {
            Self::AfterTokens(tokens) | Self::WhenOrAfterTokens(_, tokens) => {
                begun && call.tokens.len() >= *tokens
            }
            Self::Never | Self::After(_) | Self::When(_) => false,
        }
    }
}

/// The result of a wait.
enum RaceOutcome<T> {
    Ready(T),
    /// It is time to disconnect.
    Cancelled,
    /// The call exceeded its time limit.
    TimedOut,
}

/// A call in progress.
struct ActiveCall<'a> {
    shared: &'a ClientInner,
    leave: &'a CancelTrigger,
    manner: DisconnectKind,
    deadline: Instant,
    call: &'a mut Call,
    /// Where the body of a response that is no completion is stored.
    raw: Option<&'a mut Vec<u8>>,
}

/// The part of a response that was read.
struct PartialResponse {
    reader: ResponseReader,
    events: Events,
    /// Body bytes that are not yet part of an event. The whole body if there are no events.
    body: Vec<u8>,
    done: bool,
}

impl ActiveCall<'_> {
    async fn run(&mut self, request: &[u8], kept: Option<Connection>) {
        let mut stage = CallStage::Connect;
        let ended = self.stages(request, kept, &mut stage).await;
        self.call.ended = Moment::now();
        self.call.outcome = ended.unwrap_or_else(|why| CallOutcome::Broken { stage, why });
    }

    async fn stages(
        &mut self,
        request: &[u8],
        kept: Option<Connection>,
        stage: &mut CallStage,
    ) -> Result<CallOutcome, String> {
        let mut connection = match kept {
            Some(connection) => connection,
            None => {
                let until = self.deadline.min(Instant::now() + self.shared.limits.connect);
                let ClientInner { addresses, tls, far, .. } = self.shared;
                let (addresses, how) = match (self.manner, far) {
                    (DisconnectKind::Vanish, Some((host, there))) => (there.as_slice(), Dial::Far(host)),
                    (DisconnectKind::Vanish, None) => return Err(NOWHERE.to_owned()),
                    (DisconnectKind::Stall { .. }, _) => (addresses.as_slice(), Dial::SmallBuffer),
                    (DisconnectKind::Fin | DisconnectKind::Rst | DisconnectKind::HalfClose, _) => {
                        (addresses.as_slice(), Dial::Usual)
                    }
                };
                match race(until, self.leave.due(None), Connection::connect(addresses, tls.as_ref(), how))
                    .await
                {
                    RaceOutcome::Ready(connection) => {
                        self.call.connected = Some(Moment::now());
                        connection.map_err(error_text)?
                    }
                    RaceOutcome::Cancelled => {
                        self.call.left = Some(Moment::now());
                        return Ok(CallOutcome::Left);
                    }
                    RaceOutcome::TimedOut => return Ok(CallOutcome::TimedOut { stage: *stage }),
                }
            }
        };
        *stage = CallStage::Send;
        // An endpoint may refuse and close before it has read the whole request. Its response is read.
        let mut unsent = None;
        match race(self.deadline, self.leave.due(None), connection.write(request)).await {
            RaceOutcome::Ready(Ok(())) => {}
            RaceOutcome::Ready(Err(error)) => unsent = Some(error),
            RaceOutcome::Cancelled => return self.disconnect(connection, None).await,
            RaceOutcome::TimedOut => return self.time_out(connection, *stage),
        }
        if unsent.is_none() {
            self.call.sent = Some(Moment::now());
            *stage = CallStage::Head;
        }
        let answer = PartialResponse {
            reader: ResponseReader::new(self.shared.limits.answer_bytes),
            events: Events::default(),
            body: Vec::new(),
            done: false,
        };
        match (self.read(connection, answer, stage).await, unsent) {
            (Err(_), Some(error)) if self.call.head.is_none() => Err(error_text(error)),
            (ended, _) => ended,
        }
    }

    async fn read(
        &mut self,
        mut connection: Connection,
        mut answer: PartialResponse,
        stage: &mut CallStage,
    ) -> Result<CallOutcome, String> {
        let mut buffer = Vec::new();
        let mut due = std::pin::pin!(self.leave.due(self.call.sent));
        let mut last = Instant::now();
        let mut timer = std::pin::pin!(sleep_until(self.read_deadline(last).into()));
        loop {
            buffer.clear();
            let gone = self.call.left.is_some();
            let came = tokio::select! {
                biased;
                () = &mut due, if !gone => RaceOutcome::Cancelled,
                count = connection.read(&mut buffer) => RaceOutcome::Ready(count),
                () = &mut timer => RaceOutcome::TimedOut,
            };
            match came {
                RaceOutcome::Cancelled if self.manner == DisconnectKind::HalfClose => {
                    self.half_close(&mut connection).await?
                }
                RaceOutcome::Cancelled => return self.disconnect(connection, Some(answer)).await,
                RaceOutcome::TimedOut => {
                    // Every byte extends the deadline, but the timer is moved only when it expires.
                    let until = self.read_deadline(last);
                    if until <= Instant::now() {
                        return self.time_out(connection, *stage);
                    }
                    timer.as_mut().reset(until.into());
                }
                // A server may close the connection after a half-close.
                RaceOutcome::Ready(Err(_)) if gone => return Ok(CallOutcome::Left),
                RaceOutcome::Ready(Err(error)) => return Err(error_text(error)),
                RaceOutcome::Ready(Ok(0)) => {
                    let whole = answer.reader.end();
                    return match self.ended(&mut answer) {
                        _ if gone && whole.is_err() => Ok(CallOutcome::Left),
                        Ok(Some(outcome)) => Ok(outcome),
                        _ if gone => Ok(CallOutcome::Left),
                        Ok(None) => Err(whole.map_or_else(error_text, |()| CUT.to_owned())),
                        Err(why) => Err(why),
                    };
                }
                RaceOutcome::Ready(Ok(_)) => {
                    last = Instant::now();
                    if let Some(outcome) = self.take(&mut answer, &buffer, stage)? {
                        self.keep(connection, answer).await;
                        return Ok(outcome);
                    }
                    if !gone && self.leave.is_due_after(self.call) {
                        match self.manner {
                            DisconnectKind::HalfClose => {
                                self.half_close(&mut connection).await?;
                                // Bytes that arrived with the event at which the client disconnects.
                                if let Some(outcome) = self.take(&mut answer, &[], stage)? {
                                    return Ok(outcome);
                                }
                            }
                            _ => return self.disconnect(connection, Some(answer)).await,
                        }
                    }
                }
            }
        }
    }

    /// The deadline for the next byte.
    fn read_deadline(&self, last: Instant) -> Instant {
        let silence = self.shared.limits.silence.map(|silence| last + silence);
        silence.map_or(self.deadline, |silence| silence.min(self.deadline))
    }

    /// Processes the bytes that were read.
    fn take(
        &mut self,
        answer: &mut PartialResponse,
        bytes: &[u8],
        stage: &mut CallStage,
    ) -> Result<Option<CallOutcome>, String> {
        let now = Moment::now();
        answer.reader.feed(bytes, &mut answer.body).map_err(error_text)?;
        let Some(head) = answer.reader.head() else { return Ok(None) };
        let streams = head.events && (200..300).contains(&head.status);
        if self.call.head.is_none() {
            self.call.head = Some(now);
            self.call.status = Some(head.status);
            self.call.request_id.clone_from(&head.request_id);
            (self.call.should_retry, self.call.retry_after) = (head.should_retry, head.retry_after);
            *stage = CallStage::Body;
        }
        if streams {
            answer.events.buffer().append(&mut answer.body);
            while let Some(event) = answer.events.next().map_err(error_text)? {
                self.call.events = self.call.events.saturating_add(1);
                if event.trim_ascii() == b"[DONE]" {
                    answer.done = true;
                    break;
                }
                let content =
                    ReplyContent::read(event).map_err(|error| format!("an event is no chunk: {error}"))?;
                if let Some(outcome) = self.record_event(content, now) {
                    return Ok(Some(outcome));
                }
                if self.call.left.is_none() && self.leave.is_due_after(self.call) {
                    return Ok(None);
                }
            }
        }
        if answer.done || answer.reader.is_done() { self.ended(answer) } else { Ok(None) }
    }

    /// Records one event. An error ends the call.
    fn record_event(&mut self, content: ReplyContent, now: Moment) -> Option<CallOutcome> {
        let call = &mut *self.call;
        if content.content {
            call.tokens.push(now);
            if let Some(usage) = content.usage {
                call.counted.push(usage.completion_tokens);
            }
        }
        call.text.push_str(&content.text);
        call.finish_reason = content.finish_reason.or(call.finish_reason.take());
        call.usage = content.usage.or(call.usage);
        let ReplyError { code, kind, message } = content.error?;
        Some(CallOutcome::Failed { code, kind, message })
    }

    /// The outcome of a response that has ended. `None` for a stream without `[DONE]`.
    fn ended(&mut self, answer: &mut PartialResponse) -> Result<Option<CallOutcome>, String> {
        let Some(head) = answer.reader.head() else { return Ok(None) };
        let status = head.status;
        if !(200..300).contains(&status) {
            let ReplyError { code, kind, message } = ReplyError::read(&answer.body);
            return Ok(Some(CallOutcome::Refused { status, code, kind, message }));
        }
        if head.events {
            if !answer.done && answer.reader.is_done() {
                return Err(CUT.to_owned());
            }
            // The counts are usable only if every event with text has one.
            if self.call.counted.len() != self.call.tokens.len() {
                self.call.counted.clear();
            }
            return Ok(answer.done.then_some(CallOutcome::Done));
        }
        if !answer.reader.is_done() {
            return Ok(None);
        }
        if let Some(raw) = &mut self.raw {
            raw.append(&mut answer.body);
            return Ok(Some(CallOutcome::Done));
        }
        let content = ReplyContent::read(&answer.body)
            .map_err(|error| format!("the answer is no completion: {error}"))?;
        self.call.text.push_str(&content.text);
        self.call.finish_reason = content.finish_reason;
        self.call.usage = content.usage;
        Ok(Some(match content.error {
            Some(ReplyError { code, kind, message }) => CallOutcome::Failed { code, kind, message },
            None => CallOutcome::Done,
        }))
    }

    async fn half_close(&mut self, connection: &mut Connection) -> Result<(), String> {
        let at = Moment::now();
        connection.half_close().await.map_err(error_text)?;
        self.call.left = Some(at);
        Ok(())
    }

    /// Disconnects. The recorded time is before the close, because the server may act before the close returns.
    async fn disconnect(
        &mut self,
        mut connection: Connection,
        answer: Option<PartialResponse>,
    ) -> Result<CallOutcome, String> {
        let at = Moment::now();
        let closed = match self.manner {
            DisconnectKind::Fin => connection.finish(),
            DisconnectKind::Rst => connection.reset(),
            DisconnectKind::HalfClose => {
                // The request itself was cut off: the response can only be a refusal.
                self.half_close(&mut connection).await?;
                drop(answer);
                connection.finish()
            }
            DisconnectKind::Stall { hold } => {
                self.call.left = Some(Moment::now());
                tokio::time::sleep(hold).await;
                connection.reset()
            }
            DisconnectKind::Vanish => match &self.shared.far {
                Some((host, _)) => connection.vanish(host),
                None => return Err(NOWHERE.to_owned()),
            },
        };
        self.call.left.get_or_insert(at);
        closed.map(|()| CallOutcome::Left).map_err(error_text)
    }

    /// Closes the connection after a timeout, as an SDK does.
    fn time_out(&mut self, connection: Connection, stage: CallStage) -> Result<CallOutcome, String> {
        let at = Moment::now();
        connection.finish().map_err(error_text)?;
        self.call.left.get_or_insert(at);
        Ok(CallOutcome::TimedOut { stage })
    }

    /// Keeps the connection after a complete response, if possible.
    async fn keep(&mut self, mut connection: Connection, mut answer: PartialResponse) {
        if self.shared.connections == Connections::Fresh || self.call.left.is_some() {
            return;
        }
        // The end of a stream's framing may arrive one packet after its last event.
        let until = Instant::now() + FRAMING_WAIT;
        let mut buffer = Vec::new();
        while !answer.reader.is_done() {
            buffer.clear();
            answer.body.clear();
            match race(until, pending(), connection.read(&mut buffer)).await {
                RaceOutcome::Ready(Ok(1..)) if answer.reader.feed(&buffer, &mut answer.body).is_ok() => {}
                _ => return,
            }
        }
        if answer.reader.may_keep() {
            self.shared.return_idle(connection);
        }
    }
}

/// Some gateways refuse a client without a User-Agent.
const AGENT: &str = concat!("user-agent: baton-bench/", env!("CARGO_PKG_VERSION"), "\r\naccept: */*\r\n");

const NOWHERE: &str = "there is no host to vanish from";

const CUT: &str = "the stream ended without [DONE]";

fn error_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Waits for `work` until the deadline or until it is time to disconnect.
async fn race<T>(
    until: Instant,
    due: impl Future<Output = ()>,
    work: impl Future<Output = T>,
) -> RaceOutcome<T> {
    tokio::select! {
        biased;
        () = due => RaceOutcome::Cancelled,
        this = work => RaceOutcome::Ready(this),
        () = sleep_until(until.into()) => RaceOutcome::TimedOut,
    }
}
