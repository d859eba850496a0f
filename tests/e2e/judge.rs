//! `baton bench disconnect`: it finds nothing in a healthy deployment, and the fault in a faulty one.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::harness::{PendingCall, Process};

/// Findings that load alone can cause, with the maximum number of calls: clients, router, engines and all other tests
/// share two cores here. The first is about waiting time. The others count engines that received an abort 20 ms late,
/// which happens to a few when a process is not scheduled. An engine that receives no aborts causes many.
const LOAD_DEPENDENT: [(&str, u64); 3] =
    [("uncancelled_slowed", u64::MAX), ("prefill_not_aborted", 3), ("decode_not_aborted", 3)];

/// A short run, unless a test has other options. The default of a second may pass where all tests of the workspace
/// share two cores. The lease of the simulated engines is four seconds.
const SHORT: [[&str; 2]; 6] = [
    ["--stranded-after-ms", "2500"],
    ["--seconds", "1.5"],
    ["--rounds", "1"],
    ["--cancels", "5"],
    ["--phase-seconds", "4"],
    ["--final-wait", "8"],
];

/// Runs the benchmark with short settings and parses its summary.
fn judged(folder: &Path, options: &[&str]) -> Value {
    let out = folder.to_str().expect("a path");
    let short = SHORT.iter().filter(|[name, _]| !options.contains(name)).flatten().copied();
    let mut all = vec!["bench", "disconnect", "--json", "--out", out];
    all.extend(short.chain(options.iter().copied()));
    ran(&all)
}

fn ran(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the binary under test can be started");
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{log}", output.status);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}\n{log}"))
}

fn found(summary: &Value) -> Vec<&str> {
    let findings = summary["findings"].as_array().expect("findings");
    findings.iter().map(|finding| finding["name"].as_str().expect("a name")).collect()
}

/// Checks that all of `expected` are found, and nothing but `expected`, `allowed` and the findings that load alone can
/// cause.
#[track_caller]
pub(crate) fn is_judged(what: &str, summary: &Value, expected: &[&str], allowed: &[&str]) {
    let (names, findings) = (found(summary), &summary["findings"]);
    let missing: Vec<_> = expected.iter().filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "{what}: {missing:?} is not found: {findings:#}");
    let by_load = |finding: &Value| {
        let count = finding["count"].as_u64().expect("a count");
        LOAD_DEPENDENT.iter().any(|(name, most)| finding["name"] == *name && count <= *most)
    };
    let known = [expected, allowed].concat();
    let findings = findings.as_array().expect("findings").iter();
    let others: Vec<_> = findings.zip(names).filter(|(_, name)| !known.contains(name)).collect();
    let others: Vec<_> = others.into_iter().filter(|(finding, _)| !by_load(finding)).collect();
    assert!(others.is_empty(), "{what}: this is not what is wrong: {others:#?}");
}

