//! The table of every `code` in an error envelope, with its statuses and its `type`.
//!
//! `docs/reference/errors.md` is generated from this table, and a test compares the two. A router forwards codes of
//! other engines unchanged; they are not in the table.

use std::borrow::Cow;

/// The component that returns an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorSource {
    /// The router, to a client.
    Router,
    /// An engine, to any client. A router forwards the error.
    Engine,
    /// An engine, to a router, which handles it: the client gets another error, or none.
    EngineToRouter,
    /// A router or an engine.
    Both,
}

impl ErrorSource {
    /// The label on the page of errors.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Engine => "engine",
            Self::EngineToRouter => "engine, to a router",
            Self::Both => "both",
        }
    }
}

/// The kind of an error: the envelope's `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client must change the request.
    InvalidRequest,
    /// The client must send a valid key.
    Authentication,
    /// Too many requests from this client.
    RateLimit,
    /// The engines are full for now.
    Overloaded,
    /// A deadline passed.
    Timeout,
    /// No engine can serve the request.
    Unavailable,
    /// The server failed.
    Server,
    /// The client disconnected.
    ClientGone,
}

impl ErrorKind {
    /// The envelope's `type`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::RateLimit => "rate_limit_error",
            Self::Overloaded => "overloaded_error",
            Self::Timeout => "timeout_error",
            Self::Unavailable => "service_unavailable_error",
            Self::Server => "server_error",
            Self::ClientGone => "client_closed_request",
        }
    }
}

/// A row of the table.
struct CodeRow {
    word: &'static str,
    statuses: &'static [u16],
    kind: ErrorKind,
    source: ErrorSource,
    means: &'static str,
}

macro_rules! codes {
    ($($code:ident $word:literal $statuses:expr, $kind:ident, $source:ident, $means:literal;)*) => {
        /// The envelope's `code`: the error for programs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $(#[doc = $means] $code,)*
        }

        impl Code {
            /// All codes, in the order of the page.
            pub const ALL: &[Self] = &[$(Self::$code),*];

            const fn row(self) -> &'static CodeRow {
                match self {
                    $(Self::$code => &CodeRow {
                        word: $word,
                        statuses: &$statuses,
                        kind: ErrorKind::$kind,
                        source: ErrorSource::$source,
                        means: $means,
                    },)*
                }
            }
        }
    };
}

