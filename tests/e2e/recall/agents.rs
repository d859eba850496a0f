//! Agents: a checkpoint that calls tools, behind router, prefill engine and decode engine.
//!
//! `engine/models/tools/train.py` checked the texts of `cases.json` with `transformers`.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, MODEL, PATIENCE};

/// Turns of an agent before a test gives up.
const TURNS_MAX: usize = 8;

/// What a client gets of a choice.
#[derive(Debug, Default, PartialEq, Eq)]
struct Message {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
    finish: String,
    /// Of the usage. The template has rendered tools, calls and results as `transformers` does.
    prompt_tokens: u64,
}

/// A call, without its id.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call {
    name: String,
    arguments: String,
}

fn cluster() -> Cluster {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/models/tools");
    let options = format!("--model {} --served-model-name {MODEL}", model.display());
    Cluster::new().prefill(&options).decode(&options).start()
}

fn cases() -> Vec<Value> {
    let cases = serde_json::from_str(include_str!("../../../engine/models/tools/cases.json"));
    let cases: Value = cases.expect("the file is JSON");
    cases.as_array().expect("a list").clone()
}

/// The request of a case.
fn request(case: &Value) -> GenerateRequest {
    let fields = case["request"].as_object().expect("the fields of a request");
    let ask = GenerateRequest::chat(fields["messages"].clone());
    fields.iter().fold(ask, |ask, (field, value)| ask.with(field, value.clone()))
}

/// The request of the case of this name.
fn request_named(name: &str) -> GenerateRequest {
    let case = cases().into_iter().find(|case| case["name"] == name);
    request(&case.unwrap_or_else(|| panic!("no case is named {name}")))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

impl Message {
    /// What `train.py` got.
    fn of_case(case: &Value) -> Self {
        let mut message = Self::default();
        message.content.push_str(text(&case["content"]));
        message.reasoning.push_str(text(&case["reasoning"]));
        for call in case["calls"].as_array().expect("a list") {
            let (name, arguments) = (text(&call["name"]), text(&call["arguments"]));
            message.calls.push(Call { name: name.to_owned(), arguments: arguments.to_owned() });
        }
        // A named function is no reason of the end, as in OpenAI's API.
        let is_named = case["request"]["tool_choice"].is_object();
        let finish = if message.calls.is_empty() || is_named { "stop" } else { "tool_calls" };
        message.finish.push_str(finish);
        message.prompt_tokens = case["prompt_tokens"].as_u64().expect("a number");
        message
    }

    fn whole(cluster: &Cluster, ask: &GenerateRequest) -> Self {
        let reply = cluster.ask(ask);
        let body = reply.json();
        assert_eq!(reply.status, 200, "{body}");
        let choice = &body["choices"][0];
        let mut message = Self::default();
        message.add(&choice["message"]);
        message.finish.push_str(text(&choice["finish_reason"]));
        message.prompt_tokens = body["usage"]["prompt_tokens"].as_u64().expect("a usage");
        message
    }

    fn streamed(cluster: &Cluster, ask: &GenerateRequest) -> Self {
        let ask = ask.clone().streamed().with("stream_options", json!({"include_usage": true}));
        let mut stream = cluster.send(&ask).stream();
        assert_eq!(stream.status, 200);
        let (mut message, mut is_done) = (Self::default(), false);
        while let Some(event) = stream.event() {
            assert!(!is_done, "an event behind the last: {event}");
            is_done = event == "[DONE]";
            if !is_done {
                let event: Value = serde_json::from_str(&event).expect("events are JSON");
                let choice = &event["choices"][0];
                message.add(&choice["delta"]);
                message.finish.push_str(text(&choice["finish_reason"]));
                message.prompt_tokens += event["usage"]["prompt_tokens"].as_u64().unwrap_or_default();
            }
        }
        assert!(is_done, "the stream has no end: {message:?}");
        message
    }

    /// Adds a message or a delta.
    fn add(&mut self, part: &Value) {
        self.content.push_str(text(&part["content"]));
        self.reasoning.push_str(text(&part["reasoning_content"]));
        for (place, call) in part["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let index = call["index"].as_u64().map_or(Ok(place), usize::try_from).expect("a small number");
            if index == self.calls.len() {
                assert!(text(&call["id"]).starts_with("call_"), "a call begins with its id: {call}");
                self.calls.push(Call::default());
            }
            let known = self.calls.get_mut(index).expect("calls come in order");
            known.name.push_str(text(&call["function"]["name"]));
            known.arguments.push_str(text(&call["function"]["arguments"]));
        }
    }
}

impl Call {
    /// The tool's answer.
    fn result(&self) -> String {
        let arguments: Value = serde_json::from_str(&self.arguments).expect("arguments are JSON");
        match self.name.as_str() {
            "get_weather" if arguments["city"] == "Paris" => "21 degrees and sunny".to_owned(),
            "add" => {
                let number = |name: &str| arguments[name].as_i64().expect("a number");
                (number("a") + number("b")).to_string()
            }
            other => panic!("the tool {other} has no answer to {arguments}"),
        }
    }
}

/// Asks, runs the tools that are called, and asks again, until the model answers. Returns the requests and the answer.
fn run_agent(cluster: &Cluster, ask: &GenerateRequest, streams: bool) -> (usize, String) {
    let mut ask = ask.clone();
    for turn in 1..=TURNS_MAX {
        let message = match streams {
            true => Message::streamed(cluster, &ask),
            false => Message::whole(cluster, &ask),
        };
        if message.calls.is_empty() {
            return (turn, message.content);
        }
        let messages = ask.body["messages"].as_array_mut().expect("a list");
        let named = |at: usize| format!("call_{turn}_{at}");
        let calls = message.calls.iter().enumerate().map(|(at, call)| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": named(at), "type": "function", "function": function})
        });
        let calls = calls.collect::<Vec<_>>();
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": calls}));
        for (at, call) in message.calls.iter().enumerate() {
            messages.push(json!({"role": "tool", "tool_call_id": named(at), "content": call.result()}));
        }
    }
    panic!("no answer after {TURNS_MAX} turns: {}", ask.body["messages"]);
}

