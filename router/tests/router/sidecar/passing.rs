//! Requests that only the decode engine serves, TLS, and the listeners for people and monitors.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{TestSidecar, nowhere};
use crate::harness::client::{Client, DISCONNECT_KINDS, get};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};

/// An engine with a page at every path that does not generate.
async fn engine() -> FakeEngine {
    let page = |request: &ReceivedRequest| {
        let headers = vec![
            ("content-type", "text/plain"),
            ("x-of-engine", "1"),
            ("x-baton-failed-leg", "prefill"),
            ("connection", "close"),
        ];
        (!request.path.starts_with("/v1/completions")).then_some(Action::Answer(
            418,
            headers,
            b"tea".to_vec(),
        ))
    };
    FakeEngine::always(Action::Whole(1)).await.with_rule(page)
}

#[tokio::test]
async fn other_requests_reach_the_engine_as_they_are_but_for_the_routing_headers() {
    let d = engine().await;
    let sidecar = TestSidecar::beside(&d).await;
    let mut client = Client::connect(sidecar.address).await;
    let head = "PUT /some/path?a=b&c HTTP/1.1\r\nhost: front\r\naccept: text/plain\r\nx-own: 1\r\nte: trailers\r\n\
                connection: x-hop\r\nx-hop: 1\r\nx-prefiller-host-port: 10.0.0.1:1\r\nx-encoder-hosts-ports: e:1\r\n\
                x-kv-cache-source-host-port: s:1\r\nx-data-parallel-host-port: \r\nx-baton-cluster-secret: s\r\n\
                x-override-rid: r\r\nx-data-parallel-rank: 7\r\n\
                content-type: text/plain\r\ncontent-length: 5\r\n\r\nhello";
    client.send(head.as_bytes()).await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.text().as_str(), answer.header("x-of-engine")),
        (418, "tea", Some("1"))
    );
    assert_eq!(answer.header("content-type"), Some("text/plain"));
    assert_eq!(answer.header("x-baton-failed-leg"), None, "only the sidecar names a failed engine");
    let request = d.all().pop().unwrap();
    assert_eq!((request.path.as_str(), &request.raw[..]), ("/some/path", &b"hello"[..]));
    let mut names: Vec<_> = request.headers.keys().map(|name| name.as_str().to_owned()).collect();
    names.sort();
    assert_eq!(names, ["accept", "content-length", "content-type", "host", "x-own"]);
    assert_eq!(request.headers["host"], format!("localhost:{}", d.address.port()));
}

