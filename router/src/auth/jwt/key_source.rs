//! Where an issuer's keys come from: a file, or an address from which a task fetches them again and again.
//!
//! ```text
//!  start ─▶ fetch ─▶ wait: refresh_s, or a backoff after a failure ─▶ fetch …
//!             ▲                 │ a token with an unknown key id
//!             └─────────────────┘ at most every 10 s, whatever clients send
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::task::AbortOnDropHandle;

use super::fetch::fetch;
use super::key_set::KeySet;
use crate::config::JwtConfig;
use crate::metrics::tenants::IssuerMetrics;
use crate::tls::service::ServiceTls;

/// Minimum time between two fetches that unknown key ids cause.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(10);
/// Longest pause after a failed fetch; the first one is a second.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Time that a request waits for a fetch; as long as a fetch may take, so that its result is seen.
const WAIT_MAX: Duration = Duration::from_secs(6);
/// Maximum requests that wait for an issuer's fetch. More get the keys that are there at once.
const WAITERS_MAX: usize = 256;

/// The keys of an issuer, kept current.
pub(crate) struct KeySource {
    shared: Arc<KeyState>,
    /// Fetches until the source is dropped; `None` for a file.
    _task: Option<AbortOnDropHandle<()>>,
}

/// Keys that may be used now.
#[derive(Clone)]
pub(super) struct CurrentKeys {
    pub set: Arc<KeySet>,
    /// Changes when a key is withdrawn, and not when one is added.
    pub version: u64,
    /// When the fetch of them began; `None` for a file, whose keys do not change.
    asked_at: Option<Instant>,
}

struct KeyState {
    config: JwtConfig,
    metrics: IssuerMetrics,
    keys: Mutex<FetchedKeys>,
    /// A request needs a fetch.
    asked: Notify,
    /// Changes at the end of each fetch.
    finished: watch::Sender<()>,
    waiters: Semaphore,
}

struct FetchedKeys {
    plan: FetchPlan,
    current: Option<CurrentKeys>,
    versions: u64,
    tls: Option<ServiceTls>,
}

/// When keys are fetched, and until when they are used. Pure.
#[derive(Clone, Debug)]
struct FetchPlan {
    refresh: Duration,
    stale: Duration,
    attempted: Option<Instant>,
    /// The latest fetch that an unknown key id caused.
    asked: Option<Instant>,
    succeeded: Option<Instant>,
    failures: u32,
    is_fetching: bool,
}

impl FetchPlan {
    fn new(config: &JwtConfig) -> Self {
        Self {
            refresh: Duration::from_secs(config.refresh_s),
            stale: Duration::from_secs(config.stale_s),
            attempted: None,
            asked: None,
            succeeded: None,
            failures: 0,
            // The first fetch begins with the source.
            is_fetching: true,
        }
    }

    fn begin(&mut self, now: Instant) {
        (self.attempted, self.is_fetching) = (Some(now), true);
    }

    fn end(&mut self, now: Instant, succeeded: bool) {
        self.is_fetching = false;
        if succeeded {
            (self.succeeded, self.failures) = (Some(now), 0);
        } else {
            self.failures = self.failures.saturating_add(1);
        }
    }

    /// The time of the next fetch.
    fn next(&self, now: Instant) -> Instant {
        let Some(attempted) = self.attempted else { return now };
        let backoff = Duration::from_secs(1 << self.failures.saturating_sub(1).min(6)).min(BACKOFF_MAX);
        attempted + if self.failures == 0 { self.refresh } else { backoff.min(self.refresh) }
    }

    /// Time until an unknown key id may cause a fetch.
    fn pause(&self, now: Instant) -> Duration {
        self.asked.map_or(Duration::ZERO, |asked| (asked + UNKNOWN_PAUSE).saturating_duration_since(now))
    }

    /// Whether an unknown key id may cause a fetch now.
    fn may_ask(&self, now: Instant) -> bool {
        self.pause(now).is_zero()
    }

    fn is_stale(&self, now: Instant) -> bool {
        self.succeeded.is_none_or(|succeeded| now.saturating_duration_since(succeeded) > self.stale)
    }
}

impl CurrentKeys {
    /// Whether they include each key that was published at this time and is not withdrawn.
    pub(super) fn are_newer_than(&self, published: Instant) -> bool {
        self.asked_at.is_none_or(|asked_at| asked_at >= published)
    }
}

impl KeySource {
    /// Keys that a file contains.
    pub(super) fn of_file(config: &JwtConfig, set: KeySet, metrics: IssuerMetrics) -> Arc<Self> {
        let shared = KeyState::new(config, None, metrics);
        shared.finish(Ok(set));
        Arc::new(Self { shared: Arc::new(shared), _task: None })
    }

    /// Keys that a task of `runtime` fetches.
    pub(in crate::auth) fn fetched(
        config: &JwtConfig,
        tls: Option<ServiceTls>,
        metrics: IssuerMetrics,
        runtime: Option<&Handle>,
    ) -> Arc<Self> {
        let shared = Arc::new(KeyState::new(config, tls, metrics));
        let task =
            runtime.map(|runtime| AbortOnDropHandle::new(runtime.spawn(Arc::clone(&shared).keep_current())));
        Arc::new(Self { shared, _task: task })
    }

    /// Whether this source fetches what `config` needs.
    pub(in crate::auth) fn fits(&self, config: &JwtConfig) -> bool {
        let own = &self.shared.config;
        own.jwks_file.is_none()
            && (&own.issuer, &own.jwks_url, &own.ca_file)
                == (&config.issuer, &config.jwks_url, &config.ca_file)
            && (own.refresh_s, own.stale_s) == (config.refresh_s, config.stale_s)
    }

