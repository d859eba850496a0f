//! What simulated engines are like: their speeds, bounds and dialect, and what is wrong with them.

use std::time::Duration;

use super::faults::{FaultAt, Faults};

/// Which verbs and rules an engine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// Baton's engine: release and abort endpoints, handles, verified reads
    Baton,
    /// Stock vLLM with the NixlConnector: no release or abort endpoints, and a late read returns whatever the
    /// blocks hold
    #[default]
    Vllm,
}

impl Dialect {
    /// As options and reports name it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Baton => "baton",
            Self::Vllm => "vllm",
        }
    }
}

/// What a decode engine does whose read has failed (vLLM's `kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFailure {
    /// Recomputes the prompt
    Recompute,
    /// Refuses the request
    Fail,
}

/// Which half of the work an engine is meant for. It does what it is asked, like vLLM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Lends.
    Prefill,
    /// Reads and decodes.
    Decode,
}

impl Role {
    /// As engines tell it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One engine. A speed of zero takes no time at all.
#[derive(Clone, Debug)]
pub struct EnginePlan {
    /// Which verbs and rules it has.
    pub dialect: Dialect,
    /// The name it serves.
    pub model: String,
    /// Prompt tokens per second; 0: no time.
    pub prefill_rate: u64,
    /// Before the first token of a prompt is computed.
    pub prefill_overhead: Duration,
    /// A step in which a token is decoded, for each that decodes.
    pub decode_step: Duration,
    /// Prompt tokens in one step, over all requests.
    pub step_tokens: usize,
    /// Requests that compute at once.
    pub running_max: usize,
    /// Requests that wait; one more is refused.
    pub waiting_max: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of a block; the same for all engines of a fleet.
    pub block_tokens: usize,
    /// Tokens of prompt and answer.
    pub context_tokens: usize,
    /// Life of what was lent (`kv_lease_duration`).
    pub lease: Duration,
    /// Whether a decode engine keeps alive what its waiting requests will read.
    pub heartbeats: bool,
    /// Blocks that a decode engine reads per second; 0: no time.
    pub fetch_rate: u64,
    /// From a request's arrival at a decode engine until it is in its queue.
    pub admission_delay: Duration,
    /// From the end of a request's work until its server writes the reply in one piece: a caller that has sent its end by then does
    /// not get it. [default: as the dialect's server: 1 ms for vllm, none for baton]
    pub reply_delay: Option<Duration>,
    /// KV of one token, for what is told of bytes.
    pub bytes_per_token: u64,
    /// After a read that failed. [default: as the dialect's engine: `recompute` for baton, `fail` for vllm]
    pub load_failure: Option<LoadFailure>,
    /// What is wrong with it.
    pub faults: Faults,
}

impl Default for EnginePlan {
    fn default() -> Self {
        Self {
            dialect: Dialect::default(),
            model: String::from("sim"),
            prefill_rate: 20_000,
            prefill_overhead: Duration::from_millis(2),
            decode_step: Duration::from_millis(5),
            step_tokens: 2_048,
            running_max: 256,
            waiting_max: 4_096,
            blocks: 4_096,
            block_tokens: 16,
            context_tokens: 32_768,
            lease: Duration::from_secs(30),
            heartbeats: true,
            fetch_rate: 100_000,
            admission_delay: Duration::ZERO,
            reply_delay: None,
            bytes_per_token: 128 << 10,
            load_failure: None,
            faults: Faults::default(),
        }
    }
}

impl EnginePlan {
    /// An engine whose work takes no time: what is measured is everything else.
    #[must_use]
    pub fn instant() -> Self {
        Self {
            prefill_rate: 0,
            prefill_overhead: Duration::ZERO,
            decode_step: Duration::ZERO,
            reply_delay: Some(Duration::ZERO),
            fetch_rate: 0,
            ..Self::default()
        }
    }

