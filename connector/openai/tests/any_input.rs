//! Generated requests: no input panics, every refusal is a 4xx that can be sent, and every accepted request is within
//! the documented bounds.

use baton_openai::cluster::{self, EventQuery};
use baton_openai::{
    ApiError, Endpoint, GenerateRequest, Object, ParseLimits, TokenizeRequest, parse, parse_object,
};
use proptest::prelude::*;
use serde_json::{Number, Value, json};

/// Every field that is read or refused, and two others.
const FIELDS: [&str; 65] = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "n",
    "logprobs",
    "top_logprobs",
    "echo",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "stream",
    "stream_options",
    "user",
    "best_of",
    "suffix",
    "return_token_ids",
    "kv_transfer_params",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "reasoning_effort",
    "thinking_token_budget",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "response_format",
    "documents",
    "add_special_tokens",
    "cache_salt",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "use_beam_search",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_embeds",
    "audio",
    "modalities",
    "functions",
    "function_call",
    "chat_template",
    "return_token_strs",
    "unknown",
    "",
];

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..25).prop_map(Value::from),
        (-1.5f64..2.5).prop_map(Value::from),
        any::<f64>().prop_map(|x| Number::from_f64(x).map_or(Value::Null, Value::Number)),
        ".{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["auto", "none", "text", "user", "system", "{}", "{\"a\":1}"])
            .prop_map(Value::from),
    ]
}

fn any_value() -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        prop::sample::select(vec![
            "role",
            "content",
            "type",
            "text",
            "tool_calls",
            "function",
            "name",
            "arguments",
            "include_usage",
            "5",
        ])
        .prop_map(str::to_owned),
        ".{0,5}",
    ];
    leaf().prop_recursive(4, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            prop::collection::vec((name.clone(), inner), 0..6)
                .prop_map(|fields| fields.into_iter().collect()),
        ]
    })
}

/// A nearly valid message, so that later checks are reached.
fn any_message() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(vec!["user", "assistant", "tool", "developer"]);
    let call = any_value().prop_map(|arguments| json!({"function": {"name": "f", "arguments": arguments}}));
    (role, any_value(), prop::option::of(prop::collection::vec(call, 0..3))).prop_map(
        |(role, content, calls)| {
            let mut message = json!({"role": role, "content": content});
            if let Some(calls) = calls {
                message["tool_calls"] = Value::from(calls);
            }
            message
        },
    )
}

fn any_request() -> impl Strategy<Value = Object> {
    let fields = prop::collection::vec((prop::sample::select(&FIELDS[..]), any_value()), 0..6);
    let sound = prop::option::of(prop_oneof![
        Just(json!({"prompt": "x"})),
        Just(json!({"prompt": [1, 2]})),
        prop::collection::vec(any_message(), 0..3).prop_map(|messages| json!({"messages": messages})),
    ]);
    (sound, fields).prop_map(|(sound, fields)| {
        let mut map = sound.and_then(|sound| sound.as_object().cloned()).unwrap_or_default();
        map.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        map
    })
}

fn is_sendable(error: &ApiError) -> Result<(), TestCaseError> {
    prop_assert!((400..500).contains(&error.status));
    prop_assert!(error.message.len() < 1000, "{} bytes of message", error.message.len());
    prop_assert!(!error.to_sse().windows(2).rev().skip(1).any(|pair| pair == b"\n\n"));
    Ok(())
}

