//! The raw events of a run, as they are written to `events.jsonl`: one JSON object a line, in the order in which they
//! became known. Every number of a report is computed from these and from nothing else.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::disconnect::drive::rate::Rate;
use crate::disconnect::plan::phase::{Kind, Phase};
use crate::disconnect::record::flight::Struck;
use crate::disconnect::record::timeline::Seen;

/// A line is not read beyond this.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Lines that are read.
const RECORDS_MAX: usize = 20_000_000;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Record {
    /// The first line.
    Run(Run),
    /// An engine that is watched, by its number in this file.
    Engine(EngineFacts),
    /// Part of the run has begun.
    SegmentBegan {
        #[serde(rename = "segment")]
        act: String,
        at_us: u64,
        what: ActKind,
    },
    /// It is over: every call has ended, and the engines were given time to come to rest.
    SegmentEnded {
        #[serde(rename = "segment")]
        act: String,
        at_us: u64,
    },
    /// How much is asked for in calm, storm and faults.
    Load(Rate),
    /// A client's call.
    Call(CallRecord),
    /// What an engine did.
    Event(EventRecord),
    /// What an engine's books said.
    EngineState(Books),
    /// Events of an engine that were overwritten before they were read.
    Lost { engine: usize, events: u64 },
    /// Something was broken, or mended, on purpose.
    Fault {
        #[serde(rename = "segment")]
        act: String,
        fault: String,
        at_us: u64,
        mended: bool,
        /// Where something was broken: what that had waited for, and what was known then. Older files do not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        struck: Option<Struck>,
    },
    /// Whoever ran it has stopped it before its end.
    Interrupted { at_us: u64 },
    /// It could not go on.
    Failed { at_us: u64, why: String },
    /// An engine is another process than it was.
    Restarted { engine: usize, at_us: u64 },
    /// A kind of leaving that was not possible here and was not played, and why.
    NotPlayed { kind: Kind, why: String },
    /// What `baton bench compare --json` has measured of other gateways.
    ComparedWith { compared: serde_json::Value },
    /// The same prompt asked again when all was quiet.
    Replay {
        tag: String,
        /// What was said in the run.
        text: Option<String>,
        /// What is right; `None` where the deployment did not say the same twice, or said nothing.
        said: Option<String>,
        /// What it said when asked twice, where that differs.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        answers: Vec<String>,
        /// It gave no answer.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unanswered: bool,
    },
}

/// What was run, and where.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) version: String,
    /// Of the repository, where the run was made in it.
    #[serde(default)]
    pub(crate) commit: Option<String>,
    pub(crate) command: String,
    /// Its niceness, and that of what it has started. Older files do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nice: Option<i32>,
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) target: String,
    pub(crate) model: String,
    pub(crate) seed: u64,
    /// After so long without its blocks being back, a client that left counts as stranded.
    pub(crate) stranded_after_us: u64,
    /// Everything else that was chosen.
    pub(crate) options: serde_json::Value,
}

/// What a part of a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ActKind {
    /// To learn how fast the deployment is; in no statistic.
    Calibration,
    /// The load, and nobody leaves.
    Calm,
    /// The same load, and some leave.
    Storm,
    /// Clients that leave in one phase.
    Phase,
    /// Clients that the decode engine refuses.
    Refused,
    /// Something is killed.
    Fault,
}

/// What is known of an engine from its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineFacts {
    pub(crate) engine: usize,
    pub(crate) name: String,
    pub(crate) role: String,
    /// It has an event log; otherwise only its metrics are read.
    pub(crate) events: bool,
    /// It says that what is batched beside a request may change its words.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) batching_shows: bool,
    /// Blocks of its pool; 0 where it does not say.
    pub(crate) blocks: u64,
    /// Its clock less ours, and how far off that may be, microseconds.
    pub(crate) clock_offset_us: i64,
    pub(crate) clock_doubt_us: u64,
}

