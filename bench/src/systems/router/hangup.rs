//! How soon an engine sees that a client has left, by the phase in which it leaves.

use std::time::{Duration, Instant};

use super::first_token::{histogram, record};
use super::report::{Hangup, SubjectReport};
use super::subject::Subject;
use super::wire::Wire;
use super::{Engines, RouterArgs, RouterBenchError};
use crate::sim::instant::{Behaviour, Sign, SimEngine};

/// A close that no engine has seen by then is missed.
const WITHIN: Duration = Duration::from_secs(1);
/// After so many missed closes the phase is over: each costs [`WITHIN`].
const MISSED_MAX: usize = 5;
/// A full window fills up within this time; it holds a few MiB.
const FILLS_WITHIN: Duration = Duration::from_millis(20);

/// Where a request is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The prefill engine computes.
    Prefill,
    /// The prefill engine has just answered.
    Gap,
    /// The decode engine has sent nothing yet.
    DecodeBeforeHead,
    /// As that, for an answer in one piece.
    Unary,
    /// The decode engine has sent the first token and is silent.
    MidStream,
    /// As that, and the client resets its connection.
    MidStreamReset,
    /// The decode engine sends more than the client reads: every buffer in between is full.
    WindowFull,
}

impl Phase {
    pub(super) const ALL: [Self; 7] = [
        Self::Prefill,
        Self::Gap,
        Self::DecodeBeforeHead,
        Self::Unary,
        Self::MidStream,
        Self::MidStreamReset,
        Self::WindowFull,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Gap => "gap",
            Self::DecodeBeforeHead => "decode_before_head",
            Self::Unary => "unary",
            Self::MidStream => "mid_stream",
            Self::MidStreamReset => "mid_stream_reset",
            Self::WindowFull => "window_full",
        }
    }

    /// What the prefill and the decode engine do.
    fn behaviours(self) -> (Behaviour, Behaviour) {
        match self {
            Self::Prefill => (Behaviour::Silent, Behaviour::Answer),
            Self::Gap | Self::DecodeBeforeHead | Self::Unary => (Behaviour::Answer, Behaviour::Silent),
            Self::MidStream | Self::MidStreamReset => (Behaviour::Answer, Behaviour::OneToken),
            Self::WindowFull => (Behaviour::Answer, Behaviour::Flood),
        }
    }

    /// How many engines must have said [`Sign::Took`] before the client leaves.
    fn takers(self, disaggregates: bool) -> usize {
        match self {
            Self::Prefill | Self::Gap => 1,
            _ => 1 + usize::from(disaggregates),
        }
    }
}

/// Every phase; a plain reverse proxy has no prefill and no gap.
pub(super) async fn measure(
    args: &RouterArgs,
    engines: &Engines,
    subject: &Subject,
    report: &mut SubjectReport,
) -> Result<(), RouterBenchError> {
    for phase in Phase::ALL {
        if subject.disaggregates || !matches!(phase, Phase::Prefill | Phase::Gap) {
            report.hangups.push(leave(args, engines, subject, phase).await?);
        }
    }
    Ok(())
}

async fn leave(
    args: &RouterArgs,
    engines: &Engines,
    subject: &Subject,
    phase: Phase,
) -> Result<Hangup, RouterBenchError> {
    let (prefill, decode) = phase.behaviours();
    engines.prefill.behave(prefill);
    engines.decode.behave(decode);
    let mut hangup = Hangup { phase: phase.name(), ..Hangup::default() };
    let mut times = histogram();
    while hangup.seen < args.cancels && hangup.missed < MISSED_MAX {
        match once(engines, subject, phase).await? {
            Some(took) => {
                record(&mut times, took);
                hangup.seen += 1;
            }
            None => hangup.missed += 1,
        }
    }
    engines.prefill.behave(Behaviour::Answer);
    engines.decode.behave(Behaviour::Answer);
    engines.prefill.watch(None);
    engines.decode.watch(None);
    if hangup.seen > 0 {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e6;
        (hangup.p50_ms, hangup.p99_ms, hangup.max_ms) = (at(0.5), at(0.99), at(1.0));
    }
    Ok(hangup)
}

/// From one client's close to the first engine that sees it; `None` when none does.
async fn once(
    engines: &Engines,
    subject: &Subject,
    phase: Phase,
) -> Result<Option<Duration>, RouterBenchError> {
    // A watcher of its own for each client: what still comes of the one before is nobody's.
    let (tells, mut signs) = SimEngine::watcher();
    engines.prefill.watch(Some(tells.clone()));
    engines.decode.watch(Some(tells));
    let mut wire = Wire::connect(subject.address).await?;
    wire.send(phase != Phase::Unary).await?;
    let mut takers = 0;
    while takers < phase.takers(subject.disaggregates) {
        match tokio::time::timeout(WITHIN, signs.recv()).await {
            Ok(Some((_, Sign::Took))) => takers += 1,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Ok(None),
        }
    }
    match phase {
        Phase::MidStream => wire.first_byte().await?,
        Phase::MidStreamReset => {
            wire.first_byte().await?;
            wire.reset_on_close()?;
        }
        Phase::WindowFull => tokio::time::sleep(FILLS_WITHIN).await,
        Phase::Prefill | Phase::Gap | Phase::DecodeBeforeHead | Phase::Unary => {}
    }
    let left = Instant::now();
    drop(wire);
    loop {
        match tokio::time::timeout(WITHIN, signs.recv()).await {
            Ok(Some((at, Sign::Closed | Sign::Verb))) if at >= left => return Ok(Some(at - left)),
            // What came before is of somebody else.
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}
