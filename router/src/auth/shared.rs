//! Limits that several routers share through a Valkey or Redis server.
//!
//! ```text
//!  Permit ── take, at most timeout_ms ─▶ link ─▶ server: one script takes from key and tenant, or from neither
//!     │ unavailable: this router's own buckets, or 503
//!     └── end of the request ─▶ queue of corrections ─▶ task ─▶ server
//! ```
//!
//! Invariants:
//! - A question of a request waits for `timeout_ms` at most, and not at all while the server is known not to answer.
//! - The server's clock counts, so the routers' clocks do not matter.
//! - A place of a request in flight is a lease that its router renews. It ends with the router, not with a message.
//! - Corrections are queued and bounded. One that is lost makes a limit stricter, or a charge smaller, until the
//!   bucket is full again.

mod bounded_stream;
mod link;
mod protocol;
mod terms;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::bucket::{Meter, RateLimitError};
use crate::config::OnStoreFailure;
use crate::message::random;
use crate::metrics::log_limiter::LogLimiter;
use crate::metrics::tenants::{CorrectionResult, LimitKind, SharedLimitsMetrics, SharedResult};
use link::{Backoff, Connected, StoreLink};
use protocol::{Correction, LEASE, SharedName, Take, TakeReply};
pub(super) use terms::SharedLimitsTerms;

/// Maximum corrections that wait: those of 4,096 requests that end while the server is away. Each has 300 bytes.
const CORRECTIONS_MAX: usize = 4096;
/// Corrections, or renewals, that are sent together. More would delay the questions of requests behind them.
const BATCH: usize = 64;
/// Time for a correction or a renewal. No request waits for it.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(1);
/// Leases that one message renews.
const RENEWED_AT_ONCE: usize = 256;

/// Leases of one set that are to be renewed with one message.
type DueRenewal = (String, Vec<String>);

/// The shared limits of a router.
pub(crate) struct SharedLimits {
    state: Arc<SharedState>,
    corrections: mpsc::Sender<Correction>,
    /// Connects, renews and corrects until the limits are dropped. Corrections still queued are then lost.
    _task: Option<AbortOnDropHandle<()>>,
}

struct SharedState {
    terms: SharedLimitsTerms,
    metrics: SharedLimitsMetrics,
    link: StoreLink,
    /// Precedes the numbers of leases: no two routers use one.
    router: String,
    next_lease: AtomicU64,
    /// The leases of requests in flight, with their sets.
    leases: Mutex<HashMap<String, Vec<String>>>,
}

/// A place of a request in flight. Dropping it frees the place.
pub(super) struct Lease {
    limits: Arc<SharedLimits>,
    id: String,
    sets: Vec<String>,
}

/// What was taken from the buckets of a key and its tenant.
pub(super) struct SharedTake {
    buckets: Vec<SharedName>,
    at_us: i64,
    /// The bucket that leaves the smallest share of its limit: its limit and the time until it is full.
    pub tightest: Option<(u64, Duration)>,
    /// The place of a request, until the take is dropped.
    _lease: Option<Lease>,
}

/// Why nothing was taken. The index is that of the meter.
pub(super) enum SharedError {
    Limit(usize, u64, RateLimitError),
    Concurrent(usize),
    /// This router's own limits apply.
    Local,
    /// The request must be refused.
    Unavailable,
}

impl SharedLimits {
    /// Starts the task that connects.
    pub(super) fn start(
        terms: SharedLimitsTerms,
        metrics: SharedLimitsMetrics,
        runtime: Option<&Handle>,
    ) -> Arc<Self> {
        let state = Arc::new(SharedState {
            link: StoreLink::new(terms.timeout),
            terms,
            metrics,
            router: super::keys::hex(&random::bytes::<8>()),
            next_lease: AtomicU64::new(0),
            leases: Mutex::default(),
        });
        let (corrections, queue) = mpsc::channel(CORRECTIONS_MAX);
        let task = runtime.map(|runtime| runtime.spawn(Arc::clone(&state).run(queue)));
        Arc::new(Self { state, corrections, _task: task.map(AbortOnDropHandle::new) })
    }

    pub(super) fn fits(&self, terms: &SharedLimitsTerms) -> bool {
        self.state.terms.fit(terms)
    }

