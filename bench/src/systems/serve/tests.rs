//! `baton bench serve` against a test server with known behaviour: token counts, minimum pauses, refusals.

mod server;

use std::path::Path;
use std::time::Duration;

use clap::Parser;
use serde_json::Value;

use super::*;
use server::{ServerOptions, TestServer};

#[derive(Parser)]
struct ServeCli {
    #[command(flatten)]
    args: ServeArgs,
}

fn args(server: &TestServer, more: &[&str]) -> ServeArgs {
    let url = server.url();
    let line = ["serve", "--url", &url].into_iter().chain(more.iter().copied());
    ServeCli::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).args
}

/// Runs the benchmark and parses its output.
fn json(server: &TestServer, more: &[&str]) -> Value {
    let mut out = Vec::new();
    run(&args(server, &[more, &["--json"]].concat()), &mut out).unwrap_or_else(|error| panic!("{error}"));
    serde_json::from_slice(&out).expect("JSON")
}

fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is a number"))
}

/// The definition, without the code under test.
fn nearest_rank(mut samples: Vec<f64>, p: usize) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[(p * samples.len()).div_ceil(100) - 1]
}

#[test]
fn a_closed_loop_counts_what_the_server_counts() {
    let server = TestServer::start(ServerOptions::default());
    let options =
        ["--num-prompts", "40", "--max-concurrency", "4", "--input-len", "uniform:8-40", "--output-len", "6"];
    let report = json(
        &server,
        &[&options[..], &["--warmup", "3", "--goodput", "e2e:60000", "ttft:0.000001"]].concat(),
    );
    let run = &report["runs"][0];
    assert_eq!(
        (&run["sent"], &run["completed"], &run["failed"]),
        (&40.into(), &40.into(), &0.into()),
        "{run:#}"
    );
    assert_eq!((&report["model"], &report["endpoint"]), (&"first".into(), &"completions".into()));
    // The server's counts, without the warm-up's four requests.
    let seen = server.seen();
    assert_eq!(seen.completions, 44);
    assert_eq!(number(&run["prompt_tokens"]) as usize, seen.prompt_tokens[4..].iter().sum::<usize>());
    assert_eq!(run["prompt_tokens"], run["planned_prompt_tokens"], "lengths are exact");
    assert!(seen.prompt_tokens.iter().all(|tokens| (8..=40).contains(tokens)), "{:?}", seen.prompt_tokens);
    assert_eq!((&run["completion_tokens"], &run["tokens_per_event"]), (&240.into(), &1.0.into()));
    assert_eq!(run["finish_reasons"]["length"], 40);
    assert!(seen.peak <= 4 && run["peak_in_flight"] == 4, "{} {run:#}", seen.peak);
    assert_eq!(
        (&run["itl_ms"]["count"], &run["tpot_ms"]["count"], &run["ttft_ms"]["count"]),
        (&200.into(), &40.into(), &40.into())
    );
    // One limit that all requests keep, and one that none can.
    assert_eq!((&run["goodput"]["good"], &run["goodput"]["share"]), (&0.into(), &0.0.into()));
}

#[test]
fn pauses_of_the_server_are_in_the_numbers() {
    let pause = Duration::from_millis(30);
    let server =
        TestServer::start(ServerOptions { first: pause * 2, gap: pause, ..ServerOptions::default() });
    let report = json(
        &server,
        &["--num-prompts", "4", "--max-concurrency", "2", "--output-len", "4", "--input-len", "8"],
    );
    let run = &report["runs"][0];
    // A sleep lasts at least as long as requested.
    assert!(
        number(&run["ttft_ms"]["min"]) >= 60.0 && number(&run["ttft_from_sent_ms"]["min"]) >= 60.0,
        "{run:#}"
    );
    // A client that wakes late measures a late first token and a short gap. The sum is unaffected.
    let mean = |name: &str| number(&run[name]["mean"]);
    assert!(mean("ttft_ms") + 3.0 * mean("itl_ms") >= 150.0 - 1e-3, "{run:#}");
    assert!((mean("ttft_ms") + 3.0 * mean("tpot_ms") - mean("e2e_ms")).abs() < 1e-3, "{run:#}");
    assert!(number(&run["e2e_ms"]["min"]) >= 150.0 && number(&run["duration_s"]) >= 0.3, "{run:#}");
    let goodput = json(
        &server,
        &["--num-prompts", "2", "--max-concurrency", "2", "--output-len", "4", "--goodput", "tpot:0.001"],
    );
    assert_eq!(goodput["runs"][0]["goodput"]["good"], 0);
    let goodput = json(
        &server,
        &["--num-prompts", "2", "--max-concurrency", "2", "--output-len", "4", "--goodput", "tpot:60000"],
    );
    assert_eq!(goodput["runs"][0]["goodput"]["share"], 1.0);
}

