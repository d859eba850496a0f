//! A scalar field of a handoff, parsed from a JSON tree or directly from text, with typed accessors.

use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::HandoffError;
use crate::{Epoch, Handle};

/// Bytes of a text in a handoff.
const TEXT_BYTES_MAX: usize = 512;

/// The value of a field. A text without escapes is borrowed.
#[derive(Debug, Default)]
pub(super) enum Scalar<'a> {
    /// Missing, or `null`.
    #[default]
    Absent,
    Flag(bool),
    Count(u64),
    /// A number below zero, with a fraction, or beyond 64 bits.
    Number,
    Text(Cow<'a, str>),
    /// A list or an object.
    Other,
}

impl<'a> Scalar<'a> {
    pub(super) fn of(value: Option<&'a Value>) -> Self {
        match value {
            None | Some(Value::Null) => Self::Absent,
            Some(Value::Bool(set)) => Self::Flag(*set),
            Some(Value::Number(number)) => number.as_u64().map_or(Self::Number, Self::Count),
            Some(Value::String(text)) => Self::Text(Cow::Borrowed(text)),
            Some(Value::Array(_) | Value::Object(_)) => Self::Other,
        }
    }

    /// A boolean; false if absent.
    pub(super) fn flag(&self, field: &'static str) -> Result<bool, HandoffError> {
        match self {
            Self::Absent => Ok(false),
            Self::Flag(set) => Ok(*set),
            _ => Err(HandoffError::Malformed { field, expected: "a boolean" }),
        }
    }

    pub(super) fn text(&self, field: &'static str) -> Result<&str, HandoffError> {
        match self {
            Self::Absent => Err(HandoffError::Missing(field)),
            Self::Text(text) if (1..=TEXT_BYTES_MAX).contains(&text.len()) => Ok(text),
            _ => Err(HandoffError::Malformed { field, expected: "a string of 1 to 512 bytes" }),
        }
    }

    pub(super) fn handle(&self, field: &'static str) -> Result<Handle, HandoffError> {
        let malformed = HandoffError::Malformed { field, expected: "32 hexadecimal digits" };
        self.text(field)?.parse().map_err(|_| malformed)
    }

    pub(super) fn epoch(&self, field: &'static str) -> Result<Epoch, HandoffError> {
        let malformed = HandoffError::Malformed { field, expected: "16 hexadecimal digits" };
        self.text(field)?.parse().map_err(|_| malformed)
    }

    pub(super) fn port(&self, field: &'static str) -> Result<u16, HandoffError> {
        let port = self.number(field, 1..=u16::MAX.into(), "an integer from 1 to 65535")?;
        let port = port.ok_or(HandoffError::Missing(field))?;
        Ok(u16::try_from(port).expect("the range is that of a port"))
    }

    /// A number in a range; `None` if absent.
    pub(super) fn number(
        &self,
        field: &'static str,
        range: RangeInclusive<usize>,
        expected: &'static str,
    ) -> Result<Option<usize>, HandoffError> {
        let number = match self {
            Self::Absent => return Ok(None),
            Self::Count(number) => usize::try_from(*number).ok().filter(|number| range.contains(number)),
            _ => None,
        };
        number.map(Some).ok_or(HandoffError::Malformed { field, expected })
    }

    pub(super) fn milliseconds(&self, field: &'static str) -> Result<Option<Duration>, HandoffError> {
        match self {
            Self::Absent => Ok(None),
            Self::Count(number) => Ok(Some(Duration::from_millis(*number))),
            _ => Err(HandoffError::Malformed { field, expected: "a number of milliseconds" }),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Scalar<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ScalarVisitor)
    }
}

/// Accepts any value. The typed accessors check the type, because their errors name the field.
struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Scalar::Absent)
    }

    fn visit_bool<E: Error>(self, set: bool) -> Result<Self::Value, E> {
        Ok(Scalar::Flag(set))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Scalar::Count(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok(u64::try_from(number).map_or(Scalar::Number, Scalar::Count))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Scalar::Number)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }
}
