//! Constraints behind reasoning, and budgets of reasoning: from one engine and from two, whole and streamed.
//!
//! The fixture's weights are random. Biases choose its tokens where a test needs certain ones.

use baton_engine::model::output::{FormatChoice, ReasoningFormat};
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::all_at_once;
use crate::harness::cluster::{Cluster, Node, QWEN3, fresh_id, options, with};
use crate::requests::texts::checkpoint;

/// Tokens of the fixture.
const OPEN: u32 = 510;
const CLOSE: u32 = 511;
const EOS: u32 = 507;
/// Letters that no prompt contains: penalties count its tokens, too.
const B: u32 = 65;
const C: u32 = 66;
const Y: u32 = 88;
/// Rows of the fixture's vocabulary.
const VOCAB: u32 = 536;

/// The fixture with a template that opens reasoning.
fn opened() -> TempDir {
    checkpoint(&[
        ("chat_template.jinja", None),
        ("tokenizer_config.json", Some(json!({"chat_template": "{{ messages[0]['content'] }}<think>\n"}))),
    ])
}

/// The template has no closing tag.
fn qwen3(options: &mut EngineOptions) {
    options.output.reasoning = FormatChoice::Is(ReasoningFormat::Qwen3);
}

fn path(folder: &TempDir) -> &str {
    folder.path().to_str().expect("UTF-8")
}

fn engine(folder: &TempDir) -> Node {
    let mut options = options(path(folder), Role::Both);
    qwen3(&mut options);
    Node::start(options)
}

/// A chat whose free tokens are these, in this order: each is far likelier than the next one, until it has occurred.
fn scripted(tokens: &[u32]) -> Value {
    let mut bias: serde_json::Map<String, Value> =
        (0..VOCAB).map(|id| (id.to_string(), json!(-100))).collect();
    for (at, token) in tokens.iter().enumerate() {
        bias.insert(token.to_string(), json!(100 - 20 * at as i64));
    }
    json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "repetition_penalty": 10,
        "logit_bias": bias, "max_tokens": 16, "return_token_ids": true,
    })
}

/// A chat whose tokens are drawn, and which never closes its reasoning by itself.
fn drawn(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": seed, "ignore_eos": true,
        "logit_bias": {CLOSE.to_string(): -100}, "max_tokens": 24, "return_token_ids": true, "logprobs": true,
    })
}

fn ids(reply: &Value, choice: usize) -> Vec<u32> {
    serde_json::from_value(reply["choices"][choice]["token_ids"].clone()).expect("token ids")
}

fn reasoned(reply: &Value) -> u64 {
    reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count")
}

/// Content and reasoning of a stream.
fn streamed(node: &Node, body: &Value) -> (String, String) {
    let stream = node.generate(&fresh_id(), &with(body, "stream", json!(true)));
    let (mut content, mut reasoning) = (String::new(), String::new());
    for data in stream.text.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let chunk: Value = serde_json::from_str(&format!("{{{data}")).expect("JSON");
        let delta = &chunk["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
    }
    (content, reasoning)
}

/// The answer of one engine, which that of two equals, and its stream.
#[track_caller]
fn everywhere(cluster: &Cluster, body: &Value) -> Value {
    let reply = cluster.agrees(body);
    let message = &reply["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    assert_eq!(streamed(&cluster.one, body), (text("content"), text("reasoning_content")), "{reply}");
    reply
}

#[test]
fn a_constraint_begins_behind_the_reasoning_that_the_model_opens() {
    let cluster = Cluster::of(QWEN3);
    let body = scripted(&[OPEN, EOS, B, C, CLOSE]);
    let body = with(&body, "structured_outputs", json!({"choice": ["yes", "no"]}));
    let reply = everywhere(&cluster, &body);
    let (message, finish) = (&reply["choices"][0]["message"], &reply["choices"][0]["finish_reason"]);
    assert_eq!((message["reasoning_content"].as_str(), finish), (Some("bc"), &json!("stop")), "{reply}");
    assert!(["yes", "no"].contains(&message["content"].as_str().expect("a text")), "{reply}");
    // The likelier end of the text is not permitted before the content.
    assert_eq!((&ids(&reply, 0)[..4], reasoned(&reply)), (&[OPEN, B, C, CLOSE][..], 2), "{reply}");

    // A model that does not reason answers at once.
    let direct = with(&scripted(&[Y]), "structured_outputs", json!({"choice": ["yes", "no"]}));
    let reply = everywhere(&cluster, &direct);
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], "yes", "{reply}");
    assert!(message["reasoning_content"].is_null() && reasoned(&reply) == 0, "{reply}");
    cluster.is_clean();
}

#[test]
fn a_forced_call_follows_the_reasoning() {
    let folder = opened();
    let engine = engine(&folder);
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"], "additionalProperties": false});
    let mut body = scripted(&[B, CLOSE]);
    body["tools"] = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    body["max_tokens"] = json!(80);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let reply = engine.generate(&fresh_id(), &with(&body, "tool_choice", choice)).ok();
        let message = &reply["choices"][0]["message"];
        let call = &message["tool_calls"][0]["function"];
        assert_eq!(
            (&message["reasoning_content"], &call["name"]),
            (&json!("b"), &json!("weather")),
            "{reply}"
        );
        let arguments = call["arguments"].as_str().expect("a text");
        assert_eq!(serde_json::from_str::<Value>(arguments).ok(), Some(json!({"city": "Paris"})), "{reply}");
    }
    engine.is_clean();
}

