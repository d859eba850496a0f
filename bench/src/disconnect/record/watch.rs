//! Looks at the engines of a deployment while it is used: follows their event logs, and reads their books again and again.
//!
//! Baton's engines (and the simulated ones) tell every step of every request. A vLLM engine tells its usage; then only
//! sums can be known, and the report says so.

mod live;
mod log;
pub(crate) mod room;
mod vllm;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::common::http_client::{Origin, Samples, WebError};
use crate::disconnect::record::raw::{Books, EngineFacts, EventRecord, Record};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::timeline::Timeline;
use crate::load::Moment;

/// How long an engine may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an engine may let a follower wait for an event, ms.
const LONG_POLL_MS: u64 = 2_000;
/// Between two tries to reach an engine that is away.
const RETRY: Duration = Duration::from_millis(50);
/// Looks at a clock; the quickest of them says most.
const CLOCK_LOOKS: usize = 9;
/// Events of one answer.
const EVENTS_OF_ONE_ANSWER: usize = 2_000;

/// An endpoint that does not wait is not asked faster.
const BETWEEN_PAGES: Duration = Duration::from_micros(500);
/// An engine that is another process more often is several engines.
const RESTARTS_MAX: usize = 50;
/// Requests whose tags are remembered, and events of one that wait for its tag.
const REQUESTS_REMEMBERED: usize = 65_536;
const UNTAGGED_MAX: usize = 8;

/// A point in the life of a request that its engines tell of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mark {
    /// Accepted by the first engine that has it.
    Queued,
    /// The prefill engine computes.
    PrefillStarted,
    /// The prefill engine has lent the blocks.
    Lent,
    /// Its server has written the reply.
    Replied,
    /// The decode engine has begun to read them.
    Fetching,
    /// It has read them.
    Fetched,
    /// It has the first token.
    FirstToken,
}

/// An engine that is watched.
pub(crate) struct Watched {
    origin: Origin,
    facts: Mutex<EngineFacts>,
    /// It shows its books; otherwise they are guessed from its metrics.
    shows_books: bool,
    /// Where its event log was when it was met: epoch and number.
    met_at: (String, u64),
    expired: AtomicU64,
}

/// What the watching knows so far of requests with tags of this run.
#[derive(Default)]
pub(crate) struct Feed {
    state: Mutex<FeedState>,
    news: Notify,
}

#[derive(Default)]
struct FeedState {
    timelines: HashMap<String, Timeline>,
    waiting: HashMap<String, Vec<(Mark, CancellationToken)>>,
    /// The latest look at each engine: held blocks and requests.
    held: HashMap<usize, (u64, u64, u64)>,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token that is cancelled when this happens to the request with this tag.
    pub(crate) fn when(&self, tag: &str, mark: Mark) -> CancellationToken {
        let token = CancellationToken::new();
        self.lock().waiting.entry(tag.to_owned()).or_default().push((mark, token.clone()));
        token
    }

    /// Nobody waits for this request any more; says what is known of it.
    pub(crate) fn forget(&self, tag: &str) -> Option<Timeline> {
        let mut state = self.lock();
        state.waiting.remove(tag);
        state.timelines.get(tag).cloned()
    }

    /// What is known of a request.
    pub(crate) fn timeline(&self, tag: &str) -> Option<Timeline> {
        self.lock().timelines.get(tag).cloned()
    }

