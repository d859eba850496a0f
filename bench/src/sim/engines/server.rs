//! The HTTP side of a simulated engine: a path and its answer, on one thread, by hand.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_engine::event_log::Page;
use baton_openai::response::{ModelCard, TokenizeReply, models};
use baton_openai::{ApiError, Endpoint, ParseLimits, TokenizeRequest, parse_object};
use tokio::net::{TcpListener, TcpStream};

use super::core::Leg;
use super::engine::Engine;
use super::leases::LeaseKey;
use super::plan::Dialect;
use super::{books, generate, text};
use crate::sim::instant::http::{Inbox, unchunked};

/// Request ids in one abort.
const ABORT_IDS_MAX: usize = 1_024;
/// How long a reader of events may wait for one, and how many it gets.
const EVENTS_WAIT_MAX_MS: u64 = 10_000;
const EVENTS_SHOWN: usize = 10_000;

/// One request, as far as engines look at it.
pub(super) struct Asked {
    pub posts: bool,
    pub path: String,
    pub query: String,
    pub body: Vec<u8>,
    pub request_id: Option<String>,
    /// `x-baton-router-settles`.
    pub settles: bool,
    /// The caller wants the connection closed.
    pub closes: bool,
}

impl Asked {
    fn read(head: &[u8], body: &[u8], chunked: bool) -> Self {
        let mut lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let mut words = lines.next().unwrap_or_default().split(|&byte| byte == b' ');
        let word = |word: Option<&[u8]>| String::from_utf8_lossy(word.unwrap_or_default()).into_owned();
        let posts = words.next() == Some(b"POST");
        let target = word(words.next());
        let old = words.next() == Some(b"HTTP/1.0");
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let body = if chunked { unchunked(body) } else { body.to_vec() };
        let (path, query) = (path.to_owned(), query.to_owned());
        let mut asked = Self { posts, path, query, body, request_id: None, settles: false, closes: old };
        for line in lines {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
            if name.eq_ignore_ascii_case(b"x-request-id") {
                asked.request_id = Some(word(Some(value)));
            } else if name.eq_ignore_ascii_case(b"x-baton-router-settles") {
                asked.settles = true;
            } else if name.eq_ignore_ascii_case(b"connection") {
                asked.closes = value.eq_ignore_ascii_case(b"close");
            }
        }
        asked
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

/// Serves until the engine is stopped; then every connection is cut.
pub(super) async fn serve(listener: std::net::TcpListener, engine: Arc<Engine>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = engine.stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors: wait for some to be closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let engine = Arc::clone(&engine);
        connections.spawn(async move {
            // An error is the caller's end of the connection.
            let _ = connection(stream, &engine).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn connection(stream: TcpStream, engine: &Arc<Engine>) -> io::Result<()> {
    let mut inbox = Inbox::new(stream);
    while let Some(asked) = inbox.next(Asked::read).await? {
        let closes = asked.closes;
        match Endpoint::at(&asked.path).filter(|_| asked.posts) {
            Some(endpoint) => generate::answer(engine, &mut inbox, endpoint, asked).await?,
            None => {
                let reply = tokio::select! {
                    reply = other(engine, &asked) => reply,
                    () = inbox.gone(), if asked.path == "/debug/kv/events" => return Ok(()),
                };
                inbox.send_or_gone(&reply).await?;
            }
        }
        if closes {
            return Ok(());
        }
    }
    Ok(())
}

/// A whole reply: head and body, in one piece.
pub(super) fn reply(status: u16, headers: &[(&str, String)], body: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut out = Vec::with_capacity(body.len() + 160);
    let reason = if status < 400 { "OK" } else { "Error" };
    // Into a vector every write succeeds.
    let _ = write!(out, "HTTP/1.1 {status} {reason}\r\nserver: sim\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        let _ = write!(out, "{name}: {value}\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

pub(super) fn json(body: &[u8]) -> Vec<u8> {
    reply(200, &[("content-type", String::from("application/json"))], body)
}

pub(super) fn refusal(error: &ApiError) -> Vec<u8> {
    reply(error.status, &error.headers(), &error.to_bytes())
}

async fn other(engine: &Arc<Engine>, asked: &Asked) -> Vec<u8> {
    let baton = engine.plan.dialect == Dialect::Baton;
    let answer = match (asked.posts, asked.path.as_str()) {
        (false, "/health" | "/ping") => Ok(json(b"{\"status\":\"ok\"}")),
        (false, "/v1/models") => Ok(json(&models(&[card(engine)]))),
        (false, "/version") => Ok(json(b"{\"version\":\"sim\"}")),
        (false, "/metrics") => {
            let kind = String::from("text/plain; version=0.0.4; charset=utf-8");
            Ok(reply(200, &[("content-type", kind)], books::metrics(engine).as_bytes()))
        }
        (false, "/debug/kv/events") => events(engine, asked).await,
        (true, "/tokenize") => tokenize(engine, asked),
        (false, "/debug/kv") if baton => Ok(json(books::debug_kv(engine).to_string().as_bytes())),
        (true, "/kv/release") if baton => release(engine, asked),
        (true, "/abort_requests") if baton => abort(engine, asked),
        (_, path) => Err(ApiError::not_found(path)),
    };
    answer.unwrap_or_else(|error| refusal(&error))
}

fn card(engine: &Engine) -> ModelCard {
    ModelCard {
        id: engine.plan.model.clone(),
        created: 0,
        root: None,
        max_model_len: Some(engine.plan.capacity()),
    }
}

fn tokenize(engine: &Engine, asked: &Asked) -> Result<Vec<u8>, ApiError> {
    let limits = ParseLimits::default();
    let request = TokenizeRequest::from_map(&parse_object(&asked.body, &limits)?, &limits)?;
    let tokens =
        text::prompt(&request.input).ok_or_else(|| ApiError::invalid("prompt", "one prompt at a time"))?;
    let reply = TokenizeReply {
        count: tokens.len(),
        max_model_len: engine.plan.capacity(),
        tokens,
        token_strs: None,
    };
    Ok(json(&reply.to_bytes()))
}

/// As Baton's engine.
fn release(engine: &Arc<Engine>, asked: &Asked) -> Result<Vec<u8>, ApiError> {
    let fields = parse_object(&asked.body, &ParseLimits::default())?;
    let handle = fields.get("handle").and_then(|handle| handle.as_str());
    let handle = handle.filter(|text| text.len() == 32).and_then(|text| u128::from_str_radix(text, 16).ok());
    let handle =
        handle.ok_or_else(|| ApiError::invalid("handle", "`handle` must be 32 hexadecimal digits"))?;
    let reason = fields.get("reason").and_then(|reason| reason.as_str()).unwrap_or("router_release");
    if reason.len() > 64 || !reason.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Err(ApiError::invalid("reason", "`reason` must be at most 64 letters, digits and `_`"));
    }
    let released = engine.drive(|core, now_us| core.release(&LeaseKey::Handle(handle), reason, now_us));
    Ok(json(format!("{{\"result\":\"{}\"}}", released.label()).as_bytes()))
}

/// As Baton's engine.
fn abort(engine: &Arc<Engine>, asked: &Asked) -> Result<Vec<u8>, ApiError> {
    let fields = parse_object(&asked.body, &ParseLimits::default())?;
    let malformed = || {
        let bound = format!("`request_ids` must be a list of 1 to {ABORT_IDS_MAX} request ids");
        ApiError::invalid("request_ids", bound)
    };
    let ids = fields.get("request_ids").and_then(|ids| ids.as_array()).ok_or_else(malformed)?;
    if ids.is_empty() || ids.len() > ABORT_IDS_MAX {
        return Err(malformed());
    }
    let named = |id: &serde_json::Value| id.as_str().and_then(|id| RequestId::new(bare(id)).ok());
    let ids = ids.iter().map(named).collect::<Option<Vec<_>>>().ok_or_else(malformed)?;
    let leg = match fields.get("leg").map(|leg| leg.as_str()) {
        None => None,
        Some(Some("prefill")) => Some(Leg::Prefill),
        Some(Some("decode")) => Some(Leg::Decode),
        Some(_) => return Err(ApiError::invalid("leg", "`leg` must be \"prefill\" or \"decode\"")),
    };
    let mut results = serde_json::Map::new();
    for id in ids {
        let result = engine.drive(|core, now_us| core.abort_named(&id, leg, now_us));
        results.insert(id.as_str().to_owned(), result.into());
    }
    Ok(json(serde_json::json!({"results": results}).to_string().as_bytes()))
}

/// The router's name in the names that vLLM makes of it.
pub(super) fn bare(id: &str) -> &str {
    id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")).unwrap_or(id)
}

/// `GET /debug/kv/events`: in both dialects, since it is the simulated truth.
async fn events(engine: &Engine, asked: &Asked) -> Result<Vec<u8>, ApiError> {
    let number = |name: &'static str, default: u64, most: u64| match asked.field(name).map(str::parse::<u64>)
    {
        None => Ok(default),
        Some(Ok(number)) if number <= most => Ok(number),
        Some(_) => Err(ApiError::invalid(name, format!("`{name}` must be a number up to {most}"))),
    };
    let limit = number("limit", EVENTS_SHOWN as u64, EVENTS_SHOWN as u64)?.max(1);
    let wait = Duration::from_millis(number("wait_ms", 0, EVENTS_WAIT_MAX_MS)?);
    let page = match asked.field("after") {
        Some("latest") => Page { next: engine.log.latest(), lost: 0, events: Vec::new() },
        _ => engine.log.page_within(number("after", 0, u64::MAX)?, limit as usize, wait).await,
    };
    let body = serde_json::json!({
        "engine": {"id": engine.id, "epoch": engine.epoch.to_string(), "role": engine.role.label(), "model": engine.plan.model},
        "now_us": engine.log.now_us(), "next": page.next, "lost": page.lost, "events": page.events,
    });
    Ok(json(body.to_string().as_bytes()))
}