#[test]
fn requests_that_wait_in_the_client_count_from_when_they_were_due() {
    let pause = Duration::from_millis(40);
    let server = TestServer::start(ServerOptions { first: pause, ..ServerOptions::default() });
    let options =
        ["--num-prompts", "6", "--request-rate", "1000", "--burstiness", "inf", "--max-concurrency", "1"];
    let report = json(&server, &[&options[..], &["--output-len", "2", "--input-len", "8"]].concat());
    let run = &report["runs"][0];
    // The sixth request is due after 6 ms, and begins after five others of 40 ms each.
    assert!(number(&run["ttft_ms"]["max"]) >= 6.0 * 40.0 - 6.0 - 1.0, "{run:#}");
    assert!(number(&run["lag_ms"]["max"]) >= 5.0 * 40.0 - 6.0 - 1.0, "{run:#}");
    assert!(number(&run["ttft_ms"]["max"]) > number(&run["ttft_from_sent_ms"]["max"]) + 150.0, "{run:#}");
    assert_eq!(server.seen().peak, 1);
    assert!(report["notes"].as_array().is_some_and(|notes| {
        notes.iter().any(|note| note.as_str().is_some_and(|n| n.contains("--max-concurrency")))
    }));
}

#[test]
fn calls_due_at_the_end_count_as_overdue_and_miss_the_goodput() {
    // The server answers one request and holds the next, while one lane waits.
    let server =
        TestServer::start(ServerOptions { first: Duration::from_millis(900), ..ServerOptions::default() });
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("UTF-8");
    let options =
        ["--request-rate", "50", "--burstiness", "inf", "--max-concurrency", "1", "--duration", "0.49"];
    let more = ["--output-len", "2", "--input-len", "8", "--goodput", "ttft:60000", "--out", out];
    let report = json(&server, &[&options[..], &more].concat());
    let run = &report["runs"][0];
    // One request is due every 20 ms for half a second. The first is sent and occupies the only lane to the end. All
    // begun responses are good, but most requests never begin.
    let (sent, overdue) = (number(&run["sent"]), number(&run["overdue"]));
    assert_eq!((sent, overdue), (1.0, 23.0), "{run:#}");
    assert_eq!((&run["unsent"], &run["lag_ms"]["count"]), (&23.into(), &24.into()), "{run:#}");
    assert_eq!(run["goodput"]["good"], 1);
    assert!((number(&run["goodput"]["share"]) - 1.0 / 24.0).abs() < 0.001, "{run:#}");
    // The second request is due after 40 ms. The run ends after 490 ms.
    assert!(number(&run["lag_ms"]["max"]) >= 445.0, "{run:#}");
    let notes = report["notes"].as_array().expect("notes");
    assert!(
        notes.iter().any(|note| note.as_str().is_some_and(|n| n.contains("23 requests were due"))),
        "{notes:?}"
    );
    let calls = lines(&folder.path().join("calls-0.jsonl"));
    let waited: Vec<_> = calls.iter().filter(|call| call["waited_us"].is_u64()).collect();
    assert_eq!((calls.len(), waited.len(), &waited[0]["index"]), (24, 23, &1.into()));
}

#[test]
fn a_call_behind_another_of_its_lane_is_not_overdue() {
    let server =
        TestServer::start(ServerOptions { first: Duration::from_millis(50), ..ServerOptions::default() });
    let options = ["--max-concurrency", "1", "--duration", "0.3", "--goodput", "ttft:60000"];
    let run = &json(&server, &[&options[..], &["--output-len", "2", "--input-len", "8"]].concat())["runs"][0];
    assert!(number(&run["sent"]) >= 1.0 && number(&run["unsent"]) > 1_000.0, "{run:#}");
    assert_eq!((&run["overdue"], &run["goodput"]["share"]), (&0.into(), &1.0.into()), "{run:#}");
}

