//! Generated requests, replies and streams of Messages and Responses: none panics, and every refusal can be sent. A
//! stream has what its whole reply has.

use baton_openai::{
    ApiError, Endpoint, GenerateRequest, Object, ParseLimits, StreamTranslator, TranslatedApi, Translation,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const APIS: [TranslatedApi; 2] = [TranslatedApi::Messages, TranslatedApi::Responses];

/// Fields that a translation reads.
const FIELDS: [&str; 28] = [
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "metadata",
    "stop_sequences",
    "mcp_servers",
    "max_tokens",
    "chat_template_kwargs",
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "reasoning",
    "include",
    "top_logprobs",
    "store",
    "background",
    "truncation",
    "previous_response_id",
    "conversation",
    "context_management",
    "temperature",
    "stream",
    "parallel_tool_calls",
    "model",
];

/// Words by which a value is recognized.
const WORDS: [&str; 34] = [
    "user",
    "assistant",
    "system",
    "developer",
    "text",
    "image",
    "document",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "input_text",
    "output_text",
    "input_image",
    "refusal",
    "reasoning_text",
    "function",
    "custom",
    "json_schema",
    "json_object",
    "auto",
    "any",
    "none",
    "required",
    "url",
    "base64",
    "in_progress",
    "{}",
    "{\"a\":1}",
    "f",
];

const NAMES: [&str; 30] = [
    "role",
    "type",
    "content",
    "text",
    "source",
    "url",
    "media_type",
    "data",
    "id",
    "name",
    "input",
    "tool_use_id",
    "thinking",
    "summary",
    "call_id",
    "arguments",
    "output",
    "status",
    "image_url",
    "refusal",
    "format",
    "schema",
    "effort",
    "parameters",
    "input_schema",
    "description",
    "strict",
    "user_id",
    "disable_parallel_tool_use",
    "encrypted_content",
];

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3i64..25).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop::sample::select(&WORDS[..]).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        let name = prop::sample::select(&NAMES[..]).prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::vec((name, inner), 0..6).prop_map(|fields| fields.into_iter().collect()),
        ]
    })
}

/// A block or an item that is nearly valid, so that later checks are reached.
fn any_item() -> impl Strategy<Value = Value> {
    let fields = prop::collection::vec((prop::sample::select(&NAMES[..]), any_value()), 0..6);
    (prop::sample::select(&WORDS[..]), prop::sample::select(&WORDS[..]), fields).prop_map(
        |(kind, role, fields)| {
            let mut item = json!({"type": kind, "role": role, "content": "x", "text": "x", "call_id": "c", "name": "f",
                "arguments": "{}", "output": "x", "id": "t", "tool_use_id": "t"});
            for (name, value) in fields {
                item[name] = value;
            }
            item
        },
    )
}

fn any_request() -> impl Strategy<Value = Object> {
    let items = || prop::collection::vec(any_item(), 0..4).prop_map(Value::Array);
    let fields = prop::collection::vec((prop::sample::select(&FIELDS[..]), any_value()), 0..4);
    (items(), items(), fields).prop_map(|(input, content, fields)| {
        let turns = json!([{"role": "user", "content": content}]);
        let mut body = json!({"input": input, "messages": turns, "max_tokens": 5});
        for (name, value) in fields {
            body[name] = value;
        }
        body.as_object().expect("an object").clone()
    })
}

fn is_sendable(error: &ApiError) -> Result<(), TestCaseError> {
    prop_assert!((400..600).contains(&error.status), "{error}");
    prop_assert!(error.message.len() < 1_000, "{}", error.message);
    Ok(())
}

/// Parts of a chat's reply: reasoning, text, calls.
#[derive(Clone, Debug)]
struct Parts {
    reasoning: String,
    text: String,
    calls: Vec<(String, String)>,
    finish: &'static str,
}

fn any_parts() -> impl Strategy<Value = Parts> {
    let arguments = prop_oneof![Just("{}".to_owned()), Just("{\"a\": [1, \"é\"]}".to_owned())];
    let calls = prop::collection::vec(("[a-z]{1,6}", arguments), 0..3);
    let finish = prop::sample::select(vec!["stop", "length", "tool_calls", "content_filter"]);
    (".{0,12}", ".{0,12}", calls, finish).prop_map(|(reasoning, text, calls, finish)| Parts {
        reasoning,
        text,
        calls,
        finish,
    })
}

impl Parts {
    fn whole(&self) -> Value {
        let call = |(at, (name, arguments)): (usize, &(String, String))| json!({"id": format!("c{at}"), "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls: Vec<Value> = self.calls.iter().enumerate().map(call).collect();
        let message = json!({"content": self.text, "reasoning_content": self.reasoning, "tool_calls": calls});
        json!({"id": "chatcmpl-1", "created": 7, "model": "m", "usage": usage(),
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish}]})
    }