#[test]
fn batons_own_deployment_has_no_finding_and_the_report_is_reproducible() {
    let folder = tempfile::tempdir().expect("a folder");
    let engines = ["--", "--kv-cache-mib", "32", "--threads", "1"];
    let options = ["--no-faults", "--rate", "15"];
    let summary = judged(folder.path(), &[&options, engines.as_slice()].concat());
    is_judged("our own", &summary, &[], &[]);
    assert_eq!(summary["exact"], true);
    assert_eq!(summary["texts"]["wrong"], 0);
    let load = &summary["load"];
    assert_eq!(
        (load["chosen"].as_str(), load["rate_per_s"].as_f64()),
        (Some("asked"), Some(15.0)),
        "{load:#}"
    );
    assert!(
        load["able_per_s"].as_f64() > Some(0.0) && load["late_calm_ms"]["n"].as_u64() > Some(0),
        "{load:#}"
    );
    let left = |phase: &str| {
        let rows = summary["phases"].as_array().expect("phases");
        let row = rows.iter().find(|row| row["phase"] == phase);
        row.and_then(|row| row["cancelled"].as_u64()).unwrap_or(0)
    };
    assert_eq!(summary["all"]["never_freed"], 0, "{:#}", summary["all"]);
    for phase in ["queued", "prefill", "stream"] {
        assert!(left(phase) > 0, "no cancel in phase {phase}: {:#}", summary["phases"]);
    }
    assert!(
        summary["texts"]["compared"].as_u64() > Some(0) && summary["refused"]["cancelled"].as_u64() > Some(0)
    );
    // Requests that are to be cancelled in a storm are cancelled in it.
    let cancels = &summary["storm_cancels"];
    let count = |name: &str| cancels[name].as_u64().expect("a count");
    assert!(count("drawn") > 0 && count("in_time") * 2 > count("drawn"), "{cancels:#}");
    let page = std::fs::read_to_string(folder.path().join("report.html")).expect("a report");
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg"), "{page}");
    // Every number follows from the raw events.
    let again = ran(&["bench", "report", "--json", folder.path().to_str().expect("a path")]);
    assert_eq!(again, summary);
}

#[test]
fn every_kill_hits_requests_and_the_restarted_processes_have_no_finding() {
    let folder = tempfile::tempdir().expect("a folder");
    let engines = ["--", "--kv-cache-mib", "32", "--threads", "1"];
    let options = ["--rate", "15", "--phases", "stream"];
    let summary = judged(folder.path(), &[&options, engines.as_slice()].concat());
    is_judged("our own", &summary, &[], &[]);
    let faults = summary["faults"].as_array().expect("faults");
    assert_eq!(faults.len(), 3);
    for fault in faults {
        assert!(fault["in_flight"].as_u64() > Some(0), "it met nothing: {fault:#}");
        assert!(
            fault["e2e_ms"]["max"].is_f64() && fault["cancelled"]["cancelled"].as_u64() > Some(0),
            "{fault:#}"
        );
        assert_eq!(fault["errors_after"], 0, "{fault:#}");
    }
}

/// The sample report is what this version computes from its raw events.
#[test]
fn the_committed_sample_report_follows_from_its_events() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results/disconnect/sample");
    let folder = tempfile::tempdir().expect("a folder");
    let packed = "events.jsonl.gz";
    std::fs::copy(sample.join(packed), folder.path().join(packed)).expect("the sample's events");
    let summary = ran(&["bench", "report", "--json", folder.path().to_str().expect("a path")]);
    assert_eq!((found(&summary), &summary["exact"]), (Vec::new(), &true.into()));
    for file in ["summary.json", "series.json", "report.html"] {
        let made = std::fs::read_to_string(folder.path().join(file)).expect("it was written");
        if std::env::var_os("BATON_WRITE_DOCS").is_some() {
            std::fs::write(sample.join(file), &made).expect("it can be written");
        }
        let kept = std::fs::read_to_string(sample.join(file)).expect("the sample");
        assert!(
            made == kept,
            "{file} of the sample is of another version: BATON_WRITE_DOCS=1 writes it again"
        );
    }
}

/// The router in front of simulated engines with a fault.
pub(crate) struct SimDeployment {
    pub(crate) url: String,
    pub(crate) admin: String,
    folder: tempfile::TempDir,
    _processes: [Process; 2],
}

pub(crate) fn simulated(fault: Option<&str>) -> SimDeployment {
    simulated_like(fault, &[])
}

/// The same, with options of the engines.
pub(crate) fn simulated_like(fault: Option<&str>, engine: &[&str]) -> SimDeployment {
    simulated_at("127.0.0.1", fault, engine, "")
}

