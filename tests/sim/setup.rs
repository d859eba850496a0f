//! The parameters of a seed: number, size and speed of processes and clients, and the faults with their times.

use crate::faults::{self, Fault};
use crate::messages::Node;
use crate::net::NetworkFaults;
use crate::rng::SimRng;
use crate::sim::Micros;

pub const SECOND: Micros = 1_000_000;

#[derive(Clone, Debug)]
pub struct EngineSetup {
    pub prefills: bool,
    pub decodes: bool,
    pub host: usize,
    pub blocks: usize,
    /// Local microseconds per 1,000 microseconds of the simulator.
    pub clock_rate: u64,
    pub max_num_seqs: usize,
    pub max_batched: usize,
    pub max_waiting: usize,
    pub fetch_workers: usize,
    pub recompute: bool,
    /// Slots of the host tier and files of the disk tier; 0 is none.
    pub host_blocks: usize,
    pub disk_blocks: usize,
    pub step: (Micros, Micros),
    pub block_copy: (Micros, Micros),
    /// The engine refuses one in this many requests before it reads them; 0 is never.
    pub refuses_one_in: u64,
}

#[derive(Clone, Debug)]
pub struct ClientSetup {
    pub arrives: Micros,
    pub cancel_after: Option<Micros>,
    /// The client disconnects without a notice.
    pub silently: bool,
    pub prompt: Vec<u32>,
    pub max_new: usize,
    pub choices: u32,
    /// The decode engine computes everything.
    pub aggregate: bool,
    pub router: usize,
}

/// What the schedulers of a run do, independent of each other and of the other parameters: 288 seeds have every
/// combination.
#[derive(Clone, Copy, Debug, Default)]
pub struct SchedulerOptions {
    /// Steps have a time target: in a third of the runs.
    pub has_target: bool,
    /// Sequences have priorities: in a third of the runs.
    pub has_priorities: bool,
    /// Admission leaves blocks for growth: in half of the runs.
    pub has_reserve: bool,
    /// Every second engine drafts: the even ones, or the odd ones.
    pub drafts: Option<u64>,
    /// Some sequences have a near deadline: in half of the runs, but in no calm one.
    pub has_deadlines: bool,
}

impl SchedulerOptions {
    /// A quarter of the runs has none: some faults show seldom beside them.
    fn of(seed: u64, calm: bool) -> Self {
        if seed.is_multiple_of(4) {
            return Self::default();
        }
        let seed = seed / 4;
        Self {
            has_target: seed.is_multiple_of(3),
            has_priorities: (seed / 3).is_multiple_of(3),
            has_reserve: (seed / 9).is_multiple_of(2),
            drafts: Some(seed / 18 % 2),
            has_deadlines: !calm && (seed / 36).is_multiple_of(2),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub options: SchedulerOptions,
    /// The only faults are clients that disconnect and engines that refuse. No lease may then end by expiry.
    pub calm: bool,
    /// The routers neither abort nor release, like a router that does not know leases. Decode engines alone must then
    /// release what they refuse. Clients do not disconnect in such a run.
    pub naive_router: bool,
    pub calm_from: Micros,
    pub routers: usize,
    pub engines: Vec<EngineSetup>,
    pub block_tokens: usize,
    pub lease: Micros,
    pub clients: Vec<ClientSetup>,
    pub network_faults: NetworkFaults,
    pub faults: Vec<(Micros, Fault)>,
    /// The routers request early handoffs.
    pub early: bool,
    pub prefill_attempts: usize,
    pub decode_attempts: usize,
    pub fall_back: bool,
    pub prefill_silence: Micros,
    pub decode_silence: Micros,
    /// One in this many transfers breaks off; 0 is never.
    pub truncate_one_in: u64,
    /// Disk tiers fail, fill up and damage their contents.
    pub bad_disks: bool,
    /// Keys that a position of the model sees, in a quarter of the runs: sequences release the blocks behind them.
    pub window: Option<usize>,
    /// The planted fault.
    pub mutation: Mutation,
}

/// A planted naive behaviour that the invariants must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    None,
    /// A reader does not check whether the lease was live for the whole read (the stale read).
    VerdictSkipped,
    /// The producer receives no release for a request that was refused or aborted (vLLM #41269).
    ReleasesNotSent,
    /// A lease that has ended returns its blocks twice (vLLM #25067).
    GivenBackTwice,
    /// A release frees blocks under a reader (vLLM #35506 done naively).
    ReleaseDoesNotDrain,
    /// Leases do not expire (vLLM #20139).
    NoExpiry,
    /// Leases live a minute too long.
    LateExpiry,
    /// A producer sends blocks that are not computed yet.
    SentTooSoon,
    /// A tier's file is used without a check of its checksum.
    DamageBelieved,
    /// A tier's worker continues a revoked load: the commitment point is not kept (Dynamo #6681).
    RevokedLoadWrites,
    /// A sequence releases a block while its last position is still seen: one token early.
    PassedTooSoon,
    /// A device reads one position behind the window.
    ReadsBehindWindow,
}

impl Mutation {
    pub const ALL: [Self; 11] = [
        Self::PassedTooSoon,
        Self::ReadsBehindWindow,
        Self::LateExpiry,
        Self::SentTooSoon,
        Self::DamageBelieved,
        Self::RevokedLoadWrites,
        Self::VerdictSkipped,
        Self::ReleasesNotSent,
        Self::GivenBackTwice,
        Self::ReleaseDoesNotDrain,
        Self::NoExpiry,
    ];

