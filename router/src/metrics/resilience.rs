//! What the router counts of engines that fail, and of what it does about it.
//!
//! | metric | labels | unit |
//! |---|---|---|
//! | `baton_router_engines` | `leg`, `standing` | engines of all pools, by what they may be given |
//! | `baton_router_retries_refused_total` | `leg` | attempts that the budget of second attempts did not allow |
//! | `baton_router_releases_via_total` | `via` | leases given up, by the way in which the engine was told |
//! | `baton_router_resumes_total` | `result` | streams whose decode engine died in the middle |
//! | `baton_router_wrong_model_total` | `leg` | engines that do not serve the model they are configured for |

use metrics::{Counter, Gauge, Label, counter, gauge};

use super::Leg;
use crate::health::Standing;

/// How an engine was told that nobody will read what it lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// `POST /kv/release`.
    Release,
    /// `POST /abort_requests`, where it gave no handle.
    Abort,
    /// A decode request that had to be refused.
    RefusedDecode,
    /// Not at all: the lease runs out.
    Lease,
}

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
pub(crate) struct Resilience {
    standings: Vec<Gauge>,
    refused: [Counter; 2],
    via: [Counter; 4],
    resumes: [Counter; 3],
    wrong_model: [Counter; 2],
}

impl Resilience {
    /// Registers with the local recorder.
    pub(super) fn register() -> Self {
        let legs = [Leg::Prefill, Leg::Decode];
        let labels = |leg: Leg, standing: Standing| {
            vec![Label::new("leg", leg.label()), Label::new("standing", standing.label())]
        };
        let standing =
            |leg| Standing::ALL.map(|standing| gauge!("baton_router_engines", labels(leg, standing)));
        let one = |name: &'static str, value: &'static str| vec![Label::new(name, value)];
        Self {
            standings: legs.iter().flat_map(|leg| standing(*leg)).collect(),
            refused: legs.map(|l| counter!("baton_router_retries_refused_total", one("leg", l.label()))),
            via: ["release", "abort", "refused_decode", "lease"]
                .map(|via| counter!("baton_router_releases_via_total", one("via", via))),
            resumes: ["resumed", "failed", "not_allowed"]
                .map(|result| counter!("baton_router_resumes_total", one("result", result))),
            wrong_model: legs.map(|l| counter!("baton_router_wrong_model_total", one("leg", l.label()))),
        }
    }

    pub(crate) fn standing(&self, leg: Leg, standing: Standing, engines: u32) {
        self.standings[leg as usize * Standing::ALL.len() + standing as usize].set(f64::from(engines));
    }

    pub(crate) fn retry_refused(&self, leg: Leg) {
        self.refused[leg as usize].increment(1);
    }

    pub(crate) fn released(&self, via: Via) {
        self.via[via as usize].increment(1);
    }

    pub(crate) fn resume(&self, result: Resume) {
        self.resumes[result as usize].increment(1);
    }

    pub(crate) fn wrong_model(&self, leg: Leg) {
        self.wrong_model[leg as usize].increment(1);
    }
}