/// The same, with an address, and with more keys in the router's configuration.
pub(crate) fn simulated_at(listen: &str, fault: Option<&str>, engine: &[&str], more: &str) -> SimDeployment {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("router.yaml");
    let config = config.to_str().expect("a path");
    let at = format!("{listen}:0");
    let place = ["--router-config", config, "--router-listen", &at, "--router-admin", "127.0.0.1:0"];
    let mut sim = vec!["bench", "sim", "--kv-lease-duration", "4"];
    sim.extend(place);
    if !engine.contains(&"--dialect") {
        sim.extend(["--dialect", "baton"]);
    }
    sim.extend(fault.iter().flat_map(|fault| ["--fault", fault]));
    sim.extend(engine);
    let started = |name: &str, arguments: &[&str]| {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let mut process = Process::start(name, &arguments, folder.path());
        process.wait_ready();
        process
    };
    let engines = started("sim", &sim);
    let written = std::fs::read_to_string(config).expect("its configuration");
    std::fs::write(config, format!("{written}{more}")).expect("it can be written");
    let router = started("router", &["router", "--config", config]);
    let http = router.fact("http").replace("0.0.0.0", "127.0.0.1");
    let (url, admin) = (format!("http://{http}"), format!("http://{}", router.fact("admin")));
    SimDeployment { url, admin, folder, _processes: [router, engines] }
}

/// The summary of a run on this deployment.
fn judged_with(fault: Option<&str>, options: &[&str]) -> Value {
    judged_like(fault, &[], options)
}

/// The same, with options of the engines.
fn judged_like(fault: Option<&str>, engine: &[&str], options: &[&str]) -> Value {
    judged_at(&simulated_like(fault, engine), options)
}

pub(crate) fn judged_at(simulated: &SimDeployment, options: &[&str]) -> Value {
    let (url, admin) = (&simulated.url, &simulated.admin);
    let more = ["--url", url, "--admin", admin, "--rate", "40", "--verify-seconds", "5"];
    judged(simulated.folder.path(), &[&more, options].concat())
}

fn is_found(fault: &str, phases: &str, expected: &[&str], allowed: &[&str]) -> Value {
    let summary = judged_with(Some(fault), &["--phases", phases]);
    is_judged(fault, &summary, expected, allowed);
    summary
}

#[test]
fn healthy_simulated_engines_have_no_finding() {
    is_judged("healthy", &judged_with(None, &[]), &[], &[]);
}

#[test]
fn a_prefill_engine_that_never_aborts_is_found() {
    is_found("never-aborts-prefill", "prefill", &["prefill_not_aborted"], &[]);
}

#[test]
fn a_decode_engine_that_never_aborts_is_found() {
    is_found("never-aborts-decode", "stream,unary", &["decode_not_aborted"], &[]);
}

#[test]
fn blocks_stranded_in_the_gap_are_found() {
    // A refused decode also leaks its lease, and so does a request that was cancelled before its blocks were read.
    let expected = ["gap_stranded", "refused_stranded", "leases_expired"];
    let summary = is_found("strands-gap", "gap", &expected, &["stranded"]);
    assert!(summary["all"]["expired"].as_u64() > Some(0), "{:#}", summary["all"]);
}

/// A reply window far longer than the router waits for the reply of an abandoned prefill.
pub(crate) const REPLY_WINDOW: [&str; 2] = ["--reply-delay-ms", "150"];

#[test]
fn a_stock_engine_that_drops_replies_is_found_and_one_with_an_abort_by_id_passes() {
    let run = |dialect| {
        let engines = [&["--dialect", dialect], &REPLY_WINDOW[..]].concat();
        let summary = judged_like(None, &engines, &["--phases", "reply"]);
        let rows = summary["phases"].as_array().expect("phases");
        let reply = rows.iter().find(|row| row["phase"] == "reply").expect("a row").clone();
        (summary, reply)
    };
    let (summary, reply) = run("vllm");
    // An abort of the prefill may arrive in the window, and a reply may be written as the client leaves.
    let allowed = ["stranded", "gap_stranded"];
    is_judged("stock", &summary, &["reply_stranded", "leases_expired"], &allowed);
    assert!(reply["stranded"].as_u64() > Some(0) && reply["expired"].as_u64() > Some(0), "{reply:#}");
    let (summary, reply) = run("baton");
    is_judged("with an abort by id", &summary, &[], &[]);
    assert!(reply["cancelled"].as_u64() > Some(0), "no cancel hit the window: {reply:#}");
    assert_eq!(reply["stranded"], 0, "{reply:#}");
}

