//! Requests, as clients write them.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// What the built-in model is called.
pub(crate) const MODEL: &str = "baton-demo";

/// Token ids below this are the model's special ones; above, its words.
const WORDS: std::ops::Range<u64> = 6..1500;

/// One request to generate, greedy.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

impl Ask {
    /// A completion of this many tokens that no engine has seen before.
    pub(crate) fn fresh(tokens: usize) -> Self {
        static NONCE: AtomicU64 = AtomicU64::new(1);
        let mut seed = NONCE.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let ids: Vec<u64> = (0..tokens)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                WORDS.start + (seed >> 33) % (WORDS.end - WORDS.start)
            })
            .collect();
        Self::at("/v1/completions", json!({"prompt": ids, "max_tokens": 4}))
    }

    /// A chat over a page of facts of about `25 × people` tokens, about the last of them but one.
    pub(crate) fn recall(people: usize) -> Self {
        const NAMES: [&str; 6] = ["Alice", "Bob", "Carol", "David", "Emma", "Frank"];
        const TOWNS: [&str; 5] = ["Paris", "Oslo", "Rome", "Berlin", "Madrid"];
        let facts: String = (0..people)
            .map(|at| {
                format!("{} lives in {}. ", NAMES[at % NAMES.len()], TOWNS[(at * 3 + people) % TOWNS.len()])
            })
            .collect();
        let about = NAMES[(people + 4) % NAMES.len()];
        let question = format!("{facts}Where does {about} live?");
        let messages = json!([{"role": "user", "content": question}]);
        Self::at("/v1/chat/completions", json!({"messages": messages, "max_tokens": 24}))
    }

    /// A chat, to the end of its answer.
    pub(crate) fn chat(messages: Value) -> Self {
        Self::at("/v1/chat/completions", json!({"messages": messages, "max_tokens": 200}))
    }

    fn at(path: &'static str, mut body: Value) -> Self {
        body["model"] = json!(MODEL);
        body["temperature"] = json!(0);
        Self { path, body }
    }

    /// Exactly this many tokens, whatever the model would say.
    pub(crate) fn tokens(self, count: u32) -> Self {
        self.with("max_tokens", json!(count)).with("ignore_eos", json!(true))
    }

    pub(crate) fn streamed(self) -> Self {
        self.with("stream", json!(true))
    }

    pub(crate) fn with(mut self, field: &str, value: Value) -> Self {
        self.body[field] = value;
        self
    }
}
