//! Structured output: the texts that a request permits, in OpenAI's spelling (`response_format`) and in vLLM's
//! (`structured_outputs`, and the older `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`).
//!
//! A request has at most one constraint. The size, depth and references of a schema are bounded here, before any work
//! is done for it. The engine compiles the constraint and refuses what it cannot enforce.
//!
//! With [`Scope::AnyEngine`] nothing is read: the fields pass through a router unchanged, and the engine checks them.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::schema_work::{self, SCHEMA_COPIES_MAX};
use crate::code::Code;
use crate::error::{ApiError, shortened};
use crate::field::{Fields, must_be};
use crate::limits::{Scope, TOKENS_MAX};

/// Bytes of the texts of a schema, names included. Large published schemas have about this many.
const SCHEMA_TEXT_BYTES_MAX: usize = 256 << 10;
/// Values of a schema.
const SCHEMA_VALUES_MAX: usize = 16_384;
/// Levels of nesting of a schema. A level of an object has two: `properties` and the property.
const SCHEMA_DEPTH_MAX: usize = 64;
/// Levels of a schema times its references: a compiler that follows references recursively is at most so deep.
const SCHEMA_LEVELS_MAX: usize = 2_048;
/// Bytes of a regular expression or a grammar.
const GRAMMAR_BYTES_MAX: usize = 32 << 10;
/// Choices of one request. Their texts together have the bound of a grammar.
const CHOICES_MAX: usize = 1_024;
/// Bytes of the JSON text of a field with a constraint. Escapes and spaces can make a schema several times as long.
pub(crate) const CONSTRAINT_JSON_BYTES_MAX: usize = 2 << 20;

/// The fields that contain a constraint.
const FIELDS: [&str; 6] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// The texts that a request permits.
#[derive(Clone, Debug, PartialEq)]
pub struct StructuredOutput {
    /// The field that contains the constraint, for messages about it.
    pub field: String,
    /// The constraint.
    pub constraint: OutputConstraint,
    /// Last tokens of the prompt that belong to the text already: a router continues a response. 0 for a new one.
    pub continues: u32,
}

impl StructuredOutput {
    /// JSON of a schema.
    pub(super) fn of_schema(
        field: &str,
        schema: Value,
        whitespace: JsonWhitespace,
    ) -> Result<Self, ApiError> {
        Ok(Self::new(field, json_schema(field, &schema, whitespace)?))
    }

    /// The constraint of a new response.
    fn new(field: &str, constraint: OutputConstraint) -> Self {
        Self { field: field.to_owned(), constraint, continues: 0 }
    }
}

/// A constraint on a text.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputConstraint {
    /// JSON of a schema.
    Json {
        /// The schema.
        schema: Value,
        /// The whitespace between values.
        whitespace: JsonWhitespace,
    },
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar, in Lark's syntax or in EBNF.
    Grammar(String),
}

/// Whitespace between the values of a JSON text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonWhitespace {
    /// Any, of bounded length.
    Allowed,
    /// None.
    Omitted,
}

/// Whether the field contains a constraint.
#[must_use]
pub fn is_constraint(name: &str) -> bool {
    FIELDS.contains(&name)
}

/// The constraint of a request.
pub(super) fn read(fields: Fields<'_>, scope: Scope) -> Result<Option<StructuredOutput>, ApiError> {
    if scope == Scope::AnyEngine {
        return Ok(None);
    }
    one_of(fields)
}

/// The only constraint among these fields.
fn one_of(fields: Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    let mut found: Option<StructuredOutput> = None;
    for name in FIELDS {
        let Some(value) = fields.get(name) else { continue };
        let Some(constraint) = of_field(name, value)? else { continue };
        if let Some(first) = &found {
            let message = format!("`{name}` and `{}` exclude each other: send one constraint", first.field);
            return Err(ApiError::invalid(name, message));
        }
        found = Some(constraint);
    }
    Ok(found)
}

fn of_field(name: &str, value: &Value) -> Result<Option<StructuredOutput>, ApiError> {
    let one = |constraint| Ok(Some(StructuredOutput::new(name, constraint)));
    match name {
        "response_format" => response_format(value),
        "structured_outputs" => structured_outputs(value),
        "guided_json" => one(json_schema(name, value, JsonWhitespace::Allowed)?),
        "guided_regex" => one(OutputConstraint::Regex(grammar_text(name, value)?)),
        "guided_choice" => one(OutputConstraint::Choice(choices(name, value)?)),
        _ => one(OutputConstraint::Grammar(grammar_text(name, value)?)),
    }
}

