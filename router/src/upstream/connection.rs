//! One HTTP/1.1 connection to an engine, with the two ways of giving it up: cut, or half-closed and read on.

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;

/// A second hand on a connection's socket, for closing it while hyper holds the first.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

/// A connection. Cut when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    socket: Arc<Socket>,
    idle_since: Instant,
}

impl Socket {
    /// Says that nothing more will be sent; the answer can still be read. Stock vLLM aborts a request at this
    /// just as at a close, and a reply that crosses it still arrives.
    pub(crate) fn half_close(&self) {
        // An error means that the connection is closed already, which is what was wanted.
        let _ = SockRef::from(&self.0).shutdown(Shutdown::Write);
    }

    fn cut(&self) {
        let _ = SockRef::from(&self.0).shutdown(Shutdown::Both);
    }
}

impl Connection {
    pub(crate) async fn dial(host: &str, port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let socket = Arc::new(Socket(stream.as_fd().try_clone_to_owned()?));
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        // Ends when the connection does, and the connection when its `Connection` is dropped. Its error is
        // also the error of the request in flight.
        tokio::spawn(async move { drop(driver.await) });
        Ok(Self { sender, socket, idle_since: Instant::now() })
    }

    pub(crate) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    pub(crate) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        self.sender.send_request(request).await
    }

    /// Whether another request can be sent; a connection whose answer was just read needs a moment.
    pub(crate) async fn is_ready(&mut self) -> bool {
        !self.sender.is_closed() && self.sender.ready().await.is_ok()
    }

    pub(crate) fn rest(&mut self, now: Instant) {
        self.idle_since = now;
    }

    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.socket.cut();
    }
}
