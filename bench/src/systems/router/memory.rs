//! Resident memory: idle, and per open stream.

use std::time::{Duration, Instant};

use super::report::SubjectReport;
use super::subject::Subject;
use super::wire::{self, Wire};
use super::{Engines, RouterArgs, RouterBenchError};
use crate::sim::instant::Behaviour;

/// Streams that are opened at a time.
const BATCH: usize = 50;
/// Streams must be open at the engine, and be closed again, within this time.
const WITHIN: Duration = Duration::from_secs(30);

/// After a few requests, so that what is allocated once is there.
pub(super) async fn idle(subject: &Subject, report: &mut SubjectReport) -> Result<(), RouterBenchError> {
    if !subject.is_process() {
        return Ok(());
    }
    let mut wire = Wire::connect(subject.address).await?;
    for stream in [false, true, false, true] {
        wire.post(&wire::request(&wire::body(stream))).await?;
    }
    report.memory.get_or_insert_default().idle_mib = subject.resident_kib()? as f64 / 1024.0;
    Ok(())
}

/// Opens streams that have said one token and then nothing, and divides.
pub(super) async fn per_stream(
    args: &RouterArgs,
    engines: &Engines,
    subject: &Subject,
    report: &mut SubjectReport,
) -> Result<(), RouterBenchError> {
    if !subject.is_process() {
        return Ok(());
    }
    let before_kib = subject.resident_kib()?;
    engines.decode.behave(Behaviour::OneToken);
    let mut open = Vec::new();
    while open.len() < args.streams {
        let mut batch = Vec::new();
        for _ in 0..BATCH.min(args.streams - open.len()) {
            let mut wire = Wire::connect(subject.address).await?;
            wire.send(true).await?;
            batch.push(wire);
        }
        for mut wire in batch {
            wire.first_byte().await?;
            open.push(wire);
        }
    }
    // Whatever a subject frees a moment after the first byte is freed.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let with_kib = subject.resident_kib()?;
    let memory = report.memory.get_or_insert_default();
    memory.streams = open.len();
    memory.per_stream_kib = Some(with_kib.saturating_sub(before_kib) as f64 / open.len() as f64);
    drop(open);
    engines.decode.behave(Behaviour::Answer);
    let begun = Instant::now();
    while engines.decode.held() > 0 {
        if begun.elapsed() > WITHIN {
            crate::note(format_args!(
                "baton bench router: {} keeps {} streams whose clients have left",
                subject.name,
                engines.decode.held()
            ));
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
