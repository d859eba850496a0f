//! The byte stream of a connection to an engine: plain, or TLS.

use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// Either stream. Without TLS it costs a comparison.
pub(in crate::engines::http) type EngineTransport = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// The TCP socket.
pub(in crate::engines::http) fn tcp(transport: &EngineTransport) -> &TcpStream {
    match transport {
        EngineTransport::Left(stream) => stream,
        EngineTransport::Right(stream) => stream.get_ref().0,
    }
}
