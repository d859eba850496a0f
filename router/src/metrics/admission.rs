//! What is counted of those who wait.
//!
//! | metric | labels | unit |
//! |---|---|---|
//! | `baton_router_queue_requests` | `priority` | requests that wait for a decode engine |
//! | `baton_router_queue_outcomes_total` | `outcome` | requests that waited or were refused; one that found room at once is not among them |
//! | `baton_router_queue_seconds` | | how long those waited who waited |
//! | `baton_router_body_bytes` | | bytes of clients' bodies that are held |

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};

use crate::config::Priority;

/// How a wait ended, or why it did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// An engine had room.
    Dispatched,
    /// No place in the queue.
    RejectedFull,
    /// Its deadline would have passed.
    RejectedLate,
    /// Its deadline passed.
    Expired,
    /// The client left, or the router stopped.
    ClientGone,
    /// No engine could serve it.
    NoCapacity,
}

impl Outcome {
    const ALL: [Self; 6] = [
        Self::Dispatched,
        Self::RejectedFull,
        Self::RejectedLate,
        Self::Expired,
        Self::ClientGone,
        Self::NoCapacity,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Dispatched => "dispatched",
            Self::RejectedFull => "rejected_full",
            Self::RejectedLate => "rejected_late",
            Self::Expired => "expired",
            Self::ClientGone => "client_gone",
            Self::NoCapacity => "no_capacity",
        }
    }
}

/// Handles, made once.
pub(crate) struct AdmissionMetrics {
    waiting: [Gauge; 3],
    outcomes: [Counter; 6],
    seconds: Histogram,
    pub body_bytes: Gauge,
}

impl AdmissionMetrics {
    /// Within the recorder of the router.
    pub(crate) fn register() -> Self {
        let with = |name: &'static str, value: &'static str| vec![Label::new(name, value)];
        Self {
            waiting: Priority::ALL
                .map(|p| gauge!("baton_router_queue_requests", with("priority", p.label()))),
            outcomes: Outcome::ALL
                .map(|o| counter!("baton_router_queue_outcomes_total", with("outcome", o.label()))),
            seconds: histogram!("baton_router_queue_seconds"),
            body_bytes: gauge!("baton_router_body_bytes"),
        }
    }

    pub(crate) fn waiting(&self, priority: Priority) -> &Gauge {
        &self.waiting[priority as usize]
    }

    pub(crate) fn outcome(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].increment(1);
    }

    /// A request left the queue after this long.
    pub(crate) fn left(&self, outcome: Outcome, after: Duration) {
        self.outcome(outcome);
        self.seconds.record(after);
    }
}
