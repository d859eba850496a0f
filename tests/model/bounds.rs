//! What one exploration covers.

use baton_connector::fetch::LoadFailurePolicy;

use crate::mutations::Mutation;

/// The bounds of one exploration. Within them everything that can happen is explored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Requests: 1 or 2.
    pub requests: u8,
    /// Prefill engines: 1 or 2. The router asks each at most once per request.
    pub prefill: u8,
    /// Decode engines: 1 or 2. The router asks each at most once per request, with the same handoff.
    pub decode: u8,
    /// Blocks of each prefill engine; a request needs one.
    pub prefill_blocks: u8,
    /// Blocks of each decode engine; a request needs one.
    pub decode_blocks: u8,
    /// Ranks of a decode engine, each a reader of its own: 1 or 2.
    pub ranks: u8,
    /// Faults in one run, of any kinds: see `world.rs`.
    pub faults: u8,
    /// A client may leave at any time.
    pub clients_leave: bool,
    /// Engines may refuse: too full, or a request that no engine would take.
    pub refusals: bool,
    /// A decode engine may have the prompt's blocks in its cache already.
    pub cached: bool,
    /// What the router does without a prefill engine: let a decode engine compute everything, or give up.
    pub fallback: bool,
    /// What a decode engine does when a fetch fails.
    pub policy: LoadFailurePolicy,
    /// When no decode engine can use a handoff the router has the prompt computed anew, once.
    pub anew: bool,
    /// A prefill engine may lend what it still computes.
    pub early: bool,
    /// When an accepted answer breaks off, or its engine falls silent, another decode engine goes on, once.
    pub resume: bool,
    /// The router releases nothing by itself and does not say that it would (any other router).
    pub foreign_router: bool,
    /// What is planted.
    pub mutation: Option<Mutation>,
}

impl Bounds {
    /// One of each, nothing goes wrong, nobody leaves.
    pub(crate) const PLAIN: Self = Self {
        requests: 1,
        prefill: 1,
        decode: 1,
        prefill_blocks: 1,
        decode_blocks: 1,
        ranks: 1,
        faults: 0,
        clients_leave: false,
        refusals: false,
        cached: false,
        fallback: false,
        policy: LoadFailurePolicy::Recompute,
        anew: false,
        early: false,
        resume: false,
        foreign_router: false,
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
            (self.clients_leave, "clients leave"),
            (self.refusals, "engines refuse"),
            (self.cached, "D may have the prompt cached"),
            (self.fallback, "fallback: D computes all"),
            (self.anew, "spent handoffs are computed anew"),
            (self.early, "P may lend what it still computes"),
            (self.resume, "streams that break are resumed"),
            (self.foreign_router, "a router that settles nothing"),
        ];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}
