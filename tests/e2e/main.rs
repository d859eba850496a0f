//! End-to-end tests: router, prefill engines and decode engines as real processes on loopback. Clients use bare
//! sockets, so that a test chooses how a connection ends (FIN or RST).
//!
//! | file | subject |
//! |---|---|
//! | `../harness/` | shared code: a cluster, its snapshots, a client that can disconnect |
//! | `disconnects` | a client disconnects in every phase of a request: all blocks are freed |
//! | `caches` | the router follows the engines' caches by their KV events; a LoRA adapter is a model with blocks of its own |
//! | `early` | blocks are fetched while they are computed; a client disconnects or an engine dies meanwhile |
//! | `judge` | `baton bench disconnect` finds faults, and only faults |
//! | `recall` | the text shows that the blocks arrived; a checkpoint calls tools |
//! | `refusals` | an engine refuses, is down or dies: one clear error, nothing held |
//! | `reports` | the five source reports |
//! | `resume` | a decode engine dies during a stream: the client gets one response |
//! | `sidecar` | `baton sidecar` beside a decode engine: a client disconnects in every phase |
//! | `stale` | blocks that were reused before or during a read: never a wrong text |
//! | `storm` | many clients at once, a third of which disconnect |
//! | `endings` | the router is killed or shut down, or an engine is shut down |
//! | `bad_input` | invalid requests, and values that clients may not choose |
//! | `upgrade` | routers and engines are replaced under load: no request fails |
//! | `pages` | the commands of README and tutorials |
//! | `transports` | blocks go from device to device if both engines have one; the real NIXL |
//! | `up` | `baton up`: its banner, its supervision, its end |
//! | `vanish` | `baton bench disconnect` checks whether the router detects clients whose host vanishes |
//! | `watching` | `baton top` and `baton doctor` |

#![allow(clippy::print_stdout, reason = "--nocapture shows the measured times")]

mod bad_input;
mod caches;
mod disconnects;
mod early;
mod endings;
#[path = "../harness/mod.rs"]
mod harness;
mod judge;
mod pages;
mod recall;
mod refusals;
mod reports;
mod resume;
mod sidecar;
mod stale;
mod storm;
mod transports;
mod up;
mod upgrade;
mod vanish;
mod watching;
