//! The bounds of one exploration.

use baton_connector::fetch::LoadFailurePolicy;

use crate::mutations::Mutation;

/// The bounds of one exploration. Every step that is possible within them is explored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Requests: 1 or 2.
    pub requests: u8,
    /// Prefill engines: 1 or 2. The router sends each of them at most one leg per request.
    pub prefill: u8,
    /// Decode engines: 1 or 2. The router sends each of them at most one leg per request, with the same handoff.
    pub decode: u8,
    /// Blocks of each prefill engine; a request needs one.
    pub prefill_blocks: u8,
    /// Blocks of each decode engine; a request needs one.
    pub decode_blocks: u8,
    /// Ranks of a decode engine, each with its own reader: 1 or 2.
    pub ranks: u8,
    /// Faults in one run, of any kinds: see `system.rs`.
    pub faults: u8,
    /// A client may disconnect at any time.
    pub clients_cancel: bool,
    /// Engines may refuse: for lack of capacity, or because no engine accepts the request.
    pub refusals: bool,
    /// A decode engine may have cached the prompt's blocks already.
    pub cached: bool,
    /// Without a prefill engine the router lets a decode engine compute everything. Otherwise the request fails.
    pub fallback: bool,
    /// The decode engine's reaction to a failed fetch.
    pub policy: LoadFailurePolicy,
    /// If no decode engine can use a handoff, the router has the prompt recomputed, once.
    pub recompute: bool,
    /// A prefill engine may open a lease while it computes.
    pub early: bool,
    /// If an accepted response breaks off, or its engine becomes silent, another decode engine continues, once.
    pub resume: bool,
    /// The router does not release and does not announce that it would (any other router).
    pub foreign_router: bool,
    /// Both legs at once: the engines are vLLM's, and only P's write frees the page of a D that was given up.
    pub pushes: bool,
    /// The planted bug.
    pub mutation: Option<Mutation>,
}

impl Bounds {
    /// One of each, without faults and without disconnects.
    pub(crate) const PLAIN: Self = Self {
        requests: 1,
        prefill: 1,
        decode: 1,
        prefill_blocks: 1,
        decode_blocks: 1,
        ranks: 1,
        faults: 0,
        clients_cancel: false,
        refusals: false,
        cached: false,
        fallback: false,
        policy: LoadFailurePolicy::Recompute,
        recompute: false,
        early: false,
        resume: false,
        foreign_router: false,
        pushes: false,
        mutation: None,
    };

    /// Whether a mutation is planted.
    pub(crate) fn has(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }
}

impl std::fmt::Display for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} request(s), {} P of {} block(s), {} D of {} block(s) and {} rank(s), {} fault(s), policy {}",
            self.requests,
            self.prefill,
            self.prefill_blocks,
            self.decode,
            self.decode_blocks,
            self.ranks,
            self.faults,
            self.policy.label()
        )?;
        let flags = [
            (self.clients_cancel, "clients leave"),
            (self.refusals, "engines refuse"),
            (self.cached, "D may have the prompt cached"),
            (self.fallback, "fallback: D computes all"),
            (self.recompute, "spent handoffs are recomputed"),
            (self.early, "P may lend what it still computes"),
            (self.resume, "streams that break are resumed"),
            (self.foreign_router, "a router that settles nothing"),
            (self.pushes, "vLLM push"),
        ];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}
