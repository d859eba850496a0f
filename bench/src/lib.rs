//! Measures running systems and their parts against baselines from the same run.

pub mod router;
pub mod sim_engine;
