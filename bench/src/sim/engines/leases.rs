//! Leases of a simulated engine, by handle and by request, with expiry.
//!
//! ```text
//! Offered ─ read begun ─▶ Reading ─ done ─▶ closed(transfer_done)
//!    ├ release, expiry ─▶ closed(reason)     └ release, expiry: baton drains, vLLM closes at once
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};

use baton_connector::RequestId;

use super::plan::Dialect;

/// The name of a lease: a handle in Baton's dialect, the request in vLLM's. A consumer of a producer that writes has no
/// name of the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaseKey {
    Handle(u128),
    Request(RequestId),
    Unnamed,
}

/// The reason of a lease that was read.
pub(super) const FETCHED: &str = "transfer_done";
/// The reason of a lease that has expired.
pub(super) const EXPIRED: &str = "lease_expired";

/// Closed leases that are remembered, to distinguish repeated from unknown releases.
const CLOSED_KEPT: usize = 4_096;
/// How long an ended lease waits for its readers.
const DRAIN_US: u64 = 5_000_000;

/// A lease. See the module documentation.
#[derive(Debug)]
pub(super) struct Lease {
    pub handle: u128,
    /// The consumers' name of the request.
    pub request: RequestId,
    /// The router's name of the request.
    pub id: RequestId,
    pub blocks: Vec<u32>,
    pub opened_us: u64,
    pub ends_us: u64,
    pub readers: u32,
    pub draining: Option<Box<str>>,
}

/// A closed lease and its reason.
#[derive(Debug)]
pub(super) struct ClosedLease {
    pub lease: Lease,
    pub reason: Box<str>,
    /// The lease was read.
    pub fetched: bool,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadEnd {
    /// The consumer has all blocks.
    Complete,
    /// The consumer gave up.
    Stopped,
}

/// The result of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseOutcome {
    Ended,
    Draining,
    Already,
    Unknown,
}

impl ReleaseOutcome {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Ended => "released",
            Self::Draining => "draining",
            Self::Already => "already",
            Self::Unknown => "unknown",
        }
    }
}

/// All leases of an engine.
#[derive(Debug, Default)]
pub(super) struct Leases {
    dialect: Dialect,
    live: HashMap<u128, Lease>,
    by_request: HashMap<RequestId, u128>,
    by_end: BTreeSet<(u64, u128)>,
    closed: VecDeque<(u128, RequestId)>,
    pub opened: u64,
    /// Reads and releases of closed leases.
    pub late: u64,
    /// Reads and releases of unknown leases.
    pub unknown: u64,
}

