//! One round of clients that leave in the gap: the prefill engine has lent, and the decode engine has not looked yet.
//!
//! When that is, the prefill engine's event log says; what becomes of the blocks, too.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::event_log::EventLog;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::calm::{client, prompt};
use super::{CompareArgs, Contender};
use crate::BenchError;
use crate::load::{Call, Connections, Endpoint, Leave, Manner, Moment, Outcome, Wish};
use crate::sim_fleet::{Role, SimFleet};

/// Victims at a time: a storm, but none that fills a queue.
const AT_ONCE: usize = 8;
/// After a lease's end its blocks are home within this time, on a machine that has other work.
const SLACK: Duration = Duration::from_secs(5);
/// Events that are looked at in one go.
const PAGE: usize = 4_096;

/// What became of one client's blocks.
pub(super) enum Victim {
    /// The client did not leave in the gap: nothing was lent, or its answer was there before.
    Missed,
    Home {
        /// From the client's leaving.
        after_ms: f64,
        blocks: u64,
        stranded: bool,
    },
    /// They had not come home when the log was looked at no longer.
    Lost { after_ms: f64, blocks: u64 },
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
) -> Result<Vec<Victim>, BenchError> {
    let client = client(contender, Connections::Fresh).await?;
    let mut watch = Watch::of(fleet)?;
    let mut victims = Vec::new();
    for first in (0..args.victims).step_by(AT_ONCE) {
        let mut calls = tokio::task::JoinSet::new();
        let mut leaving = Vec::new();
        for number in first..args.victims.min(first + AT_ONCE) {
            let (tag, leave) = (format!("{}-{round}-{number}", contender.name), CancellationToken::new());
            let (client, args, leaves) = (client.clone(), args.clone(), leave.clone());
            leaving.push((tag.clone(), leave));
            calls.spawn(async move {
                let prompt = prompt(round * args.victims + number, args.prompt_tokens);
                let wish = Wish::new(Endpoint::Completions, &args.model, &prompt, args.output_tokens as u32);
                let ask = Wish { user: Some(&tag), ..wish }.ask();
                let call = client.call(&ask, &Leave::When(leaves), Manner::Fin).await;
                (tag, call)
            });
        }
        for (tag, leave) in &leaving {
            // One that is never lent leaves all the same, and is counted as missed.
            watch.until(tag, "lent", SLACK).await;
            leave.cancel();
        }
        let mut left = HashMap::new();
        while let Some(done) = calls.join_next().await {
            let (tag, call) = done?;
            left.insert(tag, call);
        }
        for (tag, _) in leaving {
            victims.push(watch.judge(args, &tag, &left[&tag]).await);
        }
    }
    Ok(victims)
}

impl Watch {
    async fn judge(&mut self, args: &CompareArgs, tag: &str, call: &Call) -> Victim {
        let lent = self.until(tag, "lent", Duration::ZERO).await;
        let (Some(lent), Some(left), Outcome::Left) = (lent, call.left, &call.outcome) else {
            return Victim::Missed;
        };
        if !call.tokens.is_empty() {
            return Victim::Missed;
        }
        let blocks = lent["blocks"].as_u64().unwrap_or(0);
        let within = Duration::from_millis(args.lease_ms) + SLACK;
        let Some(freed) = self.until(tag, "freed", within).await else {
            return Victim::Lost { after_ms: Moment::now().since(left).as_secs_f64() * 1e3, blocks };
        };
        let ended = self.until(tag, "lease_ended", Duration::ZERO).await;
        let after_us = freed["at_us"].as_u64().unwrap_or(0).saturating_sub(left.us());
        let stranded = ended.is_some_and(|ended| ended["reason"] == "lease_expired");
        Victim::Home { after_ms: after_us as f64 / 1e3, blocks, stranded }
    }
}
