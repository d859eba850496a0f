//! Simulated SGLang engines.
mod message;
mod plan;
mod rank;
mod rooms;
