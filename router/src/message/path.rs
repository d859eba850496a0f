//! Routes of the client listener, and the endpoints of engines.

use std::borrow::Cow;

use baton_openai::translate::{messages, responses};
use baton_openai::{ApiError, Endpoint, TranslatedApi, path};
use hyper::Method;

use crate::message::sse::StreamEnding;

/// The API of a request to engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Completions and chats.
    OpenAi(Endpoint),
    /// OpenAI's newer `/v1/responses`.
    Responses,
    /// Anthropic's `/v1/messages`.
    Messages,
    /// Not generated: one engine of the decode pool answers the request, at this path.
    Passthrough(&'static str),
}

impl Dialect {
    /// The generating API at a path.
    pub(crate) fn at(path: &str) -> Option<Self> {
        match TranslatedApi::at(path) {
            Some(api) => Some(Self::of(api)),
            None => Endpoint::at(path).map(Self::OpenAi),
        }
    }

    /// That of an API that may be translated, as engines that have it get it.
    pub(crate) fn of(api: TranslatedApi) -> Self {
        match api {
            TranslatedApi::Messages => Self::Messages,
            TranslatedApi::Responses => Self::Responses,
        }
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::OpenAi(endpoint) => endpoint.path(),
            Self::Responses => responses::PATH,
            Self::Messages => messages::PATH,
            Self::Passthrough(path) => path,
        }
    }

    /// Whether the API has a prefill and a decode leg.
    pub(crate) fn generates(self) -> bool {
        !matches!(self, Self::Passthrough(_))
    }

    /// The field that bounds the output.
    pub(crate) fn length_field(self) -> &'static str {
        match self {
            Self::OpenAi(_) | Self::Messages | Self::Passthrough(_) => "max_tokens",
            Self::Responses => "max_output_tokens",
        }
    }

    /// What a stream sends while it waits: a comment without a blank line, which readers skip. To readers that take each
    /// blank line for the end of an event, it is a line of the next event. Messages have an event for it.
    pub(crate) fn comment(self) -> &'static [u8] {
        match self {
            Self::OpenAi(_) | Self::Responses | Self::Passthrough(_) => b": ka\n",
            Self::Messages => b"event: ping\ndata: {\"type\": \"ping\"}\n\n",
        }
    }

    /// What ends a stream.
    pub(crate) fn stream_ending(self) -> StreamEnding {
        match self {
            Self::OpenAi(_) | Self::Passthrough(_) => StreamEnding::Done,
            Self::Messages => StreamEnding::MessageStop,
            Self::Responses => StreamEnding::ResponseEnd,
        }
    }

    /// The API of a request that is translated for engines without it.
    pub(crate) fn translated_api(self) -> Option<TranslatedApi> {
        match self {
            Self::Messages | Self::Passthrough(messages::COUNT_TOKENS) => Some(TranslatedApi::Messages),
            Self::Responses => Some(TranslatedApi::Responses),
            Self::OpenAi(_) | Self::Passthrough(_) => None,
        }
    }
}

/// The tokens of a prompt or a conversation.
pub(crate) const TOKENIZE: &str = "/tokenize";

/// Paths that one engine of the decode pool answers.
const PASSTHROUGH_PATHS: [&str; 12] = [
    TOKENIZE,
    "/detokenize",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/pooling",
    messages::COUNT_TOKENS,
];

/// The route of a client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route<'a> {
    /// A request for engines.
    Ask(Dialect),
    /// The list of models.
    Models,
    /// One model.
    Model(Cow<'a, str>),
    /// Whether the router is alive.
    Health,
    /// Whether the router accepts requests and has an engine for them.
    Ready,
    /// The router's version.
    Version,
    /// The methods of a path.
    Options(&'static str),
}

impl<'a> Route<'a> {
    /// # Errors
    /// 404, or 405 if only the method is wrong; 400 for a model's name with a malformed escape.
    pub(crate) fn of(method: &Method, path: &'a str) -> Result<Self, ApiError> {
        let (route, allowed) = match (Self::fixed(path), path::model_at(path)) {
            (Some(fixed), _) => fixed,
            (None, Some(name)) => (Self::Model(name?), Method::GET),
            (None, None) => return Err(path::not_found(path, |meant| Self::fixed(meant).is_some())),
        };
        // A path that allows GET also allows HEAD.
        if *method == allowed || (*method == Method::HEAD && allowed == Method::GET) {
            return Ok(route);
        }
        let allowed = if allowed == Method::GET { "GET, HEAD, OPTIONS" } else { "POST, OPTIONS" };
        if *method == Method::OPTIONS {
            return Ok(Self::Options(allowed));
        }
        Err(ApiError::method_not_allowed(method.as_str(), allowed))
    }

    /// The route of a path in the tables above, with its method.
    fn fixed(path: &str) -> Option<(Self, Method)> {
        Some(match path {
            "/v1/models" => (Self::Models, Method::GET),
            "/health" => (Self::Health, Method::GET),
            "/ready" => (Self::Ready, Method::GET),
            "/version" => (Self::Version, Method::GET),
            _ => {
                let passed =
                    || PASSTHROUGH_PATHS.into_iter().find(|passed| *passed == path).map(Dialect::Passthrough);
                (Self::Ask(Dialect::at(path).or_else(passed)?), Method::POST)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_exactly_and_by_its_method() {
        let route = |method, path| Route::of(&method, path).map_err(|e| e.status);
        assert_eq!(
            route(Method::POST, "/v1/completions"),
            Ok(Route::Ask(Dialect::OpenAi(Endpoint::Completions)))
        );
        assert_eq!(route(Method::GET, "/v1/models/a/b"), Ok(Route::Model("a/b".into())));
        assert_eq!(route(Method::GET, "/v1/models/a%2Fb"), Ok(Route::Model("a/b".into())));
        assert_eq!(route(Method::GET, "/v1/models/a%2"), Err(400));
        assert_eq!(route(Method::POST, "/v1/responses"), Ok(Route::Ask(Dialect::Responses)));
        assert_eq!(
            route(Method::POST, "/v1/embeddings"),
            Ok(Route::Ask(Dialect::Passthrough("/v1/embeddings")))
        );
        assert_eq!(route(Method::POST, "/v1/messages"), Ok(Route::Ask(Dialect::Messages)));
        let count = Route::Ask(Dialect::Passthrough("/v1/messages/count_tokens"));
        assert_eq!(route(Method::POST, "/v1/messages/count_tokens"), Ok(count));
        assert_eq!(route(Method::HEAD, "/health"), Ok(Route::Health));
        assert_eq!(route(Method::GET, "/ready"), Ok(Route::Ready));
        assert_eq!(route(Method::OPTIONS, "/v1/completions"), Ok(Route::Options("POST, OPTIONS")));
        assert_eq!(route(Method::HEAD, "/v1/completions"), Err(405));
        assert_eq!(route(Method::OPTIONS, "/nowhere"), Err(404));
        assert_eq!(route(Method::GET, "/v1/completions"), Err(405));
        for unknown in ["/", "/v1/completions/", "/kv/release", "/abort_requests", "/v1/models/", "/metrics"]
        {
            assert_eq!(route(Method::POST, unknown), Err(404), "{unknown}");
        }
    }
}
