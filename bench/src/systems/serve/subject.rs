//! An endpoint that has been tried out, and runs on it.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::metrics::Slo;
use super::options::EndpointArgs;
use crate::BenchError;
use crate::load::plan::prompts::Words;
use crate::load::plan::workload::{Plan, Workload};
use crate::load::runner::{Run, Runner, Watch};
use crate::load::speaker::{Speaker, first_model, learn_ids, learn_words};
use crate::load::{Client, Connections, Limits, Retries, Streaming, Target};

/// Runs of a workload have small numbers; what is sent before them has others, so that no prompt is the same.
const WARM_UP_RUN: usize = 1 << 40;
/// Warm-up requests in flight, where the workload does not say.
const WARM_UP_LANES: usize = 8;

/// An endpoint that can be measured.
pub(crate) struct Subject {
    pub(crate) client: Client,
    pub(crate) speaker: Speaker,
    pub(crate) retries: Retries,
    pub(crate) percentiles: Vec<f64>,
    pub(crate) slo: Slo,
    /// What somebody who reads the numbers should know.
    pub(crate) notes: Vec<String>,
}

/// Nobody looks.
struct Unwatched;

impl Watch for Unwatched {}

impl Subject {
    /// Finds the endpoint, its model, and what its prompts are made of.
    ///
    /// # Errors
    /// When it cannot be asked, in words.
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
            (true, Some(size)) => Words::Ids((0..size).collect()),
            (true, None) => learn_ids(&client, &model).await?,
            (false, _) => learn_words(&client, args.endpoint, &model).await?,
        };
        let streaming = match (args.no_stream, args.continuous_usage) {
            (true, _) => Streaming::Whole,
            (false, true) => Streaming::Counted,
            (false, false) => Streaming::Streamed,
        };
        let speaker = Speaker {
            endpoint: args.endpoint,
            model,
            words,
            streaming,
            ignore_eos: !args.stop_at_eos,
            tag: args.tag.clone(),
            extra: args.extra()?,
        };
        let (percentiles, slo) = (percentiles.to_vec(), slo.clone());
        Ok(Self { client, speaker, retries: Retries(args.retries), percentiles, slo, notes: Vec::new() })
    }

    /// Tries the endpoint out with one request, then sends it some more that nobody measures.
    ///
    /// # Errors
    /// When it does not answer the first.
    pub(crate) async fn warm_up(
        &mut self,
        workload: &Workload,
        requests: usize,
        stop: &CancellationToken,
    ) -> Result<(), BenchError> {
        let mut plan = workload.plan(WARM_UP_RUN);
        let wanted = self.speaker.ignore_eos;
        if let Some(first) = plan.requests.first() {
            let least = self.speaker.words.least();
            if first.input_tokens() < least {
                self.notes.push(format!("the shortest prompt for this endpoint has {least} tokens"));
            }
            self.speaker.try_out(&self.client, first).await?;
        }
        if wanted && !self.speaker.ignore_eos {
            self.notes
                .push("the endpoint refuses ignore_eos: answers may be shorter than asked for".to_owned());
        }
        plan.requests.truncate(requests);
        plan.requests.iter_mut().for_each(|planned| planned.at = None);
        plan.lanes = Some(plan.lanes.unwrap_or(WARM_UP_LANES));
        plan.until = None;
        if !plan.requests.is_empty() {
            self.run(plan, 0, stop, &mut Unwatched).await;
        }
        Ok(())
    }

    /// Carries out a plan.
    pub(crate) async fn run(
        &self,
        plan: Plan,
        seed: u64,
        stop: &CancellationToken,
        watch: &mut dyn Watch,
    ) -> Run {
        let runner = Runner {
            client: &self.client,
            speaker: Arc::new(self.speaker.clone()),
            retries: self.retries,
            stop: stop.clone(),
            seed,
        };
        runner.run(plan, watch).await
    }
}
