//! The parameters of a seed: protocol, engines, clients and faults, and the planted bugs.

use super::Node;
use crate::rng::SimRng;
use crate::setup::SECOND;
use crate::sim::Micros;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Sglang,
    Push,
}

#[derive(Clone, Debug)]
pub struct PairClient {
    pub arrives: Micros,
    pub leaves_after: Option<Micros>,
    pub tokens: u32,
    /// Pages of the prompt and the response.
    pub pages: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum PairFault {
    /// A process ends, and another one starts at its address after this time.
    Crash(Node, Micros),
    Restart(Node),
    Pause(Node, Micros),
    /// A leg that waits or computes fails at its engine.
    Fail(Node),
}

/// A planted bug that the invariants must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairMutation {
    None,
    /// P's half fails, and the router does not end D's.
    FailedPrefillLeavesDecode,
    /// D's half fails, and the router does not end P's.
    FailedDecodeLeavesPrefill,
    /// All pairs of a request have one room.
    RoomIsReused,
    /// D gives pages away before the write into them (SGLang #32564).
    PagesGivenAwayAtOnce,
    /// The `rid` of a pair is the beginning of another pair's.
    RidIsAPrefix,
    /// vLLM push: the prefill of a pair that is given up is aborted, although D waits for its write.
    PrefillOfAPushIsAborted,
    /// vLLM push: the router waits for a decode engine for longer than P's lease.
    PushWaitsWithoutEnd,
}

impl PairMutation {
    pub const ALL: [Self; 7] = [
        Self::FailedPrefillLeavesDecode,
        Self::FailedDecodeLeavesPrefill,
        Self::RoomIsReused,
        Self::PagesGivenAwayAtOnce,
        Self::RidIsAPrefix,
        Self::PrefillOfAPushIsAborted,
        Self::PushWaitsWithoutEnd,
    ];

    /// The violations that show this bug. No other violation counts.
    pub fn shows_as(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::FailedPrefillLeavesDecode | Self::FailedDecodeLeavesPrefill => &["needs its timeout"],
            Self::RoomIsReused => &["lands in pages that belong to"],
            Self::PagesGivenAwayAtOnce => &["lands in pages that"],
            Self::RidIsAPrefix => &["which was not given up"],
            Self::PrefillOfAPushIsAborted | Self::PushWaitsWithoutEnd => &["I5: D"],
        }
    }

    fn protocol(self) -> Option<Protocol> {
        match self {
            Self::None => None,
            Self::PrefillOfAPushIsAborted | Self::PushWaitsWithoutEnd => Some(Protocol::Push),
            _ => Some(Protocol::Sglang),
        }
    }
}

#[derive(Clone, Debug)]
pub struct PairSetup {
    pub protocol: Protocol,
    /// The only faults are clients that leave and engines that refuse.
    pub calm: bool,
    pub calm_from: Micros,
    pub prefills: usize,
    /// Pages of each decode engine.
    pub pages: Vec<usize>,
    pub clients: Vec<PairClient>,
    pub faults: Vec<(Micros, PairFault)>,
    /// Pairs of one request.
    pub attempts: usize,
    pub latency: (Micros, Micros),
    /// One in this many messages is lost, or delayed; 0 is never.
    pub loss_one_in: u64,
    pub delay_one_in: u64,
    /// An engine refuses one in this many legs, because of its content or because it is full; 0 is never.
    pub refuses_one_in: u64,
    pub compute: (Micros, Micros),
    pub write: (Micros, Micros),
    pub token: (Micros, Micros),
    pub mutation: PairMutation,
}

impl PairSetup {
    pub fn of(seed: u64, mutation: PairMutation) -> Self {
        let dice = &mut SimRng::new(seed, 21);
        let protocol = *dice.pick(&[Protocol::Sglang, Protocol::Push]);
        let protocol = mutation.protocol().unwrap_or(protocol);
        let calm = dice.percent(40);
        let (prefills, decodes) = (dice.between(1, 3) as usize, dice.between(1, 3) as usize);
        let span = if dice.percent(70) { dice.stretch(20_000, SECOND) } else { dice.between(1, 20) * SECOND };
        let calm_from = span + dice.between(5, 60) * SECOND;
        // Some decode engines are so slow that requests wait for pages.
        let slow = dice.percent(30);
        let mut sometimes = |low, high| if calm || dice.percent(50) { 0 } else { dice.between(low, high) };
        let (loss_one_in, delay_one_in) = (sometimes(20, 400), sometimes(5, 100));
        let leave_percent = *dice.pick(&[0, 30, 60, 90]);
        let clients = (0..dice.between(2, 14)).map(|_| PairClient {
            arrives: dice.below(span),
            leaves_after: dice.percent(leave_percent).then(|| dice.stretch(50, 4 * SECOND)),
            tokens: dice.between(1, 12) as u32,
            pages: dice.between(1, 2) as usize,
        });
        let clients = clients.collect();
        let faults = if calm { Vec::new() } else { faults(dice, prefills, decodes, span) };
        Self {
            protocol,
            calm,
            calm_from,
            prefills,
            // Two requests at the least.
            pages: (0..decodes).map(|_| dice.between(2, 8) as usize).collect(),
            clients,
            faults,
            attempts: dice.between(1, 4) as usize,
            latency: (dice.between(20, 200), dice.between(200, 2_000)),
            loss_one_in,
            delay_one_in,
            refuses_one_in: if dice.percent(50) { 0 } else { dice.between(2, 12) },
            compute: (dice.between(200, 5_000), dice.between(5_000, if slow { SECOND } else { 100_000 })),
            write: (dice.between(50, 500), dice.between(500, if slow { SECOND } else { 50_000 })),
            token: if slow { (SECOND / 2, 4 * SECOND) } else { (500, 20_000) },
            mutation,
        }
    }

    pub fn has(&self, mutation: PairMutation) -> bool {
        self.mutation == mutation
    }

    pub fn pushes(&self) -> bool {
        self.protocol == Protocol::Push
    }
}

fn faults(dice: &mut SimRng, prefills: usize, decodes: usize, span: Micros) -> Vec<(Micros, PairFault)> {
    let engine = |dice: &mut SimRng| match dice.percent(50) {
        true => Node::Prefill(dice.below(prefills as u64) as usize),
        false => Node::Decode(dice.below(decodes as u64) as usize),
    };
    let fault = |dice: &mut SimRng| {
        let at = dice.below(span + SECOND);
        let node = engine(dice);
        let fault = match dice.below(8) {
            0..=2 => PairFault::Crash(node, dice.stretch(1_000, 5 * SECOND)),
            3 => PairFault::Crash(Node::Router, dice.stretch(1_000, 2 * SECOND)),
            4 | 5 => PairFault::Pause(node, dice.stretch(1_000, 4 * SECOND)),
            _ => PairFault::Fail(node),
        };
        (at, fault)
    };
    (0..dice.below(6)).map(|_| fault(dice)).collect()
}
