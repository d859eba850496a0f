//! Typed access to the fields of one JSON file, with errors that name file and field.
//!
//! An explicit `null` means absent, as in Python.

use serde_json::{Map, Value};

use crate::model::ModelError;

/// The fields of one JSON object, and the name of their file.
#[derive(Clone, Debug)]
pub(crate) struct JsonFields<'a> {
    file: &'a str,
    map: Map<String, Value>,
}

impl<'a> JsonFields<'a> {
    pub(crate) fn parse(file: &'a str, bytes: &[u8]) -> Result<Self, ModelError> {
        let failed = |what: String| ModelError::Malformed { file: file.to_owned(), what };
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self { file, map }),
            Ok(_) => Err(failed("is not a JSON object".into())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// The fields of an object inside this one; errors still name this file.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Self>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { file: self.file, map: map.clone() })),
            Some(other) => Err(self.malformed(format!("{name} is {other}, not an object"))),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, possibly as `null`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// A number above 0.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        match self.number(name)? {
            Some(value) if value > 0.0 && value.is_finite() => Ok(Some(value)),
            Some(value) => Err(self.malformed(format!("{name} {value} must be positive"))),
            None => Ok(None),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, ModelError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A size: between 1 and `max`.
    pub(crate) fn size(&self, name: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.typed(name, "a whole number", Value::as_u64)? else { return Ok(None) };
        match usize::try_from(value) {
            Ok(size) if (1..=max).contains(&size) => Ok(Some(size)),
            _ => Err(self.malformed(format!("{name} {value} is not between 1 and {max}"))),
        }
    }

    /// A count where 0 and absent mean the same.
    pub(crate) fn size_or_zero(&self, name: &str) -> Result<usize, ModelError> {
        let value = self.typed(name, "a whole number", Value::as_u64)?.unwrap_or(0);
        Ok(usize::try_from(value).unwrap_or(usize::MAX))
    }

    /// A token id.
    pub(crate) fn token(&self, name: &str) -> Result<Option<u32>, ModelError> {
        self.get(name).map(|value| self.as_token(name, value)).transpose()
    }

    /// A token id or a list of them.
    pub(crate) fn tokens(&self, name: &str) -> Result<Option<Vec<u32>>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => {
                list.iter().map(|value| self.as_token(name, value)).collect::<Result<_, _>>().map(Some)
            }
            Some(value) => Ok(Some(vec![self.as_token(name, value)?])),
        }
    }

    pub(crate) fn absent(&self, name: &str) -> ModelError {
        self.malformed(format!("{name} is absent"))
    }

    pub(crate) fn malformed(&self, what: String) -> ModelError {
        ModelError::Malformed { file: self.file.to_owned(), what }
    }

    pub(crate) fn unsupported(&self, what: &str, supported: &str) -> ModelError {
        ModelError::Unsupported {
            file: self.file.to_owned(),
            what: what.to_owned(),
            supported: format!("supported: {supported}"),
        }
    }

    fn as_token(&self, name: &str, value: &Value) -> Result<u32, ModelError> {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| self.malformed(format!("{name} {value} is not a token id")))
    }

    fn typed<'v, T>(
        &'v self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'v Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let wrong = |value: &Value| self.malformed(format!("{name} is {value}, not {wanted}"));
        self.get(name).map(|value| read(value).ok_or_else(|| wrong(value))).transpose()
    }
}
