//! Generated JSON schemas: types, enumerations, ranges, patterns, bounds, nesting, alternatives and references.

use serde_json::{Map, Value, json};

/// Levels of nesting of a generated schema.
const DEPTH_MAX: usize = 3;

const PATTERNS: [&str; 5] =
    ["^[a-z]{1,6}$", "^[A-Z][0-9]{2,3}$", "^(red|green|blue)-[0-9]$", "^\\d{3}-\\d{4}$", "^x?y+z*$"];

const NAMES: [&str; 8] = ["id", "name", "kind", "größe", "a b", "x/y", "tags", "next"];

/// Random numbers by seed: SplitMix64.
pub(super) struct SchemaRng(u64);

impl SchemaRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }

    fn chance(&mut self) -> bool {
        self.below(2) == 0
    }

    fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len() as u64) as usize]
    }
}

/// A schema whose texts are short. It can always be satisfied.
pub(super) fn schema(rng: &mut SchemaRng) -> Value {
    let definitions = json!({
        "leaf": leaf(rng),
        "pair": {"type": "array", "prefixItems": [leaf(rng), leaf(rng)], "minItems": 2, "maxItems": 2},
        "list": {
            "type": "object", "required": ["value"], "additionalProperties": false,
            "properties": {
                "value": leaf(rng), "rest": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]},
            },
        },
    });
    let mut root = match rng.below(3) {
        0 => array(rng, 0),
        _ => object(rng, 0),
    };
    root["$defs"] = definitions;
    root
}

fn any(rng: &mut SchemaRng, depth: usize) -> Value {
    if depth >= DEPTH_MAX {
        return leaf(rng);
    }
    match rng.below(8) {
        0 | 1 => object(rng, depth),
        2 => array(rng, depth),
        3 => {
            let count = 2 + rng.below(2);
            json!({"anyOf": (0..count).map(|_| any(rng, depth + 1)).collect::<Vec<_>>()})
        }
        4 => json!({"$ref": format!("#/$defs/{}", rng.pick(&["leaf", "pair", "list"]))}),
        _ => leaf(rng),
    }
}

fn leaf(rng: &mut SchemaRng) -> Value {
    match rng.below(10) {
        0 => json!({"type": "string", "pattern": rng.pick(&PATTERNS)}),
        1 | 2 => {
            let least = rng.below(3);
            json!({"type": "string", "minLength": least, "maxLength": least + rng.below(8)})
        }
        3 => {
            let least = rng.below(2_000) as i64 - 1_000;
            json!({"type": "integer", "minimum": least, "maximum": least + 20 + rng.below(5_000) as i64})
        }
        4 => {
            let step = 2 + rng.below(9);
            json!({"type": "integer", "minimum": 0, "exclusiveMaximum": 1_000, "multipleOf": step})
        }
        5 => {
            let least = rng.below(400) as f64 / 4.0;
            match rng.below(4) {
                // Any number of digits may follow the point.
                0 => json!({"type": "number", "minimum": least - 50.0, "maximum": least - 37.5}),
                _ => json!({"type": "number", "minimum": least, "maximum": least + 12.5, "multipleOf": 0.25}),
            }
        }
        6 => json!({"type": rng.pick(&["boolean", "null"])}),
        7 => json!({"enum": ["north", "south", 7, 2.5, null, true, "a \"b\" \\ é\n"]}),
        8 => json!({"const": ["fixed", {"deep": [1, "two"]}]}),
        _ => json!({"type": ["string", "null", "boolean"], "maxLength": 1 + rng.below(5)}),
    }
}

fn array(rng: &mut SchemaRng, depth: usize) -> Value {
    let least = rng.below(3);
    let most = least + rng.below(3);
    json!({"type": "array", "items": any(rng, depth + 1), "minItems": least, "maxItems": most})
}

fn object(rng: &mut SchemaRng, depth: usize) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for _ in 0..1 + rng.below(4) {
        let name = rng.pick(&NAMES);
        properties.insert(name.to_owned(), any(rng, depth + 1));
        if rng.chance() && !required.contains(&name) {
            required.push(name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}
