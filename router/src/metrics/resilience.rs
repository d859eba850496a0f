//! Failures of engines, and the router's reactions.

use super::legs::Leg;
use super::registry::{Counter, Family, Registry, families};

families! {
    /// Looked up at each scrape.
    pub(crate) gauge STANDINGS("baton_router_engine_standing", ["engine", "leg", "standing"]):
        "1 for the state of an engine: `usable`, `trial` (one request at a time), `ejected`, `unresponsive`, \
         `draining`.";
    counter RETRIES_REFUSED("baton_router_retries_refused_total", ["leg"]):
        "Retries that the retry budget did not allow.";
    counter RESUMES("baton_router_resumes_total", ["result"]):
        "Streams whose decode engine failed during the response: `resumed` by another engine, `failed` (no engine \
         available), `not_allowed` (by the request, or by the part already sent).";
    counter WRONG_MODEL("baton_router_wrong_model_total", ["leg"]):
        "Responses of engines that do not serve their configured model.";
}

/// The result for a stream whose decode engine failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResumeResult {
    /// Another engine continued it.
    Resumed,
    /// No engine was available.
    Failed,
    /// The request, or the part already sent, does not permit it.
    NotAllowed,
}

/// Handles, created once.
pub(crate) struct ResilienceMetrics {
    refused: [Counter; 2],
    resumes: [Counter; 3],
    wrong_model: [Counter; 2],
}

impl ResilienceMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let both = |family: &'static Family| Leg::BOTH.map(|leg| registry.counter(family, &[leg.label()]));
        Self {
            refused: both(&RETRIES_REFUSED),
            resumes: ["resumed", "failed", "not_allowed"].map(|result| registry.counter(&RESUMES, &[result])),
            wrong_model: both(&WRONG_MODEL),
        }
    }

    pub(crate) fn count_refused_retry(&self, leg: Leg) {
        self.refused[leg as usize].increment(1);
    }

    pub(crate) fn count_resume(&self, result: ResumeResult) {
        self.resumes[result as usize].increment(1);
    }

    pub(crate) fn count_wrong_model(&self, leg: Leg) {
        self.wrong_model[leg as usize].increment(1);
    }
}
