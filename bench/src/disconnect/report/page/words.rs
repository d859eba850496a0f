//! The terms of the report, and the configuration of the run.

use std::fmt::Write as _;

use super::super::super::analyse::summary::{SLOWER, Summary};
use super::super::super::analyse::units::format_ms;
use super::super::super::record::timeline::RACE_US;
use super::super::svg::escaped;

pub(super) fn draw(summary: &Summary, out: &mut String) {
    let run = &summary.run;
    let seconds = run.stranded_after_us as f64 / 1e6;
    let soon_ms = RACE_US / 1_000;
    let nice = run.nice.map_or_else(String::new, |nice| format!(", at nice {nice}"));
    let vanished = summary.vanished.as_ref().map_or_else(String::new, |vanished| {
        format!(
            "<dt>vanished</dt><dd>requests whose client's host disappeared without FIN or RST. The deployment has {} to notice, and blocks are stranded {seconds} s after that. They are in no number of the cancelled requests</dd>",
            format_ms(vanished.noticed_within_ms)
        )
    });
    let _ = write!(
        out,
        "<h2 id=\"words\">Terms</h2><dl>\
         <dt>cancelled</dt><dd>requests whose client disconnected before the response was complete. The phase is the one at that moment, by the engines' clocks</dd>\
         <dt>stranded</dt><dd>requests with blocks that are still held {seconds} s after the cancel</dd>{vanished}\
         <dt>time to free</dt><dd>from the cancel until the last block of the request is free on every engine; only requests that held blocks</dd>\
         <dt>abort p50, p99</dt><dd>from the cancel until every engine at work has received the abort, the release or the closed connection, or until the lease has been read to its end</dd>\
         <dt>no abort</dt><dd>requests that an engine still processed more than {soon_ms} ms after the cancel, and whose abort it never received. Shorter rests count in “ran to the end” only</dd>\
         <dt>ran to the end</dt><dd>requests that an engine completed without an abort, of those that are judged: the abort arrived, or more work was left than 90 % of the aborts of this run take to arrive</dd>\
         <dt>too late</dt><dd>requests that completed before their cancel; in no other number</dd>\
         <dt>retries</dt><dd>new attempts of clients with a timeout, at most two as in SDKs. Retries are neither cancelled nor uncancelled requests</dd>\
         <dt>uncancelled</dt><dd>requests whose client stays connected, in calm, storm and fault segments</dd>\
         <dt>in flight</dt><dd>connected requests at the moment of a fault, by phase</dd>\
         <dt>block-s / 1,000</dt><dd>blocks times seconds held after the cancel, per 1,000 cancelled requests</dd>\
         <dt>block-s without a request</dt><dd>blocks times seconds that an engine reports as held while the benchmark has no open request, in segments</dd>\
         <dt>wasted tokens</dt><dd>prompt tokens of steps that ended after the cancel, and generated tokens, spread evenly from the first to the last</dd>\
         <dt>of N</dt><dd>number of samples, where it is less than the number of cancelled requests: the others held no blocks or needed no abort</dd>\
         <dt>never</dt><dd>not freed, or no abort, for as long as the run observed it (<code>watched_ms</code> in <code>summary.json</code>). In percentiles it is longer than every measured time, and a curve ends below 100 %</dd>\
         <dt>noise between calms</dt><dd>how much the number differs between the calms of the rounds, or between the halves of a single calm; at least 2 ms. A storm is slower if its median round is above {SLOWER} times the calm and beyond this noise</dd>\
         <dt>a finding from</dt><dd>additional time from which this number is a finding</dd>\
         <dt>ITL</dt><dd>time between two events with text as the client read them; 0 for events of one socket read</dd>\
         <dt>TPOT, average token</dt><dd>time from the first to the last token, divided by the tokens after the first; one number per streamed response</dd>\
         <dt>TTFT, E2E</dt><dd>from the moment at which the request was due, so a delayed client counts its waiting time</dd>\
         <dt>percentiles</dt><dd>by nearest rank; with fewer than 100 samples p99 is the maximum</dd>\
         </dl><h2>This run</h2><dl>\
         <dt>command</dt><dd><code>{}</code>{nice}</dd><dt>version</dt><dd>{}{}</dd><dt>machine</dt><dd>{}</dd><dt>date</dt><dd>{}</dd><dt>seed</dt><dd>{}</dd><dt>options</dt><dd><code>{}</code></dd>\
         <dt>raw events</dt><dd><code>events.jsonl</code> beside this page; <code>baton bench report DIR</code> computes everything here from it again</dd><dt>plots</dt><dd>as numbers: <code>series.json</code> beside this page</dd></dl>",
        escaped(&run.command),
        escaped(&run.version),
        run.commit.as_ref().map_or_else(String::new, |commit| format!(", commit {}", escaped(commit))),
        escaped(&run.machine),
        escaped(&run.date),
        run.seed,
        escaped(&run.options.to_string()),
    );
}
