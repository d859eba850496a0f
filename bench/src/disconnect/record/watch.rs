//! Watches the engines of a deployment during a run: follows their event logs and samples their states.
//!
//! Baton's engines and the simulated ones log every step of every request. A vLLM engine reports only sums in its
//! metrics, which the report states.

mod live;
mod log;
pub(crate) mod token_capacity;
mod vllm;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::common::http_client::{Samples, ServiceClient, WebError};
use crate::disconnect::record::raw::{EngineRecord, EngineState, EventRecord, Record};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::timeline::Timeline;
use crate::load::Moment;

/// Timeout of a request to an engine.
const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of a long poll of the event log, ms.
const LONG_POLL_MS: u64 = 2_000;
/// Pause before the next attempt to reach an engine.
const RETRY: Duration = Duration::from_millis(50);
/// Measurements of a clock; the fastest one is the most exact.
const CLOCK_LOOKS: usize = 9;
/// Maximum events of one page.
const EVENTS_OF_ONE_ANSWER: usize = 2_000;

/// Minimum pause between pages, for an endpoint that does not wait.
const BETWEEN_PAGES: Duration = Duration::from_micros(500);
/// More restarts mean that there are several engines behind one address.
const RESTARTS_MAX: usize = 50;
/// Requests whose tags are kept, and events of one request that wait for its tag.
const REQUESTS_REMEMBERED: usize = 65_536;
const UNTAGGED_MAX: usize = 8;

/// A point in the life of a request that its engines log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Milestone {
    /// An engine has accepted the request.
    Queued,
    /// The prefill engine has begun to compute.
    PrefillStarted,
    /// The prefill engine has leased the blocks.
    Lent,
    /// The prefill engine has written its reply.
    Replied,
    /// The prefill has ended, and the decode engine has begun to read the blocks.
    Fetching,
    /// The decode engine has read the blocks.
    Fetched,
    /// The decode engine has generated the first token.
    FirstToken,
}

/// A watched engine.
pub(crate) struct WatchedEngine {
    service: ServiceClient,
    record: Mutex<EngineRecord>,
    /// The engine has `/debug/kv`. Otherwise its state is estimated from its metrics.
    has_debug_kv: bool,
    /// The end of the event log when the watch began: epoch and number.
    met_at: (String, u64),
    expired: AtomicU64,
}

/// The timelines of the requests with tags of this run.
#[derive(Default)]
pub(crate) struct TimelineFeed {
    state: Mutex<FeedState>,
    news: Notify,
}

#[derive(Default)]
struct FeedState {
    timelines: HashMap<String, Timeline>,
    waiting: HashMap<String, Vec<(Milestone, CancellationToken)>>,
    /// The last sample of each engine: time, held blocks and requests.
    held: HashMap<usize, (u64, u64, u64)>,
}

impl TimelineFeed {
    fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token that is cancelled when the request with this tag reaches the milestone.
    pub(crate) fn when(&self, tag: &str, milestone: Milestone) -> CancellationToken {
        let token = CancellationToken::new();
        self.lock().waiting.entry(tag.to_owned()).or_default().push((milestone, token.clone()));
        token
    }

    /// Removes the milestones of a request and returns its timeline.
    pub(crate) fn forget(&self, tag: &str) -> Option<Timeline> {
        let mut state = self.lock();
        state.waiting.remove(tag);
        state.timelines.get(tag).cloned()
    }

    /// The timeline of a request.
    pub(crate) fn timeline(&self, tag: &str) -> Option<Timeline> {
        self.lock().timelines.get(tag).cloned()
    }

