//! `GET /debug/kv`: the KV state of the whole deployment, engine by engine, with the reason for every lease. `GET
//! /debug/kv/requests/ID`: one request from its arrival to the release of its last block.
//!
//! The router queries the engines over its own connections, at most once per [`SNAPSHOT_TTL`] however many pages
//! are open. Each engine has [`ENGINE_TIMEOUT`] to respond. The view of an unresponsive engine contains an error.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Mutex;

use super::AdminResponse;
use crate::admin::explain;
use crate::engines::http::{CallError, Engine, EngineRequest};
use crate::message::request_id::bare_id;
use crate::metrics::Leg;
use crate::observe::in_flight::InFlightRequest;
use crate::observe::snapshot::{
    EngineEvents, EngineView, LeaseView, RequestState, RequestView, RequestsView, RouterView, Snapshot,
    SnapshotSource, Timeline, concerns,
};
use crate::state::shared::Shared;

/// A snapshot is served from the cache for this time.
const SNAPSHOT_TTL: Duration = Duration::from_secs(1);
/// Maximum wait for one engine's response.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum wait for all engines: longer than one unresponsive engine takes, shorter than a page waits.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum engines queried at once.
const CONCURRENT_QUERIES_MAX: usize = 32;
/// 1,000 leases of a core take about 200 KiB.
const DEBUG_KV_BYTES_MAX: usize = 16 << 20;
const METRICS_BYTES_MAX: usize = 4 << 20;
/// Maximum requests in a snapshot's list.
const LISTED_REQUESTS_MAX: usize = 1_000;
/// Events of one page of an engine's log; engines allow no more. The pages read for one request cover its whole
/// ring.
const EVENTS_PER_PAGE: u64 = 2_000;
const PAGES_MAX: u64 = 33;
const PAGE_BYTES_MAX: usize = 16 << 20;
/// Maximum engines queried for one request's events: the engines of its attempts, where those are known.
const ENGINES_PER_REQUEST_MAX: usize = 16;

/// The latest snapshot. Requests that arrive while one is being made wait for it.
#[derive(Default)]
pub(super) struct SnapshotCache {
    latest: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    /// Serializes reads of event logs, because their pages are large.
    reading: Mutex<()>,
}

impl SnapshotCache {
    /// See the module's documentation.
    pub(super) async fn snapshot(&self, shared: &Arc<Shared>) -> AdminResponse {
        let mut latest = self.latest.lock().await;
        let fresh = latest.as_ref().filter(|(at, _)| at.elapsed() < SNAPSHOT_TTL);
        let snapshot = match fresh {
            Some((_, snapshot)) => Arc::clone(snapshot),
            None => {
                let made = Arc::new(collect(shared).await);
                *latest = Some((Instant::now(), Arc::clone(&made)));
                made
            }
        };
        drop(latest);
        let written = move || serde_json::to_value(&*snapshot).unwrap_or(Value::Null);
        AdminResponse::json(tokio::task::spawn_blocking(written).await.unwrap_or(Value::Null))
    }

    /// See the module's documentation.
    pub(super) async fn timeline(&self, shared: &Shared, id: &str) -> AdminResponse {
        let page = explain::find_requests(&shared.explanations, id);
        let explanation = page.as_ref().map(|page| &page["requests"][0]);
        let minted = explanation.and_then(|explanation| explanation["id"].as_str()).unwrap_or(id).to_owned();
        let began_us = explanation.and_then(|explanation| explanation["began_us"].as_u64()).unwrap_or(0);
        let steps = explanation.and_then(|explanation| explanation["steps"].as_array()).into_iter().flatten();
        let engines_asked: HashSet<&str> =
            steps.filter(|step| step["what"] == "ask").filter_map(|step| step["engine"].as_str()).collect();
        // Any engine may have a lease of a request that this router does not know.
        let is_involved =
            |engine: &Arc<Engine>| explanation.is_none() || engines_asked.contains(engine.authority());
        let engines: Vec<_> =
            shared.fleet.engines().into_iter().filter(is_involved).take(ENGINES_PER_REQUEST_MAX).collect();
        let _one_at_a_time = self.reading.lock().await;
        let reading = engines.iter().map(|engine| events_of(engine, &minted, began_us));
        let events: Vec<EngineEvents> = futures::future::join_all(reading).await;
        let line = Timeline::join(id, explanation, &events);
        if line.moments.is_empty() {
            return AdminResponse::error(
                StatusCode::NOT_FOUND,
                "no request with this id is known to this router or its engines",
            );
        }
        AdminResponse::json(serde_json::to_value(&line).unwrap_or(Value::Null))
    }
}

