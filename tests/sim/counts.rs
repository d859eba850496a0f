//! Counts of a run, or of many: injected faults by kind, and outcomes of requests.

macro_rules! counts {
    ($($name:ident: $what:literal,)*) => {
        #[derive(Clone, Debug, Default)]
        pub struct Counts { $(pub $name: u64,)* }

        impl Counts {
            pub fn add(&mut self, other: &Self) { $(self.$name += other.$name;)* }

            pub fn lines(&self) -> Vec<(&'static str, u64)> { vec![$(($what, self.$name),)*] }
        }
    };
}

counts! {
    client_cancelled: "fault: client leaves",
    client_silent: "fault: client goes silent",
    crash_prefill: "fault: crash of P",
    crash_decode: "fault: crash of D",
    crash_host: "fault: crash without a word (host)",
    crash_router: "fault: crash of a router",
    paused: "fault: pause (SIGSTOP)",
    drained: "fault: shutdown while serving",
    partitioned: "fault: partition, both ways",
    partitioned_one_way: "fault: partition, one way",
    lost: "fault: message lost",
    delayed: "fault: message delayed",
    reordered: "fault: message overtaken on another connection",
    duplicated: "fault: message duplicated",
    drifting: "fault: clock drift",
    slow_reads: "fault: slow reader",
    truncated: "fault: truncated transfer",
    corrupted: "fault: corrupted transfer, noticed by the transport",
    device: "fault: device failure",
    refused: "fault: engine refuses",
    duplicate_id: "fault: duplicate request id",
    reload: "fault: engine taken out of rotation in flight",
    cache_reset: "fault: prefix cache reset",
    disk_full: "fault: disk tier full",
    disk_error: "fault: disk tier error",
    disk_corrupt: "fault: damaged file, noticed by its checksum",
    settled_in_step: "seen: lease ended during a step",
    preempted: "seen: out of blocks, preempted",
    queue_full: "seen: queue full",
    timed_out: "seen: sequences ended at their deadline",
    completed: "seen: requests completed",
    failed: "seen: requests failed",
    recomputed: "seen: handoffs recomputed",
    load_failed: "seen: handoffs failed by policy",
    landed: "seen: reads landed",
    passed: "seen: parts of steps behind released blocks",
    stored: "seen: blocks stored in a tier",
    loaded: "seen: blocks loaded from a tier",
    gone: "seen: verdicts gone",
    early_leases: "seen: leases opened before their prefill was done",
    unready: "seen: reads that waited for a prefill",
    fetched: "seen: leases fetched",
    released: "seen: leases released",
    expired: "seen: leases expired",
    late_handles: "seen: handles that came late and were released",
    second_decode: "seen: same handoff, another D",
    ignored: "seen: stale or repeated events ignored",
    failed_legs: "fault: leg fails at its engine",
    pairs: "seen: pairs sent",
    second_pairs: "seen: pairs after a failed one",
    kept_pages: "seen: aborts of D before the write into its pages",
    freed_by_write: "seen: pages of a given-up request freed by the write",
    engine_timeouts: "seen: halves of pairs ended by an engine's timeout",
    unwritten: "seen: pages of D left by a fault of a push",
}