    /// Waits until the condition holds or the time is over, and returns the timeline.
    pub(crate) async fn until(
        &self,
        tag: &str,
        within: Duration,
        is_so: impl Fn(&Timeline) -> bool,
    ) -> Option<Timeline> {
        let until = tokio::time::Instant::now() + within;
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // From here on no event is missed.
            news.as_mut().enable();
            let known = self.timeline(tag);
            if known.as_ref().is_some_and(&is_so) || tokio::time::timeout_at(until, news).await.is_err() {
                return known;
            }
        }
    }

    pub(crate) fn publish(&self, event: &EventRecord) {
        self.put(event);
        self.news.notify_waiters();
    }

    fn put(&self, event: &EventRecord) {
        let mut state = self.lock();
        let timeline = state.timelines.entry(event.tag.clone()).or_default();
        timeline.apply(event);
        let produces = timeline.legs.iter().any(|leg| leg.engine == event.engine && leg.produces);
        let computes = timeline.legs.iter().any(|leg| leg.produces && leg.ended.is_none());
        let reads = timeline.legs.iter().any(|leg| leg.fetching.is_some() && leg.fetched.is_none());
        let milestone = match (event.kind.as_str(), produces) {
            ("queued", _) => Milestone::Queued,
            ("started", true) => Milestone::PrefillStarted,
            ("lease_opened", _) => Milestone::Lent,
            ("replied", true) => Milestone::Replied,
            // A read or write that began before the prefill's end is a phase only after it.
            ("fetching", _) if !computes => Milestone::Fetching,
            ("ended", true) if reads => Milestone::Fetching,
            ("fetched", _) => Milestone::Fetched,
            ("first_token", false) => Milestone::FirstToken,
            _ => return,
        };
        if let Some(waiting) = state.waiting.get_mut(&event.tag) {
            waiting.retain(|(wanted, token)| {
                if *wanted == milestone {
                    token.cancel();
                }
                *wanted != milestone
            });
        }
    }

    /// Whether every engine held no blocks and no requests in its last sample, at or after this moment.
    pub(crate) fn all_free_since(&self, at_us: u64, engines: usize) -> bool {
        let state = self.lock();
        state.held.len() == engines
            && state.held.values().all(|(at, held, requests)| *at >= at_us && *held == 0 && *requests == 0)
    }
}

/// The watch of a deployment; ends when it is dropped.
pub(crate) struct EngineWatch {
    pub(crate) engines: Vec<Arc<WatchedEngine>>,
    pub(crate) feed: Arc<TimelineFeed>,
    _tasks: JoinSet<()>,
}

/// An engine to watch.
pub(crate) struct EngineEndpoint {
    pub(crate) name: String,
    /// If it is known.
    pub(crate) role: Option<String>,
    pub(crate) service: ServiceClient,
}

/// Options of the watch.
#[derive(Clone)]
pub(crate) struct WatchOptions {
    /// Only requests whose tag has this prefix are watched.
    pub(crate) prefix: String,
    /// The interval between samples of an engine.
    pub(crate) every: Duration,
    /// Read only metrics, without event logs and `/debug/kv`.
    pub(crate) metrics_only: bool,
}

