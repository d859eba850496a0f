//! Transports between engines with devices, and the real NIXL.

mod device;
mod nixl;
