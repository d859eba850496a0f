//! The refusals of a decode engine, and the release of their leases.

pub(crate) mod full;
pub(crate) mod refusals;
pub(crate) mod rejections;
pub(crate) mod stale;
