//! Work that goes on although its connection ends.
//!
//! hyper drops the future of a request when it reads the connection's end. When the end lies in the socket right behind
//! the request (whoever sent it was killed while this engine stood still), both are read in one go, and the future is dropped
//! **before it was polled once**: the service is called, and nothing in it runs. It is so on a connection that was used
//! before; on a new one the poller has not yet told of the end, and there is time for one poll.
//!
//! So what is owed to others (a handoff to give back, a lease to end) is a task of its own, and it begins when the
//! service is called. What is owed only to the caller stays with the future, and ends with it.

use std::sync::Arc;

use baton_openai::ApiError;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

/// Where work of one connection is begun. Work keeps the connection's place until it is done, so that there is never more of it
/// than connections may be; and the server waits for it when it ends.
#[derive(Clone)]
pub(super) struct Begin {
    place: Arc<OwnedSemaphorePermit>,
    all: TaskTracker,
}

impl Begin {
    pub(super) fn new(place: OwnedSemaphorePermit, all: &TaskTracker) -> Self {
        Self { place: Arc::new(place), all: all.clone() }
    }

    /// Begins this work at once; waits for it when polled. Dropped, it lets the work go on.
    pub(super) fn begun<T: Send + 'static, W: Future<Output = Result<T, ApiError>> + Send + 'static>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<T, ApiError>> + Send + use<T, W> {
        let place = Arc::clone(&self.place);
        let task = self.all.spawn(async move {
            let done = work.await;
            drop(place);
            done
        });
        async move { task.await.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read"))) }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{Error, ErrorKind};
    use std::pin::Pin;
    use std::task::{Context, Poll, ready};

    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper::{Request, StatusCode};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
    use tokio::sync::Semaphore;
    use tokio::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::server::protocol;
    use crate::server::reply::{Reply, json, read_body};

    /// Room for all that a client sends, so that it never waits for the server.
    const ROOM: usize = 1 << 20;

    /// How a client leaves.
    #[derive(Clone, Copy, Debug)]
    enum HangUp {
        Fin,
        Rst,
    }

    /// A client's end that reads as its hanging up does. It is known at once, as that of a socket whose poller has told of it.
    struct Server(DuplexStream, HangUp);

    impl AsyncRead for Server {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<std::io::Result<()>> {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.0).poll_read(cx, buf))?;
            let ended = buf.filled().len() == before;
            Poll::Ready(match self.1 {
                HangUp::Rst if ended => Err(Error::from(ErrorKind::ConnectionReset)),
                HangUp::Rst | HangUp::Fin => Ok(()),
            })
        }
    }

    impl AsyncWrite for Server {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<std::io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    fn asking(bytes: usize) -> Vec<u8> {
        let head = format!("POST / HTTP/1.1\r\nhost: engine\r\ncontent-length: {bytes}\r\n\r\n");
        [head.into_bytes(), vec![b' '; bytes]].concat()
    }

    /// Reads the body and tells how long it was.
    async fn look(request: Request<Incoming>, tell: Sender<usize>) -> Result<Reply, ApiError> {
        let body = read_body(request, ROOM, &Arc::default()).await?;
        tell.send(body.len()).await.expect("the test listens");
        Ok(json(StatusCode::OK, "{}"))
    }

    /// The bodies that are seen on a connection: of a request that is answered, and of `bytes` bytes that lie there
    /// together with the connection's end when the server looks.
    async fn seen<F>(
        how: HangUp,
        bytes: usize,
        service: impl Fn(Request<Incoming>, Sender<usize>) -> F,
    ) -> Vec<usize>
    where
        F: Future<Output = Result<Reply, ApiError>>,
    {
        let (mut client, server) = duplex(ROOM);
        let (tell, mut told) = channel(2);
        let service = service_fn(|request| {
            let answer = service(request, tell.clone());
            async { Ok::<_, Infallible>(answer.await.expect("an answer")) }
        });
        let connection = protocol().serve_connection(TokioIo::new(Server(server, how)), service);
        let calling = async move {
            client.write_all(&asking(3)).await.expect("it reads");
            let mut answer = vec![0; 4096];
            while !answer.ends_with(b"{}") {
                answer.resize(4096, 0);
                let read = client.read(&mut answer).await.expect("an answer");
                answer.truncate(read);
            }
            // There is room: nobody else runs between this and the end.
            client.write_all(&asking(bytes)).await.expect("it reads");
        };
        let (ended, ()) = tokio::join!(connection, calling);
        assert!(ended.is_err(), "nobody was there to read an answer");
        drop(tell);
        let mut seen = Vec::new();
        while let Some(body) = told.recv().await {
            seen.push(body);
        }
        seen
    }

    #[tokio::test]
    async fn a_request_that_is_read_together_with_its_connections_end_is_seen() {
        for how in [HangUp::Fin, HangUp::Rst] {
            for bytes in [0, 200, 5_000, 20_000, 500_000] {
                let (places, all) = (Arc::new(Semaphore::new(1)), TaskTracker::new());
                let begin = Begin::new(Arc::clone(&places).try_acquire_owned().expect("a place"), &all);
                let seen = seen(how, bytes, move |request, tell| begin.begun(look(request, tell))).await;
                assert_eq!(seen, [3, bytes], "{how:?}");
                // Whoever waits for all work finds the place free.
                all.close();
                all.wait().await;
                assert_eq!(places.available_permits(), 1);
            }
        }
    }

    #[tokio::test]
    async fn work_keeps_its_connections_place_until_it_is_done() {
        let (places, all) = (Arc::new(Semaphore::new(1)), TaskTracker::new());
        let begin = Begin::new(Arc::clone(&places).try_acquire_owned().expect("a place"), &all);
        let (go, wait) = tokio::sync::oneshot::channel::<()>();
        let work = begin.begun(async move { wait.await.map_err(|_| ApiError::internal("never told")) });
        // The connection has ended.
        drop((work, begin));
        tokio::task::yield_now().await;
        assert_eq!(places.available_permits(), 0);
        go.send(()).expect("it waits");
        all.close();
        all.wait().await;
        assert_eq!(places.available_permits(), 1);
    }

    /// Why this file is there.
    #[tokio::test]
    async fn hyper_drops_a_request_that_it_has_not_polled() {
        for how in [HangUp::Fin, HangUp::Rst] {
            assert_eq!(seen(how, 200, look).await, [3], "{how:?}");
        }
    }
}
