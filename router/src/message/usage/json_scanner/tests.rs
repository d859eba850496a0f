//! Facts of whole replies and of their pieces, as the scanner finds them.

use super::*;

fn cut(text: &str, piece: usize) -> JsonScanner {
    let mut scanner = JsonScanner::default();
    text.as_bytes().chunks(piece).for_each(|piece| scanner.feed(piece));
    scanner
}

/// Scans a text in any split, with the same result.
fn read(text: &str) -> JsonScanner {
    let whole = JsonScanner::of(text.as_bytes());
    for piece in (1..text.len().min(12)).chain([57, 301]) {
        let cut = cut(text, piece);
        let facts = |scanner: &JsonScanner| {
            let error = scanner.error().map(<[u8]>::to_vec);
            let counted = (scanner.usage(), scanner.has_usage(), scanner.choice());
            (counted, scanner.finish(), error, scanner.is_error(), scanner.has_choice(), scanner.is_whole())
        };
        assert_eq!(facts(&cut), facts(&whole), "in pieces of {piece}: {text}");
    }
    whole
}

const USAGE: Option<Usage> = Some(Usage { prompt: 7, cached: 4, completion: 2 });
const TOKENS: &str =
    r#""usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}"#;

#[test]
fn usage_is_parsed_at_any_position_and_split() {
    let ids = (0..2000).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    for text in [
        format!("{{{TOKENS}}}"),
        format!(r#"{{{TOKENS},"prompt_token_ids":[{ids}]}}"#),
        format!(
            r#"{{"choices":[{{"text":"a","finish_reason":"stop"}}],{TOKENS},"prompt_logprobs":[null,{{"7":{{"rank":1}}}}]}}"#
        ),
        format!(r#"{{"choices":[],"prompt_logprobs":[{{"a":[[{ids}]]}}], {TOKENS} }}"#),
        format!(
            r#"{{"type":"response.completed","response":{{"tools":[{{"usage":{{}}}}],{TOKENS},"error":null}}}}"#
        ),
    ] {
        let scanner = read(&text);
        assert!(scanner.usage() == USAGE && scanner.is_whole() && !scanner.is_error(), "{text}");
    }
    assert_eq!(
        read(r#"{"choices":[{"finish_reason":null},{"finish_reason":"length"}]}"#).finish(),
        Some(FinishReason::Length)
    );
}

#[test]
fn a_text_or_a_nested_member_does_not_count_as_usage_or_error() {
    for text in [
        format!(r#"{{"choices":[{{"text":{:?},"error":{{}}}}]}}"#, format!("{{{TOKENS}, \"error\": {{}}}}")),
        format!(r#"{{"tools":[{{{TOKENS}}}],"metadata":{{{TOKENS},"error":{{"code":400}}}}}}"#),
        format!(r#"{{"a \"usage":{{"prompt_tokens":1}},"\\":{{{TOKENS}}}}}"#),
        format!(r#"[{{{TOKENS},"error":{{}}}}]"#),
        r#"{"choices":[{"message":{"usage":{"prompt_tokens":1},"finish_reason":"stop"}}]}"#.to_owned(),
        r#"{"error":null,"usage":null,"object":"list","type":7}"#.to_owned(),
        r#"{"error":"","usage":{}}"#.to_owned(),
        r#"{"error":false,"usage":[{"prompt_tokens":1}]}"#.to_owned(),
        r#"{"response":[{"usage":{"prompt_tokens":1}}],"object":"err\u006fr"}"#.to_owned(),
    ] {
        let scanner = read(&text);
        assert_eq!((scanner.usage(), scanner.finish(), scanner.is_error()), (None, None, false), "{text}");
        assert!(scanner.is_whole(), "{text}");
    }
}

#[test]
fn a_usage_is_seen_although_it_cannot_be_read_and_a_choice_by_its_number() {
    for (usage, has) in
        [("{}", true), ("7", true), (" [7]", true), ("\"\"", true), ("false", true), ("null", false)]
    {
        let scanner = read(&format!(r#"{{"id":"u","usage":{usage},"x":{{"index":3}}}}"#));
        assert_eq!((scanner.has_usage(), scanner.usage(), scanner.choice()), (has, None, None), "{usage}");
    }
    for (choices, choice) in [
        (r#"[{"index":12,"delta":{"index":3}}]"#, Some(12)),
        (r#"[{"delta":{"tool_calls":[{"index":3}]},"index": 0}]"#, Some(0)),
        (r#"[{"index":null}]"#, Some(0)),
        (r#"[{"index":1},{"index":2}]"#, None),
        (r#"[{"index":99999999999999999999}]"#, Some(usize::MAX)),
        ("[]", None),
    ] {
        assert_eq!(read(&format!(r#"{{"choices":{choices}}}"#)).choice(), choice, "{choices}");
    }
}

#[test]
fn an_error_is_read_in_each_of_its_dialects() {
    for (text, error) in [
        (r#"{"error":{"message":"}\"{"}}"#, Some(r#"{"message":"}\"{"}"#)),
        (r#"{"id":1,"error":"out of memory"}"#, Some("\"out of memory\"")),
        (r#"{"object" : "error","message":"x"}"#, None),
        (r#"{"type":"error","message":"x"}"#, None),
        (r#"{"response":{"id":"r","error":{"code":"server_error"}}}"#, Some(r#"{"code":"server_error"}"#)),
    ] {
        let scanner = read(text);
        assert!(scanner.is_error(), "{text}");
        assert_eq!(scanner.error(), error.map(str::as_bytes), "{text}");
    }
    for (text, begins) in [
        (r#"{"error":{"#, true),
        (r#"{"choices":[{"text":"a"}],"error":{"message":"10.0.0"#, true),
        (r#"{"error":"out"#, true),
        ("{\"error\":\"", false),
        (r#"{"error":""}"#, false),
        (r#"{"error":null,"choices":[{"error":{"#, false),
        (r#"{"metadata":{"error":{"#, false),
    ] {
        assert_eq!(read(text).begins_error(), begins, "{text}");
    }
    let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(CAPTURED_BYTES_MAX));
    assert_eq!(cut(&long, 4096).error(), Some(&b""[..]), "bounded");
}

#[test]
fn a_value_that_is_cut_empty_or_something_else_is_not_whole() {
    let whole = format!(r#"{{"choices":[{{"text":"a\"}}","n":[1,[2]]}}],{TOKENS}}}"#);
    assert!(read(&format!(" \r\n{whole}\n ")).is_whole());
    for end in 0..whole.len() {
        assert!(!JsonScanner::of(&whole.as_bytes()[..end]).is_whole(), "{}", &whole[..end]);
    }
    for text in
        ["", " ", "<html>{}</html>", "Internal Server Error", "{}{}", "{} x", "}", "{]", "[}", "\"{}\"", "7"]
    {
        assert!(!read(text).is_whole(), "{text}");
    }
    assert!(
        read("[[],{}]").is_whole()
            && !JsonScanner::of(b"[]").is_object()
            && JsonScanner::of(b"{}").is_object()
    );
}

proptest::proptest! {
    /// Any JSON is complete, and no prefix of it is.
    #[test]
    fn any_json_is_whole_and_none_of_its_beginnings_is(text in json(), cut in 0..1000_usize) {
        assert!(read(&text).is_whole());
        assert!(!JsonScanner::of(&text.as_bytes()[..cut % text.len()]).is_whole());
    }

    #[test]
    fn any_bytes_are_parsed_alike_at_any_split(text in r#"[\[\]{}",:\\ae]{0,60}"#) {
        read(&text);
    }
}

fn json() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    let leaf = proptest::prop_oneof![
        Just(serde_json::Value::Null),
        any::<i64>().prop_map(Into::into),
        ".*".prop_map(serde_json::Value::from),
    ];
    let names = proptest::prop_oneof![Just("usage".to_owned()), Just("choices".to_owned()), ".{0,4}"];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        proptest::prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(serde_json::Value::from),
            proptest::collection::hash_map(names.clone(), inner, 0..6)
                .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
        ]
    })
    .prop_map(|value| serde_json::json!([value]).to_string())
}