#[test]
fn a_checkpoint_calls_tools_and_tells_their_results_behind_the_handoff() {
    let cases = cases();
    assert!(cases.len() >= 25, "{}", cases.len());
    let cluster = cluster();
    for case in &cases {
        let (ask, wanted) = (request(case), Message::of_case(case));
        assert_eq!(Message::whole(&cluster, &ask), wanted, "{}", case["name"]);
        assert_eq!(Message::streamed(&cluster, &ask), wanted, "{}, streamed", case["name"]);
    }
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched > 0.0, "blocks came from the prefill engine");
    cluster.settled(AT_ONCE);
}

#[test]
fn an_agent_goes_on_until_its_tools_have_answered() {
    let cluster = cluster();
    let both = request_named("two tools, two calls");
    let told = "The weather in Paris is 21 degrees and sunny. The sum of 12 and 30 is 42.";
    for streams in [false, true] {
        assert_eq!(run_agent(&cluster, &both, streams), (2, told.to_owned()), "streams: {streams}");
        // One call in each turn.
        let ask = both.clone().with("parallel_tool_calls", json!(false));
        assert_eq!(run_agent(&cluster, &ask, streams), (3, told.to_owned()), "streams: {streams}");
    }
    cluster.settled(AT_ONCE);
}

#[test]
fn a_client_that_leaves_within_a_call_leaves_no_block_behind() {
    let cluster = cluster();
    // The model goes on behind its calls, so that the request does not end by itself.
    let ask = request_named("one call").tokens(1800).streamed();
    for how in HangUp::BOTH {
        let mut stream = cluster.send(&ask).stream();
        while !stream.event().expect("a call comes").contains("\"arguments\"") {}
        stream.hang_up(how);
        cluster.settled(PATIENCE);
    }
}

#[test]
fn tools_that_cannot_be_called_are_refused_with_the_field() {
    let cluster = cluster();
    let ask = request_named("one call");
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let no_schema = json!([{"type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "not": {}}}}]);
    let not_json = json!([{"role": "user", "content": "Hello!"}, {"role": "assistant", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1"}}]}]);
    let refused = [
        (ask.clone().with("tool_choice", named("get_wether")), "tool_choice"),
        (ask.clone().with("tools", json!([])).with("tool_choice", json!("required")), "tool_choice"),
        (ask.clone().with("tools", json!(["get_weather"])), "tools[0]"),
        (ask.clone().with("tools", no_schema).with("tool_choice", json!("required")), "tools"),
        (ask.with("messages", not_json), "messages[1].tool_calls[0].function.arguments"),
    ];
    for (ask, param) in refused {
        let reply = cluster.ask(&ask);
        let error = &reply.json()["error"];
        assert_eq!((reply.status, text(&error["param"])), (400, param), "{error}");
        assert_eq!(error["type"], "invalid_request_error", "{error}");
        let streamed = cluster.ask(&ask.streamed());
        assert_eq!((streamed.status, &streamed.json()["error"]["param"]), (400, &json!(param)), "streamed");
    }
    cluster.settled(AT_ONCE);
}
