//! Reasoning between two tags at the beginning of a response.
//!
//! The prompt decides where a response begins: behind an open tag (DeepSeek R1, Qwen 3 thinking), behind a closed one
//! (Qwen 3 with `enable_thinking` false), or before both. Then the response may begin with the opening tag.

use super::marker::MarkerMatcher;
use super::sink::{OutputSink, TextKind};

/// The end of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptEnd {
    /// Behind an opening tag.
    InReasoning,
    /// Behind a closing tag.
    AfterReasoning,
    /// Without a tag.
    Plain,
}

/// The tags of a format.
#[derive(Debug)]
pub(super) struct ReasoningTags {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Both, for the matcher.
    pub(super) open_marker: &'static [&'static str],
    pub(super) close_marker: &'static [&'static str],
    /// Whether a response without an opening tag is reasoning up to the closing one.
    pub(super) implied: bool,
}

pub(super) const THINK: &ReasoningTags = &ReasoningTags {
    open: "<think>",
    close: "</think>",
    open_marker: &["<think>"],
    close_marker: &["</think>"],
    implied: false,
};
pub(super) const DEEPSEEK_R1: &ReasoningTags = &ReasoningTags { implied: true, ..*THINK };
pub(super) const MISTRAL: &ReasoningTags = &ReasoningTags {
    open: "[THINK]",
    close: "[/THINK]",
    open_marker: &["[THINK]"],
    close_marker: &["[/THINK]"],
    implied: false,
};

#[derive(Clone, Debug)]
enum ReasoningPlace {
    /// Before the opening tag, with the whitespace so far; `true` if other text is reasoning.
    Start(bool, String),
    Inside,
    After,
}

/// Splits one response.
#[derive(Clone, Debug)]
pub(super) struct ReasoningSplitter {
    tags: &'static ReasoningTags,
    matcher: MarkerMatcher,
    place: ReasoningPlace,
}

impl ReasoningTags {
    /// Where a prompt with this last text ends.
    pub(super) fn end_of(&self, text: &str) -> PromptEnd {
        let text = text.trim_end();
        if text.ends_with(self.open) {
            PromptEnd::InReasoning
        } else if text.ends_with(self.close) {
            PromptEnd::AfterReasoning
        } else {
            PromptEnd::Plain
        }
    }

    /// Where a message with this text stops, if it is continued.
    pub(super) fn end_of_message(&self, text: &str) -> PromptEnd {
        if text.rfind(self.open) > text.rfind(self.close) {
            PromptEnd::InReasoning
        } else {
            PromptEnd::AfterReasoning
        }
    }
}

impl ReasoningSplitter {
    pub(super) fn new(tags: &'static ReasoningTags, end: PromptEnd, sink: &mut OutputSink) -> Self {
        let place = match end {
            PromptEnd::InReasoning => ReasoningPlace::Start(true, String::new()),
            PromptEnd::Plain => ReasoningPlace::Start(tags.implied, String::new()),
            PromptEnd::AfterReasoning => ReasoningPlace::After,
        };
        if end == PromptEnd::InReasoning {
            sink.markup();
        }
        Self { tags, matcher: MarkerMatcher::new(tags.open_marker), place }
    }

    /// Whether the response may still contain reasoning.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self.place, ReasoningPlace::After)
    }

    /// Whether the next text is reasoning, if it is no tag.
    pub(super) fn is_inside(&self) -> bool {
        matches!(self.place, ReasoningPlace::Inside | ReasoningPlace::Start(true, _))
    }

    /// Adds a character. `rest` gets the characters that are no reasoning.
    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink, rest: &mut String) {
        match &mut self.place {
            ReasoningPlace::Start(inside, spaces) => {
                let mut free = String::new();
                let found = self.matcher.push(character, |character| free.push(character));
                if found.is_some() {
                    return self.enter(sink);
                }
                let blank = free.bytes().all(|byte| byte.is_ascii_whitespace());
                spaces.push_str(&free);
                if !blank {
                    let (inside, text) = (*inside, std::mem::take(spaces) + &self.matcher.finish());
                    self.decide(inside, &text, sink, rest);
                }
            }
            ReasoningPlace::Inside => {
                let reasoning = |character| sink.text(TextKind::Reasoning, character);
                if self.matcher.push(character, reasoning).is_some() {
                    sink.markup();
                    self.place = ReasoningPlace::After;
                }
            }
            ReasoningPlace::After => rest.push(character),
        }
    }

    /// The response ends.
    pub(super) fn finish(&mut self, sink: &mut OutputSink, rest: &mut String) {
        let held = self.matcher.finish();
        match std::mem::replace(&mut self.place, ReasoningPlace::After) {
            ReasoningPlace::Start(false, spaces) => rest.push_str(&(spaces + &held)),
            ReasoningPlace::Start(true, _) | ReasoningPlace::Inside => {
                held.chars().for_each(|character| sink.text(TextKind::Reasoning, character));
            }
            ReasoningPlace::After => {}
        }
    }

    fn enter(&mut self, sink: &mut OutputSink) {
        sink.markup();
        self.place = ReasoningPlace::Inside;
        self.matcher = MarkerMatcher::new(self.tags.close_marker);
    }

    /// The response does not begin with the opening tag.
    fn decide(&mut self, inside: bool, text: &str, sink: &mut OutputSink, rest: &mut String) {
        if inside {
            self.enter(sink);
        } else {
            self.place = ReasoningPlace::After;
        }
        text.chars().for_each(|character| self.push(character, sink, rest));
    }
}
