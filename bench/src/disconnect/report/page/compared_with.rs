//! The table of other gateways.

use std::fmt::Write as _;

use super::super::super::analyse::summary::Summary;
use super::super::super::analyse::units::format_ms;
use super::super::svg::escaped;
use super::super::{NOT_COMPARED, count};
use crate::systems::compare::gap_value;

/// Maximum gateways in the table.
const COMPARED_MAX: usize = 20;

/// The gateways that `baton bench compare` measured.
pub(super) fn draw(summary: &Summary, out: &mut String) {
    let Some(compared) = &summary.compared_with else {
        let _ = write!(out, "<h2>Other gateways</h2><p class=\"note\">{}</p>", escaped(NOT_COMPARED));
        return;
    };
    let word = |name: &str| escaped(compared[name].as_str().unwrap_or_default());
    let or = |word: String, other: &str| if word.is_empty() { other.to_owned() } else { word };
    let _ = write!(
        out,
        "<h2>Comparison with other gateways</h2><p class=\"note\">Each gateway is in front of the same simulated engines ({} dialect). Date and machine: {}, {}. Command: <code>{}</code>, commit {}. Cancels are in the gap between prefill and decode; a lease lasts {} s. Values are the median of {} rounds, with minimum and maximum; × is the ratio to the first gateway in the same round.</p><div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>gateway</th><th>cancelled in the gap</th><th>stranded</th><th>block-s / 1,000</th><th>time to free p50</th><th>p99</th><th>TTFT p50</th><th>p99</th><th>CPU s / 1,000</th><th>failed</th></tr></thead><tbody>",
        word("dialect"),
        word("date"),
        word("machine"),
        or(word("command"), "baton bench compare"),
        or(word("commit"), "unknown"),
        compared["lease_ms"].as_f64().unwrap_or(0.0) / 1e3,
        count(compared["rounds"].as_u64().unwrap_or(0)),
    );
    for target in compared["targets"].as_array().into_iter().flatten().take(COMPARED_MAX) {
        let (gap, over, number) = (&target["gap"], &target["over_first"], serde_json::Value::as_f64);
        let tenths = |value: f64| format!("{value:.1}");
        let text =
            |value: Option<f64>, text: &dyn Fn(f64) -> String| value.map_or_else(|| "–".to_owned(), text);
        let whole = |value: f64| count(value as u64);
        let of_gap = |key: &str| gap_value(gap, key);
        let stranded = number(&gap["stranded"]);
        let class = if stranded.is_some_and(|stranded| stranded > 0.0) { " class=\"bad\"" } else { "" };
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td{class}>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(target["name"].as_str().unwrap_or_default()),
            text(number(of_gap("cancels")), &whole),
            text(stranded, &whole),
            text(number(&gap["stranded_block_seconds_per_1000"]), &tenths)
                + &range(&gap["rounds_block_seconds_per_1000"], &tenths),
            text(number(of_gap("time_to_free_p50_ms")), &format_ms)
                + &range(of_gap("rounds_time_to_free_p50_ms"), &format_ms),
            text(number(of_gap("time_to_free_p99_ms")), &format_ms),
            spread(&target["ttft_p50_ms"], &over["ttft_p50"], &format_ms),
            spread(&target["ttft_p99_ms"], &over["ttft_p99"], &format_ms),
            spread(&target["cpu_s_per_1000"], &over["cpu"], &|value| format!("{value:.2}")),
            text(number(&target["failed"]), &whole),
        );
    }
    out.push_str("</tbody></table></div>");
}

/// Minimum and maximum of a spread; empty without a spread.
fn range(spread: &serde_json::Value, text: &dyn Fn(f64) -> String) -> String {
    match (spread["min"].as_f64(), spread["max"].as_f64()) {
        (Some(min), Some(max)) => format!("<br><small>{} … {}</small>", text(min), text(max)),
        _ => String::new(),
    }
}

/// Median, range, and ratio to the first gateway with its range.
fn spread(of: &serde_json::Value, over: &serde_json::Value, text: &dyn Fn(f64) -> String) -> String {
    let Some(median) = of["median"].as_f64() else { return "–".to_owned() };
    let times = |value: f64| format!("× {value:.2}");
    let ratio = over["median"].as_f64().map(|ratio| format!("<br>{}{}", times(ratio), range(over, &times)));
    format!("{}{}{}", text(median), range(of, text), ratio.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    /// The committed reports have the keys of three versions.
    #[test]
    fn reports_of_earlier_versions_are_read() {
        let results = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("results/compare");
        for file in ["2026-11-23-vllm-zen5.json", "2026-11-23-baton-zen5.json", "2026-11-22-baton-xeon.json"]
        {
            let text = std::fs::read(results.join(file)).expect("a report");
            let report: Value = serde_json::from_slice(&text).expect("JSON");
            let gap = &report["targets"][0]["gap"];
            for key in ["cancels", "time_to_free_p50_ms", "time_to_free_p99_ms"] {
                assert!(super::gap_value(gap, key).is_number(), "{file}: {key}");
            }
        }
        let now = json!({"cancels": 3});
        assert_eq!(
            (super::gap_value(&now, "cancels"), super::gap_value(&now, "x")),
            (&3.into(), &Value::Null)
        );
    }

    #[test]
    fn a_number_of_another_gateway_has_a_spread_and_a_ratio() {
        let of = json!({"median": 3.0, "min": 2.0, "max": 4.5});
        let over = json!({"median": 1.5, "min": 1.25, "max": 2.0});
        let text = |value: f64| format!("{value} ms");
        let cell = super::spread(&of, &over, &text);
        assert_eq!(cell, "3 ms<br><small>2 ms … 4.5 ms</small><br>× 1.50<br><small>× 1.25 … × 2.00</small>");
        assert_eq!(super::spread(&of, &json!(null), &text), "3 ms<br><small>2 ms … 4.5 ms</small>");
        assert_eq!(super::spread(&json!(null), &json!(null), &text), "–");
    }
}
