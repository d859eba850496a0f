//! A fair queue: decides which request is next when there is capacity for one. Pure.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng: *Start-time Fair Queueing*, SIGCOMM 1996), applied twice: between
//! priorities by their weights, and inside a priority between tenants by theirs.
//!
//! ```text
//!  priority high ── tenant a ─ [r1 r4 r5]        tag: the virtual time at which its head is due
//!                └─ tenant b ─ [r3]              the smallest tag of a priority is its next,
//!  priority low  ── tenant a ─ [r2]              the smallest tag of the priorities is the queue's next
//! ```
//!
//! Only heads have tags. A dispatched request moves its tenant's tag on by cost / weight. A request that leaves
//! the queue unserved costs its tenant nothing. A tenant that was idle starts at the present virtual time, so
//! unused time is neither a credit nor a charge.
//!
//! A request that had its turn before and holds a finished prefill goes ahead of the others, in the order of
//! arrival. Its first turn was charged, and the second attempt is the same turn.
//!
//! Not every request can use every engine: a request is not sent again to an engine that failed it. Requests with
//! the same excluded engines are in one [`Lane`]. When a lane is full, so are all engines but its excluded ones.
//! The next request is then the first one that may use one of these ([`FairQueue::next_eligible`]).
//!
//! Invariants:
//! - Requests and bytes never exceed their bounds, in total and per tenant. Requests that go ahead have the same
//!   total bounds for themselves, and none per tenant.
//! - Of two tenants that wait all the time, neither is served more than one of its largest requests ahead of its
//!   share. So a first request waits for at most one turn of every other tenant, whatever they have queued.
//! - No priority starves: the same holds between priorities.
//! - Memory is bounded by the waiting requests, and by the tenants that waited since the queue was last empty.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::turn_totals::TurnTotals;
use crate::auth::TenantId;
use crate::config::{Priority, QueueConfig};

/// Virtual time of one unit of cost at weight 1. It is so fine that the largest weight still moves it.
const UNIT: u128 = 1 << 20;

/// What a request claims of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// `None`: a client without a tenant. All such clients are one tenant, without a bound of its own.
    pub tenant: Option<TenantId>,
    /// The tenant's share, relative to the others.
    pub weight: u32,
    pub priority: Priority,
    /// Size of its body.
    pub bytes: usize,
    /// Estimated cost for an engine, in tokens.
    pub cost: u64,
}

/// A request's entry in the queue, in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueEntry(u64);

/// Engines that a request cannot use, by number, ascending. Most requests have none.
pub(crate) type Lane = Vec<u32>;

/// How a request waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitOptions {
    pub excluded: Lane,
    /// The request had its turn and holds a finished prefill.
    pub ahead: bool,
}

