//! The limits of one engine's texts: end-of-text tokens, seeds, the shortest text, the longest context, and the
//! number of texts in a request.

use std::path::Path;

use baton_engine::engine::Engine;
use baton_engine::run::options::{Role, StartError};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::cluster::{LLAMA, Node, QWEN2, QWEN3, options, prompt, with};

/// A copy of the Qwen 3 fixture with changes: file name and changed JSON fields; `None` deletes the file.
pub(crate) fn checkpoint(changes: &[(&str, Option<Value>)]) -> TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(QWEN3);
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(from).expect("the fixture is there") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("it can be copied");
    }
    for (name, change) in changes {
        let path = folder.path().join(name);
        let Some(change) = change else {
            std::fs::remove_file(path).expect("it is there");
            continue;
        };
        let text = std::fs::read_to_string(&path).expect("it is there");
        let mut fields: Value = serde_json::from_str(&text).expect("JSON");
        for (field, value) in change.as_object().expect("fields") {
            fields[field] = value.clone();
        }
        std::fs::write(path, fields.to_string()).expect("it can be written");
    }
    folder
}

fn engine_of(folder: &TempDir) -> Node {
    Node::start(options(folder.path().to_str().expect("UTF-8"), Role::Both))
}

/// The end of a text of at most four tokens, in which this token is by far the likeliest.
#[track_caller]
fn ended_by(engine: &Node, token: u32) -> (String, u64) {
    let body = json!({
        "prompt": prompt(1, 12), "max_tokens": 4, "temperature": 0, "logit_bias": {token.to_string(): 100},
    });
    let reply = engine.post("/v1/completions", &body).ok();
    let reason = reply["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned();
    (reason, reply["usage"]["completion_tokens"].as_u64().expect("a count"))
}

/// `<|im_end|>`, in the fixture's tokenizer.
const OF_TOKENIZER: u32 = 507;

#[test]
fn the_tokenizers_end_of_text_ends_a_text_beside_that_of_the_generation_config_or_else_the_config() {
    let (stop, length) = (("stop".to_owned(), 1), ("length".to_owned(), 4));
    let [of_config, of_generation] = [300, 301];
    let config = ("config.json", Some(json!({"eos_token_id": of_config})));
    let generation = ("generation_config.json", Some(json!({"eos_token_id": of_generation})));
    let folder = checkpoint(&[config.clone(), generation]);
    let engine = engine_of(&folder);
    assert_eq!(ended_by(&engine, OF_TOKENIZER), stop);
    assert_eq!(ended_by(&engine, of_generation), stop);
    assert_eq!(ended_by(&engine, of_config), length, "the generation config replaces it, as in vLLM");
    assert_eq!(ended_by(&engine, 302), length);

    let folder = checkpoint(&[config, ("generation_config.json", None)]);
    let engine = engine_of(&folder);
    assert_eq!(ended_by(&engine, OF_TOKENIZER), stop);
    assert_eq!(ended_by(&engine, of_config), stop);

    // Without any: the engine starts, and texts end at their limit.
    let no_id = ("config.json", Some(json!({"eos_token_id": null})));
    let no_name = ("tokenizer_config.json", Some(json!({"eos_token": null})));
    let folder = checkpoint(&[no_id, no_name, ("generation_config.json", None)]);
    assert_eq!(ended_by(&engine_of(&folder), OF_TOKENIZER), length);
}

#[test]
fn a_generation_config_without_a_bound_leaves_the_rest_of_the_context_to_a_chat() {
    let folder = checkpoint(&[("generation_config.json", Some(json!({"max_new_tokens": -1})))]);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": true});
    let reply = engine_of(&folder).post("/v1/chat/completions", &chat).ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["total_tokens"], 160);
}

/// The tokens of each choice.
#[track_caller]
fn tokens(engine: &Node, body: &Value) -> Vec<Value> {
    let reply = engine.post("/v1/completions", body).ok();
    let choices = reply["choices"].as_array().expect("choices").clone();
    choices.into_iter().map(|choice| choice["token_ids"].clone()).collect()
}

