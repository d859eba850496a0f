//! What engines held for nobody, from looks at their metrics alone: for those that tell sums and no single request, as stock
//! vLLM does.
//!
//! A look is *quiet* where the engine has no request, running or waiting, and no client waits for its first token (until then its
//! blocks may be lent, and on the engine's books as nobody's). What is held at a quiet look is held for nobody. Between two
//! of them it is taken to be the mean of both; it may have been the smaller or the greater all the time ([`Held::off_by`]).
//!
//! Less than the truth: what engines compute on for those who left (it is a request of theirs, running), and what began and
//! ended between two quiet looks. More: what somebody else's requests left there, and blocks that an engine gives back late
//! to clients that stayed.

use serde::Serialize;

use crate::disconnect::analyse::{Facts, gone};
use crate::disconnect::record::raw::{ActKind, Books, CallRecord};

/// Blocks times seconds that one engine held for nobody, or all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Held {
    pub(crate) block_seconds: f64,
    /// By how much that may be wrong either way, for all that changed between two quiet looks.
    pub(crate) off_by: f64,
    pub(crate) looks: u64,
    pub(crate) quiet_looks: u64,
    /// The longest time without a quiet look, s: what began and ended in it was not seen.
    pub(crate) longest_unseen_s: f64,
}

/// The same of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Sampled {
    /// Of all engines of which it can be said; the looks are theirs, too.
    #[serde(flatten)]
    pub(crate) held: Held,
    /// Engines of which it cannot: they do not tell how many blocks they have, or were never quiet. What these held is missing.
    pub(crate) unknown_engines: u64,
    /// For every 1,000 clients that left.
    pub(crate) per_1000: f64,
    pub(crate) per_1000_off_by: f64,
}

/// Of the whole run; `None` where it can be said of no engine.
pub(crate) fn of(facts: &Facts, left: u64) -> Option<Sampled> {
    let mut all = Held::default();
    let mut unknown_engines = 0;
    for engine in &facts.engines {
        let Some(held) = of_engine(facts, engine.engine) else {
            unknown_engines += 1;
            continue;
        };
        all.block_seconds += held.block_seconds;
        all.off_by += held.off_by;
        (all.looks, all.quiet_looks) = (all.looks + held.looks, all.quiet_looks + held.quiet_looks);
        all.longest_unseen_s = all.longest_unseen_s.max(held.longest_unseen_s);
    }
    let per_1000 = |of: f64| of * 1_000.0 / left.max(1) as f64;
    let (per_1000, per_1000_off_by) = (per_1000(all.block_seconds), per_1000(all.off_by));
    (all.looks > 0).then_some(Sampled { held: all, unknown_engines, per_1000, per_1000_off_by })
}

/// Of one engine, in the parts of the run in which those leave that are counted: until others are refused or something is broken.
pub(crate) fn of_engine(facts: &Facts, engine: usize) -> Option<Held> {
    let told = facts.engines.iter().any(|known| known.engine == engine && known.blocks > 0);
    let apart = |what| matches!(what, ActKind::Refused | ActKind::Fault);
    let from = facts.acts.iter().map(|act| act.began).min().filter(|_| told)?;
    let until = facts.acts.iter().filter(|act| apart(act.what)).map(|act| act.began).min();
    let until = until.or(facts.acts.iter().map(|act| act.ended).max())?.min(facts.watched_until());
    let waits = waits(facts);
    let ours = |books: &&Books| books.engine == engine && from <= books.at_us && books.at_us < until;
    let looks: Vec<_> = facts.books.iter().filter(ours).collect();
    let quiet: Vec<_> =
        looks.iter().filter(|books| books.requests == 0 && !waits.overlap(books)).copied().collect();
    let (first, last) = (quiet.first()?, quiet.last()?);
    let mut held = Held { looks: looks.len() as u64, quiet_looks: quiet.len() as u64, ..Held::default() };
    let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    held.longest_unseen_s = seconds(from, first.at_us).max(seconds(last.at_us, until));
    for pair in quiet.windows(2) {
        let (lasted, blocks) = (seconds(pair[0].at_us, pair[1].at_us), [pair[0].held, pair[1].held]);
        held.block_seconds += lasted * (blocks[0] + blocks[1]) as f64 / 2.0;
        held.off_by += lasted * blocks[0].abs_diff(blocks[1]) as f64 / 2.0;
        held.longest_unseen_s = held.longest_unseen_s.max(lasted);
    }
    Some(held)
}

/// When some client waited for its first token: times that do not touch, in order.
struct Waits(Vec<(u64, u64)>);

/// From its beginning to its first token; of an answer in one piece to its end; and no longer than the client was there.
fn waits(facts: &Facts) -> Waits {
    let wait = |call: &CallRecord| {
        let token = call.seen().first_token.unwrap_or(u64::MAX);
        // One that has vanished waits for all that the deployment can know.
        let left = gone(call).filter(|_| !call.vanishes());
        (call.began_us, token.min(left.unwrap_or(u64::MAX)).min(facts.there_until(call)))
    };
    let mut all: Vec<_> = facts.calls.iter().map(wait).collect();
    all.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (from, to) in all {
        match apart.last_mut().filter(|last| from <= last.1) {
            Some(last) => last.1 = last.1.max(to),
            None => apart.push((from, to)),
        }
    }
    Waits(apart)
}

impl Waits {
    /// Whether somebody waited while this look was taken: it tells of some moment until it was answered.
    fn overlap(&self, look: &Books) -> bool {
        let next = self.0.partition_point(|(_, to)| *to < look.at_us);
        self.0.get(next).is_some_and(|(from, _)| *from <= look.at_us + look.took_us)
    }
}
