//! The response format of gpt-oss (harmony): messages on channels.
//!
//! ```text
//!  <|channel|>analysis<|message|>…<|end|><|start|>assistant
//!  <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//!  <|channel|>final<|message|>…<|return|>
//! ```
//!
//! `analysis` is reasoning. A message to `functions.NAME` is a call, whose text is its arguments. `final`, and
//! `commentary` to the user, are content. A message to another recipient is reasoning: the model talks to its own tool.

use super::marker::MarkerMatcher;
use super::sink::{OutputSink, ResponseStage, TextKind};

pub(super) const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MARKERS: &[&str] =
    &[START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>"];

/// Ends a message of reasoning and begins the one for the user.
pub(super) const TO_FINAL: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

/// Bytes of a message's header.
const HEADER_BYTES_MAX: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HarmonyPlace {
    Header,
    Text(TextKind),
    Arguments,
}

/// The parser of one response.
#[derive(Clone, Debug)]
pub(super) struct HarmonyMessages {
    markers: MarkerMatcher,
    place: HarmonyPlace,
    header: String,
}

impl HarmonyMessages {
    pub(super) fn new() -> Self {
        Self { markers: MarkerMatcher::new(MARKERS), place: HarmonyPlace::Header, header: String::new() }
    }

    /// What the next text is, if it is no marker.
    pub(super) fn stage(&self) -> ResponseStage {
        match self.place {
            HarmonyPlace::Header | HarmonyPlace::Arguments => ResponseStage::Outside,
            HarmonyPlace::Text(TextKind::Reasoning) => ResponseStage::Reasoning,
            HarmonyPlace::Text(TextKind::Content) => ResponseStage::Content,
        }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        let mut free = String::new();
        let found = self.markers.push(character, |character| free.push(character));
        self.free(&free, sink);
        if let Some(marker) = found {
            self.marker(marker, sink);
        }
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        let held = self.markers.finish();
        self.free(&held, sink);
        self.give_back(sink);
    }

    fn free(&mut self, text: &str, sink: &mut OutputSink) {
        match self.place {
            HarmonyPlace::Header => {
                self.header.push_str(text);
                if self.header.len() > HEADER_BYTES_MAX {
                    let header = std::mem::take(&mut self.header);
                    sink.content(header.strip_prefix(START).unwrap_or(&header));
                    self.place = HarmonyPlace::Text(TextKind::Content);
                }
            }
            HarmonyPlace::Text(kind) => text.chars().for_each(|character| sink.text(kind, character)),
            HarmonyPlace::Arguments if text.is_empty() => {}
            HarmonyPlace::Arguments => sink.arguments(text),
        }
    }

    fn marker(&mut self, marker: &'static str, sink: &mut OutputSink) {
        match (self.place, marker) {
            (HarmonyPlace::Header, MESSAGE) => self.message(sink),
            (HarmonyPlace::Header, CHANNEL | CONSTRAIN) => self.header.push_str(marker),
            _ => {
                self.give_back(sink);
                sink.markup();
                self.place = HarmonyPlace::Header;
                if matches!(marker, CHANNEL | START) {
                    self.header.push_str(marker);
                }
            }
        }
    }

    /// Without any marker before it, the header is a text without channels.
    fn give_back(&mut self, sink: &mut OutputSink) {
        let header = std::mem::take(&mut self.header);
        if !header.contains(CHANNEL) && !header.starts_with(START) {
            sink.content(&header);
        }
    }

    fn message(&mut self, sink: &mut OutputSink) {
        let header = std::mem::take(&mut self.header);
        let word = |after: &str| {
            let text = header.split_once(after)?.1;
            text.split(|c: char| c.is_ascii_whitespace() || c == '<').next()
        };
        let recipient = word("to=");
        let function = recipient.and_then(|recipient| recipient.strip_prefix("functions."));
        self.place = match (function, word(CHANNEL)) {
            (Some(name), _) if sink.call(name) => HarmonyPlace::Arguments,
            (None, _) if recipient.is_some() => HarmonyPlace::Text(TextKind::Reasoning),
            (None, Some("analysis")) => HarmonyPlace::Text(TextKind::Reasoning),
            _ => HarmonyPlace::Text(TextKind::Content),
        };
        if self.place != HarmonyPlace::Arguments {
            sink.markup();
        }
    }
}
