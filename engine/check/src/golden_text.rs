//! Checks of tokenizer, chat template and sampling against golden files made with `transformers`.
//!
//! A golden file is JSON: `tokenizer` (round trips), `prompts` (of kind `chat`: messages, rendering, ids) and
//! `sampling` (distributions after the warpers). Each check returns every case by name, passed or not, so that a
//! report can count them.

use std::sync::Arc;
use std::time::SystemTime;

use baton_openai::{Endpoint, GenerateRequest, Input, ParseLimits, SamplingOptions};
use serde_json::{Map, Value, json};

use baton_engine::model::chat_template::ChatTemplate;
use baton_engine::model::detokenizer::Detokenizer;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::tokenizer::{DecodeMode, SpecialTokens, Tokenizer};
use baton_engine::sampling::{SamplingParams, TokenCounts, TokenPosition, distribution};

/// A case's name, and its error if it failed.
pub type GoldenTextCase = (String, Result<(), String>);

/// Upper bound of tokens for the texts of a golden file.
const MAX_TOKENS: usize = 1 << 20;
/// Largest error of a probability. Both are computed from the same float32 logits.
const PROBABILITY_MAX_ERROR: f64 = 1e-5;

/// Round trips: encoding with and without special tokens, decoding, and the stream of every prefix.
#[must_use]
pub fn check_tokenizer(golden: &Value, tokenizer: &Arc<Tokenizer>) -> Vec<GoldenTextCase> {
    let trips = golden["tokenizer"].as_array().map_or(&[][..], Vec::as_slice);
    trips
        .iter()
        .enumerate()
        .map(|(i, trip)| (format!("tokenizer {i}"), round_trip(trip, tokenizer)))
        .collect()
}

fn round_trip(trip: &Value, tokenizer: &Arc<Tokenizer>) -> Result<(), String> {
    let text = string(trip, "text")?;
    let encode = |special| tokenizer.encode(text, special, MAX_TOKENS).map_err(|error| error.to_string());
    let (ids, plain) = (ids(trip, "ids")?, ids(trip, "ids_no_special")?);
    same("ids", &encode(SpecialTokens::Add)?, &ids)?;
    same("ids_no_special", &encode(SpecialTokens::AsWritten)?, &plain)?;
    let decoded = |decode| tokenizer.decode(&ids, decode);
    same("decoded", decoded(DecodeMode::SkipSpecial).as_str(), string(trip, "decoded")?)?;
    same("decoded_with_special", decoded(DecodeMode::All).as_str(), string(trip, "decoded_with_special")?)?;
    let prefixes = trip["prefixes"].as_array().ok_or("no `prefixes`")?;
    for (last, prefix) in prefixes.iter().enumerate() {
        let mut stream = Detokenizer::new(Arc::clone(tokenizer), DecodeMode::All);
        let mut text: String = plain[..=last].iter().map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish());
        let prefix = prefix.as_str().ok_or("a prefix is not a string")?;
        // A stream does not take back a character whose bytes were complete (see detokenizer.rs).
        if tokenizer.is_byte_level() || !prefix.ends_with(char::REPLACEMENT_CHARACTER) {
            same(&format!("prefix of {} tokens", last + 1), text.as_str(), prefix)?;
        }
    }
    Ok(())
}

/// Renderings of the golden conversations, and their tokens.
#[must_use]
pub fn check_chat(golden: &Value, tokenizer: &Tokenizer, template: &ChatTemplate) -> Vec<GoldenTextCase> {
    let prompts = golden["prompts"].as_array().map_or(&[][..], Vec::as_slice);
    let chats = prompts.iter().enumerate().filter(|(_, prompt)| prompt["kind"] == "chat");
    chats.map(|(i, prompt)| (format!("chat {i}"), rendering(prompt, tokenizer, template))).collect()
}

