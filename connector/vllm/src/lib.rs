//! The Rust core of the KV connector for vLLM.
//!
//! A vLLM engine process loads this library and starts one core per EngineCore, through the C functions of [`abi`]. The
//! Python half of the connector calls them from the scheduler's thread. The core has the leases of the engine's blocks,
//! its side channel, its loads from other engines, the event log and an HTTP port. It serves them on threads of its
//! own, without the interpreter's lock. It touches no object of vLLM.
//!
//! ```text
//! scheduler's thread ── JSON ──▶ abi ─▶ core ─▶ producer: leases, ended ids, aborts
//!      ▲ bits: take, pool                └────▶ consumer: holds, reads, verdicts ══ channel ══▶ other engines
//!      └── signals ◀── HTTP port, side channel, lease timer
//! ```
//!
//! A module imports the ones above it:
//!
//! | module | contents |
//! |---|---|
//! | `signals` | the bits that the Python half polls and waits for |
//! | `ids` | vLLM's internal ids, and the router's request id in them |
//! | `config` | the settings of one core, checked |
//! | `ops` | the operations of the Python half as types |
//! | `metrics` | counters, and the text of `/metrics` |
//! | `pool` | blocks by state, as the scheduler's thread last reported them |
//! | `channel` | the side channel: block ids instead of bytes |
//! | `producer` | requests, leases and aborts of this engine |
//! | `consumer` | loads from other engines: check, hold, begin, done, leave |
//! | `http` | the verbs, the state and the events for routers and tools |
//! | `assembly` | one core: its parts, operations and threads |
//! | [`abi`] | the C functions |

pub mod abi;
mod assembly;
mod channel;
mod config;
mod consumer;
mod http;
mod ids;
mod metrics;
mod ops;
mod pool;
mod producer;
mod signals;
