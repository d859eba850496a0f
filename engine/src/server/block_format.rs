//! The format of this engine's KV blocks. A handoff of another format is refused.

use baton_connector::slice::Geometry;
use baton_connector::{Handoff, KvLayout};
use baton_openai::{ApiError, Code};

use super::transfer_params::PARAMS;

/// Layout and model of this engine's KV blocks.
pub struct BlockFormat {
    /// Their fingerprint.
    pub fingerprint: u64,
    /// The shards of the KV caches.
    pub geometry: Geometry,
}

impl BlockFormat {
    /// Refuses a handoff whose blocks cannot be used here.
    pub(super) fn check(&self, handoff: &Handoff) -> Result<(), ApiError> {
        let refuse =
            |message: String| Err(ApiError::invalid(PARAMS, message).with_code(Code::KvLayoutMismatch));
        if handoff.layout != self.fingerprint {
            return refuse("the producer's blocks have another layout or another model".into());
        }
        let theirs = KvLayout { block_tokens: handoff.block_tokens, ..self.geometry.whole() };
        let theirs = Geometry::new(theirs, handoff.ports.len());
        match theirs.and_then(|theirs| theirs.links(&self.geometry)) {
            Ok(_) => Ok(()),
            Err(error) => refuse(format!("the producer's blocks cannot be used here: {error}")),
        }
    }
}
