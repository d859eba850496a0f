//! The raw events of a run, as in `events.jsonl`: one JSON object per line, in the order in which they arrived. All
//! numbers of a report are computed from these events alone.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::in_flight::FaultContext;
use crate::disconnect::record::rate::CalibratedRate;

/// Maximum bytes of a line.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Maximum lines of a file.
const RECORDS_MAX: usize = 20_000_000;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Record {
    /// The first line.
    Run(RunRecord),
    /// A watched engine, by its number in this file.
    Engine(EngineRecord),
    /// A segment has begun.
    SegmentBegan { segment: String, at_us: u64, what: SegmentKind },
    /// A segment has ended: all calls have ended, and the engines had time to free their blocks.
    SegmentEnded { segment: String, at_us: u64 },
    /// The request rate of calm, storm and faults.
    Load(CalibratedRate),
    /// A client's call.
    Call(CallRecord),
    /// An event of an engine.
    Event(EventRecord),
    /// The state of an engine at one moment.
    EngineState(EngineState),
    /// Events of an engine that were overwritten before they were read.
    Lost { engine: usize, events: u64 },
    /// A fault was injected, or its recovery has ended.
    Fault {
        segment: String,
        fault: String,
        at_us: u64,
        #[serde(rename = "mended")]
        recovered: bool,
        /// For an injected fault: the awaited condition and the known requests in flight. Missing in older files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        struck: Option<FaultContext>,
    },
    /// The run was stopped before its end.
    Interrupted { at_us: u64 },
    /// The run failed.
    Failed { at_us: u64, why: String },
    /// An engine runs in another process than before.
    Restarted {
        engine: usize,
        /// When this was noticed.
        at_us: u64,
        /// The last answer of the process before. Missing in older files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seen_us: Option<u64>,
    },
    /// A kind of cancel that is not possible here, and the reason.
    NotPlayed { kind: CancelKind, why: String },
    /// The output of `baton bench compare --json` for other gateways.
    ComparedWith { compared: serde_json::Value },
    /// A prompt that was repeated without load.
    Replay {
        tag: String,
        /// The response in the run.
        text: Option<String>,
        /// The expected response; `None` if the deployment gave two different responses without load, or none.
        said: Option<String>,
        /// The two responses without load, if they differ.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        answers: Vec<String>,
        /// The deployment gave no response.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unanswered: bool,
    },
    /// A prompt that was repeated beside others, without cancels and faults.
    ParallelReplay { tag: String, text: String },
}

/// The configuration and the machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    pub(crate) version: String,
    /// The commit of the repository, if the run was started in it.
    #[serde(default)]
    pub(crate) commit: Option<String>,
    pub(crate) command: String,
    /// The niceness of the benchmark and of the processes it started. Missing in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nice: Option<i32>,
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) target: String,
    pub(crate) model: String,
    pub(crate) seed: u64,
    /// Blocks that are held for longer after a cancel are stranded.
    pub(crate) stranded_after_us: u64,
    /// The other options.
    pub(crate) options: serde_json::Value,
}

/// The purpose of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SegmentKind {
    /// Measures the capacity of the deployment; in no statistic.
    Calibration,
    /// The load without cancels.
    Calm,
    /// The same load with cancels.
    Storm,
    /// Requests that are cancelled in one phase.
    Phase,
    /// Requests that the decode engine refuses.
    Refused,
    /// Load with an injected fault.
    Fault,
}

/// The properties of an engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineRecord {
    pub(crate) engine: usize,
    pub(crate) name: String,
    pub(crate) role: String,
    /// The engine has an event log. Otherwise only its metrics are read.
    pub(crate) events: bool,
    /// The engine reports that other requests in a batch may change a response.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) batching_shows: bool,
    /// Blocks of the pool; 0 if the engine does not report them.
    pub(crate) blocks: u64,
    /// The clock of the engine minus the clock of the benchmark, and the error of that, microseconds.
    pub(crate) clock_offset_us: i64,
    pub(crate) clock_doubt_us: u64,
}

