//! A client's body that is not taken apart: its bytes, and where its fields are.
//!
//! A router reads a body to check it and to take out what is not the client's to say, and then writes it twice, once
//! for each leg. A prompt can be megabytes, so none of this builds a tree or copies the prompt:
//!
//! ```text
//! bytes ──▶ one strict walk ([`crate::scan`]) ──▶ fields: name, where, tangled or not
//!                │ sure                 │ in doubt, or not JSON
//!                ▼                      ▼
//!          the shape is right      parse_object, strip, GenerateRequest::from_map: today's verdict, word for word
//!                └──────────┬───────────┘
//!                           ▼
//!      write: ours, then the client's fields as slices of `bytes`; only tangled ones are written anew
//! ```
//!
//! Invariants:
//! - A body is accepted exactly when [`parse_object`] and [`GenerateRequest::from_map`] accept what [`strip`] leaves of
//!   it, and refused with their words. Doubt is settled by asking them. Three bounds are of this side alone: [`FIELDS_MAX`],
//!   the length of a small field, which is checked before it is parsed, and what the small ones may take together; and
//!   one is of theirs alone: how large a tree a body may become, because this side makes none of the prompt.
//! - What is written, read as JSON, is what they would have written. Nothing passes as it is that two parsers could
//!   read differently: each top-level name is written once, a part with a name twice or an escaped name is written
//!   anew, and the walk lets no invalid UTF-8, lone surrogate, `NaN` or number beyond an f64 through at all.
//! - No field that [`Internal`] knows is in what is written, however it was spelled, repeated or nested.

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
use crate::request::{Endpoint, GenerateRequest, Input};
use crate::scan::{Internal, Place, Scanner, has_twins, tree_bytes};
use crate::shape::Shapes;
use crate::untangle::{decoded, quoted, untangle};

/// Fields of one body. OpenAI's API has about 50.
pub const FIELDS_MAX: usize = 4096;

/// Fields of a body as it usually is.
const USUAL_FIELDS: usize = 8;

/// Slices up to this size are copied into one piece: cheaper than a piece of their own.
const COPIED_BYTES_MAX: usize = 16 << 10;

/// Fields of `/v1/responses` and what they are called in a chat.
const SHARED_WITH_CHAT: [(&str, &str); 7] = [
    ("model", "model"),
    ("stream", "stream"),
    ("user", "user"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("cache_salt", "cache_salt"),
    ("max_output_tokens", "max_tokens"),
];

/// A body, checked and cleaned.
#[derive(Clone, Debug, Default)]
pub struct RawBody {
    bytes: Bytes,
    fields: Vec<Field>,
}

/// A request to generate as far as it is not its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Outline {
    /// Its `input` holds nothing: that is in the body.
    pub request: GenerateRequest,
    /// Prompts in the body.
    pub prompts: usize,
}

/// A top-level field that stays.
#[derive(Clone, Debug)]
struct Field {
    /// As the client wrote it, between the quotes.
    name: Range<usize>,
    value: Range<usize>,
    /// Where it cannot be written as it came.
    odd: Option<Box<Odd>>,
    /// Only a comma is between it and the field before it.
    follows: bool,
}

/// What differs from how a field came.
#[derive(Clone, Debug)]
struct Odd {
    /// What the name says, where it is written with escapes.
    decoded: Option<Box<str>>,
    /// What is written instead of the value.
    anew: Option<Box<[u8]>>,
}

impl RawBody {
    /// Reads a body of an endpoint that generates.
    ///
    /// # Errors
    /// Those of [`parse_object`] and [`GenerateRequest::from_map`], and 400 over [`FIELDS_MAX`] and for a field besides
    /// the prompt that is longer than [`SMALL_FIELD_BYTES_MAX`].
    pub fn generate(
        bytes: Bytes,
        endpoint: Endpoint,
        limits: &ParseLimits,
        internal: &dyn Internal,
    ) -> Result<(Self, Outline), ApiError> {
        let (body, shapes) = Self::walk(bytes, Some(endpoint), limits, internal)?;
        body.small_enough(limits.scope)?;
        let sure = shapes.prompts().and_then(|prompts| {
            let small = body.small_fields(limits.scope);
            let request = GenerateRequest::outline(endpoint, &small, prompts, limits).ok()?;
            Some(Outline { request, prompts })
        });
        let outline = match sure {
            Some(outline) => outline,
            None => in_doubt(&body.bytes, endpoint, limits, internal)?,
        };
        Ok((body, outline))
    }

