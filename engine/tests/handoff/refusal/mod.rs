//! What a decode engine refuses, and what becomes of the lease.

pub(crate) mod full;
pub(crate) mod refusals;
pub(crate) mod rejections;
pub(crate) mod stale;
