//! Chats with tools: reasoning, content and calls of one response, whole and streamed, from one engine and from two.
//!
//! Some tokens of the checkpoint are renamed to pieces of a response, and biases choose them in order.

use std::path::Path;

use baton_engine::model::output::{CallFormat, FormatChoice};
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::texts::checkpoint;
use crate::harness::cluster::{Cluster, Node, QWEN3, options, with};

/// The response, by token.
const SCRIPT: [(u32, &str); 3] = [
    (508, "<think>Hm.</think>\n\nLet me see.<tool_call>{\"name\": \"wea"),
    (509, "ther\", \"arguments\": {\"city\": \"Par"),
    (510, "is\"}}</tool_call>"),
];
/// The token that ends it.
pub(super) const END: u32 = 511;
/// Rows of the fixture's vocabulary.
const VOCAB: u32 = 536;

/// The fixture, whose tokens are the script's.
pub(super) fn scripted() -> TempDir {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(QWEN3);
    let text = std::fs::read_to_string(path.join("tokenizer.json")).expect("the fixture has a tokenizer");
    let mut tokens = serde_json::from_str::<Value>(&text).expect("JSON")["added_tokens"].clone();
    for token in tokens.as_array_mut().expect("tokens") {
        let named = SCRIPT.iter().chain(&[(END, "<done>")]).find(|(id, _)| token["id"] == *id);
        if let Some((_, text)) = named {
            token["content"] = json!(text);
        }
    }
    checkpoint(&[("tokenizer.json", Some(json!({"added_tokens": tokens})))])
}

/// Calls as Hermes writes them; the fixture's template has only the tags of reasoning.
pub(super) fn hermes(options: &mut EngineOptions) {
    options.output.calls = FormatChoice::Is(CallFormat::Hermes);
}

pub(super) fn engine(folder: &TempDir) -> Node {
    let mut options = options(folder.path().to_str().expect("UTF-8"), Role::Both);
    hermes(&mut options);
    Node::start(options)
}

/// A chat whose response is the script: each of its tokens is far likelier than the next one, until it has occurred.
pub(super) fn weather() -> Value {
    let mut bias: serde_json::Map<String, Value> =
        (0..VOCAB).map(|id| (id.to_string(), json!(-100))).collect();
    for (id, value) in [(508, 100), (509, 75), (510, 50), (END, 25)] {
        bias.insert(id.to_string(), json!(value));
    }
    json!({
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "temperature": 0, "logit_bias": bias, "repetition_penalty": 10, "stop_token_ids": [END], "max_tokens": 8,
    })
}

