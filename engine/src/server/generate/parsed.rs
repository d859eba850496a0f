//! One choice of a chat as reasoning, content and calls.
//!
//! The text is the one that stop strings have been matched in, so that a stop string may be inside markup, as in vLLM.
//! Ids of calls are hashes of the request's name, its prompt and the call's place: repeating a request under its name
//! repeats them, and the next turn of a conversation has others.

use std::sync::Arc;

use baton_openai::{CallDelta, GenerateRequest, Input, MessageParts, ToolCall, ToolChoice};
use sha2::{Digest, Sha256};

use super::thinking;
use crate::model::output::{
    CallFormat, ForcedCalls, OutputContext, OutputFormat, OutputParser, OutputPart, ReasoningTrack,
};
use crate::model::tokenizer::Tokenizer;
use crate::scheduler::sequence::{NewSequence, Purpose};
use crate::server::choice::ChoiceUpdate;
use crate::server::served_model::ServedModel;

/// Digits of an id. Mistral's templates accept exactly nine letters and digits.
const ID_DIGITS: usize = 24;
const MISTRAL_ID_DIGITS: usize = 9;

/// The parsed text of a choice.
pub(super) struct ParsedChoice {
    parser: OutputParser,
    ids: CallIds,
    calls: u32,
    /// Whether the request names the function of its calls. They are no reason of the end then, as in OpenAI's API.
    named: bool,
    include_reasoning: bool,
    /// Whether the model's format has reasoning.
    has_reasoning: bool,
    /// Counts the tokens of reasoning; `None` if this response has none.
    track: Option<ReasoningTrack>,
    tokenizer: Arc<Tokenizer>,
}

/// Ids of the calls of one choice.
struct CallIds {
    digest: Sha256,
    mistral: bool,
}

impl ParsedChoice {
    /// The parser of a choice, if its text is parsed. A producer's text is not needed.
    pub(super) fn new(
        model: &ServedModel,
        request: &GenerateRequest,
        sequence: &NewSequence,
        index: u32,
    ) -> Option<Self> {
        let mut format = model.output.of_request(request);
        let Input::Chat(chat) = &request.input else { return None };
        let prompt = thinking::end_of_prompt(model, chat, format, &sequence.prompt);
        let track = thinking::track(model, request, &sequence.prompt);
        if request.structured.is_some() && track.is_none() {
            // The whole text is constrained.
            format.reasoning = None;
        }
        let forced = match &chat.tool_choice {
            ToolChoice::Auto | ToolChoice::None => None,
            ToolChoice::Required => Some(ForcedCalls::Any),
            ToolChoice::Function(name) => Some(ForcedCalls::Of(name.clone())),
        };
        let is_off = format.is_off() && forced.is_none();
        if is_off || matches!(sequence.purpose, Purpose::Produce { .. }) {
            return None;
        }
        let name = |tool: &serde_json::Value| tool["function"]["name"].as_str().map(str::to_owned);
        let context = OutputContext {
            prompt,
            functions: chat.tools.iter().filter_map(name).collect(),
            tools: if format.calls == Some(CallFormat::Qwen3Coder) { chat.tools.clone() } else { Vec::new() },
            forced,
            calls_shown: if chat.parallel_tool_calls { usize::MAX } else { 1 },
            hides_markers: request.skip_special_tokens
                && has_special(&model.tokenizer, OutputFormat { reasoning: None, ..format }),
            exact: request.structured.is_some(),
        };
        Some(Self {
            parser: OutputParser::new(format, context),
            ids: CallIds::new(sequence, index, format.calls),
            calls: 0,
            named: matches!(chat.tool_choice, ToolChoice::Function(_)),
            include_reasoning: chat.include_reasoning,
            has_reasoning: format.reasoning.is_some(),
            track,
            tokenizer: Arc::clone(&model.tokenizer),
        })
    }

    /// Whether the first text may be reasoning that the reply contains.
    pub(super) fn may_reason(&self) -> bool {
        self.include_reasoning && self.parser.may_reason()
    }

