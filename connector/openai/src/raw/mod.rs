//! A client's body without a parsed tree: its bytes, and the positions of its fields.
//!
//! A router reads a body to check it and to remove internal fields, and then writes it twice, once for each leg. A
//! prompt can have megabytes, so this module neither builds a tree nor copies the prompt:
//!
//! ```text
//! bytes ──▶ one strict walk ([`crate::scan`]) ──▶ fields: name, position, ambiguous or not
//!                │ sure                 │ in doubt, or not JSON
//!                ▼                      ▼
//!          the shape is right      parse_object, strip, GenerateRequest::from_map decide
//!                └──────────┬───────────┘
//!                           ▼
//!      write: the router's fields, then the client's as slices of `bytes`; only ambiguous ones are rewritten
//! ```
//!
//! Invariants:
//! - A body is accepted exactly if [`parse_object`] and [`GenerateRequest::from_map`] accept it after [`strip`]. A
//!   refused body gets their message. In doubt this module calls them. Three bounds exist only here: [`FIELDS_MAX`],
//!   the length of a small field, which is checked before parsing, and the total of the small fields. One bound exists
//!   only there: the size of a body's tree, because this module builds none of the prompt.
//! - The written body, read as JSON, equals theirs. Parts that two parsers could read differently do not pass
//!   unchanged. Each top-level name is written once, and a part with a duplicate or escaped name is rewritten. The walk
//!   accepts no invalid UTF-8, lone surrogate, `NaN` or number beyond an f64.
//! - The written body contains no field of [`InternalFields`], for any spelling, repetition or nesting.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value};

use crate::body::parse_object;
use crate::code::Code;
use crate::error::ApiError;
use crate::limits::{
    LOGIT_BIAS_BYTES_MAX, ParseLimits, SMALL_FIELD_BYTES_MAX, SMALL_TREE_BYTES_MAX,
    SMALL_UNWEIGHED_BYTES_MAX, Scope, TREE_BYTES_MAX,
};
use crate::request::{CONSTRAINT_JSON_BYTES_MAX, Endpoint, GenerateRequest, Input};
use crate::sanitize::{decoded, quoted, sanitize};
use crate::scan::{FieldLevel, InternalFields, Scanner, has_duplicates, tree_bytes};
use crate::shape::ShapeCheck;

/// Maximum number of fields of one body. OpenAI's API has about 50.
pub const FIELDS_MAX: usize = 4096;

/// Number of fields of a typical body.
const USUAL_FIELDS: usize = 8;

/// Slices up to this size are copied into one piece, which costs less than a piece of their own.
const COPIED_BYTES_MAX: usize = 16 << 10;

