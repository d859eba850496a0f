//! One request's life as engines tell of it: in which phase it was at a moment, and who still holds blocks of it. Pure.

use std::collections::BTreeMap;

use serde_json::Value;

/// A phase of a request's life, as its client can leave in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Phase {
    /// Sent, and nothing computes yet.
    Queued,
    /// An engine computes the prompt.
    Prefill,
    /// The blocks are lent, and nobody has begun to read them.
    Gap,
    /// A decode engine reads them.
    Fetch,
    /// They are there, and no token has reached the client.
    FirstToken,
    /// Tokens have reached the client.
    Stream,
    /// An answer in one piece is being generated.
    Unary,
}

impl Phase {
    pub(super) const ALL: [Self; 7] =
        [Self::Queued, Self::Prefill, Self::Gap, Self::Fetch, Self::FirstToken, Self::Stream, Self::Unary];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Prefill => "prefill",
            Self::Gap => "gap",
            Self::Fetch => "fetch",
            Self::FirstToken => "before first token",
            Self::Stream => "mid-stream",
            Self::Unary => "unary",
        }
    }
}

/// One event of an engine's log, on our clock.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) engine: String,
    pub(super) at_us: u64,
    pub(super) event: Value,
}

impl Told {
    fn kind(&self) -> &str {
        self.event["kind"].as_str().unwrap_or_default()
    }

    /// The request at this engine: its name there, and which choice.
    fn leg(&self) -> (String, String, u64) {
        let id = self.event["request_id"].as_str().unwrap_or_default().to_owned();
        (self.engine.clone(), id, self.event["index"].as_u64().unwrap_or(0))
    }
}

/// A request at one engine.
#[derive(Clone, Debug, Default)]
struct Leg {
    queued: Option<u64>,
    started: Option<u64>,
    first_token: Option<u64>,
    fetching: Option<u64>,
    fetched: Option<u64>,
    lent: Option<u64>,
    growing: bool,
    lease_ended: Option<u64>,
    ended: Option<u64>,
    freed: Option<u64>,
    blocks: u64,
}

impl Leg {
    fn holds(&self) -> bool {
        // Blocks come with the first step, or with the read.
        self.started.is_some() || self.fetching.is_some() || self.lent.is_some()
    }

    /// What is still missing of its end.
    fn open(&self) -> Option<&'static str> {
        if self.queued.is_some() && self.ended.is_none() {
            return Some("it has not ended");
        }
        if self.lent.is_some() && self.lease_ended.is_none() {
            return Some("its lease is live");
        }
        (self.holds() && self.freed.is_none()).then_some("its blocks are not back")
    }
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    legs: BTreeMap<(String, String, u64), Leg>,
}

impl Life {
    pub(super) fn of(told: &[Told]) -> Self {
        let mut life = Self::default();
        for told in told {
            let leg = life.legs.entry(told.leg()).or_default();
            let at = Some(told.at_us);
            match told.kind() {
                "queued" => leg.queued = at,
                "started" => leg.started = leg.started.or(at),
                "first_token" => leg.first_token = leg.first_token.or(at),
                "fetching" => leg.fetching = leg.fetching.or(at),
                "fetched" => leg.fetched = leg.fetched.or(at),
                "lent" => {
                    leg.lent = at;
                    leg.growing = told.event["growing"].as_bool() == Some(true)
                        || told.event.get("left_ms").is_some_and(Value::is_null);
                }
                "lease_ended" => leg.lease_ended = at,
                "ended" => leg.ended = at,
                "freed" => {
                    leg.freed = at;
                    leg.blocks = told.event["blocks"].as_u64().unwrap_or(0);
                }
                _ => {}
            }
        }
        life
    }

    pub(super) fn is_empty(&self) -> bool {
        self.legs.is_empty()
    }

    /// Another engine computed the prompt, and lent what it computed.
    pub(super) fn was_handed_over(&self) -> bool {
        self.legs.values().any(|leg| leg.lent.is_some())
            && self.legs.values().any(|leg| leg.fetching.is_some())
    }

    /// Who still holds something, and what.
    pub(super) fn open(&self) -> Vec<String> {
        let of =
            |((engine, ..), leg): (&(String, String, u64), &Leg)| Some(format!("{engine}: {}", leg.open()?));
        self.legs.iter().filter_map(of).collect()
    }

    /// When the last block was back; `None` where none was held.
    pub(super) fn home_us(&self) -> Option<u64> {
        self.legs.values().filter_map(|leg| leg.freed).max()
    }

    /// Blocks that were held and are back, and engines that held them.
    pub(super) fn freed(&self) -> (u64, usize) {
        let freed = self.legs.values().filter(|leg| leg.freed.is_some());
        (freed.clone().map(|leg| leg.blocks).sum(), freed.count())
    }

    fn first(&self, of: impl Fn(&Leg) -> Option<u64>) -> Option<u64> {
        self.legs.values().filter_map(of).min()
    }