/// One call of a client, in microseconds since the Unix epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallRecord {
    #[serde(rename = "segment")]
    pub(crate) act: String,
    /// The request's `user`.
    pub(crate) tag: String,
    /// What it was to do; `None`: stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaves: Option<Leaves>,
    pub(crate) stream: bool,
    /// When it was to begin.
    pub(crate) due_us: u64,
    pub(crate) began_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sent_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) left_us: Option<u64>,
    pub(crate) ended_us: u64,
    /// Each event with text, microseconds after `began_us`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tokens_us: Vec<u64>,
    /// `done`, `left`, `refused`, `failed`, `broken` or `timed_out`.
    pub(crate) outcome: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Tokens of the answer, as far as it came.
    pub(crate) generated: u32,
    /// That it asked for, where that is not what all ask for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_tokens: Option<u32>,
    pub(crate) text: String,
    /// An SDK's retry of the call with this tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retries: Option<String>,
}

impl CallRecord {
    /// Its client is to vanish.
    pub(crate) fn vanishes(&self) -> bool {
        self.leaves.is_some_and(|leaves| leaves.kind == Kind::Vanish)
    }

    /// What its client has seen.
    pub(crate) fn seen(&self) -> Seen {
        let token = |after: Option<&u64>| after.map(|after| self.began_us + after).filter(|_| self.stream);
        Seen {
            began: self.began_us,
            stream: self.stream,
            first_token: token(self.tokens_us.first()),
            last_token: token(self.tokens_us.last()),
            done: (self.outcome == "done").then_some(self.ended_us),
        }
    }
}

/// When and how a client is to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leaves {
    /// The phase that it aims at; `None`: any.
    pub(crate) phase: Option<Phase>,
    pub(crate) kind: Kind,
}

/// One event of an engine's log. See `docs/reference/event-log.md`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventRecord {
    pub(crate) engine: usize,
    /// By our clock.
    pub(crate) at_us: u64,
    pub(crate) seq: u64,
    pub(crate) request_id: String,
    pub(crate) tag: String,
    #[serde(default)]
    pub(crate) index: u32,
    pub(crate) kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leg: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) blocks: Option<u64>,
    /// Of a lease, until only time ends it; none while it grows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) left_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generated: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) computed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) result: Option<String>,
}

/// An engine's books at one moment. Blocks that are not told are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Books {
    pub(crate) engine: usize,
    pub(crate) at_us: u64,
    /// Of metrics: from asking until they were there. They are of some moment in between.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub(crate) took_us: u64,
    pub(crate) total: u64,
    /// The engine does not tell how many blocks it has: `total` and `held` are thousandths of its pool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) thousandths: bool,
    /// Blocks that nobody can have: active, leased, landing, storing.
    pub(crate) held: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leased: Option<u64>,
    /// Blocks by state, less the pool: more than there are, where some were freed twice; fewer, where some were lost.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) askew: i64,
    /// Requests on the books, in whatever phase.
    pub(crate) requests: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leases: Option<u64>,
    /// Leases that ended by expiry since the engine began.
    pub(crate) expired: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's shape
fn is_zero(value: &i64) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's shape
fn is_nothing(value: &u64) -> bool {
    *value == 0
}

/// Why a file of raw events cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RawError {
    /// It cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// A line is no record.
    #[error("line {line}: {why}")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// Writes one line.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn write(out: &mut dyn Write, record: &Record) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, record)?;
    out.write_all(b"\n")
}

/// Reads what [`write`] has written.
///
/// # Errors
/// [`RawError`], at the first line that is no record.
pub(crate) fn read(from: &mut dyn BufRead) -> Result<Vec<Record>, RawError> {
    let mut records = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let bytes = std::io::Read::take(&mut *from, LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if bytes == 0 {
            break;
        }
        let wrong = |why: String| RawError::Line { line: number, why };
        if line.last() != Some(&b'\n') && bytes as u64 != LINE_BYTES_MAX && number > 1 {
            // Whoever wrote it was killed in the middle of it.
            break;
        }
        if bytes as u64 == LINE_BYTES_MAX || records.len() == RECORDS_MAX {
            return Err(wrong("too long".into()));
        }
        records.push(serde_json::from_slice(&line).map_err(|error| wrong(error.to_string()))?);
    }
    Ok(records)
}
