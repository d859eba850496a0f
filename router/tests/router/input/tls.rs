//! TLS with clients, monitors and engines: authentication, and disconnects that reach the engines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_router::{Router, RouterConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use socket2::SockRef;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::harness::client::completion;
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::{TestRouter, await_requests};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A root certificate and a folder with the certificates that it signed.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

/// A certificate and its key, as PEM.
pub(crate) struct PemPair {
    certificate: String,
    key: String,
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    pub(crate) fn signs(&self, names: &[&str], uri: Option<&str>) -> PemPair {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.subject_alt_names.extend(uri.map(|uri| SanType::URI(uri.try_into().unwrap())));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        PemPair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces the configured files of a pair, each atomically.
    pub(crate) fn install(&self, name: &str, pair: &PemPair) {
        for (end, text) in [("key", &pair.key), ("pem", &pair.certificate)] {
            std::fs::write(self.path("new"), text).unwrap();
            std::fs::rename(self.path("new"), self.path(&format!("{name}.{end}"))).unwrap();
        }
    }

    /// The file of the root certificate.
    pub(crate) fn ca(&self) -> String {
        self.path("ca.pem").display().to_string()
    }

    /// The files of a pair, as YAML.
    pub(crate) fn files(&self, name: &str) -> String {
        let (pem, key) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        format!("certificate: '{}', key: '{}'", pem.display(), key.display())
    }

    /// A client with this certificate, that offers these protocols.
    pub(crate) fn connector(&self, own: Option<&PemPair>, alpn: &[&str]) -> TlsConnector {
        use rustls::pki_types::pem::PemObject;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.issuer.pem().as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes());
                let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain.map(Result::unwrap).collect(), key).unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    async fn connect(&self, to: SocketAddr, own: Option<&PemPair>) -> std::io::Result<TlsClient> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from("router.test").unwrap();
        let stream = self.connector(own, &["http/1.1"]).connect(name, stream).await?;
        Ok(TlsClient { stream, buffer: Vec::new() })
    }
}

/// An encrypted connection of a client.
struct TlsClient {
    stream: TlsStream<TcpStream>,
    buffer: Vec<u8>,
}

