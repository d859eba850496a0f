//! The configuration of KV events, in vLLM's spelling: `--kv-events-config '{"enable_kv_cache_events": true, …}'`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use serde_json::{Value, json};

/// Limit of a topic's bytes, as at Baton's router.
const TOPIC_BYTES_MAX: usize = 64;

/// Limit of the messages that wait for the publisher. At 64 KiB each they take 256 MiB. A message can be larger by one
/// event, and a name has 32 bytes here and 9 on the wire, so a full queue takes 1.8 GiB at most. vLLM's is 100,000.
const MAX_QUEUE_SIZE: usize = 4_096;

/// Limit of each number of messages.
const MESSAGES_MAX: usize = 1_000_000;

/// The fields of vLLM's `KVEventsConfig`, with its defaults but for `max_queue_size`.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ConfigFields {
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: String,
    replay_endpoint: Option<String>,
    buffer_steps: usize,
    hwm: usize,
    max_queue_size: usize,
    topic: String,
}

impl Default for ConfigFields {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: MAX_QUEUE_SIZE,
            topic: String::new(),
        }
    }
}

/// Enabled KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where the first rank publishes. Rank N uses the port + N.
    pub endpoint: EventEndpoint,
    /// Where the first rank repeats messages on request.
    pub replay_endpoint: Option<EventEndpoint>,
    /// Messages kept for replays and for subscribers that are behind.
    pub buffer_steps: usize,
    /// Messages that a subscriber may be behind.
    pub hwm: usize,
    /// Messages that wait for the publisher.
    pub max_queue_size: usize,
    /// The first frame of each message.
    pub topic: String,
}

/// Why a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvEventsConfigError {
    /// It is not a JSON object of the known fields.
    #[error("{0}")]
    Json(String),
    /// A publisher that this engine does not have.
    #[error("`publisher` must be \"zmq\" or \"null\", not {0:?}")]
    Publisher(String),
    /// An endpoint that this engine does not have.
    #[error("`{field}` must be tcp://*:PORT, tcp://ADDRESS:PORT or tcp://HOST:PORT, not {endpoint:?}")]
    Endpoint {
        /// The field.
        field: &'static str,
        /// Its value.
        endpoint: String,
    },
    /// A replay is requested by the subscriber, so the engine must listen for it.
    #[error("`replay_endpoint` must be tcp://*:PORT or tcp://ADDRESS:PORT, not {0:?}")]
    ReplayHost(String),
    /// A number of messages is out of range.
    #[error("`{0}` must be from 1 to {MESSAGES_MAX} messages")]
    Range(&'static str),
    /// The topic is too long.
    #[error("`topic` must have at most {TOPIC_BYTES_MAX} bytes")]
    Topic,
    /// A rank's port is above the last one.
    #[error("the port of rank {rank} is above 65535: {endpoint}")]
    Port {
        /// The data-parallel rank.
        rank: usize,
        /// The endpoint of the first rank.
        endpoint: EventEndpoint,
    },
}

/// An endpoint. ZeroMQ's rule of vLLM decides who connects: the engine listens at `*` and at addresses with `::`, and
/// connects to all others. `0.0.0.0` is no address to connect to, so the engine listens there too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventEndpoint {
    /// The engine listens: at this address, or where its HTTP server listens (`*`). Port 0 is a free one.
    Listen {
        /// `None` is `*`.
        ip: Option<IpAddr>,
        /// The port.
        port: u16,
    },
    /// The engine connects to a subscriber that listens.
    Connect {
        /// A name or an address.
        host: String,
        /// The port, at least 1.
        port: u16,
    },
}

impl EventEndpoint {
    fn parse(field: &'static str, text: &str) -> Result<Self, KvEventsConfigError> {
        let refused = || KvEventsConfigError::Endpoint { field, endpoint: text.to_owned() };
        let (host, port) =
            text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(refused)?;
        let port: u16 = port.parse().map_err(|_| refused())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = bare.parse::<IpAddr>().ok();
        let is_name = !bare.is_empty()
            && bare.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        match ip {
            _ if bare == "*" => Ok(Self::Listen { ip: None, port }),
            Some(ip) if ip.is_unspecified() || bare.contains("::") => Ok(Self::Listen { ip: Some(ip), port }),
            _ if port > 0 && (ip.is_some() || is_name) => Ok(Self::Connect { host: bare.to_owned(), port }),
            _ => Err(refused()),
        }
    }

