//! What a subject adds to the time to first token, against a client that makes both hops itself.

use std::time::{Duration, Instant};

use baton_connector::handoff::KvIntent;
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::awake::Awake;
use super::report::{Cores, RouterReport};
use super::subject::Subject;
use super::wire::{self, Wire, failed};
use super::{Engines, RouterArgs, RouterBenchError};

/// To the prefill engine and then to the decode engine.
struct Direct {
    prefill: Wire,
    decode: Wire,
    ask: Map<String, Value>,
    first: Vec<u8>,
}

fn ask(stream: bool) -> Map<String, Value> {
    serde_json::from_str(&wire::body(stream)).expect("an object is written there")
}

impl Direct {
    async fn connect(engines: &Engines) -> Result<Self, RouterBenchError> {
        let mut first = ask(false);
        first.insert("max_tokens".into(), json!(1));
        let intent = serde_json::from_str(KvIntent::PRODUCE_REQUEST).map_err(failed)?;
        first.insert("kv_transfer_params".into(), intent);
        let first = serde_json::to_string(&first).map_err(failed)?;
        Ok(Self {
            prefill: Wire::connect(engines.prefill.address()).await?,
            decode: Wire::connect(engines.decode.address()).await?,
            ask: ask(true),
            first: wire::request(&first),
        })
    }

    async fn first_token(&mut self) -> Result<Duration, RouterBenchError> {
        let begun = Instant::now();
        let reply = self.prefill.post(&self.first).await?;
        let mut reply: Map<String, Value> = serde_json::from_slice(reply.bytes).map_err(failed)?;
        let handoff = reply.remove("kv_transfer_params").ok_or_else(|| failed("no handoff"))?;
        self.ask.insert("kv_transfer_params".into(), handoff);
        let second = wire::request(&serde_json::to_string(&self.ask).map_err(failed)?);
        let answer = self.decode.post(&second).await?;
        Ok(answer.first - begun)
    }
}

/// Tokens of an answer: the first, and one after a pause, as an engine has it. Without the pause what follows is on
/// its way through the same two processors before the client has read the first.
pub(super) const TOKENS: usize = 2;
/// Between the two: much longer than a token's way, and shorter than any engine's step.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// One repetition, on processors as they are and on such as do not sleep.
pub(super) async fn measure(
    args: &RouterArgs,
    engines: &Engines,
    subjects: &[Subject],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    measure_on(Cores::AsTheyAre, args, engines, subjects, repetition, report).await?;
    match Awake::keep() {
        Ok(_awake) => measure_on(Cores::Awake, args, engines, subjects, repetition, report).await?,
        Err(error) if repetition == 0 => {
            crate::note(format_args!("baton bench router: SKIPPED processors that are kept awake: {error}"));
        }
        Err(_) => {}
    }
    Ok(())
}

/// The first tenth is left out: connections, caches and branch predictors are cold.
async fn measure_on(
    cores: Cores,
    args: &RouterArgs,
    engines: &Engines,
    subjects: &[Subject],
    repetition: usize,
    report: &mut RouterReport,
) -> Result<(), RouterBenchError> {
    let request = wire::request(&wire::body(true));
    let mut direct = Direct::connect(engines).await?;
    let mut past = histogram();
    let mut through = Vec::new();
    for subject in subjects.iter().filter(|subject| subject.disaggregates) {
        through.push((subject.name, Wire::connect(subject.address).await?, histogram()));
    }
    let warm = args.requests / 10;
    for round in 0..warm + args.requests {
        let took = direct.first_token().await?;
        if round >= warm {
            record(&mut past, took);
        }
        for turn in 0..through.len() {
            let at = (turn + round + repetition) % through.len();
            let (_, wire, histogram) = &mut through[at];
            let begun = Instant::now();
            let first = wire.post(&request).await?.first;
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

/// From 1 µs to a minute, in nanoseconds, to three digits.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 3).expect("the bounds are in order")
}

pub(super) fn record(histogram: &mut Histogram<u64>, took: Duration) {
    histogram.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
}
