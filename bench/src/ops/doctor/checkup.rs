//! The checks and their results, for people and for machines.

use std::fmt::Write as _;

use serde_json::{Value, json};

use clap::ValueEnum;

use super::Verdict;
use crate::common::http_client::WebError;
use crate::ops::top::text::clean;

/// The checks that can warn, which are the values of `--ignore`.
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
    /// The name of the check in its line.
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

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckStatus {
    Ok,
    /// Nothing is broken, but an operator should know.
    Warn,
    /// A warning that the operator ignores (`--ignore`).
    Ignored,
    Fail,
    /// The check could not be made.
    Skipped,
}

impl CheckStatus {
    fn label(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Ignored => "IGNORED",
            Self::Fail => "FAIL",
            Self::Skipped => "SKIPPED",
        }
    }
}

/// The line of one check.
#[derive(Clone, Debug)]
struct CheckLine {
    mark: CheckStatus,
    /// Which check.
    check: &'static str,
    /// The component. Empty for the whole deployment.
    of: String,
    message: String,
}

/// The check whose lines verify disconnects, one for each phase.
const DISCONNECT: &str = "disconnect";

/// The lines of all checks.
#[derive(Debug)]
pub(super) struct Checkup {
    lines: Vec<CheckLine>,
    /// At least one component responded.
    reachable: bool,
    /// The client endpoint and why it does not respond. The verdict begins with this.
    dead_endpoint: Option<String>,
    terms: CheckupOptions,
}

/// How the checks are judged.
#[derive(Clone, Debug, Default)]
pub(super) struct CheckupOptions {
    /// Warnings are findings.
    pub(super) strict: bool,
    /// No requests are to be sent: only the inspection counts.
    pub(super) no_requests: bool,
    /// Checks whose warnings are ignored.
    pub(super) ignored: Vec<Warning>,
}

impl Checkup {
    pub(super) fn new(terms: CheckupOptions) -> Self {
        Self { lines: Vec::new(), reachable: false, dead_endpoint: None, terms }
    }

    /// Records that a component responded.
    pub(super) fn mark_reachable(&mut self) {
        self.reachable = true;
    }

    pub(super) fn put(
        &mut self,
        mark: CheckStatus,
        check: &'static str,
        of: &str,
        message: impl Into<String>,
    ) {
        self.lines.push(CheckLine { mark, check, of: clean(of), message: clean(&message.into()) });
    }

    pub(super) fn ok(&mut self, check: &'static str, of: &str, message: impl Into<String>) {
        self.put(CheckStatus::Ok, check, of, message);
    }

    pub(super) fn warn(&mut self, check: Warning, of: &str, message: impl Into<String>) {
        let meant = self.terms.ignored.contains(&check);
        self.put(if meant { CheckStatus::Ignored } else { CheckStatus::Warn }, check.check(), of, message);
    }

    pub(super) fn fail(&mut self, check: &'static str, of: &str, message: impl Into<String>) {
        self.put(CheckStatus::Fail, check, of, message);
    }

    /// The client endpoint does not respond. Checks that this prevents do not count as failures.
    pub(super) fn dead_endpoint(&mut self, of: &str, error: &WebError) {
        let message = match error {
            WebError::Unreachable(_, why) => format!("does not respond: {why}"),
            WebError::Late(_, within) => format!("does not respond within {within:?}"),
            other => other.to_string(),
        };
        self.dead_endpoint = Some(clean(&format!("the endpoint {of} {message}")));
        self.fail("endpoint", of, message);
    }

    pub(super) fn skip(&mut self, check: &'static str, of: &str, message: impl Into<String>) {
        self.put(CheckStatus::Skipped, check, of, message);
    }

    /// Whether this check of this component has failed.
    pub(super) fn has_failed(&self, check: &str, of: &str) -> bool {
        self.lines.iter().any(|line| line.mark == CheckStatus::Fail && line.check == check && line.of == of)
    }

    /// Whether this check of any component has failed.
    pub(super) fn has_failed_any(&self, check: &str) -> bool {
        self.lines.iter().any(|line| line.mark == CheckStatus::Fail && line.check == check)
    }

