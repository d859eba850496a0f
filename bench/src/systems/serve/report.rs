//! All runs of `baton bench serve`, as JSON and as a table.

use std::fmt::Write;

use serde::{Serialize, Serializer};

use super::metrics::RunReport;
use super::options::ServeArgs;
use super::subject::ServeSubject;
use crate::common::stats::{SampleSummary, Spread};
use crate::load::{Endpoint, Streaming};

/// A client with a greater delay distorts its own measurement.
const LAG_MAX_MS: f64 = 5.0;

/// The object of `--json` and of `summary.json`.
#[derive(Debug, Serialize)]
pub(crate) struct ServeReport {
    benchmark: &'static str,
    version: &'static str,
    unix_seconds: u64,
    machine: String,
    command: String,
    url: String,
    model: String,
    endpoint: &'static str,
    stream: bool,
    seed: u64,
    /// Notes for readers of the numbers.
    notes: Vec<String>,
    pub(super) runs: Vec<RunReport>,
    /// For each number, median, minimum and maximum over the runs.
    #[serde(serialize_with = "by_name")]
    over_runs: Vec<(String, Spread)>,
}

/// Numbers of a run by name.
type Number = (&'static str, fn(&RunReport) -> Option<f64>);

const NUMBERS: [Number; 4] = [
    ("requests_per_second", |run| Some(run.requests_per_second)),
    ("output_tokens_per_second", |run| Some(run.output_tokens_per_second)),
    ("total_tokens_per_second", |run| Some(run.total_tokens_per_second)),
    ("goodput_share", |run| run.goodput.as_ref().map(|goodput| goodput.share)),
];

/// Latencies of a run, by name and by heading of the table.
type Latency = (&'static str, &'static str, fn(&RunReport) -> Option<&SampleSummary>);

const LATENCIES: [Latency; 7] = [
    ("ttft_ms", "TTFT", |run| run.ttft_ms.as_ref()),
    ("ttft_from_sent_ms", "TTFT from send", |run| run.ttft_from_sent_ms.as_ref()),
    ("tpot_ms", "TPOT", |run| run.tpot_ms.as_ref()),
    ("itl_ms", "ITL", |run| run.itl_ms.as_ref()),
    ("e2e_ms", "E2E", |run| run.e2e_ms.as_ref()),
    ("e2e_from_sent_ms", "E2E from send", |run| run.e2e_from_sent_ms.as_ref()),
    ("lag_ms", "client's lag", |run| run.lag_ms.as_ref()),
];

impl ServeReport {
    pub(super) fn new(args: &ServeArgs, subject: &ServeSubject) -> Self {
        Self {
            benchmark: "serve",
            version: env!("CARGO_PKG_VERSION"),
            unix_seconds: crate::common::machine::unix_seconds(),
            machine: crate::common::machine::described(),
            command: command(std::env::args()),
            url: subject.client.target().url(),
            model: subject.profile.model.clone(),
            endpoint: match subject.profile.endpoint {
                Endpoint::Completions => "completions",
                Endpoint::Chat => "chat",
            },
            stream: subject.profile.streaming != Streaming::Whole,
            seed: args.workload.seed,
            notes: Vec::new(),
            runs: Vec::new(),
            over_runs: Vec::new(),
        }
    }

    /// Compares the runs and adds notes.
    pub(super) fn finish(&mut self, subject: &ServeSubject) {
        self.notes.clone_from(&subject.notes);
        for (name, of) in NUMBERS {
            self.spread(name.to_owned(), &of);
        }
        for (name, _, of) in LATENCIES {
            self.spread(format!("{name}.mean"), &|run| Some(of(run)?.mean));
            for p in &subject.percentiles {
                self.spread(format!("{name}.p{p}"), &|run| of(run)?.percentile(*p));
            }
        }
        for run in &self.runs {
            let number = run.run + 1;
            let late = run.lag_ms.as_ref().and_then(|lag| lag.percentiles.last()).map(|(_, late)| *late);
            if late.is_some_and(|late| late > LAG_MAX_MS) {
                let late = late.unwrap_or_default();
                self.notes.push(format!(
                    "run {number}: requests were sent up to {late:.1} ms after they were due (last percentile): the \
                     client was too slow, or --max-concurrency made them wait; it is part of TTFT and E2E"
                ));
            }
            if run.short_answers > 0 {
                let (short, done) = (run.short_answers, run.completed);
                self.notes
                    .push(format!("run {number}: {short} of {done} answers are shorter than asked for"));
            }
            let (planned, counted) = (run.planned_prompt_tokens, run.prompt_tokens);
            if planned.abs_diff(counted) * 50 > planned {
                self.notes.push(format!(
                    "run {number}: prompts have {counted} tokens where {planned} were asked for"
                ));
            }
            if run.overdue > 0 {
                let overdue = run.overdue;
                self.notes.push(format!(
                    "run {number}: {overdue} requests were due and had not been sent when nothing more was sent: they are in \
                     the client's lag with how long they had waited, in goodput as bad ones, and in no other latency, which \
                     would be higher with them"
                ));
            }
            if run.stopped + run.unsent > 0 && !self.notes.iter().any(|note| note.contains("was stopped")) {
                let (stopped, unsent) = (run.stopped, run.unsent);
                self.notes.push(format!(
                    "run {number} was stopped or its time was over: {stopped} requests broken off, {unsent} not sent"
                ));
            }
        }
    }

    fn spread(&mut self, name: String, of: &dyn Fn(&RunReport) -> Option<f64>) {
        if let Some(spread) = Spread::of(self.runs.iter().filter_map(of).collect()) {
            self.over_runs.push((name, spread));
        }
    }

    pub(super) fn failed(&self) -> usize {
        self.runs.iter().map(|run| run.failed).sum()
    }

    pub(super) fn sent(&self) -> usize {
        self.runs.iter().map(|run| run.sent).sum()
    }

    pub(super) fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and names are JSON")
    }

    /// The table for people.
    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "{}\n{}   {}   {}{}   seed {}\n",
            self.machine,
            self.url,
            self.model,
            self.endpoint,
            if self.stream { "" } else { ", in one piece" },
            self.seed
        );
        for run in &self.runs {
            run_head(&mut text, run, self.runs.len());
            if self.runs.len() == 1 {
                latencies(&mut text, run);
            }
        }
        if self.runs.len() > 1 {
            self.over_runs_table(&mut text);
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        for run in self.runs.iter().filter(|run| run.failed > 0) {
            let _ = writeln!(text, "FAILED in run {}: {} of {} requests", run.run + 1, run.failed, run.sent);
            for (kind, failures) in &run.failures {
                let _ = writeln!(text, "{:>8} × {kind}, the first: {}", failures.count, failures.first);
            }
        }
        text.trim_end().to_owned()
    }

    fn over_runs_table(&self, text: &mut String) {
        let head = format!("over {} runs", self.runs.len());
        let _ = writeln!(text, "{head:<34}      median (       min ..        max)");
        for (name, spread) in &self.over_runs {
            let Spread { median, min, max, .. } = spread;
            let _ = writeln!(text, "{name:<34}{median:>12.3} ({min:>10.3} .. {max:>10.3})");
        }
    }
}