    /// Takes `amount` from the limits of a key and its tenant, and for a request a place too: all of it or nothing.
    ///
    /// # Errors
    /// [`SharedError`].
    pub(super) async fn take(
        self: &Arc<Self>,
        meters: [&Meter; 2],
        kind: LimitKind,
        amount: u64,
    ) -> Result<SharedTake, SharedError> {
        let (buckets, bucket_of) = self.names(meters, kind);
        let is_request = kind == LimitKind::Requests;
        let (sets, set_of) =
            if is_request { self.names(meters, LimitKind::Concurrent) } else { Default::default() };
        if let Some(at) = buckets.iter().position(|bucket| amount > bucket.capacity) {
            return Err(SharedError::Limit(bucket_of[at], buckets[at].capacity, RateLimitError::AboveLimit));
        }
        let lease = (!sets.is_empty()).then(|| Lease::new(self, &sets));
        let state = &self.state;
        if buckets.is_empty() && lease.is_none() {
            return Ok(SharedTake { buckets, at_us: 0, tightest: None, _lease: lease });
        }
        let id = lease.as_ref().map_or("", |lease| lease.id.as_str());
        let take = Take { amount, buckets: &buckets, sets: &sets, lease: id };
        let asked_at = Instant::now();
        let reply = state.link.ask(&take.invocation(), state.terms.timeout).await;
        let reply = reply.and_then(|reply| take.read(&reply).ok_or_else(|| state.misread()));
        if !matches!(reply, Err(SharedResult::Unavailable)) {
            state.metrics.seconds.record(asked_at.elapsed());
        }
        // A late take may still happen at the server. Its tokens count, and dropping the lease frees its place.
        match reply {
            Err(failure) => {
                state.metrics.count(failure);
                if failure == SharedResult::Unavailable {
                    lease.into_iter().for_each(Lease::forget);
                }
                Err(match state.terms.on_failure {
                    OnStoreFailure::AllowLocal => SharedError::Local,
                    OnStoreFailure::Refuse => SharedError::Unavailable,
                })
            }
            Ok(TakeReply::Taken { at_us, until_full }) => {
                state.metrics.count(SharedResult::Taken);
                let levels = buckets.iter().map(|bucket| bucket.capacity).zip(until_full);
                let left =
                    |&(limit, until_full): &(u64, Duration)| limit as f64 * (60.0 - until_full.as_secs_f64());
                let tightest = levels.min_by(|a, b| left(a).total_cmp(&left(b)));
                Ok(SharedTake { buckets, at_us, tightest, _lease: lease })
            }
            Ok(TakeReply::Bucket(at, error)) => {
                state.metrics.count(SharedResult::Refused);
                lease.into_iter().for_each(Lease::forget);
                Err(SharedError::Limit(bucket_of[at], buckets[at].capacity, error))
            }
            Ok(TakeReply::Set(at)) => {
                state.metrics.count(SharedResult::Refused);
                lease.into_iter().for_each(Lease::forget);
                Err(SharedError::Concurrent(set_of[at]))
            }
        }
    }

    /// Returns unused tokens.
    pub(super) fn give_back(&self, take: &SharedTake, amount: u64) {
        let (buckets, at_us) = (take.buckets.clone(), take.at_us);
        self.correct(!buckets.is_empty(), Correction::Give { buckets, amount, at_us });
    }

    /// Charges tokens that were used beyond those taken.
    pub(super) fn charge(&self, take: &SharedTake, amount: u64) {
        let buckets = take.buckets.clone();
        self.correct(!buckets.is_empty(), Correction::Charge { buckets, amount });
    }

    fn correct(&self, has_effect: bool, correction: Correction) {
        if has_effect && self.corrections.try_send(correction).is_err() {
            self.state.metrics.count_correction(CorrectionResult::Dropped);
        }
    }

    /// The names of those meters that have a limit of this kind, and the indices of these meters. Names of one
    /// tenant have one hash tag.
    fn names(&self, meters: [&Meter; 2], kind: LimitKind) -> (Vec<SharedName>, Vec<usize>) {
        let tenant = &meters[1].shared_id;
        let limited = meters.iter().enumerate().filter_map(|(at, meter)| {
            let (suffix, capacity) = match kind {
                LimitKind::Requests => ("requests", meter.requests.as_ref()?.limit()),
                LimitKind::Tokens => ("tokens", meter.tokens.as_ref()?.limit()),
                LimitKind::Concurrent => ("concurrent", meter.concurrent?.into()),
            };
            let name = format!("{}:{{{tenant}}}:{}:{suffix}", self.state.terms.prefix, meter.shared_id);
            Some((SharedName { name, capacity }, at))
        });
        limited.unzip()
    }
}

impl SharedState {
    /// A reply that the script never gives: something else answers.
    fn misread(&self) -> SharedResult {
        if let Some(connected) = self.link.connected() {
            self.link.count_failure(&connected);
        }
        SharedResult::Error
    }

    async fn run(self: Arc<Self>, mut queue: mpsc::Receiver<Correction>) {
        static LOG_LIMITER: LogLimiter = LogLimiter::new();
        let mut backoff = Backoff::new();
        loop {
            match link::connect(&self.terms).await {
                Ok(connected) => {
                    let since = Instant::now();
                    self.link.put_up(Arc::clone(&connected));
                    let up = UpGuard::new(&self.metrics);
                    tracing::info!(
                        event = "shared_limits_connected",
                        "connected to the server of the shared limits"
                    );
                    self.serve(&connected, &mut queue).await;
                    drop(up);
                    tracing::warn!(
                        event = "shared_limits_lost", on_failure = ?self.terms.on_failure,
                        "the server of the shared limits does not answer"
                    );
                    backoff.ended(since.elapsed());
                }
                Err(error) => {
                    if let Some(held_back) = LOG_LIMITER.allow() {
                        tracing::warn!(
                            event = "shared_limits_unavailable", %error, held_back,
                            "cannot connect to the server of the shared limits; it is retried"
                        );
                    }
                }
            }
            tokio::time::sleep(backoff.pause(random::fraction())).await;
        }
    }

