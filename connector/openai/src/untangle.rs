//! A part of a body that must not pass as it is, written anew: without what is internal, each name once, names spelled
//! plainly. Numbers and texts stay as they are written, digit for digit.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::scan::{Internal, Place, Scanner, Text};

enum Node<'a> {
    /// Anything without fields, as it is written.
    Leaf(&'a str),
    Array(Vec<Node<'a>>),
    Object(Vec<(Cow<'a, str>, Node<'a>)>),
}

/// Writes a value anew that stands at `place`. `None` where it is not one value.
pub(crate) fn untangle<'a>(value: &'a str, place: Place, internal: &'a dyn Internal) -> Option<String> {
    let mut scanner = Scanner::new(value, internal);
    scanner.place = place;
    let node = read(&mut scanner, value, place, internal)?;
    let mut out = String::with_capacity(value.len());
    write(&node, &mut out);
    Some(out)
}

/// What a name says.
pub(crate) fn decoded<'a>(scanner: &Scanner<'a>, name: Text) -> Option<Cow<'a, str>> {
    let written = scanner.slice(name);
    if name.plain {
        return Some(Cow::Borrowed(written));
    }
    serde_json::from_str(&format!("\"{written}\"")).ok().map(Cow::Owned)
}

fn read<'a>(
    scanner: &mut Scanner<'a>,
    text: &'a str,
    place: Place,
    internal: &dyn Internal,
) -> Option<Node<'a>> {
    let start = scanner.offset();
    match scanner.peek()? {
        b'{' => {
            let mut fields = Vec::new();
            scanner.object(|scanner, name| {
                let name = decoded(scanner, name)?;
                if internal.is_internal(place, &name) {
                    return scanner.value();
                }
                let value = read(scanner, text, place, internal)?;
                fields.push((name, value));
                Some(())
            })?;
            Some(Node::Object(last_of_each(fields)))
        }
        b'[' => {
            let mut items = Vec::new();
            scanner.array(|scanner, _| {
                items.push(read(scanner, text, place, internal)?);
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

/// Of fields with the same name the last counts, as in serde_json and Python, at the place of the first.
fn last_of_each<'a>(fields: Vec<(Cow<'a, str>, Node<'a>)>) -> Vec<(Cow<'a, str>, Node<'a>)> {
    let mut places: HashMap<Cow<'a, str>, usize> = HashMap::with_capacity(fields.len());
    let mut kept: Vec<(Cow<'a, str>, Node<'a>)> = Vec::with_capacity(fields.len());
    for (name, value) in fields {
        match places.get(&name) {
            Some(&place) => kept[place].1 = value,
            None => {
                places.insert(name.clone(), kept.len());
                kept.push((name, value));
            }
        }
    }
    kept
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

    struct Hidden;

    impl Internal for Hidden {
        fn is_extension(&self, _: &str) -> bool {
            false
        }

        fn is_internal(&self, place: Place, name: &str) -> bool {
            place == Place::Extension && name == "kv"
        }
    }

    #[test]
    fn names_come_once_plainly_and_never_internally_and_the_rest_stays_digit_for_digit() {
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
            assert_eq!(untangle(value, Place::Extension, &Hidden).as_deref(), Some(expected));
        }
        assert_eq!(untangle(r#"{"kv":1}"#, Place::Inside, &Hidden).as_deref(), Some(r#"{"kv":1}"#));
    }
}
