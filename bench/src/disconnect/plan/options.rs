//! The options of a run, their checks, and the options of its segments.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::BenchError;
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::plan::vanish::NOTICED_MS;

/// The minimum length of a round, s.
const ROUND_SECONDS_MIN: f64 = 0.5;

/// The engines of a deployment that is started for a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StartedEngines {
    /// Baton's engines
    #[default]
    Baton,
    /// Simulated engines with Baton's protocol
    SimBaton,
    /// Simulated stock vLLM engines, whose decode engine reads
    Vllm,
    /// Simulated stock vLLM engines, whose prefill engine writes
    VllmPush,
    /// Simulated SGLang engines of `baton bench sim`
    Sglang,
    /// Each kind of simulated engines in a run of its own, and a table of all; without faults
    Simulated,
}

impl StartedEngines {
    /// The simulated engines of each protocol.
    pub(crate) const SIMULATED: [Self; 4] = [Self::SimBaton, Self::Vllm, Self::VllmPush, Self::Sglang];

    /// The name in options and reports.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Baton => "baton",
            Self::SimBaton => "sim-baton",
            Self::Vllm => "vllm",
            Self::VllmPush => "vllm-push",
            Self::Sglang => "sglang",
            Self::Simulated => "simulated",
        }
    }

    /// The engines, in the description of a run.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Baton => "prefill engine, decode engine",
            Self::SimBaton => "simulated engines with Baton's protocol",
            Self::Vllm => "simulated stock vLLM engines",
            Self::VllmPush => "simulated stock vLLM engines that push",
            Self::Sglang => "simulated SGLang engines",
            Self::Simulated => "simulated engines of each protocol",
        }
    }

    /// Both legs are sent at once: the prefill engine writes the blocks as soon as it has them.
    pub(crate) fn sends_both_legs(self) -> bool {
        matches!(self, Self::VllmPush | Self::Sglang)
    }
}

/// Options of `baton bench disconnect`.
#[derive(Clone, Debug, clap::Args)]
pub struct DisconnectOptions {
    /// OpenAI endpoint of the deployment [default: start a router, a prefill and a decode engine]
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Engines to start behind a router, without --url
    #[arg(long, value_name = "NAME", value_enum, default_value_t = StartedEngines::default(), conflicts_with = "url")]
    pub(crate) start: StartedEngines,
    /// Admin URL of the router, which lists the engines
    #[arg(long, value_name = "URL", requires = "url")]
    pub(crate) admin: Option<String>,
    /// Engine to observe; ROLE is `prefill`, `decode` or `both` (repeatable)
    #[arg(long = "engine", value_name = "[ROLE=]URL[,CONTROL_URL]", requires = "url")]
    pub(crate) engines: Vec<String>,
    /// Model to request [default: the first that the endpoint lists]
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Request chat completions instead of completions
    #[arg(long)]
    pub(crate) chat: bool,
    /// File with the clients' API key in its first line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// File with the token of the admin listener in its first line
    #[arg(long, value_name = "FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// File with the cluster secret in its first line
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
    /// Directory for events.jsonl, summary.json and report.html
    #[arg(long, value_name = "DIR", default_value = "baton-disconnect")]
    pub(crate) out: PathBuf,
    /// Share of requests that are cancelled in a storm
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = share)]
    pub(crate) cancel_share: f64,
    /// Requests per second in calm and storm [default: half of what the deployment can serve]
    #[arg(long, value_name = "N")]
    pub(crate) rate: Option<f64>,
    /// Seconds of calm, and of storm, over all rounds
    #[arg(long, value_name = "N", default_value_t = 30.0)]
    pub(crate) seconds: f64,
    /// Rounds of calm and storm, which share --seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Share of requests in calm and storm with a response in one piece
    #[arg(long, value_name = "FRACTION", default_value_t = 0.2, value_parser = share)]
    pub(crate) unary_share: f64,
    /// Phases in which clients cancel, separated by commas
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_values_t = Phase::ALL, value_enum)]
    pub(crate) phases: Vec<Phase>,
    /// Ways in which clients cancel, separated by commas
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_values_t = CancelKind::ALL, value_enum)]
    pub(crate) cancel_by: Vec<CancelKind>,
    /// Milliseconds a stalled client reads nothing before it resets; less if context or pools limit the
    /// response
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub(crate) stall_ms: u64,
    /// Milliseconds to notice a vanished client; sets `timeouts.client_lost_ms` of a router started here
    #[arg(long, value_name = "MS", default_value_t = NOTICED_MS, value_parser = clap::value_parser!(u64).range(1_000..=3_600_000))]
    pub(crate) vanish_noticed_ms: u64,
    /// Cancelled requests per phase
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = cancel_count)]
    pub(crate) cancels: usize,
    /// Maximum seconds per phase
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) phase_seconds: f64,
    /// Words of a prompt
    #[arg(long, value_name = "N", default_value_t = 120)]
    pub(crate) prompt_words: usize,
    /// Tokens of a response
    #[arg(long, value_name = "N", default_value_t = 48)]
    pub(crate) max_tokens: u32,
    /// Milliseconds after a cancel from which its blocks count as stranded
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    pub(crate) stranded_after_ms: u64,
    /// Maximum seconds for engines to become idle after each segment
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub(crate) quiesce: f64,
    /// Maximum seconds for engines to become idle at the end; long enough for a lease to expire
    #[arg(long, value_name = "SECONDS", default_value_t = 35.0)]
    pub(crate) final_wait: f64,
    /// Maximum seconds to repeat prompts and compare their responses; as long again in parallel after a difference
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    pub(crate) verify_seconds: f64,
    /// Use only the engines' metrics, as if they had no event log
    #[arg(long)]
    pub(crate) metrics_only: bool,
    /// Command for `sh -c` that causes the fault NAME under load (repeatable)
    #[arg(long, value_name = "NAME=COMMAND", requires = "url")]
    pub(crate) fault: Vec<String>,
    /// Command for `sh -c` that ends the fault NAME a moment later (repeatable)
    #[arg(long, value_name = "NAME=COMMAND", requires = "url")]
    pub(crate) recover: Vec<String>,
    /// Output of `baton bench compare --json`, to show other gateways beside this deployment
    #[arg(long, value_name = "FILE")]
    pub(crate) compare_with: Option<PathBuf>,
    /// Kill and restart nothing; only a deployment that was started here is killed at all
    #[arg(long)]
    pub(crate) no_faults: bool,
    /// Options of engines that are started here, after `--`; those of `baton bench sim` for simulated ones
    #[arg(last = true, value_name = "ENGINE OPTIONS")]
    pub(crate) engine_options: Vec<String>,
    /// Seed of arrivals, prompts and cancels
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print the summary as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Fail if there are findings
    #[arg(long)]
    pub(crate) fail_on_findings: bool,
}

