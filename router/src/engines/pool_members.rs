//! The members of pools: engines from the configuration, and engines from its sources. Pure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::config::limits::MEMBERS_MAX;
use crate::config::{EngineConfig, EngineUrl, PoolConfig, RouterConfig};
use crate::engines::discovery_sources::{DiscoverySource, DiscoverySources, Endpoint};
use crate::metrics::Leg;

/// The members of all pools.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PoolMembers(HashMap<(String, Leg), Vec<EngineConfig>>);

impl PoolMembers {
    /// The members of all pools of a configuration, with the current results of its sources.
    pub(crate) fn now(config: &RouterConfig, sources: &DiscoverySources, before: &Self) -> Self {
        let mut all = HashMap::new();
        for model in &config.models {
            for (leg, pool) in [(Leg::Prefill, &model.prefill), (Leg::Decode, &model.decode)] {
                let members = members(pool, |source| sources.of(source), before.of(&model.name, leg));
                all.insert((model.name.clone(), leg), members);
            }
        }
        Self(all)
    }

    /// Whether some pool drains an engine.
    pub(crate) fn drains(&self, url: &EngineUrl) -> bool {
        self.engines().any(|engine| engine.drain && engine.url == *url)
    }

    /// The members of all pools. An engine in several pools comes several times.
    pub(crate) fn engines(&self) -> impl Iterator<Item = &EngineConfig> {
        self.0.values().flatten()
    }

    /// The members of one pool.
    pub(crate) fn of(&self, model: &str, leg: Leg) -> &[EngineConfig] {
        self.0.get(&(model.to_owned(), leg)).map_or(&[], Vec::as_slice)
    }
}

/// The members of a pool, each address once: first those of the configuration in its order, then discovered ones
/// by URL. While a source has no result yet, the members `before` stay as well.
fn members(
    pool: &PoolConfig,
    endpoints_of: impl Fn(&DiscoverySource) -> Option<Arc<[Endpoint]>>,
    before: &[EngineConfig],
) -> Vec<EngineConfig> {
    let mut members = pool.engines.clone();
    let Some(discover) = &pool.discover else { return members };
    let mut urls: HashSet<_> = members.iter().map(|member| member.url.clone()).collect();
    let (mut discovered, mut is_incomplete) = (Vec::new(), false);
    for source in DiscoverySource::of(discover) {
        match endpoints_of(&source) {
            Some(endpoints) => discovered.extend(endpoints.iter().cloned()),
            None => is_incomplete = true,
        }
    }
    discovered.sort();
    for endpoint in discovered {
        if urls.insert(endpoint.url.clone()) {
            let mut member = discover.template.engine(endpoint.url);
            member.weight = endpoint.weight.unwrap_or(member.weight);
            member.labels.extend(endpoint.labels);
            members.push(member);
        }
    }
    if is_incomplete {
        let stay = before.iter().filter(|member| urls.insert(member.url.clone()));
        members.extend(stay.cloned());
    }
    members.truncate(MEMBERS_MAX);
    members
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn pool(yaml: &str) -> PoolConfig {
        serde_saphyr::from_str(yaml).expect(yaml)
    }

    fn endpoint(url: &str, weight: Option<u32>, zone: &str) -> Endpoint {
        let labels = BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        Endpoint { url: url.parse().expect(url), weight, labels }
    }

    fn urls(members: &[EngineConfig]) -> Vec<String> {
        members.iter().map(|member| member.url.to_string()).collect()
    }

    const BOTH: &str = "engines: [{url: 'http://b:1', weight: 9}]\n\
                        discover: {dns: {host: x, port: 1}, file: {path: y}, template: {weight: 3, labels: {a: b}}}";

    #[test]
    fn listed_engines_come_first_and_keep_their_settings() {
        let answer = |source: &DiscoverySource| {
            Some(match source {
                DiscoverySource::Dns(_) => {
                    [endpoint("http://c:1", None, "q"), endpoint("http://b:1", Some(1), "q")].into()
                }
                _ => [endpoint("http://a:1", Some(7), "r"), endpoint("http://c:1", None, "q")].into(),
            })
        };
        let members = members(&pool(BOTH), answer, &[]);
        assert_eq!(urls(&members), ["http://b:1", "http://a:1", "http://c:1"]);
        assert_eq!(members.iter().map(|m| m.weight).collect::<Vec<_>>(), [9, 7, 3]);
        assert!(members[0].labels.is_empty(), "the configuration has no labels");
        assert_eq!(
            members[1].labels,
            BTreeMap::from([("a".into(), "b".into()), ("zone".into(), "r".into())])
        );
    }

    #[test]
    fn earlier_members_stay_until_a_source_answers() {
        let before = pool("engines: [{url: 'http://old:1', weight: 5}, {url: 'http://b:1'}]").engines;
        let nothing_yet = members(&pool(BOTH), |_| None, &before);
        assert_eq!(urls(&nothing_yet), ["http://b:1", "http://old:1"]);
        assert_eq!(nothing_yet[1].weight, 5);
        let one = |source: &DiscoverySource| {
            matches!(source, DiscoverySource::Dns(_)).then(|| [endpoint("http://c:1", None, "q")].into())
        };
        assert_eq!(urls(&members(&pool(BOTH), one, &before)), ["http://b:1", "http://c:1", "http://old:1"]);
        let empty = members(&pool(BOTH), |_| Some([].into()), &before);
        assert_eq!(urls(&empty), ["http://b:1"], "an empty answer is an answer");
    }

    #[test]
    fn without_sources_the_list_is_the_membership() {
        let listed = pool("engines: [{url: 'http://b:1'}, {url: 'http://a:1'}]");
        assert_eq!(
            members(&listed, |_| unreachable!("no source is queried"), &listed.engines),
            listed.engines
        );
    }

    #[test]
    fn a_pool_has_a_bound() {
        let many: Arc<[Endpoint]> =
            (0..5000).map(|n| endpoint(&format!("http://e{n}:1"), None, "q")).collect();
        assert_eq!(members(&pool(BOTH), |_| Some(Arc::clone(&many)), &[]).len(), MEMBERS_MAX);
    }
}
