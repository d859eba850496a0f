//! The course of one request: read it, choose engines, prefill, decode, stream, resume.

pub(crate) mod client_request;
pub(crate) mod driver;
pub(crate) mod resume;