/// OpenAI's field.
fn response_format(value: &Value) -> Result<Option<StructuredOutput>, ApiError> {
    const FIELD: &str = "response_format";
    let object = value.as_object().ok_or_else(|| must_be(FIELD, "an object", value))?;
    let kind = Fields::under(object, FIELD).string("type")?;
    match kind {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(StructuredOutput::new(FIELD, any_object(JsonWhitespace::Allowed)))),
        Some("json_schema") => {
            let format = Fields::under(object, FIELD).object("json_schema")?;
            let format = format.ok_or_else(|| missing("response_format.json_schema"))?;
            let field = "response_format.json_schema.schema";
            let schema = format.get("schema").filter(|schema| !schema.is_null());
            let schema = schema.ok_or_else(|| missing(field))?;
            let constraint = json_schema(field, schema, JsonWhitespace::Allowed)?;
            Ok(Some(StructuredOutput::new(field, constraint)))
        }
        Some(other) => {
            let message = format!(
                "`response_format.type` must be text, json_object or json_schema, got \"{}\"",
                shortened(other)
            );
            Err(ApiError::invalid("response_format.type", message).with_code(Code::UnsupportedParameter))
        }
        None => Err(missing("response_format.type")),
    }
}

/// vLLM's field: exactly one constraint, and options of JSON.
fn structured_outputs(value: &Value) -> Result<Option<StructuredOutput>, ApiError> {
    const FIELD: &str = "structured_outputs";
    let object = value.as_object().ok_or_else(|| must_be(FIELD, "an object", value))?;
    let fields = Fields::under(object, FIELD);
    if let Some(tokens) = fields.count("continues", 1..=TOKENS_MAX)? {
        return continued(fields, tokens);
    }
    for name in ["structural_tag", "whitespace_pattern", "disable_additional_properties"] {
        if fields.get(name).is_some_and(|value| value != &Value::Bool(false)) {
            let name = fields.name(name);
            let message = format!("`{name}` is not supported here; leave it out");
            return Err(ApiError::invalid(name, message).with_code(Code::UnsupportedParameter));
        }
    }
    let whitespace = match fields.boolean("disable_any_whitespace")?.unwrap_or(false) {
        true => JsonWhitespace::Omitted,
        false => JsonWhitespace::Allowed,
    };
    let is_set = |name: &&str| match *name {
        "json_object" => fields.get(name).is_some_and(|value| value != &Value::Bool(false)),
        _ => fields.get(name).is_some(),
    };
    let kinds = ["json", "regex", "choice", "grammar", "json_object"];
    let set: Vec<&str> = kinds.into_iter().filter(is_set).collect();
    let [kind] = set[..] else {
        let message = match set.is_empty() {
            true => format!("`{FIELD}` must have one of {}", kinds.join(", ")),
            false => format!("`{FIELD}` must have one constraint, got {}", set.join(", ")),
        };
        return Err(ApiError::invalid(FIELD, message));
    };
    let (field, value) = (fields.name(kind), fields.get(kind).unwrap_or(&Value::Null));
    let constraint = match kind {
        "json" => json_schema(&field, value, whitespace)?,
        "regex" => OutputConstraint::Regex(grammar_text(&field, value)?),
        "choice" => OutputConstraint::Choice(choices(&field, value)?),
        "grammar" => OutputConstraint::Grammar(grammar_text(&field, value)?),
        _ => {
            fields.boolean(kind)?;
            any_object(whitespace)
        }
    };
    Ok(Some(StructuredOutput::new(&field, constraint)))
}

/// A response that a router continues: `of` has the client's fields, and the prompt ends with the text so far. vLLM
/// refuses this form, because it has none of its constraints. It cannot continue a text without its constraint.
fn continued(fields: Fields<'_>, tokens: u32) -> Result<Option<StructuredOutput>, ApiError> {
    let field = fields.name("of");
    let of = fields.object("of")?.ok_or_else(|| missing(&field))?;
    match one_of(Fields::new(of))? {
        Some(first) if first.continues == 0 => Ok(Some(StructuredOutput { continues: tokens, ..first })),
        Some(_) | None => Err(ApiError::invalid(&*field, format!("`{field}` must have one constraint"))),
    }
}

