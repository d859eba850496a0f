//! The router's memory over many requests, of which every tenth is cancelled.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::connection::{self, KeptConnection};
use super::{EnginePair, RouterArgs, RouterBenchError, peers};
use crate::load::Streaming;

/// Interval of memory samples.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// One in this many requests is cancelled.
const CANCEL_EACH: usize = 10;

/// The report. The fields are the keys of `--soak N --json`.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    /// The machine: processor, processors, memory.
    pub machine: String,
    /// Requests, half of them streamed.
    pub requests: usize,
    /// Cancelled requests: a third each before the first byte, after it, and by a reset.
    pub cancelled: usize,
    /// Duration of the run.
    pub seconds: f64,
    /// Resident memory in the first quarter of the run, median of the samples, in KiB.
    pub first_quarter_kib: u64,
    /// The same in the last quarter.
    pub last_quarter_kib: u64,
    /// Maximum, in KiB.
    pub most_kib: u64,
    /// Number of memory samples.
    pub looks: usize,
}

impl SoakReport {
    /// The report for people.
    #[must_use]
    pub fn table(&self) -> String {
        let Self { machine, requests, cancelled, seconds, looks, .. } = self;
        let [first, last, most] = [self.first_quarter_kib, self.last_quarter_kib, self.most_kib]
            .map(|kib| format!("{:.2}", kib as f64 / 1024.0));
        format!(
            "{machine}\n{requests} requests, {cancelled} of them cancelled, in {seconds:.0} s\nresident memory, MiB: first \
             quarter {first}, last quarter {last}, most {most} ({looks} looks)"
        )
    }
}

/// Sends `requests` requests and samples the memory meanwhile.
pub(super) async fn measure(args: &RouterArgs, requests: usize) -> Result<SoakReport, RouterBenchError> {
    let engines = EnginePair::start(args.tokens, Duration::ZERO)?;
    let subject =
        peers::baton(args.programs.binary.as_ref(), engines.addresses(), peers::EngineHttp::One).await?;
    let (next, cancelled) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let begun = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.concurrency {
        let caller = SoakClient {
            address: subject.address,
            next: Arc::clone(&next),
            cancelled: Arc::clone(&cancelled),
        };
        tasks.spawn(caller.run(requests));
    }
    let mut looks = Vec::new();
    let mut tick = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            _ = tick.tick() => looks.push(subject.resident_kib()?),
            done = tasks.join_next() => match done {
                Some(done) => done.map_err(connection::failed)??,
                None => break,
            },
        }
    }
    looks.push(subject.resident_kib()?);
    let seconds = begun.elapsed().as_secs_f64();
    subject.stop();
    let quarter = looks.len().div_ceil(4);
    Ok(SoakReport {
        machine: crate::common::machine::described(),
        requests,
        cancelled: cancelled.load(Ordering::Relaxed),
        seconds,
        first_quarter_kib: median(&looks[..quarter]),
        last_quarter_kib: median(&looks[looks.len() - quarter..]),
        most_kib: looks.iter().copied().max().unwrap_or(0),
        looks: looks.len(),
    })
}

fn median(looks: &[u64]) -> u64 {
    let mut sorted = looks.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

/// One of several concurrent clients.
struct SoakClient {
    address: std::net::SocketAddr,
    next: Arc<AtomicUsize>,
    cancelled: Arc<AtomicUsize>,
}

impl SoakClient {
    async fn run(self, requests: usize) -> Result<(), RouterBenchError> {
        let bodies = [Streaming::Whole, Streaming::Streamed].map(connection::default_request);
        let mut kept = KeptConnection::connect(self.address).await?;
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= requests {
                return Ok(());
            }
            if number % CANCEL_EACH != CANCEL_EACH - 1 {
                kept.post(&bodies[number % 2]).await?;
                continue;
            }
            let mut leaves = KeptConnection::connect(self.address).await?;
            leaves.send(Streaming::Streamed).await?;
            match number / CANCEL_EACH % 3 {
                0 => {}
                1 => leaves.first_byte().await?,
                _ => leaves.reset_on_close()?,
            }
            drop(leaves);
            self.cancelled.fetch_add(1, Ordering::Relaxed);
        }
    }
}
