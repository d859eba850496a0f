//! Typed accessors of fields. Their errors contain the field, the expected value and the actual value.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::{ApiError, shortened};

/// The fields of an object at a path (empty at the top).
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    of: FieldSource<'a>,
    path: &'a str,
}

#[derive(Clone, Copy)]
enum FieldSource<'a> {
    Map(&'a Map<String, Value>),
    /// Few fields, for which a search is faster than a hash.
    Few(&'a [(&'a str, Value)]),
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { of: FieldSource::Map(map), path: "" }
    }

    /// A few fields with unique names.
    pub(crate) fn few(fields: &'a [(&'a str, Value)]) -> Self {
        Self { of: FieldSource::Few(fields), path: "" }
    }

    pub(crate) fn under(map: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { of: FieldSource::Map(map), path }
    }

    /// The field's value; `null` is absent.
    pub(crate) fn get(self, name: &str) -> Option<&'a Value> {
        let value = match self.of {
            FieldSource::Map(map) => map.get(name),
            FieldSource::Few(fields) => fields.iter().find(|(n, _)| *n == name).map(|(_, value)| value),
        };
        value.filter(|value| !value.is_null())
    }

    /// The field's full name.
    pub(crate) fn name(self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The error that field `name` must be `expected`.
    pub(crate) fn must_be(self, name: &str, expected: &str, got: &Value) -> ApiError {
        must_be(&self.name(name), expected, got)
    }

    pub(crate) fn boolean(self, name: &str) -> Result<Option<bool>, ApiError> {
        let read = |value: &Value| value.as_bool().ok_or_else(|| self.must_be(name, "true or false", value));
        self.get(name).map(read).transpose()
    }

    /// An integer in the range that applies to the request.
    pub(crate) fn integer(self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.bounded(name, &range, || format!("an integer from {} to {}", range.start(), range.end()))
    }

    /// An integer with a technical upper bound. The actual limit is lower and not known here, so a message names only
    /// the bound that the value violates.
    pub(crate) fn integer_from(
        self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let over = |value: &Value| value.as_f64().is_some_and(|number| number > *range.end() as f64);
        let expected = || match self.get(name).is_some_and(over) {
            true => format!("an integer of at most {}", range.end()),
            false => format!("an integer of at least {}", range.start()),
        };
        self.bounded(name, &range, expected)
    }

    fn bounded(
        self,
        name: &str,
        range: &RangeInclusive<i64>,
        expected: impl Fn() -> String,
    ) -> Result<Option<i64>, ApiError> {
        let read = |value: &Value| {
            let number = whole(value).filter(|number| range.contains(number));
            number.ok_or_else(|| self.must_be(name, &expected(), value))
        };
        self.get(name).map(read).transpose()
    }

    /// As [`Self::integer_from`].
    pub(crate) fn count_from(self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let wide = i64::from(*range.start())..=i64::from(*range.end());
        let narrow = |number| u32::try_from(number).expect("within a range of u32");
        Ok(self.integer_from(name, wide)?.map(narrow))
    }

    /// As [`Self::integer`].
    pub(crate) fn count(self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let wide = i64::from(*range.start())..=i64::from(*range.end());
        let narrow = |number| u32::try_from(number).expect("within a range of u32");
        Ok(self.integer(name, wide)?.map(narrow))
    }

    /// A finite number that `accept` accepts; `expected` describes the accepted numbers.
    pub(crate) fn number(
        self,
        name: &str,
        expected: &str,
        accept: impl Fn(f64) -> bool,
    ) -> Result<Option<f32>, ApiError> {
        let read = |value: &Value| {
            let number = value.as_f64().filter(|number| number.is_finite() && accept(*number));
            number.map(|number| number as f32).ok_or_else(|| self.must_be(name, expected, value))
        };
        self.get(name).map(read).transpose()
    }

    pub(crate) fn string(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let read = |value: &'a Value| value.as_str().ok_or_else(|| self.must_be(name, "a string", value));
        self.get(name).map(read).transpose()
    }

    pub(crate) fn object(self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let read = |value: &'a Value| value.as_object().ok_or_else(|| self.must_be(name, "an object", value));
        self.get(name).map(read).transpose()
    }

    /// An array of at most `most` values.
    pub(crate) fn array(self, name: &str, most: usize) -> Result<Option<&'a [Value]>, ApiError> {
        let read = |value: &'a Value| {
            let wrong = || match most {
                usize::MAX => self.must_be(name, "an array", value),
                most => self.must_be(name, &format!("an array of at most {most}"), value),
            };
            value.as_array().filter(|array| array.len() <= most).map(Vec::as_slice).ok_or_else(wrong)
        };
        self.get(name).map(read).transpose()
    }
}

/// The error that field `name` must be `expected`, with a bounded description of the actual value.
pub(crate) fn must_be(name: &str, expected: &str, got: &Value) -> ApiError {
    ApiError::invalid(name, format!("`{name}` must be {expected}, got {}", description(got)))
}

/// An integer; `16.0` counts as one, as in vLLM (pydantic).
pub(crate) fn whole(value: &Value) -> Option<i64> {
    // 2^53: below it every integer is exactly one f64.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)
            .map(|number| number as i64)
    })
}

/// A token id below `vocab`, if known.
pub(crate) fn token(value: &Value, vocab: Option<u32>, name: &str) -> Result<u32, ApiError> {
    let most = vocab.map_or(i32::MAX as u32, |vocab| vocab.saturating_sub(1));
    whole(value)
        .and_then(|id| u32::try_from(id).ok())
        .filter(|id| *id <= most)
        .ok_or_else(|| must_be(name, &format!("a token id from 0 to {most}"), value))
}

fn description(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(truth) => truth.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.is_empty() => "an empty string".to_owned(),
        Value::String(text) => format!("the string \"{}\"", shortened(text).escape_debug()),
        Value::Array(array) => format!("an array of {}", array.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}
