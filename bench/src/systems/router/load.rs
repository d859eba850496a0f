//! CPU per request under load.

use std::time::Instant;

use super::report::RouterReport;
use super::subject::Subject;
use super::wire::{self, Wire};
use super::{RouterArgs, RouterBenchError};

/// Rounds of one kind are cut to so many parts, so that a burst of other work does not hit one subject alone.
const PARTS: usize = 4;

/// One kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    UnaryAlone,
    StreamedAlone,
    Unary,
    Streamed,
    /// A pause between two tokens: each is a read and a write of its own.
    Paced,
}

impl Kind {
    pub(super) const ALL: [Self; 5] =
        [Self::UnaryAlone, Self::StreamedAlone, Self::Unary, Self::Streamed, Self::Paced];

    pub(super) fn is_paced(self) -> bool {
        self == Self::Paced
    }

    fn is_streamed(self) -> bool {
        !matches!(self, Self::UnaryAlone | Self::Unary)
    }

    fn at_once(self, args: &RouterArgs) -> usize {
        match self {
            Self::UnaryAlone | Self::StreamedAlone => 1,
            Self::Unary | Self::Streamed | Self::Paced => args.concurrency,
        }
    }

    fn name(self, args: &RouterArgs) -> String {
        let shape = match self {
            Self::UnaryAlone | Self::Unary => "unary",
            Self::StreamedAlone | Self::Streamed => "streamed",
            Self::Paced => "paced",
        };
        format!("{shape}_c{}", self.at_once(args))
    }
}

/// One repetition of one kind for all subjects.
pub(super) async fn measure(
    kind: Kind,
    args: &RouterArgs,
    subjects: &[Subject],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    let each = args.load_requests.div_ceil(kind.at_once(args) * PARTS);
    let mut sums = vec![(0.0, 0.0, 0); subjects.len()];
    for part in 0..PARTS {
        for turn in 0..subjects.len() {
            // Another one begins each time.
            let at = (turn + part + repetition) % subjects.len();
            let (cpu_s, took_s, requests) = round(kind, args, &subjects[at], each).await?;
            sums[at] = (sums[at].0 + cpu_s, sums[at].1 + took_s, sums[at].2 + requests);
        }
    }
    let name = kind.name(args);
    for (subject, (cpu_s, took_s, requests)) in subjects.iter().zip(sums) {
        let load = report.of(subject.name).load(&name);
        load.cpu_us.add(cpu_s * 1e6 / requests as f64);
        load.requests_per_second.add(requests as f64 / took_s);
    }
    Ok(())
}

/// Seconds of CPU, seconds, and requests.
async fn round(
    kind: Kind,
    args: &RouterArgs,
    subject: &Subject,
    each: usize,
) -> Result<(f64, f64, usize), RouterBenchError> {
    let stream = kind.is_streamed();
    let request: std::sync::Arc<[u8]> = wire::request(&wire::body(stream)).into();
    // Connections to the engines are made now, not while the CPU is counted.
    let mut warming = tokio::task::JoinSet::new();
    for _ in 0..kind.at_once(args) {
        let (address, request) = (subject.address, std::sync::Arc::clone(&request));
        warming.spawn(async move {
            let mut wire = Wire::connect(address).await?;
            wire.post(&request).await?;
            Ok(wire)
        });
    }
    let wires = all(warming).await?;
    let (cpu, begun) = (subject.cpu()?, Instant::now());
    let requests = each * wires.len();
    let mut tasks = tokio::task::JoinSet::new();
    for mut wire in wires {
        let request = std::sync::Arc::clone(&request);
        tasks.spawn(async move {
            for _ in 0..each {
                let answer = wire.post(&request).await?;
                if stream && !answer.bytes.windows(6).rev().take(64).any(|part| part == b"[DONE]") {
                    return Err(wire::failed("a stream without [DONE]"));
                }
            }
            Ok(wire)
        });
    }
    let wires = all(tasks).await?;
    let (took, used) = (begun.elapsed(), subject.cpu()?.saturating_sub(cpu));
    // Closing is not part of what was counted.
    drop(wires);
    Ok((used.as_secs_f64(), took.as_secs_f64(), requests))
}

async fn all(
    mut tasks: tokio::task::JoinSet<Result<Wire, RouterBenchError>>,
) -> Result<Vec<Wire>, RouterBenchError> {
    let mut wires = Vec::new();
    while let Some(done) = tasks.join_next().await {
        wires.push(done.map_err(wire::failed)??);
    }
    Ok(wires)
}