async fn collect(shared: &Arc<Shared>) -> Snapshot {
    let mut snapshot = Snapshot { at_us: now_us(), ..Snapshot::default() };
    let before = shared.in_flight.table.list();
    let deadline = tokio::time::Instant::now() + TOTAL_TIMEOUT;
    let mut answers = futures::stream::iter(shared.fleet.engines())
        .map(|engine| async move {
            let queried = tokio::time::timeout_at(deadline, query_engine(&engine));
            queried.await.unwrap_or_else(|_| {
                let error = Some("not read: too many engines do not respond".to_owned());
                let name = engine.authority().to_owned();
                let view = EngineView { engine: name, at_us: now_us(), error, ..EngineView::default() };
                (view, Vec::new())
            })
        })
        .buffer_unordered(CONCURRENT_QUERIES_MAX);
    while let Some((view, leases)) = answers.next().await {
        snapshot.engines.push(view);
        snapshot.leases.extend(leases);
    }
    drop(answers);
    let after = shared.in_flight.table.list();
    let shared = Arc::clone(shared);
    // Merging thousands of engines and leases runs outside the workers that serve requests.
    let together = move || merge(&shared, snapshot, &before, &after);
    tokio::task::spawn_blocking(together).await.unwrap_or_default()
}

/// Adds the router's own data to the engines' views.
fn merge(
    shared: &Shared,
    mut snapshot: Snapshot,
    before: &[Arc<InFlightRequest>],
    after: &[Arc<InFlightRequest>],
) -> Snapshot {
    let generation = shared.generation();
    let fleet = shared.fleet.engines();
    let fleet: HashMap<&str, &Arc<Engine>> =
        fleet.iter().map(|engine| (engine.authority(), engine)).collect();
    // The pool legs of each engine. An engine has several members where its ranks are chosen separately.
    let mut legs_of: HashMap<u32, Vec<(&str, Leg)>> = HashMap::new();
    for model in generation.models.list() {
        for leg in Leg::BOTH {
            for member in model.pool(leg).members() {
                let of_engine = legs_of.entry(member.engine.id()).or_default();
                if of_engine.last() != Some(&(model.name.as_str(), leg)) {
                    of_engine.push((&model.name, leg));
                }
            }
        }
    }
    for view in &mut snapshot.engines {
        let Some(&engine) = fleet.get(view.engine.as_str()) else { continue };
        view.in_flight = Some(engine.load(None) as u64);
        let terms = engine.health_terms();
        let health = engine.health().snapshot();
        let mut legs = Vec::new();
        for (model, leg) in legs_of.get(&engine.id()).into_iter().flatten() {
            let standing = health.standing(*leg, &terms).label();
            view.standing.insert(leg.label().to_owned(), standing.to_owned());
            legs.push(leg.label());
            view.model.get_or_insert_with(|| (*model).to_owned());
        }
        if view.role.is_empty() {
            legs.dedup();
            view.role = if legs.len() == 1 { legs[0].to_owned() } else { "both".to_owned() };
        }
    }
    attach_requests(shared, &mut snapshot.leases, before, after);
    snapshot.requests = requests(shared, after);
    snapshot.routers.push(RouterView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        generation: generation.version.number,
        draining: shared.draining.load(std::sync::atomic::Ordering::Relaxed),
        in_flight: snapshot.requests.in_flight,
        ..RouterView::default()
    });
    snapshot.finish();
    snapshot
}

