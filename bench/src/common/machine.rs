//! The machine, date, commit and command of a report.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The date, as in `2026-11-22`, UTC.
pub(crate) fn today() -> String {
    let now = time::OffsetDateTime::now_utc();
    format!("{:04}-{:02}-{:02}", now.year(), u8::from(now.month()), now.day())
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Provenance of a number: date, commit, machine, driver and command.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Provenance {
    date: String,
    commit: Option<String>,
    machine: String,
    /// The driver and CUDA's version. `None` on a device without a driver.
    driver: Option<String>,
    command: String,
}

impl Provenance {
    /// Of this process, on a device with this driver.
    pub(crate) fn of(driver: Option<String>) -> Self {
        Self { date: today(), commit: commit(), machine: described(), driver, command: command() }
    }

    /// One line.
    pub(crate) fn line(&self) -> String {
        let commit = self.commit.as_deref().unwrap_or("unknown");
        let driver = self.driver.as_deref().unwrap_or("none");
        format!("{}, commit {commit}, driver {driver}, {}: {}", self.date, self.machine, self.command)
    }
}

/// The command line of this process.
pub(crate) fn command() -> String {
    typed(std::env::args())
}

/// The command as typed, without the folder of the program.
fn typed(words: impl Iterator<Item = String>) -> String {
    let plain = |word: &str| {
        !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=:./,+@%".contains(&b))
    };
    let quoted =
        |word: String| if plain(&word) { word } else { format!("'{}'", word.replace('\'', r"'\''")) };
    let mut words = words;
    let program = words.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(program).chain(words).map(quoted).collect::<Vec<_>>().join(" ")
}

/// The niceness of this process, from `/proc`. Runs at different niceness are not comparable.
pub(crate) fn nice() -> Option<i32> {
    nice_of(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// The nineteenth field, see proc(5). The second is a name in parentheses, which may contain any character.
fn nice_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(16)?.parse().ok()
}

/// Names the commit of a binary that runs outside its repository.
const COMMIT_VARIABLE: &str = "BATON_COMMIT";

/// The value of [`COMMIT_VARIABLE`], else the commit of the current repository, with a `+` if files were changed.
pub(crate) fn commit() -> Option<String> {
    std::env::var(COMMIT_VARIABLE).ok().filter(|commit| !commit.is_empty()).or_else(of_repository)
}

fn of_repository() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if changed { commit + "+" } else { commit })
}

/// Processor, number of processors and memory, from `/proc`.
pub(crate) fn described() -> String {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let (processors, memory, kernel) =
        (read("/proc/cpuinfo"), read("/proc/meminfo"), read("/proc/sys/kernel/osrelease"));
    let names = processors.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let names: Vec<_> = names.map(|(_, name)| name).collect();
    format!(
        "{} × {}, {} GiB, Linux {}",
        names.len(),
        names.first().unwrap_or(&"unknown processor"),
        kib(&memory, "MemTotal:").unwrap_or(0) >> 20,
        kernel.trim()
    )
}

/// The KiB in the line of a file in `/proc` that begins with `key`.
pub(crate) fn kib(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.trim().split(' ').next()?.parse().ok()
}

/// Resident memory of a process, given by its id or as `self`, in bytes.
pub(crate) fn resident_bytes(process: impl std::fmt::Display) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    kib(&status, "VmRSS:").map(|kib| kib << 10).ok_or_else(|| io::Error::other("no VmRSS"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_date_is_a_date() {
        let today = super::today();
        assert_eq!((today.len(), &today[4..5]), (10, "-"));
    }

    #[test]
    fn a_report_contains_its_machine_and_commit() {
        let origin = super::Provenance::of(Some("580.159, CUDA 13.0".into()));
        let json = serde_json::to_value(&origin).unwrap();
        for key in ["date", "commit", "machine", "driver", "command"] {
            assert!(json.get(key).is_some(), "{json}");
        }
        assert_eq!(json["driver"], "580.159, CUDA 13.0");
        // The name of the test binary depends on the build.
        let command = json["command"].as_str().unwrap();
        assert!(command.starts_with("baton_bench") && !command.contains("/deps/"), "{command}");
        assert!(origin.line().contains("driver 580.159, CUDA 13.0"), "{}", origin.line());
    }

    #[test]
    fn niceness_is_parsed_for_any_program_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194304 9 0 0 0 1 2 0 0 35 -15 3 0 100 0 0";
        assert_eq!(super::nice_of(stat), Some(-15));
        assert_eq!(super::nice_of("7 (a) S 1"), None);
        assert!(super::nice().is_some_and(|nice| (-20..=19).contains(&nice)));
    }

    #[test]
    fn a_command_can_be_typed_again() {
        let words = ["target/release/baton", "bench", "gpu-nixl", "--trial", "kill -9", "--json", "it's", ""];
        let typed = super::typed(words.into_iter().map(str::to_owned));
        assert_eq!(typed, r"baton bench gpu-nixl --trial 'kill -9' --json 'it'\''s' ''");
    }
}