/// Fields of `/v1/responses` and their names in a chat.
const SHARED_WITH_CHAT: [(&str, &str); 7] = [
    ("model", "model"),
    ("stream", "stream"),
    ("user", "user"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("cache_salt", "cache_salt"),
    ("max_output_tokens", "max_tokens"),
];

/// Fields of Anthropic's `/v1/messages` and their names in a chat.
const SHARED_WITH_MESSAGES: [(&str, &str); 6] = [
    ("model", "model"),
    ("stream", "stream"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("cache_salt", "cache_salt"),
    ("max_tokens", "max_tokens"),
];

/// A checked body without internal fields.
#[derive(Clone, Debug, Default)]
pub struct RawBody {
    bytes: Bytes,
    fields: Vec<Field>,
}

/// A request to generate, without its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutline {
    /// The request. Its `input` is empty, because the prompt stays in the body.
    pub request: GenerateRequest,
    /// Number of prompts in the body.
    pub prompts: usize,
}

/// A top-level field that is kept.
#[derive(Clone, Debug)]
struct Field {
    /// The name as the client wrote it, between the quotes.
    name: Range<usize>,
    value: Range<usize>,
    /// Set if the field cannot be written unchanged.
    rewrite: Option<Box<FieldRewrite>>,
    /// Whether only a comma separates the field from the one before it.
    follows: bool,
}

/// The replacements of a field that cannot be written unchanged.
#[derive(Clone, Debug)]
struct FieldRewrite {
    /// The decoded name, if it is written with escapes.
    decoded: Option<Box<str>>,
    /// The replacement of the value.
    rewritten: Option<Box<[u8]>>,
}

impl RawBody {
    /// Reads a body of an endpoint that generates.
    ///
    /// # Errors
    /// Those of [`parse_object`] and [`GenerateRequest::from_map`]; 400 over [`FIELDS_MAX`], and for a field other than
    /// the prompt that is longer than [`SMALL_FIELD_BYTES_MAX`].
    pub fn generate(
        bytes: Bytes,
        endpoint: Endpoint,
        limits: &ParseLimits,
        internal: &dyn InternalFields,
    ) -> Result<(Self, RequestOutline), ApiError> {
        let (body, shapes) = Self::walk(bytes, Some(endpoint), limits, internal)?;
        body.small_enough(limits.scope)?;
        let sure = shapes.prompts().and_then(|prompts| {
            let small = body.small_fields(limits.scope);
            let request = GenerateRequest::outline(endpoint, &small, prompts, limits).ok()?;
            Some(RequestOutline { request, prompts })
        });
        let outline = match sure {
            Some(outline) => outline,
            None => parse_in_full(&body.bytes, endpoint, limits, internal)?,
        };
        Ok((body, outline))
    }

    /// Reads a body of `/v1/responses`. Only the fields in common with a chat are checked: model, user, streaming,
    /// sampling and length. The engine checks the items of `input`.
    ///
    /// # Errors
    /// Those of [`parse_object`] and of these fields.
    pub fn responses(
        bytes: Bytes,
        limits: &ParseLimits,
        internal: &dyn InternalFields,
    ) -> Result<(Self, RequestOutline), ApiError> {
        let body = Self::any(bytes, limits, internal)?;
        let shared = body.shared_fields(&SHARED_WITH_CHAT)?;
        if !body.has("input") {
            return Err(ApiError::invalid("input", "`input` is missing"));
        }
        let request = GenerateRequest::outline(Endpoint::Chat, &shared, 1, limits).map_err(|mut error| {
            if error.param.as_deref() == Some("max_tokens") {
                error.param = Some("max_output_tokens".to_owned());
                error.message = error.message.replace("max_tokens", "max_output_tokens");
            }
            error
        })?;
        Ok((body, RequestOutline { request, prompts: 1 }))
    }

    /// Reads a body of Anthropic's `/v1/messages`. Only the fields in common with a chat are checked: model, streaming,
    /// sampling and length. The engine checks the messages.
    ///
    /// # Errors
    /// Those of [`parse_object`] and of these fields; 400 without `messages` or `max_tokens`.
    pub fn messages(
        bytes: Bytes,
        limits: &ParseLimits,
        internal: &dyn InternalFields,
    ) -> Result<(Self, RequestOutline), ApiError> {
        let body = Self::any(bytes, limits, internal)?;
        let mut shared = body.shared_fields(&SHARED_WITH_MESSAGES)?;
        if let Some(metadata) = body.field("metadata") {
            is_small("metadata", metadata)?;
            let metadata: Value = serde_json::from_slice(metadata).expect("the walk read JSON");
            shared.extend(metadata["user_id"].as_str().map(|user| ("user", user.into())));
        }
        for name in ["messages", "max_tokens"] {
            if body.field(name).is_none_or(|value| value == b"null") {
                return Err(ApiError::invalid(name, format!("`{name}` is missing")));
            }
        }
        if !body.field("messages").is_some_and(|messages| messages.starts_with(b"[")) {
            return Err(ApiError::invalid("messages", "`messages` must be an array"));
        }
        let request = GenerateRequest::outline(Endpoint::Chat, &shared, 1, limits)?;
        Ok((body, RequestOutline { request, prompts: 1 }))
    }

    /// The small fields with these names, parsed, under their names in a chat.
    fn shared_fields(
        &self,
        names: &[(&'static str, &'static str)],
    ) -> Result<Vec<(&'static str, Value)>, ApiError> {
        let mut shared = Vec::new();
        for (name, as_chat) in names {
            if let Some(value) = self.field(name) {
                is_small(name, value)?;
                shared.push((*as_chat, serde_json::from_slice(value).expect("the walk read JSON")));
            }
        }
        Ok(shared)
    }

    /// Reads a body and checks only that it is a JSON object.
    ///
    /// # Errors
    /// Those of [`parse_object`], and 400 over [`FIELDS_MAX`].
    pub fn any(bytes: Bytes, limits: &ParseLimits, internal: &dyn InternalFields) -> Result<Self, ApiError> {
        Self::walk(bytes, None, limits, internal).map(|(body, _)| body)
    }

    fn walk<'l>(
        bytes: Bytes,
        endpoint: Option<Endpoint>,
        limits: &'l ParseLimits,
        internal: &dyn InternalFields,
    ) -> Result<(Self, ShapeCheck<'l>), ApiError> {
        let mut shapes = ShapeCheck::of(endpoint, limits);
        let text = (bytes.len() <= limits.body_bytes).then(|| std::str::from_utf8(&bytes).ok()).flatten();
        let fields = text.and_then(|text| fields(text, &mut shapes, internal));
        match fields {
            Some(fields) if fields.len() <= FIELDS_MAX => Ok((Self { bytes, fields }, shapes)),
            Some(_) => Err(ApiError::malformed(format!("the body has more than {FIELDS_MAX} fields"))),
            // The parser finds the reason for the message.
            None => match parse_object(&bytes, limits) {
                Err(error) => Err(error),
                Ok(_) => Err(ApiError::malformed("the body is ambiguous")),
            },
        }
    }

    /// Bytes of the original body.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the body has no field other than removed ones.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Names in the original order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|field| self.name(field))
    }

    /// Whether the body has this field, also with the value `null`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|field| self.is_named(field, name))
    }

    /// A field's value as JSON text.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields.iter().find(|field| self.is_named(field, name)).map(|field| self.value(field))
    }

    /// The value of a string field; `None` also for a value of another type.
    #[must_use]
    pub fn string(&self, name: &str) -> Option<Cow<'_, str>> {
        let value = self.field(name)?;
        let plain = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
        match plain {
            Some(plain) if !plain.contains(&b'\\') => std::str::from_utf8(plain).ok().map(Cow::Borrowed),
            Some(_) => serde_json::from_slice(value).ok().map(Cow::Owned),
            None => None,
        }
    }

    /// The body with the fields `ours` in front (names and JSON texts). The client's fields with these
    /// names, and with the names in `unset`, are left out. The pieces together are one object. Large pieces are slices
    /// of the original body.
    #[must_use]
    pub fn write(&self, ours: &[(&str, &[u8])], unset: &[&str]) -> Vec<Bytes> {
        if ours.is_empty() {
            // The first field has no comma before it. A name with escapes means nothing to an engine.
            let is_plain = |name: &str| quoted(name).len() == name.len() + 2;
            let is_unset = |field: &&Field| unset.iter().any(|name| self.is_named(field, name));
            let mut kept = self.fields.iter().filter(|field| !is_unset(field));
            return match kept.find(|field| is_plain(self.name(field))) {
                Some(first) => {
                    let value = first.rewritten().unwrap_or_else(|| self.value(first));
                    self.write(&[(self.name(first), value)], unset)
                }
                None => vec![Bytes::from_static(b"{}")],
            };
        }
        let ours_bytes: usize = ours.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        let mut out = BodyPieces::new(&self.bytes, ours_bytes + self.copied_bytes());
        // `ours` is first, so that the handoff arrives even if the body is cut off or too large for an engine.
        for (index, (name, value)) in ours.iter().enumerate() {
            out.copy(if index == 0 { b"{" } else { b"," });
            out.copy(b"\"");
            out.copy(name.as_bytes());
            out.copy(b"\":");
            out.copy(value);
        }
        for field in &self.fields {
            let is_named = |name: &&str| self.is_named(field, name);
            if ours.iter().any(|(ours, _)| is_named(ours)) || unset.iter().any(is_named) {
                out.end_run();
            } else if field.is_unchanged() {
                out.run(field);
            } else {
                out.end_run();
                out.copy(b",");
                out.copy(quoted(self.name(field)).as_bytes());
                out.copy(b":");
                match field.rewritten() {
                    Some(rewritten) => out.copy(rewritten),
                    None => out.slice(field.value.clone()),
                }
            }
        }
        out.end_run();
        out.copy(b"}");
        out.finish()
    }

    /// Upper bound of the bytes that `write` copies, except for names with escapes.
    fn copied_bytes(&self) -> usize {
        const BRACES: usize = 2;
        if self.bytes.len() <= COPIED_BYTES_MAX && self.fields.iter().all(Field::is_unchanged) {
            return self.bytes.len() + BRACES;
        }
        let bytes = |field: &Field| self.name_bytes(field).len() + self.value(field).len() + 4;
        let bytes = self.fields.iter().map(bytes).filter(|bytes| *bytes <= COPIED_BYTES_MAX);
        bytes.sum::<usize>() + BRACES
    }

    fn name<'a>(&'a self, field: &'a Field) -> &'a str {
        std::str::from_utf8(self.name_bytes(field)).expect("the walk read UTF-8")
    }

    /// Compares bytes: a comparison needs no check of the encoding.
    fn is_named(&self, field: &Field, name: &str) -> bool {
        self.name_bytes(field) == name.as_bytes()
    }

    fn name_bytes<'a>(&'a self, field: &'a Field) -> &'a [u8] {
        match field.rewrite.as_deref().and_then(|rewrite| rewrite.decoded.as_deref()) {
            Some(decoded) => decoded.as_bytes(),
            None => &self.bytes[field.name.clone()],
        }
    }

    fn value<'a>(&'a self, field: &'a Field) -> &'a [u8] {
        field.rewritten().unwrap_or(&self.bytes[field.value.clone()])
    }

    /// Checks that the fields of [`Self::small_fields`] are small, each and in total.
    fn small_enough(&self, scope: Scope) -> Result<(), ApiError> {
        let mut bytes = 0;
        for (name, value) in self.small(scope) {
            is_small(name, value)?;
            bytes += value.len();
        }
        if bytes <= SMALL_UNWEIGHED_BYTES_MAX {
            return Ok(());
        }
        let mut together = 0;
        for (name, value) in self.small(scope) {
            together += std::str::from_utf8(value).map_or(0, tree_bytes);
            if together > SMALL_TREE_BYTES_MAX {
                return Err(ApiError::invalid(name, format!("`{name}` has too many values"))
                    .with_code(Code::TooManyValues));
            }
        }
        Ok(())
    }

    /// The fields that [`GenerateRequest::outline`] reads, parsed.
    fn small_fields(&self, scope: Scope) -> Vec<(&str, Value)> {
        let mut small = Vec::with_capacity(self.fields.len());
        small.extend(self.small(scope).map(|(name, value)| {
            let value = serde_json::from_slice(value).expect("the walk read JSON");
            (name, value)
        }));
        small
    }

    fn small(&self, scope: Scope) -> impl Iterator<Item = (&str, &[u8])> {
        let fields = self.fields.iter().map(|field| (self.name(field), self.value(field)));
        fields.filter(move |(name, _)| GenerateRequest::reads(name, scope))
    }
}

