//! The router against scripted engines, over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod access_log;
mod accounting;
mod admin;
mod admission;
mod bad_input;
mod bounds;
mod client;
mod collector;
mod config;
mod configuration_page;
mod disconnect;
mod discovery;
mod early;
mod endpoints;
mod engine;
mod explain;
mod failures;
mod health;
mod hostile;
mod http_raw;
mod keys;
mod kv;
mod kv_events;
mod life;
mod load;
mod log;
mod main_path;
mod markers;
mod pipelining;
mod policies;
mod proxies;
mod reload;
mod restarts;
mod resume;
mod stock;
mod system;
mod time;
mod tls;
mod tokens;
mod traces;
mod vanish;
mod whole;
