//! HTTP/2 over TLS: chosen by ALPN, with the client's certificate as its identity.

use std::net::SocketAddr;

use h2::Reason;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::harness::client::completion;
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::http2::{Http2Client, PREFACE};
use crate::harness::system::await_requests;
use crate::input::tls::{Authority, PemPair, client_ca, system};

/// Connects with these protocols, the preferred one first.
async fn connect(
    authority: &Authority,
    to: SocketAddr,
    own: Option<&PemPair>,
    alpn: &[&str],
) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(to).await.unwrap();
    let name = "router.test".try_into().unwrap();
    authority.connector(own, alpn).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn alpn_chooses_the_protocol() {
    let authority = Authority::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let on = system(&authority, &d, "", "").await;
    let off = system(&authority, &d, "", "http2: off").await;
    for (address, offered, chosen) in [
        (on.address, &["http/1.1", "h2"][..], Some(&b"h2"[..])),
        (on.address, &["http/1.1"], Some(b"http/1.1")),
        (on.address, &[], None),
        (off.address, &["h2", "http/1.1"], Some(b"http/1.1")),
    ] {
        let stream = connect(&authority, address, None, offered).await;
        assert_eq!(stream.get_ref().1.alpn_protocol(), chosen, "{offered:?}");
    }
    let stream = connect(&authority, on.address, None, &["h2"]).await;
    let mut client = Http2Client::over(stream).await;
    assert_eq!(client.answer("/v1/completions", &completion(false)).await.status, 200);
    // With TLS only the handshake chooses HTTP/2.
    let mut stream = connect(&authority, on.address, None, &["http/1.1"]).await;
    stream.write_all(PREFACE).await.unwrap();
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    assert!(all.starts_with(b"HTTP/1.1 505 "), "{}", all.escape_ascii());
    on.counts("baton_router_http2_connections_total", 2.0).await;
}

#[tokio::test]
async fn a_certificate_is_the_identity_of_every_stream_and_resets_cancel_over_tls() {
    let authority = Authority::new();
    let d = FakeEngine::scripted(vec![Action::Whole(1), Action::Hang, Action::Whole(1)]).await;
    let known = authority.signs(&["client.test"], Some("spiffe://cluster/batch"));
    let auth = "auth: {certificates: [{name: 'spiffe://cluster/batch', tenant: batch, models: [m], \
                limits: {requests_per_minute: 100}}]}";
    let system = system(&authority, &d, &client_ca(&authority, "require"), auth).await;
    let stream = connect(&authority, system.address, Some(&known), &["h2"]).await;
    let mut client = Http2Client::over(stream).await;
    let answer = client.answer("/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.header("x-ratelimit-remaining-requests")), (200, Some("99")));
    let (_response, mut stream) = client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 2).await;
    stream.send_reset(Reason::CANCEL);
    d.wait("the cut", |d| d.cut() == 1 && d.aborts().len() == 1).await;
    assert_eq!(client.answer("/v1/completions", &completion(false)).await.status, 200);
    system.settled().await;
    system.counts("baton_router_tenant_requests_total{tenant=\"batch\"}", 3.0).await;
}
