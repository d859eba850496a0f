//! The events of a round, chosen only from the seed and the round's number.

use std::fmt;
use std::time::Duration;

use crate::harness::{CloseKind, HangUp, LinkFault};
use crate::prompt::ClientBehaviour;
use crate::rng::FaultRng;

/// Duration of a lease in these tests. Short, so that some pauses are longer.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// The clusters that rounds run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// One prefill and one decode engine, with a fault proxy on every link. No process is killed, so that leaks add up
    /// over the whole run.
    Links,
    /// One prefill engine and two decode engines without proxies: a dead process refuses connections.
    Crashes,
    /// As [`Self::Crashes`], with blocks in shared memory.
    Shared,
    /// As [`Self::Crashes`], with KV sharded over two ranks on P and on one of the decode engines.
    Ranks,
    /// As [`Self::Crashes`], with offload tiers in host memory and on disk. The disk tier survives a restart.
    Tiers,
}

impl Lane {
    pub(crate) const ALL: [Self; 5] = [Self::Links, Self::Crashes, Self::Shared, Self::Ranks, Self::Tiers];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Links => "links",
            Self::Crashes => "crashes",
            Self::Shared => "shared memory",
            Self::Ranks => "ranks",
            Self::Tiers => "tiers",
        }
    }
}

/// The target of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Target {
    Router,
    Prefill,
    /// The first decode engine.
    Decode,
    ClientRouter,
    RouterPrefill,
    RouterDecode,
    SideChannel,
}

impl Target {
    const PROCESSES: [Self; 3] = [Self::Router, Self::Prefill, Self::Decode];
    const LINKS: [Self; 4] = [Self::ClientRouter, Self::RouterPrefill, Self::RouterDecode, Self::SideChannel];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Prefill => "P",
            Self::Decode => "D",
            Self::ClientRouter => "client-router",
            Self::RouterPrefill => "router-P",
            Self::RouterDecode => "router-D",
            Self::SideChannel => "D-P",
        }
    }
}

/// The fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Injection {
    /// `kill -9`. The process restarts with the same addresses after the round's hold.
    Kill,
    /// SIGSTOP, and SIGCONT after the round's hold.
    Pause,
    /// On a link, lifted after the round's hold.
    Link(LinkFault),
}

impl Injection {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Pause => "SIGSTOP",
            Self::Link(LinkFault::None) => "none",
            Self::Link(LinkFault::Delay(_)) => "delay",
            Self::Link(LinkFault::Slow { .. }) => "byte-slow",
            Self::Link(LinkFault::Cut(CloseKind::Fin)) => "cut (FIN)",
            Self::Link(LinkFault::Cut(CloseKind::Rst)) => "cut (RST)",
            Self::Link(LinkFault::CutAfter { .. }) => "cut in a message",
            Self::Link(LinkFault::HalfOpen { up: true, down: true }) => "half-open",
            Self::Link(LinkFault::HalfOpen { .. }) => "half-open, one way",
        }
    }
}

/// The phase of a request in which the fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// No request is served.
    Idle,
    /// A request waits at P.
    Queued,
    /// P computes.
    Prefill,
    /// P has leased the blocks, and D does not read yet.
    Lent,
    /// D reads.
    Fetch,
    /// D decodes.
    Decode,
}

impl Phase {
    pub(crate) const ALL: [Self; 6] =
        [Self::Idle, Self::Queued, Self::Prefill, Self::Lent, Self::Fetch, Self::Decode];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Queued => "queued",
            Self::Prefill => "prefill",
            Self::Lent => "lent",
            Self::Fetch => "fetch",
            Self::Decode => "decode",
        }
    }
}

/// One client: its question, its behaviour, and its delay after the first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) question: usize,
    pub(crate) manner: ClientBehaviour,
    pub(crate) after: Duration,
}

