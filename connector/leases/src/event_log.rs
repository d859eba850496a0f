//! The event log: each event of requests and leases, for tools that observe this engine through
//! `GET /debug/kv/events`.
//!
//! The log is a ring of the last [`EVENTS_KEPT`] events, numbered without gaps. Without a waiting reader, writing one
//! takes a short lock and no system call. A request writes about ten. Readers ask for the events after a number, and
//! may wait for them (`baton bench disconnect`, `baton top`, `baton doctor`).
//!
//! A short `user` field of a request is its tag. The field passes through any router unchanged, so a client finds its
//! own requests in this log.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use serde_json::{Value, json};
use tokio::sync::Notify;

/// Limit of the retained events.
pub const EVENTS_KEPT: usize = 65_536;

/// Bytes of a tag; a longer `user` is no tag.
pub const TAG_BYTES_MAX: usize = 64;

/// How long a waiting reader waits for more events after the first one.
const GATHERED: Duration = Duration::from_millis(1);

/// An event of a request, or of its lease.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// Accepted into the queue.
    Queued {
        /// `prefill`, `decode` or `whole`.
        leg: &'static str,
        /// Tokens of its prompt.
        prompt: usize,
        /// The request's `user`.
        tag: Option<Arc<str>>,
    },
    /// Refused.
    Refused {
        /// Why.
        reason: &'static str,
        /// The request's `user`.
        tag: Option<Arc<str>>,
    },
    /// Computation begins. So many tokens of the prompt need none.
    Started(usize),
    /// A step over the prompt has ended. So many of its tokens are computed, or were cached.
    Computed(usize),
    /// The read of so many blocks begins.
    Fetching(usize),
    /// The read is over: `landed`, `gone`, `failed` or `stopped`.
    Fetched(&'static str),
    /// The first token is computed.
    FirstToken,
    /// The client has left (`disconnect`), or an abort named the request (`verb`).
    Abort(&'static str),
    /// A lease was opened.
    LeaseOpened {
        /// Blocks in it.
        blocks: usize,
        /// Until the lease expires; `None` while the lease grows.
        left: Option<Duration>,
    },
    /// What became of a unary reply with a handoff: `sent` once its connection has it, or `dropped` because the
    /// connection had ended. vLLM with Baton's connector does not log this event.
    Replied(&'static str),
    /// A lease has ended.
    LeaseEnded {
        /// The reason of its release, or the cause.
        reason: Box<str>,
        /// Blocks in it.
        blocks: usize,
        /// Readers that finished, of those expected.
        readers: (usize, usize),
        /// From open to close.
        held: Duration,
    },
    /// The sequence was removed from the scheduler.
    Ended {
        /// Why.
        outcome: &'static str,
        /// Tokens it generated.
        generated: usize,
        /// Tokens of its prompt that were computed here.
        computed: usize,
        /// Blocks that it held.
        blocks: usize,
    },
    /// The last of so many blocks that it held is free.
    Freed(usize),
}

impl RequestEvent {
    /// The word in the log, and the fields after it.
    fn kind_and_fields(&self) -> (&'static str, Value) {
        match self {
            Self::Queued { leg, prompt, .. } => ("queued", json!({"leg": leg, "prompt": prompt})),
            Self::Refused { reason, .. } => ("refused", json!({"reason": reason})),
            Self::Started(cached) => ("started", json!({"cached": cached})),
            Self::Computed(tokens) => ("computed", json!({"tokens": tokens})),
            Self::Fetching(blocks) => ("fetching", json!({"blocks": blocks})),
            Self::Fetched(result) => ("fetched", json!({"result": result})),
            Self::FirstToken => ("first_token", json!({})),
            Self::Abort(how) => ("abort", json!({"how": how})),
            Self::LeaseOpened { blocks, left } => {
                let left_ms = left.map(|left| left.as_millis() as u64);
                ("lease_opened", json!({"blocks": blocks, "left_ms": left_ms, "growing": left.is_none()}))
            }
            Self::Replied(result) => ("replied", json!({"result": result})),
            Self::LeaseEnded { reason, blocks, readers: (done, expected), held } => {
                let fields = json!({
                    "reason": reason, "blocks": blocks, "readers_done": done, "readers_expected": expected,
                    "held_us": held.as_micros() as u64,
                });
                ("lease_ended", fields)
            }
            Self::Ended { outcome, generated, computed, blocks } => {
                let fields = json!({
                    "outcome": outcome, "generated": generated, "computed": computed, "blocks": blocks,
                });
                ("ended", fields)
            }
            Self::Freed(blocks) => ("freed", json!({"blocks": blocks})),
        }
    }
}

#[derive(Clone)]
struct LogEntry {
    at: Instant,
    rank: usize,
    request: RequestId,
    tag: Option<Arc<str>>,
    index: u32,
    event: RequestEvent,
}

#[derive(Default)]
struct EventRing {
    /// The number of the first event in the ring.
    first: u64,
    events: VecDeque<LogEntry>,
    /// Tags of requests whose `queued` is in the ring, with its number.
    tags: HashMap<RequestId, (u64, Arc<str>)>,
}

/// See the module's documentation.
pub struct EventLog {
    ring: Mutex<EventRing>,
    appended: Notify,
    /// One moment on both clocks.
    anchor: (Instant, u64),
    capacity: usize,
}

/// The events after a number.
pub struct EventPage {
    /// The number for the next call.
    pub next: u64,
    /// Events after that number that the ring no longer contains.
    pub lost: u64,
    /// As JSON objects.
    pub events: Vec<Value>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::with_capacity(EVENTS_KEPT)
    }
}

impl EventLog {
    fn with_capacity(capacity: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            ring: Mutex::new(EventRing { first: 1, ..EventRing::default() }),
            appended: Notify::new(),
            anchor: (Instant::now(), since.as_micros() as u64),
            capacity,
        }
    }

    /// Appends one event.
    pub fn emit(&self, rank: usize, request: &RequestId, index: u32, event: RequestEvent) {
        let at = Instant::now();
        let mut guard = self.lock();
        let ring = &mut *guard;
        if ring.events.len() >= self.capacity
            && let Some(old) = ring.events.pop_front()
        {
            if ring.tags.get(&old.request).is_some_and(|(number, _)| *number == ring.first) {
                ring.tags.remove(&old.request);
            }
            ring.first += 1;
        }
        let number = ring.first + ring.events.len() as u64;
        if let RequestEvent::Queued { tag: Some(tag), .. } | RequestEvent::Refused { tag: Some(tag), .. } =
            &event
        {
            ring.tags.insert(request.clone(), (number, Arc::clone(tag)));
        }
        let tag = ring.tags.get(request).map(|(_, tag)| Arc::clone(tag));
        ring.events.push_back(LogEntry { at, rank, request: request.clone(), tag, index, event });
        drop(guard);
        self.appended.notify_waiters();
    }

    /// The number of the latest event.
    #[must_use]
    pub fn latest(&self) -> u64 {
        let ring = self.lock();
        ring.first + ring.events.len() as u64 - 1
    }

    /// At most `limit` events that follow number `after`.
    #[must_use]
    pub fn page(&self, after: u64, limit: usize) -> EventPage {
        let wanted = after.saturating_add(1);
        let (begin, end, retained) = {
            // Copied here and formatted below: an engine must not wait for its readers.
            let ring = self.lock();
            let begin = wanted.max(ring.first);
            let skip = usize::try_from(begin - ring.first).unwrap_or(usize::MAX);
            let retained: Vec<LogEntry> = ring.events.iter().skip(skip).take(limit).cloned().collect();
            (begin, ring.first + ring.events.len() as u64 - 1, retained)
        };
        let events: Vec<Value> =
            retained.iter().zip(begin..).map(|(event, number)| self.to_json(event, number)).collect();
        let next = if events.is_empty() { after.min(end) } else { begin - 1 + events.len() as u64 };
        EventPage { next, lost: begin - wanted, events }
    }

    /// As [`Self::page`]. If there is no event yet, waits up to `within` for one.
    pub async fn page_within(&self, after: u64, limit: usize, within: Duration) -> EventPage {
        let until = tokio::time::Instant::now() + within;
        loop {
            let appended = self.appended.notified();
            tokio::pin!(appended);
            // From here on no event is missed.
            appended.as_mut().enable();
            let page = self.page(after, limit);
            if !page.events.is_empty() || tokio::time::timeout_at(until, appended).await.is_err() {
                return page;
            }
            // Events that arrive together form one page.
            tokio::time::sleep(GATHERED).await;
        }
    }

    /// Microseconds since the Unix epoch, on this log's clock.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.at_us(Instant::now())
    }

    fn at_us(&self, at: Instant) -> u64 {
        let (anchor, unix) = self.anchor;
        // All events happen after the log was created.
        unix + at.saturating_duration_since(anchor).as_micros() as u64
    }

    fn to_json(&self, entry: &LogEntry, number: u64) -> Value {
        let (kind, fields) = entry.event.kind_and_fields();
        let mut event = json!({
            "seq": number, "at_us": self.at_us(entry.at), "rank": entry.rank,
            "request_id": entry.request.as_str(), "tag": entry.tag.as_deref(), "index": entry.index, "kind": kind,
        });
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        event
    }

    fn lock(&self) -> MutexGuard<'_, EventRing> {
        // Events are whole values: a panic in another thread leaves none half-written.
        self.ring.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The log, and the data-parallel rank that appends to it.
