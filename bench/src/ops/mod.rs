//! Tools for operators: `baton top` and `baton doctor`.

pub mod doctor;
pub mod top;
