//! `GET /debug/kv`: the whole deployment's books, engine by engine, and why every lease is held; and
//! `GET /debug/kv/requests/ID`: one request from its arrival to the release of its last block.
//!
//! Engines are asked over the router's own connections, at most once in [`KEPT_FOR`] however many pages are open, and
//! within [`ANSWER_WITHIN`] each. An engine that does not answer is shown as one that does not answer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Mutex;

use super::Answer;
use crate::admin::explain;
use crate::engines::http::{CallError, Engine, Outgoing};
use crate::message::request_id::bare_id;
use crate::metrics::Leg;
use crate::observe::in_flight::Entry;
use crate::observe::snapshot::{
    EngineEvents, EngineView, LeaseView, Request, RequestView, Requests, RouterView, Snapshot, Source,
    Timeline, concerns,
};
use crate::state::shared::Shared;

/// A snapshot is given to everybody who asks for so long.
const KEPT_FOR: Duration = Duration::from_secs(1);
/// An engine's answer is waited for so long.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// All engines together: more than one that hangs, less than a page's patience.
const ALL_WITHIN: Duration = Duration::from_secs(4);
/// Engines that are asked at once.
const ASKED_AT_ONCE: usize = 32;
/// 1,000 leases of a core take about 200 KiB.
const BOOKS_BYTES_MAX: usize = 16 << 20;
const METRICS_BYTES_MAX: usize = 4 << 20;
/// Requests that are listed.
const LISTED: usize = 1_000;
/// Events of one page of an engine's log (no engine gives more at once), and pages that are read for one request: its whole ring.
const EVENTS_OF_A_PAGE: u64 = 2_000;
const PAGES_MAX: u64 = 33;
const PAGE_BYTES_MAX: usize = 16 << 20;
/// Engines that are asked for one request's events: those that it was sent to, where that is known.
const ENGINES_OF_A_REQUEST: usize = 16;

/// The latest snapshot. Whoever asks while it is being made waits for it.
#[derive(Default)]
pub(super) struct Books {
    latest: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    /// One log is read at a time: pages are large.
    reading: Mutex<()>,
}

impl Books {
    /// See the module's documentation.
    pub(super) async fn snapshot(&self, shared: &Arc<Shared>) -> Answer {
        let mut latest = self.latest.lock().await;
        let fresh = latest.as_ref().filter(|(at, _)| at.elapsed() < KEPT_FOR);
        let snapshot = match fresh {
            Some((_, snapshot)) => Arc::clone(snapshot),
            None => {
                let made = Arc::new(take(shared).await);
                *latest = Some((Instant::now(), Arc::clone(&made)));
                made
            }
        };
        drop(latest);
        let written = move || serde_json::to_value(&*snapshot).unwrap_or(Value::Null);
        Answer::json(tokio::task::spawn_blocking(written).await.unwrap_or(Value::Null))
    }

    /// See the module's documentation.
    pub(super) async fn timeline(&self, shared: &Shared, id: &str) -> Answer {
        let page = explain::page(&shared.explain, id);
        let account = page.as_ref().map(|page| &page["requests"][0]);
        let minted = account.and_then(|account| account["id"].as_str()).unwrap_or(id).to_owned();
        let began_us = account.and_then(|account| account["began_us"].as_u64()).unwrap_or(0);
        let steps = account.and_then(|account| account["steps"].as_array()).into_iter().flatten();
        let asked: HashSet<&str> =
            steps.filter(|step| step["what"] == "ask").filter_map(|step| step["engine"].as_str()).collect();
        // Of a request that this router does not know, any engine may have a lease.
        let told = |engine: &Arc<Engine>| account.is_none() || asked.contains(engine.authority());
        let engines: Vec<_> =
            shared.fleet.engines().into_iter().filter(told).take(ENGINES_OF_A_REQUEST).collect();
        let _one_at_a_time = self.reading.lock().await;
        let reading = engines.iter().map(|engine| events_of(engine, &minted, began_us));
        let events: Vec<EngineEvents> = futures::future::join_all(reading).await;
        let line = Timeline::join(id, account, &events);
        if line.moments.is_empty() {
            return Answer::error(
                StatusCode::NOT_FOUND,
                "no request with this id is known to this router or its engines",
            );
        }
        Answer::json(serde_json::to_value(&line).unwrap_or(Value::Null))
    }
}

