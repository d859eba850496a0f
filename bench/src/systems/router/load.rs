//! CPU per request under load.

use std::time::Instant;

use super::connection::{self, KeptConnection};
use super::gateway::Gateway;
use super::report::RouterReport;
use super::{RouterArgs, RouterBenchError};
use crate::load::Streaming;

/// Parts of a round, so that a burst of other load does not affect one gateway alone.
const PARTS: usize = 4;

/// One kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadKind {
    UnaryAlone,
    StreamedAlone,
    Unary,
    Streamed,
    /// A pause between two tokens, so that each token takes a separate read and write.
    Paced,
}

impl LoadKind {
    pub(super) const ALL: [Self; 5] =
        [Self::UnaryAlone, Self::StreamedAlone, Self::Unary, Self::Streamed, Self::Paced];

    pub(super) fn is_paced(self) -> bool {
        self == Self::Paced
    }

    fn streaming(self) -> Streaming {
        match self {
            Self::UnaryAlone | Self::Unary => Streaming::Whole,
            Self::StreamedAlone | Self::Streamed | Self::Paced => Streaming::Streamed,
        }
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

/// One repetition of one kind for all gateways.
pub(super) async fn measure(
    kind: LoadKind,
    args: &RouterArgs,
    subjects: &[Gateway],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    let each = args.load_requests.div_ceil(kind.at_once(args) * PARTS);
    let mut sums = vec![(0.0, 0.0, 0); subjects.len()];
    for part in 0..PARTS {
        for turn in 0..subjects.len() {
            // Each part begins with another gateway.
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

/// Seconds of CPU time, seconds, and requests.
async fn round(
    kind: LoadKind,
    args: &RouterArgs,
    subject: &Gateway,
    each: usize,
) -> Result<(f64, f64, usize), RouterBenchError> {
    let streaming = kind.streaming();
    let request: std::sync::Arc<[u8]> = connection::default_request(streaming).into();
    // Connections to the engines are made before the CPU time is counted.
    let mut warming = tokio::task::JoinSet::new();
    for _ in 0..kind.at_once(args) {
        let (address, request) = (subject.address, std::sync::Arc::clone(&request));
        warming.spawn(async move {
            let mut connection = KeptConnection::connect(address).await?;
            connection.post(&request).await?;
            Ok(connection)
        });
    }
    let connections = all(warming).await?;
    let (cpu, begun) = (subject.cpu()?, Instant::now());
    let requests = each * connections.len();
    let mut tasks = tokio::task::JoinSet::new();
    for mut connection in connections {
        let request = std::sync::Arc::clone(&request);
        tasks.spawn(async move {
            for _ in 0..each {
                let answer = connection.post(&request).await?;
                if streaming != Streaming::Whole
                    && !answer.bytes.windows(6).rev().take(64).any(|part| part == b"[DONE]")
                {
                    return Err(connection::failed("a stream without [DONE]"));
                }
            }
            Ok(connection)
        });
    }
    let connections = all(tasks).await?;
    let (took, used) = (begun.elapsed(), subject.cpu()?.saturating_sub(cpu));
    // Closing does not count.
    drop(connections);
    Ok((used.as_secs_f64(), took.as_secs_f64(), requests))
}

async fn all(
    mut tasks: tokio::task::JoinSet<Result<KeptConnection, RouterBenchError>>,
) -> Result<Vec<KeptConnection>, RouterBenchError> {
    let mut connections = Vec::new();
    while let Some(done) = tasks.join_next().await {
        connections.push(done.map_err(connection::failed)??);
    }
    Ok(connections)
}
