//! Which version of HTTP a connection uses.

use hyper::Version;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::harness::client::{completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;
use crate::input::tls::{Authority, encrypted};

const PATH: &str = "/v1/completions";

/// The version of a request's connection over TLS, by the router's setting and the engine's names; `None`: no answer.
async fn version_by(authority: &Authority, setting: &str, names: &[&str]) -> Option<Version> {
    let d = FakeEngine::always(Action::Stream(1)).await;
    let proxy = encrypted(authority, d.address, names).await;
    let (ca, own) = (authority.ca(), authority.files("own"));
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nattempts: {{decode: 1}}\n\
         models: [{{name: m, protocol: vllm, http2: {setting}, decode: {{engines: [{{url: 'https://{proxy}'}}]}}}}]\n\
         engine_tls: {{ca: '{ca}', {own}, server_name: engine.test}}\nhealth: {{active: {{interval_ms: 0}}}}\n"
    ))
    .await;
    let answer = post(system.address, PATH, &completion(true)).await;
    let version = d.received().first().map(|request| request.version);
    assert_eq!(answer.status == 200, version.is_some(), "{setting} {names:?}: {}", answer.text());
    version
}

#[tokio::test]
async fn over_tls_the_engine_chooses_the_version() {
    let authority = Authority::new();
    authority.install("own", &authority.signs(&["router.test"], None));
    let (one, two) = (Some(Version::HTTP_11), Some(Version::HTTP_2));
    for (setting, names, expected) in [
        ("auto", &["h2", "http/1.1"][..], two),
        ("auto", &["http/1.1"], one),
        ("auto", &[], one),
        ("off", &["h2", "http/1.1"], one),
        ("on", &["http/1.1", "h2"], two),
        ("on", &["http/1.1"], None),
        ("on", &[], None),
    ] {
        assert_eq!(version_by(&authority, setting, names).await, expected, "{setting} {names:?}");
    }
}

#[tokio::test]
async fn in_clear_text_only_the_setting_decides() {
    for (setting, expected) in
        [("auto", Version::HTTP_11), ("off", Version::HTTP_11), ("on", Version::HTTP_2)]
    {
        let d = FakeEngine::always(Action::Stream(1)).await;
        let system = TestRouter::with(&[], &[&d], &format!("    http2: {setting}"), "").await;
        assert_eq!(post(system.address, PATH, &completion(true)).await.status, 200);
        assert_eq!(d.received()[0].version, expected, "{setting}");
    }
}

#[tokio::test]
async fn an_engine_of_http1_is_named_where_http2_is_required() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut stream = listener.accept().await.unwrap().0;
            let _ = stream.read(&mut [0; 512]).await;
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        }
    });
    let warnings = crate::operations::log::Warnings::default();
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         models: [{{name: m, protocol: vllm, http2: on, decode: {{engines: [{{url: 'http://{address}'}}]}}}}]\n"
    ))
    .await;
    let answer = post(system.address, PATH, &completion(true)).await;
    assert!([502, 503].contains(&answer.status), "{}", answer.text());
    let lines = warnings.lines();
    let named = |line: &String| line.contains("engine_without_http2") && line.contains(&address.to_string());
    assert!(lines.iter().any(named), "{lines:#?}");
    assert_eq!(get(system.admin, "/health").await.status, 200);
}

#[tokio::test]
async fn a_reload_changes_the_version_of_new_requests() {
    let d = FakeEngine::always(Action::Stream(1)).await;
    let yaml = |setting: &str| {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
             models: [{{name: m, protocol: vllm, http2: {setting}, decode: {{engines: [{{url: '{}'}}]}}}}]\n",
            d.url()
        )
    };
    let config = |setting: &str| baton_router::RouterConfig::from_yaml(&yaml(setting), "r.yaml").unwrap();
    let system = TestRouter::running(config("on")).await;
    for (setting, expected) in [("on", Version::HTTP_2), ("off", Version::HTTP_11), ("on", Version::HTTP_2)] {
        system.reload.install(config(setting)).unwrap();
        assert_eq!(post(system.address, PATH, &completion(true)).await.status, 200);
        assert_eq!(d.received().last().unwrap().version, expected, "{setting}");
    }
}

#[test]
fn an_engine_of_two_models_has_one_setting() {
    let yaml = "models:\n  - {name: a, http2: on, decode: {engines: [{url: 'http://e:1'}]}}\n  \
                - {name: b, decode: {engines: [{url: 'http://e:1'}]}}\n";
    let error = baton_router::RouterConfig::from_yaml(yaml, "r.yaml").unwrap_err().to_string();
    assert!(error.contains("e:1 has another `http2` at models[0].http2"), "{error}");
}
