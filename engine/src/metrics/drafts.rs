//! Counters of speculative decoding, with vLLM's names.

use metrics::Counter;

use super::Registrar;

/// The counters of one engine core that drafts.
pub struct DraftMetrics {
    drafts: Counter,
    draft_tokens: Counter,
    accepted: Counter,
    /// Of the first token of a draft, the second, and so on.
    accepted_at: Vec<Counter>,
}

impl DraftMetrics {
    pub(super) fn new(make: &Registrar<'_>, longest: usize) -> Self {
        let at = |position: usize| {
            let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
            let help = "Accepted draft tokens by their position in the draft, from 0.";
            make.counter_with(name, help, "position", position.to_string())
        };
        Self {
            drafts: make.counter("vllm:spec_decode_num_drafts_total", "Verified drafts of one sequence."),
            draft_tokens: make
                .counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified."),
            accepted: make
                .counter("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
            accepted_at: (0..longest).map(at).collect(),
        }
    }

    /// A step has verified a draft of `drafted` tokens, of which it has accepted the first `accepted`.
    pub fn verified(&self, drafted: usize, accepted: usize) {
        self.drafts.increment(1);
        self.draft_tokens.increment(drafted as u64);
        self.accepted.increment(accepted as u64);
        self.accepted_at.iter().take(accepted).for_each(|counter| counter.increment(1));
    }
}
