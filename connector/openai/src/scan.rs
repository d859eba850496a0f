//! A strict walk over JSON that builds nothing: what it accepts, every parser reads alike, and so it may travel as it is.
//!
//! It accepts exactly what serde_json reads into a `Value` (a test compares the two), with nothing left to a reader's
//! choice: UTF-8 throughout, no control byte in a string, no half of a surrogate pair, no `NaN`, no number beyond an
//! f64, at most [`NESTING_MAX`] levels. Two things are legal and still read differently by different parsers, or could
//! hide a name: a name that appears twice in one object, and a name that is spelled with escapes. Those, and names that
//! [`Internal`] knows, are noted as `tangled`; whoever passes bytes on writes such a part anew.
//!
//! Linear in the text's length, but for the names of an object with more than `FEW_NAMES`, which are sorted.

use crate::limits::NESTING_MAX;

/// Objects of up to so many names are compared name by name.
const FEW_NAMES: usize = 16;
/// The names of an object beyond so many are not remembered: it counts as tangled.
const NAMES_MAX: usize = 4096;
/// Strings up to this length are not worth a vectored search.
const SHORT_BYTES: usize = 24;

/// What a value takes in a tree of `serde_json::Value`s, in bytes. A value has 72, and the vector that it stands in may
/// have doubled just now.
const LEAF_BYTES: usize = 2 * 72;
/// A text of its own: the allocator's smallest piece and its header. Longer ones take what they are long.
const STRING_BYTES: usize = LEAF_BYTES + 32;
/// The first item makes room for four.
const ARRAY_BYTES: usize = LEAF_BYTES + 4 * 72 + 16;
/// The first field makes room for four of 104 bytes, and for a table of hashes.
const OBJECT_BYTES: usize = LEAF_BYTES + 4 * 104 + 96;
/// A field's name, its hash, its place in the table, all of which may have doubled; its value is counted apart.
const NAME_BYTES: usize = 88;

/// Where a field is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At the top of the body.
    Top,
    /// At any depth inside a top-level field whose fields engines read as if they stood at the top.
    Extension,
    /// At any depth inside any other top-level field.
    Inside,
}

/// Which fields are nobody's to send.
pub trait Internal {
    /// Whether engines read the fields of this top-level field as if they stood at the top.
    fn is_extension(&self, field: &str) -> bool;

    /// Whether a field of that name is internal there.
    fn is_internal(&self, place: Place, name: &str) -> bool;
}

impl Place {
    /// The place of what is inside a top-level field.
    pub(crate) fn within(field: &str, internal: &dyn Internal) -> Self {
        if internal.is_extension(field) { Self::Extension } else { Self::Inside }
    }
}

/// Nothing is internal.
impl Internal for () {
    fn is_extension(&self, _: &str) -> bool {
        false
    }

    fn is_internal(&self, _: Place, _: &str) -> bool {
        false
    }
}

/// A string as it is written: where it is, without its quotes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text {
    pub start: usize,
    pub end: usize,
    /// No escape in it: it is what it says.
    pub plain: bool,
}

/// A walk. Every step is `None` where the text is not what was asked for, and the walk is then of no further use,
/// except to [`Scanner::attempt`].
pub(crate) struct Scanner<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    names: Vec<&'a str>,
    internal: &'a dyn Internal,
    /// Where what is being walked is.
    pub place: Place,
    /// What was walked since this was last cleared must not pass as it is.
    pub tangled: bool,
    /// What was walked would take this many bytes as a tree, estimated from above.
    pub tree_bytes: usize,
}

