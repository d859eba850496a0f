//! Chooses the engine core of a request. `X-data-parallel-rank` (vLLM's name) selects one core. Without it the least
//! loaded core takes a generation request, and every core gets a control request.

use std::sync::Arc;

use baton_connector::ledger::ReleaseReply;
use baton_connector::{Handle, RequestId};
use baton_connector_leases::event_log::RequestEvent;
use baton_openai::{ApiError, Code};
use hyper::header::HeaderMap;

use super::Frontend;
use crate::engine_core::mailbox::{LegFilter, MailboxError};
use crate::run::rank::{DpRank, RequestGuard};

/// Pins a request to one data-parallel rank.
pub(super) const RANK_HEADER: &str = "x-data-parallel-rank";

impl Frontend {
    /// The core in the header; `None` without one.
    pub(super) fn named_core(&self, headers: &HeaderMap) -> Result<Option<&Arc<DpRank>>, ApiError> {
        let mut values = headers.get_all(RANK_HEADER).iter();
        let Some(value) = values.next() else { return Ok(None) };
        let digits = value.to_str().ok().filter(|text| text.len() <= 5 && !text.is_empty());
        let digits = digits.filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
        let core = digits.and_then(|text| text.parse().ok()).and_then(|rank: usize| self.cores.get(rank));
        match core.filter(|_| values.next().is_none()) {
            Some(core) => Ok(Some(core)),
            None => {
                let last = self.cores.len() - 1;
                let message = format!("`{RANK_HEADER}` must be one rank of this engine, from 0 to {last}");
                Err(ApiError::invalid(RANK_HEADER, message).with_code(Code::InvalidDataParallelRank))
            }
        }
    }

    /// Chooses the core of a request: the one in the header, or the one with the fewest requests. Among equals it
    /// takes the first, whose prefix cache has the earlier requests. A core whose device has failed is skipped.
    pub(super) fn begin_request(&self, headers: &HeaderMap) -> Result<RequestGuard, ApiError> {
        if let Some(core) = self.named_core(headers)? {
            return Ok(core.begin_request());
        }
        let healthy = |core: &&Arc<DpRank>| !core.status.has_failed();
        let least = self.cores.iter().filter(healthy).min_by_key(|core| core.load());
        Ok(least.unwrap_or(&self.cores[0]).begin_request())
    }

    /// Ends a lease at the given core, or at the one that has it.
    pub(super) fn release(&self, named: Option<&Arc<DpRank>>, handle: Handle, reason: &str) -> ReleaseReply {
        let known = |core: &Arc<DpRank>| match core.leases.release_here(handle, reason) {
            ReleaseReply::Unknown => None,
            known => Some(known),
        };
        let found = match named {
            Some(core) => known(core),
            None => self.cores.iter().find_map(known),
        };
        found.unwrap_or(ReleaseReply::Unknown)
    }

    /// Ends a request by name at the given core, or at all. A core without this request remembers the abort.
    pub(super) fn abort(
        &self,
        named: Option<&Arc<DpRank>>,
        id: &RequestId,
        legs: LegFilter,
    ) -> Result<&'static str, MailboxError> {
        let cores = named.map_or(&self.cores[..], std::slice::from_ref);
        let mut answer = match legs {
            LegFilter::Decode => "aborted",
            LegFilter::Prefill | LegFilter::Both => ReleaseReply::Unknown.label(),
        };
        for core in cores {
            // The lease is released first: a request that finishes now must not open one after this.
            core.log.emit(id, 0, RequestEvent::Abort("verb"));
            if legs != LegFilter::Decode {
                let reply = core.leases.release_request(id, "aborted");
                answer = if reply == ReleaseReply::Unknown { answer } else { reply.label() };
            }
            core.mailbox.abort(id.clone(), legs)?;
        }
        Ok(answer)
    }
}