#[test]
fn every_number_follows_from_the_recorded_calls() {
    let server =
        TestServer::start(ServerOptions { gap: Duration::from_millis(1), ..ServerOptions::default() });
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("made");
    let options =
        ["--num-prompts", "30", "--request-rate", "400", "--output-len", "uniform:1-5", "--repeat", "2"];
    let more = [
        "--out",
        out.to_str().expect("UTF-8"),
        "--tag",
        "t",
        "--percentiles",
        "50,90,99",
        "--input-len",
        "9",
    ];
    let report = json(&server, &[&options[..], &more].concat());
    let written: Value =
        serde_json::from_str(&std::fs::read_to_string(out.join("summary.json")).expect("a file"))
            .expect("JSON");
    assert_eq!(written["runs"], report["runs"]);
    for (run, summary) in report["runs"].as_array().expect("runs").iter().enumerate() {
        let calls = lines(&out.join(format!("calls-{run}.jsonl")));
        assert_eq!(calls.len(), 30);
        let us = |value: &Value| value.as_u64().expect("microseconds") as f64;
        // Times in the file are truncated to whole microseconds.
        let near = |a: f64, b: &Value, what: &str| assert!((a - number(b)).abs() < 0.004, "{what}: {a} {b}");
        let due = |call: &Value| us(&call["call"]["began_us"]) - us(&call["scheduled_us"]);
        let tokens = |call: &Value| {
            call["call"]["tokens_after_us"].as_array().expect("times").iter().map(us).collect::<Vec<_>>()
        };
        let ttft: Vec<_> = calls.iter().map(|call| (due(call) + tokens(call)[0]) / 1e3).collect();
        let e2e: Vec<_> =
            calls.iter().map(|call| (due(call) + us(&call["call"]["ended_after_us"])) / 1e3).collect();
        let tpot = calls.iter().zip(ttft.iter().zip(&e2e)).filter_map(|(call, (ttft, e2e))| {
            let count = us(&call["call"]["usage"]["completion_tokens"]);
            (count > 1.0).then(|| (e2e - ttft) / (count - 1.0))
        });
        let tpot: Vec<f64> = tpot.collect();
        let itl: Vec<_> = calls
            .iter()
            .flat_map(|call| {
                tokens(call).windows(2).map(|pair| (pair[1] - pair[0]) / 1e3).collect::<Vec<_>>()
            })
            .collect();
        for (name, samples) in [("ttft_ms", &ttft), ("e2e_ms", &e2e), ("tpot_ms", &tpot), ("itl_ms", &itl)] {
            assert_eq!(summary[name]["count"], samples.len(), "{name}");
            for p in [50, 90, 99] {
                near(nearest_rank(samples.clone(), p), &summary[name][format!("p{p}")], name);
            }
            near(samples.iter().sum::<f64>() / samples.len() as f64, &summary[name]["mean"], name);
        }
        assert_eq!(
            calls.iter().map(|call| us(&call["call"]["usage"]["completion_tokens"])).sum::<f64>(),
            number(&summary["completion_tokens"])
        );
        // Open loop: the due times were decided before.
        let mut due: Vec<_> =
            calls.iter().map(|call| (call["index"].as_u64(), us(&call["scheduled_us"]))).collect();
        due.sort_by_key(|(index, _)| *index);
        let workload = args(&server, &options).workload.check().expect("a workload");
        let plan = workload.plan(run);
        let began = us(&summary["began_us"]);
        for ((_, scheduled), planned) in due.iter().zip(&plan.requests) {
            let at = planned.at.expect("an open loop").as_secs_f64() * 1e6;
            assert!((scheduled - began - at).abs() <= 2.0, "{scheduled} {began} {at}");
        }
    }
    assert_eq!(report["over_runs"]["ttft_ms.p50"]["runs"].as_array().map(Vec::len), Some(2));
    let tags = server.seen().users;
    assert!(tags.iter().any(|tag| tag == "t-000029"), "{tags:?}");
}

#[test]
fn failures_are_counted_by_kind_and_reported() {
    let server = TestServer::start(ServerOptions {
        refuse_every: Some(4),
        cut_every: Some(5),
        ..ServerOptions::default()
    });
    let options = ["--num-prompts", "20", "--max-concurrency", "1", "--output-len", "3", "--input-len", "8"];
    let report = json(&server, &options);
    let run = &report["runs"][0];
    // The first request was the probe. Of the 21, every 4th is refused, and every 5th of the others is cut.
    assert_eq!(
        (&run["sent"], &run["failed"], &run["completed"]),
        (&20.into(), &8.into(), &12.into()),
        "{run:#}"
    );
    assert_eq!(run["failures"]["429 queue_full"]["count"], 5, "{run:#}");
    assert_eq!(run["failures"]["broken off (body)"]["count"], 3, "{run:#}");
    assert!(
        run["failures"]["429 queue_full"]["first"].as_str().is_some_and(|first| first.contains("no room"))
    );
    assert_eq!(run["ttft_ms"]["count"], 12, "latencies are those of whole answers");

    let mut out = Vec::new();
    let failing = args(&server, &[&options[..], &["--fail-on-error"]].concat());
    let failed = run_to(&failing, &mut out).expect_err("some failed");
    assert!(failed.is::<RequestsFailed>(), "{failed}");
    let table = String::from_utf8(out).expect("text");
    assert!(
        table.contains("FAILED in run 1: ") && table.contains("× 429 queue_full, the first: "),
        "{table}"
    );
    assert!(table.contains("TTFT from send") && table.contains("p99"), "{table}");
}

fn run_to(args: &ServeArgs, out: &mut Vec<u8>) -> Result<(), BenchError> {
    super::run(args, out)
}

