//! The cost of requests before they are queued: the total bytes of their bodies, and the threads that read them.
//!
//! Each body has its own bound, and the sum of all bodies must be bounded too. Bytes are counted as they arrive, so
//! that a client that announces a large body and sends nothing reserves nothing. Excess bodies are refused at once:
//! if they waited, slow uploads would block each other.
//!
//! Parsing and tokenizing take milliseconds per kilobyte of hostile text. Bodies above [`INLINE_BYTES`] are therefore
//! read by a limited number of separate threads, and aborts and releases go on meanwhile. At most as many requests
//! wait for such a thread as there are connections.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_openai::ApiError;
use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::run::options::BODY_BYTES_TOTAL;

/// The retry delay for a full queue.
pub(super) const QUEUE_RETRY: Duration = Duration::from_secs(1);
/// Bodies up to this size are read on the connection's thread. A kilobyte of hostile text takes 3 ms to tokenize, a
/// kilobyte of prose 0.4 ms.
pub(super) const INLINE_BYTES: usize = 1024;

/// The budgets of an engine's bodies.
#[derive(Debug)]
pub(crate) struct BodyBudgets {
    /// Bodies of clients' requests.
    pub(super) requests: Arc<BodyBudget>,
    /// Bodies of control requests with the cluster secret. They have a bound of their own, so that a release or an
    /// abort does not wait for bodies of clients.
    pub(super) control: Arc<BodyBudget>,
}

impl BodyBudgets {
    /// `bytes_max` bytes for the bodies of clients.
    pub(crate) fn of(bytes_max: usize) -> Self {
        Self {
            requests: Arc::new(BodyBudget::of(bytes_max)),
            control: Arc::new(BodyBudget::of(BODY_BYTES_TOTAL)),
        }
    }
}

/// The bodies that an engine has in memory, shared by all requests.
#[derive(Debug)]
pub(super) struct BodyBudget {
    reserved: AtomicUsize,
    bytes_max: usize,
    threads: Arc<Semaphore>,
}

/// A body, complete or partly read; counted until it is dropped.
#[derive(Debug)]
pub(super) struct RequestBody {
    bytes: Bytes,
    _share: BodyReservation,
}

/// The reservation of one body.
#[derive(Debug)]
pub(super) struct BodyReservation {
    bodies: Arc<BodyBudget>,
    bytes: usize,
}

impl BodyBudget {
    /// A budget of `bytes_max` bytes.
    fn of(bytes_max: usize) -> Self {
        // The step loop computes on all cores. Reading takes at most half of them, and at least two, so that one long
        // text does not block all others.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::new(bytes_max, (cores / 2).max(2))
    }

    fn new(bytes_max: usize, threads: usize) -> Self {
        Self { reserved: AtomicUsize::new(0), bytes_max, threads: Arc::new(Semaphore::new(threads)) }
    }

    /// An empty reservation for a body.
    pub(super) fn begin(self: &Arc<Self>) -> BodyReservation {
        BodyReservation { bodies: Arc::clone(self), bytes: 0 }
    }

    /// Runs work on long texts on a separate thread, when one is free.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = Arc::clone(&self.threads).acquire_owned().await.expect("the semaphore is never closed");
        // The work keeps its permit: it continues when the client has left and this future is dropped.
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        done.await.map_err(|_| ApiError::internal("the request could not be read"))?
    }
}

impl BodyReservation {
    /// Reserves so many further bytes.
    ///
    /// # Errors
    /// 429 if the sum would exceed the bound; then nothing was reserved.
    pub(super) fn take(&mut self, bytes: usize) -> Result<(), ApiError> {
        let before = self.bodies.reserved.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.bodies.bytes_max {
            self.bodies.reserved.fetch_sub(bytes, Ordering::Relaxed);
            let most = self.bodies.bytes_max;
            let message = format!("request bodies in memory have reached the limit of {most} bytes");
            return Err(ApiError::overloaded(message, QUEUE_RETRY));
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Converts the reservation to a body with these bytes.
    pub(super) fn into_body(self, bytes: Bytes) -> RequestBody {
        RequestBody { bytes, _share: self }
    }
}

impl Deref for RequestBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.bodies.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_bodies_stays_within_its_bound_and_is_released() {
        let bodies = Arc::new(BodyBudget::new(100, 1));
        let (mut one, mut other) = (bodies.begin(), bodies.begin());
        assert!(one.take(60).is_ok() && other.take(40).is_ok());
        let error = other.take(1).expect_err("the bound");
        assert_eq!((error.status, error.headers().is_empty()), (429, false), "{error}");
        assert!(other.take(usize::MAX).is_err());
        assert_eq!(bodies.reserved.load(Ordering::Relaxed), 100);
        let body = one.into_body(Bytes::from_static(b"abc"));
        assert_eq!(&*body, b"abc");
        drop(body);
        assert_eq!(bodies.reserved.load(Ordering::Relaxed), 40);
        drop(other);
        assert_eq!(bodies.reserved.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn work_of_a_cancelled_request_holds_its_permit_to_its_end() {
        let bodies = Arc::new(BodyBudget::new(100, 1));
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::sync_channel::<()>(1);
        let long = Arc::clone(&bodies);
        let left = tokio::spawn(async move {
            let work = move || {
                begun.send(()).expect("it is waited for");
                ended.recv().expect("the test ends it");
                Ok(())
            };
            long.run_blocking(work).await
        });
        has_begun.await.expect("it begins");
        left.abort();
        assert!(left.await.expect_err("it is dropped").is_cancelled());
        assert_eq!(bodies.threads.available_permits(), 0);
        end.send(()).expect("it goes on");
        bodies.run_blocking(|| Ok(())).await.expect("its turn comes");
    }

    #[tokio::test]
    async fn no_more_texts_are_read_at_once_than_there_are_threads_for_it() {
        let bodies = Arc::new(BodyBudget::new(100, 2));
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
                    bodies.run_blocking(work).await
                })
            })
            .collect();
        for one in reading {
            one.await.expect("no panic").expect("it is read");
        }
        assert!(most.load(Ordering::Acquire) <= 2, "{most:?} at once");
    }
}
