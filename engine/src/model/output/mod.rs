//! What a chat model writes: reasoning, content and calls of tools.
//!
//! Pure and incremental: characters in, parts out. The parts depend on the text only, not on its pieces. No part of a
//! marker is ever passed as text while it may still become one, and no text is lost: what turns out to be no call is
//! content.
//!
//! The formats are those of the model families, under vLLM's names. The chat template shows which one a model writes.

mod blocks;
mod call_object;
mod deepseek;
mod forced;
mod harmony;
mod marker;
mod pythonic;
mod reasoning;
mod sink;
mod tags;
mod track;

pub use forced::ForcedCalls;
pub use reasoning::PromptEnd;
pub use sink::ResponseStage;
pub use track::ReasoningTrack;

use baton_openai::{ChatInput, GenerateRequest, Input};
use serde_json::Value;

use super::chat_template::ChatTemplate;
use blocks::BlockCalls;
use deepseek::DeepseekCalls;
use forced::{ForcedMessages, ForcedParser};
use harmony::HarmonyMessages;
use pythonic::PythonicCalls;
use reasoning::{ReasoningSplitter, ReasoningTags};
use sink::{OutputSink, TextKind};
use tags::TaggedCalls;

/// A part of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputPart {
    /// Text for the user.
    Content(String),
    /// Text before the content, in which the model reasons.
    Reasoning(String),
    /// A call of this function begins.
    Call(String),
    /// Arguments of the last call, or a part of them: JSON, as the model wrote it.
    Arguments(String),
}

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{…}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `<tool_call><function=f><parameter=a>…`: Qwen 3 Coder.
    Qwen3Coder,
    /// `{"name": …, "parameters": {…}}`: Llama 3.
    Llama3Json,
    /// `[f(a=1), g()]`: Llama 3.2 and 4.
    Pythonic,
    /// `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// `<｜tool▁call▁begin｜>`: DeepSeek V3, R1 and V3.1.
    DeepseekV3,
    /// Channels: gpt-oss.
    Harmony,
}

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`.
    Qwen3,
    /// The same; a response without the opening tag is reasoning too.
    DeepseekR1,
    /// `[THINK]…[/THINK]`.
    Mistral,
    /// Channels: gpt-oss.
    Harmony,
}

/// The choice of a format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatChoice<F> {
    /// By the chat template.
    #[default]
    Auto,
    /// None: the text stays as it is.
    Off,
    /// This one.
    Is(F),
}

/// The choices for one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    /// Calls of tools.
    pub calls: FormatChoice<CallFormat>,
    /// Reasoning.
    pub reasoning: FormatChoice<ReasoningFormat>,
}

/// The formats of one model, or of one response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputFormat {
    /// Of calls; `None` if they stay in the text.
    pub calls: Option<CallFormat>,
    /// Of reasoning; `None` if it stays in the text.
    pub reasoning: Option<ReasoningFormat>,
}

impl OutputFormat {
    /// The formats of a model with this template.
    #[must_use]
    pub fn of_model(options: OutputOptions, template: &ChatTemplate) -> Self {
        Self {
            calls: match options.calls {
                FormatChoice::Auto => CallFormat::of_template(template),
                FormatChoice::Off => None,
                FormatChoice::Is(format) => Some(format),
            },
            reasoning: match options.reasoning {
                FormatChoice::Auto => ReasoningFormat::of_template(template),
                FormatChoice::Off => None,
                FormatChoice::Is(format) => Some(format),
            },
        }
    }

    /// The formats of a request's responses: none but for chats, and calls only with tools.
    #[must_use]
    pub fn of_request(self, request: &GenerateRequest) -> Self {
        match &request.input {
            Input::Chat(chat) if chat.tools.is_empty() => Self { calls: None, ..self },
            Input::Chat(_) => self,
            Input::Prompts(_) => Self::default(),
        }
    }

    /// Whether responses are not parsed.
    #[must_use]
    pub fn is_off(self) -> bool {
        self == Self::default()
    }

    /// The markers of the formats. Special tokens among them are text for the parser.
    #[must_use]
    pub fn markers(self) -> Vec<&'static str> {
        let mut markers = Vec::new();
        match self.calls {
            None => {}
            Some(CallFormat::Hermes) => {
                markers.extend(blocks::HERMES.open.iter().chain(&blocks::HERMES.close))
            }
            Some(CallFormat::Qwen3Coder) => markers.extend(tags::MARKERS),
            Some(CallFormat::Llama3Json) => markers.extend(blocks::LLAMA3.open),
            Some(CallFormat::Pythonic) => markers.extend(pythonic::MARKERS),
            Some(CallFormat::Mistral) => {
                markers.extend(blocks::MISTRAL.open.iter().chain(&[blocks::ARGS, blocks::CALL_ID]));
            }
            Some(CallFormat::DeepseekV3) => markers.extend(deepseek::MARKERS),
            Some(CallFormat::Harmony) => markers.extend(harmony::MARKERS),
        }
        match self.reasoning {
            None => {}
            Some(ReasoningFormat::Harmony) => markers.extend(harmony::MARKERS),
            Some(format) => markers.extend(format.tags().iter().flat_map(|tags| [tags.open, tags.close])),
        }
        markers
    }

    /// Where a chat's prompt ends, by its last text.
    #[must_use]
    pub fn end_of_prompt(self, chat: &ChatInput, tail: &str) -> PromptEnd {
        let Some(tags) = self.reasoning.and_then(ReasoningFormat::tags) else { return PromptEnd::Plain };
        let last = chat.messages.last().and_then(|message| message["content"].as_str());
        match last.filter(|_| chat.continue_final_message) {
            Some(message) => tags.end_of_message(message),
            None => tags.end_of(tail),
        }
    }
}

impl CallFormat {
    /// The format whose markers a template contains.
    fn of_template(template: &ChatTemplate) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        let formats = [
            (has(harmony::MARKERS[1]) && has("functions"), Self::Harmony),
            (has(deepseek::MARKERS[1]), Self::DeepseekV3),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has(pythonic::START) || has("[func_name1("), Self::Pythonic),
            (has(tags::MARKERS[0]) && has(tags::MARKERS[1]), Self::Qwen3Coder),
            (has(blocks::HERMES.open[0]), Self::Hermes),
            (has("<|python_tag|>") || has("{\"name\": function name, \"parameters\""), Self::Llama3Json),
        ];
        formats.into_iter().find_map(|(is, format)| is.then_some(format))
    }
}

impl ReasoningFormat {
    /// The format whose tags a template contains.
    fn of_template(template: &ChatTemplate) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        let formats = [
            (has(harmony::MARKERS[1]) && has("analysis"), Self::Harmony),
            (has(reasoning::THINK.open) || has(reasoning::THINK.close), Self::Qwen3),
            (has(reasoning::MISTRAL.open), Self::Mistral),
        ];
        formats.into_iter().find_map(|(is, format)| is.then_some(format))
    }

    /// The tags around reasoning, if there are any.
    fn tags(self) -> Option<&'static ReasoningTags> {
        match self {
            Self::Qwen3 => Some(reasoning::THINK),
            Self::DeepseekR1 => Some(reasoning::DEEPSEEK_R1),
            Self::Mistral => Some(reasoning::MISTRAL),
            Self::Harmony => None,
        }
    }
}

/// What a response's parser needs to know of its request.
#[derive(Clone, Debug)]
pub struct OutputContext {
    /// The end of the prompt.
    pub prompt: PromptEnd,
    /// Names of the request's functions.
    pub functions: Vec<String>,
    /// The request's tools, for the format whose arguments have no types.
    pub tools: Vec<Value>,
    /// The calls that the request forces: the text behind the reasoning has no other format then.
    pub forced: Option<ForcedCalls>,
    /// Calls beyond this number are left out.
    pub calls_shown: usize,
    /// Whether the markers of calls are special tokens that the response's text leaves out.
    pub hides_markers: bool,
    /// Whether the content keeps its whitespace beside markup: it has a constraint.
    pub exact: bool,
}

/// Parses one response.
#[derive(Debug)]
pub struct OutputParser {
    sink: OutputSink,
    reasoning: Option<ReasoningSplitter>,
    content: ContentParser,
}

/// The parser of the text behind the reasoning.
#[derive(Debug)]
enum ContentParser {
    Text,
    Blocks(BlockCalls),
    Tagged(TaggedCalls),
    Pythonic(PythonicCalls),
    Deepseek(DeepseekCalls),
    Harmony(HarmonyMessages),
    Forced(ForcedParser),
    ForcedMessages(Box<ForcedMessages>),
}

impl OutputParser {
    /// The parser of a response to come.
    #[must_use]
    pub fn new(format: OutputFormat, context: OutputContext) -> Self {
        let OutputContext { prompt, functions, tools, forced, calls_shown, hides_markers, exact } = context;
        let mut sink = OutputSink::new(calls_shown).exact(exact);
        let tags = format.reasoning.and_then(ReasoningFormat::tags);
        let reasoning = tags.map(|tags| ReasoningSplitter::new(tags, prompt, &mut sink));
        let harmony = format.reasoning == Some(ReasoningFormat::Harmony);
        if let Some(calls) = forced {
            let content = match harmony {
                true => ContentParser::ForcedMessages(Box::new(ForcedMessages::new(calls))),
                false => ContentParser::Forced(ForcedParser::new(calls)),
            };
            return Self { sink, reasoning, content };
        }
        let content = match format.calls {
            _ if harmony => ContentParser::Harmony(HarmonyMessages::new()),
            None => ContentParser::Text,
            Some(CallFormat::Hermes) => {
                ContentParser::Blocks(BlockCalls::new(blocks::HERMES, functions, hides_markers))
            }
            Some(CallFormat::Qwen3Coder) => ContentParser::Tagged(TaggedCalls::new(tools, hides_markers)),
            Some(CallFormat::Llama3Json) => {
                ContentParser::Blocks(BlockCalls::new(blocks::LLAMA3, functions, hides_markers))
            }
            Some(CallFormat::Mistral) => {
                ContentParser::Blocks(BlockCalls::new(blocks::MISTRAL, functions, hides_markers))
            }
            Some(CallFormat::Pythonic) => {
                ContentParser::Pythonic(PythonicCalls::new(functions, hides_markers))
            }
            Some(CallFormat::DeepseekV3) => ContentParser::Deepseek(DeepseekCalls::new(hides_markers)),
            Some(CallFormat::Harmony) => ContentParser::Harmony(HarmonyMessages::new()),
        };
        Self { sink, reasoning, content }
    }

    /// Whether the next text may be reasoning.
    #[must_use]
    pub fn may_reason(&self) -> bool {
        let in_tags = self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_open);
        in_tags || matches!(self.content, ContentParser::Harmony(_) | ContentParser::ForcedMessages(_))
    }

    /// The marker that ends reasoning is followed by so many characters of whitespace in its token. They are left out
    /// of a content with a constraint, which begins behind them. Called before the text of that token is added.
    pub fn skip_spaces(&mut self, spaces: usize) {
        self.sink.skip_spaces(spaces);
    }

    /// Adds text. Returns the parts that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<OutputPart> {
        let mut rest = String::new();
        for character in text.chars() {
            match &mut self.reasoning {
                Some(reasoning) => reasoning.push(character, &mut self.sink, &mut rest),
                None => rest.push(character),
            }
        }
        self.content(&rest);
        self.sink.take()
    }

    /// The response ends. Returns its last parts.
    pub fn finish(&mut self) -> Vec<OutputPart> {
        let mut rest = String::new();
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.finish(&mut self.sink, &mut rest);
        }
        self.content(&rest);
        match &mut self.content {
            ContentParser::Text => {}
            ContentParser::Blocks(calls) => calls.finish(&mut self.sink),
            ContentParser::Tagged(calls) => calls.finish(&mut self.sink),
            ContentParser::Pythonic(calls) => calls.finish(&mut self.sink),
            ContentParser::Deepseek(calls) => calls.finish(&mut self.sink),
            ContentParser::Harmony(messages) => messages.finish(&mut self.sink),
            ContentParser::Forced(calls) => calls.finish(&mut self.sink),
            ContentParser::ForcedMessages(calls) => calls.finish(&mut self.sink),
        }
        self.sink.finish();
        self.sink.take()
    }

    fn content(&mut self, text: &str) {
        let sink = &mut self.sink;
        for character in text.chars() {
            match &mut self.content {
                ContentParser::Text => sink.text(TextKind::Content, character),
                ContentParser::Blocks(calls) => calls.push(character, sink),
                ContentParser::Tagged(calls) => calls.push(character, sink),
                ContentParser::Pythonic(calls) => calls.push(character, sink),
                ContentParser::Deepseek(calls) => calls.push(character, sink),
                ContentParser::Harmony(messages) => messages.push(character, sink),
                ContentParser::Forced(calls) => calls.push(character, sink),
                ContentParser::ForcedMessages(calls) => calls.push(character, sink),
            }
        }
    }
}

#[cfg(test)]
mod tests;