codes! {
    MalformedRequest "malformed_request" [400], InvalidRequest, Router,
        "The head is not valid HTTP, the body's chunks are malformed, or the body ended early. The router closes the connection.";
    MalformedBody "malformed_body" [400], InvalidRequest, Both, "The body is not one JSON object.";
    DuplicateField "duplicate_field" [400], InvalidRequest, Both, "A field occurs twice; `param` names it.";
    TooManyValues "too_many_values" [400], InvalidRequest, Both,
        "The request has too many messages, prompts or values.";
    FieldTooLong "field_too_long" [400], InvalidRequest, Router,
        "A field that the router reads is too long; `param` names it.";
    UnsupportedParameter "unsupported_parameter" [400], InvalidRequest, Both,
        "A field requests an unsupported feature; `param` names it.";
    UnsupportedContent "unsupported_content" [400], InvalidRequest, Both,
        "A message has a part that is not text.";
    ContextLengthExceeded "context_length_exceeded" [400], InvalidRequest, Engine,
        "Prompt and `max_tokens` do not fit the model's context.";
    ChatTemplate "chat_template" [400], InvalidRequest, Engine,
        "The model has no chat template, or its template cannot render the conversation.";
    InvalidDataParallelRank "invalid_data_parallel_rank" [400], InvalidRequest, Engine,
        "`X-data-parallel-rank` names no rank of this engine.";
    InvalidApiKey "invalid_api_key" [401], Authentication, Router, "The API key is missing or unknown, or the token is not valid.";
    ModelNotAllowed "model_not_allowed" [403], InvalidRequest, Router, "The key is valid, but not for this model.";
    ModelNotFound "model_not_found" [404], InvalidRequest, Both, "The model does not exist here.";
    NotFound "not_found" [404], InvalidRequest, Both, "The path does not exist.";
    UnsupportedEndpoint "unsupported_endpoint" [404], InvalidRequest, Both,
        "The path is part of the OpenAI API or its usual extensions, but this server or the model's engines do not have it.";
    MethodNotAllowed "method_not_allowed" [405], InvalidRequest, Both,
        "The path has other methods, listed in `Allow`, or the server does not support this method on any path.";
    RequestTimeout "request_timeout" [408, 504], Timeout, Both,
        "408: the request itself did not arrive in time. 504: the whole request exceeded its time limit.";
    PayloadTooLarge "payload_too_large" [413], InvalidRequest, Both, "The body is over the limit.";
    PathTooLong "path_too_long" [414], InvalidRequest, Router, "The path is over the limit.";
    UnsupportedMediaType "unsupported_media_type" [415], InvalidRequest, Router,
        "The body is not sent as JSON, or is compressed.";
    ExpectationFailed "expectation_failed" [417], InvalidRequest, Router, "`Expect` has a value other than `100-continue`.";
    RateLimitExceeded "rate_limit_exceeded" [429], RateLimit, Router,
        "The client exceeds a limit of its key or tenant: requests per time, tokens per time, or concurrent requests.";
    Overloaded "overloaded" [429], Overloaded, Both, "Queues are full or all engines are busy, for all clients.";
    QueueTimeout "queue_timeout" [429], Overloaded, Router,
        "All engines were busy until the request's wait ended.";
    HeadTooLarge "head_too_large" [431], InvalidRequest, Router, "The request's head is over the limit.";
    ClientGone "client_gone" [499], ClientGone, Engine, "The client disconnected before the response. Only in logs.";
    InternalError "internal_error" [500], Server, Engine, "Internal error of the engine.";
    BadGateway "bad_gateway" [502], Server, Both, "An engine failed while it worked on the request.";
    Misconfigured "misconfigured" [502], Server, Router,
        "An engine refuses this router's cluster secret or API key. The operator must fix it.";
    MisconfiguredModel "misconfigured_model" [502], Server, Router,
        "An engine does not serve the model in its configuration. The operator must fix it.";
    Unavailable "unavailable" [503], Unavailable, Both, "No engine can serve the request now.";
    EngineFailed "engine_failed" [503], Unavailable, EngineToRouter, "The engine's device has failed.";
    Draining "draining" [503], Unavailable, EngineToRouter, "The engine is shutting down.";
    GatewayTimeout "gateway_timeout" [504], Timeout, Router, "An engine did not respond in time.";
    HttpVersionNotSupported "http_version_not_supported" [505], InvalidRequest, Router,
        "The server supports HTTP/1.1 and HTTP/1.0 only.";
    InvalidClusterSecret "invalid_cluster_secret" [401], Authentication, EngineToRouter,
        "The cluster's secret is missing or wrong.";
    InvalidKvTransferParams "invalid_kv_transfer_params" [400], InvalidRequest, EngineToRouter,
        "`kv_transfer_params` is not a handoff.";
    KvWrongRole "kv_wrong_role" [400], InvalidRequest, EngineToRouter,
        "The request needs a handoff that the engine's role does not create or accept.";
    KvUnsupported "kv_unsupported" [400], InvalidRequest, EngineToRouter,
        "The request has several prompts or choices, or asks for its prompt's log-probabilities.";
    KvLayoutMismatch "kv_layout_mismatch" [400], InvalidRequest, EngineToRouter,
        "The producer's blocks have a different layout or model.";
    KvPromptMismatch "kv_prompt_mismatch" [400], InvalidRequest, EngineToRouter,
        "The handoff belongs to another prompt or to another LoRA adapter.";
    KvGone "kv_gone" [503], Unavailable, EngineToRouter, "The lease has ended, and its blocks are no longer available.";
    KvRefused "kv_refused" [503], Unavailable, EngineToRouter, "The producer refuses reads by this engine.";
    KvHandshakeFailed "kv_handshake_failed" [503], Unavailable, EngineToRouter,
        "The producer's side channel is unreachable.";
    KvTransferFailed "kv_transfer_failed" [503], Unavailable, EngineToRouter, "Reading the blocks failed.";
    KvUnverified "kv_unverified" [503], Unavailable, EngineToRouter,
        "The engine read the blocks but could not verify that the lease was live until the end, and discards them.";
}

