//! Transports between engines with devices, the real NIXL, and an engine without transports.

mod device;
mod nixl;
mod standalone;
