//! One call of a client: its plan and its result.

use std::time::Instant;

use crate::disconnect::record::raw::{CallRecord, CancelPlan};
use crate::disconnect::record::timeline::Timeline;
use crate::load::{Call, CallOutcome, Moment, Streaming};

/// Maximum characters of a recorded error.
const ERROR_CHARS: usize = 200;

/// A planned call.
#[derive(Clone, Debug)]
pub(crate) struct CallPlan {
    pub(crate) segment: String,
    pub(crate) due: Instant,
    pub(crate) streaming: Streaming,
    pub(crate) leaves: Option<CancelPlan>,
    /// Requested tokens, if they differ from the usual number.
    pub(crate) max_tokens: Option<u32>,
}

/// A completed call, with the engine events known by then.
pub(crate) struct CompletedCall {
    pub(crate) record: CallRecord,
    pub(crate) call: Call,
    pub(crate) timeline: Option<Timeline>,
}

/// The record of a call.
pub(super) fn record_of(call: &Call, plan: &CallPlan, tag: String, retries: Option<String>) -> CallRecord {
    let (outcome, error) = match &call.outcome {
        CallOutcome::Done => ("done", None),
        CallOutcome::Left => ("left", None),
        CallOutcome::Refused { message, .. } => ("refused", Some(message.clone())),
        CallOutcome::Failed { message, .. } => ("failed", Some(message.clone())),
        CallOutcome::Broken { stage, why } => ("broken", Some(format!("{}: {why}", stage.as_str()))),
        CallOutcome::TimedOut { stage } => ("timed_out", Some(stage.as_str().to_owned())),
    };
    let after = |moment: Moment| moment.us().saturating_sub(call.began.us());
    CallRecord {
        segment: plan.segment.clone(),
        tag,
        leaves: plan.leaves,
        stream: plan.streaming != Streaming::Whole,
        due_us: Moment::of(plan.due).us(),
        began_us: call.began.us(),
        sent_us: call.sent.map(Moment::us),
        left_us: call.left.map(Moment::us),
        ended_us: call.ended.us(),
        tokens_us: call.tokens.iter().copied().map(after).collect(),
        outcome: outcome.into(),
        status: call.status,
        error: error.map(|error| error.chars().take(ERROR_CHARS).collect()),
        generated: call.completion_tokens(),
        max_tokens: None,
        text: call.text.clone(),
        retries,
    }
}
