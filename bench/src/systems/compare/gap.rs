//! One round of clients that leave in the gap: the prefill engine has lent, and the decode engine has not looked yet.
//!
//! When that is, the prefill engine's event log says; what becomes of the blocks, too.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::event_log::EventLog;
use serde::Serialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::calm::{client, prompt};
use super::{CompareArgs, Contender};
use crate::BenchError;
use crate::load::{Call, Connections, Endpoint, Leave, Manner, Moment, Outcome, Wish};
use crate::sim::engines::{Role, SimFleet};

/// Victims at a time: a storm, but none that fills a queue.
const AT_ONCE: usize = 8;
/// After a lease's end its blocks are home within this time, on a machine that has other work.
const SLACK: Duration = Duration::from_secs(5);
/// Events that are looked at in one go.
const PAGE: usize = 4_096;

/// What became of one client's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// The client did not leave in the gap: nothing was lent, or its answer was there before.
    Missed,
    /// They were given back.
    Home,
    /// They came home when the lease's time was up.
    Stranded,
    /// They had not come home when the log was looked at no longer.
    Lost,
}

/// One client that was to leave in the gap, and what the prefill engine wrote down of its blocks.
#[derive(Clone, Debug, Serialize)]
pub struct CancelledRequest {
    /// Which round.
    pub round: usize,
    /// The `user` of its request, which the engine's events carry.
    pub tag: String,
    /// What became of its blocks.
    pub fate: Fate,
    /// When it had left, microseconds since the Unix epoch.
    pub left_us: Option<u64>,
    /// When they were lent, by the engine's log.
    pub lent_us: Option<u64>,
    /// When they were free.
    pub freed_us: Option<u64>,
    /// Why the lease ended, in the engine's word.
    pub reason: Option<String>,
    /// How many.
    pub blocks: u64,
    /// From its leaving until they were home; of lost ones, until nobody looked any more.
    pub after_ms: f64,
}

/// Reads an engine's log on, and keeps what is of interest by tag and kind.
struct Watch {
    log: Arc<EventLog>,
    next: u64,
    seen: HashMap<(String, String), Value>,
}

impl Watch {
    fn of(fleet: &SimFleet) -> Result<Self, BenchError> {
        let log = fleet.log(Role::Prefill, 0).ok_or("the prefill engine has ended")?;
        Ok(Self { next: log.latest(), log, seen: HashMap::new() })
    }

    /// Waits for that event of that request.
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
    contender: &Contender,
    round: usize,
) -> Result<Vec<CancelledRequest>, BenchError> {
    let client = client(contender, Connections::Fresh).await?;
    let mut watch = Watch::of(fleet)?;
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
                let wish = Wish::new(Endpoint::Completions, &args.model, &prompt, args.output_tokens as u32);
                let ask = Wish { user: Some(&tag), ..wish }.ask();
                let call = client.call(&ask, &Leave::When(leaves), Manner::Fin).await;
                (tag, call)
            });
        }
        for (tag, leave) in &leaving {
            // One that is never lent leaves all the same, and is counted as missed.
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
            cancelled.push(watch.judge(args, (round, tag), call).await);
        }
    }
    Ok(cancelled)
}

impl Watch {
    async fn judge(
        &mut self,
        args: &CompareArgs,
        (round, tag): (usize, String),
        call: &Call,
    ) -> CancelledRequest {
        let lent = self.until(&tag, "lease_opened", Duration::ZERO).await;
        let mut request = CancelledRequest {
            round,
            fate: Fate::Missed,
            left_us: call.left.map(Moment::us),
            lent_us: lent.as_ref().and_then(|lent| lent["at_us"].as_u64()),
            freed_us: None,
            reason: None,
            blocks: lent.as_ref().and_then(|lent| lent["blocks"].as_u64()).unwrap_or(0),
            after_ms: 0.0,
            tag,
        };
        let (Some(_), Some(left), Outcome::Left) = (lent, call.left, &call.outcome) else { return request };
        if !call.tokens.is_empty() {
            return request;
        }
        let within = Duration::from_millis(args.lease_ms) + SLACK;
        let Some(freed) = self.until(&request.tag, "freed", within).await else {
            request.fate = Fate::Lost;
            request.after_ms = Moment::now().since(left).as_secs_f64() * 1e3;
            return request;
        };
        let ended = self.until(&request.tag, "lease_ended", Duration::ZERO).await;
        request.reason = ended.and_then(|ended| ended["reason"].as_str().map(str::to_owned));
        request.fate = match request.reason.as_deref() {
            Some("lease_expired") => Fate::Stranded,
            _ => Fate::Home,
        };
        request.freed_us = freed["at_us"].as_u64();
        request.after_ms = request.freed_us.unwrap_or(0).saturating_sub(left.us()) as f64 / 1e3;
        request
    }
}
