//! Tasks that continue when their connection ends.
//!
//! hyper drops the future of a request when it reads the connection's end. If the end directly follows the request in
//! the socket, for example because the sender was killed, both are read at once. The future is then dropped **before
//! it is polled once**: the service is called, but its future never runs. This happens on a reused connection; on a
//! new one the end is detected later, and the future is polled once.
//!
//! Work that settles for others (releasing a handoff, ending a lease) is therefore a task of its own, which begins
//! when the service is called. Work only for the caller stays in the future, and ends with it.

use std::sync::Arc;

use baton_openai::ApiError;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

/// Starts the tasks of one connection. A task holds the connection's permit until it has ended, so that the limit of
/// the connections also limits tasks. The server waits for all tasks when it ends.
#[derive(Clone)]
pub(super) struct TaskSpawner {
    permit: Arc<OwnedSemaphorePermit>,
    all: TaskTracker,
}

impl TaskSpawner {
    pub(super) fn new(permit: OwnedSemaphorePermit, all: &TaskTracker) -> Self {
        Self { permit: Arc::new(permit), all: all.clone() }
    }

    /// Starts this work at once; the returned future waits for it. Dropping the future does not stop the work.
    pub(super) fn spawn<T: Send + 'static, W: Future<Output = Result<T, ApiError>> + Send + 'static>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<T, ApiError>> + Send + use<T, W> {
        let permit = Arc::clone(&self.permit);
        let task = self.all.spawn(async move {
            let done = work.await;
            drop(permit);
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
    use crate::server::body_budget::BodyBudgets;
    use crate::server::protocol;
    use crate::server::reply::{Reply, json, read_body};

    /// Buffer size for all that a client sends, so that it never waits for the server.
    const ROOM: usize = 1 << 20;

    /// How a client leaves.
    #[derive(Clone, Copy, Debug)]
    enum HangUp {
        Fin,
        Rst,
    }

    /// A client's end of a connection, which closes in one of these ways. The server detects the close at once, as
    /// with a polled socket.
    struct HangUpStream(DuplexStream, HangUp);

    impl AsyncRead for HangUpStream {
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

    impl AsyncWrite for HangUpStream {
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

    /// Reads the body and reports its length.
    async fn look(request: Request<Incoming>, sender: Sender<usize>) -> Result<Reply, ApiError> {
        let body = read_body(request, ROOM, &BodyBudgets::of(ROOM).requests).await?;
        sender.send(body.len()).await.expect("the test listens");
        Ok(json(StatusCode::OK, "{}"))
    }

    /// The lengths of the bodies that a service reads on a connection: of a request that is answered, and of one of
    /// `bytes` bytes. The second request and the end of the connection are in the buffer when the server reads.
    async fn seen<F>(
        how: HangUp,
        bytes: usize,
        service: impl Fn(Request<Incoming>, Sender<usize>) -> F,
    ) -> Vec<usize>
    where
        F: Future<Output = Result<Reply, ApiError>>,
    {
        let (mut client, server) = duplex(ROOM);
        let (sender, mut received) = channel(2);
        let service = service_fn(|request| {
            let answer = service(request, sender.clone());
            async { Ok::<_, Infallible>(answer.await.expect("an answer")) }
        });
        let connection = protocol().serve_connection(TokioIo::new(HangUpStream(server, how)), service);
        let calling = async move {
            client.write_all(&asking(3)).await.expect("it reads");
            let mut answer = vec![0; 4096];
            while !answer.ends_with(b"{}") {
                answer.resize(4096, 0);
                let read = client.read(&mut answer).await.expect("an answer");
                answer.truncate(read);
            }
            // The buffer is large enough: no other task runs between this and the end.
            client.write_all(&asking(bytes)).await.expect("it reads");
        };
        let (ended, ()) = tokio::join!(connection, calling);
        assert!(ended.is_err(), "the client had left before the answer");
        drop(sender);
        let mut seen = Vec::new();
        while let Some(body) = received.recv().await {
            seen.push(body);
        }
        seen
    }

    #[tokio::test]
    async fn a_request_that_is_read_together_with_its_connections_end_is_seen() {
        for how in [HangUp::Fin, HangUp::Rst] {
            for bytes in [0, 200, 5_000, 20_000, 500_000] {
                let (places, all) = (Arc::new(Semaphore::new(1)), TaskTracker::new());
                let begin = TaskSpawner::new(Arc::clone(&places).try_acquire_owned().expect("a place"), &all);
                let seen = seen(how, bytes, move |request, sender| begin.spawn(look(request, sender))).await;
                assert_eq!(seen, [3, bytes], "{how:?}");
                // The permit is free once all tasks have ended.
                all.close();
                all.wait().await;
                assert_eq!(places.available_permits(), 1);
            }
        }
    }

    #[tokio::test]
    async fn work_holds_its_connection_permit_until_it_ends() {
        let (places, all) = (Arc::new(Semaphore::new(1)), TaskTracker::new());
        let begin = TaskSpawner::new(Arc::clone(&places).try_acquire_owned().expect("a place"), &all);
        let (go, wait) = tokio::sync::oneshot::channel::<()>();
        let work = begin.spawn(async move { wait.await.map_err(|_| ApiError::internal("never sent")) });
        // The connection has ended.
        drop((work, begin));
        tokio::task::yield_now().await;
        assert_eq!(places.available_permits(), 0);
        go.send(()).expect("it waits");
        all.close();
        all.wait().await;
        assert_eq!(places.available_permits(), 1);
    }

    /// The reason for this module.
    #[tokio::test]
    async fn hyper_drops_a_request_that_it_has_not_polled() {
        for how in [HangUp::Fin, HangUp::Rst] {
            assert_eq!(seen(how, 200, look).await, [3], "{how:?}");
        }
    }
}
