//! Parsers: whole texts of each format, every split of them, and hostile texts.

use proptest::prelude::*;
use serde_json::json;

use super::*;

const HERMES: OutputFormat = OutputFormat { calls: Some(CallFormat::Hermes), reasoning: None };
const LLAMA3: OutputFormat = OutputFormat { calls: Some(CallFormat::Llama3Json), reasoning: None };
const PYTHONIC: OutputFormat = OutputFormat { calls: Some(CallFormat::Pythonic), reasoning: None };
const MISTRAL: OutputFormat =
    OutputFormat { calls: Some(CallFormat::Mistral), reasoning: Some(ReasoningFormat::Mistral) };
const DEEPSEEK: OutputFormat =
    OutputFormat { calls: Some(CallFormat::DeepseekV3), reasoning: Some(ReasoningFormat::DeepseekR1) };
const QWEN3: OutputFormat =
    OutputFormat { calls: Some(CallFormat::Hermes), reasoning: Some(ReasoningFormat::Qwen3) };
const HARMONY: OutputFormat =
    OutputFormat { calls: Some(CallFormat::Harmony), reasoning: Some(ReasoningFormat::Harmony) };
const CODER: OutputFormat = OutputFormat { calls: Some(CallFormat::Qwen3Coder), reasoning: None };
const FORMATS: [OutputFormat; 8] = [HERMES, CODER, LLAMA3, PYTHONIC, MISTRAL, DEEPSEEK, QWEN3, HARMONY];

fn context() -> OutputContext {
    OutputContext {
        prompt: PromptEnd::Plain,
        functions: vec!["weather".to_owned(), "time".to_owned()],
        tools: vec![
            json!({"type": "function", "function": {"name": "weather", "parameters": {"properties": {
                "city": {"type": "string"}, "days": {"type": ["integer", "null"]}, "wind": {"type": "boolean"},
                "more": {"type": "object"},
            }}}}),
        ],
        forced: None,
        calls_shown: usize::MAX,
        hides_markers: false,
        exact: false,
    }
}

/// The parts of a text in pieces. Neighbours of the same kind are one part.
fn parts<'a>(
    format: OutputFormat,
    context: OutputContext,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<OutputPart> {
    let mut parser = OutputParser::new(format, context);
    let mut parts: Vec<OutputPart> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    let mut merged: Vec<OutputPart> = Vec::new();
    for part in parts {
        match (merged.last_mut(), &part) {
            (Some(OutputPart::Content(text)), OutputPart::Content(more))
            | (Some(OutputPart::Reasoning(text)), OutputPart::Reasoning(more))
            | (Some(OutputPart::Arguments(text)), OutputPart::Arguments(more)) => text.push_str(more),
            _ => merged.push(part),
        }
    }
    merged
}

/// Pieces that end at these bytes, as far as characters permit.
fn pieces(text: &str, cuts: impl IntoIterator<Item = usize>) -> Vec<&str> {
    let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| text.is_char_boundary(*cut)).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn reasoning(text: &str) -> OutputPart {
    OutputPart::Reasoning(text.to_owned())
}

fn content(text: &str) -> OutputPart {
    OutputPart::Content(text.to_owned())
}

fn call(name: &str, arguments: &str) -> [OutputPart; 2] {
    [OutputPart::Call(name.to_owned()), OutputPart::Arguments(arguments.to_owned())]
}

/// The text has these parts, whole, character by character, and in any two pieces.
#[track_caller]
fn has(format: OutputFormat, text: &str, expected: &[OutputPart]) {
    assert_eq!(parts(format, context(), [text]), expected, "{text}");
    assert_eq!(parts(format, context(), pieces(text, 0..text.len())), expected, "by character: {text}");
    for cut in 0..text.len() {
        assert_eq!(parts(format, context(), pieces(text, [cut])), expected, "cut at {cut}: {text}");
    }
}

const PARIS: &str = r#"{"city": "Paris"}"#;

