//! A client's connection: the strict HTTP/1 reader, HTTP/2, a request's session, disconnect detection, the client's
//! address, and comments in streams that wait.

pub(crate) mod address;
pub(crate) mod disconnect;
pub(crate) mod http;
pub(crate) mod http2;
pub(crate) mod session;
mod stall;
pub(crate) mod stream_comments;
