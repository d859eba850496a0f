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
mod kept;
pub mod messages;
pub mod responses;

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value};

use crate::error::ApiError;
use chat_reply::{REPLY_BYTES_MAX, unreadable};
use events::{ChatEvents, translate};
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
pub struct StreamTranslator {
    target: StreamTarget,
    /// Events before an error, which the push that failed has not returned.
    unsent: BytesMut,
}

/// What a stream is translated to.
#[derive(Debug)]
enum StreamTarget {
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
pub(crate) struct FieldName {
    pub(crate) chat: &'static str,
    pub(crate) own: &'static str,
    pub(crate) parts: FieldParts,
}

/// The parts of a field, such as the items of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldParts {
    /// They have the same place in both.
    Same,
    /// They have other places in the request, or none.
    Other,
}

impl FieldName {
    pub(crate) const fn same(chat: &'static str, own: &'static str) -> Self {
        Self { chat, own, parts: FieldParts::Same }
    }

    pub(crate) const fn other(chat: &'static str, own: &'static str) -> Self {
        Self { chat, own, parts: FieldParts::Other }
    }

    /// The name of a chat's field in the request, if it is this one or a part of it.
    fn of(&self, param: &str) -> Option<String> {
        let rest = param.strip_prefix(self.chat)?;
        let is_part = rest.is_empty() || rest.starts_with(['.', '[']);
        is_part.then(|| match self.parts {
            FieldParts::Same => format!("{}{rest}", self.own),
            FieldParts::Other => self.own.to_owned(),
        })
    }
}