/// Which bound a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueBound {
    /// Of the model's queue.
    Total,
    /// Of the tenant's share of the queue.
    Tenant,
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(crate) struct FairQueue {
    classes: [PriorityClass; 3],
    /// Requests that had their turn, by the order of arrival in each lane.
    ahead: BTreeMap<Lane, BTreeSet<QueueEntry>>,
    entries: HashMap<QueueEntry, (Claim, WaitOptions)>,
    tenant_totals: HashMap<Option<TenantId>, QueuedTotals>,
    total: QueuedTotals,
    total_ahead: QueuedTotals,
    now: u128,
    last: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct QueuedTotals {
    requests: usize,
    bytes: usize,
}

/// One priority.
#[derive(Debug, Default)]
struct PriorityClass {
    tag: u128,
    now: u128,
    waiting: usize,
    flows: BTreeMap<Option<TenantId>, Flow>,
    /// Sums of the flows' waiting requests.
    turns: TurnTotals,
    /// Waiting flows of each lane, by their tags, then by the arrival of their first request there.
    ready: BTreeMap<Lane, BTreeSet<(u128, QueueEntry, Option<TenantId>)>>,
    /// Idle flows that are ahead of their share. They are removed once the others have caught up.
    ahead: BTreeSet<(u128, Option<TenantId>)>,
}

#[derive(Debug, Default)]
struct Flow {
    tag: u128,
    weight: u32,
    waiting: usize,
    lanes: BTreeMap<Lane, VecDeque<QueueEntry>>,
}

impl FairQueue {
    pub(crate) fn len(&self) -> usize {
        self.total.requests + self.total_ahead.requests
    }

    pub(crate) fn waiting(&self, priority: Priority) -> usize {
        self.classes[priority as usize].waiting
    }

    /// Adds a request.
    ///
    /// # Errors
    /// [`QueueBound`] names the bound. The queue is unchanged.
    pub(crate) fn enter(
        &mut self,
        claim: Claim,
        options: WaitOptions,
        bounds: &QueueConfig,
    ) -> Result<QueueEntry, QueueBound> {
        let total = if options.ahead { &mut self.total_ahead } else { &mut self.total };
        if !total.fits(&claim, bounds.requests, bounds.bytes) {
            return Err(QueueBound::Total);
        }
        if !options.ahead {
            let totals = self.tenant_totals.get(&claim.tenant).copied().unwrap_or_default();
            if claim.tenant.is_some() && !totals.fits(&claim, bounds.tenant_requests, bounds.tenant_bytes) {
                return Err(QueueBound::Tenant);
            }
            self.tenant_totals.entry(claim.tenant).or_default().add(&claim);
        }
        total.add(&claim);
        self.last += 1;
        let entry = QueueEntry(self.last);
        if options.ahead {
            self.ahead.entry(options.excluded.clone()).or_default().insert(entry);
        } else {
            let class = &mut self.classes[claim.priority as usize];
            if class.waiting == 0 {
                class.tag = class.tag.max(self.now);
            }
            class.join(entry, &claim, &options.excluded);
        }
        self.entries.insert(entry, (claim, options));
        Ok(entry)
    }

    /// The request whose turn it is.
    pub(crate) fn next(&self) -> Option<QueueEntry> {
        self.next_eligible(None)
    }

    /// The request whose turn it is while only these engines may have capacity; `None`: any may.
    pub(crate) fn next_eligible(&self, candidates: Option<&Lane>) -> Option<QueueEntry> {
        let is_open = |lane: &Lane| candidates.is_none_or(|candidates| !is_subset(candidates, lane));
        let ahead = self.ahead.iter().filter(|(lane, _)| is_open(lane));
        if let Some(&entry) = ahead.filter_map(|(_, entries)| entries.first()).min() {
            return Some(entry);
        }
        let next = self.classes.iter().filter_map(|class| Some((class.tag, class.next(is_open)?)));
        // Of equal tags, the more urgent priority is first.
        next.min_by_key(|(tag, _)| *tag).map(|(_, entry)| entry)
    }

    /// The lane of a waiting request.
    pub(crate) fn lane(&self, entry: QueueEntry) -> Option<&Lane> {
        self.entries.get(&entry).map(|(_, options)| &options.excluded)
    }

    /// Removes a served request and charges it to its tenant and its priority, unless it was charged before. Does
    /// nothing if it is not in the queue.
    pub(crate) fn record_dispatch(&mut self, entry: QueueEntry, weights: &QueueConfig) {
        let Some((claim, options)) = self.entries.get(&entry) else { return };
        if !options.ahead {
            let claim = *claim;
            let class = &mut self.classes[claim.priority as usize];
            self.now = self.now.max(class.tag);
            class.tag += claim.virtual_cost(weights.weights.of(claim.priority));
            class.charge(&claim);
        }
        self.leave(entry);
    }

    /// Removes a request. Does nothing if it is not in the queue.
    pub(crate) fn leave(&mut self, entry: QueueEntry) {
        let Some((claim, options)) = self.entries.remove(&entry) else { return };
        if options.ahead {
            self.total_ahead.subtract(&claim);
            if let Some(entries) = self.ahead.get_mut(&options.excluded) {
                entries.remove(&entry);
                if entries.is_empty() {
                    self.ahead.remove(&options.excluded);
                }
            }
            return;
        }
        self.total.subtract(&claim);
        if let Some(totals) = self.tenant_totals.get_mut(&claim.tenant) {
            totals.subtract(&claim);
            if totals.requests == 0 {
                self.tenant_totals.remove(&claim.tenant);
            }
        }
        self.classes[claim.priority as usize].leave(entry, &claim, &options.excluded);
        if self.total.requests == 0 {
            // The queue is empty, so fairness needs no history. Reset tags stay small and the table empty.
            self.classes = Default::default();
            self.now = 0;
        }
    }

    /// Estimates how many requests would be served before this one if it joined now and none came after it. The
    /// estimate uses sums over the tenants, because refused requests cause it too, however many tenants wait.
    pub(crate) fn ahead_of(&self, claim: &Claim, options: &WaitOptions, weights: &QueueConfig) -> usize {
        if options.ahead {
            return self.total_ahead.requests;
        }
        let class = &self.classes[claim.priority as usize];
        let own = class.flows.get(&claim.tenant).filter(|flow| flow.waiting > 0);
        let mine = own.map_or(0, |flow| flow.waiting);
        let others = class.turns.ahead(mine + 1, claim.weight, own.map(|flow| (flow.waiting, flow.weight)));
        let (inside, weight) = (mine + others, weights.weights.of(claim.priority));
        let outside = Priority::ALL.into_iter().filter(|other| *other != claim.priority).map(|other| {
            let turns = (inside as u64 + 1) * u64::from(weights.weights.of(other));
            let turns = turns.div_ceil(u64::from(weight.max(1))).max(1);
            self.waiting(other).min(usize::try_from(turns).unwrap_or(usize::MAX))
        });
        self.total_ahead.requests + inside + outside.sum::<usize>()
    }
}

/// The engines that may have capacity after all engines outside `lane` were found full.
pub(crate) fn narrow_candidates(candidates: Option<Lane>, lane: &Lane) -> Lane {
    match candidates {
        None => lane.clone(),
        Some(candidates) => {
            candidates.into_iter().filter(|number| lane.binary_search(number).is_ok()).collect()
        }
    }
}

/// Whether `many` contains all of `few`; both ascend.
fn is_subset(few: &[u32], many: &[u32]) -> bool {
    few.iter().all(|number| many.binary_search(number).is_ok())
}

impl Claim {
    fn virtual_cost(&self, weight: u32) -> u128 {
        u128::from(self.cost.max(1)) * UNIT / u128::from(weight.max(1))
    }
}

impl QueuedTotals {
    fn fits(&self, claim: &Claim, requests: usize, bytes: usize) -> bool {
        self.requests < requests && self.bytes.saturating_add(claim.bytes) <= bytes
    }

    fn add(&mut self, claim: &Claim) {
        self.requests += 1;
        self.bytes += claim.bytes;
    }

    fn subtract(&mut self, claim: &Claim) {
        self.requests -= 1;
        self.bytes -= claim.bytes;
    }
}

impl PriorityClass {
    fn join(&mut self, entry: QueueEntry, claim: &Claim, lane: &Lane) {
        self.waiting += 1;
        let flow = self.flows.entry(claim.tenant).or_default();
        if flow.waiting == 0 {
            self.ahead.remove(&(flow.tag, claim.tenant));
            flow.tag = flow.tag.max(self.now);
        }
        self.turns.subtract(flow.waiting, flow.weight);
        flow.weight = claim.weight.max(1);
        flow.waiting += 1;
        self.turns.add(flow.waiting, flow.weight);
        let entries = flow.lanes.entry(lane.clone()).or_default();
        if entries.is_empty() {
            self.ready.entry(lane.clone()).or_default().insert((flow.tag, entry, claim.tenant));
        }
        entries.push_back(entry);
    }

    /// The first request of the open lanes.
    fn next(&self, is_open: impl Fn(&Lane) -> bool) -> Option<QueueEntry> {
        let open = self.ready.iter().filter(|(lane, _)| is_open(lane));
        open.filter_map(|(_, heads)| heads.first()).min().map(|&(_, entry, _)| entry)
    }

    /// Moves the tenant's tag on. The request is still in the queue.
    fn charge(&mut self, claim: &Claim) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        let (before, after) = (flow.tag, flow.tag + claim.virtual_cost(flow.weight));
        for (lane, entries) in &flow.lanes {
            if let (Some(&head), Some(heads)) = (entries.front(), self.ready.get_mut(lane)) {
                heads.remove(&(before, head, claim.tenant));
                heads.insert((after, head, claim.tenant));
            }
        }
        self.now = self.now.max(before);
        flow.tag = after;
        while let Some(&(tag, tenant)) = self.ahead.first().filter(|(tag, _)| *tag <= self.now) {
            self.ahead.remove(&(tag, tenant));
            self.flows.remove(&tenant);
        }
    }

    fn leave(&mut self, entry: QueueEntry, claim: &Claim, lane: &Lane) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        let Some(entries) = flow.lanes.get_mut(lane) else { return };
        // Entries are numbered in order.
        let Ok(at) = entries.binary_search(&entry) else { return };
        entries.remove(at);
        let (head, tag) = (entries.front().copied(), flow.tag);
        if head.is_none() {
            flow.lanes.remove(lane);
        }
        self.waiting -= 1;
        self.turns.subtract(flow.waiting, flow.weight);
        flow.waiting -= 1;
        self.turns.add(flow.waiting, flow.weight);
        let is_idle = flow.waiting == 0;
        if at == 0
            && let Some(heads) = self.ready.get_mut(lane)
        {
            heads.remove(&(tag, entry, claim.tenant));
            heads.extend(head.map(|head| (tag, head, claim.tenant)));
            if heads.is_empty() {
                self.ready.remove(lane);
            }
        }
        if is_idle && tag > self.now {
            self.ahead.insert((tag, claim.tenant));
        } else if is_idle {
            self.flows.remove(&claim.tenant);
        }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
