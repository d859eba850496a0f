//! Engines that behave like stock vLLM.

pub(crate) mod engine_abort;
pub(crate) mod next_turn;
pub(crate) mod push;
pub(crate) mod reply_window;
pub(crate) mod reuse_tokens;
pub(crate) mod stock_engine;
pub(crate) mod store;
