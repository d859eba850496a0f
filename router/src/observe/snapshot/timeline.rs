//! One request from its arrival to the release of its last block: the router's steps and every engine's events, in the
//! order of time.
//!
//! Engines on other machines have other clocks. An engine's response contains its time. If that time lies outside the
//! interval of the call, the engine's events are moved by the difference.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::message::request_id::bare_id;

/// Limit on the moments of one request; later ones are cut off.
const MOMENTS_MAX: usize = 2_000;

/// Tolerance for an engine's clock beyond half the round trip; within it events are not moved.
const CLOCKS_AGREE_US: i64 = 2_000;

/// The source of a router's steps.
const ROUTER: &str = "router";

/// The course of one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// The router's id of the request.
    pub request_id: String,
    /// The client's own id of the request.
    pub client_id: Option<String>,
    /// The model's name.
    pub model: Option<String>,
    /// Its arrival, in microseconds since the Unix epoch; if no router knows the request, the first engine's first
    /// event.
    pub began_us: i64,
    /// The status of its response.
    pub status: Option<u64>,
    /// Its outcome.
    pub outcome: Option<String>,
    /// Microseconds from its arrival to its end.
    pub took_us: Option<u64>,
    /// The moments, in order.
    pub moments: Vec<TimelineEntry>,
    /// The engines that could not be read, and the corrected clocks.
    pub notes: Vec<String>,
}

/// One step or event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimelineEntry {
    /// Microseconds since the request's arrival; negative if clocks disagree.
    pub at_us: i64,
    /// `router`, or the engine's address.
    pub who: String,
    /// The step's or event's name.
    pub kind: String,
    /// Further details, as text.
    pub text: String,
}

/// The content of an engine's event log.
#[derive(Clone, Debug, Default)]
pub struct EngineEvents {
    /// `HOST:PORT`.
    pub engine: String,
    /// Events of this request or of any.
    pub events: Vec<Value>,
    /// How far its clock is ahead of the reader's; 0 if the difference is within the duration of the call.
    pub ahead_us: i64,
    /// Why there are no events.
    pub error: Option<String>,
}

impl EngineEvents {
    /// How far an engine's clock is ahead, if its response to a call between `asked_us` and `answered_us` contains
    /// `now_us`.
    #[must_use]
    pub fn ahead(now_us: u64, asked_us: u64, answered_us: u64) -> i64 {
        let (now, asked, answered) = (signed(now_us), signed(asked_us), signed(answered_us));
        let ahead = now - (asked + (answered - asked) / 2);
        let tolerance = (answered - asked) / 2 + CLOCKS_AGREE_US;
        if ahead.abs() <= tolerance { 0 } else { ahead }
    }
}

fn signed(us: u64) -> i64 {
    i64::try_from(us).unwrap_or(i64::MAX)
}

/// Whether an event belongs to the request with this id.
#[must_use]
pub fn concerns(event: &Value, id: &str) -> bool {
    event["request_id"].as_str().is_some_and(|name| bare_id(name) == bare_id(id))
}

impl Timeline {
    /// Whether it contains a router's steps, and not only engines' events.
    #[must_use]
    pub fn has_router_steps(&self) -> bool {
        self.moments.iter().any(|moment| moment.who == ROUTER)
    }

