//! How the router chooses an engine of a pool, and what it reads of a request for this choice. A policy is a name, or a
//! name with parameters:
//!
//! ```yaml
//! policy: least_load
//! policy: {prefix_aware: {balance_abs: 16, balance_rel: 1.5}}
//! ```

use std::borrow::Cow;
use std::fmt;

use garde::Validate;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The names of all policies in a configuration.
const NAMES: &[&str] =
    &["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix_aware"];

/// How an engine of a pool is chosen: a name, or a map of one name to its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Validate)]
#[serde(rename_all = "snake_case")]
pub enum PolicyConfig {
    /// One after the other, by weight.
    RoundRobin(#[garde(dive)] NoParameters),
    /// A random engine, by weight.
    Random(#[garde(dive)] NoParameters),
    /// The less loaded of two engines drawn by weight.
    PowerOfTwo(#[garde(dive)] LoadConfig),
    /// The least loaded engine for its weight; equal engines take turns.
    LeastLoad(#[garde(dive)] LoadConfig),
    /// The engine of the request's key, unless it has more than its share.
    ConsistentHash(#[garde(dive)] ConsistentHashConfig),
    /// The engine that has most of the prompt cached, unless it is too busy.
    PrefixAware(#[garde(dive)] PrefixAwareConfig),
}

/// A policy without parameters.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// The unit of load.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct LoadConfig {
    /// `requests` in flight, or the `tokens` of their prompts (estimated). Default `requests`.
    #[garde(skip)]
    pub by: LoadUnit,
}

/// The unit of load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoadUnit {
    /// Requests in flight. If the router reads the engine's metrics, the larger of both numbers.
    #[default]
    Requests,
    /// Prompt tokens of the requests in flight, estimated from the prompts' sizes.
    Tokens,
}

/// Parameters of `consistent_hash`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ConsistentHashConfig {
    /// The part of a request to hash: the first of these that it has. Default `[session, user, prefix]`.
    #[garde(length(min = 1, max = 3))]
    pub keys: Vec<AffinityKey>,
    /// Limit of an engine's requests in flight, as a multiple of its fair share. At the limit the router
    /// takes the next engine in the key's order. 1.0 to 100.0; default 1.25.
    #[garde(range(min = 1.0, max = 100.0))]
    pub load_factor: f64,
    /// The key `prefix` is this many chunks of the prompt (`features.chunk_bytes`). 1 to 1,024; default 4.
    #[garde(range(min = 1, max = 1024))]
    pub prefix_chunks: usize,
}

/// A part of a request that determines its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AffinityKey {
    /// The session header (`features.session_header`).
    Session,
    /// The body's `user`.
    User,
    /// The beginning of the prompt.
    Prefix,
}

/// Parameters of `prefix_aware`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixAwareConfig {
    /// An engine is too busy for its cached prefix if it has this many more requests in flight than the least
    /// loaded one, and `balance_rel` is reached too. 0 to 100,000; default 8.
    #[garde(range(max = 100_000))]
    pub balance_abs: u32,
    /// An engine is too busy for its cached prefix if it has this many times the requests of the least loaded
    /// one, and `balance_abs` is reached too. 1.0 to 1,000.0; default 1.5.
    #[garde(range(min = 1.0, max = 1000.0))]
    pub balance_rel: f64,
    /// Shortest match that justifies a busier engine, as a share of the prompt. 0.0 to 1.0; default 0.1.
    #[garde(range(min = 0.0, max = 1.0))]
    pub match_min: f64,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self::LeastLoad(LoadConfig::default())
    }
}

impl Default for ConsistentHashConfig {
    fn default() -> Self {
        let keys = vec![AffinityKey::Session, AffinityKey::User, AffinityKey::Prefix];
        Self { keys, load_factor: 1.25, prefix_chunks: 4 }
    }
}

impl Default for PrefixAwareConfig {
    fn default() -> Self {
        Self { balance_abs: 8, balance_rel: 1.5, match_min: 0.1 }
    }
}

impl PolicyConfig {
    /// The policy's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::RoundRobin(_) => "round_robin",
            Self::Random(_) => "random",
            Self::PowerOfTwo(_) => "power_of_two",
            Self::LeastLoad(_) => "least_load",
            Self::ConsistentHash(_) => "consistent_hash",
            Self::PrefixAware(_) => "prefix_aware",
        }
    }
}

