//! Calls that the request forces. The text behind the reasoning is JSON of a known schema: an array of calls, or the
//! arguments of one.

use super::OutputPart;
use super::call_object::{CallObject, CallStep, ValueScanner, ValueStep};
use super::harmony::HarmonyMessages;
use super::sink::{OutputSink, TextKind};

/// The calls of a text without other content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForcedCalls {
    /// An array of objects with a name and arguments.
    Any,
    /// The arguments of this function.
    Of(String),
}

#[derive(Debug)]
enum ForcedPlace {
    Start,
    /// In the array, between calls.
    Between,
    Object(Box<CallObject>),
    Arguments(ValueScanner),
    /// Behind the calls, or in a text that is no call.
    Text,
}

/// The parser of one response.
#[derive(Debug)]
pub(super) struct ForcedParser {
    calls: ForcedCalls,
    place: ForcedPlace,
    /// The text since the last call.
    raw: String,
}

impl ForcedParser {
    pub(super) fn new(calls: ForcedCalls) -> Self {
        Self { calls, place: ForcedPlace::Start, raw: String::new() }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        let space = character.is_ascii_whitespace();
        match &mut self.place {
            ForcedPlace::Start => match (&self.calls, character) {
                _ if space => sink.text(TextKind::Content, character),
                (ForcedCalls::Of(name), '{') if sink.call(name) => {
                    sink.arguments("{");
                    self.place = ForcedPlace::Arguments(ValueScanner::begin('{'));
                }
                (ForcedCalls::Any, '[') => {
                    self.raw.push(character);
                    self.place = ForcedPlace::Between;
                }
                (ForcedCalls::Any | ForcedCalls::Of(_), _) => {
                    self.raw.push(character);
                    self.leave(sink);
                }
            },
            ForcedPlace::Between => match character {
                '{' => {
                    self.place = ForcedPlace::Object(Box::new(CallObject::new()));
                    self.push(character, sink);
                }
                ']' => {
                    self.raw.clear();
                    self.place = ForcedPlace::Text;
                }
                _ => {
                    self.raw.push(character);
                    if !space && character != ',' {
                        self.leave(sink);
                    }
                }
            },
            ForcedPlace::Object(object) => {
                self.raw.push(character);
                let step = object.push(character, &[], sink);
                if object.is_begun() {
                    self.raw.clear();
                }
                match step {
                    CallStep::More => {}
                    CallStep::Done => self.place = ForcedPlace::Between,
                    CallStep::Invalid => self.leave(sink),
                }
            }
            ForcedPlace::Arguments(value) => {
                let last = value.push(character) == ValueStep::Last;
                sink.arguments(character.encode_utf8(&mut [0; 4]));
                if last {
                    self.place = ForcedPlace::Text;
                }
            }
            ForcedPlace::Text => sink.text(TextKind::Content, character),
        }
    }

    /// A text that ends early is content, but for what follows a call.
    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        if !matches!(self.place, ForcedPlace::Between) || self.raw.starts_with('[') {
            self.leave(sink);
        }
    }

    /// What has been read since the last call is content.
    fn leave(&mut self, sink: &mut OutputSink) {
        self.place = ForcedPlace::Text;
        sink.content(&std::mem::take(&mut self.raw));
    }
}

/// Forced calls in the messages of gpt-oss: the text of the message to the user is the JSON. A call that the model
/// writes in its own format is one, too.
#[derive(Debug)]
pub(super) struct ForcedMessages {
    messages: HarmonyMessages,
    /// The parts of the messages.
    inner: OutputSink,
    calls: ForcedParser,
}

impl ForcedMessages {
    pub(super) fn new(calls: ForcedCalls) -> Self {
        let inner = OutputSink::new(usize::MAX);
        Self { messages: HarmonyMessages::new(), inner, calls: ForcedParser::new(calls) }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        self.messages.push(character, &mut self.inner);
        self.pass(sink);
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        self.messages.finish(&mut self.inner);
        self.inner.finish();
        self.pass(sink);
        self.calls.finish(sink);
    }

    fn pass(&mut self, sink: &mut OutputSink) {
        for part in self.inner.take() {
            match part {
                OutputPart::Content(text) => {
                    text.chars().for_each(|character| self.calls.push(character, sink));
                }
                OutputPart::Reasoning(text) => {
                    text.chars().for_each(|character| sink.text(TextKind::Reasoning, character));
                }
                OutputPart::Call(name) => {
                    sink.call(&name);
                }
                OutputPart::Arguments(text) => sink.arguments(&text),
            }
        }
    }
}
