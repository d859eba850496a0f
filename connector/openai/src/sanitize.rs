//! Rewrites an ambiguous part of a body: without internal fields, with each name once and without escapes. Numbers and
//! texts keep their spelling.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::scan::{FieldLevel, InternalFields, RawString, Scanner};

enum Node<'a> {
    /// A value without fields, in its original spelling.
    Leaf(&'a str),
    Array(Vec<Node<'a>>),
    Object(Vec<(Cow<'a, str>, Node<'a>)>),
}

/// Rewrites a value at `level`; `None` if the text is not one value.
pub(crate) fn sanitize<'a>(
    value: &'a str,
    level: FieldLevel,
    internal: &'a dyn InternalFields,
) -> Option<String> {
    let mut scanner = Scanner::new(value, internal);
    scanner.level = level;
    let node = read(&mut scanner, value, level, internal)?;
    let mut out = String::with_capacity(value.len());
    write(&node, &mut out);
    Some(out)
}

/// The decoded name.
pub(crate) fn decoded<'a>(scanner: &Scanner<'a>, name: RawString) -> Option<Cow<'a, str>> {
    let written = scanner.slice(name);
    if name.plain {
        return Some(Cow::Borrowed(written));
    }
    serde_json::from_str(&format!("\"{written}\"")).ok().map(Cow::Owned)
}

fn read<'a>(
    scanner: &mut Scanner<'a>,
    text: &'a str,
    level: FieldLevel,
    internal: &dyn InternalFields,
) -> Option<Node<'a>> {
    let start = scanner.offset();
    match scanner.peek()? {
        b'{' => {
            let mut fields = Vec::new();
            scanner.object(|scanner, name| {
                let name = decoded(scanner, name)?;
                if internal.is_internal(level, &name) {
                    return scanner.value();
                }
                let value = read(scanner, text, level, internal)?;
                fields.push((name, value));
                Some(())
            })?;
            Some(Node::Object(last_of_each(fields)))
        }
        b'[' => {
            let mut items = Vec::new();
            scanner.array(|scanner, _| {
                items.push(read(scanner, text, level, internal)?);
                Some(())
            })?;
            Some(Node::Array(items))
        }
        _ => {
            scanner.value()?;
            Some(Node::Leaf(&text[start..scanner.offset()]))
        }
    }
}

/// Of fields with the same name the last value counts, as in serde_json and Python, at the position of the first.
fn last_of_each<'a>(fields: Vec<(Cow<'a, str>, Node<'a>)>) -> Vec<(Cow<'a, str>, Node<'a>)> {
    let mut places: HashMap<Cow<'a, str>, usize> = HashMap::with_capacity(fields.len());
    let mut unique: Vec<(Cow<'a, str>, Node<'a>)> = Vec::with_capacity(fields.len());
    for (name, value) in fields {
        match places.get(&name) {
            Some(&place) => unique[place].1 = value,
            None => {
                places.insert(name.clone(), unique.len());
                unique.push((name, value));
            }
        }
    }
    unique
}

fn write(node: &Node<'_>, out: &mut String) {
    match node {
        Node::Leaf(text) => out.push_str(text),
        Node::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write(item, out);
            }
            out.push(']');
        }
        Node::Object(fields) => {
            out.push('{');
            for (index, (name, value)) in fields.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&quoted(name));
                out.push(':');
                write(value, out);
            }
            out.push('}');
        }
    }
}

/// A name as JSON.
pub(crate) fn quoted(name: &str) -> String {
    serde_json::to_string(name).expect("a string can be written as JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct KvInExtension;

    impl InternalFields for KvInExtension {
        fn is_extension(&self, _: &str) -> bool {
            false
        }

        fn is_internal(&self, level: FieldLevel, name: &str) -> bool {
            level == FieldLevel::Extension && name == "kv"
        }
    }

    #[test]
    fn internal_keys_are_removed_keys_are_normalized_and_numbers_kept() {
        for (value, expected) in [
            (
                r#"{ "a" : 0.1000000000000000055511, "b":[ 1E2 , -0 ] }"#,
                r#"{"a":0.1000000000000000055511,"b":[1E2,-0]}"#,
            ),
            (r#"{"a":1,"b":2,"a":{"c":3}}"#, r#"{"a":{"c":3},"b":2}"#),
            (r#"[{"kv":{"a":[1]}},{"k\u0076":1,"\u0061\n":"\u0061"}]"#, r#"[{},{"a\n":"\u0061"}]"#),
            (r#"{"a":1,"\u0061":2}"#, r#"{"a":2}"#),
            (r#""kv""#, r#""kv""#),
            ("[]", "[]"),
        ] {
            assert_eq!(sanitize(value, FieldLevel::Extension, &KvInExtension).as_deref(), Some(expected));
        }
        assert_eq!(
            sanitize(r#"{"kv":1}"#, FieldLevel::Inside, &KvInExtension).as_deref(),
            Some(r#"{"kv":1}"#)
        );
    }
}