impl Code {
    /// The word in the envelope.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.row().word
    }

    /// The statuses of the code.
    #[must_use]
    pub const fn statuses(self) -> &'static [u16] {
        self.row().statuses
    }

    /// The envelope's `type` of the code.
    #[must_use]
    pub const fn kind(self) -> ErrorKind {
        self.row().kind
    }

    /// The component that returns the code.
    #[must_use]
    pub const fn source(self) -> ErrorSource {
        self.row().source
    }

    /// The meaning, in one or two sentences.
    #[must_use]
    pub const fn means(self) -> &'static str {
        self.row().means
    }
}

impl From<Code> for Cow<'static, str> {
    fn from(code: Code) -> Self {
        Cow::Borrowed(code.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// The table of `docs/reference/errors.md`.
    fn table() -> String {
        let mut rows =
            "| `code` | status | `type` | returned by | what |\n|---|---|---|---|---|\n".to_owned();
        for code in Code::ALL {
            let statuses: Vec<_> = code.statuses().iter().map(u16::to_string).collect();
            let (kind, source) = (code.kind().as_str(), code.source().label());
            let (word, means) = (code.as_str(), code.means());
            let _ = writeln!(rows, "| `{word}` | {} | `{kind}` | {source} | {means} |", statuses.join(", "));
        }
        rows
    }

    /// `BATON_WRITE_DOCS=1` writes the table instead of comparing it.
    #[test]
    fn the_page_of_errors_matches_the_table_of_codes() {
        let file = root().join("docs/reference/errors.md");
        let page = std::fs::read_to_string(&file).expect("docs/reference/errors.md is there");
        let (begin, end) = ("<!-- codes: begin -->\n", "<!-- codes: end -->");
        let (before, rest) = page.split_once(begin).expect("the table begins");
        let (old, after) = rest.split_once(end).expect("the table ends");
        if std::env::var_os("BATON_WRITE_DOCS").is_some() {
            let new = format!("{before}{begin}{}{end}{after}", table());
            std::fs::write(&file, new).expect("docs/reference/errors.md can be written");
        } else {
            assert_eq!(old, table(), "run this test with BATON_WRITE_DOCS=1 to write the table");
        }
    }

    #[test]
    fn every_error_code_is_unique() {
        let words: BTreeSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        for code in Code::ALL {
            assert!(code.as_str().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{code:?}");
            assert!(!code.statuses().is_empty() && code.means().ends_with('.'), "{code:?}");
        }
    }

    /// The sources of a folder, each without its tests.
    fn sources(folder: &Path, found: &mut String) {
        for entry in std::fs::read_dir(folder).expect("the folder can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if path.is_dir() {
                sources(&path, found);
            } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "code.rs" {
                let text = std::fs::read_to_string(&path).expect("a source is text");
                found.push_str(text.split("#[cfg(test)]").next().unwrap_or_default());
            }
        }
    }

    /// The sources that name a code are those of its `ErrorSource`. Codes in this crate may be returned by both.
    #[test]
    fn every_error_code_is_returned_by_its_documented_source() {
        let mut texts = [String::new(), String::new(), String::new()];
        for (folder, text) in ["router/src", "engine/src", "connector/openai/src"].iter().zip(&mut texts) {
            sources(&root().join(folder), text);
        }
        for &code in Code::ALL {
            let named = |text: &String| {
                let name = format!("Code::{code:?}");
                text.match_indices(&name)
                    .any(|(at, _)| !text[at + name.len()..].starts_with(|c: char| c.is_ascii_alphanumeric()))
            };
            let [router, engine, shared] = [&texts[0], &texts[1], &texts[2]].map(named);
            let fits = match code.source() {
                ErrorSource::Router => !engine && (router || shared),
                ErrorSource::Engine | ErrorSource::EngineToRouter => !router && (engine || shared),
                ErrorSource::Both => shared || (router && engine),
            };
            assert!(fits, "{code:?}: router {router}, engine {engine}, shared {shared}");
        }
    }
}
