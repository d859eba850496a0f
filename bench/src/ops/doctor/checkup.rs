//! What was looked at and what was found, for people and for machines.

use std::fmt::Write as _;

use serde_json::{Value, json};

use clap::ValueEnum;

use super::Verdict;
use crate::common::http_client::WebError;
use crate::ops::top::text::clean;

/// The checks that can warn, and so those that `--ignore` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Warning {
    /// Clients need no key
    Exposure,
    /// The latest configuration was rejected
    Reload,
    /// An engine is drained
    Standing,
    /// The router may need more file descriptors than its limit
    Descriptors,
    /// An engine's clock differs from this machine's
    Clock,
    /// Engines have different versions
    Versions,
    /// Leases ended by expiry
    Expiries,
    /// A lease cannot be released
    Lease,
    /// Leases are short
    #[value(name = "lease time", alias = "lease-time")]
    LeaseTime,
}

impl Warning {
    /// The check, as it stands in its line.
    pub(super) fn check(self) -> &'static str {
        match self {
            Self::Exposure => "exposure",
            Self::Reload => "reload",
            Self::Standing => "standing",
            Self::Descriptors => "descriptors",
            Self::Clock => "clock",
            Self::Versions => "versions",
            Self::Expiries => "expiries",
            Self::Lease => "lease",
            Self::LeaseTime => "lease time",
        }
    }
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Ok,
    /// Nothing is broken, but somebody should know.
    Warn,
    /// A warning that the operator ignores (`--ignore`).
    Meant,
    Fail,
    /// It could not be made.
    Skipped,
}

impl Mark {
    fn label(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Meant => "IGNORED",
            Self::Fail => "FAIL",
            Self::Skipped => "SKIPPED",
        }
    }
}

/// One line.
#[derive(Clone, Debug)]
struct Line {
    mark: Mark,
    /// What was checked.
    check: &'static str,
    /// Of whom; empty: of all.
    of: String,
    told: String,
}

/// The check whose lines prove something: one for each phase.
const DISCONNECT: &str = "disconnect";

/// All lines.
#[derive(Debug)]
pub(super) struct Checkup {
    lines: Vec<Line>,
    /// Somebody answered.
    seen: bool,
    /// Where clients come in, and why nobody answers there: what the verdict begins with.
    dead_endpoint: Option<String>,
    terms: Terms,
}

/// How it is judged.
#[derive(Clone, Debug, Default)]
pub(super) struct Terms {
    /// Warnings are findings.
    pub(super) strict: bool,
    /// Nothing was to be tried: what is judged is what was looked at.
    pub(super) no_requests: bool,
    /// Checks whose warnings are meant so.
    pub(super) accepted: Vec<Warning>,
}

impl Checkup {
    pub(super) fn new(terms: Terms) -> Self {
        Self { lines: Vec::new(), seen: false, dead_endpoint: None, terms }
    }

    /// Somebody answered: something can be said.
    pub(super) fn saw(&mut self) {
        self.seen = true;
    }

    pub(super) fn put(&mut self, mark: Mark, check: &'static str, of: &str, told: impl Into<String>) {
        self.lines.push(Line { mark, check, of: clean(of), told: clean(&told.into()) });
    }

    pub(super) fn ok(&mut self, check: &'static str, of: &str, told: impl Into<String>) {
        self.put(Mark::Ok, check, of, told);
    }

    pub(super) fn warn(&mut self, check: Warning, of: &str, told: impl Into<String>) {
        let meant = self.terms.accepted.contains(&check);
        self.put(if meant { Mark::Meant } else { Mark::Warn }, check.check(), of, told);
    }

    pub(super) fn fail(&mut self, check: &'static str, of: &str, told: impl Into<String>) {
        self.put(Mark::Fail, check, of, told);
    }

    /// Nobody answers where clients come in. What could not be tried for that is no fault of its own.
    pub(super) fn dead_endpoint(&mut self, of: &str, error: &WebError) {
        let told = match error {
            WebError::Unreachable(_, why) => format!("does not respond: {why}"),
            WebError::Late(_, within) => format!("does not respond within {within:?}"),
            other => other.to_string(),
        };
        self.dead_endpoint = Some(clean(&format!("the endpoint {of} {told}")));
        self.fail("endpoint", of, told);
    }

