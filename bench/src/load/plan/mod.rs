//! Parts of a load: arrivals, lengths, prompts, recorded traces, workloads.

pub(crate) mod arrivals;
pub(crate) mod lengths;
pub(crate) mod prompts;
pub(crate) mod traces;
pub(crate) mod workload;
