//! The configuration file: what is wrong is told by line and column, and the example loads.

use baton_router::RouterConfig;

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
    assert_eq!(config.models[0].decode.engines[0].url.port(), 2);
}

#[test]
fn what_is_wrong_is_told_by_line_and_column() {
    for (from, to, place, word) in [
        ("policy: round_robin", "polizy: round_robin", "router.yaml:6:", "polizy"),
        ("policy: round_robin", "policy: best", "router.yaml:6:", "best"),
        ("http://127.0.0.1:2", "ftp://127.0.0.1:2", "router.yaml:8:", "http://"),
        ("listen: 127.0.0.1:0", "listen: nowhere", "router.yaml:1:", "socket address"),
        ("name: m", "name: ''", "router.yaml:3:", "name"),
        ("listen: 127.0.0.1:0", "limits: {body_bytes: 3}", "router.yaml:1:", "1024"),
        ("listen: 127.0.0.1:0", "attempts: {decode: 99}", "router.yaml:1:", "16"),
        ("listen: 127.0.0.1:0", "cluster_secret: short", "router.yaml:1:", "16"),
        ("name: m", "name: m\n    aliases: [m]", "router.yaml:", "twice"),
        ("        - url: http://127.0.0.1:2\n", "        []\n", "router.yaml:", "at least one engine"),
    ] {
        let yaml = GOOD.replace(from, to);
        assert_ne!(yaml, GOOD);
        let said = problem(&yaml);
        assert!(said.starts_with(place), "{to}: {said}");
        assert!(said.contains(word), "{to}: {said}");
    }
    assert!(problem("").starts_with("router.yaml:"));
}

#[test]
fn the_commented_example_loads_and_names_every_default() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/config/router.yaml");
    let example = RouterConfig::load(std::path::Path::new(path)).unwrap();
    let bare = RouterConfig::from_yaml(GOOD, "good.yaml").unwrap();
    let parts = |c: &RouterConfig| format!("{:?} {:?} {:?}", c.limits, c.timeouts, c.attempts);
    assert_eq!(parts(&example), parts(&bare), "the example shows the defaults");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let said = RouterConfig::load(std::path::Path::new("no/such.yaml")).unwrap_err().to_string();
    assert!(said.starts_with("no/such.yaml: "), "{said}");
}

#[test]
fn the_schema_describes_every_field() {
    let schema = RouterConfig::schema().to_string();
    for field in ["cluster_secret_file", "prefill_silence_ms", "round_robin", "aggregate", "drain_timeout_ms"]
    {
        assert!(schema.contains(field), "{field}");
    }
}
