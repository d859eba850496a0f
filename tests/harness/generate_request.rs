//! Requests in the form that clients send.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// Name of the built-in model.
pub(crate) const MODEL: &str = "baton-demo";

/// Token ids of the model's words. Ids below are special tokens.
const WORDS: std::ops::Range<u64> = 6..1500;

/// One greedy request to generate.
#[derive(Clone, Debug)]
pub(crate) struct GenerateRequest {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

impl GenerateRequest {
    /// A completion of this many tokens that no engine has received before.
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

    /// A chat that contains about `25 × people` tokens of facts and a question about the last of them but one.
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

    /// A chat that runs to the end of its response.
    pub(crate) fn chat(messages: Value) -> Self {
        Self::at("/v1/chat/completions", json!({"messages": messages, "max_tokens": 200}))
    }

    fn at(path: &'static str, mut body: Value) -> Self {
        body["model"] = json!(MODEL);
        body["temperature"] = json!(0);
        Self { path, body }
    }

    /// Generates exactly this many tokens and ignores the model's end token.
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