    /// Reads a body of `/v1/responses`, of which only what it shares with a chat is checked: its model, its user, whether
    /// it is streamed, how it samples, how long it may be. The items of `input` are for the engine to read.
    ///
    /// # Errors
    /// Those of [`parse_object`] and of those fields.
    pub fn responses(
        bytes: Bytes,
        limits: &ParseLimits,
        internal: &dyn Internal,
    ) -> Result<(Self, Outline), ApiError> {
        let body = Self::any(bytes, limits, internal)?;
        let mut shared = Vec::new();
        for (name, as_chat) in SHARED_WITH_CHAT {
            if let Some(value) = body.field(name) {
                is_small(name, value)?;
                let value = serde_json::from_slice(value).expect("the walk read JSON");
                shared.push((as_chat, value));
            }
        }
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
        Ok((body, Outline { request, prompts: 1 }))
    }

    /// Reads a body of which nothing is checked but that it is a JSON object.
    ///
    /// # Errors
    /// Those of [`parse_object`], and 400 over [`FIELDS_MAX`].
    pub fn any(bytes: Bytes, limits: &ParseLimits, internal: &dyn Internal) -> Result<Self, ApiError> {
        Self::walk(bytes, None, limits, internal).map(|(body, _)| body)
    }

    fn walk<'l>(
        bytes: Bytes,
        endpoint: Option<Endpoint>,
        limits: &'l ParseLimits,
        internal: &dyn Internal,
    ) -> Result<(Self, Shapes<'l>), ApiError> {
        let mut shapes = Shapes::of(endpoint, limits);
        let text = (bytes.len() <= limits.body_bytes).then(|| std::str::from_utf8(&bytes).ok()).flatten();
        let fields = text.and_then(|text| fields(text, &mut shapes, internal));
        match fields {
            Some(fields) if fields.len() <= FIELDS_MAX => Ok((Self { bytes, fields }, shapes)),
            Some(_) => Err(ApiError::malformed(format!("the body has more than {FIELDS_MAX} fields"))),
            // It says in words what is wrong.
            None => match parse_object(&bytes, limits) {
                Err(error) => Err(error),
                Ok(_) => Err(ApiError::malformed("the body is ambiguous")),
            },
        }
    }

    /// Bytes of the body as it came.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no field, but for those that were taken out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Names in the order in which they came.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|field| self.name(field))
    }

    /// Whether it has this field, `null` or not.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|n| n == name)
    }

    /// A field's value as JSON text.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields.iter().find(|field| self.name(field) == name).map(|field| self.value(field))
    }

    /// A field that is a string; `None` also where it is something else.
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

    /// The body with `ours` in front (each a name and JSON text; at least one) and without the client's fields of those
    /// names and of the names in `unset`. Large parts are slices of what came; together the pieces are one object.
    #[must_use]
    pub fn write(&self, ours: &[(&str, &[u8])], unset: &[&str]) -> Vec<Bytes> {
        debug_assert!(!ours.is_empty(), "the first field has no comma before it");
        let ours_bytes: usize = ours.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        let mut out = Pieces::new(&self.bytes, ours_bytes + self.copied_bytes());
        // First what is ours: of a body that is cut off on its way, or too large for an engine, the handoff has arrived.
        for (index, (name, value)) in ours.iter().enumerate() {
            out.copy(if index == 0 { b"{" } else { b"," });
            out.copy(b"\"");
            out.copy(name.as_bytes());
            out.copy(b"\":");
            out.copy(value);
        }
        for field in &self.fields {
            let name = self.name(field);
            if ours.iter().any(|(ours, _)| *ours == name) || unset.contains(&name) {
                out.end_run();
            } else if field.is_as_it_came() {
                out.run(field);
            } else {
                out.end_run();
                out.copy(b",");
                out.copy(quoted(name).as_bytes());
                out.copy(b":");
                match field.anew() {
                    Some(anew) => out.copy(anew),
                    None => out.slice(field.value.clone()),
                }
            }
        }
        out.end_run();
        out.copy(b"}");
        out.finish()
    }

    /// What is copied of a body when it is written, from above but for names that are written with escapes.
    fn copied_bytes(&self) -> usize {
        const BRACES: usize = 2;
        if self.bytes.len() <= COPIED_BYTES_MAX && self.fields.iter().all(Field::is_as_it_came) {
            return self.bytes.len() + BRACES;
        }
        let bytes = |field: &Field| self.name(field).len() + self.value(field).len() + 4;
        let bytes = self.fields.iter().map(bytes).filter(|bytes| *bytes <= COPIED_BYTES_MAX);
        bytes.sum::<usize>() + BRACES
    }

    fn name<'a>(&'a self, field: &'a Field) -> &'a str {
        match field.odd.as_deref().and_then(|odd| odd.decoded.as_deref()) {
            Some(decoded) => decoded,
            None => std::str::from_utf8(&self.bytes[field.name.clone()]).expect("the walk read UTF-8"),
        }
    }

    fn value<'a>(&'a self, field: &'a Field) -> &'a [u8] {
        field.anew().unwrap_or(&self.bytes[field.value.clone()])
    }

    /// Whether what [`Self::small_fields`] will parse is small, each and together.
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

    /// What [`GenerateRequest`] reads besides the prompt and what goes with it.
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

