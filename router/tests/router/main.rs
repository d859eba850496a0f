//! The router against scripted engines, over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod access_log;
mod admin;
mod bad_input;
mod bounds;
mod client;
mod collector;
mod config;
mod configuration_page;
mod disconnect;
mod discovery;
mod endpoints;
mod engine;
mod explain;
mod failures;
mod hostile;
mod http_raw;
mod load;
mod log;
mod main_path;
mod markers;
mod policies;
mod reload;
mod system;
mod traces;