    /// The violations that show this mutation. No other violation counts.
    pub fn shows_as(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::VerdictSkipped
            | Self::DamageBelieved
            | Self::SentTooSoon
            | Self::PassedTooSoon
            | Self::ReadsBehindWindow => &["stale KV", "wrong text"],
            Self::RevokedLoadWrites => &["I3", "wrong text"],
            Self::ReleaseDoesNotDrain => &["stale KV", "wrong text", "I3: freed"],
            Self::ReleasesNotSent => &["expired"],
            Self::GivenBackTwice => &["given back once per lease"],
            Self::NoExpiry => &["I5"],
            Self::LateExpiry => &["I4"],
        }
    }
}

impl Setup {
    pub fn of(seed: u64, mutation: Mutation) -> Self {
        let dice = &mut SimRng::new(seed, 1);
        let calm = dice.percent(15);
        let naive_router = calm && dice.percent(40);
        let block_tokens = *dice.pick(&[2, 4, 8]);
        let routers = if dice.percent(80) { 1 } else { 2 };
        let engines = engines(dice, calm, block_tokens);
        let network_faults = network_faults(dice, calm);
        let span = if dice.percent(60) { dice.stretch(20_000, SECOND) } else { dice.between(1, 12) * SECOND };
        let mut clients = clients(dice, routers, span, block_tokens);
        if naive_router {
            clients.iter_mut().for_each(|client| client.cancel_after = None);
        }
        let calm_from = span + dice.between(5, 60) * SECOND;
        let mut faults =
            if calm { Vec::new() } else { faults::plan(dice, routers, &engines, span, calm_from) };
        let mut engines = engines;
        // Some runs exercise the tiers: small pools that forget, and prompts that are repeated.
        if !calm && dice.percent(25) {
            for engine in &mut engines {
                engine.host_blocks = dice.between(2, 24) as usize;
                engine.disk_blocks = if dice.percent(60) { dice.between(2, 48) as usize } else { 0 };
            }
            for _ in 0..dice.between(2, 12) {
                let engine = dice.below(engines.len() as u64) as usize;
                faults.push((dice.below(span), Fault::ResetCache(engine)));
            }
        }
        // Some runs exercise the stale read: one host, slow copies, and readers that are stopped for longer than the
        // lease lives. Enough other requests make the engine reuse freed blocks.
        let stale = !calm && dice.percent(8);
        if stale {
            for engine in &mut engines {
                engine.host = 0;
                engine.block_copy = (50_000, 500_000);
            }
            let readers: Vec<usize> = (0..engines.len()).filter(|&e| engines[e].decodes).collect();
            for _ in 0..2 {
                let reader = Node::Engine(*dice.pick(&readers));
                faults.push((dice.below(5 * SECOND), Fault::Pause(reader, dice.between(10, 30) * SECOND)));
            }
            clients.iter_mut().for_each(|client| client.arrives = dice.below(25 * SECOND));
        }
        let calm_from = if stale { calm_from.max(45 * SECOND) } else { calm_from };
        Self {
            seed,
            options: SchedulerOptions::of(seed, calm),
            calm,
            naive_router,
            calm_from,
            routers,
            engines,
            block_tokens,
            lease: if stale { 2 } else { dice.between(2, 30) } * SECOND,
            clients,
            network_faults,
            faults,
            // A random stream of its own, so that the other faults of a seed do not depend on it.
            early: SimRng::new(seed, 9).percent(60),
            prefill_attempts: dice.between(1, 3) as usize,
            decode_attempts: if naive_router { 1 } else { dice.between(1, 3) as usize },
            fall_back: dice.percent(50),
            prefill_silence: if naive_router { 600 } else { dice.between(2, 60) } * SECOND,
            decode_silence: if naive_router { 600 } else { dice.between(2, 60) } * SECOND,
            truncate_one_in: if calm || dice.percent(60) { 0 } else { dice.between(5, 200) },
            bad_disks: !calm && dice.percent(50),
            window: window(seed),
            mutation,
        }
    }