/// Bytes that a text takes as a tree of values, as far as it is JSON.
pub(crate) fn tree_bytes(text: &str) -> usize {
    let mut scanner = Scanner::new(text, &());
    scanner.space();
    // As far as the walk came, and no parser comes further.
    let _ = scanner.value();
    scanner.tree_bytes
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(text: &'a str, internal: &'a dyn Internal) -> Self {
        Self {
            text,
            at: 0,
            depth: 0,
            names: Vec::new(),
            internal,
            place: Place::Inside,
            tangled: false,
            tree_bytes: 0,
        }
    }

    /// What is written in a string.
    pub(crate) fn slice(&self, text: Text) -> &'a str {
        &self.text[text.start..text.end]
    }

    pub(crate) fn text(&self) -> &'a str {
        self.text
    }

    pub(crate) fn offset(&self) -> usize {
        self.at
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub(crate) fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    pub(crate) fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    pub(crate) fn eat(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// One step into an object or array, which begins here.
    pub(crate) fn open(&mut self, bracket: u8) -> Option<()> {
        self.eat(bracket)?;
        self.depth += 1;
        self.tree_bytes += if bracket == b'{' { OBJECT_BYTES } else { ARRAY_BYTES };
        // serde_json refuses the level at which its count of 128 is used up.
        (self.depth < NESTING_MAX).then_some(())
    }

    pub(crate) fn close(&mut self) {
        self.depth -= 1;
    }

    /// Walks what begins here as `shape` says, or, where it is something else, as any value.
    /// Whether `shape` held; `None` where it is no value at all.
    pub(crate) fn attempt(&mut self, shape: impl FnOnce(&mut Self) -> Option<()>) -> Option<bool> {
        let (at, depth, names, tree_bytes) = (self.at, self.depth, self.names.len(), self.tree_bytes);
        if shape(self).is_some() {
            return Some(true);
        }
        (self.at, self.depth, self.tree_bytes) = (at, depth, tree_bytes);
        self.names.truncate(names);
        self.value().map(|()| false)
    }

    /// Any value.
    pub(crate) fn value(&mut self) -> Option<()> {
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => self.object(|scanner, _| scanner.value()),
            b'[' => self.array(|scanner, _| scanner.value()),
            b't' => self.word("true"),
            b'f' => self.word("false"),
            b'n' => self.word("null"),
            _ => self.number().map(drop),
        }
    }

    /// An object; `field` walks each value and is told its name.
    pub(crate) fn object(&mut self, mut field: impl FnMut(&mut Self, Text) -> Option<()>) -> Option<()> {
        self.open(b'{')?;
        let first = self.names.len();
        self.space();
        if self.eat(b'}').is_none() {
            loop {
                self.space();
                let name = self.string()?;
                self.note(name, first);
                self.space();
                self.eat(b':')?;
                self.space();
                field(self, name)?;
                self.space();
                match self.next()? {
                    b',' => {}
                    b'}' => break,
                    _ => return None,
                }
            }
        }
        self.tangled |= has_twins(&mut self.names[first..]);
        self.names.truncate(first);
        self.close();
        Some(())
    }

    /// An array; `item` walks each value and is told its index.
    pub(crate) fn array(&mut self, mut item: impl FnMut(&mut Self, usize) -> Option<()>) -> Option<()> {
        self.open(b'[')?;
        self.space();
        if self.eat(b']').is_none() {
            for index in 0.. {
                self.space();
                item(self, index)?;
                self.space();
                match self.next()? {
                    b',' => {}
                    b']' => break,
                    _ => return None,
                }
            }
        }
        self.close();
        Some(())
    }

    fn note(&mut self, name: Text, first: usize) {
        let written = self.slice(name);
        self.tree_bytes += NAME_BYTES;
        self.tangled |= !name.plain || self.internal.is_internal(self.place, written);
        if self.names.len() - first < NAMES_MAX {
            self.names.push(written);
        } else {
            self.tangled = true;
        }
    }

    pub(crate) fn word(&mut self, word: &str) -> Option<()> {
        self.tree_bytes += LEAF_BYTES;
        self.text.as_bytes()[self.at..].starts_with(word.as_bytes()).then(|| self.at += word.len())
    }

    pub(crate) fn string(&mut self) -> Option<Text> {
        self.eat(b'"')?;
        self.tree_bytes += STRING_BYTES;
        let (start, mut plain) = (self.at, true);
        loop {
            self.at += plain_bytes(&self.text.as_bytes()[self.at..])?;
            match self.next()? {
                b'"' => return Some(Text { start, end: self.at - 1, plain }),
                b'\\' => self.escape()?,
                _control => return None,
            }
            plain = false;
        }
    }

    fn escape(&mut self) -> Option<()> {
        match self.next()? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(()),
            b'u' => match self.hex()? {
                0xD800..=0xDBFF => {
                    self.eat(b'\\')?;
                    self.eat(b'u')?;
                    (0xDC00..=0xDFFF).contains(&self.hex()?).then_some(())
                }
                0xDC00..=0xDFFF => None,
                _ => Some(()),
            },
            _ => None,
        }
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
        self.at += 4;
        digits.iter().try_fold(0, |sum, &digit| Some(sum * 16 + char::from(digit).to_digit(16)?))
    }

    /// A number, and whether it is written as a plain count: digits only.
    pub(crate) fn number(&mut self) -> Option<bool> {
        self.tree_bytes += LEAF_BYTES;
        let start = self.at;
        let negative = self.eat(b'-').is_some();
        if self.eat(b'0').is_none() {
            self.digits()?;
        }
        let fraction = self.eat(b'.').is_some();
        if fraction {
            self.digits()?;
        }
        let exponent = matches!(self.peek(), Some(b'e' | b'E'));
        if exponent {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        // The largest f64 has 309 digits: only an exponent, or as many digits, can lead beyond it.
        if exponent || self.at - start > 300 {
            serde_json::from_str::<serde_json::Number>(&self.text[start..self.at]).ok()?;
        }
        Some(!negative && !fraction && !exponent)
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }
}

