//! The state for resuming a stream, and the limits on its resumes.

use bytes::Bytes;

use super::{ResumePlan, Transcript};
use crate::exchange::client_request::ClientRequest;

/// Limit on the resumes of one stream.
const RESUMES_MAX: u8 = 3;
/// Limit on consecutive resumes without a new token: the engine may have been stopped at that moment.
const IDLE_RESUMES_MAX: u8 = 1;

/// The state that another engine needs to continue a stream.
pub(crate) struct ResumeState {
    pub transcript: Transcript,
    pub request: ClientRequest,
    /// Number of resumes.
    times: u8,
    /// Number of consecutive resumes without a new token.
    idle: u8,
    /// Number of sent tokens at the last resume.
    sent: usize,
}

impl ResumeState {
    pub(crate) fn new(transcript: Transcript, request: ClientRequest) -> Self {
        Self { transcript, request, times: 0, idle: 0, sent: 0 }
    }

    pub(crate) fn rewrite_frames(&mut self, frames: &Bytes) -> Bytes {
        let passed = self.transcript.rewrite_frames(frames);
        if !self.transcript.needs_request() {
            self.request.drop_body();
        }
        passed
    }

    /// Plans the next resume. The number of resumes is limited, and each must follow progress: a stream that makes
    /// engines fail reaches no further engine.
    pub(crate) fn plan_resume(&mut self) -> ResumePlan {
        let plan = self.transcript.plan_resume();
        if !matches!(plan, ResumePlan::Restart | ResumePlan::Continue(_)) {
            return plan;
        }
        let sent = self.transcript.tokens.sent.len();
        let idle = if self.times > 0 && sent == self.sent { self.idle + 1 } else { 0 };
        if self.times == RESUMES_MAX || idle > IDLE_RESUMES_MAX {
            return ResumePlan::Impossible;
        }
        (self.times, self.idle, self.sent) = (self.times + 1, idle, sent);
        plan
    }
}
