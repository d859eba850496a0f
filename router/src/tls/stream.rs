//! A client's encrypted connection, and who its certificate says it is.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::der;

/// An encrypted connection.
#[derive(Debug)]
pub(crate) struct TlsConnection {
    stream: TlsStream<TcpStream>,
    client_names: Arc<[String]>,
}

impl TlsConnection {
    pub(super) fn new(stream: TlsStream<TcpStream>) -> Self {
        let (_, session) = stream.get_ref();
        let leaf = session.peer_certificates().and_then(|chain| chain.first());
        let client_names =
            leaf.and_then(|leaf| der::facts(leaf)).map(|facts| facts.names.into()).unwrap_or_default();
        Self { stream, client_names }
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
