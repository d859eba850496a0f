//! One engine core in operation: the step loop, and the threads of one data-parallel rank.

pub mod options;
pub(crate) mod random;
pub mod rank;
pub mod speculation;
pub mod step_loop;