    /// Waits until it is so, at most for so long; says what is known then.
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
            // From here on an event that comes is not missed.
            news.as_mut().enable();
            let known = self.timeline(tag);
            if known.as_ref().is_some_and(&is_so) || tokio::time::timeout_at(until, news).await.is_err() {
                return known;
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn tell(&self, event: &EventRecord) {
        self.take(event);
    }

    fn take(&self, event: &EventRecord) {
        self.put(event);
        self.news.notify_waiters();
    }

    fn put(&self, event: &EventRecord) {
        let mut state = self.lock();
        let timeline = state.timelines.entry(event.tag.clone()).or_default();
        timeline.take(event);
        let lends = timeline.legs.iter().any(|leg| leg.engine == event.engine && leg.lends);
        let mark = match (event.kind.as_str(), lends) {
            ("queued", _) => Mark::Queued,
            ("started", true) => Mark::PrefillStarted,
            ("lease_opened", _) => Mark::Lent,
            ("replied", true) => Mark::Replied,
            ("fetching", _) => Mark::Fetching,
            ("fetched", _) => Mark::Fetched,
            ("first_token", false) => Mark::FirstToken,
            _ => return,
        };
        if let Some(waiting) = state.waiting.get_mut(&event.tag) {
            waiting.retain(|(wanted, token)| {
                if *wanted == mark {
                    token.cancel();
                }
                *wanted != mark
            });
        }
    }

    /// Whether every engine held nothing when it was last looked at, at or after this moment.
    pub(crate) fn all_home_since(&self, at_us: u64, engines: usize) -> bool {
        let state = self.lock();
        state.held.len() == engines
            && state.held.values().all(|(at, held, requests)| *at >= at_us && *held == 0 && *requests == 0)
    }
}

/// The watching of a deployment; ends when dropped.
pub(crate) struct Watch {
    pub(crate) engines: Vec<Arc<Watched>>,
    pub(crate) feed: Arc<Feed>,
    _tasks: JoinSet<()>,
}

/// How engines are watched.
#[derive(Clone)]
pub(crate) struct Terms {
    /// Only requests whose tag begins so are looked at.
    pub(crate) prefix: String,
    /// Between two looks at the books.
    pub(crate) every: Duration,
    /// Event logs and books are not looked at, only metrics.
    pub(crate) metrics_only: bool,
}

impl Watch {
    /// Meets every engine and begins to watch it. `engines`: a name, a role if it is known, and where.
    ///
    /// # Errors
    /// When one of them cannot be met.
    pub(crate) async fn begin(
        engines: Vec<(String, Option<String>, Origin)>,
        terms: &Terms,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, WebError> {
        let feed = Arc::new(Feed::default());
        let mut tasks = JoinSet::new();
        let mut watched = Vec::new();
        for (number, (name, role, origin)) in engines.into_iter().enumerate() {
            let engine = Arc::new(Watched::meet(number, name, role, origin, terms.metrics_only).await?);
            recorder.put(&Record::Engine(engine.facts()));
            let (feed, recorder) = (Arc::clone(&feed), Arc::clone(recorder));
            if engine.facts().events {
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

    /// Whether every engine tells every step.
    pub(crate) fn exact(&self) -> bool {
        !self.engines.is_empty() && self.engines.iter().all(|engine| engine.facts().events)
    }

    /// Reads the counters that are only in metrics.
    pub(crate) async fn read_counters(&self) {
        for engine in &self.engines {
            engine.read_counters().await;
        }
    }

    /// Waits until every engine holds nothing, at most so long. Says whether they do.
    pub(crate) async fn home(&self, within: Duration) -> bool {
        let (from, until) = (Moment::now().us(), tokio::time::Instant::now() + within);
        while !self.feed.all_home_since(from, self.engines.len()) {
            if tokio::time::Instant::now() > until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }
}

impl Watched {
    async fn meet(
        number: usize,
        name: String,
        role: Option<String>,
        origin: Origin,
        metrics_only: bool,
    ) -> Result<Self, WebError> {
        let mut facts = EngineFacts { engine: number, name, ..EngineFacts::default() };
        let latest = origin.get_json("/debug/kv/events?after=latest", PATIENCE).await;
        match &latest {
            Ok(page) => {
                facts.events = !metrics_only;
                facts.role = page["engine"]["role"].as_str().unwrap_or("both").to_owned();
            }
            Err(error) if error.status().is_some_and(|status| status.as_u16() == 404) => {}
            Err(_) => return Err(latest.expect_err("it is an error")),
        }
        facts.role = role.unwrap_or(std::mem::take(&mut facts.role));
        let met_at = latest.map_or_else(
            |_| Default::default(),
            |page| {
                let epoch = page["engine"]["epoch"].as_str().unwrap_or_default().to_owned();
                (epoch, page["next"].as_u64().unwrap_or_default())
            },
        );
        let shown = origin.get_json("/debug/kv", PATIENCE).await;
        let absent = |error: &WebError| error.status().is_some_and(|status| status.as_u16() == 404);
        let shows_books = match shown {
            Ok(page) => {
                facts.batching_shows = page["engine"]["batch_invariant"] == false;
                !metrics_only
            }
            Err(error) if absent(&error) => false,
            Err(error) => return Err(error),
        };
        let (facts, expired) = (Mutex::new(facts), AtomicU64::new(0));
        let engine = Self { origin, facts, shows_books, met_at, expired };
        engine.read_counters().await;
        if engine.facts().events {
            engine.read_clock().await?;
        }
        let books = engine.books().await?;
        engine.with_facts(|facts| facts.blocks = if books.thousandths { 0 } else { books.total });
        Ok(engine)
    }

    fn with_facts<T>(&self, change: impl FnOnce(&mut EngineFacts) -> T) -> T {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn facts(&self) -> EngineFacts {
        self.with_facts(|facts| facts.clone())
    }

    /// How far its clock is off ours: of several looks the quickest, with half its time as the doubt.
    async fn read_clock(&self) -> Result<(), WebError> {
        let mut best: Option<(u64, i64)> = None;
        for _ in 0..CLOCK_LOOKS {
            let asked = Moment::now().us();
            let page = self.origin.get_json("/debug/kv/events?after=latest", PATIENCE).await?;
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
        self.with_facts(|facts| {
            facts.clock_doubt_us = doubt;
            // What cannot be told from nothing is nothing.
            facts.clock_offset_us = if offset.unsigned_abs() <= doubt { 0 } else { offset };
        });
        Ok(())
    }

    /// Reads its event log to the end of time.
    async fn follow(&self, terms: &Terms, feed: &Feed, recorder: &Recorder) {
        let (mut epoch, mut after) = self.met_at.clone();
        let (mut restarts, mut tags) = (0, Tags::default());
        loop {
            let path =
                format!("/debug/kv/events?after={after}&wait_ms={LONG_POLL_MS}&limit={EVENTS_OF_ONE_ANSWER}");
            let patience = PATIENCE + Duration::from_millis(LONG_POLL_MS);
            tokio::time::sleep(BETWEEN_PAGES).await;
            let Ok(page) = self.origin.get_json(&path, patience).await else {
                // Killed, perhaps, and about to be started again.
                tokio::time::sleep(RETRY).await;
                continue;
            };
            let told = page["engine"]["epoch"].as_str().unwrap_or_default();
            if told != epoch {
                // Another process: its numbers begin anew, and its clock was set anew.
                (epoch, after) = (told.to_owned(), 0);
                restarts += 1;
                if restarts > RESTARTS_MAX {
                    // Several engines behind one address: what one of them tells cannot be told from the others.
                    recorder.put(&Record::Lost { engine: self.facts().engine, events: 1 });
                    return;
                }
                let _ = self.read_clock().await;
                recorder.put(&Record::Engine(self.facts()));
                let engine = self.facts().engine;
                recorder.put(&Record::Restarted { engine, at_us: Moment::now().us() });
                continue;
            }
            let facts = self.facts();
            if let Some(events) = page["lost"].as_u64().filter(|lost| *lost > 0) {
                recorder.put(&Record::Lost { engine: facts.engine, events });
            }
            let log::Page { fresh, next } = log::read(&page, after);
            for event in fresh {
                for event in tags.tell(event, &terms.prefix) {
                    if let Some(event) = record_of(&event, &facts) {
                        recorder.put(&Record::Event(event.clone()));
                        feed.take(&event);
                    }
                }
            }
            let Some(next) = next else {
                // It would fill the disk with what is known, and tell nothing.
                recorder.put(&Record::Lost { engine: facts.engine, events: 1 });
                return;
            };
            after = next;
        }
    }

    async fn look(&self, feed: &Feed, recorder: &Recorder) {
        let Ok(books) = self.books().await else { return };
        feed.lock().held.insert(books.engine, (books.at_us, books.held, books.requests));
        recorder.put(&Record::EngineState(books));
    }

    async fn books(&self) -> Result<Books, WebError> {
        let facts = self.facts();
        let asked = Moment::now().us();
        let mut books = if self.shows_books {
            of_baton(&self.origin.get_json("/debug/kv", PATIENCE).await?)
        } else {
            let samples = self.origin.samples(PATIENCE).await?;
            self.count(&samples);
            let mut books = vllm::books(&samples);
            books.took_us = Moment::now().us() - asked;
            books
        };
        // The moment of asking: what was true at some moment after it was.
        (books.engine, books.at_us) = (facts.engine, asked);
        books.expired = self.expired.load(Ordering::Relaxed);
        Ok(books)
    }

    async fn read_counters(&self) {
        if let Ok(samples) = self.origin.samples(PATIENCE).await {
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

/// Which request has which tag: an engine may tell an abort before it knows the request, and forgets a tag with the
/// event that brought it.
#[derive(Default)]
struct Tags {
    known: HashMap<String, String>,
    /// Oldest first, of both.
    order: VecDeque<String>,
    untagged: HashMap<String, Vec<Value>>,
}

impl Tags {
    /// The events that can be told now that this one has come: it, and what waited for its tag.
    fn tell(&mut self, event: &Value, prefix: &str) -> Vec<Value> {
        let Some(request) = event["request_id"].as_str() else { return Vec::new() };
        let tag = event["tag"].as_str().map(str::to_owned).or_else(|| self.known.get(request).cloned());
        let Some(tag) = tag else {
            // Somebody else's, or one that comes before its request.
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
        let mut told = self.untagged.remove(request).unwrap_or_default();
        if self.known.insert(request.to_owned(), tag.clone()).is_none() {
            self.remember(request);
        }
        told.push(event.clone());
        for event in &mut told {
            event["tag"] = tag.as_str().into();
        }
        told
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

fn record_of(event: &Value, facts: &EngineFacts) -> Option<EventRecord> {
    let text = |name: &str| event[name].as_str().map(str::to_owned);
    let number = |name: &str| event[name].as_u64();
    let at = i64::try_from(number("at_us")?).ok()? - facts.clock_offset_us;
    Some(EventRecord {
        engine: facts.engine,
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

/// What `/debug/kv` says.
fn of_baton(shown: &Value) -> Books {
    let blocks = &shown["blocks"];
    let count = |name: &str| blocks[name].as_u64().unwrap_or(0);
    let held = count("active") + count("leased") + count("landing") + count("storing");
    let requests = shown["requests"].as_object().into_iter().flatten();
    Books {
        total: count("total"),
        held,
        leased: Some(count("leased")),
        askew: (held + count("free") + count("cached")) as i64 - count("total") as i64,
        requests: requests.filter_map(|(_, count)| count.as_u64()).sum(),
        leases: shown["leases"]["live"].as_u64(),
        ..Books::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn books_are_read() {
        let shown = json!({
            "blocks": {"total": 10, "free": 3, "cached": 2, "active": 1, "leased": 2, "landing": 1, "storing": 1},
            "requests": {"waiting": 1, "running": 2, "fetching": 0}, "leases": {"live": 4},
        });
        let books = of_baton(&shown);
        assert_eq!(
            (books.total, books.held, books.leased, books.requests, books.leases),
            (10, 5, Some(2), 3, Some(4))
        );
        assert_eq!(books.askew, 0);
        let mut crooked = shown;
        crooked["blocks"]["free"] = 2.into();
        assert_eq!(of_baton(&crooked).askew, -1);
    }

    #[test]
    fn an_event_without_a_tag_is_its_requests() {
        let mut tags = Tags::default();
        let event =
            |request: &str, kind: &str, tag: Value| json!({"request_id": request, "kind": kind, "tag": tag});
        // An abort that comes before its request, one of a stranger, and a tag that the engine has forgotten.
        assert!(tags.tell(&event("a", "abort", Value::Null), "run-").is_empty());
        assert!(tags.tell(&event("b", "abort", Value::Null), "run-").is_empty());
        let told = tags.tell(&event("a", "queued", "run-1".into()), "run-");
        assert_eq!(told.iter().map(|event| &event["kind"]).collect::<Vec<_>>(), ["abort", "queued"]);
        assert!(told.iter().all(|event| event["tag"] == "run-1"));
        assert!(tags.tell(&event("b", "queued", "other".into()), "run-").is_empty());
        assert_eq!(tags.tell(&event("a", "freed", Value::Null), "run-")[0]["tag"], "run-1");
        for n in 0..REQUESTS_REMEMBERED + 10 {
            tags.tell(&event(&format!("r{n}"), "abort", Value::Null), "run-");
        }
        assert!(tags.order.len() <= REQUESTS_REMEMBERED && tags.untagged.len() <= REQUESTS_REMEMBERED);
    }

    #[test]
    fn who_waits_for_a_mark_is_told_once_and_of_its_own_request() {
        let feed = Feed::default();
        let (mine, other) = (feed.when("a", Mark::Lent), feed.when("b", Mark::Lent));
        let event = |tag: &str, kind: &str| EventRecord {
            tag: tag.into(),
            kind: kind.into(),
            ..EventRecord::default()
        };
        feed.take(&event("a", "queued"));
        assert!(!mine.is_cancelled());
        feed.take(&event("a", "lease_opened"));
        assert!(mine.is_cancelled() && !other.is_cancelled());
        assert_eq!(feed.forget("a").map(|timeline| timeline.legs.len()), Some(1));
    }
}
