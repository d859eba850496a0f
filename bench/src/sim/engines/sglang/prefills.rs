//! The prefill engines that D knows, by their bootstrap servers.
//!
//! ```text
//!  D's first leg for P: GET /route?…=-1 (topology) ─▶ GET /route?prefill_dp_rank=r&… (the rank's address)
//!  from then on: GET /health every 5 s. After two failures every leg that waits for P fails.
//! ```
//!
//! A P that restarts between two heartbeats stays unnoticed until D sends it a message, as in SGLang.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::message::PeerRank;
use crate::common::http_client::ServiceClient;

/// Failed heartbeats after which P counts as lost.
const FAILURES_MAX: u32 = 2;
/// Maximum known prefill engines. Legs for further ones fail.
const KNOWN_MAX: usize = 256;
/// SGLang's timeout of a request to the bootstrap server.
const ROUTE_WITHIN: Duration = Duration::from_secs(5);
/// The fields of SGLang's `/route`.
pub(super) const ROUTE_FIELDS: [&str; 4] =
    ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];

/// What D knows of a prefill engine.
#[derive(Clone)]
struct KnownPrefill {
    client: ServiceClient,
    ranks: usize,
    addresses: HashMap<usize, SocketAddr>,
    failures: u32,
}

/// The prefill engines that D knows, by the address of the bootstrap server.
#[derive(Default)]
pub(super) struct KnownPrefills(Mutex<HashMap<String, KnownPrefill>>);

impl KnownPrefills {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownPrefill>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank of P for a room.
    ///
    /// # Errors
    /// The reason of the leg's failure.
    pub(super) async fn resolve(
        &self,
        bootstrap: &str,
        room: u64,
        prefill_rank: Option<usize>,
        page_size: usize,
    ) -> Result<PeerRank, String> {
        let unreachable =
            || format!("Could not fetch prefill parallel info from bootstrap_addr: {bootstrap}");
        let known = self.lock().get(bootstrap).cloned();
        let known = match known {
            Some(known) => known,
            None => {
                let client = ServiceClient::parse(bootstrap).map_err(|_| unreachable())?;
                let query: Vec<_> = ROUTE_FIELDS.iter().map(|field| format!("{field}=-1")).collect();
                let path = format!("/route?{}", query.join("&"));
                let topology = client.get_json(&path, ROUTE_WITHIN).await.map_err(|_| unreachable())?;
                if topology["page_size"].as_u64() != Some(page_size as u64) {
                    let theirs = &topology["page_size"];
                    return Err(format!("Page size mismatch: prefill {theirs}, decode {page_size}"));
                }
                let ranks = topology["dp_size"].as_u64().unwrap_or(1).max(1) as usize;
                KnownPrefill { client, ranks, addresses: HashMap::new(), failures: 0 }
            }
        };
        let rank = prefill_rank.unwrap_or((room % known.ranks as u64) as usize);
        if let Some(&at) = known.addresses.get(&rank) {
            return Ok(PeerRank { at, rank });
        }
        let path =
            format!("/route?prefill_dp_rank={rank}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0");
        let found = known.client.get_json(&path, ROUTE_WITHIN).await.map_err(|_| unreachable())?;
        let at = rank_address(&found).ok_or_else(unreachable)?;
        let mut all = self.lock();
        if !all.contains_key(bootstrap) && all.len() >= KNOWN_MAX {
            return Err(unreachable());
        }
        all.entry(bootstrap.to_owned()).or_insert(known).addresses.insert(rank, at);
        Ok(PeerRank { at, rank })
    }

    /// No engine listens at the address of a rank. The next leg asks the bootstrap server again.
    pub(super) fn forget_address(&self, at: SocketAddr) {
        for known in self.lock().values_mut() {
            known.addresses.retain(|_, known| *known != at);
        }
    }

    /// One heartbeat to every known prefill engine. Returns the lost ones, which are forgotten.
    pub(super) async fn heartbeat(&self, within: Duration) -> Vec<String> {
        let all: Vec<_> =
            self.lock().iter().map(|(bootstrap, known)| (bootstrap.clone(), known.client.clone())).collect();
        let mut lost = Vec::new();
        for (bootstrap, client) in all {
            let lives = client.get("/health", within).await.is_ok();
            let mut all = self.lock();
            let Some(known) = all.get_mut(&bootstrap) else { continue };
            known.failures = if lives { 0 } else { known.failures + 1 };
            if known.failures >= FAILURES_MAX {
                all.remove(&bootstrap);
                lost.push(bootstrap);
            }
        }
        lost
    }
}

fn rank_address(found: &Value) -> Option<SocketAddr> {
    let port = u16::try_from(found["rank_port"].as_u64()?).ok()?;
    Some(SocketAddr::new(found["rank_ip"].as_str()?.parse().ok()?, port))
}
