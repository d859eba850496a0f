//! The work of merging a schema's parts: `allOf`, `anyOf`, `oneOf`, `enum`, `$ref` and the members beside them.
//!
//! A compiler of grammars merges each option of one part with each option of the others, and copies the values of one
//! part for every option of another. A small schema can therefore take minutes and gigabytes. This count is of the
//! same order as those copies.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// Values that merging copies. Published schemas copy a few thousand.
pub(super) const SCHEMA_COPIES_MAX: usize = 1 << 20;

/// References that stand beside other parts, one behind the other. Longer chains are not followed: they only bound the
/// depth of this count.
const CHAIN_MAX: usize = 8;

/// Members that constrain nothing, or only where they are referenced.
const ANNOTATIONS: [&str; 10] = [
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
    "$anchor",
];

/// What one schema, or one part of it, has.
#[derive(Clone, Copy)]
struct SchemaExtent {
    /// Options of which one is chosen.
    options: usize,
    /// Values of all options.
    values: usize,
    /// Named or numbered schemas below it, with their options.
    names: usize,
}

impl SchemaExtent {
    const LEAF: Self = Self { options: 1, values: 1, names: 0 };
    const EMPTY: Self = Self { options: 1, values: 0, names: 0 };

    /// Adds a schema below it.
    fn add_below(&mut self, below: Self) {
        self.values = self.values.saturating_add(below.values);
        self.names = self.names.saturating_add(below.names).saturating_add(below.options);
    }

    /// Adds an option, which may have options.
    fn add_option(&mut self, option: Self) {
        self.options = self.options.saturating_add(option.options);
        self.values = self.values.saturating_add(option.values);
        self.names = self.names.saturating_add(option.names);
    }
}

/// Whether merging the parts of a schema copies at most [`SCHEMA_COPIES_MAX`] values. `references` are those in it.
pub(super) fn is_bounded(schema: &Value, references: &BTreeSet<&str>) -> bool {
    let mut count = CopyCount { root: schema, known: BTreeMap::new(), copies: 0 };
    count.schema(schema, CHAIN_MAX);
    for target in references {
        count.referenced(target, CHAIN_MAX);
    }
    count.copies <= SCHEMA_COPIES_MAX
}

struct CopyCount<'a> {
    root: &'a Value,
    /// Referenced schemas that have been counted, or whose count has begun.
    known: BTreeMap<String, SchemaExtent>,
    copies: usize,
}

impl CopyCount<'_> {
    /// Counts a schema. Recursive; the depth of a schema and [`CHAIN_MAX`] bound the depth.
    fn schema(&mut self, schema: &Value, chain: usize) -> SchemaExtent {
        let Value::Object(members) = schema else { return SchemaExtent::LEAF };
        let mut parts = Vec::new();
        let mut own = SchemaExtent::EMPTY;
        for (name, member) in members {
            match (name.as_str(), member) {
                (name, _) if ANNOTATIONS.contains(&name) => {}
                ("enum", Value::Array(all)) => {
                    let (options, values) = (all.len().max(1), values_of(member));
                    parts.push(SchemaExtent { options, values, names: 0 });
                }
                ("const", _) => parts.push(SchemaExtent { values: values_of(member), ..SchemaExtent::EMPTY }),
                ("anyOf" | "oneOf", Value::Array(all)) => {
                    let mut sum = SchemaExtent { options: 0, ..SchemaExtent::EMPTY };
                    all.iter().for_each(|option| sum.add_option(self.schema(option, chain)));
                    if name == "oneOf" {
                        // Each option is compared with all others.
                        self.add(sum.options, sum.values);
                    }
                    parts.push(SchemaExtent { options: sum.options.max(1), ..sum });
                }
                ("allOf", Value::Array(all)) => {
                    parts.extend(all.iter().map(|part| self.schema(part, chain)));
                }
                ("$ref", Value::String(target)) => parts.push(self.referenced(target, chain)),
                _ => self.own(name, member, chain, &mut own),
            }
        }
        if own.values > 0 {
            parts.push(own);
        }
        self.merged(&parts)
    }

    /// Counts a member that belongs to no other part.
    fn own(&mut self, name: &str, member: &Value, chain: usize, own: &mut SchemaExtent) {
        match (name, member) {
            ("properties" | "patternProperties", Value::Object(all)) => {
                all.values().for_each(|below| own.add_below(self.below(below, chain)));
            }
            ("prefixItems" | "items", Value::Array(all)) => {
                all.iter().for_each(|below| own.add_below(self.below(below, chain)));
            }
            ("items" | "additionalProperties", _) => own.add_below(self.below(member, chain)),
            ("type", Value::Array(all)) => {
                own.options = all.len().max(1);
                own.values = own.values.saturating_add(all.len());
            }
            _ => own.values = own.values.saturating_add(1),
        }
    }

    /// Counts a schema below another one. A reference alone stays one: it is not copied.
    fn below(&mut self, schema: &Value, chain: usize) -> SchemaExtent {
        let is_alone = |members: &Map<String, Value>| {
            let mut others = members.keys().filter(|name| !ANNOTATIONS.contains(&name.as_str()));
            members.contains_key("$ref") && others.all(|name| name == "$ref")
        };
        match schema.as_object().is_some_and(is_alone) {
            true => SchemaExtent::LEAF,
            false => self.schema(schema, chain),
        }
    }

    /// Counts the schema that a reference names, once.
    fn referenced(&mut self, target: &str, chain: usize) -> SchemaExtent {
        if let Some(known) = self.known.get(target) {
            return *known;
        }
        let root = self.root;
        let found = target.strip_prefix('#').and_then(|place| root.pointer(place));
        let Some(found) = found.filter(|_| chain > 0) else { return SchemaExtent::LEAF };
        // A schema that contains itself is one value there.
        self.known.insert(target.to_owned(), SchemaExtent::LEAF);
        let extent = self.schema(found, chain - 1);
        self.known.insert(target.to_owned(), extent);
        extent
    }

    /// The extent of a schema with these parts. Counts the copies of merging them.
    fn merged(&mut self, parts: &[SchemaExtent]) -> SchemaExtent {
        let sum = |of: fn(&SchemaExtent) -> usize| parts.iter().map(of).fold(0, usize::saturating_add);
        let options = parts.iter().map(|part| part.options).fold(1, usize::saturating_mul);
        let (values, names) = (sum(|part| part.values), sum(|part| part.names));
        if parts.len() > 1 {
            for part in parts {
                self.add(options / part.options, part.values);
                self.add(part.names, values.saturating_sub(part.values));
            }
        }
        SchemaExtent { options, values: values.max(1), names }
    }

    fn add(&mut self, times: usize, values: usize) {
        self.copies = self.copies.saturating_add(times.saturating_mul(values));
    }
}

