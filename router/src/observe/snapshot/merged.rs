//! Several views of one deployment as one: each router's, and what was asked of engines directly.

use std::collections::{HashMap, HashSet};

use super::{EngineView, LeaseView, Request, RequestView, Snapshot, Source};
use crate::message::request_id::bare_id;

/// Requests that are kept of all routers together.
const OLDEST_MAX: usize = 1_000;

/// A view may be so much older than another.
const STALE_MS: u64 = 3_000;

/// A lease's name across views: one request may have several at one engine.
type Key = (String, u64, String, usize);

impl Snapshot {
    /// Puts views together: an engine that several of them show is one engine, and a lease is stranded only where no
    /// router has its request.
    #[must_use]
    pub fn merge(views: Vec<Self>) -> Self {
        let mut whole = Self::default();
        let sights: Vec<Sight> = views.iter().map(Sight::of).collect();
        let mut places: HashMap<String, usize> = HashMap::new();
        let mut leases: HashMap<Key, (LeaseView, usize)> = HashMap::new();
        let mut order = Vec::new();
        for (at, view) in views.into_iter().enumerate() {
            whole.at_us = whole.at_us.max(view.at_us);
            let observed_by = view.routers.first().map_or(String::new(), |router| router.admin.clone());
            whole.routers.extend(view.routers);
            whole.requests.in_flight += view.requests.in_flight;
            for (phase, count) in view.requests.phases {
                *whole.requests.phases.entry(phase).or_insert(0) += count;
            }
            whole.requests.oldest.extend(view.requests.oldest);
            for mut engine in view.engines {
                if engine.at_us == 0 {
                    // An older router's.
                    engine.at_us = view.at_us;
                }
                engine.observed_by.clone_from(&observed_by);
                match places.get(&engine.engine) {
                    Some(&place) => absorb(&mut whole.engines[place], engine),
                    None => {
                        places.insert(engine.engine.clone(), whole.engines.len());
                        whole.engines.push(engine);
                    }
                }
            }
            let mut seen: HashMap<(String, u64, String), usize> = HashMap::new();
            for lease in view.leases {
                let name = (lease.engine.clone(), lease.rank, lease.request_id.clone());
                let nth = seen.entry(name.clone()).or_insert(0);
                let key: Key = (name.0, name.1, name.2, *nth);
                *nth += 1;
                match leases.get_mut(&key) {
                    Some((kept, _)) => {
                        kept.request = both(std::mem::take(&mut kept.request), lease.request);
                    }
                    None => {
                        order.push(key.clone());
                        leases.insert(key, (lease, at));
                    }
                }
            }
        }
        whole.leases = order.iter().filter_map(|key| leases.remove(key)).map(|(lease, _)| lease).collect();
        for lease in &mut whole.leases {
            let told: Vec<Request> = sights.iter().filter_map(|sight| sight.tells(lease)).collect();
            let doubt = told.contains(&Request::Unknown);
            for told in told {
                lease.request = both(std::mem::take(&mut lease.request), told);
            }
            if doubt && !matches!(lease.request, Request::InFlight { .. }) {
                lease.request = Request::Unknown;
            }
        }
        whole.requests.oldest.sort_by_key(|request| std::cmp::Reverse(request.age_ms));
        whole.requests.oldest.truncate(OLDEST_MAX);
        whole.settle();
        whole
    }
}

/// What a view with a router in it can say of leases that it does not show.
struct Sight {
    routers: bool,
    engines: HashSet<String>,
    leases: HashSet<(String, u64, String)>,
    in_flight: HashMap<String, String>,
    /// Every request in flight is listed.
    complete: bool,
}

impl Sight {
    fn of(view: &Snapshot) -> Self {
        let listed = |request: &RequestView| (bare_id(&request.request_id).to_owned(), request.phase.clone());
        let asked = view.engines.iter().filter(|engine| engine.source == Source::DebugKv);
        Self {
            routers: view.routers.iter().any(|router| router.error.is_none()),
            engines: asked.map(|engine| engine.engine.clone()).collect(),
            leases: view.leases.iter().map(|l| (l.engine.clone(), l.rank, l.request_id.clone())).collect(),
            in_flight: view.requests.oldest.iter().map(listed).collect(),
            complete: view.requests.oldest.len() as u64 >= view.requests.in_flight,
        }
    }

    /// Of a lease that this view shows it has been said already.
    fn tells(&self, lease: &LeaseView) -> Option<Request> {
        let name = (lease.engine.clone(), lease.rank, lease.request_id.clone());
        if !self.routers || self.leases.contains(&name) {
            return None;
        }
        // It may have been opened since.
        let newer = self.engines.contains(&lease.engine) && lease.age_ms < STALE_MS;
        Some(match self.in_flight.get(bare_id(&lease.request_id)) {
            Some(phase) => Request::InFlight { phase: phase.clone() },
            None if self.complete && !newer => Request::Absent,
            None => Request::Unknown,
        })
    }
}

