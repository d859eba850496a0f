//! The producer's side: leases, releases, aborts.

use serde_json::json;

use super::{TestCore, until};
use crate::signals::{ABORTS, ENDED};

const ID: &str = "cmpl-x-0-0a1b2c3d";

fn core() -> TestCore {
    TestCore::start(&json!({}))
}

#[test]
fn a_release_that_comes_before_its_request_wins() {
    let core = core();
    let result = core.verb("/kv/release", &json!({"request_id": "r", "reason": "client_gone"}));
    assert_eq!(result["result"], "remembered");
    assert!(core.queued(ID, "r", "prefill"));
    assert_eq!(core.offer(ID, &json!([[1, 2]]), 1)["refused"], "released");
    // The decode leg of this id is another request.
    assert!(!core.queued("cmpl-y-0-0a1b2c3d", "r", "decode"));
    assert_eq!(core.stats()["leases"], 0);
}

#[test]
fn an_abort_that_comes_first_ends_both_legs() {
    let core = core();
    let results = core.verb("/abort_requests", &json!({"request_ids": ["r", "cmpl-x-0-0a1b2c3d"]}));
    assert_eq!(results["results"], json!({"r": "remembered", "x": "remembered"}));
    assert!(core.queued("0_cmpl-y-0-0a1b2c3d", "r", "prefill"));
    assert!(core.queued("1_cmpl-y-0-0a1b2c3d", "r", "decode"));
    assert!(core.queued("2_cmpl-y-0-0a1b2c3d", "x", "whole"));
    let op =
        json!({"op": "queued", "id": ID, "request_id": null, "leg": "prefill", "prompt": 1, "tag": null});
    assert_eq!(core.call(&op)["released"], true, "the id of the client is in the internal one");
}

#[test]
fn a_release_while_the_prefill_runs_aborts_it_once() {
    let core = core();
    assert!(!core.queued(ID, "r", "prefill"));
    for _ in 0..2 {
        let result = core.verb("/kv/release", &json!({"request_id": "r"}));
        assert_eq!(result["result"], "aborting");
    }
    assert_eq!(core.pending() & ABORTS, ABORTS);
    assert_eq!(core.take()["aborts"], json!([ID]));
    assert_eq!((core.pending() & ABORTS, &core.take()["aborts"]), (0, &json!([])));
    assert_eq!(core.call(&json!({"op": "aborted", "id": ID}))["by_verb"], true);
    assert_eq!(core.offer(ID, &json!([[1]]), 1)["refused"], "released");
    core.events(
        &json!([{"id": ID, "kind": "abort", "how": "disconnect"}, {"id": ID, "kind": "freed", "blocks": 3}]),
    );
    let kinds = core.kinds("r");
    assert_eq!(kinds.iter().filter(|kind| **kind == "abort").count(), 2, "one for each verb: {kinds:?}");
    assert_eq!(core.stats()["requests"], 0);
}

#[test]
fn an_abort_names_its_leg() {
    let core = core();
    core.queued(ID, "r", "prefill");
    core.queued("chatcmpl-y-0a1b2c3d", "r", "decode");
    let abort = |leg: &str| core.verb("/abort_requests", &json!({"request_ids": ["r"], "leg": leg}));
    assert_eq!(abort("decode")["results"]["r"], "aborting");
    assert_eq!(core.take()["aborts"], json!(["chatcmpl-y-0a1b2c3d"]));
    assert_eq!(abort("prefill")["results"]["r"], "aborting");
    assert_eq!(core.take()["aborts"], json!([ID]));
    assert_eq!(core.call(&json!({"op": "aborted", "id": "other"}))["by_verb"], false);
}

