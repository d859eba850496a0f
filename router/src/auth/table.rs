//! The table of keys and certificates, from the configuration and the keys file, and the registry that outlives
//! it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use tokio::runtime::Handle;

use super::bucket::Meter;
use super::jwt::key_source::KeySource;
use super::keys::DigestMap;
use super::salt::SaltKey;
use super::shared::{SharedLimits, SharedLimitsTerms};
use super::{AuthError, Identity, Tenant};
use crate::auth::TenantId;
use crate::config::{AuthConfig, JwtConfig, KeysFile, RateLimitsConfig, SharedLimitsConfig, TenantConfig};
use crate::message::random;
use crate::metrics::tenants::{IssuerMetrics, TenantMetrics};
use crate::tls::service::ServiceTls;

/// Limit on tenants that only tokens name. It is above that of remembered tokens, so that some can be removed.
const NAMED_BY_TOKENS_MAX: usize = 20_000;

/// All known keys and certificates.
#[derive(Default)]
pub(super) struct KeyTable {
    pub by_hash: DigestMap<Identity>,
    pub by_certificate: HashMap<String, Arc<Identity>>,
    /// One identity per tenant.
    pub by_tenant: HashMap<Arc<str>, Arc<Identity>>,
    /// Share and limits of the tenants that the configuration lists.
    listed: HashMap<String, (u32, RateLimitsConfig)>,
    keys: usize,
    /// The meters of all entries, for [`TenantRegistry::keep`].
    meters: Vec<(String, RateLimitsConfig, Arc<Meter>)>,
}

/// A tenant that only tokens name, with its limits.
type NamedTenant = (RateLimitsConfig, Arc<Tenant>);

/// State of keys and tenants that outlives a version of the configuration: their use of limits.
pub(crate) struct TenantRegistry {
    meters: Mutex<HashMap<String, (RateLimitsConfig, Arc<Meter>)>>,
    /// Numbers of all tenants in tables, whether a table is in effect or about to be.
    ids: Mutex<HashMap<Arc<str>, TenantId>>,
    /// Tenants that only tokens name, with their limits.
    named_by_tokens: Mutex<HashMap<Arc<str>, NamedTenant>>,
    services: Services,
    /// Number of the next tenant. None is used twice.
    next_id: AtomicU32,
    started: Instant,
    /// Used where no secret is configured.
    salts: SaltKey,
    metrics: Arc<TenantMetrics>,
}

/// The table of tenants that tokens name is full.
#[derive(Debug)]
pub(super) struct TooManyTenants;

/// Tasks and connections that a new configuration with the same terms continues to use.
struct Services {
    /// Where their tasks run: `None` outside a runtime, in simulations.
    runtime: Option<Handle>,
    key_sources: Mutex<Vec<Weak<KeySource>>>,
    shared_limits: Mutex<Weak<SharedLimits>>,
}

impl TenantRegistry {
    pub(crate) fn new(metrics: Arc<TenantMetrics>) -> Self {
        Self {
            meters: Mutex::default(),
            ids: Mutex::default(),
            named_by_tokens: Mutex::default(),
            services: Services {
                runtime: Handle::try_current().ok(),
                key_sources: Mutex::default(),
                shared_limits: Mutex::default(),
            },
            next_id: AtomicU32::new(0),
            started: Instant::now(),
            salts: SaltKey::derived("cache salt", &random::bytes::<32>()),
            metrics,
        }
    }

    /// Nanoseconds since this registry was made.
    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn metrics(&self) -> &TenantMetrics {
        &self.metrics
    }

    pub(super) fn salts(&self) -> SaltKey {
        self.salts.clone()
    }

    /// The same meter as before, unless the limits were changed. A new meter is not registered until
    /// [`Self::keep`], because the configuration may still turn out to be invalid.
    fn meter(&self, name: &str, limits: &RateLimitsConfig) -> Arc<Meter> {
        let meters = lock(&self.meters);
        let known = meters.get(name).filter(|(known, _)| known == limits);
        known.map_or_else(|| Arc::new(Meter::new(name, limits)), |(_, meter)| Arc::clone(meter))
    }

