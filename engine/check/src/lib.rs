//! Checks of the engine's kernels and models against reference results. No engine needs them.
//!
//! | module | contents |
//! |---|---|
//! | [`software`] | a device on the CPU that runs reference kernels and rejects errors that a GPU accepts silently |
//! | [`kernels`] | every kernel of a device, compared with its reference kernel |
//! | [`parity`] | models, compared with recorded outputs of `transformers` |
//! | [`golden_text`] | tokenizers, chat templates and sampling, compared with golden files |

pub mod golden_text;
pub mod kernels;
mod open;
pub mod parity;
pub mod software;

pub use open::{SOFTWARE, parse_device};
