//! What requests cost before they are queued: the bytes of their bodies, in sum, and the threads that read them.
//!
//! Each body is bounded by itself; thousands of them at once must not fill the memory either. A body is counted as it
//! arrives, so that a client that announces much and sends nothing takes nothing from others. What does not fit is refused
//! at once: waiting would let slow uploads hold each other up.
//!
//! Parsing and tokenizing take milliseconds per kilobyte of hostile text. Bodies above [`INLINE_BYTES`] are read by at
//! most [`Bodies::threads`] threads at once, which are not those of HTTP: aborts and releases go on meanwhile. As many
//! requests wait for such a thread as there are connections.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_openai::ApiError;
use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::run::options::BODY_BYTES_TOTAL;

/// When to come back to a full queue.
pub(super) const QUEUE_RETRY: Duration = Duration::from_secs(1);
/// Bodies up to this are read on the connection's thread. A kilobyte of hostile text takes 3 ms to tokenize; of prose,
/// 0.4 ms.
pub(super) const INLINE_BYTES: usize = 1024;

/// The bodies that an engine holds. Shared by all requests.
#[derive(Debug)]
pub(crate) struct Bodies {
    held: AtomicUsize,
    bytes_max: usize,
    threads: Arc<Semaphore>,
}

/// A body that was read to its end, or what came of it; counted until it is dropped.
#[derive(Debug)]
pub(super) struct Body {
    bytes: Bytes,
    _share: Share,
}

/// What one body has taken.
#[derive(Debug)]
pub(super) struct Share {
    bodies: Arc<Bodies>,
    bytes: usize,
}

impl Default for Bodies {
    fn default() -> Self {
        Self::of(BODY_BYTES_TOTAL)
    }
}

impl Bodies {
    /// Of so many bytes together.
    pub(crate) fn of(bytes_max: usize) -> Self {
        // The step loop's threads compute on all cores; who reads takes half of them at most, and never just one, so that
        // one long text does not hold all others.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::new(bytes_max, (cores / 2).max(2))
    }

    fn new(bytes_max: usize, threads: usize) -> Self {
        Self { held: AtomicUsize::new(0), bytes_max, threads: Arc::new(Semaphore::new(threads)) }
    }

    /// A body's share, empty at first.
    pub(super) fn begin(self: &Arc<Self>) -> Share {
        Share { bodies: Arc::clone(self), bytes: 0 }
    }

    /// Runs work on long texts on a thread of its own, when one is free.
    pub(super) async fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = Arc::clone(&self.threads).acquire_owned().await.expect("the semaphore is never closed");
        // The work keeps its turn: it goes on when the client has left and this future is dropped.
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        done.await.map_err(|_| ApiError::internal("the request could not be read"))?
    }
}

impl Share {
    /// Takes so many bytes more.
    ///
    /// # Errors
    /// 429 if the sum would exceed the bound; then nothing was taken.
    pub(super) fn take(&mut self, bytes: usize) -> Result<(), ApiError> {
        let before = self.bodies.held.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.bodies.bytes_max {
            self.bodies.held.fetch_sub(bytes, Ordering::Relaxed);
            let most = self.bodies.bytes_max;
            let message = format!("request bodies in memory have reached the limit of {most} bytes");
            return Err(ApiError::overloaded(message, QUEUE_RETRY));
        }
        self.bytes += bytes;
        Ok(())
    }

    /// What was taken is this.
    pub(super) fn of(self, bytes: Bytes) -> Body {
        Body { bytes, _share: self }
    }
}

impl Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.bodies.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_all_bodies_never_exceeds_its_bound_and_all_of_it_comes_back() {
        let bodies = Arc::new(Bodies::new(100, 1));
        let (mut one, mut other) = (bodies.begin(), bodies.begin());
        assert!(one.take(60).is_ok() && other.take(40).is_ok());
        let error = other.take(1).expect_err("the bound");
        assert_eq!((error.status, error.headers().is_empty()), (429, false), "{error}");
        assert!(other.take(usize::MAX).is_err());
        assert_eq!(bodies.held.load(Ordering::Relaxed), 100);
        let body = one.of(Bytes::from_static(b"abc"));
        assert_eq!(&*body, b"abc");
        drop(body);
        assert_eq!(bodies.held.load(Ordering::Relaxed), 40);
        drop(other);
        assert_eq!(bodies.held.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn work_whose_client_has_left_keeps_its_turn_to_its_end() {
        let bodies = Arc::new(Bodies::new(100, 1));
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::sync_channel::<()>(1);
        let long = Arc::clone(&bodies);
        let left = tokio::spawn(async move {
            let work = move || {
                begun.send(()).expect("it is waited for");
                ended.recv().expect("the test ends it");
                Ok(())
            };
            long.apart(work).await
        });
        has_begun.await.expect("it begins");
        left.abort();
        assert!(left.await.expect_err("it is dropped").is_cancelled());
        assert_eq!(bodies.threads.available_permits(), 0);
        end.send(()).expect("it goes on");
        bodies.apart(|| Ok(())).await.expect("its turn comes");
    }

    #[tokio::test]
    async fn no_more_texts_are_read_at_once_than_there_are_threads_for_it() {
        let bodies = Arc::new(Bodies::new(100, 2));
        let (at_once, most) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let reading: Vec<_> = (0..16)
            .map(|_| {
                let (bodies, at_once, most) = (Arc::clone(&bodies), Arc::clone(&at_once), Arc::clone(&most));
                tokio::spawn(async move {
                    let work = move || {
                        most.fetch_max(at_once.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
                        std::thread::yield_now();
                        at_once.fetch_sub(1, Ordering::AcqRel);
                        Ok(())
                    };
                    bodies.apart(work).await
                })
            })
            .collect();
        for one in reading {
            one.await.expect("no panic").expect("it is read");
        }
        assert!(most.load(Ordering::Acquire) <= 2, "{most:?} at once");
    }
}