    /// The frames of a stream in pieces of one character.
    fn frames(&self) -> Vec<u8> {
        let mut deltas = vec![json!({"role": "assistant", "content": ""})];
        deltas.extend(self.reasoning.chars().map(|c| json!({"reasoning_content": c.to_string()})));
        deltas.extend(self.text.chars().map(|c| json!({"content": c.to_string()})));
        for (at, (name, arguments)) in self.calls.iter().enumerate() {
            let first =
                json!({"index": at, "id": format!("c{at}"), "function": {"name": name, "arguments": ""}});
            deltas.push(json!({"tool_calls": [first]}));
            let piece =
                |c: char| json!({"tool_calls": [{"index": at, "function": {"arguments": c.to_string()}}]});
            deltas.extend(arguments.chars().map(piece));
        }
        let frame = |delta: &Value, finish: Option<&str>| {
            let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
            let chunk = json!({"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice]});
            format!("data: {chunk}\n\n")
        };
        let mut frames: String = deltas.iter().map(|delta| frame(delta, None)).collect();
        frames += &frame(&json!({}), Some(self.finish));
        frames += &format!("data: {}\n\n", json!({"id": "chatcmpl-1", "choices": [], "usage": usage()}));
        (frames + "data: [DONE]\n\n").into_bytes()
    }
}

fn usage() -> Value {
    json!({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}})
}

fn translation(api: TranslatedApi) -> Translation {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "input": "x"});
    api.to_chat(body.as_object().expect("an object")).expect("a chat").1
}

fn translator(api: TranslatedApi) -> StreamTranslator {
    translation(api).stream().expect("a stream")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn a_request_is_a_chat_or_is_refused(body in any_request()) {
        for api in APIS {
            match api.to_chat(&body) {
                Err(error) => {
                    is_sendable(&error)?;
                    prop_assert_eq!(error.status, 400);
                }
                Ok((chat, translation)) => {
                    prop_assert!(chat["messages"].as_array().is_some());
                    prop_assert_eq!(translation.api(), api);
                    let read = GenerateRequest::from_map(Endpoint::Chat, &chat, &ParseLimits::default());
                    if let Err(error) = read {
                        is_sendable(&api.named(error))?;
                    }
                }
            }
        }
    }

    #[test]
    fn any_reply_is_translated_or_refused(reply in any_value(), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        for api in APIS {
            let text = reply.to_string();
            for reply in [text.as_bytes(), bytes.as_slice()] {
                if let Err(error) = translation(api).reply(reply) {
                    is_sendable(&error)?;
                }
                let mut stream = translator(api);
                let frame = [&b"data: "[..], reply, &b"\n\ndata: [DONE]\n\n"[..]].concat();
                for bytes in [reply, frame.as_slice()] {
                    if let Err(error) = stream.push(bytes) {
                        is_sendable(&error)?;
                    }
                }
                prop_assert!(!stream.fail(&ApiError::bad_gateway("x")).is_empty());
            }
        }
    }

    #[test]
    fn a_stream_has_what_its_whole_reply_has(
        parts in any_parts(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let frames = parts.frames();
        // Whole frames, however they are joined.
        let ends: Vec<usize> = (2..=frames.len()).filter(|end| frames[..*end].ends_with(b"\n\n")).collect();
        let mut places: Vec<usize> = cuts.iter().map(|cut| *cut.get(&ends)).collect();
        places.extend([0, frames.len()]);
        places.sort_unstable();
        let whole: Value = {
            let reply = translation(TranslatedApi::Responses).reply(parts.whole().to_string().as_bytes());
            serde_json::from_slice(&reply.expect("a response")).expect("JSON")
        };
        let mut stream = translator(TranslatedApi::Responses);
        let mut all = Vec::new();
        for pair in places.windows(2) {
            all.extend(stream.push(&frames[pair[0]..pair[1]]).expect("events"));
        }
        let at_once = translator(TranslatedApi::Responses).push(&frames).expect("events");
        prop_assert_eq!(&all, &at_once);
        let text = String::from_utf8(all).expect("UTF-8");
        let last = text.trim_end().rsplit("\ndata: ").next().expect("an event");
        let last: Value = serde_json::from_str(last).expect("JSON");
        prop_assert_eq!(&last["response"], &whole);
        let message = translator(TranslatedApi::Messages).push(&frames).expect("events");
        let is_stopped = message.ends_with(b"{\"type\":\"message_stop\"}\n\n");
        prop_assert!(is_stopped);
    }
}