/// What two routers know together. One that asked nobody knows nothing, and takes nothing from what the other knows.
fn both(one: Request, other: Request) -> Request {
    use Request as R;
    match (one, other) {
        (flying @ R::InFlight { .. }, _) | (_, flying @ R::InFlight { .. }) => flying,
        (R::Over { outcome, ms_ago }, R::Over { outcome: theirs, ms_ago: later }) => {
            if later < ms_ago {
                R::Over { outcome: theirs, ms_ago: later }
            } else {
                R::Over { outcome, ms_ago }
            }
        }
        (over @ R::Over { .. }, _) | (_, over @ R::Over { .. }) => over,
        (R::Absent, R::Absent) => R::Absent,
        (R::Unknown, other) | (other, R::Unknown) => other,
    }
}

/// Takes over what another view knows better of the same engine.
fn absorb(kept: &mut EngineView, other: EngineView) {
    let in_flight = match (kept.in_flight, other.in_flight) {
        (Some(one), Some(two)) => Some(one + two),
        (one, two) => one.or(two),
    };
    let mut standing = std::mem::take(&mut kept.standing);
    for (leg, how) in &other.standing {
        // The worse word: one router may have seen what the other has not.
        standing
            .entry(leg.clone())
            .and_modify(|kept| {
                if kept == "usable" {
                    kept.clone_from(how);
                }
            })
            .or_insert_with(|| how.clone());
    }
    if other.source as u8 > kept.source as u8 || (kept.error.is_some() && other.error.is_none()) {
        *kept = other;
    }
    (kept.in_flight, kept.standing) = (in_flight, standing);
}

#[cfg(test)]
mod tests {
    use super::super::tests::lease;
    use super::super::{Blocks, RouterView};
    use super::*;

    fn view(admin: &str, engines: &[&str], leases: Vec<LeaseView>, requests: &[&str]) -> Snapshot {
        let engine = |name: &&str| EngineView {
            engine: (*name).to_owned(),
            source: Source::DebugKv,
            blocks: Some(Blocks { total: 100, leased: 100, ..Blocks::default() }),
            in_flight: Some(1),
            ..EngineView::default()
        };
        let mut view = Snapshot {
            routers: vec![RouterView { admin: admin.to_owned(), ..RouterView::default() }],
            engines: engines.iter().map(engine).collect(),
            leases,
            ..Snapshot::default()
        };
        if admin.is_empty() {
            view.routers.clear();
        }
        view.requests.in_flight = requests.len() as u64;
        let flying = |id: &&str| RequestView {
            request_id: (*id).to_owned(),
            phase: "gap".to_owned(),
            ..RequestView::default()
        };
        view.requests.oldest = requests.iter().map(flying).collect();
        view
    }

    fn absent() -> LeaseView {
        lease("offered", Request::Absent)
    }

    #[test]
    fn a_lease_is_stranded_only_where_no_router_has_its_request() {
        let alone = Snapshot::merge(vec![view("a", &["p:1"], vec![absent()], &[])]);
        assert_eq!((alone.stranded_leases, alone.stranded_blocks), (Some(1), Some(4)));
        let flying = LeaseView { request: Request::InFlight { phase: "gap".to_owned() }, ..absent() };
        let two = vec![view("a", &["p:1"], vec![absent()], &[]), view("b", &["p:1"], vec![flying], &["r"])];
        let merged = Snapshot::merge(two);
        assert_eq!((merged.stranded_leases, merged.leases.len(), merged.engines.len()), (Some(0), 1, 1));
        assert_eq!(merged.engines[0].in_flight, Some(2), "of both routers");
        let elsewhere = vec![view("a", &["p:1"], vec![absent()], &[]), view("b", &["p:2"], vec![], &["r-2"])];
        assert_eq!(Snapshot::merge(elsewhere).stranded_leases, Some(0), "the other router lists its request");
    }

    #[test]
    fn a_router_that_lists_too_little_leaves_it_unknown() {
        let mut many = view("b", &["p:2"], vec![], &["x"]);
        many.requests.in_flight = 5_000;
        let mut alone = absent();
        alone.request = Request::Unknown;
        let merged = Snapshot::merge(vec![view("", &["p:1"], vec![alone], &[]), many]);
        assert_eq!((merged.stranded_leases, merged.leases[0].stranded), (None, None));
    }

    #[test]
    fn engines_asked_directly_are_judged_by_the_routers_in_view() {
        let direct = LeaseView { request: Request::Unknown, ..absent() };
        let views = vec![view("", &["p:1"], vec![direct.clone()], &[]), view("b", &["p:2"], vec![], &[])];
        assert_eq!(Snapshot::merge(views).stranded_leases, Some(1));
        let alone = Snapshot::merge(vec![view("", &["p:1"], vec![direct], &[])]);
        assert_eq!(
            (alone.stranded_leases, alone.engines[0].blocks.as_ref().and_then(|b| b.stranded)),
            (None, None)
        );
    }

    #[test]
    fn what_answered_wins_over_what_did_not() {
        let mut deaf = view("a", &["p:1"], vec![], &[]);
        deaf.engines[0] =
            EngineView { engine: "p:1".to_owned(), error: Some("late".to_owned()), ..EngineView::default() };
        for views in [
            vec![deaf.clone(), view("b", &["p:1"], vec![], &[])],
            vec![view("b", &["p:1"], vec![], &[]), deaf],
        ] {
            let merged = Snapshot::merge(views);
            assert_eq!((merged.engines[0].source, &merged.engines[0].error), (Source::DebugKv, &None));
        }
    }
}
