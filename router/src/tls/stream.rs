//! A client's encrypted connection, with the names in the client's certificate.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::certificate_info::certificate_info;

/// An encrypted connection.
#[derive(Debug)]
pub(crate) struct TlsConnection {
    stream: TlsStream<TcpStream>,
    client_names: Arc<[String]>,
}

impl TlsConnection {
    /// The TCP socket.
    pub(crate) fn tcp(&self) -> &TcpStream {
        self.stream.get_ref().0
    }

    /// Whether the client chose HTTP/2 in the handshake.
    pub(crate) fn is_http2(&self) -> bool {
        self.stream.get_ref().1.alpn_protocol() == Some(b"h2")
    }

    pub(super) fn new(stream: TlsStream<TcpStream>) -> Self {
        let (_, session) = stream.get_ref();
        let leaf = session.peer_certificates().and_then(|chain| chain.first());
        let client_names =
            leaf.and_then(|leaf| certificate_info(leaf)).map(|info| info.names.into()).unwrap_or_default();
        Self { stream, client_names }
    }

    /// The names in the client's certificate.
    pub(crate) fn client_names(&self) -> Arc<[String]> {
        Arc::clone(&self.client_names)
    }
}

impl AsyncRead for TlsConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for TlsConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use tokio::net::TcpListener;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use std::io::IoSlice;
    use std::net::SocketAddr;

    use tokio_util::either::Either;

    use crate::client::http::ClientConnection;

    /// A client, and the router's side of its connection.
    async fn pair() -> (tokio_rustls::client::TlsStream<TcpStream>, TlsConnection) {
        let provider = super::super::certificate::provider;
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["router.test".to_owned()]).unwrap();
        let certificate: CertificateDer<'static> = certificate.self_signed(&key).unwrap().der().clone();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let server = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate).unwrap();
        let client = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let name = ServerName::try_from("router.test").unwrap();
        let connector = TlsConnector::from(Arc::new(client));
        let accepted = async {
            let far = listener.accept().await.unwrap().0;
            TlsAcceptor::from(Arc::new(server)).accept(far).await
        };
        let (client, server) = tokio::join!(connector.connect(name, near), accepted);
        (client.unwrap(), TlsConnection::new(server.unwrap()))
    }

    #[tokio::test]
    async fn a_client_that_stops_reading_does_not_keep_the_last_record_waiting() {
        let (client, connection) = pair().await;
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let connection = ClientConnection::new(Either::Right(Box::new(connection)), peer, Duration::ZERO);
        let piece = vec![b'x'; 1 << 20];
        // Until neither the kernel nor the session accepts more, so that the `close_notify` cannot be sent.
        let more =
            |context: &mut Context<'_>| connection.poll_send(context, &[IoSlice::new(&piece)]).is_ready();
        while poll_fn(|context| Poll::Ready(more(context))).await {}
        let closed = tokio::time::timeout(Duration::from_secs(20), connection.close()).await;
        assert!(closed.is_ok(), "it is given up");
        drop(client);
    }
}
