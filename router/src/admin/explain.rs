//! Explanations as JSON.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use baton_connector::Time;
use serde_json::{Value, json};

use crate::metrics::routing::DisaggregationReason;
use crate::routing::disaggregation::DisaggregationInputs;
use crate::routing::explain::{EventText, Explanation, ExplanationHistory, ExplanationSteps, Step};

/// Maximum requests of one list.
const LISTED_REQUESTS_MAX: usize = 100;

/// The explanations of the requests with this id, the latest first; `None` where there are none.
pub(crate) fn find_requests(history: &ExplanationHistory, id: &str) -> Option<Value> {
    let found = history.find(id);
    if found.is_empty() {
        return None;
    }
    Some(json!({"requests": found.iter().map(|explanation| explanation.json()).collect::<Vec<_>>()}))
}

/// The error for an id without explanations, with the reason and where to look.
pub(crate) fn not_found_message(history: &ExplanationHistory) -> String {
    match history.most.load(Ordering::Relaxed) {
        0 => "no requests are kept: `explain.requests` is 0".to_owned(),
        most => format!(
            "no request with this id: this router keeps the latest {most} (`explain.requests`); /explain, or `baton explain` \
             without an id, lists the latest {}",
            LISTED_REQUESTS_MAX.min(most)
        ),
    }
}

/// Outcomes of the remembered requests of `ids` that have ended, and the time since then.
pub(crate) fn ended_requests<'a>(
    history: &ExplanationHistory,
    ids: &HashSet<&'a str>,
    now: Time,
) -> HashMap<&'a str, (&'static str, Duration)> {
    let mut found = HashMap::new();
    if ids.is_empty() {
        return found;
    }
    for explanation in history.lock().iter() {
        let Some(id) = ids.get(explanation.id.as_str()) else { continue };
        if let Some(over) = &explanation.lock_steps().end {
            let ago = now.since(explanation.begun).saturating_sub(over.after);
            found.insert(*id, (over.outcome.map_or("ended", |outcome| outcome.label()), ago));
        }
    }
    found
}

/// The latest requests, one line each.
pub(crate) fn list_recent(history: &ExplanationHistory) -> Value {
    let line = |explanation: &Explanation| {
        let mut head = explanation.head();
        head["steps"] = json!(explanation.lock_steps().steps.len());
        head
    };
    json!({"requests": history.latest(LISTED_REQUESTS_MAX).iter().map(|explanation| line(explanation)).collect::<Vec<_>>()})
}

impl Explanation {
    fn head(&self) -> Value {
        let steps = self.lock_steps();
        let since_epoch = self.began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let over = steps.end.as_ref();
        json!({
            "id": self.id.as_str(),
            "client_id": self.client_id.as_ref().and_then(|value| value.to_str().ok()),
            "path": self.path,
            "model": self.model,
            "began_ms": u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX),
            "began_us": micros(since_epoch),
            "took_us": over.map(|over| micros(over.after)),
            "status": over.map(|over| over.status),
            "outcome": over.and_then(|over| over.outcome).map(|o| o.label()),
        })
    }

    pub(crate) fn json(&self) -> Value {
        let mut explanation = self.head();
        let steps = self.lock_steps();
        explanation["steps"] = steps.steps.iter().map(|(at, step)| step.json(*at, &steps)).collect();
        explanation["steps_left_out"] = json!(steps.left_out);
        explanation
    }
}

impl Step {
    fn json(&self, at: Duration, steps: &ExplanationSteps) -> Value {
        let mut step = match self {
            Self::Choice(leg, decision) => {
                let mut step = decision.json();
                step["what"] = json!("choose");
                step["leg"] = json!(leg.label());
                step
            }
            Self::Disaggregation(why, inputs) => disaggregated(*why, inputs),
            Self::Event(event) => match EventText::of(event) {
                Some(EventText::AttemptSent(leg, to)) => {
                    json!({"what": "ask", "leg": leg.label(), "engine": steps.name(to)})
                }
                Some(EventText::AttemptResult(leg, by, came)) => {
                    json!({"what": "answer", "leg": leg.label(), "engine": steps.name(by), "came": came})
                }
                Some(EventText::Transition(how)) => json!({"what": "go_on", "how": how}),
                None => json!({"what": "go_on"}),
            },
        };
        step["at_us"] = json!(micros(at));
        step
    }
}

pub(crate) fn disaggregated(why: DisaggregationReason, inputs: &DisaggregationInputs) -> Value {
    json!({
        "what": "disaggregate", "decision": why.decision(), "reason": why.label(),
        "prompt_tokens": inputs.prompt_tokens, "cached_share": inputs.cached_share,
        "prefill_in_flight": inputs.prefill_in_flight,
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
