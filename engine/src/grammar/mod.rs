//! Structured output: grammars over the model's tokens, compiled and followed off the step loop.
//!
//! ```text
//!  HTTP task ─ constraint ─▶ grammar-compile-n ─ states, one per sequence ─▶ submissions ─▶ step loop
//!                              (cache)                                                        │   ▲
//!                     after each token: the grammar, to compute the next mask ◀───────────────┘   │
//!                     grammar-mask-n, while the device runs the next step ──── mask ──────────────┘
//! ```
//!
//! The step loop only advances a grammar by one token, which takes microseconds, and applies masks that are ready. It
//! waits for late masks at most [`MASK_WAIT`] per step, after all other sequences. A sequence without a mask then
//! computes its position again in the next step.
//!
//! Invariants:
//! - A mask is a function of the constraint and of the generated tokens. Every sequence has a lexer of its own, so no
//!   other sequence changes what its limits permit. Batches, preemption and handoffs therefore change no token.
//! - Behind reasoning, a grammar begins after the marker that ends it ([`TokenGate`]). The end of the prompt and the
//!   generated tokens decide where that is.
//! - A decode engine begins at the state before the first token: the prefill engine's token is not part of the text.
//! - Work is bounded by counted steps of the lexer and the parser, not by a clock, so a limit hits at the same token on
//!   every machine.
//! - A compilation whose request has ended is cancelled, and its thread takes the next one.
//! - Every queue is bounded: compilations by [`COMPILE_QUEUE_MAX`], masks by the number of states, [`STATES_MAX`].

mod cache;
mod cancel;
mod compile;
mod ebnf;
mod gate;
mod service;
mod state;
mod vocabulary;

#[cfg(test)]
mod tests;

pub use gate::{ReasoningRules, TokenGate, can_precede_grammar};
pub use service::GrammarService;
pub use state::{GrammarFault, GrammarState, MaskReadiness};

use std::time::Duration;

/// How long a step waits for late masks, all together. A mask takes 0.05 to 1 ms, rarely up to 20.
pub const MASK_WAIT: Duration = Duration::from_millis(2);

/// Compilations that wait. One takes 1 to 100 ms; the next request is refused with 429.
pub const COMPILE_QUEUE_MAX: usize = 64;

/// Time of one compilation, which is then cancelled and refused with 400. Also the time that a constraint waits for it,
/// longer than the queue normally takes; it is then refused with 429.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);

/// Grammars of running and waiting sequences: as many as one request may have sequences. Their lexers take 5 GB at most:
/// each has a few hundred states with 1 to 2 kB, and at most `LEXER_STATES_MAX`.
pub const STATES_MAX: usize = 256;

/// States of one lexer. A string of n characters with a bound visits about n, and answers rarely have longer ones.
const LEXER_STATES_MAX: usize = 10_000;

/// Why a constraint is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarRefusal {
    /// It cannot be compiled or enforced.
    #[error("{0}")]
    Invalid(String),
    /// It takes longer than the time for an answer.
    #[error("it takes longer than {} s to compile", COMPILE_TIMEOUT.as_secs())]
    TooSlow,
    /// The queue, or the number of states, is at its bound.
    #[error("{0}")]
    Busy(&'static str),
}
