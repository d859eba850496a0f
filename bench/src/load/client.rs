//! The client of one endpoint: makes calls, and leaves them as told.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls_pki_types::ServerName;
use tokio::time::sleep_until;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::ask::Ask;
use super::call::{Call, Outcome, Stage};
use super::clock::Moment;
use super::far::FarHost;
use super::limits::{FRAMING_WAIT, KEPT_MAX, Limits};
use super::reply::{Complaint, Said};
use super::target::{Scheme, Target, TargetError};
use super::wire::connection::{Dial, Wire};
use super::wire::framing::Reader;
use super::wire::sse::Events;
use super::wire::tls;

/// When a client leaves.
#[derive(Clone, Debug, Default)]
pub(crate) enum Leave {
    /// It stays to the end.
    #[default]
    Never,
    /// So long after the request's last byte was sent.
    After(Duration),
    /// With so many events that bring text; 0: with the head of an answer of status 2xx.
    AfterTokens(usize),
    /// When somebody says so, at whatever stage that is.
    When(CancellationToken),
    /// Whichever comes first: somebody says so, or so many events have brought text.
    WhenOrAfterTokens(CancellationToken, usize),
}

/// How a client leaves. See [`super::wire::connection`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Manner {
    #[default]
    Fin,
    Rst,
    /// Reads on, until the answer or the connection ends.
    HalfClose,
    /// Reads nothing for so long, then resets. The connection has a small receive buffer from its beginning.
    Stall {
        hold: Duration,
    },
    /// Its host is gone, with neither FIN nor RST. Of a client that has another host to vanish from: [`Client::with_far`].
    Vanish,
}

/// Where connections come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connections {
    /// One for each call.
    Fresh,
    /// From whole calls before, while they last.
    Kept,
}

/// Makes calls to one endpoint. Its clones share connections.
#[derive(Clone)]
pub(crate) struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    target: Target,
    limits: Limits,
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The host from which clients vanish, and where the target is for that one.
    far: Option<(Arc<FarHost>, [SocketAddr; 1])>,
    connections: Connections,
    /// At most [`KEPT_MAX`]; the one that was used last is taken first.
    kept: Mutex<Vec<Wire>>,
}

impl Client {
    /// Finds the target's address and the certificates that it may show; nobody is called yet.
    ///
    /// # Errors
    /// When there are none.
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
                Some((tls::connector(target.ca_file.as_deref())?, name))
            }
        };
        let (kept, far) = (Mutex::new(Vec::new()), None);
        Ok(Self { shared: Arc::new(Shared { target, limits, addresses, tls, far, connections, kept }) })
    }

    pub(crate) fn target(&self) -> &Target {
        &self.shared.target
    }

    /// The same endpoint within other bounds, and with connections of its own.
    pub(crate) fn within(&self, limits: Limits, connections: Connections) -> Self {
        let Shared { target, addresses, tls, far, .. } = &*self.shared;
        let (target, addresses, tls, far) = (target.clone(), addresses.clone(), tls.clone(), far.clone());
        let kept = Mutex::new(Vec::new());
        Self { shared: Arc::new(Shared { target, limits, addresses, tls, far, connections, kept }) }
    }

    /// The same endpoint, with a host from which its clients can vanish.
    ///
    /// # Errors
    /// In words, where the endpoint cannot be reached from there.
    pub(crate) async fn with_far(&self, host: Arc<FarHost>) -> Result<Self, String> {
        let there = host.reach(&self.shared.addresses).await?;
        let Shared { target, limits, addresses, tls, connections, .. } = &*self.shared;
        let (target, limits, addresses, tls) =
            (target.clone(), limits.clone(), addresses.clone(), tls.clone());
        let (far, connections, kept) = (Some((host, [there])), *connections, Mutex::new(Vec::new()));
        Ok(Self { shared: Arc::new(Shared { target, limits, addresses, tls, far, connections, kept }) })
    }

    /// Makes one call.
    ///
    /// # Cancel safety
    /// Dropping it closes the connection.
    pub(crate) async fn call(&self, ask: &Ask, leave: &Leave, manner: Manner) -> Call {
        let mut call = Call::begin();
        let deadline = Instant::now() + self.shared.limits.total;
        let request = self.request(ask);
        let kept = match manner {
            Manner::Stall { .. } | Manner::Vanish => None,
            Manner::Fin | Manner::Rst | Manner::HalfClose => self.shared.kept(),
        };
        let was_kept = kept.is_some();
        let mut course = Course { shared: &self.shared, leave, manner, deadline, call: &mut call, raw: None };
        course.run(&request, kept).await;
        // The other side may have ended a kept connection in the moment in which it was used. Every HTTP client sends
        // the request again then.
        let unanswered = matches!(call.outcome, Outcome::Broken { stage: Stage::Send | Stage::Head, .. });
        if was_kept && unanswered && call.head.is_none() {
            call.sent_again = true;
            let mut course =
                Course { shared: &self.shared, leave, manner, deadline, call: &mut call, raw: None };
            course.run(&request, None).await;
        }
        call
    }

    /// Asks for JSON that is no completion.
    ///
    /// # Errors
    /// In words, when there is none.
    pub(crate) async fn json(&self, ask: &Ask) -> Result<serde_json::Value, String> {
        let (mut call, mut body) = (Call::begin(), Vec::new());
        let deadline = Instant::now() + self.shared.limits.total;
        let (leave, manner) = (&Leave::Never, Manner::Fin);
        let raw = Some(&mut body);
        let mut course = Course { shared: &self.shared, leave, manner, deadline, call: &mut call, raw };
        course.run(&self.request(ask), None).await;
        let url = format!("{}{}", self.shared.target.url(), ask.path);
        if !call.is_done() {
            return Err(format!("{url}: {}", call.outcome));
        }
        serde_json::from_slice(&body).map_err(|error| format!("{url}: not JSON: {error}"))
    }

    fn request(&self, ask: &Ask) -> Vec<u8> {
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

impl Shared {
    /// A connection of a call before that is still good.
    fn kept(&self) -> Option<Wire> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| kept.pop()).find(Wire::is_quiet)
    }

    fn keep(&self, wire: Wire) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_MAX {
            kept.push(wire);
        }
    }
}

