//! The token ids of a request's prompt: the client's own, or those that an engine tells.

use baton_openai::Endpoint;

use super::ClientRequest;
use crate::message::estimate::NonTextParts;
use crate::message::path::Dialect;
use crate::metrics::Leg;
use crate::metrics::routing::{DisaggregationReason, TokenizeResult};
use crate::routing::models::Models;
use crate::routing::tokenizer::{PromptKind, TokenQuestion};

impl ClientRequest {
    /// Asks an engine for the prompt's token ids, if the model is configured so. Without them the request goes on: its
    /// text is compared instead.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the request without ids.
    pub(crate) async fn tokenize(&mut self, models: &Models) {
        let Some(tokenizer) = models.tokenizer(&self.model).filter(|_| self.dialect.generates()) else {
            return;
        };
        let kind = match self.prompt_kind() {
            Ok(kind) => kind,
            Err(why) => return tokenizer.skip(why),
        };
        let question = TokenQuestion {
            kind,
            body: &self.body,
            model: &self.model.name_in_bodies,
            owner: self.owner,
            authorization: self.authorization.as_ref(),
        };
        let pools = [(Leg::Decode, &*self.model.decode), (Leg::Prefill, &*self.model.prefill)];
        if let Some(ids) = tokenizer.ids(&question, pools).await {
            self.features.set_prompt_ids(ids, &self.model.features);
        }
    }

    /// The kind of the prompt, or why no engine is asked about it.
    fn prompt_kind(&self) -> Result<PromptKind, TokenizeResult> {
        if self.prompt_ids().is_some() {
            return Err(TokenizeResult::Client);
        }
        let kind = match self.dialect {
            Dialect::OpenAi(Endpoint::Chat) => PromptKind::Chat,
            Dialect::OpenAi(Endpoint::Completions) => {
                let is_text = self.body.field("prompt").is_some_and(|prompt| prompt.starts_with(b"\""));
                if is_text { PromptKind::Text } else { return Err(TokenizeResult::NotText) }
            }
            Dialect::Messages => PromptKind::Messages,
            // The prompt is in an engine's memory.
            Dialect::Responses if self.shape.decode_only == Some(DisaggregationReason::EngineState) => {
                return Err(TokenizeResult::Unsupported);
            }
            Dialect::Responses => PromptKind::Responses,
            Dialect::Passthrough(_) => return Err(TokenizeResult::Unsupported),
        };
        // The ids that stand for an image depend on what an engine makes of it.
        if NonTextParts::of(&self.body).tokens > 0 { Err(TokenizeResult::NotText) } else { Ok(kind) }
    }
}
