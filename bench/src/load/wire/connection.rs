//! A connection, and the ways to leave it.
//!
//! | manner | what the other side sees |
//! |---|---|
//! | FIN | the end of the stream; what it still writes is answered with RST, as by any client that has closed |
//! | RST | a reset, at once |
//! | half-close | the end of the stream; what it writes is still read |
//! | stall | nothing, until its send buffer is full |
//! | vanish | nothing, and nothing that it sends is acknowledged |

use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Duration;

use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::load::far::FarHost;
use crate::load::limits::{DRAIN_BYTES_MAX, READ_BYTES, STALL_BUFFER_BYTES};

/// What a connection is made with.
#[derive(Clone, Copy)]
pub(crate) enum Dial<'a> {
    /// As the system sees fit.
    Usual,
    /// The system reads ahead as little as it lets one choose.
    LittleAhead,
    /// From another host.
    Far(&'a FarHost),
}

pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    /// Tries one address after another.
    pub(crate) async fn connect(
        addresses: &[SocketAddr],
        tls: Option<&(TlsConnector, ServerName<'static>)>,
        how: Dial<'_>,
    ) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "its name has no address");
        for address in addresses {
            match dial(*address, how).await {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let Some((connector, name)) = tls else { return Ok(Self::Plain(stream)) };
                    let stream = connector.connect(name.clone(), stream).await;
                    let stream = stream.map_err(|error| at(format_args!("{address}, TLS"), &error))?;
                    return Ok(Self::Tls(Box::new(stream)));
                }
                Err(error) => last = at(address, &error),
            }
        }
        Err(last)
    }

    /// Appends what has come; 0 at the end.
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

    /// Whether nothing has come on a connection that nobody is asked by: no bytes, and no end.
    pub(crate) fn is_quiet(&self) -> bool {
        let quiet = self.stream().try_read(&mut [0]);
        quiet.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Leaves with a FIN. Bytes that nobody has read would make it an RST, so they are read first.
    pub(crate) fn finish(self) -> io::Result<()> {
        let stream = match self {
            Self::Plain(stream) => stream.into_std()?,
            Self::Tls(stream) => {
                let (stream, mut session) = stream.into_inner();
                let mut stream = stream.into_std()?;
                session.send_close_notify();
                // Whoever is still there hears it; whoever is not, sees the FIN.
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

    /// Leaves with an RST.
    pub(crate) fn reset(self) -> io::Result<()> {
        socket2::SockRef::from(self.stream()).set_linger(Some(Duration::ZERO))
    }

    /// Leaves without a word: nothing of this connection comes from that host any more, its close included.
    pub(crate) fn vanish(self, host: &FarHost) -> io::Result<()> {
        host.vanish(self.stream().local_addr()?.ip())?;
        // The RST goes nowhere; a close that waits for what is not acknowledged would keep the socket.
        self.reset()
    }

    /// Says that no more is sent, and reads on.
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

/// An error with the place where it came to light.
fn at(place: impl std::fmt::Display, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{place}: {error}"))
}

async fn dial(address: SocketAddr, how: Dial<'_>) -> io::Result<TcpStream> {
    let socket = match how {
        Dial::Far(host) => host.socket().await?,
        Dial::Usual | Dial::LittleAhead if address.is_ipv4() => TcpSocket::new_v4()?,
        Dial::Usual | Dial::LittleAhead => TcpSocket::new_v6()?,
    };
    if matches!(how, Dial::LittleAhead) {
        // The window that is offered to the other side follows from it, so it comes before the handshake.
        socket.set_recv_buffer_size(STALL_BUFFER_BYTES)?;
    }
    socket.connect(address).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the other side reads when a client leaves that has 64 KiB before it which it never read.
    fn seen_after(leave: fn(Wire)) -> io::Result<usize> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
            let wire = Wire::connect(&[listener.local_addr()?], None, Dial::Usual).await?;
            let (mut other, _) = listener.accept().await?;
            other.write_all(&[b'x'; 64 << 10]).await?;
            leave(wire);
            let mut read = [0; 8];
            tokio::time::timeout(Duration::from_secs(20), other.read(&mut read))
                .await
                .expect("it hears of it")
        })
    }

    #[test]
    fn a_fin_is_a_fin_whatever_is_unread() {
        assert_eq!(seen_after(|wire| wire.finish().expect("closed")).ok(), Some(0));
        let reset = |seen: io::Result<usize>| seen.map_err(|error| error.kind());
        assert_eq!(
            reset(seen_after(|wire| wire.reset().expect("closed"))),
            Err(io::ErrorKind::ConnectionReset)
        );
        // Why a FIN takes more than a close.
        assert_eq!(reset(seen_after(drop)), Err(io::ErrorKind::ConnectionReset));
    }
}