    /// What it does after a read that has failed.
    pub(super) fn after_failed_read(&self) -> LoadFailure {
        self.load_failure.unwrap_or(match self.dialect {
            Dialect::Baton => LoadFailure::Recompute,
            Dialect::Vllm => LoadFailure::Fail,
        })
    }

    /// From the end of a request's work until its reply is written. vLLM's engine core is another process than its server, and
    /// uvicorn drops what is written after the caller's end: a reply crossed a half-close by at most 1 ms on vLLM 0.32.
    pub(super) fn reply_window(&self) -> Duration {
        self.reply_delay.unwrap_or(match self.dialect {
            Dialect::Baton => Duration::ZERO,
            Dialect::Vllm => Duration::from_millis(1),
        })
    }

    /// Whether the numbers can be those of an engine.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        let bounds = [
            ("tokens in a step", self.step_tokens, 1, 1 << 20),
            ("running requests", self.running_max, 1, 1 << 20),
            ("waiting requests", self.waiting_max, 0, 1 << 20),
            ("blocks", self.blocks, 1, 1 << 24),
            ("tokens of a block", self.block_tokens, 1, 1024),
            ("tokens of context", self.context_tokens, 2, 1 << 24),
        ];
        for (what, number, least, most) in bounds {
            if !(least..=most).contains(&number) {
                return Err(format!("{what}: {number} is not between {least} and {most}"));
            }
        }
        if self.lease.is_zero() || self.lease > Duration::from_secs(86_400) {
            return Err(format!("a lease of {:?} is not between 1 ms and a day", self.lease));
        }
        if self.model.is_empty() {
            return Err(String::from("a model needs a name"));
        }
        Ok(())
    }

    /// Tokens that one request can have.
    pub(super) fn capacity(&self) -> usize {
        self.context_tokens.min(self.blocks * self.block_tokens)
    }
}

/// Engines that know each other.
#[derive(Clone, Debug)]
pub struct FleetPlan {
    /// Prefill engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
    /// What each of them is like, but for its faults.
    pub engine: EnginePlan,
    /// What is wrong, and with whom.
    pub faults: Vec<FaultAt>,
    /// The first engine's port, the next one's being one more; 0: free ones.
    pub port: u16,
}

/// Engines of one fleet: each has a thread.
const ENGINES_MAX: usize = 64;

impl FleetPlan {
    /// So many engines of each kind.
    #[must_use]
    pub fn new(prefill: usize, decode: usize, engine: EnginePlan) -> Self {
        Self { prefill, decode, engine, faults: Vec::new(), port: 0 }
    }

    /// With this planted.
    #[must_use]
    pub fn with(mut self, fault: FaultAt) -> Self {
        self.faults.push(fault);
        self
    }

    /// Whether such a fleet can be.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.prefill + self.decode == 0 || self.prefill + self.decode > ENGINES_MAX {
            return Err(format!("a fleet has 1 to {ENGINES_MAX} engines"));
        }
        if usize::from(self.port) + self.prefill + self.decode > usize::from(u16::MAX) + 1 {
            return Err(format!("there are not so many ports after {}", self.port));
        }
        for fault in &self.faults {
            if !self.all().any(|(role, number)| fault.is_at(role, number)) {
                return Err(format!("fault `{fault}`: there is no such engine"));
            }
        }
        self.engine.check()
    }

    /// Every engine by role and number.
    pub(super) fn all(&self) -> impl Iterator<Item = (Role, usize)> + '_ {
        let prefill = (0..self.prefill).map(|number| (Role::Prefill, number));
        prefill.chain((0..self.decode).map(|number| (Role::Decode, number)))
    }

    /// What one of them is like.
    pub(super) fn of(&self, role: Role, number: usize) -> EnginePlan {
        let mut faults = self.engine.faults;
        for fault in self.faults.iter().filter(|fault| fault.is_at(role, number)) {
            faults.plant(fault.fault);
        }
        EnginePlan { faults, ..self.engine.clone() }
    }
}
