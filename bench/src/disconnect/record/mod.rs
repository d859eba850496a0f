//! What is recorded while a run is in progress: raw events, engine states, timelines.

pub(crate) mod flight;
pub(crate) mod raw;
pub(crate) mod recorder;
pub(crate) mod retries;
pub(crate) mod timeline;
pub(crate) mod watch;
