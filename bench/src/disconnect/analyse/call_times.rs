//! Times of one call, as its client measured them.

use crate::disconnect::record::raw::CallRecord;

/// Time from the due time of a streamed call to its first token, ms.
pub(crate) fn ttft(call: &CallRecord) -> Option<f64> {
    let first = call.began_us + call.tokens_us.first()?;
    call.stream.then_some(first.saturating_sub(call.due_us) as f64 / 1e3)
}

/// Times between consecutive events with text, ms.
pub(crate) fn gaps(call: &CallRecord) -> impl Iterator<Item = f64> {
    call.tokens_us.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64 / 1e3)
}

/// The share of gaps that are zero: their events arrived in one read of the socket.
pub(crate) fn within_one_read(gaps: &[f64]) -> f64 {
    gaps.iter().filter(|gap| **gap <= 0.0).count() as f64 / gaps.len().max(1) as f64
}

/// Time from the first event with text to the last, per token after the first, ms; for streams of at least two tokens.
pub(crate) fn tpot(call: &CallRecord) -> Option<f64> {
    let (first, last) = (call.tokens_us.first()?, call.tokens_us.last()?);
    // One event may have several tokens.
    let tokens = (call.tokens_us.len() as u64).max(u64::from(call.generated));
    (call.stream && tokens > 1).then(|| last.saturating_sub(*first) as f64 / 1e3 / (tokens - 1) as f64)
}
