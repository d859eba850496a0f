//! Clients whose host vanishes: `baton bench disconnect` on a router that detects them, and on one that does not.

use serde_json::Value;

use crate::judge::{is_judged, judged_at, simulated_at};

/// In front of engines that take 20 ms per token, so that a response can outlast the detection. `None`, with a message,
/// where this machine cannot make clients vanish.
fn judged(client_lost_ms: u64) -> Option<Value> {
    let lost = format!("timeouts: {{client_lost_ms: {client_lost_ms}}}\n");
    let simulated = simulated_at("0.0.0.0", None, &["--decode-ms", "20"], &lost);
    let options = ["--phases", "stream", "--cancel-by", "fin,vanish", "--vanish-noticed-ms", "1000"];
    let summary = judged_at(&simulated, &options);
    if summary["not_played"].is_array() {
        eprintln!("SKIPPED: no client can vanish on this machine: {}", summary["not_played"]);
        return None;
    }
    Some(summary)
}

#[test]
fn a_router_that_detects_vanished_clients_is_distinct_from_one_that_does_not() {
    let Some(healthy) = judged(1_000) else { return };
    is_judged("it notices", &healthy, &[], &[]);
    let vanished = &healthy["vanished"];
    let number = |of: &Value, name: &str| of[name].as_u64().expect("a number");
    // Not before the configured second: the disconnect sends nothing.
    assert!(number(&vanished["noticed_ms"], "n") > 0, "{vanished:#}");
    assert!(vanished["noticed_ms"]["min"].as_f64() >= Some(900.0), "{vanished:#}");
    assert_eq!(number(vanished, "stranded"), 0, "{vanished:#}");
    let row = healthy["kinds"].as_array().expect("kinds").iter().find(|row| row["kind"] == "vanish");
    assert_eq!(row.expect("a row")["cancelled"], vanished["cancelled"]);
    let left = healthy["cancelled"].as_u64().expect("a number");
    assert_eq!(
        healthy["all"]["cancelled"].as_u64(),
        Some(left),
        "they are not among those that can be known at once"
    );
    let unnoticed = judged(0).expect("as before");
    is_judged("it never notices", &unnoticed, &["vanished_stranded"], &[]);
    assert_eq!(number(&unnoticed["vanished"]["noticed_ms"], "n"), 0, "{:#}", unnoticed["vanished"]);
}
