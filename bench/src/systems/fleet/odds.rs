//! How long the steps of a request's life take, and how often they go wrong.

/// Mean times, in microseconds: an uncached chunk at P, a wait in D's queue, a read, an answer.
pub(super) const CHUNK_US: f64 = 20_000.0;
pub(super) const QUEUE_US: f64 = 500_000.0;
pub(super) const READ_US: f64 = 50_000.0;
pub(super) const STREAM_US: f64 = 12e6;
/// A decode engine that queues a request renews its lease so often.
pub(super) const BEAT_US: u64 = 5_000_000;
/// One that has lost sight of it comes back to it only now, when its lease has expired.
pub(super) const SILENT_US: u64 = 45_000_000;
/// Of how many requests the client leaves in each phase, or the decode engine forgets to renew.
pub(super) const LEAVES_PREFILL: f64 = 0.03;
pub(super) const LEAVES_GAP: f64 = 0.02;
pub(super) const LEAVES_QUEUE: f64 = 0.02;
pub(super) const LEAVES_READ: f64 = 0.005;
pub(super) const LEAVES_STREAM: f64 = 0.05;
pub(super) const SILENT: f64 = 0.005;
/// How often a prefill's reply is on its way already when it is aborted.
pub(super) const REPLY_ON_ITS_WAY: f64 = 0.25;
/// From one answer of a client to its next request, and from a refusal, which says when to come back.
pub(super) const THINKS_US: f64 = 20_000.0;
pub(super) const COMES_BACK_US: f64 = 1e6;
