//! Why a request went where it went: what was decided, from what, and what came of it. Kept for the latest
//! requests, for people who ask (`GET /explain/{id}`, `baton explain`).
//!
//! A request's [`Account`] is in the ring from its first decision on, so that one that hangs can be asked about. It
//! holds names of engines, never the engines, and nothing of the prompt. Everything in it is bounded.

mod sight;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use baton_connector::RequestId;
use baton_connector::exchange::{Cause, Event, Failure, Outcome};
use hyper::header::HeaderValue;

use crate::engines::http::Engine;
use crate::message::request_id::bare_id;
use crate::metrics::Leg;
use crate::metrics::routing::Why;
use crate::routing::disaggregation::Facts;
pub(crate) use sight::{Considered, Removed, Sight};

/// Steps of one request: more than two rounds of the most attempts that a configuration allows, decisions included.
const STEPS_MAX: usize = 160;

/// Steps of a request that goes through both legs and meets no trouble.
const STEPS_USUAL: usize = 9;

/// The latest accounts.
pub(crate) struct Ring {
    accounts: Mutex<VecDeque<Arc<Account>>>,
    pub(crate) most: AtomicUsize,
}

/// What was decided about one request.
pub(crate) struct Account {
    /// The router's name for it.
    pub(crate) id: RequestId,
    /// The client's own name for it.
    pub(crate) client_id: Option<HeaderValue>,
    /// What was asked: an endpoint's path, as the router names it.
    pub(crate) path: &'static str,
    pub(crate) model: String,
    pub(crate) began: SystemTime,
    pub(crate) begun: Instant,
    told: Mutex<Told>,
}

#[derive(Default)]
pub(crate) struct Told {
    pub(crate) steps: Vec<(Duration, Step)>,
    pub(crate) left_out: usize,
    pub(crate) over: Option<Over>,
}

/// How it ended.
pub(crate) struct Over {
    pub(crate) after: Duration,
    pub(crate) status: u16,
    pub(crate) outcome: Option<Outcome>,
}

