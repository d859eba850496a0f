//! The process around the requests: server, socket takeover, reload, discovery sources, health probes.

pub(crate) mod discovery;
pub(crate) mod health_probe;
pub(crate) mod reload;
pub(crate) mod server;
pub(crate) mod socket_takeover;
