//! The log of messages, shared by the publisher's thread and its connections.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::config::KvEventsConfig;
use super::message_log::{EventMessage, MessageLog};
use super::sender::{Audience, KvEventMetrics};

/// The state of a log, for those that wait for its changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LogState {
    /// The number after the newest message.
    pub(super) end: u64,
    /// No message follows.
    pub(super) is_closed: bool,
}

/// See the module's documentation.
pub(super) struct SharedLog {
    messages: Mutex<MessageLog>,
    state: watch::Sender<LogState>,
    topic: Box<[u8]>,
    /// Messages that a subscriber may be behind.
    behind_max: usize,
    audience: Audience,
    metrics: KvEventMetrics,
}

impl SharedLog {
    pub(super) fn new(config: &KvEventsConfig, audience: Audience, metrics: KvEventMetrics) -> Self {
        Self {
            messages: Mutex::new(MessageLog::new(config.buffer_steps)),
            state: watch::Sender::new(LogState::default()),
            topic: config.topic.as_bytes().into(),
            behind_max: config.hwm,
            audience,
            metrics,
        }
    }

    /// Publishes a message.
    pub(super) fn push(&self, message: EventMessage) {
        let end = message.sequence + 1;
        self.lock().push(message);
        self.metrics.published.increment(1);
        self.state.send_modify(|state| state.end = end);
    }

    /// No message follows.
    pub(super) fn close(&self) {
        self.state.send_modify(|state| state.is_closed = true);
    }

    pub(super) fn changes(&self) -> watch::Receiver<LogState> {
        self.state.subscribe()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.borrow().is_closed
    }

    /// The number after the newest message.
    pub(super) fn end(&self) -> u64 {
        self.lock().end()
    }

    /// A subscriber begins with the next message. Returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.audience.change();
        self.end()
    }

    /// A subscriber's next message, from number `from` on. Earlier ones may be gone.
    pub(super) fn next(&self, from: u64) -> Option<EventMessage> {
        let message = self.lock().next(from, self.behind_max);
        if message.as_ref().is_some_and(|message| message.sequence > from) {
            self.audience.change();
        }
        message
    }

    /// The next message of a replay, from number `from` on.
    pub(super) fn replay(&self, from: u64) -> Option<EventMessage> {
        self.lock().next(from, usize::MAX)
    }

    /// The first frame of each message.
    pub(super) fn topic(&self) -> &[u8] {
        &self.topic
    }

    pub(super) fn metrics(&self) -> &KvEventMetrics {
        &self.metrics
    }

    fn lock(&self) -> MutexGuard<'_, MessageLog> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
