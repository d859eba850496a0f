//! Messages and Responses: the chat behind them is the same, whole and streamed, from one engine and from two.

use std::path::Path;

use baton_engine::run::options::Role;
use serde_json::{Map, Value, json};

use super::chats::{engine, hermes, scripted, weather};
use crate::harness::cluster::{Cluster, LLAMA, Node, fresh_id, options, prefill_leg, with};
use crate::harness::http::{self, Reply};

const CHATS: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// The request of [`weather`] in another API.
fn weather_in(api: &str) -> Value {
    let mut body = weather();
    match api {
        MESSAGES => body["tools"] = json!([{"name": "weather"}]),
        RESPONSES => {
            body["tools"] = json!([{"type": "function", "name": "weather"}]);
            let fields = body.as_object_mut().expect("an object");
            let most = fields.remove("max_tokens").expect("a bound");
            fields.insert("max_output_tokens".to_owned(), most);
            fields.remove("messages");
            fields.insert("input".to_owned(), json!("hi"));
        }
        _ => {}
    }
    body
}

fn ask(node: &Node, api: &str, body: &Value) -> Reply {
    http::call(node.http, "POST", api, &[("x-request-id", "turn")], &body.to_string())
}

/// The data of each event; its name is the data's type.
#[track_caller]
fn events(stream: &str) -> Vec<Value> {
    let frames = stream.split_terminator("\n\n").map(|frame| {
        let (name, data) = frame.split_once("\ndata: ").expect("two lines");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(name, format!("event: {}", data["type"].as_str().expect("a type")));
        data
    });
    frames.collect()
}

