//! The suite: texts of the built-in model for hundreds of generated schemas, drawn at temperature 1. Each of them that
//! ends by itself is valid. Another implementation of JSON Schema decides that.
//!
//! `BATON_SCHEMA_SEED=7 cargo test -p baton-engine --test handoff suite -- --nocapture` takes other schemas.

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use super::all_at_once;
use super::schemas::{SchemaRng, schema};
use crate::harness::cluster::{Node, fresh_id, options, same_choices};

/// Schemas of one run.
const SCHEMAS: u64 = 320;

/// Requests that run at once.
const BATCH: usize = 16;

/// Whether a text may have whitespace between values.
fn has_whitespace(number: u64) -> bool {
    number.is_multiple_of(4)
}

/// A request for a text of the schema.
fn request(number: u64, schema: &Value) -> Value {
    let question = "Alice lives in Paris. Bob is 38 years old. The red box holds a key. Tell me everything.";
    let mut body = json!({
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 400, "temperature": 1, "seed": number,
    });
    if has_whitespace(number) {
        let format = json!({"type": "json_schema", "json_schema": {"name": "generated", "schema": schema}});
        body["response_format"] = format;
    } else {
        body["structured_outputs"] = json!({"json": schema, "disable_any_whitespace": true});
    }
    body
}

/// Checks one answer. Returns whether it ended by itself, and its tokens.
fn check(schema: &Value, answer: &Value) -> (bool, u64) {
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().expect("a text");
    let tokens = answer["usage"]["completion_tokens"].as_u64().expect("a count");
    if choice["finish_reason"] != "stop" {
        return (false, tokens);
    }
    let parsed: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}\nof {schema}"));
    let validator = jsonschema::validator_for(schema).expect("a schema");
    assert!(validator.is_valid(&parsed), "{text}\nis not of {schema}");
    (true, tokens)
}

#[test]
fn texts_of_generated_schemas_are_valid() {
    let seed: u64 = std::env::var("BATON_SCHEMA_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let mut options = options(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo"), Role::Both);
    options.max_num_batched_tokens = 256;
    options.kv_blocks = Some(2_048);
    let node = Node::start(options);
    let (mut ended, mut tokens) = ([0, 0], 0);
    let numbers: Vec<u64> = (0..SCHEMAS).collect();
    for batch in numbers.chunks(BATCH) {
        let schemas: Vec<Value> =
            batch.iter().map(|number| schema(&mut SchemaRng::new((seed << 32) | number))).collect();
        let bodies: Vec<Value> =
            batch.iter().zip(&schemas).map(|(number, schema)| request(*number, schema)).collect();
        let answers = all_at_once(&node, &bodies);
        for ((number, schema), answer) in batch.iter().zip(&schemas).zip(&answers) {
            let (by_itself, count) = check(schema, answer);
            ended[usize::from(has_whitespace(*number))] += u64::from(by_itself);
            tokens += count;
        }
        // One of each batch alone: the same bits.
        same_choices(&answers[0], &node.generate(&fresh_id(), &bodies[0]).ok());
    }
    node.is_clean();
    let [dense, spaced] = ended;
    eprintln!(
        "seed {seed}: {SCHEMAS} schemas, {tokens} tokens; {dense} of {} texts without and {spaced} of {} with \
         whitespace ended by themselves and are valid",
        SCHEMAS * 3 / 4,
        SCHEMAS / 4
    );
    // The others ran into `max_tokens`: the model goes on with digits, spaces or items.
    assert!(dense * 3 >= SCHEMAS * 3 / 4 * 2, "only {dense} texts ended within their tokens");
}
