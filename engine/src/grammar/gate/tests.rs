//! Gates over the vocabularies of the text fixtures. Qwen 3's has the tags as tokens, Llama 3's has not.

use baton_openai::OutputConstraint;

use super::*;
use crate::grammar::GrammarService;
use crate::model::output::{OutputFormat, PromptEnd, ReasoningFormat};
use crate::model::tests::fixture;

/// Longer than any mask takes.
const LONG: Duration = Duration::from_secs(60);

struct Fixture {
    tokenizer: Arc<Tokenizer>,
    service: GrammarService,
    runtime: tokio::runtime::Runtime,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let (tokenizer, _) = fixture(name);
        let service = GrammarService::new(&tokenizer, tokenizer.vocab(), &[]);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        Self { tokenizer, service, runtime }
    }

    fn track(&self, prompt: PromptEnd) -> ReasoningTrack {
        let format = OutputFormat { calls: None, reasoning: Some(ReasoningFormat::Qwen3) };
        ReasoningTrack::new(format, prompt).expect("it may reason")
    }

    fn rules(&self, prompt: PromptEnd) -> ReasoningRules {
        ReasoningRules::new(self.track(prompt), &self.tokenizer, self.tokenizer.vocab())
    }

    /// A gate with a grammar of one text.
    fn gate(&self, rules: ReasoningRules, text: &str) -> TokenGate {
        let constraint = OutputConstraint::Choice(vec![text.to_owned()]);
        let stops = [self.eos()];
        let states = self.service.states(&constraint, &stops, Vec::new(), 1);
        let grammar = self.runtime.block_on(states).expect("it can be enforced").pop();
        TokenGate::new(Some(&Arc::new(rules)), grammar).expect("it restricts")
    }

    fn eos(&self) -> u32 {
        self.tokenizer.eos().expect("the fixture has one")
    }

    fn id(&self, text: &str) -> u32 {
        let mut ids = 0..self.tokenizer.vocab() as u32;
        ids.find(|id| self.tokenizer.bytes(*id) == text.as_bytes()).expect("a token")
    }
}

fn permits(gate: &mut TokenGate, token: u32) -> bool {
    assert_eq!(gate.wait(LONG), MaskReadiness::Ready);
    gate.is_free() || gate.mask().is_none_or(|mask| mask.permits(token))
}

/// Adds tokens that do not end the sequence.
#[track_caller]
fn add(gate: &mut TokenGate, tokens: impl IntoIterator<Item = u32>) {
    for token in tokens {
        assert!(permits(gate, token), "{token}");
        assert_eq!(gate.end_after(token, None), None);
    }
}

#[test]
fn a_grammar_begins_behind_the_reasoning_that_the_prompt_opens() {
    let fixture = Fixture::new("qwen3");
    let (a, y, close) = (fixture.id("a"), fixture.id("y"), fixture.id("</think>"));
    let rules = fixture.rules(PromptEnd::InReasoning).without_stops(&[fixture.eos()]);
    let mut gate = fixture.gate(rules, "yy");
    add(&mut gate, [a, y]);
    assert!(!permits(&mut gate, fixture.eos()) && !gate.is_accepting());
    add(&mut gate, [close]);
    assert!(permits(&mut gate, y) && !permits(&mut gate, a) && !permits(&mut gate, close));
    add(&mut gate, [y]);
    assert_eq!(gate.wait(LONG), MaskReadiness::Ready);
    assert_eq!(gate.end_after(y, None), Some(FinishReason::Stop));
    // Reasoning that is never closed ends with the tokens.
    let mut gate = fixture.gate(fixture.rules(PromptEnd::InReasoning), "yy");
    assert!(gate.is_free());
    assert_eq!(gate.end_after(y, Some(FinishReason::Length)), Some(FinishReason::Length));
}

