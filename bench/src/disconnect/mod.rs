//! `baton bench disconnect`: what cancelled requests cost a deployment. Clients measure from outside, and the engines'
//! event logs show the outcome of each request.
//!
//! ```text
//!  clients (load) ──▶ router ──▶ engines          a run, segment by segment (drive)
//!     │ every call        ▲          │ event logs, engine states (watch)
//!     ▼                   │ kill     ▼
//!  events.jsonl ◀── recorder ◀───────┘
//!     └─▶ analyse (pure) ─▶ summary.json, series.json, report.html
//! ```
//!
//! All numbers are computed from `events.jsonl` alone. `baton bench report DIR` computes them again.

mod analyse;
pub mod drive;
pub mod plan;
mod protocols;
pub mod record;
mod report;
#[cfg(test)]
mod tests;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::BenchError;
use analyse::summary::Summary;
use plan::options::StartedEngines;
pub use plan::options::{DisconnectOptions, ReportOptions};
pub(crate) use report::{escaped, grouped};

/// Runs the benchmark and writes its folder.
///
/// # Errors
/// If the deployment cannot be used or the folder cannot be written. With `--fail-on-findings` also if there are
/// findings.
pub fn run(options: &DisconnectOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    options.check()?;
    if options.start == StartedEngines::Simulated {
        return protocols::run(options, out);
    }
    let (summary, played) = play(options)?;
    print_summary(&summary, &options.out, options.json, out)?;
    played?;
    if options.fail_on_findings && summary.interrupted {
        return Err("the run was broken off".into());
    }
    if options.fail_on_findings && !summary.findings.is_empty() {
        return Err(format!("{} findings", summary.findings.len()).into());
    }
    Ok(())
}

/// Plays one run and writes its folder. Returns its summary, and the error that broke the run off.
fn play(options: &DisconnectOptions) -> Result<(Summary, Result<(), BenchError>), BenchError> {
    let made = folder(&options.out).map_err(|error| format!("{}: {error}", options.out.display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let before = events_of(&options.out);
    let played = runtime.block_on(drive::run::run(options));
    if played.is_err() && events_of(&options.out) == before {
        // The run did not start. Events of an earlier run stay, and a folder that this run created is removed.
        made.iter().take_while(|folder| std::fs::remove_dir(folder).is_ok()).count();
        return Err(played.expect_err("just seen"));
    }
    let summary = match (write_report(&options.out), &played) {
        (Ok(summary), _) => summary,
        (Err(error), Ok(())) => return Err(error),
        (Err(_), Err(_)) => return Err(played.expect_err("just seen")),
    };
    if played.is_err() && summary.calm.is_none() && summary.cancelled == 0 {
        // No call was analysed. A report would show that there are no findings.
        for file in ["summary.json", "series.json", "report.html"] {
            std::fs::remove_file(options.out.join(file))?;
        }
        return Err(played.expect_err("just seen"));
    }
    Ok((summary, played))
}

/// Creates a writable folder. Returns the folders that did not exist before, the innermost first.
fn folder(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let missing = path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let missing: Vec<_> = missing.map(Path::to_owned).collect();
    std::fs::create_dir_all(path)?;
    // Checks now that the folder is writable, before the run has results to lose.
    tempfile::tempfile_in(path)?;
    Ok(missing)
}

/// The time of the last write to the raw events of a folder; `None` if there are none.
fn events_of(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join("events.jsonl")).and_then(|events| events.modified()).ok()
}

/// Computes the summary and the report of a folder again.
///
/// # Errors
/// If the raw events cannot be read or the report cannot be written.
pub fn report(options: &ReportOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let summary = write_report(&options.folder)?;
    print_summary(&summary, &options.folder, options.json, out)
}

/// The raw events of a folder.
fn records(folder: &Path) -> Result<Vec<record::raw::Record>, BenchError> {
    let (plain, packed) = (folder.join("events.jsonl"), folder.join("events.jsonl.gz"));
    let is_packed = !plain.exists() && packed.exists();
    let raw = if is_packed { packed } else { plain };
    let name = |error: &dyn std::fmt::Display| format!("{}: {error}", raw.display());
    let file = std::fs::File::open(&raw).map_err(|error| name(&error))?;
    let records = if is_packed {
        record::raw::read(&mut BufReader::new(flate2::read::GzDecoder::new(file)))
    } else {
        record::raw::read(&mut BufReader::new(file))
    };
    Ok(records.map_err(|error| name(&error))?)
}

/// Writes the summary and the report of a folder from its raw events.
fn write_report(folder: &Path) -> Result<Summary, BenchError> {
    let summary = analyse::summary(&records(folder)?);
    std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&summary)? + "\n")?;
    std::fs::write(folder.join("series.json"), report::series(&summary).to_string() + "\n")?;
    std::fs::write(folder.join("report.html"), report::page(&summary))?;
    Ok(summary)
}

fn print_summary(
    summary: &Summary,
    folder: &Path,
    as_json: bool,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    if as_json {
        serde_json::to_writer(&mut *out, summary)?;
        writeln!(out)?;
    } else {
        out.write_all(report::text(summary).as_bytes())?;
        writeln!(out, "\nreport: {}", folder.join("report.html").display())?;
    }
    Ok(())
}
