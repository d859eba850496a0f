//! The parts of a response, in order: text by kind, and calls.
//!
//! Whitespace beside markup belongs to neither text: it is held back until the next character decides. A response
//! without markup keeps all of its whitespace.

use super::OutputPart;

/// Calls of one response: a conversation with more in one message would be refused in the next request.
pub(super) const CALLS_MAX: usize = 128;

/// Bytes of a function's name. OpenAI allows 64.
const NAME_BYTES_MAX: usize = 256;

/// The field of a response that a text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    Content,
    Reasoning,
}

/// What the next text of a response is, if it is no marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseStage {
    /// Not known yet, a header, or a call in a channel.
    Outside,
    /// Reasoning.
    Reasoning,
    /// Text for the user.
    Content,
}

/// Collects parts.
#[derive(Clone, Debug)]
pub(super) struct OutputSink {
    parts: Vec<OutputPart>,
    /// Whitespace that is held back, of the kind `kind`.
    spaces: String,
    kind: TextKind,
    /// Whether no text has followed the last markup.
    at_edge: bool,
    calls: usize,
    /// Calls beyond this are left out (`parallel_tool_calls`).
    shown: usize,
    /// Whether content keeps its whitespace beside markup: a constraint permits it as it is.
    exact: bool,
    /// Whitespace before such content that belongs to the marker, in characters.
    skipped: usize,
}

impl OutputSink {
    pub(super) fn new(shown: usize) -> Self {
        let kind = TextKind::Content;
        let (parts, spaces) = (Vec::new(), String::new());
        Self { parts, spaces, kind, at_edge: false, calls: 0, shown, exact: false, skipped: 0 }
    }

    /// The same for a response whose content has a constraint.
    pub(super) fn exact(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    /// The next content follows so much whitespace of the marker's token, which no constraint has seen.
    pub(super) fn skip_spaces(&mut self, spaces: usize) {
        self.skipped = spaces;
    }

    /// Adds a character of text.
    pub(super) fn text(&mut self, kind: TextKind, character: char) {
        self.kind = kind;
        if self.exact && kind == TextKind::Content {
            if self.skipped > 0 && character.is_ascii_whitespace() {
                self.skipped -= 1;
                return;
            }
            self.skipped = 0;
            self.at_edge = false;
        }
        if character.is_ascii_whitespace() {
            self.spaces.push(character);
            return;
        }
        if std::mem::replace(&mut self.at_edge, false) {
            self.spaces.clear();
        }
        let spaces = std::mem::take(&mut self.spaces);
        let text = self.open(kind);
        text.push_str(&spaces);
        text.push(character);
    }

    /// Adds text that was taken for markup first.
    pub(super) fn content(&mut self, text: &str) {
        text.chars().for_each(|character| self.text(TextKind::Content, character));
    }

    /// Markup is here. Whitespace before and after it is left out.
    pub(super) fn markup(&mut self) {
        self.spaces.clear();
        self.at_edge = true;
    }

    /// Begins a call. `false` if its name cannot be one, or there are too many calls.
    pub(super) fn call(&mut self, name: &str) -> bool {
        let valid = (1..=NAME_BYTES_MAX).contains(&name.len())
            && !name.contains(|character: char| character.is_control() || character == ' ');
        if !valid || self.calls == CALLS_MAX {
            return false;
        }
        self.markup();
        self.calls += 1;
        if self.calls <= self.shown {
            self.parts.push(OutputPart::Call(name.to_owned()));
        }
        true
    }

    /// Adds text to the arguments of the last call.
    pub(super) fn arguments(&mut self, text: &str) {
        if self.calls > self.shown {
            return;
        }
        match self.parts.last_mut() {
            Some(OutputPart::Arguments(arguments)) => arguments.push_str(text),
            _ => self.parts.push(OutputPart::Arguments(text.to_owned())),
        }
    }

    /// The response ends.
    pub(super) fn finish(&mut self) {
        let spaces = std::mem::take(&mut self.spaces);
        if !self.at_edge && !spaces.is_empty() {
            self.open(self.kind).push_str(&spaces);
        }
    }

    /// The parts since the last call.
    pub(super) fn take(&mut self) -> Vec<OutputPart> {
        std::mem::take(&mut self.parts)
    }

    /// The last part, if it is a text of this kind, or a new one.
    fn open(&mut self, kind: TextKind) -> &mut String {
        let same = match self.parts.last() {
            Some(OutputPart::Content(_)) => kind == TextKind::Content,
            Some(OutputPart::Reasoning(_)) => kind == TextKind::Reasoning,
            Some(OutputPart::Call(_) | OutputPart::Arguments(_)) | None => false,
        };
        if !same {
            self.parts.push(match kind {
                TextKind::Content => OutputPart::Content(String::new()),
                TextKind::Reasoning => OutputPart::Reasoning(String::new()),
            });
        }
        match self.parts.last_mut().expect("a part is there") {
            OutputPart::Content(text)
            | OutputPart::Reasoning(text)
            | OutputPart::Call(text)
            | OutputPart::Arguments(text) => text,
        }
    }
}
