//! Paths of requests: the model's name in a path, and the suggestion for a path that differs by slashes.

use std::borrow::Cow;

use crate::error::ApiError;

/// Paths of the OpenAI API and of the extensions that vLLM, SGLang and Anthropic's clients use, with all paths below
/// them.
const KNOWN: [&str; 28] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/conversations",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/moderations",
    "/v1/audio",
    "/v1/images",
    "/v1/videos",
    "/v1/realtime",
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
    "/v1/fine_tuning",
    "/v1/vector_stores",
    "/v1/assistants",
    "/v1/threads",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
];

/// The prefix of the paths of models.
const MODELS: &str = "/v1/models/";

/// The percent-decoded model of `GET /v1/models/{name}`, which may contain slashes. `None` for any other path.
///
/// # Errors
/// 400 if an escape is not two hexadecimal digits, or the name is not UTF-8.
pub fn model_at(path: &str) -> Option<Result<Cow<'_, str>, ApiError>> {
    let name = path.strip_prefix(MODELS).filter(|name| !name.is_empty())?;
    let malformed = || {
        ApiError::invalid(
            "model",
            "the model's name in the path must be percent-encoded UTF-8, such as `a%2Fb`",
        )
    };
    Some(decoded(name).ok_or_else(malformed))
}

/// `None` if an escape is malformed or the text is not UTF-8.
fn decoded(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let [high, low, after @ ..] = rest else { return None };
        let digit = |byte: u8| char::from(byte).to_digit(16);
        bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

/// The path as the most lenient server reads it: percent-decoded once, without empty segments and dots. `None` if an
/// escape is malformed or the text is not UTF-8.
#[must_use]
pub fn normalized(path: &str) -> Option<String> {
    let decoded = decoded(path)?;
    let mut segments = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    Some(segments.into_iter().flat_map(|segment| ["/", segment]).collect())
}

/// Whether a path belongs to an API that clients may expect here.
fn is_of_an_api(path: &str) -> bool {
    KNOWN
        .iter()
        .any(|known| path.strip_prefix(known).is_some_and(|below| below.is_empty() || below.starts_with('/')))
}

/// 404 for a path without a route. If a known path differs only by slashes or by the `/v1` of a base URL, the message
/// suggests it. A lenient match instead could bypass the path rules of a proxy. A path of an API that is not served
/// here has a code of its own, to distinguish it from a typing error.
#[must_use]
pub fn not_found(path: &str, is_known: impl Fn(&str) -> bool) -> ApiError {
    let mut tidy = String::with_capacity(path.len());
    path.split('/').filter(|part| !part.is_empty()).for_each(|part| {
        tidy.push('/');
        tidy.push_str(part);
    });
    let once = tidy.strip_prefix("/v1").filter(|rest| rest.starts_with("/v1/")).map(str::to_owned);
    let meant = [Some(tidy.clone()), once, Some(format!("/v1{tidy}"))];
    let meant = meant.into_iter().flatten().find(|meant| meant != path && is_known(meant));
    let Some(meant) = meant else {
        return if is_of_an_api(&tidy) {
            ApiError::unsupported_endpoint(path)
        } else {
            ApiError::not_found(path)
        };
    };
    let mut error = ApiError::not_found(path);
    error.message = format!("{}; did you mean {meant}?", error.message);
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_name_is_percent_decoded_and_bad_escapes_are_refused() {
        let name = |path| model_at(path).map(|name| name.map(Cow::into_owned).map_err(|e| e.status));
        for (path, expected) in [
            ("/v1/models/org%2Ftiny-1", Some(Ok("org/tiny-1"))),
            ("/v1/models/org%2ftiny-1", Some(Ok("org/tiny-1"))),
            ("/v1/models/org/tiny-1", Some(Ok("org/tiny-1"))),
            ("/v1/models/a%3Ab", Some(Ok("a:b"))),
            ("/v1/models/a%20b", Some(Ok("a b"))),
            ("/v1/models/plai%6E", Some(Ok("plain"))),
            ("/v1/models/%C3%A9", Some(Ok("é"))),
            ("/v1/models/a+b", Some(Ok("a+b"))),
            ("/v1/models/%252F", Some(Ok("%2F"))),
            ("/v1/models/a%", Some(Err(400))),
            ("/v1/models/a%2", Some(Err(400))),
            ("/v1/models/a%zz", Some(Err(400))),
            ("/v1/models/a%+1", Some(Err(400))),
            ("/v1/models/%ff", Some(Err(400))),
            ("/v1/models/", None),
            ("/v1/models", None),
            ("/v1/other/a", None),
        ] {
            assert_eq!(name(path), expected.map(|name| name.map(str::to_owned)), "{path}");
        }
    }

    #[test]
    fn every_spelling_of_a_path_that_a_server_takes_for_it_has_one_form() {
        for spelled in [
            "/kv/release",
            "/kv/release/",
            "//kv///release",
            "/kv/%72elease",
            "/kv%2Frelease",
            "/%2e/kv/./release",
            "/x/../kv/release",
            "/../kv/release",
        ] {
            assert_eq!(normalized(spelled).as_deref(), Some("/kv/release"), "{spelled}");
        }
        // Servers decode once.
        assert_eq!(normalized("/kv/%2572elease").as_deref(), Some("/kv/%72elease"));
        assert_eq!(normalized("/").as_deref(), Some(""));
        for malformed in ["/kv/%7", "/kv/%zz", "/%ff"] {
            assert_eq!(normalized(malformed), None, "{malformed}");
        }
    }

    #[test]
    fn a_path_that_differs_by_slashes_or_by_its_base_is_named_in_the_404() {
        let known = |path: &str| path == "/v1/chat/completions" || path == "/health";
        for path in [
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/v1//chat/completions",
            "/chat/completions",
            "/v1/v1/chat/completions",
        ] {
            let error = not_found(path, known);
            assert_eq!(error.status, 404);
            assert!(
                error.message.ends_with("did you mean /v1/chat/completions?"),
                "{path}: {}",
                error.message
            );
        }
        assert!(not_found("/health/", known).message.ends_with("did you mean /health?"));
        for path in ["/", "/v1/", "", "/v1/chat", "/nowhere", "/v1/embeddingsx", &"/a".repeat(4000)] {
            let error = not_found(path, known);
            assert!(!error.message.contains("did you mean"), "{path}");
            assert_eq!(error.code.as_deref(), Some("not_found"), "{path}");
        }
    }

    #[test]
    fn a_path_of_an_api_that_is_not_served_is_no_typing_error() {
        for path in [
            "/v1/embeddings",
            "/v1/messages",
            "/v1/responses/resp_1",
            "/v1/audio/speech",
            "/rerank",
            "/score/",
        ] {
            let error = not_found(path, |path| path == "/v1/chat/completions");
            assert_eq!((error.status, error.code.as_deref()), (404, Some("unsupported_endpoint")), "{path}");
            assert!(error.message.contains(path), "{}", error.message);
        }
    }
}