fn two_calls() -> Vec<OutputPart> {
    [call("weather", PARIS), call("time", "{}")].concat()
}

#[test]
fn calls_of_hermes_are_found_between_content() {
    let text = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
                <tool_call>\n{\"arguments\": {}, \"name\": \"time\"}\n</tool_call>\n";
    has(HERMES, text, &[vec![content("Let me see.")], two_calls()].concat());
    // Several objects in one block, text behind it, and markers inside a string.
    let text = "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\":\"</tool_call>\\\"}<tool_call>\"}}\
                {\"name\":\"time\"}</tool_call> Done. ";
    let first = call("weather", "{\"city\":\"</tool_call>\\\"}<tool_call>\"}");
    has(HERMES, text, &[&first[..], &call("time", "{}"), &[content("Done. ")]].concat());
    // Arguments in a string, further fields, and an unknown function, which the client has to answer.
    let text = "<tool_call>{\"id\": [1, {\"a\": \"]\"}], \"name\": \"f\", \"n\": 3 , \
                \"arguments\": \"{\\\"a\\\":1}\"}</tool_call>";
    has(HERMES, text, &call("f", "{\"a\":1}"));
    has(HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &call("f", "{}"));
}

#[test]
fn what_is_no_call_is_content_as_written() {
    for text in [
        "no call",
        " \n spaces stay \n",
        "<tool_call>",
        "<tool_call>\n not JSON </tool_call> and more",
        "<tool_call>{\"name\": 7, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"two words\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\"}</tool_call>",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\" \"f\"}</tool_call>",
        "<tool_call>{\"name\": \"f",
        "<tool_cal",
        "a < b, <tool, <tool_call <tool_callx>",
        "</tool_call>",
    ] {
        has(HERMES, text, &[content(text)]);
    }
    let text = "<tool_call><tool_call>{\"name\": \"time\"}</tool_call>";
    has(HERMES, text, &[&[content("<tool_call>")][..], &call("time", "{}")].concat());
}

#[test]
fn what_follows_a_call_in_its_block_is_dropped_unless_the_block_stays_open() {
    let text = "<tool_call>{\"name\": \"time\"} trailing words</tool_call>Then.";
    has(HERMES, text, &[&call("time", "{}")[..], &[content("Then.")]].concat());
    let text = "<tool_call>{\"name\": \"time\"} words without an end";
    has(HERMES, text, &[&call("time", "{}")[..], &[content("words without an end")]].concat());
    // Cut off inside the arguments or the closing marker.
    has(HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", &call("f", "{\"a\": \"b"));
    has(HERMES, "<tool_call>{\"name\": \"time\"}\n</tool_", &call("time", "{}"));
}

#[test]
fn a_call_behind_one_that_is_not_closed_is_found() {
    let text = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n\
                <tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";
    has(HERMES, text, &two_calls());
    // The first object is not closed either.
    let text = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}\n\
                <tool_call>{\"name\": \"time\", \"arguments\": {}}\n";
    has(HERMES, text, &two_calls());
    let text = "<tool_call>{\"name\": \"time\"} and <tool_call>{\"name\": \"time\"} then <tool_call> words";
    let expected = [
        &call("time", "{}")[..],
        &[content("and")],
        &call("time", "{}"),
        &[content("then <tool_call> words")],
    ]
    .concat();
    has(HERMES, text, &expected);
    let text = "<tool_call><function=weather><parameter=city>Paris</parameter>\n<tool_call><function=time></tool_call>Then.";
    has(CODER, text, &[two_calls(), vec![content("Then.")]].concat());
    let text = "<function=weather><parameter=city>Paris</parameter><function=time></function>";
    has(CODER, text, &two_calls());
}

#[test]
fn arguments_in_tags_have_the_types_of_the_schema() {
    let text = "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n\
                </tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
    has(CODER, text, &[vec![content("Let me see.")], two_calls()].concat());
    let text = "<function=weather><parameter=days>2<parameter=city>\n\n2\n</parameter>junk<parameter=wind>True</parameter>\
                <parameter=more>\n{\"a\": [1]}\n</parameter><parameter=days>soon</parameter><parameter=x>3</function> Done.";
    let json = r#"{"days": 2, "city": "\n2", "wind": true, "more": {"a": [1]}, "days": "soon", "x": "3"}"#;
    has(CODER, text, &[&call("weather", json)[..], &[content("Done.")]].concat());
    let text = "<tool_call><function=weather><parameter=city>Par";
    has(CODER, text, &[OutputPart::Call("weather".to_owned())]);
    for text in [
        "<tool_call>",
        "<tool_call> {\"name\": 1}</tool_call>",
        "<tool_call><func",
        "<function=a b>",
        "<function=f",
    ] {
        has(CODER, text, &[content(text)]);
    }
}

#[test]
fn calls_of_llama_are_the_beginning_or_behind_the_marker() {
    let bare = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"time\", \"parameters\": {}}";
    has(LLAMA3, bare, &two_calls());
    has(LLAMA3, &format!("\n<|python_tag|>{bare}"), &two_calls());
    let marked = "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}";
    has(LLAMA3, &format!("See: {marked}"), &[&[content("See:")][..], &call("f", "{}")].concat());
    // Without the marker, an object is a call only if it names a function of the request.
    for text in [
        "{\"name\": \"Ada\", \"parameters\": {}} is JSON",
        "{\"name\": \"time\"",
        "{\"city\": \"Paris\"}",
        "An object: {\"name\": \"time\", \"parameters\": {}}",
        "<|python_tag|>brave_search.call(query=\"x\")",
        "{}",
    ] {
        has(LLAMA3, text, &[content(text)]);
    }
}

#[test]
fn pythonic_calls_have_their_literals_as_json() {
    has(PYTHONIC, "[weather(city=\"Paris\"), time()]", &two_calls());
    has(PYTHONIC, "<|python_start|>[time()]<|python_end|> ", &call("time", "{}"));
    let text =
        "[time(a='it\\'s \"x\"\\n\\u00e9', b=-1.5e3, c=[True, None, (1, 2,)], d = {'k': False, \"l\": {}},)]";
    let json =
        r#"{"a": "it's \"x\"\né", "b": -1.5e3, "c": [true, null, [1, 2]], "d": {"k": false, "l": {}}}"#;
    has(PYTHONIC, text, &call("time", json));
    for text in [
        "[]",
        "[1, 2]",
        "[other(a=1)]",
        "[time(1)]",
        "[time(a=open('x'))]",
        "[time(a=nan)]",
        "[time(a={1: 2})]",
        "[time(a='open",
        "[time)",
        "<|python_start|> no list",
        "<|python_start|><|python_start|>",
        "See [time()]",
    ] {
        has(PYTHONIC, text, &[content(text)]);
    }
    let deep = format!("[time(a={})]", "[".repeat(5000));
    assert_eq!(parts(PYTHONIC, context(), [deep.as_str()]), [content(&deep)]);
    let text = "[time(), time(1)]";
    has(PYTHONIC, text, &[&call("time", "{}")[..], &[content(", time(1)]")]].concat());
}

#[test]
fn mistral_writes_an_array_or_names_with_arguments() {
    let array = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}, \
                 {\"name\": \"time\", \"arguments\": {}, \"id\": \"abcdefghi\"}]";
    has(MISTRAL, array, &two_calls());
    for named in [
        "[TOOL_CALLS]weather[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]time[ARGS]{}",
        "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]time{}",
    ] {
        has(MISTRAL, named, &two_calls());
    }
    let text = "[THINK]Hm.[/THINK]Now.[TOOL_CALLS]time[ARGS]{}";
    has(MISTRAL, text, &[&[reasoning("Hm."), content("Now.")][..], &call("time", "{}")].concat());
    for text in
        ["[TOOL_CALLS][1]", "[TOOL_CALLS][]", "[TOOL_CALLS]a b[ARGS]{}", "[TOOL_CALLS]f[X]{}", "[TOOL"]
    {
        has(MISTRAL, text, &[content(text)]);
    }
    // A special token is no text.
    let hidden = OutputContext { hides_markers: true, ..context() };
    assert_eq!(parts(MISTRAL, hidden, ["[TOOL_CALLS][1] x"]), [content("[1] x")]);
}

#[test]
fn deepseek_writes_calls_between_markers() {
    let (begin, end, separator) = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>");
    let within = |calls: String| format!("</think>Now. <｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>");
    let v3 = |name: &str, json: &str| format!("{begin}function{separator}{name}\n```json\n{json}\n```{end}");
    let v31 = |name: &str, json: &str| format!("{begin}{name}{separator}{json}{end}");
    let expected = [vec![content("Now.")], two_calls()].concat();
    has(DEEPSEEK, &within(v3("weather", PARIS) + "\n" + &v3("time", "{}")), &expected);
    has(DEEPSEEK, &within(v31("weather", PARIS) + &v31("time", "{}")), &expected);
    let text = format!("</think>{begin}no name {separator}\n text");
    has(DEEPSEEK, &text, &[content(&format!("{begin}no name {separator}\n text"))]);
    // R1's responses are reasoning without an opening tag.
    has(DEEPSEEK, "Hm. </think>\n\nYes.", &[reasoning("Hm."), content("Yes.")]);
    has(DEEPSEEK, "<think>Hm.", &[reasoning("Hm.")]);
}

#[test]
fn harmony_has_reasoning_calls_and_content_on_channels() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\
                <|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>\
                {\"city\": \"Paris\"}<|call|>";
    let expected = [&[reasoning("Hm."), content("I look.")][..], &call("weather", PARIS)].concat();
    has(HARMONY, text, &expected);
    let text = "<|channel|>analysis to=browser.search<|message|>x<|end|><|start|>assistant to=functions.time\
                <|channel|>commentary json<|message|>{}<|call|>";
    has(HARMONY, text, &[&[reasoning("x")][..], &call("time", "{}")].concat());
    has(HARMONY, "<|channel|>final<|message|>Yes. <|return|>", &[content("Yes.")]);
    has(HARMONY, "without channels", &[content("without channels")]);
    has(HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", &[reasoning("Hm.")]);
}

#[test]
fn reasoning_begins_where_the_prompt_ends() {
    let text = "<think>\nHm. </thin\n</think>\n\nYes.\n";
    has(QWEN3, text, &[reasoning("Hm. </thin"), content("Yes.\n")]);
    has(QWEN3, "Yes. <think>", &[content("Yes. <think>")]);
    has(QWEN3, "\n <think>Hm.", &[reasoning("Hm.")]);
    has(QWEN3, "\n <thin", &[content("\n <thin")]);
    let with = |prompt, text| parts(QWEN3, OutputContext { prompt, ..context() }, [text]);
    for text in ["Hm.</think>Yes.", "<think>Hm.</think>Yes.", "\n<think>\nHm.\n</think>\n\nYes."] {
        assert_eq!(with(PromptEnd::InReasoning, text), [reasoning("Hm."), content("Yes.")]);
    }
    assert_eq!(with(PromptEnd::AfterReasoning, "<think>x"), [content("<think>x")]);
    // Calls are searched behind the reasoning only.
    let text = "<think>I could write <tool_call>.</think><tool_call>{\"name\": \"time\"}</tool_call>";
    has(QWEN3, text, &[&[reasoning("I could write <tool_call>.")][..], &call("time", "{}")].concat());
}

#[test]
fn the_end_of_a_prompt_is_read_from_its_tags() {
    let body = |fields: &str| {
        let body =
            format!("{{\"messages\": [{{\"role\": \"assistant\", \"content\": \"<think>a\"}}]{fields}}}");
        let request = baton_openai::parse(
            baton_openai::Endpoint::Chat,
            body.as_bytes(),
            &baton_openai::ParseLimits::default(),
        );
        let Input::Chat(chat) = request.expect("a sound request").input else { panic!("a conversation") };
        chat
    };
    let chat = body("");
    for (tail, end) in [
        ("<|im_start|>assistant\n<think>\n", PromptEnd::InReasoning),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", PromptEnd::AfterReasoning),
        ("</think>x<|im_start|>assistant\n", PromptEnd::Plain),
    ] {
        assert_eq!(QWEN3.end_of_prompt(&chat, tail), end, "{tail}");
    }
    // A continued message decides by its own text.
    let chat = body(", \"continue_final_message\": true");
    assert_eq!(QWEN3.end_of_prompt(&chat, "<think>a"), PromptEnd::InReasoning);
    assert_eq!(HERMES.end_of_prompt(&chat, "<think>"), PromptEnd::Plain);
}

#[test]
fn forced_calls_are_the_whole_text() {
    let any = "[{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}},\n {\"name\":\"time\",\"parameters\":{}}]\n";
    let cases = [
        (ForcedCalls::Any, any, two_calls()),
        (ForcedCalls::Of("weather".to_owned()), PARIS, call("weather", PARIS).to_vec()),
        (ForcedCalls::Of("f".to_owned()), "{\"a\": \"b", call("f", "{\"a\": \"b").to_vec()),
        (ForcedCalls::Any, "[{\"name\": \"time\"}, ", call("time", "{}").to_vec()),
        // Without a grammar: as written.
        (ForcedCalls::Of("f".to_owned()), "no call", vec![content("no call")]),
        (ForcedCalls::Any, "[{\"name\": 7}] x", vec![content("[{\"name\": 7}] x")]),
        (ForcedCalls::Any, "[ {\"name\": \"f", vec![content("[ {\"name\": \"f")]),
    ];
    for (forced, text, expected) in cases {
        let context = || OutputContext { forced: Some(forced.clone()), ..context() };
        assert_eq!(parts(QWEN3, context(), [text]), expected, "{text}");
        assert_eq!(parts(QWEN3, context(), pieces(text, 0..text.len())), expected, "by character: {text}");
    }
}

#[test]
fn forced_calls_follow_the_reasoning() {
    let forced = |prompt| OutputContext { prompt, forced: Some(ForcedCalls::Any), ..context() };
    let calls = "[{\"name\": \"time\", \"parameters\": {}}]";
    let expected = [vec![reasoning("Hm.")], call("time", "{}").to_vec()].concat();
    let channels = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>";
    for (format, prompt, before) in [
        (QWEN3, PromptEnd::InReasoning, "Hm.</think>\n"),
        (QWEN3, PromptEnd::Plain, "<think>\nHm.\n</think>"),
        (HARMONY, PromptEnd::Plain, channels),
    ] {
        let text = format!("{before}{calls}");
        assert_eq!(parts(format, forced(prompt), [text.as_str()]), expected, "{text}");
        assert_eq!(parts(format, forced(prompt), pieces(&text, 0..text.len())), expected, "{text}");
    }
    // A text without channels, and a call in the model's own format.
    assert_eq!(parts(HARMONY, forced(PromptEnd::Plain), [calls]), call("time", "{}"));
    let own = "<|channel|>commentary to=functions.time<|message|>{}<|call|>";
    assert_eq!(parts(HARMONY, forced(PromptEnd::Plain), [own]), call("time", "{}"));
}

#[test]
fn content_with_a_constraint_keeps_its_whitespace_behind_reasoning() {
    let text = "<think> Hm. </think> \n yes ";
    let exact = || OutputContext { exact: true, ..context() };
    for (context, kept) in [(exact(), " \n yes "), (context(), "yes ")] {
        assert_eq!(parts(QWEN3, context.clone(), [text]), [reasoning("Hm."), content(kept)]);
        let split = parts(QWEN3, context, pieces(text, 0..text.len()));
        assert_eq!(split, [reasoning("Hm."), content(kept)]);
    }
}

/// The grammar does the same (`a_text_that_begins_inside_a_token_is_followed_from_there`).
#[test]
fn whitespace_in_the_token_of_the_marker_is_no_part_of_a_constrained_content() {
    let (before, behind) = ("<think> Hm. </think>", " \n yes ");
    for (spaces, kept) in [(0, " \n yes "), (1, "\n yes "), (3, "yes "), (9, "yes ")] {
        let mut parser = OutputParser::new(QWEN3, OutputContext { exact: true, ..context() });
        let mut found = parser.push(before);
        parser.skip_spaces(spaces);
        found.extend(behind.chars().flat_map(|character| parser.push(character.encode_utf8(&mut [0; 4]))));
        found.extend(parser.finish());
        let content: String = found
            .iter()
            .map(|part| match part {
                OutputPart::Content(text) => text.as_str(),
                OutputPart::Reasoning(_) | OutputPart::Call(_) | OutputPart::Arguments(_) => "",
            })
            .collect();
        assert_eq!(content, kept, "{spaces}");
    }
}

#[test]
fn calls_are_bounded() {
    let one = OutputContext { calls_shown: 1, ..context() };
    let text = "<tool_call>{\"name\": \"time\"}</tool_call>".repeat(3);
    assert_eq!(parts(HERMES, one, [text.as_str()]), call("time", "{}"));
    let text = "<tool_call>{\"name\": \"time\"}</tool_call>".repeat(sink::CALLS_MAX + 1);
    let all = parts(HERMES, context(), [text.as_str()]);
    let calls = all.iter().filter(|part| matches!(part, OutputPart::Call(_))).count();
    assert_eq!(calls, sink::CALLS_MAX);
    assert_eq!(all.last(), Some(&content("<tool_call>{\"name\": \"time\"}</tool_call>")));
}

#[test]
fn no_part_of_a_marker_is_passed_before_it_is_complete() {
    let text = "See.<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";
    let mut parser = OutputParser::new(HERMES, context());
    for (at, character) in text.char_indices() {
        for part in parser.push(character.encode_utf8(&mut [0; 4])) {
            match part {
                OutputPart::Content(text) => assert!(at < 4 && !text.contains('<'), "{at}: {text}"),
                OutputPart::Reasoning(text) => panic!("{text}"),
                OutputPart::Call(name) => assert_eq!(name, "time"),
                // Each character of the arguments at once.
                OutputPart::Arguments(text) => assert_eq!(text, character.to_string()),
            }
        }
    }
    assert!(parser.finish().is_empty());
}

/// The parsers of all formats, and those of forced calls.
fn all_contexts() -> Vec<(OutputFormat, OutputContext)> {
    let forced = [ForcedCalls::Any, ForcedCalls::Of("time".to_owned())];
    let forced = forced.into_iter().map(|calls| (HERMES, OutputContext { forced: Some(calls), ..context() }));
    let tags = FORMATS.into_iter().map(|format| (format, context()));
    let open = [QWEN3, DEEPSEEK].into_iter();
    let open = open.map(|format| (format, OutputContext { prompt: PromptEnd::InReasoning, ..context() }));
    forced.chain(tags).chain(open).collect()
}

/// A parser that reads its text again for each character would take minutes for each text.
#[test]
fn a_long_text_of_any_pattern_is_read_a_constant_number_of_times() {
    let patterns = [
        ("", " "),
        ("", "<"),
        ("", "["),
        ("", "{"),
        ("", "<tool_call>"),
        ("", "<tool_call"),
        ("", "<function="),
        ("", "<think"),
        ("", "<|python_start|>[time("),
        ("", "[TOOL_CALLS]f"),
        ("", "<｜tool▁call▁begin｜>"),
        ("", "<|channel|>"),
        ("<tool_call>", " "),
        ("<tool_call>{\"name\": \"time\"}", " "),
        ("<tool_call>{\"name\": \"time\"}x", "</tool_call"),
        ("<tool_call>{\"name\": \"time\"}x", "<tool_call>"),
        ("<tool_call>{\"name\": \"time\", \"arguments\": \"", "["),
        ("<tool_call>{\"arguments\": {\"a\": ", "["),
        ("<function=f>", "<"),
        ("<function=f><parameter=", "x"),
        ("<function=f><parameter=a>", "</parameter"),
        ("<function=f></function>", " "),
        ("<|python_start|>", " "),
        ("[time(a=", "["),
        ("[time(), ", " "),
        ("[TOOL_CALLS][", " "),
        ("</think><｜tool▁call▁begin｜>function<｜tool▁sep｜>", " "),
        ("<|channel|>commentary to=functions.time<|message|>", "<|"),
    ];
    for (begin, pattern) in patterns {
        let text = begin.to_owned() + &pattern.repeat((1 << 20) / pattern.len());
        for (format, context) in all_contexts() {
            let whole = parts(format, context, [text.as_str(), "!"]);
            if let ([OutputPart::Content(content)], None) = (whole.as_slice(), format.reasoning) {
                assert!(*content == format!("{text}!"), "{format:?}: {begin} and {pattern}");
            }
        }
    }
}

/// Texts of fragments of all formats, in any order.
fn hostile() -> impl Strategy<Value = String> {
    let fragments = vec![
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "f>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|call|>",
        "analysis",
        " to=functions.time",
        "{\"name\": \"time\", \"arguments\": {\"a\": \"",
        "{\"name\": \"time\"",
        "\"arguments\": {",
        "\"name\": \"f\"",
        "time(",
        "a='",
        "[time(a=1), ",
        "}",
        "{",
        "]",
        "[",
        ")",
        "\"",
        "\\",
        ":",
        ",",
        "\n",
        " ",
        "é🙂",
        "```json",
        "x",
    ];
    prop::collection::vec(prop::sample::select(fragments), 0..24).prop_map(|all| all.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_pieces_of_any_text_have_the_parts_of_the_whole(
        text in hostile(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        end in prop::sample::select(vec![PromptEnd::Plain, PromptEnd::InReasoning, PromptEnd::AfterReasoning]),
        hides: bool,
    ) {
        let cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        for format in FORMATS {
            let context = || OutputContext { prompt: end, hides_markers: hides, ..context() };
            let whole = parts(format, context(), [text.as_str()]);
            prop_assert_eq!(&parts(format, context(), pieces(&text, cuts.clone())), &whole);
            prop_assert_eq!(&parts(format, context(), pieces(&text, 0..text.len())), &whole);
            // Arguments follow a call.
            for pair in whole.windows(2) {
                if matches!(pair[1], OutputPart::Arguments(_)) {
                    prop_assert!(matches!(pair[0], OutputPart::Call(_)), "{:?}", whole);
                }
            }
            prop_assert!(!matches!(whole.first(), Some(OutputPart::Arguments(_))));
        }
    }

    #[test]
    fn a_text_without_calls_is_its_content(text in hostile()) {
        for format in [HERMES, CODER, LLAMA3, PYTHONIC, OutputFormat { reasoning: None, ..MISTRAL }] {
            // This marker is left out wherever it stands.
            let text = text.replace("<|python_end|>", "");
            let whole = parts(format, context(), [text.as_str()]);
            if whole.iter().all(|part| matches!(part, OutputPart::Content(_))) {
                let expected = if text.is_empty() { Vec::new() } else { vec![content(&text)] };
                prop_assert_eq!(whole, expected);
            }
        }
    }
}
