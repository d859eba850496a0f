//! `baton bench serve`: load on any OpenAI-compatible endpoint, measured by its clients.
//!
//! The workload is decided before a run begins (`crate::load::plan::workload`). Each request is sent at its time,
//! whatever the state of earlier ones (`crate::load::runner`), and latencies count from that time. The numbers are
//! defined in `metrics` and in `docs/reference/benchmark-metrics.md`.

mod error;
pub(crate) mod metrics;
mod options;
mod progress;
mod report;
pub(crate) mod subject;
#[cfg(test)]
mod tests;

use std::io::Write;

use tokio_util::sync::CancellationToken;

pub use options::ServeArgs;

use crate::BenchError;
use metrics::RunReport;
use progress::RunProgress;
use report::ServeReport;
use subject::ServeSubject;

/// Some requests failed, with `--fail-on-error`. The report was written.
#[derive(Debug, thiserror::Error)]
#[error("{0} of {1} requests failed")]
pub(crate) struct RequestsFailed(usize, usize);

/// Measures, and writes the table or the JSON object to `out`.
///
/// # Errors
/// If options are invalid, the endpoint does not answer a first request, or a file cannot be written. Also for
/// failed requests with `--fail-on-error`.
pub fn run(args: &ServeArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    let checked = args.check()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(args.client_threads)
        .enable_all()
        .build()?;
    let report = runtime.block_on(measure(args, &checked, stopped_by_signal()))?;
    if let Some(folder) = &args.out {
        let file = folder.join("summary.json");
        let json = report.json();
        std::fs::write(&file, format!("{json}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let text = if args.json { report.json() } else { report.table() };
    writeln!(out, "{text}")?;
    let (failed, sent) = (report.failed(), report.sent());
    if args.fail_on_error && failed > 0 {
        return Err(Box::new(RequestsFailed(failed, sent)));
    }
    Ok(())
}

/// All runs, one after another.
pub(crate) async fn measure(
    args: &ServeArgs,
    checked: &options::ValidOptions,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<ServeReport, BenchError> {
    let stopped = CancellationToken::new();
    let stopper = tokio::spawn({
        let stopped = stopped.clone();
        async move {
            stop.await;
            stopped.cancel();
        }
    });
    let mut subject =
        ServeSubject::open(&args.url, &args.endpoint, &checked.percentiles, &checked.slo).await?;
    if checked.workload.left_out() > 0 {
        let left_out = checked.workload.left_out();
        subject
            .notes
            .push(format!("{left_out} lines of the trace have no prompt or no answer and were left out"));
    }
    subject.warm_up(&checked.workload, args.warmup, &stopped).await?;
    let mut report = ServeReport::new(args, &subject);
    for run in 0..args.repeat {
        let plan = checked.workload.plan(run);
        let mut progress = RunProgress::start(args.out.as_deref(), run, plan.requests.len())?;
        let mut ended =
            subject.run(plan, args.workload.seed.wrapping_add(run as u64), &stopped, &mut progress).await;
        progress.finish()?;
        // In the order of the plan.
        ended.calls.sort_by_key(|measured| measured.index);
        report.runs.push(RunReport::of(run, &ended, &subject.percentiles, &subject.slo));
        if ended.stopped {
            break;
        }
    }
    stopper.abort();
    report.finish(&subject);
    Ok(report)
}

/// Ctrl-C ends a run, whose results so far are reported.
async fn stopped_by_signal() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}
