//! Shared by all benchmarks: the machine, processes, statistics, reports, an HTTP client.

pub(crate) mod http_client;
pub(crate) mod machine;
pub(crate) mod processes;
pub(crate) mod report;
pub(crate) mod stats;
#[cfg(test)]
pub(crate) mod test_server;
