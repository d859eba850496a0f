//! How everybody else speaks to the step loop: one mailbox, one lock, one wake-up.
//!
//! The step loop owns the engine's state; HTTP tasks, fetch workers and the lease desk only leave messages.
//! Every queue is bounded by what it is about:
//! - submissions by [`Mailbox::new`]'s bound, over which a request is refused;
//! - endings by the live sequences (each is ended by its one guard), or by [`ABORTS_MAX`] when they come by name;
//! - fetch reports by the live fetches (at most three each);
//! - reports of offload workers by the orders in flight;
//! - settled leases by the blocks they hold, unfinished ones by the sequences that compute for them;
//! - asks for digests by [`DIGEST_ASKS_MAX`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use baton_connector::fetch::Event;
use baton_connector::ledger::Settled;
use baton_connector::{Handle, RequestId};

use crate::blocks::digests::{DIGEST_ASKS_MAX, DigestAsk};
use crate::engine_core::Submission;
use crate::offload::Report;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// Aborts by request id that wait for the step loop. More are refused with 503.
pub const ABORTS_MAX: usize = 16_384;

/// Which sequences of a request are meant: both legs of a request can be on one engine, under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Legs {
    /// Those that lend.
    Prefill,
    /// Those that decode.
    Decode,
    /// All.
    Both,
}

/// Everything that has arrived since the last look.
#[derive(Debug, Default)]
pub struct Mail {
    /// New sequences.
    pub submissions: VecDeque<Submission>,
    /// Sequences whose client is gone or content.
    pub endings: Vec<(SeqId, FinishReason)>,
    /// Requests aborted by name, and which of their legs.
    pub aborts: Vec<(RequestId, Legs)>,
    /// Reports of fetch workers and heartbeats.
    pub fetches: Vec<(SeqId, Event)>,
    /// Leases that have ended.
    pub settled: Vec<Settled>,
    /// Leases that end before their prefill does.
    pub unfinished: Vec<Handle>,
    /// Pages of digests that are wanted.
    pub digests: Vec<DigestAsk>,
    /// Reports of offload workers.
    pub offloads: Vec<Report>,
    /// Forget the prefix cache.
    pub reset_cache: bool,
    /// Forget what the offload tiers hold.
    pub reset_tiers: bool,
    /// No new work; end when the books are empty or at this moment.
    pub closing: Option<Instant>,
    /// `closing` was set after the last look.
    closing_is_news: bool,
}

impl Mail {
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
    mail: Mutex<Mail>,
    arrived: Condvar,
    submissions_max: usize,
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undelivered {
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

    /// Sequences of one request at most: more are never taken.
    #[must_use]
    pub fn submissions_max(&self) -> usize {
        self.submissions_max
    }

    /// Hands in all sequences of one request, or none.
    ///
    /// # Errors
    /// [`Undelivered`], with the submissions given back.
    pub fn submit(&self, submissions: Vec<Submission>) -> Result<(), (Vec<Submission>, Undelivered)> {
        let mut mail = self.lock();
        if mail.closing.is_some() {
            return Err((submissions, Undelivered::Closing));
        }
        if mail.submissions.len() + submissions.len() > self.submissions_max {
            return Err((submissions, Undelivered::Full));
        }
        mail.submissions.extend(submissions);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    /// The client of a sequence is gone (abort) or has what it wanted (a stop string).
    pub fn end(&self, id: SeqId, reason: FinishReason) {
        self.put(|mail| mail.endings.push((id, reason)));
    }

    /// Aborts a request by name, running or not yet known.
    ///
    /// # Errors
    /// [`Undelivered::Full`] when [`ABORTS_MAX`] are waiting.
    pub fn abort(&self, request: RequestId, legs: Legs) -> Result<(), Undelivered> {
        let mut mail = self.lock();
        if mail.aborts.len() >= ABORTS_MAX {
            return Err(Undelivered::Full);
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
    pub fn settled(&self, settled: Vec<Settled>) {
        self.put(|mail| mail.settled.extend(settled));
    }

    /// Leases that end before their prefill does: nobody wants it any more.
    pub fn unfinished(&self, leases: Vec<Handle>) {
        self.put(|mail| mail.unfinished.extend(leases));
    }

    /// Asks for a page of digests; it is answered between two steps.
    ///
    /// # Errors
    /// [`Undelivered`]; [`DIGEST_ASKS_MAX`] may wait.
    pub fn ask_digests(&self, ask: DigestAsk) -> Result<(), Undelivered> {
        let mut mail = self.lock();
        if mail.closing.is_some() {
            return Err(Undelivered::Closing);
        }
        if mail.digests.len() >= DIGEST_ASKS_MAX {
            return Err(Undelivered::Full);
        }
        mail.digests.push(ask);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    /// An offload worker's report.
    pub fn offload(&self, report: Report) {
        self.put(|mail| mail.offloads.push(report));
    }

    /// Forget what the offload tiers hold.
    pub fn reset_tiers(&self) {
        self.put(|mail| mail.reset_tiers = true);
    }

    /// Forget the prefix cache.
    pub fn reset_cache(&self) {
        self.put(|mail| mail.reset_cache = true);
    }

    /// No new work from now on; what runs may finish until `deadline`.
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

    /// Takes the leases that have ended, if nobody is writing just now: not even for the lock it waits.
    #[must_use]
    pub fn take_settled(&self) -> Vec<Settled> {
        match self.mail.try_lock() {
            Ok(mut mail) => std::mem::take(&mut mail.settled),
            Err(TryLockError::Poisoned(mail)) => std::mem::take(&mut mail.into_inner().settled),
            Err(TryLockError::WouldBlock) => Vec::new(),
        }
    }

    /// Takes what is there, without waiting.
    #[must_use]
    pub fn collect(&self) -> Mail {
        take(&mut self.lock())
    }

    /// Takes what is there; waits for something to arrive first, until `deadline` if there is one. That the mailbox
    /// was closed since the last look counts as something, whether it happened before this call or during it.
    #[must_use]
    pub fn wait(&self, deadline: Option<Instant>) -> Mail {
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

    fn put(&self, message: impl FnOnce(&mut Mail)) {
        message(&mut self.lock());
        self.arrived.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Mail> {
        // Messages are whole values: a panic elsewhere leaves nothing half-written.
        self.mail.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn take(mail: &mut Mail) -> Mail {
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
    fn a_close_between_two_looks_is_not_slept_through() {
        let mailbox = Arc::new(Mailbox::new(1));
        drop(mailbox.collect());
        let deadline = Instant::now() + Duration::from_secs(60);
        mailbox.close(deadline);
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let waiting = Arc::clone(&mailbox);
        std::thread::spawn(move || tell.send(waiting.wait(None).closing));
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Some(deadline)));
        // From then on it is known, and only something new wakes.
        assert!(mailbox.wait(Some(Instant::now())).is_empty());
    }
}
