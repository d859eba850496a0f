//! Metrics of the router itself: version, configuration, connections, and bytes of bodies.

use super::registry::{Counter, Gauge, Registry, families};

families! {
    gauge BUILD("baton_router_build_info", ["version"]): "Always 1; the label is the version of the router.";
    gauge GENERATION("baton_router_config_generation", []):
        "Number of the configuration in effect: 1 at the start, plus 1 for each reload.";
    gauge CONNECTIONS("baton_router_connections_open", []): "Open client connections.";
    counter CONNECTED("baton_router_connections_total", []): "Accepted client connections.";
    counter HTTP2("baton_router_http2_connections_total", []): "Client connections that used HTTP/2.";
    counter HTTP2_CLOSED("baton_router_http2_closed_total", ["reason"]):
        "HTTP/2 connections that the router closed because of the client: flood, slow_head or protocol.";
    counter REFUSED("baton_router_malformed_heads_total", []):
        "Requests refused because of their head: malformed, too large or too slow.";
    counter REQUEST_BYTES("baton_router_request_body_bytes_total", []): "Bytes read of request bodies.";
    counter RESPONSE_BYTES("baton_router_response_body_bytes_total", []): "Bytes written of response bodies.";
}

/// Metrics of clients' HTTP/2 connections.
pub(crate) struct Http2Metrics {
    pub connected: Counter,
    pub flood: Counter,
    pub slow_head: Counter,
    pub protocol: Counter,
}

impl Http2Metrics {
    fn new(registry: &Registry) -> Self {
        let closed = |reason| registry.counter(&HTTP2_CLOSED, &[reason]);
        Self {
            connected: registry.counter(&HTTP2, &[]),
            flood: closed("flood"),
            slow_head: closed("slow_head"),
            protocol: closed("protocol"),
        }
    }
}

/// Metrics of the router itself.
pub(crate) struct ServerMetrics {
    _build: Gauge,
    pub generation: Gauge,
    pub connections: Gauge,
    pub connected: Counter,
    pub http2: Http2Metrics,
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
            http2: Http2Metrics::new(registry),
            refused: registry.counter(&REFUSED, &[]),
            request_bytes: registry.counter(&REQUEST_BYTES, &[]),
            response_bytes: registry.counter(&RESPONSE_BYTES, &[]),
        }
    }
}
