//! What an answer says of itself, seen as it passes: tokens and why it finished.
//!
//! Answers are passed on unparsed. Engines write `usage` and `finish_reason` near the end of a frame or of a whole
//! answer, so only the last [`TAIL_BYTES`] of each piece are looked at, and JSON is read only where a `usage` object
//! begins. Inside a JSON string the quotes of these names would be escaped, so a model's text cannot be taken for
//! them. What is cut in two by a piece's end is missed: the numbers are for metrics and logs, and what a key is
//! charged beyond the estimate; where they are missing, the estimate counts.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;

/// How much of a piece's end is looked at.
const TAIL_BYTES: usize = 2048;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));

/// What was seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub usage: Option<Usage>,
    pub finish: Option<Finish>,
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

/// Both dialects: of completions and of responses.
#[derive(Deserialize)]
struct Fields {
    #[serde(alias = "input_tokens", default)]
    prompt_tokens: u64,
    #[serde(alias = "output_tokens", default)]
    completion_tokens: u64,
    #[serde(alias = "input_tokens_details", default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Seen {
    /// Looks at one piece; what is said later counts.
    pub(crate) fn look(&mut self, piece: &[u8]) {
        let tail = &piece[piece.len().saturating_sub(TAIL_BYTES)..];
        for at in USAGE.find_iter(tail) {
            let object = value(&tail[at + USAGE.needle().len()..]).filter(|value| value.starts_with(b"{"));
            self.usage = object.and_then(read_usage).or(self.usage);
        }
        for at in FINISH.find_iter(tail) {
            let text = value(&tail[at + FINISH.needle().len()..]).and_then(|value| value.strip_prefix(b"\""));
            let text = text.and_then(|text| text.split(|byte| *byte == b'"').next());
            self.finish = text.map(Finish::of).or(self.finish);
        }
    }
}

/// What follows a name's colon.
fn value(after: &[u8]) -> Option<&[u8]> {
    after.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

fn read_usage(object: &[u8]) -> Option<Usage> {
    let fields: Fields = serde_json::Deserializer::from_slice(object).into_iter().next()?.ok()?;
    let cached = fields.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
    Some(Usage { prompt: fields.prompt_tokens, cached, completion: fields.completion_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pieces: &[&str]) -> Seen {
        let mut seen = Seen::default();
        pieces.iter().for_each(|piece| seen.look(piece.as_bytes()));
        seen
    }

    #[test]
    fn tokens_and_the_reason_are_seen_in_streams_and_in_whole_answers() {
        let streamed = seen(&[
            "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}],\"usage\":null}\n\n",
            "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"total_tokens\":9,\"completion_tokens\":2,\
             \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
        ]);
        let usage = Some(Usage { prompt: 7, cached: 4, completion: 2 });
        assert_eq!(streamed, Seen { usage, finish: Some(Finish::Length) });
        let whole =
            seen(&["{\"choices\": [{\"finish_reason\": \"tool_calls\"}], \"usage\": {\"input_tokens\": 3, \
            \"output_tokens\": 1, \"prompt_tokens_details\": null}, \"system_fingerprint\": null}"]);
        let usage = Some(Usage { prompt: 3, cached: 0, completion: 1 });
        assert_eq!(whole, Seen { usage, finish: Some(Finish::ToolCalls) });
    }

    #[test]
    fn a_models_text_is_not_taken_for_it() {
        let text =
            r#"data: {"choices":[{"text":"\"usage\":{\"prompt_tokens\":9},\"finish_reason\":\"stop\""}]}"#;
        assert_eq!(seen(&[text]), Seen::default());
    }

    #[test]
    fn what_is_broken_or_far_away_is_not_seen() {
        for text in
            ["\"usage\":{\"prompt_tokens\":", "\"usage\":{\"prompt_tokens\":-1}", "\"usage\"", "\"", ""]
        {
            assert_eq!(seen(&[text]).usage, None, "{text}");
        }
        let far = format!("\"usage\":{{\"prompt_tokens\":1}}{}", " ".repeat(TAIL_BYTES));
        assert_eq!(seen(&[&far]).usage, None);
    }
}
