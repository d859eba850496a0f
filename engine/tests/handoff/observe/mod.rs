//! What an engine shows of requests and blocks: names, events, digests, `/debug/kv`.

pub(crate) mod books;
pub(crate) mod digests;
pub(crate) mod events;
pub(crate) mod named;
