//! A request's life: routing, waiting, failures, continuation, time.

pub(crate) mod admission;
pub(crate) mod early;
pub(crate) mod endpoints;
pub(crate) mod failures;
pub(crate) mod life;
pub(crate) mod load;
pub(crate) mod main_path;
pub(crate) mod policies;
pub(crate) mod restarts;
pub(crate) mod resume;
pub(crate) mod stock;
pub(crate) mod time;
pub(crate) mod whole;
