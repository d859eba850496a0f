//! Checks of kernels and models against reference results. No engine uses them.

pub mod golden_text;
pub mod kernels;
pub mod parity;
