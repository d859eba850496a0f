//! A strict walk over JSON that builds nothing. Every parser reads accepted text alike, so the text may be forwarded
//! unchanged.
//!
//! The walk accepts exactly the text that serde_json reads into a `Value` (a test compares the two). The text is UTF-8,
//! without control bytes in strings, lone surrogates, `NaN` or numbers beyond an f64, with at most [`NESTING_MAX`]
//! levels. Two legal forms are read differently by different parsers, or could hide a name: a duplicate name in one
//! object, and a name with escapes. These, and the names of [`InternalFields`], set the flag `ambiguous`. Before
//! forwarding, such a part is rewritten.
//!
//! The walk is linear in the length of the text, except that the names of an object with more than `FEW_NAMES` are
//! sorted.

use crate::limits::NESTING_MAX;

/// Objects with up to this many names are compared name by name.
const FEW_NAMES: usize = 16;
/// Further names of an object are not stored, and the object counts as ambiguous.
const NAMES_MAX: usize = 4096;
/// Strings up to this length are searched byte by byte.
const SHORT_BYTES: usize = 24;

/// Bytes of a value in a tree of `serde_json::Value`s: a value has 72, and its vector may have just doubled.
const LEAF_BYTES: usize = 2 * 72;
/// A string value: also the allocator's smallest piece and its header. Longer strings also take their length.
const STRING_BYTES: usize = LEAF_BYTES + 32;
/// An array: the first item allocates capacity for four.
const ARRAY_BYTES: usize = LEAF_BYTES + 4 * 72 + 16;
/// An object: the first field allocates capacity for four of 104 bytes, and a hash table.
const OBJECT_BYTES: usize = LEAF_BYTES + 4 * 104 + 96;
/// The name of a field, its hash and its table entry, all of which may have doubled. Its value is counted separately.
const NAME_BYTES: usize = 88;

/// The position of a field in the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldLevel {
    /// At the top of the body.
    Top,
    /// At any depth inside a top-level field whose fields engines read like top-level ones.
    Extension,
    /// At any depth inside any other top-level field.
    Inside,
}

/// The internal fields, which clients may not send.
pub trait InternalFields {
    /// Whether engines read the fields of this top-level field like top-level ones.
    fn is_extension(&self, field: &str) -> bool;

    /// Whether a field with this name is internal at this level.
    fn is_internal(&self, level: FieldLevel, name: &str) -> bool;
}

impl FieldLevel {
    /// The level inside a top-level field.
    pub(crate) fn within(field: &str, internal: &dyn InternalFields) -> Self {
        if internal.is_extension(field) { Self::Extension } else { Self::Inside }
    }
}

/// No field is internal.
impl InternalFields for () {
    fn is_extension(&self, _: &str) -> bool {
        false
    }

    fn is_internal(&self, _: FieldLevel, _: &str) -> bool {
        false
    }
}

/// The position of a string in the text, without its quotes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawString {
    pub start: usize,
    pub end: usize,
    /// Whether the string has no escape.
    pub plain: bool,
}

/// A walk. A step returns `None` if the text does not match. Then only [`Scanner::attempt`] can continue the walk.
pub(crate) struct Scanner<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    names: Vec<&'a str>,
    internal: &'a dyn InternalFields,
    /// The level of the current value.
    pub level: FieldLevel,
    /// Whether the text since the last reset must be rewritten.
    pub ambiguous: bool,
    /// Upper estimate of the bytes of the walked text as a tree.
    pub tree_bytes: usize,
}

