//! Clients that vanish: whether that is possible here, the length of their requests, and how long the requests may
//! continue.
//!
//! The deployment may compute the request of a vanished client until it ends by itself or the deployment has to notice.
//! Such requests count as open clients of a phase, and no segment ends before them.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::disconnect::drive::stall::{CallPace, Stall};
use crate::disconnect::plan::phase::CancelKind;
use crate::disconnect::plan::vanish::add_probe_interval;
use crate::disconnect::record::raw::CallRecord;
use crate::disconnect::record::watch::TimelineFeed;
use crate::disconnect::record::watch::token_capacity::TokenCapacity;
use crate::load::{Client, FarHost};

/// The host from which clients vanish, if that is configured.
pub(crate) enum VanishSupport {
    NotRequested,
    Available(Arc<FarHost>),
    Unavailable(String),
}

impl VanishSupport {
    pub(crate) async fn begin(kinds: &[CancelKind]) -> Self {
        if !kinds.contains(&CancelKind::Vanish) {
            return Self::NotRequested;
        }
        match tokio::task::spawn_blocking(FarHost::new).await {
            Ok(Ok(host)) => Self::Available(Arc::new(host)),
            Ok(Err(why)) => Self::Unavailable(why),
            Err(error) => Self::Unavailable(error.to_string()),
        }
    }

    /// The address at which that host reaches processes of this machine.
    pub(crate) fn near(&self) -> Option<Ipv4Addr> {
        match self {
            Self::Available(host) => Some(host.near()),
            Self::NotRequested | Self::Unavailable(_) => None,
        }
    }

    /// The client, on a host that can vanish if one is available.
    pub(crate) async fn client(&mut self, client: Client) -> Client {
        let Self::Available(host) = self else { return client };
        match client.with_far(Arc::clone(host)).await {
            Ok(client) => client,
            Err(why) => {
                *self = Self::Unavailable(why);
                client
            }
        }
    }

    /// Why clients cannot vanish although that is configured.
    pub(crate) fn unavailable_reason(&self) -> Option<&str> {
        match self {
            Self::Unavailable(why) => Some(why),
            Self::NotRequested | Self::Available(_) => None,
        }
    }

    /// The possible kinds of cancels.
    ///
    /// # Errors
    /// If no kind remains.
    pub(crate) fn kinds(&self, asked: &[CancelKind]) -> Result<Vec<CancelKind>, String> {
        let Some(why) = self.unavailable_reason() else { return Ok(asked.to_vec()) };
        let kinds: Vec<_> = asked.iter().copied().filter(|kind| *kind != CancelKind::Vanish).collect();
        if kinds.is_empty() { Err(format!("no client can vanish here: {why}")) } else { Ok(kinds) }
    }
}

/// See the module's documentation.
pub(crate) struct VanishedClients {
    /// The deployment has to notice within this time.
    noticed: Duration,
    /// After that, the time until blocks are stranded.
    back: Duration,
    /// Tokens of a response that lasts longer than that; unset if there is no room for one.
    max_tokens: OnceLock<u32>,
    /// The last request of a vanished client may last until then, including the time in which a leak beyond the limit
    /// shows.
    until: Mutex<Option<Instant>>,
}

impl VanishedClients {
    pub(crate) fn new(noticed_ms: u64, stranded_after_ms: u64) -> Self {
        let noticed = Duration::from_micros(add_probe_interval(noticed_ms * 1_000));
        let back = Duration::from_millis(stranded_after_ms);
        Self { noticed, back, max_tokens: OnceLock::new(), until: Mutex::default() }
    }

    /// Sets the length of a response, if there is room for `at_once` of them.
    pub(crate) fn learn(&self, pace: &CallPace, capacity: TokenCapacity, usual: u32, at_once: usize) {
        let lasting = Stall::usual(usual, self.noticed + self.back);
        let found = lasting.of(pace, capacity, at_once);
        if found.hold == lasting.hold && found.max_tokens > usual {
            let _ = self.max_tokens.set(found.max_tokens);
        }
    }