    /// When each phase began and ended, as far as it did.
    pub(super) fn spans(&self, sent_us: u64, client_token_us: Option<u64>) -> BTreeMap<Phase, (u64, u64)> {
        let mut spans = BTreeMap::new();
        let mut span = |phase, from: Option<u64>, to: Option<u64>| {
            if let (Some(from), Some(to)) = (from, to)
                && from < to
            {
                spans.insert(phase, (from, to));
            }
        };
        let started = self.first(|leg| leg.started);
        span(Phase::Queued, Some(sent_us), started.or(self.first(|leg| leg.queued)));
        let fetching = self.first(|leg| leg.fetching);
        let fetched = self.first(|leg| leg.fetched);
        // A lease that grows is lent before its prefill is done.
        let computed = self.first(|leg| leg.lent.and(if leg.growing { leg.ended } else { leg.lent }));
        let alone = computed.is_none().then(|| self.first(|leg| leg.first_token)).flatten();
        span(Phase::Prefill, started, computed.or(alone));
        span(Phase::Gap, computed, fetching);
        span(Phase::Fetch, fetching.max(computed), fetched);
        span(Phase::FirstToken, fetched.or(alone), client_token_us);
        let decodes = self.legs.values().filter(|leg| leg.lent.is_none());
        let token = decodes.clone().filter_map(|leg| leg.first_token).min();
        span(Phase::Unary, token, decodes.filter_map(|leg| leg.ended).max());
        spans
    }

    /// In which phase the client was when it left.
    pub(super) fn phase(&self, left_us: u64, client_token_us: Option<u64>, streamed: bool) -> Phase {
        let passed = |at: Option<u64>| at.is_some_and(|at| at <= left_us);
        let computed = self.first(|leg| leg.lent.and(if leg.growing { leg.ended } else { leg.lent }));
        let fetching = self.first(|leg| leg.fetching);
        if passed(client_token_us) {
            return Phase::Stream;
        }
        let decoding =
            self.legs.values().filter(|leg| leg.lent.is_none()).filter_map(|leg| leg.first_token).min();
        if !streamed && passed(decoding) {
            return Phase::Unary;
        }
        if passed(self.first(|leg| leg.fetched)) || passed(decoding) {
            return Phase::FirstToken;
        }
        if passed(computed) {
            return if passed(fetching) { Phase::Fetch } else { Phase::Gap };
        }
        if passed(fetching) && computed.is_none() {
            return Phase::Fetch;
        }
        if passed(self.first(|leg| leg.started)) { Phase::Prefill } else { Phase::Queued }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(engine: &str, at_us: u64, kind: &str) -> Told {
        let event = json!({"request_id": "r", "index": 0, "kind": kind, "blocks": 7, "left_ms": 30_000});
        Told { engine: engine.to_owned(), at_us, event }
    }

    /// A request that is handed over and decodes to its end.
    fn whole() -> Vec<Told> {
        [
            ("p", 100, "queued"),
            ("p", 200, "started"),
            ("p", 300, "computed"),
            ("p", 301, "first_token"),
            ("p", 310, "ended"),
            ("p", 312, "lent"),
            ("d", 350, "queued"),
            ("d", 400, "fetching"),
            ("d", 500, "fetched"),
            ("p", 501, "lease_ended"),
            ("p", 502, "freed"),
            ("d", 600, "started"),
            ("d", 650, "first_token"),
            ("d", 900, "ended"),
            ("d", 901, "freed"),
        ]
        .map(|(engine, at, kind)| told(engine, at, kind))
        .to_vec()
    }

    #[test]
    fn every_moment_of_a_life_has_its_phase() {
        let life = Life::of(&whole());
        assert!(life.was_handed_over() && life.open().is_empty());
        for (at, streamed, phase) in [
            (50, true, Phase::Queued),
            (150, true, Phase::Queued),
            (250, true, Phase::Prefill),
            (311, true, Phase::Prefill),
            (313, true, Phase::Gap),
            (399, true, Phase::Gap),
            (450, true, Phase::Fetch),
            (550, true, Phase::FirstToken),
            (660, true, Phase::FirstToken),
            (660, false, Phase::Unary),
            (701, true, Phase::Stream),
        ] {
            assert_eq!(life.phase(at, Some(700).filter(|_| streamed), streamed), phase, "{at}");
        }
        let spans = life.spans(10, Some(700));
        assert_eq!(spans[&Phase::Gap], (312, 400));
        assert_eq!((spans[&Phase::Queued], spans[&Phase::FirstToken]), ((10, 200), (500, 700)));
    }

    #[test]
    fn whoever_has_not_given_back_is_named() {
        let until = |count: usize| Life::of(&whole()[..count]).open();
        assert!(until(0).is_empty());
        assert_eq!(until(1), ["p: it has not ended"]);
        assert_eq!(until(6), ["p: its lease is live"]);
        assert_eq!(until(8), ["d: it has not ended", "p: its lease is live"]);
        assert_eq!(until(10), ["d: it has not ended", "p: its blocks are not back"]);
        assert_eq!(until(14), ["d: its blocks are not back"]);
        assert_eq!(Life::of(&whole()).freed(), (14, 2));
        let unheld = Life::of(&[told("p", 1, "queued"), told("p", 2, "abort"), told("p", 3, "ended")]);
        assert!(unheld.open().is_empty() && unheld.home_us().is_none(), "it never held a block");
    }

    #[test]
    fn a_lease_that_grows_is_no_gap() {
        let mut lent = told("p", 150, "lent");
        lent.event["left_ms"] = Value::Null;
        let early = [told("p", 100, "started"), lent, told("d", 160, "fetching"), told("p", 300, "ended")];
        let life = Life::of(&early);
        assert_eq!(life.phase(200, None, true), Phase::Prefill);
        assert_eq!(life.phase(350, None, true), Phase::Fetch);
        assert_eq!(life.spans(0, None).get(&Phase::Gap), None);
    }
}
