//! The legs of one call, built from the events of its engines.

#[cfg(test)]
mod tests;

use baton_connector::lease::CloseCause;

use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::{ClientTimes, EventRecord};

/// The part of one engine in a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LegTimeline {
    pub(crate) engine: usize,
    /// A prefill leg: it leases its blocks and does not decode.
    pub(crate) produces: bool,
    /// A decode leg: it fetches the blocks of another engine.
    pub(crate) fetches: bool,
    pub(crate) queued: Option<u64>,
    pub(crate) started: Option<u64>,
    /// The time, and the prompt tokens that were computed or cached by then.
    pub(crate) computed: Vec<(u64, u64)>,
    pub(crate) first_token: Option<u64>,
    pub(crate) fetching: Option<u64>,
    /// Blocks that the fetch writes.
    fetches_blocks: u64,
    pub(crate) fetched: Option<(u64, String)>,
    /// The times of all aborts of the leg and releases of its lease.
    pub(crate) aborts: Vec<u64>,
    /// Time and blocks.
    pub(crate) leased: Option<(u64, u64)>,
    /// When the reply was written or dropped; `true` if it was written. Not every engine logs this event.
    pub(crate) replied: Option<(u64, bool)>,
    /// Time until the unread lease expires, microseconds, if the engine logs it.
    pub(crate) lease_time: Option<u64>,
    /// Time and reason.
    pub(crate) lease_ended: Option<(u64, String)>,
    pub(crate) ended: Option<LegEnd>,
    /// Time and blocks. More than one entry means that blocks were freed twice.
    pub(crate) freed: Vec<(u64, u64)>,
    pub(crate) refused: bool,
}

/// The end of a leg.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LegEnd {
    pub(crate) at: u64,
    pub(crate) outcome: String,
    pub(crate) generated: u64,
    pub(crate) computed: u64,
    pub(crate) blocks: u64,
}

/// Whether engines received the abort of a cancelled request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbortDelivery {
    /// No engine had work for the request, or each completed its leg within [`RACE_US`] without an abort.
    NotNeeded,
    /// The time of the last abort.
    Received(u64),
    /// An engine received no abort and worked for longer than [`RACE_US`].
    NotReceived,
}

/// An engine that completes a leg this soon after the cancel needs no abort, microseconds.
pub(crate) const RACE_US: u64 = 20_000;

/// The reason of a lease that an abort by request id ended.
const ABORTED: &str = "aborted";

/// A reply is written within this time after its lease is opened, microseconds. On a vLLM 0.32 pair a reply crossed a
/// half-close by at most 1 ms.
const REPLY_US: u64 = 1_000;

/// The close causes of a lease that expired and of a lease that was read completely.
fn expired() -> &'static str {
    CloseCause::Expired.label()
}

fn read_whole() -> &'static str {
    CloseCause::Fetched.label()
}

/// The legs of a call on all engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Timeline {
    pub(crate) legs: Vec<LegTimeline>,
}

impl Timeline {
    /// Adds one event. Events of one engine arrive in order.
    pub(crate) fn apply(&mut self, event: &EventRecord) {
        let leg = self.leg(event);
        let at = event.at_us;
        match event.kind.as_str() {
            "queued" => {
                leg.queued = Some(at);
                leg.produces = event.leg.as_deref() == Some("prefill");
                leg.fetches = event.leg.as_deref() == Some("decode");
            }
            "refused" => leg.refused = true,
            "started" => {
                leg.started.get_or_insert(at);
            }
            "computed" => leg.computed.push((at, event.tokens.unwrap_or(0))),
            "fetching" => {
                leg.fetching = Some(at);
                leg.fetches_blocks = event.blocks.unwrap_or(0);
            }
            "fetched" => leg.fetched = Some((at, event.result.clone().unwrap_or_default())),
            "first_token" => leg.first_token = Some(at),
            "abort" => leg.aborts.push(at),
            "lease_opened" => {
                leg.leased = Some((at, event.blocks.unwrap_or(0)));
                leg.lease_time = event.left_ms.map(|left| left.saturating_mul(1_000));
            }
            // A decode leg on the same engine has a later reply.
            "replied" => {
                leg.replied.get_or_insert((at, event.result.as_deref() == Some("sent")));
            }
            "lease_ended" => {
                let reason = event.reason.clone().unwrap_or_default();
                if reason != read_whole() && reason != expired() {
                    leg.aborts.push(at);
                }
                leg.lease_ended = Some((at, reason));
            }
            "ended" => {
                leg.ended = Some(LegEnd {
                    at,
                    outcome: event.outcome.clone().unwrap_or_default(),
                    generated: event.generated.unwrap_or(0),
                    computed: event.computed.unwrap_or(0),
                    blocks: event.blocks.unwrap_or(0),
                });
            }
            "freed" => leg.freed.push((at, event.blocks.unwrap_or(0))),
            // Later versions of the engine may log more kinds. They change nothing here.
            _ => {}
        }
    }