/// Upper estimate of the bytes of a text as a tree of values, as far as the text is JSON.
pub(crate) fn tree_bytes(text: &str) -> usize {
    let mut scanner = Scanner::new(text, &());
    scanner.space();
    // No parser goes further than this walk.
    let _ = scanner.value();
    scanner.tree_bytes
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(text: &'a str, internal: &'a dyn InternalFields) -> Self {
        Self {
            text,
            at: 0,
            depth: 0,
            names: Vec::new(),
            internal,
            level: FieldLevel::Inside,
            ambiguous: false,
            tree_bytes: 0,
        }
    }

    /// The raw content of a string.
    pub(crate) fn slice(&self, text: RawString) -> &'a str {
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

    /// Enters an object or array.
    pub(crate) fn open(&mut self, bracket: u8) -> Option<()> {
        self.eat(bracket)?;
        self.depth += 1;
        self.tree_bytes += if bracket == b'{' { OBJECT_BYTES } else { ARRAY_BYTES };
        // serde_json refuses the level that exhausts its count of 128.
        (self.depth < NESTING_MAX).then_some(())
    }

    pub(crate) fn close(&mut self) {
        self.depth -= 1;
    }

    /// Walks the next value with `shape`, or as any value if `shape` fails. Returns whether `shape` succeeded; `None`
    /// if there is no value.
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

    /// An object; `field` gets each name and walks the value.
    pub(crate) fn object(&mut self, mut field: impl FnMut(&mut Self, RawString) -> Option<()>) -> Option<()> {
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
        self.ambiguous |= has_duplicates(&mut self.names[first..]);
        self.names.truncate(first);
        self.close();
        Some(())
    }

    /// An array; `item` gets each index and walks the value.
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

    fn note(&mut self, name: RawString, first: usize) {
        let written = self.slice(name);
        self.tree_bytes += NAME_BYTES;
        self.ambiguous |= !name.plain || self.internal.is_internal(self.level, written);
        if self.names.len() - first < NAMES_MAX {
            self.names.push(written);
        } else {
            self.ambiguous = true;
        }
    }

    pub(crate) fn word(&mut self, word: &str) -> Option<()> {
        self.tree_bytes += LEAF_BYTES;
        self.text.as_bytes()[self.at..].starts_with(word.as_bytes()).then(|| self.at += word.len())
    }

    pub(crate) fn string(&mut self) -> Option<RawString> {
        self.eat(b'"')?;
        self.tree_bytes += STRING_BYTES;
        let (start, mut plain) = (self.at, true);
        loop {
            self.at += plain_bytes(&self.text.as_bytes()[self.at..])?;
            match self.next()? {
                b'"' => return Some(RawString { start, end: self.at - 1, plain }),
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

    /// A number; true if it consists of digits only.
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
        // The largest f64 has 309 digits: only an exponent, or that many digits, can exceed it.
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

/// Bytes up to the next quote, escape or control byte; `None` without one.
fn plain_bytes(bytes: &[u8]) -> Option<usize> {
    let special = |byte: &u8| *byte < 0x20 || matches!(*byte, b'"' | b'\\');
    let (short, long) = bytes.split_at(bytes.len().min(SHORT_BYTES));
    if let Some(found) = short.iter().position(special) {
        return Some(found);
    }
    let end = memchr::memchr2(b'"', b'\\', long)?;
    // The loop has no early end, so that the compiler can vectorize it.
    let control = long[..end].iter().fold(false, |found, byte| found | (*byte < 0x20));
    let control = control.then(|| long[..end].iter().position(special)).flatten();
    Some(short.len() + control.unwrap_or(end))
}

/// Whether the names contain a duplicate. May reorder the names.
pub(crate) fn has_duplicates<S: Ord>(names: &mut [S]) -> bool {
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

    struct KvIsInternal;

    impl InternalFields for KvIsInternal {
        fn is_extension(&self, _: &str) -> bool {
            false
        }

        fn is_internal(&self, _: FieldLevel, name: &str) -> bool {
            name == "kv"
        }
    }

    /// Whether the value is ambiguous; `None` if the text is not one value.
    fn walk(text: &str) -> Option<bool> {
        let mut scanner = Scanner::new(text, &KvIsInternal);
        scanner.space();
        scanner.value()?;
        scanner.space();
        scanner.peek().is_none().then_some(scanner.ambiguous)
    }

    #[test]
    fn the_scanner_accepts_exactly_what_serde_json_parses() {
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
    fn json_that_parsers_read_differently_is_ambiguous() {
        let many = |last: usize| {
            let names: Vec<String> = (0..100).map(|n| format!("\"n{n}\":0")).collect();
            format!("{{{},\"n{last}\":1}}", names.join(","))
        };
        let too_many: Vec<String> = (0..=NAMES_MAX).map(|n| format!("\"n{n}\":0")).collect();
        for (text, ambiguous) in [
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
            assert_eq!(walk(&text), Some(ambiguous), "{}", &text[..text.len().min(60)]);
        }
    }

    #[test]
    fn the_estimated_tree_size_is_an_upper_bound() {
        // The estimate is made of this.
        assert!(size_of::<Value>() <= 72 && size_of::<(u64, String, Value)>() <= 104);
        for (text, bytes) in [
            ("", 0),
            ("1", LEAF_BYTES),
            ("[null,\"a\"]", ARRAY_BYTES + LEAF_BYTES + STRING_BYTES),
            (r#"{"a":{}}"#, 2 * OBJECT_BYTES + STRING_BYTES + NAME_BYTES),
            // Counted as far as the text is JSON.
            ("[[],[],", 3 * ARRAY_BYTES),
        ] {
            assert_eq!(tree_bytes(text), bytes, "{text}");
        }
        let heaviest = OBJECT_BYTES.max(ARRAY_BYTES) / 2;
        assert!(heaviest * crate::limits::UNWEIGHED_BYTES_MAX <= crate::limits::TREE_BYTES_MAX);
        assert!(heaviest * crate::limits::SMALL_UNWEIGHED_BYTES_MAX <= crate::limits::SMALL_TREE_BYTES_MAX);
    }

    #[test]
    fn a_failed_attempt_changes_no_state() {
        let mut scanner = Scanner::new(r#"{"a":{"b":[1,{"c":2}]}}"#, &());
        let shape = |scanner: &mut Scanner<'_>| {
            scanner.object(|scanner, _| {
                scanner.object(|scanner, _| scanner.array(|scanner, _| scanner.word("x")))
            })
        };
        assert_eq!(scanner.attempt(shape), Some(false));
        assert_eq!((scanner.peek(), scanner.depth, scanner.names.len()), (None, 0, 0));
    }
}
