//! Resident memory: idle, and per open stream.

use std::time::{Duration, Instant};

use super::connection::{self, KeptConnection};
use super::gateway::Gateway;
use super::report::GatewayReport;
use super::{EnginePair, RouterArgs, RouterBenchError};
use crate::load::Streaming;
use crate::sim::instant::Behaviour;

/// Streams that are opened at a time.
const BATCH: usize = 50;
/// Maximum time until streams are open at the engine, and until they are closed.
const WITHIN: Duration = Duration::from_secs(30);

/// Idle memory after a few requests, when one-time allocations are done.
pub(super) async fn idle(subject: &Gateway, report: &mut GatewayReport) -> Result<(), RouterBenchError> {
    if !subject.is_process() {
        return Ok(());
    }
    let mut connection = KeptConnection::connect(subject.address).await?;
    for streaming in [Streaming::Whole, Streaming::Streamed, Streaming::Whole, Streaming::Streamed] {
        connection.post(&connection::default_request(streaming)).await?;
    }
    report.memory.get_or_insert_default().idle_mib = subject.resident_kib()? as f64 / 1024.0;
    Ok(())
}

/// Opens streams that have sent one token, and divides the added memory by their number.
pub(super) async fn per_stream(
    args: &RouterArgs,
    engines: &EnginePair,
    subject: &Gateway,
    report: &mut GatewayReport,
) -> Result<(), RouterBenchError> {
    if !subject.is_process() {
        return Ok(());
    }
    let before_kib = subject.resident_kib()?;
    engines.decode.set_behaviour(Behaviour::OneToken);
    let mut open = Vec::new();
    while open.len() < args.streams {
        let mut batch = Vec::new();
        for _ in 0..BATCH.min(args.streams - open.len()) {
            let mut connection = KeptConnection::connect(subject.address).await?;
            connection.send(Streaming::Streamed).await?;
            batch.push(connection);
        }
        for mut connection in batch {
            connection.first_byte().await?;
            open.push(connection);
        }
    }
    // Time for the subject to free memory after the first byte.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let with_kib = subject.resident_kib()?;
    let memory = report.memory.get_or_insert_default();
    memory.streams = open.len();
    memory.per_stream_kib = Some(with_kib.saturating_sub(before_kib) as f64 / open.len() as f64);
    drop(open);
    engines.decode.set_behaviour(Behaviour::Answer);
    let begun = Instant::now();
    while engines.decode.open_generations() > 0 {
        if begun.elapsed() > WITHIN {
            crate::note(format_args!(
                "baton bench router: {} keeps {} streams whose clients have left",
                subject.name,
                engines.decode.open_generations()
            ));
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