#[test]
fn a_stop_token_that_ends_reasoning_stays_permitted() {
    let fixture = Fixture::new("qwen3");
    let (eos, close) = (fixture.eos(), fixture.id("</think>"));
    let rules = fixture.rules(PromptEnd::InReasoning).without_stops(&[close]);
    assert!(fixture.gate(rules, "y").is_free());
    let rules = fixture.rules(PromptEnd::InReasoning).without_stops(&[close, eos]);
    let mut gate = fixture.gate(rules, "y");
    assert!(permits(&mut gate, close) && !permits(&mut gate, eos));
}

#[test]
fn the_first_token_opens_reasoning_or_is_the_grammars() {
    let fixture = Fixture::new("qwen3");
    let (a, y) = (fixture.id("a"), fixture.id("y"));
    let (open, close) = (fixture.id("<think>"), fixture.id("</think>"));
    let gate = || fixture.gate(fixture.rules(PromptEnd::Plain), "yy");
    let mut direct = gate();
    assert!(permits(&mut direct, open) && permits(&mut direct, y) && !permits(&mut direct, a));
    add(&mut direct, [y]);
    assert!(!permits(&mut direct, open));
    assert_eq!(direct.end_after(y, None), Some(FinishReason::Stop));
    let mut reasoned = gate();
    add(&mut reasoned, [open, a, open, close]);
    assert!(permits(&mut reasoned, y) && !permits(&mut reasoned, open));
}

#[test]
fn a_spent_budget_leaves_only_the_closing_tag() {
    let fixture = Fixture::new("qwen3");
    let (a, open, close) = (fixture.id("a"), fixture.id("<think>"), fixture.id("</think>"));
    let rules = |prompt, budget| fixture.rules(prompt).with_budget(budget).expect("it can be enforced");
    for budget in [0, 1, 3] {
        // Without a grammar, whose place stays free.
        let free = TokenGate::new(Some(&Arc::new(rules(PromptEnd::InReasoning, budget))), None);
        let mut free = free.expect("it restricts");
        let mut opened = fixture.gate(rules(PromptEnd::Plain, budget), "y");
        add(&mut opened, [open]);
        for gate in [&mut free, &mut opened] {
            for _ in 0..budget {
                assert!(gate.is_free());
                add(gate, [a]);
            }
            assert!(!gate.is_free() && !gate.is_accepting());
            let only = (0..fixture.tokenizer.vocab() as u32).filter(|id| permits(gate, *id));
            assert_eq!(only.collect::<Vec<_>>(), [close]);
            add(gate, [close]);
        }
        assert!(free.is_free() && free.is_accepting());
        assert!(permits(&mut opened, fixture.id("y")) && !permits(&mut opened, a));
    }
    // A model that closes its reasoning itself is not disturbed.
    let mut early = fixture.gate(rules(PromptEnd::InReasoning, 3), "y");
    add(&mut early, [a, close]);
    assert!(permits(&mut early, fixture.id("y")));
}

#[test]
fn a_closing_tag_of_several_tokens_is_found_and_forced() {
    let fixture = Fixture::new("llama3");
    let tokens = |text: &str| fixture.tokenizer.encode(text, SpecialTokens::AsWritten, 99).expect("short");
    let (a, y, closing) = (fixture.id("a"), fixture.id("y"), tokens("</think>"));
    assert!(closing.len() > 1, "the fixture has no such token");
    assert!(!can_precede_grammar(&fixture.track(PromptEnd::Plain), &fixture.tokenizer));
    assert!(can_precede_grammar(&fixture.track(PromptEnd::InReasoning), &fixture.tokenizer));
    let mut found = fixture.gate(fixture.rules(PromptEnd::InReasoning), "yy");
    add(&mut found, [vec![a], closing.clone()].concat());
    assert!(permits(&mut found, y) && !permits(&mut found, a));
    let rules = fixture.rules(PromptEnd::InReasoning).with_budget(2).expect("it can be enforced");
    let mut forced = fixture.gate(rules, "yy");
    // The budget is spent inside a tag, which then begins again.
    add(&mut forced, [a, closing[0]]);
    for token in closing {
        assert!(!permits(&mut forced, a));
        add(&mut forced, [token]);
    }
    assert!(permits(&mut forced, y) && !permits(&mut forced, a));
}
