//! What the router asks the server, and what its replies mean. Pure: the scripts do the rest at the server, each as
//! one step that no other router's interleaves with.

use std::sync::LazyLock;
use std::time::Duration;

use redis::{Script, ScriptInvocation};

use crate::auth::bucket::RateLimitError;

/// Time after which a lease ends that its router does not renew: a router that crashed holds its places that long.
pub(super) const LEASE: Duration = Duration::from_secs(30);
/// Longest wait that a bucket can have: a minute, and the cap of overuse. A longer one is no reply of the script.
const WAIT_US_MAX: i64 = 60_000_000 + 86_400_000_000;

static TAKE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("take.lua")));
static CORRECT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("correct.lua")));
static RENEW: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("renew.lua")));

/// A name at the server and its capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedName {
    pub name: String,
    pub capacity: u64,
}

/// A question of a request: take `amount` from all buckets and a place in all sets.
pub(super) struct Take<'a> {
    pub amount: u64,
    pub buckets: &'a [SharedName],
    pub sets: &'a [SharedName],
    pub lease: &'a str,
}

/// The reply to a [`Take`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TakeReply {
    /// All of it was taken.
    Taken {
        /// The server's time, in microseconds.
        at_us: i64,
        /// The time until each bucket is full.
        until_full: Vec<Duration>,
    },
    /// The bucket of this index refuses, and nothing was taken.
    Bucket(usize, RateLimitError),
    /// The set of this index is full, and nothing was taken.
    Set(usize),
}

/// A message about a request that has begun or ended. No request waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Correction {
    /// Unused tokens, taken at this time.
    Give { buckets: Vec<SharedName>, amount: u64, at_us: i64 },
    /// Tokens used beyond those taken.
    Charge { buckets: Vec<SharedName>, amount: u64 },
    /// The request has ended.
    Release { sets: Vec<String>, lease: String },
}

impl Take<'_> {
    pub(super) fn invocation(&self) -> ScriptInvocation<'static> {
        let mut invocation = TAKE.prepare_invoke();
        invocation.arg(self.amount).arg(self.buckets.len()).arg(self.lease).arg(millis(LEASE));
        for SharedName { name, capacity } in self.buckets.iter().chain(self.sets) {
            invocation.key(name).arg(capacity);
        }
        invocation
    }

    /// The meaning of a reply; `None` if the script never gives it.
    pub(super) fn read(&self, reply: &[i64]) -> Option<TakeReply> {
        let (buckets, keys) = (self.buckets.len(), self.buckets.len() + self.sets.len());
        let us = |us: i64| {
            let in_range = (0..=WAIT_US_MAX).contains(&us);
            in_range.then(|| Duration::from_micros(us.unsigned_abs()))
        };
        match *reply {
            [0, at_us, ref rest @ ..] if rest.len() == buckets && at_us > 0 => Some(TakeReply::Taken {
                at_us,
                until_full: rest.iter().map(|&us_| us(us_)).collect::<Option<_>>()?,
            }),
            [at, wait] if at > 0 => {
                let at = usize::try_from(at).ok().filter(|at| *at <= buckets)?;
                Some(TakeReply::Bucket(at - 1, RateLimitError::RetryAfter(us(wait)?)))
            }
            [at, 0] if at < 0 => {
                let at =
                    usize::try_from(at.unsigned_abs()).ok().filter(|at| (buckets + 1..=keys).contains(at))?;
                Some(TakeReply::Set(at - 1 - buckets))
            }
            _ => None,
        }
    }
}

impl Correction {
    /// The script's call; `None` for a plain command, [`Self::command`].
    pub(super) fn invocation(&self) -> Option<ScriptInvocation<'static>> {
        let (verb, buckets, amount, at_us) = match self {
            Self::Give { buckets, amount, at_us } => ("give", buckets, amount, *at_us),
            Self::Charge { buckets, amount } => ("charge", buckets, amount, 0),
            Self::Release { .. } => return None,
        };
        let mut invocation = CORRECT.prepare_invoke();
        invocation.arg(verb).arg(amount).arg(at_us);
        for SharedName { name, capacity } in buckets {
            invocation.key(name).arg(capacity);
        }
        Some(invocation)
    }

    /// The command of a release.
    pub(super) fn command(&self) -> Option<redis::Pipeline> {
        let Self::Release { sets, lease } = self else { return None };
        let mut pipeline = redis::pipe();
        sets.iter().for_each(|set| {
            pipeline.cmd("ZREM").arg(set).arg(lease).ignore();
        });
        Some(pipeline)
    }
}

/// Renews leases of one set.
pub(super) fn renewal<'a>(set: &str, leases: impl Iterator<Item = &'a str>) -> ScriptInvocation<'static> {
    let mut invocation = RENEW.prepare_invoke();
    invocation.key(set).arg(millis(LEASE));
    leases.for_each(|lease| {
        invocation.arg(lease);
    });
    invocation
}

/// The scripts, to load them before the first request needs them.
pub(super) fn scripts() -> [&'static Script; 3] {
    [&TAKE, &CORRECT, &RENEW]
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_that_no_script_gives_mean_nothing() {
        let name = |name: &str| SharedName { name: name.to_owned(), capacity: 9 };
        let (buckets, sets) = ([name("a"), name("b")], [name("c")]);
        let take = Take { amount: 1, buckets: &buckets, sets: &sets, lease: "l" };
        let us = Duration::from_micros;
        assert_eq!(
            take.read(&[0, 7, 1, 2]),
            Some(TakeReply::Taken { at_us: 7, until_full: vec![us(1), us(2)] })
        );
        assert_eq!(take.read(&[2, 5]), Some(TakeReply::Bucket(1, RateLimitError::RetryAfter(us(5)))));
        assert_eq!(take.read(&[-3, 0]), Some(TakeReply::Set(0)));
        for wrong in [
            &[][..],
            &[0],
            &[0, 7],
            &[0, 7, 1],
            &[0, 7, 1, 2, 3],
            &[0, 0, 1, 2],
            &[0, 7, 1, -1],
            &[0, 7, 1, i64::MAX],
            &[3, 5],
            &[1, -5],
            &[1, i64::MAX],
            &[-2, 0],
            &[-4, 0],
            &[i64::MIN, 0],
            &[i64::MAX, 0],
            &[1, 2, 3],
        ] {
            assert_eq!(take.read(wrong), None, "{wrong:?}");
        }
    }
}
