//! A fair queue: who is next when there is room for one. Pure.
//!
//! Fair queueing with virtual start times (Goyal, Vin, Cheng: *Start-time Fair Queueing*, SIGCOMM 1996), twice:
//! between priorities by their weights, and inside a priority between tenants by theirs.
//!
//! ```text
//!  priority high ── tenant a ─ [r1 r4 r5]        tag: the virtual time at which its head is due
//!                └─ tenant b ─ [r3]              the smallest tag of a priority is its next,
//!  priority low  ── tenant a ─ [r2]              the smallest tag of the priorities is the queue's next
//! ```
//!
//! Only heads have tags: a request that is dispatched moves its tenant's tag on by cost / weight, and one that
//! leaves the queue unserved has cost its tenant nothing. A tenant that was idle starts at the present virtual
//! time: it neither saves up nor pays for what it did not use.
//!
//! A request that had its turn before and holds a finished prefill goes ahead of those that had none, in the order of
//! arrival: its first turn was charged, and the second attempt is the same turn.
//!
//! Not every request can be given to every engine: one that an engine failed is not sent there again. Requests with
//! the same engines left out stand in one [`Lane`]. When a lane is full, so are all engines but those that it leaves out;
//! the next request is then the first that can be given to one of these ([`FairQueue::next_within`]).
//!
//! Invariants:
//! - Requests and bytes never exceed their bounds, in total and per tenant; those that go ahead have the same bounds
//!   for themselves, and none per tenant.
//! - Of two tenants that wait all the time, neither is served more than one of its largest requests ahead of
//!   its share; so a first request waits for at most one turn of every other tenant, whatever they have queued.
//! - No priority starves: the same holds between priorities.
//! - What is kept is bounded by what waits, and by tenants that waited since the queue was last empty.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::turns::Turns;
use crate::auth::TenantId;
use crate::config::{Priority, QueueConfig};

/// Virtual time of one unit of cost at weight 1; so fine that the largest weight still moves it.
const UNIT: u128 = 1 << 20;

/// What a request is to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// `None`: a client that nobody knows; all of them are one tenant, without a bound of its own.
    pub tenant: Option<TenantId>,
    /// The tenant's share against the others'.
    pub weight: u32,
    pub priority: Priority,
    /// Of its body, in bytes.
    pub bytes: usize,
    /// What it will cost an engine, in tokens (estimated).
    pub cost: u64,
}

/// A request's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place(u64);

/// Engines that a request cannot be given to, by their numbers, ascending. Most requests have none.
pub(crate) type Lane = Vec<u32>;

/// How a request waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wants {
    pub without: Lane,
    /// It had its turn and holds a finished prefill.
    pub ahead: bool,
}

/// Which bound a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// Of the model's queue.
    Total,
    /// Of the tenant's share of it.
    Tenant,
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(crate) struct FairQueue {
    classes: [Class; 3],
    /// Those that had their turn, by the order of arrival in each lane.
    ahead: BTreeMap<Lane, BTreeSet<Place>>,
    claims: HashMap<Place, (Claim, Wants)>,
    held: HashMap<Option<TenantId>, Held>,
    total: Held,
    total_ahead: Held,
    now: u128,
    last: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    requests: usize,
    bytes: usize,
}

/// One priority.
#[derive(Debug, Default)]
struct Class {
    tag: u128,
    now: u128,
    waiting: usize,
    flows: BTreeMap<Option<TenantId>, Flow>,
    /// How much each flow has waiting, in sums.
    turns: Turns,
    /// Flows that wait in each lane: by their tags, then by the arrival of their first there.
    ready: BTreeMap<Lane, BTreeSet<(u128, Place, Option<TenantId>)>>,
    /// Flows that do not wait but are ahead of their share; forgotten once the others have caught up.
    ahead: BTreeSet<(u128, Option<TenantId>)>,
}

