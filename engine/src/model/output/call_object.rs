//! One call as a JSON object, character by character: `{"name": …, "arguments": {…}}`, in any order of the fields.
//!
//! Llama's `parameters` are arguments too, and so is an object that a model writes as a string. Further fields are
//! skipped. The call begins when its name and the first character of its arguments are known. From there on, the
//! arguments are passed as the model writes them, up to the bracket that closes them. Brackets inside strings do not
//! count.

use serde::de::IgnoredAny;

use super::sink::OutputSink;

/// Bytes of a field's name.
const KEY_BYTES_MAX: usize = 256;

/// Fields of calls.
const FIELDS: [&str; 5] = ["name", "arguments", "parameters", "type", "id"];

/// The effect of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallStep {
    /// It belongs to the object, which continues.
    More,
    /// It ends the object.
    Done,
    /// The object is no call.
    Invalid,
}

/// The end of a JSON value, by brackets and strings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ValueScanner {
    depth: usize,
    string: bool,
    escaped: bool,
}

/// The place of a character in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueStep {
    Inside,
    Last,
    /// Behind a number or a word.
    Past,
}

impl ValueScanner {
    /// A value with this first character.
    pub(super) fn begin(first: char) -> Self {
        Self { depth: usize::from(matches!(first, '{' | '[')), string: first == '"', escaped: false }
    }

    pub(super) fn push(&mut self, character: char) -> ValueStep {
        if self.string {
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.string = false;
                    return if self.depth == 0 { ValueStep::Last } else { ValueStep::Inside };
                }
                _ => {}
            }
            return ValueStep::Inside;
        }
        if self.depth == 0 {
            let past = matches!(character, ',' | '}' | ']') || character.is_ascii_whitespace();
            return if past { ValueStep::Past } else { ValueStep::Inside };
        }
        match character {
            '"' => self.string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return ValueStep::Last;
                }
            }
            _ => {}
        }
        ValueStep::Inside
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectPlace {
    Start,
    Key,
    InKey,
    Colon,
    Value,
    InName,
    InArguments,
    InTextArguments,
    InOther,
    AfterValue,
}

/// A call's object.
#[derive(Debug)]
pub(super) struct CallObject {
    place: ObjectPlace,
    value: ValueScanner,
    /// The JSON of a field's name, of the function's name, or of arguments in a string.
    json: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
    begun: bool,
}

impl CallObject {
    pub(super) fn new() -> Self {
        Self {
            place: ObjectPlace::Start,
            value: ValueScanner::default(),
            json: String::new(),
            name: None,
            early: String::new(),
            has_arguments: false,
            begun: false,
        }
    }

    /// Whether the call was passed to the sink.
    pub(super) fn is_begun(&self) -> bool {
        self.begun
    }

    /// Adds a character. `known` are the only functions that a call may name; empty for all.
    pub(super) fn push(&mut self, character: char, known: &[String], sink: &mut OutputSink) -> CallStep {
        let space = character.is_ascii_whitespace();
        match self.place {
            ObjectPlace::Start => self.go(character == '{', ObjectPlace::Key),
            ObjectPlace::Key => match character {
                _ if space => CallStep::More,
                '"' => self.go(true, ObjectPlace::InKey),
                '}' => self.close(sink),
                _ => CallStep::Invalid,
            },
            ObjectPlace::InKey => self.in_key(character, known),
            ObjectPlace::Colon => self
                .go(space || character == ':', if space { ObjectPlace::Colon } else { ObjectPlace::Value }),
            ObjectPlace::Value => {
                if space {
                    CallStep::More
                } else {
                    self.begin_value(character, sink)
                }
            }
            ObjectPlace::InName | ObjectPlace::InTextArguments => self.in_string(character, known, sink),
            ObjectPlace::InArguments => {
                let last = self.value.push(character) == ValueStep::Last;
                self.add_arguments(character.encode_utf8(&mut [0; 4]), sink);
                self.go(true, if last { ObjectPlace::AfterValue } else { ObjectPlace::InArguments })
            }
            ObjectPlace::InOther => match self.value.push(character) {
                ValueStep::Inside => CallStep::More,
                ValueStep::Last => self.go(true, ObjectPlace::AfterValue),
                ValueStep::Past => {
                    self.place = ObjectPlace::AfterValue;
                    self.push(character, known, sink)
                }
            },
            ObjectPlace::AfterValue => match character {
                _ if space => CallStep::More,
                ',' => self.go(true, ObjectPlace::Key),
                '}' => self.close(sink),
                _ => CallStep::Invalid,
            },
        }
    }

