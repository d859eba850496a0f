//! What an answer says of itself, seen as it passes: tokens and why it finished.
//!
//! Answers are passed on unparsed. Of a stream each event is looked at where it ends ([`crate::message::sse`]), a whole answer is
//! followed from its first byte to its last ([`Skim`]), so that `usage` is found wherever it stands and however it was
//! cut. Tokens of a stream that its engine has not counted, or not yet, are counted here, by events.

pub(crate) mod skim;

use serde::Deserialize;

pub(crate) use skim::Skim;

/// What was seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub usage: Option<Usage>,
    pub finish: Option<Finish>,
    /// Tokens of a stream that passed since the last usage.
    pub passed: u64,
}

/// Tokens, as the engine counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: u64,
    /// Those of the prompt that were found in a cache.
    pub cached: u64,
    pub completion: u64,
}

/// Why an answer finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    ToolCalls,
    ContentFilter,
    Other,
}

impl Finish {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::ContentFilter => "content_filter",
            Self::Other => "other",
        }
    }

    fn of(text: &[u8]) -> Self {
        match text {
            b"stop" => Self::Stop,
            b"length" => Self::Length,
            b"tool_calls" => Self::ToolCalls,
            b"content_filter" => Self::ContentFilter,
            _ => Self::Other,
        }
    }
}

/// Tokens of each choice of a stream, where its engine counts them apart: with `continuous_usage_stats` an event has the
/// tokens of its own choice so far (vLLM, SGLang). Their sum is the answer's until the engine says its own.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    tokens: Vec<u64>,
    sum: u64,
}

/// As many choices as vLLM makes of one prompt are known apart.
const CHOICES_MAX: usize = 16 << 10;

impl Choices {
    /// A choice has so many tokens by now, `new` of them of this event; the tokens of all. A choice beyond the bound
    /// counts by its events.
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

impl Seen {
    /// Takes over what one event or a whole answer says; what is said later counts.
    pub(crate) fn note(&mut self, skim: &Skim) {
        if let Some(usage) = skim.usage() {
            (self.usage, self.passed) = (Some(usage), 0);
        }
        self.finish = skim.finish().or(self.finish);
    }

    /// Tokens of the answer; of one that ended before its engine has counted, what passed.
    pub(crate) fn completion(&self) -> Option<u64> {
        match self.usage {
            Some(usage) => Some(usage.completion.saturating_add(self.passed)),
            None => (self.passed > 0).then_some(self.passed),
        }
    }

    /// Tokens of prompt and answer. The prompt is `prompt` where the engine has not said it; `None` where nothing is
    /// known.
    pub(crate) fn cost(&self, prompt: u64) -> Option<u64> {
        match self.usage {
            Some(usage) => Some(usage.prompt.saturating_add(usage.completion).saturating_add(self.passed)),
            None if self.passed > 0 => Some(prompt.saturating_add(self.passed)),
            None => None,
        }
    }
}

/// All dialects: of completions, of responses, of what is not generated.
#[derive(Deserialize)]
struct Fields {
    prompt_tokens: Option<u64>,
    input_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// `None` where the object does not say how long prompt and answer are: that is unknown, and not 0.
fn read_usage(object: &[u8]) -> Option<Usage> {
    let fields: Fields = serde_json::from_slice(object).ok()?;
    let prompt = fields.prompt_tokens.or(fields.input_tokens);
    let completion = fields.completion_tokens.or(fields.output_tokens);
    let (prompt, completion) = match (prompt, completion, fields.total_tokens) {
        (Some(prompt), Some(completion), _) => (prompt, completion),
        (Some(prompt), None, Some(total)) => (prompt, total.saturating_sub(prompt)),
        (None, Some(completion), Some(total)) => (total.saturating_sub(completion), completion),
        // Of rerankers.
        (None, None, Some(total)) => (total, 0),
        (_, _, None) => return None,
    };
    let details = fields.prompt_tokens_details.or(fields.input_tokens_details);
    let cached = details.and_then(|details| details.cached_tokens).unwrap_or(0);
    Some(Usage { prompt, cached, completion })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_in_every_dialect_and_what_it_does_not_say_is_unknown() {
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
    fn a_cost_is_the_engines_and_else_what_was_counted() {
        let mut seen = Seen { passed: 5, ..Seen::default() };
        assert_eq!((Seen::default().cost(3), seen.cost(3)), (None, Some(8)));
        seen.note(&Skim::of(br#"{"usage":{}}"#));
        assert_eq!(seen.cost(3), Some(8), "unknown is not 0");
        seen.note(&Skim::of(br#"{"usage":{"prompt_tokens":4,"completion_tokens":6}}"#));
        assert_eq!(seen.cost(3), Some(10));
        seen.passed += 2;
        assert_eq!(seen.cost(3), Some(12), "what passed since");
    }
}