impl TlsClient {
    async fn post(&mut self, body: &serde_json::Value) {
        let body = body.to_string();
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        self.send(format!("{head}{body}").as_bytes()).await;
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    /// Reads until the text arrives; `None` if the connection ends first.
    async fn until(&mut self, text: &str) -> Option<String> {
        let read = async {
            loop {
                let all = String::from_utf8_lossy(&self.buffer).into_owned();
                if all.contains(text) {
                    self.buffer.clear();
                    return Some(all);
                }
                let mut piece = [0; 4096];
                match self.stream.read(&mut piece).await {
                    Ok(0) | Err(_) => return None,
                    Ok(read) => self.buffer.extend_from_slice(&piece[..read]),
                }
            }
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("in time")
    }

    /// The certificate that the router sent.
    fn shown(&self) -> Vec<u8> {
        self.stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    }
}

pub(crate) async fn system(authority: &Authority, d: &FakeEngine, tls: &str, top: &str) -> TestRouter {
    authority.install("router", &authority.signs(&["router.test"], None));
    let listen = format!("listen_tls: {{{}{tls}}}\n{top}", authority.files("router"));
    TestRouter::with(&[], &[d], "", &listen).await
}

pub(crate) fn client_ca(authority: &Authority, auth: &str) -> String {
    format!(", client_ca: '{}', client_auth: {auth}", authority.path("ca.pem").display())
}

#[tokio::test]
async fn requests_and_streams_go_through_tls_on_kept_connections() {
    let authority = Authority::new();
    let d = FakeEngine::scripted(vec![Action::Whole(100_000), Action::Stream(3), Action::Whole(1)]).await;
    let system = system(&authority, &d, "", "").await;
    let mut client = authority.connect(system.address, None).await.unwrap();
    assert_eq!(client.stream.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
    client.post(&completion(false)).await;
    let answer = client.until("tttt\"}]}").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.len() > 100_000);
    client.post(&completion(true)).await;
    assert!(client.until("[DONE]\n\n\r\n0\r\n\r\n").await.is_some());
    client.post(&json!({"model": "m", "prompt": "x".repeat(300_000), "max_tokens": 1})).await;
    assert!(client.until("\"t\"}]}").await.is_some());
    system.settled().await;
    let shown = system.metric("baton_router_certificate_expiry_seconds{use=\"clients\"}").await;
    assert!(shown > 86_400.0, "{shown}");
    system.counts("baton_router_tls_handshakes_total{use=\"clients\",result=\"ok\"}", 1.0).await;
}

#[tokio::test]
async fn every_tls_disconnect_of_a_client_aborts_its_request() {
    let authority = Authority::new();
    for leave in ["close_notify", "fin", "rst", "notify and stay"] {
        let d = FakeEngine::scripted(vec![Action::Hang]).await;
        let system = system(&authority, &d, "", "").await;
        let mut client = authority.connect(system.address, None).await.unwrap();
        client.post(&completion(true)).await;
        await_requests(&d, 1).await;
        let mut kept = None;
        match leave {
            "close_notify" => client.stream.shutdown().await.unwrap(),
            "fin" => drop(client.stream),
            "rst" => {
                SockRef::from(client.stream.get_ref().0).set_linger(Some(Duration::ZERO)).unwrap();
                drop(client.stream);
            }
            // The `close_notify` record, without the end of the TCP connection.
            _ => {
                let (tcp, session) = client.stream.get_mut();
                session.send_close_notify();
                let mut record = Vec::new();
                session.write_tls(&mut record).unwrap();
                tcp.write_all(&record).await.unwrap();
                kept = Some(client);
            }
        }
        eventually(leave, || d.cut() == 1 && d.aborts().len() == 1).await;
        system.counts("baton_router_disconnects_total{phase=\"decode_pre_first\"}", 1.0).await;
        system.settled().await;
        drop(kept);
    }
}

#[tokio::test]
async fn a_new_certificate_is_for_new_connections_and_a_bad_one_changes_nothing() {
    let authority = Authority::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = system(&authority, &d, "", "").await;
    let mut old = authority.connect(system.address, None).await.unwrap();
    let reloads = |result: &str| {
        format!("baton_router_certificate_reloads_total{{use=\"clients\",result=\"{result}\"}}")
    };
    // Swapped as in Kubernetes: a symlink to another folder.
    let next = authority.signs(&["router.test"], None);
    let folder = authority.path("next");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("router.pem"), &next.certificate).unwrap();
    std::fs::write(folder.join("router.key"), &next.key).unwrap();
    for end in ["key", "pem"] {
        std::os::unix::fs::symlink(folder.join(format!("router.{end}")), authority.path("link")).unwrap();
        std::fs::rename(authority.path("link"), authority.path(&format!("router.{end}"))).unwrap();
    }
    let begun = std::time::Instant::now();
    let new = loop {
        let new = authority.connect(system.address, None).await.unwrap();
        if new.shown() != old.shown() {
            break new;
        }
        assert!(begun.elapsed() < TIMEOUT, "the new certificate is in effect");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    old.post(&completion(false)).await;
    assert!(old.until("\"t\"}]}").await.is_some(), "the old connection goes on");
    let failed = system.metric(&reloads("failed")).await;
    std::fs::write(folder.join("router.pem"), "nonsense").unwrap();
    system.counts(&reloads("failed"), failed + 1.0).await;
    let again = authority.connect(system.address, None).await.unwrap();
    assert_eq!(again.shown(), new.shown());
}

#[tokio::test]
async fn clients_show_certificates_where_they_must() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    let d = FakeEngine::always(Action::Whole(1)).await;
    let good = authority.signs(&["client.test"], None);
    let forged = foreign.signs(&["client.test"], None);
    for (auth, without) in [("optional", true), ("require", false)] {
        let system = system(&authority, &d, &client_ca(&authority, auth), "").await;
        for (own, welcome) in [(None, without), (Some(&good), true), (Some(&forged), false)] {
            let before = d.received().len();
            // In TLS 1.3 a refused client gets the error with its first read.
            let answered = match authority.connect(system.address, own).await {
                Err(_) => None,
                Ok(mut client) => {
                    let body = completion(false).to_string();
                    let head =
                        format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}", body.len());
                    // The connection may be refused before all is written.
                    let _ = client.stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await;
                    let _ = client.stream.flush().await;
                    client.until("\"t\"}]}").await
                }
            };
            assert_eq!(answered.is_some(), welcome, "{auth}");
            assert_eq!(d.received().len() - before, usize::from(welcome), "{auth}");
        }
    }
}