#[test]
fn retries_are_made_and_the_whole_answer_counts() {
    let server = TestServer::start(ServerOptions { refuse_every: Some(4), ..ServerOptions::default() });
    let options = [
        "--num-prompts",
        "6",
        "--max-concurrency",
        "1",
        "--output-len",
        "2",
        "--input-len",
        "8",
        "--retries",
        "2",
    ];
    let run = &json(&server, &options)["runs"][0];
    assert_eq!(
        (&run["completed"], &run["failed"], &run["retries"]),
        (&6.into(), &0.into(), &2.into()),
        "{run:#}"
    );
}

#[test]
fn a_run_that_is_stopped_reports_what_there_is() {
    let server = TestServer::start(ServerOptions {
        first: Duration::from_secs(600),
        quick: 3,
        ..ServerOptions::default()
    });
    let args = args(
        &server,
        &["--num-prompts", "20", "--max-concurrency", "4", "--output-len", "2", "--input-len", "8"],
    );
    let checked = args.check().expect("options");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let waiting = server.waiting();
    let report = runtime.block_on(async {
        // With four held requests, the run cannot continue.
        let stop = async move {
            while waiting() < 4 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), measure(&args, &checked, stop)).await.expect("it stops")
    });
    let report = report.expect("a report");
    let run = &report.runs[0];
    // The first of the three quick requests was the probe.
    assert_eq!((run.completed, run.failed, run.stopped, run.unsent), (2, 0, 4, 14), "{run:?}");
    assert!(
        report.table().contains("4 broken off") && report.table().contains("was stopped"),
        "{}",
        report.table()
    );
}

#[test]
fn an_endpoint_is_understood_as_it_is() {
    // The server refuses ignore_eos, has no /tokenize, and answers chats in one piece.
    let server = TestServer::start(ServerOptions {
        refuses_ignore_eos: true,
        tokenizes: false,
        ..ServerOptions::default()
    });
    let options = ["--num-prompts", "5", "--max-concurrency", "2", "--output-len", "4", "--input-len", "20"];
    let chat = json(&server, &[&options[..], &["--endpoint", "chat", "--no-stream"]].concat());
    let run = &chat["runs"][0];
    assert_eq!(
        (&run["completed"], &run["completion_tokens"], &run["prompt_tokens"]),
        (&5.into(), &20.into(), &100.into()),
        "{run:#}"
    );
    assert!(run["ttft_ms"].is_null() && run["e2e_ms"]["count"] == 5, "{run:#}");
    assert!(chat["notes"][0].as_str().is_some_and(|note| note.contains("ignore_eos")), "{chat:#}");

    let server = TestServer::start(ServerOptions { tokens_per_event: 2, ..ServerOptions::default() });
    let options = [&options[..], &["--prompt-ids", "--continuous-usage"]].concat();
    let run = &json(&server, &options)["runs"][0];
    assert_eq!(
        (&run["prompt_tokens"], &run["tokens_per_event"], &run["itl_ms"]["count"]),
        (&100.into(), &2.0.into(), &5.into()),
        "{run:#}"
    );
    assert!(server.seen().ids > 0);
}

#[test]
fn invalid_options_are_refused_before_the_first_request() {
    let server = TestServer::start(ServerOptions::default());
    for (options, word) in [
        (&["--request-rate", "0"][..], "--request-rate"),
        (&["--request-rate", "nan"], "--request-rate"),
        (&["--num-prompts", "0"], "--num-prompts"),
        (&["--repeat", "0"], "--repeat"),
        (&["--percentiles", "101"], "--percentiles"),
        (&["--goodput", "itl:5"], "--goodput"),
        (&["--goodput", "ttft:-5"], "--goodput"),
        (&["--no-stream", "--goodput", "ttft:5"], "--goodput"),
        (&["--endpoint", "chat", "--prompt-ids"], "--prompt-ids"),
        (&["--extra-body", "[1]"], "--extra-body"),
        (&["--prefix-share", "2"], "--prefix-share"),
        (&["--duration", "5"], "--duration"),
        (&["--burst-on", "1", "--burst-off", "1"], "--burst-on"),
        (
            &[
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "9",
                "--request-rate",
                "5",
            ],
            "--request-rate",
        ),
        (&["--trace", "/no/such/file"], "/no/such/file"),
    ] {
        let error = args(&server, options).check().map(|_| ()).expect_err(word).to_string();
        assert!(error.contains(word), "{options:?}: {error}");
    }
    assert!(ServeCli::try_parse_from(["serve"]).is_err(), "an endpoint is required");
    let error = run(&args(&server, &["--header", "host: x"]), &mut Vec::new()).expect_err("a header of ours");
    assert!(error.to_string().contains("host: x"), "{error}");
    assert_eq!(server.seen().completions, 0);
}
