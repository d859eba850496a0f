//! Calls of Qwen 3 Coder, with a tag for each argument.
//!
//! ```text
//!  <tool_call>
//!  <function=NAME>
//!  <parameter=city>
//!  Paris
//!  </parameter>
//!  </function>
//!  </tool_call>
//! ```
//!
//! An argument is passed when its tag closes. Its text is JSON if the function's schema names a type other than text
//! and the text is such JSON, otherwise a string. A block without a function is content, as the model wrote it.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::marker::MarkerMatcher;
use super::sink::{OutputSink, TextKind};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
pub(super) const MARKERS: &[&str] = &[OPEN, FUNCTION];
/// What ends an argument. Models leave out its closing tag at times.
const VALUE_ENDS: &[&str] = &[PARAMETER_END, PARAMETER, FUNCTION_END];
/// What is read between arguments. Models leave out a function's closing tag at times.
const BETWEEN: &[&str] = &[PARAMETER, FUNCTION_END, OPEN, FUNCTION, CLOSE];

/// Bytes of a name in a tag.
const NAME_BYTES_MAX: usize = 256;

#[derive(Debug)]
enum TagPlace {
    Text,
    /// Behind the opening tag of a block. A number of bytes of the function's tag have been read.
    Opened(usize),
    FunctionName,
    /// In a function, between arguments.
    Between(MarkerMatcher),
    ParameterName,
    Value(MarkerMatcher),
    /// Behind a function: the block may close. A number of bytes of its closing tag have been read.
    Closing(usize),
}

/// The parser of one response.
#[derive(Debug)]
pub(super) struct TaggedCalls {
    tools: Vec<Value>,
    text: MarkerMatcher,
    place: TagPlace,
    /// The text since the block began or its function ended.
    raw: String,
    function: String,
    parameter: String,
    value: String,
    /// Whether the function has had an argument.
    has_arguments: bool,
    is_special: bool,
}

impl TaggedCalls {
    pub(super) fn new(tools: Vec<Value>, is_special: bool) -> Self {
        Self {
            tools,
            text: MarkerMatcher::new(MARKERS),
            place: TagPlace::Text,
            raw: String::new(),
            function: String::new(),
            parameter: String::new(),
            value: String::new(),
            has_arguments: false,
            is_special,
        }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        match &mut self.place {
            TagPlace::Text => {
                let found = self.text.push(character, |free| sink.text(TextKind::Content, free));
                if let Some(marker) = found {
                    self.raw = if self.is_special { String::new() } else { marker.to_owned() };
                    self.function.clear();
                    self.place = if marker == OPEN { TagPlace::Opened(0) } else { TagPlace::FunctionName };
                }
            }
            TagPlace::Opened(read) => {
                let read = bytes_read(FUNCTION, *read, character);
                self.raw.push(character);
                match read {
                    Some(read) if read == FUNCTION.len() => self.place = TagPlace::FunctionName,
                    Some(read) => self.place = TagPlace::Opened(read),
                    None => self.leave(sink),
                }
            }
            TagPlace::FunctionName => {
                self.raw.push(character);
                if character != '>' {
                    self.function.push(character);
                    if self.function.len() > NAME_BYTES_MAX {
                        self.leave(sink);
                    }
                } else if sink.call(self.function.trim()) {
                    self.raw.clear();
                    self.has_arguments = false;
                    self.place = TagPlace::Between(MarkerMatcher::new(BETWEEN));
                } else {
                    self.leave(sink);
                }
            }
            TagPlace::Between(tags) => {
                if let Some(tag) = tags.push(character, |_| {}) {
                    self.behind_value(tag, sink);
                }
            }
            TagPlace::ParameterName if character == '>' => {
                self.value.clear();
                self.place = TagPlace::Value(MarkerMatcher::new(VALUE_ENDS));
            }
            TagPlace::ParameterName => self.parameter.push(character),
            TagPlace::Value(ends) => {
                let value = &mut self.value;
                if let Some(marker) = ends.push(character, |free| value.push(free)) {
                    self.argument(marker, sink);
                }
            }
            TagPlace::Closing(read) => {
                let read = bytes_read(CLOSE, *read, character);
                self.raw.push(character);
                match read {
                    Some(read) if read < CLOSE.len() => self.place = TagPlace::Closing(read),
                    Some(_) => {
                        self.raw.clear();
                        self.place = TagPlace::Text;
                    }
                    None => {
                        self.place = TagPlace::Text;
                        let raw = std::mem::take(&mut self.raw);
                        raw.chars().for_each(|character| self.push(character, sink));
                    }
                }
            }
        }
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        match self.place {
            TagPlace::Text => {
                let held = self.text.finish();
                sink.content(&held);
            }
            TagPlace::Opened(_) | TagPlace::FunctionName => sink.content(&std::mem::take(&mut self.raw)),
            // A call that is cut off, or a part of a tag behind it.
            TagPlace::Between(_) | TagPlace::ParameterName | TagPlace::Value(_) | TagPlace::Closing(_) => {}
        }
    }

