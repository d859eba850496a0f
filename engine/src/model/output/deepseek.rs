//! Calls of DeepSeek V3, R1 and V3.1, between markers.
//!
//! ```text
//!  V3      <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>
//!  V3.1    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
//! ```
//!
//! Markers around calls are left out wherever they stand. A call without a name or arguments is content.

use super::call_object::{ValueScanner, ValueStep};
use super::marker::MarkerMatcher;
use super::sink::{OutputSink, TextKind};

const BEGIN: &str = "<｜tool▁call▁begin｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const MARKERS: &[&str] =
    &["<｜tool▁calls▁begin｜>", BEGIN, SEPARATOR, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"];

/// Bytes between the markers of a call and its arguments.
const HEAD_BYTES_MAX: usize = 512;

#[derive(Debug)]
enum DeepseekPlace {
    Text,
    /// Behind the first marker of a call; `true` behind the second.
    Head(bool),
    Arguments(ValueScanner),
    /// Behind arguments: a code fence may end.
    Fence,
}

/// The parser of one response.
#[derive(Debug)]
pub(super) struct DeepseekCalls {
    markers: MarkerMatcher,
    place: DeepseekPlace,
    /// Text between the markers of a call, and behind the second one.
    kind: String,
    name: String,
    is_special: bool,
}

impl DeepseekCalls {
    pub(super) fn new(is_special: bool) -> Self {
        Self {
            markers: MarkerMatcher::new(MARKERS),
            place: DeepseekPlace::Text,
            kind: String::new(),
            name: String::new(),
            is_special,
        }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        if let DeepseekPlace::Arguments(value) = &mut self.place {
            let last = value.push(character) == ValueStep::Last;
            sink.arguments(character.encode_utf8(&mut [0; 4]));
            if last {
                self.place = DeepseekPlace::Fence;
            }
            return;
        }
        let mut free = Vec::new();
        let found = self.markers.push(character, |character| free.push(character));
        free.into_iter().for_each(|character| self.free(character, sink));
        if let Some(marker) = found {
            self.marker(marker, sink);
        }
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        let held = self.markers.finish();
        self.give_back(sink);
        sink.content(&held);
    }

    fn marker(&mut self, marker: &str, sink: &mut OutputSink) {
        match (&self.place, marker) {
            (DeepseekPlace::Head(false), SEPARATOR) => self.place = DeepseekPlace::Head(true),
            (_, BEGIN) => {
                self.give_back(sink);
                self.place = DeepseekPlace::Head(false);
            }
            _ => {
                self.give_back(sink);
                sink.markup();
            }
        }
    }

    fn free(&mut self, character: char, sink: &mut OutputSink) {
        match self.place {
            DeepseekPlace::Fence if character == '`' || character.is_ascii_whitespace() => {}
            DeepseekPlace::Text | DeepseekPlace::Fence | DeepseekPlace::Arguments(_) => {
                self.place = DeepseekPlace::Text;
                sink.text(TextKind::Content, character);
            }
            DeepseekPlace::Head(true) if character == '{' => self.begin(sink),
            DeepseekPlace::Head(named) => {
                let text = if named { &mut self.name } else { &mut self.kind };
                text.push(character);
                if self.kind.len() + self.name.len() > HEAD_BYTES_MAX {
                    self.give_back(sink);
                }
            }
        }
    }

    /// The arguments begin. In V3 the name is behind the second marker, with a code fence; in V3.1 before it.
    fn begin(&mut self, sink: &mut OutputSink) {
        let name = match self.name.trim().strip_suffix("```json") {
            Some(name) => name.trim(),
            None if self.name.trim().is_empty() => self.kind.trim(),
            None => "",
        };
        if !sink.call(name) {
            self.give_back(sink);
            sink.text(TextKind::Content, '{');
            return;
        }
        self.kind.clear();
        self.name.clear();
        sink.arguments("{");
        self.place = DeepseekPlace::Arguments(ValueScanner::begin('{'));
    }

    /// The text of a call that is none becomes content.
    fn give_back(&mut self, sink: &mut OutputSink) {
        let (kind, name) = (std::mem::take(&mut self.kind), std::mem::take(&mut self.name));
        let place = std::mem::replace(&mut self.place, DeepseekPlace::Text);
        let DeepseekPlace::Head(named) = place else { return };
        let marker = |marker: &'static str| if self.is_special { "" } else { marker };
        let separator = if named { marker(SEPARATOR) } else { "" };
        sink.content(&[marker(BEGIN), &kind, separator, &name].concat());
    }
}
