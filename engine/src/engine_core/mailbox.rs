//! The mailbox of the step loop: one queue, one lock, one wake-up for all other threads.
//!
//! The step loop owns the engine's state. HTTP tasks, fetch workers and the lease service only leave messages. Every
//! queue has a bound:
//! - submissions by [`Mailbox::new`]'s bound, over which a request is refused;
//! - endings by the live sequences (each has one guard), or by [`ABORTS_MAX`] when they come by name;
//! - fetch reports by the live fetches (at most three each);
//! - reports of offload workers by the orders in flight;
//! - settled leases by the blocks they hold, unfinished ones by the sequences that compute for them;
//! - digest requests by [`DIGEST_REQUESTS_MAX`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use baton_connector::fetch::Event;
use baton_connector::ledger::ClosedLease;
use baton_connector::{Handle, RequestId};
pub use baton_openai::cluster::LegFilter;

use crate::blocks::digests::{DIGEST_REQUESTS_MAX, DigestRequest};
use crate::engine_core::Submission;
use crate::offload::OffloadReport;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// Limit of the aborts by request id that wait for the step loop. Further ones are refused with 503.
pub const ABORTS_MAX: usize = 16_384;

/// All messages since the last look.
#[derive(Debug, Default)]
pub struct MailBatch {
    /// New sequences.
    pub submissions: VecDeque<Submission>,
    /// Sequences whose client has left or needs no more tokens.
    pub endings: Vec<(SeqId, FinishReason)>,
    /// Requests aborted by name, with the legs to end.
    pub aborts: Vec<(RequestId, LegFilter)>,
    /// Reports of fetch workers and heartbeats.
    pub fetches: Vec<(SeqId, Event)>,
    /// Leases that have ended.
    pub settled: Vec<ClosedLease>,
    /// Leases that end before their prefill does.
    pub unfinished: Vec<Handle>,
    /// Requested pages of digests.
    pub digests: Vec<DigestRequest>,
    /// Reports of offload workers.
    pub offloads: Vec<OffloadReport>,
    /// Clear the prefix cache.
    pub reset_cache: bool,
    /// Clear the offload tiers.
    pub reset_tiers: bool,
    /// No new work. The engine ends when it has no work left, or at this moment.
    pub closing: Option<Instant>,
    /// `closing` was set after the last look.
    closing_is_news: bool,
}

impl MailBatch {
    fn is_empty(&self) -> bool {
        self.submissions.is_empty()
            && self.endings.is_empty()
            && self.aborts.is_empty()
            && self.fetches.is_empty()
            && self.settled.is_empty()
            && self.unfinished.is_empty()
            && self.digests.is_empty()
            && self.offloads.is_empty()
            && !self.reset_cache
            && !self.reset_tiers
            && !self.closing_is_news
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Mailbox {
    mail: Mutex<MailBatch>,
    arrived: Condvar,
    submissions_max: usize,
}

/// Why the mailbox refused a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailboxError {
    /// The queue is at its bound.
    Full,
    /// The engine is shutting down.
    Closing,
}

impl Mailbox {
    /// An empty mailbox that takes `submissions_max` sequences between two steps.
    #[must_use]
    pub fn new(submissions_max: usize) -> Self {
        Self { mail: Mutex::default(), arrived: Condvar::new(), submissions_max }
    }

    /// Limit of the sequences of one request. Larger requests are always refused.
    #[must_use]
    pub fn submissions_max(&self) -> usize {
        self.submissions_max
    }

