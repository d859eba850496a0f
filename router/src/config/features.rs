//! What the router looks at in a request to choose engines.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
