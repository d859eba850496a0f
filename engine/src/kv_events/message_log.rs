//! The newest messages, for subscribers and replays. Pure.
//!
//! A subscriber that is behind reads from here, so all of them together hold no more than the log. It is bounded by
//! messages and by bytes. A reader whose next message has left the log continues with the oldest one.

use std::collections::VecDeque;
use std::sync::Arc;

/// Limit of the bytes: some hundred steps of the largest prompts, or all of the usual 10,000 steps.
const BYTES_MAX: usize = 64 << 20;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EventMessage {
    /// Its number, from 0. Dropped messages leave gaps.
    pub(super) sequence: u64,
    /// Its events.
    pub(super) payload: Arc<[u8]>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct MessageLog {
    messages: VecDeque<EventMessage>,
    bytes: usize,
    messages_max: usize,
    /// The number after the newest message.
    end: u64,
}

impl MessageLog {
    pub(super) fn new(messages_max: usize) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, messages_max, end: 0 }
    }

    /// Adds the newest message.
    pub(super) fn push(&mut self, message: EventMessage) {
        assert!(message.sequence >= self.end, "numbers only increase");
        self.end = message.sequence + 1;
        self.bytes += message.payload.len();
        self.messages.push_back(message);
        while self.messages.len() > 1
            && (self.messages.len() > self.messages_max || self.bytes > BYTES_MAX)
            && let Some(oldest) = self.messages.pop_front()
        {
            self.bytes -= oldest.payload.len();
        }
    }

    /// The number after the newest message.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The oldest message from number `from` on, of the newest `behind_max` ones.
    pub(super) fn next(&self, from: u64, behind_max: usize) -> Option<EventMessage> {
        let at = self.messages.partition_point(|message| message.sequence < from);
        self.messages.get(at.max(self.messages.len().saturating_sub(behind_max))).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(sequence: u64, bytes: usize) -> EventMessage {
        EventMessage { sequence, payload: vec![sequence as u8; bytes].into() }
    }

    fn next(log: &MessageLog, from: u64, behind_max: usize) -> Option<u64> {
        log.next(from, behind_max).map(|message| message.sequence)
    }

    #[test]
    fn a_reader_gets_each_message_and_skips_those_that_are_gone() {
        let mut log = MessageLog::new(3);
        assert_eq!((next(&log, 0, 9), log.end()), (None, 0));
        for sequence in [0, 1, 5, 6] {
            log.push(message(sequence, 1));
        }
        assert_eq!((next(&log, 0, 9), next(&log, 2, 9), next(&log, 6, 9)), (Some(1), Some(5), Some(6)));
        assert_eq!((next(&log, 7, 9), log.end()), (None, 7));
        assert_eq!(next(&log, 0, 1), Some(6), "a reader that is further behind than allowed");
    }

    #[test]
    fn the_log_is_bounded_by_bytes_and_keeps_the_newest_message() {
        let mut log = MessageLog::new(1_000);
        for sequence in 0..10 {
            log.push(message(sequence, BYTES_MAX / 4));
        }
        assert_eq!(next(&log, 0, 99), Some(6));
        log.push(message(10, BYTES_MAX + 1));
        assert_eq!((next(&log, 0, 99), log.messages.len()), (Some(10), 1));
    }
}