#[test]
fn reasoning_that_is_never_closed_ends_with_the_tokens() {
    let folder = opened();
    let engine = engine(&folder);
    let body = with(&drawn(1), "response_format", json!({"type": "json_object"}));
    let reply = engine.generate(&fresh_id(), &body).ok();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["finish_reason"], reasoned(&reply)), (&json!("length"), 24), "{reply}");
    assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), "", "{reply}");
    engine.is_clean();
}

#[test]
fn a_budget_ends_the_reasoning_at_its_token_on_every_path() {
    let folder = opened();
    let cluster = Cluster::each(path(&folder), qwen3);
    for budget in [0, 1, 7] {
        let body = with(&drawn(budget), "thinking_token_budget", json!(budget));
        let free = everywhere(&cluster, &body);
        let tokens = ids(&free, 0);
        let ends = tokens.iter().position(|token| *token == CLOSE);
        assert_eq!((ends, reasoned(&free)), (Some(budget as usize), budget), "{free}");
        // The tokens before it are those of the response without a budget.
        let unbounded = cluster.one.generate(&fresh_id(), &drawn(budget)).ok();
        assert_eq!(tokens[..budget as usize], ids(&unbounded, 0)[..budget as usize]);
        let body = with(&body, "structured_outputs", json!({"choice": ["yes", "no"]}));
        let constrained = everywhere(&cluster, &body);
        let content = &constrained["choices"][0]["message"]["content"];
        assert!(["yes", "no"].contains(&content.as_str().expect("a text")), "{constrained}");
        assert_eq!(constrained["choices"][0]["finish_reason"], "stop");
        assert_eq!(ids(&constrained, 0)[..=budget as usize], tokens[..=budget as usize]);
    }
    // Each choice has the budget for itself, and none is the bound without one.
    let body = with(&with(&drawn(3), "thinking_token_budget", json!(4)), "n", json!(3));
    let reply = cluster.agrees(&body);
    for choice in 0..3 {
        assert_eq!(ids(&reply, choice).iter().position(|token| *token == CLOSE), Some(4), "{reply}");
    }
    assert_eq!(reasoned(&reply), 12);
    let unbounded = cluster.agrees(&with(&drawn(3), "thinking_token_budget", json!(-1)));
    assert_eq!(reasoned(&unbounded), 24);
    cluster.is_clean();
}

#[test]
fn bounded_reasoning_in_a_batch_has_the_tokens_of_each_response_alone() {
    let folder = opened();
    let engine = engine(&folder);
    let body = |number: u64| {
        let body = with(&drawn(number), "thinking_token_budget", json!(number % 5));
        match number % 3 {
            0 => body,
            1 => with(&body, "guided_regex", json!("[a-c]{4,8}!")),
            _ => drawn(number),
        }
    };
    let bodies: Vec<Value> = (0..16).map(body).collect();
    let alone: Vec<Value> = bodies.iter().map(|body| engine.generate(&fresh_id(), body).ok()).collect();
    for (together, alone) in all_at_once(&engine, &bodies).iter().zip(&alone) {
        assert_eq!(together["choices"], alone["choices"]);
        assert_eq!(
            together["usage"]["completion_tokens_details"],
            alone["usage"]["completion_tokens_details"]
        );
    }
    engine.is_clean();
}

#[test]
fn a_device_draws_the_free_tokens_of_bounded_reasoning() {
    let folder = opened();
    let mut options = options(path(&folder), Role::Both);
    qwen3(&mut options);
    options.device = baton_engine_check::SOFTWARE;
    let engine = Node::start(options);
    for budget in [0, 5] {
        let body = with(&drawn(budget), "thinking_token_budget", json!(budget));
        // Without log-probabilities and bias the device chooses.
        let body = with(&with(&body, "logprobs", json!(false)), "logit_bias", json!({}));
        let reply = engine.generate(&fresh_id(), &body).ok();
        let ends = ids(&reply, 0).iter().position(|token| *token == CLOSE);
        assert!(ends.is_some_and(|ends| ends <= budget as usize), "{reply}");
    }
    engine.is_clean();
}

#[test]
fn a_budget_that_leaves_no_content_is_refused_by_name() {
    let cluster = Cluster::of(QWEN3);
    let body = with(&drawn(1), "thinking_token_budget", json!(24));
    let handoff = cluster.p.open_lease(&body);
    for reply in [cluster.one.generate(&fresh_id(), &body), cluster.d.decode(&body, &handoff)] {
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!("thinking_token_budget")), "{error}");
    }
    // A request that excludes the closing tag is at fault itself.
    let folder = opened();
    let engine = engine(&folder);
    let allowed =
        with(&with(&drawn(1), "allowed_token_ids", json!([B, C])), "thinking_token_budget", json!(2));
    let reply = engine.generate(&fresh_id(), &allowed);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("thinking_token_budget")));
    engine.is_clean();
    cluster.is_clean();
}

/// The example of `docs/reference/api.md`.
#[test]
fn the_example_of_the_reference_is_answered_as_it_describes() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/api.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, section) = page.split_once("## Reasoning").expect("the section is there");
    let (_, block) = section.split_once("```json\n").expect("an example");
    let example = serde_json::from_str(block.split("```").next().unwrap_or_default()).expect("JSON");
    let budget = with(&example, "logit_bias", json!({CLOSE.to_string(): -100}));
    let folder = opened();
    let engine = engine(&folder);
    let reply = engine.generate(&fresh_id(), &with(&budget, "seed", json!(1))).ok();
    let choice = &reply["choices"][0];
    assert_eq!(reasoned(&reply), example["thinking_token_budget"].as_u64().expect("a number"), "{reply}");
    let content = choice["message"]["content"].as_str().expect("a text");
    assert!(["yes", "no"].contains(&content) && choice["finish_reason"] == "stop", "{reply}");
    engine.is_clean();
}