#[test]
fn a_released_lease_ends_once_and_its_blocks_are_freed_once() {
    let core = core();
    core.queued(ID, "r", "prefill");
    let lease = core.offer(ID, &json!([[1, 2], [3, 0]]), 1);
    assert_eq!(lease["epoch"], core.epoch.as_str());
    assert_eq!(lease["left_ms"], 30_000);
    let again = core.call(&json!({"op": "offer", "id": ID, "blocks": [[1]], "consumers": 1, "prompt": ""}));
    assert_eq!(again["refused"], "released", "lent once");
    let stats = core.stats();
    assert_eq!((&stats["leases"], &stats["leased_blocks"]), (&json!(1), &json!(3)));
    let handle = json!({"handle": lease["handle"], "reason": "client_gone"});
    assert_eq!(core.verb("/kv/release", &handle)["result"], "released");
    assert_eq!(core.pending() & ENDED, ENDED);
    assert_eq!(core.verb("/kv/release", &handle)["result"], "already");
    let ended = core.take()["ended"].clone();
    assert_eq!(ended, json!([{"id": ID, "cause": "released", "reason": "client_gone"}]));
    assert_eq!(core.take()["ended"], json!([]));
    core.call(&json!({"op": "freed", "id": ID, "blocks": 4}));
    core.call(&json!({"op": "freed", "id": ID, "blocks": 4}));
    let stats = core.stats();
    assert_eq!(
        (&stats["requests"], &stats["leases"], &stats["leased_blocks"]),
        (&json!(0), &json!(0), &json!(0))
    );
    assert_eq!(stats["late_events"], 1);
    assert_eq!(core.kinds("r"), ["queued", "ended", "lease_opened", "lease_ended", "freed"]);
}

#[test]
fn a_lost_reply_is_released_by_the_routers_id() {
    let core = core();
    for id in ["0_cmpl-x-0-0a1b2c3d", "1_cmpl-x-0-0a1b2c3d"] {
        core.queued(id, "r", "prefill");
        core.offer(id, &json!([[1, 2]]), 1);
    }
    assert_eq!(core.stats()["leased_blocks"], 2, "shared blocks count once");
    let results = core.verb("/abort_requests", &json!({"request_ids": ["r"], "leg": "prefill"}));
    assert_eq!(results["results"]["r"], "released");
    assert_eq!(core.ended().len(), 2);
    let stats = core.stats();
    assert_eq!((&stats["leases"], &stats["leased_blocks"]), (&json!(0), &json!(0)));
}

#[test]
fn an_unread_lease_expires() {
    let core = TestCore::start(&json!({"lease_s": 0.1}));
    core.queued(ID, "r", "prefill");
    core.offer(ID, &json!([[1]]), 1);
    assert_eq!(core.ended()[0]["cause"], "lease_expired");
    let (_, metrics) = core.http("GET", "/metrics", "");
    let expired = "baton_kv_release_total{model_name=\"m\",engine=\"0\",cause=\"lease_expired\"} 1";
    assert!(metrics.contains(expired), "{metrics}");
}

#[test]
fn stock_consumers_renew_and_acknowledge() {
    let core = TestCore::start(&json!({"lease_s": 1.0}));
    core.queued(ID, "r", "prefill");
    core.offer(ID, &json!([[1]]), 1);
    core.call(&json!({"op": "beat", "ids": [ID, "other"]}));
    core.call(&json!({"op": "acked", "id": ID}));
    assert_eq!(core.ended()[0]["reason"], "transfer_done");
    core.call(&json!({"op": "acked", "id": ID}));
    core.call(&json!({"op": "late", "id": "other"}));
    assert_eq!(core.stats()["late_events"], 2);
}

#[test]
fn blocks_that_are_freed_without_an_order_end_their_lease() {
    let core = core();
    core.queued(ID, "r", "prefill");
    let lease = core.offer(ID, &json!([[1]]), 1);
    core.call(&json!({"op": "freed", "id": ID, "blocks": 1}));
    let handle = json!({"handle": lease["handle"]});
    assert_eq!(core.verb("/kv/release", &handle)["result"], "already");
}

#[test]
fn blocks_that_cannot_be_lent_are_refused() {
    let core = core();
    core.queued(ID, "r", "prefill");
    assert_eq!(core.offer(ID, &json!([[]]), 1)["refused"], "blocks");
    assert_eq!(core.offer("unknown", &json!([[1]]), 1)["refused"], "full");
    assert_eq!(core.offer(ID, &json!([[1]]), 0)["refused"], json!(null));
    assert_eq!(core.stats()["leased_blocks"], 1);
}

#[test]
fn a_stop_releases_every_lease() {
    let core = core();
    core.queued(ID, "r", "prefill");
    core.offer(ID, &json!([[1]]), 1);
    let number = core.number;
    let begun = std::time::Instant::now();
    drop(core);
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    until("the core is gone", || crate::abi::baton_vllm_pending(number) == crate::signals::STOPPING);
}
