//! One round of one target without cancels: streams in a closed loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{CompareArgs, CompareTarget};
use crate::BenchError;
use crate::load::{
    Call, CancelTrigger, Client, CompletionSpec, Connections, DisconnectKind, Endpoint, Limits, Prompt,
    Target,
};

/// Maximum time of a request.
const PATIENCE: Duration = Duration::from_secs(60);
/// Uncounted requests per client at the beginning, which open connections to the engines.
const WARM_UP: usize = 1;

/// The results of a round.
pub(super) struct CalmRound {
    pub ttft_ms: Vec<f64>,
    pub gaps_ms: Vec<f64>,
    pub failed: usize,
    pub requests_per_second: f64,
    pub cpu_s_per_1000: Option<f64>,
}

/// A client of a target, with the limits of this benchmark.
pub(super) async fn client(
    contender: &CompareTarget,
    connections: Connections,
) -> Result<Client, BenchError> {
    let limits = Limits { total: PATIENCE, ..Limits::default() };
    Ok(Client::open(Target::parse(&contender.address)?, limits, connections).await?)
}

/// A prompt of `words` words, different for each number.
pub(super) fn prompt(number: usize, words: usize) -> Prompt {
    Prompt::Text((0..words).map(|word| format!("w{number}x{word} ")).collect())
}

pub(super) fn completion<'a>(args: &'a CompareArgs, prompt: &'a Prompt) -> CompletionSpec<'a> {
    CompletionSpec::new(Endpoint::Completions, &args.model, prompt, args.output_tokens as u32)
}

pub(super) async fn round(
    args: &CompareArgs,
    contender: &CompareTarget,
    round: usize,
) -> Result<CalmRound, BenchError> {
    let client = client(contender, Connections::Kept).await?;
    let args = Arc::new(args.clone());
    closed_loop(&args, &client, usize::MAX / 2, WARM_UP * args.concurrency).await?;
    let used = || contender.subject.as_ref().map(|subject| subject.cpu()).transpose();
    let (cpu, begun) = (used()?, Instant::now());
    let calls = closed_loop(&args, &client, round * args.requests, args.requests).await?;
    let (took, after) = (begun.elapsed(), used()?);
    let done: Vec<_> = calls.iter().filter(|call| call.is_done()).collect();
    if done.is_empty() {
        let why = calls.first().map(|call| format!("{:?}", call.outcome)).unwrap_or_default();
        return Err(format!("{}: no request was answered: {why}", contender.name).into());
    }
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let per_1000 = |cpu: Duration| cpu.as_secs_f64() * 1_000.0 / calls.len() as f64;
    Ok(CalmRound {
        ttft_ms: done.iter().filter_map(|call| call.ttft()).map(ms).collect(),
        gaps_ms: done.iter().flat_map(|call| call.gaps()).map(ms).collect(),
        failed: calls.len() - done.len(),
        requests_per_second: done.len() as f64 / took.as_secs_f64(),
        cpu_s_per_1000: cpu.zip(after).map(|(before, after)| per_1000(after.saturating_sub(before))),
    })
}

async fn closed_loop(
    args: &Arc<CompareArgs>,
    client: &Client,
    first: usize,
    requests: usize,
) -> Result<Vec<Call>, BenchError> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..args.concurrency {
        let (args, client, next) = (Arc::clone(args), client.clone(), Arc::clone(&next));
        clients.spawn(async move {
            let mut calls = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return calls;
                }
                let prompt = prompt(first + number, args.prompt_tokens);
                let ask = completion(&args, &prompt).prepare();
                calls.push(client.call(&ask, &CancelTrigger::Never, DisconnectKind::Fin).await);
            }
        });
    }
    let mut calls = Vec::new();
    while let Some(done) = clients.join_next().await {
        calls.extend(done?);
    }
    Ok(calls)
}
