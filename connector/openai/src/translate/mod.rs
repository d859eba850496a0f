//! APIs that are answered as chats: Anthropic's Messages and OpenAI's Responses. Pure.
//!
//! ```text
//! request ─▶ TranslatedApi::to_chat ─▶ chat completion ─▶ engine
//! client ◀── Translation::reply (whole) or StreamTranslator (events) ◀── chat
//! ```
//!
//! Router and engine share the translation, so both give the same response. A field that would change a response and
//! has no counterpart in a chat is refused by name.

mod block;
mod chat_reply;
mod events;
pub mod messages;
pub mod responses;

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::error::ApiError;
use chat_reply::{REPLY_BYTES_MAX, unreadable};
use messages::MessagesStream;
use responses::{RequestEcho, ResponsesStream};

/// An API that is answered as a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TranslatedApi {
    /// Anthropic's `/v1/messages`.
    Messages,
    /// OpenAI's `/v1/responses`.
    Responses,
}

/// What a reply is translated to.
#[derive(Clone, Debug, PartialEq)]
pub enum Translation {
    /// A chat to a message.
    Message,
    /// The reply of `/tokenize` to a count.
    TokenCount,
    /// A chat to a response, which repeats fields of its request.
    Response(Arc<RequestEcho>),
}

/// The translation of one stream.
#[derive(Debug)]
pub enum StreamTranslator {
    /// To the events of a message.
    Message(Box<MessagesStream>),
    /// To the events of a response.
    Response(Box<ResponsesStream>),
}

impl TranslatedApi {
    /// The API whose requests to generate have this path.
    #[must_use]
    pub fn at(path: &str) -> Option<Self> {
        [Self::Messages, Self::Responses].into_iter().find(|api| api.path() == path)
    }

    /// The path of its requests to generate.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Messages => messages::PATH,
            Self::Responses => responses::PATH,
        }
    }

    /// The request as a chat, and the translation of the chat's reply.
    ///
    /// # Errors
    /// 400 with the field that is invalid or has no counterpart. Fields that a chat has too are not checked here.
    pub fn to_chat(self, body: &Map<String, Value>) -> Result<(Map<String, Value>, Translation), ApiError> {
        Ok(match self {
            Self::Messages => (messages::to_chat(body)?, Translation::Message),
            Self::Responses => {
                let chat = responses::to_chat(body)?;
                (chat, Translation::Response(Arc::new(RequestEcho::of(body))))
            }
        })
    }

    /// An error of the chat with the name of the request's own field.
    #[must_use]
    pub fn named(self, error: ApiError) -> ApiError {
        match self {
            Self::Messages => renamed(error, &messages::FIELDS),
            Self::Responses => renamed(error, &responses::FIELDS),
        }
    }
}

/// A field of a chat, and the field that it is made of.
pub(crate) type FieldName = (&'static str, &'static str);

/// An error that names a chat's field, with the name of the field that it is made of.
fn renamed(mut error: ApiError, names: &[FieldName]) -> ApiError {
    let Some(param) = error.param.take() else { return error };
    let found = names.iter().find_map(|(chat, own)| {
        let rest = param.strip_prefix(*chat)?;
        (rest.is_empty() || rest.starts_with(['.', '['])).then_some((*chat, *own))
    });
    error.param = Some(match found {
        // Messages and parts of formats have other places in the request.
        Some((chat, own)) => {
            error.message = error.message.replace(&format!("`{chat}`"), &format!("`{own}`"));
            own.to_owned()
        }
        None => param,
    });
    error
}

impl Translation {
    /// The API of the request.
    #[must_use]
    pub const fn api(&self) -> TranslatedApi {
        match self {
            Self::Message | Self::TokenCount => TranslatedApi::Messages,
            Self::Response(_) => TranslatedApi::Responses,
        }
    }

    /// Translates a whole reply.
    ///
    /// # Errors
    /// 502 for a reply that has no counterpart.
    pub fn reply(&self, reply: &[u8]) -> Result<Bytes, ApiError> {
        self.value(&read(reply)?).map(|value| value.to_string().into())
    }

    /// As [`Self::reply`], with the reply's `kv_transfer_params`. They are for routers, never for clients.
    ///
    /// # Errors
    /// As [`Self::reply`].
    pub fn reply_with_handoff(&self, reply: &[u8]) -> Result<Bytes, ApiError> {
        let mut chat = read(reply)?;
        let mut value = self.value(&chat)?;
        let params = chat.get_mut("kv_transfer_params").map(Value::take);
        if let Some(params) = params.filter(|params| !params.is_null()) {
            value["kv_transfer_params"] = params;
        }
        Ok(value.to_string().into())
    }

