//! The legs of one call, built from the events of its engines.

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
    /// When the reply was written or dropped; `true` if it was written. Few engines log this event.
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
            "replied" => leg.replied = Some((at, event.result.as_deref() == Some("sent"))),
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
            let unwritten = leg.replied.is_some_and(|(when, sent)| !sent || when > at);
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
        let computes = self.legs.iter().any(|leg| leg.produces && !before(leg.ended_at()));
        Some(match (before(leg.fetching), before(leg.fetched.as_ref().map(|(at, _)| *at))) {
            // An early handoff: the prefill continues.
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
        let fetching = reader.and_then(|leg| leg.fetching);
        let fetched = reader.and_then(|leg| leg.fetched.as_ref()).map(|(at, _)| *at);
        let decodes = reader.or(only).and_then(|leg| leg.first_token);
        let spans = [
            (Phase::Queued, before.and_then(|leg| leg.queued), started),
            (Phase::Prefill, started, leased.or(alone)),
            (Phase::Reply, leased.filter(|_| written.is_some()), written),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `kind@at`, on engine 0 (prefill) or 1 (decode).
    fn event(engine: usize, kind: &str, at: u64) -> EventRecord {
        let leg = (kind == "queued").then(|| if engine == 0 { "prefill" } else { "decode" }.to_owned());
        EventRecord { engine, at_us: at, kind: kind.into(), leg, ..EventRecord::default() }
    }

    fn timeline_of(events: &[(usize, &str, u64)]) -> Timeline {
        let mut timeline = Timeline::default();
        for &(engine, kind, at) in events {
            let mut event = event(engine, kind, at);
            match kind {
                "computed" => event.tokens = Some(at),
                "lease_opened" => event.blocks = Some(7),
                "freed" => event.blocks = Some(if engine == 0 { 7 } else { 8 }),
                "fetching" => event.blocks = Some(6),
                "lease_ended" => event.reason = Some("transfer_done".into()),
                "ended" => (event.generated, event.computed) = (Some(9), Some(100)),
                _ => {}
            }
            timeline.apply(&event);
        }
        timeline
    }

    const WHOLE: [(usize, &str, u64); 18] = [
        (0, "queued", 10),
        (0, "started", 20),
        (0, "computed", 60),
        (0, "computed", 100),
        (0, "first_token", 100),
        (0, "ended", 100),
        (0, "lease_opened", 101),
        (1, "queued", 110),
        (1, "fetching", 120),
        (1, "fetched", 140),
        (0, "lease_ended", 141),
        (0, "freed", 142),
        (1, "started", 145),
        (1, "computed", 150),
        (1, "first_token", 150),
        (1, "abort", 300),
        (1, "ended", 310),
        (1, "freed", 312),
    ];

    #[test]
    fn a_call_goes_through_every_phase_in_order() {
        let timeline = timeline_of(&WHOLE);
        let mut seen = ClientTimes {
            stream: true,
            first_token: Some(160),
            last_token: Some(200),
            ..ClientTimes::default()
        };
        let phase = |seen: &ClientTimes, at| timeline.phase_at(seen, at);
        let expected = [
            (5, Phase::Queued),
            (15, Phase::Queued),
            (20, Phase::Prefill),
            (99, Phase::Prefill),
            (101, Phase::Gap),
            (115, Phase::Gap),
            (120, Phase::Fetch),
            (140, Phase::FirstToken),
            (159, Phase::FirstToken),
            (160, Phase::Stream),
            (309, Phase::Stream),
        ];
        for (at, expected) in expected {
            assert_eq!(phase(&seen, at), Some(expected), "at {at}");
        }
        assert_eq!(phase(&seen, 310), None);
        seen = ClientTimes::default();
        assert_eq!((phase(&seen, 145), phase(&seen, 160)), (Some(Phase::FirstToken), Some(Phase::Unary)));
    }

    #[test]
    fn spans_are_what_the_phases_were() {
        let seen = ClientTimes { stream: true, first_token: Some(160), ..ClientTimes::default() };
        let spans = timeline_of(&WHOLE).spans(&seen);
        let expected = [
            (Phase::Queued, 10, 20),
            (Phase::Prefill, 20, 101),
            (Phase::Gap, 101, 120),
            (Phase::Fetch, 120, 140),
            (Phase::FirstToken, 140, 160),
        ];
        assert_eq!(spans, expected);
        let whole = ClientTimes { done: Some(400), ..ClientTimes::default() };
        assert!(timeline_of(&WHOLE).spans(&whole).contains(&(Phase::Unary, 150, 400)));
        // A lease that grows is read during the prefill: there is no gap.
        let early = timeline_of(&[
            (0, "queued", 10),
            (0, "started", 20),
            (0, "lease_opened", 30),
            (1, "queued", 35),
            (1, "fetching", 40),
            (0, "ended", 80),
            (1, "fetched", 90),
        ]);
        let spans = early.spans(&seen);
        assert!(
            spans.contains(&(Phase::Prefill, 20, 80)) && spans.contains(&(Phase::Fetch, 80, 90)),
            "{spans:?}"
        );
        assert!(!spans.iter().any(|(phase, ..)| *phase == Phase::Gap), "{spans:?}");
        assert_eq!(
            (early.phase_at(&seen, 50), early.phase_at(&seen, 85)),
            (Some(Phase::Prefill), Some(Phase::Fetch))
        );
    }

    #[test]
    fn the_reply_phase_lasts_from_the_lease_to_the_written_reply() {
        let timeline = |result: &str| {
            let mut timeline = timeline_of(&WHOLE[..7]);
            let result = Some(result.to_owned());
            timeline.apply(&EventRecord { result, ..event(0, "replied", 105) });
            WHOLE[7..].iter().for_each(|&(engine, kind, at)| timeline.apply(&event(engine, kind, at)));
            timeline
        };
        let seen = ClientTimes { stream: true, first_token: Some(160), ..ClientTimes::default() };
        let sent = timeline("sent");
        let phases = [99, 101, 104, 105, 119].map(|at| sent.phase_at(&seen, at));
        let expected = [Phase::Prefill, Phase::Reply, Phase::Reply, Phase::Gap, Phase::Gap].map(Some);
        assert_eq!(phases, expected);
        let spans = sent.spans(&seen);
        assert!(
            spans.contains(&(Phase::Reply, 101, 105)) && spans.contains(&(Phase::Gap, 105, 120)),
            "{spans:?}"
        );
        // A reply that was dropped was never written.
        let mut dropped = timeline_of(&WHOLE[..7]);
        let result = Some("dropped".to_owned());
        dropped.apply(&EventRecord { result, ..event(0, "replied", 105) });
        assert_eq!(dropped.phase_at(&seen, 110), Some(Phase::Reply));
        assert!(!dropped.spans(&seen).iter().any(|(phase, ..)| matches!(phase, Phase::Reply | Phase::Gap)));
    }

    #[test]
    fn engines_that_hold_blocks_are_named() {
        let open = |count: usize| timeline_of(&WHOLE[..count]).unfinished().collect::<Vec<_>>();
        assert_eq!(open(0), []);
        assert_eq!(open(1), [(0, "it has not ended")]);
        assert_eq!(open(7), [(0, "its lease is live")]);
        assert_eq!(open(9), [(0, "its lease is live"), (1, "it has not ended")]);
        assert_eq!(open(11), [(0, "its blocks are not freed"), (1, "it has not ended")]);
        assert_eq!((open(17), open(18)), (vec![(1, "its blocks are not freed")], vec![]));
        assert!(timeline_of(&WHOLE).had_handoff());
        let unheld = timeline_of(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]);
        assert_eq!(unheld.unfinished().count(), 0, "it never held a block");
    }

    #[test]
    fn held_blocks_aborts_and_work_after_a_cancel_are_counted() {
        let timeline = timeline_of(&WHOLE);
        assert_eq!(timeline.all_freed_at(), Some(312));
        // 7 blocks of P for 42 µs and 8 blocks of D for 202 µs; the leg of D begins 10 µs later.
        let held = timeline.block_seconds_after(100, 1_000);
        assert!((held - (7.0 * 42.0 + 8.0 * 202.0) / 1e6).abs() < 1e-12, "{held}");
        assert_eq!(timeline.abort_delivery(200), AbortDelivery::Received(300));
        // At 100 both had work. P received no abort, but its lease was read.
        assert_eq!(timeline.abort_delivery(100), AbortDelivery::Received(300));
        assert_eq!(timeline_of(&WHOLE[..7]).abort_delivery(50), AbortDelivery::NotReceived);
        assert_eq!(timeline.abort_delivery(312), AbortDelivery::NotNeeded);
        assert_eq!(timeline.work_after(60, 0), (40 + (150 - 50), 9));
        // 110 of the 160 µs in which it generated nine tokens.
        assert_eq!(timeline.work_after(200, 4), (0, 6));
        assert!(!timeline.expired());
    }

    #[test]
    fn all_blocks_are_freed_only_when_each_block_is() {
        let timeline = timeline_of(&WHOLE[..7]);
        assert_eq!(timeline.all_freed_at(), None);
        assert!((timeline.block_seconds_after(101, 1_000_101) - 7.0).abs() < 1e-9);
        // The leg still computes: its blocks are not freed.
        assert_eq!(timeline_of(&WHOLE[..2]).all_freed_at(), None);
        // The leg holds the blocks that it fetches, even if the engine logs nothing more.
        let hangs = timeline_of(&[(1, "queued", 1), (1, "fetching", 1_000_000)]);
        assert_eq!((hangs.all_freed_at(), hangs.legs[0].held()), (None, 6));
        // Aborted before it held blocks: nothing has to be freed.
        assert_eq!(
            timeline_of(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]).all_freed_at(),
            Some(0)
        );
    }

    #[test]
    fn an_engine_with_two_attempts_has_two_legs() {
        let mut events = WHOLE.to_vec();
        events.extend([
            (1, "queued", 400),
            (1, "fetching", 401),
            (1, "fetched", 402),
            (1, "ended", 403),
            (1, "freed", 404),
        ]);
        let timeline = timeline_of(&events);
        assert_eq!(timeline.legs.len(), 3);
        assert_eq!(timeline.all_freed_at(), Some(404));
        assert_eq!((timeline.legs[1].freed.len(), timeline.legs[2].freed.len()), (1, 1));
        // A second `freed` event of one leg is kept.
        let twice = timeline_of(&[(0, "queued", 1), (0, "ended", 2), (0, "freed", 3), (0, "freed", 4)]);
        assert_eq!(twice.legs[0].freed.len(), 2);
        // An abort before its request does not create a second leg.
        assert_eq!(timeline_of(&[(0, "abort", 1), (0, "queued", 2), (0, "ended", 3)]).legs.len(), 1);
    }
}