#[test]
fn an_engine_that_dies_by_itself_is_found() {
    // Requests to this engine fail in any segment. Its freed blocks appear in no report.
    let allowed = ["requests_failed", "uncancelled_failed", "stranded", "gap_stranded"];
    is_found("dies:9@decode-0", "stream,unary,prefill,gap", &["engine_gone"], &allowed);
}

#[test]
fn blocks_that_are_freed_twice_are_found() {
    // Two requests have the same block. One of them may return the other's prompt.
    is_found("double-free", "gap,fetch", &["freed_twice"], &["wrong_texts"]);
}

#[test]
fn answers_from_stale_blocks_are_found() {
    // A repeated request reads the same stale blocks as the first.
    is_found("stale-blocks", "gap,stream", &["wrong_texts"], &["texts_nondeterministic"]);
}

#[test]
fn stalled_uncancelled_requests_are_found() {
    // No request ends while nothing is computed: three cancels one after the other cost a second.
    is_found("stalls-uncancelled", "stream", &["uncancelled_slowed"], &["stranded"]);
}

#[test]
fn an_engine_with_metrics_only_is_judged_by_them() {
    let summary = judged_with(None, &["--metrics-only"]);
    assert_eq!((&summary["exact"], &summary["texts"]["wrong"]), (&false.into(), &0.into()));
    is_judged("healthy", &summary, &[], &[]);
    // Reads of 80 ms: a cancel during one leaks a lease, often enough for a comparison.
    let simulated = simulated_like(Some("strands-gap"), &["--fetch-rate", "100"]);
    let summary = judged_at(&simulated, &["--metrics-only", "--phases", "prefill,first-token"]);
    is_judged("strands-gap", &summary, &["orphaned_blocks", "leases_expired"], &[]);
    // Samples of metrics agree with the simulator's own log of the same minutes, as far as they can.
    let exact = by_their_own_logs(&simulated)["all"]["block_seconds"].as_f64().expect("block-seconds");
    let sampled = &summary["sampled"];
    let number = |name: &str| sampled[name].as_f64().unwrap_or_else(|| panic!("{name}: {summary:#}"));
    let (seconds, off_by) = (number("block_seconds"), number("off_by"));
    println!("block-seconds: {exact:.1} by the logs, {seconds:.1} ± {off_by:.1} from samples");
    // At least two leases of 8 blocks and 4 s. Otherwise nothing is compared.
    assert!(exact > 64.0, "{exact}: {sampled:#}");
    // The samples do not show work on cancelled requests. Neither twice nor half of the value would pass.
    assert!(off_by < 0.3 * exact, "{exact}: {sampled:#}");
    assert!(seconds > 0.8 * exact - off_by && seconds < 1.1 * exact + off_by, "{exact}: {sampled:#}");
}