    /// Renews and corrects until the connection is given up. Both proceed in turn, so that many leases do not let the
    /// corrections overflow.
    async fn serve(&self, connected: &Arc<Connected>, queue: &mut mpsc::Receiver<Correction>) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut renewals = tokio::time::interval(LEASE / 3);
        let mut due: Vec<DueRenewal> = Vec::new();
        loop {
            tokio::select! {
                () = self.link.went_down(connected) => return,
                _ = renewals.tick() => due = self.due_renewals(),
                () = std::future::ready(()), if !due.is_empty() => self.renew(connected, &mut due).await,
                received = queue.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        return;
                    }
                    // On one connection, one after the other. A release is queued once its lease is not in the table
                    // any more, so a renewal never follows it.
                    let sent = batch.drain(..).map(|correction| self.send(connected, correction));
                    futures::future::join_all(sent).await;
                }
            }
        }
    }

    async fn send(&self, connected: &Arc<Connected>, correction: Correction) {
        let mut connection = connected.connection.clone();
        let sent = async {
            match (correction.invocation(), correction.command()) {
                (Some(invocation), _) => invocation.invoke_async::<Vec<i64>>(&mut connection).await.map(drop),
                (None, Some(command)) => command.query_async::<()>(&mut connection).await,
                (None, None) => Ok(()),
            }
        };
        let fine = self.in_background(connected, sent).await;
        self.metrics.count_correction(if fine { CorrectionResult::Sent } else { CorrectionResult::Failed });
    }

    /// All leases. The list is as long as the requests in flight have sets.
    fn due_renewals(&self) -> Vec<DueRenewal> {
        let mut by_set: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (lease, sets) in &*self.leases.lock() {
            sets.iter().for_each(|set| by_set.entry(set.clone()).or_default().push(lease.clone()));
        }
        let mut due = Vec::with_capacity(by_set.len());
        for (set, leases) in by_set {
            due.extend(leases.chunks(RENEWED_AT_ONCE).map(|some| (set.clone(), some.to_vec())));
        }
        due
    }

    /// Renews a batch of what is due, in one round trip, but no lease that has ended meanwhile. After a failure the
    /// rest waits for the next time.
    async fn renew(&self, connected: &Arc<Connected>, due: &mut Vec<DueRenewal>) {
        let batch = due.split_off(due.len().saturating_sub(BATCH));
        let renewals: Vec<_> = {
            let held = self.leases.lock();
            let of_set = |(set, leases): &DueRenewal| {
                let left: Vec<&str> =
                    leases.iter().map(String::as_str).filter(|lease| held.contains_key(*lease)).collect();
                (!left.is_empty()).then(|| protocol::renewal(set, left.into_iter()))
            };
            batch.iter().filter_map(of_set).collect()
        };
        let sent = renewals.into_iter().map(|renewal| {
            let mut connection = connected.connection.clone();
            let sent = async move { renewal.invoke_async::<Vec<i64>>(&mut connection).await.map(drop) };
            self.in_background(connected, sent)
        });
        if futures::future::join_all(sent).await.contains(&false) {
            due.clear();
        }
    }

    /// Waits for work that no request waits for; `false` if it failed, which is counted at the link.
    async fn in_background(
        &self,
        connected: &Arc<Connected>,
        work: impl Future<Output = redis::RedisResult<()>>,
    ) -> bool {
        match tokio::time::timeout(BACKGROUND_TIMEOUT, work).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => self.link.fail(connected, &error),
            Err(_elapsed) => self.link.count_failure(connected),
        }
        false
    }
}

/// Counts a link that is up, also if its task is aborted.
struct UpGuard<'a>(&'a SharedLimitsMetrics);

impl<'a> UpGuard<'a> {
    fn new(metrics: &'a SharedLimitsMetrics) -> Self {
        metrics.up.increment(1.0);
        Self(metrics)
    }
}

impl Drop for UpGuard<'_> {
    fn drop(&mut self) {
        self.0.up.decrement(1.0);
    }
}

impl Lease {
    fn new(limits: &Arc<SharedLimits>, sets: &[SharedName]) -> Self {
        let state = &limits.state;
        let id = format!("{}-{}", state.router, state.next_lease.fetch_add(1, Ordering::Relaxed));
        let sets: Vec<_> = sets.iter().map(|set| set.name.clone()).collect();
        state.leases.lock().insert(id.clone(), sets.clone());
        Self { limits: Arc::clone(limits), id, sets }
    }

    /// The server has no such lease.
    fn forget(mut self) {
        self.sets.clear();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.limits.state.leases.lock().remove(&self.id);
        let release =
            Correction::Release { sets: std::mem::take(&mut self.sets), lease: std::mem::take(&mut self.id) };
        let has_effect = matches!(&release, Correction::Release { sets, .. } if !sets.is_empty());
        self.limits.correct(has_effect, release);
    }
}