    /// Hands in all sequences of one request, or none.
    ///
    /// # Errors
    /// [`MailboxError`], with the submissions given back.
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<(), (Vec<Submission>, MailboxError)> {
        let mut mail = self.lock();
        if mail.closing.is_some() {
            return Err((submissions, MailboxError::Closing));
        }
        if mail.submissions.len() + submissions.len() > self.submissions_max {
            return Err((submissions, MailboxError::Full));
        }
        mail.submissions.extend(submissions);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    /// Ends a sequence whose client has left (abort) or needs no more tokens (a stop string).
    pub fn end(&self, id: SeqId, reason: FinishReason) {
        self.put(|mail| mail.endings.push((id, reason)));
    }

    /// Aborts a request by name, running or not yet known.
    ///
    /// # Errors
    /// [`MailboxError::Full`] when [`ABORTS_MAX`] are waiting.
    pub fn abort(&self, request: RequestId, legs: LegFilter) -> Result<(), MailboxError> {
        let mut mail = self.lock();
        if mail.aborts.len() >= ABORTS_MAX {
            return Err(MailboxError::Full);
        }
        mail.aborts.push((request, legs));
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    /// A fetch worker's report.
    pub fn fetch(&self, id: SeqId, event: Event) {
        self.put(|mail| mail.fetches.push((id, event)));
    }

    /// Leases that have ended.
    pub fn settled(&self, settled: Vec<ClosedLease>) {
        self.put(|mail| mail.settled.extend(settled));
    }

    /// Leases that end before their prefill does. No consumer needs the prefill any more.
    pub fn unfinished(&self, leases: Vec<Handle>) {
        self.put(|mail| mail.unfinished.extend(leases));
    }

    /// Requests a page of digests, which the core sends between two steps.
    ///
    /// # Errors
    /// [`MailboxError`]; at most [`DIGEST_REQUESTS_MAX`] requests wait.
    pub fn request_digests(&self, request: DigestRequest) -> Result<(), MailboxError> {
        let mut mail = self.lock();
        if mail.closing.is_some() {
            return Err(MailboxError::Closing);
        }
        if mail.digests.len() >= DIGEST_REQUESTS_MAX {
            return Err(MailboxError::Full);
        }
        mail.digests.push(request);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    /// An offload worker's report.
    pub fn offload(&self, report: OffloadReport) {
        self.put(|mail| mail.offloads.push(report));
    }

    /// Clears the offload tiers.
    pub fn reset_tiers(&self) {
        self.put(|mail| mail.reset_tiers = true);
    }

    /// Clears the prefix cache.
    pub fn reset_cache(&self) {
        self.put(|mail| mail.reset_cache = true);
    }

    /// Takes no new work from now on. Running work may finish until `deadline`.
    pub fn close(&self, deadline: Instant) {
        self.put(|mail| {
            mail.closing = Some(deadline);
            mail.closing_is_news = true;
        });
    }

    /// Whether the engine is shutting down.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.lock().closing.is_some()
    }

    /// Takes the leases that have ended. Returns none if another thread holds the lock, because this call must not
    /// wait.
    #[must_use]
    pub fn take_settled(&self) -> Vec<ClosedLease> {
        match self.mail.try_lock() {
            Ok(mut mail) => std::mem::take(&mut mail.settled),
            Err(TryLockError::Poisoned(mail)) => std::mem::take(&mut mail.into_inner().settled),
            Err(TryLockError::WouldBlock) => Vec::new(),
        }
    }

    /// Takes the messages that are there, without waiting.
    #[must_use]
    pub fn collect(&self) -> MailBatch {
        take(&mut self.lock())
    }

    /// Takes the messages that are there. Waits for one to arrive first, until `deadline` if there is one. A close
    /// since the last look counts as a message, whether it happened before this call or during it.
    #[must_use]
    pub fn wait(&self, deadline: Option<Instant>) -> MailBatch {
        let mut mail = self.lock();
        while mail.is_empty() {
            mail = match deadline {
                None => self.arrived.wait(mail).unwrap_or_else(std::sync::PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    self.arrived.wait_timeout(mail, left).unwrap_or_else(std::sync::PoisonError::into_inner).0
                }
            };
        }
        take(&mut mail)
    }

    fn put(&self, message: impl FnOnce(&mut MailBatch)) {
        message(&mut self.lock());
        self.arrived.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, MailBatch> {
        // Messages are whole values: a panic in another thread leaves none half-written.
        self.mail.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn take(mail: &mut MailBatch) -> MailBatch {
    let closing = mail.closing;
    let taken = std::mem::take(mail);
    mail.closing = closing;
    taken
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_close_between_two_waits_wakes_the_loop() {
        let mailbox = Arc::new(Mailbox::new(1));
        drop(mailbox.collect());
        let deadline = Instant::now() + Duration::from_secs(60);
        mailbox.close(deadline);
        let (sender, received) = std::sync::mpsc::sync_channel(1);
        let waiting = Arc::clone(&mailbox);
        std::thread::spawn(move || sender.send(waiting.wait(None).closing));
        assert_eq!(received.recv_timeout(Duration::from_secs(20)), Ok(Some(deadline)));
        // The next look knows the close already: only a new message wakes it.
        assert!(mailbox.wait(Some(Instant::now())).is_empty());
    }
}
