//! One call with the time of each event.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::clock::Moment;

/// Token counts of the endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TokenUsage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Cached tokens of the prompt. `None` if the endpoint does not report them.
    pub(crate) cached_tokens: Option<u32>,
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CallStage {
    /// The connection is being made.
    Connect,
    /// The request is being written.
    Send,
    /// The client waits for the response head.
    Head,
    /// The response body is being read.
    Body,
}

impl CallStage {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Send => "send",
            Self::Head => "head",
            Self::Body => "body",
        }
    }
}

/// How a call ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub(crate) enum CallOutcome {
    /// The response is complete: a stream with its `[DONE]`, or a body of status 2xx.
    Done,
    /// The client disconnected before the response was complete.
    #[default]
    Left,
    /// Any status but 2xx.
    Refused { status: u16, code: Option<String>, kind: Option<String>, message: String },
    /// A stream of status 200 contained an error.
    Failed { code: Option<String>, kind: Option<String>, message: String },
    /// There was no connection, the connection ended too soon, or the response was invalid.
    Broken { stage: CallStage, why: String },
    /// The call exceeded its time limit.
    TimedOut { stage: CallStage },
}

impl CallOutcome {
    /// Key by which failures are counted: status and code, or stage and reason. `None` if the call did not fail.
    pub(crate) fn failure(&self) -> Option<String> {
        let coded = |what: &str, code: &Option<String>| match code {
            Some(code) => format!("{what} {code}"),
            None => what.to_owned(),
        };
        match self {
            Self::Done | Self::Left => None,
            Self::Refused { status, code, .. } => Some(coded(&status.to_string(), code)),
            Self::Failed { code, .. } => Some(coded("error in a stream", code)),
            Self::Broken { stage, .. } => Some(format!("broken off ({})", stage.as_str())),
            Self::TimedOut { stage } => Some(format!("timed out ({})", stage.as_str())),
        }
    }
}

impl fmt::Display for CallOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.failure();
        match (self, kind) {
            (Self::Refused { message, .. } | Self::Failed { message, .. }, Some(kind)) => {
                write!(f, "{kind}: {message}")
            }
            (Self::Broken { why, .. }, Some(kind)) => write!(f, "{kind}: {why}"),
            (_, Some(kind)) => write!(f, "{kind}"),
            (Self::Left, None) => write!(f, "the client left"),
            (_, None) => write!(f, "done"),
        }
    }
}

/// One call. Times that are present are in the order of the fields.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call {
    /// The client began, before a connection was made.
    pub(crate) began: Moment,
    /// A connection was made for this call. `None` if a kept connection was used.
    pub(crate) connected: Option<Moment>,
    /// The request's last byte was passed to the system.
    pub(crate) sent: Option<Moment>,
    /// The response head was read.
    pub(crate) head: Option<Moment>,
    pub(crate) status: Option<u16>,
    /// When each event with text was read, of any choice, or with a tool call. An event may contain more than one
    /// token: see `counted`.
    pub(crate) tokens: Vec<Moment>,
    /// For each of `tokens` the number of tokens so far, if every event contains it
    /// ([`super::Streaming::UsageFields`]). Else empty.
    pub(crate) counted: Vec<u32>,
    /// All events, including `[DONE]`.
    pub(crate) events: u32,
    /// The text of the choice with index 0.
    pub(crate) text: String,
    pub(crate) finish_reason: Option<String>,
    pub(crate) usage: Option<TokenUsage>,
    /// The response's `x-request-id`.
    pub(crate) request_id: Option<String>,
    /// When the client disconnected: before its close, reset or half-close. For a stall, when it stopped reading.
    pub(crate) left: Option<Moment>,
    /// The call was over.
    pub(crate) ended: Moment,
    pub(crate) outcome: CallOutcome,
    /// `x-should-retry`.
    pub(crate) should_retry: Option<bool>,
    /// `retry-after-ms` or `retry-after`.
    pub(crate) retry_after: Option<Duration>,
    /// The request was sent twice, because a kept connection ended before a byte of the response.
    pub(crate) sent_again: bool,
}

impl Call {
    /// A call that begins now.
    pub(super) fn begin() -> Self {
        let now = Moment::now();
        Self { began: now, ended: now, ..Self::default() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.outcome == CallOutcome::Done
    }

    /// Generated tokens: from `usage` if present, else the number of events with text.
    pub(crate) fn completion_tokens(&self) -> u32 {
        let counted = self.usage.map(|usage| usage.completion_tokens).or(self.counted.last().copied());
        counted.unwrap_or_else(|| u32::try_from(self.tokens.len()).unwrap_or(u32::MAX))
    }

    /// From the beginning to the first token.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        Some(self.tokens.first()?.since(self.began))
    }

    /// From the beginning to the end.
    pub(crate) fn e2e(&self) -> Duration {
        self.ended.since(self.began)
    }

    /// Time between consecutive events with text.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.tokens.windows(2).map(|pair| pair[1].since(pair[0]))
    }
}

impl Serialize for Call {
    /// `began_us` is since the Unix epoch. All other times are microseconds after `began_us`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let after = |moment: Moment| u64::try_from(moment.since(self.began).as_micros()).unwrap_or(u64::MAX);
        let mut call = serializer.serialize_struct("Call", 17)?;
        call.serialize_field("began_us", &self.began)?;
        call.serialize_field("connected_after_us", &self.connected.map(after))?;
        call.serialize_field("sent_after_us", &self.sent.map(after))?;
        call.serialize_field("head_after_us", &self.head.map(after))?;
        call.serialize_field("left_after_us", &self.left.map(after))?;
        call.serialize_field("ended_after_us", &after(self.ended))?;
        let tokens: Vec<_> = self.tokens.iter().copied().map(after).collect();
        call.serialize_field("tokens_after_us", &tokens)?;
        call.serialize_field("counted", &self.counted)?;
        call.serialize_field("events", &self.events)?;
        call.serialize_field("status", &self.status)?;
        call.serialize_field("outcome", &self.outcome)?;
        call.serialize_field("finish_reason", &self.finish_reason)?;
        call.serialize_field("usage", &self.usage)?;
        call.serialize_field("request_id", &self.request_id)?;
        call.serialize_field("retry_after_ms", &self.retry_after.map(|after| after.as_secs_f64() * 1e3))?;
        call.serialize_field("sent_again", &self.sent_again)?;
        call.serialize_field("text", &self.text)?;
        call.end()
    }
}