#[tokio::test]
async fn a_certificates_name_can_be_a_tenant() {
    let authority = Authority::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let known = authority.signs(&["client.test"], Some("spiffe://cluster/batch"));
    let unknown = authority.signs(&["other.test"], None);
    let auth = "auth: {certificates: [{name: 'spiffe://cluster/batch', tenant: batch, priority_max: low, models: [m], \
                limits: {requests_per_minute: 100}}]}";
    let system = system(&authority, &d, &client_ca(&authority, "require"), auth).await;
    let mut client = authority.connect(system.address, Some(&known)).await.unwrap();
    client.post(&completion(false)).await;
    let answer = client.until("\"t\"}]}").await.unwrap();
    assert!(answer.to_ascii_lowercase().contains("x-ratelimit-remaining-requests: 99"), "{answer}");
    system.counts("baton_router_tenant_requests_total{tenant=\"batch\"}", 1.0).await;
    assert!(d.received()[0].body["cache_salt"].is_string());
    let mut client = authority.connect(system.address, Some(&unknown)).await.unwrap();
    client.post(&completion(false)).await;
    assert!(client.until("invalid_api_key").await.unwrap().starts_with("HTTP/1.1 401"));
}

#[tokio::test]
async fn a_missing_handshake_is_cut_and_delays_no_client() {
    let authority = Authority::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = system(&authority, &d, ", handshake_ms: 300, handshakes: 4", "").await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(TcpStream::connect(system.address).await.unwrap());
    }
    let mut plain = TcpStream::connect(system.address).await.unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut all = Vec::new();
    let _ = tokio::time::timeout(TIMEOUT, plain.read_to_end(&mut all)).await.expect("it is cut");
    assert!(!all.starts_with(b"HTTP"), "nothing is answered in the clear");
    for stream in &mut silent {
        let ended = tokio::time::timeout(TIMEOUT, stream.read(&mut [0; 16])).await.expect("it is cut");
        assert!(matches!(ended, Ok(0) | Err(_)));
    }
    let mut client = authority.connect(system.address, None).await.unwrap();
    client.post(&completion(false)).await;
    assert!(client.until("\"t\"}]}").await.is_some());
}