/// The message of a stream of Messages.
#[track_caller]
fn message_of(stream: &str) -> Value {
    let (mut message, mut json) = (Value::Null, String::new());
    for event in events(stream) {
        let at = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str().expect("a type") {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().map(Vec::len), Some(at));
                message["content"].as_array_mut().expect("blocks").push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let delta = event["delta"].as_object().expect("a delta");
                for (name, text) in delta.iter().filter(|(name, _)| *name != "type") {
                    let text = text.as_str().expect("a text");
                    match name.as_str() {
                        "partial_json" => json.push_str(text),
                        name => {
                            let before = message["content"][at][name].as_str().expect("a text").to_owned();
                            message["content"][at][name] = json!(before + text);
                        }
                    }
                }
            }
            "content_block_stop" if !json.is_empty() => {
                message["content"][at]["input"] = serde_json::from_str(&json).expect("JSON");
                json.clear();
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().expect("a delta") {
                    message[name.as_str()] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    message
}

/// A reply without what differs between two replies to the same request: the end of its id, its time, and the tokens that
/// were cached.
fn comparable(mut reply: Value) -> Value {
    let id = reply["id"].as_str().expect("an id").to_owned();
    let mark = id.rsplit_once('.').expect("a mark").1.to_owned();
    let fields = reply.as_object_mut().expect("an object");
    fields.remove("created_at");
    fields.remove("usage");
    serde_json::from_str(&reply.to_string().replace(&mark, "")).expect("JSON")
}

/// The reply of a stream.
#[track_caller]
fn reply_of(api: &str, stream: &str) -> Value {
    if api == MESSAGES {
        return message_of(stream);
    }
    let events = events(stream);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    events.last().expect("an event")["response"].clone()
}

#[test]
fn messages_and_responses_have_what_the_chat_has() {
    let folder = scripted();
    let engine = engine(&folder);
    let chat = ask(&engine, CHATS, &weather_in(CHATS)).ok();
    let id = &chat["choices"][0]["message"]["tool_calls"][0]["id"];
    let message = ask(&engine, MESSAGES, &weather_in(MESSAGES));
    assert_eq!((message.header("request-id"), message.header("x-request-id")), (Some("turn"), Some("turn")));
    let message = message.ok();
    assert_eq!(
        message["content"],
        json!([
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Paris"}},
        ])
    );
    assert_eq!(
        (&message["stop_reason"], &message["usage"]["output_tokens"]),
        (&json!("tool_use"), &json!(4))
    );
    assert_eq!(message["model"], chat["model"]);
    let response = ask(&engine, RESPONSES, &weather_in(RESPONSES)).ok();
    let output = response["output"].as_array().expect("items");
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap_or_default()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"][0]["text"], "Hm.");
    assert_eq!(output[1]["content"][0]["text"], "Let me see.");
    assert_eq!((&output[2]["call_id"], &output[2]["arguments"]), (id, &json!("{\"city\": \"Paris\"}")));
    assert_eq!((&response["status"], &response["usage"]["output_tokens"]), (&json!("completed"), &json!(4)));
    for (api, whole) in [(MESSAGES, message), (RESPONSES, response)] {
        let stream = ask(&engine, api, &with(&weather_in(api), "stream", json!(true)));
        assert_eq!(stream.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let streamed = reply_of(api, &stream.text);
        assert_eq!(streamed["usage"]["output_tokens"], 4, "{streamed}");
        assert_eq!(comparable(streamed), comparable(whole), "{}", stream.text);
        assert!(!stream.text.contains("[DONE]"));
    }
    engine.is_clean();
}

#[test]
fn two_engines_return_the_messages_and_responses_of_one() {
    let folder = scripted();
    let cluster = Cluster::each(folder.path().to_str().expect("UTF-8"), hermes);
    for api in [MESSAGES, RESPONSES] {
        let body = weather_in(api);
        let alone = comparable(ask(&cluster.one, api, &body).ok());
        for stream in [false, true] {
            let mut leg = prefill_leg(&body);
            if api == RESPONSES {
                leg["max_output_tokens"] = json!(1);
            }
            let name = fresh_id();
            let named = [("x-request-id", name.as_str())];
            let reply = http::call(cluster.p.http, "POST", api, &named, &leg.to_string()).ok();
            let handoff = &reply["kv_transfer_params"];
            assert_eq!(handoff["do_remote_prefill"], true, "{reply}");
            let body = with(&with(&body, "kv_transfer_params", handoff.clone()), "stream", json!(stream));
            let reply = ask(&cluster.d, api, &body);
            let decoded = if stream { reply_of(api, &reply.text) } else { reply.ok() };
            assert_eq!(decoded.get("kv_transfer_params"), None);
            assert_eq!(comparable(decoded), alone, "{}", reply.text);
        }
    }
    cluster.is_clean();
}

/// A router may send what its client sends in the other API.
#[test]
fn a_handoff_of_a_chat_is_one_of_the_message_and_of_the_response() {
    let folder = scripted();
    let cluster = Cluster::each(folder.path().to_str().expect("UTF-8"), hermes);
    for api in [MESSAGES, RESPONSES] {
        let alone = comparable(ask(&cluster.one, api, &weather_in(api)).ok());
        let handoff = cluster.p.open_lease(&weather());
        let reply = ask(&cluster.d, api, &with(&weather_in(api), "kv_transfer_params", handoff)).ok();
        assert_eq!(comparable(reply), alone);
    }
    cluster.is_clean();
}

#[test]
fn a_refusal_releases_its_handoff_and_names_the_field() {
    let cluster = Cluster::of(LLAMA);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
    for (api, body, param) in [
        (RESPONSES, json!({"input": "hi", "max_output_tokens": 0}), "max_output_tokens"),
        (RESPONSES, json!({"input": "hi", "previous_response_id": "resp_1"}), "previous_response_id"),
        (RESPONSES, json!({"input": "hi", "conversation": "conv_1"}), "conversation"),
        (RESPONSES, json!({"input": "hi", "background": true}), "background"),
        (RESPONSES, json!({"input": "hi", "prompt": {"id": "p"}}), "prompt"),
        (RESPONSES, json!({"input": "hi", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (RESPONSES, json!({"input": [{"role": "user"}]}), "input[0].content"),
        (MESSAGES, json!({"messages": [{"role": "user", "content": "hi"}]}), "max_tokens"),
    ] {
        let handoff = cluster.p.open_lease(&chat);
        let reply = ask(&cluster.d, api, &with(&body, "kv_transfer_params", handoff));
        assert_eq!(reply.status, 400, "{}", reply.text);
        let body = reply.json();
        let error = &body["error"];
        if api == MESSAGES {
            assert_eq!((&body["type"], error.get("param")), (&json!("error"), None));
            assert!(error["message"].as_str().is_some_and(|text| text.contains(param)), "{}", reply.text);
        } else {
            assert_eq!(error["param"], param, "{}", reply.text);
        }
    }
    let asked = http::call(cluster.d.http, "POST", MESSAGES, &[("x-baton-router-settles", "1")], "{}");
    assert_eq!((asked.status, asked.code().as_deref()), (404, Some("unsupported_endpoint")));
    // To a client the error has Anthropic's envelope, and to a router the code.
    let handoff = cluster.p.open_lease(&chat);
    let body = with(&with(&chat, "kv_transfer_params", handoff), "max_tokens", json!(0));
    for (header, is_for_router) in [("x-other", false), ("x-baton-router-settles", true)] {
        let reply = http::call(cluster.d.http, "POST", MESSAGES, &[(header, "1")], &body.to_string());
        assert_eq!((reply.status, reply.json()["type"] == "error"), (400, !is_for_router), "{}", reply.text);
    }
    let wrong = http::call(cluster.d.http, "GET", RESPONSES, &[], "");
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("post")));
    cluster.is_clean();
}

#[test]
fn the_tokens_of_a_message_are_those_of_its_chat() {
    let engine = Node::start(options(LLAMA, Role::Both));
    let turns = json!([{"role": "user", "content": "How many?"}]);
    let message = json!({"system": "Count.", "messages": turns, "tools": [{"name": "f"}]});
    let system = json!({"role": "system", "content": "Count."});
    let chat = json!({"messages": [system, turns[0]],
        "tools": [{"type": "function", "function": {"name": "f"}}]});
    let counted = engine.post("/v1/messages/count_tokens", &message).ok();
    let tokenized = engine.post("/tokenize", &chat).ok();
    assert_eq!(counted, json!({"input_tokens": tokenized["count"]}));
    let refused = engine.post("/v1/messages/count_tokens", &json!({"messages": []}));
    assert_eq!((refused.status, &refused.json()["type"]), (400, &json!("error")));
    engine.is_clean();
}

#[test]
fn a_client_that_leaves_a_stream_ends_its_sequence() {
    let engine = Node::start(options(LLAMA, Role::Both));
    for (api, body) in [
        (MESSAGES, json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100})),
        (RESPONSES, json!({"input": "hi", "max_output_tokens": 100})),
    ] {
        let body = with(&with(&body, "stream", json!(true)), "ignore_eos", json!(true));
        drop(http::send(engine.http, "POST", api, &[], &body.to_string()));
    }
    engine.is_clean();
}

/// The JSON blocks of the page that are requests of Responses.
fn examples() -> Vec<Map<String, Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/how-to/fleets/responses.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let blocks = page.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    blocks.map(|block| serde_json::from_str(block).expect("an example is an object")).collect()
}

#[test]
fn the_examples_of_responses_are_served() {
    let engine = Node::start(options(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo"), Role::Both));
    let examples = examples();
    assert!(examples.iter().any(|body| body.contains_key("tools")), "no example of tools");
    for mut body in examples {
        // The test's engine has another name.
        body.remove("model");
        let body = Value::Object(body);
        let response = engine.post(RESPONSES, &body).ok();
        assert!(["completed", "incomplete"].iter().any(|status| response["status"] == *status), "{response}");
        assert_eq!(response["object"], "response");
    }
    engine.is_clean();
}
