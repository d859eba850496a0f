//! Decode engines that are given something to compute, so that they look at the next handoff a little later.
//!
//! ```text
//!  P  ├── prefill of the client's prompt ──┤ lent
//!  D            ├── prompt of ours, one step ──────┤ looks at the handoff
//!                                         └─ gap ──┘ the client leaves in here
//! ```

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use super::super::look::Engine;
use super::prompt;
use crate::common::http_client::{Origin, WebError};

/// More decode engines are not occupied for the sake of a check: a handoff goes to any of them.
const ENGINES_MAX: usize = 8;
/// A prompt on a busy engine.
const PATIENCE: Duration = Duration::from_secs(30);
/// The client leaves at some moment within this time after it is known that the blocks are lent.
pub(super) const LEAVES_WITHIN_US: u64 = 1_500;
/// When the engines are occupied, as shares of the time until the blocks are lent; try by try.
const BEGINS: [f64; 3] = [0.5, 0.7, 0.3];

/// The decode engines that can be occupied.
#[derive(Default)]
pub(super) struct Crew {
    engines: Vec<Origin>,
    taken: u32,
    refused: u32,
}

/// Prompts that are being computed.
pub(super) struct Occupied(JoinSet<Result<serde_json::Value, WebError>>);

impl Crew {
    /// The decode engines of a model; nobody where they are too many.
    pub(super) fn of(engines: &[&Engine], model: &str) -> Self {
        let decodes = |engine: &&&Engine| {
            matches!(engine.role.as_deref(), Some("decode" | "both"))
                && (engine.models.is_empty() || engine.models.contains(model))
        };
        let engines: Vec<_> = engines.iter().filter(decodes).map(|engine| engine.origin.clone()).collect();
        let engines = if engines.len() > ENGINES_MAX { Vec::new() } else { engines };
        Self { engines, ..Self::default() }
    }

    pub(super) fn is_there(&self) -> bool {
        !self.engines.is_empty()
    }

    /// Prompts that were taken, and that were refused.
    pub(super) fn counts(&self) -> (u32, u32) {
        (self.taken, self.refused)
    }

    /// Gives each engine a prompt of as many words some time before the blocks are lent.
    pub(super) fn occupy(
        &self,
        model: &str,
        tag: &str,
        words: usize,
        lent_after: Duration,
        attempt: u32,
    ) -> Occupied {
        let after = lent_after.mul_f64(BEGINS[attempt as usize % BEGINS.len()]);
        let mut prompts = JoinSet::new();
        for (number, engine) in self.engines.iter().enumerate() {
            let engine = engine.clone();
            // No tag of ours: its events are nobody's business.
            let body = json!({
                "model": model, "prompt": prompt(&format!("{tag}-{number}-occupied"), words), "max_tokens": 1,
                "temperature": 0, "user": "baton-doctor-occupies",
            });
            prompts.spawn(async move {
                tokio::time::sleep(after).await;
                engine.post_json("/v1/completions", &body, PATIENCE).await
            });
        }
        Occupied(prompts)
    }

    /// Waits until they are computed.
    pub(super) async fn rest(&mut self, mut occupied: Occupied) {
        while let Some(ended) = occupied.0.join_next().await {
            match ended {
                Ok(Ok(_)) => self.taken += 1,
                Ok(Err(_)) | Err(_) => self.refused += 1,
            }
        }
    }
}
