//! Engines that fail, and what the router does about it.

use super::legs::Leg;
use super::registry::{Counter, Family, Registry};

/// Looked up when somebody asks.
pub(crate) static STANDINGS: Family = Family::gauge(
    "baton_router_engine_standing",
    &["engine", "leg", "standing"],
    "1 for what an engine may be given: `usable`, `trial` (one request at a time), `out`, `silent`, `draining`.",
);
static RETRIES_REFUSED: Family = Family::counter(
    "baton_router_retries_refused_total",
    &["leg"],
    "Second attempts that the budget of the whole router did not allow.",
);
static RESUMES: Family = Family::counter(
    "baton_router_resumes_total",
    &["result"],
    "Streams whose decode engine died in the middle: `resumed` by another, `failed` (none could be had), \
     `not_allowed` (by the request, or by what was sent of its answer).",
);
static WRONG_MODEL: Family = Family::counter(
    "baton_router_wrong_model_total",
    &["leg"],
    "Answers of engines that do not serve the model that they are configured for.",
);

pub(super) static FAMILIES: &[&Family] = &[&STANDINGS, &RETRIES_REFUSED, &RESUMES, &WRONG_MODEL];

/// What became of a stream whose decode engine died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    /// Another engine went on.
    Resumed,
    /// None could be had.
    Failed,
    /// The request, or what was sent of its answer, does not allow it.
    NotAllowed,
}

/// The handles.
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

    pub(crate) fn retry_refused(&self, leg: Leg) {
        self.refused[leg as usize].increment(1);
    }

    pub(crate) fn resume(&self, result: Resume) {
        self.resumes[result as usize].increment(1);
    }

    pub(crate) fn wrong_model(&self, leg: Leg) {
        self.wrong_model[leg as usize].increment(1);
    }
}
