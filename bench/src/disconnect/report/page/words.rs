//! What the report's words mean, and where its numbers are from.

use std::fmt::Write as _;

use super::super::super::bystanders::SLOWER;
use super::super::super::summary::Summary;
use super::super::super::timeline::RACE_US;
use super::super::svg::escaped;

pub(super) fn draw(summary: &Summary, out: &mut String) {
    let run = &summary.run;
    let seconds = run.stranded_after_us as f64 / 1e6;
    let soon_ms = RACE_US / 1_000;
    let nice = run.nice.map_or_else(String::new, |nice| format!(", at nice {nice}"));
    let vanished = summary.vanished.as_ref().map_or_else(String::new, |vanished| {
        format!(
            "<dt>vanished</dt><dd>clients whose host was gone without FIN or RST: the deployment has {} to notice, and blocks count as stranded {seconds} s after that. They are in none of the numbers of all that left</dd>",
            super::super::ms(vanished.noticed_within_ms)
        )
    });
    let _ = write!(
        out,
        "<h2 id=\"words\">What the words mean</h2><dl>\
         <dt>in flight</dt><dd>requests whose clients were there and which were not over when something broke, by the phase in which they were</dd>\
         <dt>left</dt><dd>clients that were gone while their request was not over; the phase is the one it was in at that moment, by the engines' own times</dd>\
         <dt>told</dt><dd>from the client's going until every engine that had work for it had learnt of it, by a closed connection, an abort or a release, or until its lease had been read to the end</dd>\
         <dt>never told</dt><dd>clients of whose going an engine never learnt that had work for them for more than {soon_ms} ms longer. What was done within {soon_ms} ms by itself is in neither number; of those at work, “ran on untold” has it</dd>\
         <dt>ran on untold</dt><dd>of clients that left while an engine worked for them: how many of them it computed to its own end for, without having been told, of so many of which that can be said: they were told, or had more left to do than telling takes nine times in ten in this run</dd>\
         <dt>too late</dt><dd>clients that were to leave, and whose request was over before they had; they are in no other number</dd>\
         <dt>asked again</dt><dd>by clients that ran out of patience, twice at most, as SDKs do; failed: of these calls; gave up: clients without a whole answer in the end. Such calls are neither among those who left nor among those who stayed</dd>\
         <dt>blocks back</dt><dd>from the client's going until the last block of its request was free on every engine; only clients whose requests held blocks when they left, or came to hold them</dd>\
         <dt>stranded</dt><dd>blocks that were not back {seconds} s after their client had left</dd>{vanished}\
         <dt>block-s / 1,000</dt><dd>blocks times seconds held for clients that had left, for every 1,000 of them</dd>\
         <dt>block-s with no client</dt><dd>blocks times seconds that an engine's books had as held while the benchmark had no request open at all, in the parts of the run: not while it waited at the end for what had not come back</dd>\
         <dt>of N</dt><dd>beside a time: as many were measured, fewer than have left; the others held nothing there, or nobody had to be told</dd>\
         <dt>tokens for nobody</dt><dd>tokens of prompts in steps that ended after the client had left, and of answers, taken evenly from the first to the last</dd>\
         <dt>never</dt><dd>an engine did not learn that this client had gone, or its blocks were not back, for as long as anybody watched: in percentiles that is longer than every time that was measured, and a curve ends below 100 %. For how long it was watched is <code>watched_ms</code> of <code>summary.json</code></dd>\
         <dt>from calm to calm</dt><dd>by how much the same number differs between the calms of the rounds, where nobody leaves; of one round between its halves; at least 2 ms. Who stayed is slower where the median of the rounds is above {SLOWER} times the calm's, and by more than this</dd>\
         <dt>a finding from</dt><dd>how much slower still this number of the storm would have to be to be reported as a finding</dd>\
         <dt>above {SLOWER} times</dt><dd>a number of who stayed whose ratio is above that in the median of the rounds, named or not: of few requests a high percentile is so by chance, too</dd>\
         <dt>ITL</dt><dd>between two events with text, when the client read them: events that came with one read of the socket have nothing between them</dd>\
         <dt>TPOT, average token</dt><dd>from the first token to the last, for each token after the first: one number for each streamed answer of at least two tokens</dd>\
         <dt>percentiles</dt><dd>by nearest rank: the smallest sample that at least so many per cent of all do not exceed; of fewer than 100 samples the 99th is the greatest</dd>\
         <dt>TTFT, E2E</dt><dd>from the moment at which the request was due, so that a client that is held up counts its waiting</dd>\
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
