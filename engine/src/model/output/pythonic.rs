//! Calls as a list of Python calls, of Llama 3.2 and 4: `[weather(city="Paris", days=2), time()]`.
//!
//! The list is the beginning of the content, or stands behind `<|python_start|>`. A call is passed when its bracket
//! has closed, with its keyword arguments as JSON. Only literals are values. A list that contains anything else, or
//! names an unknown function, is content from there on.

use super::marker::MarkerMatcher;
use super::sink::{OutputSink, TextKind};

pub(super) const START: &str = "<|python_start|>";
pub(super) const MARKERS: &[&str] = &[START, "<|python_end|>"];

/// Levels of nesting of a value: serde_json's bound for what clients send.
const NESTING_MAX: usize = 128;

#[derive(Debug)]
enum ListPlace {
    /// Before any text; `true` behind the marker.
    Start(bool),
    Text,
    /// Before a call; `true` behind one.
    Between(bool),
    Name,
    Arguments(CallScanner),
}

/// The end of a call, by brackets and strings.
#[derive(Clone, Copy, Debug, Default)]
struct CallScanner {
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

/// The parser of one response.
#[derive(Debug)]
pub(super) struct PythonicCalls {
    known: Vec<String>,
    markers: MarkerMatcher,
    place: ListPlace,
    /// The list since its beginning, or since its last call.
    raw: String,
    name: String,
    arguments: String,
    is_special: bool,
}

impl CallScanner {
    /// Whether the character closes the call's own bracket.
    fn push(&mut self, character: char) -> bool {
        match (self.quote, character) {
            (Some(_), _) if self.escaped => self.escaped = false,
            (Some(_), '\\') => self.escaped = true,
            (Some(quote), _) if quote == character => self.quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => self.quote = Some(character),
            (None, '(' | '[' | '{') => self.depth += 1,
            (None, ')' | ']' | '}') if self.depth == 0 => return character == ')',
            (None, ')' | ']' | '}') => self.depth -= 1,
            (None, _) => {}
        }
        false
    }
}

impl PythonicCalls {
    pub(super) fn new(known: Vec<String>, is_special: bool) -> Self {
        Self {
            known,
            markers: MarkerMatcher::new(MARKERS),
            place: ListPlace::Start(false),
            raw: String::new(),
            name: String::new(),
            arguments: String::new(),
            is_special,
        }
    }

    pub(super) fn push(&mut self, character: char, sink: &mut OutputSink) {
        match &mut self.place {
            ListPlace::Start(_) | ListPlace::Text => {
                let mut free = String::new();
                let found = self.markers.push(character, |character| free.push(character));
                free.chars().for_each(|character| self.free(character, sink));
                match found {
                    Some(START) => {
                        sink.content(&self.raw);
                        self.place = ListPlace::Start(true);
                        self.raw = if self.is_special { String::new() } else { START.to_owned() };
                    }
                    Some(_) => sink.markup(),
                    None => {}
                }
            }
            ListPlace::Between(called) => {
                let called = *called;
                self.raw.push(character);
                match character {
                    _ if character.is_ascii_whitespace() || (character == ',' && called) => {}
                    ']' if called => {
                        self.raw.clear();
                        self.place = ListPlace::Text;
                    }
                    _ if character.is_alphabetic() || character == '_' => {
                        self.name = character.to_string();
                        self.place = ListPlace::Name;
                    }
                    _ => self.leave(sink),
                }
            }
            ListPlace::Name => {
                self.raw.push(character);
                match character {
                    '(' if self.known.is_empty() || self.known.contains(&self.name) => {
                        self.arguments.clear();
                        self.place = ListPlace::Arguments(CallScanner::default());
                    }
                    _ if character.is_alphanumeric() || matches!(character, '_' | '.' | '-') => {
                        self.name.push(character);
                    }
                    _ => self.leave(sink),
                }
            }
            ListPlace::Arguments(scanner) => {
                self.raw.push(character);
                if scanner.push(character) {
                    self.call(sink);
                } else {
                    self.arguments.push(character);
                }
            }
        }
    }

    pub(super) fn finish(&mut self, sink: &mut OutputSink) {
        let held = self.markers.finish();
        let called = matches!(self.place, ListPlace::Between(true));
        let raw = std::mem::take(&mut self.raw);
        if !called {
            sink.content(&raw);
        }
        sink.content(&held);
    }

    fn free(&mut self, character: char, sink: &mut OutputSink) {
        match (&self.place, character) {
            (ListPlace::Start(_), '[') => {
                self.raw.push(character);
                self.place = ListPlace::Between(false);
            }
            (ListPlace::Start(true), _) if character.is_ascii_whitespace() => self.raw.push(character),
            (ListPlace::Start(false), _) if character.is_ascii_whitespace() => {
                sink.text(TextKind::Content, character);
            }
            // The matcher frees characters one by one, but behind a list's beginning it has no text to free.
            _ => {
                let raw = std::mem::take(&mut self.raw);
                sink.content(&raw);
                self.place = ListPlace::Text;
                sink.text(TextKind::Content, character);
            }
        }
    }

