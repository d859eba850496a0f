//! What happens in a round: chosen from the seed and the round's number, and from nothing else.

use std::fmt;
use std::time::Duration;

use crate::dice::Dice;
use crate::harness::{End, Fault, HangUp};
use crate::question::Manner;

/// How long a lease lives in these tests. Short, so that some pauses are longer.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// The clusters that rounds run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// One prefill and one decode engine, a fault proxy on every link. No process of it is ever killed, so that what
    /// leaks adds up over the whole run.
    Links,
    /// One prefill engine and two decode engines without proxies: a dead process refuses connections as it does in life.
    Crashes,
    /// As [`Self::Crashes`], with blocks that go by shared memory.
    Shared,
    /// As [`Self::Crashes`], with KV sharded over two ranks on P and on one of the decode engines.
    Ranks,
    /// As [`Self::Crashes`], with offload tiers in host memory and on disk, which survive.
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

/// Who is hit.
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

/// What is done to the target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Harm {
    /// `kill -9`; started again on the same addresses after the round's hold.
    Kill,
    /// SIGSTOP, and SIGCONT after the round's hold.
    Pause,
    /// On a link, lifted after the round's hold.
    Link(Fault),
}

impl Harm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Pause => "SIGSTOP",
            Self::Link(Fault::None) => "none",
            Self::Link(Fault::Delay(_)) => "delay",
            Self::Link(Fault::Slow { .. }) => "byte-slow",
            Self::Link(Fault::Cut(End::Fin)) => "cut (FIN)",
            Self::Link(Fault::Cut(End::Rst)) => "cut (RST)",
            Self::Link(Fault::CutAfter { .. }) => "cut in a message",
            Self::Link(Fault::HalfOpen { up: true, down: true }) => "half-open",
            Self::Link(Fault::HalfOpen { .. }) => "half-open, one way",
        }
    }
}

/// Where in the life of a request the harm is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Nobody is served.
    Idle,
    /// Waits at P.
    Queued,
    /// P computes.
    Prefill,
    /// P has lent the blocks, D does not read yet.
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

/// One client: which question, how it behaves, and how long after the others it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) question: usize,
    pub(crate) manner: Manner,
    pub(crate) after: Duration,
}

/// One round.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) number: u64,
    pub(crate) lane: Lane,
    pub(crate) target: Target,
    pub(crate) harm: Harm,
    pub(crate) phase: Phase,
    /// From the moment of the phase to the harm.
    pub(crate) aim: Duration,
    /// From the harm to its end.
    pub(crate) hold: Duration,
    pub(crate) clients: Vec<Client>,
    /// Whether the prefix caches are emptied first.
    pub(crate) forget: bool,
}

impl Round {
    pub(crate) fn new(seed: u64, number: u64, questions: usize) -> Self {
        let mut dice = Dice::new(seed, number);
        // Half of the rounds have proxies, a quarter shared memory.
        const LANES: [Lane; 16] = {
            use Lane::{Crashes, Links, Ranks, Shared, Tiers};
            [
                Links, Links, Links, Links, Links, Links, Links, Links, Shared, Shared, Shared, Crashes,
                Ranks, Ranks, Tiers, Tiers,
            ]
        };
        let lane = dice.one_of(&LANES);
        let phase = dice.one_of(&Phase::ALL);
        let (target, harm) = match lane {
            Lane::Crashes | Lane::Shared | Lane::Ranks | Lane::Tiers => {
                let harm = if dice.one_in(3) { Harm::Pause } else { Harm::Kill };
                (dice.one_of(&Target::PROCESSES), harm)
            }
            Lane::Links if dice.one_in(6) => (dice.one_of(&Target::PROCESSES), Harm::Pause),
            Lane::Links => (dice.one_of(&Target::LINKS), Harm::Link(fault(&mut dice))),
        };
        let hold = match harm {
            Harm::Kill => dice.ms(0, 400),
            // One in eight outlives the lease.
            Harm::Pause if dice.one_in(8) => LEASE + dice.ms(200, 600),
            Harm::Pause => dice.ms(30, 900),
            Harm::Link(_) if dice.one_in(12) => LEASE + dice.ms(200, 600),
            Harm::Link(_) => dice.ms(30, 1200),
        };
        let clients = (0..dice.between(2, 5)).map(|_| client(&mut dice, questions)).collect();
        let aim = dice.ms(0, 15);
        Self { number, lane, target, harm, phase, aim, hold, clients, forget: !dice.one_in(4) }
    }
}

fn client(dice: &mut Dice, questions: usize) -> Client {
    let manner = match dice.next() % 8 {
        0..3 => Manner::Waits,
        3..7 => Manner::Streams,
        _ => Manner::Leaves(dice.ms(0, 300), dice.one_of(&HangUp::BOTH)),
    };
    let question = usize::try_from(dice.between(0, questions as u64 - 1)).expect("an index");
    Client { question, manner, after: dice.ms(0, 40) }
}

fn fault(dice: &mut Dice) -> Fault {
    let end = dice.one_of(&[End::Fin, End::Rst]);
    match dice.next() % 8 {
        0 => Fault::Delay(dice.ms(5, 150)),
        1 | 2 => Fault::Slow {
            bytes: usize::try_from(dice.one_of(&[1, 7, 64, 1000, 8000])).expect("small"),
            pause: dice.ms(1, 20),
        },
        3 => Fault::Cut(end),
        // Heads and envelopes are some hundred bytes, a block is some thousand.
        4 | 5 => Fault::CutAfter {
            bytes: u32::try_from(dice.one_of(&[0, 1, 10, 150, 400, 3_000, 50_000, 300_000])).expect("small"),
            end,
        },
        6 => Fault::HalfOpen { up: true, down: true },
        _ => {
            let up = dice.one_in(2);
            Fault::HalfOpen { up, down: !up }
        }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, lane, target, harm, phase, hold, clients, .. } = self;
        let (lane, phase, clients) = (lane.name(), phase.name(), clients.len());
        write!(
            f,
            "round {number} ({lane}): {harm:?} on {} in phase {phase} for {hold:?}, {clients} clients",
            target.name()
        )
    }
}