/// Bytes up to the quote, escape or control byte that is next; `None` where there is none.
fn plain_bytes(bytes: &[u8]) -> Option<usize> {
    let special = |byte: &u8| *byte < 0x20 || matches!(*byte, b'"' | b'\\');
    let (short, long) = bytes.split_at(bytes.len().min(SHORT_BYTES));
    if let Some(found) = short.iter().position(special) {
        return Some(found);
    }
    let end = memchr::memchr2(b'"', b'\\', long)?;
    // Without an early end, so that it is done many bytes at a time.
    let control = long[..end].iter().fold(false, |found, byte| found | (*byte < 0x20));
    let control = control.then(|| long[..end].iter().position(special)).flatten();
    Some(short.len() + control.unwrap_or(end))
}

/// Whether a name is there twice. The order of the names may change.
pub(crate) fn has_twins<S: Ord>(names: &mut [S]) -> bool {
    if names.len() <= FEW_NAMES {
        return (1..names.len()).any(|index| names[..index].contains(&names[index]));
    }
    names.sort_unstable();
    names.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    struct Marked;

    impl Internal for Marked {
        fn is_extension(&self, _: &str) -> bool {
            false
        }

        fn is_internal(&self, _: Place, name: &str) -> bool {
            name == "kv"
        }
    }

    /// Whether it is one value, and whether that is tangled.
    fn walk(text: &str) -> Option<bool> {
        let mut scanner = Scanner::new(text, &Marked);
        scanner.space();
        scanner.value()?;
        scanner.space();
        scanner.peek().is_none().then_some(scanner.tangled)
    }

    #[test]
    fn it_accepts_exactly_what_serde_json_reads() {
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let texts = [
            "",
            " ",
            "nul",
            "null",
            "true ",
            "falsey",
            "0",
            "-0",
            "-",
            "01",
            "1.",
            ".5",
            "+1",
            "1.5e",
            "1e5",
            "1E+5",
            "1e-5",
            "1e400",
            "-1e400",
            "1e308",
            "1.8e308",
            "1e-400",
            "NaN",
            "Infinity",
            "-Infinity",
            "0x10",
            "1_0",
            r#""""#,
            r#""a"#,
            r#""\x""#,
            r#""\u00e9""#,
            r#""\u00g9""#,
            r#""\ud800""#,
            r#""\udc00""#,
            r#""\ud83d\ude00""#,
            r#""\ud83d\ud83d""#,
            r#""\ud83dx""#,
            "\"a\nb\"",
            "\"\u{7f}\"",
            r#""\"#,
            r#""\u12""#,
            "{}",
            "[]",
            "[1,]",
            "[,1]",
            "{,}",
            r#"{"a":1,}"#,
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{a:1}"#,
            "{'a':1}",
            "[1 2]",
            r#"{"a":1 "b":2}"#,
            "[1]]",
            "[[1]",
            "[1}",
            "1 2",
            "\u{feff}1",
            "\u{a0}1",
            "\u{b}1",
            r#"{"a":{"a":{}}}"#,
            "// c\n1",
            "\"\0\"",
            "[1,\u{2028}2]",
        ];
        let long = [
            deep(126),
            deep(127),
            deep(128),
            deep(10_000),
            "9".repeat(308),
            "9".repeat(309),
            "9".repeat(400),
            format!("\"{}\"", "é".repeat(100)),
            format!("\"{}\u{1}\"", "a".repeat(100)),
            format!("\"{}", "a".repeat(100)),
            format!("\"{}\\n\"", "a".repeat(100)),
            format!("0.{}", "1".repeat(400)),
            format!("{}e-300", "1".repeat(500)),
        ];
        for text in texts.iter().map(|text| (*text).to_owned()).chain(long) {
            let oracle = serde_json::from_str::<Value>(&text).is_ok();
            assert_eq!(walk(&text).is_some(), oracle, "{}", &text[..text.floor_char_boundary(60)]);
        }
    }

    #[test]
    fn what_parsers_could_read_differently_is_tangled() {
        let many = |last: usize| {
            let names: Vec<String> = (0..100).map(|n| format!("\"n{n}\":0")).collect();
            format!("{{{},\"n{last}\":1}}", names.join(","))
        };
        let too_many: Vec<String> = (0..=NAMES_MAX).map(|n| format!("\"n{n}\":0")).collect();
        for (text, tangled) in [
            (r#"{"a":1,"b":{"a":2},"c":[{"a":1},{"a":1}]}"#.to_owned(), false),
            (r#"{"a":1,"a":2}"#.to_owned(), true),
            (r#"[[{"a":{"b":1,"c":2,"b":1}}]]"#.to_owned(), true),
            (r#"{"\u0061":1}"#.to_owned(), true),
            (r#"{"a":"kv"}"#.to_owned(), false),
            (r#"[{"kv":1}]"#.to_owned(), true),
            (many(100), false),
            (many(3), true),
            (format!("{{{}}}", too_many.join(",")), true),
        ] {
            assert_eq!(walk(&text), Some(tangled), "{}", &text[..text.len().min(60)]);
        }
    }

    #[test]
    fn what_a_text_takes_as_a_tree_is_estimated_from_above() {
        // The estimate is made of this.
        assert!(size_of::<Value>() <= 72 && size_of::<(u64, String, Value)>() <= 104);
        for (text, bytes) in [
            ("", 0),
            ("1", LEAF_BYTES),
            ("[null,\"a\"]", ARRAY_BYTES + LEAF_BYTES + STRING_BYTES),
            (r#"{"a":{}}"#, 2 * OBJECT_BYTES + STRING_BYTES + NAME_BYTES),
            // As far as it is JSON.
            ("[[],[],", 3 * ARRAY_BYTES),
        ] {
            assert_eq!(tree_bytes(text), bytes, "{text}");
        }
        let heaviest = OBJECT_BYTES.max(ARRAY_BYTES) / 2;
        assert!(heaviest * crate::limits::UNWEIGHED_BYTES_MAX <= crate::limits::TREE_BYTES_MAX);
        assert!(heaviest * crate::limits::SMALL_UNWEIGHED_BYTES_MAX <= crate::limits::SMALL_TREE_BYTES_MAX);
    }

    #[test]
    fn an_attempt_that_fails_leaves_no_trace() {
        let mut scanner = Scanner::new(r#"{"a":{"b":[1,{"c":2}]}}"#, &());
        let odd = |scanner: &mut Scanner<'_>| {
            scanner.object(|scanner, _| {
                scanner.object(|scanner, _| scanner.array(|scanner, _| scanner.word("x")))
            })
        };
        assert_eq!(scanner.attempt(odd), Some(false));
        assert_eq!((scanner.peek(), scanner.depth, scanner.names.len()), (None, 0, 0));
    }
}
