//! Where an engine's data-parallel ranks publish their events: vLLM's `GET /kv_event_sources` (0.32). Pure.
//!
//! ```text
//! {"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "", …}, "1": …}
//! ```
//!
//! The reply names a port only. The router connects to the engine's own host, so that no engine can make it connect
//! anywhere else.

use std::collections::HashMap;

use serde::Deserialize;

/// Maximum bytes of a reply: 256 ranks with 256 bytes each.
pub(super) const REPLY_BYTES_MAX: usize = 64 << 10;
/// Maximum bytes of a topic, as in the configuration.
const TOPIC_BYTES_MAX: usize = 64;
/// Hosts of an endpoint at which vLLM listens. With another one it connects to that host.
const LISTENING_HOSTS: [&str; 5] = ["*", "0.0.0.0", "[::]", "::", ""];

/// The publisher of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedSource {
    pub port: u16,
    /// Prefix of its messages.
    pub topic: String,
}

/// Why a reply names no publisher.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SourceError {
    /// The engine has not answered, or not with its sources.
    #[error("the engine reports no sources of KV events at /kv_event_sources")]
    Unreported,
    /// The rank is not in the reply.
    #[error("the engine reports no source of KV events for rank {0}")]
    NoRank(u16),
    /// The engine publishes no events.
    #[error("the engine publishes no KV events, expected --kv-events-config with enable_kv_cache_events")]
    Disabled,
    /// The endpoint is not one at which the engine listens.
    #[error(
        "the engine does not listen for subscribers of KV events, expected an endpoint tcp://*:PORT \
         (set `port` and `bind` if it connects to the router)"
    )]
    NotListening,
}

#[derive(Deserialize)]
struct SourceReply {
    #[serde(default = "yes")]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: Option<String>,
    topic: Option<String>,
}

fn yes() -> bool {
    true
}

/// The publisher of a rank, from the engine's reply. `own_host`: the engine's host in the configuration.
pub(super) fn read(reply: &[u8], rank: u16, own_host: &str) -> Result<ReportedSource, SourceError> {
    let ranks: HashMap<String, SourceReply> =
        serde_json::from_slice(reply).map_err(|_| SourceError::Unreported)?;
    let source = ranks.get(&rank.to_string()).ok_or(SourceError::NoRank(rank))?;
    if !source.enable_kv_cache_events || source.publisher.as_deref().is_some_and(|kind| kind != "zmq") {
        return Err(SourceError::Disabled);
    }
    let port_of = |source: &SourceReply| {
        let (host, port) = source.endpoint.as_deref()?.strip_prefix("tcp://")?.rsplit_once(':')?;
        let listens = LISTENING_HOSTS.contains(&host) || host == own_host;
        port.parse().ok().filter(|port: &u16| *port > 0 && listens)
    };
    let port = port_of(source).ok_or(SourceError::NotListening)?;
    // Every rank publishes at the first rank's port + its own number. The reply may name either.
    let is_base = rank > 0 && ranks.get("0").and_then(port_of) == Some(port);
    let port = if is_base { port.checked_add(rank).ok_or(SourceError::NotListening)? } else { port };
    let topic = source.topic.clone().unwrap_or_default();
    if topic.len() > TOPIC_BYTES_MAX {
        return Err(SourceError::Unreported);
    }
    Ok(ReportedSource { port, topic })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn source(endpoint: &str) -> Value {
        json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint, "topic": "kv",
            "replay_endpoint": null, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000})
    }

    fn port(reply: &Value, rank: u16) -> Result<u16, SourceError> {
        read(reply.to_string().as_bytes(), rank, "gpu-1").map(|source| source.port)
    }

    #[test]
    fn every_rank_has_its_own_port_at_the_engines_host() {
        let apart = json!({"0": source("tcp://*:5557"), "1": source("tcp://*:5558")});
        assert_eq!((port(&apart, 0), port(&apart, 1)), (Ok(5557), Ok(5558)));
        let base = json!({"0": source("tcp://0.0.0.0:5557"), "3": source("tcp://[::]:5557")});
        assert_eq!((port(&base, 0), port(&base, 3)), (Ok(5557), Ok(5560)));
        assert_eq!(port(&base, 1), Err(SourceError::NoRank(1)));
        assert_eq!(port(&json!({"0": source("tcp://gpu-1:5557")}), 0), Ok(5557));
        let read = read(json!({"0": source("tcp://*:1")}).to_string().as_bytes(), 0, "gpu-1");
        assert_eq!(read, Ok(ReportedSource { port: 1, topic: "kv".to_owned() }));
    }

    #[test]
    fn a_reply_can_name_neither_another_host_nor_another_transport() {
        for endpoint in [
            "tcp://169.254.169.254:80",
            "tcp://gpu-2:5557",
            "tcp://*:0",
            "tcp://*:65536",
            "tcp://*",
            "ipc:///tmp/kv",
            "inproc://kv",
            "*:5557",
            "",
        ] {
            assert_eq!(
                port(&json!({"0": source(endpoint)}), 0),
                Err(SourceError::NotListening),
                "{endpoint}"
            );
        }
        let last = json!({"0": source("tcp://*:65535"), "1": source("tcp://*:65535")});
        assert_eq!(port(&last, 1), Err(SourceError::NotListening));
        let mut off = source("tcp://*:5557");
        off["enable_kv_cache_events"] = json!(false);
        assert_eq!(port(&json!({"0": off}), 0), Err(SourceError::Disabled));
        let mut other = source("tcp://*:5557");
        other["publisher"] = json!("null");
        assert_eq!(port(&json!({"0": other}), 0), Err(SourceError::Disabled));
        let mut long = source("tcp://*:5557");
        long["topic"] = json!("x".repeat(65));
        for odd in [json!({"0": long}), json!([]), json!("x"), json!({"0": 3}), json!({"0": {"endpoint": 3}})]
        {
            assert_eq!(port(&odd, 0), Err(SourceError::Unreported), "{odd}");
        }
        assert_eq!(port(&json!({}), 0), Err(SourceError::NoRank(0)));
    }
}
