//! A probed endpoint, and runs on it.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::metrics::Slo;
use super::options::EndpointArgs;
use crate::BenchError;
use crate::load::endpoint_profile::{EndpointProfile, first_model, learn_ids, learn_words};
use crate::load::plan::prompts::Vocabulary;
use crate::load::plan::workload::{RunPlan, Workload};
use crate::load::runner::{RunObserver, RunResult, Runner};
use crate::load::{Client, Connections, Limits, RetryLimit, Streaming, Target};

/// Runs of a workload have small numbers. Warm-up requests have larger ones, so that no prompt is repeated.
const WARM_UP_RUN: usize = 1 << 40;
/// Concurrent warm-up requests, if the workload does not specify concurrency.
const WARM_UP_LANES: usize = 8;

/// An endpoint under measurement.
pub(crate) struct ServeSubject {
    pub(crate) client: Client,
    pub(crate) profile: EndpointProfile,
    pub(crate) retries: RetryLimit,
    pub(crate) percentiles: Vec<f64>,
    pub(crate) slo: Slo,
    /// Notes for readers of the numbers.
    pub(crate) notes: Vec<String>,
}

/// Ignores all events.
struct NoObserver;

impl RunObserver for NoObserver {}

impl ServeSubject {
    /// Resolves the endpoint, its model, and the tokens of its prompts.
    ///
    /// # Errors
    /// If the endpoint cannot be reached.
    pub(crate) async fn open(
        url: &str,
        args: &EndpointArgs,
        percentiles: &[f64],
        slo: &Slo,
    ) -> Result<Self, BenchError> {
        let mut target = Target::parse(url)?.with_ca_file(args.ca_file.as_deref());
        target = match (&args.api_key_file, std::env::var("OPENAI_API_KEY")) {
            (None, Ok(key)) if !key.is_empty() => target.with_key(&key)?,
            (file, _) => target.with_key_file(file.as_deref())?,
        };
        for header in &args.headers {
            target = target.with_header(header)?;
        }
        let connections = if args.fresh_connections { Connections::Fresh } else { Connections::Kept };
        let total = Duration::from_secs_f64(args.timeout);
        let client = Client::open(target, Limits { total, ..Limits::default() }, connections).await?;
        let model = match &args.model {
            Some(model) => model.clone(),
            None => first_model(&client).await?,
        };
        let words = match (args.prompt_ids, args.vocab_size) {
            (true, Some(size)) => Vocabulary::Ids((0..size).collect()),
            (true, None) => learn_ids(&client, &model).await?,
            (false, _) => learn_words(&client, args.endpoint, &model).await?,
        };
        let streaming = match (args.no_stream, args.continuous_usage) {
            (true, _) => Streaming::Whole,
            (false, true) => Streaming::Counted,
            (false, false) => Streaming::Streamed,
        };
        let profile = EndpointProfile {
            endpoint: args.endpoint,
            model,
            words,
            streaming,
            ignore_eos: !args.stop_at_eos,
            tag: args.tag.clone(),
            extra: args.extra()?,
        };
        let (percentiles, slo) = (percentiles.to_vec(), slo.clone());
        Ok(Self { client, profile, retries: RetryLimit(args.retries), percentiles, slo, notes: Vec::new() })
    }

    /// Probes the endpoint with one request, then sends some uncounted requests.
    ///
    /// # Errors
    /// If the endpoint does not answer the first request.
    pub(crate) async fn warm_up(
        &mut self,
        workload: &Workload,
        requests: usize,
        stop: &CancellationToken,
    ) -> Result<(), BenchError> {
        let mut plan = workload.plan(WARM_UP_RUN);
        let wanted = self.profile.ignore_eos;
        if let Some(first) = plan.requests.first() {
            let least = self.profile.words.least();
            if first.input_tokens() < least {
                self.notes.push(format!("the shortest prompt for this endpoint has {least} tokens"));
            }
            self.profile.probe(&self.client, first).await?;
        }
        if wanted && !self.profile.ignore_eos {
            self.notes
                .push("the endpoint refuses ignore_eos: answers may be shorter than asked for".to_owned());
        }
        plan.requests.truncate(requests);
        plan.requests.iter_mut().for_each(|planned| planned.at = None);
        plan.lanes = Some(plan.lanes.unwrap_or(WARM_UP_LANES));
        plan.until = None;
        if !plan.requests.is_empty() {
            self.run(plan, 0, stop, &mut NoObserver).await;
        }
        Ok(())
    }

    /// Runs a plan.
    pub(crate) async fn run(
        &self,
        plan: RunPlan,
        seed: u64,
        stop: &CancellationToken,
        watch: &mut dyn RunObserver,
    ) -> RunResult {
        let runner = Runner {
            client: &self.client,
            profile: Arc::new(self.profile.clone()),
            retries: self.retries,
            stop: stop.clone(),
            seed,
        };
        runner.run(plan, watch).await
    }
}