#[derive(Debug, Default)]
struct Flow {
    tag: u128,
    weight: u32,
    waiting: usize,
    lanes: BTreeMap<Lane, VecDeque<Place>>,
}

impl FairQueue {
    pub(crate) fn len(&self) -> usize {
        self.total.requests + self.total_ahead.requests
    }

    pub(crate) fn waiting(&self, priority: Priority) -> usize {
        self.classes[priority as usize].waiting
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// [`Full`] names the bound; the queue is as before.
    pub(crate) fn enter(&mut self, claim: Claim, wants: Wants, bounds: &QueueConfig) -> Result<Place, Full> {
        let total = if wants.ahead { &mut self.total_ahead } else { &mut self.total };
        if !total.has_room(&claim, bounds.requests, bounds.bytes) {
            return Err(Full::Total);
        }
        if !wants.ahead {
            let held = self.held.get(&claim.tenant).copied().unwrap_or_default();
            if claim.tenant.is_some() && !held.has_room(&claim, bounds.tenant_requests, bounds.tenant_bytes) {
                return Err(Full::Tenant);
            }
            self.held.entry(claim.tenant).or_default().add(&claim);
        }
        total.add(&claim);
        self.last += 1;
        let place = Place(self.last);
        if wants.ahead {
            self.ahead.entry(wants.without.clone()).or_default().insert(place);
        } else {
            let class = &mut self.classes[claim.priority as usize];
            if class.waiting == 0 {
                class.tag = class.tag.max(self.now);
            }
            class.join(place, &claim, &wants.without);
        }
        self.claims.insert(place, (claim, wants));
        Ok(place)
    }

    /// Whose turn it is.
    pub(crate) fn next(&self) -> Option<Place> {
        self.next_within(None)
    }

    /// Whose turn it is while only these engines may have room; `None`: any may.
    pub(crate) fn next_within(&self, room: Option<&Lane>) -> Option<Place> {
        let is_open = |lane: &Lane| room.is_none_or(|room| !is_within(room, lane));
        let ahead = self.ahead.iter().filter(|(lane, _)| is_open(lane));
        if let Some(&place) = ahead.filter_map(|(_, places)| places.first()).min() {
            return Some(place);
        }
        let next = self.classes.iter().filter_map(|class| Some((class.tag, class.next(is_open)?)));
        // The first of equals is the more urgent one.
        next.min_by_key(|(tag, _)| *tag).map(|(_, place)| place)
    }

    /// The lane of a request that waits.
    pub(crate) fn lane(&self, place: Place) -> Option<&Lane> {
        self.claims.get(&place).map(|(_, wants)| &wants.without)
    }

    /// A request was served; it is charged to its tenant and its priority, unless it was before. Nothing if it is not in
    /// the queue.
    pub(crate) fn dispatched(&mut self, place: Place, weights: &QueueConfig) {
        let Some((claim, wants)) = self.claims.get(&place) else { return };
        if !wants.ahead {
            let claim = *claim;
            let class = &mut self.classes[claim.priority as usize];
            self.now = self.now.max(class.tag);
            class.tag += claim.price(weights.weights.of(claim.priority));
            class.charge(&claim);
        }
        self.leave(place);
    }

    /// A request goes, served or not. Nothing if it is not in the queue.
    pub(crate) fn leave(&mut self, place: Place) {
        let Some((claim, wants)) = self.claims.remove(&place) else { return };
        if wants.ahead {
            self.total_ahead.take(&claim);
            if let Some(places) = self.ahead.get_mut(&wants.without) {
                places.remove(&place);
                if places.is_empty() {
                    self.ahead.remove(&wants.without);
                }
            }
            return;
        }
        self.total.take(&claim);
        if let Some(held) = self.held.get_mut(&claim.tenant) {
            held.take(&claim);
            if held.requests == 0 {
                self.held.remove(&claim.tenant);
            }
        }
        self.classes[claim.priority as usize].leave(place, &claim, &wants.without);
        if self.total.requests == 0 {
            // Nobody is left to be fair to. A new beginning keeps the tags small and the table empty.
            self.classes = Default::default();
            self.now = 0;
        }
    }

    /// How many requests would be served before this one if it joined now and none came after it; estimated from sums
    /// over the tenants, because those that are refused ask as well, however many tenants wait.
    pub(crate) fn ahead_of(&self, claim: &Claim, wants: &Wants, weights: &QueueConfig) -> usize {
        if wants.ahead {
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

/// Engines that may have room, where those but `lane` have none.
pub(crate) fn narrowed(room: Option<Lane>, lane: &Lane) -> Lane {
    match room {
        None => lane.clone(),
        Some(room) => room.into_iter().filter(|number| lane.binary_search(number).is_ok()).collect(),
    }
}

/// Whether all of `few` are among `many`; both ascend.
fn is_within(few: &[u32], many: &[u32]) -> bool {
    few.iter().all(|number| many.binary_search(number).is_ok())
}

impl Claim {
    fn price(&self, weight: u32) -> u128 {
        u128::from(self.cost.max(1)) * UNIT / u128::from(weight.max(1))
    }
}

impl Held {
    fn has_room(&self, claim: &Claim, requests: usize, bytes: usize) -> bool {
        self.requests < requests && self.bytes.saturating_add(claim.bytes) <= bytes
    }

    fn add(&mut self, claim: &Claim) {
        self.requests += 1;
        self.bytes += claim.bytes;
    }

    fn take(&mut self, claim: &Claim) {
        self.requests -= 1;
        self.bytes -= claim.bytes;
    }
}

impl Class {
    fn join(&mut self, place: Place, claim: &Claim, lane: &Lane) {
        self.waiting += 1;
        let flow = self.flows.entry(claim.tenant).or_default();
        if flow.waiting == 0 {
            self.ahead.remove(&(flow.tag, claim.tenant));
            flow.tag = flow.tag.max(self.now);
        }
        self.turns.take(flow.waiting, flow.weight);
        flow.weight = claim.weight.max(1);
        flow.waiting += 1;
        self.turns.add(flow.waiting, flow.weight);
        let places = flow.lanes.entry(lane.clone()).or_default();
        if places.is_empty() {
            self.ready.entry(lane.clone()).or_default().insert((flow.tag, place, claim.tenant));
        }
        places.push_back(place);
    }

    /// The first of the lanes that are open.
    fn next(&self, is_open: impl Fn(&Lane) -> bool) -> Option<Place> {
        let open = self.ready.iter().filter(|(lane, _)| is_open(lane));
        open.filter_map(|(_, heads)| heads.first()).min().map(|&(_, place, _)| place)
    }

    /// Moves the tenant's tag on. Its request is still in the queue.
    fn charge(&mut self, claim: &Claim) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        let (before, after) = (flow.tag, flow.tag + claim.price(flow.weight));
        for (lane, places) in &flow.lanes {
            if let (Some(&head), Some(heads)) = (places.front(), self.ready.get_mut(lane)) {
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

    fn leave(&mut self, place: Place, claim: &Claim, lane: &Lane) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        let Some(places) = flow.lanes.get_mut(lane) else { return };
        // Places are given out in order.
        let Ok(at) = places.binary_search(&place) else { return };
        places.remove(at);
        let (head, tag) = (places.front().copied(), flow.tag);
        if head.is_none() {
            flow.lanes.remove(lane);
        }
        self.waiting -= 1;
        self.turns.take(flow.waiting, flow.weight);
        flow.waiting -= 1;
        self.turns.add(flow.waiting, flow.weight);
        let is_idle = flow.waiting == 0;
        if at == 0
            && let Some(heads) = self.ready.get_mut(lane)
        {
            heads.remove(&(tag, place, claim.tenant));
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
