//! The HTTP server of a simulated engine: paths and their responses, on one thread.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_connector_leases::event_log::{EventLog, EventPage};
use baton_openai::response::{ModelCard, TokenizeReply, models};
use baton_openai::{ApiError, Endpoint, ParseLimits, TokenizeRequest, parse_object};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::core::Leg;
use super::engine::Engine;
use super::http::{HttpRequest, bare, json, refusal, reply};
use super::leases::LeaseKey;
use super::plan::Dialect;
use super::{debug_pages, generate, text};
use crate::sim::instant::connection::ServerConnection;

/// Maximum request ids of one abort.
const ABORT_IDS_MAX: usize = 1_024;
/// Maximum wait for an event, and maximum events of a page.
const EVENTS_WAIT_MAX_MS: u64 = 10_000;
const EVENTS_SHOWN: usize = 10_000;

/// Serves until the engine is stopped, then closes every connection.
pub(super) async fn serve(listener: std::net::TcpListener, engine: Arc<Engine>) {
    accept(listener, &engine.stop, |stream| {
        let engine = Arc::clone(&engine);
        async move {
            // An error means that the caller closed the connection.
            let _ = connection(stream, &engine).await;
        }
    })
    .await;
}

/// Accepts connections and gives each to a task of its own, until `stop`. Then every task ends.
pub(super) async fn accept<F>(
    listener: std::net::TcpListener,
    stop: &CancellationToken,
    serve: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(listener) = TcpListener::from_std(listener) else { return };
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

async fn connection(stream: TcpStream, engine: &Arc<Engine>) -> io::Result<()> {
    let mut connection = ServerConnection::new(stream);
    while let Some(request) = connection.next(HttpRequest::read).await? {
        let closes = request.closes;
        match Endpoint::at(&request.path).filter(|_| request.posts) {
            Some(endpoint) => generate::answer(engine, &mut connection, endpoint, request).await?,
            None => {
                let reply = tokio::select! {
                    reply = other(engine, &request) => reply,
                    () = connection.wait_until_closed(), if request.path == "/debug/kv/events" => return Ok(()),
                };
                connection.send_or_gone(&reply).await?;
            }
        }
        if closes {
            return Ok(());
        }
    }
    Ok(())
}

async fn other(engine: &Arc<Engine>, request: &HttpRequest) -> Vec<u8> {
    let baton = engine.plan.dialect == Dialect::Baton;
    let answer = match (request.posts, request.path.as_str()) {
        (false, "/health" | "/ping") => Ok(json(b"{\"status\":\"ok\"}")),
        (false, "/v1/models") => Ok(json(&models(&[card(engine)]))),
        (false, "/version") => Ok(json(b"{\"version\":\"sim\"}")),
        (false, "/metrics") => {
            let kind = String::from("text/plain; version=0.0.4; charset=utf-8");
            Ok(reply(200, &[("content-type", kind)], debug_pages::metrics(engine).as_bytes()))
        }
        (false, "/debug/kv/events") => events(engine, request).await,
        (true, "/tokenize") => tokenize(request, engine.plan.capacity()),
        (false, "/debug/kv") if baton => Ok(json(debug_pages::debug_kv(engine).to_string().as_bytes())),
        (true, "/kv/release") if baton => release(engine, request),
        (true, "/abort_requests") if baton => abort(engine, request),
        (_, path) => Err(ApiError::not_found(path)),
    };
    answer.unwrap_or_else(|error| refusal(&error))
}

fn card(engine: &Engine) -> ModelCard {
    ModelCard {
        id: engine.plan.model.clone(),
        created: 0,
        root: None,
        parent: None,
        max_model_len: Some(engine.plan.capacity()),
    }
}

/// `/tokenize` of every simulated engine: a text or a chat.
pub(super) fn tokenize(request: &HttpRequest, max_model_len: usize) -> Result<Vec<u8>, ApiError> {
    let limits = ParseLimits::default();
    let request = TokenizeRequest::from_map(&parse_object(&request.body, &limits)?, &limits)?;
    let tokens =
        text::prompt(&request.input).ok_or_else(|| ApiError::invalid("prompt", "one prompt at a time"))?;
    let reply = TokenizeReply { count: tokens.len(), max_model_len, tokens, token_strs: None };
    Ok(json(&reply.to_bytes()))
}

/// As in Baton's engine.
fn release(engine: &Arc<Engine>, request: &HttpRequest) -> Result<Vec<u8>, ApiError> {
    let fields = parse_object(&request.body, &ParseLimits::default())?;
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

/// As in Baton's engine.
fn abort(engine: &Arc<Engine>, request: &HttpRequest) -> Result<Vec<u8>, ApiError> {
    let fields = parse_object(&request.body, &ParseLimits::default())?;
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

async fn events(engine: &Engine, request: &HttpRequest) -> Result<Vec<u8>, ApiError> {
    let identity = serde_json::json!({
        "id": engine.id, "epoch": engine.epoch.to_string(), "role": engine.role.label(), "model": engine.plan.model,
    });
    events_page(&engine.log, &identity, request).await
}

/// `GET /debug/kv/events`, of every simulated engine, because the log is the simulation's record.
pub(super) async fn events_page(
    log: &EventLog,
    identity: &serde_json::Value,
    request: &HttpRequest,
) -> Result<Vec<u8>, ApiError> {
    let number =
        |name: &'static str, default: u64, most: u64| match request.field(name).map(str::parse::<u64>) {
            None => Ok(default),
            Some(Ok(number)) if number <= most => Ok(number),
            Some(_) => Err(ApiError::invalid(name, format!("`{name}` must be a number up to {most}"))),
        };
    let limit = number("limit", EVENTS_SHOWN as u64, EVENTS_SHOWN as u64)?.max(1);
    let wait = Duration::from_millis(number("wait_ms", 0, EVENTS_WAIT_MAX_MS)?);
    let page = match request.field("after") {
        Some("latest") => EventPage { next: log.latest(), lost: 0, events: Vec::new() },
        _ => log.page_within(number("after", 0, u64::MAX)?, limit as usize, wait).await,
    };
    let body = serde_json::json!({
        "engine": identity, "now_us": log.now_us(), "next": page.next, "lost": page.lost, "events": page.events,
    });
    Ok(json(body.to_string().as_bytes()))
}
