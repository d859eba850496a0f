//! Metrics of the router itself: version, configuration, connections, and bytes of bodies.

use super::registry::{Counter, Gauge, Registry, families};

families! {
    gauge BUILD("baton_router_build_info", ["version"]): "Always 1; the label is the version of the router.";
    gauge GENERATION("baton_router_config_generation", []):
        "Number of the configuration in effect: 1 at the start, plus 1 for each reload.";
    gauge CONNECTIONS("baton_router_connections_open", []): "Open client connections.";
    counter CONNECTED("baton_router_connections_total", []): "Accepted client connections.";
    counter REFUSED("baton_router_malformed_heads_total", []):
        "Requests refused because of their head: malformed, too large or too slow.";
    counter REQUEST_BYTES("baton_router_request_body_bytes_total", []): "Bytes read of request bodies.";
    counter RESPONSE_BYTES("baton_router_response_body_bytes_total", []): "Bytes written of response bodies.";
}

/// Metrics of the router itself.
pub(crate) struct ServerMetrics {
    _build: Gauge,
    pub generation: Gauge,
    pub connections: Gauge,
    pub connected: Counter,
    pub refused: Counter,
    pub request_bytes: Counter,
    pub response_bytes: Counter,
}

impl ServerMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let build = registry.gauge(&BUILD, &[env!("CARGO_PKG_VERSION")]);
        build.set(1.0);
        Self {
            _build: build,
            generation: registry.gauge(&GENERATION, &[]),
            connections: registry.gauge(&CONNECTIONS, &[]),
            connected: registry.counter(&CONNECTED, &[]),
            refused: registry.counter(&REFUSED, &[]),
            request_bytes: registry.counter(&REQUEST_BYTES, &[]),
            response_bytes: registry.counter(&RESPONSE_BYTES, &[]),
        }
    }
}