    /// Records that the deployment cannot be judged, even if components respond.
    pub(super) fn mark_unreachable(&mut self, why: &str) {
        self.reachable = false;
        self.skip("disconnects", "", why);
    }

    fn count(&self, mark: CheckStatus) -> usize {
        self.lines.iter().filter(|line| line.mark == mark).count()
    }

    /// Failures and warnings so far.
    pub(super) fn findings(&self) -> usize {
        self.count(CheckStatus::Fail) + self.count(CheckStatus::Warn)
    }

    /// Warnings are findings only with `--strict`. A skipped check never is. The result is healthy only if a
    /// disconnect was verified, unless `--no-requests` is given.
    pub(super) fn verdict(&self) -> Verdict {
        let findings = if self.terms.strict { self.findings() } else { self.count(CheckStatus::Fail) };
        match (self.reachable, findings, self.unproved_reason()) {
            (false, ..) => Verdict::NotSeen,
            (true, 1.., _) => Verdict::Findings,
            (true, 0, Some(_)) => Verdict::NotProved,
            (true, 0, None) => Verdict::Healthy,
        }
    }

    /// Why no disconnect was verified. `None` if one was verified, left blocks behind, or was not requested.
    fn unproved_reason(&self) -> Option<String> {
        let of = |check: &'static str| self.lines.iter().filter(move |line| line.check == check);
        if self.terms.no_requests || of(DISCONNECT).any(|line| line.mark != CheckStatus::Skipped) {
            return None;
        }
        let phases = of(DISCONNECT).count();
        if let Some(last) = of(DISCONNECT).next_back() {
            return Some(format!("none of {phases} phases could be tested; {}: {}", last.of, last.message));
        }
        if let Some(failed) = of("request").find(|line| line.mark == CheckStatus::Fail) {
            return Some(format!("a request without a disconnect failed: {}", failed.message));
        }
        let skipped = of("disconnects").next_back();
        Some(skipped.map_or_else(|| "none was tried".to_owned(), |line| line.message.clone()))
    }

