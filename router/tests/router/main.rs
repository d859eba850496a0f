//! The router against scripted engines, over real sockets.

mod bad_input;
mod client;
mod config;
mod disconnect;
mod engine;
mod failures;
mod load;
mod main_path;
mod system;