/// Options of `baton bench report`.
#[derive(Debug, clap::Args)]
pub struct ReportOptions {
    /// Directory written by `baton bench disconnect`; events may be compressed (`events.jsonl.gz`)
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Print the summary as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".into()),
    }
}

fn cancel_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=100_000).contains(&count) => Ok(count),
        _ => Err("a number of clients, from 1 to 100,000".into()),
    }
}

/// Options of the segments of a run.
pub(crate) struct SegmentOptions {
    /// Length of one calm or one storm.
    pub(crate) segment: Duration,
    pub(crate) rounds: u32,
    pub(crate) phase: Duration,
    pub(crate) fault: Duration,
    /// Share of the requests that are cancelled in a fault segment: half of the storm's share. Uncancelled requests
    /// show the effect of a fault, so more of them are needed.
    pub(crate) fault_share: f64,
    pub(crate) settle: Duration,
    pub(crate) rate: f64,
    pub(crate) unary: f64,
    pub(crate) cancels: usize,
    pub(crate) kinds: Vec<CancelKind>,
}

/// The commands of one fault.
pub(crate) struct FaultCommands {
    pub(crate) inject: String,
    /// Ends the fault.
    pub(crate) recover: Option<String>,
}

impl DisconnectOptions {
    pub(crate) fn check(&self) -> Result<(), BenchError> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 && value < 1e6 {
                Ok(())
            } else {
                Err(format!("--{name} must be a positive number"))
            }
        };
        positive("seconds", self.seconds)?;
        positive("phase-seconds", self.phase_seconds)?;
        positive("quiesce", self.quiesce)?;
        positive("final-wait", self.final_wait)?;
        positive("verify-seconds", self.verify_seconds)?;
        positive("rate", self.rate.unwrap_or(1.0))?;
        if self.seconds / f64::from(self.rounds) < ROUND_SECONDS_MIN {
            return Err(format!(
                "--seconds must be at least {ROUND_SECONDS_MIN} for each of the {} --rounds",
                self.rounds
            )
            .into());
        }
        if self.prompt_words == 0 || self.prompt_words > 1_000_000 {
            return Err("--prompt-words must be from 1 to 1,000,000".into());
        }
        if self.max_tokens < 2 {
            return Err("--max-tokens must be at least 2".into());
        }
        if self.url.is_some() && !self.engine_options.is_empty() {
            return Err("engine options are for engines that are started here, without --url".into());
        }
        Ok(())
    }

    /// The chosen options for the run record, without those that have a field of their own there.
    pub(crate) fn describe(&self, engines: usize) -> serde_json::Value {
        let named = |commands: &[String]| -> Vec<String> {
            commands.iter().filter_map(|text| Some(text.split_once('=')?.0.to_owned())).collect()
        };
        serde_json::json!({
            "engines": engines, "chat": self.chat, "metrics_only": self.metrics_only,
            "rate": self.rate, "seconds": self.seconds, "rounds": self.rounds, "cancel_share": self.cancel_share, "unary_share": self.unary_share,
            "phases": self.phases, "cancel_by": self.cancel_by, "stall_ms": self.stall_ms, "vanish_noticed_ms": self.vanish_noticed_ms, "cancels": self.cancels, "phase_seconds": self.phase_seconds,
            "prompt_words": self.prompt_words, "max_tokens": self.max_tokens,
            "quiesce": self.quiesce, "final_wait": self.final_wait, "verify_seconds": self.verify_seconds,
            "fault": named(&self.fault), "recover": named(&self.recover), "no_faults": self.no_faults,
            "start": self.start, "engine_options": self.engine_options,
        })
    }

    pub(crate) fn compared_with(&self) -> Result<Option<serde_json::Value>, BenchError> {
        let Some(file) = &self.compare_with else { return Ok(None) };
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read(file).map_err(|error| wrong(&error))?;
        let compared: serde_json::Value = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
        if !compared["targets"].is_array() {
            return Err(wrong(&"not what `baton bench compare --json` writes").into());
        }
        Ok(Some(compared))
    }

    /// Faults by name.
    pub(crate) fn faults(&self) -> Result<BTreeMap<String, FaultCommands>, BenchError> {
        let named = |option: &str, text: &str| match text.split_once('=') {
            Some((name, command)) if !name.is_empty() && !command.is_empty() => {
                Ok((name.to_owned(), command.to_owned()))
            }
            _ => Err(format!("--{option} must be NAME=COMMAND, not `{text}`")),
        };
        let mut faults = BTreeMap::new();
        for text in &self.fault {
            let (name, inject) = named("fault", text)?;
            faults.insert(name, FaultCommands { inject, recover: None });
        }
        for text in &self.recover {
            let (name, command) = named("recover", text)?;
            match faults.get_mut(&name) {
                Some(fault) => fault.recover = Some(command),
                None => return Err(format!("--recover {name}=… has no --fault {name}=…").into()),
            }
        }
        Ok(faults)
    }

    pub(crate) fn segment_options(&self) -> SegmentOptions {
        let seconds = Duration::from_secs_f64;
        let segment = self.seconds / f64::from(self.rounds);
        SegmentOptions {
            segment: seconds(segment),
            rounds: self.rounds,
            phase: seconds(self.phase_seconds),
            fault: seconds((segment * 1.5).max(4.0)),
            fault_share: self.cancel_share / 2.0,
            settle: seconds(self.quiesce),
            // Calibration replaces this rate.
            rate: self.rate.unwrap_or(1.0),
            unary: self.unary_share,
            cancels: self.cancels,
            kinds: self.cancel_by.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    #[test]
    fn the_run_record_contains_every_option() {
        let command = DisconnectOptions::augment_args(clap::Command::new("disconnect"));
        let given = command.clone().get_matches_from(["disconnect"]);
        let options = DisconnectOptions::from_arg_matches(&given).expect("defaults");
        let described = options.describe(2);
        // In a field of the record, only in its command line, or without effect on the measurement.
        let elsewhere = [
            "url",
            "admin",
            "model",
            "seed",
            "stranded_after_ms",
            "out",
            "json",
            "fail_on_findings",
            "compare_with",
            "api_key_file",
            "admin_token_file",
            "cluster_secret_file",
        ];
        for option in command.get_arguments().map(|option| option.get_id().as_str()) {
            assert!(described.get(option).is_some() != elsewhere.contains(&option), "{option}: {described}");
        }
    }
}
