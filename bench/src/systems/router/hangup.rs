//! Time until an engine detects a client's disconnect, by the phase of the disconnect.

use std::time::{Duration, Instant};

use super::connection::KeptConnection;
use super::first_token::{histogram, record};
use super::gateway::Gateway;
use super::report::{GatewayReport, Hangup};
use super::{EnginePair, RouterArgs, RouterBenchError};
use crate::load::Streaming;
use crate::sim::instant::{Behaviour, EngineSignal, SimEngine};

/// After this time a close counts as missed.
const WITHIN: Duration = Duration::from_secs(1);
/// Maximum missed closes of a phase, each of which costs [`WITHIN`].
const MISSED_MAX: usize = 5;
/// Time in which a full window of a few MiB fills up.
const FILLS_WITHIN: Duration = Duration::from_millis(20);

/// Where a request is when its client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HangupPhase {
    /// The prefill engine computes.
    Prefill,
    /// The prefill engine has just responded.
    Gap,
    /// The decode engine has sent nothing yet.
    DecodeBeforeHead,
    /// The same, for a response in one piece.
    Unary,
    /// The decode engine has sent the first token and pauses.
    MidStream,
    /// The same, and the client resets its connection.
    MidStreamReset,
    /// The decode engine sends more than the client reads: all buffers on the way are full.
    WindowFull,
}

impl HangupPhase {
    pub(super) const ALL: [(Self, &'static str); 7] = [
        (Self::Prefill, "prefill"),
        (Self::Gap, "gap"),
        (Self::DecodeBeforeHead, "decode_before_head"),
        (Self::Unary, "unary"),
        (Self::MidStream, "mid_stream"),
        (Self::MidStreamReset, "mid_stream_reset"),
        (Self::WindowFull, "window_full"),
    ];

    /// Behaviours of the prefill engine and the decode engine.
    fn behaviours(self) -> (Behaviour, Behaviour) {
        match self {
            Self::Prefill => (Behaviour::Silent, Behaviour::Answer),
            Self::Gap | Self::DecodeBeforeHead | Self::Unary => (Behaviour::Answer, Behaviour::Silent),
            Self::MidStream | Self::MidStreamReset => (Behaviour::Answer, Behaviour::OneToken),
            Self::WindowFull => (Behaviour::Answer, Behaviour::Flood),
        }
    }

    /// Number of engines that must have sent [`EngineSignal::Took`] before the client disconnects.
    fn phases_by_engine(self, disaggregates: bool) -> usize {
        match self {
            Self::Prefill | Self::Gap => 1,
            _ => 1 + usize::from(disaggregates),
        }
    }
}

/// All phases. A plain reverse proxy has neither prefill nor gap.
pub(super) async fn measure(
    args: &RouterArgs,
    engines: &EnginePair,
    subject: &Gateway,
    report: &mut GatewayReport,
) -> Result<(), RouterBenchError> {
    for (phase, name) in HangupPhase::ALL {
        if subject.disaggregates || !matches!(phase, HangupPhase::Prefill | HangupPhase::Gap) {
            let hangup = leave(args, engines, subject, phase).await?;
            report.hangups.push(Hangup { phase: name, ..hangup });
        }
    }
    Ok(())
}

async fn leave(
    args: &RouterArgs,
    engines: &EnginePair,
    subject: &Gateway,
    phase: HangupPhase,
) -> Result<Hangup, RouterBenchError> {
    let (prefill, decode) = phase.behaviours();
    engines.prefill.set_behaviour(prefill);
    engines.decode.set_behaviour(decode);
    let mut hangup = Hangup::default();
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
    engines.prefill.set_behaviour(Behaviour::Answer);
    engines.decode.set_behaviour(Behaviour::Answer);
    engines.prefill.watch(None);
    engines.decode.watch(None);
    if hangup.seen > 0 {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e6;
        (hangup.p50_ms, hangup.p99_ms, hangup.max_ms) = (at(0.5), at(0.99), at(1.0));
    }
    Ok(hangup)
}

/// Time from one client's close to the first engine that detects it. `None` if none does.
async fn once(
    engines: &EnginePair,
    subject: &Gateway,
    phase: HangupPhase,
) -> Result<Option<Duration>, RouterBenchError> {
    // Each client has its own watcher, so that late signals of earlier clients are dropped.
    let (watcher, mut signals) = SimEngine::watcher();
    engines.prefill.watch(Some(watcher.clone()));
    engines.decode.watch(Some(watcher));
    let mut connection = KeptConnection::connect(subject.address).await?;
    let streaming = if phase == HangupPhase::Unary { Streaming::Whole } else { Streaming::Streamed };
    connection.send(streaming).await?;
    let mut takers = 0;
    while takers < phase.phases_by_engine(subject.disaggregates) {
        match tokio::time::timeout(WITHIN, signals.recv()).await {
            Ok(Some((_, EngineSignal::Took))) => takers += 1,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Ok(None),
        }
    }
    match phase {
        HangupPhase::MidStream => connection.first_byte().await?,
        HangupPhase::MidStreamReset => {
            connection.first_byte().await?;
            connection.reset_on_close()?;
        }
        HangupPhase::WindowFull => tokio::time::sleep(FILLS_WITHIN).await,
        HangupPhase::Prefill | HangupPhase::Gap | HangupPhase::DecodeBeforeHead | HangupPhase::Unary => {}
    }
    let left = Instant::now();
    drop(connection);
    loop {
        match tokio::time::timeout(WITHIN, signals.recv()).await {
            Ok(Some((at, EngineSignal::Closed | EngineSignal::Verb))) if at >= left => {
                return Ok(Some(at - left));
            }
            // Other signals, and those before the close, do not count.
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}
