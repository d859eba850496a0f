//! Merges several views of one deployment: those of routers, and those of directly queried engines.

use std::collections::{HashMap, HashSet};

use baton_router::snapshot::{
    EngineView, LeaseView, RequestState, RequestView, Snapshot, SnapshotSource, bare_id,
};

/// Maximum requests in a merged view.
const OLDEST_MAX: usize = 1_000;

/// Maximum age difference of two views.
const STALE_MS: u64 = 3_000;

/// A lease's key across views. One request may have several leases at one engine.
type LeaseName = (String, u64, String, usize);

/// Merges views. An engine in several views is one engine, and a lease is stranded only if no router has its request.
pub(super) fn merge(views: Vec<Snapshot>) -> Snapshot {
    let mut whole = Snapshot::default();
    let sights: Vec<Coverage> = views.iter().map(Coverage::of).collect();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut leases: HashMap<LeaseName, (LeaseView, usize)> = HashMap::new();
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
                // A view of an older router.
                engine.at_us = view.at_us;
            }
            engine.observed_by.clone_from(&observed_by);
            match places.get(&engine.engine) {
                Some(&place) => merge_engine(&mut whole.engines[place], engine),
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
            let key: LeaseName = (name.0, name.1, name.2, *nth);
            *nth += 1;
            match leases.get_mut(&key) {
                Some((kept, _)) => {
                    kept.request = combine(std::mem::take(&mut kept.request), lease.request);
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
        let states: Vec<RequestState> = sights.iter().filter_map(|sight| sight.request_of(lease)).collect();
        let doubt = states.contains(&RequestState::Unknown);
        for state in states {
            lease.request = combine(std::mem::take(&mut lease.request), state);
        }
        if doubt && !matches!(lease.request, RequestState::InFlight { .. }) {
            lease.request = RequestState::Unknown;
        }
    }
    whole.requests.oldest.sort_by_key(|request| std::cmp::Reverse(request.age_ms));
    whole.requests.oldest.truncate(OLDEST_MAX);
    whole.finish();
    whole
}

/// The conclusions from a router's view about leases that the view does not contain.
struct Coverage {
    routers: bool,
    engines: HashSet<String>,
    leases: HashSet<(String, u64, String)>,
    in_flight: HashMap<String, String>,
    /// Whether the view lists every request in flight.
    complete: bool,
}

impl Coverage {
    fn of(view: &Snapshot) -> Self {
        let listed = |request: &RequestView| (bare_id(&request.request_id).to_owned(), request.phase.clone());
        let queried = view.engines.iter().filter(|engine| engine.source == SnapshotSource::DebugKv);
        Self {
            routers: view.routers.iter().any(|router| router.error.is_none()),
            engines: queried.map(|engine| engine.engine.clone()).collect(),
            leases: view.leases.iter().map(|l| (l.engine.clone(), l.rank, l.request_id.clone())).collect(),
            in_flight: view.requests.oldest.iter().map(listed).collect(),
            complete: view.requests.oldest.len() as u64 >= view.requests.in_flight,
        }
    }

    /// The state of a lease's request. `None` if the view contains the lease itself.
    fn request_of(&self, lease: &LeaseView) -> Option<RequestState> {
        let name = (lease.engine.clone(), lease.rank, lease.request_id.clone());
        if !self.routers || self.leases.contains(&name) {
            return None;
        }
        // The lease may have been opened after the view.
        let newer = self.engines.contains(&lease.engine) && lease.age_ms < STALE_MS;
        Some(match self.in_flight.get(bare_id(&lease.request_id)) {
            Some(phase) => RequestState::InFlight { phase: phase.clone() },
            None if self.complete && !newer => RequestState::Absent,
            None => RequestState::Unknown,
        })
    }
}

/// Combines the states of two views. An unknown state does not change the other.
fn combine(one: RequestState, other: RequestState) -> RequestState {
    use RequestState as R;
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

/// Merges another view of the same engine. The better source wins.
fn merge_engine(kept: &mut EngineView, other: EngineView) {
    let in_flight = match (kept.in_flight, other.in_flight) {
        (Some(one), Some(two)) => Some(one + two),
        (one, two) => one.or(two),
    };
    let mut standing = std::mem::take(&mut kept.standing);
    for (leg, how) in &other.standing {
        // The worse standing, because one router may have observed a failure that the other has not.
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
    use baton_router::snapshot::{BlockCounts, RouterView};

    use super::*;

    fn view(admin: &str, engines: &[&str], leases: Vec<LeaseView>, requests: &[&str]) -> Snapshot {
        let engine = |name: &&str| EngineView {
            engine: (*name).to_owned(),
            source: SnapshotSource::DebugKv,
            blocks: Some(BlockCounts { total: 100, leased: 100, ..BlockCounts::default() }),
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
        LeaseView {
            engine: "p:1".to_owned(),
            request_id: "r".to_owned(),
            blocks: 4,
            state: "offered".to_owned(),
            age_ms: 10_000,
            left_ms: Some(20_000),
            request: RequestState::Absent,
            ..LeaseView::default()
        }
    }

    #[test]
    fn a_lease_is_stranded_only_where_no_router_has_its_request() {
        let alone = merge(vec![view("a", &["p:1"], vec![absent()], &[])]);
        assert_eq!((alone.stranded_leases, alone.stranded_blocks), (Some(1), Some(4)));
        let flying = LeaseView { request: RequestState::InFlight { phase: "gap".to_owned() }, ..absent() };
        let two = vec![view("a", &["p:1"], vec![absent()], &[]), view("b", &["p:1"], vec![flying], &["r"])];
        let merged = merge(two);
        assert_eq!((merged.stranded_leases, merged.leases.len(), merged.engines.len()), (Some(0), 1, 1));
        assert_eq!(merged.engines[0].in_flight, Some(2), "of both routers");
        let elsewhere = vec![view("a", &["p:1"], vec![absent()], &[]), view("b", &["p:2"], vec![], &["r-2"])];
        assert_eq!(merge(elsewhere).stranded_leases, Some(0), "the other router lists its request");
    }

    #[test]
    fn a_router_with_a_truncated_list_gives_unknown() {
        let mut many = view("b", &["p:2"], vec![], &["x"]);
        many.requests.in_flight = 5_000;
        let mut alone = absent();
        alone.request = RequestState::Unknown;
        let merged = merge(vec![view("", &["p:1"], vec![alone], &[]), many]);
        assert_eq!((merged.stranded_leases, merged.leases[0].stranded), (None, None));
    }

    #[test]
    fn engines_queried_directly_are_judged_by_the_routers_in_view() {
        let direct = LeaseView { request: RequestState::Unknown, ..absent() };
        let views = vec![view("", &["p:1"], vec![direct.clone()], &[]), view("b", &["p:2"], vec![], &[])];
        assert_eq!(merge(views).stranded_leases, Some(1));
        let alone = merge(vec![view("", &["p:1"], vec![direct], &[])]);
        assert_eq!(
            (alone.stranded_leases, alone.engines[0].blocks.as_ref().and_then(|b| b.stranded)),
            (None, None)
        );
    }

    #[test]
    fn a_reply_wins_over_a_failed_query() {
        let mut silent = view("a", &["p:1"], vec![], &[]);
        silent.engines[0] =
            EngineView { engine: "p:1".to_owned(), error: Some("late".to_owned()), ..EngineView::default() };
        for views in [
            vec![silent.clone(), view("b", &["p:1"], vec![], &[])],
            vec![view("b", &["p:1"], vec![], &[]), silent],
        ] {
            let merged = merge(views);
            assert_eq!(
                (merged.engines[0].source, &merged.engines[0].error),
                (SnapshotSource::DebugKv, &None)
            );
        }
    }
}
