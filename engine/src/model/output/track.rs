//! Where a response is, by the bytes of its tokens: before its reasoning, in it, or in its content.
//!
//! It drives the parsers of the text, so that both find the content at the same place. All markers are ASCII: a byte
//! stands for a character here, and parts of characters need no assembly.

use super::OutputFormat;
use super::harmony::{self, HarmonyMessages};
use super::reasoning::{PromptEnd, ReasoningSplitter};
use super::sink::{OutputSink, ResponseStage};

#[derive(Clone, Debug)]
enum TrackedFormat {
    Tags(ReasoningSplitter),
    Channels(HarmonyMessages),
}

/// Follows one response, and counts its tokens of reasoning.
#[derive(Clone, Debug)]
pub struct ReasoningTrack {
    format: TrackedFormat,
    /// Not read: the parsers need one.
    sink: OutputSink,
    tokens: u32,
    opening: Option<&'static str>,
    closing: &'static str,
}

impl ReasoningTrack {
    /// The track of a response to a prompt with this end. `None` if no text of it can be reasoning.
    #[must_use]
    pub fn new(format: OutputFormat, prompt: PromptEnd) -> Option<Self> {
        let mut sink = OutputSink::new(0);
        let Some(tags) = format.reasoning?.tags() else {
            let format = TrackedFormat::Channels(HarmonyMessages::new());
            let (opening, closing) = (Some(harmony::CHANNEL), harmony::TO_FINAL);
            return Some(Self { format, sink, tokens: 0, opening, closing });
        };
        let splitter = ReasoningSplitter::new(tags, prompt, &mut sink);
        let opening = (!splitter.is_inside()).then_some(tags.open);
        let closing = tags.close;
        let is_open = splitter.is_open();
        let format = TrackedFormat::Tags(splitter);
        is_open.then_some(Self { format, sink, tokens: 0, opening, closing })
    }