fn is_within_bounds(request: &GenerateRequest) -> Result<(), TestCaseError> {
    let wish = &request.sampling;
    prop_assert!((1..=16).contains(&request.n) && request.sequences() <= 256 && request.stop.len() <= 16);
    prop_assert!(wish.temperature.is_none_or(|x| (0.0..=100.0).contains(&x)));
    prop_assert!(wish.top_p.is_none_or(|x| (0.0..=1.0).contains(&x)));
    prop_assert!(wish.repetition_penalty.is_none_or(|x| x > 0.0 && x.is_finite()));
    prop_assert!(request.max_tokens.is_none_or(|max| request.min_tokens <= max));
    prop_assert!(request.logprobs.is_none_or(|top| top <= 20));
    prop_assert!(request.prompt.logprobs.is_none_or(|top| top <= 20 && !request.stream));
    prop_assert!(request.restrictions.allowed_token_ids.as_ref().is_none_or(|ids| !ids.is_empty()));
    prop_assert!(request.restrictions.bad_words.iter().all(|word| !word.is_empty()));
    prop_assert!(request.stop.iter().all(|stop| !stop.is_empty()));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn any_fields_are_read_or_refused(map in any_request(), chat: bool) {
        let endpoint = if chat { Endpoint::Chat } else { Endpoint::Completions };
        match GenerateRequest::from_map(endpoint, &map, &ParseLimits::default()) {
            Ok(request) => is_within_bounds(&request)?,
            Err(error) => is_sendable(&error)?,
        }
        if let Err(error) = TokenizeRequest::from_map(&map, &ParseLimits::default()) {
            is_sendable(&error)?;
        }
    }

    #[test]
    fn one_field_of_any_value_is_read_or_refused(name in prop::sample::select(&FIELDS[..]), value in any_value()) {
        for (endpoint, mut body) in [
            (Endpoint::Completions, json!({"prompt": "x"})),
            (Endpoint::Chat, json!({"messages": [{"role": "user", "content": "x"}]})),
        ] {
            body[name] = value.clone();
            match parse(endpoint, body.to_string().as_bytes(), &ParseLimits::default()) {
                Ok(request) => is_within_bounds(&request)?,
                Err(error) => {
                    is_sendable(&error)?;
                    // The error names the field, or one that it contradicts.
                    prop_assert!(error.param.is_some() || error.code.as_deref() == Some("malformed_body"));
                }
            }
        }
    }

    #[test]
    fn a_request_of_the_cluster_is_read_or_refused(
        name in prop::sample::select(vec!["handle", "request_id", "reason", "request_ids", "leg"]),
        value in any_value(),
        query in "(after|wait_ms|limit|[a-z&=]{0,3})(=(latest|[-+0-9]{0,22}|.{0,9}))?(&limit=[0-9]{0,6})?",
    ) {
        let map: Object = [(name.to_owned(), value)].into_iter().collect();
        let read = |id: &str| (!id.is_empty()).then(|| id.to_owned());
        let errors = [
            cluster::handle::<u128>(&map).err(),
            cluster::request_id(&map, read).err(),
            cluster::reason(&map, "none").err(),
            cluster::request_ids(&map, read).err(),
            cluster::legs(&map).err(),
            EventQuery::parse(&query).err(),
        ];
        for error in errors.iter().flatten() {
            is_sendable(error)?;
            prop_assert!(error.param.is_some());
        }
    }

    #[test]
    fn any_bytes_are_an_object_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        if let Err(error) = parse_object(&bytes, &ParseLimits::default()) {
            is_sendable(&error)?;
        }
    }

    #[test]
    fn a_sound_body_with_one_byte_changed_never_panics(at in 0usize..90, byte: u8) {
        let mut body = br#"{"model":"m","prompt":["a\u00e9","b"],"temperature":0.5,"stop":["x"],"logit_bias":{"5":1}}"#.to_vec();
        let at = at % body.len();
        body[at] = byte;
        if let Err(error) = parse(Endpoint::Completions, &body, &ParseLimits::default()) {
            is_sendable(&error)?;
        }
    }

    #[test]
    fn a_parsed_body_keeps_its_fields_and_their_order(fields in prop::collection::vec((".{0,8}", any_value()), 0..8)) {
        let map: Object = fields.into_iter().map(|(name, value)| (name, without_fractions(value))).collect();
        let body = Value::Object(map).to_string();
        let parsed = parse_object(body.as_bytes(), &ParseLimits::default()).expect("sound JSON");
        prop_assert_eq!(Value::Object(parsed).to_string(), body);
    }
}

/// serde_json reads a decimal fraction to within one unit of its last place, and everything else exactly.
fn without_fractions(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => Value::Null,
        Value::Array(values) => values.into_iter().map(without_fractions).collect(),
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, without_fractions(value))).collect(),
        other => other,
    }
}
