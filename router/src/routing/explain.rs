//! Records why a request went to its engines: the decisions, their inputs and their results. The router keeps the
//! latest requests for `GET /explain/{id}` and `baton explain`.
//!
//! A request's [`Explanation`] enters the ring with its first decision, so it is available while the request hangs. It
//! contains names of engines, no engines, and nothing of the prompt. All its parts are bounded. Most explanations are
//! never read, so events are kept as they are, and become texts when one is.

mod decision;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use baton_connector::exchange::{Attempt, Event, Failure, Outcome, SettlementCause};
use baton_connector::{RequestId, Time};
use hyper::header::HeaderValue;

use crate::engines::http::Engine;
use crate::message::request_id::bare_id;
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::disaggregation::DisaggregationInputs;
pub(crate) use decision::Decision;

/// Limit on the steps of one request: more than two rounds of the most attempts that a configuration allows, with their
/// decisions.
const STEPS_MAX: usize = 160;

/// Steps of a request that uses both legs without a failure.
const STEPS_USUAL: usize = 9;

/// Attempts of such a request.
const ATTEMPTS_USUAL: usize = 2;

/// The explanations of the latest requests.
pub(crate) struct ExplanationHistory {
    entries: Mutex<VecDeque<Arc<Explanation>>>,
    pub(crate) most: AtomicUsize,
}

/// The decisions about one request.
pub(crate) struct Explanation {
    /// The router's id of the request.
    pub(crate) id: RequestId,
    /// The client's own id of the request.
    pub(crate) client_id: Option<HeaderValue>,
    /// The path of the requested endpoint.
    pub(crate) path: &'static str,
    pub(crate) model: String,
    pub(crate) began: SystemTime,
    pub(crate) begun: Time,
    steps: Mutex<ExplanationSteps>,
}

#[derive(Default)]
pub(crate) struct ExplanationSteps {
    pub(crate) steps: Vec<(Duration, Step)>,
    /// The names of the attempts' engines, by the attempt's number.
    names: Vec<Arc<str>>,
    pub(crate) left_out: usize,
    pub(crate) end: Option<ExplanationEnd>,
}

/// How the request ended.
pub(crate) struct ExplanationEnd {
    pub(crate) after: Duration,
    pub(crate) status: u16,
    pub(crate) outcome: Option<Outcome>,
}

/// A decision or an event.
pub(crate) enum Step {
    Choice(Leg, Box<Decision>),
    Disaggregation(DisaggregationReason, DisaggregationInputs),
    /// An event of the exchange that [`EventText::of`] describes.
    Event(Event),
}

