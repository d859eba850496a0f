//! One round of cancels in the gap: the prefill engine has opened a lease, and the decode engine has not accepted
//! the request.
//!
//! The prefill engine's event log determines the time of the cancel, and reports the end of the lease.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_connector_leases::event_log::EventLog;
use serde::Serialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::calm::{client, completion, prompt};
use super::{CompareArgs, CompareTarget};
use crate::BenchError;
use crate::load::{Call, CallOutcome, CancelTrigger, CompletionSpec, Connections, DisconnectKind, Moment};
use crate::sim::engines::{Role, SimFleet};

/// Cancelled requests at a time: enough for a storm, but too few to fill a queue.
const AT_ONCE: usize = 8;
/// Maximum time from the end of a lease until its blocks are free, on a busy machine.
const SLACK: Duration = Duration::from_secs(5);
/// Events per page.
const PAGE: usize = 4_096;

/// The outcome for one client's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GapOutcome {
    /// The client did not cancel in the gap: there was no lease, or the response came before.
    Missed,
    /// The blocks were released.
    Home,
    /// The blocks were freed when the lease expired.
    Stranded,
    /// The blocks were not freed while the log was read.
    Lost,
}

/// One client that was to cancel in the gap, and the prefill engine's events about its blocks.
#[derive(Clone, Debug, Serialize)]
pub struct CancelledRequest {
    /// The round.
    pub round: usize,
    /// The `user` of the request, which is in the engine's events.
    pub tag: String,
    /// The outcome for the blocks.
    pub fate: GapOutcome,
    /// Time of the cancel, microseconds since the Unix epoch.
    pub left_us: Option<u64>,
    /// When the lease was opened, by the engine's log.
    pub lent_us: Option<u64>,
    /// When the blocks were freed.
    pub freed_us: Option<u64>,
    /// Why the lease ended, as in the engine's log.
    pub reason: Option<String>,
    /// Number of blocks.
    pub blocks: u64,
    /// From the cancel until the blocks were freed. For lost blocks, until the end of the observation.
    pub after_ms: f64,
}

/// Reads an engine's log and keeps the events by tag and kind.
struct LogReader {
    log: Arc<EventLog>,
    next: u64,
    seen: HashMap<(String, String), Value>,
}

impl LogReader {
    fn of(fleet: &SimFleet) -> Result<Self, BenchError> {
        let log = fleet.log(Role::Prefill, 0).ok_or("the prefill engine has ended")?;
        Ok(Self { next: log.latest(), log, seen: HashMap::new() })
    }

    /// Waits for this event of this request.
    async fn until(&mut self, tag: &str, kind: &str, within: Duration) -> Option<Value> {
        let key = (tag.to_owned(), kind.to_owned());
        let until = tokio::time::Instant::now() + within;
        loop {
            if let Some(event) = self.seen.get(&key) {
                return Some(event.clone());
            }
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            if left.is_zero() {
                return None;
            }
            let page = self.log.page_within(self.next, PAGE, left).await;
            self.next = page.next;
            for event in page.events {
                if let (Some(tag), Some(kind)) = (event["tag"].as_str(), event["kind"].as_str()) {
                    self.seen.insert((tag.to_owned(), kind.to_owned()), event.clone());
                }
            }
        }
    }
}

pub(super) async fn round(
    args: &CompareArgs,
    fleet: &SimFleet,
    contender: &CompareTarget,
    round: usize,
) -> Result<Vec<CancelledRequest>, BenchError> {
    let client = client(contender, Connections::Fresh).await?;
    let mut watch = LogReader::of(fleet)?;
    let mut cancelled = Vec::new();
    for first in (0..args.cancels).step_by(AT_ONCE) {
        let mut calls = tokio::task::JoinSet::new();
        let mut leaving = Vec::new();
        for number in first..args.cancels.min(first + AT_ONCE) {
            let (tag, leave) = (format!("{}-{round}-{number}", contender.name), CancellationToken::new());
            let (client, args, leaves) = (client.clone(), args.clone(), leave.clone());
            leaving.push((tag.clone(), leave));
            calls.spawn(async move {
                let prompt = prompt(round * args.cancels + number, args.prompt_tokens);
                let ask = CompletionSpec { user: Some(&tag), ..completion(&args, &prompt) }.prepare();
                let call = client.call(&ask, &CancelTrigger::When(leaves), DisconnectKind::Fin).await;
                (tag, call)
            });
        }
        for (tag, leave) in &leaving {
            // A request without a lease is cancelled all the same, and counts as missed.
            watch.until(tag, "lease_opened", SLACK).await;
            leave.cancel();
        }
        let mut left = HashMap::new();
        while let Some(done) = calls.join_next().await {
            let (tag, call) = done?;
            left.insert(tag, call);
        }
        for (tag, _) in leaving {
            let call = &left[&tag];
            cancelled.push(watch.judge(args, round, tag, call).await);
        }
    }
    Ok(cancelled)
}

impl LogReader {
    async fn judge(
        &mut self,
        args: &CompareArgs,
        round: usize,
        tag: String,
        call: &Call,
    ) -> CancelledRequest {
        let lent = self.until(&tag, "lease_opened", Duration::ZERO).await;
        let mut request = CancelledRequest {
            round,
            fate: GapOutcome::Missed,
            left_us: call.left.map(Moment::us),
            lent_us: lent.as_ref().and_then(|lent| lent["at_us"].as_u64()),
            freed_us: None,
            reason: None,
            blocks: lent.as_ref().and_then(|lent| lent["blocks"].as_u64()).unwrap_or(0),
            after_ms: 0.0,
            tag,
        };
        let (Some(_), Some(left), CallOutcome::Left) = (lent, call.left, &call.outcome) else {
            return request;
        };
        if !call.tokens.is_empty() {
            return request;
        }
        let within = Duration::from_millis(args.lease_ms) + SLACK;
        let Some(freed) = self.until(&request.tag, "freed", within).await else {
            request.fate = GapOutcome::Lost;
            request.after_ms = Moment::now().since(left).as_secs_f64() * 1e3;
            return request;
        };
        let ended = self.until(&request.tag, "lease_ended", Duration::ZERO).await;
        request.reason = ended.and_then(|ended| ended["reason"].as_str().map(str::to_owned));
        request.fate = match request.reason.as_deref() {
            Some("lease_expired") => GapOutcome::Stranded,
            _ => GapOutcome::Home,
        };
        request.freed_us = freed["at_us"].as_u64();
        request.after_ms = request.freed_us.unwrap_or(0).saturating_sub(left.us()) as f64 / 1e3;
        request
    }
}
