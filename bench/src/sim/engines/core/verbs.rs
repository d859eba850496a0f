//! Requests of routers and other engines about leases and requests.

use baton_connector::RequestId;

use super::{AbortSource, Core, Leg, Submission, us};
use crate::sim::engines::leases::{LeaseKey, ReadEnd, ReleaseOutcome};

/// Maximum aborts of requests that have not arrived, and how long they are remembered.
const EARLY_MAX: usize = 4_096;
const EARLY_US: u64 = 120_000_000;

impl Core {
    /// Whether a consumer may begin to read.
    pub(in crate::sim::engines) fn begin_read(&mut self, lease: &LeaseKey) -> bool {
        self.leases.begin_read(lease)
    }

    /// Ends a read. Returns whether the blocks were leased during the whole read.
    pub(in crate::sim::engines) fn end_read(&mut self, lease: &LeaseKey, end: ReadEnd, now_us: u64) -> bool {
        let (valid, closed) = self.leases.end_read(lease, end);
        if let Some(closed) = closed {
            self.record_closed_lease(closed, now_us);
        }
        if end == ReadEnd::Complete && !valid {
            self.counts.after_expiry += 1;
        }
        valid
    }

    /// Renews a lease for two thirds of its duration, for a consumer that will read later.
    pub(in crate::sim::engines) fn renew(&mut self, lease: &LeaseKey, now_us: u64) {
        self.leases.renew(lease, now_us + us(self.plan.lease) * 2 / 3);
    }

    /// Ends a lease early.
    pub(in crate::sim::engines) fn release(
        &mut self,
        lease: &LeaseKey,
        reason: &str,
        now_us: u64,
    ) -> ReleaseOutcome {
        if self.plan.faults.strands_gap {
            // The fault reports success without releasing.
            return ReleaseOutcome::Ended;
        }
        let (released, closed) = self.leases.release(lease, reason, now_us);
        if let Some(closed) = closed {
            self.record_closed_lease(closed, now_us);
        }
        released
    }

    /// `/abort_requests`: aborts a request by the router's name, whether it runs, is leased, or has not arrived.
    pub(in crate::sim::engines) fn abort_named(
        &mut self,
        id: &RequestId,
        leg: Option<Leg>,
        now_us: u64,
    ) -> &'static str {
        let mut answer = if leg == Some(Leg::Decode) { "aborted" } else { ReleaseOutcome::Unknown.label() };
        if leg != Some(Leg::Decode)
            && let Some(handle) = self.leases.of_request(id)
        {
            answer = self.release(&LeaseKey::Handle(handle), "aborted", now_us).label();
        }
        let meant = |sent: &Submission| sent.id == *id && is_meant(leg, sent.leg);
        let found: Vec<_> = self
            .requests
            .iter()
            .filter(|(_, request)| meant(&request.sent))
            .map(|(ticket, _)| *ticket)
            .collect();
        if found.is_empty() {
            if self.early_ends.len() >= EARLY_MAX {
                self.forget_first();
            }
            self.early.insert(id.clone(), leg);
            self.early_ends.push_back((id.clone(), now_us + EARLY_US));
        }
        for ticket in found {
            self.abort(ticket, AbortSource::Verb, now_us);
        }
        answer
    }

    pub(super) fn was_aborted_early(&mut self, sent: &Submission, now_us: u64) -> bool {
        while self.early_ends.front().is_some_and(|(_, until_us)| *until_us <= now_us) {
            self.forget_first();
        }
        self.early.get(&sent.id).is_some_and(|leg| is_meant(*leg, sent.leg))
    }

    fn forget_first(&mut self) {
        if let Some((id, _)) = self.early_ends.pop_front()
            // The request may have been aborted again since.
            && !self.early_ends.iter().any(|(other, _)| *other == id)
        {
            self.early.remove(&id);
        }
    }
}

/// Whether an abort of one leg, or of both, applies to a leg.
fn is_meant(named: Option<Leg>, leg: Leg) -> bool {
    match named {
        None => true,
        Some(Leg::Prefill) => leg == Leg::Prefill,
        Some(Leg::Decode | Leg::Whole) => leg != Leg::Prefill,
    }
}
