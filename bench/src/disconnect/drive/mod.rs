//! A run in progress: the deployment, its clients, the segments of calm and storm.

pub(crate) mod clients;
pub(crate) mod deployment;
pub(crate) mod ghosts;
pub(crate) mod local;
pub(crate) mod progress;
pub(crate) mod rate;
pub(crate) mod run;
pub(crate) mod segments;
pub(crate) mod stall;
pub(crate) mod timing;
