//! Templates in the style of real checkpoints. Expected texts are from Python's jinja2 3.1 with Hugging Face's settings
//! and functions.

use std::time::{Duration, SystemTime};

use baton_openai::{Endpoint, GenerateRequest, Input, ParseLimits};
use serde_json::json;

use super::*;
use crate::model::tests::{fixture, fixture_files};

fn template(source: &str) -> ChatTemplate {
    let mut environment = environment();
    environment
        .add_template_owned(DEFAULT, without_generation_tags(source))
        .expect("the test's template is Jinja");
    let special_tokens = vec![("bos_token".to_owned(), "<s>".to_owned())];
    ChatTemplate { environment, names: vec![DEFAULT.to_owned()], special_tokens }
}

fn chat(body: Json) -> ChatInput {
    let Json::Object(map) = body else { panic!("an object") };
    match GenerateRequest::from_map(Endpoint::Chat, &map, &ParseLimits::default())
        .expect("a sound request")
        .input
    {
        Input::Chat(chat) => *chat,
        Input::Prompts(_) => panic!("a conversation"),
    }
}

fn hello() -> ChatInput {
    chat(json!({"messages": [{"role": "user", "content": "Hello"}]}))
}

fn render(source: &str, chat: &ChatInput) -> Result<String, ChatError> {
    // 2024-07-26 09:05:03 UTC, a Friday.
    template(source).render(chat, SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_984_703))
}

fn shows(source: &str, expected: &str) {
    assert_eq!(render(source, &hello()).as_deref(), Ok(expected), "{source}");
}

#[test]
fn values_print_as_in_python() {
    shows(
        "{{ none }} {{ true }} {{ [1, 'a', none] }} {{ {'k': 1.0} }}",
        "None True [1, 'a', None] {'k': 1.0}",
    );
    shows(
        "{{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ '%s-%d' | format('a', 3) }} {{ 'ab' * 2 }}",
        "3 3.5 8 a-3 abab",
    );
    shows("{{ undefined_name }}|{{ messages[0].nothing }}|{{ tools is none }}", "||True");
}

#[test]
fn python_methods_and_loop_controls_work() {
    shows("{{ ' a b '.strip().split(' ')[-1].upper() }}{{ 'x'.startswith('x') }}", "BTrue");
    shows(
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "023",
    );
    shows(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "1",
    );
    shows(
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('z', 5) }}",
        "a1b25",
    );
    shows(
        "{%- macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ messages | map(attribute='role') | join(',') }}",
        "<a>user",
    );
    shows(
        "{{ messages[::-1][0]['content'][1:3] }}{{ '<think>x</think>y'.split('</think>')[-1].lstrip('\\n') }}",
        "ely",
    );
    shows(
        "{{ 'a' ~ 1 ~ none }}{{ 'content' in messages[0] }}{{ messages[0].content is string }}",
        "a1NoneTrueTrue",
    );
}

#[test]
fn blocks_on_their_own_line_leave_no_trace() {
    shows("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc");
}

#[test]
fn json_is_laid_out_as_python_does_it() {
    let value = json!({"b": [1, 2.5, "é<'&>\"\n"], "a": {}, "c": [], "n": null});
    let chat =
        chat(json!({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"v": value}}));
    let shows = |filter: &str, expected: &str| {
        assert_eq!(render(&format!("{{{{ v | {filter} }}}}"), &chat).as_deref(), Ok(expected), "{filter}");
    };
    shows("tojson", r#"{"b": [1, 2.5, "é<'&>\"\n"], "a": {}, "c": [], "n": null}"#);
    shows(
        "tojson(indent=2)",
        "{\n  \"b\": [\n    1,\n    2.5,\n    \"é<'&>\\\"\\n\"\n  ],\n  \"a\": {},\n  \"c\": [],\n  \"n\": null\n}",
    );
    shows("tojson(ensure_ascii=true)", r#"{"b": [1, 2.5, "\u00e9<'&>\"\n"], "a": {}, "c": [], "n": null}"#);
    shows(
        "tojson(separators=(',', ':'), sort_keys=true)",
        r#"{"a":{},"b":[1,2.5,"é<'&>\"\n"],"c":[],"n":null}"#,
    );
}

#[test]
fn the_date_is_the_callers_in_utc() {
    shows(
        "{{ strftime_now('%d %B %Y, %A %-d %b %H:%M:%S %I%p %j %y%%') }}",
        "26 July 2024, Friday 26 Jul 09:05:03 09AM 208 24%",
    );
    assert!(matches!(render("{{ strftime_now('%Q') }}", &hello()), Err(ChatError::Failed(_))));
}

#[test]
fn a_template_error_reaches_the_client_verbatim() {
    let raised = render("{{ raise_exception('roles must alternate') }}", &hello());
    assert_eq!(raised, Err(ChatError::Raised("roles must alternate".into())));
    let error = ApiError::from(ChatError::Raised("roles must alternate".into()));
    assert_eq!((error.status, error.message.as_str()), (400, "roles must alternate"));
    let failed = render("{{ messages[0].content.nothing() }}", &hello());
    assert!(matches!(failed, Err(ChatError::Failed(_))), "{failed:?}");
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let nested =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
    assert_eq!(render(nested, &hello()), Err(ChatError::Failed("it takes too many steps".into())));
    let text = "x".repeat(1 << 20);
    let long = chat(json!({"messages": [{"role": "user", "content": text}]}));
    assert_eq!(
        render("{% for i in range(99) %}{{ messages[0].content }}{% endfor %}", &long),
        Err(ChatError::TooLong)
    );
    let recursive = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}";
    assert!(matches!(render(recursive, &hello()), Err(ChatError::Failed(_))));
}

