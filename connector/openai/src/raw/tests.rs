//! The raw body compared with the parsed one: same verdict, same message, same meaning.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A small version of the router's rules.
struct RouterRules;

impl InternalFields for RouterRules {
    fn is_extension(&self, field: &str) -> bool {
        field == "extra_body"
    }

    fn is_internal(&self, level: FieldLevel, name: &str) -> bool {
        name == "kv_transfer_params" || (level != FieldLevel::Inside && name.starts_with("remote_"))
    }
}

const CHAT: Endpoint = Endpoint::Chat;
const COMPLETIONS: Endpoint = Endpoint::Completions;

fn read(endpoint: Endpoint, text: &str) -> Result<(RawBody, RequestOutline), ApiError> {
    read_for(&ParseLimits::default(), endpoint, text)
}

fn read_for(
    limits: &ParseLimits,
    endpoint: Endpoint,
    text: &str,
) -> Result<(RawBody, RequestOutline), ApiError> {
    RawBody::generate(Bytes::from(text.to_owned()), endpoint, limits, &RouterRules)
}

fn joined(pieces: &[Bytes]) -> String {
    String::from_utf8(pieces.concat()).unwrap()
}

/// The result of the parser, as the reference.
fn parsed(
    limits: &ParseLimits,
    endpoint: Endpoint,
    text: &str,
) -> Result<(Map<String, Value>, GenerateRequest), ApiError> {
    let mut map = parse_object(text.as_bytes(), limits)?;
    strip(&mut map, &RouterRules);
    let request = GenerateRequest::from_map(endpoint, &map, limits)?;
    Ok((map, request))
}

fn assert_alike(endpoint: Endpoint, text: &str) {
    assert_alike_for(&ParseLimits::default(), endpoint, text);
    assert_alike_for(&ParseLimits::of_any_engine(32 << 20), endpoint, text);
}

fn assert_alike_for(limits: &ParseLimits, endpoint: Endpoint, text: &str) {
    match (read_for(limits, endpoint, text), parsed(limits, endpoint, text)) {
        (Err(raw), Err(tree)) => assert_eq!(raw, tree, "{text}"),
        (Ok((raw, outline)), Ok((mut map, mut request))) => {
            assert_eq!(outline.prompts, request.input.prompts(), "{text}");
            request.input = Input::Prompts(Vec::new());
            assert_eq!(outline.request, request, "{text}");
            let written = joined(&raw.write(&[("model", b"\"ours\"")], &["stream"]));
            let written = parse_object(written.as_bytes(), limits).expect("one object, each name once");
            map.shift_remove("stream");
            map.insert("model".to_owned(), json!("ours"));
            assert_eq!(Value::Object(written), Value::Object(map), "{text}");
        }
        (raw, tree) => panic!("{text}: {:?} against {:?}", raw.map(drop), tree.map(drop)),
    }
}