/// Checks that a field other than the prompt is not longer than any valid one.
fn is_small(name: &str, value: &[u8]) -> Result<(), ApiError> {
    let most = match name {
        "logit_bias" => LOGIT_BIAS_BYTES_MAX,
        name if GenerateRequest::has_constraint(name) => CONSTRAINT_JSON_BYTES_MAX,
        _ => SMALL_FIELD_BYTES_MAX,
    };
    if value.len() > most {
        let message = format!("`{name}` is {} bytes of JSON; at most {most} are read", value.len());
        return Err(ApiError::invalid(name, message).with_code(Code::FieldTooLong));
    }
    Ok(())
}

impl Field {
    fn is_unchanged(&self) -> bool {
        self.rewrite.is_none()
    }

    fn rewritten(&self) -> Option<&[u8]> {
        self.rewrite.as_deref().and_then(|rewrite| rewrite.rewritten.as_deref())
    }
}

/// Removes all internal fields from a parsed body.
pub fn strip(body: &mut Map<String, Value>, internal: &dyn InternalFields) {
    body.retain(|name, _| !internal.is_internal(FieldLevel::Top, name));
    for (name, value) in body {
        strip_within(value, FieldLevel::within(name, internal), internal);
    }
}

/// Recursive. The parser bounds the depth.
fn strip_within(value: &mut Value, level: FieldLevel, internal: &dyn InternalFields) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !internal.is_internal(level, name));
            fields.values_mut().for_each(|value| strip_within(value, level, internal));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| strip_within(item, level, internal)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Parses a body with an unusual shape completely.