fn missing(field: &str) -> ApiError {
    ApiError::invalid(field, format!("`{field}` is missing"))
}

fn any_object(whitespace: JsonWhitespace) -> OutputConstraint {
    OutputConstraint::Json { schema: json!({"type": "object"}), whitespace }
}

/// A schema: an object, or an object in a string, as in vLLM.
fn json_schema(field: &str, value: &Value, whitespace: JsonWhitespace) -> Result<OutputConstraint, ApiError> {
    let expected = "a JSON schema: an object, or an object in a string";
    let schema = match value {
        Value::Object(_) => value.clone(),
        Value::String(text) if text.len() <= CONSTRAINT_JSON_BYTES_MAX => {
            let parsed = serde_json::from_str::<Map<String, Value>>(text);
            let wrong = |error| ApiError::invalid(field, format!("`{field}` must be {expected}: {error}"));
            Value::Object(parsed.map_err(wrong)?)
        }
        _ => return Err(must_be(field, expected, value)),
    };
    SchemaBounds::check(field, &schema)?;
    Ok(OutputConstraint::Json { schema, whitespace })
}

fn grammar_text(field: &str, value: &Value) -> Result<String, ApiError> {
    let fits = |text: &&str| (1..=GRAMMAR_BYTES_MAX).contains(&text.len());
    let text = value.as_str().filter(fits).map(str::to_owned);
    text.ok_or_else(|| must_be(field, &format!("a string of 1 to {GRAMMAR_BYTES_MAX} bytes"), value))
}

fn choices(field: &str, value: &Value) -> Result<Vec<String>, ApiError> {
    let fits = |all: &&Vec<Value>| (1..=CHOICES_MAX).contains(&all.len());
    let expected = format!("an array of 1 to {CHOICES_MAX} strings");
    let all = value.as_array().filter(fits).ok_or_else(|| must_be(field, &expected, value))?;
    let mut bytes = 0;
    let mut read = Vec::with_capacity(all.len());
    for (index, choice) in all.iter().enumerate() {
        let text = choice.as_str().filter(|text| !text.is_empty());
        let name = format!("{field}[{index}]");
        let text = text.ok_or_else(|| must_be(&name, "a string that is not empty", choice))?;
        bytes += text.len();
        read.push(text.to_owned());
    }
    if bytes > GRAMMAR_BYTES_MAX {
        let message = format!("`{field}` has {bytes} bytes of text; at most {GRAMMAR_BYTES_MAX} are allowed");
        return Err(ApiError::invalid(field, message));
    }
    Ok(read)
}

/// The size of a schema so far, and the place that is looked at, as a JSON pointer.
struct SchemaBounds<'a> {
    field: &'a str,
    place: String,
    values: usize,
    text_bytes: usize,
    deepest: usize,
    references: BTreeSet<&'a str>,
}

impl<'a> SchemaBounds<'a> {
    fn check(field: &'a str, schema: &'a Value) -> Result<(), ApiError> {
        let references = BTreeSet::new();
        let mut bounds =
            Self { field, place: String::new(), values: 0, text_bytes: 0, deepest: 0, references };
        bounds.visit(schema, 1)?;
        if !schema_work::is_bounded(schema, &bounds.references) {
            return Err(bounds.refuse(format!(
                "alternatives beside other members that copy more than {SCHEMA_COPIES_MAX} values when they are merged"
            )));
        }
        let targets = bounds.references.len();
        if bounds.deepest * (targets + 1) > SCHEMA_LEVELS_MAX {
            let deepest = bounds.deepest;
            return Err(bounds.refuse(format!(
                "{deepest} levels with {targets} referenced schemas; levels times references are at most \
                 {SCHEMA_LEVELS_MAX}"
            )));
        }
        Ok(())
    }

