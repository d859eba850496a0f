//! JSON that is written as text. A tree of values takes many times the memory of its text, and a response is kept for
//! as long as its stream lasts.

use std::fmt::{self, Display, Write};

use serde_json::Value;

/// The members of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct JsonObject(String);

/// An array.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct JsonArray {
    items: String,
    len: usize,
}

impl JsonObject {
    /// With a member whose value is written as JSON.
    pub(super) fn with(mut self, name: &str, value: impl Display) -> Self {
        self.separate();
        let _ = write!(self.0, "\"{name}\":{value}");
        self
    }

    /// With a member that is a string.
    pub(super) fn with_text(self, name: &str, text: &str) -> Self {
        self.with(name, Value::from(text))
    }

    /// With the members of another object.
    pub(super) fn with_all(mut self, other: &Self) -> Self {
        if !other.0.is_empty() {
            self.separate();
            self.0.push_str(&other.0);
        }
        self
    }

    fn separate(&mut self) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
    }
}

impl Display for JsonObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}}}", self.0)
    }
}

impl JsonArray {
    /// Adds an item that is written as JSON.
    pub(super) fn push(&mut self, item: impl Display) {
        self.separate();
        let _ = write!(self.items, "{item}");
        self.len += 1;
    }

    /// Adds the items of another array.
    pub(super) fn append(&mut self, other: &Self) {
        if other.len > 0 {
            self.separate();
            self.items.push_str(&other.items);
            self.len += other.len;
        }
    }

    /// Number of items.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of its items.
    pub(super) fn bytes(&self) -> usize {
        self.items.len()
    }

    fn separate(&mut self) {
        if self.len > 0 {
            self.items.push(',');
        }
    }
}

impl Display for JsonArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_arrays_are_json() {
        let mut array = JsonArray::default();
        assert_eq!((array.to_string(), array.len()), ("[]".to_owned(), 0));
        array.append(&JsonArray::default());
        array.push(1);
        let mut more = JsonArray::default();
        more.push("null");
        more.push(JsonObject::default());
        array.append(&more);
        assert_eq!((array.to_string(), array.len()), ("[1,null,{}]".to_owned(), 3));
        let other = JsonObject::default().with("list", &array);
        let object = JsonObject::default().with_all(&JsonObject::default()).with_text("text", "a\"\n");
        assert_eq!(object.with_all(&other).to_string(), r#"{"text":"a\"\n","list":[1,null,{}]}"#);
    }
}
