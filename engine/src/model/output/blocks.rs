//! Calls as JSON objects in blocks: Hermes and Qwen, Llama 3, Mistral.
//!
//! ```text
//!  Hermes     <tool_call>{"name": …, "arguments": …}</tool_call>
//!  Llama 3    {"name": …, "parameters": …}; {…}          also behind <|python_tag|>
//!  Mistral    [TOOL_CALLS][{"name": …, "arguments": …}]  or  [TOOL_CALLS]name[ARGS]{…}
//! ```
//!
//! A block that is no call is content, as the model wrote it. What follows a call inside its block is dropped up to
//! the closing marker, or is content if that marker does not come before the next block.

use super::call_object::{CallObject, CallStep, ValueScanner, ValueStep};
use super::marker::MarkerMatcher;
use super::sink::{OutputSink, TextKind};

/// Bytes between Mistral's marker and the arguments: a name, and an id.
const HEAD_BYTES_MAX: usize = 512;
pub(super) const ARGS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";

/// What distinguishes the formats.
#[derive(Debug)]
pub(super) struct BlockSyntax {
    /// The marker before a block.
    pub(super) open: &'static [&'static str],
    /// The marker behind a block.
    pub(super) close: Option<&'static str>,
    /// Whether the content may begin with an object, without a marker.
    pub(super) bare: bool,
    /// Whether a block may be an array, or a name with arguments.
    pub(super) mistral: bool,
}

pub(super) const HERMES: &BlockSyntax =
    &BlockSyntax { open: &["<tool_call>"], close: Some("</tool_call>"), bare: false, mistral: false };
pub(super) const LLAMA3: &BlockSyntax =
    &BlockSyntax { open: &["<|python_tag|>"], close: None, bare: true, mistral: false };
pub(super) const MISTRAL: &BlockSyntax =
    &BlockSyntax { open: &["[TOOL_CALLS]"], close: None, bare: false, mistral: true };

/// The place in a response.
#[derive(Debug)]
enum BlockPlace {
    /// Before any text.
    Start,
    Text,
    /// Between two objects of a block. A number of bytes of the closing marker have been read.
    Between(usize),
    Object(Box<CallObject>),
    /// Mistral: before the arguments.
    Head(String),
    /// Mistral: in arguments without an object around them.
    Arguments(ValueScanner),
    /// Behind a call, before the closing marker or the next block.
    Rest(MarkerMatcher),
}

/// The parser of one response.
#[derive(Debug)]
pub(super) struct BlockCalls {
    syntax: &'static BlockSyntax,
    /// Functions that a call without a marker may name.
    known: Vec<String>,
    /// Whether the opening marker is left out of text that turns out to be no call.
    is_special: bool,
    text: MarkerMatcher,
    place: BlockPlace,
    /// The block since its marker, or since its last call.
    raw: String,
    /// Whether the block has a marker.
    marked: bool,
    /// Whether the block has had a call.
    called: bool,
    /// Whether an array is open.
    array: bool,
}

impl BlockCalls {
    pub(super) fn new(syntax: &'static BlockSyntax, known: Vec<String>, is_special: bool) -> Self {
        Self {
            syntax,
            known,
            is_special,
            text: MarkerMatcher::new(syntax.open),
            place: if syntax.bare { BlockPlace::Start } else { BlockPlace::Text },
            raw: String::new(),
            marked: false,
            called: false,
            array: false,
        }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        match &mut self.place {
            BlockPlace::Start => match character {
                '{' => {
                    self.open(None);
                    self.push(character, sink);
                }
                _ if character.is_ascii_whitespace() => sink.text(TextKind::Content, character),
                _ => {
                    self.place = BlockPlace::Text;
                    self.push(character, sink);
                }
            },
            BlockPlace::Text => {
                let found = self.text.push(character, |free| sink.text(TextKind::Content, free));
                if found.is_some() {
                    self.open(found);
                }
            }
            BlockPlace::Between(closing) => {
                let closing = *closing;
                self.between(closing, character, sink);
            }
            BlockPlace::Object(_) => self.object(character, sink),
            BlockPlace::Head(_) => self.head(character, sink),
            BlockPlace::Arguments(value) => {
                let last = value.push(character) == ValueStep::Last;
                sink.arguments(character.encode_utf8(&mut [0; 4]));
                if last {
                    self.place = BlockPlace::Text;
                }
            }
            BlockPlace::Rest(markers) => {
                let raw = &mut self.raw;
                let found = markers.push(character, |free| raw.push(free));
                if found.is_some() && found == self.syntax.close {
                    self.raw.clear();
                    self.place = BlockPlace::Text;
                } else if found.is_some() {
                    // The closing marker is missing: what follows the call is content.
                    sink.content(&std::mem::take(&mut self.raw));
                    self.open(found);
                }
            }
        }
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        let held = match &mut self.place {
            BlockPlace::Text => self.text.finish(),
            BlockPlace::Rest(markers) => std::mem::take(&mut self.raw) + &markers.finish(),
            BlockPlace::Object(object) if object.is_begun() => String::new(),
            // A part of the closing marker.
            BlockPlace::Between(_) if self.called => String::new(),
            BlockPlace::Start
            | BlockPlace::Between(_)
            | BlockPlace::Object(_)
            | BlockPlace::Head(_)
            | BlockPlace::Arguments(_) => std::mem::take(&mut self.raw),
        };
        sink.content(&held);
    }

