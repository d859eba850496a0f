//! A client's encrypted connection, as pingora takes connections.

use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest,
    UniqueID,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::der;

/// A client that does not take the last record is not waited for.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

/// An encrypted connection.
#[derive(Debug)]
pub(crate) struct TlsConnection {
    stream: TlsStream<TcpStream>,
    client_names: Arc<[String]>,
    socket: Arc<SocketDigest>,
}

impl TlsConnection {
    pub(super) fn new(stream: TlsStream<TcpStream>) -> Self {
        let (tcp, session) = stream.get_ref();
        let leaf = session.peer_certificates().and_then(|chain| chain.first());
        let client_names =
            leaf.and_then(|leaf| der::facts(leaf)).map(|facts| facts.names.into()).unwrap_or_default();
        let socket = Arc::new(SocketDigest::from_raw_fd(tcp.as_raw_fd()));
        Self { stream, client_names, socket }
    }

    /// The names in the certificate that the client showed.
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

#[async_trait]
impl Shutdown for TlsConnection {
    async fn shutdown(&mut self) {
        // A client that is gone already needs no goodbye.
        let _ = tokio::time::timeout(CLOSE_WITHIN, self.stream.shutdown()).await;
    }
}

impl UniqueID for TlsConnection {
    fn id(&self) -> i32 {
        self.stream.get_ref().0.as_raw_fd()
    }
}

impl Ssl for TlsConnection {}

impl Peek for TlsConnection {}

impl GetTimingDigest for TlsConnection {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for TlsConnection {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for TlsConnection {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(Arc::clone(&self.socket))
    }
}