    fn value(&self, chat: &Value) -> Result<Value, ApiError> {
        match self {
            Self::Message => messages::to_message(chat),
            Self::TokenCount => messages::to_count(chat),
            Self::Response(echo) => responses::to_response(chat, echo),
        }
    }

    /// The translation of a stream; `None` for a reply that is never one.
    #[must_use]
    pub fn stream(&self) -> Option<StreamTranslator> {
        match self {
            Self::Message => Some(StreamTranslator::Message(Box::default())),
            Self::TokenCount => None,
            Self::Response(echo) => {
                Some(StreamTranslator::Response(Box::new(ResponsesStream::new(Arc::clone(echo)))))
            }
        }
    }
}

fn read(reply: &[u8]) -> Result<Value, ApiError> {
    let chat = Some(reply)
        .filter(|reply| reply.len() <= REPLY_BYTES_MAX)
        .and_then(|reply| serde_json::from_slice(reply).ok());
    chat.ok_or_else(|| unreadable("an engine's answer cannot be translated"))
}

impl StreamTranslator {
    /// Translates whole frames of a chat.
    ///
    /// # Errors
    /// 502 for a chunk that cannot be translated, or a stream that ends early.
    pub fn push(&mut self, frames: &[u8]) -> Result<Bytes, ApiError> {
        match self {
            Self::Message(stream) => stream.push(frames),
            Self::Response(stream) => stream.push(frames),
        }
    }

    /// Sets the tokens of the prompt, of its cached part and of the response of a stream whose engine failed before it
    /// counted them.
    pub fn set_usage(&mut self, tokens: [u64; 3]) {
        match self {
            Self::Message(stream) => stream.set_usage(tokens),
            Self::Response(stream) => stream.set_usage(tokens),
        }
    }

    /// The last bytes of a stream that fails. A client must not take it for a complete one.
    pub fn fail(&mut self, error: &ApiError) -> Bytes {
        match self {
            Self::Message(_) => messages::error_event(error),
            Self::Response(stream) => stream.fail(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_is_known_by_its_path() {
        assert_eq!(TranslatedApi::at("/v1/messages"), Some(TranslatedApi::Messages));
        assert_eq!(TranslatedApi::at("/v1/responses"), Some(TranslatedApi::Responses));
        for path in ["/v1/messages/count_tokens", "/v1/responses/resp_1", "/v1/chat/completions", ""] {
            assert_eq!(TranslatedApi::at(path), None, "{path}");
        }
    }

    #[test]
    fn an_error_names_the_field_of_the_request() {
        let error = |param: &str| ApiError::invalid(param, format!("`{param}` must be a number"));
        let named = |api: TranslatedApi, param: &str| {
            let ApiError { param, message, .. } = api.named(error(param));
            (param.unwrap_or_default(), message)
        };
        for (api, chat, own) in [
            (TranslatedApi::Responses, "max_tokens", "max_output_tokens"),
            (TranslatedApi::Responses, "reasoning_effort", "reasoning.effort"),
            (TranslatedApi::Responses, "top_p", "top_p"),
            (TranslatedApi::Messages, "stop", "stop_sequences"),
            (TranslatedApi::Messages, "max_tokens", "max_tokens"),
        ] {
            assert_eq!(named(api, chat), (own.to_owned(), format!("`{own}` must be a number")));
        }
        let (param, message) = named(TranslatedApi::Responses, "messages[3].content");
        assert_eq!((param.as_str(), message.as_str()), ("input", "`messages[3].content` must be a number"));
        assert_eq!(named(TranslatedApi::Messages, "stop_token_ids").0, "stop_token_ids");
        let plain = ApiError::bad_gateway("x");
        assert_eq!(TranslatedApi::Responses.named(plain.clone()), plain);
    }

    #[test]
    fn a_handoff_is_only_in_the_reply_for_a_router() {
        let chat = serde_json::json!({"id": "chatcmpl-1", "model": "m", "kv_transfer_params": {"a": 1},
            "choices": [{"message": {"content": "x"}, "finish_reason": "length"}]});
        let reply = chat.to_string();
        let echo = Arc::new(RequestEcho::of(&Map::new()));
        for translation in [Translation::Message, Translation::Response(echo)] {
            let has = |reply: Result<Bytes, ApiError>| -> Value {
                let reply: Value = serde_json::from_slice(&reply.expect("a reply")).expect("JSON");
                reply["kv_transfer_params"].clone()
            };
            assert_eq!(has(translation.reply(reply.as_bytes())), Value::Null);
            assert_eq!(has(translation.reply_with_handoff(reply.as_bytes())), chat["kv_transfer_params"]);
            let long = vec![b' '; REPLY_BYTES_MAX + 1];
            assert_eq!(translation.reply(&long).map_err(|error| error.status), Err(502));
            assert_eq!(translation.reply(b"[").map_err(|error| error.status), Err(502));
        }
    }
}