    /// The marker that begins a response with reasoning; `None` where the prompt has opened it.
    #[must_use]
    pub fn opening(&self) -> Option<&'static str> {
        self.opening
    }

    /// The markers that end reasoning and begin the content.
    #[must_use]
    pub fn closing(&self) -> &'static str {
        self.closing
    }

    /// Whether calls of tools are written before the content, which may then be missing.
    #[must_use]
    pub fn has_channels(&self) -> bool {
        matches!(self.format, TrackedFormat::Channels(_))
    }

    /// What the next text is.
    #[must_use]
    pub fn stage(&self) -> ResponseStage {
        match &self.format {
            TrackedFormat::Channels(messages) => messages.stage(),
            TrackedFormat::Tags(splitter) if splitter.is_inside() => ResponseStage::Reasoning,
            TrackedFormat::Tags(splitter) if splitter.is_open() => ResponseStage::Outside,
            TrackedFormat::Tags(_) => ResponseStage::Content,
        }
    }

    /// Tokens of reasoning so far, without its markers. The pieces of a tag that is no token of its own count.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Adds the bytes of a token. Returns how many of them come before the content, if a marker in them begins it.
    pub fn push(&mut self, bytes: &[u8]) -> Option<usize> {
        let before = self.stage();
        let mut begins = None;
        for (at, byte) in bytes.iter().enumerate() {
            let was = self.stage();
            self.step(char::from(*byte));
            if was != ResponseStage::Content && self.stage() == ResponseStage::Content {
                begins = begins.or(Some(at + 1));
            }
        }
        let inside = [before, self.stage()] == [ResponseStage::Reasoning; 2];
        self.tokens = self.tokens.saturating_add(inside.into());
        begins
    }

    fn step(&mut self, character: char) {
        match &mut self.format {
            TrackedFormat::Channels(messages) => messages.push(character, &mut self.sink),
            TrackedFormat::Tags(splitter) if splitter.is_open() => {
                splitter.push(character, &mut self.sink, &mut String::new());
            }
            TrackedFormat::Tags(_) => {}
        }
        drop(self.sink.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::output::{CallFormat, ReasoningFormat};

    fn track(reasoning: ReasoningFormat, prompt: PromptEnd) -> Option<ReasoningTrack> {
        let format = OutputFormat { calls: Some(CallFormat::Hermes), reasoning: Some(reasoning) };
        ReasoningTrack::new(format, prompt)
    }

    /// Where the content begins: the index of the token, and how many of its bytes come before.
    fn follow(track: &mut ReasoningTrack, tokens: &[&str]) -> Option<(usize, usize)> {
        let mut begins = None;
        for (index, token) in tokens.iter().enumerate() {
            begins = track.push(token.as_bytes()).map(|at| (index, at)).or(begins);
        }
        begins
    }

    #[test]
    fn tags_are_found_in_any_tokens_and_reasoning_is_counted_without_them() {
        use PromptEnd::{AfterReasoning, InReasoning, Plain};
        let qwen = ReasoningFormat::Qwen3;
        type Case<'a> = (ReasoningFormat, PromptEnd, &'a [&'a str], Option<(usize, usize)>, u32);
        let cases: [Case<'_>; 8] = [
            (qwen, InReasoning, &["Hm", ".", "</think>", "{"], Some((2, 8)), 2),
            (qwen, Plain, &["<think>", "\n", "é", "</think>"], Some((3, 8)), 2),
            (qwen, InReasoning, &["a", " b</think>{\"x", "\""], Some((1, 10)), 1),
            // The pieces of a tag count.
            (qwen, InReasoning, &["a", "</", "think", ">\n"], Some((3, 1)), 3),
            (qwen, InReasoning, &["a", "</thi", "</think>"], Some((2, 8)), 2),
            (qwen, InReasoning, &["never", "closed", "</thinking>"], None, 3),
            (ReasoningFormat::DeepseekR1, Plain, &["a", "</think>"], Some((1, 8)), 1),
            (ReasoningFormat::Mistral, Plain, &["[THINK]", "a", "[/THINK]", "b"], Some((2, 8)), 1),
        ];
        for (format, prompt, tokens, begins, count) in cases {
            let mut track = track(format, prompt).expect("it may reason");
            assert_eq!((follow(&mut track, tokens), track.tokens()), (begins, count), "{tokens:?}");
            assert_eq!(track.stage() == ResponseStage::Content, begins.is_some(), "{tokens:?}");
        }
        assert!(track(qwen, AfterReasoning).is_none());
        let mut plain = track(qwen, Plain).expect("it may reason");
        assert_eq!((plain.opening(), plain.stage()), (Some("<think>"), ResponseStage::Outside));
        plain.push(b" no");
        assert_eq!((plain.stage(), plain.tokens()), (ResponseStage::Content, 0));
        assert_eq!(track(qwen, InReasoning).and_then(|track| track.opening()), None);
    }

    #[test]
    fn the_channel_for_the_user_begins_the_content_of_gpt_oss() {
        let mut track = track(ReasoningFormat::Harmony, PromptEnd::Plain).expect("it may reason");
        let analysis = ["<|channel|>", "analysis", "<|message|>", "Think", "ing"];
        assert_eq!((follow(&mut track, &analysis), track.tokens()), (None, 2));
        let call =
            ["<|end|>", "<|start|>", "assistant", "<|channel|>", "commentary to=functions.f", "<|message|>"];
        assert_eq!((follow(&mut track, &call), track.stage()), (None, ResponseStage::Outside));
        let last = ["{}", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "a"];
        assert_eq!((follow(&mut track, &last), track.tokens()), (Some((6, 11)), 2));
        // The forced end leads there from the middle of a text.
        let mut track = self::track(ReasoningFormat::Harmony, PromptEnd::Plain).expect("it may reason");
        assert_eq!(follow(&mut track, &analysis), None);
        let closing = track.closing();
        assert_eq!(track.push(closing.as_bytes()), Some(closing.len()));
    }
}