    pub(super) fn skip(&mut self, check: &'static str, of: &str, told: impl Into<String>) {
        self.put(Mark::Skipped, check, of, told);
    }

    /// Whether this check of this has failed.
    pub(super) fn has_failed(&self, check: &str, of: &str) -> bool {
        self.lines.iter().any(|line| line.mark == Mark::Fail && line.check == check && line.of == of)
    }

    /// Whether this check of anybody has failed.
    pub(super) fn has_failed_any(&self, check: &str) -> bool {
        self.lines.iter().any(|line| line.mark == Mark::Fail && line.check == check)
    }

    /// Nothing can be said of the deployment, whoever answers.
    pub(super) fn unseen(&mut self, why: &str) {
        self.seen = false;
        self.skip("disconnects", "", why);
    }

    fn count(&self, mark: Mark) -> usize {
        self.lines.iter().filter(|line| line.mark == mark).count()
    }

    /// Failures and warnings so far.
    pub(super) fn findings(&self) -> usize {
        self.count(Mark::Fail) + self.count(Mark::Warn)
    }

    /// Warnings are findings where somebody wants it so (`--strict`). What was skipped never is: it says nothing of the
    /// deployment. But nothing is healthy of which no disconnect was proved, unless `--no-requests` asks for less.
    pub(super) fn verdict(&self) -> Verdict {
        let findings = if self.terms.strict { self.findings() } else { self.count(Mark::Fail) };
        match (self.seen, findings, self.unproved()) {
            (false, ..) => Verdict::NotSeen,
            (true, 1.., _) => Verdict::Findings,
            (true, 0, Some(_)) => Verdict::NotProved,
            (true, 0, None) => Verdict::Healthy,
        }
    }

    /// Why no disconnect was proved; `None` where one was (or was seen to leave blocks behind), or none was to be.
    fn unproved(&self) -> Option<String> {
        let of = |check: &'static str| self.lines.iter().filter(move |line| line.check == check);
        if self.terms.no_requests || of(DISCONNECT).any(|line| line.mark != Mark::Skipped) {
            return None;
        }
        let phases = of(DISCONNECT).count();
        if let Some(last) = of(DISCONNECT).next_back() {
            return Some(format!("none of {phases} phases could be tested; {}: {}", last.of, last.told));
        }
        if let Some(failed) = of("request").find(|line| line.mark == Mark::Fail) {
            return Some(format!("a request without a disconnect failed: {}", failed.told));
        }
        let skipped = of("disconnects").next_back();
        Some(skipped.map_or_else(|| "none was tried".to_owned(), |line| line.told.clone()))
    }

