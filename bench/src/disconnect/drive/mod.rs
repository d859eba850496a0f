//! A run in progress: the deployment, its clients, the segments of calm and storm.

pub(crate) mod call;
pub(crate) mod deployment;
pub(crate) mod driver;
pub(crate) mod local;
pub(crate) mod phase_times;
pub(crate) mod progress;
pub(crate) mod rate;
pub(crate) mod run;
pub(crate) mod segments;
pub(crate) mod stall;
pub(crate) mod vanished_clients;
