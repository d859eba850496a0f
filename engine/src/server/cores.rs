//! Which engine core a request or verb is for: `X-data-parallel-rank` says (vLLM's name), or else the least loaded
//! core takes a request, and every core hears a verb.

use std::sync::Arc;

use baton_connector::ledger::ReleaseReply;
use baton_connector::{Handle, RequestId};
use baton_openai::{ApiError, Code};
use hyper::header::HeaderMap;

use super::Frontend;
use crate::engine_core::mailbox::{Legs, Undelivered};
use crate::event_log::What;
use crate::run::rank::{DpRank, Seat};

/// Pins a request, or a verb, to one data-parallel rank.
pub(super) const RANK_HEADER: &str = "x-data-parallel-rank";

impl Frontend {
    /// The core that the header names; `None` without one.
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

    /// A place for a request: at the core that the header names, or at the one with the fewest requests. Among equals
    /// the first: what came before is in its prefix cache. A core whose device has failed is passed over.
    pub(super) fn seat(&self, headers: &HeaderMap) -> Result<Seat, ApiError> {
        if let Some(core) = self.named_core(headers)? {
            return Ok(core.seat());
        }
        let healthy = |core: &&Arc<DpRank>| !core.status.has_failed();
        let least = self.cores.iter().filter(healthy).min_by_key(|core| core.load());
        Ok(least.unwrap_or(&self.cores[0]).seat())
    }

    /// Ends a lease at the named core, or at the one that knows it.
    pub(super) fn release(&self, named: Option<&Arc<DpRank>>, handle: Handle, reason: &str) -> ReleaseReply {
        let known = |core: &Arc<DpRank>| match core.desk.release_here(handle, reason) {
            ReleaseReply::Unknown => None,
            known => Some(known),
        };
        let found = match named {
            Some(core) => known(core),
            None => self.cores.iter().find_map(known),
        };
        found.unwrap_or(ReleaseReply::Unknown)
    }

    /// Ends a request by name at the named core, or wherever it is; a core that has not heard of it remembers.
    pub(super) fn abort(
        &self,
        named: Option<&Arc<DpRank>>,
        id: &RequestId,
        legs: Legs,
    ) -> Result<&'static str, Undelivered> {
        let cores = named.map_or(&self.cores[..], std::slice::from_ref);
        let mut answer = match legs {
            Legs::Decode => "aborted",
            Legs::Prefill | Legs::Both => ReleaseReply::Unknown.label(),
        };
        for core in cores {
            // The lease first: a request that finishes just now must not open one after this.
            core.log.tell(id, 0, What::Abort("verb"));
            if legs != Legs::Decode {
                let reply = core.desk.release_request(id, "aborted");
                answer = if reply == ReleaseReply::Unknown { answer } else { reply.label() };
            }
            core.mailbox.abort(id.clone(), legs)?;
        }
        Ok(answer)
    }
}