impl Leave {
    /// It is time to go. Returns never for a client that leaves by what it has read, or not at all.
    async fn due(&self, sent: Option<Moment>) {
        match (self, sent) {
            (Self::When(said) | Self::WhenOrAfterTokens(said, _), _) => said.cancelled().await,
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

/// What a wait ended with.
enum Came<T> {
    This(T),
    /// It is time to leave.
    Due,
    /// The call's time is over.
    Late,
}

/// A call on its way.
struct Course<'a> {
    shared: &'a Shared,
    leave: &'a Leave,
    manner: Manner,
    deadline: Instant,
    call: &'a mut Call,
    /// Where the body of an answer goes that is no completion.
    raw: Option<&'a mut Vec<u8>>,
}

/// What of an answer is here.
struct Answer {
    reader: Reader,
    events: Events,
    /// Of the body what is not an event's yet; all of it, if there are no events.
    body: Vec<u8>,
    done: bool,
}

impl Course<'_> {
    async fn run(&mut self, request: &[u8], kept: Option<Wire>) {
        let mut stage = Stage::Connect;
        let ended = self.stages(request, kept, &mut stage).await;
        self.call.ended = Moment::now();
        self.call.outcome = ended.unwrap_or_else(|why| Outcome::Broken { stage, why });
    }

    async fn stages(
        &mut self,
        request: &[u8],
        kept: Option<Wire>,
        stage: &mut Stage,
    ) -> Result<Outcome, String> {
        let mut wire = match kept {
            Some(wire) => wire,
            None => {
                let until = self.deadline.min(Instant::now() + self.shared.limits.connect);
                let Shared { addresses, tls, far, .. } = self.shared;
                let (addresses, how) = match (self.manner, far) {
                    (Manner::Vanish, Some((host, there))) => (there.as_slice(), Dial::Far(host)),
                    (Manner::Vanish, None) => return Err(NOWHERE.to_owned()),
                    (Manner::Stall { .. }, _) => (addresses.as_slice(), Dial::LittleAhead),
                    (Manner::Fin | Manner::Rst | Manner::HalfClose, _) => (addresses.as_slice(), Dial::Usual),
                };
                match race(until, self.leave.due(None), Wire::connect(addresses, tls.as_ref(), how)).await {
                    Came::This(wire) => {
                        self.call.connected = Some(Moment::now());
                        wire.map_err(told)?
                    }
                    Came::Due => {
                        self.call.left = Some(Moment::now());
                        return Ok(Outcome::Left);
                    }
                    Came::Late => return Ok(Outcome::TimedOut { stage: *stage }),
                }
            }
        };
        *stage = Stage::Send;
        // An endpoint may refuse a request before it has read it all, and close: its answer is read all the same.
        let mut unsent = None;
        match race(self.deadline, self.leave.due(None), wire.write(request)).await {
            Came::This(Ok(())) => {}
            Came::This(Err(error)) => unsent = Some(error),
            Came::Due => return self.go(wire, None).await,
            Came::Late => return self.late(wire, *stage),
        }
        if unsent.is_none() {
            self.call.sent = Some(Moment::now());
            *stage = Stage::Head;
        }
        let answer = Answer {
            reader: Reader::new(self.shared.limits.answer_bytes),
            events: Events::default(),
            body: Vec::new(),
            done: false,
        };
        match (self.read(wire, answer, stage).await, unsent) {
            (Err(_), Some(error)) if self.call.head.is_none() => Err(told(error)),
            (ended, _) => ended,
        }
    }

    async fn read(
        &mut self,
        mut wire: Wire,
        mut answer: Answer,
        stage: &mut Stage,
    ) -> Result<Outcome, String> {
        let mut buffer = Vec::new();
        let mut due = std::pin::pin!(self.leave.due(self.call.sent));
        let mut last = Instant::now();
        let mut timer = std::pin::pin!(sleep_until(self.patience(last).into()));
        loop {
            buffer.clear();
            let gone = self.call.left.is_some();
            let came = tokio::select! {
                biased;
                () = &mut due, if !gone => Came::Due,
                count = wire.read(&mut buffer) => Came::This(count),
                () = &mut timer => Came::Late,
            };
            match came {
                Came::Due if self.manner == Manner::HalfClose => self.half_close(&mut wire).await?,
                Came::Due => return self.go(wire, Some(answer)).await,
                Came::Late => {
                    // Every byte puts the end off; the timer is moved only when it rings.
                    let until = self.patience(last);
                    if until <= Instant::now() {
                        return self.late(wire, *stage);
                    }
                    timer.as_mut().reset(until.into());
                }
                // Whoever heard that nothing more will be sent may well hang up.
                Came::This(Err(_)) if gone => return Ok(Outcome::Left),
                Came::This(Err(error)) => return Err(told(error)),
                Came::This(Ok(0)) => {
                    let whole = answer.reader.end();
                    return match self.ended(&mut answer) {
                        _ if gone && whole.is_err() => Ok(Outcome::Left),
                        Ok(Some(outcome)) => Ok(outcome),
                        _ if gone => Ok(Outcome::Left),
                        Ok(None) => Err(whole.map_or_else(told, |()| CUT.to_owned())),
                        Err(why) => Err(why),
                    };
                }
                Came::This(Ok(_)) => {
                    last = Instant::now();
                    if let Some(outcome) = self.take(&mut answer, &buffer, stage)? {
                        self.part(wire, answer).await;
                        return Ok(outcome);
                    }
                    if !gone && self.leave.is_due_after(self.call) {
                        match self.manner {
                            Manner::HalfClose => {
                                self.half_close(&mut wire).await?;
                                // What came with the event that it left at.
                                if let Some(outcome) = self.take(&mut answer, &[], stage)? {
                                    return Ok(outcome);
                                }
                            }
                            _ => return self.go(wire, Some(answer)).await,
                        }
                    }
                }
            }
        }
    }

    /// Until when nothing may come.
    fn patience(&self, last: Instant) -> Instant {
        let silence = self.shared.limits.silence.map(|silence| last + silence);
        silence.map_or(self.deadline, |silence| silence.min(self.deadline))
    }

    /// Understands what has come.
    fn take(
        &mut self,
        answer: &mut Answer,
        bytes: &[u8],
        stage: &mut Stage,
    ) -> Result<Option<Outcome>, String> {
        let now = Moment::now();
        answer.reader.feed(bytes, &mut answer.body).map_err(told)?;
        let Some(head) = answer.reader.head() else { return Ok(None) };
        let streams = head.events && (200..300).contains(&head.status);
        if self.call.head.is_none() {
            self.call.head = Some(now);
            self.call.status = Some(head.status);
            self.call.request_id.clone_from(&head.request_id);
            (self.call.should_retry, self.call.retry_after) = (head.should_retry, head.retry_after);
            *stage = Stage::Body;
        }
        if streams {
            answer.events.buffer().append(&mut answer.body);
            while let Some(event) = answer.events.next().map_err(told)? {
                self.call.events = self.call.events.saturating_add(1);
                if event.trim_ascii() == b"[DONE]" {
                    answer.done = true;
                    break;
                }
                let said = Said::read(event).map_err(|error| format!("an event is no chunk: {error}"))?;
                if let Some(outcome) = self.heard(said, now) {
                    return Ok(Some(outcome));
                }
                if self.call.left.is_none() && self.leave.is_due_after(self.call) {
                    return Ok(None);
                }
            }
        }
        if answer.done || answer.reader.is_done() { self.ended(answer) } else { Ok(None) }
    }

    /// Notes what one event says; an error ends the call.
    fn heard(&mut self, said: Said, now: Moment) -> Option<Outcome> {
        let call = &mut *self.call;
        if said.content {
            call.tokens.push(now);
            if let Some(usage) = said.usage {
                call.counted.push(usage.completion_tokens);
            }
        }
        call.text.push_str(&said.text);
        call.finish_reason = said.finish_reason.or(call.finish_reason.take());
        call.usage = said.usage.or(call.usage);
        let Complaint { code, kind, message } = said.error?;
        Some(Outcome::Failed { code, kind, message })
    }

    /// What an answer without any more bytes is; `None` for a stream that was cut.
    fn ended(&mut self, answer: &mut Answer) -> Result<Option<Outcome>, String> {
        let Some(head) = answer.reader.head() else { return Ok(None) };
        let status = head.status;
        if !(200..300).contains(&status) {
            let Complaint { code, kind, message } = Complaint::read(&answer.body);
            return Ok(Some(Outcome::Refused { status, code, kind, message }));
        }
        if head.events {
            if !answer.done && answer.reader.is_done() {
                return Err(CUT.to_owned());
            }
            // Only where every event with text says so does it say anything about each.
            if self.call.counted.len() != self.call.tokens.len() {
                self.call.counted.clear();
            }
            return Ok(answer.done.then_some(Outcome::Done));
        }
        if !answer.reader.is_done() {
            return Ok(None);
        }
        if let Some(raw) = &mut self.raw {
            raw.append(&mut answer.body);
            return Ok(Some(Outcome::Done));
        }
        let said =
            Said::read(&answer.body).map_err(|error| format!("the answer is no completion: {error}"))?;
        self.call.text.push_str(&said.text);
        self.call.finish_reason = said.finish_reason;
        self.call.usage = said.usage;
        Ok(Some(match said.error {
            Some(Complaint { code, kind, message }) => Outcome::Failed { code, kind, message },
            None => Outcome::Done,
        }))
    }

    async fn half_close(&mut self, wire: &mut Wire) -> Result<(), String> {
        let at = Moment::now();
        wire.half_close().await.map_err(told)?;
        self.call.left = Some(at);
        Ok(())
    }

    /// Leaves. The moment is the one before it closes: whoever is on the other side may have acted on it before that returns.
    async fn go(&mut self, mut wire: Wire, answer: Option<Answer>) -> Result<Outcome, String> {
        let at = Moment::now();
        let closed = match self.manner {
            Manner::Fin => wire.finish(),
            Manner::Rst => wire.reset(),
            Manner::HalfClose => {
                // The request itself is cut off: nothing can come but a refusal.
                self.half_close(&mut wire).await?;
                drop(answer);
                wire.finish()
            }
            Manner::Stall { hold } => {
                self.call.left = Some(Moment::now());
                tokio::time::sleep(hold).await;
                wire.reset()
            }
            Manner::Vanish => match &self.shared.far {
                Some((host, _)) => wire.vanish(host),
                None => return Err(NOWHERE.to_owned()),
            },
        };
        self.call.left.get_or_insert(at);
        closed.map(|()| Outcome::Left).map_err(told)
    }

    /// Gives up, as an SDK does: it closes.
    fn late(&mut self, wire: Wire, stage: Stage) -> Result<Outcome, String> {
        let at = Moment::now();
        wire.finish().map_err(told)?;
        self.call.left.get_or_insert(at);
        Ok(Outcome::TimedOut { stage })
    }

    /// After a whole answer: keeps the connection, if it can be.
    async fn part(&mut self, mut wire: Wire, mut answer: Answer) {
        if self.shared.connections == Connections::Fresh || self.call.left.is_some() {
            return;
        }
        // What frames the end of a stream may come a packet later than its last event.
        let until = Instant::now() + FRAMING_WAIT;
        let mut buffer = Vec::new();
        while !answer.reader.is_done() {
            buffer.clear();
            answer.body.clear();
            match race(until, pending(), wire.read(&mut buffer)).await {
                Came::This(Ok(1..)) if answer.reader.feed(&buffer, &mut answer.body).is_ok() => {}
                _ => return,
            }
        }
        if answer.reader.may_keep() {
            self.shared.keep(wire);
        }
    }
}

/// Some gateways refuse a client without a User-Agent.
const AGENT: &str = concat!("user-agent: baton-bench/", env!("CARGO_PKG_VERSION"), "\r\naccept: */*\r\n");

const NOWHERE: &str = "there is no host to vanish from";

const CUT: &str = "the stream ended without [DONE]";

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Waits for `work`, for as long as there is time and nobody wants to leave.
async fn race<T>(until: Instant, due: impl Future<Output = ()>, work: impl Future<Output = T>) -> Came<T> {
    tokio::select! {
        biased;
        () = due => Came::Due,
        this = work => Came::This(this),
        () = sleep_until(until.into()) => Came::Late,
    }
}
