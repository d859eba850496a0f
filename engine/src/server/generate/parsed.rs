//! One choice of a chat as reasoning, content and calls.
//!
//! The text is the one that stop strings have been matched in, so that a stop string may be inside markup, as in vLLM.
//! Ids of calls are hashes of the request's name, its prompt and the call's place: repeating a request under its name
//! repeats them, and the next turn of a conversation has others.

use baton_openai::{CallDelta, GenerateRequest, Input, MessageParts, ToolCall, ToolChoice};
use sha2::{Digest, Sha256};

use crate::model::output::{CallFormat, ForcedCalls, OutputContext, OutputFormat, OutputParser, OutputPart};
use crate::model::tokenizer::{DecodeMode, Tokenizer};
use crate::scheduler::sequence::{NewSequence, Purpose};
use crate::server::choice::ChoiceUpdate;
use crate::server::served_model::ServedModel;

/// Tokens at the end of a prompt in which a reasoning tag is searched.
const TAIL_TOKENS: usize = 32;

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
        if request.structured.is_some() {
            // A constrained text has no reasoning, whatever the end of the prompt opens.
            format.reasoning = None;
        }
        let Input::Chat(chat) = &request.input else { return None };
        let forced = match &chat.tool_choice {
            ToolChoice::Auto | ToolChoice::None => None,
            ToolChoice::Required => Some(ForcedCalls::Any),
            ToolChoice::Function(name) => Some(ForcedCalls::Of(name.clone())),
        };
        let is_off = format.is_off() && forced.is_none();
        if is_off || matches!(sequence.purpose, Purpose::Produce { .. }) {
            return None;
        }
        let tail = &sequence.prompt[sequence.prompt.len().saturating_sub(TAIL_TOKENS)..];
        let tail = model.tokenizer.decode(tail, DecodeMode::All);
        let name = |tool: &serde_json::Value| tool["function"]["name"].as_str().map(str::to_owned);
        let context = OutputContext {
            prompt: format.end_of_prompt(chat, &tail),
            functions: chat.tools.iter().filter_map(name).collect(),
            tools: if format.calls == Some(CallFormat::Qwen3Coder) { chat.tools.clone() } else { Vec::new() },
            forced,
            calls_shown: if chat.parallel_tool_calls { usize::MAX } else { 1 },
            hides_markers: request.skip_special_tokens
                && has_special(&model.tokenizer, OutputFormat { reasoning: None, ..format }),
        };
        Some(Self {
            parser: OutputParser::new(format, context),
            ids: CallIds::new(sequence, index, format.calls),
            calls: 0,
            named: matches!(chat.tool_choice, ToolChoice::Function(_)),
            include_reasoning: chat.include_reasoning,
        })
    }

    /// Whether the first text may be reasoning that the reply contains.
    pub(super) fn may_reason(&self) -> bool {
        self.include_reasoning && self.parser.may_reason()
    }

    /// Replaces the text of an update by its parts.
    pub(super) fn apply(&mut self, update: &mut ChoiceUpdate) {
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