/// Adds to every lease the state of its request in this router. The lists of requests are of before and after the
/// query of the engines: a request of either list was in flight when they responded.
fn attach_requests(
    shared: &Shared,
    leases: &mut [LeaseView],
    before: &[Arc<InFlightRequest>],
    after: &[Arc<InFlightRequest>],
) {
    if leases.is_empty() {
        return;
    }
    let in_flight: HashMap<&str, &Arc<InFlightRequest>> =
        before.iter().chain(after).map(|entry| (entry.id.as_str(), entry)).collect();
    let ids: Vec<String> = leases.iter().map(|lease| bare_id(&lease.request_id).to_owned()).collect();
    let others = ids.iter().map(String::as_str).filter(|id| !in_flight.contains_key(id)).collect();
    let over = explain::ended_requests(&shared.explanations, &others, shared.now());
    for (lease, id) in leases.iter_mut().zip(&ids) {
        lease.request = match (in_flight.get(id.as_str()), over.get(id.as_str())) {
            (Some(entry), _) => RequestState::InFlight { phase: entry.phase().to_owned() },
            (None, Some((outcome, ago))) => RequestState::Over {
                outcome: (*outcome).to_owned(),
                ms_ago: u64::try_from(ago.as_millis()).unwrap_or(u64::MAX),
            },
            (None, None) => RequestState::Absent,
        };
    }
}

/// The number of requests per phase, and the oldest requests.
fn requests(shared: &Shared, list: &[Arc<InFlightRequest>]) -> RequestsView {
    let now = shared.now();
    let mut requests = RequestsView { in_flight: list.len() as u64, ..RequestsView::default() };
    for (at, entry) in list.iter().enumerate() {
        let phase = entry.phase();
        *requests.phases.entry(phase.to_owned()).or_default() += 1;
        if at >= LISTED_REQUESTS_MAX {
            continue;
        }
        let [prefill, decode] = entry.engines();
        let name = |engine: Option<Arc<Engine>>| engine.map(|engine| engine.authority().to_owned());
        requests.oldest.push(RequestView {
            request_id: entry.id.as_str().to_owned(),
            model: entry.model.get().map(|model| model.name.clone()),
            phase: phase.to_owned(),
            age_ms: u64::try_from(now.since(entry.begun).as_millis()).unwrap_or(u64::MAX),
            prefill_engine: name(prefill),
            decode_engine: name(decode),
        });
    }
    requests
}

/// Reads one engine's `/debug/kv` and `/metrics`.
async fn query_engine(engine: &Arc<Engine>) -> (EngineView, Vec<LeaseView>) {
    let mut view = EngineView { engine: engine.authority().to_owned(), ..EngineView::default() };
    let mut leases = Vec::new();
    // `at_us` is the time of `/debug/kv`, even if `/metrics` takes longer.
    let debug_kv = async {
        let debug_kv = fetch(engine, "/debug/kv", DEBUG_KV_BYTES_MAX).await;
        (debug_kv, now_us())
    };
    let (debug_kv, metrics) = tokio::join!(debug_kv, fetch(engine, "/metrics", METRICS_BYTES_MAX));
    let (debug_kv, at_us) = debug_kv;
    view.at_us = at_us;
    match debug_kv {
        Ok((StatusCode::OK, body)) => {
            // Up to 16 MiB: parsed outside the workers that serve requests.
            let read = move || serde_json::from_slice::<Value>(&body).unwrap_or(Value::Null);
            let value = tokio::task::spawn_blocking(read).await.unwrap_or(Value::Null);
            if !view.read_debug_kv(&value, &mut leases) {
                view.error = Some("its /debug/kv is not that of a Baton engine".to_owned());
            }
        }
        Ok((StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _)) => {
            view.error = Some("it refuses this router's cluster secret".to_owned());
        }
        // A stock engine has no `/debug/kv`.
        Ok((status, _)) if status.is_client_error() => {}
        Ok((status, _)) => view.error = Some(format!("/debug/kv: {}", status.as_u16())),
        Err(error) => view.error = Some(error),
    }
    if let Ok((StatusCode::OK, body)) = metrics {
        view.read_metrics(&String::from_utf8_lossy(&body));
    }
    if view.source == SnapshotSource::None && view.error.is_none() {
        view.error = Some("it has neither /debug/kv nor metrics".to_owned());
    }
    (view, leases)
}

