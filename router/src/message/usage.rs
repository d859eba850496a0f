//! Usage of a response, read in transit: tokens and the finish reason.
//!
//! Responses are passed unparsed. Each event of a stream is read at its end ([`crate::message::sse`]). A whole
//! response is scanned from its first byte to its last ([`JsonScanner`]), so that `usage` is found at any position
//! and across any split. Tokens of a stream that its engine has not counted, or not yet, are counted here by
//! events.

pub(crate) mod json_scanner;

use serde::Deserialize;

pub(crate) use json_scanner::JsonScanner;

/// The values read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageScan {
    pub usage: Option<Usage>,
    pub finish: Option<FinishReason>,
    /// Tokens of a stream since the last usage.
    pub streamed: u64,
}

/// Token counts of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: u64,
    /// Tokens of the prompt that were found in a cache.
    pub cached: u64,
    pub completion: u64,
}

baton_connector::labelled! {
    /// Why a response finished.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum FinishReason {
        Stop => "stop",
        Length => "length",
        ToolCalls => "tool_calls",
        ContentFilter => "content_filter",
        Other => "other",
    }
}

impl FinishReason {
    fn of(text: &[u8]) -> Self {
        match text {
            // Anthropic's `stop_reason`.
            b"end_turn" | b"stop_sequence" => Self::Stop,
            b"max_tokens" => Self::Length,
            b"tool_use" => Self::ToolCalls,
            b"refusal" => Self::ContentFilter,
            _ => {
                Self::ALL.into_iter().find(|reason| reason.label().as_bytes() == text).unwrap_or(Self::Other)
            }
        }
    }
}

/// Tokens of each choice of a stream, where its engine counts them separately. With `continuous_usage_stats` an
/// event has the tokens of its own choice so far (vLLM, SGLang). Their sum counts until the engine sends its own.
#[derive(Debug, Default)]
pub(crate) struct ChoiceTokens {
    tokens: Vec<u64>,
    sum: u64,
}

/// Maximum choices that are counted separately: as many as vLLM makes of one prompt.
const CHOICES_MAX: usize = 16 << 10;

impl ChoiceTokens {
    /// Records a choice's tokens so far, of which this event has `new`. Returns the tokens of all choices. A
    /// choice beyond the bound counts by its events.
    pub(crate) fn count(&mut self, choice: usize, tokens: u64, new: u64) -> u64 {
        if choice >= CHOICES_MAX {
            self.sum = self.sum.saturating_add(new);
            return self.sum;
        }
        if self.tokens.len() <= choice {
            self.tokens.resize(choice + 1, 0);
        }
        let before = std::mem::replace(&mut self.tokens[choice], tokens);
        self.sum = self.sum.saturating_sub(before).saturating_add(tokens);
        self.sum
    }
}

impl UsageScan {
    /// Records the values of one event or of a whole response. Later values replace earlier ones.
    pub(crate) fn note(&mut self, scanner: &JsonScanner) {
        if let Some(usage) = scanner.usage() {
            (self.usage, self.streamed) = (Some(usage), 0);
        } else if let (Some(output), Some(usage)) = (scanner.output(), &mut self.usage) {
            (usage.completion, self.streamed) = (output, 0);
        }
        self.finish = scanner.finish().or(self.finish);
    }

    /// Tokens of the response. If it ended before its engine has counted, the streamed tokens.
    pub(crate) fn completion(&self) -> Option<u64> {
        match self.usage {
            Some(usage) => Some(usage.completion.saturating_add(self.streamed)),
            None => (self.streamed > 0).then_some(self.streamed),
        }
    }

    /// The tokens of the prompt, of its cached part and of the response, as far as they are known.
    pub(crate) fn known_tokens(&self) -> [u64; 3] {
        let usage = self.usage.unwrap_or_default();
        [usage.prompt, usage.cached, self.completion().unwrap_or(0)]
    }

    /// Tokens of prompt and response, with `prompt` if the engine has not counted it; `None` if nothing is known.
    pub(crate) fn cost(&self, prompt: u64) -> Option<u64> {
        match self.usage {
            Some(usage) => Some(usage.prompt.saturating_add(usage.completion).saturating_add(self.streamed)),
            None if self.streamed > 0 => Some(prompt.saturating_add(self.streamed)),
            None => None,
        }
    }
}

