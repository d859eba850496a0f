//! Structured output: constrained texts are the same on every path, and the texts of others beside them are, too.

mod reasoning;
mod schemas;
mod suite;

use std::thread;

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{
    BLOCK, Cluster, LLAMA, Node, QWEN2, QWEN3, fresh_id, greedy, options, prompt, same_choices, with,
};

/// A schema whose texts have at most 33 bytes.
fn schema() -> Value {
    json!({
        "type": "object", "required": ["id", "kind", "on"], "additionalProperties": false,
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["left", "right"]},
            "on": {"type": "boolean"},
        },
    })
}

/// A body with one of four constraints. Four numbers are greedy, the next four are drawn.
fn constrained(number: u64) -> Value {
    let constraints = [
        json!({"json": schema(), "disable_any_whitespace": true}),
        json!({"regex": "[a-f]{3,6}-[0-9]{2}!"}),
        json!({"choice": ["north", "north-east", "south"]}),
        json!({"grammar": "start: \"<\" item (\",\" item)? \">\"\nitem: /[a-z]{2,4}/ | \"(\" item \")\""}),
    ];
    let constraint = constraints[number as usize % constraints.len()].clone();
    json!({
        "prompt": prompt(7_000 + number, 2 * BLOCK + 1 + number as usize % 5), "max_tokens": 48,
        "temperature": (number / 4) % 2, "seed": number, "structured_outputs": constraint,
        "return_token_ids": true, "logprobs": 3,
    })
}

/// A text that has ended by itself is one that its constraint permits.
#[track_caller]
fn fits(body: &Value, choice: &Value) {
    if choice["finish_reason"] != "stop" {
        assert_eq!(choice["finish_reason"], "length");
        return;
    }
    let text = choice["text"].as_str().expect("a text");
    let constraint = &body["structured_outputs"];
    if let Some(choices) = constraint["choice"].as_array() {
        assert!(choices.iter().any(|choice| choice == text), "{text}");
    } else if constraint["json"].is_object() {
        let parsed: Value = serde_json::from_str(text).expect(text);
        let validator = jsonschema::validator_for(&constraint["json"]).expect("a schema");
        assert!(validator.is_valid(&parsed), "{text}");
    } else if constraint["regex"].is_string() {
        let (letters, digits) = text.strip_suffix('!').and_then(|text| text.split_once('-')).expect(text);
        assert!((3..=6).contains(&letters.len()) && digits.len() == 2, "{text}");
    } else {
        assert!(text.starts_with('<') && text.ends_with('>'), "{text}");
    }
}

#[test]
fn a_constrained_text_is_the_same_from_two_engines_as_from_one() {
    for model in [LLAMA, QWEN3, QWEN2] {
        let cluster = Cluster::of(model);
        let mut ended = 0;
        for number in 0..8 {
            let body = constrained(number);
            let answer = cluster.agrees(&body);
            fits(&body, &answer["choices"][0]);
            ended += usize::from(answer["choices"][0]["finish_reason"] == "stop");
        }
        assert!(ended > 0, "{model}: no text ended by itself");
        cluster.is_clean();
    }
}

