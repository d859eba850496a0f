//! The time to first token that a gateway adds to that of a client that makes both hops itself.

use std::time::{Duration, Instant};

use baton_connector::handoff::KvIntent;
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::busy_cores::BusyCores;
use super::connection::{self, KeptConnection, failed};
use super::gateway::Gateway;
use super::report::{CoreMode, RouterReport};
use super::{EnginePair, RouterArgs, RouterBenchError};
use crate::load::Streaming;

/// A client that calls the prefill engine and then the decode engine.
struct DirectClient {
    prefill: KeptConnection,
    decode: KeptConnection,
    ask: Map<String, Value>,
    first: Vec<u8>,
}

fn ask(streaming: Streaming) -> Map<String, Value> {
    serde_json::from_str(&connection::body(streaming)).expect("an object is written there")
}

impl DirectClient {
    async fn connect(engines: &EnginePair) -> Result<Self, RouterBenchError> {
        let mut first = ask(Streaming::Whole);
        first.insert("max_tokens".into(), json!(1));
        let intent = serde_json::from_str(KvIntent::PRODUCE_REQUEST).map_err(failed)?;
        first.insert("kv_transfer_params".into(), intent);
        let first = serde_json::to_string(&first).map_err(failed)?;
        Ok(Self {
            prefill: KeptConnection::connect(engines.prefill.address()).await?,
            decode: KeptConnection::connect(engines.decode.address()).await?,
            ask: ask(Streaming::Streamed),
            first: connection::request(&first),
        })
    }

    async fn first_token(&mut self) -> Result<Duration, RouterBenchError> {
        let begun = Instant::now();
        let reply = self.prefill.post(&self.first).await?;
        let mut reply: Map<String, Value> = serde_json::from_slice(reply.bytes).map_err(failed)?;
        let handoff = reply.remove("kv_transfer_params").ok_or_else(|| failed("no handoff"))?;
        self.ask.insert("kv_transfer_params".into(), handoff);
        let second = connection::request(&serde_json::to_string(&self.ask).map_err(failed)?);
        let answer = self.decode.post(&second).await?;
        Ok(answer.first - begun)
    }
}

/// Tokens of a response: the first, and one after a pause, as from an engine. Without the pause, the processors
/// would already transfer the second token before the client has read the first.
pub(super) const TOKENS: usize = 2;
/// Time between the two tokens: much longer than a token's way, and shorter than an engine's step.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// One repetition, with idle processors asleep and kept awake.
pub(super) async fn measure(
    args: &RouterArgs,
    engines: &EnginePair,
    subjects: &[Gateway],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    measure_on(CoreMode::AsTheyAre, args, engines, subjects, repetition, report).await?;
    match BusyCores::keep() {
        Ok(_awake) => measure_on(CoreMode::Awake, args, engines, subjects, repetition, report).await?,
        Err(error) if repetition == 0 => {
            crate::note(format_args!("baton bench router: SKIPPED processors that are kept awake: {error}"));
        }
        Err(_) => {}
    }
    Ok(())
}

/// The first tenth of the requests warms up and does not count.
async fn measure_on(
    cores: CoreMode,
    args: &RouterArgs,
    engines: &EnginePair,
    subjects: &[Gateway],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    let request = connection::default_request(Streaming::Streamed);
    let mut direct = DirectClient::connect(engines).await?;
    let mut past = histogram();
    let mut through = Vec::new();
    for subject in subjects.iter().filter(|subject| subject.disaggregates) {
        through.push((subject.name, KeptConnection::connect(subject.address).await?, histogram()));
    }
    let warm = args.requests / 10;
    for round in 0..warm + args.requests {
        let took = direct.first_token().await?;
        if round >= warm {
            record(&mut past, took);
        }
        for turn in 0..through.len() {
            let at = (turn + round + repetition) % through.len();
            let (_, connection, histogram) = &mut through[at];
            let begun = Instant::now();
            let first = connection.post(&request).await?.first;
            if round >= warm {
                record(histogram, first - begun);
            }
        }
    }
    let at = |of: &Histogram<u64>, quantile| of.value_at_quantile(quantile) as f64 / 1e3;
    let (direct_p50, direct_p99) = (at(&past, 0.5), at(&past, 0.99));
    for (name, _, histogram) in &through {
        let (p50, p99) = (at(histogram, 0.5), at(histogram, 0.99));
        let first_token = report.of(name).first_token(cores);
        first_token.direct_p50_us.add(direct_p50);
        first_token.direct_p99_us.add(direct_p99);
        first_token.p50_us.add(p50);
        first_token.p99_us.add(p99);
        first_token.added_p50_us.add(p50 - direct_p50);
        first_token.added_p99_us.add(p99 - direct_p99);
    }
    Ok(())
}

/// From 1 µs to a minute, in nanoseconds, with three digits.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 3).expect("the bounds are in order")
}

pub(super) fn record(histogram: &mut Histogram<u64>, took: Duration) {
    histogram.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
}