    /// Called when a table takes effect. Registers the meters of its keys, and removes those of keys that are in
    /// no table any more. Tenants that tokens have named, and that the table lists, count under their own label now.
    pub(super) fn keep(&self, table: &KeyTable) {
        {
            let mut tenants = lock(&self.named_by_tokens);
            for name in table.listed.keys() {
                if let Some((_, known)) = tenants.get_mut(name.as_str()) {
                    *known = Arc::new(Tenant {
                        name: Arc::clone(&known.name),
                        id: known.id,
                        weight: known.weight,
                        meter: Arc::clone(&known.meter),
                        counters: self.metrics.tenant(name),
                    });
                }
            }
        }
        let mut meters = lock(&self.meters);
        for (name, limits, meter) in &table.meters {
            meters.insert(name.clone(), (limits.clone(), Arc::clone(meter)));
        }
        meters.retain(|_, (_, meter)| Arc::strong_count(meter) > 1);
    }

    /// A tenant that a token names, with its use of limits.
    ///
    /// # Errors
    /// [`TooManyTenants`]: all of them have requests, remembered tokens, or used a limit within the last minute.
    pub(super) fn tenant(
        &self,
        name: &str,
        weight: u32,
        limits: &RateLimitsConfig,
    ) -> Result<Arc<Tenant>, TooManyTenants> {
        let mut tenants = lock(&self.named_by_tokens);
        if let Some((known, tenant)) = tenants.get(name)
            && (known, tenant.weight) == (limits, weight)
        {
            return Ok(Arc::clone(tenant));
        }
        if tenants.len() >= NAMED_BY_TOKENS_MAX && !tenants.contains_key(name) {
            let now = self.now_ns();
            tenants.retain(|_, (_, tenant)| Arc::strong_count(tenant) > 1 || !tenant.meter.is_unused(now));
            lock(&self.meters).retain(|_, (_, meter)| Arc::strong_count(meter) > 1);
            lock(&self.ids).retain(|name, _| Arc::strong_count(name) > 1);
            if tenants.len() >= NAMED_BY_TOKENS_MAX {
                return Err(TooManyTenants);
            }
        }
        let meter_name = format!("tenant {name}");
        let meter = self.meter(&meter_name, limits);
        lock(&self.meters).insert(meter_name, (limits.clone(), Arc::clone(&meter)));
        let (shared_name, id) = self.id(name);
        let counters = self.metrics.tenant(name);
        let tenant = Arc::new(Tenant { name: Arc::clone(&shared_name), id, weight, meter, counters });
        tenants.insert(shared_name, (limits.clone(), Arc::clone(&tenant)));
        Ok(tenant)
    }

    /// The task that fetches an issuer's keys; the one in use if its terms are the same.
    pub(super) fn key_source(
        &self,
        config: &JwtConfig,
        tls: Option<ServiceTls>,
        metrics: IssuerMetrics,
    ) -> Arc<KeySource> {
        let mut sources = lock(&self.services.key_sources);
        sources.retain(|source| source.strong_count() > 0);
        if let Some(found) = sources.iter().filter_map(Weak::upgrade).find(|source| source.fits(config)) {
            found.set_tls(tls);
            return found;
        }
        let source = KeySource::fetched(config, tls, metrics, self.services.runtime.as_ref());
        sources.push(Arc::downgrade(&source));
        source
    }

