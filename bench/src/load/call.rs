//! One call, as everything in it happened.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::clock::Moment;

/// What the endpoint says it counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Of the prompt; `None` where the endpoint does not say.
    pub(crate) cached_tokens: Option<u32>,
}

/// How far a call had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stage {
    /// Until the connection was there.
    Connect,
    /// While the request was written.
    Send,
    /// While the answer's head was waited for.
    Head,
    /// While the answer was read.
    Body,
}

impl Stage {
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub(crate) enum Outcome {
    /// The answer is whole: a stream with its `[DONE]`, or a body of status 2xx.
    Done,
    /// The client left, and has no whole answer.
    Left,
    /// Any other status than 2xx.
    Refused { status: u16, code: Option<String>, kind: Option<String>, message: String },
    /// A stream of status 200 told of an error.
    Failed { code: Option<String>, kind: Option<String>, message: String },
    /// No connection, or one that ended too soon, or an answer that is none.
    Broken { stage: Stage, why: String },
    /// The call's time was over.
    TimedOut { stage: Stage },
}

impl Outcome {
    /// What failures are counted by: status and code, or where and how it broke off. `None` for what is no failure.
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

impl fmt::Display for Outcome {
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

/// One call. Times are in the order of the fields where they are there at all.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The client began: before a connection was made.
    pub(crate) began: Moment,
    /// A connection was made for this call; `None` for one that was kept from another.
    pub(crate) connected: Option<Moment>,
    /// The request's last byte was with the system.
    pub(crate) sent: Option<Moment>,
    /// The answer's head was here.
    pub(crate) head: Option<Moment>,
    pub(crate) status: Option<u16>,
    /// Each event of a stream that brought text (of any choice; or a tool call), when it was read. An event may bring
    /// more than one token: see `counted`.
    pub(crate) tokens: Vec<Moment>,
    /// For each of `tokens` how many tokens there had been by then, where every event says so
    /// ([`super::Streaming::Counted`]); empty otherwise.
    pub(crate) counted: Vec<u32>,
    /// All events, `[DONE]` included.
    pub(crate) events: u32,
    /// What the choice with index 0 said.
    pub(crate) text: String,
    pub(crate) finish_reason: Option<String>,
    pub(crate) usage: Option<Usage>,
    /// The answer's `x-request-id`.
    pub(crate) request_id: Option<String>,
    /// The client left: the moment before its close, reset or half-close; for a stall, the one at which it stopped reading.
    pub(crate) left: Option<Moment>,
    /// Nothing happens any more.
    pub(crate) ended: Moment,
    pub(crate) outcome: Outcome,
    /// `x-should-retry`.
    pub(crate) should_retry: Option<bool>,
    /// `retry-after-ms` or `retry-after`.
    pub(crate) retry_after: Option<Duration>,
    /// The request went out twice, because a kept connection had ended before a byte of an answer came.
    pub(crate) sent_again: bool,
}

impl Call {
    /// Of a client that begins now.
    pub(super) fn begin() -> Self {
        let now = Moment::now();
        Self {
            began: now,
            connected: None,
            sent: None,
            head: None,
            status: None,
            tokens: Vec::new(),
            counted: Vec::new(),
            events: 0,
            text: String::new(),
            finish_reason: None,
            usage: None,
            request_id: None,
            left: None,
            ended: now,
            outcome: Outcome::Left,
            should_retry: None,
            retry_after: None,
            sent_again: false,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.outcome == Outcome::Done
    }

    /// Tokens that were generated: what `usage` says where it is there, events with text otherwise.
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

    /// Between each two events with text.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.tokens.windows(2).map(|pair| pair[1].since(pair[0]))
    }
}

impl Serialize for Call {
    /// `began_us` is since the Unix epoch; every other time is in microseconds after it.
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
