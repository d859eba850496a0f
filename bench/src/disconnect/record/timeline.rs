//! What became of one call on the engines: its legs, put together from their events.

use baton_connector::lease::Cause;

use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::EventRecord;

/// One engine's part in a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Leg {
    pub(crate) engine: usize,
    /// It lends, and does not decode.
    pub(crate) lends: bool,
    /// It fetches what another engine lends.
    pub(crate) fetches: bool,
    pub(crate) queued: Option<u64>,
    pub(crate) started: Option<u64>,
    /// When so many tokens of the prompt were computed or there.
    pub(crate) computed: Vec<(u64, u64)>,
    pub(crate) first_token: Option<u64>,
    pub(crate) fetching: Option<u64>,
    /// That it reads into.
    fetches_blocks: u64,
    pub(crate) fetched: Option<(u64, String)>,
    /// Every time that it learnt that nobody waits: an abort, or a release of its lease.
    pub(crate) told: Vec<u64>,
    /// Blocks, and when.
    pub(crate) lent: Option<(u64, u64)>,
    /// When its reply was written, or dropped: `true` where it was written. Few engines log it.
    pub(crate) replied: Option<(u64, bool)>,
    /// Microseconds that the lease lives unread, where that is told.
    pub(crate) lease_life: Option<u64>,
    /// Why, and when.
    pub(crate) lease_ended: Option<(u64, String)>,
    pub(crate) ended: Option<Ended>,
    /// Blocks, and when; more than one is a block that was freed twice.
    pub(crate) freed: Vec<(u64, u64)>,
    pub(crate) refused: bool,
}

/// How a leg left its engine's books.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ended {
    pub(crate) at: u64,
    pub(crate) outcome: String,
    pub(crate) generated: u64,
    pub(crate) computed: u64,
    pub(crate) blocks: u64,
}

/// Whether engines have learnt that a client had gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// No engine had work for it, or each was done with it within [`RACE_US`], untold.
    Nobody,
    /// The last of them at this moment.
    All(u64),
    /// One of them never, and it went on for longer than [`RACE_US`].
    Never,
}

/// An engine that is done with a request so soon after its client has gone need not have learnt of that: whether it was told is not asked.
pub(crate) const RACE_US: u64 = 20_000;

/// What a lease's end by time is called, and how one ends that was read to its end.
fn expired() -> &'static str {
    Cause::Expired.label()
}

fn read_whole() -> &'static str {
    Cause::Fetched.label()
}

/// What a client has seen of its call, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) began: u64,
    pub(crate) stream: bool,
    /// The first event of a stream that brought text, and the last so far.
    pub(crate) first_token: Option<u64>,
    pub(crate) last_token: Option<u64>,
    /// The end of a whole answer.
    pub(crate) done: Option<u64>,
}

/// A call on the engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Timeline {
    pub(crate) legs: Vec<Leg>,
}

impl Timeline {
    /// Puts one more event in its place. Events of one engine come in order.
    pub(crate) fn take(&mut self, event: &EventRecord) {
        let leg = self.leg(event);
        let at = event.at_us;
        match event.kind.as_str() {
            "queued" => {
                leg.queued = Some(at);
                leg.lends = event.leg.as_deref() == Some("prefill");
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
            "abort" => leg.told.push(at),
            "lease_opened" => {
                leg.lent = Some((at, event.blocks.unwrap_or(0)));
                leg.lease_life = event.left_ms.map(|left| left.saturating_mul(1_000));
            }
            "replied" => leg.replied = Some((at, event.result.as_deref() == Some("sent"))),
            "lease_ended" => {
                let reason = event.reason.clone().unwrap_or_default();
                if reason != read_whole() && reason != expired() {
                    leg.told.push(at);
                }
                leg.lease_ended = Some((at, reason));
            }
            "ended" => {
                leg.ended = Some(Ended {
                    at,
                    outcome: event.outcome.clone().unwrap_or_default(),
                    generated: event.generated.unwrap_or(0),
                    computed: event.computed.unwrap_or(0),
                    blocks: event.blocks.unwrap_or(0),
                });
            }
            "freed" => leg.freed.push((at, event.blocks.unwrap_or(0))),
            // A later engine tells more; nothing here depends on it.
            _ => {}
        }
    }

    /// The leg that an event belongs to. An engine that was asked twice (a retry, or another round) has two.
    fn leg(&mut self, event: &EventRecord) -> &mut Leg {
        let begins = event.kind == "queued" || event.kind == "refused";
        let ours = |leg: &Leg| leg.engine == event.engine;
        // Two legs of one request can be on one engine: what only one of them can do is that one's.
        let of_lease = matches!(event.kind.as_str(), "lease_opened" | "lease_ended" | "replied");
        let of_fetch = matches!(event.kind.as_str(), "fetching" | "fetched");
        let fits = |leg: &Leg| ours(leg) && (!of_lease || leg.lends) && (!of_fetch || leg.fetches);
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
            // An abort by name may come before its request does.
            Some(at) if self.legs[at].queued.is_none() && !self.legs[at].refused => at,
            _ => {
                self.legs.push(Leg { engine: event.engine, ..Leg::default() });
                self.legs.len() - 1
            }
        };
        &mut self.legs[at]
    }

