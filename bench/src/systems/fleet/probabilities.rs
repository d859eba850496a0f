//! Durations of the steps of a request, and probabilities of failures.

/// Mean times in microseconds: an uncached chunk at P, a wait in D's queue, a read, a response.
pub(super) const CHUNK_US: f64 = 20_000.0;
pub(super) const QUEUE_US: f64 = 500_000.0;
pub(super) const READ_US: f64 = 50_000.0;
pub(super) const STREAM_US: f64 = 12e6;
/// Interval of renewals by a decode engine that queues a request.
pub(super) const BEAT_US: u64 = 5_000_000;
/// A decode engine that stops renewing continues with the request after this time, when the lease has expired.
pub(super) const SILENT_US: u64 = 45_000_000;
/// Probabilities that the client disconnects in each phase, and that the decode engine stops renewing.
pub(super) const LEAVES_PREFILL: f64 = 0.03;
pub(super) const LEAVES_GAP: f64 = 0.02;
pub(super) const LEAVES_QUEUE: f64 = 0.02;
pub(super) const LEAVES_READ: f64 = 0.005;
pub(super) const LEAVES_STREAM: f64 = 0.05;
pub(super) const SILENT: f64 = 0.005;
/// Probability that the reply of an aborted prefill is already on its way.
pub(super) const REPLY_ON_ITS_WAY: f64 = 0.25;
/// Mean time from a response to the client's next request, and from a refusal to the retry.
pub(super) const THINKS_US: f64 = 20_000.0;
pub(super) const COMES_BACK_US: f64 = 1e6;
