//! From a constraint to a grammar, and to a message where that is impossible.

use baton_openai::{JsonWhitespace, OutputConstraint};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::LEXER_STATES_MAX;
use super::cancel::CompileControl;
use super::ebnf::{is_ebnf, literal, to_lark};
use super::state::RawMask;

/// Whitespace between the values of a JSON text. It is bounded, so that a model cannot fill its answer with it.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";

/// Bytes of a message from the compiler.
const MESSAGE_BYTES_MAX: usize = 400;

/// Tokens of a text between two masks, each of which renews the work that the lexer may do. A sequence renews it after
/// every token.
const TOKENS_PER_RENEWAL: usize = 64;

/// A grammar after a text, and the mask of the next token.
pub(super) struct CompiledGrammar {
    pub(super) matcher: Matcher,
    pub(super) first: RawMask,
    /// Bytes of its lexer.
    pub(super) bytes: usize,
}

impl CompiledGrammar {
    /// The same with a lexer of its own: a shared one would fill with the states of others.
    pub(super) fn copy(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), first: self.first.clone(), bytes: self.bytes }
    }

    /// Adds a text, until `control` cancels it.
    ///
    /// # Errors
    /// The text does not begin a permitted one.
    pub(super) fn advance(
        &mut self,
        text: &[u32],
        rows: usize,
        control: &CompileControl,
    ) -> Result<(), String> {
        if let Some(handle) = self.matcher.cancellation_handle() {
            control.watch(handle);
        }
        let wrong = || "the text so far does not fit the constraint".to_owned();
        for part in text.chunks(TOKENS_PER_RENEWAL) {
            self.matcher.consume_tokens(part).map_err(|_| wrong())?;
            self.first = match self.matcher.is_stopped() {
                true => RawMask::complete(rows),
                false => RawMask::of(&mut self.matcher, rows).map_err(|_| wrong())?,
            };
        }
        Ok(())
    }
}

/// A factory for grammars over a vocabulary.
pub(super) fn factory(trie: &TokEnv) -> Result<ParserFactory, String> {
    // No forced tokens and no backtracking: every token is sampled from the model's own row.
    let capabilities = InferenceCapabilities::default();
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let mut factory =
        ParserFactory::new(trie, capabilities, &slices).map_err(|error| message(&error.to_string()))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.max_lexer_states = LEXER_STATES_MAX;
    limits.verbose_errors = false;
    Ok(factory)
}

/// Compiles a constraint, until `control` cancels it.
///
/// # Errors
/// Why it cannot be enforced, and where if the compiler names a part of it.
pub(super) fn compile(
    factory: &ParserFactory,
    rows: usize,
    constraint: &OutputConstraint,
    control: &CompileControl,
) -> Result<CompiledGrammar, String> {
    let wrong = |error: &dyn std::fmt::Display| {
        let message = message(&format!("{error:#}"));
        match constraint {
            OutputConstraint::Json { schema, .. } => located(&message, schema),
            OutputConstraint::Regex(_) | OutputConstraint::Choice(_) | OutputConstraint::Grammar(_) => {
                message
            }
        }
    };
    let mut parser = factory.create_parser(grammar_of(constraint)?).map_err(|error| wrong(&error))?;
    control.watch(parser.enable_cancellation());
    // It shares the lexer of the matcher.
    let measured = parser.clone();
    let mut matcher = Matcher::new(Ok(parser));
    let first = RawMask::of(&mut matcher, rows).map_err(|error| wrong(&error))?;
    if first.mask.is_empty() {
        return Err("no token of the model begins a permitted text".into());
    }
    let bytes = measured.parser.lexer_stats().num_bytes;
    Ok(CompiledGrammar { matcher, first, bytes })
}

fn grammar_of(constraint: &OutputConstraint) -> Result<TopLevelGrammar, String> {
    match constraint {
        OutputConstraint::Json { schema, whitespace } => {
            let mut schema = schema.clone();
            if let Value::Object(members) = &mut schema {
                // The compiler's options; a client's own are replaced.
                let options = match whitespace {
                    JsonWhitespace::Allowed => json!({"whitespace_pattern": WHITESPACE}),
                    JsonWhitespace::Omitted => json!({"whitespace_flexible": false}),
                };
                members.insert("x-guidance".to_owned(), options);
            }
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        OutputConstraint::Regex(regex) => {
            let backslashes = regex.bytes().rev().take_while(|byte| *byte == b'\\').count();
            if backslashes % 2 == 1 {
                return Err("the regular expression ends with a single backslash".into());
            }
            Ok(TopLevelGrammar::from_regex(regex))
        }
        OutputConstraint::Choice(choices) => {
            let literals: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: {}", literals.join(" | "))))
        }
        OutputConstraint::Grammar(grammar) if is_ebnf(grammar) => {
            Ok(TopLevelGrammar::from_lark(to_lark(grammar)?))
        }
        OutputConstraint::Grammar(grammar) => Ok(TopLevelGrammar::from_lark(grammar.clone())),
    }
}

/// The compiler's message without its inner state: its first line, and the error in a regular expression. After a
/// panic the state is all there is.
fn message(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default().trim();
    if line.is_empty() || line.starts_with("panic") {
        return "it cannot be compiled".to_owned();
    }
    let line = &line[..line.floor_char_boundary(MESSAGE_BYTES_MAX)];
    match text.lines().find_map(|line| line.strip_prefix("error: ")) {
        Some(error) => format!("{line} {}", &error[..error.floor_char_boundary(MESSAGE_BYTES_MAX)]),
        None => line.to_owned(),
    }
}

/// The message with the place of the first name or reference that it quotes, as a JSON pointer.
fn located(message: &str, schema: &Value) -> String {
    let mut quoted = message.split(['"', '\'']).skip(1).step_by(2).filter(|name| !name.is_empty());
    match quoted.find_map(|name| pointer(schema, name, &mut String::new())) {
        Some(place) => format!("{message}, at {place}"),
        None => message.to_owned(),
    }
}

/// The place of the first member with this name, or of the first reference to it. Depth is bounded by the request.
fn pointer(value: &Value, name: &str, place: &mut String) -> Option<String> {
    let before = place.len();
    let mut below = |key: &str, value: &Value| {
        place.push('/');
        place.push_str(&key.replace('~', "~0").replace('/', "~1"));
        let is_reference = key == "$ref" && value.as_str() == Some(name);
        let found =
            if key == name || is_reference { Some(place.clone()) } else { pointer(value, name, place) };
        place.truncate(before);
        found
    };
    match value {
        Value::Object(members) => members.iter().find_map(|(key, value)| below(key, value)),
        Value::Array(items) => items.iter().enumerate().find_map(|(at, item)| below(&at.to_string(), item)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}