#[test]
fn every_choice_of_a_request_follows_the_constraint_on_its_own() {
    let cluster = Cluster::of(LLAMA);
    for number in 4..8 {
        let body = with(&constrained(number), "n", json!(3));
        let answer = cluster.agrees(&body);
        let choices = answer["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), 3);
        choices.iter().for_each(|choice| fits(&body, choice));
    }
    cluster.is_clean();
}

/// Sends all bodies to an engine at once. Returns the answers in the same order.
fn all_at_once(node: &Node, bodies: &[Value]) -> Vec<Value> {
    thread::scope(|scope| {
        let call = |body| scope.spawn(move || node.generate(&fresh_id(), body).ok());
        let calls: Vec<_> = bodies.iter().map(call).collect();
        calls.into_iter().map(|call| call.join().expect("an answer")).collect()
    })
}

#[test]
fn a_batch_with_constrained_texts_gives_the_bits_of_each_text_alone() {
    let node = Node::start(options(QWEN3, Role::Both));
    let bodies: Vec<Value> = (0..16)
        .map(|number| match number % 2 {
            0 => constrained(number / 2),
            _ => greedy(&prompt(8_000 + number, BLOCK + number as usize), 24),
        })
        .collect();
    let alone: Vec<Value> = bodies.iter().map(|body| node.generate(&fresh_id(), body).ok()).collect();
    for _ in 0..3 {
        for (together, alone) in all_at_once(&node, &bodies).iter().zip(&alone) {
            same_choices(together, alone);
        }
    }
    node.is_clean();
}

#[test]
fn constrained_rows_beside_drawn_ones_on_a_device_follow_their_constraints() {
    let mut on_device = options(LLAMA, Role::Both);
    on_device.device = baton_engine_check::SOFTWARE;
    let node = Node::start(on_device);
    let drawn = |number: u64| {
        json!({
            "prompt": prompt(8_100 + number, 20), "max_tokens": 24, "temperature": 1, "seed": number,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    let bodies: Vec<Value> =
        (0..16).map(|number| if number < 8 { constrained(number) } else { drawn(number) }).collect();
    for (body, answer) in bodies.iter().zip(all_at_once(&node, &bodies)) {
        let choice = &answer["choices"][0];
        if body["structured_outputs"].is_object() {
            fits(body, choice);
        } else {
            assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(24));
        }
    }
    node.is_clean();
}

#[test]
fn a_preempted_text_goes_on_where_its_grammar_was() {
    let long = json!({"regex": "([a-m][n-z]){20}"});
    let body = |number: u64| {
        let body = with(&constrained(number), "structured_outputs", long.clone());
        with(&body, "prompt", json!(prompt(9_000 + number, 2 * BLOCK + 1)))
    };
    let bodies: Vec<Value> = (0..12).map(body).collect();
    let plenty = Node::start(options(LLAMA, Role::Both));
    let alone: Vec<Value> = bodies.iter().map(|body| plenty.generate(&fresh_id(), body).ok()).collect();
    for _ in 0..20 {
        let mut small = options(LLAMA, Role::Both);
        small.kv_blocks = Some(20);
        small.scheduling.growth_reserve = false;
        let node = Node::start(small);
        for (together, alone) in all_at_once(&node, &bodies).iter().zip(&alone) {
            same_choices(together, alone);
        }
        node.is_clean();
        if node.metric("vllm:num_preemptions_total") > 0.0 {
            return;
        }
    }
    panic!("nothing was preempted");
}

#[test]
fn a_stream_contains_the_text_of_the_reply() {
    let node = Node::start(options(LLAMA, Role::Both));
    for number in 0..4 {
        let body = constrained(number);
        let whole = node.generate(&fresh_id(), &body).ok();
        let stream = node.generate(&fresh_id(), &with(&body, "stream", json!(true)));
        let events = stream.text.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
        let mut text = String::new();
        for event in events {
            let event: Value = serde_json::from_str(&format!("{{{event}")).expect("JSON");
            text += event["choices"][0]["text"].as_str().unwrap_or_default();
        }
        assert_eq!(text, whole["choices"][0]["text"].as_str().expect("a text"));
    }
}

#[test]
fn chats_take_openais_response_format() {
    let node = Node::start(options(QWEN3, Role::Both));
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema(), "strict": true}});
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "response_format": format, "max_tokens": 80,
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 1, "seed": 3, "logit_bias": {}, "ignore_eos": true, "min_tokens": 70,
    });
    let answer = node.generate(&fresh_id(), &body).ok();
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().expect("a text");
    if choice["finish_reason"] == "stop" {
        let parsed: Value = serde_json::from_str(text).expect(text);
        let validator = jsonschema::validator_for(&schema()).expect("a schema");
        assert!(validator.is_valid(&parsed), "{text}");
    }
    assert!(text.trim_start().starts_with('{'), "{text}");
}

#[test]
fn a_text_is_continued_from_every_token_as_it_would_have_been() {
    let cluster = Cluster::of(QWEN3);
    for number in 0..4 {
        let body = constrained(number);
        let whole = cluster.one.generate(&fresh_id(), &body).ok()["choices"][0].clone();
        let tokens: Vec<u64> = serde_json::from_value(whole["token_ids"].clone()).expect("token ids");
        let prompt: Vec<u64> = serde_json::from_value(body["prompt"].clone()).expect("token ids");
        for sent in (1..tokens.len()).step_by(2) {
            let so_far = [&prompt[..], &tokens[..sent]].concat();
            let continued = json!({
                "continues": sent, "of": {"structured_outputs": body["structured_outputs"]},
            });
            let mut body = with(&with(&body, "prompt", json!(so_far)), "structured_outputs", continued);
            body["max_tokens"] = json!(48 - sent);
            let rest = cluster.agrees(&body)["choices"][0].clone();
            assert_eq!(rest["token_ids"], json!(tokens[sent..]), "{number}, after {sent}");
            assert_eq!(rest["finish_reason"], whole["finish_reason"]);
        }
    }
    cluster.is_clean();
}

