//! `tojson` as Hugging Face defines it: Python's `json.dumps(x, ensure_ascii=False)`, without escapes for HTML.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

/// The filter: `x | tojson(indent=None, ensure_ascii=False, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, indent: Option<usize>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<usize>>("indent")?,
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
        // Python: with an indent the line break replaces the space.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut json = serde_json::to_value(value).map_err(|error| unserializable(&error))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    let style = PythonFormatter { item, key, indent, ascii, level: 0, empty: true };
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, style);
    json.serialize(&mut serializer).map_err(|error| unserializable(&error))?;
    String::from_utf8(out).map(Value::from).map_err(|error| unserializable(&error))
}

/// A value as `tojson` without arguments writes it.
pub(super) fn dumps(value: &serde_json::Value) -> String {
    let (item, key) = (", ".to_owned(), ": ".to_owned());
    let style = PythonFormatter { item, key, indent: None, ascii: false, level: 0, empty: true };
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, style);
    value.serialize(&mut serializer).expect("a value of JSON serializes, and a Vec takes every write");
    String::from_utf8(out).expect("JSON is UTF-8")
}

fn unserializable(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::BadSerialization, error.to_string())
}

/// Python's layout of JSON.
struct PythonFormatter {
    item: String,
    key: String,
    indent: Option<usize>,
    ascii: bool,
    level: usize,
    /// Whether the innermost array or object is still empty.
    empty: bool,
}

impl PythonFormatter {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if !self.empty {
            self.line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.empty = false;
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        writer.write_all(" ".repeat(indent * self.level).as_bytes())
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    /// Rust's shortest digits are Python's, and so is the choice of an exponent. Python's has a sign and two digits.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:?}");
        let Some((digits, exponent)) = text.split_once('e') else { return writer.write_all(text.as_bytes()) };
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        write!(writer, "{digits}e{sign}{exponent:0>2}")
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(text.as_bytes());
        }
        for character in text.chars() {
            if character.is_ascii() {
                writer.write_all(&[character as u8])?;
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}