    /// What was to be accepted, and no check has warned of: mended since, or not looked at.
    fn accepted_in_vain(&self) -> Vec<&'static str> {
        let meant =
            |name: &&str| self.lines.iter().any(|line| line.mark == Mark::Meant && line.check == *name);
        self.terms.accepted.iter().map(|warning| warning.check()).filter(|name| !meant(name)).collect()
    }

    fn summary(&self) -> String {
        let skipped = match self.count(Mark::Skipped) {
            0 => String::new(),
            count => format!(", {count} skipped"),
        };
        let plural =
            |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let (failed, warned) = (self.count(Mark::Fail), self.count(Mark::Warn));
        let well = format!("{} passed{skipped}", plural(self.count(Mark::Ok), "check"));
        let mut warnings =
            if warned > 0 { format!(", {}", plural(warned, "warning")) } else { String::new() };
        if let meant @ 1.. = self.count(Mark::Meant) {
            // A String takes whatever is written.
            let _ = write!(warnings, ", {meant} ignored");
        }
        let unproved = self.unproved().map(|why| format!("no disconnect was verified: {why}"));
        match self.verdict() {
            Verdict::NotSeen if self.lines.iter().any(|line| line.mark == Mark::Ok) => {
                format!("not examined: {well}, but no engine is known")
            }
            Verdict::NotSeen => "not examined: no endpoint responds".to_owned(),
            Verdict::Healthy if self.terms.no_requests => {
                format!("healthy: {well}{warnings}; no request was sent (--no-requests)")
            }
            Verdict::Healthy => format!("healthy: {well}{warnings}"),
            Verdict::NotProved => {
                format!("not examined: {}; {well}{warnings}", unproved.unwrap_or_default())
            }
            Verdict::Findings => {
                let (found, unproved) = match (&self.dead_endpoint, failed) {
                    (Some(endpoint), 1) => (endpoint.clone(), None),
                    (Some(endpoint), _) => {
                        (format!("{endpoint}; and {}", plural(failed - 1, "more failure")), None)
                    }
                    (None, _) => (plural(failed, "failure"), unproved),
                };
                let unproved = unproved.map_or_else(String::new, |why| format!("; {why}"));
                format!("NOT healthy: {found}{warnings}; {well}{unproved}")
            }
        }
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let check = self.lines.iter().map(|line| line.check.len()).max().unwrap_or(0);
        let of = self.lines.iter().map(|line| line.of.chars().count()).max().unwrap_or(0).min(40);
        let mut text = String::new();
        for line in &self.lines {
            // A String takes whatever is written.
            let _ = writeln!(
                text,
                "{:<7}  {:<check$}  {:<of$}  {}",
                line.mark.label(),
                line.check,
                line.of,
                line.told
            );
        }
        for unused in self.accepted_in_vain() {
            let unused = if unused.contains(' ') { format!("{unused:?}") } else { unused.to_owned() };
            let _ = writeln!(text, "\n--ignore {unused}: no such warning");
        }
        let _ = writeln!(text, "\n{}", self.summary());
        text
    }

    /// For machines.
    pub(super) fn json(&self) -> Value {
        let line = |line: &Line| json!({"mark": line.mark.label(), "check": line.check, "of": line.of, "told": line.told});
        json!({
            "verdict": match self.verdict() {
                Verdict::Healthy => "healthy",
                Verdict::Findings => "findings",
                Verdict::NotSeen => "not_seen",
                Verdict::NotProved => "not_proved",
            },
            "summary": self.summary(), "no_requests": self.terms.no_requests,
            "ok": self.count(Mark::Ok), "warnings": self.count(Mark::Warn), "ignored": self.count(Mark::Meant),
            "failures": self.count(Mark::Fail), "skipped": self.count(Mark::Skipped),
            "checks": self.lines.iter().map(line).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_verdict_is_that_of_the_worst_line() {
        let mut checkup = Checkup::new(Terms { accepted: vec![Warning::Exposure], ..Terms::default() });
        checkup.skip("a", "", "x");
        assert_eq!((checkup.verdict(), checkup.verdict().code()), (Verdict::NotSeen, 2));
        checkup.saw();
        checkup.ok(DISCONNECT, "unary", "y");
        assert_eq!((checkup.verdict(), checkup.verdict().code()), (Verdict::Healthy, 0));
        assert!(checkup.text().ends_with("\nhealthy: 1 check passed, 1 skipped\n"), "{}", checkup.text());
        checkup.warn(Warning::Clock, "", "z");
        assert_eq!(checkup.verdict().code(), 0, "a warning breaks nothing");
        checkup.terms.strict = true;
        assert_eq!(checkup.verdict().code(), 1, "where it is not to be passed over");
        assert_eq!(checkup.findings(), 1);
        checkup.lines.pop();
        checkup.warn(Warning::Exposure, "", "open");
        assert_eq!((checkup.verdict().code(), checkup.findings()), (0, 0), "what is meant so is no finding");
        assert_eq!(checkup.accepted_in_vain(), Vec::<&str>::new());
        checkup.terms.accepted.push(Warning::LeaseTime);
        assert!(checkup.text().contains("--ignore \"lease time\": no such warning"));
        assert!(
            checkup.text().contains("IGNORED") && checkup.text().contains("1 ignored"),
            "{}",
            checkup.text()
        );
        checkup.terms.strict = false;
        checkup.warn(Warning::Clock, "", "z");
        checkup.fail("d", "\u{1b}[2J", "w\n");
        assert_eq!(checkup.verdict().code(), 1);
        assert!(checkup.text().contains("1 failure, 1 warning"), "{}", checkup.text());
        assert!(!checkup.text().contains('\u{1b}'));
        assert_eq!(checkup.json()["failures"], 1);
    }

    #[test]
    fn what_was_not_to_be_tried_is_no_finding_and_the_summary_says_how_far_was_looked() {
        let mut checkup = Checkup::new(Terms { strict: true, no_requests: true, ..Terms::default() });
        checkup.saw();
        checkup.ok("endpoint", "", "answers");
        checkup.skip("disconnects", "", "--no-requests");
        assert_eq!(checkup.verdict(), Verdict::Healthy);
        let summary = checkup.summary();
        assert_eq!(summary, "healthy: 1 check passed, 1 skipped; no request was sent (--no-requests)");
        assert_eq!(checkup.json()["no_requests"], true);
        checkup.warn(Warning::Clock, "", "z");
        assert_eq!(checkup.verdict(), Verdict::Findings);
    }

    #[test]
    fn nothing_is_healthy_of_which_no_disconnect_was_proved() {
        for strict in [false, true] {
            let mut checkup = Checkup::new(Terms { strict, ..Terms::default() });
            checkup.saw();
            checkup.ok("endpoint", "", "answers");
            assert!(checkup.summary().contains("verified: none was tried"), "{}", checkup.summary());
            checkup.skip("disconnects", "", "it went elsewhere");
            assert_eq!((checkup.verdict(), checkup.verdict().code()), (Verdict::NotProved, 2));
            assert_eq!(
                checkup.summary(),
                "not examined: no disconnect was verified: it went elsewhere; 1 check passed, 1 skipped"
            );
            assert_eq!(checkup.json()["verdict"], "not_proved");
            checkup.skip(DISCONNECT, "queued", "too quick");
            checkup.skip(DISCONNECT, "unary", "too quick, too");
            let summary = checkup.summary();
            assert!(summary.contains("none of 2 phases could be tested; unary: too quick, too"), "{summary}");
            checkup.warn(Warning::Clock, "", "z");
            let expected = if strict { Verdict::Findings } else { Verdict::NotProved };
            assert_eq!(checkup.verdict(), expected, "what was found is said first");
            assert!(checkup.summary().contains("no disconnect was verified"), "{}", checkup.summary());
            checkup.ok(DISCONNECT, "gap", "freed");
            assert!(!checkup.summary().contains("verified"), "{}", checkup.summary());
            assert_eq!(checkup.verdict(), if strict { Verdict::Findings } else { Verdict::Healthy });
        }
        // One that left blocks behind is no question of proof.
        let mut checkup = Checkup::new(Terms::default());
        checkup.saw();
        checkup.fail(DISCONNECT, "gap", "still held");
        assert_eq!(checkup.verdict(), Verdict::Findings);
        assert!(!checkup.summary().contains("verified"), "{}", checkup.summary());
    }

    #[test]
    fn a_dead_endpoint_is_named_first_and_what_could_not_be_tried_for_it_is_no_reason_of_its_own() {
        let mut checkup = Checkup::new(Terms::default());
        let refused = || WebError::Unreachable("http://d:1/health".into(), "cannot connect: refused".into());
        checkup.dead_endpoint("d:1", &refused());
        assert_eq!(checkup.summary(), "not examined: no endpoint responds", "nothing else responds");
        checkup.saw();
        checkup.ok("admin", "a:1", "in effect");
        checkup.skip("request", "", "the endpoint does not respond");
        checkup.skip("disconnects", "", "the endpoint does not respond");
        let said = "NOT healthy: the endpoint d:1 does not respond: cannot connect: refused; 1 check passed, 2 skipped";
        assert_eq!((checkup.summary().as_str(), checkup.verdict().code()), (said, 1));
        assert!(checkup.text().starts_with("FAIL     endpoint     d:1  does not respond: cannot connect"));
        checkup.fail("engine", "p:1", "gone");
        let summary = checkup.summary();
        assert!(summary.contains("cannot connect: refused; and 1 more failure; 1 check passed"), "{summary}");
        let mut late = Checkup::new(Terms { no_requests: true, ..Terms::default() });
        late.saw();
        late.dead_endpoint("d:1", &WebError::Late("http://d:1/health".into(), Duration::from_secs(5)));
        assert_eq!(
            late.summary(),
            "NOT healthy: the endpoint d:1 does not respond within 5s; 0 checks passed"
        );
    }

    #[test]
    fn every_check_that_warns_is_accepted_by_the_name_in_its_line() {
        for warning in Warning::value_variants() {
            assert_eq!(Warning::from_str(warning.check(), false), Ok(*warning));
        }
        assert!(
            Warning::from_str("expsure", false).is_err() && Warning::from_str("endpoint", false).is_err()
        );
    }
}