    /// Begins a block.
    fn open(&mut self, marker: Option<&str>) {
        self.place = BlockPlace::Between(0);
        self.raw = marker.filter(|_| !self.is_special).unwrap_or_default().to_owned();
        self.marked = marker.is_some();
        (self.called, self.array) = (false, false);
    }

    fn between(&mut self, closing: usize, character: char, sink: &mut OutputSink) {
        self.raw.push(character);
        if let Some(close) = self.syntax.close {
            if close[closing..].starts_with(character) && (self.called || closing > 0) {
                let closing = closing + character.len_utf8();
                self.place = BlockPlace::Between(closing);
                if closing == close.len() {
                    self.raw.clear();
                    self.place = BlockPlace::Text;
                }
                return;
            }
            if closing > 0 {
                return self.leave(sink);
            }
        }
        let comma = matches!(character, ',' | ';') && self.called;
        match character {
            _ if character.is_ascii_whitespace() || comma => {}
            '{' => {
                self.place = BlockPlace::Object(Box::new(CallObject::new()));
                self.raw.pop();
                self.object(character, sink);
            }
            '[' if self.syntax.mistral && !self.called && !self.array => self.array = true,
            ']' if self.array => {
                if self.called {
                    self.raw.clear();
                    self.place = BlockPlace::Text;
                } else {
                    self.leave(sink);
                }
            }
            _ if self.syntax.mistral && !self.called && !self.array => {
                self.place = BlockPlace::Head(character.to_string());
            }
            _ => self.leave(sink),
        }
    }

    fn object(&mut self, character: char, sink: &mut OutputSink) {
        let BlockPlace::Object(object) = &mut self.place else { return };
        let known: &[String] = if self.marked { &[] } else { &self.known };
        let step = object.push(character, known, sink);
        self.called |= object.is_begun();
        if object.is_begun() {
            self.raw.clear();
        }
        match step {
            CallStep::More if !object.is_begun() => self.raw.push(character),
            CallStep::More => {}
            CallStep::Done => {
                let more = !self.syntax.mistral || self.array;
                self.place = if more { BlockPlace::Between(0) } else { BlockPlace::Text };
            }
            CallStep::Invalid => {
                self.raw.push(character);
                self.leave(sink);
            }
        }
    }

    fn head(&mut self, character: char, sink: &mut OutputSink) {
        let BlockPlace::Head(head) = &mut self.place else { return };
        self.raw.push(character);
        head.push(character);
        if character != '{' {
            if head.len() > HEAD_BYTES_MAX {
                self.leave(sink);
            }
            return;
        }
        let head = head[..head.len() - 1].trim_end();
        let name = head.split('[').next().unwrap_or_default();
        let between = &head[name.len()..];
        let valid = between.is_empty()
            || between == ARGS
            || (between.starts_with(CALL_ID) && between.ends_with(ARGS) && between.matches('[').count() == 2);
        if valid && sink.call(name.trim_end()) {
            self.raw.clear();
            sink.arguments("{");
            self.place = BlockPlace::Arguments(ValueScanner::begin('{'));
        } else {
            self.leave(sink);
        }
    }

    /// Leaves the block at a character that does not belong to it, the last of `raw`.
    fn leave(&mut self, sink: &mut OutputSink) {
        if let (Some(_), true) = (self.syntax.close, self.called) {
            self.place = BlockPlace::Rest(MarkerMatcher::new(HERMES_MARKERS));
            let raw = std::mem::take(&mut self.raw);
            raw.chars().for_each(|character| self.push(character, sink));
            return;
        }
        // The last character may begin the marker of another block.
        let last = self.raw.pop();
        let raw = std::mem::take(&mut self.raw);
        sink.content(&raw);
        self.place = BlockPlace::Text;
        if let Some(last) = last {
            self.push(last, sink);
        }
    }
}

/// The markers of blocks that close, for text behind a call.
const HERMES_MARKERS: &[&str] = &["<tool_call>", "</tool_call>"];