async fn take(shared: &Arc<Shared>) -> Snapshot {
    let mut snapshot = Snapshot { at_us: now_us(), ..Snapshot::default() };
    let before = shared.in_flight_table.list();
    let deadline = tokio::time::Instant::now() + ALL_WITHIN;
    let mut answers = futures::stream::iter(shared.fleet.engines())
        .map(|engine| async move {
            let asked = tokio::time::timeout_at(deadline, ask(&engine));
            asked.await.unwrap_or_else(|_| {
                let error = Some("not read: too many engines do not respond".to_owned());
                let name = engine.authority().to_owned();
                let view = EngineView { engine: name, at_us: now_us(), error, ..EngineView::default() };
                (view, Vec::new())
            })
        })
        .buffer_unordered(ASKED_AT_ONCE);
    while let Some((view, leases)) = answers.next().await {
        snapshot.engines.push(view);
        snapshot.leases.extend(leases);
    }
    drop(answers);
    let after = shared.in_flight_table.list();
    let shared = Arc::clone(shared);
    // Thousands of engines and leases are put together beside the workers that serve.
    let together = move || put_together(&shared, snapshot, &before, &after);
    tokio::task::spawn_blocking(together).await.unwrap_or_default()
}

/// Adds what this router knows to what the engines have told.
fn put_together(
    shared: &Shared,
    mut snapshot: Snapshot,
    before: &[Arc<Entry>],
    after: &[Arc<Entry>],
) -> Snapshot {
    let generation = shared.generation();
    let fleet = shared.fleet.engines();
    let fleet: HashMap<&str, &Arc<Engine>> =
        fleet.iter().map(|engine| (engine.authority(), engine)).collect();
    // Each engine's places, once; it has several members where its ranks are chosen apart.
    let mut places: HashMap<u32, Vec<(&str, Leg)>> = HashMap::new();
    for model in generation.models.list() {
        for leg in Leg::BOTH {
            for member in model.pool(leg).members() {
                let of_engine = places.entry(member.engine.id()).or_default();
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
        for (model, leg) in places.get(&engine.id()).into_iter().flatten() {
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
    know(shared, &mut snapshot.leases, before, after);
    snapshot.requests = requests(shared, after);
    snapshot.routers.push(RouterView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        generation: generation.number,
        draining: shared.draining.load(std::sync::atomic::Ordering::Relaxed),
        in_flight: snapshot.requests.in_flight,
        ..RouterView::default()
    });
    snapshot.settle();
    snapshot
}

/// Says of every lease what this router knows of its request. It was looked at before the engines were asked and after:
/// a request that was there at either time was in flight while they answered.
fn know(shared: &Shared, leases: &mut [LeaseView], before: &[Arc<Entry>], after: &[Arc<Entry>]) {
    if leases.is_empty() {
        return;
    }
    let flying: HashMap<&str, &Arc<Entry>> =
        before.iter().chain(after).map(|entry| (entry.id.as_str(), entry)).collect();
    let ids: Vec<String> = leases.iter().map(|lease| bare_id(&lease.request_id).to_owned()).collect();
    let others = ids.iter().map(String::as_str).filter(|id| !flying.contains_key(id)).collect();
    let over = explain::over(&shared.explain, &others);
    for (lease, id) in leases.iter_mut().zip(&ids) {
        lease.request = match (flying.get(id.as_str()), over.get(id.as_str())) {
            (Some(entry), _) => Request::InFlight { phase: entry.phase().to_owned() },
            (None, Some((outcome, ago))) => Request::Over {
                outcome: (*outcome).to_owned(),
                ms_ago: u64::try_from(ago.as_millis()).unwrap_or(u64::MAX),
            },
            (None, None) => Request::Absent,
        };
    }
}

/// How many requests are in each phase, and the oldest of them.
fn requests(shared: &Shared, list: &[Arc<Entry>]) -> Requests {
    let now = shared.now();
    let mut requests = Requests { in_flight: list.len() as u64, ..Requests::default() };
    for (at, entry) in list.iter().enumerate() {
        let phase = entry.phase();
        match requests.phases.get_mut(phase) {
            Some(count) => *count += 1,
            None => drop(requests.phases.insert(phase.to_owned(), 1)),
        }
        if at >= LISTED {
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

/// What an engine says of itself.
async fn ask(engine: &Arc<Engine>) -> (EngineView, Vec<LeaseView>) {
    let mut view = EngineView { engine: engine.authority().to_owned(), ..EngineView::default() };
    let mut leases = Vec::new();
    // However long the metrics take: the books are of the moment at which they came.
    let books = async {
        let books = get(engine, "/debug/kv", BOOKS_BYTES_MAX).await;
        (books, now_us())
    };
    let (books, metrics) = tokio::join!(books, get(engine, "/metrics", METRICS_BYTES_MAX));
    let (books, at_us) = books;
    view.at_us = at_us;
    match books {
        Ok((StatusCode::OK, body)) => {
            // Up to 16 MiB: read beside the workers that serve.
            let read = move || serde_json::from_slice::<Value>(&body).unwrap_or(Value::Null);
            let told = tokio::task::spawn_blocking(read).await.unwrap_or(Value::Null);
            if !view.read_books(&told, &mut leases) {
                view.error = Some("its /debug/kv is not that of a Baton engine".to_owned());
            }
        }
        Ok((StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _)) => {
            view.error = Some("it refuses this router's cluster secret".to_owned());
        }
        // A stock engine has no books.
        Ok((status, _)) if status.is_client_error() => {}
        Ok((status, _)) => view.error = Some(format!("/debug/kv: {}", status.as_u16())),
        Err(error) => view.error = Some(error),
    }
    if let Ok((StatusCode::OK, body)) = metrics {
        view.read_metrics(&String::from_utf8_lossy(&body));
    }
    if view.source == Source::None && view.error.is_none() {
        view.error = Some("it has neither /debug/kv nor metrics".to_owned());
    }
    (view, leases)
}

async fn get(
    engine: &Arc<Engine>,
    path: impl Into<std::borrow::Cow<'static, str>>,
    most: usize,
) -> Result<(StatusCode, bytes::Bytes), String> {
    let question = Outgoing::get(path);
    let asked = async { engine.call(&question, |_| {}).await?.whole(most).await };
    match tokio::time::timeout(ANSWER_WITHIN, asked).await {
        Ok(Ok(answer)) => Ok((answer.status, answer.body)),
        Ok(Err(CallError::NotReached)) => Err("it cannot be reached".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", ANSWER_WITHIN.as_secs())),
    }
}

/// One page of an engine's log; its events are looked at one by one.
#[derive(Deserialize)]
struct Page<'a> {
    now_us: u64,
    next: u64,
    /// Older events are gone.
    lost: u64,
    #[serde(borrow)]
    events: Vec<&'a RawValue>,
}

/// What an engine logged of a request, from the newest page back to the time at which the request began.
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
        match get(engine, path, PAGE_BYTES_MAX).await? {
            (StatusCode::OK, body) => Ok(body),
            (StatusCode::NOT_FOUND, _) => Err("it has no event log".to_owned()),
            (status, _) => Err(format!("its event log: {}", status.as_u16())),
        }
    };
    let odd = |_| "its event log cannot be read".to_owned();
    let asked_us = now_us();
    let body = read("latest", 1).await?;
    let latest: Page<'_> = serde_json::from_slice(&body).map_err(odd)?;
    found.ahead_us = EngineEvents::ahead(latest.now_us, asked_us, now_us());
    // What is logged while we read would make the last page too long by a few.
    let mut end = latest.next;
    for _ in 0..PAGES_MAX {
        let after = end.saturating_sub(EVENTS_OF_A_PAGE);
        let body = read(&after.to_string(), EVENTS_OF_A_PAGE).await?;
        let page: Page<'_> = serde_json::from_slice(&body).map_err(odd)?;
        let mut first_at = None;
        let mut events = Vec::new();
        for raw in &page.events {
            if first_at.is_none() {
                first_at = event(raw).and_then(|event| event["at_us"].as_u64());
            }
            // Most are of other requests, and need not be read.
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
