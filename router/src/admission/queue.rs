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
//! Invariants:
//! - Requests and bytes never exceed their bounds, in total and per tenant.
//! - Of two tenants that wait all the time, neither is served more than one of its largest requests ahead of
//!   its share; so a first request waits for at most one turn of every other tenant, whatever they have queued.
//! - No priority starves: the same holds between priorities.
//! - What is kept is bounded by what waits, and by tenants that waited since the queue was last empty.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::config::{Priority, QueueConfig};

/// Virtual time of one unit of cost at weight 1; so fine that the largest weight still moves it.
const UNIT: u128 = 1 << 20;

/// A tenant, by a number that stays the same as long as the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(pub u32);

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
    claims: HashMap<Place, Claim>,
    held: HashMap<Option<TenantId>, Held>,
    total: Held,
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
    /// Flows that wait: by their tags, then by their heads' arrival.
    ready: BTreeSet<(u128, Place, Option<TenantId>)>,
    /// Flows that do not wait but are ahead of their share; forgotten once the others have caught up.
    ahead: BTreeSet<(u128, Option<TenantId>)>,
}

#[derive(Debug, Default)]
struct Flow {
    tag: u128,
    weight: u32,
    waiting: VecDeque<Place>,
}

impl FairQueue {
    pub(crate) fn len(&self) -> usize {
        self.total.requests
    }

    pub(crate) fn waiting(&self, priority: Priority) -> usize {
        self.classes[priority as usize].waiting
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// [`Full`] names the bound; the queue is as before.
    pub(crate) fn join(&mut self, claim: Claim, bounds: &QueueConfig) -> Result<Place, Full> {
        if !self.total.has_room(&claim, bounds.requests, bounds.bytes) {
            return Err(Full::Total);
        }
        let held = self.held.get(&claim.tenant).copied().unwrap_or_default();
        if claim.tenant.is_some() && !held.has_room(&claim, bounds.tenant_requests, bounds.tenant_bytes) {
            return Err(Full::Tenant);
        }
        self.last += 1;
        let place = Place(self.last);
        self.total.add(&claim);
        self.held.entry(claim.tenant).or_default().add(&claim);
        self.claims.insert(place, claim);
        let class = &mut self.classes[claim.priority as usize];
        if class.waiting == 0 {
            class.tag = class.tag.max(self.now);
        }
        class.join(place, &claim);
        Ok(place)
    }

    /// Whose turn it is.
    pub(crate) fn next(&self) -> Option<Place> {
        let waiting = self.classes.iter().filter(|class| class.waiting > 0);
        // The first of equals is the more urgent one.
        waiting.min_by_key(|class| class.tag)?.next()
    }

    /// A request was served; it is charged to its tenant and its priority. Nothing if it is not in the queue.
    pub(crate) fn dispatched(&mut self, place: Place, weights: &QueueConfig) {
        let Some(claim) = self.claims.get(&place).copied() else { return };
        let class = &mut self.classes[claim.priority as usize];
        self.now = self.now.max(class.tag);
        class.tag += claim.price(weights.weights.of(claim.priority));
        class.charge(&claim);
        self.leave(place);
    }

    /// A request goes, served or not. Nothing if it is not in the queue.
    pub(crate) fn leave(&mut self, place: Place) {
        let Some(claim) = self.claims.remove(&place) else { return };
        self.total.take(&claim);
        if let Some(held) = self.held.get_mut(&claim.tenant) {
            held.take(&claim);
            if held.requests == 0 {
                self.held.remove(&claim.tenant);
            }
        }
        self.classes[claim.priority as usize].leave(place, &claim);
        if self.total.requests == 0 {
            // Nobody is left to be fair to. A new beginning keeps the tags small and the table empty.
            self.classes = Default::default();
            self.now = 0;
        }
    }

    /// How many requests would be served before this one if it joined now and nobody came after it.
    pub(crate) fn ahead_of(&self, claim: &Claim, weights: &QueueConfig) -> usize {
        let class = &self.classes[claim.priority as usize];
        let own = class.flows.get(&claim.tenant).map_or(0, |flow| flow.waiting.len());
        let share = |turns: usize, theirs: u32, mine: u32| {
            (turns as u64 * u64::from(theirs)).div_ceil(u64::from(mine.max(1))).max(1) as usize
        };
        let others = class.flows.iter().filter(|(tenant, _)| **tenant != claim.tenant);
        let inside: usize = own
            + others
                .map(|(_, flow)| flow.waiting.len().min(share(own + 1, flow.weight, claim.weight)))
                .sum::<usize>();
        let mine = weights.weights.of(claim.priority);
        let outside = Priority::ALL
            .into_iter()
            .filter(|other| *other != claim.priority)
            .map(|other| self.waiting(other).min(share(inside + 1, weights.weights.of(other), mine)));
        inside + outside.sum::<usize>()
    }
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
    fn join(&mut self, place: Place, claim: &Claim) {
        self.waiting += 1;
        let flow = self.flows.entry(claim.tenant).or_default();
        flow.weight = claim.weight.max(1);
        if flow.waiting.is_empty() {
            self.ahead.remove(&(flow.tag, claim.tenant));
            flow.tag = flow.tag.max(self.now);
            self.ready.insert((flow.tag, place, claim.tenant));
        }
        flow.waiting.push_back(place);
    }

    fn next(&self) -> Option<Place> {
        self.ready.first().map(|&(_, place, _)| place)
    }

    /// Moves the tenant's tag on. Its request is still in the queue.
    fn charge(&mut self, claim: &Claim) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        let Some(&head) = flow.waiting.front() else { return };
        self.ready.remove(&(flow.tag, head, claim.tenant));
        self.now = self.now.max(flow.tag);
        flow.tag += claim.price(flow.weight);
        self.ready.insert((flow.tag, head, claim.tenant));
        while let Some(&(tag, tenant)) = self.ahead.first().filter(|(tag, _)| *tag <= self.now) {
            self.ahead.remove(&(tag, tenant));
            self.flows.remove(&tenant);
        }
    }

    fn leave(&mut self, place: Place, claim: &Claim) {
        let Some(flow) = self.flows.get_mut(&claim.tenant) else { return };
        // Places are given out in order.
        let Ok(at) = flow.waiting.binary_search(&place) else { return };
        flow.waiting.remove(at);
        self.waiting -= 1;
        if at > 0 {
            return;
        }
        self.ready.remove(&(flow.tag, place, claim.tenant));
        match flow.waiting.front() {
            Some(&head) => {
                self.ready.insert((flow.tag, head, claim.tenant));
            }
            None if flow.tag > self.now => {
                self.ahead.insert((flow.tag, claim.tenant));
            }
            None => {
                self.flows.remove(&claim.tenant);
            }
        }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