/// One round.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) number: u64,
    pub(crate) lane: Lane,
    pub(crate) target: Target,
    pub(crate) injection: Injection,
    pub(crate) phase: Phase,
    /// From the beginning of the phase to the fault.
    pub(crate) aim: Duration,
    /// From the fault to its end.
    pub(crate) hold: Duration,
    pub(crate) clients: Vec<Client>,
    /// Whether the prefix caches are reset first.
    pub(crate) forget: bool,
}

impl Round {
    pub(crate) fn new(seed: u64, number: u64, questions: usize) -> Self {
        let mut rng = FaultRng::new(seed, number);
        // Half of the rounds have proxies, a quarter shared memory.
        const LANES: [Lane; 16] = {
            use Lane::{Crashes, Links, Ranks, Shared, Tiers};
            [
                Links, Links, Links, Links, Links, Links, Links, Links, Shared, Shared, Shared, Crashes,
                Ranks, Ranks, Tiers, Tiers,
            ]
        };
        let lane = rng.one_of(&LANES);
        let phase = rng.one_of(&Phase::ALL);
        let (target, injection) = match lane {
            Lane::Crashes | Lane::Shared | Lane::Ranks | Lane::Tiers => {
                let injection = if rng.one_in(3) { Injection::Pause } else { Injection::Kill };
                (rng.one_of(&Target::PROCESSES), injection)
            }
            Lane::Links if rng.one_in(6) => (rng.one_of(&Target::PROCESSES), Injection::Pause),
            Lane::Links => (rng.one_of(&Target::LINKS), Injection::Link(fault(&mut rng))),
        };
        let hold = match injection {
            Injection::Kill => rng.ms(0, 400),
            // One pause in eight is longer than the lease.
            Injection::Pause if rng.one_in(8) => LEASE + rng.ms(200, 600),
            Injection::Pause => rng.ms(30, 900),
            Injection::Link(_) if rng.one_in(12) => LEASE + rng.ms(200, 600),
            Injection::Link(_) => rng.ms(30, 1200),
        };
        let clients = (0..rng.between(2, 5)).map(|_| client(&mut rng, questions)).collect();
        let aim = rng.ms(0, 15);
        Self { number, lane, target, injection, phase, aim, hold, clients, forget: !rng.one_in(4) }
    }
}

fn client(rng: &mut FaultRng, questions: usize) -> Client {
    let manner = match rng.next() % 8 {
        0..3 => ClientBehaviour::Waits,
        3..7 => ClientBehaviour::Streams,
        _ => ClientBehaviour::Leaves(rng.ms(0, 300), rng.one_of(&HangUp::BOTH)),
    };
    let question = usize::try_from(rng.between(0, questions as u64 - 1)).expect("an index");
    Client { question, manner, after: rng.ms(0, 40) }
}

fn fault(rng: &mut FaultRng) -> LinkFault {
    let end = rng.one_of(&[CloseKind::Fin, CloseKind::Rst]);
    match rng.next() % 8 {
        0 => LinkFault::Delay(rng.ms(5, 150)),
        1 | 2 => LinkFault::Slow {
            bytes: usize::try_from(rng.one_of(&[1, 7, 64, 1000, 8000])).expect("small"),
            pause: rng.ms(1, 20),
        },
        3 => LinkFault::Cut(end),
        // Heads and envelopes have some hundred bytes, a block some thousand.
        4 | 5 => LinkFault::CutAfter {
            bytes: u32::try_from(rng.one_of(&[0, 1, 10, 150, 400, 3_000, 50_000, 300_000])).expect("small"),
            end,
        },
        6 => LinkFault::HalfOpen { up: true, down: true },
        _ => {
            let up = rng.one_in(2);
            LinkFault::HalfOpen { up, down: !up }
        }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, lane, target, injection, phase, hold, clients, .. } = self;
        let (lane, phase, clients) = (lane.name(), phase.name(), clients.len());
        write!(
            f,
            "round {number} ({lane}): {injection:?} on {} in phase {phase} for {hold:?}, {clients} clients",
            target.name()
        )
    }
}