/// A TLS proxy in front of an engine that requires client certificates.
/// `names`: the versions of HTTP that it offers by ALPN.
pub(crate) async fn encrypted(authority: &Authority, engine: SocketAddr, names: &[&str]) -> SocketAddr {
    use rustls::pki_types::pem::PemObject;
    let pair = authority.signs(&["engine.test"], None);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.issuer.pem().as_bytes()).unwrap()).unwrap();
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = names.iter().map(|name| name.as_bytes().to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (outer, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut outer) = acceptor.accept(outer).await else { return };
                let mut inner = TcpStream::connect(engine).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn engines_are_reached_by_mutual_tls_and_their_certificates_are_checked() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    let d = FakeEngine::scripted(vec![Action::Whole(1), Action::Stream(2), Action::Hang]).await;
    let proxy = encrypted(&authority, d.address, &[]).await;
    authority.install("own", &authority.signs(&["router.test"], None));
    foreign.install("own", &foreign.signs(&["router.test"], None));
    let yaml = |by: &Authority, own: &Authority, name: &str| {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, protocol: vllm, decode: {{engines: [{{url: \
             'https://{proxy}'}}]}}}}]\nengine_tls: {{ca: '{}', {}, server_name: {name}}}\nattempts: {{decode: 1}}\n\
             health: {{active: {{interval_ms: 0}}}}\n",
            by.path("ca.pem").display(),
            own.files("own")
        )
    };
    let good = TestRouter::of(&yaml(&authority, &authority, "engine.test")).await;
    for stream in [false, true] {
        let answer = crate::harness::client::post(good.address, "/v1/completions", &completion(stream)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(d.connections(), 1, "the connection is kept");
    let mut client = crate::harness::client::Client::connect(good.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 3).await;
    client.hang_up(crate::harness::client::DisconnectKind::Fin);
    eventually("the engine is cut", || d.cut() == 1).await;
    good.settled().await;
    for (by, own, name, why) in [
        (&foreign, &authority, "engine.test", "an engine of another root"),
        (&authority, &foreign, "engine.test", "a router of another root"),
        (&authority, &authority, "other.test", "another name"),
    ] {
        let bad = TestRouter::of(&yaml(by, own, name)).await;
        let answer = crate::harness::client::post(bad.address, "/v1/completions", &completion(false)).await;
        assert!(answer.status >= 500, "{why}: {}", answer.status);
    }
    assert_eq!(d.received().len(), 3);
}

#[tokio::test]
async fn unusable_tls_files_are_reported_before_the_router_listens() {
    let authority = Authority::new();
    authority.install("a", &authority.signs(&["a.test"], None));
    authority.install("b", &authority.signs(&["b.test"], None));
    let (a, b) = (authority.path("a.pem"), authority.path("b.key"));
    let start = async |url: &str, top: &str| {
        let yaml = format!("models: [{{name: m, decode: {{engines: [{{url: '{url}'}}]}}}}]\n{top}\n");
        match RouterConfig::from_yaml(&yaml, "r.yaml") {
            Ok(config) => Router::bind(config).await.err().expect("refused").to_string(),
            Err(error) => error.to_string(),
        }
    };
    let listen = "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\n";
    for (url, top, word) in [
        ("https://127.0.0.1:1", String::new(), "engine_tls.ca"),
        ("http://127.0.0.1:1", "engine_tls: {ca: no/such.pem}".into(), "no/such.pem"),
        (
            "http://127.0.0.1:1",
            format!("engine_tls: {{ca: '{0}', certificate: '{0}'}}", a.display()),
            "each other",
        ),
        (
            "http://127.0.0.1:1",
            format!("listen_tls: {{certificate: '{}', key: '{}'}}", a.display(), b.display()),
            "key",
        ),
        (
            "http://127.0.0.1:1",
            format!("listen_tls: {{certificate: '{0}', key: '{0}'}}", a.display()),
            "no private key",
        ),
        (
            "http://127.0.0.1:1",
            format!("listen_tls: {{{}, client_auth: require}}", authority.files("a")),
            "client_ca",
        ),
    ] {
        let message = start(url, &format!("{listen}{top}")).await;
        assert!(message.contains(word), "{top}: {message}");
        assert!(!message.contains("PRIVATE"), "{message}");
    }
}

#[tokio::test]
async fn beyond_loopback_the_admin_listener_needs_a_token_or_certificates() {
    let authority = Authority::new();
    authority.install("router", &authority.signs(&["router.test"], None));
    let token = authority.path("token");
    std::fs::write(&token, "a token of many bytes\n").unwrap();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let yaml = |admin: &str| {
        format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '0.0.0.0:0'{admin}}}\nmodels: [{{name: m, decode: {{engines: \
             [{{url: '{}'}}]}}}}]\n",
            d.url()
        )
    };
    let refused = |admin: &str| {
        let config = RouterConfig::from_yaml(&yaml(admin), "r.yaml");
        async move {
            match config {
                Ok(config) => Router::bind(config).await.err().expect("refused").to_string(),
                Err(problem) => problem.to_string(),
            }
        }
    };
    assert!(refused("").await.contains("beyond loopback"));
    assert!(refused(&format!(", tls: {{{}}}", authority.files("router"))).await.contains("beyond loopback"));
    std::fs::write(authority.path("short"), "short").unwrap();
    assert!(
        refused(&format!(", token_file: '{}'", authority.path("short").display())).await.contains("16 bytes")
    );

    let system = TestRouter::of(&yaml(&format!(", token_file: '{}'", token.display()))).await;
    let admin = SocketAddr::from(([127, 0, 0, 1], system.admin.port()));
    let status = async |path: &str, token: &str| {
        let mut client = crate::harness::client::Client::connect(admin).await;
        client
            .send(
                format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n").as_bytes(),
            )
            .await;
        client.answer().await.status
    };
    for path in ["/metrics", "/config", "/engines", "/nowhere"] {
        assert_eq!(status(path, "a guess of many bytes").await, 401, "{path}");
    }
    assert_eq!((status("/health", "").await, status("/ready", "").await), (200, 200));
    assert_eq!(status("/metrics", "a token of many bytes").await, 200);
    std::fs::write(&token, "another token of bytes\n").unwrap();
    let begun = std::time::Instant::now();
    while status("/metrics", "another token of bytes").await != 200 {
        assert!(begun.elapsed() < TIMEOUT, "the new token is in effect");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(status("/metrics", "a token of many bytes").await, 401);

    let tls = format!(", tls: {{{}{}}}", authority.files("router"), client_ca(&authority, "require"));
    let system = TestRouter::of(&yaml(&tls)).await;
    let admin = SocketAddr::from(([127, 0, 0, 1], system.admin.port()));
    let own = authority.signs(&["monitor.test"], None);
    let mut monitor = authority.connect(admin, Some(&own)).await.unwrap();
    monitor.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(monitor.until("baton_router_build_info").await.is_some());
    let foreign = authority.connect(admin, None).await;
    if let Ok(mut foreign) = foreign {
        let _ = foreign.stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(foreign.until("baton_router_build_info").await.is_none());
    }
}

