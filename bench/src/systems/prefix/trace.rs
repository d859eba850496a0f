//! A trace of multi-turn chats: conversations that share a few system prompts and grow by a question and an answer per
//! turn. Texts follow from a seed. Of all open conversations the next turn is that of a random one, so that a
//! conversation returns after others, as after a user's pause.

use serde_json::{Value, json};

use crate::load::rng::Rng;

/// Sizes of a trace.
#[derive(Clone, Debug)]
pub(super) struct TracePlan {
    /// Conversations that are open at once.
    pub open: usize,
    /// Turns of a conversation.
    pub turns: u32,
    /// Different system prompts, and their words.
    pub systems: u64,
    pub system_words: usize,
    /// Words of a question.
    pub question_words: usize,
    pub seed: u64,
}

/// The conversations of one run.
pub(super) struct ChatTrace {
    plan: TracePlan,
    rng: Rng,
    /// Conversations whose next turn may begin.
    open: Vec<Conversation>,
    begun: u64,
    /// Turns that have not begun.
    turns_left: u64,
}

/// One conversation.
pub(super) struct Conversation {
    messages: Vec<Value>,
    turns: u32,
}

impl ChatTrace {
    /// A trace with so many turns in total.
    pub(super) fn new(plan: TracePlan, turns: u64) -> Self {
        let rng = Rng::stream(plan.seed, "prefix trace");
        let mut trace = Self { plan, rng, open: Vec::new(), begun: 0, turns_left: turns };
        for _ in 0..trace.plan.open {
            let conversation = trace.begin();
            trace.open.push(conversation);
        }
        trace
    }

    fn begin(&mut self) -> Conversation {
        self.begun += 1;
        let which = self.rng.below(self.plan.systems);
        let mut words = Rng::stream(self.plan.seed ^ which << 32, "system prompt");
        let system = text(&mut words, self.plan.system_words);
        Conversation { messages: vec![json!({"role": "system", "content": system})], turns: 0 }
    }

    /// The conversation of the next turn, with its question; `None` after the last turn, or while every open
    /// conversation waits for its answer.
    pub(super) fn next(&mut self) -> Option<Conversation> {
        if self.open.is_empty() {
            return None;
        }
        self.turns_left = self.turns_left.checked_sub(1)?;
        let at = self.rng.below(self.open.len() as u64) as usize;
        let mut conversation = self.open.swap_remove(at);
        conversation.turns += 1;
        let question = text(&mut self.rng, self.plan.question_words);
        conversation.messages.push(json!({"role": "user", "content": question}));
        Some(conversation)
    }

    /// Adds the answer of a turn. A conversation after its last turn is replaced by a new one.
    pub(super) fn answered(&mut self, mut conversation: Conversation, answer: &str) {
        if conversation.turns >= self.plan.turns {
            conversation = self.begin();
        } else {
            conversation.messages.push(json!({"role": "assistant", "content": answer}));
        }
        self.open.push(conversation);
    }
}

impl Conversation {
    /// The body of the turn's request.
    pub(super) fn body(&self) -> String {
        json!({"model": "sim", "messages": self.messages, "max_tokens": 64}).to_string()
    }
}

/// Words of two to eight letters.
fn text(rng: &mut Rng, words: usize) -> String {
    let mut text = String::with_capacity(words * 6);
    for _ in 0..words {
        let mut letters = rng.next();
        for _ in 0..2 + rng.below(7) {
            text.push(char::from(b'a' + (letters % 26) as u8));
            letters /= 26;
        }
        text.push(' ');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: TracePlan =
        TracePlan { open: 3, turns: 2, systems: 2, system_words: 5, question_words: 4, seed: 7 };

    #[test]
    fn conversations_grow_turn_by_turn_and_are_replaced_after_the_last() {
        let mut trace = ChatTrace::new(PLAN, 9);
        let mut sizes = Vec::new();
        while let Some(conversation) = trace.next() {
            sizes.push(conversation.messages.len());
            trace.answered(conversation, "yes");
        }
        assert_eq!(sizes.len(), 9);
        assert!(sizes.iter().all(|size| [2, 4].contains(size)), "a question, or a turn before it: {sizes:?}");
        assert!(trace.begun > 3 && trace.open.len() == 3);
    }

    #[test]
    fn a_seed_gives_one_trace_and_few_system_prompts() {
        let first = |seed| {
            let mut trace = ChatTrace::new(TracePlan { seed, open: 20, ..PLAN }, 20);
            let mut bodies = Vec::new();
            while let Some(conversation) = trace.next() {
                bodies.push(conversation.body());
            }
            bodies
        };
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
        let system =
            |body: &String| serde_json::from_str::<Value>(body).expect("JSON")["messages"][0].to_string();
        let systems: std::collections::BTreeSet<_> = first(1).iter().map(system).collect();
        assert_eq!(systems.len(), 2);
    }
}