    /// Joins a router's explanation of a request (one of `GET /explain/ID`) and the engines' events.
    #[must_use]
    pub fn join(id: &str, explanation: Option<&Value>, engines: &[EngineEvents]) -> Self {
        let null = Value::Null;
        let explanation = explanation.unwrap_or(&null);
        let text = |name: &str| explanation[name].as_str().map(str::to_owned);
        let mut line = Self {
            request_id: text("id").unwrap_or_else(|| bare_id(id).to_owned()),
            client_id: text("client_id"),
            model: text("model"),
            status: explanation["status"].as_u64(),
            outcome: text("outcome"),
            took_us: explanation["took_us"].as_u64(),
            ..Self::default()
        };
        let mut events = Vec::new();
        for engine in engines {
            if let Some(error) = &engine.error {
                line.notes.push(format!("{}: {error}", engine.engine));
            }
            if engine.ahead_us != 0 {
                let ahead = engine.ahead_us as f64 / 1e3;
                line.notes.push(format!("{}: clock differs by {ahead:+.1} ms; corrected", engine.engine));
            }
            for event in engine.events.iter().filter(|event| concerns(event, &line.request_id)) {
                let Some(at) = event["at_us"].as_u64() else { continue };
                events.push((signed(at) - engine.ahead_us, engine.engine.as_str(), event));
            }
        }
        let began = explanation["began_us"].as_u64().map(signed);
        line.began_us = began.or(events.iter().map(|(at, ..)| *at).min()).unwrap_or(0);
        if began.is_some() {
            line.moments.push(moment(0, ROUTER, "arrived", String::new()));
        }
        for step in explanation["steps"].as_array().into_iter().flatten() {
            let (kind, text) = step_text(step);
            line.moments.push(moment(signed(step["at_us"].as_u64().unwrap_or(0)), ROUTER, kind, text));
        }
        if let Some(took) = line.took_us {
            let status = line.status.map_or(String::new(), |status| status.to_string());
            let text = format!("{status} {}", line.outcome.as_deref().unwrap_or("")).replace('_', " ");
            line.moments.push(moment(signed(took), ROUTER, "over", text.trim().to_owned()));
        }
        if let Some(left_out @ 1..) = explanation["steps_left_out"].as_u64() {
            line.notes.push(format!("router: {left_out} more steps are not kept"));
        }
        for (at, engine, event) in events {
            let kind = event["kind"].as_str().unwrap_or("?");
            line.moments.push(moment(at - line.began_us, engine, kind, event_text(event)));
        }
        line.moments.sort_by_key(|moment| moment.at_us);
        if line.moments.len() > MOMENTS_MAX {
            line.notes.push(format!("{} later events are not shown", line.moments.len() - MOMENTS_MAX));
            line.moments.truncate(MOMENTS_MAX);
        }
        line
    }
}

fn moment(at_us: i64, who: &str, kind: &str, text: String) -> TimelineEntry {
    TimelineEntry { at_us, who: who.to_owned(), kind: kind.to_owned(), text }
}

/// The name and the text of a router's step.
fn step_text(step: &Value) -> (&'static str, String) {
    let text = |name: &str| step[name].as_str().unwrap_or("-");
    let (leg, engine) = (text("leg"), text("engine"));
    match text("what") {
        "choose" => {
            let chosen = step["chosen"].as_str().unwrap_or("no engine");
            ("choose", format!("{leg}: {chosen} ({}: {})", text("policy"), text("reason").replace('_', " ")))
        }
        "disaggregate" => {
            let how = match text("decision") {
                "prefill_decode" => "another engine prefills",
                _ => "the decode engine computes everything",
            };
            ("disaggregate", format!("{how} ({})", text("reason").replace('_', " ")))
        }
        "ask" => ("ask", format!("{leg}: {engine}")),
        "answer" => ("answer", format!("{leg}: {engine} {}", text("came"))),
        _ => ("go on", text("how").to_owned()),
    }
}