fn rendering(prompt: &Value, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<(), String> {
    let mut kwargs = prompt["template_kwargs"].as_object().cloned().unwrap_or_default();
    let tools = kwargs.shift_remove("tools").unwrap_or_default();
    // Parsed as a client's request.
    let body = json!({"messages": prompt["messages"], "tools": tools, "chat_template_kwargs": kwargs});
    let Value::Object(body) = body else { return Err("not an object".into()) };
    let request = GenerateRequest::from_map(Endpoint::Chat, &body, &ParseLimits::default());
    let Input::Chat(chat) = request.map_err(|error| error.to_string())?.input else {
        return Err("not a conversation".into());
    };
    let text = template.render(&chat, SystemTime::UNIX_EPOCH).map_err(|error| error.to_string())?;
    same("text", text.as_str(), string(prompt, "text")?)?;
    let encoded = tokenizer.encode(&text, SpecialTokens::AsWritten, MAX_TOKENS);
    same("ids", &encoded.map_err(|error| error.to_string())?, &ids(prompt, "ids")?)
}

/// Sampling distributions. `logits(prompt, step)` returns the row of a golden case, or `None` if the row is unknown:
/// such cases are skipped.
#[must_use]
pub fn check_sampling(
    golden: &Value,
    mut logits: impl FnMut(usize, usize) -> Option<Vec<f32>>,
) -> Vec<GoldenTextCase> {
    let mut cases = Vec::new();
    for entry in golden["sampling"].as_array().map_or(&[][..], Vec::as_slice) {
        let (prompt, step) = (index(entry, "prompt"), index(entry, "step"));
        let Some(row) = logits(prompt, step) else { continue };
        for case in entry["cases"].as_array().map_or(&[][..], Vec::as_slice) {
            let name = format!("sampling {prompt}.{step} {}", case["params"]);
            let counts = counts(golden, prompt, step);
            cases.push((name, counts.and_then(|counts| compare(case, &row, &counts))));
        }
    }
    cases
}

fn counts(golden: &Value, prompt: usize, step: usize) -> Result<TokenCounts, String> {
    let prompt = &golden["prompts"][prompt];
    let mut counts = TokenCounts::new(&ids(prompt, "ids")?);
    ids(&prompt["f32"], "greedy_ids")?.iter().take(step).for_each(|id| counts.push(*id));
    Ok(counts)
}

fn compare(case: &Value, row: &[f32], counts: &TokenCounts) -> Result<(), String> {
    let params = case["params"].as_object().cloned().unwrap_or_default();
    let params = params_of(params)?;
    let place = TokenPosition { position: 0, generated: 2 };
    let ours = distribution(row, &params, counts, place);
    same("kept", &ours.len(), &index(case, "kept"))?;
    let probabilities = case["probs"].as_array().ok_or("no `probs`")?;
    for (id, golden) in ids(case, "ids")?.iter().zip(probabilities) {
        let golden = golden.as_f64().ok_or("a probability is not a number")?;
        let ours = ours.iter().find(|(ours, _)| ours == id).map_or(0.0, |(_, probability)| *probability);
        if (ours - golden).abs() > PROBABILITY_MAX_ERROR {
            return Err(format!("probability of {id}: {ours}, golden {golden}"));
        }
    }
    Ok(())
}

/// The case's parameters, parsed as a request. Parameters without a value are off, as in the golden run.
fn params_of(mut fields: Map<String, Value>) -> Result<SamplingParams, String> {
    fields.insert("prompt".into(), Value::from("x"));
    let request = GenerateRequest::from_map(Endpoint::Completions, &fields, &ParseLimits::default());
    let request = request.map_err(|error| error.to_string())?;
    debug_assert_ne!(request.sampling, SamplingOptions::default(), "every case sets something");
    Ok(SamplingParams::resolve(&request, &GenerationDefaults::default(), &[], 0))
}

fn string<'a>(value: &'a Value, name: &str) -> Result<&'a str, String> {
    value[name].as_str().ok_or_else(|| format!("no `{name}`"))
}

fn index(value: &Value, name: &str) -> usize {
    value[name].as_u64().map_or(usize::MAX, |number| number as usize)
}

fn ids(value: &Value, name: &str) -> Result<Vec<u32>, String> {
    serde_json::from_value(value[name].clone()).map_err(|error| format!("`{name}`: {error}"))
}

fn same<T: PartialEq + std::fmt::Debug + ?Sized>(what: &str, ours: &T, golden: &T) -> Result<(), String> {
    if ours == golden { Ok(()) } else { Err(format!("{what}: {ours:?}, golden {golden:?}")) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_engine::model::ModelFiles;

    use super::*;

    /// Files of a text fixture: `llama3`, `qwen3` or `sentencepiece`.
    fn fixture_files(name: &str) -> ModelFiles {
        ModelFiles::Dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/text").join(name))
    }

    fn fixture(name: &str) -> (Arc<Tokenizer>, ChatTemplate) {
        let files = fixture_files(name);
        let tokenizer = Tokenizer::load(&files).expect("the fixture has a tokenizer");
        let template = ChatTemplate::load(&files, &tokenizer).expect("the fixture has a template");
        (Arc::new(tokenizer), template)
    }

    fn fixture_json(name: &str, file: &str) -> Value {
        let bytes = fixture_files(name).open(file).expect("readable").expect("there");
        serde_json::from_slice(&bytes).expect("JSON")
    }

    fn passes(cases: &[GoldenTextCase], least: usize) {
        let failed: Vec<_> = cases.iter().filter(|(_, result)| result.is_err()).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(cases.len() >= least, "only {} cases", cases.len());
    }

    #[test]
    fn texts_round_trip_as_in_transformers() {
        for name in ["llama3", "qwen3", "sentencepiece"] {
            let (tokenizer, _) = fixture(name);
            passes(&check_tokenizer(&fixture_json(name, "golden.json"), &tokenizer), 12);
        }
    }

    #[test]
    fn conversations_render_as_in_transformers() {
        for name in ["llama3", "qwen3"] {
            let (tokenizer, template) = fixture(name);
            passes(&check_chat(&fixture_json(name, "golden.json"), &tokenizer, &template), 4);
        }
    }

    #[test]
    fn each_wrong_golden_value_fails_one_case() {
        let (tokenizer, template) = fixture("qwen3");
        let mut golden = fixture_json("qwen3", "golden.json");
        golden["tokenizer"][0]["ids"][0] = json!(1);
        golden["tokenizer"][1]["prefixes"][3] = json!("nonsense");
        golden["prompts"][0]["text"] = json!("nonsense");
        let failed = |cases: Vec<GoldenTextCase>| cases.iter().filter(|(_, result)| result.is_err()).count();
        assert_eq!(failed(check_tokenizer(&golden, &tokenizer)), 2);
        assert_eq!(failed(check_chat(&golden, &tokenizer, &template)), 1);
    }

    #[test]
    fn sampling_distributions_match_transformers() {
        for name in ["llama3", "qwen3"] {
            let golden = fixture_json(name, "sampling.json");
            let logits: Vec<f32> = serde_json::from_value(golden["row"].clone()).expect("numbers");
            let cases = check_sampling(&golden, |_, _| Some(logits.clone()));
            passes(&cases, 6);
            assert_eq!(cases.len(), 6);
            // The check can fail: another row has another distribution.
            let other: Vec<f32> = logits.iter().rev().copied().collect();
            let other = check_sampling(&golden, |_, _| Some(other.clone()));
            assert!(other.iter().all(|(_, result)| result.is_err()));
        }
    }
}
