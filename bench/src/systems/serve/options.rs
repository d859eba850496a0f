//! Options of `baton bench serve`, and their checks. Options with the meaning of vLLM's have vLLM's names.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::error::OptionError;
use super::metrics::Slo;
use crate::load::Endpoint;
use crate::load::plan::workload::{Workload, WorkloadArgs};

/// Options of `baton bench serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Endpoint: http(s)://HOST[:PORT][/PREFIX], with or without /v1
    #[arg(long, visible_alias = "base-url", value_name = "URL")]
    pub(crate) url: String,
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Requests before the first run, besides the one that probes the endpoint
    #[arg(long, visible_alias = "num-warmups", default_value_t = 0, value_name = "N")]
    pub(crate) warmup: usize,
    /// Runs, each with the next seed; medians and spread are over them
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) repeat: usize,
    /// Limits of a good request in ms: ttft:MS, tpot:MS, e2e:MS (repeatable)
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    pub(crate) goodput: Vec<String>,
    /// Percentiles in the report, separated by commas
    #[arg(
        long,
        visible_alias = "metric-percentiles",
        value_delimiter = ',',
        default_value = "50,90,95,99",
        value_name = "P,..."
    )]
    pub(crate) percentiles: Vec<f64>,
    /// Threads of the client
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) client_threads: usize,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory for summary.json and calls-RUN.jsonl, with one line of JSON per request
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Fail if a request failed
    #[arg(long)]
    pub(crate) fail_on_error: bool,
}

/// Options of the endpoint and its requests.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EndpointArgs {
    /// Model name [default: the first that /v1/models lists]
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// API that requests use
    #[arg(long, value_name = "NAME", default_value = "completions")]
    pub(crate) endpoint: Endpoint,
    /// Send prompts as token ids, of exact lengths; completions only
    #[arg(long)]
    pub(crate) prompt_ids: bool,
    /// Draw token ids from 0 to N - 1 [default: ids of common words, by /tokenize]
    #[arg(long, value_name = "N", requires = "prompt_ids")]
    pub(crate) vocab_size: Option<u32>,
    /// Let responses end by themselves, without ignore_eos
    #[arg(long)]
    pub(crate) stop_at_eos: bool,
    /// As in vLLM; it is the default here
    #[arg(long, hide = true, conflicts_with = "stop_at_eos")]
    pub(crate) ignore_eos: bool,
    /// Request responses in one piece
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Request the number of tokens in each event (vLLM's continuous_usage_stats)
    #[arg(long, conflicts_with = "no_stream")]
    pub(crate) continuous_usage: bool,
    /// Sampling temperature
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// JSON object that overrides fields of each request body
    #[arg(long, value_name = "JSON")]
    pub(crate) extra_body: Option<String>,
    /// Header of each request (repeatable)
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub(crate) headers: Vec<String>,
    /// File with the API key [default: OPENAI_API_KEY, if it is set]
    #[arg(long, alias = "key-file", value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,
    /// Open a new connection for each request
    #[arg(long)]
    pub(crate) fresh_connections: bool,
    /// Retries, made as OpenAI's SDKs make them; they default to 2
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) retries: u32,
    /// Seconds until a request is given up
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS")]
    pub(crate) timeout: f64,
    /// Send `user: TEXT-NUMBER` with each request, to find it in the engines' event logs
    #[arg(long, value_name = "TEXT")]
    pub(crate) tag: Option<String>,
}

/// Checked options.
#[derive(Debug)]
pub(crate) struct ValidOptions {
    pub(crate) workload: Workload,
    pub(crate) percentiles: Vec<f64>,
    pub(crate) slo: Slo,
}

fn need(fine: bool, name: &'static str, what: &'static str) -> Result<(), OptionError> {
    if fine { Ok(()) } else { Err(OptionError::Option(name, what)) }
}

impl ServeArgs {
    /// Checks everything that can be checked before the endpoint is contacted.
    ///
    /// # Errors
    /// A description of the invalid option.
    pub(crate) fn check(&self) -> Result<ValidOptions, crate::BenchError> {
        need((1..=1_000).contains(&self.repeat), "--repeat", "from 1 to 1000")?;
        need((1..=256).contains(&self.client_threads), "--client-threads", "from 1 to 256")?;
        need(self.warmup <= 100_000, "--warmup", "at most 100,000")?;
        let percentiles = !self.percentiles.is_empty()
            && self.percentiles.len() <= 20
            && self.percentiles.iter().all(|p| *p > 0.0 && *p <= 100.0);
        need(percentiles, "--percentiles", "up to 20 numbers greater than 0, and at most 100")?;
        self.endpoint.check()?;
        let slo = Slo::parse(&self.goodput)?;
        let stream = !self.endpoint.no_stream || (slo.ttft_ms.is_none() && slo.tpot_ms.is_none());
        need(stream, "--goodput", "e2e:MS only with --no-stream")?;
        if let Some(folder) = &self.out {
            std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        Ok(ValidOptions { workload: self.workload.check()?, percentiles: self.percentiles.clone(), slo })
    }
}

impl EndpointArgs {
    /// # Errors
    /// [`OptionError`].
    pub(crate) fn check(&self) -> Result<(), OptionError> {
        let ids_fit = !self.prompt_ids || self.endpoint == Endpoint::Completions;
        need(ids_fit, "--prompt-ids", "with --endpoint completions")?;
        need(self.vocab_size != Some(0), "--vocab-size", "greater than 0")?;
        need(self.timeout > 0.0 && self.timeout <= 86_400.0, "--timeout", "from 0 to 86,400")?;
        need((0.0..=10.0).contains(&self.temperature), "--temperature", "from 0 to 10")?;
        need(self.retries <= 10, "--retries", "at most 10")?;
        let tag = self.tag.as_ref().is_none_or(|tag| !tag.is_empty() && tag.len() <= 48 && tag.is_ascii());
        need(tag, "--tag", "1 to 48 ASCII characters")?;
        self.extra().map(|_| ())
    }

    /// The fields that override those of every request body.
    pub(crate) fn extra(&self) -> Result<Map<String, Value>, OptionError> {
        let mut all = Map::new();
        all.insert("temperature".into(), self.temperature.into());
        let Some(text) = &self.extra_body else { return Ok(all) };
        match serde_json::from_str(text) {
            Ok(Value::Object(extra)) => {
                all.extend(extra);
                Ok(all)
            }
            Ok(_) => Err(OptionError::ExtraBody("it has to be a JSON object".to_owned())),
            Err(error) => Err(OptionError::ExtraBody(error.to_string())),
        }
    }
}