impl Leases {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self { dialect, ..Self::default() }
    }

    pub(super) fn open(&mut self, lease: Lease) {
        self.opened += 1;
        self.by_end.insert((lease.ends_us, lease.handle));
        self.by_request.insert(lease.request.clone(), lease.handle);
        self.live.insert(lease.handle, lease);
    }

    /// The live lease of this name. A missing one is counted.
    fn find(&mut self, key: &LeaseKey) -> Option<&mut Lease> {
        let handle = match key {
            LeaseKey::Handle(handle) => Some(*handle),
            LeaseKey::Request(request) => self.by_request.get(request).copied(),
            LeaseKey::Unnamed => return None,
        };
        if let Some(handle) = handle.filter(|handle| self.live.contains_key(handle)) {
            return self.live.get_mut(&handle);
        }
        if self.was_closed(key) {
            self.late += 1
        } else {
            self.unknown += 1
        }
        None
    }

    fn was_closed(&self, key: &LeaseKey) -> bool {
        self.closed.iter().any(|(handle, request)| match key {
            LeaseKey::Handle(named) => named == handle,
            LeaseKey::Request(named) => named == request,
            LeaseKey::Unnamed => false,
        })
    }

    /// Whether a read may begin.
    pub(super) fn begin_read(&mut self, key: &LeaseKey) -> bool {
        let Some(lease) = self.find(key) else { return false };
        if lease.draining.is_some() {
            return false;
        }
        lease.readers += 1;
        true
    }

    /// Ends a read. Returns whether the lease existed for the whole read, and the closed lease.
    pub(super) fn end_read(&mut self, key: &LeaseKey, end: ReadEnd) -> (bool, Option<ClosedLease>) {
        let Some(lease) = self.find(key) else { return (false, None) };
        lease.readers = lease.readers.saturating_sub(1);
        let (handle, readers) = (lease.handle, lease.readers);
        let ended = match (end, lease.draining.clone()) {
            (ReadEnd::Complete, _) => Some(FETCHED.into()),
            (ReadEnd::Stopped, Some(reason)) if readers == 0 => Some(reason),
            (ReadEnd::Stopped, _) => None,
        };
        (true, ended.map(|reason| self.close(handle, reason)))
    }

    /// Extends a lease for a later read.
    pub(super) fn renew(&mut self, key: &LeaseKey, until_us: u64) {
        let Some(lease) = self.find(key) else { return };
        if lease.draining.is_none() && until_us > lease.ends_us {
            let (before, handle) = (lease.ends_us, lease.handle);
            lease.ends_us = until_us;
            self.by_end.remove(&(before, handle));
            self.by_end.insert((until_us, handle));
        }
    }

    /// Ends a lease early.
    pub(super) fn release(
        &mut self,
        key: &LeaseKey,
        reason: &str,
        now_us: u64,
    ) -> (ReleaseOutcome, Option<ClosedLease>) {
        let late = self.late;
        let Some(lease) = self.find(key) else {
            return (if self.late > late { ReleaseOutcome::Already } else { ReleaseOutcome::Unknown }, None);
        };
        let handle = lease.handle;
        if lease.draining.is_some() {
            return (ReleaseOutcome::Draining, None);
        }
        if lease.readers > 0 && self.dialect == Dialect::Baton {
            self.drain(handle, reason.into(), now_us);
            return (ReleaseOutcome::Draining, None);
        }
        (ReleaseOutcome::Ended, Some(self.close(handle, reason.into())))
    }

    /// Closes the first expired lease that can be closed.
    pub(super) fn expire(&mut self, now_us: u64) -> Option<ClosedLease> {
        while let Some(&(ends_us, handle)) = self.by_end.first().filter(|(ends_us, _)| *ends_us <= now_us) {
            let lease = self.live.get_mut(&handle).expect("both name the same leases");
            match lease.draining.take() {
                Some(reason) => return Some(self.close(handle, reason)),
                // vLLM's expiry ignores reads in flight.
                None if lease.readers > 0 && self.dialect == Dialect::Baton => {
                    self.drain(handle, EXPIRED.into(), now_us.max(ends_us));
                }
                None => return Some(self.close(handle, EXPIRED.into())),
            }
        }
        None
    }

    fn drain(&mut self, handle: u128, reason: Box<str>, now_us: u64) {
        let lease = self.live.get_mut(&handle).expect("it was found");
        self.by_end.remove(&(lease.ends_us, handle));
        lease.ends_us = now_us + DRAIN_US;
        lease.draining = Some(reason);
        self.by_end.insert((lease.ends_us, handle));
    }

    fn close(&mut self, handle: u128, reason: Box<str>) -> ClosedLease {
        let lease = self.live.remove(&handle).expect("it was found");
        self.by_end.remove(&(lease.ends_us, handle));
        self.by_request.remove(&lease.request);
        if self.closed.len() >= CLOSED_KEPT {
            self.closed.pop_front();
        }
        self.closed.push_back((handle, lease.request.clone()));
        let fetched = &*reason == FETCHED;
        ClosedLease { lease, reason, fetched }
    }

    /// When the next lease expires.
    pub(super) fn next_end_us(&self) -> Option<u64> {
        self.by_end.first().map(|(ends_us, _)| *ends_us)
    }

    /// The handle of a request's lease, by the router's name.
    pub(super) fn of_request(&self, id: &RequestId) -> Option<u128> {
        self.live.values().find(|lease| lease.id == *id).map(|lease| lease.handle)
    }

    /// The oldest lease whose request fits, and that is not read yet.
    pub(super) fn unread(&self, fits: impl Fn(&RequestId) -> bool) -> Option<&Lease> {
        let unread = self.live.values().filter(|lease| lease.readers == 0 && fits(&lease.request));
        unread.min_by_key(|lease| (lease.opened_us, lease.handle))
    }

    pub(super) fn live(&self) -> impl ExactSizeIterator<Item = &Lease> {
        self.live.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leases(dialect: Dialect) -> Leases {
        let mut leases = Leases::new(dialect);
        let id = RequestId::new("a").expect("an id");
        leases.open(Lease {
            handle: 1,
            request: id.clone(),
            id,
            blocks: vec![1, 2],
            opened_us: 0,
            ends_us: 100,
            readers: 0,
            draining: None,
        });
        leases
    }

    const KEY: LeaseKey = LeaseKey::Handle(1);

    #[test]
    fn a_lease_ends_once_and_what_comes_later_is_counted() {
        let mut all = leases(Dialect::Baton);
        assert!(all.begin_read(&KEY));
        let (valid, closed) = all.end_read(&KEY, ReadEnd::Complete);
        assert!(valid && closed.is_some_and(|closed| closed.fetched));
        assert!(!all.end_read(&KEY, ReadEnd::Complete).0);
        assert!(!all.begin_read(&KEY));
        assert_eq!(all.release(&KEY, "client_gone", 5).0, ReleaseOutcome::Already);
        assert_eq!(all.release(&LeaseKey::Handle(9), "client_gone", 5).0, ReleaseOutcome::Unknown);
        assert!(all.expire(1_000).is_none());
        assert_eq!((all.opened, all.late, all.unknown), (1, 3, 1));
    }

    #[test]
    fn baton_awaits_a_reader_and_vllm_does_not() {
        for (dialect, waits) in [(Dialect::Baton, true), (Dialect::Vllm, false)] {
            let mut all = leases(dialect);
            assert!(all.begin_read(&KEY));
            assert_eq!(all.expire(100).is_none(), waits);
            let (valid, closed) = all.end_read(&KEY, ReadEnd::Complete);
            assert_eq!((valid, closed.is_some()), (waits, waits));
        }
        let mut all = leases(Dialect::Baton);
        assert!(all.begin_read(&KEY));
        assert_eq!(all.release(&KEY, "client_gone", 0).0, ReleaseOutcome::Draining);
        assert!(!all.begin_read(&KEY), "no new reader");
        assert_eq!(all.next_end_us(), Some(DRAIN_US));
        assert_eq!(all.expire(DRAIN_US).map(|closed| closed.reason), Some("client_gone".into()));
    }

    #[test]
    fn a_heartbeat_only_extends_the_expiry() {
        let mut all = leases(Dialect::Vllm);
        all.renew(&KEY, 250);
        all.renew(&KEY, 200);
        assert!(all.expire(249).is_none());
        assert_eq!(all.expire(250).map(|closed| closed.reason), Some(EXPIRED.into()));
    }
}
