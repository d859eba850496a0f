//! One HTTP/1.1 connection to an engine, with the two ways of giving it up: cut, or half-closed and read on.
//!
//! hyper's half of the connection is not a task of its own: whoever waits for the engine drives it. That saves
//! two hops between tasks per message (measured 2026-11-20, loaded 2 cores: see `baton bench router`), and an
//! idle connection costs nothing until it is looked at again.

use std::future::poll_fn;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::payload::Sending;

/// A second hand on a connection's socket, for closing it while hyper holds the first.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

/// A connection. Cut when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: SendRequest<Sending>,
    /// `None` once the connection has ended.
    driver: Option<http1::Connection<TokioIo<TcpStream>, Sending>>,
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
        Ok(Self { sender, driver: Some(driver), socket, idle_since: Instant::now() })
    }

    pub(crate) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Sends a request and waits for the head of its answer.
    ///
    /// # Cancel safety
    /// The connection is of no use after a cancelled call.
    pub(crate) async fn send(&mut self, request: Request<Sending>) -> hyper::Result<Response<Incoming>> {
        let answer = self.sender.send_request(request);
        let mut answer = std::pin::pin!(answer);
        let driver = &mut self.driver;
        poll_fn(|context| {
            drive(driver, context);
            answer.as_mut().poll(context)
        })
        .await
    }

    /// The next frame of an answer's body, which this connection carries.
    pub(crate) fn poll_frame(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        drive(&mut self.driver, context);
        Pin::new(body).poll_frame(context)
    }

    /// Whether another request can be sent: the last answer is read and the engine has not closed it.
    pub(crate) fn is_ready(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        drive(&mut self.driver, &mut context);
        self.driver.is_some() && matches!(self.sender.poll_ready(&mut context), Poll::Ready(Ok(())))
    }

    pub(crate) fn rest(&mut self, now: Instant) {
        self.idle_since = now;
    }

    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }
}

/// Does what can be done without waiting. An error of the connection is also the error of its request.
fn drive(driver: &mut Option<http1::Connection<TokioIo<TcpStream>, Sending>>, context: &mut Context<'_>) {
    if driver.as_mut().is_some_and(|driver| Pin::new(driver).poll(context).is_ready()) {
        *driver = None;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.socket.cut();
    }
}