/// The report of a run with metrics only, computed again with the engines' event logs.
fn by_their_own_logs(simulated: &SimDeployment) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let seen = std::fs::read_to_string(simulated.folder.path().join("events.jsonl")).expect("its events");
    let mut out = String::new();
    for line in seen.lines() {
        let mut record: Value = serde_json::from_str(line).expect("a record");
        if record["record"] != "engine" {
            out.push_str(&format!("{line}\n"));
            continue;
        }
        record["events"] = true.into();
        out.push_str(&format!("{record}\n"));
        let place = record["name"].as_str().expect("its address");
        let page = PendingCall::new(place, "GET", "/debug/kv/events?after=0&limit=10000", b"").reply().json();
        let events = page["events"].as_array().expect("events");
        assert!(page["lost"].as_u64().unwrap_or(0) == 0 && events.len() < 10_000, "its log is whole");
        let mut tags = std::collections::HashMap::new();
        for event in events {
            let request = event["request_id"].as_str().expect("a request");
            if let Some(tag) = event["tag"].as_str() {
                tags.insert(request, tag);
            }
            let Some(tag) = tags.get(request) else { continue };
            let mut logged = event.clone();
            (logged["record"], logged["engine"], logged["tag"]) =
                ("event".into(), record["engine"].clone(), (*tag).into());
            out.push_str(&format!("{logged}\n"));
        }
    }
    std::fs::write(folder.path().join("events.jsonl"), out).expect("they are written");
    ran(&["bench", "report", "--json", folder.path().to_str().expect("a path")])
}

#[test]
fn engines_without_introspection_are_judged_by_their_clients() {
    let simulated = simulated(None);
    let options = ["--url", &simulated.url, "--rate", "40", "--verify-seconds", "5", "--phases", "stream"];
    let summary = judged(simulated.folder.path(), &options);
    is_judged("metrics only", &summary, &[], &[]);
    assert_eq!((&summary["exact"], &summary["engines"]), (&false.into(), &serde_json::json!([])));
    assert!(
        summary["cancelled"].as_u64() > Some(0) && summary["texts"]["compared"].as_u64() > Some(0),
        "{summary:#}"
    );
    assert!(summary["calm_paired"]["ttft_ms"]["n"].as_u64() > Some(0), "{summary:#}");
    let page = std::fs::read_to_string(simulated.folder.path().join("report.html")).expect("a report");
    assert!(page.contains("no engine was observed"), "{page}");
    assert!(!page.contains("<b>Excused:</b>") && !page.contains("No block was stranded"), "{page}");
}