/// One thing that was decided, or that happened.
pub(crate) enum Step {
    Chose(Leg, Box<Sight>),
    Disaggregated(Why, Facts),
    /// An attempt at an engine.
    Asked(Leg, Arc<str>),
    /// What came of an attempt.
    Came(Leg, Arc<str>, &'static str),
    /// The exchange went on without an engine.
    Went(&'static str),
}

impl Ring {
    /// The latest `most` requests; 0: none.
    pub(crate) fn new(most: usize) -> Self {
        Self { accounts: Mutex::default(), most: AtomicUsize::new(most) }
    }

    /// Keeps more or fewer from now on.
    pub(crate) fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
        let mut accounts = self.lock();
        while accounts.len() > most {
            accounts.pop_front();
        }
        accounts.shrink_to(most);
    }

    /// An account for a request; `None` when none are kept.
    pub(crate) fn begin(
        &self,
        id: &RequestId,
        client_id: Option<&HeaderValue>,
        path: &'static str,
        model: &str,
    ) -> Option<Arc<Account>> {
        let most = self.most.load(Ordering::Relaxed);
        if most == 0 {
            return None;
        }
        let account = Arc::new(Account {
            id: id.clone(),
            client_id: client_id.cloned(),
            path,
            model: model.to_owned(),
            began: SystemTime::now(),
            begun: Instant::now(),
            told: Mutex::new(Told { steps: Vec::with_capacity(STEPS_USUAL), ..Told::default() }),
        });
        let mut accounts = self.lock();
        while accounts.len() > most {
            accounts.pop_front();
        }
        let oldest = if accounts.len() == most { accounts.pop_front() } else { None };
        accounts.push_back(Arc::clone(&account));
        drop(accounts);
        // Nobody waits for that.
        drop(oldest);
        Some(account)
    }

    /// The accounts of that name, the router's, the client's, or that of a reply, the latest first.
    pub(crate) fn named(&self, id: &str) -> Vec<Arc<Account>> {
        // The name under which a prompt is computed anew belongs to the same request.
        let minted = bare_id(id).trim_end_matches("-2");
        let is = |account: &&Arc<Account>| {
            let clients = account.client_id.as_ref().is_some_and(|value| value.as_bytes() == id.as_bytes());
            clients || account.id.as_str() == id || account.id.as_str() == minted
        };
        self.lock().iter().rev().filter(is).cloned().collect()
    }

    pub(crate) fn latest(&self, count: usize) -> Vec<Arc<Account>> {
        self.lock().iter().rev().take(count).cloned().collect()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Account>>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// An engine was chosen for a leg, or none could be.
    pub(crate) fn chose(&self, leg: Leg, sight: Sight) {
        self.tell(Step::Chose(leg, Box::new(sight)));
    }

    pub(crate) fn disaggregated(&self, why: Why, facts: Facts) {
        self.tell(Step::Disaggregated(why, facts));
    }

    /// The exchange took an event; `engines` are those of its attempts.
    pub(crate) fn event(&self, event: &Event, engines: &[Arc<Engine>]) {
        use Leg::{Decode, Prefill};
        let step = |by: baton_connector::exchange::Attempt, leg, came: Option<&'static str>| {
            let engine = engines.get(usize::from(by.0)).map_or_else(|| Arc::from("?"), |e| e.name());
            match came {
                None => Step::Asked(leg, engine),
                Some(what) => Step::Came(leg, engine, what),
            }
        };
        self.tell(match *event {
            Event::PrefillSent(to) => step(to, Prefill, None),
            Event::DecodeSent(to) => step(to, Decode, None),
            Event::PrefillLent(by, _) => step(by, Prefill, Some("opened a lease")),
            Event::PrefillEmpty(by) => step(by, Prefill, Some("opened no lease")),
            Event::PrefillRefused(by) => step(by, Prefill, Some("refused the request")),
            Event::PrefillFailed(by, failure) => step(by, Prefill, Some(failed(failure))),
            Event::DecodeAccepted(by) => step(by, Decode, Some("accepted")),
            Event::DecodeRefused(by) => step(by, Decode, Some("refused the request")),
            Event::DecodeFailed(by, failure) => step(by, Decode, Some(failed(failure))),
            Event::FirstChunk(by) => step(by, Decode, Some("first bytes")),
            Event::StreamEnded(by) => step(by, Decode, Some("complete")),
            Event::StreamBroken(by) => step(by, Decode, Some("failed")),
            Event::StreamCut(by) => step(by, Decode, Some("failed; another engine continues")),
            Event::NotAdmitted => Step::Went("not admitted"),
            Event::NoEngine => Step::Went("no usable engine"),
            Event::PrefillSkipped => Step::Went("no remote prefill"),
            Event::HandoffSpent => {
                Step::Went("no decode engine could use the handoff; the prompt is computed again")
            }
            Event::GaveUp => Step::Went("gave up"),
            Event::GaveUpFor(Cause::DecodeBusy) => Step::Went("gave up: the remaining engines are full"),
            Event::GaveUpFor(Cause::OutOfTime) => Step::Went("gave up: out of time"),
            Event::GaveUpFor(_) => Step::Went("gave up: no engine left"),
            Event::ClientGone => Step::Went("cancelled by the client"),
            // Not a step of the request, which goes on from the handoff.
            Event::PrefillEnded(_) | Event::Dropped => return,
        });
    }

    /// The request is over. Only the first call counts.
    pub(crate) fn end(&self, status: u16, outcome: Option<Outcome>) {
        let mut told = self.told();
        if told.over.is_none() {
            told.over = Some(Over { after: self.begun.elapsed(), status, outcome });
        }
    }

    fn tell(&self, step: Step) {
        let mut told = self.told();
        if told.steps.len() == STEPS_MAX {
            told.left_out += 1;
        } else {
            told.steps.push((self.begun.elapsed(), step));
        }
    }

    pub(crate) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(failure: Failure) -> &'static str {
    match failure {
        Failure::NotReached => "is unreachable",
        Failure::Answered => "returned an error",
        Failure::Unknown => "failed or did not respond",
        Failure::Unusable(_) => "returned an unusable response",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::explain::unknown;

    fn begin(ring: &Ring, id: &str, client: Option<&'static str>) -> Option<Arc<Account>> {
        let client = client.map(HeaderValue::from_static);
        ring.begin(&RequestId::new(id).expect("an id"), client.as_ref(), "/v1/completions", "m")
    }

    #[test]
    fn the_latest_are_kept_and_found_by_either_name() {
        let ring = Ring::new(2);
        for (id, client) in [("a", None), ("b", Some("mine")), ("c", Some("mine"))] {
            assert!(begin(&ring, id, client).is_some());
        }
        let names = |id: &str| ring.named(id).iter().map(|a| a.id.to_string()).collect::<Vec<_>>();
        assert!(names("a").is_empty(), "the oldest went");
        assert_eq!(names("b"), ["b"]);
        assert_eq!(names("c-2"), ["c"], "computed anew, the same request");
        assert_eq!(names("c-2-2"), ["c"], "and gone on with");
        assert_eq!(names("mine"), ["c", "b"], "clients may repeat themselves");
        assert_eq!(names("chatcmpl-c.0123456789abcdef"), ["c"], "as an engine's reply names it");
        assert_eq!(names("cmpl-c-2"), ["c"]);
        assert!(unknown(&ring).contains("keeps the latest 2 "), "{}", unknown(&ring));
        ring.set_most(1);
        assert!(names("b").is_empty());
        ring.set_most(0);
        assert!(unknown(&ring).contains("`explain.requests` is 0"), "{}", unknown(&ring));
        assert!(begin(&ring, "d", None).is_none() && ring.latest(9).is_empty());
    }

    #[test]
    fn an_account_is_bounded_and_says_what_it_left_out() {
        let ring = Ring::new(1);
        let account = begin(&ring, "a", None).expect("it is kept");
        for _ in 0..STEPS_MAX + 3 {
            account.event(&Event::GaveUp, &[]);
        }
        account.event(&Event::Dropped, &[]);
        let told = account.told();
        assert_eq!((told.steps.len(), told.left_out), (STEPS_MAX, 3));
    }
}