/// An event of the exchange, as an explanation describes it.
pub(crate) enum EventText {
    /// An attempt was sent to an engine.
    AttemptSent(Leg, Attempt),
    /// The result of an attempt.
    AttemptResult(Leg, Attempt, &'static str),
    /// The exchange continued without an engine.
    Transition(&'static str),
}

impl ExplanationHistory {
    /// Keeps the latest `most` requests; 0: none.
    pub(crate) fn new(most: usize) -> Self {
        Self { entries: Mutex::default(), most: AtomicUsize::new(most) }
    }

    /// Changes the limit.
    pub(crate) fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
        let mut entries = self.lock();
        while entries.len() > most {
            entries.pop_front();
        }
        entries.shrink_to(most);
    }

    /// Adds an explanation for a request; `None` when the limit is 0.
    pub(crate) fn begin(
        &self,
        id: &RequestId,
        client_id: Option<&HeaderValue>,
        path: &'static str,
        model: &str,
        begun: Time,
    ) -> Option<Arc<Explanation>> {
        let most = self.most.load(Ordering::Relaxed);
        if most == 0 {
            return None;
        }
        let explanation = Arc::new(Explanation {
            id: id.clone(),
            client_id: client_id.cloned(),
            path,
            model: model.to_owned(),
            began: SystemTime::now(),
            begun,
            steps: Mutex::new(ExplanationSteps {
                steps: Vec::with_capacity(STEPS_USUAL),
                names: Vec::with_capacity(ATTEMPTS_USUAL),
                ..ExplanationSteps::default()
            }),
        });
        let mut entries = self.lock();
        while entries.len() > most {
            entries.pop_front();
        }
        let oldest = if entries.len() == most { entries.pop_front() } else { None };
        entries.push_back(Arc::clone(&explanation));
        drop(entries);
        // Outside the lock: deallocation takes time.
        drop(oldest);
        Some(explanation)
    }

    /// The explanations with this id (the router's, the client's, or a reply's), latest first.
    pub(crate) fn find(&self, id: &str) -> Vec<Arc<Explanation>> {
        // A prompt that is computed again has the suffix `-2` and belongs to the same request.
        let minted = bare_id(id).trim_end_matches("-2");
        let is = |explanation: &&Arc<Explanation>| {
            let clients =
                explanation.client_id.as_ref().is_some_and(|value| value.as_bytes() == id.as_bytes());
            clients || explanation.id.as_str() == id || explanation.id.as_str() == minted
        };
        self.lock().iter().rev().filter(is).cloned().collect()
    }

    pub(crate) fn latest(&self, count: usize) -> Vec<Arc<Explanation>> {
        self.lock().iter().rev().take(count).cloned().collect()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Explanation>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Explanation {
    /// Records the engine chosen for a leg, or that none could be chosen.
    pub(crate) fn record_choice(&self, leg: Leg, decision: Decision, now: Time) {
        self.record(now, Step::Choice(leg, Box::new(decision)));
    }

    pub(crate) fn record_disaggregation(
        &self,
        reason: DisaggregationReason,
        inputs: DisaggregationInputs,
        now: Time,
    ) {
        self.record(now, Step::Disaggregation(reason, inputs));
    }

    /// Records an event of the exchange; `engines` are those of its attempts, each at the same place in every call.
    pub(crate) fn record_event(&self, event: &Event, engines: &[Arc<Engine>], now: Time) {
        if EventText::of(event).is_none() {
            return;
        }
        let mut steps = self.lock_steps();
        let known = steps.names.len().min(engines.len());
        steps.names.extend(engines[known..].iter().map(|engine| engine.name()));
        steps.add(now.since(self.begun), Step::Event(*event));
    }

    /// Records the end of the request. Only the first call has an effect.
    pub(crate) fn record_end(&self, status: u16, outcome: Option<Outcome>, now: Time) {
        let mut steps = self.lock_steps();
        if steps.end.is_none() {
            steps.end = Some(ExplanationEnd { after: now.since(self.begun), status, outcome });
        }
    }

    fn record(&self, now: Time, step: Step) {
        self.lock_steps().add(now.since(self.begun), step);
    }

    pub(crate) fn lock_steps(&self) -> MutexGuard<'_, ExplanationSteps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExplanationSteps {
    fn add(&mut self, at: Duration, step: Step) {
        if self.steps.len() == STEPS_MAX {
            self.left_out += 1;
        } else {
            self.steps.push((at, step));
        }
    }

    /// The name of an attempt's engine.
    pub(crate) fn name(&self, attempt: Attempt) -> &str {
        self.names.get(usize::from(attempt.0)).map_or("?", |name| &**name)
    }
}

impl EventText {
    /// `None`: the event is no step, because the request continues from the handoff.
    pub(crate) fn of(event: &Event) -> Option<Self> {
        use Leg::{Decode, Prefill};
        let result = Self::AttemptResult;
        Some(match *event {
            Event::DecodeSent(to) => Self::AttemptSent(Decode, to),
            Event::PrefillSent(to) => Self::AttemptSent(Prefill, to),
            Event::PrefillLeased(by, _) => result(Prefill, by, "opened a lease"),
            Event::PrefillEmpty(by) => result(Prefill, by, "opened no lease"),
            Event::PrefillRefused(by) => result(Prefill, by, "refused the request"),
            Event::PrefillFailed(by, failure) => result(Prefill, by, failure_text(failure)),
            Event::DecodeAccepted(by) => result(Decode, by, "accepted"),
            Event::DecodeRefused(by) => result(Decode, by, "refused the request"),
            Event::DecodeFailed(by, failure) => result(Decode, by, failure_text(failure)),
            Event::DecodeDeclined(by) => result(Decode, by, "declined: too little of the prompt is cached"),
            Event::FirstChunk(by) => result(Decode, by, "first bytes"),
            Event::StreamEnded(by) => result(Decode, by, "complete"),
            Event::StreamBroken(by) => result(Decode, by, "failed"),
            Event::StreamCut(by) => result(Decode, by, "failed; another engine continues"),
            Event::NotAdmitted => Self::Transition("not admitted"),
            Event::NoEngine => Self::Transition("no usable engine"),
            Event::PrefillSkipped => Self::Transition("no remote prefill"),
            Event::HandoffUnusable => {
                Self::Transition("no decode engine could use the handoff; the prompt is computed again")
            }
            Event::Exhausted => Self::Transition("gave up"),
            Event::ExhaustedFor(SettlementCause::DecodeBusy) => {
                Self::Transition("gave up: the remaining engines are full")
            }
            Event::ExhaustedFor(SettlementCause::OutOfTime) => Self::Transition("gave up: out of time"),
            Event::ExhaustedFor(_) => Self::Transition("gave up: no engine left"),
            Event::ClientGone => Self::Transition("cancelled by the client"),
            Event::PrefillEnded(_) | Event::Dropped => return None,
        })
    }
}

fn failure_text(failure: Failure) -> &'static str {
    match failure {
        Failure::NotReached => "is unreachable",
        Failure::Answered => "returned an error",
        Failure::Unknown => "failed or did not respond",
        Failure::Unusable(_) => "returned an unusable response",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::explain::not_found_message;

    fn begin(ring: &ExplanationHistory, id: &str, client: Option<&'static str>) -> Option<Arc<Explanation>> {
        let client = client.map(HeaderValue::from_static);
        ring.begin(&RequestId::new(id).expect("an id"), client.as_ref(), "/v1/completions", "m", Time(0))
    }

    #[test]
    fn the_latest_explanations_are_kept_and_found_by_either_id() {
        let ring = ExplanationHistory::new(2);
        for (id, client) in [("a", None), ("b", Some("mine")), ("c", Some("mine"))] {
            assert!(begin(&ring, id, client).is_some());
        }
        let names = |id: &str| ring.find(id).iter().map(|a| a.id.to_string()).collect::<Vec<_>>();
        assert!(names("a").is_empty(), "the oldest went");
        assert_eq!(names("b"), ["b"]);
        assert_eq!(names("c-2"), ["c"], "computed again, the same request");
        assert_eq!(names("c-2-2"), ["c"], "and continued");
        assert_eq!(names("mine"), ["c", "b"], "clients may repeat themselves");
        assert_eq!(names("chatcmpl-c.0123456789abcdef"), ["c"], "as an engine's reply names it");
        assert_eq!(names("cmpl-c-2"), ["c"]);
        assert!(not_found_message(&ring).contains("keeps the latest 2 "), "{}", not_found_message(&ring));
        ring.set_most(1);
        assert!(names("b").is_empty());
        ring.set_most(0);
        assert!(not_found_message(&ring).contains("`explain.requests` is 0"), "{}", not_found_message(&ring));
        assert!(begin(&ring, "d", None).is_none() && ring.latest(9).is_empty());
    }

    #[test]
    fn an_explanation_is_bounded_and_counts_omitted_steps() {
        let ring = ExplanationHistory::new(1);
        let explanation = begin(&ring, "a", None).expect("it is kept");
        for _ in 0..STEPS_MAX + 3 {
            explanation.record_event(&Event::Exhausted, &[], Time(0));
        }
        explanation.record_event(&Event::Dropped, &[], Time(0));
        let steps = explanation.lock_steps();
        assert_eq!((steps.steps.len(), steps.left_out), (STEPS_MAX, 3));
    }
}
