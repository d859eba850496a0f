//! The APIs of requests to generate: completions, chats, and those that are answered as chats. A translation is around
//! the chat: it makes the request a chat before it is read, and the chat's reply that of the API.

use std::collections::VecDeque;

use baton_openai::{
    ApiError, ChunkEncoder, Endpoint, FinishedChoice, GenerateRequest, Object, ParseLimits, ReplyHead,
    StreamTranslator, TranslatedApi, Translation, Usage, sse,
};
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};

use crate::server::transfer_params::ROUTER_SETTLES;

/// The API of a request to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum GenerateApi {
    OpenAi(Endpoint),
    /// Answered as a chat.
    Translated(TranslatedApi),
}

/// The form of a reply.
pub(super) struct ReplyForm {
    pub(super) head: ReplyHead,
    /// Set if the chat is translated.
    pub(super) translation: Option<Translation>,
}

/// The frames of a stream that are not sent yet, translated if its API needs it.
pub(super) struct FrameQueue {
    frames: VecDeque<Bytes>,
    translator: Option<StreamTranslator>,
    has_failed: bool,
}

impl GenerateApi {
    /// The API of a path that generates.
    pub(in crate::server) fn at(path: &str) -> Option<Self> {
        let translated = || TranslatedApi::at(path).map(Self::Translated);
        Endpoint::at(path).map(Self::OpenAi).or_else(translated)
    }

    /// Answers a router that asks with an empty request whether this engine wants this API: it gets 404, because a router
    /// that translates can continue a broken stream at another engine.
    ///
    /// # Errors
    /// 404 for such a question.
    pub(super) fn check_asker(self, body: &Object, headers: &HeaderMap) -> Result<(), ApiError> {
        match self {
            Self::Translated(api) if body.is_empty() && headers.contains_key(ROUTER_SETTLES) => {
                Err(ApiError::unsupported_endpoint(api.path()))
            }
            Self::OpenAi(_) | Self::Translated(_) => Ok(()),
        }
    }

    /// Reads a request, and what its reply is translated to.
    ///
    /// # Errors
    /// 400 with the field of this API.
    pub(super) fn read(
        self,
        body: &Object,
        limits: &ParseLimits,
    ) -> Result<(GenerateRequest, Option<Translation>), ApiError> {
        match self {
            Self::OpenAi(endpoint) => Ok((GenerateRequest::from_map(endpoint, body, limits)?, None)),
            Self::Translated(api) => {
                let (mut chat, translation) = api.to_chat(body)?;
                if chat.get("stream") == Some(&Value::Bool(true)) {
                    // The last events of these APIs contain it.
                    chat.insert("stream_options".to_owned(), json!({"include_usage": true}));
                }
                // The translation has named the client's own fields, and the chat has others.
                let read = GenerateRequest::from_map(Endpoint::Chat, &chat, limits);
                Ok((read.map_err(|error| self.named(error))?, Some(translation)))
            }
        }
    }

    /// An error of the chat with the name of the field in this API.
    pub(super) fn named(self, error: ApiError) -> ApiError {
        match self {
            Self::OpenAi(_) => error,
            Self::Translated(api) => api.named(error),
        }
    }
}

impl ReplyForm {
    /// A reply in one piece.
    ///
    /// # Errors
    /// 502 for a chat without a counterpart, such as one that was aborted.
    pub(super) fn whole(
        &self,
        choices: &[FinishedChoice],
        usage: &Usage,
        params: Option<&Value>,
    ) -> Result<Bytes, ApiError> {
        let chat = self.head.full(choices, usage, params);
        match &self.translation {
            None => Ok(chat),
            Some(translation) => translation.reply_with_handoff(&chat),
        }
    }

    pub(super) fn chunks(&self) -> ChunkEncoder {
        self.head.chunks()
    }

    pub(super) fn frames(&self) -> FrameQueue {
        let translator = self.translation.as_ref().and_then(Translation::stream);
        FrameQueue { frames: VecDeque::new(), translator, has_failed: false }
    }
}

