//! Writes of a prefill engine into the blocks of a decode engine, as vLLM's NixlPushConnector makes them (0.32, 0.33).
//!
//! ```text
//!  D: blocks reserved ─ registration ─▶ P: waits for its prefill ─ leased ─▶ write ─ landed ─▶ D: ready, or freed
//!                                          └ timeout: dropped             P: freed ◀──┘
//! ```
//!
//! P finds the lease of a registration by the request's id, without the tail that each engine adds. Only the end of the
//! write frees D's blocks: not the abort of D's request, not the end of P's lease, and not the timeout of the
//! registration. D learns of none of them. A lease whose write has begun does not expire before the write's end.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use baton_connector::RequestId;

use super::{Action, Core, RequestPhase, Ticket, us};
use crate::sim::engines::leases::{LeaseKey, ReadEnd};

/// Maximum registrations without a prefill. The oldest one is dropped first.
const REGISTRATIONS_MAX: usize = 4_096;
/// Digits of the random tail.
const TAIL_DIGITS: usize = 8;
/// How long a lease outlives the planned end of its write.
const WRITE_LATE_US: u64 = 1_000_000;

/// The blocks that a decode engine has reserved for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sim::engines) struct Registration {
    /// The decode engine's id. Its I/O layer sets it.
    pub engine: String,
    pub ticket: Ticket,
    /// The request's id, without the decode engine's tail.
    request: String,
    pub blocks: Vec<u32>,
}

impl Registration {
    pub(super) fn new(ticket: Ticket, internal: &RequestId, blocks: Vec<u32>) -> Self {
        Self { engine: String::new(), ticket, request: without_tail(internal).to_owned(), blocks }
    }
}

/// An id without the tail that distinguishes the requests of one engine.
fn without_tail(internal: &RequestId) -> &str {
    let text = internal.as_str();
    let is_tail = |tail: &str| tail.len() == TAIL_DIGITS && tail.bytes().all(|b| b.is_ascii_hexdigit());
    text.rsplit_once('-').filter(|(_, tail)| is_tail(tail)).map_or(text, |(base, _)| base)
}

/// Registrations without a prefill, and writes in progress.
#[derive(Debug, Default)]
pub(super) struct PushTable {
    /// In the order of their ends, which is that of their arrival.
    waiting: VecDeque<(u64, Registration)>,
    /// By end and handle.
    writes: BTreeMap<(u64, u128), Registration>,
}

impl PushTable {
    /// When the next write or registration ends.
    pub(super) fn next_us(&self) -> Option<u64> {
        let write = self.writes.first_key_value().map(|((ends_us, _), _)| *ends_us);
        write.into_iter().chain(self.waiting.front().map(|(ends_us, _)| *ends_us)).min()
    }
}

impl Core {
    /// P: a decode engine has reserved blocks.
    pub(in crate::sim::engines) fn register(&mut self, registration: Registration, now_us: u64) {
        let Some(timeout) = self.plan.push else { return };
        let lease = self.leases.unread(|request| without_tail(request) == registration.request);
        if let Some(handle) = lease.map(|lease| lease.handle) {
            return self.begin_write(handle, registration, now_us);
        }
        if self.push.waiting.len() >= REGISTRATIONS_MAX {
            self.push.waiting.pop_front();
        }
        self.push.waiting.push_back((now_us + us(timeout), registration));
    }

    /// P: a prefill has ended. A registration that fits begins its write.
    pub(super) fn match_lease(&mut self, handle: u128, now_us: u64) {
        if self.push.waiting.is_empty() {
            return;
        }
        let Some(lease) = self.leases.live().find(|lease| lease.handle == handle) else { return };
        let name = without_tail(&lease.request);
        let fits = self.push.waiting.iter().position(|(_, registration)| registration.request == name);
        if let Some((_, registration)) = fits.and_then(|at| self.push.waiting.remove(at)) {
            self.begin_write(handle, registration, now_us);
        }
    }

    fn begin_write(&mut self, handle: u128, to: Registration, now_us: u64) {
        let takes_us = (to.blocks.len() as u64 * 1_000_000).checked_div(self.plan.fetch_rate).unwrap_or(0);
        let lease = LeaseKey::Handle(handle);
        self.leases.begin_read(&lease);
        self.leases.renew(&lease, now_us + takes_us + WRITE_LATE_US);
        self.push.writes.insert((now_us + takes_us, handle), to);
    }

    /// P: ends the writes and drops the registrations that are due.
    pub(super) fn end_writes(&mut self, now_us: u64) {
        while self.push.waiting.front().is_some_and(|(ends_us, _)| *ends_us <= now_us) {
            self.push.waiting.pop_front();
        }
        while let Some(entry) = self.push.writes.first_entry().filter(|entry| entry.key().0 <= now_us) {
            let ((_, handle), to) = entry.remove_entry();
            let lease = self.leases.live().find(|lease| lease.handle == handle);
            let blocks = lease.map(|lease| lease.blocks.clone()).unwrap_or_default();
            let contents = blocks.iter().map(|&block| self.pool.contents().read(block)).collect();
            self.actions.push(Action::Written(to, contents));
            let (_, closed) = self.leases.end_read(&LeaseKey::Handle(handle), ReadEnd::Complete);
            if let Some(closed) = closed {
                self.record_closed_lease(closed, now_us);
            }
        }
    }

    /// D: the producer has written into blocks. A write needs no permission, and its end is all that D learns.
    pub(in crate::sim::engines) fn land(&mut self, to: &Registration, contents: Vec<u64>) {
        let request = self.requests.get(&to.ticket);
        let holds = request.is_some_and(|request| {
            request.phase == RequestPhase::Fetching && request.blocks.starts_with(&to.blocks)
        });
        self.counts.stray_writes += u64::from(!holds);
        for (&block, &content) in to.blocks.iter().zip(&contents) {
            self.pool.contents().write(block, content);
        }
        self.fetched(to.ticket, Ok(contents));
    }
}
