//! Requests of Anthropic's Messages and OpenAI's Responses for engines that do not have these APIs: read as the chats
//! that they are translated to.

use baton_openai::translate::messages;
use baton_openai::{ApiError, Endpoint, Object, TranslatedApi, Translation, parse_object, strip};
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::Value;

use super::{ClientRequest, RequestOwner};
use crate::message::path::{Dialect, TOKENIZE};
use crate::message::rewrite::ClientRules;
use crate::state::generation::Generation;

impl ClientRequest {
    /// Like [`ClientRequest::read`], for a path of one of these APIs ([`Dialect::translated_api`]). The chat has no
    /// budget of reasoning: vLLM refuses one unless it is configured for it, also where the client's API requires it.
    ///
    /// # Errors
    /// Those of the translation, and those of the chat.
    pub(crate) fn read_translated(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
    ) -> Result<Self, ApiError> {
        Self::translated(dialect, body, headers, generation, owner, |chat| {
            chat.remove(messages::THINKING_BUDGET);
        })
    }

    /// As [`ClientRequest::read_translated`], for Baton's engines: they have a budget of reasoning.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn read_for_batons(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
    ) -> Result<Self, ApiError> {
        Self::translated(dialect, body, headers, generation, owner, |_| {})
    }

    fn translated(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
        adapt: impl FnOnce(&mut Object),
    ) -> Result<Self, ApiError> {
        let mut fields = parse_object(&body, &generation.parse_limits)?;
        strip(&mut fields, &ClientRules);
        let chat = Dialect::OpenAi(Endpoint::Chat);
        let ((mut translated, translation), dialect) = match dialect {
            Dialect::Messages => (TranslatedApi::Messages.to_chat(&fields)?, chat),
            Dialect::Responses => (TranslatedApi::Responses.to_chat(&fields)?, chat),
            Dialect::OpenAi(_) | Dialect::Passthrough(_) => {
                let count = (messages::to_tokenize(&fields)?, Translation::TokenCount);
                (count, Dialect::Passthrough(TOKENIZE))
            }
        };
        // Both trees may be large, so they exist together only here.
        drop(fields);
        adapt(&mut translated);
        let body = Bytes::from(Value::Object(translated).to_string());
        let read = Self::read(dialect, body, headers, generation, owner);
        let request = read.map_err(|error| translation.api().named(error))?;
        Ok(Self { translation: Some(translation), ..request })
    }
}