    pub fn prefills(&self) -> Vec<usize> {
        (0..self.engines.len()).filter(|&e| self.engines[e].prefills).collect()
    }

    pub fn decodes(&self) -> Vec<usize> {
        (0..self.engines.len()).filter(|&e| self.engines[e].decodes).collect()
    }
}

/// Shorter than a block, up to almost half of the longest sequence. A random stream of its own, as for `early`.
fn window(seed: u64) -> Option<usize> {
    let dice = &mut SimRng::new(seed, 10);
    dice.percent(25).then(|| dice.between(3, 24) as usize)
}

fn engines(dice: &mut SimRng, calm: bool, block_tokens: usize) -> Vec<EngineSetup> {
    let prefills = *dice.pick(&[1, 1, 2, 2, 3, 4]);
    let decodes = *dice.pick(&[1, 1, 2, 2, 3, 4]);
    let hosts = dice.between(1, 4);
    let mut engines = Vec::new();
    for e in 0..prefills + decodes {
        let both = dice.percent(10);
        let small = dice.percent(70);
        // The longest sequence has 56 tokens. It fits into the smallest pool, and little else does.
        let least = (56_u64.div_ceil(block_tokens as u64) + 1).max(8);
        engines.push(EngineSetup {
            prefills: both || e < prefills,
            decodes: both || e >= prefills,
            host: dice.below(hosts) as usize,
            // Most pools are so small that exhaustion is the normal case.
            blocks: dice.between(least, if small { least + 6 } else { 64.max(least) }) as usize,
            clock_rate: if calm || dice.percent(60) { 1_000 } else { dice.between(950, 1_050) },
            max_num_seqs: dice.between(1, 8) as usize,
            max_batched: dice.between(8, 64) as usize,
            max_waiting: if dice.percent(70) { 64 } else { dice.between(1, 3) as usize },
            fetch_workers: dice.between(1, 4) as usize,
            recompute: dice.percent(60),
            host_blocks: if dice.percent(60) { 0 } else { dice.between(1, 24) as usize },
            disk_blocks: if dice.percent(70) { 0 } else { dice.between(1, 48) as usize },
            step: (dice.between(500, 5_000), dice.between(5_000, 60_000)),
            block_copy: if dice.percent(70) { (5, 200) } else { (5_000, 2_000_000) },
            refuses_one_in: if dice.percent(60) { 0 } else { dice.between(3, 20) },
        });
    }
    engines
}

fn network_faults(dice: &mut SimRng, calm: bool) -> NetworkFaults {
    let latency = (dice.between(20, 200), dice.between(200, 2_000));
    if calm || dice.percent(25) {
        return NetworkFaults { latency, ..NetworkFaults::default() };
    }
    let mut sometimes = |low, high| if dice.percent(50) { 0 } else { dice.between(low, high) };
    NetworkFaults {
        latency,
        loss_one_in: sometimes(30, 800),
        duplicate_one_in: sometimes(3, 40),
        delay_one_in: sometimes(5, 200),
        delay_max: 120 * SECOND,
    }
}

fn clients(dice: &mut SimRng, routers: usize, span: Micros, block_tokens: usize) -> Vec<ClientSetup> {
    let prefix: Vec<u32> = (0..24).map(|_| dice.below(crate::device::VOCAB) as u32).collect();
    let mut family: Vec<Vec<u32>> = Vec::new();
    for _ in 0..dice.between(1, 4) {
        let shared = dice.between(0, 24) as usize;
        let own = dice.between(1, 16);
        let mut prompt = prefix[..shared].to_vec();
        prompt.extend((0..own).map(|_| dice.below(crate::device::VOCAB) as u32));
        family.push(prompt);
    }
    let cancel_percent = *dice.pick(&[0, 20, 50, 90]);
    (0..dice.between(2, 20))
        .map(|_| {
            let mut prompt = dice.pick(&family).clone();
            if dice.one_in(4) {
                prompt.truncate((prompt.len() / block_tokens * block_tokens).max(1));
            }
            ClientSetup {
                arrives: dice.below(span),
                cancel_after: dice.percent(cancel_percent).then(|| dice.stretch(50, 4 * SECOND)),
                silently: dice.percent(10),
                prompt,
                max_new: dice.between(1, 14) as usize,
                choices: if dice.percent(85) { 1 } else { dice.between(2, 3) as u32 },
                aggregate: dice.percent(15),
                router: dice.below(routers as u64) as usize,
            }
        })
        .collect()
}