    /// The phase at this moment of a call; `None` where it had ended on the engines.
    pub(crate) fn phase_at(&self, seen: &Seen, at: u64) -> Option<Phase> {
        let before = |moment: Option<u64>| moment.is_some_and(|moment| moment <= at);
        if seen.stream && before(seen.first_token) {
            // Whoever has said it. Where its engine has ended, that is judged below.
            let over = self
                .legs
                .iter()
                .filter(|leg| !leg.lends)
                .all(|leg| before(leg.ended.as_ref().map(|ended| ended.at)));
            let decodes = self.legs.iter().any(|leg| !leg.lends);
            return if over && decodes { None } else { Some(Phase::Stream) };
        }
        // The last leg that was there by then says most.
        let there = self.legs.iter().filter(|leg| before(leg.queued));
        let Some(leg) = there.max_by_key(|leg| (!leg.lends, leg.queued)) else {
            return Some(Phase::Queued);
        };
        if leg.lends {
            let lent =
                leg.lent.map(|(at, _)| at).filter(|_| before(leg.ended.as_ref().map(|ended| ended.at)));
            let read =
                leg.lease_ended.as_ref().filter(|(_, reason)| reason == read_whole()).map(|(at, _)| *at);
            if before(read) {
                // By an engine that is not watched.
                return Some(Phase::FirstToken);
            }
            let unwritten = leg.replied.is_some_and(|(when, sent)| !sent || when > at);
            return Some(match (before(leg.started), before(lent)) {
                (_, true) if unwritten => Phase::Reply,
                (_, true) => Phase::Gap,
                (true, false) => Phase::Prefill,
                (false, false) => Phase::Queued,
            });
        }
        if before(leg.ended.as_ref().map(|ended| ended.at)) {
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
        let computes =
            self.legs.iter().any(|leg| leg.lends && !before(leg.ended.as_ref().map(|ended| ended.at)));
        Some(match (before(leg.fetching), before(leg.fetched.as_ref().map(|(at, _)| *at))) {
            // An early handoff: the prefill goes on.
            (_, false) if computes => Phase::Prefill,
            (false, false) if before(leg.started) => Phase::FirstToken,
            (false, false) => Phase::Gap,
            (true, false) => Phase::Fetch,
            (_, true) if !seen.stream && before(leg.first_token) => Phase::Unary,
            (_, true) => Phase::FirstToken,
        })
    }

    /// A client's leaving by the engines' clocks: no later than the moment before the first of them that ended a leg for it.
    pub(crate) fn before_told(&self, gone: u64) -> u64 {
        let aborted =
            self.legs.iter().filter_map(|leg| leg.ended.as_ref()).filter(|end| end.outcome == "abort");
        let just = aborted.map(|end| end.at).filter(|at| *at <= gone && gone - *at < RACE_US);
        just.min().map_or(gone, |at| at.saturating_sub(1))
    }

    /// When the last block of every leg was back, of those that held any; `None`: not as far as is known.
    pub(crate) fn home_at(&self) -> Option<u64> {
        let held = self.legs.iter().filter(|leg| leg.held() > 0 || leg.is_at_work());
        held.map(|leg| leg.freed.first().map(|(at, _)| *at)).try_fold(0, |last, at| Some(last.max(at?)))
    }

    /// What engines still owe of it: which engine, and what.
    pub(crate) fn open(&self) -> impl Iterator<Item = (usize, &'static str)> {
        self.legs.iter().filter_map(|leg| Some((leg.engine, leg.open()?)))
    }

    /// Another engine computed the prompt, and lent what it computed.
    pub(crate) fn was_handed_over(&self) -> bool {
        self.legs.iter().any(|leg| leg.lent.is_some()) && self.legs.iter().any(|leg| leg.fetching.is_some())
    }

    /// When each phase began and ended, as far as it did.
    pub(crate) fn spans(&self, seen: &Seen) -> Vec<(Phase, u64, u64)> {
        let lender = self.legs.iter().find(|leg| leg.lends);
        let reader = self.legs.iter().find(|leg| leg.fetches);
        let only = self.legs.iter().find(|leg| !leg.lends && !leg.fetches);
        let before = lender.or(only);
        let started = before.and_then(|leg| leg.started);
        let alone = only.and_then(|leg| leg.first_token);
        // A lease that grows is lent before its prefill is over.
        let lent = lender.and_then(|leg| Some(leg.lent?.0.max(leg.ended.as_ref()?.at)));
        let written = lender.and_then(|leg| leg.replied).filter(|(_, sent)| *sent).map(|(at, _)| at);
        let fetching = reader.and_then(|leg| leg.fetching);
        let fetched = reader.and_then(|leg| leg.fetched.as_ref()).map(|(at, _)| *at);
        let decodes = reader.or(only).and_then(|leg| leg.first_token);
        let spans = [
            (Phase::Queued, before.and_then(|leg| leg.queued), started),
            (Phase::Prefill, started, lent.or(alone)),
            (Phase::Reply, lent.filter(|_| written.is_some()), written),
            (Phase::Gap, written.or(lent), fetching),
            (Phase::Fetch, fetching.max(lent.filter(|_| fetching.is_some())), fetched),
            (Phase::FirstToken, fetched.or(alone), seen.first_token),
            (Phase::Unary, decodes.filter(|_| !seen.stream), seen.done),
        ];
        let there = |(phase, from, to): (Phase, Option<u64>, Option<u64>)| Some((phase, from?, to?));
        spans.into_iter().filter_map(there).filter(|(_, from, to)| from <= to).collect()
    }

    /// Seconds that blocks were held after this moment, times their number; until `end` where they are held still.
    pub(crate) fn block_seconds_after(&self, at: u64, end: u64) -> f64 {
        let of = |leg: &Leg| {
            let back = leg.freed.first().map_or(end, |(at, _)| *at);
            leg.held() as f64 * back.saturating_sub(at.max(leg.queued.unwrap_or(at))) as f64 / 1e6
        };
        self.legs.iter().map(of).sum()
    }

    /// Whether the engines that still had work for this call at `at` have learnt that nobody waits.
    pub(crate) fn told(&self, at: u64) -> Told {
        let mut told = Told::Nobody;
        for leg in self.legs.iter().filter(|leg| leg.holds_at(at)) {
            match leg.told_after(at) {
                // Over by itself: neither told nor never told.
                None if leg.is_over_soon(at) => {}
                None => return Told::Never,
                Some(when) => {
                    let before = if let Told::All(before) = told { before } else { 0 };
                    told = Told::All(before.max(when));
                }
            }
        }
        told
    }

    /// Tokens of the prompt, and of the answer, that were computed after this moment; `seen` of the answer's tokens had
    /// reached the client by then.
    pub(crate) fn work_after(&self, at: u64, seen: u64) -> (u64, u64) {
        let (mut prompt, mut answer) = (0, 0);
        for leg in &self.legs {
            let before = leg.computed.iter().filter(|(when, _)| *when <= at).map(|(_, tokens)| *tokens).max();
            let last = leg.computed.iter().map(|(_, tokens)| *tokens).max();
            let there =
                leg.ended.as_ref().map_or(0, |ended| last.unwrap_or(0).saturating_sub(ended.computed));
            // What was cached or fetched cost nothing.
            prompt += last.unwrap_or(0).saturating_sub(before.unwrap_or(there));
            if let Some(ended) = leg.ended.as_ref().filter(|ended| !leg.lends && ended.at > at) {
                answer += match leg.first_token {
                    // Evenly from its first token to its end.
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

    /// Its lease ended by time alone.
    pub(crate) fn expired(&self) -> bool {
        let ended = self.legs.iter().filter_map(|leg| leg.lease_ended.as_ref());
        ended.into_iter().any(|(_, reason)| reason == expired())
    }
}

impl Leg {
    /// Blocks that it held at its end.
    pub(crate) fn held(&self) -> u64 {
        let freed = self.freed.first().map(|(_, blocks)| *blocks);
        let ended = self.ended.as_ref().map(|ended| ended.blocks).filter(|blocks| *blocks > 0);
        let lent = self.lent.map(|(_, blocks)| blocks);
        // Without an end it holds what it fetched into; of what it computes nothing is told before.
        let fetches = (self.fetches_blocks > 0 && self.ended.is_none()).then_some(self.fetches_blocks);
        freed.or(lent).or(ended).or(fetches).unwrap_or(0)
    }

    /// What it still owes.
    fn open(&self) -> Option<&'static str> {
        if self.queued.is_some() && self.ended.is_none() {
            return Some("it has not ended");
        }
        if self.lent.is_some() && self.lease_ended.is_none() {
            return Some("its lease is live");
        }
        // Blocks come with the first step, or with the read.
        let held = self.started.is_some() || self.fetching.is_some() || self.lent.is_some();
        (held && self.freed.is_empty()).then_some("its blocks are not freed")
    }

    /// It has begun and not ended, as far as is known.
    pub(crate) fn is_at_work(&self) -> bool {
        (self.started.is_some() || self.fetching.is_some()) && self.ended.is_none()
    }

    /// When it learnt, after this moment, that nobody waits; or its lease was read to its end.
    pub(crate) fn told_after(&self, at: u64) -> Option<u64> {
        let aborted = self.ended.as_ref().filter(|ended| ended.outcome == "abort" && ended.at >= at);
        let told = self.told.iter().find(|told| **told >= at).copied().or(aborted.map(|ended| ended.at));
        let read =
            self.lease_ended.as_ref().filter(|(_, reason)| reason == read_whole()).map(|(when, _)| *when);
        // It may have been told before the clocks agree that it was.
        let just = self.told.iter().rev().find(|told| **told < at && at - **told < RACE_US).copied();
        told.or(read).or(just.map(|_| at))
    }

    /// It had given everything back so soon after this moment that it need not have learnt of anything.
    fn is_over_soon(&self, at: u64) -> bool {
        self.freed.first().is_some_and(|(freed, _)| *freed <= at + RACE_US)
    }

    /// Whether it still had something to do or to give back at this moment, or came to have it afterwards.
    pub(crate) fn holds_at(&self, at: u64) -> bool {
        let over = match (self.freed.first(), &self.ended) {
            (Some((freed, _)), _) => *freed <= at,
            (None, Some(ended)) => self.lent.is_none() && ended.at <= at,
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

    fn told(events: &[(usize, &str, u64)]) -> Timeline {
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
            timeline.take(&event);
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
        let timeline = told(&WHOLE);
        let mut seen =
            Seen { stream: true, first_token: Some(160), last_token: Some(200), ..Seen::default() };
        let phase = |seen: &Seen, at| timeline.phase_at(seen, at);
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
        seen = Seen::default();
        assert_eq!((phase(&seen, 145), phase(&seen, 160)), (Some(Phase::FirstToken), Some(Phase::Unary)));
    }

    #[test]
    fn spans_are_what_the_phases_were() {
        let seen = Seen { stream: true, first_token: Some(160), ..Seen::default() };
        let spans = told(&WHOLE).spans(&seen);
        let expected = [
            (Phase::Queued, 10, 20),
            (Phase::Prefill, 20, 101),
            (Phase::Gap, 101, 120),
            (Phase::Fetch, 120, 140),
            (Phase::FirstToken, 140, 160),
        ];
        assert_eq!(spans, expected);
        let whole = Seen { done: Some(400), ..Seen::default() };
        assert!(told(&WHOLE).spans(&whole).contains(&(Phase::Unary, 150, 400)));
        // A lease that grows is lent and read while its prefill goes on: there is no gap.
        let early = told(&[
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
    fn the_reply_phase_lasts_from_the_loan_until_the_reply_is_written() {
        let timeline = |result: &str| {
            let mut timeline = told(&WHOLE[..7]);
            let result = Some(result.to_owned());
            timeline.take(&EventRecord { result, ..event(0, "replied", 105) });
            WHOLE[7..].iter().for_each(|&(engine, kind, at)| timeline.take(&event(engine, kind, at)));
            timeline
        };
        let seen = Seen { stream: true, first_token: Some(160), ..Seen::default() };
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
        let mut dropped = told(&WHOLE[..7]);
        let result = Some("dropped".to_owned());
        dropped.take(&EventRecord { result, ..event(0, "replied", 105) });
        assert_eq!(dropped.phase_at(&seen, 110), Some(Phase::Reply));
        assert!(!dropped.spans(&seen).iter().any(|(phase, ..)| matches!(phase, Phase::Reply | Phase::Gap)));
    }

    #[test]
    fn whoever_has_not_given_back_is_named() {
        let open = |count: usize| told(&WHOLE[..count]).open().collect::<Vec<_>>();
        assert_eq!(open(0), []);
        assert_eq!(open(1), [(0, "it has not ended")]);
        assert_eq!(open(7), [(0, "its lease is live")]);
        assert_eq!(open(9), [(0, "its lease is live"), (1, "it has not ended")]);
        assert_eq!(open(11), [(0, "its blocks are not freed"), (1, "it has not ended")]);
        assert_eq!((open(17), open(18)), (vec![(1, "its blocks are not freed")], vec![]));
        assert!(told(&WHOLE).was_handed_over());
        let unheld = told(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]);
        assert_eq!(unheld.open().count(), 0, "it never held a block");
    }

    #[test]
    fn what_is_held_told_and_computed_after_a_moment_is_counted() {
        let timeline = told(&WHOLE);
        assert_eq!(timeline.home_at(), Some(312));
        // 7 blocks of P for 42 µs, 8 of D for 202: it was asked 10 µs later.
        let held = timeline.block_seconds_after(100, 1_000);
        assert!((held - (7.0 * 42.0 + 8.0 * 202.0) / 1e6).abs() < 1e-12, "{held}");
        assert_eq!(timeline.told(200), Told::All(300));
        // At 100 both had work. P was never told, but its lease was read.
        assert_eq!(timeline.told(100), Told::All(300));
        assert_eq!(told(&WHOLE[..7]).told(50), Told::Never);
        assert_eq!(timeline.told(312), Told::Nobody);
        assert_eq!(timeline.work_after(60, 0), (40 + (150 - 50), 9));
        // 110 of the 160 µs in which it said nine.
        assert_eq!(timeline.work_after(200, 4), (0, 6));
        assert!(!timeline.expired());
    }

    #[test]
    fn blocks_that_are_not_back_are_not_home() {
        let timeline = told(&WHOLE[..7]);
        assert_eq!(timeline.home_at(), None);
        assert!((timeline.block_seconds_after(101, 1_000_101) - 7.0).abs() < 1e-9);
        // It computes, for all that is known: nothing of it is home.
        assert_eq!(told(&WHOLE[..2]).home_at(), None);
        // It holds what it fetches into, also where it never says a word again.
        let hangs = told(&[(1, "queued", 1), (1, "fetching", 1_000_000)]);
        assert_eq!((hangs.home_at(), hangs.legs[0].held()), (None, 6));
        // Refused before it held anything: nothing has to come home.
        assert_eq!(told(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]).home_at(), Some(0));
    }

    #[test]
    fn an_engine_that_is_asked_twice_has_two_legs() {
        let mut events = WHOLE.to_vec();
        events.extend([
            (1, "queued", 400),
            (1, "fetching", 401),
            (1, "fetched", 402),
            (1, "ended", 403),
            (1, "freed", 404),
        ]);
        let timeline = told(&events);
        assert_eq!(timeline.legs.len(), 3);
        assert_eq!(timeline.home_at(), Some(404));
        assert_eq!((timeline.legs[1].freed.len(), timeline.legs[2].freed.len()), (1, 1));
        // A second "freed" of one leg is what it is.
        let twice = told(&[(0, "queued", 1), (0, "ended", 2), (0, "freed", 3), (0, "freed", 4)]);
        assert_eq!(twice.legs[0].freed.len(), 2);
        // An abort by name that comes first does not make a leg of its own.
        assert_eq!(told(&[(0, "abort", 1), (0, "queued", 2), (0, "ended", 3)]).legs.len(), 1);
    }
}
