//! The thread of one rank that encodes messages and serves its subscribers.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{Receiver, channel};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::KvEventsConfig;
use super::encode::encode;
use super::message_log::EventMessage;
use super::sender::{Audience, EventSender, KvEventMetrics, QueuedBatch};
use super::shared_log::SharedLog;
use super::sockets::EventSockets;

/// How long subscribers may take to read the last messages, as in vLLM.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The blocks of one rank's messages.
#[derive(Clone, Copy, Debug)]
pub struct RankBlocks {
    /// The data-parallel rank.
    pub rank: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
}

/// A running publisher. It ends after its [`EventSender`] was dropped.
pub struct EventPublisher {
    thread: JoinHandle<()>,
    source: Value,
}

impl EventPublisher {
    /// Starts the thread `name`, and returns the step loop's end.
    ///
    /// # Errors
    /// When the system refuses the thread or its sockets.
    pub fn start(
        name: &str,
        config: &KvEventsConfig,
        sockets: EventSockets,
        blocks: RankBlocks,
        metrics: KvEventMetrics,
    ) -> io::Result<(EventSender, Self)> {
        let source = config.source(sockets.endpoint(), sockets.replay_endpoint());
        tracing::info!(
            event = "kv_events_enabled", rank = blocks.rank, endpoint = %sockets.endpoint(), "KV events are published"
        );
        let audience = Audience::default();
        let log = Arc::new(SharedLog::new(config, audience.clone(), metrics.clone()));
        let (queue, batches) = channel(config.max_queue_size);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        {
            let _context = runtime.enter();
            sockets.serve(&tasks, &stop, &log)?;
        }
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || publish(&runtime, batches, &log, blocks, &tasks, &stop))?;
        Ok((EventSender::new(queue, audience, metrics), Self { thread, source }))
    }

    /// The publisher's entry in the reply to `GET /kv_event_sources`.
    #[must_use]
    pub fn source(&self) -> &Value {
        &self.source
    }

    /// Waits for the end of the thread, whose sender was dropped.
    pub fn join(self) {
        // The thread's panic was logged.
        drop(self.thread.join());
    }
}

/// Publishes each batch until the sender is dropped. Subscribers then get the last messages.
fn publish(
    runtime: &Runtime,
    mut batches: Receiver<QueuedBatch>,
    log: &SharedLog,
    blocks: RankBlocks,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    runtime.block_on(async {
        while let Some(batch) = batches.recv().await {
            let payload = encode(batch.at, &batch.events, blocks.rank, blocks.block_tokens);
            log.push(EventMessage { sequence: batch.sequence, payload: payload.into() });
        }
        log.close();
        stop.cancel();
        tasks.close();
        // Subscribers that do not read are left behind.
        drop(tokio::time::timeout(FLUSH_TIMEOUT, tasks.wait()).await);
    });
}