    fn call(&mut self, sink: &mut OutputSink) {
        match keywords(&self.arguments) {
            Some(arguments) if sink.call(&self.name) => {
                sink.arguments(&arguments);
                self.raw.clear();
                self.place = ListPlace::Between(true);
            }
            _ => self.leave(sink),
        }
    }

    /// The list is content, up to the last marker behind its own: each text is read at most twice.
    fn leave(&mut self, sink: &mut OutputSink) {
        self.place = ListPlace::Text;
        let raw = std::mem::take(&mut self.raw);
        let own = if raw.starts_with(START) { START.len() } else { 0 };
        let content = raw[own..].rfind(START).map_or(raw.len(), |at| own + at);
        // A marker may begin with the last character.
        let last = raw[..content].char_indices().next_back().map_or(0, |(at, _)| at);
        sink.content(&raw[..last]);
        raw[last..].chars().for_each(|character| self.push(character, sink));
    }
}

/// Keyword arguments as a JSON object, laid out as Python's `json.dumps` does it.
fn keywords(text: &str) -> Option<String> {
    let mut literal = Literal { rest: text };
    let mut out = String::from("{");
    literal.space();
    while !literal.rest.is_empty() {
        if out.len() > 1 {
            out.push_str(", ");
        }
        let end = literal.rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
        let (name, rest) = literal.rest.split_at(end);
        literal.rest = rest;
        literal.space();
        if name.is_empty() || !literal.take("=") {
            return None;
        }
        out.push_str(&serde_json::to_string(name).ok()?);
        out.push_str(": ");
        literal.value(&mut out, 0)?;
        literal.space();
        if !literal.rest.is_empty() && !literal.take(",") {
            return None;
        }
        literal.space();
    }
    out.push('}');
    Some(out)
}

/// A reader of Python literals.
struct Literal<'a> {
    rest: &'a str,
}

impl Literal<'_> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Writes the next value as JSON.
    fn value(&mut self, out: &mut String, depth: usize) -> Option<()> {
        if depth == NESTING_MAX {
            return None;
        }
        self.space();
        match self.rest.chars().next()? {
            '[' => self.items('[', "]", out, depth),
            '(' => self.items('(', ")", out, depth),
            '{' => self.items('{', "}", out, depth),
            '"' | '\'' => self.string(out),
            _ => self.word(out),
        }
    }

    /// A list, a tuple (as a list), or a dictionary with strings as keys.
    fn items(&mut self, open: char, close: &str, out: &mut String, depth: usize) -> Option<()> {
        self.rest = &self.rest[open.len_utf8()..];
        let pairs = open == '{';
        out.push(if pairs { '{' } else { '[' });
        let mut first = true;
        loop {
            self.space();
            if self.take(close) {
                out.push(if pairs { '}' } else { ']' });
                return Some(());
            }
            if !std::mem::replace(&mut first, false) {
                out.push_str(", ");
            }
            if pairs {
                self.rest.starts_with(['"', '\'']).then_some(())?;
                self.string(out)?;
                self.space();
                self.take(":").then_some(())?;
                out.push_str(": ");
            }
            self.value(out, depth + 1)?;
            self.space();
            if !self.take(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    fn string(&mut self, out: &mut String) -> Option<()> {
        let quote = self.rest.chars().next()?;
        let mut text = String::new();
        let mut characters = self.rest[1..].chars();
        loop {
            match characters.next()? {
                end if end == quote => break,
                '\\' => escape(&mut characters, &mut text)?,
                other => text.push(other),
            }
        }
        self.rest = characters.as_str();
        out.push_str(&serde_json::to_string(&text).ok()?);
        Some(())
    }

    /// A number, or a word of Python or JSON.
    fn word(&mut self, out: &mut String) -> Option<()> {
        let ends = |c: char| matches!(c, ',' | ')' | ']' | '}' | ':') || c.is_ascii_whitespace();
        let end = self.rest.find(ends).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        out.push_str(match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number => {
                serde_json::from_str::<serde_json::Number>(number).ok()?;
                number
            }
        });
        Some(())
    }
}

/// An escape of a Python string, behind its backslash.
fn escape(characters: &mut std::str::Chars<'_>, text: &mut String) -> Option<()> {
    let character = match characters.next()? {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        '\n' => return Some(()),
        same @ ('\\' | '\'' | '"') => same,
        'x' => code(characters, 2)?,
        'u' => code(characters, 4)?,
        'U' => code(characters, 8)?,
        other => {
            text.push('\\');
            other
        }
    };
    text.push(character);
    Some(())
}

/// The character with this number of hexadecimal digits.
fn code(characters: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let hex: String = characters.by_ref().take(digits).collect();
    let code = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
    code.and_then(char::from_u32)
}
