//! Constraints over the vocabularies of the text fixtures: what is permitted, what is refused, and where a text ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_openai::{FinishReason, JsonWhitespace, OutputConstraint};
use llguidance::ParserFactory;
use serde_json::{Value, json};

use super::cancel::CompileControl;
use super::compile::{CompiledGrammar, compile};
use super::state::{GrammarCursor, StatePermit};
use super::*;
use crate::model::tests::fixture;
use crate::model::tokenizer::{DecodeMode, SpecialTokens};

const FIXTURES: [&str; 3] = ["qwen3", "llama3", "sentencepiece"];

/// Longer than any mask takes: a test that needs it fails.
const LONG: Duration = Duration::from_secs(60);

fn service(name: &str) -> GrammarService {
    let (tokenizer, _) = fixture(name);
    let eos: Vec<u32> = tokenizer.eos().into_iter().collect();
    GrammarService::new(&tokenizer, tokenizer.vocab() + 7, &eos)
}

fn states(
    service: &GrammarService,
    constraint: &OutputConstraint,
    stops: &[u32],
    count: usize,
) -> Result<Vec<GrammarState>, GrammarRefusal> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    runtime.block_on(service.states(constraint, stops, Vec::new(), count))
}

fn one(service: &GrammarService, constraint: &OutputConstraint) -> GrammarState {
    states(service, constraint, &[], 1).expect("it can be enforced").remove(0)
}

fn compiled(factory: &ParserFactory, rows: usize, constraint: &OutputConstraint) -> CompiledGrammar {
    compile(factory, rows, constraint, &CompileControl::default()).expect("it can be enforced")
}

fn json_schema(schema: Value) -> OutputConstraint {
    OutputConstraint::Json { schema, whitespace: JsonWhitespace::Omitted }
}

/// Feeds a text. Returns why it ended, and how many of its tokens were permitted.
fn feed(name: &str, state: &mut GrammarState, text: &str) -> (Option<FinishReason>, usize) {
    let (tokenizer, _) = fixture(name);
    // The fixture with SentencePiece adds a space before a text; single bytes are the same everywhere.
    let byte_token = |byte: u8| {
        let found = (0..tokenizer.vocab() as u32).find(|id| tokenizer.bytes(*id) == [byte]);
        found.expect("every byte has a token")
    };
    for (fed, byte) in text.bytes().enumerate() {
        assert_eq!(state.wait(LONG), MaskReadiness::Ready, "{name}, {text:?} at {fed}");
        let token = byte_token(byte);
        if !state.mask().is_some_and(|mask| mask.permits(token)) {
            return (None, fed);
        }
        if let Some(ended) = state.end_after(token, None) {
            return (Some(ended), fed + 1);
        }
    }
    (None, text.len())
}

