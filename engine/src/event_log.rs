//! What happened to requests and leases, step by step, for whoever judges this engine from outside:
//! `GET /debug/kv/events`.
//!
//! A ring of the last [`EVENTS_KEPT`] events, numbered without gaps. Writing one is a short lock and no system call
//! while nobody waits; a request leaves about ten. Readers ask for what follows a number, and wait for it if they like
//! (`baton bench disconnect`, `baton top`, `baton doctor`).
//!
//! A request's `user` field, where it has one that is short, is its tag: it passes through any router unchanged, so that
//! whoever asked finds its own requests here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use serde_json::{Map, Value};
use tokio::sync::Notify;

/// Events that are kept.
pub const EVENTS_KEPT: usize = 65_536;

/// Bytes of a tag; a longer `user` is no tag.
pub const TAG_BYTES_MAX: usize = 64;

/// How long a reader that waits for an event is let wait for more.
const GATHERED: Duration = Duration::from_millis(1);

/// Something that happened to a request, or to its lease.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// Accepted into the queue.
    Queued {
        /// `prefill`, `decode` or `whole`.
        leg: &'static str,
        /// Tokens of its prompt.
        prompt: usize,
        /// The request's `user`.
        tag: Option<Arc<str>>,
    },
    /// Turned away.
    Refused {
        /// Why.
        reason: &'static str,
        /// The request's `user`.
        tag: Option<Arc<str>>,
    },
    /// Computes from now on; so many tokens of its prompt needed no computing.
    Started(usize),
    /// A step over its prompt has ended; so many of its tokens are computed, or were there.
    Computed(usize),
    /// Begins to read so many blocks.
    Fetching(usize),
    /// The read is over: `landed`, `gone`, `failed` or `stopped`.
    Fetched(&'static str),
    /// Its first token is there.
    FirstToken,
    /// Nobody waits for it any more, as the engine has learnt by `disconnect` or `verb`.
    Abort(&'static str),
    /// A lease was opened.
    Lent {
        /// Blocks in it.
        blocks: usize,
        /// Until it ends by itself; `None` while it grows.
        left: Option<Duration>,
    },
    /// What became of the reply that its caller waited for: `sent`, or `dropped` because the caller had left. Simulated
    /// engines alone log it.
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
    /// It has left the engine's books.
    Ended {
        /// Why.
        outcome: &'static str,
        /// Tokens it said.
        generated: usize,
        /// Tokens of its prompt that were computed here.
        computed: usize,
        /// Blocks that it held.
        blocks: usize,
    },
    /// The last block it held is back; it held so many.
    Freed(usize),
}

impl What {
    /// The word in the log.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Queued { .. } => "queued",
            Self::Refused { .. } => "refused",
            Self::Started(_) => "started",
            Self::Computed(_) => "computed",
            Self::Fetching(_) => "fetching",
            Self::Fetched(_) => "fetched",
            Self::FirstToken => "first_token",
            Self::Abort(_) => "abort",
            Self::Lent { .. } => "lease_opened",
            Self::Replied(_) => "replied",
            Self::LeaseEnded { .. } => "lease_ended",
            Self::Ended { .. } => "ended",
            Self::Freed(_) => "freed",
        }
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        match self {
            Self::Queued { leg, prompt, .. } => vec![("leg", (*leg).into()), ("prompt", (*prompt).into())],
            Self::Refused { reason, .. } => vec![("reason", (*reason).into())],
            Self::Started(cached) => vec![("cached", (*cached).into())],
            Self::Computed(tokens) => vec![("tokens", (*tokens).into())],
            Self::Fetching(blocks) | Self::Freed(blocks) => vec![("blocks", (*blocks).into())],
            Self::Fetched(result) | Self::Replied(result) => vec![("result", (*result).into())],
            Self::FirstToken => Vec::new(),
            Self::Abort(how) => vec![("how", (*how).into())],
            Self::Lent { blocks, left } => vec![
                ("blocks", (*blocks).into()),
                ("left_ms", left.map_or(Value::Null, |left| (left.as_millis() as u64).into())),
                ("growing", left.is_none().into()),
            ],
            Self::LeaseEnded { reason, blocks, readers, held } => vec![
                ("reason", (**reason).into()),
                ("blocks", (*blocks).into()),
                ("readers_done", readers.0.into()),
                ("readers_expected", readers.1.into()),
                ("held_us", (held.as_micros() as u64).into()),
            ],
            Self::Ended { outcome, generated, computed, blocks } => vec![
                ("outcome", (*outcome).into()),
                ("generated", (*generated).into()),
                ("computed", (*computed).into()),
                ("blocks", (*blocks).into()),
            ],
        }
    }
}

