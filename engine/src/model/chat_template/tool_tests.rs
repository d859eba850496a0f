//! Conversations with tools render as in transformers, through templates with the features of those of Qwen 3,
//! Llama 3.1, Mistral and DeepSeek V3 (`tests/fixtures/text/tools`, where `make.py` writes the golden file).

use std::path::Path;
use std::time::SystemTime;

use baton_openai::{Endpoint, GenerateRequest, Input, ParseLimits};

use super::*;
use crate::model::output::{CallFormat, OutputFormat, OutputOptions, ReasoningFormat};

fn read(file: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/tools");
    std::fs::read_to_string(folder.join(file)).expect("the fixture is there")
}

fn template(name: &str) -> ChatTemplate {
    let mut environment = environment();
    let source = without_generation_tags(&read(&format!("{name}.jinja")));
    environment.add_template_owned(DEFAULT, source).expect("the template is Jinja");
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let special_tokens = special.map(|(name, token)| (name.to_owned(), token.to_owned())).to_vec();
    ChatTemplate { environment, names: vec![DEFAULT.to_owned()], special_tokens }
}

#[test]
fn conversations_with_tools_render_as_in_transformers() {
    let golden: Json = serde_json::from_str(&read("golden.json")).expect("JSON");
    let cases = golden["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 16);
    for case in cases {
        let name = case["template"].as_str().expect("a name");
        let body = case["body"].as_object().expect("a body");
        let request = GenerateRequest::from_map(Endpoint::Chat, body, &ParseLimits::default());
        let Input::Chat(chat) = request.expect("a sound request").input else { panic!("a conversation") };
        let rendered = template(name).render(&chat, SystemTime::UNIX_EPOCH);
        match case["raised"].as_str() {
            Some(raised) => assert_eq!(rendered, Err(ChatError::Raised(raised.to_owned())), "{name}"),
            None => assert_eq!(rendered.as_deref().ok(), case["text"].as_str(), "{name}: {rendered:?}"),
        }
    }
}

#[test]
fn a_template_shows_the_formats_of_calls_and_reasoning() {
    let formats = |template: &ChatTemplate| {
        let format = OutputFormat::of_model(OutputOptions::default(), template);
        (format.calls, format.reasoning)
    };
    for (name, calls, reasoning) in [
        ("qwen", CallFormat::Hermes, Some(ReasoningFormat::Qwen3)),
        ("llama", CallFormat::Llama3Json, None),
        ("mistral", CallFormat::Mistral, None),
        ("deepseek", CallFormat::DeepseekV3, Some(ReasoningFormat::Qwen3)),
    ] {
        assert_eq!(formats(&template(name)), (Some(calls), reasoning), "{name}");
    }
    for (source, calls, reasoning) in [
        ("<|channel|>analysis to=functions.f", Some(CallFormat::Harmony), Some(ReasoningFormat::Harmony)),
        ("[func_name1(params)]", Some(CallFormat::Pythonic), None),
        ("<|python_start|>", Some(CallFormat::Pythonic), None),
        ("<|python_tag|>", Some(CallFormat::Llama3Json), None),
        ("<tool_call><function=f>", Some(CallFormat::Qwen3Coder), None),
        ("[THINK]", None, Some(ReasoningFormat::Mistral)),
        ("plain", None, None),
    ] {
        let mut template = template("qwen");
        template.environment.add_template_owned(DEFAULT, source).expect("text is Jinja");
        assert_eq!(formats(&template), (calls, reasoning), "{source}");
    }
}
