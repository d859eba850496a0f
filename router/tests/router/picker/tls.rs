//! TLS between gateway and picker.

use std::net::SocketAddr;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use hyper::Uri;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::transport::Channel;

use crate::input::tls::Authority;
use crate::picker::gateway::{GatewayStream, TestPicker, completion, head, piece, pool};

/// Connects to the picker with TLS, and requires HTTP/2 by ALPN.
#[derive(Clone)]
struct GatewayTls {
    to: SocketAddr,
    tls: TlsConnector,
}

impl Service<Uri> for GatewayTls {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = std::io::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { to, tls } = self.clone();
        Box::pin(async move {
            let name = ServerName::try_from("picker.test").unwrap();
            let stream = tls.connect(name, TcpStream::connect(to).await?).await?;
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
            Ok(TokioIo::new(stream))
        })
    }
}

#[tokio::test]
async fn a_gateway_reaches_the_picker_by_tls() {
    let authority = Authority::new();
    authority.install("picker", &authority.signs(&["picker.test"], None));
    let engine = SocketAddr::from(([127, 0, 0, 1], 7001));
    let model = format!("    decode: {}", pool(&[engine], "round_robin", None));
    let picker =
        TestPicker::start(&model, &format!("picker: {{tls: {{{}}}}}\n", authority.files("picker"))).await;
    let connector = GatewayTls { to: picker.address, tls: authority.connector(None, &["h2"]) };
    let endpoint = Channel::from_static("http://picker.test");
    let mut stream = GatewayStream::open(endpoint.connect_with_connector(connector).await.unwrap()).await;
    stream.send(head(&[], None, false)).await;
    stream.send(piece(completion("p").as_bytes(), true)).await;
    assert_eq!(stream.choice().await.destination, engine.to_string());
    picker.counts("baton_router_tls_handshakes_total{use=\"picker\",result=\"ok\"}", 1.0).await;
}