/// Whether a field besides the prompt is no longer than any that means something.
fn is_small(name: &str, value: &[u8]) -> Result<(), ApiError> {
    let most = if name == "logit_bias" { LOGIT_BIAS_BYTES_MAX } else { SMALL_FIELD_BYTES_MAX };
    if value.len() > most {
        let message = format!("`{name}` is {} bytes of JSON; at most {most} are read", value.len());
        return Err(ApiError::invalid(name, message).with_code(Code::FieldTooLong));
    }
    Ok(())
}

impl Field {
    fn is_as_it_came(&self) -> bool {
        self.odd.is_none()
    }

    fn anew(&self) -> Option<&[u8]> {
        self.odd.as_deref().and_then(|odd| odd.anew.as_deref())
    }
}

/// Takes everything internal out of a body that was parsed.
pub fn strip(body: &mut Map<String, Value>, internal: &dyn Internal) {
    body.retain(|name, _| !internal.is_internal(Place::Top, name));
    for (name, value) in body {
        strip_within(value, Place::within(name, internal), internal);
    }
}

/// As deep as the parser goes, which is bounded.
fn strip_within(value: &mut Value, place: Place, internal: &dyn Internal) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !internal.is_internal(place, name));
            fields.values_mut().for_each(|value| strip_within(value, place, internal));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| strip_within(item, place, internal)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The verdict on a body whose shape is not the usual one.
fn in_doubt(
    bytes: &[u8],
    endpoint: Endpoint,
    limits: &ParseLimits,
    internal: &dyn Internal,
) -> Result<Outline, ApiError> {
    let mut map = parse_object(bytes, limits)?;
    strip(&mut map, internal);
    let mut request = GenerateRequest::from_map(endpoint, &map, limits)?;
    let prompts = request.input.prompts();
    request.input = Input::Prompts(Vec::new());
    Ok(Outline { request, prompts })
}

/// The fields that stay; `None` where the text is not one JSON object with each name once. Ends early beyond
/// [`FIELDS_MAX`].
fn fields<'a>(text: &'a str, shapes: &mut Shapes<'_>, internal: &'a dyn Internal) -> Option<Vec<Field>> {
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
            if internal.is_internal(Place::Top, &name) {
                scanner.value()?;
                follows = false;
            } else {
                scanner.place = Place::within(&name, internal);
                (scanner.tangled, scanner.tree_bytes) = (false, 0);
                shapes.walk(&mut scanner, &name)?;
                let value = start..scanner.offset();
                let anew = if scanner.tangled {
                    // `parse_object`, which is asked then, says the same in words.
                    (scanner.tree_bytes <= TREE_BYTES_MAX).then_some(())?;
                    Some(untangle(&text[value.clone()], scanner.place, internal)?.into_bytes().into())
                } else {
                    None
                };
                let decoded = (!written.plain).then(|| Box::from(name.as_ref()));
                let odd = (decoded.is_some() || anew.is_some()).then(|| Box::new(Odd { decoded, anew }));
                fields.push(Field { name: written.start..written.end, value, odd, follows });
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
    (scanner.peek().is_none() && !has_twins(&mut names)).then_some(fields)
}

/// Pieces of a body that is being written: small parts are copied together, large ones are slices.
struct Pieces<'a> {
    came: &'a Bytes,
    done: Vec<Bytes>,
    copied: BytesMut,
    /// Fields that follow each other as they came.
    run: Option<Range<usize>>,
}

impl<'a> Pieces<'a> {
    /// With room for so many bytes that are copied.
    fn new(came: &'a Bytes, bytes: usize) -> Self {
        Self { came, done: Vec::new(), copied: BytesMut::with_capacity(bytes), run: None }
    }

    fn copy(&mut self, bytes: &[u8]) {
        self.copied.extend_from_slice(bytes);
    }

    fn slice(&mut self, range: Range<usize>) {
        if range.len() <= COPIED_BYTES_MAX {
            self.copied.extend_from_slice(&self.came[range]);
        } else {
            let copied = self.copied.split().freeze();
            self.done.push(copied);
            self.done.push(self.came.slice(range));
        }
    }

    /// A field whose bytes stay; with those before it in one slice, where nothing else was between them.
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