fn parse_in_full(
    bytes: &[u8],
    endpoint: Endpoint,
    limits: &ParseLimits,
    internal: &dyn InternalFields,
) -> Result<RequestOutline, ApiError> {
    let mut map = parse_object(bytes, limits)?;
    strip(&mut map, internal);
    let mut request = GenerateRequest::from_map(endpoint, &map, limits)?;
    let prompts = request.input.prompts();
    request.input = Input::Prompts(Vec::new());
    Ok(RequestOutline { request, prompts })
}

/// The kept fields; `None` if the text is not one JSON object with unique names. Ends early beyond [`FIELDS_MAX`].
fn fields<'a>(
    text: &'a str,
    shapes: &mut ShapeCheck<'_>,
    internal: &'a dyn InternalFields,
) -> Option<Vec<Field>> {
    let mut scanner = Scanner::new(text, internal);
    let mut fields: Vec<Field> = Vec::with_capacity(USUAL_FIELDS);
    let mut names: Vec<Cow<'_, str>> = Vec::with_capacity(USUAL_FIELDS);
    let mut follows = false;
    scanner.space();
    scanner.open(b'{')?;
    scanner.space();
    if scanner.eat(b'}').is_none() {
        while fields.len() <= FIELDS_MAX {
            scanner.space();
            let written = scanner.string()?;
            let name = decoded(&scanner, written)?;
            scanner.space();
            scanner.eat(b':')?;
            scanner.space();
            let start = scanner.offset();
            if internal.is_internal(FieldLevel::Top, &name) {
                scanner.value()?;
                follows = false;
            } else {
                scanner.level = FieldLevel::within(&name, internal);
                (scanner.ambiguous, scanner.tree_bytes) = (false, 0);
                shapes.walk(&mut scanner, &name)?;
                let value = start..scanner.offset();
                let rewritten = if scanner.ambiguous {
                    // On `None`, `parse_object` runs and returns the error for this.
                    (scanner.tree_bytes <= TREE_BYTES_MAX).then_some(())?;
                    Some(sanitize(&text[value.clone()], scanner.level, internal)?.into_bytes().into())
                } else {
                    None
                };
                let decoded = (!written.plain).then(|| Box::from(name.as_ref()));
                let rewrite = (decoded.is_some() || rewritten.is_some())
                    .then(|| Box::new(FieldRewrite { decoded, rewritten }));
                fields.push(Field { name: written.start..written.end, value, rewrite, follows });
                follows = true;
            }
            names.push(name);
            scanner.space();
            match scanner.next()? {
                b',' => {}
                b'}' => break,
                _ => return None,
            }
        }
    }
    if fields.len() > FIELDS_MAX {
        return Some(fields);
    }
    scanner.space();
    (scanner.peek().is_none() && !has_duplicates(&mut names)).then_some(fields)
}