#[derive(Clone)]
struct Event {
    at: Instant,
    rank: usize,
    request: RequestId,
    tag: Option<Arc<str>>,
    index: u32,
    what: What,
}

#[derive(Default)]
struct Ring {
    /// The number of the first event that is kept.
    first: u64,
    events: VecDeque<Event>,
    /// Tags of requests whose `queued` is kept, with its number.
    tags: HashMap<RequestId, (u64, Arc<str>)>,
}

/// See the module's documentation.
pub struct EventLog {
    ring: Mutex<Ring>,
    news: Notify,
    /// One moment on both clocks.
    anchor: (Instant, u64),
    kept: usize,
}

/// What follows a number.
pub struct Page {
    /// What to ask for next.
    pub next: u64,
    /// Events that followed and are not kept any more.
    pub lost: u64,
    /// As JSON objects.
    pub events: Vec<Value>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::keeping(EVENTS_KEPT)
    }
}

impl EventLog {
    fn keeping(kept: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            ring: Mutex::new(Ring { first: 1, ..Ring::default() }),
            news: Notify::new(),
            anchor: (Instant::now(), since.as_micros() as u64),
            kept,
        }
    }

    /// Writes one event down.
    pub fn tell(&self, rank: usize, request: &RequestId, index: u32, what: What) {
        let at = Instant::now();
        let mut guard = self.lock();
        let ring = &mut *guard;
        if ring.events.len() >= self.kept
            && let Some(old) = ring.events.pop_front()
        {
            if ring.tags.get(&old.request).is_some_and(|(number, _)| *number == ring.first) {
                ring.tags.remove(&old.request);
            }
            ring.first += 1;
        }
        let number = ring.first + ring.events.len() as u64;
        if let What::Queued { tag: Some(tag), .. } | What::Refused { tag: Some(tag), .. } = &what {
            ring.tags.insert(request.clone(), (number, Arc::clone(tag)));
        }
        let tag = ring.tags.get(request).map(|(_, tag)| Arc::clone(tag));
        ring.events.push_back(Event { at, rank, request: request.clone(), tag, index, what });
        drop(guard);
        self.news.notify_waiters();
    }

    /// The number of the latest event.
    #[must_use]
    pub fn latest(&self) -> u64 {
        let ring = self.lock();
        ring.first + ring.events.len() as u64 - 1
    }

    /// At most `limit` events that follow number `after`.
    #[must_use]
    pub fn page(&self, after: u64, limit: usize) -> Page {
        let wanted = after.saturating_add(1);
        let (begin, end, kept) = {
            // Copied, and written out below: an engine must not wait for its readers.
            let ring = self.lock();
            let begin = wanted.max(ring.first);
            let skip = usize::try_from(begin - ring.first).unwrap_or(usize::MAX);
            let kept: Vec<Event> = ring.events.iter().skip(skip).take(limit).cloned().collect();
            (begin, ring.first + ring.events.len() as u64 - 1, kept)
        };
        let events: Vec<Value> =
            kept.iter().zip(begin..).map(|(event, number)| self.shown(event, number)).collect();
        let next = if events.is_empty() { after.min(end) } else { begin - 1 + events.len() as u64 };
        Page { next, lost: begin - wanted, events }
    }

    /// As [`Self::page`]; where there is nothing yet, waits so long for it.
    pub async fn page_within(&self, after: u64, limit: usize, within: Duration) -> Page {
        let until = tokio::time::Instant::now() + within;
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // From here on an event that comes is not missed.
            news.as_mut().enable();
            let page = self.page(after, limit);
            if !page.events.is_empty() || tokio::time::timeout_at(until, news).await.is_err() {
                return page;
            }
            // What comes together is told together.
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
        // Whatever is logged happened after the log was made.
        unix + at.saturating_duration_since(anchor).as_micros() as u64
    }

    fn shown(&self, event: &Event, number: u64) -> Value {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        put("seq", number.into());
        put("at_us", self.at_us(event.at).into());
        put("rank", event.rank.into());
        put("request_id", event.request.as_str().into());
        put("tag", event.tag.as_deref().map_or(Value::Null, Value::from));
        put("index", event.index.into());
        put("kind", event.what.label().into());
        for (name, value) in event.what.fields() {
            put(name, value);
        }
        Value::Object(fields)
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        // Events are whole values: a panic elsewhere leaves nothing half-written.
        self.ring.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The log, and the data-parallel rank that writes into it.
#[derive(Clone)]
pub struct RankLog {
    log: Arc<EventLog>,
    rank: usize,
}

impl RankLog {
    /// What this rank writes into the engine's log.
    #[must_use]
    pub fn new(log: &Arc<EventLog>, rank: usize) -> Self {
        Self { log: Arc::clone(log), rank }
    }

    /// Writes one event down.
    pub fn tell(&self, request: &RequestId, index: u32, what: What) {
        self.log.tell(self.rank, request, index, what);
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

    fn queued(tag: &str) -> What {
        What::Queued { leg: "prefill", prompt: 3, tag: super::tag(Some(tag)) }
    }

    #[test]
    fn pages_follow_each_other_and_say_what_was_lost() {
        let log = EventLog::keeping(4);
        assert_eq!((log.latest(), log.page(0, 10).next), (0, 0));
        log.tell(0, &request("a"), 0, queued("mine"));
        for step in 1..4 {
            log.tell(0, &request("a"), 0, What::Computed(step));
        }
        let page = log.page(0, 3);
        assert_eq!((page.next, page.lost, page.events.len()), (3, 0, 3));
        assert_eq!((&page.events[0]["kind"], &page.events[0]["prompt"]), (&"queued".into(), &3.into()));
        assert!(page.events.iter().all(|event| event["tag"] == "mine"));
        let page = log.page(page.next, 3);
        assert_eq!((page.next, page.events.len(), &page.events[0]["tokens"]), (4, 1, &3.into()));
        assert!(log.page(4, 3).events.is_empty());
        // The ring goes round: the first is lost, and with it the tag for what comes.
        log.tell(0, &request("a"), 0, What::Freed(2));
        log.tell(0, &request("b"), 0, What::FirstToken);
        let page = log.page(0, 10);
        assert_eq!((page.next, page.lost, page.events.len()), (6, 2, 4));
        assert_eq!((&page.events[2]["tag"], &page.events[3]["tag"]), (&Value::Null, &Value::Null));
        // A number from another epoch is no reason to show nothing for ever.
        assert_eq!(log.page(u64::MAX, 10).next, 6);
    }

    #[test]
    fn a_name_that_is_used_again_keeps_its_new_tag() {
        let log = EventLog::keeping(3);
        for tag in ["old", "new"] {
            log.tell(0, &request("a"), 0, queued(tag));
        }
        for _ in 0..2 {
            log.tell(0, &request("b"), 0, What::FirstToken);
        }
        log.tell(0, &request("a"), 0, What::Freed(1));
        assert_eq!(log.page(4, 10).events[0]["tag"], Value::Null);
        let log = EventLog::keeping(3);
        for tag in ["old", "new"] {
            log.tell(0, &request("a"), 0, queued(tag));
        }
        for _ in 0..2 {
            log.tell(0, &request("a"), 0, What::FirstToken);
        }
        assert_eq!(log.page(3, 10).events[0]["tag"], "new");
        assert_eq!(tag(Some(&"x".repeat(TAG_BYTES_MAX + 1))), None);
    }

    #[tokio::test]
    async fn who_waits_is_told() {
        let log = Arc::new(EventLog::default());
        let waiting = {
            let log = Arc::clone(&log);
            tokio::spawn(async move { log.page_within(0, 10, Duration::from_secs(60)).await.events.len() })
        };
        tokio::task::yield_now().await;
        log.tell(1, &request("a"), 2, What::Abort("verb"));
        assert_eq!(waiting.await.expect("it was told"), 1);
        assert!(log.page_within(1, 10, Duration::ZERO).await.events.is_empty());
        let event = &log.page(0, 1).events[0];
        assert_eq!((&event["rank"], &event["index"], &event["how"]), (&1.into(), &2.into(), &"verb".into()));
        assert!(event["at_us"].as_u64().is_some_and(|at| at <= log.now_us()));
    }
}
