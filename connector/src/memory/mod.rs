//! The memory of a KV pool: its layout, its region, and the slices of transfers between different layouts.

pub mod layout;
pub mod region;
pub mod slice;
