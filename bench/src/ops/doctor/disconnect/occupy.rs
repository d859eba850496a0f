//! Keeps decode engines busy, so that they accept the next handoff later.
//!
//! ```text
//!  P  ├── prefill of the client's prompt ──┤ lease opened
//!  D            ├── own prompt, one step ──────────┤ accepts the handoff
//!                                         └─ gap ──┘ the client disconnects
//! ```

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use super::super::engine::EngineInfo;
use super::prompt;
use crate::common::http_client::{ServiceClient, WebError};

/// With more decode engines none is occupied, because a handoff may go to any of them.
const ENGINES_MAX: usize = 8;
/// Maximum time of a prompt on a busy engine.
const PATIENCE: Duration = Duration::from_secs(30);
/// The client disconnects within this time after the lease is reported.
pub(super) const LEAVES_WITHIN_US: u64 = 1_500;
/// When the engines are occupied, as a fraction of the time until the lease, per attempt.
const BEGINS: [f64; 3] = [0.5, 0.7, 0.3];

/// The decode engines that can be occupied.
#[derive(Default)]
pub(super) struct DecodeOccupier {
    engines: Vec<ServiceClient>,
    taken: u32,
    refused: u32,
}

/// Prompts that are being computed.
pub(super) struct OccupyingRequests(JoinSet<Result<serde_json::Value, WebError>>);

impl DecodeOccupier {
    /// The decode engines of a model. Empty if there are too many.
    pub(super) fn of(engines: &[&EngineInfo], model: &str) -> Self {
        let decodes = |engine: &&&EngineInfo| {
            matches!(engine.role.as_deref(), Some("decode" | "both" | "standalone"))
                && (engine.models.is_empty() || engine.models.contains(model))
        };
        let engines: Vec<_> = engines.iter().filter(decodes).map(|engine| engine.service.clone()).collect();
        let engines = if engines.len() > ENGINES_MAX { Vec::new() } else { engines };
        Self { engines, ..Self::default() }
    }

    pub(super) fn is_there(&self) -> bool {
        !self.engines.is_empty()
    }

    /// Accepted prompts and refused prompts.
    pub(super) fn counts(&self) -> (u32, u32) {
        (self.taken, self.refused)
    }

    /// Sends each engine a prompt of `words` words some time before the blocks are leased.
    pub(super) fn occupy(
        &self,
        model: &str,
        tag: &str,
        words: usize,
        leased_after: Duration,
        attempt: u32,
    ) -> OccupyingRequests {
        let after = leased_after.mul_f64(BEGINS[attempt as usize % BEGINS.len()]);
        let mut prompts = JoinSet::new();
        for (number, engine) in self.engines.iter().enumerate() {
            let engine = engine.clone();
            // Without the tag, so that the prompt's events are ignored.
            let body = json!({
                "model": model, "prompt": prompt(&format!("{tag}-{number}-occupied"), words), "max_tokens": 1,
                "temperature": 0, "user": "baton-doctor-occupies",
            });
            prompts.spawn(async move {
                tokio::time::sleep(after).await;
                engine.post_json("/v1/completions", &body, PATIENCE).await
            });
        }
        OccupyingRequests(prompts)
    }

    /// Waits until the prompts are computed.
    pub(super) async fn rest(&mut self, mut occupied: OccupyingRequests) {
        while let Some(ended) = occupied.0.join_next().await {
            match ended {
                Ok(Ok(_)) => self.taken += 1,
                Ok(Err(_)) | Err(_) => self.refused += 1,
            }
        }
    }
}