impl FrameQueue {
    /// Adds frames of the chat or of the completion. A chunk without a counterpart fails the stream.
    pub(super) fn push(&mut self, frames: Bytes) {
        let Some(translator) = &mut self.translator else { return self.frames.push_back(frames) };
        if self.has_failed {
            return;
        }
        match translator.push(&frames) {
            Ok(translated) if translated.is_empty() => {}
            Ok(translated) => self.frames.push_back(translated),
            Err(error) => self.fail(&error),
        }
    }

    /// Adds the end of a stream that fails.
    pub(super) fn fail(&mut self, error: &ApiError) {
        if std::mem::replace(&mut self.has_failed, true) {
            return;
        }
        match &mut self.translator {
            Some(translator) => self.frames.push_back(translator.fail(error)),
            None => self.frames.extend([error.to_sse(), sse::DONE]),
        }
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        self.frames.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether nothing follows the frames.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether the stream contains the handoff of its request. The APIs that are translated have no place for it.
    pub(super) fn has_handoff(&self) -> bool {
        self.translator.is_none()
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn read(path: &str, body: &Value) -> Result<GenerateRequest, Option<String>> {
        let api = GenerateApi::at(path).expect("it generates");
        let body = body.as_object().expect("an object");
        api.read(body, &ParseLimits::default()).map(|(request, _)| request).map_err(|error| error.param)
    }

    #[test]
    fn three_apis_make_the_same_request() {
        let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        let chat = json!({"messages": messages, "max_tokens": 9, "stream": true, "top_p": 0.5,
            "stream_options": {"include_usage": true}});
        let expected = read("/v1/chat/completions", &chat);
        assert!(expected.is_ok());
        let message = json!({"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9, "stream": true, "top_p": 0.5});
        assert_eq!(read("/v1/messages", &message), expected);
        let response = json!({"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 9,
            "stream": true, "top_p": 0.5});
        assert_eq!(read("/v1/responses", &response), expected);
    }

    #[test]
    fn an_error_names_the_field_of_its_api() {
        let user = json!([{"role": "user", "content": "x"}]);
        let stop = json!({"messages": user, "max_tokens": 1, "stop_sequences": [7]});
        for (path, body, param) in [
            ("/v1/responses", json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
            ("/v1/responses", json!({"input": "x", "background": true}), "background"),
            ("/v1/responses", json!({"input": "x", "prompt": {"id": "p"}}), "prompt"),
            ("/v1/messages", stop, "stop_sequences[0]"),
            ("/v1/messages", json!({"messages": [], "max_tokens": 1}), "messages"),
            ("/v1/chat/completions", json!({"messages": []}), "messages"),
        ] {
            assert_eq!(read(path, &body), Err(Some(param.to_owned())), "{path}: {body}");
        }
    }

    #[test]
    fn only_the_question_of_a_router_is_answered_that_the_path_is_missing() {
        let asks = |path: &str, body: Value, is_router: bool| {
            let mut headers = HeaderMap::new();
            if is_router {
                headers.insert(ROUTER_SETTLES, HeaderValue::from_static("1"));
            }
            let api = GenerateApi::at(path).expect("it generates");
            api.check_asker(body.as_object().expect("an object"), &headers).map_err(|error| error.status)
        };
        for path in ["/v1/messages", "/v1/responses"] {
            assert_eq!(asks(path, json!({}), true), Err(404));
            assert_eq!(asks(path, json!({}), false), Ok(()));
            assert_eq!(asks(path, json!({"model": "m"}), true), Ok(()));
        }
        assert_eq!(asks("/v1/chat/completions", json!({}), true), Ok(()));
    }

    #[test]
    fn a_stream_that_cannot_be_translated_fails_once() {
        let mut frames = FrameQueue {
            frames: VecDeque::new(),
            translator: Translation::Message.stream(),
            has_failed: false,
        };
        frames.push(Bytes::from_static(b"data: [1]\n\n"));
        frames.push(sse::DONE);
        frames.fail(&ApiError::internal("x"));
        assert!(frames.has_failed() && !frames.has_handoff());
        let sent: Vec<Bytes> = std::iter::from_fn(|| frames.pop()).collect();
        assert_eq!(sent.len(), 1);
        assert!(sent[0].starts_with(b"event: error\n") && frames.is_empty());
    }
}