/// One call of a client, in microseconds since the Unix epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallRecord {
    pub(crate) segment: String,
    /// The request's `user`.
    pub(crate) tag: String,
    /// The planned cancel; `None` for an uncancelled request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaves: Option<CancelPlan>,
    pub(crate) stream: bool,
    /// The planned start.
    pub(crate) due_us: u64,
    pub(crate) began_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sent_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) left_us: Option<u64>,
    pub(crate) ended_us: u64,
    /// The events with text, microseconds after `began_us`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tokens_us: Vec<u64>,
    /// `done`, `left`, `refused`, `failed`, `broken` or `timed_out`.
    pub(crate) outcome: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Received tokens of the response.
    pub(crate) generated: u32,
    /// Requested tokens, if they differ from the usual number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_tokens: Option<u32>,
    pub(crate) text: String,
    /// The tag of the call that this call retries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retries: Option<String>,
}

/// The times of a call as its client saw them, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ClientTimes {
    pub(crate) began: u64,
    pub(crate) stream: bool,
    /// The first event of a stream with text, and the last one so far.
    pub(crate) first_token: Option<u64>,
    pub(crate) last_token: Option<u64>,
    /// The end of a complete response.
    pub(crate) done: Option<u64>,
}

impl CallRecord {
    /// The client of the call is planned to vanish.
    pub(crate) fn vanishes(&self) -> bool {
        self.leaves.is_some_and(|leaves| leaves.kind == CancelKind::Vanish)
    }

    /// The times that the client saw.
    pub(crate) fn client_times(&self) -> ClientTimes {
        let token = |after: Option<&u64>| after.map(|after| self.began_us + after).filter(|_| self.stream);
        ClientTimes {
            began: self.began_us,
            stream: self.stream,
            first_token: token(self.tokens_us.first()),
            last_token: token(self.tokens_us.last()),
            done: (self.outcome == "done").then_some(self.ended_us),
        }
    }
}

/// When and how a client cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CancelPlan {
    /// The intended phase; `None` for any phase.
    pub(crate) phase: Option<Phase>,
    pub(crate) kind: CancelKind,
}

/// One event of an engine's log. See `docs/reference/event-log.md`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventRecord {
    pub(crate) engine: usize,
    /// By the clock of the benchmark.
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
    /// Of a lease: the time until it expires; `None` while it grows.
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

/// The state of an engine at one moment. Unreported block counts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineState {
    pub(crate) engine: usize,
    pub(crate) at_us: u64,
    /// For metrics: the duration of the request. The values are from a moment within it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) took_us: u64,
    pub(crate) total: u64,
    /// The engine does not report the size of its pool: `total` and `held` are thousandths of the pool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) thousandths: bool,
    /// Blocks that cannot be allocated: active, leased, landing, storing.
    pub(crate) held: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leased: Option<u64>,
    /// The sum of all blocks by state minus the size of the pool. Positive if blocks were freed twice, negative if
    /// blocks were lost.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) askew: i64,
    /// Requests of the engine, in any phase.
    pub(crate) requests: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leases: Option<u64>,
    /// Expired leases since the start of the engine.
    pub(crate) expired: u64,
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// An error in a file of raw events.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RawError {
    /// The file cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// A line is not a record.
    #[error("line {line}: {why}")]
    Line {
        /// The line number, from 1.
        line: usize,
        /// The error of the line.
        why: String,
    },
}

/// Writes one line.
///
/// # Errors
/// If the write fails.
pub(crate) fn write(out: &mut dyn Write, record: &Record) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, record)?;
    out.write_all(b"\n")
}

/// Reads the output of [`write`].
///
/// # Errors
/// [`RawError`] at the first line that is not a record.
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
            // The writer was killed while it wrote this line.
            break;
        }
        if bytes as u64 == LINE_BYTES_MAX || records.len() == RECORDS_MAX {
            return Err(wrong("too long".into()));
        }
        records.push(serde_json::from_slice(&line).map_err(|error| wrong(error.to_string()))?);
    }
    Ok(records)
}