    /// The endpoint of a rank: the port + its number. Port 0 is a free one for each.
    ///
    /// # Errors
    /// [`KvEventsConfigError::Port`].
    pub fn of_rank(&self, rank: usize) -> Result<Self, KvEventsConfigError> {
        let own = |port: u16| match port {
            0 => Some(0),
            port => u16::try_from(rank).ok().and_then(|rank| port.checked_add(rank)),
        };
        let refused = || KvEventsConfigError::Port { rank, endpoint: self.clone() };
        match self {
            Self::Listen { ip, port } => Ok(Self::Listen { ip: *ip, port: own(*port).ok_or_else(refused)? }),
            Self::Connect { host, port } => {
                Ok(Self::Connect { host: host.clone(), port: own(*port).ok_or_else(refused)? })
            }
        }
    }

    /// The address to listen at; `own` is that of the HTTP server. `None`: the engine connects.
    pub(super) fn address(&self, own: IpAddr) -> Option<SocketAddr> {
        match self {
            Self::Listen { ip, port } => Some(SocketAddr::new(ip.unwrap_or(own), *port)),
            Self::Connect { .. } => None,
        }
    }

    /// The same endpoint at the port that was taken.
    pub(super) fn at_port(&self, taken: u16) -> Self {
        match self {
            Self::Listen { ip, .. } => Self::Listen { ip: *ip, port: taken },
            Self::Connect { .. } => self.clone(),
        }
    }
}

/// As it is written in the configuration.
impl fmt::Display for EventEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen { ip: None, port } => write!(f, "tcp://*:{port}"),
            Self::Listen { ip: Some(ip), port } => write!(f, "tcp://{}", SocketAddr::new(*ip, *port)),
            Self::Connect { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Connect { host, port } => write!(f, "tcp://{host}:{port}"),
        }
    }
}

impl KvEventsConfig {
    /// Parses the option's JSON. `None`: events are disabled.
    ///
    /// # Errors
    /// [`KvEventsConfigError`].
    pub fn parse(json: &str) -> Result<Option<Self>, KvEventsConfigError> {
        let fields: ConfigFields =
            serde_json::from_str(json).map_err(|error| KvEventsConfigError::Json(error.to_string()))?;
        let publisher = fields.publisher.as_deref().unwrap_or("zmq");
        if !matches!(publisher, "zmq" | "null") {
            return Err(KvEventsConfigError::Publisher(publisher.to_owned()));
        }
        let endpoint = EventEndpoint::parse("endpoint", &fields.endpoint)?;
        let replay_endpoint = fields.replay_endpoint.as_deref().map(replay_endpoint).transpose()?;
        for (name, messages) in [
            ("buffer_steps", fields.buffer_steps),
            ("hwm", fields.hwm),
            ("max_queue_size", fields.max_queue_size),
        ] {
            if !(1..=MESSAGES_MAX).contains(&messages) {
                return Err(KvEventsConfigError::Range(name));
            }
        }
        if fields.topic.len() > TOPIC_BYTES_MAX {
            return Err(KvEventsConfigError::Topic);
        }
        let (buffer_steps, hwm) = (fields.buffer_steps, fields.hwm);
        let (max_queue_size, topic) = (fields.max_queue_size, fields.topic);
        let config = Self { endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic };
        Ok((fields.enable_kv_cache_events && publisher == "zmq").then_some(config))
    }

    /// One rank's entry in the reply to `GET /kv_event_sources`, as in vLLM.
    #[must_use]
    pub fn source(&self, endpoint: &EventEndpoint, replay: Option<&EventEndpoint>) -> Value {
        json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint.to_string(),
            "replay_endpoint": replay.map(ToString::to_string), "buffer_steps": self.buffer_steps,
            "hwm": self.hwm, "max_queue_size": self.max_queue_size, "topic": self.topic,
        })
    }
}

