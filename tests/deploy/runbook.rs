//! `deploy/README.md` and the pages for operators name only alarms, files, options and metrics that exist, and name
//! every alarm.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::metrics::{documented, rules};
use crate::{baton, ours, parsed, read};

const ALARMS: &str = "docs/how-to/alarms.md";
const PAGES: [&str; 8] = [
    "deploy/README.md",
    "docs/how-to/kubernetes.md",
    "docs/how-to/systemd.md",
    "docs/how-to/sizing.md",
    "docs/how-to/upgrade.md",
    "docs/how-to/stuck-blocks.md",
    "docs/how-to/keys-and-tls.md",
    ALARMS,
];

fn page() -> String {
    PAGES.map(|page| read(&ours(page))).join("\n")
}

#[test]
fn every_alarm_has_a_section_and_every_section_an_alarm() {
    let page = page();
    let sections: BTreeSet<_> =
        read(&ours(ALARMS)).lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect();
    let alarms: BTreeSet<_> = rules().into_iter().map(|rule| rule.alert).collect();
    assert_eq!(sections, alarms);
    let words = page.split(|c: char| !c.is_ascii_alphanumeric());
    let named = words.filter(|word| word.starts_with("Baton") && word.len() > 5);
    let unknown: Vec<_> = named.filter(|word| !alarms.contains(*word)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn every_file_and_every_command_that_it_names_is_there() {
    let page = page();
    let words =
        page.split([' ', '`', '(', ')', '\n', ',', ';']).map(|word| word.trim_end_matches(['.', ':']));
    let files: BTreeSet<_> = words
        .filter(|word| ["deploy/", "tests/", "docs/"].iter().any(|folder| word.starts_with(folder)))
        .collect();
    assert!(files.len() >= 6, "{files:?}");
    let missing: Vec<_> = files.iter().filter(|file| !ours(file).exists()).collect();
    assert!(missing.is_empty(), "{missing:?}");

    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let commands: Vec<_> =
        blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("baton ")).collect();
    assert!(commands.len() >= 5, "{commands:?}");
    for command in commands {
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let (known, help) = baton(&[words[0].clone(), "--help".to_owned()]);
        assert!(known, "{command}: {help}");
        let options = words.iter().filter(|word| word.starts_with("--"));
        options.for_each(|option| assert!(help.contains(option.as_str()), "{command}: {help}"));
    }
    let (_, engine) = baton(&["engine".to_owned(), "--help".to_owned()]);
    let ours = ["--kv-", "--max-num", "--shutdown", "--max-model"];
    let options =
        page.split('`').skip(1).step_by(2).filter(|word| ours.iter().any(|known| word.starts_with(known)));
    options.for_each(|option| assert!(engine.contains(option), "{option}"));
}

#[test]
fn every_metric_and_key_that_it_names_exists() {
    let page = page();
    let known = documented();
    let table = read(&ours("docs/reference/metrics.md"));
    let stock = ["vllm:nixl_num_kv_expired_reqs_total"];
    let words = page.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let metrics: BTreeSet<_> =
        words.filter(|word| word.starts_with("baton_") || word.starts_with("vllm:")).collect();
    assert!(metrics.len() >= 5, "{metrics:?}");
    for metric in metrics {
        let there = known.contains_key(metric)
            || table.contains(&format!("\n| `{metric}` | "))
            || stock.contains(&metric);
        assert!(there, "{metric}");
    }
    let keys = read(&ours("docs/reference/configuration.md"));
    let named = [
        "drain_delay_ms",
        "drain_timeout_ms",
        "limits.connections",
        "timeouts.request_ms",
        "disaggregate.min_uncached_tokens",
    ];
    for key in named {
        assert!(page.contains(&format!("`{key}`")) && keys.contains(&format!("{key}`")), "{key}");
    }
}

#[test]
fn the_table_of_kv_bytes_adds_up() {
    // Layers, KV heads, head dimension.
    let shapes = [
        ("Llama-3.1-8B", 32, 8, 128),
        ("Qwen3-8B", 36, 8, 128),
        ("Qwen3-32B", 64, 8, 128),
        ("Llama-3.x-70B", 80, 8, 128),
    ];
    let page = page();
    for (model, layers, heads, dimension) in shapes {
        let row = page.lines().find(|line| line.starts_with(&format!("| {model} |"))).expect("a row");
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let token: u64 = 2 * layers * heads * dimension * 2;
        assert_eq!(cells[2].replace(',', ""), format!("{token} B"));
        let mib = token as f64 * 16.0 / f64::from(1 << 20);
        assert_eq!(cells[3], format!("{mib} MiB"));
        let gigabits = token as f64 * 8192.0 * 8.0 / 1e9;
        let ms = [25.0, 100.0, 400.0].map(|speed| format!("{:.0}", gigabits / speed * 1000.0));
        assert_eq!(cells[5], format!("{} ms", ms.join(" / ")));
    }
}

/// The cells of the row with this beginning.
fn cells(page: &str, first: &str) -> Vec<String> {
    let row = page.lines().find(|line| line.starts_with(&format!("| {first} |")));
    let row = row.unwrap_or_else(|| panic!("no row {first}"));
    row.split('|')
        .skip(3)
        .map(|cell| cell.trim().trim_matches('*').to_owned())
        .filter(|c| !c.is_empty())
        .collect()
}

#[test]
fn the_example_of_sizing_adds_up_from_what_was_measured() {
    let page = page();
    let results: Value =
        serde_json::from_str(&read(&ours("bench/results/gpu/2026-11-22-h200.json"))).expect("JSON");
    let speed = |what: &str| {
        let all = results["speeds"].as_array().expect("speeds");
        let found = all.iter().find(|speed| speed["what"] == what).unwrap_or_else(|| panic!("no {what}"));
        found["value"].as_f64().expect("a number")
    };
    let (token, answer, rate, spare) = (131_072.0, 512.0, 4.0, 0.7);
    // A prefill takes time for each token, and for each pair of tokens.
    let short = 1024.0 / speed("prefill of 1024, 32 layers");
    let long = 8192.0 / speed("prefill of 8192, 32 layers");
    let squared = (long - 8.0 * short) / (8192.0 * 8192.0 - 8.0 * 1024.0 * 1024.0);
    let linear = (short - squared * 1024.0 * 1024.0) / 1024.0;
    let expected = format!("{:.2} µs × n + {:.3} ns × n²", linear * 1e6, squared * 1e9);
    assert!(page.contains(&expected), "{expected}");
    let few = 64.0 / speed("decode, 32 layers, batch 64");
    let keys = speed("decode attention, 8 × 32768 keys, one layer");
    let expected = format!("{:.2} ms + sequences × (prompt + answer / 2 − 512)", few * 1e3);
    assert!(page.contains(&expected), "{expected}");
    assert!(page.contains(&format!("/ {},{:03.0} GB/s", (keys / 1000.0).floor(), keys % 1000.0)), "{keys}");

    for (column, (prompt, at_once)) in [(8192.0, 64.0), (32_768.0, 24.0)].into_iter().enumerate() {
        let cell = |first: &str| cells(&page, first)[column].replace(',', "");
        let tokens: f64 = prompt + answer;
        assert_eq!(cell("tokens of a sequence at its end"), format!("{tokens}"));
        let fit = [110.0, 55.0].map(|gib: f64| (gib * f64::from(1 << 30) / (tokens * token)).floor());
        assert_eq!(cell("sequences that fit, H200 / H100"), format!("{} / {}", fit[0], fit[1]));
        assert!(at_once < fit[0]);
        assert_eq!(cell("sequences of one D, `max_in_flight`"), format!("{at_once}"));
        let prefill = linear * prompt + squared * prompt * prompt;
        assert_eq!(cell("one prefill"), format!("{prefill:.3} s"));
        assert_eq!(cell("P at work"), format!("{:.2}", rate * prefill));
        assert_eq!(cell("**P**"), format!("{}", (rate * prefill / spare).ceil() + 1.0));
        let step = few + at_once * (prompt + answer / 2.0 - 512.0) * token / (keys * 1e9);
        assert_eq!(cell("a step of it"), format!("{:.1} ms", step * 1e3));
        let each = at_once / step;
        assert_eq!(cell("tokens/s of one D"), format!("{each:.0}"));
        let work = rate * answer / each;
        assert_eq!(cell("D at work"), format!("{work:.2}"));
        assert_eq!(cell("**D**"), format!("{}", (work / spare).ceil() + 1.0));
        let streams = rate * answer * step;
        assert!(streams < ((work / spare).ceil()) * at_once);
        assert_eq!(cell("streams at once"), format!("{streams:.0}"));
        assert_eq!(
            cell("each P sends, at most"),
            format!("{:.0} Gb/s", prompt * token * 8.0 / prefill / 1e9)
        );
    }
}

#[test]
fn the_engine_settings_match_the_sizing() {
    let mut seen = 0;
    for file in crate::files_below(&ours("deploy")) {
        let text = read(&file);
        let pool =
            text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains("--kv-cache-mib"));
        if pool && file.extension().is_some_and(|kind| kind == "yaml" || kind == "env") {
            let expected = text.replace("--kv-cache-dtype ", "--kv-cache-dtype=");
            assert!(expected.contains("--kv-cache-dtype=bf16"), "{}", file.display());
            seen += 1;
        }
    }
    assert_eq!(seen, 4, "P and D, for systemd and in the overlay `baton`");
}

#[test]
fn objects_missing_from_overlays_are_documented() {
    let page = page();
    for (kind, name, keys) in crate::references::BROUGHT_BY_OTHERS {
        assert!(page.contains(&format!("`{name}`")), "{kind} {name}");
        keys.iter().for_each(|key| assert!(page.contains(&format!("`{key}")), "{key}"));
    }
    // The chapter on upgrades uses the manifest's values.
    let prefill =
        parsed(&read(&ours("deploy/kubernetes/overlays/vllm/prefill.yaml")), "prefill.yaml".as_ref());
    let sleep =
        &prefill["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"];
    assert!(page.contains(&format!("preStop of {sleep} s")), "{sleep}");
}
