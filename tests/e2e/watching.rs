//! `baton top` and `baton doctor` on real deployments: they report healthy parts as healthy and name faults.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::{
    AT_ONCE, Cluster, GenerateRequest, MODEL, PATIENCE, PendingCall, Process, Proxy, eventually,
};
use crate::judge::{REPLY_WINDOW, simulated, simulated_like};

/// Runs `baton` with these arguments. Returns its exit code and its output.
fn baton(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(args).output().expect("it can be started");
    let printed = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), format!("{}{printed}", String::from_utf8_lossy(&output.stdout)))
}

/// The doctor's report on a cluster: its exit code and every line.
struct DoctorReport {
    code: Option<i32>,
    checks: Vec<Value>,
    text: String,
}

impl DoctorReport {
    fn of(cluster: &Cluster, more: &[&str]) -> Self {
        let (url, admin) = (format!("http://{}", cluster.url), format!("http://{}", cluster.admin));
        Self::at(&url, &admin, more)
    }

    fn at(url: &str, admin: &str, more: &[&str]) -> Self {
        let args = [&["doctor", url, "--admin", admin, "--json"], more].concat();
        let (code, text) = baton(&args);
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        Self { code, checks: report["checks"].as_array().expect("a list").clone(), text }
    }

    /// The lines of a check with this mark.
    fn marked(&self, mark: &str, check: &str) -> Vec<String> {
        let is = |line: &&Value| line["mark"] == mark && line["check"] == check;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let line = |line: &Value| format!("{} {}", text(&line["of"]), text(&line["told"]));
        self.checks.iter().filter(is).map(line).collect()
    }
}

/// Checks that a run prints every line of the sample in `docs/how-to/watch.md`, with any numbers.
fn shows_the_sample_of_the_page(report: &DoctorReport) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/watch.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, rest) = page.split_once("```text\nOK ").expect("the page has a sample of the doctor");
    let (sample, _) = rest.split_once("```").expect("the block ends");
    let plain = |line: &str| {
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        let line = line.replace("cancelled once", "cancelled 1 times").replace("engines", "engine");
        line.split(|at: char| at.is_ascii_digit())
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("#")
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line = |check: &Value| ["mark", "check", "of", "told"].map(|key| text(&check[key])).join(" ");
    let json: Value = serde_json::from_str(&report.text).expect("it was read before");
    let printed: Vec<_> =
        report.checks.iter().map(line).chain([text(&json["summary"])]).map(|line| plain(&line)).collect();
    for line in format!("OK {sample}").lines().filter(|line| !line.is_empty() && *line != "…") {
        // The summary also counts skipped checks, if there are any.
        let is_shown = printed.iter().any(|shown| shown.starts_with(&plain(line)));
        assert!(is_shown, "the page shows {line:?}, the doctor printed {printed:#?}");
    }
}

