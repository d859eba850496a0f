//! The byte stream of a connection to an engine: plain, or TLS.

use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// Either stream. Without TLS it costs a comparison.
pub(in crate::engines::http) type Transport = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// The TCP socket.
pub(in crate::engines::http) fn tcp(transport: &Transport) -> &TcpStream {
    match transport {
        Transport::Left(stream) => stream,
        Transport::Right(stream) => stream.get_ref().0,
    }
}
