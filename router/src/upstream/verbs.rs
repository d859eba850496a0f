//! Which of the verbs that settle debts an engine has: learnt once, from its answers, and remembered.

use std::sync::atomic::{AtomicU8, Ordering};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// `POST /abort_requests`.
    Abort,
    /// `POST /kv/release`.
    Release,
}

/// What is known; nothing at first.
#[derive(Debug, Default)]
pub(crate) struct Verbs([AtomicU8; 2]);

const HAS: u8 = 1;
const LACKS: u8 = 2;

impl Verbs {
    /// Whether the engine has it, where that is known.
    pub(crate) fn has(&self, verb: Verb) -> Option<bool> {
        match self.0[verb as usize].load(Ordering::Relaxed) {
            HAS => Some(true),
            LACKS => Some(false),
            _ => None,
        }
    }

    pub(crate) fn learn(&self, verb: Verb, has: bool) {
        self.0[verb as usize].store(if has { HAS } else { LACKS }, Ordering::Relaxed);
    }

    /// The engine went away; what comes up in its place may be another version.
    pub(crate) fn forget(&self) {
        self.0.iter().for_each(|verb| verb.store(0, Ordering::Relaxed));
    }
}