#[test]
fn an_unchanged_body_is_forwarded_as_a_slice() {
    let prompt = "p".repeat(1 << 20);
    let text = format!(r#"{{"model":"m","temperature" : 0.10 ,"prompt":"{prompt}","x":[1.50]}}"#);
    let (body, _) = read(COMPLETIONS, &text).unwrap();
    let pieces = body.write(&[("model", b"\"n\"")], &[]);
    assert_eq!(
        joined(&pieces),
        format!(r#"{{"model":"n","temperature" : 0.10 ,"prompt":"{prompt}","x":[1.50]}}"#)
    );
    let inside = |piece: &Bytes| body.bytes.as_ptr_range().contains(&piece.as_ptr());
    let (shared, copied): (Vec<&Bytes>, Vec<&Bytes>) = pieces.iter().partition(|piece| inside(piece));
    assert_eq!(shared.len(), 1);
    assert!(copied.iter().map(|piece| piece.len()).sum::<usize>() < 100);
}

#[test]
fn a_body_without_fields_of_the_caller_is_one_object() {
    for (text, expected) in [
        (r#"{"a":1,"b":[2],"c":{"d":3}}"#, r#"{"a":1,"b":[2],"c":{"d":3}}"#),
        (r#"{"kv_transfer_params":{},"a":1}"#, r#"{"a":1}"#),
        (r#"{"gone":1,"a":1}"#, r#"{"a":1}"#),
        (r#"{"a":{"kv_transfer_params":1}}"#, r#"{"a":{}}"#),
        (r#"{"gone":1}"#, "{}"),
        ("{}", "{}"),
    ] {
        let body = RawBody::any(Bytes::from(text), &ParseLimits::default(), &RouterRules).expect(text);
        let written: Value = serde_json::from_str(&joined(&body.write(&[], &["gone"]))).expect(text);
        assert_eq!(written, serde_json::from_str::<Value>(expected).expect(expected), "{text}");
    }
}

#[test]
fn only_an_ambiguous_part_is_rewritten() {
    let text = r#"{"model":"m","prompt":"x","a":{"b":1.10,"b":2.20},"c" : 3.30,"\u0064":4.40,
        "remote_host":"x","extra_body":{"remote_port":1,"y":{"remote_x":0}},"e":{"remote_kept":[5.50]}}"#;
    let (body, _) = read(COMPLETIONS, text).unwrap();
    let written = joined(&body.write(&[("model", b"\"n\"")], &[]));
    assert_eq!(
        written,
        r#"{"model":"n","prompt":"x","a":{"b":2.20},"c" : 3.30,"d":4.40,"extra_body":{"y":{}},"e":{"remote_kept":[5.50]}}"#
    );
    assert_eq!(body.field("a"), Some(b"{\"b\":2.20}".as_slice()));
    assert_eq!((body.string("d"), body.string("prompt")), (None, Some(Cow::Borrowed("x"))));
    assert!(!body.has("remote_host") && body.has("c"));
}

#[test]
fn ordinary_bodies_are_never_ambiguous() {
    for (endpoint, text) in [
        (COMPLETIONS, r#"{"model":"m","prompt":"hello","max_tokens":5,"stream":true}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":["a","b"]}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":[1,2,3]}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":[[1],[2,3]]}"#),
        (CHAT, r#"{"model":"m","messages":[{"role":"user","content":"hi \"you\""}],"x_unknown":{"a":1}}"#),
        (
            CHAT,
            r#"{"messages":[{"role":"system","content":[{"type":"text","text":"a"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
            "function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"1","content":"r"}],
            "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
            "chat_template_kwargs":{"enable_thinking":false},"tool_choice":"auto"}"#,
        ),
    ] {
        let limits = ParseLimits::default();
        let (_, shapes) =
            RawBody::walk(Bytes::from(text.to_owned()), Some(endpoint), &limits, &RouterRules).unwrap();
        assert!(shapes.prompts().is_some(), "{text}");
        assert_alike(endpoint, text);
    }
}

#[test]
fn bodies_on_the_edge_are_judged_as_the_parser_judges_them() {
    for text in [
        "",
        "{}",
        "[]",
        "null",
        "{\"prompt\":\"x\"",
        "{\"prompt\":\"x\"}}",
        "{\"prompt\":\"x\",\"prompt\":\"y\"}",
        "{\"prompt\":\"x\",\"pr\\u006fmpt\":\"y\"}",
        "{\"pr\\u006fmpt\":\"y\"}",
        "\u{feff}{\"prompt\":\"x\"}",
        "{\"prompt\":\"x\",\"kv_transfer_params\":{},\"kv_transfer_params\":{}}",
        "{\"prompt\":null}",
        "{\"prompt\":[1,\"a\"]}",
        "{\"prompt\":[\"a\",1]}",
        "{\"prompt\":[16.0]}",
        "{\"prompt\":[-1]}",
        "{\"prompt\":[4294967296]}",
        "{\"prompt\":[2147483648]}",
        "{\"prompt\":[[]]}",
        "{\"prompt\":[]}",
        "{\"prompt\":\"\"}",
        "{\"prompt\":\"x\",\"n\":17}",
        "{\"prompt\":\"x\",\"n\":2147483647,\"logprobs\":-1}",
        "{\"prompt\":\"x\",\"n\":2147483648}",
        "{\"prompt\":\"x\",\"temperature\":1e300,\"repetition_penalty\":200,\"logit_bias\":{\"7\":-5e9}}",
        "{\"prompt\":[\"a\",\"b\"],\"n\":16}",
        "{\"messages\":[]}",
        "{\"messages\":[{\"role\":\"user\"}]}",
        "{\"messages\":[{\"role\":\"assistant\"}]}",
        "{\"messages\":[{\"role\":\"us\\u0065r\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"unknown\",\"role\":\"user\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"role\":\"unknown\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":null}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":null}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[1]}",
        "{\"prompt\":\"x\",\"extra\":1e400}",
        "{\"prompt\":\"x\",\"extra\":\"\\ud800\"}",
        "{\"prompt\":\"x\",\"temperature\":NaN}",
        "{\"prompt\":\"x\",\"kv_transfer_params\":[NaN]}",
    ] {
        assert_alike(COMPLETIONS, text);
        assert_alike(CHAT, text);
    }
    let fields = |count: usize| {
        let fields: Vec<String> = (0..count).map(|n| format!("\"f{n}\":0")).collect();
        format!("{{\"prompt\":\"x\",{}}}", fields.join(","))
    };
    assert_alike(COMPLETIONS, &fields(FIELDS_MAX - 1));
    assert_eq!(read(COMPLETIONS, &fields(FIELDS_MAX)).unwrap_err().status, 400);
}

/// Random JSON text with spaces, escapes and duplicate names.
fn any_text() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "a",
        "kv_transfer_params",
        "remote_x",
        "kv\\u005ftransfer_params",
        "\\u0061",
        "é",
    ]);
    let leaf = prop::sample::select(vec![
        "null",
        "true",
        "0",
        "-0",
        "1.50",
        "1e2",
        "2147483647",
        "12345678901234567890123",
        "\"\"",
        "\"user\"",
        "\"assistant\"",
        "\"text\"",
        "\"x\\n\"",
        "\"\\u00e9\"",
        "\"{}\"",
        "\"{\\\"a\\\":1}\"",
        "\"auto\"",
    ])
    .prop_map(str::to_owned);
    let space = prop::sample::select(vec!["", " ", "\n\t "]);
    leaf.prop_recursive(5, 32, 5, move |inner| {
        let fields = prop::collection::vec((name.clone(), inner.clone()), 0..5);
        prop_oneof![
            (prop::collection::vec(inner, 0..5), space.clone())
                .prop_map(|(items, space)| format!("[{space}{}{space}]", items.join(","))),
            (fields, space.clone()).prop_map(|(fields, space)| {
                let fields: Vec<_> = fields.iter().map(|(n, v)| format!("\"{n}\"{space}:{v}")).collect();
                format!("{{{space}{}}}", fields.join(","))
            }),
        ]
    })
}

fn any_message() -> impl Strategy<Value = String> {
    let role = prop::sample::select(vec!["user", "assistant", "tool", "unknown"]);
    let call =
        any_text().prop_map(|arguments| format!(r#"{{"function":{{"name":"f","arguments":{arguments}}}}}"#));
    let part = prop_oneof![
        3 => any_text(),
        1 => any_text().prop_map(|text| format!(r#"{{"type":"text","text":{text}}}"#)),
    ];
    (role, prop::collection::vec(part, 0..3), prop::option::of(call)).prop_map(|(role, parts, call)| {
        let calls = call.map(|call| format!(r#","tool_calls":[{call}]"#)).unwrap_or_default();
        format!(r#"{{"role":"{role}","content":[{}]{calls}}}"#, parts.join(","))
    })
}

fn any_body() -> impl Strategy<Value = String> {
    const NAMES: [&str; 24] = [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "n",
        "stream",
        "stream_options",
        "stop",
        "temperature",
        "logit_bias",
        "tools",
        "tool_choice",
        "documents",
        "chat_template_kwargs",
        "response_format",
        "user",
        "x",
        "kv_transfer_params",
        "remote_host",
        "kv\\u005ftransfer_params",
        "extra_body",
        "mod\\u0065l",
        "suffix",
        "continue_final_message",
    ];
    let prompt = prop_oneof![
        any_text(),
        prop::sample::select(vec!["\"x\"", "[\"a\",\"b\"]", "[1,2]", "[[1],[2]]"]).prop_map(str::to_owned)
    ];
    let messages = prop::collection::vec(any_message(), 0..3).prop_map(|all| format!("[{}]", all.join(",")));
    let rest = prop::collection::vec((prop::sample::select(NAMES.to_vec()), any_text()), 0..4);
    (prompt, messages, rest, any::<bool>()).prop_map(|(prompt, messages, rest, space)| {
        let mut fields: Vec<String> =
            vec![format!("\"prompt\":{prompt}"), format!("\"messages\" : {messages}")];
        fields.extend(rest.iter().map(|(name, value)| format!("\"{name}\":{value}")));
        let length = fields.len();
        fields.rotate_left(rest.len() % length);
        let comma = if space { "\n , " } else { "," };
        format!("{{{}}}", fields.join(comma))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn generated_bodies_are_judged_and_written_as_the_parser_would(text in any_body()) {
        assert_alike(COMPLETIONS, &text);
        assert_alike(CHAT, &text);
    }

    #[test]
    fn randomly_changed_bytes_are_judged_like_the_parser(
        text in any_body(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = text.into_bytes();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        let limits = ParseLimits::default();
        let raw = RawBody::any(Bytes::from(bytes.clone()), &limits, &RouterRules).map(drop);
        prop_assert_eq!(raw, parse_object(&bytes, &limits).map(drop));
    }
}

#[test]
fn a_small_field_of_megabytes_is_named_and_not_parsed() {
    let arrays = |bytes: usize| format!("[{}[]]", "[],".repeat(bytes / 3));
    for (name, bytes) in
        [("stop", 32 << 20), ("stop", 66_000), ("temperature", 1 << 20), ("logit_bias", 2 << 20)]
    {
        let text = format!(r#"{{"prompt":"x","{name}":{}}}"#, arrays(bytes - 100));
        let error = read(COMPLETIONS, &text).unwrap_err();
        assert_eq!((error.status, error.code.as_deref()), (400, Some("field_too_long")), "{name}");
        assert_eq!(error.param.as_deref(), Some(name));
    }
    let text = format!(r#"{{"input":"x","user":{}}}"#, arrays(1 << 20));
    let error = RawBody::responses(text.into(), &ParseLimits::default(), &RouterRules).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("user"));
    let text = format!(r#"{{"prompt":"x","logit_bias":{}}}"#, arrays(1 << 19));
    assert_eq!(read(COMPLETIONS, &text).unwrap_err().code.as_deref(), Some("too_many_values"));
    let many = ["stop", "n", "seed", "user"].map(|name| format!(r#""{name}":{}"#, arrays(65_000)));
    let text = format!(r#"{{"prompt":"x",{}}}"#, many.join(","));
    assert_eq!(read(COMPLETIONS, &text).unwrap_err().code.as_deref(), Some("too_many_values"), "together");
}

#[test]
fn fields_of_other_engines_may_be_long() {
    let limits = ParseLimits::of_any_engine(32 << 20);
    let text = format!(r#"{{"prompt":"x","guided_grammar":"{}"}}"#, "g".repeat(1 << 20));
    assert!(read_for(&limits, COMPLETIONS, &text).is_ok());
}

#[test]
fn an_ambiguous_or_malformed_body_with_a_huge_tree_is_not_parsed() {
    let arrays = format!("{}[]", "[],".repeat(2 << 20));
    for text in [
        format!(r#"{{"prompt":[{arrays}]}}"#),
        format!(r#"{{"prompt":"x","x":[{arrays}],"stream":0}}"#),
        format!(r#"{{"prompt":"x","x":[{{"a":1,"a":2}},{arrays}]}}"#),
        format!(r#"{{"prompt":"x","x":[{arrays}"#),
        format!(r#"{{"x":[{arrays}],"x":1}}"#),
    ] {
        let error = read(COMPLETIONS, &text).unwrap_err();
        assert_eq!((error.status, error.code.as_deref()), (400, Some("too_many_values")), "{}", &text[..20]);
    }
    let sure = format!(r#"{{"prompt":"x","x":[{arrays}]}}"#);
    assert!(read(COMPLETIONS, &sure).is_ok(), "no tree is made of it");
    let arguments = format!(r#"{{\"a\":[{arrays}]}}"#);
    let chat = format!(
        r#"{{"messages":[{{"role":"assistant","content":null,"tool_calls":[
        {{"function":{{"name":"f","arguments":"{arguments}"}}}}]}}],"stream":0}}"#
    );
    assert_eq!(read(CHAT, &chat).unwrap_err().code.as_deref(), Some("too_many_values"));
}

#[test]
fn a_body_of_messages_is_checked_where_it_is_like_a_chat() {
    let read = |text: &str| RawBody::messages(text.to_owned().into(), &ParseLimits::default(), &RouterRules);
    let (body, outline) = read(
        r#"{"max_tokens":7,"messages":[{"role":"user"}],"metadata":{"user_id":"u"},"remote_host":"x","stream":true}"#,
    )
    .unwrap();
    assert_eq!((outline.request.max_tokens, outline.request.stream, outline.prompts), (Some(7), true, 1));
    assert_eq!((outline.request.user.as_deref(), body.has("remote_host")), (Some("u"), false));
    for (text, param) in [
        (r#"{"messages":[]}"#, "max_tokens"),
        (r#"{"max_tokens":7,"messages":null}"#, "messages"),
        (r#"{"max_tokens":7,"messages":"x"}"#, "messages"),
        (r#"{"max_tokens":0,"messages":[]}"#, "max_tokens"),
        (r#"{"max_tokens":"7","messages":[]}"#, "max_tokens"),
        (r#"{"max_tokens":7,"messages":[],"stream":1}"#, "stream"),
        (r#"{"max_tokens":7,"messages":[],"temperature":-1}"#, "temperature"),
    ] {
        let found = read(text).map(drop).map_err(|error| (error.status, error.param));
        assert_eq!(found, Err((400, Some(param.to_owned()))), "{text}");
    }
    let text = format!(r#"{{"max_tokens":7,"messages":[],"metadata":{{"x":"{}"}}}}"#, "m".repeat(1 << 20));
    assert_eq!(read(&text).unwrap_err().param.as_deref(), Some("metadata"));
}
