//! What a report says of the machine and the day it was made on.

/// The date, as in `2026-11-22`, UTC.
pub(crate) fn today() -> String {
    let now = time::OffsetDateTime::now_utc();
    format!("{:04}-{:02}-{:02}", now.year(), u8::from(now.month()), now.day())
}

/// The commit of the repository that this is run in, where it is run in one; with a `+` where it was changed.
pub(crate) fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if changed { commit + "+" } else { commit })
}

/// Processor, how many, and memory, from `/proc`.
pub(crate) fn described() -> String {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let (processors, memory, kernel) =
        (read("/proc/cpuinfo"), read("/proc/meminfo"), read("/proc/sys/kernel/osrelease"));
    let names = processors.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let names: Vec<_> = names.map(|(_, name)| name).collect();
    let kib = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse::<u64>().ok());
    format!(
        "{} × {}, {} GiB, Linux {}",
        names.len(),
        names.first().unwrap_or(&"unknown processor"),
        kib.unwrap_or(0) >> 20,
        kernel.trim()
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_date_is_a_date() {
        let today = super::today();
        assert_eq!((today.len(), &today[4..5]), (10, "-"));
    }
}
