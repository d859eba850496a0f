//! Operators' interfaces: configuration, health, admin listener, logs, metrics, traces.

pub(crate) mod access_log;
pub(crate) mod accounting;
pub(crate) mod admin;
pub(crate) mod compatibility;
pub(crate) mod config;
pub(crate) mod configuration_page;
pub(crate) mod control_url;
pub(crate) mod discovery;
pub(crate) mod explain;
pub(crate) mod health;
pub(crate) mod kv;
pub(crate) mod kv_events;
pub(crate) mod log;
pub(crate) mod reload;
pub(crate) mod tenant_tokens;
pub(crate) mod tokenize;
pub(crate) mod traces;