#[test]
fn generation_marks_are_read_as_nothing() {
    shows("a {%- generation -%} b {%- endgeneration %} c", "ab c");
    shows("{% generation %}{{ 'generation' }}{% endgeneration %}", "generation");
}

#[test]
fn template_variables_of_a_client_do_not_override_reserved_ones() {
    let body = |kwargs: Json| {
        chat(json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}))
    };
    let source =
        "{{ bos_token }}{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}";
    assert_eq!(render(source, &body(json!({"enable_thinking": false}))).as_deref(), Ok("<s>no"));
    assert_eq!(render(source, &body(json!({"messages": []}))), Err(ChatError::Reserved("messages".into())));
}

#[test]
fn developer_is_system_unless_the_template_knows_it() {
    let chat = chat(json!({"messages": [{"role": "developer", "content": "x"}]}));
    let source = "{% for m in messages %}{{ m.role }}{% endfor %}";
    assert_eq!(render(source, &chat).as_deref(), Ok("system"));
    assert_eq!(render(&format!("{source}{{# developer #}}"), &chat).as_deref(), Ok("developer"));
}

#[test]
fn the_last_message_can_stay_open() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}";
    let body = |content: &str| {
        chat(
            json!({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": content}],
            "continue_final_message": true}),
        )
    };
    assert_eq!(render(source, &body("ab ")).as_deref(), Ok("<user>ab</><assistant>ab"));
    assert_eq!(
        render(&source.replace(" | trim", ""), &body("ab ")).as_deref(),
        Ok("<user>ab</><assistant>ab ")
    );
    assert_eq!(render(source, &body(" ")), Err(ChatError::NothingToContinue));
}

#[test]
fn tools_choose_their_own_template_where_there_is_one() {
    let list = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].a }}"}]);
    let mut environment = environment();
    let mut names = Vec::new();
    for (name, source) in named(Some(&list)).expect("named templates") {
        environment.add_template_owned(name.clone(), source).expect("Jinja");
        names.push(name);
    }
    let template = ChatTemplate { environment, names, special_tokens: Vec::new() };
    let render = |chat: &ChatInput| template.render(chat, SystemTime::UNIX_EPOCH).expect("renders");
    let messages = json!([{"role": "user", "content": "x"}]);
    assert_eq!(render(&chat(json!({"messages": messages}))), "plain");
    assert_eq!(render(&chat(json!({"messages": messages, "tools": [{"a": "T"}]}))), "T");
    assert_eq!(
        render(&chat(json!({"messages": messages, "tools": [{"a": "T"}], "tool_choice": "none"}))),
        "plain"
    );
    assert!(named(Some(&json!([1]))).is_err() && named(Some(&json!(1))).is_err());
}

#[test]
fn a_checkpoint_without_a_template_loads_and_refuses_conversations() {
    let files = fixture_files("sentencepiece");
    let tokenizer = Tokenizer::load(&files).expect("loads");
    let template = ChatTemplate::load(&files, &tokenizer).expect("loads");
    assert!(!template.is_present());
    assert_eq!(template.render(&hello(), SystemTime::UNIX_EPOCH), Err(ChatError::NoTemplate));
}

#[test]
fn a_conversation_has_one_bos_token() {
    use crate::model::tokenizer::SpecialTokens;
    let (tokenizer, template) = fixture("llama3");
    let text = template.render(&hello(), SystemTime::UNIX_EPOCH).expect("renders");
    let count = |special| {
        let ids = tokenizer.encode(&text, special, 1000).expect("encodes");
        ids.iter().filter(|id| Some(**id) == tokenizer.bos()).count()
    };
    assert_eq!((count(SpecialTokens::AsWritten), count(SpecialTokens::Add)), (1, 2));
}
