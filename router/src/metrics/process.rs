//! Metrics of the process under the names of Prometheus' client libraries, read from `/proc` at each scrape.

use std::fs;

use super::page::Scrape;
use super::registry::families;

/// Ticks per second in `/proc/self/stat`: `USER_HZ`, which is 100 on all current architectures of Linux.
const TICKS: f64 = 100.0;
/// Bytes of a `kB` in `/proc/self/status`.
const KIB: f64 = 1024.0;

families! {
    counter CPU("process_cpu_seconds_total", []): "User and system time of the process.";
    gauge RESIDENT("process_resident_memory_bytes", []): "Resident memory.";
    gauge VIRTUAL("process_virtual_memory_bytes", []): "Virtual memory.";
    gauge THREADS("process_threads", []): "Threads of the process.";
    gauge OPEN_FDS("process_open_fds", []): "File descriptors in use.";
    gauge MAX_FDS("process_max_fds", []): "Limit of file descriptors of the process.";
    gauge START("process_start_time_seconds", []): "Start time of the process, in seconds since the epoch.";
}

/// Reads the available files; none on a system without `/proc`.
pub(super) fn read(scrape: &mut Scrape) {
    if let Ok(stat) = fs::read_to_string("/proc/self/stat") {
        // The process's name can contain any character and ends with the last parenthesis; the third field follows.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<f64>().ok());
        if let (Some(user), Some(system)) = (field(14), field(15)) {
            scrape.put(&CPU, &[], (user + system) / TICKS);
        }
        if let (Some(began), Some(boot)) = (field(22), boot_time()) {
            scrape.put(&START, &[], boot + began / TICKS);
        }
    }
    if let Ok(status) = fs::read_to_string("/proc/self/status") {
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<f64>().ok()
        };
        for (family, name, scale) in
            [(&RESIDENT, "VmRSS:", KIB), (&VIRTUAL, "VmSize:", KIB), (&THREADS, "Threads:", 1.0)]
        {
            if let Some(value) = value(name) {
                scrape.put(family, &[], value * scale);
            }
        }
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One descriptor is that of the directory itself.
        scrape.put(&OPEN_FDS, &[], open.count().saturating_sub(1) as f64);
    }
    if let Some(limit) = fs::read_to_string("/proc/self/limits").ok().as_deref().and_then(fd_limit) {
        scrape.put(&MAX_FDS, &[], limit);
    }
}

/// Seconds since the epoch at which the machine booted.
fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn fd_limit(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}
