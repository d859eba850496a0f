//! End to end: router, prefill engines and decode engines as real processes on loopback, and clients on bare
//! sockets, so that how a connection ends (FIN or RST) is the test's choice.
//!
//! | file | what it shows |
//! |---|---|
//! | `../harness/` | the vocabulary: a cluster, its books, a client that can hang up |
//! | `disconnects` | a client leaves, at every point of a request's life: the blocks come back |
//! | `device` | blocks go from device to device where both engines have one |
//! | `early` | blocks are fetched while they are computed, and somebody leaves or dies meanwhile |
//! | `judge` | `baton bench disconnect`: finds what is broken, and only that |
//! | `recall` | the text shows that the blocks arrived |
//! | `refusals` | an engine refuses, is down or dies: one clear error, nothing held |
//! | `reports` | the five reports from which this project learned |
//! | `resume` | a decode engine dies in the middle of a stream: the client sees one answer |
//! | `stale` | blocks that were reused before or during a read: never a wrong text |
//! | `storm` | many clients at once, every third of which leaves |
//! | `endings` | the router is killed, or told to stop; so is an engine |
//! | `bad_input` | what no engine should hear of, and what clients may not choose |
//! | `upgrade` | routers and engines are replaced under load: no request fails |
//! | `pages` | the commands of README and tutorial |
//! | `up` | `baton up`: its banner, its supervision, its end |
//! | `vanish` | `baton bench disconnect` finds whether clients are noticed whose host is gone without a word |
//! | `watching` | `baton top` and `baton doctor` |

#![allow(clippy::print_stdout)] // what a test measured is shown with --nocapture

mod bad_input;
mod device;
mod disconnects;
mod early;
mod endings;
#[path = "../harness/mod.rs"]
mod harness;
mod judge;
mod nixl;
mod pages;
mod recall;
mod refusals;
mod reports;
mod resume;
mod stale;
mod storm;
mod up;
mod upgrade;
mod vanish;
mod watching;
