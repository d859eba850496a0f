//! The configuration file: problems are reported by line and column, and the example is valid.

use baton_router::{RouterConfig, listen_address};

const GOOD: &str = "\
listen: 127.0.0.1:0
models:
  - name: m
    prefill: {engines: [{url: 'http://127.0.0.1:1'}]}
    decode:
      policy: round_robin
      engines:
        - url: http://127.0.0.1:2
";

fn problem(yaml: &str) -> String {
    RouterConfig::from_yaml(yaml, "router.yaml").expect_err(yaml).to_string()
}

#[test]
fn a_good_file_loads_with_its_defaults() {
    let config = RouterConfig::from_yaml(GOOD, "router.yaml").unwrap();
    assert_eq!(config.limits.body_bytes, 32 << 20);
    assert!(config.admin.listen.ip().is_loopback());
    let engine = &config.models[0].decode.engines[0];
    assert_eq!((engine.url.port(), engine.weight, engine.labels.len()), (2, 1, 0));
}

#[test]
fn a_problem_is_reported_by_line_and_column() {
    for (from, to, expected) in [
        ("policy: round_robin", "polizy: round_robin", "6:7: unknown key `polizy`, did you mean `policy`?"),
        (
            "http://127.0.0.1:2",
            "ftp://127.0.0.1:2",
            "8:16: `models[0].decode.engines[0].url`: `ftp://127.0.0.1:2` must start with http://",
        ),
        ("listen: 127.0.0.1:0", "listen: nowhere", "1:9: `listen`: `nowhere` is no address: write IP:PORT"),
        ("listen: 127.0.0.1:0", "listen: [a]", "1:9: `listen`: needs a text, not a list"),
        ("name: m", "name: ''", "3:11: `models[0].name`: shorter than 1 bytes"),
        ("listen: 127.0.0.1:0", "limits: {body_bytes: 3}", "1:22: `limits.body_bytes`: 3 is below 1024"),
        ("listen: 127.0.0.1:0", "attempts: {decode: 99}", "1:20: `attempts.decode`: 99 is above 16"),
        (
            "listen: 127.0.0.1:0",
            "attempts: {decode: many}",
            "1:20: `attempts.decode`: needs a whole number, not `many`",
        ),
        ("listen: 127.0.0.1:0", "cluster_secret: short", "1:17: `cluster_secret`: length is lower than 16"),
        (
            "name: m",
            "name: m\n    aliases: [m]",
            "4:15: `models[0].aliases[0]`: the name `m` is given twice, first as models[0].name",
        ),
        (
            "        - url: http://127.0.0.1:2\n",
            "        []\n",
            "5:5: `models[0].decode`: needs at least one engine",
        ),
        (
            "        - url: http://127.0.0.1:2\n",
            "        - weight: 2\n",
            "8:11: `models[0].decode.engines[0]`: needs the key `url`",
        ),
        (
            "        - url: http://127.0.0.1:2\n",
            "        - url: http://a:2\n        - url: http://a:2\n",
            "9:16: `models[0].decode.engines[1].url`: the engine is in this pool twice",
        ),
        (
            "    prefill: {engines: [{url: 'http://127.0.0.1:1'}]}\n",
            "    prefill: {engines: [{url: 'http://p:1', release: lease}]}\n    \
             decode: {engines: [{url: 'http://p:1'}]}\n  - name: n\n    \
             prefill: {engines: [{url: 'http://p:1'}]}\n",
            "7:25: `models[1].prefill.engines[0].release`: the same engine has another `release` at models[0].prefill",
        ),
        (
            "    prefill: {engines: [{url: 'http://127.0.0.1:1'}]}\n",
            "    protocol: vllm\n    decode: {engines: [{url: 'http://p:1'}]}\n  - name: n\n    \
             protocol: sglang\n    prefill: {engines: [{url: 'http://p:1'}]}\n",
            "7:15: `models[1].protocol`: p:1 has another `protocol` at models[0].protocol",
        ),
        (
            "name: m",
            "name: m\n    protocol: sglang\n    resume: true",
            "5:13: `models[0].resume`: SGLang's decode engines cannot continue a stream",
        ),
        (
            "name: m",
            "name: m\n    protocol: sglang\n    disaggregate: {always: true}",
            "5:5: `models[0].disaggregate`: with `protocol: sglang` every request has both legs",
        ),
        ("name: m", "name: m\n    name: n", "4:5: the key `name` is given twice, first in line 3"),
        (
            "name: m",
            "name: m\n    body_bytes: 2048",
            "4:5: unknown key `body_bytes`, did you mean `limits.body_bytes`?",
        ),
        ("name: m", "name: m\n    zzz: 1", "4:5: unknown key `zzz`; known here: name, aliases"),
        ("name: m", "name: m\n    fallback: agregate", "4:15: `models[0].fallback`: `agregate` is none of"),
        ("name: m", "name: [m", "not YAML"),
        (
            "listen: 127.0.0.1:0",
            "listen: 127.0.0.1:99\nadmin: {listen: '127.0.0.1:99'}",
            "2:17: `admin.listen`: is the same address as `listen`",
        ),
    ] {
        let yaml = GOOD.replace(from, to);
        assert_ne!(yaml, GOOD);
        let message = problem(&yaml);
        let place = format!("router.yaml:{expected}");
        assert!(
            message.starts_with(&place) || (expected == "not YAML" && message.contains(expected)),
            "{to}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "reported once: {message}");
    }
    assert_eq!(problem(""), "router.yaml:1:1: the file is empty");
}

#[test]
fn all_problems_of_a_file_are_reported_in_file_order() {
    let message = problem(
        "listen: 127.0.0.1:0\n\
         limmits: {in_flight: 1}\n\
         timeouts: {body_ms: 0, connect_ms: soon}\n\
         models:\n  \
           - name: m\n    \
             decode: {engines: [{url: 'http://a:1', weight: 0}, {uri: 'http://b:1'}]}\n    \
             decode: {}\n",
    );
    let places: Vec<_> =
        message.lines().map(|line| line.split_whitespace().next().unwrap_or_default()).collect();
    let wanted =
        ["2:1:", "3:21:", "3:36:", "6:52:", "6:56:", "6:57:", "7:5:"].map(|p| format!("router.yaml:{p}"));
    assert_eq!(places, wanted, "{message}");
}

#[test]
fn values_that_garde_rejects_are_reported_with_their_position() {
    let labels: Vec<_> = (0..33).map(|n| format!("l{n}: x")).collect();
    let engine = format!("url: http://127.0.0.1:2\n          labels: {{{}}}", labels.join(", "));
    let message = problem(&GOOD.replace("url: http://127.0.0.1:2", &engine));
    assert!(message.starts_with("router.yaml:9:"), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn a_hostile_file_is_refused_early() {
    let mut bomb = String::from("x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n");
    for n in 1..30 {
        bomb += &format!("x{n}: &x{n} [{}]\n", vec![format!("*x{}", n - 1); 10].join(", "));
    }
    let deep = format!("models: {}{}", "[".repeat(100_000), "]".repeat(100_000));
    let huge = format!("{GOOD}#{}\n", "x".repeat(2 << 20));
    let long = format!("{}: 1\n", "k".repeat(1000));
    for (yaml, word) in [(bomb, "aliases"), (deep, "limit"), (huge, "bytes"), (long.clone() + GOOD, "kkk...")]
    {
        let begun = std::time::Instant::now();
        let message = problem(&yaml);
        assert!(message.contains(word) && message.lines().count() == 1, "{message}");
        assert!(begun.elapsed().as_secs() < 5);
    }
    // Repeated problems are limited to 100.
    let unknown: String = (0..40_000).map(|n| format!("timeoutz_{n}: 1\n")).collect();
    let begun = std::time::Instant::now();
    let message = problem(&unknown);
    assert_eq!(message.lines().count(), 100);
    assert!(begun.elapsed().as_secs() < 5);
    assert!(!problem("\"\\e[31m\": 1\n").contains('\u{1b}'), "a terminal is not written to by a file");
}

#[test]
fn anchors_and_merges_reuse_settings() {
    let engines: Vec<_> = (1..=200).map(|n| format!("{{<<: *e, url: 'http://e{n}:1'}}")).collect();
    let yaml = format!(
        "models:\n  - name: m\n    prefill: {{engines: [&e {{weight: 7, labels: {{zone: a}}, url: 'http://p:1'}}]}}\n    \
         decode: {{engines: [{}]}}\n",
        engines.join(", ")
    );
    let config = RouterConfig::from_yaml(&yaml, "router.yaml").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.models[0].decode.engines.len(), 200);
    let last = &config.models[0].decode.engines[199];
    assert_eq!((last.weight, last.labels["zone"].as_str(), last.url.host()), (7, "a", "e200"));
}

#[test]
fn every_file_that_a_configuration_names_is_known() {
    let yaml = GOOD
        .replace("- url: http://127.0.0.1:2", "- {url: 'http://127.0.0.1:2', labels: {a_file: no}}")
        + "cluster_secret_file: /s\nlisten_tls: {certificate: /c, key: /k, client_ca: /a, client_auth: require}\n\
           auth: {keys_file: /y, keys: []}\n";
    let config =
        RouterConfig::from_yaml(&yaml, "router.yaml").unwrap_or_else(|problems| panic!("{problems}"));
    let files: Vec<_> = config.files().into_iter().map(|file| file.display().to_string()).collect();
    assert_eq!(files, ["/a", "/c", "/k", "/s", "/y"]);
    // The modules that use the other files watch them.
    assert_eq!(config.watched_files().into_iter().collect::<Vec<_>>(), [std::path::Path::new("/s")]);
}

#[test]
fn secrets_are_never_shown() {
    let yaml = format!("{GOOD}cluster_secret: 0123456789abcdef\n");
    let config = RouterConfig::from_yaml(&yaml, "router.yaml").unwrap();
    assert_eq!(config.secret().unwrap().as_deref(), Some("0123456789abcdef"));
    let shown = format!("{config:?}{}", config.effective());
    assert!(!shown.contains("0123456789abcdef") && shown.contains("cluster_secret: \"***\""), "{shown}");
}

#[test]
fn the_effective_configuration_is_a_configuration_with_the_same_meaning() {
    let config = RouterConfig::from_yaml(GOOD, "router.yaml").unwrap();
    let again = RouterConfig::from_yaml(&config.effective(), "effective").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(format!("{again:?}"), format!("{config:?}"));
}

#[test]
fn the_commented_example_loads_and_names_every_default() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/router/router.yaml");
    let example = RouterConfig::load(std::path::Path::new(path)).unwrap();
    let bare = RouterConfig::from_yaml(GOOD, "good.yaml").unwrap();
    let parts = |c: &RouterConfig| {
        format!("{:?} {:?} {:?} {:?} {:?}", c.limits, c.timeouts, c.attempts, c.access_log, c.telemetry)
    };
    assert_eq!(parts(&example), parts(&bare), "the example shows the defaults");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let message = RouterConfig::load(std::path::Path::new("no/such.yaml")).unwrap_err().to_string();
    assert!(message.starts_with("no/such.yaml: "), "{message}");
}

#[test]
fn the_schema_describes_every_field() {
    let schema = RouterConfig::schema().to_string();
    for field in ["cluster_secret_file", "prefill_silence_ms", "round_robin", "aggregate", "drain_timeout_ms"]
    {
        assert!(schema.contains(field), "{field}");
    }
}

#[test]
fn invalid_telemetry_and_access_log_settings_are_refused() {
    for (bad, word) in [
        ("access_log: {sample: 1.5}", "1"),
        ("access_log: {queue: 0}", "1"),
        ("telemetry: {otlp: {endpoint: 'https://127.0.0.1:4318'}}", "http://HOST:PORT"),
        ("telemetry: {otlp: {endpoint: '/v1/traces'}}", "http://HOST:PORT"),
        ("telemetry: {otlp: {endpoint: 'http://h:1', sample_ratio: -0.1}}", "0"),
        ("telemetry: {otlp: {endpoint: 'http://h:1', service_name: ''}}", "1"),
        ("telemetry: {otlp: {endpoint: 'http://h:1', timeout_ms: 0}}", "1"),
        ("telemetry: {otlp: {endpoint: 'http://h:1', queue: 0}}", "1"),
        ("telemetry: {otlp: {endpoint: 'http://h:1', headers: {}}}", "headers"),
    ] {
        let message = problem(&GOOD.replace("listen: 127.0.0.1:0", bad));
        assert!(message.starts_with("router.yaml:1:") && message.contains(word), "{bad}: {message}");
    }
}

#[test]
fn a_policy_is_a_name_or_a_map_of_one_name_to_its_parameters() {
    let with = |policy: &str| {
        RouterConfig::from_yaml(
            &GOOD.replace("policy: round_robin", &format!("policy: {policy}")),
            "router.yaml",
        )
    };
    for name in ["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix_aware"] {
        let bare = with(name).unwrap().models.remove(0).decode.policy;
        assert_eq!(bare.name(), name);
        let mapped = with(&format!("{{{name}: {{}}}}")).unwrap().models.remove(0).decode.policy;
        assert_eq!(mapped, bare, "no parameters are the defaults");
        // The effective value is printed in a format that can be read again.
        let printed = serde_json::to_string(&bare).unwrap();
        assert_eq!(with(&printed).unwrap().models.remove(0).decode.policy, bare, "{printed}");
    }
    let set = with("{prefix_aware: {balance_abs: 64, balance_rel: 1.25}}").unwrap();
    assert!(format!("{:?}", set.models[0].decode.policy).contains("balance_abs: 64"));
    for (bad, word) in [
        ("best", "best"),
        ("{best: {}}", "best"),
        ("{prefix_aware: {balanz_abs: 1}}", "balanz_abs"),
        ("{prefix_aware: {balance_rel: 0.5}}", "1"),
        ("{consistent_hash: {keys: []}}", "keys"),
        ("{consistent_hash: {load_factor: 0.9}}", "1"),
        ("{random: {}, least_load: {}}", "second"),
        ("{}", "policy"),
        ("[random]", "policy"),
    ] {
        let message = with(bad).expect_err(bad).to_string();
        assert!(message.starts_with("router.yaml:") && message.contains(word), "{bad}: {message}");
    }
}

#[test]
fn engines_that_publish_to_one_port_of_the_router_are_refused() {
    let pool = |of_pool: &str, first: &str, second: &str| {
        format!(
            "listen: 127.0.0.1:0\nmodels:\n  - name: m\n    decode:\n      {of_pool}\n      engines:\n        \
             - {{url: 'http://a:1'{first}}}\n        - {{url: 'http://b:1'{second}}}\n"
        )
    };
    for shared in [
        pool("kv_events: {bind: 127.0.0.1, port: 5557}", "", ""),
        pool(
            "policy: random",
            ", kv_events: {bind: 0.0.0.0, port: 7}",
            ", kv_events: {bind: 127.0.0.1, port: 7}",
        ),
    ] {
        let message = problem(&shared);
        assert!(
            message.contains("`models[0].decode.engines[1].url`: publishes its `kv_events` to port"),
            "{message}"
        );
    }
    for apart in [
        pool("kv_events: {port: 5557}", "", ""),
        pool(
            "policy: random",
            ", kv_events: {bind: 127.0.0.1, port: 7}",
            ", kv_events: {bind: 127.0.0.1, port: 8}",
        ),
        pool(
            "policy: random",
            ", kv_events: {bind: 127.0.0.1, port: 7}",
            ", kv_events: {bind: 127.0.0.2, port: 7}",
        ),
    ] {
        RouterConfig::from_yaml(&apart, "router.yaml")
            .unwrap_or_else(|problems| panic!("{problems}\n{apart}"));
    }
    // One engine in two pools is one publisher.
    let both = "listen: 127.0.0.1:0\nmodels:\n  - name: m\n    prefill: &pool {kv_events: {bind: 127.0.0.1, port: 7}, \
                engines: [{url: 'http://a:1'}]}\n    decode: *pool\n";
    RouterConfig::from_yaml(both, "router.yaml").unwrap_or_else(|problems| panic!("{problems}"));
    let found = "listen: 127.0.0.1:0\nmodels:\n  - name: m\n    decode: {kv_events: {bind: 127.0.0.1, port: 7}, discover: \
                 {dns: {host: d, port: 1}}}\n";
    assert!(problem(found).contains("an address for one engine"), "{}", problem(found));
}

#[test]
fn keys_without_effect_are_reported() {
    let doubts = |model: &str, pool: &str, top: &str| {
        let yaml = GOOD
            .replace("  - name: m\n", &format!("  - name: m\n{model}"))
            .replace("      policy: round_robin\n", &format!("      policy: round_robin\n{pool}"));
        let config = RouterConfig::from_yaml(&(yaml + top), "router.yaml").unwrap_or_else(|e| panic!("{e}"));
        config.warnings()
    };
    assert_eq!(doubts("", "", ""), Vec::<String>::new());
    for (model, pool, top, expected) in [
        ("    resume: true\n    fallback: none\n", "", "", "models[0].resume"),
        ("", "      capacity: {max_waiting: 4}\n", "", "models[0].decode.capacity"),
        ("", "      capacity: {max_kv_usage: 0.5}\n", "", "models[0].decode.capacity"),
        ("", "", "health: {load: {interval_ms: 9000}}\n", "health.load"),
        ("", "", "engine_tls: {ca: /ca.pem}\n", "engine_tls"),
        ("", "", "auth: {tenants: [{name: t}]}\n", "auth"),
    ] {
        let found = doubts(model, pool, top);
        assert!(found.len() == 1 && found[0].starts_with(expected), "{expected}: {found:?}");
    }
    let load = "health: {load: {interval_ms: 1000}}\n";
    assert_eq!(
        doubts("    resume: true\n", "      capacity: {max_waiting: 4}\n", load),
        Vec::<String>::new()
    );
    let secure = "      discover: {dns: {host: d, port: 1, scheme: https}}\n";
    assert_eq!(doubts("", secure, "engine_tls: {ca: /ca.pem}\n"), Vec::<String>::new());
    let without = GOOD.replace("      policy: round_robin\n", secure);
    let message = problem(&without);
    assert!(
        message.contains("`models[0].decode.discover.dns.scheme`: `https` needs `engine_tls.ca`"),
        "{message}"
    );
}

#[test]
fn the_bounds_of_an_optional_key_are_in_the_schema() {
    let schema = RouterConfig::schema();
    for (part, key, low, high) in [
        ("CapacityConfig", "max_in_flight", 1, 1_000_000),
        ("CapacityConfig", "max_waiting", 1, 1_000_000),
        ("EngineConfig", "max_in_flight", 1, 1_000_000),
        ("ModelTimeouts", "prefill_silence_ms", 1, 3_600_000),
        ("RateLimitsConfig", "requests_per_minute", 1, 1_000_000_000),
    ] {
        let bounds = &schema["$defs"][part]["properties"][key];
        assert_eq!(
            (bounds["minimum"].as_u64(), bounds["maximum"].as_u64()),
            (Some(low), Some(high)),
            "{part}.{key}"
        );
    }
    let message =
        problem(&GOOD.replace("http://127.0.0.1:2", "http://127.0.0.1:2\n          max_in_flight: 0"));
    assert!(message.contains("`models[0].decode.engines[0].max_in_flight`: 0 is below 1"), "{message}");
}

#[test]
fn trusted_proxies_are_networks() {
    let message = problem(&GOOD.replace("listen: 127.0.0.1:0", "trusted_proxies: [10.0.0.0/33]"));
    assert!(message.contains("`10.0.0.0/33` is no network"), "{message}");
}

#[test]
fn an_address_to_listen_at_is_an_ip_address_or_localhost_with_a_port() {
    for (text, address) in [
        ("127.0.0.1:8080", "127.0.0.1:8080"),
        ("localhost:8080", "127.0.0.1:8080"),
        ("localhost:0", "127.0.0.1:0"),
        ("[::]:9", "[::]:9"),
    ] {
        assert_eq!(listen_address(text).map(|address| address.to_string()), Ok(address.to_owned()));
    }
}

#[test]
fn an_invalid_value_is_refused_with_the_expected_form() {
    for (text, part) in [
        ("8080", "`127.0.0.1:8080` (this machine only) or `0.0.0.0:8080`"),
        (":8080", "`127.0.0.1:8080` (this machine only) or `0.0.0.0:8080`"),
        ("*:8080", "`0.0.0.0:8080`"),
        ("0.0.0.0", "has no port: write `0.0.0.0:8080`"),
        ("::1", "has no port: write `[::1]:8080`"),
        ("[::1]", "has no port: write `[::1]:8080`"),
        ("localhost", "has no port: write `localhost:8080`"),
        ("localhost:", "has no port from 0 to 65535"),
        ("127.0.0.1:http", "has no port from 0 to 65535"),
        ("127.0.0.1:65536", "has no port from 0 to 65535"),
        ("80800", "has no port from 0 to 65535"),
        ("http://127.0.0.1:8080/", "is a URL: write `127.0.0.1:8080`"),
        ("http://localhost:8080", "is a URL: write `localhost:8080`"),
        ("http://gateway:8080/v1", "is no address: write IP:PORT"),
        (
            "gateway:8080",
            "names a host: write an IP address of this machine and a port, for example `0.0.0.0:8080`",
        ),
        ("1.2.3:80", "for example `0.0.0.0:80`"),
        ("::1:80:", "is no address"),
        ("", "is no address"),
        ("nowhere", "is no address"),
        ("\u{1b}[31m:1", "is no address"),
    ] {
        let message = listen_address(text).expect_err(text).to_string();
        assert!(message.contains(part) && !message.contains('\u{1b}'), "{text}: {message}");
    }
    assert!(listen_address(&"9".repeat(100_000)).expect_err("it is none").to_string().len() < 200);
}

#[test]
fn an_address_has_the_same_forms_under_every_key() {
    for key in ["listen: ADDRESS", "admin: {listen: 'ADDRESS'}"] {
        let with = |address: &str| GOOD.replace("listen: 127.0.0.1:0", &key.replace("ADDRESS", address));
        let config = RouterConfig::from_yaml(&with("localhost:18080"), "router.yaml").unwrap();
        let effective = config.effective();
        assert!(effective.contains("127.0.0.1:18080"), "{effective}");
        let name = if key.starts_with("admin") { "`admin.listen`: " } else { "`listen`: " };
        for (address, expected) in [
            (
                "8080",
                "`8080` has no IP address: write `127.0.0.1:8080` (this machine only) or `0.0.0.0:8080`",
            ),
            ("0.0.0.0", "`0.0.0.0` has no port: write `0.0.0.0:8080`"),
            (":8080", "`:8080` has no IP address"),
        ] {
            let message = problem(&with(address));
            assert!(
                message.starts_with("router.yaml:1:") && message.contains(&format!("{name}{expected}")),
                "{message}"
            );
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    // All invalid addresses of a file are reported together with its other problems.
    let message = problem(
        "listen: 8080\nadmin: {listen: 8081}\ntrusted_proxies: [10.0.0.0/33]\nmodels:\n  - name: m\n    \
         decode: {engines: [{url: '127.0.0.1:1', kv_events: {port: 1, bind: '127.0.0.1:5557'}}], polcy: random}\n",
    );
    for expected in [
        "1:9: `listen`: ",
        "2:17: `admin.listen`: ",
        "3:19: `trusted_proxies[0]`: `10.0.0.0/33` is no network",
        "6:30: `models[0].decode.engines[0].url`: `127.0.0.1:1` must start with http:// or https://",
        "`models[0].decode.engines[0].kv_events.bind`: `127.0.0.1:5557` is no IP address: write one without a port",
        "unknown key `polcy`, did you mean `policy`?",
    ] {
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn a_value_of_another_form_is_reported_with_the_expected_form() {
    let model = |decode: &str| format!("models:\n  - name: m\n    decode: {decode}\n");
    for (decode, expected) in [
        (
            "{engines: ['http://a:1']}",
            "engines[0]`: needs a map, not `http://a:1`: write `{url: http://a:1}`",
        ),
        ("{engines: ['a:1']}", "engines[0]`: needs a map, not `a:1`: write `{url: http://a:1}`"),
        ("{engines: 'http://a:1'}", "engines`: needs a list, not `http://a:1`: write `[{url: http://a:1}]`"),
        ("{engines: {url: 'http://a:1'}}", "engines`: needs a list, not a map: write `[{...}]`"),
        ("[{url: 'http://a:1'}]", "`models[0].decode`: needs a map, not a list: write `{engines: [...]}`"),
        ("'http://a:1'", "needs a map, not `http://a:1`: write `{engines: [{url: http://a:1}]}`"),
        (
            "{engines: [{url: 'http://a:1', kv_events: 5557}]}",
            "needs a map, not `5557`: write `{port: 5557}`",
        ),
        ("{engines: ['']}", "engines[0]`: needs a map, not ``"),
    ] {
        let message = problem(&model(decode));
        assert!(message.contains(expected), "{decode}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let message = problem("models: {name: m, decode: {engines: [{url: 'http://a:1'}]}}\n");
    assert!(message.ends_with("`models`: needs a list, not a map: write `[{...}]`"), "{message}");
}

#[test]
fn an_unknown_key_is_reported_with_the_closest_key() {
    let engine = "{url: 'http://a:1'}";
    for (top, model, decode, expected) in [
        ("tls: {certificate: /c, key: /k}", "", "", "`tls`, did you mean `listen_tls`?"),
        ("tls: {ca: /ca}", "", "", "`tls`, did you mean `engine_tls`?"),
        ("tls:", "", "", "`tls`, did you mean `listen_tls` or `engine_tls`?"),
        ("ssl: {certificate: /c, key: /k}", "", "", "`ssl`, did you mean `listen_tls`?"),
        ("port: 8080", "", "", "`port`, did you mean `listen`?"),
        ("listen_address: '127.0.0.1:1'", "", "", "`listen_address`, did you mean `listen`?"),
        ("Listen-TLS: {certificate: /c, key: /k}", "", "", "`Listen-TLS`, did you mean `listen_tls`?"),
        ("request_timeout: {body_ms: 1}", "", "", "`request_timeout`, did you mean `timeouts`?"),
        ("", "engines: []", "", "did you mean `models[].prefill.engines` or `models[].decode.engines`?"),
        ("", "policy: random", "", "did you mean `models[].prefill.policy` or `models[].decode.policy`?"),
        ("", "", "strategy: random", "`strategy`, did you mean `policy`?"),
        ("", "", "workers: [{url: 'http://b:1'}]", "`workers`, did you mean `engines`?"),
        ("", "", "max_waiting: 4", "did you mean `models[].decode.capacity.max_waiting`?"),
    ] {
        let yaml = format!(
            "{top}\nmodels:\n  - name: m\n    {}\n    decode:\n      {}\n      engines: [{engine}]\n",
            model, decode
        );
        let message = problem(&yaml);
        assert!(message.contains(expected), "{top}{model}{decode}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_misspelt_choice_is_reported_with_the_expected_spelling() {
    let with = |policy: &str| problem(&GOOD.replace("policy: round_robin", &format!("policy: {policy}")));
    for (policy, expected) in [
        ("least-load", "`least-load` is none of"),
        ("least-load", "did you mean `least_load`?"),
        ("LeastLoad", "did you mean `least_load`?"),
        ("Round Robin", "did you mean `round_robin`?"),
        ("{least-load: {}}", "unknown key `least-load`, did you mean `least_load`?"),
        (
            "{kind: least-load}",
            "unknown key `kind`: write `least_load`, or with parameters `{least_load: {...}}`",
        ),
        (
            "{name: random, by: tokens}",
            "unknown key `name`: write `random`, or with parameters `{random: {...}}`",
        ),
        ("{kind: best}", "unknown key `kind`; known here: round_robin, random, power_of_two"),
        ("{least_load: {by: Tokens}}", "did you mean `tokens`?"),
    ] {
        let message = with(policy);
        assert!(
            message.contains(expected) && message.matches("`round_robin`").count() < 3,
            "{policy}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    for (key, expected) in [
        ("fallback: Aggregate", "`aggregate`"),
        ("disaggregate: {min_prompt-tokens: 1}", "did you mean `min_prompt_tokens`?"),
    ] {
        let message = problem(&GOOD.replace("  - name: m\n", &format!("  - name: m\n    {key}\n")));
        assert!(message.contains(expected), "{key}: {message}");
    }
}

#[test]
fn an_engine_in_both_pools_of_a_model_is_doubted() {
    let with = |decode: &str| {
        let yaml = GOOD.replace("        - url: http://127.0.0.1:2\n", decode);
        RouterConfig::from_yaml(&yaml, "router.yaml")
            .unwrap_or_else(|problems| panic!("{problems}"))
            .warnings()
    };
    assert_eq!(with("        - url: http://127.0.0.1:3\n"), Vec::<String>::new());
    let doubts = with("        - url: http://127.0.0.1:1\n        - url: http://127.0.0.1:2\n");
    assert_eq!(doubts.len(), 1, "{doubts:?}");
    assert!(
        doubts[0].starts_with("models[0]: http://127.0.0.1:1 in `prefill` and in `decode`"),
        "{doubts:?}"
    );
}
