//! One request: read it, choose engines, prefill, decode, stream, resume.

pub(crate) mod ask;
pub(crate) mod driver;
pub(crate) mod resume;