/// The engine always listens for replays, at `*` or at any address.
fn replay_endpoint(text: &str) -> Result<EventEndpoint, KvEventsConfigError> {
    match EventEndpoint::parse("replay_endpoint", text)? {
        EventEndpoint::Connect { host, port } => match host.parse() {
            Ok(ip) => Ok(EventEndpoint::Listen { ip: Some(ip), port }),
            Err(_) => Err(KvEventsConfigError::ReplayHost(text.to_owned())),
        },
        listen @ EventEndpoint::Listen { .. } => Ok(listen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled(fields: &str) -> Result<KvEventsConfig, KvEventsConfigError> {
        let json = format!("{{\"enable_kv_cache_events\": true{fields}}}");
        KvEventsConfig::parse(&json).map(|config| config.expect("it is enabled"))
    }

    fn endpoint(text: &str) -> Result<EventEndpoint, KvEventsConfigError> {
        enabled(&format!(", \"endpoint\": \"{text}\"")).map(|config| config.endpoint)
    }

    #[test]
    fn the_defaults_are_those_of_vllm() {
        let config = enabled("").expect("valid");
        assert_eq!(config.endpoint, EventEndpoint::Listen { ip: None, port: 5557 });
        assert_eq!((config.replay_endpoint.as_ref(), config.topic.as_str()), (None, ""));
        assert_eq!((config.buffer_steps, config.hwm, config.max_queue_size), (10_000, 100_000, 4_096));
        for disabled in [
            "{}",
            r#"{"publisher": "zmq"}"#,
            r#"{"enable_kv_cache_events": true, "publisher": "null"}"#,
            r#"{"publisher": null}"#,
        ] {
            assert_eq!(KvEventsConfig::parse(disabled), Ok(None), "{disabled}");
        }
    }

    #[test]
    fn the_example_of_the_page_is_valid() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/api.md");
        let page = std::fs::read_to_string(page).expect("docs/reference/api.md is there");
        let (_, rest) = page.split_once("baton engine --kv-events-config '").expect("the example");
        let (json, _) = rest.split_once('\'').expect("its end");
        let config = KvEventsConfig::parse(json).expect("valid").expect("it is enabled");
        assert_eq!((config.endpoint.to_string().as_str(), config.topic.as_str()), ("tcp://*:5557", "kv"));
        let table =
            page.split_once("## KV events").expect("the section").1.split("\n## ").next().unwrap_or_default();
        let source = config.source(&config.endpoint, None);
        for field in source.as_object().expect("an object").keys() {
            assert!(table.contains(&format!("| `{field}` |")), "{field} is not in the table");
        }
    }

    #[test]
    fn endpoints_are_read_by_vllms_rule() {
        let listen = |ip: Option<&str>, port| {
            Ok(EventEndpoint::Listen { ip: ip.map(|ip| ip.parse().expect("an address")), port })
        };
        let connect = |host: &str, port| Ok(EventEndpoint::Connect { host: host.to_owned(), port });
        assert_eq!(endpoint("tcp://*:0"), listen(None, 0));
        assert_eq!(endpoint("tcp://0.0.0.0:5557"), listen(Some("0.0.0.0"), 5557));
        assert_eq!(endpoint("tcp://[::]:5557"), listen(Some("::"), 5557));
        assert_eq!(endpoint("tcp://[::1]:5557"), listen(Some("::1"), 5557));
        assert_eq!(endpoint("tcp://127.0.0.1:5557"), connect("127.0.0.1", 5557));
        assert_eq!(endpoint("tcp://router.example:5557"), connect("router.example", 5557));
        for text in ["tcp://*:0", "tcp://0.0.0.0:5557", "tcp://[::1]:5557", "tcp://router.example:1"] {
            assert_eq!(endpoint(text).expect("valid").to_string(), text);
        }
        for wrong in [
            "*:5557",
            "ipc:///tmp/kv",
            "inproc://kv",
            "tcp://*",
            "tcp://*:65536",
            "tcp://:5557",
            "tcp://a b:1",
            "tcp://router:0",
        ] {
            let refused = KvEventsConfigError::Endpoint { field: "endpoint", endpoint: wrong.to_owned() };
            assert_eq!(endpoint(wrong), Err(refused), "{wrong}");
        }
        let replay = |text: &str| enabled(&format!(", \"replay_endpoint\": \"{text}\""));
        let listens = replay("tcp://127.0.0.1:5558").expect("valid").replay_endpoint;
        assert_eq!(listens, listen(Some("127.0.0.1"), 5558).ok());
        assert_eq!(
            replay("tcp://router:5558"),
            Err(KvEventsConfigError::ReplayHost("tcp://router:5558".to_owned()))
        );
    }

    #[test]
    fn each_rank_has_the_next_port() {
        let base = endpoint("tcp://*:65534").expect("valid");
        assert_eq!(base.of_rank(1).map(|own| own.to_string()), Ok("tcp://*:65535".to_owned()));
        assert_eq!(base.of_rank(2), Err(KvEventsConfigError::Port { rank: 2, endpoint: base.clone() }));
        let free = endpoint("tcp://*:0").expect("valid");
        assert_eq!(free.of_rank(3), Ok(free.clone()), "a free port each");
    }

    #[test]
    fn wrong_fields_are_named() {
        for (fields, what) in [
            (r#", "topics": "kv""#, "unknown field `topics`"),
            (r#", "publisher": "nats""#, "`publisher` must be \"zmq\" or \"null\", not \"nats\""),
            (r#", "hwm": 0"#, "`hwm` must be from 1 to 1000000 messages"),
            (r#", "buffer_steps": 1000001"#, "`buffer_steps` must be from 1 to 1000000 messages"),
            (r#", "endpoint": 5557"#, "expected a string"),
        ] {
            let error = enabled(fields).expect_err("refused").to_string();
            assert!(error.contains(what), "{error}");
        }
        let long = format!(", \"topic\": \"{}\"", "x".repeat(65));
        assert_eq!(enabled(&long), Err(KvEventsConfigError::Topic));
    }
}