    /// Passes the argument that this marker ends.
    fn argument(&mut self, marker: &str, sink: &mut OutputSink) {
        let text = self.value.strip_prefix('\n').unwrap_or(&self.value);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let name = Value::from(self.parameter.trim());
        let value = typed(self.schema(), text);
        sink.arguments(if self.has_arguments { ", " } else { "{" });
        sink.arguments(&format!("{name}: {value}"));
        self.has_arguments = true;
        self.behind_value(marker, sink);
    }

    /// Goes on behind a tag in a function. The next block and the end of this one end a function that has no end.
    fn behind_value(&mut self, tag: &str, sink: &mut OutputSink) {
        match tag {
            PARAMETER => {
                self.parameter.clear();
                self.place = TagPlace::ParameterName;
            }
            FUNCTION_END => self.end(sink),
            OPEN | FUNCTION | CLOSE => {
                self.end(sink);
                tag.chars().for_each(|character| self.push(character, sink));
            }
            _ => self.place = TagPlace::Between(MarkerMatcher::new(BETWEEN)),
        }
    }

    /// The schema of the current argument.
    fn schema(&self) -> &Value {
        let (function, parameter) = (self.function.trim(), self.parameter.trim());
        let tool = self.tools.iter().find(|tool| tool["function"]["name"] == function);
        tool.map_or(&Value::Null, |tool| &tool["function"]["parameters"]["properties"][parameter])
    }

    fn end(&mut self, sink: &mut OutputSink) {
        sink.arguments(if self.has_arguments { "}" } else { "{}" });
        self.raw.clear();
        self.place = TagPlace::Closing(0);
    }

    /// Leaves a block that is no call. Its last tag, or at least its last character, is read again.
    fn leave(&mut self, sink: &mut OutputSink) {
        let raw = std::mem::take(&mut self.raw);
        let last = raw.char_indices().next_back().map_or(0, |(at, _)| at);
        let at = raw.rfind('<').filter(|at| *at > 0).unwrap_or(last);
        sink.content(&raw[..at]);
        self.place = TagPlace::Text;
        raw[at..].chars().for_each(|character| self.push(character, sink));
    }
}

/// The bytes of a tag that have been read with this character. Whitespace may precede the tag. `None`: another text.
fn bytes_read(tag: &str, read: usize, character: char) -> Option<usize> {
    if read == 0 && character.is_whitespace() {
        return Some(0);
    }
    tag[read..].starts_with(character).then(|| read + character.len_utf8())
}

/// An argument's text as JSON.
fn typed(schema: &Value, text: &str) -> String {
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind.as_str()],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let trimmed = text.trim();
    let word = match trimmed {
        "True" if kinds.contains(&"boolean") => "true",
        "False" if kinds.contains(&"boolean") => "false",
        other => other,
    };
    let is_text = kinds.is_empty() || kinds.contains(&"string");
    if !is_text && serde_json::from_str::<IgnoredAny>(word).is_ok() {
        return word.to_owned();
    }
    Value::from(text).to_string()
}