    /// The connection to the server of the shared limits; the one in use if its terms are the same.
    ///
    /// # Errors
    /// [`AuthError`]: a file is invalid.
    pub(super) fn shared_limits(&self, config: &SharedLimitsConfig) -> Result<Arc<SharedLimits>, AuthError> {
        let terms = SharedLimitsTerms::read(config)?;
        let mut known = lock(&self.services.shared_limits);
        if let Some(found) = known.upgrade().filter(|found| found.fits(&terms)) {
            return Ok(found);
        }
        let metrics = self.metrics.shared_limits();
        let shared = SharedLimits::start(terms, metrics, self.services.runtime.as_ref());
        *known = Arc::downgrade(&shared);
        Ok(shared)
    }

    /// The tenant's number. It stays the same for as long as a reference to the tenant's name exists.
    fn id(&self, tenant: &str) -> (Arc<str>, TenantId) {
        let mut ids = lock(&self.ids);
        if let Some((name, id)) = ids.get_key_value(tenant) {
            return (Arc::clone(name), *id);
        }
        let (name, id) = (Arc::<str>::from(tenant), TenantId(self.next_id.fetch_add(1, Ordering::Relaxed)));
        ids.insert(Arc::clone(&name), id);
        (name, id)
    }
}

impl KeyTable {
    /// # Errors
    /// [`AuthError`] names the problem. Nothing else changes.
    pub(super) fn build(config: &AuthConfig, registry: &TenantRegistry) -> Result<Self, AuthError> {
        // Removes numbers of tables that are no longer in effect, or never were.
        lock(&registry.ids).retain(|name, _| Arc::strong_count(name) > 1);
        let file = match &config.keys_file {
            Some(path) => crate::config::read::load_checked::<KeysFile>(path)?,
            None => KeysFile::default(),
        };
        let mut known: HashMap<&str, Arc<Tenant>> = HashMap::new();
        let listed: Vec<_> = config.tenants.iter().chain(&file.tenants).collect();
        let mut seen = HashSet::new();
        if let Some(twice) = listed.iter().find(|tenant| !seen.insert(tenant.name.as_str())) {
            return Err(AuthError::Twice { what: "tenant", name: twice.name.clone() });
        }
        registry.metrics.reserve(named(config, &file));
        let by_name: HashMap<&str, _> = listed.iter().map(|tenant| (tenant.name.as_str(), *tenant)).collect();
        let mut fresh = Vec::new();
        let mut meter = |name: String, limits: &RateLimitsConfig| {
            let meter = registry.meter(&name, limits);
            fresh.push((name, limits.clone(), Arc::clone(&meter)));
            meter
        };
        let tenant =
            |name: &str, meter: &mut dyn FnMut(String, &RateLimitsConfig) -> Arc<Meter>| -> Arc<Tenant> {
                let (weight, limits) = by_name.get(name).map_or((1, RateLimitsConfig::default()), |tenant| {
                    (tenant.weight, tenant.limits.clone())
                });
                let (shared_name, id) = registry.id(name);
                Arc::new(Tenant {
                    name: shared_name,
                    id,
                    weight,
                    meter: meter(format!("tenant {name}"), &limits),
                    counters: registry.metrics.tenant(name),
                })
            };
        let terms = |tenant: &&TenantConfig| (tenant.name.clone(), (tenant.weight, tenant.limits.clone()));
        let mut table = Self { listed: listed.iter().map(terms).collect(), ..Self::default() };
        let mut names = HashSet::new();
        for key in config.keys.iter().chain(&file.keys) {
            if !names.insert(key.id.as_str()) {
                return Err(AuthError::Twice { what: "key", name: key.id.clone() });
            }
            let identity = Identity {
                name: key.id.clone(),
                tenant: Arc::clone(
                    known.entry(&key.tenant).or_insert_with(|| tenant(&key.tenant, &mut meter)),
                ),
                priority_max: key.priority_max,
                models: key.models.clone(),
                expires_s: key.expires_s(),
                meter: meter(format!("key {}", key.id), &key.limits),
            };
            let digest = key.digest().ok_or_else(|| AuthError::SameKey(key.id.clone()))?;
            let identity = Arc::new(identity);
            table.by_tenant.insert(Arc::clone(&identity.tenant.name), Arc::clone(&identity));
            if !table.by_hash.insert(digest, identity) {
                return Err(AuthError::SameKey(key.id.clone()));
            }
            table.keys += 1;
        }
        for certificate in config.certificates.iter().chain(&file.certificates) {
            let tenant =
                known.entry(&certificate.tenant).or_insert_with(|| tenant(&certificate.tenant, &mut meter));
            let identity = Identity {
                name: certificate.name.clone(),
                tenant: Arc::clone(tenant),
                priority_max: certificate.priority_max,
                models: certificate.models.clone(),
                expires_s: None,
                meter: meter(format!("certificate {}", certificate.name), &certificate.limits),
            };
            let identity = Arc::new(identity);
            table.by_tenant.insert(Arc::clone(&identity.tenant.name), Arc::clone(&identity));
            if table.by_certificate.insert(certificate.name.clone(), identity).is_some() {
                return Err(AuthError::Twice { what: "certificate", name: certificate.name.clone() });
            }
        }
        table.meters = fresh;
        Ok(table)
    }

