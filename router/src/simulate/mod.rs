//! Entry points for the fleet simulation and for fuzzing. Not a public interface.

#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod sim_router;
