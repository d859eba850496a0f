//! The question whether an engine lives: one on its way per engine, shared by all requests that wait for the answer.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::time::Instant;

use crate::engines::health::Sign;

/// The longest wait for an answer to one question.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// What came of asking an engine whether it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pulse {
    /// It answered, and says whether it is well.
    Answered(bool),
    /// It did not answer, and bytes came of it on another connection.
    Busy,
    /// Nothing came of it.
    Silent,
    /// No connection could be made.
    Unreachable(Sign),
    /// This machine lacked something of its own. It says nothing of the engine.
    Unasked,
}

impl Pulse {
    /// Whether it shows that the engine lives.
    pub(crate) fn is_life(self) -> bool {
        match self {
            Self::Answered(_) | Self::Busy => true,
            Self::Silent | Self::Unreachable(_) | Self::Unasked => false,
        }
    }
}

/// The question whether an engine lives that is on its way: one for all who want to know.
#[derive(Default)]
pub(crate) struct Question(Mutex<Option<Asked>>);

struct Asked {
    begun: Instant,
    /// What had come of the engine by then.
    heard: u64,
    answer: WeakShared<BoxFuture<'static, Pulse>>,
}

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question")
    }
}

impl Question {
    /// The question that is on its way, or a new one. It ends when no request waits for it.
    /// With it, what of the engine had been heard when it began.
    pub(crate) fn join(
        &self,
        heard: u64,
        ask: impl FnOnce() -> BoxFuture<'static, Pulse>,
    ) -> (u64, Shared<BoxFuture<'static, Pulse>>) {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One that has had the time of a whole question is not waited for by others: its connection may be what is lost.
        if let Some(asked) = asked.as_ref().filter(|asked| asked.begun.elapsed() < ANSWER_WITHIN)
            && let Some(answer) = asked.answer.upgrade().filter(|answer| answer.peek().is_none())
        {
            return (asked.heard, answer);
        }
        let answer = ask().shared();
        *asked = answer.downgrade().map(|answer| Asked { begun: Instant::now(), heard, answer });
        (heard, answer)
    }
}
