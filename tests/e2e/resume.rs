//! A decode engine dies, or becomes silent, during a stream, and another engine continues. The client gets one
//! response: the text of an undisturbed run, one request id, one end, and the usage of the whole.

use serde_json::{Value, json};

use crate::harness::{Cluster, GenerateRequest, PATIENCE, Stream};

/// Slow tokens, so that a test can stop an engine during a response.
const SLOW: &str = "--pace-ms 25";

/// A client's view of one stream.
#[derive(Debug, Default)]
struct StreamContent {
    text: String,
    names: Vec<String>,
    objects: Vec<String>,
    finishes: Vec<String>,
    usages: Vec<Value>,
    dones: usize,
    events: usize,
}

impl StreamContent {
    /// Reads up to this many events.
    fn read(&mut self, stream: &mut Stream, most: usize) {
        for event in std::iter::from_fn(|| stream.event()).take(most) {
            assert_eq!(self.dones, 0, "nothing comes after the end");
            self.events += 1;
            if event == "[DONE]" {
                self.dones += 1;
                continue;
            }
            let frame: Value = serde_json::from_str(&event).expect("JSON");
            assert!(frame["error"].is_null(), "{frame}");
            assert!(!event.contains("token_ids"), "what the router asked for is not the client's: {event}");
            for (list, field) in [(&mut self.names, "id"), (&mut self.objects, "object")] {
                let value = frame[field].as_str().expect("a text").to_owned();
                if list.last() != Some(&value) {
                    list.push(value);
                }
            }
            if !frame["usage"].is_null() {
                self.usages.push(frame["usage"].clone());
            }
            let choice = &frame["choices"][0];
            let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
            self.text += text.unwrap_or_default();
            self.finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
    }

    fn whole(cluster: &Cluster, ask: &GenerateRequest) -> Self {
        let mut seen = Self::default();
        seen.read(&mut cluster.send(ask).stream(), usize::MAX);
        assert_eq!((seen.dones, seen.usages.len(), seen.finishes.len()), (1, 1, 1), "{seen:?}");
        seen
    }
}

/// The fault of the streaming engine.
#[derive(Clone, Copy, PartialEq)]
enum EngineFault {
    Dies,
    FallsSilent,
}

/// Injects the fault into the streaming engine after this many events, and compares.
fn goes_on(ask: &GenerateRequest, after: usize, fate: EngineFault) {
    let usage = json!({"include_usage": true});
    let ask = ask.clone().streamed().with("stream_options", usage);
    let patience = json!({"stream_silence_ms": 2000, "settle_ms": 500});
    let mut cluster = Cluster::new().decode(SLOW).decode(SLOW).resume().router("timeouts", patience).start();
    let reference = StreamContent::whole(&cluster, &ask);
    cluster.settled(PATIENCE);
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        assert_eq!(engine.send("POST", "/reset_prefix_cache", &json!({})).reply().status, 200);
    }

    let mut seen = StreamContent::default();
    let mut stream = cluster.send(&ask).stream();
    seen.read(&mut stream, after);
    assert_eq!((seen.events, seen.finishes.len()), (after, 0), "it is in the middle: {seen:?}");
    let at = cluster.decode.iter().position(|engine| engine.snapshot().running == 1).expect("one streams");
    match fate {
        EngineFault::Dies => cluster.decode[at].kill(),
        EngineFault::FallsSilent => cluster.decode[at].pause(),
    }
    seen.read(&mut stream, usize::MAX);

    assert_eq!(seen.text, reference.text);
    assert_eq!(seen.dones, 1);
    assert_eq!(seen.finishes, reference.finishes);
    assert_eq!(seen.objects, reference.objects);
    assert_eq!(seen.names.len(), 1, "one answer has one name: {:?}", seen.names);
    let counted = |usages: &[Value]| -> Vec<Value> {
        let fields = ["prompt_tokens", "completion_tokens", "total_tokens"];
        usages.iter().map(|usage| fields.iter().map(|field| usage[field].clone()).collect()).collect()
    };
    assert_eq!(counted(&seen.usages), counted(&reference.usages));
    assert_eq!(cluster.router_metric("baton_router_resumes_total", "result=\"resumed\""), 1.0);
    assert_eq!(cluster.router_metric("baton_router_resumes_total", ""), 1.0);
    if fate == EngineFault::FallsSilent {
        cluster.decode[at].go_on();
    }
    cluster.settled(PATIENCE);
}

#[test]
fn a_completion_is_resumed_after_its_engine_is_killed() {
    for after in [2, 40] {
        goes_on(&GenerateRequest::fresh(150).tokens(80), after, EngineFault::Dies);
    }
}

#[test]
fn a_chat_is_resumed_after_its_engine_is_killed() {
    for after in [1, 30] {
        goes_on(&GenerateRequest::recall(12).tokens(80), after, EngineFault::Dies);
    }
}

#[test]
fn a_completion_is_resumed_after_its_engine_is_stopped() {
    goes_on(&GenerateRequest::fresh(150).tokens(80), 10, EngineFault::FallsSilent);
}