#[test]
fn a_text_that_cannot_become_complete_is_a_400_of_its_field_and_no_stop() {
    let cluster = Cluster::of(LLAMA);
    let body = with(&greedy(&prompt(3, 20), 9), "guided_choice", json!(["north~east"]));
    let tokens = cluster.one.generate(&fresh_id(), &body).ok()["choices"][0]["token_ids"].clone();
    let tokens: Vec<u64> = serde_json::from_value(tokens).expect("token ids");
    assert!(tokens.len() > 1, "{tokens:?}");
    // Without a permitted first token, and without a permitted second one.
    for allowed in [&tokens[1..2], &tokens[..1]] {
        let body = with(&body, "allowed_token_ids", json!(allowed));
        let whole = cluster.one.generate(&fresh_id(), &body);
        let error = &whole.json()["error"];
        assert_eq!((whole.status, &error["param"]), (400, &json!("guided_choice")), "{}", whole.text);
        assert!(error["message"].as_str().is_some_and(|message| message.contains("exclude")), "{error}");
        assert_eq!(whole.header("retry-after"), None, "no engine answers otherwise");
        let stream = cluster.one.generate(&fresh_id(), &with(&body, "stream", json!(true)));
        let error = json!({"error": error}).to_string();
        if allowed == &tokens[1..2] {
            assert_eq!((stream.status, stream.text), (400, error));
        } else {
            let end = format!("data: {error}\n\ndata: [DONE]\n\n");
            assert!(stream.status == 200 && stream.text.ends_with(&end), "{}", stream.text);
            assert!(!stream.text.contains("\"stop\""), "{}", stream.text);
        }
    }
    let first = with(&body, "allowed_token_ids", json!(tokens[..1]));
    let handoff = cluster.p.open_lease(&first);
    let reply = cluster.d.decode(&first, &handoff);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("guided_choice")));
    cluster.is_clean();
}

/// The examples of `docs/reference/structured-output.md`.
#[test]
fn the_examples_of_the_page_are_answered_as_it_describes() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/structured-output.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let examples: Vec<Value> = page
        .split("```json\n")
        .skip(1)
        .map(|rest| serde_json::from_str(rest.split("```").next().unwrap_or_default()).expect("JSON"))
        .collect();
    assert_eq!(examples.len(), 4);
    let node = Node::start(options(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo"), Role::Both));
    for (number, example) in examples.iter().enumerate() {
        let example = with(&with(example, "seed", json!(number)), "return_token_ids", json!(true));
        let answer = node.generate(&fresh_id(), &example).ok();
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).expect("a text");
        assert_eq!(choice["finish_reason"], "stop", "{text}");
        match number {
            0 => {
                let schema = &example["response_format"]["json_schema"]["schema"];
                let parsed: Value = serde_json::from_str(text).expect(text);
                assert!(jsonschema::validator_for(schema).expect("a schema").is_valid(&parsed), "{text}");
            }
            1 => assert!(["yes", "no"].contains(&text), "{text}"),
            2 => assert!(text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_digit()), "{text}"),
            _ => assert!(
                text.contains('+') && text.split('+').all(|part| part.parse::<u8>().is_ok()),
                "{text}"
            ),
        }
    }
}

#[test]
fn a_refused_constraint_is_a_400_that_names_field_and_place_and_leaves_nothing() {
    let cluster = Cluster::of(LLAMA);
    let unsupported = json!({"type": "object", "properties": {"x": {"not": {"type": "string"}}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": unsupported}});
    let field = "response_format.json_schema.schema";
    for (name, value, param, words) in [
        ("response_format", format.clone(), field, "/properties/x/not"),
        ("guided_regex", json!("(a"), "guided_regex", "guided_regex"),
        ("guided_grammar", json!("root ::= x"), "guided_grammar", "`x` is not defined"),
        ("structured_outputs", json!({"choice": []}), "structured_outputs.choice", "1 to 1024"),
        ("structured_outputs", json!({"regex": "a", "grammar": "b"}), "structured_outputs", "regex, grammar"),
    ] {
        let body = with(&greedy(&prompt(1, 20), 4), name, value);
        for reply in [cluster.p.prefill(&fresh_id(), &body), cluster.one.generate(&fresh_id(), &body)] {
            let error = &reply.json()["error"];
            assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{error}");
            assert!(error["message"].as_str().is_some_and(|message| message.contains(words)), "{error}");
        }
    }
    // A decode engine that refuses releases the handoff.
    let body = greedy(&prompt(2, 20), 4);
    let handoff = cluster.p.open_lease(&body);
    let reply = cluster.d.decode(&with(&body, "response_format", format), &handoff);
    assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some(field)));
    cluster.is_clean();
}
