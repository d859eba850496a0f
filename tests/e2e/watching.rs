//! `baton top` and `baton doctor` on real deployments: they report healthy parts as healthy and name faults.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, PATIENCE, eventually};
use crate::judge::simulated;

/// Runs `baton` with these arguments. Returns its exit code and its output.
fn baton(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(args).output().expect("it can be started");
    let said = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), format!("{}{said}", String::from_utf8_lossy(&output.stdout)))
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
        let told: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        Self { code, checks: told["checks"].as_array().expect("a list").clone(), text }
    }

    /// The lines of a check with this mark.
    fn marked(&self, mark: &str, check: &str) -> Vec<String> {
        let is = |line: &&Value| line["mark"] == mark && line["check"] == check;
        self.checks.iter().filter(is).map(|line| format!("{} {}", line["of"], line["told"])).collect()
    }
}

/// Checks that a run prints every line of the sample in `docs/how-to/watch.md`, with any numbers.
fn shows_the_sample_of_the_page(told: &DoctorReport) {
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
    let json: Value = serde_json::from_str(&told.text).expect("it was read before");
    let printed: Vec<_> =
        told.checks.iter().map(line).chain([text(&json["summary"])]).map(|line| plain(&line)).collect();
    for line in format!("OK {sample}").lines().filter(|line| !line.is_empty() && *line != "…") {
        // The summary also counts skipped checks, if there are any.
        let is_shown = printed.iter().any(|shown| shown.starts_with(&plain(line)));
        assert!(is_shown, "the page shows {line:?}, the doctor printed {printed:#?}");
    }
}

