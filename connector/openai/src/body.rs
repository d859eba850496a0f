//! Parses the bytes of a body as one JSON object. Each kind of failure has a message of its own.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::code::Code;
use crate::error::{ApiError, shortened};
use crate::limits::{NESTING_MAX, ParseLimits, TREE_BYTES_MAX, UNWEIGHED_BYTES_MAX};
use crate::scan::tree_bytes;

/// Reads a body as one JSON object, with its fields in order.
///
/// A duplicate field is refused: parsers disagree on which one counts, and `model` or `kv_transfer_params` must have
/// the same value at every hop. In nested objects the last one counts. A hop that rewrites a body sends the parsed
/// value, so the next hop cannot disagree.
///
/// # Errors
/// 413 over [`ParseLimits::body_bytes`]; otherwise 400, also if the values would take too much memory.
pub fn parse_object(body: &[u8], limits: &ParseLimits) -> Result<Map<String, Value>, ApiError> {
    if body.len() > limits.body_bytes {
        return Err(ApiError::payload_too_large(limits.body_bytes));
    }
    if body.starts_with(b"\xEF\xBB\xBF") {
        return Err(ApiError::malformed("the body starts with a byte order mark; send JSON without one"));
    }
    let text = std::str::from_utf8(body).map_err(|error| {
        ApiError::malformed(format!(
            "the body is not UTF-8: first wrong byte at offset {}",
            error.valid_up_to()
        ))
    })?;
    if text.trim_ascii().is_empty() {
        return Err(ApiError::malformed("the body is empty; send a JSON object"));
    }
    if text.len() > UNWEIGHED_BYTES_MAX && tree_bytes(text) > TREE_BYTES_MAX {
        return Err(ApiError::malformed("the body has too many values").with_code(Code::TooManyValues));
    }
    let mut duplicate = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let seed = ObjectSeed { duplicate: &mut duplicate };
    let parsed = seed.deserialize(&mut json).and_then(|map| json.end().map(|()| map));
    match (parsed, duplicate) {
        (_, Some(name)) => {
            let message = format!("`{}` appears more than once", shortened(&name));
            Err(ApiError::invalid(shortened(&name), message).with_code(Code::DuplicateField))
        }
        (Err(error), None) => Err(malformed(&error)),
        (Ok(map), None) => Ok(map),
    }
}

fn malformed(error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    if text.starts_with("recursion limit exceeded") {
        return ApiError::malformed(format!("the body is nested deeper than {NESTING_MAX} levels"));
    }
    if error.is_data() {
        return ApiError::malformed(format!("the body must be a JSON object: {}", shortened(&text)));
    }
    ApiError::malformed(format!("the body is not JSON: {}", shortened(&text)))
}

struct ObjectSeed<'a> {
    duplicate: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for ObjectSeed<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectSeed<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = access.next_key::<String>()? {
            if map.contains_key(&name) {
                *self.duplicate = Some(name);
                return Err(serde::de::Error::custom("duplicate field"));
            }
            let value = access.next_value::<Value>()?;
            map.insert(name, value);
        }
        Ok(map)
    }
}