/// The pieces of a body during writing: small parts are copied together, large parts are slices.
struct BodyPieces<'a> {
    original: &'a Bytes,
    done: Vec<Bytes>,
    copied: BytesMut,
    /// Consecutive fields that are unchanged.
    run: Option<Range<usize>>,
}

impl<'a> BodyPieces<'a> {
    /// No pieces, with capacity for `bytes` copied bytes.
    fn new(original: &'a Bytes, bytes: usize) -> Self {
        Self { original, done: Vec::new(), copied: BytesMut::with_capacity(bytes), run: None }
    }

    fn copy(&mut self, bytes: &[u8]) {
        self.copied.extend_from_slice(bytes);
    }

    fn slice(&mut self, range: Range<usize>) {
        if range.len() <= COPIED_BYTES_MAX {
            self.copied.extend_from_slice(&self.original[range]);
        } else {
            let copied = self.copied.split().freeze();
            self.done.push(copied);
            self.done.push(self.original.slice(range));
        }
    }

    /// Appends an unchanged field, in one slice with the fields before it if they are consecutive.
    fn run(&mut self, field: &Field) {
        match &mut self.run {
            Some(run) if field.follows => run.end = field.value.end,
            _ => {
                self.end_run();
                self.run = Some(field.name.start - 1..field.value.end);
            }
        }
    }

    fn end_run(&mut self) {
        if let Some(run) = self.run.take() {
            self.copy(b",");
            self.slice(run);
        }
    }

    fn finish(mut self) -> Vec<Bytes> {
        self.done.push(self.copied.freeze());
        self.done
    }
}

#[cfg(test)]
mod tests;
