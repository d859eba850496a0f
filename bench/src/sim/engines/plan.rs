//! Properties of simulated engines: speeds, limits, dialect and faults.

use std::time::Duration;

use super::faults::{Fault, FaultAt, Faults};
use super::role::Role;

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
    /// The name in options and reports.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Baton => "baton",
            Self::Vllm => "vllm",
        }
    }
}

/// Behaviour of a decode engine after a failed read (vLLM's `kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFailure {
    /// Recomputes the prompt
    Recompute,
    /// Refuses the request
    Fail,
}

/// One engine. A speed of zero takes no time.
#[derive(Clone, Debug)]
pub struct EnginePlan {
    /// Endpoints and rules.
    pub dialect: Dialect,
    /// Name of the served model.
    pub model: String,
    /// Prompt tokens per second. 0 takes no time.
    pub prefill_rate: u64,
    /// Time before the first token of a prompt is computed.
    pub prefill_overhead: Duration,
    /// Time that a step takes per token that it decodes.
    pub decode_step: Duration,
    /// Maximum prompt tokens of one step, over all requests.
    pub step_tokens: usize,
    /// Maximum requests that compute at once.
    pub running_max: usize,
    /// Maximum waiting requests. Further ones are refused.
    pub waiting_max: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of a block, the same for all engines of a fleet.
    pub block_tokens: usize,
    /// Maximum tokens of prompt and response.
    pub context_tokens: usize,
    /// Duration of a lease (`kv_lease_duration`).
    pub lease: Duration,
    /// Whether a decode engine renews the leases of its waiting requests.
    pub heartbeats: bool,
    /// Blocks that a decode engine reads per second. 0 takes no time.
    pub fetch_rate: u64,
    /// From a request's arrival at a decode engine until it is queued.
    pub admission_delay: Duration,
    /// From the end of a request's work until its server writes the reply in one piece. A caller that closes its
    /// sending side before does not receive it. [default: as the dialect's server: 1 ms for vllm, none for baton]
    pub reply_delay: Option<Duration>,
    /// vLLM's NixlPushConnector: the prefill engine writes the blocks. It drops a decode engine's registration without a
    /// prefill after this time (`push_registration_timeout`). `None`: the decode engine reads.
    pub push: Option<Duration>,
    /// KV bytes of one token, for reported sizes.
    pub bytes_per_token: u64,
    /// Behaviour after a failed read. [default: as the dialect's engine: `recompute` for baton, `fail` for vllm]
    pub load_failure: Option<LoadFailure>,
    /// Faults of the engine.
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
            push: None,
            bytes_per_token: 128 << 10,
            load_failure: None,
            faults: Faults::default(),
        }
    }
}

impl EnginePlan {
    /// An engine whose work takes no time, to measure everything else.
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

    /// Behaviour after a failed read.
    pub(super) fn after_failed_read(&self) -> LoadFailure {
        self.load_failure.unwrap_or(match self.dialect {
            Dialect::Baton => LoadFailure::Recompute,
            Dialect::Vllm => LoadFailure::Fail,
        })
    }

    /// From the end of a request's work until its reply is written. vLLM's engine core and server are separate
    /// processes, and uvicorn drops what is written after the caller's end. With vLLM 0.32, a reply crossed a
    /// half-close by at most 1 ms.
    pub(super) fn reply_window(&self) -> Duration {
        self.reply_delay.unwrap_or(match self.dialect {
            Dialect::Baton => Duration::ZERO,
            Dialect::Vllm => Duration::from_millis(1),
        })
    }

    /// Checks all numbers.
    ///
    /// # Errors
    /// A description of the problem.
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
        if self.push.is_some() && self.dialect == Dialect::Baton {
            return Err(String::from("only vLLM's engines push"));
        }
        Ok(())
    }

    /// Maximum tokens of one request.
    pub(super) fn capacity(&self) -> usize {
        self.context_tokens.min(self.blocks * self.block_tokens)
    }
}

/// Engines that find each other.
#[derive(Clone, Debug)]
pub struct FleetPlan {
    /// Prefill engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
    /// The properties of each engine, except faults.
    pub engine: EnginePlan,
    /// Faults and their engines.
    pub faults: Vec<FaultAt>,
    /// The first engine's port. Each further engine has the next port. 0 for free ports.
    pub port: u16,
}

/// Maximum engines of a fleet, because each has a thread.
const ENGINES_MAX: usize = 64;

impl FleetPlan {
    /// A fleet with these numbers of engines.
    #[must_use]
    pub fn new(prefill: usize, decode: usize, engine: EnginePlan) -> Self {
        Self { prefill, decode, engine, faults: Vec::new(), port: 0 }
    }

    /// Adds a fault.
    #[must_use]
    pub fn with(mut self, fault: FaultAt) -> Self {
        self.faults.push(fault);
        self
    }

    /// Checks the numbers of engines and all properties.
    ///
    /// # Errors
    /// A description of the problem.
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
            if fault.fault == Fault::FreesBeforeWrite && self.engine.push.is_none() {
                return Err(format!("fault `{fault}` concerns writes, and only engines that push have them"));
            }
        }
        self.engine.check()
    }

    /// Every engine by role and number.
    pub(super) fn all(&self) -> impl Iterator<Item = (Role, usize)> + '_ {
        let prefill = (0..self.prefill).map(|number| (Role::Prefill, number));
        prefill.chain((0..self.decode).map(|number| (Role::Decode, number)))
    }

    /// The properties of one engine.
    pub(super) fn of(&self, role: Role, number: usize) -> EnginePlan {
        let mut faults = self.engine.faults;
        for fault in self.faults.iter().filter(|fault| fault.is_at(role, number)) {
            faults.plant(fault.fault);
        }
        EnginePlan { faults, ..self.engine.clone() }
    }
}
