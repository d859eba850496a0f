//! The plan of a run: its options, and the phases in which requests are cancelled.

pub(crate) mod options;
pub(crate) mod phase;
pub(crate) mod vanish;
