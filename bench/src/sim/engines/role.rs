//! The role of a simulated engine.

/// The leg that an engine is meant for. Like a vLLM engine, it accepts requests of both legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Computes prompts and leases their blocks.
    Prefill,
    /// Reads leased blocks and decodes.
    Decode,
}

impl Role {
    /// The name in engine pages.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}