/// An error that names a chat's field, with the name of the field that it is made of.
fn renamed(mut error: ApiError, names: &[FieldName]) -> ApiError {
    let Some(param) = error.param.take() else { return error };
    let found = names.iter().find_map(|name| Some((name, name.of(&param)?)));
    error.param = Some(match found {
        Some((FieldName { chat, own, .. }, named)) => {
            let message = error.message.replace(&format!("`{param}`"), &format!("`{named}`"));
            error.message = message.replace(&format!("`{chat}`"), &format!("`{own}`"));
            named
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
        self.json(&read(reply)?).map(Bytes::from)
    }

    /// As [`Self::reply`], with the reply's `kv_transfer_params`. They are for routers, never for clients.
    ///
    /// # Errors
    /// As [`Self::reply`].
    pub fn reply_with_handoff(&self, reply: &[u8]) -> Result<Bytes, ApiError> {
        let chat = read(reply)?;
        let mut json = self.json(&chat)?;
        if let Some(params) = chat.get("kv_transfer_params").filter(|params| !params.is_null()) {
            // One more member of an object that has some.
            json.truncate(json.len() - 1);
            json.push_str(&format!(",\"kv_transfer_params\":{params}}}"));
        }
        Ok(json.into())
    }

    /// The reply of a chat in the form of the API.
    fn json(&self, chat: &Value) -> Result<String, ApiError> {
        match self {
            Self::Message => messages::to_message(chat).map(|message| message.to_string()),
            Self::TokenCount => messages::to_count(chat).map(|count| count.to_string()),
            Self::Response(echo) => responses::to_response(chat, echo),
        }
    }

    /// The translation of a stream; `None` for a reply that is never one.
    #[must_use]
    pub fn stream(&self) -> Option<StreamTranslator> {
        let target = match self {
            Self::Message => StreamTarget::Message(Box::default()),
            Self::TokenCount => return None,
            Self::Response(echo) => StreamTarget::Response(Box::new(ResponsesStream::new(Arc::clone(echo)))),
        };
        Some(StreamTranslator { target, unsent: BytesMut::new() })
    }
}

fn read(reply: &[u8]) -> Result<Value, ApiError> {
    let chat = Some(reply)
        .filter(|reply| reply.len() <= REPLY_BYTES_MAX)
        .and_then(|reply| serde_json::from_slice(reply).ok());
    chat.ok_or_else(|| unreadable("an engine's answer cannot be translated"))
}

impl StreamTranslator {
    /// Translates whole frames of a chat. Events before an error are those of [`Self::fail`].
    ///
    /// # Errors
    /// 502 for a chunk that cannot be translated, or a stream that ends early.
    pub fn push(&mut self, frames: &[u8]) -> Result<Bytes, ApiError> {
        let mut out = std::mem::take(&mut self.unsent);
        let translated = match &mut self.target {
            StreamTarget::Message(stream) => translate(&mut **stream, frames, &mut out),
            StreamTarget::Response(stream) => translate(&mut **stream, frames, &mut out),
        };
        match translated {
            Ok(()) => Ok(out.freeze()),
            Err(error) => {
                self.unsent = out;
                Err(error)
            }
        }
    }

    /// Sets the tokens of the prompt, of its cached part and of the response of a stream whose engine failed before it
    /// counted them.
    pub fn set_usage(&mut self, tokens: [u64; 3]) {
        match &mut self.target {
            StreamTarget::Message(stream) => stream.usage().set_missing(tokens),
            StreamTarget::Response(stream) => stream.usage().set_missing(tokens),
        }
    }

    /// The last bytes of a stream that fails. A client must not take it for a complete one.
    pub fn fail(&mut self, error: &ApiError) -> Bytes {
        let mut out = std::mem::take(&mut self.unsent);
        match &mut self.target {
            StreamTarget::Message(_) => {
                let error = TranslatedApi::Messages.named(error.clone());
                out.extend_from_slice(&messages::error_event(&error));
            }
            StreamTarget::Response(stream) => {
                stream.fail(&TranslatedApi::Responses.named(error.clone()), &mut out);
            }
        }
        out.freeze()
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
        // The places of messages differ, and those of the items of a list do not.
        for (api, chat, own) in [
            (TranslatedApi::Responses, "messages[3].content", "input"),
            (TranslatedApi::Messages, "stop[0]", "stop_sequences[0]"),
            (TranslatedApi::Responses, "stop[0]", "stop[0]"),
        ] {
            assert_eq!(named(api, chat), (own.to_owned(), format!("`{own}` must be a number")));
        }
        assert_eq!(named(TranslatedApi::Messages, "stop_token_ids").0, "stop_token_ids");
        let plain = ApiError::bad_gateway("x");
        assert_eq!(TranslatedApi::Responses.named(plain.clone()), plain);
    }

    #[test]
    fn the_events_before_an_error_are_sent_with_it() {
        let text = |text: &str| {
            let choice = serde_json::json!({"delta": {"content": text}});
            format!(
                "data: {}\n\n",
                serde_json::json!({"id": "chatcmpl-1", "model": "m", "choices": [choice]})
            )
        };
        let echo = Arc::new(RequestEcho::of(&Map::new()));
        for translation in [Translation::Message, Translation::Response(echo)] {
            let mut at_once = translation.stream().expect("a stream");
            let all = text("a") + &text("b") + "data: [1]\n\n";
            let error = at_once.push(all.as_bytes()).expect_err("it is no chunk");
            let mut one_by_one = translation.stream().expect("a stream");
            let mut expected = Vec::new();
            for part in ["a", "b"] {
                expected.extend(one_by_one.push(text(part).as_bytes()).expect("events"));
            }
            expected.extend(one_by_one.fail(&error));
            let found = at_once.fail(&error);
            assert_eq!(String::from_utf8_lossy(&found), String::from_utf8_lossy(&expected));
        }
    }

    #[test]
    fn a_failed_stream_names_the_field_of_its_api() {
        let error = ApiError::invalid("response_format", "`response_format` cannot be met");
        let echo = Arc::new(RequestEcho::of(&Map::new()));
        for (translation, own) in
            [(Translation::Message, "output_config.format"), (Translation::Response(echo), "text.format")]
        {
            let sent = translation.stream().expect("a stream").fail(&error);
            assert!(String::from_utf8_lossy(&sent).contains(&format!("`{own}` cannot be met")), "{own}");
        }
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
