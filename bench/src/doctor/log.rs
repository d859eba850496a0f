//! Follows the event logs of engines, and keeps what concerns our own requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_router::snapshot::EngineEvents;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::life::{Life, Told};
use super::look::Engine;
use crate::top::source::now_us;
use crate::web::{Origin, WebError};

/// How long an engine may let us wait for an event, and then some.
const LONG_POLL_MS: u64 = 1_000;
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries to reach an engine that is away.
const RETRY: Duration = Duration::from_millis(50);
/// Events of one answer.
const EVENTS_OF_ONE_ANSWER: usize = 2_000;
/// Events that are kept of one request.
const EVENTS_MAX: usize = 10_000;

/// See the module's documentation; ends when dropped.
pub(super) struct Log {
    told: Arc<Feed>,
    _following: JoinSet<()>,
}

#[derive(Default)]
struct Feed {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Default)]
struct State {
    by_tag: HashMap<String, Vec<Told>>,
    /// Who is to be told at once: tag, kind of event.
    waiting: Vec<(String, &'static str, CancellationToken)>,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log {
    /// Follows from now on. Only requests whose tag begins so are kept.
    ///
    /// # Errors
    /// When a log cannot be read.
    pub(super) async fn follow(engines: &[&Engine], prefix: &str) -> Result<Self, WebError> {
        let told = Arc::new(Feed::default());
        let mut following = JoinSet::new();
        for engine in engines {
            let asked = now_us();
            let page = engine.origin.get_json("/debug/kv/events?after=latest", PATIENCE).await?;
            let ahead_us = EngineEvents::ahead(page["now_us"].as_u64().unwrap_or(asked), asked, now_us());
            let follower = Follower {
                origin: engine.origin.clone(),
                name: engine.name.clone(),
                prefix: prefix.to_owned(),
                after: page["next"].as_u64().unwrap_or(0),
                epoch: page["engine"]["epoch"].as_str().unwrap_or_default().to_owned(),
                ahead_us,
            };
            following.spawn(follower.run(Arc::clone(&told)));
        }
        Ok(Self { told, _following: following })
    }

    /// What is known of a request.
    pub(super) fn life(&self, tag: &str) -> Life {
        Life::of(self.told.lock().by_tag.get(tag).map_or(&[][..], Vec::as_slice))
    }

    /// A token that is cancelled with the first event of this kind that is told of a request.
    pub(super) fn when(&self, tag: &str, kind: &'static str) -> CancellationToken {
        let token = CancellationToken::new();
        let mut state = self.told.lock();
        // Those of earlier requests are of no use any more.
        state.waiting.retain(|(of, ..)| of == tag);
        state.waiting.push((tag.to_owned(), kind, token.clone()));
        token
    }

    /// Waits until it is so, at most for so long; says what is known then.
    pub(super) async fn until(&self, tag: &str, within: Duration, is_so: impl Fn(&Life) -> bool) -> Life {
        let deadline = Instant::now() + within;
        loop {
            let news = self.told.news.notified();
            let life = self.life(tag);
            let left = deadline.saturating_duration_since(Instant::now());
            if is_so(&life) || left.is_zero() {
                return life;
            }
            // News that came between the look and the wait is seen a moment later.
            let _ = tokio::time::timeout(left.min(RETRY), news).await;
        }
    }
}

struct Follower {
    origin: Origin,
    name: String,
    prefix: String,
    after: u64,
    epoch: String,
    ahead_us: i64,
}

impl Follower {
    async fn run(mut self, feed: Arc<Feed>) {
        loop {
            let path = format!(
                "/debug/kv/events?after={}&wait_ms={LONG_POLL_MS}&limit={EVENTS_OF_ONE_ANSWER}",
                self.after
            );
            let Ok(page) = self.origin.get_json(&path, PATIENCE).await else {
                tokio::time::sleep(RETRY).await;
                continue;
            };
            let epoch = page["engine"]["epoch"].as_str().unwrap_or_default();
            if epoch != self.epoch {
                // Started again: another log.
                (self.epoch, self.after) = (epoch.to_owned(), 0);
                continue;
            }
            self.after = page["next"].as_u64().unwrap_or(self.after);
            let mut state = feed.lock();
            let State { by_tag, waiting } = &mut *state;
            for event in page["events"].as_array().into_iter().flatten() {
                let (Some(tag), Some(at)) = (event["tag"].as_str(), event["at_us"].as_u64()) else {
                    continue;
                };
                if !tag.starts_with(&self.prefix) {
                    continue;
                }
                for (of, kind, token) in waiting.iter() {
                    if of == tag && event["kind"] == *kind {
                        token.cancel();
                    }
                }
                let told = by_tag.entry(tag.to_owned()).or_default();
                if told.len() < EVENTS_MAX {
                    let at_us = at.saturating_add_signed(-self.ahead_us);
                    told.push(Told { engine: self.name.clone(), at_us, event: event.clone() });
                }
            }
            drop(state);
            feed.news.notify_waiters();
        }
    }
}
