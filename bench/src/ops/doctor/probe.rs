//! Opens a lease and checks its duration against the router's timeouts, and whether its side channel can be reached.
//! The lease is released at once.
//!
//! Only Baton engines and vLLM engines with its connector are probed: a stock engine would keep the blocks until its lease expires.

use std::time::Duration;

use serde_json::{Value, json};

use super::checkup::{Checkup, Warning};
use super::disconnect::prompt;
use super::engine::{EngineInfo, PATIENCE};
use super::inventory::Inventory;

/// Words of a prompt of a few blocks.
const WORDS: usize = 40;
/// Maximum time to connect to a side channel.
const CONNECT: Duration = Duration::from_secs(2);
/// Maximum time of a prefill on a busy engine.
const PREFILL: Duration = Duration::from_secs(30);
/// The router gives up a silent decode engine after `liveness_probe_ms` and two probes of two seconds each.
const QUESTIONS_MS: u64 = 4_000;
/// Leases below this are short, if no router is known. vLLM's default is 30 s.
const SHORT_MS: u64 = 5_000;

/// Opens a lease at every prefill engine.
pub(super) async fn leases(inventory: &Inventory, checkup: &mut Checkup) {
    // Only an engine that reports its blocks' layout returns handles, which are needed to release a lease.
    let lends = |engine: &&EngineInfo| {
        let prefills = matches!(engine.role.as_deref(), Some("prefill" | "both"));
        engine.up && prefills && (engine.layout.is_some() || engine.has_connector)
    };
    let mut probed = 0;
    for engine in inventory.engines.iter().filter(lends) {
        probed += 1;
        lease(engine, &inventory.configs, checkup).await;
    }
    if probed == 0 {
        checkup.skip("side channel", "", "no prefill engine of Baton is known");
    }
}

async fn lease(engine: &EngineInfo, configs: &[Value], checkup: &mut Checkup) {
    let name = engine.name.as_str();
    let Some(model) = engine.models.first() else {
        return checkup.skip("side channel", name, "it lists no model");
    };
    let info = engine.service.get_json("/server_info", PATIENCE).await.unwrap_or_default();
    if info["disaggregation_mode"].is_string() {
        return checkup.skip("lease", name, "SGLang's prefill engines lend no blocks");
    }
    let tag = format!("baton-doctor-lease-{}", crate::ops::top::source::now_us());
    let body = json!({
        "model": model, "prompt": prompt(&tag, WORDS), "max_tokens": 1, "temperature": 0, "user": tag,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null},
    });
    let answer = match engine.service.post_json("/v1/completions", &body, PREFILL).await {
        Ok(answer) => answer,
        Err(error) => return checkup.fail("lease", name, format!("a prefill was refused: {error}")),
    };
    let lent = &answer["kv_transfer_params"];
    if lent.is_null() {
        return checkup.fail("lease", name, "it computed a prompt and opened no lease");
    }
    if let Some(left) = lent["remote_lease_left_ms"].as_u64() {
        duration(name, left, configs, checkup);
    }
    side_channel(name, lent, checkup).await;
    let Some(handle) = lent["remote_handle"].as_str() else {
        let message = "it returned no handle: the blocks of this probe are freed when its lease expires";
        return checkup.warn(Warning::Lease, name, message);
    };
    let release = json!({"handle": handle, "reason": "router_release"});
    match engine.service.post_json("/kv/release", &release, PATIENCE).await {
        Ok(response) if response["result"] == "unknown" => {
            checkup.fail("lease", name, "it does not know the lease that it just opened");
        }
        Ok(_) => checkup.ok("lease", name, "opened and released"),
        Err(error) => checkup.fail("lease", name, format!("it cannot be released: {error}")),
    }
}

fn duration(name: &str, left_ms: u64, configs: &[Value], checkup: &mut Checkup) {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let alive = configs.iter().filter_map(|config| config["timeouts"]["liveness_probe_ms"].as_u64()).max();
    let Some(alive) = alive else {
        return if left_ms < SHORT_MS {
            let message = format!("{:.1} s is short: a decode engine may pause for longer", seconds(left_ms));
            checkup.warn(Warning::LeaseTime, name, message);
        } else {
            checkup.ok("lease time", name, format!("{:.1} s", seconds(left_ms)));
        };
    };
    let needed = alive + QUESTIONS_MS;
    if left_ms < needed {
        let message = format!(
            "{:.1} s is too short: the router gives up an unresponsive decode engine after {:.1} s \
             (timeouts.liveness_probe_ms)",
            seconds(left_ms),
            seconds(needed)
        );
        checkup.warn(Warning::LeaseTime, name, message);
    } else {
        let message = format!(
            "{:.1} s; the router gives up an unresponsive decode engine after {:.1} s",
            seconds(left_ms),
            seconds(needed)
        );
        checkup.ok("lease time", name, message);
    }
}

async fn side_channel(name: &str, lent: &Value, checkup: &mut Checkup) {
    let (Some(host), Some(port)) = (lent["remote_host"].as_str(), lent["remote_port"].as_u64()) else {
        return checkup.fail("side channel", name, "its handoff contains no address");
    };
    // vLLM's connector has a channel of its own beside NIXL's.
    for port in [Some(port), lent["remote_channel_port"].as_u64()].into_iter().flatten() {
        reach(name, host, u16::try_from(port).unwrap_or(0), checkup).await;
    }
}

async fn reach(name: &str, host: &str, port: u16, checkup: &mut Checkup) {
    let place = format!("{host}:{port}");
    match tokio::time::timeout(CONNECT, tokio::net::TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => checkup.ok("side channel", name, format!("{place} is reachable from here")),
        Ok(Err(error)) => {
            checkup.fail("side channel", name, format!("{place} is not reachable from here: {error}"))
        }
        Err(_) => checkup.fail(
            "side channel",
            name,
            format!("{place} does not respond from here within {} s", CONNECT.as_secs()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::checkup::CheckupOptions;
    use super::*;
    use crate::common::http_client::ServiceClient;
    use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, SglangFleet, SglangPlan, SimFleet};

    /// The check of the prefill engine at this address.
    fn examine(address: String) -> Checkup {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut engine = EngineInfo::at(ServiceClient::parse(&address).expect("an address"));
            engine.models.insert("sim".to_owned());
            let mut checkup = Checkup::new(CheckupOptions::default());
            checkup.mark_reachable();
            lease(&engine, &[], &mut checkup).await;
            checkup
        })
    }

    #[test]
    fn the_lease_of_a_baton_engine_is_checked_and_an_sglang_engine_lends_none() {
        let plan = EnginePlan { dialect: Dialect::Baton, ..EnginePlan::default() };
        let fleet = SimFleet::start(FleetPlan::new(1, 1, plan)).expect("a fleet starts on loopback");
        let text = examine(fleet.prefill()[0].to_string()).text();
        assert!(text.contains("opened and released"), "{text}");
        let fleet = SglangFleet::start(SglangPlan::new(FleetPlan::new(1, 1, EnginePlan::default())));
        let checkup = examine(fleet.expect("a fleet starts on loopback").prefill()[0].to_string());
        assert!(!checkup.has_failed_any("lease"), "{}", checkup.text());
        assert!(checkup.text().contains("lend no blocks"), "{}", checkup.text());
    }
}
