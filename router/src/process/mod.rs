//! The process around the requests: servers of router and picker, socket takeover, reload, discovery sources, health probes.

pub(crate) mod discovery;
pub(crate) mod health_probe;
pub(crate) mod http2;
pub(crate) mod picker_server;
pub(crate) mod reload;
pub(crate) mod server;
pub(crate) mod sidecar_server;
pub(crate) mod socket_takeover;