    /// Replaces the root certificates, whose file may have changed.
    pub(in crate::auth) fn set_tls(&self, tls: Option<ServiceTls>) {
        self.shared.keys.lock().tls = tls;
    }

    /// The keys, unless there are none yet or they are too old.
    pub(super) fn current(&self) -> Option<CurrentKeys> {
        let keys = self.shared.keys.lock();
        let is_file = self.shared.config.jwks_file.is_some();
        keys.current.clone().filter(|_| is_file || !keys.plan.is_stale(Instant::now()))
    }

    /// Time until an unknown key id may cause a fetch.
    pub(super) fn pause(&self) -> Duration {
        self.shared.keys.lock().plan.pause(Instant::now())
    }

    /// Waits for the fetch in progress, or causes one. Returns at once where neither is possible.
    pub(super) async fn await_fetch(&self) {
        let shared = &self.shared;
        if shared.config.jwks_file.is_some() {
            return;
        }
        let Ok(_slot) = shared.waiters.try_acquire() else { return };
        // Before the look at the plan, so that no end of a fetch is missed.
        let mut finished = shared.finished.subscribe();
        let (is_fetching, may_ask) = {
            let keys = shared.keys.lock();
            (keys.plan.is_fetching, keys.plan.may_ask(Instant::now()))
        };
        if !is_fetching {
            if !may_ask {
                return;
            }
            shared.asked.notify_one();
        }
        // An error would mean that the source is gone.
        let _ = tokio::time::timeout(WAIT_MAX, finished.changed()).await;
    }
}

impl KeyState {
    fn new(config: &JwtConfig, tls: Option<ServiceTls>, metrics: IssuerMetrics) -> Self {
        let keys = FetchedKeys { plan: FetchPlan::new(config), current: None, versions: 0, tls };
        Self {
            config: config.clone(),
            metrics,
            keys: Mutex::new(keys),
            asked: Notify::new(),
            finished: watch::Sender::new(()),
            waiters: Semaphore::new(WAITERS_MAX),
        }
    }

    async fn keep_current(self: Arc<Self>) {
        loop {
            let tls = {
                let mut keys = self.keys.lock();
                keys.plan.begin(Instant::now());
                keys.tls.clone()
            };
            let fetched = fetch(&self.config, tls.as_ref()).await;
            self.metrics.count_fetch(fetched.is_ok());
            self.finish(fetched.map_err(|error| error.to_string()));
            loop {
                let next = self.keys.lock().plan.next(Instant::now());
                tokio::select! {
                    () = tokio::time::sleep_until(next.into()) => break,
                    () = self.asked.notified() => {
                        let (mut keys, now) = (self.keys.lock(), Instant::now());
                        if keys.plan.may_ask(now) {
                            keys.plan.asked = Some(now);
                            break;
                        }
                    }
                }
            }
        }
    }

    fn finish(&self, fetched: Result<KeySet, String>) {
        let now = Instant::now();
        let mut keys = self.keys.lock();
        let failures = keys.plan.failures;
        keys.plan.end(now, fetched.is_ok());
        let issuer = &self.config.issuer;
        match fetched {
            Ok(set) => {
                if failures > 0 || keys.current.is_none() {
                    tracing::info!(
                        event = "issuer_keys_fetched",
                        issuer,
                        keys = set.len(),
                        "fetched an issuer's keys"
                    );
                }
                let kept = keys.current.as_ref().is_some_and(|before| set.contains(&before.set));
                keys.versions += u64::from(!kept);
                let (version, asked_at) = (keys.versions, keys.plan.attempted);
                keys.current = Some(CurrentKeys { set: Arc::new(set), version, asked_at });
            }
            // One line when it begins to fail, and one a minute afterwards.
            Err(error) if failures == 0 || failures >= 6 => tracing::warn!(
                event = "issuer_keys_failed",
                issuer,
                error,
                usable = !keys.plan.is_stale(now),
                "cannot fetch an issuer's keys; it is retried"
            ),
            Err(_) => {}
        }
        let usable = self.config.jwks_file.is_some() || !keys.plan.is_stale(now);
        let count = keys.current.as_ref().filter(|_| usable).map_or(0, |current| current.set.len());
        self.metrics.keys.set(count as f64);
        drop(keys);
        self.finished.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> (FetchPlan, Instant) {
        let yaml = "{issuer: 'https://i.test', audience: a, tenant: t, refresh_s: 600, stale_s: 3600}";
        (FetchPlan::new(&serde_saphyr::from_str(yaml).expect("an entry")), Instant::now())
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn keys_are_fetched_before_they_are_old_and_sooner_after_failures() {
        let (mut plan, start) = plan();
        assert_eq!(plan.next(start), start);
        assert!(plan.is_stale(start));
        plan.begin(start);
        plan.end(start, true);
        assert_eq!(plan.next(start), start + s(600));
        for (failures, wait) in [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (60, 60)] {
            plan.failures = failures - 1;
            plan.end(start, false);
            assert_eq!(plan.next(start), start + s(wait), "{failures}");
        }
        assert!(!plan.is_stale(start + s(3600)) && plan.is_stale(start + s(3601)));
    }

    #[test]
    fn unknown_key_ids_cause_a_fetch_every_ten_seconds_at_most() {
        let (mut plan, start) = plan();
        plan.begin(start);
        plan.end(start, true);
        assert!(plan.may_ask(start), "a regular fetch does not count");
        plan.asked = Some(start);
        assert!(!plan.may_ask(start + s(9)) && plan.may_ask(start + s(10)));
        assert_eq!((plan.pause(start + s(4)), plan.pause(start + s(60))), (s(6), s(0)));
        plan.end(start + s(5), false);
        assert!(!plan.may_ask(start + s(9)), "a failure is no reason to ask more often");
    }
}