#[test]
fn external_faults_and_recoveries_are_reported_and_bad_options_refused() {
    let broken = ["--fault", "nothing=true", "--recover", "nothing=true", "--phases", "stream"];
    let summary = judged_with(None, &broken);
    let faults = summary["faults"].as_array().expect("faults");
    assert_eq!(
        (faults.len(), &faults[0]["fault"], &faults[0]["errors_after"]),
        (1, &"nothing".into(), &0.into())
    );
    is_judged("nothing broken", &summary, &[], &[]);
    // The recovery waited for requests in prefill and in their responses, and some of its clients disconnected.
    assert!(faults[0]["in_flight"].as_u64() > Some(0) && faults[0]["waited_ms"].is_f64(), "{faults:#?}");
    assert!(faults[0]["cancelled"]["cancelled"].as_u64() > Some(0), "{faults:#?}");
    let url = ["--url", "http://127.0.0.1:1", "--admin", "http://127.0.0.1:1"];
    for (wrong, says) in [
        (vec!["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (vec!["--cancel-share", "1.5"], "0 to 1"),
        (vec!["--seconds", "0"], "--seconds"),
        ([url.as_slice(), &["--fault", "x"]].concat(), "NAME=COMMAND"),
        ([url.as_slice(), &["--recover", "x=y"]].concat(), "no --fault"),
        ([url.as_slice(), &["--compare-with", "/dev/null"]].concat(), "/dev/null"),
        (url.to_vec(), "127.0.0.1:1"),
        (vec!["--url", "http://127.0.0.1:1", "--engine", "prefil=http://127.0.0.1:2"], "not `prefil`"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().to_str().expect("a path");
        let output = Command::new(env!("CARGO_BIN_EXE_baton"))
            .args(["bench", "disconnect", "--out", out])
            .args(&wrong)
            .output()
            .expect("the binary under test can be started");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && log.contains(says), "{wrong:?}: {log}");
    }
}

/// Engines that take some 5 ms for a prompt, so that no cancelled leg runs on for long. The others take four and
/// sixteen times as long, for a busy machine, on which an abort takes too long to judge legs of 5 ms.
const SHORT_PREFILL: [[&str; 4]; 3] = [
    ["--prefill-rate", "40000", "--prefill-overhead-ms", "2"],
    ["--prefill-rate", "10000", "--prefill-overhead-ms", "8"],
    ["--prefill-rate", "2500", "--prefill-overhead-ms", "32"],
];

/// The share of judged prefills that ran on after a cancel; `None` if the report counts too few.
fn went_on(summary: &Value) -> Option<f64> {
    let row = &summary["work"][0];
    assert_eq!(row["leg"], "prefill");
    let number = |name: &str| row[name].as_f64().expect("a number");
    let few = number("judged") < 10.0 || number("judged") < number("at_work") / 4.0;
    (!few).then(|| (number("completed_without_abort") + number("continued_after_abort")) / number("judged"))
}

/// This machine's speed determines how long prefills must be to be judged, and how many of them run on without an
/// abort. Correct engines are therefore compared with faulty ones of the same minute.
#[test]
fn short_prefills_without_aborts_are_found_and_correct_engines_pass() {
    let options = ["--phases", "prefill,stream", "--cancels", "30"];
    for engines in SHORT_PREFILL {
        let summary = judged_like(Some("never-aborts-prefill"), &engines, &options);
        let Some(never) = went_on(&summary) else { continue };
        is_judged("never-aborts-prefill", &summary, &["prefill_not_aborted"], &[]);
        // On a busy machine an abort may be late once, but not twice.
        for accused_before in [false, true] {
            let summary = judged_like(None, &engines, &options);
            let Some(honest) = went_on(&summary) else { break };
            println!("{engines:?}: {never:.2} go on, and {honest:.2} of honest ones");
            assert!(never > 0.5 && honest < never / 4.0, "{honest} of {never}: {:#}", summary["work"]);
            if accused_before || found(&summary).is_empty() {
                return is_judged("honest", &summary, &[], &[]);
            }
        }
    }
    panic!("prefills of 80 ms could not be judged either");
}

/// Enough rounds and clients to know the noise.
const ROUNDS: [&str; 6] = ["--seconds", "6", "--rounds", "4", "--phases", "prefill"];

/// Unit tests cover the case without stalls, with events at known times. Here other load may slow a storm. If it slows
/// the calm as much, a stall of 40 ms is not detectable, and the test uses a stall as long as the report requires.
#[test]
fn a_stall_after_each_abort_is_a_finding() {
    let mut stall_ms = 40.0;
    for _ in 0..3 {
        let fault = format!("stalls-uncancelled:{stall_ms:.0}");
        let summary = judged_with(Some(&fault), &ROUNDS);
        let numbers = summary["uncancelled"]["numbers"].as_array().expect("numbers");
        let first = numbers.iter().rev().find(|number| number["measure"] == "ttft");
        println!("{fault}: {:?}, {first:?}", found(&summary));
        if found(&summary).contains(&"uncancelled_slowed") {
            return is_judged(&fault, &summary, &["uncancelled_slowed"], &["stranded"]);
        }
        let missing = first.and_then(|number| number["named_by_ms"].as_f64()).unwrap_or(stall_ms);
        stall_ms = (stall_ms + 2.0 * missing).min(300.0);
    }
    panic!("three stalls, each as much longer as was missing, were not found");
}

#[test]
fn clients_that_stall_are_measured() {
    let options = ["--phases", "prefill,stream,unary", "--cancel-by", "stall", "--cancels", "12"];
    let summary = judged_with(None, &options);
    let stalls = &summary["kinds"][0];
    let number = |name: &str| stalls[name].as_u64().expect("a number");
    // Most cancels of the storm are too late where all requests are identical. With other requests no client stalls.
    assert!(stalls["kind"] == "stall" && number("cancelled") >= 24, "{stalls:#}");
    assert!(number("too_late") > 0, "{stalls:#}");
}