#[test]
fn the_doctor_cancels_in_every_phase_and_proves_that_blocks_are_freed() {
    let cluster = Cluster::new().start();
    let report = DoctorReport::of(&cluster, &[]);
    assert_eq!(report.code, Some(0), "{}", report.text);
    let proved = report.marked("OK", "disconnect");
    let skipped = report.marked("SKIPPED", "disconnect");
    assert_eq!(proved.len() + skipped.len(), 8, "every phase has its line: {}", report.text);
    for phase in ["queued", "prefill", "gap", "mid-stream", "unary"] {
        assert!(proved.iter().any(|line| line.contains(phase)), "{phase}: {}", report.text);
    }
    for (check, lines) in
        [("side channel", 1), ("lease", 1), ("layout", 1), ("engine", 2), ("request", 2), ("epoch", 1)]
    {
        assert_eq!(report.marked("OK", check).len(), lines, "{check}: {}", report.text);
    }
    assert!(
        report.marked("OK", "epoch")[0].contains("2 engines did not restart; the routers reach the same")
    );
    // No block stays held.
    cluster.settled(AT_ONCE * 5);
    shows_the_sample_of_the_page(&report);
    let url = format!("http://{}", cluster.url);
    let (code, text) =
        baton(&["doctor", &url, "--admin", &format!("http://{}", cluster.admin), "--no-requests"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\nhealthy: ") && text.contains("SKIPPED  disconnects"), "{text}");
}

#[test]
fn the_doctor_reads_engines_at_their_control_addresses() {
    let cluster = Cluster::new().start();
    let proxy = |target: &str| {
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        Proxy::start(any, target.parse().expect("an address")).expect("a free port")
    };
    // What arrives at `url` and at `control_url` of the prefill engine, then of the decode engine.
    let links = [&cluster.prefill[0], &cluster.decode[0]].map(|of| (proxy(&of.address), proxy(&of.address)));
    let named = links.each_ref().map(|(own, control)| {
        let (url, control) = (format!("http://{}", own.address), format!("http://{}", control.address));
        (json!({"engines": [{"url": url, "control_url": control}]}), format!("{url},{control}"))
    });
    let config = json!({
        "listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"},
        "models": [{"name": MODEL, "prefill": named[0].0, "decode": named[1].0}],
    });
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("router.yaml");
    std::fs::write(&file, config.to_string()).expect("the test's folder can be written");
    let args = ["router", "--config", &file.display().to_string()].map(str::to_owned);
    let mut router = Process::start("router", &args, folder.path());
    router.wait_ready();
    let (url, admin) = (router.fact("http"), router.fact("admin"));
    eventually(PATIENCE, "every engine is known to the router", || {
        let shown = PendingCall::new(&admin, "GET", "/engines", b"").reply().json();
        let mut engines = shown["engines"].as_array().into_iter().flatten();
        if engines.all(|engine| engine["known"] == true) { Ok(()) } else { Err(shown.to_string()) }
    });
    let (url, admin) = (format!("http://{url}"), format!("http://{admin}"));
    let report = DoctorReport::at(&url, &admin, &["--requests-per-phase", "5"]);
    assert_eq!(report.code, Some(0), "{}", report.text);
    let proved = report.marked("OK", "disconnect");
    assert!(proved.iter().any(|line| line.contains("all blocks")), "by the event logs: {}", report.text);
    for (own, control) in &links {
        let (own, control) = (own.received(), control.received());
        assert!(own.contains("GET /metrics ") && !own.contains("/debug/kv") && !own.contains("/kv/release"));
        assert!(control.contains("GET /debug/kv/events?after=latest ") && !control.contains("/v1/"));
    }
    // Without the router, the options name both addresses.
    let before = links[0].1.received().len();
    let (code, text) =
        baton(&["doctor", &url, "--no-requests", "--engine", &named[0].1, "--engine", &named[1].1]);
    assert!(code == Some(0) && text.contains("prefill, version"), "{code:?} {text}");
    let first = links.each_ref().map(|(own, control)| (own.received(), control.received()));
    assert!(first[0].1.len() > before && first.iter().all(|(own, _)| !own.contains("/debug/kv")), "{text}");
}

#[test]
fn a_doctor_with_metrics_only_proves_what_they_show() {
    // Slow enough to distinguish an abort from a response's own end.
    let cluster = Cluster::new().decode("--pace-ms 5").start();
    let report = DoctorReport::of(&cluster, &["--metrics-only"]);
    assert_eq!(report.code, Some(0), "{}", report.text);
    let proved = report.marked("OK", "disconnect");
    for phase in ["before first token", "mid-stream", "unary"] {
        assert!(proved.iter().any(|line| line.contains(phase)), "{phase}: {}", report.text);
    }
    let invisible = "reply not visible in metrics".to_owned();
    assert!(report.marked("SKIPPED", "disconnect").contains(&invisible), "{}", report.text);
    cluster.settled(AT_ONCE * 5);
    let broken = simulated(Some("never-aborts-decode"));
    let report = DoctorReport::at(&broken.url, &broken.admin, &["--metrics-only", "--free-within", "1"]);
    let failed = report.marked("FAIL", "disconnect");
    assert!(
        failed.iter().any(|line| line.contains("did not abort") || line.contains("are not freed")),
        "{}",
        report.text
    );
}

#[test]
fn the_doctor_finds_the_reply_window_of_a_stock_engine() {
    let of = |dialect, more: &[&str]| {
        let site = simulated_like(None, &[&["--dialect", dialect], &REPLY_WINDOW[..]].concat());
        DoctorReport::at(&site.url, &site.admin, &[&["--free-within", "1"], more].concat())
    };
    let is_named = |line: &String| line.ends_with("(the reply window)");
    let report = of("vllm", &[]);
    let failed = report.marked("FAIL", "disconnect");
    assert!(report.code == Some(1) && failed.len() == 1 && is_named(&failed[0]), "{}", report.text);
    // Metrics do not show the phase. They show blocks that no request holds.
    let report = of("vllm", &["--metrics-only"]);
    assert!(report.marked("FAIL", "disconnect").iter().any(is_named), "{}", report.text);
    // An abort by id frees these blocks.
    let report = of("baton", &[]);
    let proved = report.marked("OK", "disconnect");
    assert!(report.marked("FAIL", "disconnect").is_empty(), "{}", report.text);
    assert!(proved.iter().any(|line| line.starts_with("reply ")), "{}", report.text);
}

#[test]
fn a_doctor_that_observes_unused_engines_does_not_report_healthy() {
    let (answers, looked_at) = (Cluster::new().start(), Cluster::new().start());
    let (url, admin) = (format!("http://{}", answers.url), format!("http://{}", looked_at.admin));
    // The strictest options: a warning would change the verdict.
    for more in [&["--ignore", "exposure", "--strict"][..], &["--metrics-only", "--free-within", "1"]] {
        let report = DoctorReport::at(&url, &admin, more);
        assert_eq!(report.code, Some(2), "{}", report.text);
        assert!(report.marked("OK", "disconnect").is_empty(), "{}", report.text);
        assert!(report.text.contains("not examined: no disconnect was verified: "), "{}", report.text);
        assert!(
            report.text.contains("\"verdict\": \"not_proved\"")
                && report.text.contains("other engines served it")
        );
    }
    // One of two is not enough.
    let (code, text) =
        baton(&["doctor", &url, "--engine", &format!("http://{}", answers.prefill[0].address)]);
    assert!(code == Some(2) && text.contains("the decode engine is unknown"), "{code:?} {text}");
    let report = DoctorReport::at(&url, &admin, &["--no-requests"]);
    assert_eq!(report.code, Some(0), "what was looked at is well: {}", report.text);
}

#[test]
fn the_doctor_names_a_dead_engine_and_its_unclaimed_leases() {
    let mut cluster = Cluster::new().decode("").decode("").start();
    let handoff = cluster.prefill[0].open_lease(&GenerateRequest::fresh(100));
    let gone = cluster.decode[1].address.clone();
    cluster.decode[1].kill();
    eventually(PATIENCE, "the lease is called stranded", || {
        let report = DoctorReport::of(&cluster, &["--no-requests"]);
        assert_eq!(report.code, Some(1), "{}", report.text);
        let engines = report.marked("FAIL", "engine");
        assert!(engines.len() == 1 && engines[0].contains(&gone), "{}", report.text);
        match &report.marked("FAIL", "stranded")[..] {
            [one] if one.contains("of 1 leases") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(cluster.prefill[0].release(&handoff), "released");
}

#[test]
fn the_doctor_names_a_wrong_secret_and_a_mismatched_block_layout() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("it can be written");
        path.display().to_string()
    };
    let (right, wrong) = (file("right", "the cluster's own secret"), file("wrong", "some other secret text"));
    let guarded = format!("--cluster-secret-file {right}");
    let cluster = Cluster::new()
        .prefill(&guarded)
        .decode(&format!("{guarded} --block-size 24"))
        .router("cluster_secret_file", json!(Path::new(&right)))
        .start();
    let report = DoctorReport::of(&cluster, &["--no-requests", "--cluster-secret-file", &wrong]);
    assert_eq!((report.code, report.marked("FAIL", "secret").len()), (Some(1), 2), "{}", report.text);
    let report = DoctorReport::of(&cluster, &["--no-requests", "--cluster-secret-file", &right]);
    assert_eq!((report.code, report.marked("FAIL", "secret").len()), (Some(1), 0), "{}", report.text);
    let layout = report.marked("FAIL", "layout");
    assert!(layout.len() == 1 && layout[0].contains("16 and 24"), "{}", report.text);
}

#[test]
fn a_doctor_without_engines_reports_it() {
    // A port that was free a moment ago, without a listener.
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("an address").port();
    let (code, text) = baton(&["doctor", &format!("http://127.0.0.1:{port}")]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("not examined"), "{text}");
    assert_eq!(baton(&["doctor", "not a url"]).0, Some(2));
    let (code, text) = baton(&["top", "--once", "--admin", &format!("http://127.0.0.1:{port}")]);
    assert_eq!(code, Some(1), "{text}");
}

#[test]
fn a_doctor_names_an_unreachable_endpoint_as_its_only_finding() {
    let cluster = Cluster::new().start();
    // A port that was free a moment ago, without a listener.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = listener.local_addr().expect("an address");
    drop(listener);
    let admin = format!("http://{}", cluster.admin);
    for more in [&["--strict", "--ignore", "exposure"][..], &["--no-requests"]] {
        let report = DoctorReport::at(&format!("http://{dead}"), &admin, more);
        assert_eq!(report.code, Some(1), "{}", report.text);
        let verdict =
            format!("NOT healthy: the endpoint {dead} does not respond: cannot connect: Connection refused");
        assert!(report.text.contains(&verdict), "{}", report.text);
        let failed = report.checks.iter().filter(|line| line["mark"] == "FAIL").collect::<Vec<_>>();
        assert!(failed.len() == 1 && failed[0]["check"] == "endpoint", "{}", report.text);
        assert!(!report.text.contains("no endpoint responds"), "{}", report.text);
        let look_only = more == ["--no-requests"];
        // The engines accept requests, and the doctor sends one.
        assert_eq!(report.marked("OK", "lease").len(), usize::from(!look_only), "{}", report.text);
    }
    // An engine that is also the endpoint is counted once.
    let report = DoctorReport::at(
        &format!("http://{dead}"),
        &admin,
        &["--no-requests", "--engine", &format!("http://{dead}")],
    );
    assert!(report.marked("FAIL", "engine").is_empty() && report.code == Some(1), "{}", report.text);
}

#[test]
fn top_prints_a_frame_and_json_of_a_deployment_in_use() {
    let cluster = Cluster::new().decode("--pace-ms 20").start();
    let mut stream = cluster.send(&GenerateRequest::fresh(60).tokens(200).streamed()).stream();
    stream.event();
    let handoff = cluster.prefill[0].open_lease(&GenerateRequest::fresh(100));
    let admin = format!("http://{}", cluster.admin);
    let report = eventually(PATIENCE, "both are seen", || {
        let (code, text) = baton(&["top", "--json", "--once", "--admin", &admin]);
        assert_eq!(code, Some(0), "{text}");
        let report: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        let seen = report["stranded_leases"] == 1 && report["requests"]["phases"]["decode_stream"] == 1;
        if seen { Ok(report) } else { Err(text) }
    });
    assert_eq!(report["routers"][0]["admin"], cluster.admin);
    assert!(report["stranded_blocks"].as_u64() >= Some(6), "{report:#}");
    assert_eq!(report["engines"].as_array().map(Vec::len), Some(2));
    let (code, frame) = baton(&["top", "--once", "--admin", &admin]);
    assert_eq!(code, Some(0), "{frame}");
    for part in ["STRANDED", &cluster.prefill[0].address, &cluster.decode[0].address, "mid-stream"] {
        assert!(frame.contains(part), "{part}: {frame}");
    }
    assert!(!frame.contains('\u{1b}'), "a page of text has no colours");
    // Stranded blocks cannot be determined without a router.
    let (_, frame) = baton(&["top", "--once", "--engine", &format!("http://{}", cluster.prefill[0].address)]);
    assert!(frame.contains("stranded ?") && !frame.contains("STRANDED"), "{frame}");
    assert_eq!(cluster.prefill[0].release(&handoff), "released");
}