    /// The leg of an event. An engine with two requests for one call (a retry or another round) has two legs.
    fn leg(&mut self, event: &EventRecord) -> &mut LegTimeline {
        let begins = event.kind == "queued" || event.kind == "refused";
        let ours = |leg: &LegTimeline| leg.engine == event.engine;
        // Two legs of one request can be on one engine. These events belong to the leg that can cause them.
        let of_lease = matches!(event.kind.as_str(), "lease_opened" | "lease_ended" | "replied");
        let of_fetch = matches!(event.kind.as_str(), "fetching" | "fetched");
        let fits = |leg: &LegTimeline| ours(leg) && (!of_lease || leg.produces) && (!of_fetch || leg.fetches);
        let found = match event.kind.as_str() {
            "freed" => {
                self.legs.iter().rposition(|leg| ours(leg) && leg.ended.is_some() && leg.freed.is_empty())
            }
            "ended" => self.legs.iter().rposition(|leg| ours(leg) && leg.ended.is_none()),
            _ => None,
        };
        let found =
            found.or_else(|| self.legs.iter().rposition(fits)).or_else(|| self.legs.iter().rposition(ours));
        let at = match found {
            Some(at) if !begins => at,
            // An abort by request id may arrive before its request.
            Some(at) if self.legs[at].queued.is_none() && !self.legs[at].refused => at,
            _ => {
                self.legs.push(LegTimeline { engine: event.engine, ..LegTimeline::default() });
                self.legs.len() - 1
            }
        };
        &mut self.legs[at]
    }

    /// The phase of a call at this moment; `None` if the call had ended on its engines.
    pub(crate) fn phase_at(&self, seen: &ClientTimes, at: u64) -> Option<Phase> {
        let before = |moment: Option<u64>| moment.is_some_and(|moment| moment <= at);
        if seen.stream && before(seen.first_token) {
            // The token may come from any leg. The next lines check whether its engine has ended.
            let over = self.legs.iter().filter(|leg| !leg.produces).all(|leg| before(leg.ended_at()));
            let decodes = self.legs.iter().any(|leg| !leg.produces);
            return if over && decodes { None } else { Some(Phase::Stream) };
        }
        // The last leg at that moment determines the phase.
        let there = self.legs.iter().filter(|leg| before(leg.queued));
        let Some(leg) = there.max_by_key(|leg| (!leg.produces, leg.queued)) else {
            return Some(Phase::Queued);
        };
        if leg.produces {
            let leased = leg.leased.map(|(at, _)| at).filter(|_| before(leg.ended_at()));
            let read =
                leg.lease_ended.as_ref().filter(|(_, reason)| reason == read_whole()).map(|(at, _)| *at);
            if before(read) {
                // An engine that is not watched has read the lease.
                return Some(Phase::FirstToken);
            }
            let unwritten = match leg.replied {
                Some((when, sent)) => !sent || when > at,
                // A gateway that has the reply releases the lease by its handle.
                None => leg.lease_ended.as_ref().is_some_and(|(_, reason)| reason == ABORTED),
            };
            return Some(match (before(leg.started), before(leased)) {
                (_, true) if unwritten => Phase::Reply,
                (_, true) => Phase::Gap,
                (true, false) => Phase::Prefill,
                (false, false) => Phase::Queued,
            });
        }
        if before(leg.ended_at()) {
            return None;
        }
        if !leg.fetches {
            return Some(match (before(leg.started), before(leg.first_token)) {
                (false, _) => Phase::Queued,
                (true, false) => Phase::Prefill,
                (true, true) if seen.stream => Phase::FirstToken,
                (true, true) => Phase::Unary,
            });
        }
        let mut producers = self.legs.iter().filter(|leg| leg.produces);
        let computes = producers.clone().any(|leg| !before(leg.ended_at()));
        let begun = producers.any(|leg| before(leg.started));
        Some(match (before(leg.fetching), before(leg.fetched.as_ref().map(|(at, _)| *at))) {
            // Both legs at once: the decode leg has blocks before the prefill begins.
            (_, false) if computes && !begun => Phase::Queued,
            // An early handoff, or both legs at once: the prefill continues.
            (_, false) if computes => Phase::Prefill,
            (false, false) if before(leg.started) => Phase::FirstToken,
            (false, false) => Phase::Gap,
            (true, false) => Phase::Fetch,
            (_, true) if !seen.stream && before(leg.first_token) => Phase::Unary,
            (_, true) => Phase::FirstToken,
        })
    }