async fn fetch(
    engine: &Arc<Engine>,
    path: impl Into<std::borrow::Cow<'static, str>>,
    most: usize,
) -> Result<(StatusCode, bytes::Bytes), String> {
    let request = EngineRequest::get(path);
    let reply = async {
        let reply = match request.path.starts_with("/debug/kv") {
            true => engine.call_control(&request).await?,
            false => engine.call(&request, |_| {}).await?,
        };
        reply.read_whole(most).await
    };
    match tokio::time::timeout(ENGINE_TIMEOUT, reply).await {
        Ok(Ok(answer)) => Ok((answer.status, answer.body)),
        Ok(Err(CallError::NotConnected)) => Err("it cannot be reached".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", ENGINE_TIMEOUT.as_secs())),
    }
}

/// One page of an engine's log. Its events are parsed one by one.
#[derive(Deserialize)]
struct EventLogPage<'a> {
    now_us: u64,
    next: u64,
    /// The number of older events that the ring no longer has.
    lost: u64,
    #[serde(borrow)]
    events: Vec<&'a RawValue>,
}

/// Reads an engine's events of one request, from the newest page back to the time at which the request began.
async fn events_of(engine: &Arc<Engine>, id: &str, began_us: u64) -> EngineEvents {
    let mut found = EngineEvents { engine: engine.authority().to_owned(), ..EngineEvents::default() };
    found.error = read_log(engine, id, began_us, &mut found).await.err();
    found
}

async fn read_log(
    engine: &Arc<Engine>,
    id: &str,
    began_us: u64,
    found: &mut EngineEvents,
) -> Result<(), String> {
    let id = bare_id(id);
    let read = async |after: &str, limit: u64| {
        let path = format!("/debug/kv/events?after={after}&wait_ms=0&limit={limit}");
        match fetch(engine, path, PAGE_BYTES_MAX).await? {
            (StatusCode::OK, body) => Ok(body),
            (StatusCode::NOT_FOUND, _) => Err("it has no event log".to_owned()),
            (status, _) => Err(format!("its event log: {}", status.as_u16())),
        }
    };
    let odd = |_| "its event log cannot be read".to_owned();
    let asked_us = now_us();
    let body = read("latest", 1).await?;
    let latest: EventLogPage<'_> = serde_json::from_slice(&body).map_err(odd)?;
    found.ahead_us = EngineEvents::ahead(latest.now_us, asked_us, now_us());
    // Events logged during the read would make the last page longer than the limit.
    let mut end = latest.next;
    for _ in 0..PAGES_MAX {
        let after = end.saturating_sub(EVENTS_PER_PAGE);
        let body = read(&after.to_string(), EVENTS_PER_PAGE).await?;
        let page: EventLogPage<'_> = serde_json::from_slice(&body).map_err(odd)?;
        let mut first_at = None;
        let mut events = Vec::new();
        for raw in &page.events {
            if first_at.is_none() {
                first_at = event(raw).and_then(|event| event["at_us"].as_u64());
            }
            // Most events belong to other requests and are not parsed.
            let event = raw.get().contains(id).then(|| event(raw)).flatten();
            events.extend(event.filter(|event| concerns(event, id)));
        }
        events.append(&mut found.events);
        found.events = events;
        let before = began_us.saturating_add_signed(found.ahead_us).saturating_sub(1_000_000);
        if after == 0 || page.lost > 0 || first_at.is_none_or(|at| at < before) {
            break;
        }
        end = after;
    }
    found.events.sort_by_key(|event| event["seq"].as_u64());
    found.events.dedup_by_key(|event| event["seq"].as_u64());
    Ok(())
}

fn event(raw: &RawValue) -> Option<Value> {
    serde_json::from_str(raw.get()).ok()
}

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
