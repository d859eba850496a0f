//! `baton bench disconnect`: what clients that leave cost a deployment, measured from outside, with the engines' own word
//! on what became of every request.
//!
//! ```text
//!  clients (load) ──▶ router ──▶ engines          a run, part after part (drive)
//!     │ every call        ▲          │ event logs, books (watch)
//!     ▼                   │ kill     ▼
//!  events.jsonl ◀── recorder ◀───────┘
//!     └─▶ analyse (pure) ─▶ summary.json, series.json, report.html
//! ```
//!
//! The numbers are computed from `events.jsonl` and nothing else: `baton bench report DIR` computes them again.

mod analyse;
pub mod drive;
pub mod plan;
pub mod record;
mod report;
#[cfg(test)]
mod tests;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::BenchError;
use analyse::summary::Summary;
pub use plan::options::{DisconnectOptions, ReportOptions};
pub(crate) use report::escaped;

/// Runs the benchmark and writes its folder.
///
/// # Errors
/// When the deployment cannot be used or the folder not be written; with `--fail-on-findings` also when anything was found.
pub fn run(options: &DisconnectOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    options.check()?;
    let made = folder(&options.out).map_err(|error| format!("{}: {error}", options.out.display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let before = events_of(&options.out);
    let played = runtime.block_on(drive::run::play(options));
    if played.is_err() && events_of(&options.out) == before {
        // It did not begin. What a run before it left there is not its own, and a folder that it made is in the way.
        made.iter().take_while(|folder| std::fs::remove_dir(folder).is_ok()).count();
        return played;
    }
    let summary = match (written(&options.out), &played) {
        (Ok(summary), _) => summary,
        (Err(error), Ok(())) => return Err(error),
        (Err(_), Err(_)) => return played,
    };
    if played.is_err() && summary.calm.is_none() && summary.cancelled == 0 {
        // Nothing was learnt before it went wrong: a report would say that nothing was found.
        for file in ["summary.json", "series.json", "report.html"] {
            std::fs::remove_file(options.out.join(file))?;
        }
        return played;
    }
    told(&summary, &options.out, options.json, out)?;
    played?;
    if options.fail_on_findings && summary.interrupted {
        return Err("the run was broken off".into());
    }
    if options.fail_on_findings && !summary.findings.is_empty() {
        return Err(format!("{} findings", summary.findings.len()).into());
    }
    Ok(())
}

/// Makes a folder that can be written to. Those that were not there before, the innermost first.
fn folder(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let missing = path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let missing: Vec<_> = missing.map(Path::to_owned).collect();
    std::fs::create_dir_all(path)?;
    // Said now, not when there is something to lose.
    tempfile::tempfile_in(path)?;
    Ok(missing)
}

/// When the raw events in a folder were written last; `None` where there are none.
fn events_of(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join("events.jsonl")).and_then(|events| events.modified()).ok()
}

/// Computes the summary and the report of a folder again.
///
/// # Errors
/// When its raw events cannot be read, or the report not be written.
pub fn report(options: &ReportOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let summary = written(&options.folder)?;
    told(&summary, &options.folder, options.json, out)
}

/// From the raw events of a folder to its summary and its report.
fn written(folder: &Path) -> Result<Summary, BenchError> {
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
    let records = records.map_err(|error| name(&error))?;
    let summary = analyse::summary(&records);
    std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&summary)? + "\n")?;
    std::fs::write(folder.join("series.json"), report::series(&summary).to_string() + "\n")?;
    std::fs::write(folder.join("report.html"), report::page(&summary))?;
    Ok(summary)
}

fn told(summary: &Summary, folder: &Path, as_json: bool, out: &mut dyn Write) -> Result<(), BenchError> {
    if as_json {
        serde_json::to_writer(&mut *out, summary)?;
        writeln!(out)?;
    } else {
        out.write_all(report::text(summary).as_bytes())?;
        writeln!(out, "\nreport: {}", folder.join("report.html").display())?;
    }
    Ok(())
}
