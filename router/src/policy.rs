//! How one engine of a pool is chosen. A plug: the trait is here, one file per policy is below.

mod least_load;
mod round_robin;

pub(crate) use least_load::LeastLoad;
pub(crate) use round_robin::RoundRobin;

use crate::config::PolicyKind;

/// What a policy may know of an engine that can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Its index in its pool.
    pub index: usize,
    /// Requests of this router that it is working on.
    pub in_flight: usize,
    /// Its share of the work against the others'.
    pub weight: u32,
}

/// What a policy may know of a request.
#[derive(Clone, Copy, Debug, Default)]
#[expect(dead_code, reason = "the policies that look at a request come next")]
pub(crate) struct Wanted<'a> {
    /// Requests with the same key belong to the same engine, if it can be had.
    pub affinity: Option<u64>,
    /// The prompt's beginning, chunk by chunk: each hash is of everything up to the chunk's end.
    pub prefix: &'a [u64],
    /// The prompt as JSON, in bytes.
    pub prompt_bytes: usize,
}

/// Chooses among the engines that can serve a request.
pub(crate) trait Policy: Send + Sync {
    /// The chosen candidate's `index`; `None` only when there is no candidate.
    fn choose(&self, wanted: &Wanted<'_>, candidates: &[Candidate]) -> Option<usize>;
}

/// The policy that a configuration names.
pub(crate) fn of_kind(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::RoundRobin => Box::<RoundRobin>::default(),
        PolicyKind::LeastLoad => Box::<LeastLoad>::default(),
    }
}
