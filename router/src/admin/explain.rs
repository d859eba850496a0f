//! Accounts as JSON.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use crate::metrics::routing::Why;
use crate::routing::disaggregation::Facts;
use crate::routing::explain::{Account, Ring, Step};

/// Requests that one list tells.
const LISTED: usize = 100;

/// What is known of the requests of that name, the latest first; `None` when nothing is.
pub(crate) fn page(ring: &Ring, id: &str) -> Option<Value> {
    let found = ring.named(id);
    if found.is_empty() {
        return None;
    }
    Some(json!({"requests": found.iter().map(|account| account.json()).collect::<Vec<_>>()}))
}

/// Why nothing is known of a name, and where to look.
pub(crate) fn unknown(ring: &Ring) -> String {
    match ring.most.load(Ordering::Relaxed) {
        0 => "no requests are kept: `explain.requests` is 0".to_owned(),
        most => format!(
            "no request with this id: this router keeps the latest {most} (`explain.requests`); /explain, or `baton explain` \
             without an id, lists the latest {}",
            LISTED.min(most)
        ),
    }
}

/// How remembered requests ended, and how long ago: those of `ids` that are over.
pub(crate) fn over<'a>(ring: &Ring, ids: &HashSet<&'a str>) -> HashMap<&'a str, (&'static str, Duration)> {
    let mut found = HashMap::new();
    if ids.is_empty() {
        return found;
    }
    for account in ring.lock().iter() {
        let Some(id) = ids.get(account.id.as_str()) else { continue };
        if let Some(over) = &account.told().over {
            let ago = account.begun.elapsed().saturating_sub(over.after);
            found.insert(*id, (over.outcome.map_or("ended", |outcome| outcome.label()), ago));
        }
    }
    found
}

/// The latest requests in a line each.
pub(crate) fn recent(ring: &Ring) -> Value {
    let line = |account: &Account| {
        let mut head = account.head();
        head.insert("steps".into(), json!(account.told().steps.len()));
        Value::Object(head)
    };
    json!({"requests": ring.latest(LISTED).iter().map(|account| line(account)).collect::<Vec<_>>()})
}

impl Account {
    fn head(&self) -> Map<String, Value> {
        let told = self.told();
        let since_epoch = self.began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let client_id = self.client_id.as_ref().and_then(|value| value.to_str().ok());
        let over = told.over.as_ref();
        let mut head = Map::new();
        head.insert("id".into(), json!(self.id.as_str()));
        head.insert("client_id".into(), json!(client_id));
        head.insert("path".into(), json!(self.path));
        head.insert("model".into(), json!(self.model));
        head.insert("began_ms".into(), json!(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)));
        head.insert("began_us".into(), json!(micros(since_epoch)));
        head.insert("took_us".into(), json!(over.map(|over| micros(over.after))));
        head.insert("status".into(), json!(over.map(|over| over.status)));
        head.insert("outcome".into(), json!(over.and_then(|over| over.outcome).map(|o| o.label())));
        head
    }

    pub(crate) fn json(&self) -> Value {
        let mut account = self.head();
        let told = self.told();
        let steps = told.steps.iter().map(|(at, step)| step.json(*at)).collect::<Vec<_>>();
        account.insert("steps".into(), Value::Array(steps));
        account.insert("steps_left_out".into(), json!(told.left_out));
        Value::Object(account)
    }
}

impl Step {
    fn json(&self, at: Duration) -> Value {
        let mut step = match self {
            Self::Chose(leg, sight) => {
                let mut step = sight.json();
                step["what"] = json!("choose");
                step["leg"] = json!(leg.label());
                step
            }
            Self::Disaggregated(why, facts) => disaggregated(*why, facts),
            Self::Asked(leg, engine) => json!({"what": "ask", "leg": leg.label(), "engine": &**engine}),
            Self::Came(leg, engine, came) => {
                json!({"what": "answer", "leg": leg.label(), "engine": &**engine, "came": came})
            }
            Self::Went(how) => json!({"what": "go_on", "how": how}),
        };
        step["at_us"] = json!(micros(at));
        step
    }
}

pub(crate) fn disaggregated(why: Why, facts: &Facts) -> Value {
    json!({
        "what": "disaggregate", "decision": why.decision(), "reason": why.label(),
        "prompt_tokens": facts.prompt_tokens, "cached_share": facts.cached_share,
        "prefill_in_flight": facts.prefill_in_flight,
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