impl EngineWatch {
    /// Connects to every engine and begins to watch it.
    ///
    /// # Errors
    /// If an engine does not respond.
    pub(crate) async fn begin(
        engines: Vec<EngineEndpoint>,
        terms: &WatchOptions,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, WebError> {
        let feed = Arc::new(TimelineFeed::default());
        let mut tasks = JoinSet::new();
        let mut watched = Vec::new();
        for (number, endpoint) in engines.into_iter().enumerate() {
            let engine = Arc::new(WatchedEngine::connect(number, endpoint, terms.metrics_only).await?);
            recorder.put(&Record::Engine(engine.record()));
            let (feed, recorder) = (Arc::clone(&feed), Arc::clone(recorder));
            if engine.record().events {
                let (engine, feed) = (Arc::clone(&engine), Arc::clone(&feed));
                let (terms, recorder) = (terms.clone(), Arc::clone(&recorder));
                tasks.spawn(async move { engine.follow(&terms, &feed, &recorder).await });
            }
            let looked_at = Arc::clone(&engine);
            let every = terms.every;
            tasks.spawn(async move {
                loop {
                    looked_at.look(&feed, &recorder).await;
                    tokio::time::sleep(every).await;
                }
            });
            watched.push(engine);
        }
        Ok(Self { engines: watched, feed, _tasks: tasks })
    }

    /// Whether all engines have an event log.
    pub(crate) fn exact(&self) -> bool {
        !self.engines.is_empty() && self.engines.iter().all(|engine| engine.record().events)
    }

    /// Reads the counters that only metrics contain.
    pub(crate) async fn read_counters(&self) {
        for engine in &self.engines {
            engine.read_counters().await;
        }
    }

    /// Waits until no engine holds blocks, or the time is over. Returns whether they are free.
    pub(crate) async fn wait_until_all_free(&self, within: Duration) -> bool {
        let (from, until) = (Moment::now().us(), tokio::time::Instant::now() + within);
        while !self.feed.all_free_since(from, self.engines.len()) {
            if tokio::time::Instant::now() > until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }
}

impl WatchedEngine {
    async fn connect(number: usize, endpoint: EngineEndpoint, metrics_only: bool) -> Result<Self, WebError> {
        let EngineEndpoint { name, role, service } = endpoint;
        let mut record = EngineRecord { engine: number, name, ..EngineRecord::default() };
        let latest = service.get_json("/debug/kv/events?after=latest", PATIENCE).await;
        match &latest {
            Ok(page) => {
                record.events = !metrics_only;
                record.role = page["engine"]["role"].as_str().unwrap_or("both").to_owned();
            }
            Err(error) if error.status().is_some_and(|status| status.as_u16() == 404) => {}
            Err(_) => return Err(latest.expect_err("it is an error")),
        }
        record.role = role.unwrap_or(std::mem::take(&mut record.role));
        let met_at = latest.map_or_else(
            |_| Default::default(),
            |page| {
                let epoch = page["engine"]["epoch"].as_str().unwrap_or_default().to_owned();
                (epoch, page["next"].as_u64().unwrap_or_default())
            },
        );
        let shown = service.get_json("/debug/kv", PATIENCE).await;
        let absent = |error: &WebError| error.status().is_some_and(|status| status.as_u16() == 404);
        let has_debug_kv = match shown {
            Ok(page) => {
                record.batching_shows = page["engine"]["batch_invariant"] == false;
                !metrics_only
            }
            Err(error) if absent(&error) => false,
            Err(error) => return Err(error),
        };
        let (record, expired) = (Mutex::new(record), AtomicU64::new(0));
        let engine = Self { service, record, has_debug_kv, met_at, expired };
        engine.read_counters().await;
        if engine.record().events {
            engine.read_clock().await?;
        }
        let state = engine.engine_state().await?;
        engine.with_record(|record| record.blocks = if state.thousandths { 0 } else { state.total });
        Ok(engine)
    }

    fn with_record<T>(&self, change: impl FnOnce(&mut EngineRecord) -> T) -> T {
        change(&mut self.record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn record(&self) -> EngineRecord {
        self.with_record(|record| record.clone())
    }

    /// Measures the offset of the engine's clock: the fastest of several measurements, with half its duration as the
    /// error.
    async fn read_clock(&self) -> Result<(), WebError> {
        let mut best: Option<(u64, i64)> = None;
        for _ in 0..CLOCK_LOOKS {
            let asked = Moment::now().us();
            let page = self.service.get_json("/debug/kv/events?after=latest", PATIENCE).await?;
            let answered = Moment::now().us();
            let theirs = page["now_us"].as_i64().unwrap_or_default();
            let (took, middle) =
                (answered - asked, i64::try_from(asked.midpoint(answered)).unwrap_or(i64::MAX));
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, theirs - middle));
            }
        }
        let (took, offset) = best.expect("it was looked at");
        let doubt = took / 2 + 1;
        self.with_record(|record| {
            record.clock_doubt_us = doubt;
            // An offset within its error counts as zero.
            record.clock_offset_us = if offset.unsigned_abs() <= doubt { 0 } else { offset };
        });
        Ok(())
    }

    /// Follows the event log until the watch ends.
    async fn follow(&self, terms: &WatchOptions, feed: &TimelineFeed, recorder: &Recorder) {
        let (mut epoch, mut after) = self.met_at.clone();
        let (mut restarts, mut tags) = (0, TagIndex::default());
        let mut seen_us = Moment::now().us();
        loop {
            let path =
                format!("/debug/kv/events?after={after}&wait_ms={LONG_POLL_MS}&limit={EVENTS_OF_ONE_ANSWER}");
            let patience = PATIENCE + Duration::from_millis(LONG_POLL_MS);
            tokio::time::sleep(BETWEEN_PAGES).await;
            let Ok(page) = self.service.get_json(&path, patience).await else {
                // The engine may be killed and about to restart.
                tokio::time::sleep(RETRY).await;
                continue;
            };
            let current = page["engine"]["epoch"].as_str().unwrap_or_default();
            if current != epoch {
                // A new process: its event numbers begin again, and its clock may differ.
                (epoch, after) = (current.to_owned(), 0);
                restarts += 1;
                if restarts > RESTARTS_MAX {
                    // Several engines behind one address: their events cannot be separated.
                    recorder.put(&Record::Lost { engine: self.record().engine, events: 1 });
                    return;
                }
                let _ = self.read_clock().await;
                recorder.put(&Record::Engine(self.record()));
                let engine = self.record().engine;
                let at_us = Moment::now().us();
                recorder.put(&Record::Restarted { engine, at_us, seen_us: Some(seen_us) });
                seen_us = at_us;
                continue;
            }
            seen_us = Moment::now().us();
            let record = self.record();
            if let Some(events) = page["lost"].as_u64().filter(|lost| *lost > 0) {
                recorder.put(&Record::Lost { engine: record.engine, events });
            }
            let log::LogPage { fresh, next } = log::read(&page, after);
            for event in fresh {
                for event in tags.tag(event, &terms.prefix) {
                    if let Some(event) = record_of(&event, &record) {
                        recorder.put(&Record::Event(event.clone()));
                        feed.publish(&event);
                    }
                }
            }
            let Some(next) = next else {
                // A log that returns the same page again would fill the disk.
                recorder.put(&Record::Lost { engine: record.engine, events: 1 });
                return;
            };
            after = next;
        }
    }

    async fn look(&self, feed: &TimelineFeed, recorder: &Recorder) {
        let Ok(state) = self.engine_state().await else { return };
        feed.lock().held.insert(state.engine, (state.at_us, state.held, state.requests));
        recorder.put(&Record::EngineState(state));
    }

    async fn engine_state(&self) -> Result<EngineState, WebError> {
        let record = self.record();
        let asked = Moment::now().us();
        let mut state = if self.has_debug_kv {
            of_baton(&self.service.get_json("/debug/kv", PATIENCE).await?)
        } else {
            let samples = self.service.samples(PATIENCE).await?;
            self.count(&samples);
            let mut state = vllm::engine_state(&samples);
            state.took_us = Moment::now().us() - asked;
            state
        };
        // The start of the request. The values are from a later moment.
        (state.engine, state.at_us) = (record.engine, asked);
        state.expired = self.expired.load(Ordering::Relaxed);
        Ok(state)
    }

    async fn read_counters(&self) {
        if let Ok(samples) = self.service.samples(PATIENCE).await {
            self.count(&samples);
        }
    }

    fn count(&self, samples: &Samples) {
        let expired = ["vllm:nixl_num_kv_expired_reqs", "vllm:nixl_num_kv_expired_reqs_total"];
        if let Some(expired) = expired.iter().find_map(|name| samples.sum(name, &[])) {
            self.expired.store(expired as u64, Ordering::Relaxed);
        }
    }
}

/// Tags by request. An engine may log an abort before its request, and only the first event contains the tag.
#[derive(Default)]
struct TagIndex {
    known: HashMap<String, String>,
    /// Oldest first, of both maps.
    order: VecDeque<String>,
    untagged: HashMap<String, Vec<Value>>,
}

impl TagIndex {
    /// Returns the events that have a tag now: this one, and those that waited for the tag.
    fn tag(&mut self, event: &Value, prefix: &str) -> Vec<Value> {
        let Some(request) = event["request_id"].as_str() else { return Vec::new() };
        let tag = event["tag"].as_str().map(str::to_owned).or_else(|| self.known.get(request).cloned());
        let Some(tag) = tag else {
            // An event of another client, or one that precedes its request.
            if event["kind"] == "abort" {
                self.remember(request);
                let waiting = self.untagged.entry(request.to_owned()).or_default();
                if waiting.len() < UNTAGGED_MAX {
                    waiting.push(event.clone());
                }
            }
            return Vec::new();
        };
        if !tag.starts_with(prefix) {
            return Vec::new();
        }
        let mut tagged = self.untagged.remove(request).unwrap_or_default();
        if self.known.insert(request.to_owned(), tag.clone()).is_none() {
            self.remember(request);
        }
        tagged.push(event.clone());
        for event in &mut tagged {
            event["tag"] = tag.as_str().into();
        }
        tagged
    }