    /// The time of a cancel by the clocks of the engines: before the first abort that ended a leg because of this
    /// cancel.
    pub(crate) fn cancel_before_abort(&self, cancelled_at: u64) -> u64 {
        let aborted =
            self.legs.iter().filter_map(|leg| leg.ended.as_ref()).filter(|end| end.outcome == "abort");
        let just = aborted.map(|end| end.at).filter(|at| *at <= cancelled_at && cancelled_at - *at < RACE_US);
        just.min().map_or(cancelled_at, |at| at.saturating_sub(1))
    }

    /// When the last block of all legs with blocks was freed; `None` if blocks are still held.
    pub(crate) fn all_freed_at(&self) -> Option<u64> {
        let held = self.legs.iter().filter(|leg| leg.held() > 0 || leg.is_at_work());
        held.map(LegTimeline::freed_at).try_fold(0, |last, at| Some(last.max(at?)))
    }

    /// Engines with unfinished legs, and what is missing.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = (usize, &'static str)> {
        self.legs.iter().filter_map(|leg| Some((leg.engine, leg.open()?)))
    }

    /// A second engine computed the prompt and leased its blocks.
    pub(crate) fn had_handoff(&self) -> bool {
        self.legs.iter().any(|leg| leg.leased.is_some()) && self.legs.iter().any(|leg| leg.fetching.is_some())
    }

    /// Begin and end of each completed phase.
    pub(crate) fn spans(&self, seen: &ClientTimes) -> Vec<(Phase, u64, u64)> {
        let producer = self.legs.iter().find(|leg| leg.produces);
        let reader = self.legs.iter().find(|leg| leg.fetches);
        let only = self.legs.iter().find(|leg| !leg.produces && !leg.fetches);
        let before = producer.or(only);
        let started = before.and_then(|leg| leg.started);
        let alone = only.and_then(|leg| leg.first_token);
        // A lease that grows is opened before its prefill has ended.
        let leased = producer.and_then(|leg| Some(leg.leased?.0.max(leg.ended.as_ref()?.at)));
        let written = producer.and_then(|leg| leg.replied).filter(|(_, sent)| *sent).map(|(at, _)| at);
        // If the reply is not logged, the decode engine's leg limits its time.
        let replied = written.or_else(|| Some(reader?.queued?.min(leased? + REPLY_US)));
        let fetching = reader.and_then(|leg| leg.fetching);
        let fetched = reader.and_then(|leg| leg.fetched.as_ref()).map(|(at, _)| *at);
        let decodes = reader.or(only).and_then(|leg| leg.first_token);
        let spans = [
            (Phase::Queued, before.and_then(|leg| leg.queued), started),
            (Phase::Prefill, started, leased.or(alone)),
            (Phase::Reply, leased, replied),
            (Phase::Gap, written.or(leased), fetching),
            (Phase::Fetch, fetching.max(leased.filter(|_| fetching.is_some())), fetched),
            (Phase::FirstToken, fetched.or(alone), seen.first_token),
            (Phase::Unary, decodes.filter(|_| !seen.stream), seen.done),
        ];
        let there = |(phase, from, to): (Phase, Option<u64>, Option<u64>)| Some((phase, from?, to?));
        spans.into_iter().filter_map(there).filter(|(_, from, to)| from <= to).collect()
    }

    /// Block-seconds after this moment; blocks that are not freed count until `end`.
    pub(crate) fn block_seconds_after(&self, at: u64, end: u64) -> f64 {
        let of = |leg: &LegTimeline| {
            let freed = leg.freed_at().unwrap_or(end);
            leg.held() as f64 * freed.saturating_sub(at.max(leg.queued.unwrap_or(at))) as f64 / 1e6
        };
        self.legs.iter().map(of).sum()
    }

    /// Whether the engines with work for this call at `at` received its abort.
    pub(crate) fn abort_delivery(&self, at: u64) -> AbortDelivery {
        let mut delivery = AbortDelivery::NotNeeded;
        for leg in self.legs.iter().filter(|leg| leg.holds_at(at)) {
            match leg.aborted_after(at) {
                // The leg completed soon: an abort was not needed.
                None if leg.completes_soon(at) => {}
                None => return AbortDelivery::NotReceived,
                Some(when) => {
                    let before = if let AbortDelivery::Received(before) = delivery { before } else { 0 };
                    delivery = AbortDelivery::Received(before.max(when));
                }
            }
        }
        delivery
    }

    /// Tokens of the prompt and of the response that were computed after this moment. `seen`: response tokens that the
    /// client had received by then.
    pub(crate) fn work_after(&self, at: u64, seen: u64) -> (u64, u64) {
        let (mut prompt, mut answer) = (0, 0);
        for leg in &self.legs {
            let before = leg.computed.iter().filter(|(when, _)| *when <= at).map(|(_, tokens)| *tokens).max();
            let last = leg.computed.iter().map(|(_, tokens)| *tokens).max();
            let there =
                leg.ended.as_ref().map_or(0, |ended| last.unwrap_or(0).saturating_sub(ended.computed));
            // Cached and fetched tokens need no work.
            prompt += last.unwrap_or(0).saturating_sub(before.unwrap_or(there));
            if let Some(ended) = leg.ended.as_ref().filter(|ended| !leg.produces && ended.at > at) {
                answer += match leg.first_token {
                    // Tokens are spread evenly from the first one to the end.
                    Some(first) if ended.at > first => {
                        let after = (ended.at - at.max(first)) as f64 / (ended.at - first) as f64;
                        (ended.generated as f64 * after).round() as u64
                    }
                    _ => ended.generated.saturating_sub(seen),
                };
            }
        }
        (prompt, answer)
    }

    /// The prefill engine has logged its reply, written or dropped.
    pub(crate) fn logs_reply(&self) -> bool {
        self.legs.iter().any(|leg| leg.produces && leg.replied.is_some())
    }

    /// The prefill engine has dropped its reply.
    pub(crate) fn dropped_reply(&self) -> bool {
        self.legs.iter().any(|leg| leg.produces && leg.replied.is_some_and(|(_, sent)| !sent))
    }

    /// Whether a lease expired.
    pub(crate) fn expired(&self) -> bool {
        let ended = self.legs.iter().filter_map(|leg| leg.lease_ended.as_ref());
        ended.into_iter().any(|(_, reason)| reason == expired())
    }
}