#[derive(Clone)]
pub struct RankLog {
    log: Arc<EventLog>,
    rank: usize,
}

impl RankLog {
    /// The view of one rank on the engine's log.
    #[must_use]
    pub fn new(log: &Arc<EventLog>, rank: usize) -> Self {
        Self { log: Arc::clone(log), rank }
    }

    /// Appends one event.
    pub fn emit(&self, request: &RequestId, index: u32, event: RequestEvent) {
        self.log.emit(self.rank, request, index, event);
    }
}

/// The tag of a request with this `user`.
#[must_use]
pub fn tag(user: Option<&str>) -> Option<Arc<str>> {
    user.filter(|user| user.len() <= TAG_BYTES_MAX).map(Arc::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(name: &str) -> RequestId {
        RequestId::new(name).expect("a request id")
    }

    fn queued(tag: &str) -> RequestEvent {
        RequestEvent::Queued { leg: "prefill", prompt: 3, tag: super::tag(Some(tag)) }
    }

    #[test]
    fn pages_are_consecutive_and_report_lost_events() {
        let log = EventLog::with_capacity(4);
        assert_eq!((log.latest(), log.page(0, 10).next), (0, 0));
        log.emit(0, &request("a"), 0, queued("mine"));
        for step in 1..4 {
            log.emit(0, &request("a"), 0, RequestEvent::Computed(step));
        }
        let page = log.page(0, 3);
        assert_eq!((page.next, page.lost, page.events.len()), (3, 0, 3));
        assert_eq!((&page.events[0]["kind"], &page.events[0]["prompt"]), (&"queued".into(), &3.into()));
        assert!(page.events.iter().all(|event| event["tag"] == "mine"));
        let page = log.page(page.next, 3);
        assert_eq!((page.next, page.events.len(), &page.events[0]["tokens"]), (4, 1, &3.into()));
        assert!(log.page(4, 3).events.is_empty());
        // The ring is full: the first event is lost, and with it the tag of later events.
        log.emit(0, &request("a"), 0, RequestEvent::Freed(2));
        log.emit(0, &request("b"), 0, RequestEvent::FirstToken);
        let page = log.page(0, 10);
        assert_eq!((page.next, page.lost, page.events.len()), (6, 2, 4));
        assert_eq!((&page.events[2]["tag"], &page.events[3]["tag"]), (&Value::Null, &Value::Null));
        // A number of another epoch does not hide the events forever.
        assert_eq!(log.page(u64::MAX, 10).next, 6);
    }

    #[test]
    fn a_name_that_is_used_again_keeps_its_new_tag() {
        let log = EventLog::with_capacity(3);
        for tag in ["old", "new"] {
            log.emit(0, &request("a"), 0, queued(tag));
        }
        for _ in 0..2 {
            log.emit(0, &request("b"), 0, RequestEvent::FirstToken);
        }
        log.emit(0, &request("a"), 0, RequestEvent::Freed(1));
        assert_eq!(log.page(4, 10).events[0]["tag"], Value::Null);
        let log = EventLog::with_capacity(3);
        for tag in ["old", "new"] {
            log.emit(0, &request("a"), 0, queued(tag));
        }
        for _ in 0..2 {
            log.emit(0, &request("a"), 0, RequestEvent::FirstToken);
        }
        assert_eq!(log.page(3, 10).events[0]["tag"], "new");
        assert_eq!(tag(Some(&"x".repeat(TAG_BYTES_MAX + 1))), None);
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken_by_an_event() {
        let log = Arc::new(EventLog::default());
        let waiting = {
            let log = Arc::clone(&log);
            tokio::spawn(async move { log.page_within(0, 10, Duration::from_secs(60)).await.events.len() })
        };
        tokio::task::yield_now().await;
        log.emit(1, &request("a"), 2, RequestEvent::Abort("verb"));
        assert_eq!(waiting.await.expect("it received a page"), 1);
        assert!(log.page_within(1, 10, Duration::ZERO).await.events.is_empty());
        let event = &log.page(0, 1).events[0];
        assert_eq!((&event["rank"], &event["index"], &event["how"]), (&1.into(), &2.into(), &"verb".into()));
        assert!(event["at_us"].as_u64().is_some_and(|at| at <= log.now_us()));
    }
}