/// The choice of a stream: its deltas, merged.
#[track_caller]
fn merged(stream: &str) -> Value {
    let (mut message, mut reason) = (json!({"role": null, "content": "", "refusal": null}), Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    let add = |to: &mut Value, text: &Value| {
        let text = text.as_str().unwrap_or_default();
        *to = json!(to.as_str().unwrap_or_default().to_owned() + text);
    };
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    for data in data.filter(|data| *data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).expect("JSON");
        let choice = &chunk["choices"][0];
        for (name, value) in choice["delta"].as_object().expect("a delta") {
            match name.as_str() {
                "role" => message["role"] = value.clone(),
                "tool_calls" => {
                    for delta in value.as_array().expect("calls") {
                        let index = delta["index"].as_u64().expect("an index") as usize;
                        if index == calls.len() {
                            calls.push(json!({"id": delta["id"], "type": delta["type"], "function": {
                                "name": delta["function"]["name"], "arguments": ""}}));
                        } else {
                            assert!(delta.get("id").is_none() && delta["function"].get("name").is_none());
                        }
                        add(&mut calls[index]["function"]["arguments"], &delta["function"]["arguments"]);
                    }
                }
                name => add(&mut message[name], value),
            }
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    json!({"message": message, "finish_reason": reason})
}

/// Message and reason of a whole reply.
fn answer(reply: &Value) -> Value {
    let choice = &reply["choices"][0];
    json!({"message": choice["message"], "finish_reason": choice["finish_reason"]})
}

#[test]
fn a_call_is_returned_apart_from_reasoning_and_content_whole_and_streamed() {
    let folder = scripted();
    let engine = engine(&folder);
    let reply = engine.generate("turn", &weather()).ok();
    let id = reply["choices"][0]["message"]["tool_calls"][0]["id"].clone();
    assert!(id.as_str().is_some_and(|id| id.starts_with("call_") && id.len() == 29), "{reply}");
    let expected = json!({
        "message": {
            "role": "assistant", "content": "Let me see.", "refusal": null,
            "reasoning_content": "Hm.", "reasoning": "Hm.",
            "tool_calls": [{"id": id, "type": "function", "function": {
                "name": "weather", "arguments": "{\"city\": \"Paris\"}"}}],
        },
        "finish_reason": "tool_calls",
    });
    assert_eq!(answer(&reply), expected);
    assert_eq!(with_id(&documented(), &id), expected["message"]);
    assert_eq!(
        (&reply["usage"]["completion_tokens"], &reply["choices"][0]["stop_reason"]),
        (&json!(4), &json!(END))
    );

    let stream = engine.generate("turn", &with(&weather(), "stream", json!(true)));
    assert_eq!(merged(&stream.text), expected, "{}", stream.text);
    // The first frame announces reasoning, so that no router continues the stream as plain text.
    let first = stream.text.lines().find(|line| line.starts_with("data: ")).expect("a frame");
    assert!(first.contains("\"reasoning_content\":\"\""), "{first}");
    assert!(!stream.text.contains("tool_call>") && !stream.text.contains("think>"), "{}", stream.text);
    engine.is_clean();
}

/// The message in the reference.
fn documented() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/api.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let (_, section) = page.split_once("## Tool calls").expect("the section is there");
    let (_, block) = section.split_once("```json\n").expect("an example");
    let (example, _) = block.split_once("```").expect("its end");
    serde_json::from_str(example).expect("JSON")
}

/// A message whose call has this id.
fn with_id(message: &Value, id: &Value) -> Value {
    let mut message = message.clone();
    message["tool_calls"][0]["id"] = id.clone();
    message
}

#[test]
fn two_engines_return_the_calls_of_one() {
    let folder = scripted();
    let cluster = Cluster::each(folder.path().to_str().expect("UTF-8"), hermes);
    let body = weather();
    let alone = answer(&cluster.one.generate("turn", &body).ok());
    assert_eq!(alone["finish_reason"], "tool_calls");
    for stream in [false, true] {
        let handoff = cluster.p.open_lease(&body);
        let body = with(&with(&body, "kv_transfer_params", handoff), "stream", json!(stream));
        let reply = cluster.d.generate("turn", &body);
        let decoded = if stream { merged(&reply.text) } else { answer(&reply.ok()) };
        assert_eq!(decoded, alone, "{}", reply.text);
    }
    cluster.is_clean();
}

#[test]
fn the_next_turn_reads_the_call_and_its_result() {
    let folder = scripted();
    let engine = engine(&folder);
    let reply = engine.generate("turn", &weather()).ok();
    let message = &reply["choices"][0]["message"];
    let id = &message["tool_calls"][0]["id"];
    let result = json!({"role": "tool", "tool_call_id": id, "content": "rain"});
    let body = with(&weather(), "messages", json!([{"role": "user", "content": "hi"}, message, result]));
    let next = engine.generate("turn", &body).ok();
    let other = &next["choices"][0]["message"]["tool_calls"][0]["id"];
    assert!(other.is_string() && other != id, "ids are unique in a conversation: {other} {id}");
    // Choices have calls of their own.
    let two = engine.generate("turn", &with(&weather(), "n", json!(2))).ok();
    let id = |choice: usize| two["choices"][choice]["message"]["tool_calls"][0]["id"].clone();
    assert!(id(0).is_string() && id(0) != id(1), "{two}");
    engine.is_clean();
}

#[test]
fn without_tools_or_parsers_the_text_stays_as_it_is() {
    let folder = scripted();
    let engine = engine(&folder);
    let text: String = SCRIPT.iter().map(|(_, text)| *text).collect();
    let content = text.strip_prefix("<think>Hm.</think>\n\n").expect("reasoning first");
    let mut plain = weather();
    plain.as_object_mut().expect("an object").remove("tools");
    for body in [plain, with(&weather(), "tool_choice", json!("none"))] {
        let reply = answer(&engine.generate("turn", &body).ok());
        assert_eq!(reply["message"]["content"], content);
        assert_eq!(
            (&reply["message"]["reasoning"], &reply["finish_reason"]),
            (&json!("Hm."), &json!("stop"))
        );
        assert!(reply["message"].get("tool_calls").is_none());
    }
    let reply = answer(&engine.generate("turn", &with(&weather(), "include_reasoning", json!(false))).ok());
    assert!(reply["message"].get("reasoning").is_none() && reply["message"]["content"] == "Let me see.");
    // A call that `max_tokens` cuts off ends for that reason.
    let reply = answer(&engine.generate("turn", &with(&weather(), "max_tokens", json!(2))).ok());
    assert_eq!(reply["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Par");
    assert_eq!(reply["finish_reason"], "length");

    let mut options = options(folder.path().to_str().expect("UTF-8"), Role::Both);
    options.output.calls = FormatChoice::Off;
    options.output.reasoning = FormatChoice::Off;
    let reply = answer(&Node::start(options).generate("turn", &weather()).ok());
    assert_eq!((&reply["message"]["content"], &reply["finish_reason"]), (&json!(text), &json!("stop")));
}

#[test]
fn a_forced_call_is_made_by_a_model_that_knows_no_format() {
    // Its template renders no tools.
    let folder = checkpoint(&[
        ("chat_template.jinja", None),
        ("tokenizer_config.json", Some(json!({"chat_template": "{{ messages[0]['content'] }}"}))),
    ]);
    let cluster = Cluster::of(folder.path().to_str().expect("UTF-8"));
    let tool = |name: &str, city: &str| {
        let parameters = json!({"type": "object", "properties": {"city": {"enum": [city]}},
            "required": ["city"], "additionalProperties": false});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let forced = |choice: Value| {
        json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 7, "max_tokens": 150,
            "tools": [tool("weather", "Paris"), tool("time", "Oslo")], "tool_choice": choice,
            "parallel_tool_calls": false})
    };
    let named = json!({"type": "function", "function": {"name": "time"}});
    let cases = [(json!("required"), &["weather", "time"][..], "tool_calls"), (named, &["time"][..], "stop")];
    for (choice, functions, reason) in cases {
        let body = forced(choice);
        let alone = answer(&cluster.one.generate("forced", &body).ok());
        assert_eq!(alone["finish_reason"], reason, "{alone}");
        let streamed = merged(&cluster.one.generate("forced", &with(&body, "stream", json!(true))).text);
        assert_eq!(streamed["finish_reason"], reason, "{streamed}");
        assert_eq!(streamed["message"]["tool_calls"], alone["message"]["tool_calls"]);
        let call = &alone["message"]["tool_calls"][0]["function"];
        assert!(functions.iter().any(|name| call["name"] == *name), "{alone}");
        let arguments: Value =
            serde_json::from_str(call["arguments"].as_str().expect("a text")).expect("valid JSON");
        let city = if call["name"] == "time" { "Oslo" } else { "Paris" };
        assert_eq!(arguments, json!({"city": city}));
        assert_eq!(alone["message"]["tool_calls"][1], Value::Null);
        let handoff = cluster.p.open_lease(&body);
        let decoded = cluster.d.generate("forced", &with(&body, "kv_transfer_params", handoff)).ok();
        assert_eq!(answer(&decoded), alone);
    }
    cluster.is_clean();
}