/// A client's first TLS message.
fn hello(authority: &Authority) -> Vec<u8> {
    let config = Arc::clone(authority.connector(None, &["http/1.1"]).config());
    let name = ServerName::try_from("router.test").unwrap();
    let mut bytes = Vec::new();
    rustls::ClientConnection::new(config, name).unwrap().write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn silent_connections_do_not_block_new_clients() {
    let authority = Authority::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = system(&authority, &d, ", handshakes: 1, handshake_ms: 60000", "").await;
    let hello = hello(&authority);
    let mut silent = Vec::new();
    for n in 0..300 {
        let mut stream = TcpStream::connect(system.address).await.unwrap();
        // Some clients send nothing, some half of the message, some all of it and then nothing.
        stream.write_all(&hello[..[0, hello.len() / 2, hello.len()][n % 3]]).await.unwrap();
        silent.push(stream);
    }
    // Far below the 60 seconds that each silent client may take.
    let honest = tokio::time::timeout(TIMEOUT, authority.connect(system.address, None)).await;
    let mut client = honest.expect("it is let in at once").unwrap();
    client.post(&completion(false)).await;
    assert!(client.until("\"t\"}]}").await.is_some());
    drop(silent);
}

#[tokio::test]
async fn a_new_token_file_takes_effect_and_a_missing_one_keeps_the_admin_api_closed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("one"), "the first of two tokens\n").unwrap();
    std::fs::write(at("two"), "the second of two tokens\n").unwrap();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let config = |admin: &str| {
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {admin}\nmodels: [{{name: m, decode: {{engines: [{{url: '{}'}}]}}}}]\n",
            d.url()
        );
        RouterConfig::from_yaml(&yaml, "r.yaml").unwrap()
    };
    let with = |file: &str| config(&format!("{{listen: '0.0.0.0:0', token_file: '{}'}}", at(file)));
    let system = TestRouter::running(with("one")).await;
    let admin = SocketAddr::from(([127, 0, 0, 1], system.admin.port()));
    let status = async |token: &str| {
        let mut client = crate::harness::client::Client::connect(admin).await;
        let head = format!("GET /config HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
        client.send(head.as_bytes()).await;
        client.answer().await.status
    };
    assert_eq!(status("the first of two tokens").await, 200);
    system.reload.install(with("two")).unwrap();
    assert_eq!(status("the first of two tokens").await, 401);
    assert_eq!(status("the second of two tokens").await, 200);
    system.reload.install(with("none")).expect_err("its token cannot be read");
    // The listener's address does not change, so a configuration that puts it on loopback still needs the token.
    system.reload.install(config("{listen: '127.0.0.1:0'}")).expect_err("the admin API would be unprotected");
    assert_eq!(status("the second of two tokens").await, 200);
    assert_eq!(status("").await, 401);
}
