//! A client's connection, encrypted or not, without a call through a table.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::client_stream::ClientStream;
use crate::tls::TlsConnection;

/// A client's connection.
#[derive(Debug)]
pub(crate) enum Client {
    Plain(ClientStream),
    Tls(Box<TlsConnection>),
}

impl Client {
    /// See [`ClientStream::hold`]; encrypted, each write is a record anyhow.
    pub(super) fn hold(&self, hold: bool) {
        if let Self::Plain(stream) = self {
            stream.hold(hold);
        }
    }

    /// The names in the certificate that the client showed; `None` without TLS.
    pub(super) fn certificate_names(&self) -> Option<Arc<[String]>> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(connection) => Some(connection.client_names()),
        }
    }
}

impl AsRawFd for Client {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Plain(stream) => stream.as_raw_fd(),
            Self::Tls(connection) => connection.as_raw_fd(),
        }
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, room),
            Self::Tls(connection) => Pin::new(connection).poll_read(context, room),
        }
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(connection) => Pin::new(connection).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(connection) => Pin::new(connection).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(connection) => Pin::new(connection).poll_shutdown(context),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Self::Tls(connection) => Pin::new(connection).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(connection) => connection.is_write_vectored(),
        }
    }
}