/// The fields of all dialects: completions, responses, Messages, and requests without generation.
#[derive(Deserialize)]
struct UsageFields {
    prompt_tokens: Option<u64>,
    input_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptTokenDetails>,
    input_tokens_details: Option<PromptTokenDetails>,
    /// Of Messages: not part of `input_tokens`.
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct PromptTokenDetails {
    cached_tokens: Option<u64>,
}

/// The output of a usage without the prompt's length, as the last one of a Messages stream may be.
fn read_output(object: &[u8]) -> Option<u64> {
    serde_json::from_slice::<UsageFields>(object).ok()?.output_tokens
}

/// `None` if the object does not contain both lengths: they are then unknown, and not 0.
fn read_usage(object: &[u8]) -> Option<Usage> {
    let fields: UsageFields = serde_json::from_slice(object).ok()?;
    let cache_read = fields.cache_read_input_tokens.filter(|_| fields.prompt_tokens.is_none());
    let cache_created = fields.cache_creation_input_tokens.unwrap_or(0);
    let uncounted = cache_read.map_or(0, |read| read.saturating_add(cache_created));
    let input = fields.input_tokens.map(|input| input.saturating_add(uncounted));
    let prompt = fields.prompt_tokens.or(input);
    let completion = fields.completion_tokens.or(fields.output_tokens);
    let (prompt, completion) = match (prompt, completion, fields.total_tokens) {
        (Some(prompt), Some(completion), _) => (prompt, completion),
        (Some(prompt), None, Some(total)) => (prompt, total.saturating_sub(prompt)),
        (None, Some(completion), Some(total)) => (total.saturating_sub(completion), completion),
        // The form of rerankers.
        (None, None, Some(total)) => (total, 0),
        (_, _, None) => return None,
    };
    let details = fields.prompt_tokens_details.or(fields.input_tokens_details);
    let cached = details.and_then(|details| details.cached_tokens).or(cache_read).unwrap_or(0);
    Some(Usage { prompt, cached, completion })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_parsed_in_every_dialect_and_missing_fields_are_unknown() {
        let usage = |prompt, cached, completion| Some(Usage { prompt, cached, completion });
        for (text, expected) in [
            (r#"{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}"#, usage(7, 0, 2)),
            (
                r#"{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":3}}"#,
                usage(7, 3, 2),
            ),
            (
                r#"{"prompt_tokens":7,"input_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}"#,
                usage(7, 0, 2),
            ),
            (
                r#"{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":3,"cache_creation_input_tokens":1}"#,
                usage(8, 3, 2),
            ),
            (r#"{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":null}"#, usage(4, 0, 2)),
            (r#"{"prompt_tokens":7,"total_tokens":9}"#, usage(7, 0, 2)),
            (r#"{"completion_tokens":2,"total_tokens":9}"#, usage(7, 0, 2)),
            (r#"{"total_tokens":9}"#, usage(9, 0, 0)),
            ("{}", None),
            (r#"{"prompt_tokens":null,"completion_tokens":null}"#, None),
            (r#"{"prompt_tokens":7}"#, None),
            (r#"{"prompt_tokens":-1,"completion_tokens":2}"#, None),
        ] {
            assert_eq!(read_usage(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn the_usage_of_a_messages_stream_is_in_its_first_and_last_events() {
        let mut scan = UsageScan::default();
        let start = r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":7,"output_tokens":0}}}"#;
        scan.note(&JsonScanner::of(start.as_bytes()));
        assert_eq!((scan.completion(), scan.finish), (Some(0), None));
        scan.streamed = 3;
        let delta =
            r#"{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":5}}"#;
        scan.note(&JsonScanner::of(delta.as_bytes()));
        assert_eq!(scan.usage, Some(Usage { prompt: 7, cached: 0, completion: 5 }));
        assert_eq!((scan.streamed, scan.finish), (0, Some(FinishReason::ToolCalls)));
        let whole = r#"{"type":"message","content":[{"stop_reason":"x"}],"stop_reason":"max_tokens"}"#;
        assert_eq!(JsonScanner::of(whole.as_bytes()).finish(), Some(FinishReason::Length));
    }

    #[test]
    fn a_cost_is_the_engines_and_else_what_was_counted() {
        let mut seen = UsageScan { streamed: 5, ..UsageScan::default() };
        assert_eq!((UsageScan::default().cost(3), seen.cost(3)), (None, Some(8)));
        seen.note(&JsonScanner::of(br#"{"usage":{}}"#));
        assert_eq!(seen.cost(3), Some(8), "unknown is not 0");
        seen.note(&JsonScanner::of(br#"{"usage":{"prompt_tokens":4,"completion_tokens":6}}"#));
        assert_eq!(seen.cost(3), Some(10));
        seen.streamed += 2;
        assert_eq!(seen.cost(3), Some(12), "what passed since");
    }
}