    fn remember(&mut self, request: &str) {
        if self.order.len() >= REQUESTS_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
            self.untagged.remove(&oldest);
        }
        self.order.push_back(request.to_owned());
    }
}

fn record_of(event: &Value, record: &EngineRecord) -> Option<EventRecord> {
    let text = |name: &str| event[name].as_str().map(str::to_owned);
    let number = |name: &str| event[name].as_u64();
    let at = i64::try_from(number("at_us")?).ok()? - record.clock_offset_us;
    Some(EventRecord {
        engine: record.engine,
        at_us: u64::try_from(at).ok()?,
        seq: number("seq")?,
        request_id: text("request_id")?,
        tag: text("tag")?,
        index: u32::try_from(number("index").unwrap_or(0)).unwrap_or(u32::MAX),
        kind: text("kind")?,
        leg: text("leg"),
        blocks: number("blocks"),
        left_ms: number("left_ms"),
        tokens: number("tokens"),
        generated: number("generated"),
        computed: number("computed"),
        outcome: text("outcome"),
        reason: text("reason").or_else(|| text("how")),
        result: text("result"),
    })
}

/// The state in `/debug/kv`.
fn of_baton(shown: &Value) -> EngineState {
    let blocks = &shown["blocks"];
    let count = |name: &str| blocks[name].as_u64().unwrap_or(0);
    let held = count("active") + count("leased") + count("landing") + count("storing");
    let requests = shown["requests"].as_object().into_iter().flatten();
    EngineState {
        total: count("total"),
        held,
        leased: Some(count("leased")),
        askew: (held + count("free") + count("cached")) as i64 - count("total") as i64,
        requests: requests.filter_map(|(_, count)| count.as_u64()).sum(),
        leases: shown["leases"]["live"].as_u64(),
        ..EngineState::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn engine_state_is_parsed() {
        let shown = json!({
            "blocks": {"total": 10, "free": 3, "cached": 2, "active": 1, "leased": 2, "landing": 1, "storing": 1},
            "requests": {"waiting": 1, "running": 2, "fetching": 0}, "leases": {"live": 4},
        });
        let state = of_baton(&shown);
        assert_eq!(
            (state.total, state.held, state.leased, state.requests, state.leases),
            (10, 5, Some(2), 3, Some(4))
        );
        assert_eq!(state.askew, 0);
        let mut crooked = shown;
        crooked["blocks"]["free"] = 2.into();
        assert_eq!(of_baton(&crooked).askew, -1);
    }

    #[test]
    fn an_event_without_a_tag_is_its_requests() {
        let mut tags = TagIndex::default();
        let event =
            |request: &str, kind: &str, tag: Value| json!({"request_id": request, "kind": kind, "tag": tag});
        // An abort before its request, one of another client, and a tag that the engine no longer repeats.
        assert!(tags.tag(&event("a", "abort", Value::Null), "run-").is_empty());
        assert!(tags.tag(&event("b", "abort", Value::Null), "run-").is_empty());
        let tagged = tags.tag(&event("a", "queued", "run-1".into()), "run-");
        assert_eq!(tagged.iter().map(|event| &event["kind"]).collect::<Vec<_>>(), ["abort", "queued"]);
        assert!(tagged.iter().all(|event| event["tag"] == "run-1"));
        assert!(tags.tag(&event("b", "queued", "other".into()), "run-").is_empty());
        assert_eq!(tags.tag(&event("a", "freed", Value::Null), "run-")[0]["tag"], "run-1");
        for n in 0..REQUESTS_REMEMBERED + 10 {
            tags.tag(&event(&format!("r{n}"), "abort", Value::Null), "run-");
        }
        assert!(tags.order.len() <= REQUESTS_REMEMBERED && tags.untagged.len() <= REQUESTS_REMEMBERED);
    }

    #[test]
    fn a_milestone_wakes_the_waiter_of_its_own_request() {
        let feed = TimelineFeed::default();
        let (mine, other) = (feed.when("a", Milestone::Lent), feed.when("b", Milestone::Lent));
        let event = |tag: &str, kind: &str| EventRecord {
            tag: tag.into(),
            kind: kind.into(),
            ..EventRecord::default()
        };
        feed.publish(&event("a", "queued"));
        assert!(!mine.is_cancelled());
        feed.publish(&event("a", "lease_opened"));
        assert!(mine.is_cancelled() && !other.is_cancelled());
        assert_eq!(feed.forget("a").map(|timeline| timeline.legs.len()), Some(1));
        // Pages that are reserved before the prefill are read after it.
        let reads = feed.when("c", Milestone::Fetching);
        for (engine, kind, leg) in
            [(1, "queued", "decode"), (0, "queued", "prefill"), (1, "fetching", ""), (0, "ended", "")]
        {
            assert!(!reads.is_cancelled(), "before {kind}");
            feed.publish(&EventRecord { engine, leg: Some(leg.into()), ..event("c", kind) });
        }
        assert!(reads.is_cancelled());
    }
}