    /// The tokens that a client requests that vanishes during its response.
    pub(crate) fn max_tokens(&self, usual: u32) -> u32 {
        self.max_tokens.get().copied().unwrap_or(usual)
    }

    /// Waits until the request of a client that has just vanished has ended on its engines, or should have ended.
    /// Without a feed it returns at once if the response was short.
    pub(crate) async fn wait_until_noticed(&self, call: &CallRecord, feed: Option<&TimelineFeed>) {
        let limit = self.noticed + self.back;
        {
            let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
            *until = (*until).max(Some(Instant::now() + limit + self.back));
        }
        match feed {
            // The request was not sent.
            Some(_) if call.sent_us.is_none() => {}
            Some(feed) => {
                drop(feed.until(&call.tag, limit, |timeline| timeline.unfinished().next().is_none()).await)
            }
            None if call.max_tokens.is_some() => tokio::time::sleep(self.noticed).await,
            None => {}
        }
    }

    /// The time that engines get to free their blocks: the usual time, or longer because of vanished clients.
    pub(crate) fn settle_timeout(&self, usual: Duration) -> Duration {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(usual, |until| usual.max(until.saturating_duration_since(Instant::now())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disconnect::record::raw::EventRecord;

    #[tokio::test]
    async fn without_vanish_support_the_other_kinds_run_and_an_empty_list_is_refused() {
        let unavailable = VanishSupport::Unavailable("no root".into());
        assert_eq!(unavailable.kinds(&[CancelKind::Fin, CancelKind::Vanish]), Ok(vec![CancelKind::Fin]));
        assert_eq!(
            unavailable.kinds(&[CancelKind::Vanish]),
            Err("no client can vanish here: no root".into())
        );
        assert_eq!((unavailable.unavailable_reason(), unavailable.near()), (Some("no root"), None));
        let not_requested = VanishSupport::begin(&[CancelKind::Fin, CancelKind::Rst]).await;
        assert!(
            matches!(not_requested, VanishSupport::NotRequested)
                && not_requested.unavailable_reason().is_none()
        );
    }

    #[test]
    fn an_answer_outlasts_what_a_deployment_may_take_to_notice_or_is_the_usual_one() {
        let asked = |ms_a_token, context| {
            let vanished = VanishedClients::new(20_000, 1_000);
            let pace = CallPace::of_tokens(Duration::from_millis(ms_a_token), 168);
            vanished.learn(&pace, TokenCapacity { context: Some(context), pool: None }, 48, 10);
            vanished.max_tokens(48)
        };
        // 22.5 s and one, twice: 1,567 tokens of 30 ms.
        assert_eq!(asked(30, 32_768), 48 + 1_567);
        // No room for that: a shorter response would show nothing.
        assert_eq!(asked(30, 1_024), 48);
        assert_eq!(VanishedClients::new(20_000, 1_000).max_tokens(48), 48);
    }

    #[tokio::test]
    async fn a_segment_waits_for_the_engines_of_a_vanished_client() {
        let (vanished, feed, second) =
            (VanishedClients::new(3_600_000, 1_000), TimelineFeed::default(), Duration::from_secs(1));
        assert_eq!(vanished.settle_timeout(second), second);
        let call = CallRecord { tag: "a".into(), sent_us: Some(1), ..CallRecord::default() };
        let tell = |kind: &str| {
            feed.publish(&EventRecord { tag: "a".into(), kind: kind.into(), ..EventRecord::default() });
        };
        tell("queued");
        let mut waiting = std::pin::pin!(vanished.wait_until_noticed(&call, Some(&feed)));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        tell("ended");
        waiting.await;
        assert!(vanished.settle_timeout(second) > Duration::from_secs(3_600));
        // A request that was not sent ends at once.
        vanished.wait_until_noticed(&CallRecord::default(), Some(&feed)).await;
    }
}