/// Values of a JSON value, with itself.
fn values_of(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(values_of).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(values_of).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bounded(schema: &Value) -> bool {
        let targets = ["#/$defs/a", "#/$defs/b"];
        is_bounded(schema, &targets.into_iter().collect())
    }

    fn names(count: usize) -> Value {
        (0..count).map(|at| (format!("p{at}"), json!({"type": "integer"}))).collect::<Map<_, _>>().into()
    }

    fn words(count: usize) -> Value {
        (0..count).map(|at| json!(format!("w{at}"))).collect()
    }

    #[test]
    fn parts_whose_options_multiply_are_refused_and_long_lists_alone_are_not() {
        let objects = |count: usize| -> Value {
            (0..count).map(|at| json!({"type": "object", "required": [format!("p{at}")]})).collect()
        };
        for hostile in [
            json!({"properties": names(4_000), "enum": words(4_000)}),
            json!({"type": "object", "properties": names(4_000), "anyOf": objects(2_000)}),
            json!({"oneOf": objects(4_000)}),
            json!({"allOf": (0..24).map(|_| json!({"anyOf": objects(4)})).collect::<Value>()}),
            json!({"allOf": [{"properties": names(3_000)}, {"additionalProperties": {"properties": names(3_000)}}]}),
            json!({"properties": {"x": {"enum": words(3_000), "properties": names(3_000)}}}),
            json!({
                "$defs": {"a": {"enum": words(4_000)}, "b": {"properties": names(4_000)}},
                "items": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            }),
            json!({
                "$defs": {"a": {"allOf": [{"enum": words(4_000)}, {"properties": names(4_000)}]}},
                "properties": {"x": {"$ref": "#/$defs/a"}},
            }),
        ] {
            assert!(!bounded(&hostile), "{}", &hostile.to_string()[..200]);
        }
        for usual in [
            json!({"type": "string", "enum": words(10_000)}),
            json!({"anyOf": objects(5_000)}),
            json!({"type": "object", "properties": names(7_000), "required": words(1_000)}),
            json!({"type": "object", "properties": names(1_000), "oneOf": objects(20)}),
            json!({"allOf": [{"properties": names(300)}, {"properties": names(300), "minProperties": 1}]}),
            json!({
                "$defs": {
                    "a": {"properties": {"next": {"$ref": "#/$defs/a"}, "other": {"$ref": "#/$defs/b"}}},
                    "b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"properties": names(500)}]},
                },
                "$ref": "#/$defs/b",
            }),
        ] {
            assert!(bounded(&usual), "{}", &usual.to_string()[..100]);
        }
    }
}
