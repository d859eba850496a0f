//! Requests of Anthropic's Messages API for engines that do not have it: read as the chat that they are translated to.

use baton_openai::{ApiError, Endpoint, parse_object, strip};
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::Value;

use super::{ClientRequest, RequestOwner};
use crate::anthropic::{Translation, chat};
use crate::message::path::{Dialect, TOKENIZE};
use crate::message::rewrite::ClientRules;
use crate::state::generation::Generation;

impl ClientRequest {
    /// Like [`ClientRequest::read`], for a path of Messages ([`Dialect::is_of_messages`]).
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
        let mut fields = parse_object(&body, &generation.parse_limits)?;
        strip(&mut fields, &ClientRules);
        let (translated, dialect, translation) = match dialect {
            Dialect::Messages => {
                (chat::to_chat(&fields)?, Dialect::OpenAi(Endpoint::Chat), Translation::Message)
            }
            Dialect::OpenAi(_) | Dialect::Responses | Dialect::Passthrough(_) => {
                (chat::to_tokenize(&fields)?, Dialect::Passthrough(TOKENIZE), Translation::TokenCount)
            }
        };
        // Both trees may be large, so they exist together only here.
        drop(fields);
        let body = Bytes::from(Value::Object(translated).to_string());
        let request = Self::read(dialect, body, headers, generation, owner)?;
        Ok(Self { translation: Some(translation), ..request })
    }
}