impl LegTimeline {
    fn ended_at(&self) -> Option<u64> {
        self.ended.as_ref().map(|ended| ended.at)
    }

    /// When its blocks were freed for the first time.
    pub(crate) fn freed_at(&self) -> Option<u64> {
        self.freed.first().map(|(at, _)| *at)
    }

    /// Blocks that the leg held at its end.
    pub(crate) fn held(&self) -> u64 {
        let freed = self.freed.first().map(|(_, blocks)| *blocks);
        let ended = self.ended.as_ref().map(|ended| ended.blocks).filter(|blocks| *blocks > 0);
        let leased = self.leased.map(|(_, blocks)| blocks);
        // A leg without an end holds the blocks that it fetches. An engine logs computed blocks only later.
        let fetches = (self.fetches_blocks > 0 && self.ended.is_none()).then_some(self.fetches_blocks);
        freed.or(leased).or(ended).or(fetches).unwrap_or(0)
    }

    /// What is missing for the leg to be finished.
    fn open(&self) -> Option<&'static str> {
        if self.queued.is_some() && self.ended.is_none() {
            return Some("it has not ended");
        }
        if self.leased.is_some() && self.lease_ended.is_none() {
            return Some("its lease is live");
        }
        // A leg gets blocks with its first step or its fetch.
        let held = self.started.is_some() || self.fetching.is_some() || self.leased.is_some();
        (held && self.freed.is_empty()).then_some("its blocks are not freed")
    }

    /// The leg has begun and not ended, as far as known.
    pub(crate) fn is_at_work(&self) -> bool {
        (self.started.is_some() || self.fetching.is_some()) && self.ended.is_none()
    }

    /// When the leg was aborted after this moment, its lease was released, or its lease was read completely.
    pub(crate) fn aborted_after(&self, at: u64) -> Option<u64> {
        let aborted = self.ended.as_ref().filter(|ended| ended.outcome == "abort" && ended.at >= at);
        let later = self.aborts.iter().find(|abort| **abort >= at).copied().or(aborted.map(|ended| ended.at));
        let read =
            self.lease_ended.as_ref().filter(|(_, reason)| reason == read_whole()).map(|(when, _)| *when);
        // The clocks may show an abort shortly before its cause.
        let just = self.aborts.iter().rev().find(|abort| **abort < at && at - **abort < RACE_US).copied();
        later.or(read).or(just.map(|_| at))
    }

    /// The leg freed its blocks so soon after this moment that it needed no abort.
    fn completes_soon(&self, at: u64) -> bool {
        self.freed.first().is_some_and(|(freed, _)| *freed <= at + RACE_US)
    }

    /// Whether the leg had work or blocks at this moment, or got them later.
    pub(crate) fn holds_at(&self, at: u64) -> bool {
        let over = match (self.freed.first(), &self.ended) {
            (Some((freed, _)), _) => *freed <= at,
            (None, Some(ended)) => self.leased.is_none() && ended.at <= at,
            (None, None) => false,
        };
        !over && !self.refused
    }
}