#[test]
fn each_kind_of_constraint_permits_its_texts_and_ends_them() {
    let object = json!({
        "type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}},
    });
    let stop = Some(FinishReason::Stop);
    for name in FIXTURES {
        let service = service(name);
        for (constraint, good, bad, permitted) in [
            (json_schema(object.clone()), r#"{"a":42}"#, r#"{"a":7}"#, 6),
            (json_schema(json!({"enum": ["x", 3]})), r#""x""#, r#""y""#, 1),
            (OutputConstraint::Regex("^[0-9]{2}-é$".into()), "31-é", "3-", 1),
            (
                OutputConstraint::Choice(vec!["no".into(), "maybe \"\\\n\u{7f}".into()]),
                "maybe \"\\\n\u{7f}",
                "may,",
                3,
            ),
            (
                OutputConstraint::Grammar("root ::= \"a\" b{2}\nb ::= [x-z] | \"(\" b \")\"".into()),
                "a((x))z",
                "ay!",
                2,
            ),
            (
                OutputConstraint::Grammar("start: \"a\" b\nb: \"(\" b \")\" | \"x\"".into()),
                "a((x))",
                "a(x(",
                3,
            ),
        ] {
            let mut state = one(&service, &constraint);
            assert_eq!(feed(name, &mut state, good), (stop, good.len()), "{name}, {constraint:?}");
            let mut state = one(&service, &constraint);
            assert_eq!(feed(name, &mut state, bad), (None, permitted), "{name}, {constraint:?}");
        }
    }
}

#[test]
fn tokens_that_end_a_text_are_permitted_exactly_when_it_is_complete() {
    for name in FIXTURES {
        let (tokenizer, _) = fixture(name);
        let eos = tokenizer.eos().expect("the fixture has one");
        let service = service(name);
        // "b" ends the text as the request's own stop token, and is a part of the language as well.
        let b = (0..tokenizer.vocab() as u32).find(|id| tokenizer.bytes(*id) == b"b").expect("a token");
        let constraint = OutputConstraint::Regex("a+b*".into());
        let mut state = states(&service, &constraint, &[eos, b], 1).expect("it can be enforced").remove(0);
        let permits = |state: &mut GrammarState, token| {
            assert_eq!(state.wait(LONG), MaskReadiness::Ready);
            state.mask().expect("it is ready").permits(token)
        };
        assert!(!permits(&mut state, eos) && !permits(&mut state, b), "{name}");
        assert_eq!(feed(name, &mut state, "a"), (None, 1));
        assert!(permits(&mut state, eos) && permits(&mut state, b), "{name}");
        assert_eq!(state.end_after(eos, None), Some(FinishReason::Stop), "also where EOS is ignored");
    }
}

#[test]
fn a_text_that_completes_at_the_last_permitted_token_ends_with_stop() {
    let service = service("qwen3");
    let (tokenizer, _) = fixture("qwen3");
    let mut state = one(&service, &OutputConstraint::Choice(vec!["y".into(), "yy".into()]));
    let y = tokenizer.encode("y", SpecialTokens::AsWritten, 9).expect("short")[0];
    assert_eq!(state.end_after(y, Some(FinishReason::Stop)), Some(FinishReason::Stop), "a stop token");
    let mut state = one(&service, &OutputConstraint::Choice(vec!["y".into()]));
    assert_eq!(state.end_after(y, Some(FinishReason::Length)), Some(FinishReason::Stop));
    let mut state = one(&service, &OutputConstraint::Choice(vec!["yes".into()]));
    assert_eq!(state.end_after(y, Some(FinishReason::Length)), Some(FinishReason::Length));
}

#[test]
fn a_constraint_that_cannot_be_enforced_is_refused_with_its_place() {
    let service = service("llama3");
    let refused = |constraint: &OutputConstraint| match states(&service, constraint, &[], 1) {
        Err(GrammarRefusal::Invalid(why)) => why,
        other => panic!("{constraint:?}: {other:?}"),
    };
    let inside = json!({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": true}}});
    let why = refused(&json_schema(inside));
    assert!(why.contains("uniqueItems") && why.ends_with("at /properties/x/uniqueItems"), "{why}");
    let dangling = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}});
    assert!(refused(&json_schema(dangling)).contains("at /properties/x/$ref"));
    refused(&json_schema(json!({"type": "integer", "minimum": 3, "maximum": 2})));
    refused(&json_schema(json!({"type": "strung"})));
    let oneof = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
    assert!(refused(&json_schema(oneof)).contains("oneOf"));
    refused(&OutputConstraint::Regex("(a".into()));
    refused(&OutputConstraint::Regex("a\\".into()));
    refused(&OutputConstraint::Regex("(?=a)b".into()));
    assert!(refused(&OutputConstraint::Grammar("root ::= x".into())).contains("`x` is not defined"));
    refused(&OutputConstraint::Grammar("start: missing".into()));
    // Hostile depth and size end with a refusal, not with the thread.
    refused(&OutputConstraint::Regex("(".repeat(16_000) + &")".repeat(16_000)));
    refused(&OutputConstraint::Grammar(format!("start: {}\"a\"{}", "(".repeat(16_000), ")".repeat(16_000))));
    let chain = |n: usize| json!({"$ref": format!("#/$defs/d{n}")});
    let mut defs = serde_json::Map::new();
    for n in 0..500 {
        defs.insert(format!("d{n}"), json!({"anyOf": [chain((n + 1) % 500), {"type": "null"}]}));
    }
    let deep = json!({"$defs": defs, "anyOf": [chain(0)]});
    let huge = OutputConstraint::Regex("((a{1,9999}){1,9999}){1,9999}|(b|c)*b(b|c){4000}x".into());
    for hostile in [json_schema(deep), huge] {
        // Accepted or refused: there is an answer, and the thread goes on.
        drop(states(&service, &hostile, &[], 1));
    }
    assert_eq!(one(&service, &OutputConstraint::Choice(vec!["a".into()])).wait(LONG), MaskReadiness::Ready);
}

#[test]
fn live_states_are_bounded_and_free_again_when_dropped() {
    let service = service("llama3");
    let constraint = OutputConstraint::Choice(vec!["abc".into()]);
    let held = states(&service, &constraint, &[], STATES_MAX).expect("as many as there may be");
    assert!(matches!(states(&service, &constraint, &[], 1), Err(GrammarRefusal::Busy(_))));
    drop(held);
    let mut again = states(&service, &constraint, &[], STATES_MAX).expect("they are free");
    // A state whose mask is being computed counts until the thread is done with it.
    assert_eq!(feed("llama3", &mut again[0], "a").1, 1);
    drop(again);
    while states(&service, &constraint, &[], STATES_MAX).is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn equal_constraints_give_equal_masks_whatever_was_followed_before() {
    let schema = json!({"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4});
    let constraint = json_schema(schema);
    let service = service("qwen3");
    let text = r#"["abc","defghijkl mnop","x"]"#;
    let masks = |state: &mut GrammarState| {
        let mut masks = Vec::new();
        for at in 0..text.len() {
            assert_eq!(state.wait(LONG), MaskReadiness::Ready);
            masks.push(state.mask().expect("ready").clone());
            assert_eq!(feed("qwen3", state, &text[at..=at]).1, 1, "{at}");
        }
        masks
    };
    let first = masks(&mut one(&service, &constraint));
    for _ in 0..3 {
        assert_eq!(masks(&mut one(&service, &constraint)), first);
    }
    let fresh = self::service("qwen3");
    assert_eq!(masks(&mut one(&fresh, &constraint)), first, "compiled again");
}

#[test]
fn a_continued_text_has_the_masks_of_the_text_in_one_piece() {
    let (tokenizer, _) = fixture("llama3");
    let eos = tokenizer.eos().expect("the fixture has one");
    let service = service("llama3");
    let constraint = OutputConstraint::Regex("[a-z]{2,9}(-[0-9]{2})*!".into());
    let ids = tokenizer.encode("hello-12-34!", SpecialTokens::AsWritten, 99).expect("short");
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    let continued = |text: &[u32]| {
        let states = runtime.block_on(service.states(&constraint, &[eos], text.to_vec(), 1));
        states.map(|mut states| states.remove(0))
    };
    let mut whole = continued(&[]).expect("it can be enforced");
    for at in 0..ids.len() {
        assert_eq!(whole.wait(LONG), MaskReadiness::Ready);
        let rest = continued(&ids[..at]).expect("it fits");
        assert_eq!(rest.mask(), whole.mask(), "after {at} tokens");
        assert!(!rest.is_accepting() && !whole.is_accepting(), "after {at} tokens");
        whole.end_after(ids[at], None);
    }
    let complete = continued(&ids).expect("it fits");
    assert!(complete.is_accepting());
    let mask = complete.mask().expect("ready");
    assert!(mask.permits(eos) && !(0..ids.len()).any(|at| mask.permits(ids[at])));
    assert!(matches!(continued(&[ids[0], eos]), Err(GrammarRefusal::Invalid(_))));
}

#[test]
fn a_long_continued_text_may_take_the_work_of_the_text_in_one_piece() {
    let (tokenizer, _) = fixture("qwen3");
    let rows = tokenizer.vocab();
    let trie = vocabulary::token_trie(&tokenizer, rows, &[]).expect("a vocabulary");
    let mut factory = compile::factory(&trie).expect("a factory");
    // Less work for one mask than usual: the text is too long for it.
    factory.limits_mut().step_lexer_fuel = 12_000;
    let constraint = OutputConstraint::Regex("(a|b)*b(a|b){60}x".into());
    let compiled = compiled(&factory, rows, &constraint);
    let id = |text: &[u8]| {
        (0..rows as u32).find(|id| tokenizer.bytes(*id) == text).expect("every byte has a token")
    };
    let letters = [id(b"a"), id(b"b")];
    let mut state = 1u32;
    let text: Vec<u32> = (0..400)
        .map(|_| {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            letters[(state >> 16) as usize & 1]
        })
        .collect();
    assert!(compiled.copy().matcher.consume_tokens(&text).is_err(), "the work is bounded");
    let mut continued = compiled.copy();
    continued.advance(&text, rows, &CompileControl::default()).expect("it fits");
    let mut whole = compiled.copy();
    for token in &text {
        whole.advance(&[*token], rows, &CompileControl::default()).expect("it fits");
    }
    let mask = |grammar: CompiledGrammar| grammar.first.with_stops(&[]);
    assert_eq!(mask(continued), mask(whole));
}

#[test]
fn a_mask_is_late_until_its_thread_has_computed_it_and_fails_without_threads() {
    let (tokenizer, _) = fixture("qwen3");
    let rows = tokenizer.vocab();
    // A model without an end-of-text token: a text still ends where nothing continues it.
    let trie = vocabulary::token_trie(&tokenizer, rows, &[]).expect("a vocabulary");
    let factory = compile::factory(&trie).expect("a factory");
    let constraint = OutputConstraint::Regex("(xq){2}".into());
    let compiled = compiled(&factory, rows, &constraint);
    let (masks, wanted) = std::sync::mpsc::sync_channel(STATES_MAX);
    let live = Arc::default();
    let state = || {
        let permit = StatePermit::take(&live, 1).expect("few").remove(0);
        let matcher = compiled.matcher.deep_clone();
        let cursor = GrammarCursor { matcher, stops: Arc::from(Vec::new()), _permit: permit };
        GrammarState::new(cursor, compiled.first.clone(), masks.clone())
    };
    let id = |text: &[u8]| {
        (0..rows as u32).find(|id| tokenizer.bytes(*id) == text).expect("every byte has a token")
    };
    let (x, q) = (id(b"x"), id(b"q"));
    let mut followed = state();
    for (token, next) in [(x, q), (q, x), (x, q)] {
        assert!(followed.mask().expect("ready").permits(token));
        assert_eq!(followed.end_after(token, None), None);
        assert_eq!(followed.wait(Duration::ZERO), MaskReadiness::Late);
        assert_eq!((followed.wait(Duration::ZERO), followed.mask()), (MaskReadiness::Late, None));
        wanted.recv().expect("an order").carry_out(rows);
        assert_eq!(followed.wait(Duration::ZERO), MaskReadiness::Ready);
        assert!(followed.mask().expect("ready").permits(next));
    }
    assert_eq!(followed.end_after(q, None), Some(FinishReason::Stop));
    let mut dropped = state();
    assert_eq!(dropped.end_after(x, None), None);
    drop(wanted.recv().expect("an order"));
    assert_eq!(dropped.wait(Duration::ZERO), MaskReadiness::Failed(GrammarFault::Stopped));
    let mut alone = state();
    drop(wanted);
    assert_eq!(alone.end_after(x, None), None);
    assert_eq!(alone.wait(Duration::ZERO), MaskReadiness::Failed(GrammarFault::Stopped));
}

#[test]
fn a_text_that_begins_inside_a_token_is_followed_from_there() {
    let service = service("qwen3");
    let constraint = OutputConstraint::Regex("abc".into());
    let mut state = one(&service, &constraint);
    let first = state.mask().cloned();
    assert_eq!(state.begin(b"", None), None);
    // Whitespace there is a part of the marker, whatever the text permits.
    assert_eq!((state.begin(b"\n\n", None), state.mask().cloned()), (None, first));
    assert_eq!(state.begin(b" ab", None), None);
    assert_eq!(feed("qwen3", &mut state, "c"), (Some(FinishReason::Stop), 1));
    let mut state = one(&service, &OutputConstraint::Choice(vec!["\nabc".into()]));
    assert_eq!(state.begin(b"\n", None), None);
    assert_eq!(feed("qwen3", &mut state, "\nabc"), (Some(FinishReason::Stop), 4));
    let mut state = one(&service, &constraint);
    assert_eq!(state.begin(b"abc", Some(FinishReason::Length)), Some(FinishReason::Stop));
    let mut state = one(&service, &constraint);
    assert_eq!(state.begin(b"ax", None), None);
    assert_eq!(state.wait(LONG), MaskReadiness::Failed(GrammarFault::DeadEnd));
}

#[test]
fn a_cancelled_compilation_ends_wherever_it_is() {
    let (tokenizer, _) = fixture("qwen3");
    let rows = tokenizer.vocab();
    let trie = vocabulary::token_trie(&tokenizer, rows, &[]).expect("a vocabulary");
    let factory = compile::factory(&trie).expect("a factory");
    let constraint = OutputConstraint::Regex("a*".into());
    let control = CompileControl::default();
    control.cancel();
    assert!(compile(&factory, rows, &constraint, &control).is_err(), "before the first mask");
    let mut grammar = compiled(&factory, rows, &constraint);
    let a = (0..rows as u32).find(|id| tokenizer.bytes(*id) == b"a").expect("every byte has a token");
    let kept = grammar.copy();
    assert!(grammar.advance(&[a], rows, &control).is_err(), "in the text so far");
    for mut other in [kept, compiled(&factory, rows, &constraint)] {
        assert!(other.advance(&[a], rows, &CompileControl::default()).is_ok(), "a copy is independent");
    }
}

/// Without cancellation both threads are busy for far longer than the bound. The length of their texts is measured.
#[test]
fn threads_are_free_when_the_requests_of_their_constraints_have_ended() {
    const SAMPLE: usize = 20_000;
    const TOKENS_MAX: u128 = 16_000_000;
    const BOUND: Duration = Duration::from_secs(5);
    let service = service("qwen3");
    let (tokenizer, _) = fixture("qwen3");
    let rows = tokenizer.vocab();
    let a = (0..rows as u32).find(|id| tokenizer.bytes(*id) == b"a").expect("a token");
    let letters = OutputConstraint::Regex("a*".into());
    let trie = vocabulary::token_trie(&tokenizer, rows, &[]).expect("a vocabulary");
    let factory = compile::factory(&trie).expect("a factory");
    let mut sample = compiled(&factory, rows, &letters);
    let begun = Instant::now();
    sample.advance(&vec![a; SAMPLE], rows, &CompileControl::default()).expect("it fits");
    let each = (begun.elapsed() / SAMPLE as u32).as_nanos().max(1);
    // Four times the bound.
    let tokens = (4 * BOUND.as_nanos() / each).clamp(SAMPLE as u128, TOKENS_MAX) as usize;
    // The threads have what all compilations share.
    assert_eq!(one(&service, &letters).wait(LONG), MaskReadiness::Ready);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let slow = || service.states(&letters, &[], vec![a; tokens], 1);
        let brief = Duration::from_millis(50);
        let both = tokio::join!(tokio::time::timeout(brief, slow()), tokio::time::timeout(brief, slow()));
        assert!(both.0.is_err() && both.1.is_err(), "their requests have ended first");
    });
    let begun = Instant::now();
    for choice in ["x", "y", "z"] {
        let constraint = OutputConstraint::Choice(vec![choice.into()]);
        assert_eq!(one(&service, &constraint).wait(LONG), MaskReadiness::Ready);
    }
    assert!(begun.elapsed() < BOUND, "{:?} behind texts of {tokens} tokens", begun.elapsed());
}

/// Prints what masks cost. Nothing is asserted about time.
#[test]
fn the_cost_of_masks_is_printed() {
    let (tokenizer, _) = fixture("qwen3");
    let service = service("qwen3");
    let schema = json!({
        "type": "object", "required": ["name", "age", "tags"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
    });
    let text = r#"{"name":"Ada Lovelace","age":36,"tags":["red","blue"]}"#;
    let ids = tokenizer.encode(text, SpecialTokens::AsWritten, 200).expect("short");
    let begun = Instant::now();
    let mut state = one(&service, &json_schema(schema));
    let compiled = begun.elapsed();
    let begun = Instant::now();
    let mut ended = None;
    for id in &ids {
        assert_eq!(state.wait(LONG), MaskReadiness::Ready);
        assert!(state.mask().expect("ready").permits(*id), "{:?}", tokenizer.decode(&[*id], DecodeMode::All));
        ended = state.end_after(*id, None);
    }
    assert_eq!(ended, Some(FinishReason::Stop));
    let each = begun.elapsed() / ids.len() as u32;
    eprintln!("compiled with the vocabulary in {compiled:?}, then {each:?} per token and mask");
}