/// The text of an engine's event; of an unknown kind, its fields.
fn event_text(event: &Value) -> String {
    const KNOWN: [&str; 8] = ["seq", "at_us", "rank", "request_id", "tag", "index", "kind", "now_us"];
    let number = |name: &str| event[name].as_u64().unwrap_or(0);
    let text = |name: &str| event[name].as_str().unwrap_or("-").replace('_', " ");
    let blocks = |count: u64| if count == 1 { "1 block".to_owned() } else { format!("{count} blocks") };
    let details = match event["kind"].as_str().unwrap_or_default() {
        "queued" => format!("{}, {} prompt tokens", text("leg"), number("prompt")),
        "started" if number("cached") > 0 => format!("{} tokens cached", number("cached")),
        "started" | "first_token" => String::new(),
        "computed" => format!("{} tokens of the prompt", number("tokens")),
        "fetching" | "freed" => blocks(number("blocks")),
        "fetched" | "replied" => text("result"),
        "refused" => text("reason"),
        "abort" => format!("by {}", text("how")),
        "lease_opened" if event["growing"].as_bool() == Some(true) => {
            format!("{}, while it computes", blocks(number("blocks")))
        }
        "lease_opened" => {
            let left = event["left_ms"].as_u64().map(|left| format!(", for {:.1} s", left as f64 / 1e3));
            format!("{}{}", blocks(number("blocks")), left.unwrap_or_default())
        }
        "lease_ended" => format!(
            "{} after {:.1} ms, {} of {} readers, {}",
            text("reason"),
            number("held_us") as f64 / 1e3,
            number("readers_done"),
            number("readers_expected"),
            blocks(number("blocks")),
        ),
        "ended" => {
            let counts = [("generated", number("generated")), ("computed", number("computed"))];
            let counts: String = counts.iter().map(|(what, n)| format!(", {n} tokens {what}")).collect();
            format!("{}{counts}", text("outcome"))
        }
        _ => {
            let rest = event.as_object().into_iter().flatten();
            let rest = rest.filter(|(name, _)| !KNOWN.contains(&name.as_str())).take(8);
            rest.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
        }
    };
    match number("index") {
        0 => details,
        index => format!("choice {index}: {details}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(at_us: u64, id: &str, kind: &str) -> Value {
        json!({"seq": 1, "at_us": at_us, "rank": 0, "request_id": id, "tag": null, "index": 0, "kind": kind,
            "blocks": 3, "left_ms": 30_000, "prompt": 40, "leg": "prefill", "how": "verb"})
    }

    #[test]
    fn steps_and_events_are_sorted_by_time() {
        let explanation = json!({"id": "a", "client_id": "mine", "model": "m", "began_us": 1_000_000, "took_us": 9_000,
            "status": 499, "outcome": "client_gone", "steps_left_out": 0, "steps": [
                {"what": "choose", "at_us": 100, "leg": "decode", "chosen": "d:1", "policy": "random", "reason": "drawn"},
                {"what": "ask", "at_us": 200, "leg": "prefill", "engine": "p:1"}]});
        let p = EngineEvents {
            engine: "p:1".to_owned(),
            events: vec![
                event(1_000_400, "a", "queued"),
                event(1_000_500, "b", "queued"),
                event(1_012_000, "a-2", "freed"),
            ],
            ..EngineEvents::default()
        };
        let line = Timeline::join("mine", Some(&explanation), &[p]);
        let moments: Vec<_> =
            line.moments.iter().map(|m| (m.at_us, m.who.as_str(), m.kind.as_str())).collect();
        assert_eq!(
            moments,
            [
                (0, "router", "arrived"),
                (100, "router", "choose"),
                (200, "router", "ask"),
                (400, "p:1", "queued"),
                (9_000, "router", "over"),
                (12_000, "p:1", "freed"),
            ]
        );
        assert!(line.has_router_steps());
        assert_eq!(line.moments[3].text, "prefill, 40 prompt tokens");
        assert_eq!(line.moments[4].text, "499 client gone");
        assert_eq!(line.moments[5].text, "3 blocks");
    }

    #[test]
    fn engines_alone_make_a_timeline_and_a_clock_that_is_wrong_is_put_right() {
        assert_eq!(EngineEvents::ahead(1_000, 900, 1_300), 0, "within the duration of the call");
        let ahead = EngineEvents::ahead(5_001_000, 900, 1_100);
        assert_eq!(ahead, 5_000_000);
        let p = EngineEvents {
            engine: "p:1".to_owned(),
            events: vec![event(5_001_000, "a", "lease_opened")],
            ahead_us: ahead,
            error: None,
        };
        let d = EngineEvents {
            engine: "d:1".to_owned(),
            events: vec![event(1_500, "a", "odd")],
            ..EngineEvents::default()
        };
        let gone = EngineEvents {
            engine: "x:1".to_owned(),
            error: Some("no answer".to_owned()),
            ..EngineEvents::default()
        };
        let line = Timeline::join("a", None, &[p, d, gone]);
        assert!(!line.has_router_steps());
        assert_eq!((line.began_us, line.moments[0].at_us, line.moments[1].at_us), (1_000, 0, 500));
        assert_eq!(line.moments[0].text, "3 blocks, for 30.0 s");
        assert!(line.moments[1].text.contains("blocks 3"), "an unknown event is shown with its fields");
        assert_eq!(line.notes.len(), 2);
    }
}