    /// Recursive; [`SCHEMA_DEPTH_MAX`] bounds the depth.
    fn visit(&mut self, value: &'a Value, depth: usize) -> Result<(), ApiError> {
        self.values += 1;
        self.deepest = self.deepest.max(depth);
        if self.values > SCHEMA_VALUES_MAX {
            return Err(self.refuse(format!("more than {SCHEMA_VALUES_MAX} values")));
        }
        if depth > SCHEMA_DEPTH_MAX {
            return Err(self.refuse(format!("more than {SCHEMA_DEPTH_MAX} levels")));
        }
        match value {
            Value::String(text) => self.add_text(text.len()),
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.visit_below(&index.to_string(), item, depth)?;
                }
                Ok(())
            }
            Value::Object(members) => {
                for (name, member) in members {
                    self.add_text(name.len())?;
                    if let ("$ref", Value::String(target)) = (name.as_str(), member) {
                        self.references.insert(target);
                    }
                    self.visit_below(name, member, depth)?;
                }
                Ok(())
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
        }
    }

    fn visit_below(&mut self, name: &str, value: &'a Value, depth: usize) -> Result<(), ApiError> {
        let before = self.place.len();
        self.place.push('/');
        self.place.push_str(&name.replace('~', "~0").replace('/', "~1"));
        self.visit(value, depth + 1)?;
        self.place.truncate(before);
        Ok(())
    }

    fn add_text(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.text_bytes += bytes;
        if self.text_bytes > SCHEMA_TEXT_BYTES_MAX {
            return Err(self.refuse(format!("more than {SCHEMA_TEXT_BYTES_MAX} bytes of text")));
        }
        Ok(())
    }

    fn refuse(&self, what: String) -> ApiError {
        let place: &str = if self.place.is_empty() { "its root" } else { &self.place };
        let message = format!("the schema in `{}` has {what}, at {}", self.field, shortened(place));
        ApiError::invalid(self.field, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &Value) -> Result<Option<StructuredOutput>, ApiError> {
        read(Fields::new(body.as_object().expect("an object")), Scope::ThisEngine)
    }

    #[track_caller]
    fn refuses(body: Value, param: &str, words: &str) {
        let error = of(&body).expect_err("refused");
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{}", error.message);
        assert!(error.message.contains(words), "{}", error.message);
    }

    fn json_of(schema: Value, whitespace: JsonWhitespace) -> OutputConstraint {
        OutputConstraint::Json { schema, whitespace }
    }

    #[test]
    fn every_spelling_of_a_constraint_is_read() {
        use JsonWhitespace::{Allowed, Omitted};
        let schema = json!({"type": "integer"});
        let object = json!({"type": "object"});
        let regex = OutputConstraint::Regex("a+".into());
        let choice = OutputConstraint::Choice(vec!["yes".into(), "no".into()]);
        let grammar = OutputConstraint::Grammar("start: \"a\"".into());
        for (body, field, constraint) in [
            (
                json!({"response_format": {"type": "json_object"}}),
                "response_format",
                json_of(object.clone(), Allowed),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
                "response_format.json_schema.schema",
                json_of(schema.clone(), Allowed),
            ),
            (json!({"guided_json": schema}), "guided_json", json_of(schema.clone(), Allowed)),
            (json!({"guided_json": schema.to_string()}), "guided_json", json_of(schema.clone(), Allowed)),
            (json!({"guided_regex": "a+"}), "guided_regex", regex.clone()),
            (json!({"guided_choice": ["yes", "no"]}), "guided_choice", choice.clone()),
            (json!({"guided_grammar": "start: \"a\""}), "guided_grammar", grammar.clone()),
            (json!({"structured_outputs": {"regex": "a+", "json": null}}), "structured_outputs.regex", regex),
            (json!({"structured_outputs": {"choice": ["yes", "no"]}}), "structured_outputs.choice", choice),
            (
                json!({"structured_outputs": {"grammar": "start: \"a\""}}),
                "structured_outputs.grammar",
                grammar,
            ),
            (
                json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": true}}),
                "structured_outputs.json_object",
                json_of(object, Omitted),
            ),
            (
                json!({"structured_outputs": {"json": schema, "json_object": false}}),
                "structured_outputs.json",
                json_of(schema.clone(), Allowed),
            ),
        ] {
            let expected = StructuredOutput::new(field, constraint);
            assert_eq!(of(&body), Ok(Some(expected)), "{body}");
        }
        for body in [json!({}), json!({"response_format": {"type": "text"}}), json!({"guided_json": null})] {
            assert_eq!(of(&body), Ok(None), "{body}");
        }
    }

    #[test]
    fn a_continued_response_has_the_clients_fields_and_the_number_of_its_tokens() {
        let regex = json!({"guided_regex": "a+"});
        let body = json!({"structured_outputs": {"continues": 3, "of": regex}});
        let first = StructuredOutput::new("guided_regex", OutputConstraint::Regex("a+".into()));
        assert_eq!(of(&body), Ok(Some(StructuredOutput { continues: 3, ..first })));
        for wrong in [json!({}), json!({"response_format": {"type": "text"}}), body] {
            let body = json!({"structured_outputs": {"continues": 3, "of": wrong}});
            refuses(body, "structured_outputs.of", "one constraint");
        }
        refuses(json!({"structured_outputs": {"continues": 3}}), "structured_outputs.of", "missing");
        let none = json!({"structured_outputs": {"continues": 0, "of": regex}});
        refuses(none, "structured_outputs.continues", "from 1 to");
    }

    #[test]
    fn a_malformed_or_second_constraint_is_refused_with_its_field() {
        refuses(json!({"response_format": "json"}), "response_format", "an object");
        refuses(json!({"response_format": {}}), "response_format.type", "missing");
        refuses(
            json!({"response_format": {"type": "structural_tag"}}),
            "response_format.type",
            "json_schema, got",
        );
        refuses(
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "missing",
        );
        let empty = json!({"type": "json_schema", "json_schema": {"name": "x"}});
        refuses(json!({"response_format": empty}), "response_format.json_schema.schema", "missing");
        refuses(json!({"guided_json": 7}), "guided_json", "a JSON schema");
        refuses(json!({"guided_json": "[1]"}), "guided_json", "a JSON schema");
        refuses(json!({"guided_regex": ""}), "guided_regex", "1 to 32768 bytes");
        refuses(
            json!({"guided_grammar": "g".repeat(GRAMMAR_BYTES_MAX + 1)}),
            "guided_grammar",
            "1 to 32768 bytes",
        );
        refuses(json!({"guided_choice": []}), "guided_choice", "1 to 1024 strings");
        refuses(json!({"guided_choice": ["a", ""]}), "guided_choice[1]", "not empty");
        refuses(
            json!({"guided_choice": ["a".repeat(GRAMMAR_BYTES_MAX + 1)]}),
            "guided_choice",
            "bytes of text",
        );
        refuses(json!({"structured_outputs": {}}), "structured_outputs", "must have one of json, regex");
        let two = json!({"regex": "a", "choice": ["a"]});
        refuses(json!({"structured_outputs": two}), "structured_outputs", "got regex, choice");
        let tag = json!({"structural_tag": "{}"});
        refuses(json!({"structured_outputs": tag}), "structured_outputs.structural_tag", "not supported");
        let both = json!({"response_format": {"type": "json_object"}, "guided_regex": "a"});
        refuses(both, "guided_regex", "exclude each other");
    }

    #[test]
    fn a_schema_is_bounded_in_depth_values_text_and_references() {
        let mut deep = json!({"type": "string"});
        for _ in 0..SCHEMA_DEPTH_MAX {
            deep = json!({"items": deep});
        }
        refuses(json!({"guided_json": deep}), "guided_json", "more than 64 levels, at /items/items");
        let many = json!({"enum": vec![json!(1); SCHEMA_VALUES_MAX]});
        refuses(json!({"guided_json": many}), "guided_json", "more than 16384 values, at /enum/");
        let long = json!({"a/b": {"const": "x".repeat(SCHEMA_TEXT_BYTES_MAX)}});
        refuses(json!({"guided_json": long}), "guided_json", "bytes of text, at /a~1b/const");
        let references = |count: usize| -> Value {
            let all: Vec<_> = (0..count).map(|at| json!({"$ref": format!("#/$defs/d{at}")})).collect();
            json!({"anyOf": all})
        };
        refuses(json!({"guided_json": references(600)}), "guided_json", "600 referenced schemas");
        assert!(of(&json!({"guided_json": references(500)})).is_ok());
        let words: Vec<_> = (0..4_000).map(|at| json!(format!("w{at}"))).collect();
        let names: Map<_, _> = (0..4_000).map(|at| (format!("p{at}"), json!(true))).collect();
        let product = json!({"properties": names, "enum": words});
        refuses(json!({"guided_json": product}), "guided_json", "copy more than 1048576 values");
    }

    #[test]
    fn a_router_reads_no_constraint() {
        let body = json!({"guided_json": 7, "response_format": {"type": "structural_tag"}});
        let fields = body.as_object().expect("an object");
        assert_eq!(read(Fields::new(fields), Scope::AnyEngine), Ok(None));
    }
}
