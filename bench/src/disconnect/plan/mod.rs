//! What a run is to do: its options, and the phases in which requests are cancelled.

pub(crate) mod options;
pub(crate) mod phase;
