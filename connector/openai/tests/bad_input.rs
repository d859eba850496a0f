//! Invalid input. Every case gets an error that names the problem, never a panic.

use baton_openai::{
    ApiError, DetokenizeRequest, Endpoint, GenerateRequest, Input, ParseLimits, Prompt, PromptOptions,
    TokenizeRequest, Truncation, TruncationSide, parse, parse_object,
};
use serde_json::{Value, json};

fn completions(body: &str) -> Result<GenerateRequest, ApiError> {
    parse(Endpoint::Completions, body.as_bytes(), &ParseLimits::default())
}

fn chat(body: Value) -> Result<GenerateRequest, ApiError> {
    parse(Endpoint::Chat, body.to_string().as_bytes(), &ParseLimits::default())
}

fn with(field: &str, value: &str) -> Result<GenerateRequest, ApiError> {
    completions(&format!(r#"{{"prompt":"x","{field}":{value}}}"#))
}

/// Checks for 400 with `words` in the message.
fn refuses<T: std::fmt::Debug>(result: Result<T, ApiError>, param: Option<&str>, words: &str) {
    let error = result.expect_err(words);
    assert_eq!((error.status, error.param.as_deref()), (400, param), "{error}");
    assert!(error.message.contains(words), "{:?} does not say {words:?}", error.message);
    assert!(error.message.len() < 600, "{} bytes", error.message.len());
}

#[test]
fn a_body_that_is_no_object_is_refused_with_its_type() {
    let body = |bytes: &[u8]| parse_object(bytes, &ParseLimits::default());
    refuses(body(b""), None, "empty");
    refuses(body(b" \n "), None, "empty");
    refuses(body(b"[1]"), None, "must be a JSON object");
    refuses(body(b"\"x\""), None, "must be a JSON object");
    refuses(body(b"{\"a\":1"), None, "not JSON");
    refuses(body(b"{\"a\":1}}"), None, "not JSON");
    refuses(body(b"{\"a\":1} x"), None, "not JSON");
    refuses(body(b"{\"a\":NaN}"), None, "not JSON");
    refuses(body(b"{\"a\":1e999}"), None, "not JSON");
    refuses(body(b"\xEF\xBB\xBF{}"), None, "byte order mark");
    refuses(body(b"{\"a\":\"\xFF\"}"), None, "not UTF-8: first wrong byte at offset 6");
    refuses(body(br#"{"a":"\ud800"}"#), None, "not JSON");
    refuses(body(br#"{"a":"\udc00x"}"#), None, "not JSON");
    refuses(body(b"{\"a\":\"\x00\"}"), None, "not JSON");
    assert!(body(br#"{"a":"\u0000"}"#).is_ok());
}

#[test]
fn deep_nesting_is_refused_without_a_stack_overflow() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        for depth in [200, 10_000, 1_000_000] {
            for close in [close, ""] {
                let value = format!("{}1{}", open.repeat(depth), close.repeat(depth));
                refuses(with("x", &value), None, "nested deeper than 128");
            }
        }
    }
    assert!(with("x", &format!("{}{}", "[".repeat(100), "]".repeat(100))).is_ok());
    // JSON inside a string, the arguments of tools, is parsed too.
    let arguments = "[".repeat(10_000);
    let messages =
        json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]);
    refuses(
        chat(json!({"messages": messages})),
        Some("messages[0].tool_calls[0].function.arguments"),
        "must be a JSON object in a string",
    );
}

#[test]
fn a_body_at_the_limit_is_read_and_one_byte_more_is_413() {
    let body = br#"{"prompt":"x"}"#;
    let limits = |body_bytes| ParseLimits { body_bytes, ..ParseLimits::default() };
    assert!(parse(Endpoint::Completions, body, &limits(body.len())).is_ok());
    let error = parse(Endpoint::Completions, body, &limits(body.len() - 1)).expect_err("too large");
    assert_eq!((error.status, error.code.as_deref()), (413, Some("payload_too_large")));
}

#[test]
fn a_field_that_comes_twice_is_refused() {
    let twice = completions(r#"{"prompt":"x","model":"a","model":"b"}"#);
    refuses(twice, Some("model"), "`model` appears more than once");
    let twice = completions(r#"{"kv_transfer_params":{},"prompt":"x","kv_transfer_params":null}"#);
    refuses(twice, Some("kv_transfer_params"), "more than once");
    refuses(completions(r#"{"prompt":"x","mod\u0065l":"a","model":"b"}"#), Some("model"), "more than once");
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    for (field, wrong, words) in [
        ("n", "0", "an integer from 1 to 16, got 0"),
        ("n", "17", "from 1 to 16"),
        ("n", "-1", "from 1 to 16"),
        ("n", "1.5", "from 1 to 16"),
        ("n", "\"2\"", "got the string \"2\""),
        ("n", "true", "got true"),
        ("max_tokens", "0", "an integer of at least 1, got 0"),
        ("max_tokens", "-1", "an integer of at least 1"),
        ("max_tokens", "\"7\"", "an integer of at least 1"),
        ("max_tokens", "9223372036854775808", "an integer of at most 2147483647"),
        ("max_tokens", "1e20", "an integer of at most"),
        ("max_completion_tokens", "0", "an integer of at least 1"),
        ("min_tokens", "-1", "an integer of at least 0"),
        ("temperature", "-1", "a number from 0 to 100, got -1"),
        ("temperature", "1e308", "from 0 to 100"),
        ("temperature", "\"NaN\"", "from 0 to 100"),
        ("top_p", "0", "over 0, up to 1"),
        ("top_p", "1.1", "over 0, up to 1"),
        ("top_k", "-2", "an integer from -1"),
        ("top_k", "1e308", "an integer from -1"),
        ("min_p", "-0.1", "from 0 to 1"),
        ("seed", "9223372036854775808", "an integer from"),
        ("seed", "[]", "got an array of 0"),
        ("presence_penalty", "2.1", "from -2 to 2"),
        ("frequency_penalty", "-2.1", "from -2 to 2"),
        ("repetition_penalty", "0", "over 0"),
        ("repetition_penalty", "1e-60", "over 0"),
        ("logprobs", "21", "from 0 to 20"),
        ("logprobs", "1.5", "from 0 to 20"),
        ("logprobs", "true", "a number of alternatives here, got true"),
        ("stream", "1", "true or false, got 1"),
        ("model", "7", "a string, got 7"),
        ("model", "\"\"", "must not be an empty string"),
        ("ignore_eos", "\"true\"", "true or false"),
        ("logit_bias", "[]", "an object"),
        ("stop", "7", "a string or an array of strings"),
        ("kv_transfer_params", "\"x\"", "an object"),
        ("cache_salt", "\"\"", "must not be an empty string"),
    ] {
        refuses(with(field, wrong), Some(field), words);
    }
    refuses(
        completions(r#"{"prompt":"x","min_tokens":5,"max_tokens":4}"#),
        Some("min_tokens"),
        "5 is more than",
    );
    refuses(with("stop", r#"[""]"#), Some("stop[0]"), "1 to 1024 bytes, got an empty string");
    refuses(with("stop", "[\"a\",7]"), Some("stop[1]"), "got 7");
    refuses(with("stop", &json!(vec!["x"; 10_000]).to_string()), Some("stop"), "at most 16");
    refuses(with("stop", &json!("x".repeat(1025)).to_string()), None.or(Some("stop[0]")), "1 to 1024 bytes");
    refuses(with("stop_token_ids", "[1,-1]"), Some("stop_token_ids[1]"), "a token id from 0");
    refuses(with("logit_bias", r#"{"5":101}"#), Some("logit_bias.5"), "-100 to 100");
    for key in ["x", "-1", "05", "+5", "", "5.0", "99999999999"] {
        refuses(with("logit_bias", &json!({key: 1}).to_string()), Some("logit_bias"), "a token id");
    }
    refuses(with("stream_options", r#"{"include_usage":true}"#), Some("stream_options"), "only allowed when");
}

#[test]
fn null_and_absent_are_the_same_and_whole_floats_are_integers() {
    let plain = completions(r#"{"prompt":"x"}"#).expect("sound");
    let nulls = completions(
        r#"{"prompt":"x","model":null,"n":null,"stop":null,"temperature":null,"stream":null,"seed":null,
            "stream_options":null,"logit_bias":null,"suffix":null,"best_of":null,"kv_transfer_params":null}"#,
    );
    assert_eq!(nulls.expect("sound"), plain);
    assert_eq!(with("max_tokens", "16.0").expect("sound").max_tokens, Some(16));
    assert_eq!(with("top_k", "-1").expect("sound").sampling.top_k, Some(0));
    assert_eq!(with("unknown_field", "{\"a\":[1]}").expect("sound"), plain);
    assert_eq!(with("suffix", "\"\"").expect("sound"), plain);
}

#[test]
fn prompts_come_in_four_shapes_and_nothing_else() {
    let prompts = |prompt: &str| match completions(&format!("{{\"prompt\":{prompt}}}"))?.input {
        Input::Prompts(prompts) => Ok(prompts),
        Input::Chat(_) => panic!("completions have prompts"),
    };
    let text = |text: &str| Prompt::Text(text.to_owned());
    assert_eq!(prompts("\"a\""), Ok(vec![text("a")]));
    assert_eq!(prompts("[\"a\",\"b\"]"), Ok(vec![text("a"), text("b")]));
    assert_eq!(prompts("[1,2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
    assert_eq!(prompts("[[1],[2,3]]"), Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]));
    assert_eq!(prompts("[[1],\"a\"]"), Ok(vec![Prompt::Tokens(vec![1]), text("a")]));
    for (wrong, param, words) in [
        ("null", "prompt", "missing"),
        ("\"\"", "prompt", "empty"),
        ("[]", "prompt", "empty"),
        ("[\"a\",\"\"]", "prompt[1]", "empty"),
        ("[[]]", "prompt[0]", "empty"),
        ("[1,\"a\"]", "prompt[1]", "a token id"),
        ("[1,-1]", "prompt[1]", "a token id"),
        ("[1.5]", "prompt[0]", "a token id"),
        ("[4294967296]", "prompt[0]", "a token id"),
        ("{}", "prompt", "a string"),
        ("true", "prompt", "a string"),
        ("[[[1]]]", "prompt[0][0]", "a token id"),
    ] {
        refuses(prompts(wrong), Some(param), words);
    }
    refuses(completions("{}"), Some("prompt"), "missing");
    refuses(prompts(&json!(vec!["x"; 257]).to_string()), Some("prompt"), "at most 256");
    refuses(completions(&json!({"prompt": vec!["x"; 200], "n": 2}).to_string()), Some("n"), "256 sequences");
}

#[test]
fn a_million_tokens_are_read_and_ids_are_held_to_the_vocabulary() {
    let body = json!({"prompt": vec![7; 1_000_000]}).to_string();
    let limits = |vocab, prompt_tokens| ParseLimits { vocab, prompt_tokens, ..ParseLimits::default() };
    let read = |vocab, tokens| parse(Endpoint::Completions, body.as_bytes(), &limits(vocab, tokens));
    assert!(read(Some(8), 1_000_000).is_ok());
    refuses(read(Some(7), 1_000_000), Some("prompt[0]"), "a token id from 0 to 6, got 7");
    refuses(read(None, 999_999), Some("prompt"), "at most 999999");
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    for (field, value) in [("best_of", "2"), ("suffix", "\"x\""), ("use_beam_search", "true")] {
        refuses(with(field, value), Some(field), "not supported");
    }
    assert!(with("best_of", "1").is_ok() && with("response_format", r#"{"type":"text"}"#).is_ok());
    let user = json!([{"role": "user", "content": "x"}]);
    refuses(chat(json!({"messages": user, "chat_template": "x"})), Some("chat_template"), "not supported");
    refuses(chat(json!({"messages": user, "tool_choice": "required"})), Some("tool_choice"), "no `tools`");
    let named = json!({"type": "function", "function": {"name": "f"}});
    refuses(chat(json!({"messages": user, "tool_choice": named})), Some("tool_choice"), "not in `tools`");
    let image =
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]);
    refuses(
        chat(json!({"messages": image})),
        Some("messages[0].content[0].type"),
        "`image_url`; this model reads text",
    );
}

#[test]
fn restrictions_and_prompt_options_are_checked_with_vllms_bounds() {
    for (field, value, param, words) in [
        ("allowed_token_ids", "[]", "allowed_token_ids", "is empty"),
        ("allowed_token_ids", "7", "allowed_token_ids", "an array of at most 262144"),
        ("allowed_token_ids", "[1,-1]", "allowed_token_ids[1]", "a token id"),
        ("bad_words", "\"x\"", "bad_words", "an array of at most 128"),
        ("bad_words", r#"["x",""]"#, "bad_words[1]", "a string of 1 to 1024 bytes"),
        ("prompt_logprobs", "21", "prompt_logprobs", "an integer from 0 to 20"),
        ("prompt_logprobs", "-1", "prompt_logprobs", "an integer from 0 to 20"),
        ("truncate_prompt_tokens", "-2", "truncate_prompt_tokens", "an integer from -1"),
        ("truncate_prompt_tokens", "0", "truncate_prompt_tokens", "leaves no prompt"),
        ("truncation_side", "\"middle\"", "truncation_side", "\"left\" or \"right\""),
    ] {
        refuses(with(field, value), Some(param), words);
    }
    let words = json!(vec!["x"; 129]).to_string();
    refuses(with("bad_words", &words), Some("bad_words"), "at most 128");
    let vocab = ParseLimits { vocab: Some(8), ..ParseLimits::default() };
    let outside = parse(Endpoint::Completions, br#"{"prompt":"x","allowed_token_ids":[7,8]}"#, &vocab);
    refuses(outside, Some("allowed_token_ids[1]"), "a token id from 0 to 7");
    let streamed =
        |top: u32| completions(&format!(r#"{{"prompt":"x","stream":true,"prompt_logprobs":{top}}}"#));
    refuses(streamed(1), Some("prompt_logprobs"), "cannot be streamed");
    assert_eq!(streamed(0).expect("as in vLLM").prompt.logprobs, None);

    let request = completions(
        r#"{"prompt":"x","allowed_token_ids":[3,5],"bad_words":["no"],"prompt_logprobs":2,
            "truncate_prompt_tokens":-1,"truncation_side":"left"}"#,
    )
    .expect("sound");
    assert_eq!(request.restrictions.allowed_token_ids, Some(vec![3, 5]));
    assert_eq!(request.restrictions.bad_words, ["no"]);
    let left = Truncation { tokens: None, side: Some(TruncationSide::Left) };
    assert_eq!(request.prompt, PromptOptions { logprobs: Some(2), truncation: Some(left) });
    let plain = with("truncate_prompt_tokens", "9").expect("sound").prompt.truncation;
    assert_eq!(plain, Some(Truncation { tokens: Some(9), side: None }));
}

#[test]
fn a_router_leaves_the_bounds_of_restrictions_to_engines() {
    let limits = ParseLimits::of_any_engine(1 << 20);
    let body = json!({
        "prompt": "x", "allowed_token_ids": vec![1; 50_000], "bad_words": [""], "prompt_logprobs": -1,
        "truncate_prompt_tokens": 0,
    });
    let request = parse(Endpoint::Completions, body.to_string().as_bytes(), &limits).expect("not read here");
    assert_eq!(request.restrictions.allowed_token_ids, None);
    assert_eq!(request.prompt, PromptOptions::default());
}

#[test]
fn fields_of_other_engines_are_left_to_them() {
    let limits = ParseLimits::of_any_engine(1 << 20);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]},
            {"role": "function", "name": "f", "content": "7"},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "chat_template": "x",
        "guided_regex": "a+",
        "prompt_logprobs": 1,
    });
    let read = |body: &Value| parse(Endpoint::Chat, body.to_string().as_bytes(), &limits);
    assert!(read(&body).is_ok());
    // Known fields must still be well formed: an engine's parser would refuse them after the prefill.
    for (field, wrong) in [("tool_choice", json!(7)), ("temperature", json!("hot")), ("messages", json!([7]))]
    {
        let mut body = body.clone();
        body[field] = wrong;
        let error = read(&body).expect_err(field);
        assert!(error.status == 400 && error.param.is_some_and(|param| param.starts_with(field)));
    }
}

#[test]
fn amounts_for_other_engines_are_left_to_them() {
    let limits = ParseLimits::of_any_engine(4 << 20);
    let read = |endpoint, body: Value| parse(endpoint, body.to_string().as_bytes(), &limits);
    let many = json!({
        "prompt": vec!["x"; 300], "n": 16_384, "stop": vec!["x"; 17], "stop_token_ids": vec![1; 200],
        "logprobs": -1, "temperature": 200.0, "repetition_penalty": 101, "logit_bias": {"5": 1000.0},
    });
    let request = read(Endpoint::Completions, many).expect("each is an engine's to refuse");
    assert_eq!((request.sequences(), request.logprobs), (300 * 16_384, Some(u32::MAX)));
    let call = json!({"function": {"name": "f", "arguments": "{}"}});
    let user = json!({"role": "user", "content": "x"});
    let calls = json!({"role": "assistant", "tool_calls": vec![call; 200]});
    let messages = [vec![user; 5000], vec![calls]].concat();
    let tools = vec![json!({}); 600];
    let chat = json!({"messages": messages, "tools": tools, "logprobs": true, "top_logprobs": 50});
    assert_eq!(read(Endpoint::Chat, chat).expect("so is each of these").logprobs, Some(50));
    // Values that no engine accepts are refused before the prefill. The message names no range of a particular engine.
    for (field, wrong, words) in [
        ("n", json!(0), "`n` must be an integer of at least 1, got 0"),
        ("n", json!("2"), "`n` must be an integer of at least 1, got the string \"2\""),
        ("n", json!(16_385), "`n` must be an integer of at most 16384, got 16385"),
        ("logprobs", json!(-2), "`logprobs` must be an integer of at least -1, got -2"),
        ("logprobs", json!(true), "`logprobs` must be a number of alternatives here, got true"),
        ("temperature", json!(-1), "`temperature` must be a number from 0 that a 32-bit float can hold"),
        ("repetition_penalty", json!(0), "`repetition_penalty` must be a number over 0, got 0"),
        ("logit_bias", json!({"5": "x"}), "`logit_bias.5` must be a number, got"),
        ("stop", json!([""]), "`stop[0]` must be a string that is not empty"),
    ] {
        let error = read(Endpoint::Completions, json!({"prompt": "x", field: wrong})).expect_err(field);
        assert!(error.message.starts_with(words), "{}", error.message);
        assert!(error.param.is_some_and(|param| param.starts_with(field)), "{field}");
    }
}

#[test]
fn conversations_are_checked_message_by_message() {
    let one = |message: Value| chat(json!({"messages": [message]}));
    refuses(chat(json!({})), Some("messages"), "missing");
    refuses(chat(json!({"messages": []})), Some("messages"), "empty");
    refuses(chat(json!({"messages": "hi"})), Some("messages"), "an array");
    refuses(one(json!("hi")), Some("messages[0]"), "an object");
    refuses(one(json!({"content": "hi"})), Some("messages[0].role"), "missing");
    refuses(
        one(json!({"role": "root", "content": "hi"})),
        Some("messages[0].role"),
        "got the string \"root\"",
    );
    refuses(one(json!({"role": "user"})), Some("messages[0].content"), "missing");
    refuses(one(json!({"role": "user", "content": 5})), Some("messages[0].content"), "got 5");
    refuses(one(json!({"role": "user", "content": [5]})), Some("messages[0].content[0]"), "with `type`");
    refuses(
        one(json!({"role": "user", "content": [{"type": "text"}]})),
        Some("messages[0].content[0].text"),
        "missing",
    );
    let both = json!({"messages": [{"role": "user", "content": "x"}], "continue_final_message": true,
        "add_generation_prompt": true});
    refuses(chat(both), Some("continue_final_message"), "cannot both");
    let top = json!({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2});
    refuses(chat(top), Some("top_logprobs"), "needs `logprobs`");
}

#[test]
fn content_parts_tool_calls_and_flags_reach_the_template() {
    let request = chat(json!({
        "messages": [
            {"role": "developer", "content": "be brief", "name": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": false},
        "logprobs": true, "top_logprobs": 3, "max_tokens": 5, "max_completion_tokens": 7, "stop": "x",
        "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    }))
    .expect("sound");
    assert_eq!(
        (request.logprobs, request.max_tokens, request.stop.as_slice()),
        (Some(3), Some(7), &["x".into()][..])
    );
    assert!(request.stream_options.include_usage && request.stream_options.continuous_usage_stats);
    let Input::Chat(chat) = request.input else { panic!("a conversation") };
    assert_eq!(chat.messages[0], json!({"role": "developer", "content": "be brief", "name": "d"}));
    assert_eq!(chat.messages[1]["content"], "a\nb");
    assert_eq!(chat.messages[2]["content"], "");
    assert_eq!(chat.messages[2]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
    assert!(chat.add_generation_prompt && !chat.continue_final_message);
    assert_eq!((chat.tools.len(), &chat.template_kwargs["enable_thinking"]), (1, &json!(false)));
}

#[test]
fn fields_of_tools_and_reasoning_are_checked_and_reach_the_template() {
    let user = json!({"role": "user", "content": "x"});
    let with = |field: &str, value: Value| chat(json!({"messages": [user], field: value}));
    refuses(with("parallel_tool_calls", json!("yes")), Some("parallel_tool_calls"), "true or false");
    refuses(with("include_reasoning", json!(1)), Some("include_reasoning"), "true or false");
    refuses(with("reasoning_effort", json!("huge")), Some("reasoning_effort"), "none, minimal, low");
    for wrong in [json!(-2), json!(1.5), json!("5"), json!(true)] {
        refuses(with("thinking_token_budget", wrong), Some("thinking_token_budget"), "an integer from -1");
    }
    for (value, budget) in [(json!(0), Some(0)), (json!(5), Some(5)), (json!(-1), None), (Value::Null, None)]
    {
        let read = with("thinking_token_budget", value).expect("sound");
        assert_eq!(read.thinking_token_budget, budget);
    }

    let read = |body: Value| match chat(body).expect("sound").input {
        Input::Chat(chat) => *chat,
        Input::Prompts(_) => panic!("a conversation"),
    };
    let plain = read(json!({"messages": [user]}));
    assert!(plain.parallel_tool_calls && plain.include_reasoning && plain.template_kwargs.is_empty());
    let one = read(json!({"messages": [user], "parallel_tool_calls": false, "include_reasoning": false}));
    assert!(!one.parallel_tool_calls && !one.include_reasoning);
    // As in vLLM: an effort turns thinking on or off, unless the client does.
    let kwargs = |body| Value::Object(read(body).template_kwargs);
    assert_eq!(
        kwargs(json!({"messages": [user], "reasoning_effort": "none"})),
        json!({"reasoning_effort": "none", "enable_thinking": false})
    );
    assert_eq!(
        kwargs(
            json!({"messages": [user], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}})
        ),
        json!({"enable_thinking": false, "reasoning_effort": "low"})
    );
    // Templates read one of two names; a message without calls has none.
    for name in ["reasoning", "reasoning_content"] {
        let message = json!({"role": "assistant", "content": "y", name: "Hm.", "tool_calls": []});
        assert_eq!(
            read(json!({"messages": [message]})).messages[0],
            json!({"role": "assistant", "content": "y", "reasoning": "Hm.", "reasoning_content": "Hm."})
        );
    }
}

#[test]
fn tokenize_and_detokenize_read_vllms_shapes() {
    let limits = ParseLimits::default();
    let object = |value: Value| parse_object(value.to_string().as_bytes(), &limits).expect("an object");
    let tokenize = |value| TokenizeRequest::from_map(&object(value), &limits);
    let request = tokenize(json!({"model": "m", "prompt": "", "return_token_strs": true})).expect("sound");
    assert_eq!(
        (request.input, request.return_token_strs),
        (Input::Prompts(vec![Prompt::Text("".into())]), true)
    );
    assert!(matches!(
        tokenize(json!({"messages": [{"role": "user", "content": "x"}]})).expect("sound").input,
        Input::Chat(_)
    ));
    refuses(tokenize(json!({})), Some("prompt"), "missing");
    refuses(tokenize(json!({"prompt": "x", "messages": []})), Some("prompt"), "cannot both");
    refuses(tokenize(json!({"prompt": ["x"]})), Some("prompt"), "a string");
    let detokenize = |value| DetokenizeRequest::from_map(&object(value), &limits);
    assert_eq!(detokenize(json!({"tokens": [1, 2]})).expect("sound").tokens, [1, 2]);
    refuses(detokenize(json!({"tokens": [1, "a"]})), Some("tokens[1]"), "a token id");
    refuses(detokenize(json!({})), Some("tokens"), "missing");
}
