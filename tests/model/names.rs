//! Names of requests, leases and readers, and the renamings under which two states are the same.
//!
//! Both prefill engines are alike, both decode engines are alike, and so are both requests. If two of them change
//! places, a state leads to the same futures with changed places. The explorer visits one of the (up to eight) states
//! for all of them.

use baton_connector::Handle;

/// One round of a request: its place (0 or 1) in the lowest bit, and 1 above it if the prompt is recomputed. At the
/// engines each round is a separate request with its own name.
pub(crate) type Req = u8;

/// Both rounds of both requests.
pub(crate) const ROUNDS: [Req; 4] = [0, 1, 2, 3];

/// A request's place at the router.
pub(crate) fn place(req: Req) -> usize {
    usize::from(req & 1)
}

/// The name in a trace.
pub(crate) fn shown(req: Req) -> String {
    format!("r{}{}", place(req) + 1, if req > 1 { " again" } else { "" })
}

/// One of the eight renamings, with a bit each for a swap of the requests, the prefill engines and the decode engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Renaming(pub u8);

impl Renaming {
    pub(crate) fn req(self, r: Req) -> Req {
        r ^ (self.0 & 1)
    }

    pub(crate) fn prefill(self, p: u8) -> u8 {
        p ^ (self.0 >> 1 & 1)
    }

    pub(crate) fn decode(self, d: u8) -> u8 {
        d ^ (self.0 >> 2 & 1)
    }
}

/// A lease in its producer: the producer's start, the request, and the lease's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LocalLease {
    /// The number of earlier starts of the producer.
    pub life: u8,
    pub req: Req,
    /// The number of leases that this process opened before, where handles are counted; else 0. A process opens at most
    /// one lease per request.
    pub nth: u8,
}

impl LocalLease {
    /// The form that a block's content carries.
    pub(crate) fn tag(self) -> Self {
        Self { nth: 0, ..self }
    }

    pub(crate) fn renamed(self, by: Renaming) -> Self {
        Self { req: by.req(self.req), ..self }
    }
}

/// A lease with its producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LeaseName {
    pub p: u8,
    pub local: LocalLease,
}

impl LeaseName {
    pub(crate) fn renamed(self, by: Renaming) -> Self {
        Self { p: by.prefill(self.p), local: self.local.renamed(by) }
    }

    /// The handle in the router's machine.
    pub(crate) fn handle(self) -> Handle {
        let LocalLease { life, req, nth } = self.local;
        Handle(u128::from(u32::from_be_bytes([self.p, life, req, nth])) + 1)
    }

    pub(crate) fn of(handle: Handle) -> Self {
        let [p, life, req, nth] = u32::try_from(handle.0 - 1).expect("ours").to_be_bytes();
        Self { p, local: LocalLease { life, req, nth } }
    }
}

impl std::fmt::Display for LeaseName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "P{}'s lease for {}", self.p + 1, shown(self.local.req))?;
        if self.local.life > 0 { write!(f, " (life {})", self.local.life + 1) } else { Ok(()) }
    }
}

/// One rank of one fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReaderName {
    pub d: u8,
    /// The number of earlier starts of the decode engine.
    pub life: u8,
    pub req: Req,
    pub rank: u8,
}

impl ReaderName {
    pub(crate) fn renamed(self, by: Renaming) -> Self {
        Self { d: by.decode(self.d), req: by.req(self.req), ..self }
    }
}

/// Places of both requests or both engines.
pub(crate) const BOTH: [u8; 2] = [0, 1];
