//! `baton bench disconnect --start simulated`: one run per protocol of simulated engines, and one table of all.
//!
//! The engines of a run are in its folder's subfolder, which `baton bench report` reads too. No engine is killed: the
//! engines of some protocols share a process.

use std::fmt::Write as _;
use std::io::Write;

use serde::Serialize;

use super::analyse::summary::{CancelGroup, Summary};
use super::analyse::{CancelCell, cells};
use super::plan::options::{DisconnectOptions, StartedEngines};
use super::report::{count, percentile};
use crate::BenchError;

/// The result of one protocol.
#[derive(Debug, Serialize)]
pub(super) struct ProtocolRun {
    pub(super) protocol: StartedEngines,
    /// Cancelled requests, without those of vanished clients.
    pub(super) cancelled: u64,
    pub(super) stranded: u64,
    pub(super) wrong_texts: u64,
    pub(super) compared_texts: u64,
    pub(super) findings: Vec<&'static str>,
    pub(super) cells: Vec<CancelCell>,
}

impl ProtocolRun {
    pub(super) fn new(protocol: StartedEngines, summary: &Summary, cells: Vec<CancelCell>) -> Self {
        Self {
            protocol,
            cancelled: summary.all.cancelled,
            stranded: summary.all.stranded,
            wrong_texts: summary.texts.wrong,
            compared_texts: summary.texts.compared,
            findings: summary.findings.iter().map(|finding| finding.name).collect(),
            cells,
        }
    }

    /// What is stranded, in which phases, and why.
    fn describe(&self) -> String {
        let Self { cancelled, stranded, wrong_texts, compared_texts, .. } = self;
        let mut text =
            format!("{}: {} of {} stranded", self.protocol.label(), count(*stranded), count(*cancelled));
        let mut phases: Vec<(&str, u64)> = Vec::new();
        for CancelCell { phase, group, .. } in self.cells.iter().filter(|cell| cell.group.stranded > 0) {
            match phases.last_mut().filter(|(name, _)| *name == phase.label()) {
                Some((_, sum)) => *sum += group.stranded,
                None => phases.push((phase.label(), group.stranded)),
            }
        }
        if !phases.is_empty() {
            let phases: Vec<_> =
                phases.iter().map(|(phase, sum)| format!("{phase} {}", count(*sum))).collect();
            // Writing to a string cannot fail.
            let _ = write!(text, " ({})", phases.join(", "));
        }
        let _ = write!(text, ", {wrong_texts} of {compared_texts} texts wrong. {}", commands(self.protocol));
        if !self.findings.is_empty() {
            let _ = write!(text, " Findings: {}.", self.findings.join(", "));
        }
        text
    }
}

/// The commands of a protocol, and what a router cannot free without them.
fn commands(protocol: StartedEngines) -> &'static str {
    match protocol {
        StartedEngines::Vllm => {
            "Without commands: the end of a connection is the only abort. P drops the reply of a closed connection, the \
             only copy of the handoff, and keeps the blocks until the lease ends."
        }
        StartedEngines::VllmPush => {
            "Without commands: only the end of P's write frees D's blocks, so a prefill whose D has the request runs to \
             its end. If D ends before it has reserved blocks, P keeps its own until the lease ends."
        }
        StartedEngines::Sglang => "Commands: abort by `rid`, at both engines.",
        StartedEngines::SimBaton | StartedEngines::Baton | StartedEngines::Simulated => {
            "Commands: abort and release, by handle or request id."
        }
    }
}

/// Runs every protocol, and prints the table.
///
/// # Errors
/// As for one run.
pub(super) fn run(options: &DisconnectOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let mut runs = Vec::new();
    for protocol in StartedEngines::SIMULATED {
        let one = DisconnectOptions {
            start: protocol,
            out: options.out.join(protocol.label()),
            no_faults: true,
            ..options.clone()
        };
        let (summary, played) = super::play(&one)?;
        played?;
        if summary.interrupted {
            return Err("the run was broken off".into());
        }
        let records = super::records(&one.out)?;
        runs.push(ProtocolRun::new(protocol, &summary, cells(&records)));
    }
    if options.json {
        serde_json::to_writer(&mut *out, &runs)?;
        writeln!(out)?;
    } else {
        out.write_all(table(&runs).as_bytes())?;
    }
    let found: Vec<_> =
        runs.iter().filter(|run| !run.findings.is_empty()).map(|run| run.protocol.label()).collect();
    match options.fail_on_findings && !found.is_empty() {
        true => Err(format!("findings with {}", found.join(", ")).into()),
        false => Ok(()),
    }
}

/// Protocol × phase × way of leaving.
pub(super) fn table(runs: &[ProtocolRun]) -> String {
    let mut text = String::from(
        "protocol    cancelled in        by          cancelled  stranded time to free p50        p99        max  \
         tokens for no client\n",
    );
    for run in runs {
        for CancelCell { phase, kind, group } in &run.cells {
            let CancelGroup { cancelled, stranded, time_to_free_ms: times, .. } = group;
            let _ = writeln!(
                text,
                "{:<11} {:<19} {:<11} {:>9} {:>9} {:>16} {:>10} {:>10} {:>10} + {}",
                run.protocol.label(),
                phase.label(),
                kind.label(),
                count(*cancelled),
                count(*stranded),
                percentile(times, |dist| dist.p50),
                percentile(times, |dist| dist.p99),
                percentile(times, |dist| dist.max),
                count(group.wasted_prompt_tokens),
                count(group.wasted_response_tokens),
            );
        }
    }
    text.push_str("Tokens for no client: prompt + response, computed after the cancel.\n\n");
    for run in runs {
        text.push_str(&run.describe());
        text.push('\n');
    }
    text
}