fn by_name<S: Serializer>(all: &[(String, Spread)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(all.iter().map(|(name, spread)| (name, spread)))
}

fn run_head(text: &mut String, run: &RunReport, runs: usize) {
    let which = if runs > 1 { format!("run {}: ", run.run + 1) } else { String::new() };
    let failed = if run.failed > 0 { format!(", {} FAILED", run.failed) } else { String::new() };
    let stopped = if run.stopped > 0 { format!(", {} broken off", run.stopped) } else { String::new() };
    let retried = if run.retries > 0 { format!(", {} retries", run.retries) } else { String::new() };
    let _ = writeln!(
        text,
        "{which}{} requests sent, {} whole{failed}{stopped}{retried}; {:.2} s; at most {} in flight",
        run.sent, run.completed, run.duration_s, run.peak_in_flight
    );
    let cached = run.cached_tokens.map(|cached| format!(" ({cached} cached)")).unwrap_or_default();
    let _ = writeln!(
        text,
        "{:.2} requests/s   {:.1} tokens/s out   {:.1} tokens/s in and out   {} tokens in{cached}, {} out",
        run.requests_per_second,
        run.output_tokens_per_second,
        run.total_tokens_per_second,
        run.prompt_tokens,
        run.completion_tokens
    );
    if let Some(goodput) = &run.goodput {
        let limits = [
            ("TTFT", goodput.limits.ttft_ms),
            ("TPOT", goodput.limits.tpot_ms),
            ("E2E", goodput.limits.e2e_ms),
        ];
        let limits = limits.iter().filter_map(|(name, limit)| Some(format!("{name} ≤ {} ms", (*limit)?)));
        let limits: Vec<_> = limits.collect();
        let (share, rate) = (goodput.share * 100.0, goodput.per_second);
        let _ = writeln!(text, "goodput {share:.1} %, {rate:.2} requests/s ({})", limits.join(", "));
    }
}

fn latencies(text: &mut String, run: &RunReport) {
    let Some((_, _, first)) = LATENCIES.iter().find(|(_, _, of)| of(run).is_some()) else { return };
    let Some(columns) = first(run).map(|summary| summary.percentiles.clone()) else { return };
    let _ = write!(text, "{:<16}{:>10}{:>10}{:>10}", "ms", "mean", "std", "min");
    for (p, _) in &columns {
        let _ = write!(text, "{:>10}", format!("p{p}"));
    }
    let _ = writeln!(text, "{:>10}{:>9}", "max", "count");
    for (_, name, of) in LATENCIES {
        let Some(summary) = of(run) else { continue };
        let _ =
            write!(text, "{name:<16}{:>10.2}{:>10.2}{:>10.2}", summary.mean, summary.deviation, summary.min);
        for (_, value) in &summary.percentiles {
            let _ = write!(text, "{value:>10.2}");
        }
        let _ = writeln!(text, "{:>10.2}{:>9}", summary.max, summary.count);
    }
}

/// The command line without values that may be secret.
fn command(args: impl Iterator<Item = String>) -> String {
    let mut hidden = false;
    let words = args.map(|word| {
        let hide = std::mem::replace(&mut hidden, word == "--header");
        match (hide, word.split_once('=')) {
            (true, _) => "…".to_owned(),
            (false, Some(("--header", _))) => "--header=…".to_owned(),
            _ if word.contains([' ', '\'', '"', '$', '{']) => format!("'{}'", word.replace('\'', r"'\''")),
            _ => word,
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_printed_without_its_secrets() {
        let words = [
            "baton",
            "bench",
            "--header",
            "authorization: Bearer x",
            "--extra-body",
            "{\"a\": 1}",
            "--header=x: y",
        ];
        let line = command(words.into_iter().map(str::to_owned));
        assert_eq!(line, "baton bench --header … --extra-body '{\"a\": 1}' --header=…");
    }
}
