//! The two halves of a request, each as one attempt at one engine and what its answer means.

pub(crate) mod decode;
pub(crate) mod prefill;

mod refusal;
mod said;

pub(crate) use refusal::{Blame, Meaning, Refusal, Verdict};
