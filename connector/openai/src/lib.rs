//! The OpenAI HTTP dialect that router and engine share: requests, errors, responses.
//!
//! Pure: bytes in, types out, and back. No sockets, no clock, no model. The router works on the JSON object itself
//! ([`parse_object`]), so that unknown fields pass through unchanged, and checks it with [`GenerateRequest::from_map`].
//! The engine reads the same type and answers through [`ReplyHead`]. [`cluster`] has the requests of routers and tools.
//! [`translate`] makes Messages and Responses chats, and chats their replies.
//!
//! ```text
//!  body ──▶ parse_object ──▶ Map ──▶ GenerateRequest::from_map ──▶ engine
//!                             └────▶ router: strip, rewrite, forward
//!  engine ──▶ ReplyHead ──▶ one reply, or ChunkEncoder ──▶ SSE frames
//!  both   ──▶ ApiError  ──▶ status, headers, envelope, or SSE frame
//! ```
//!
//! Invariants:
//! - No input panics or recurses without bound: every field is tested with generated values of every type.
//! - Every refusal is an [`ApiError`] with the field and the compared values.
//! - No value is guessed: a known field of the wrong type is refused, never coerced. Two exceptions follow vLLM: `null`
//!   is the same as absent, and `16.0` is the integer 16.

pub mod body;
pub mod cluster;
pub mod code;
pub mod error;
mod field;
pub mod limits;
pub mod media;
pub mod path;
pub mod raw;
pub mod recover;
pub mod request;
pub mod response;
mod sanitize;
pub mod scan;
mod shape;
pub mod sse;
pub mod translate;

pub use body::parse_object;
pub use code::{Code, ErrorKind};
pub use error::{ApiError, Challenge};
pub use limits::{ParseLimits, Scope};
pub use media::MediaCounts;
pub use request::{
    ChatInput, Endpoint, GenerateRequest, Input, JsonWhitespace, OutputConstraint, Prompt, PromptOptions,
    SamplingOptions, StreamOptions, StructuredOutput, TokenRestrictions, ToolChoice, Truncation,
    TruncationSide, is_constraint,
};
pub use request::{DetokenizeRequest, EmbeddingFormat, EmbeddingRequest, TokenizeRequest};
pub use request::{FIRST_TOKEN_TIMEOUT, REQUEST_TIMEOUT, TIMEOUT_MAX_MS, TimeLeft};
pub use response::{
    CallDelta, ChoiceDelta, ChunkEncoder, EmbeddingReply, Finish, FinishReason, FinishedChoice, MessageParts,
    ModelCard, PredictionTokens, PromptTokenLogprob, ReplyHead, StopReason, TokenLogprob, ToolCall,
    TopLogprob, Usage,
};

pub use raw::{RawBody, RequestOutline, strip};
pub use recover::recover_member;
pub use scan::{FieldLevel, InternalFields};
pub use translate::{StreamTranslator, TranslatedApi, Translation};

use serde_json::{Map, Value};

/// Reads a request body: [`parse_object`], then [`GenerateRequest::from_map`].
///
/// # Errors
/// 400 with the field, or 413 when the body is over [`ParseLimits::body_bytes`].
pub fn parse(endpoint: Endpoint, body: &[u8], limits: &ParseLimits) -> Result<GenerateRequest, ApiError> {
    GenerateRequest::from_map(endpoint, &parse_object(body, limits)?, limits)
}

/// A JSON object with its fields in the original order.
pub type Object = Map<String, Value>;
