//! The record of a run in progress: raw events, engine states, timelines.

pub(crate) mod in_flight;
pub(crate) mod rate;
pub(crate) mod raw;
pub(crate) mod recorder;
pub(crate) mod retries;
pub(crate) mod timeline;
pub(crate) mod watch;