#[test]
fn every_prompt_of_a_seeded_request_draws_as_alone_and_choices_increment_the_seed() {
    let engine = Node::start(options(LLAMA, Role::Both));
    let (one, other) = (prompt(1, 12), prompt(2, 9));
    let body = json!({
        "prompt": one, "max_tokens": 24, "temperature": 2, "top_k": 0, "top_p": 1, "seed": 7, "ignore_eos": true,
        "return_token_ids": true,
    });
    let alone = [&one, &other].map(|prompt| tokens(&engine, &with(&body, "prompt", json!(prompt))));
    let together = tokens(&engine, &with(&body, "prompt", json!([one, other, one])));
    assert_eq!(together, [&alone[0][..], &alone[1], &alone[0]].concat());
    // As in vLLM, choice 1 has the next seed.
    let two = tokens(&engine, &with(&with(&body, "prompt", json!([one, other])), "n", json!(2)));
    let next = [&one, &other]
        .map(|prompt| tokens(&engine, &with(&with(&body, "prompt", json!(prompt)), "seed", json!(8))));
    assert_eq!(two, [&alone[0][..], &next[0], &alone[1], &next[1]].concat());
    assert_ne!(alone[0], next[0]);
    // Without a seed, or with -1, no draw is repeated.
    for seed in [Value::Null, json!(-1)] {
        let body = with(&with(&body, "prompt", json!([one, one])), "seed", seed);
        let drawn = [tokens(&engine, &body), tokens(&engine, &body)].concat();
        assert!(drawn.iter().enumerate().all(|(at, tokens)| !drawn[..at].contains(tokens)), "{drawn:?}");
    }
}

#[test]
fn a_stop_string_counts_from_the_token_after_min_tokens_on() {
    let engine = Node::start(options(LLAMA, Role::Both));
    // One letter repeatedly.
    let letter = engine.post("/tokenize", &json!({"prompt": "a", "add_special_tokens": false})).ok();
    let bias = json!({letter["tokens"][0].to_string(): 100});
    let choice_with = |min_tokens: u32, stop: &str| {
        let body = json!({
            "prompt": prompt(1, 12), "max_tokens": 8, "temperature": 0, "logit_bias": bias, "stop": stop,
            "min_tokens": min_tokens, "ignore_eos": true,
        });
        let reply = engine.post("/v1/completions", &body).ok();
        let choice = &reply["choices"][0];
        (choice["text"].as_str().expect("a text").to_owned(), reply["usage"]["completion_tokens"].clone())
    };
    let wanted = |text: &str, count: u32| (text.to_owned(), json!(count));
    assert_eq!(choice_with(0, "a"), wanted("", 1));
    assert_eq!(choice_with(1, "a"), wanted("a", 2));
    assert_eq!(choice_with(3, "a"), wanted("aaa", 4));
    // A stop string that begins among the first tokens ends the text too.
    assert_eq!(choice_with(3, "aa"), wanted("aa", 4));
    assert_eq!(choice_with(8, "a"), wanted("aaaaaaaa", 8));
}

#[test]
fn a_context_longer_than_the_models_is_refused_at_start_and_yarn_stretches_the_models() {
    let start = |model: &str, wanted: Option<usize>| {
        let mut options = options(model, Role::Both);
        options.max_model_len = wanted;
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(async { Engine::start(options, &mut |_| {}).map(drop) })
    };
    // 64 positions times 4, although `max_position_embeddings` is 160.
    let yarn = Node::start(options(QWEN2, Role::Both));
    assert_eq!(yarn.get("/v1/models").ok()["data"][0]["max_model_len"], 256);
    for (model, most) in [(LLAMA, 160), (QWEN2, 256)] {
        match start(model, Some(most + 1)) {
            Err(StartError::Options(what)) => {
                assert!(what.contains("--max-model-len") && what.contains(&most.to_string()), "{what}");
            }
            Err(error) => panic!("{error}"),
            Ok(()) => panic!("{model} started"),
        }
    }
}

#[test]
fn a_request_of_more_sequences_than_the_queue_takes_is_a_400_at_once() {
    let mut narrow = options(LLAMA, Role::Both);
    narrow.max_waiting = 4;
    let engine = Node::start(narrow);
    let body = json!({"prompt": vec![prompt(1, 4); 4], "max_tokens": 1});
    engine.post("/v1/completions", &body).ok();
    for (field, value, param) in [("prompt", json!(vec![prompt(1, 4); 5]), "prompt"), ("n", json!(2), "n")] {
        let reply = engine.post("/v1/completions", &with(&body, field, value));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.text);
        assert!(reply.text.contains("queues 4"), "{}", reply.text);
    }
    engine.is_clean();
}
