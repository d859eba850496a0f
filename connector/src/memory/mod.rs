//! The memory of a KV pool: its layout, its region, and which bytes go where.

pub mod layout;
pub mod region;
pub mod slice;
