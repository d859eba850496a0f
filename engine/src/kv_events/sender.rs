//! The step loop's end: changes become numbered batches, and a full queue drops them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge};
use tokio::sync::mpsc::Sender;

use super::encode::wire_bytes;
use crate::blocks::cache_events::CacheEvent;

/// Bytes of a message after which the next event begins another one. A message is larger by one event at most, so it
/// is far below the 16 MiB that Baton's router accepts.
const MESSAGE_BYTES: usize = 64 << 10;

/// The metrics of one rank's events.
#[derive(Clone)]
pub struct KvEventMetrics {
    /// Published messages.
    pub published: Counter,
    /// Messages that were dropped because the publisher was behind.
    pub dropped: Counter,
    /// Connected subscribers.
    pub subscribers: Gauge,
}

/// The number of the audience. It changes when a subscriber begins, or may have missed messages: blocks that are used
/// afterwards are reported again.
#[derive(Clone, Debug, Default)]
pub(super) struct Audience(Arc<AtomicU64>);

impl Audience {
    /// A subscriber has begun or missed messages.
    pub(super) fn change(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn number(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The events of one message.
#[derive(Debug)]
pub(super) struct QueuedBatch {
    pub(super) sequence: u64,
    /// Seconds since the epoch.
    pub(super) at: f64,
    pub(super) events: Vec<CacheEvent>,
}

/// See the module's documentation.
pub struct EventSender {
    queue: Sender<QueuedBatch>,
    /// The number of the next message.
    next: u64,
    /// The last message was dropped, and no later one shows the gap yet.
    hides_gap: bool,
    audience: Audience,
    metrics: KvEventMetrics,
}

impl EventSender {
    pub(super) fn new(queue: Sender<QueuedBatch>, audience: Audience, metrics: KvEventMetrics) -> Self {
        Self { queue, next: 0, hides_gap: false, audience, metrics }
    }

    /// The number of the present audience.
    #[must_use]
    pub fn audience(&self) -> u64 {
        self.audience.number()
    }

    /// Whether messages were dropped and none after them shows it. The caller then calls [`Self::send`] soon, even
    /// without changes.
    #[must_use]
    pub fn hides_gap(&self) -> bool {
        self.hides_gap
    }

    /// Queues changes, in order. Never waits: messages beyond the queue's bound are dropped, and a later message shows
    /// the gap, even if it has no events.
    pub fn send(&mut self, events: Vec<CacheEvent>) {
        if events.is_empty() && !self.hides_gap {
            return;
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        for events in batches(events) {
            self.send_batch(at, events);
        }
    }

    fn send_batch(&mut self, at: f64, events: Vec<CacheEvent>) {
        let place = self.queue.try_reserve();
        if place.is_err() && events.is_empty() {
            return;
        }
        let sequence = self.next;
        self.next += 1;
        match place {
            Ok(place) => {
                place.send(QueuedBatch { sequence, at, events });
                self.hides_gap = false;
            }
            Err(_) => {
                if !self.hides_gap {
                    tracing::warn!(
                        event = "kv_events_dropped",
                        sequence,
                        "KV events dropped, the publisher is behind"
                    );
                }
                self.metrics.dropped.increment(1);
                self.hides_gap = true;
                self.audience.change();
            }
        }
    }
}

/// Splits events into messages; one without events if there are none.
fn batches(events: Vec<CacheEvent>) -> Vec<Vec<CacheEvent>> {
    let (mut batches, mut bytes) = (vec![Vec::new()], 0);
    for event in events {
        if bytes >= MESSAGE_BYTES {
            batches.push(Vec::new());
            bytes = 0;
        }
        bytes += wire_bytes(&event);
        batches.last_mut().expect("one is there").push(event);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::cache_events::CacheMedium;
    use crate::blocks::hash::BlockHash;

    fn sender(places: usize) -> (EventSender, tokio::sync::mpsc::Receiver<QueuedBatch>) {
        let (queue, batches) = tokio::sync::mpsc::channel(places);
        let metrics = KvEventMetrics {
            published: Counter::noop(),
            dropped: Counter::noop(),
            subscribers: Gauge::noop(),
        };
        (EventSender::new(queue, Audience::default(), metrics), batches)
    }

    fn removed(blocks: usize) -> CacheEvent {
        CacheEvent::Removed { medium: CacheMedium::Device, hashes: vec![BlockHash([1; 32]); blocks] }
    }

    #[test]
    fn a_full_queue_drops_messages_and_the_next_one_shows_the_gap() {
        let (mut sender, mut queue) = sender(2);
        sender.send(Vec::new());
        for blocks in 1..=4 {
            sender.send(vec![removed(blocks)]);
        }
        // Nothing has changed since, but subscribers must learn of the gap.
        sender.send(Vec::new());
        assert!(sender.hides_gap(), "the queue is still full");
        let mut received = Vec::new();
        while let Ok(batch) = queue.try_recv() {
            received.push((batch.sequence, batch.events.len()));
        }
        assert_eq!(received, [(0, 1), (1, 1)]);
        assert_eq!(sender.audience(), 2, "each loss may concern every subscriber");
        sender.send(Vec::new());
        sender.send(Vec::new());
        assert!(!sender.hides_gap());
        let batch = queue.try_recv().expect("a message without events");
        assert_eq!((batch.sequence, batch.events.len()), (4, 0));
        assert!(queue.try_recv().is_err(), "once");
        sender.send(vec![removed(1)]);
        assert_eq!(queue.try_recv().expect("the next message").sequence, 5);
    }

    #[test]
    fn many_events_are_several_messages_in_order() {
        let events: Vec<_> = (0..40).map(|at| removed(1_000 + at)).collect();
        let split = batches(events.clone());
        assert!(split.len() > 3);
        assert_eq!(split.concat(), events);
        let largest = wire_bytes(&removed(1_039));
        for batch in split {
            assert!(batch.iter().map(wire_bytes).sum::<usize>() < MESSAGE_BYTES + largest);
        }
    }
}