    /// Ignored checks that did not warn.
    fn unused_ignores(&self) -> Vec<&'static str> {
        let meant = |name: &&str| {
            self.lines.iter().any(|line| line.mark == CheckStatus::Ignored && line.check == *name)
        };
        self.terms.ignored.iter().map(|warning| warning.check()).filter(|name| !meant(name)).collect()
    }

    fn summary(&self) -> String {
        let skipped = match self.count(CheckStatus::Skipped) {
            0 => String::new(),
            count => format!(", {count} skipped"),
        };
        let plural =
            |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let (failed, warned) = (self.count(CheckStatus::Fail), self.count(CheckStatus::Warn));
        let well = format!("{} passed{skipped}", plural(self.count(CheckStatus::Ok), "check"));
        let mut warnings =
            if warned > 0 { format!(", {}", plural(warned, "warning")) } else { String::new() };
        if let meant @ 1.. = self.count(CheckStatus::Ignored) {
            // Writing to a string cannot fail.
            let _ = write!(warnings, ", {meant} ignored");
        }
        let unproved = self.unproved_reason().map(|why| format!("no disconnect was verified: {why}"));
        match self.verdict() {
            Verdict::NotSeen if self.lines.iter().any(|line| line.mark == CheckStatus::Ok) => {
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
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{:<7}  {:<check$}  {:<of$}  {}",
                line.mark.label(),
                line.check,
                line.of,
                line.message
            );
        }
        for unused in self.unused_ignores() {
            let unused = if unused.contains(' ') { format!("{unused:?}") } else { unused.to_owned() };
            let _ = writeln!(text, "\n--ignore {unused}: no such warning");
        }
        let _ = writeln!(text, "\n{}", self.summary());
        text
    }

    /// For machines.
    pub(super) fn json(&self) -> Value {
        let line = |line: &CheckLine| json!({"mark": line.mark.label(), "check": line.check, "of": line.of, "told": line.message});
        json!({
            "verdict": match self.verdict() {
                Verdict::Healthy => "healthy",
                Verdict::Findings => "findings",
                Verdict::NotSeen => "not_seen",
                Verdict::NotProved => "not_proved",
            },
            "summary": self.summary(), "no_requests": self.terms.no_requests,
            "ok": self.count(CheckStatus::Ok), "warnings": self.count(CheckStatus::Warn), "ignored": self.count(CheckStatus::Ignored),
            "failures": self.count(CheckStatus::Fail), "skipped": self.count(CheckStatus::Skipped),
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
        let mut checkup =
            Checkup::new(CheckupOptions { ignored: vec![Warning::Exposure], ..CheckupOptions::default() });
        checkup.skip("a", "", "x");
        assert_eq!((checkup.verdict(), checkup.verdict().code()), (Verdict::NotSeen, 2));
        checkup.mark_reachable();
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
        assert_eq!(checkup.unused_ignores(), Vec::<&str>::new());
        checkup.terms.ignored.push(Warning::LeaseTime);
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
    fn a_skipped_check_is_no_finding_and_the_summary_lists_it() {
        let mut checkup =
            Checkup::new(CheckupOptions { strict: true, no_requests: true, ..CheckupOptions::default() });
        checkup.mark_reachable();
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
    fn without_a_proved_disconnect_the_verdict_is_not_healthy() {
        for strict in [false, true] {
            let mut checkup = Checkup::new(CheckupOptions { strict, ..CheckupOptions::default() });
            checkup.mark_reachable();
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
            assert_eq!(checkup.verdict(), expected, "findings come first");
            assert!(checkup.summary().contains("no disconnect was verified"), "{}", checkup.summary());
            checkup.ok(DISCONNECT, "gap", "freed");
            assert!(!checkup.summary().contains("verified"), "{}", checkup.summary());
            assert_eq!(checkup.verdict(), if strict { Verdict::Findings } else { Verdict::Healthy });
        }
        // A disconnect that left blocks behind was verified.
        let mut checkup = Checkup::new(CheckupOptions::default());
        checkup.mark_reachable();
        checkup.fail(DISCONNECT, "gap", "still held");
        assert_eq!(checkup.verdict(), Verdict::Findings);
        assert!(!checkup.summary().contains("verified"), "{}", checkup.summary());
    }

    #[test]
    fn a_dead_endpoint_is_the_first_finding_and_skipped_checks_are_none() {
        let mut checkup = Checkup::new(CheckupOptions::default());
        let refused = || WebError::Unreachable("http://d:1/health".into(), "cannot connect: refused".into());
        checkup.dead_endpoint("d:1", &refused());
        assert_eq!(checkup.summary(), "not examined: no endpoint responds", "nothing else responds");
        checkup.mark_reachable();
        checkup.ok("admin", "a:1", "in effect");
        checkup.skip("request", "", "the endpoint does not respond");
        checkup.skip("disconnects", "", "the endpoint does not respond");
        let summary = "NOT healthy: the endpoint d:1 does not respond: cannot connect: refused; 1 check passed, 2 skipped";
        assert_eq!((checkup.summary().as_str(), checkup.verdict().code()), (summary, 1));
        assert!(checkup.text().starts_with("FAIL     endpoint     d:1  does not respond: cannot connect"));
        checkup.fail("engine", "p:1", "gone");
        let summary = checkup.summary();
        assert!(summary.contains("cannot connect: refused; and 1 more failure; 1 check passed"), "{summary}");
        let mut late = Checkup::new(CheckupOptions { no_requests: true, ..CheckupOptions::default() });
        late.mark_reachable();
        late.dead_endpoint("d:1", &WebError::Late("http://d:1/health".into(), Duration::from_secs(5)));
        assert_eq!(
            late.summary(),
            "NOT healthy: the endpoint d:1 does not respond within 5s; 0 checks passed"
        );
    }

    #[test]
    fn every_warning_is_ignorable_by_its_check_name() {
        for warning in Warning::value_variants() {
            assert_eq!(Warning::from_str(warning.check(), false), Ok(*warning));
        }
        assert!(
            Warning::from_str("expsure", false).is_err() && Warning::from_str("endpoint", false).is_err()
        );
    }
}