    fn go(&mut self, valid: bool, place: ObjectPlace) -> CallStep {
        if place == ObjectPlace::InKey && self.place != ObjectPlace::InKey {
            self.json.clear();
            self.value = ValueScanner::begin('"');
        }
        self.place = place;
        if valid { CallStep::More } else { CallStep::Invalid }
    }

    /// An object that may be an answer in JSON is none of the known calls as soon as it has another field.
    fn in_key(&mut self, character: char, known: &[String]) -> CallStep {
        if self.value.push(character) == ValueStep::Last {
            let valid = known.is_empty() || FIELDS.contains(&self.json.as_str());
            return self.go(valid, ObjectPlace::Colon);
        }
        self.json.push(character);
        self.go(self.json.len() <= KEY_BYTES_MAX, ObjectPlace::InKey)
    }

    fn begin_value(&mut self, first: char, sink: &mut OutputSink) -> CallStep {
        if matches!(first, ',' | '}' | ']' | ':') {
            return CallStep::Invalid;
        }
        self.value = ValueScanner::begin(first);
        match (self.json.as_str(), first) {
            ("name", '"') if self.name.is_none() => self.begin_string(ObjectPlace::InName),
            ("name", _) if self.name.is_none() => CallStep::Invalid,
            ("arguments" | "parameters", '{') if !self.has_arguments => {
                self.has_arguments = true;
                if self.name.is_some() && !self.begin(sink) {
                    return CallStep::Invalid;
                }
                self.add_arguments("{", sink);
                self.go(true, ObjectPlace::InArguments)
            }
            ("arguments" | "parameters", '"') if !self.has_arguments => {
                self.has_arguments = true;
                self.begin_string(ObjectPlace::InTextArguments)
            }
            // `null`: no arguments.
            ("arguments" | "parameters", first) if !self.has_arguments && first != 'n' => CallStep::Invalid,
            _ => self.go(true, ObjectPlace::InOther),
        }
    }

    fn begin_string(&mut self, place: ObjectPlace) -> CallStep {
        self.json.clear();
        self.json.push('"');
        self.go(true, place)
    }

    fn in_string(&mut self, character: char, known: &[String], sink: &mut OutputSink) -> CallStep {
        self.json.push(character);
        if self.value.push(character) != ValueStep::Last {
            return CallStep::More;
        }
        let Ok(text) = serde_json::from_str::<String>(&self.json) else { return CallStep::Invalid };
        if self.place == ObjectPlace::InName {
            let valid = known.is_empty() || known.contains(&text);
            self.name = Some(text);
            if !valid || (self.has_arguments && !self.begin(sink)) {
                return CallStep::Invalid;
            }
        } else {
            let text = if text.trim().is_empty() { "{}" } else { text.trim() };
            let valid = text.starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok();
            if !valid || (self.name.is_some() && !self.begin(sink)) {
                return CallStep::Invalid;
            }
            self.add_arguments(text, sink);
        }
        self.go(true, ObjectPlace::AfterValue)
    }

    fn add_arguments(&mut self, text: &str, sink: &mut OutputSink) {
        if self.begun {
            sink.arguments(text);
        } else {
            self.early.push_str(text);
        }
    }

    /// Passes the call to the sink, with the arguments so far.
    fn begin(&mut self, sink: &mut OutputSink) -> bool {
        if !self.name.as_deref().is_some_and(|name| sink.call(name)) {
            return false;
        }
        self.begun = true;
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            sink.arguments(&early);
        }
        true
    }

    fn close(&mut self, sink: &mut OutputSink) -> CallStep {
        if !self.begun && !self.begin(sink) {
            return CallStep::Invalid;
        }
        if !self.has_arguments {
            sink.arguments("{}");
        }
        CallStep::Done
    }
}