#[test]
fn the_doctor_leaves_a_healthy_deployment_in_every_phase_and_proves_that_the_blocks_came_back() {
    let cluster = Cluster::new().start();
    let told = DoctorReport::of(&cluster, &[]);
    assert_eq!(told.code, Some(0), "{}", told.text);
    let proved = told.marked("OK", "disconnect");
    let skipped = told.marked("SKIPPED", "disconnect");
    assert_eq!(proved.len() + skipped.len(), 7, "every phase has its line: {}", told.text);
    for phase in ["queued", "prefill", "gap", "mid-stream", "unary"] {
        assert!(proved.iter().any(|line| line.contains(phase)), "{phase}: {}", told.text);
    }
    for (check, lines) in
        [("side channel", 1), ("lease", 1), ("layout", 1), ("engine", 2), ("request", 2), ("epoch", 1)]
    {
        assert_eq!(told.marked("OK", check).len(), lines, "{check}: {}", told.text);
    }
    assert!(told.marked("OK", "epoch")[0].contains("2 engines did not restart; the routers reach the same"));
    // No block stays held.
    cluster.settled(AT_ONCE * 5);
    shows_the_sample_of_the_page(&told);
    let url = format!("http://{}", cluster.url);
    let (code, text) =
        baton(&["doctor", &url, "--admin", &format!("http://{}", cluster.admin), "--no-requests"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\nhealthy: ") && text.contains("SKIPPED  disconnects"), "{text}");
}

#[test]
fn the_doctor_that_sees_metrics_only_proves_what_they_show() {
    // Slow enough to distinguish an abort from a response's own end.
    let cluster = Cluster::new().decode("--pace-ms 5").start();
    let told = DoctorReport::of(&cluster, &["--metrics-only"]);
    assert_eq!(told.code, Some(0), "{}", told.text);
    let proved = told.marked("OK", "disconnect");
    for phase in ["before first token", "mid-stream", "unary"] {
        assert!(proved.iter().any(|line| line.contains(phase)), "{phase}: {}", told.text);
    }
    cluster.settled(AT_ONCE * 5);
    let broken = simulated(Some("never-aborts-decode"));
    let told = DoctorReport::at(&broken.url, &broken.admin, &["--metrics-only", "--free-within", "1"]);
    let failed = told.marked("FAIL", "disconnect");
    assert!(
        failed.iter().any(|line| line.contains("did not abort") || line.contains("are not freed")),
        "{}",
        told.text
    );
}

#[test]
fn the_doctor_that_looks_at_other_engines_than_those_that_answer_does_not_call_them_healthy() {
    let (answers, looked_at) = (Cluster::new().start(), Cluster::new().start());
    let (url, admin) = (format!("http://{}", answers.url), format!("http://{}", looked_at.admin));
    // The strictest options: a warning would change the verdict.
    for more in [&["--ignore", "exposure", "--strict"][..], &["--metrics-only", "--free-within", "1"]] {
        let told = DoctorReport::at(&url, &admin, more);
        assert_eq!(told.code, Some(2), "{}", told.text);
        assert!(told.marked("OK", "disconnect").is_empty(), "{}", told.text);
        assert!(told.text.contains("not examined: no disconnect was verified: "), "{}", told.text);
        assert!(
            told.text.contains("\"verdict\": \"not_proved\"")
                && told.text.contains("other engines served it")
        );
    }
    // One of two is not enough.
    let (code, text) =
        baton(&["doctor", &url, "--engine", &format!("http://{}", answers.prefill[0].address)]);
    assert!(code == Some(2) && text.contains("the decode engine is unknown"), "{code:?} {text}");
    let told = DoctorReport::at(&url, &admin, &["--no-requests"]);
    assert_eq!(told.code, Some(0), "what was looked at is well: {}", told.text);
}

#[test]
fn the_doctor_names_an_engine_that_is_gone_and_leases_that_nobody_will_fetch() {
    let mut cluster = Cluster::new().decode("").decode("").start();
    let handoff = cluster.prefill[0].lends(&GenerateRequest::fresh(100));
    let gone = cluster.decode[1].address.clone();
    cluster.decode[1].kill();
    eventually(PATIENCE, "the lease is called stranded", || {
        let told = DoctorReport::of(&cluster, &["--no-requests"]);
        assert_eq!(told.code, Some(1), "{}", told.text);
        let engines = told.marked("FAIL", "engine");
        assert!(engines.len() == 1 && engines[0].contains(&gone), "{}", told.text);
        match &told.marked("FAIL", "stranded")[..] {
            [one] if one.contains("of 1 leases") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(cluster.prefill[0].release(&handoff), "released");
}

#[test]
fn the_doctor_names_a_wrong_secret_and_blocks_that_do_not_fit() {
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
    let told = DoctorReport::of(&cluster, &["--no-requests", "--cluster-secret-file", &wrong]);
    assert_eq!((told.code, told.marked("FAIL", "secret").len()), (Some(1), 2), "{}", told.text);
    let told = DoctorReport::of(&cluster, &["--no-requests", "--cluster-secret-file", &right]);
    assert_eq!((told.code, told.marked("FAIL", "secret").len()), (Some(1), 0), "{}", told.text);
    let layout = told.marked("FAIL", "layout");
    assert!(layout.len() == 1 && layout[0].contains("16 and 24"), "{}", told.text);
}

#[test]
fn the_doctor_that_sees_nobody_says_so() {
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
fn the_doctor_that_meets_a_dead_door_says_which_and_finds_no_fault_besides() {
    let cluster = Cluster::new().start();
    // A port that was free a moment ago, without a listener.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = listener.local_addr().expect("an address");
    drop(listener);
    let admin = format!("http://{}", cluster.admin);
    for more in [&["--strict", "--ignore", "exposure"][..], &["--no-requests"]] {
        let told = DoctorReport::at(&format!("http://{dead}"), &admin, more);
        assert_eq!(told.code, Some(1), "{}", told.text);
        let verdict =
            format!("NOT healthy: the endpoint {dead} does not respond: cannot connect: Connection refused");
        assert!(told.text.contains(&verdict), "{}", told.text);
        let failed = told.checks.iter().filter(|line| line["mark"] == "FAIL").collect::<Vec<_>>();
        assert!(failed.len() == 1 && failed[0]["check"] == "endpoint", "{}", told.text);
        assert!(!told.text.contains("no endpoint responds"), "{}", told.text);
        let look_only = more == ["--no-requests"];
        // The engines accept requests, and the doctor sends one.
        assert_eq!(told.marked("OK", "lease").len(), usize::from(!look_only), "{}", told.text);
    }
    // An engine that is also the endpoint is counted once.
    let told = DoctorReport::at(
        &format!("http://{dead}"),
        &admin,
        &["--no-requests", "--engine", &format!("http://{dead}")],
    );
    assert!(told.marked("FAIL", "engine").is_empty() && told.code == Some(1), "{}", told.text);
}

#[test]
fn top_prints_a_frame_and_json_of_a_deployment_in_use() {
    let cluster = Cluster::new().decode("--pace-ms 20").start();
    let mut stream = cluster.send(&GenerateRequest::fresh(60).tokens(200).streamed()).stream();
    stream.event();
    let handoff = cluster.prefill[0].lends(&GenerateRequest::fresh(100));
    let admin = format!("http://{}", cluster.admin);
    let told = eventually(PATIENCE, "both are seen", || {
        let (code, text) = baton(&["top", "--json", "--once", "--admin", &admin]);
        assert_eq!(code, Some(0), "{text}");
        let told: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        let seen = told["stranded_leases"] == 1 && told["requests"]["phases"]["decode_stream"] == 1;
        if seen { Ok(told) } else { Err(text) }
    });
    assert_eq!(told["routers"][0]["admin"], cluster.admin);
    assert!(told["stranded_blocks"].as_u64() >= Some(6), "{told:#}");
    assert_eq!(told["engines"].as_array().map(Vec::len), Some(2));
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