    /// Whether the model's format has reasoning, which this response may lack.
    pub(super) fn has_reasoning(&self) -> bool {
        self.has_reasoning
    }

    /// Replaces the text of an update by its parts. Returns how many of its tokens are reasoning.
    pub(super) fn apply(&mut self, update: &mut ChoiceUpdate) -> usize {
        let reasoned = self.reasoned(update.token);
        let mut parts = self.parser.push(&update.text);
        if update.finish.is_some() {
            parts.extend(self.parser.finish());
        }
        update.text.clear();
        for part in parts {
            match part {
                OutputPart::Content(text) => update.text.push_str(&text),
                OutputPart::Reasoning(text) if self.include_reasoning => update.reasoning.push_str(&text),
                OutputPart::Reasoning(_) => {}
                OutputPart::Call(name) => {
                    let head = Some((self.ids.id(self.calls), name));
                    update.calls.push(CallDelta { index: self.calls, head, arguments: String::new() });
                    self.calls += 1;
                }
                OutputPart::Arguments(text) => self.add_arguments(&text, update),
            }
        }
        update.called = self.calls > 0 && !self.named;
        reasoned
    }

    /// Follows a token. Returns 1 if it is reasoning. A grammar begins behind the whitespace of a token that ends it.
    fn reasoned(&mut self, token: Option<u32>) -> usize {
        let Some((track, token)) = self.track.as_mut().zip(token) else { return 0 };
        let before = track.tokens();
        let bytes = self.tokenizer.bytes(token);
        if let Some(behind) = track.push(bytes).and_then(|at| bytes.get(at..)) {
            self.parser.skip_spaces(behind.len() - behind.trim_ascii_start().len());
        }
        (track.tokens() - before) as usize
    }

    /// Adds to the arguments of the last call.
    fn add_arguments(&self, text: &str, update: &mut ChoiceUpdate) {
        let index = self.calls.saturating_sub(1);
        match update.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments.push_str(text),
            None => update.calls.push(CallDelta { index, head: None, arguments: text.to_owned() }),
        }
    }
}

/// Adds an update to a complete message.
pub(super) fn collect(parts: &mut MessageParts, update: ChoiceUpdate) {
    parts.reasoning.push_str(&update.reasoning);
    parts.called |= update.called;
    for CallDelta { head, arguments, .. } in update.calls {
        match head {
            Some((id, name)) => parts.calls.push(ToolCall { id, name, arguments }),
            None => {
                if let Some(call) = parts.calls.last_mut() {
                    call.arguments.push_str(&arguments);
                }
            }
        }
    }
}

/// Whether a marker of the format is a special token.
fn has_special(tokenizer: &Tokenizer, format: OutputFormat) -> bool {
    let mut ids = format.markers().into_iter().filter_map(|marker| tokenizer.id(marker));
    ids.any(|id| tokenizer.is_special(id))
}

impl CallIds {
    fn new(sequence: &NewSequence, index: u32, format: Option<CallFormat>) -> Self {
        let mut digest = Sha256::new();
        digest.update(sequence.request.to_string().as_bytes());
        digest.update([0u8]);
        sequence.prompt.iter().for_each(|token| digest.update(token.to_le_bytes()));
        digest.update(index.to_le_bytes());
        Self { digest, mistral: format == Some(CallFormat::Mistral) }
    }

    /// The id of a call of this index.
    fn id(&self, call: u32) -> String {
        let hash = self.digest.clone().chain_update(call.to_le_bytes()).finalize();
        let digits: String = hash.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(hex_digit).collect();
        match self.mistral {
            true => digits[..MISTRAL_ID_DIGITS].to_owned(),
            false => format!("call_{}", &digits[..ID_DIGITS]),
        }
    }
}

fn hex_digit(digit: u8) -> char {
    char::from_digit(digit.into(), 16).expect("four bits")
}