impl<'de> Deserialize<'de> for PolicyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PolicyVisitor)
    }
}

struct PolicyVisitor;

impl<'de> Visitor<'de> for PolicyVisitor {
    type Value = PolicyConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a policy's name, or a map of one name to its parameters")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<PolicyConfig, E> {
        match name {
            "round_robin" => Ok(PolicyConfig::RoundRobin(NoParameters {})),
            "random" => Ok(PolicyConfig::Random(NoParameters {})),
            "power_of_two" => Ok(PolicyConfig::PowerOfTwo(LoadConfig::default())),
            "least_load" => Ok(PolicyConfig::LeastLoad(LoadConfig::default())),
            "consistent_hash" => Ok(PolicyConfig::ConsistentHash(ConsistentHashConfig::default())),
            "prefix_aware" => Ok(PolicyConfig::PrefixAware(PrefixAwareConfig::default())),
            other => Err(E::unknown_variant(other, NAMES)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PolicyConfig, A::Error> {
        let Some(name) = map.next_key::<String>()? else {
            return Err(de::Error::invalid_length(0, &"a map of one policy"));
        };
        let policy = match name.as_str() {
            "round_robin" => PolicyConfig::RoundRobin(map.next_value()?),
            "random" => PolicyConfig::Random(map.next_value()?),
            "power_of_two" => PolicyConfig::PowerOfTwo(map.next_value()?),
            "least_load" => PolicyConfig::LeastLoad(map.next_value()?),
            "consistent_hash" => PolicyConfig::ConsistentHash(map.next_value()?),
            "prefix_aware" => PolicyConfig::PrefixAware(map.next_value()?),
            other => return Err(de::Error::unknown_variant(other, NAMES)),
        };
        match map.next_key::<String>()? {
            None => Ok(policy),
            Some(second) => Err(de::Error::custom(format!("a second policy, `{second}`, beside `{name}`"))),
        }
    }
}

/// The map form; only its schema is used.
#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(dead_code, reason = "the schema is made of the type alone")]
enum WithParameters {
    /// One after the other, by weight.
    RoundRobin(NoParameters),
    /// A random engine, by weight.
    Random(NoParameters),
    /// The less loaded of two engines drawn by weight.
    PowerOfTwo(LoadConfig),
    /// The least loaded engine for its weight; equal engines take turns.
    LeastLoad(LoadConfig),
    /// The engine of the request's key, unless it has more than its share.
    ConsistentHash(ConsistentHashConfig),
    /// The engine that has most of the prompt cached, unless it is too busy.
    PrefixAware(PrefixAwareConfig),
}

impl JsonSchema for PolicyConfig {
    fn schema_name() -> Cow<'static, str> {
        "PolicyConfig".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let with_parameters = generator.subschema_for::<WithParameters>();
        json_schema!({
            "description": "How an engine of a pool is chosen: a name, or a map of one name to its parameters.",
            "anyOf": [{"type": "string", "enum": NAMES}, with_parameters],
        })
    }
}

/// What the router reads of a request to choose engines, if a policy or `disaggregate` needs it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct FeaturesConfig {
    /// The header that names a session. At most 64 bytes; default `x-session-id`.
    #[garde(length(bytes, min = 1, max = 64), custom(header_name))]
    pub session_header: String,
    /// Prompts are compared in pieces of this many bytes of their JSON. 64 to 65,536; default 512, which is
    /// about 128 tokens of English.
    #[garde(range(min = 64, max = 65_536))]
    pub chunk_bytes: usize,
    /// Pieces of one prompt that are compared, from its beginning. 1 to 4,096; default 512.
    #[garde(range(min = 1, max = 4096))]
    pub chunks_max: usize,
    /// Bytes of a prompt's JSON per token, to estimate tokens. 0.5 to 64.0; default 4.0.
    #[garde(range(min = 0.5, max = 64.0))]
    pub bytes_per_token: f64,
}

impl Default for FeaturesConfig {
    fn default() -> Self {
        Self {
            session_header: "x-session-id".to_owned(),
            chunk_bytes: 512,
            chunks_max: 512,
            bytes_per_token: 4.0,
        }
    }
}

fn header_name(name: &str, _: &()) -> garde::Result {
    let known = hyper::header::HeaderName::try_from(name).is_ok();
    known.then_some(()).ok_or_else(|| garde::Error::new("is not the name of a header"))
}
