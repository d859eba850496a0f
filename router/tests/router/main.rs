//! Tests of the router with scripted engines over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;
mod http2;
mod input;
mod operations;
mod picker;
mod requests;
mod sidecar;