#[tokio::test]
async fn a_passed_body_of_json_loses_what_chooses_blocks() {
    let d = engine().await;
    let sidecar = TestSidecar::beside(&d).await;
    let mut client = Client::connect(sidecar.address).await;
    let body = json!({"kv_transfer_params": {"remote_host": "x"}, "token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {}}}});
    client.post("/inference/v1/generate", &body).await;
    assert_eq!(client.answer().await.status, 418);
    let request = d.all().pop().unwrap();
    assert_eq!(request.body["token_ids"], json!([1]));
    assert!(!String::from_utf8_lossy(&request.raw).contains("kv_transfer_params"));
    client.post_bytes("/inference/v1/generate", "", b"[1]").await;
    assert_eq!(client.answer().await.status, 400);
    assert_eq!(d.all().len(), 1);
    // Servers differ in the line that they use.
    let mut client = Client::connect(sidecar.address).await;
    let head = "POST /inference/v1/generate HTTP/1.1\r\nhost: front\r\ncontent-type: application/json\r\n\
                content-type: text/plain\r\ncontent-length: 27\r\n\r\n{\"kv_transfer_params\": {} }";
    client.send(head.as_bytes()).await;
    assert_eq!(client.answer().await.status, 400);
    assert_eq!(d.all().len(), 1);
}

#[tokio::test]
async fn the_sidecar_answers_health_itself_and_verbs_of_routers_not_at_all() {
    let d = engine().await;
    let sidecar = TestSidecar::beside(&d).await;
    assert_eq!(get(sidecar.address, "/health").await.status, 200);
    for path in [
        "/abort_requests",
        "/kv/release",
        "/abort_request",
        "/%61bort_request",
        "/kv/%72elease",
        "/kv%2frelease",
        "//abort_requests",
        "/inference/v1/abort_requests",
    ] {
        // The refusal precedes the body, so the connection is closed.
        let mut client = Client::connect(sidecar.address).await;
        client.post(path, &json!({"request_ids": ["a"], "rid": "a"})).await;
        assert_eq!(client.answer().await.status, 404, "{path}");
    }
    assert!(d.all().is_empty());
    assert_eq!(get(sidecar.address, "/ready").await.status, 418, "all other paths are the engine's");
}

#[tokio::test]
async fn a_disconnect_ends_a_passed_request() {
    for how in DISCONNECT_KINDS {
        let d = FakeEngine::always(Action::Hang).await;
        let sidecar = TestSidecar::beside(&d).await;
        let mut client = Client::connect(sidecar.address).await;
        client.post("/v1/embeddings", &json!({"input": "x"})).await;
        d.wait("the request", |d| d.received().len() == 1).await;
        client.hang_up(how);
        d.wait("the end", |d| d.cut() == 1).await;
        sidecar.settled().await;
    }
}

#[tokio::test]
async fn a_passed_request_without_an_engine_is_unavailable() {
    let sidecar = TestSidecar::at_port(nowhere().await.port(), 1, "").await;
    let answer = get(sidecar.address, "/v1/models").await;
    assert_eq!((answer.status, &answer.json()["type"]), (503, &json!("ServiceUnavailable")));
    assert_eq!(answer.header("x-baton-failed-leg"), Some("decode"));
    let d = FakeEngine::always(Action::Close).await;
    let sidecar = TestSidecar::beside(&d).await;
    let answer = get(sidecar.address, "/v1/models").await;
    assert_eq!((answer.status, &answer.json()["type"]), (502, &json!("BadGateway")));
    assert_eq!(answer.header("x-baton-failed-leg"), Some("decode"));
}

#[tokio::test]
async fn an_engine_that_breaks_off_cuts_the_passed_response() {
    let d = FakeEngine::always(Action::PartAndDie(1000)).await;
    let sidecar = TestSidecar::beside(&d).await;
    let mut client = Client::connect(sidecar.address).await;
    client.post("/v1/embeddings", &json!({"input": "x"})).await;
    assert_eq!(client.head().await.0, 200);
    assert!(client.is_cut().await);
}

#[tokio::test]
async fn tls_is_the_default_with_a_certificate_of_its_own() {
    let d = engine().await;
    let sidecar = TestSidecar::with(&d, "secure-proxy: true").await;
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().dangerous();
    let config = config.with_custom_certificate_verifier(Arc::new(AnyCertificate)).with_no_client_auth();
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    let mut plain = Client::connect(sidecar.address).await;
    plain.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(!plain.rest().await.starts_with(b"HTTP"), "no plain answer");
}

#[tokio::test]
async fn monitors_get_metrics_and_nothing_else() {
    let d = engine().await;
    let port = super::free_ports(1);
    let sidecar = TestSidecar::with(&d, &format!("metrics-port: {port}")).await;
    let at = |path: &'static str| get((sidecar.address.ip(), port).into(), path);
    assert!(at("/metrics").await.text().contains("baton_router_requests_in_flight"));
    assert_eq!(at("/health").await.status, 200);
    for path in ["/config", "/engines", "/debug/kv", "/"] {
        assert_eq!(at(path).await.status, 404, "{path}");
    }
    assert_eq!(get(sidecar.admin, "/config").await.status, 200, "loopback has all");
}

/// Accepts every certificate, as a gateway does that has no roots for a sidecar.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let provider = rustls::crypto::ring::default_provider();
        provider.signature_verification_algorithms.supported_schemes()
    }
}