    /// Share and limits of a tenant that the configuration lists.
    pub(super) fn terms(&self, tenant: &str) -> Option<(u32, &RateLimitsConfig)> {
        self.listed.get(tenant).map(|(weight, limits)| (*weight, limits))
    }

    pub(super) fn len(&self) -> usize {
        self.keys + self.by_certificate.len()
    }
}

/// The tenants that a configuration and its keys file name: the listed ones first.
fn named<'a>(config: &'a AuthConfig, file: &'a KeysFile) -> impl Iterator<Item = &'a str> {
    let listed = config.tenants.iter().chain(&file.tenants).map(|tenant| tenant.name.as_str());
    let with_keys = config.keys.iter().chain(&file.keys).map(|key| key.tenant.as_str());
    let certificates = config.certificates.iter().chain(&file.certificates);
    listed.chain(with_keys).chain(certificates.map(|certificate| certificate.tenant.as_str()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn a_rejected_table_keeps_the_previous_usage() {
        let registry = TenantRegistry::new(Arc::clone(&Metrics::new().tenants));
        let table = |tokens: u64| {
            let hash = format!("sha256:{}", "0".repeat(64));
            let text = format!(
                "{{keys: [{{id: a, hash: '{hash}', tenant: t, limits: {{tokens_per_minute: {tokens}}}}}]}}"
            );
            let config: AuthConfig = serde_saphyr::from_str(&text).unwrap();
            KeyTable::build(&config, &registry).unwrap()
        };
        let limits = |tokens| RateLimitsConfig { tokens_per_minute: Some(tokens), ..Default::default() };
        let first = table(10);
        registry.keep(&first);
        let meter = registry.meter("key a", &limits(10));
        drop(table(20));
        assert!(
            Arc::ptr_eq(&meter, &registry.meter("key a", &limits(10))),
            "the configuration was wrong elsewhere"
        );
        registry.keep(&table(10));
        assert!(Arc::ptr_eq(&meter, &registry.meter("key a", &limits(10))));
        registry.keep(&table(20));
        assert!(!Arc::ptr_eq(&meter, &registry.meter("key a", &limits(10))), "other limits begin at zero");
        drop((first, meter));
        registry.keep(&KeyTable::default());
        assert_eq!(lock(&registry.meters).len(), 0, "no table has the key any more");
        let other = table(10);
        assert_eq!(lock(&registry.ids).len(), 1, "a tenant that returns keeps its number");
        drop(other);
        KeyTable::build(&serde_saphyr::from_str("{}").unwrap(), &registry).unwrap();
        assert_eq!(lock(&registry.ids).len(), 0, "nor the tenant");
        let (name, id) = registry.id("u");
        assert_eq!(registry.id("u").1, id);
        drop(name);
    }
}
