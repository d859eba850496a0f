//! A connection, and the ways to disconnect.
//!
//! | way | what the server sees |
//! |---|---|
//! | FIN | the end of the stream; further writes are answered with RST, as by any client that has closed |
//! | RST | a reset, at once |
//! | half-close | the end of the stream; its writes are still read |
//! | stall | nothing, until its send buffer is full |
//! | vanish | nothing; its packets are not acknowledged |

use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;

use crate::load::far_host::FarHost;
use crate::load::limits::{DRAIN_BYTES_MAX, READ_BYTES, STALL_BUFFER_BYTES};
use crate::load::transport::tls::TlsPeer;

/// How a connection is made.
#[derive(Clone, Copy)]
pub(crate) enum Dial<'a> {
    /// With the system's defaults.
    Usual,
    /// With the smallest receive buffer that the system allows.
    SmallBuffer,
    /// From another host.
    Far(&'a FarHost),
}

pub(crate) enum Connection {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connection {
    /// Tries the addresses in order.
    pub(crate) async fn connect(
        addresses: &[SocketAddr],
        tls: Option<&TlsPeer>,
        how: Dial<'_>,
    ) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "its name has no address");
        for address in addresses {
            match dial(*address, how).await {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let Some(tls) = tls else { return Ok(Self::Plain(stream)) };
                    let stream = tls.connector.connect(tls.name.clone(), stream).await;
                    let stream = stream.map_err(|error| at(format_args!("{address}, TLS"), &error))?;
                    return Ok(Self::Tls(Box::new(stream)));
                }
                Err(error) => last = at(address, &error),
            }
        }
        Err(last)
    }

    /// Appends the bytes that arrived. 0 at the end.
    pub(crate) async fn read(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        buffer.reserve(READ_BYTES);
        match self {
            Self::Plain(stream) => stream.read_buf(buffer).await,
            Self::Tls(stream) => stream.read_buf(buffer).await,
        }
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(bytes).await,
            Self::Tls(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
        }
    }

    /// Whether an idle connection has neither bytes nor an end.
    pub(crate) fn is_quiet(&self) -> bool {
        let quiet = self.stream().try_read(&mut [0]);
        quiet.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Closes with a FIN. Unread bytes would make the close an RST, so they are read first.
    pub(crate) fn finish(self) -> io::Result<()> {
        let stream = match self {
            Self::Plain(stream) => stream.into_std()?,
            Self::Tls(stream) => {
                let (stream, mut session) = stream.into_inner();
                let mut stream = stream.into_std()?;
                session.send_close_notify();
                // Sends TLS's closing message. If the server is gone, the FIN follows all the same.
                let _ = session.write_tls(&mut stream);
                stream
            }
        };
        let (mut drained, mut bytes) = (0, [0; READ_BYTES]);
        while drained < DRAIN_BYTES_MAX {
            match (&stream).read(&mut bytes) {
                Ok(count @ 1..) => drained += count,
                _ => break,
            }
        }
        Ok(())
    }

    /// Closes with an RST.
    pub(crate) fn reset(self) -> io::Result<()> {
        socket2::SockRef::from(self.stream()).set_linger(Some(Duration::ZERO))
    }

    /// Vanishes: no further packet of this connection leaves that host, not even for its close.
    pub(crate) fn vanish(self, host: &FarHost) -> io::Result<()> {
        host.vanish(self.stream().local_addr()?.ip())?;
        // The RST is not delivered. A regular close would keep the socket until its data is acknowledged.
        self.reset()
    }

    /// Closes the sending side and reads on.
    pub(crate) async fn half_close(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.shutdown().await,
            Self::Tls(stream) => stream.shutdown().await,
        }
    }

    fn stream(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }
}

/// An error with the place where it occurred.
fn at(place: impl std::fmt::Display, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{place}: {error}"))
}

async fn dial(address: SocketAddr, how: Dial<'_>) -> io::Result<TcpStream> {
    let socket = match how {
        Dial::Far(host) => host.socket().await?,
        Dial::Usual | Dial::SmallBuffer if address.is_ipv4() => TcpSocket::new_v4()?,
        Dial::Usual | Dial::SmallBuffer => TcpSocket::new_v6()?,
    };
    if matches!(how, Dial::SmallBuffer) {
        // The advertised window depends on this size, so it is set before the handshake.
        socket.set_recv_buffer_size(STALL_BUFFER_BYTES)?;
    }
    socket.connect(address).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the server reads after a client disconnects with 64 KiB unread.
    fn peer_end_after(leave: fn(Connection)) -> io::Result<usize> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
            let connection = Connection::connect(&[listener.local_addr()?], None, Dial::Usual).await?;
            let (mut other, _) = listener.accept().await?;
            other.write_all(&[b'x'; 64 << 10]).await?;
            leave(connection);
            let mut read = [0; 8];
            tokio::time::timeout(Duration::from_secs(20), other.read(&mut read))
                .await
                .expect("it hears of it")
        })
    }

    #[test]
    fn a_close_with_unread_data_sends_fin() {
        assert_eq!(peer_end_after(|connection| connection.finish().expect("closed")).ok(), Some(0));
        let reset = |seen: io::Result<usize>| seen.map_err(|error| error.kind());
        assert_eq!(
            reset(peer_end_after(|connection| connection.reset().expect("closed"))),
            Err(io::ErrorKind::ConnectionReset)
        );
        // Why a FIN requires more than a close.
        assert_eq!(reset(peer_end_after(drop)), Err(io::ErrorKind::ConnectionReset));
    }
}
