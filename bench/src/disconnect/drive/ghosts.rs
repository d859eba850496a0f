//! Clients that vanish: whether they can here, what they ask for, and how long their requests may go on.
//!
//! A *ghost* is the request of a client that has vanished. The deployment may compute it until it ends by itself, or until
//! it has to notice. Ghosts keep their place among the clients of a phase, and no part of the run ends before them.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::disconnect::analyse::vanished::with_probes;
use crate::disconnect::drive::stall::{Pace, Stall};
use crate::disconnect::plan::phase::Kind;
use crate::disconnect::record::raw::CallRecord;
use crate::disconnect::record::watch::Feed;
use crate::disconnect::record::watch::room::Room;
use crate::load::{Client, FarHost};

/// The host that clients vanish from, where they are to.
pub(crate) enum Vanishing {
    NotAsked,
    Possible(Arc<FarHost>),
    NotHere(String),
}

impl Vanishing {
    pub(crate) async fn begin(kinds: &[Kind]) -> Self {
        if !kinds.contains(&Kind::Vanish) {
            return Self::NotAsked;
        }
        match tokio::task::spawn_blocking(FarHost::new).await {
            Ok(Ok(host)) => Self::Possible(Arc::new(host)),
            Ok(Err(why)) => Self::NotHere(why),
            Err(error) => Self::NotHere(error.to_string()),
        }
    }

    /// Where that host finds what is started here.
    pub(crate) fn near(&self) -> Option<Ipv4Addr> {
        match self {
            Self::Possible(host) => Some(host.near()),
            Self::NotAsked | Self::NotHere(_) => None,
        }
    }

    /// The same client, whose calls can vanish; or it, and they cannot.
    pub(crate) async fn client(&mut self, client: Client) -> Client {
        let Self::Possible(host) = self else { return client };
        match client.with_far(Arc::clone(host)).await {
            Ok(client) => client,
            Err(why) => {
                *self = Self::NotHere(why);
                client
            }
        }
    }

    /// Why clients do not vanish although they were to.
    pub(crate) fn why_not(&self) -> Option<&str> {
        match self {
            Self::NotHere(why) => Some(why),
            Self::NotAsked | Self::Possible(_) => None,
        }
    }

    /// The kinds that are played.
    ///
    /// # Errors
    /// When none is left.
    pub(crate) fn kinds(&self, asked: &[Kind]) -> Result<Vec<Kind>, String> {
        let Some(why) = self.why_not() else { return Ok(asked.to_vec()) };
        let kinds: Vec<_> = asked.iter().copied().filter(|kind| *kind != Kind::Vanish).collect();
        if kinds.is_empty() { Err(format!("no client can vanish here: {why}")) } else { Ok(kinds) }
    }
}

/// See the module's documentation.
pub(crate) struct Ghosts {
    /// A deployment has to notice within this time.
    noticed: Duration,
    /// And to have given back the blocks so much later.
    back: Duration,
    /// Of an answer that lasts longer than that; unset where there is no room for one.
    max_tokens: OnceLock<u32>,
    /// The last of them may be there until then. It includes the time in which a leak beyond the bound shows.
    until: Mutex<Option<Instant>>,
}

impl Ghosts {
    pub(crate) fn new(noticed_ms: u64, stranded_after_ms: u64) -> Self {
        let noticed = Duration::from_micros(with_probes(noticed_ms * 1_000));
        let back = Duration::from_millis(stranded_after_ms);
        Self { noticed, back, max_tokens: OnceLock::new(), until: Mutex::default() }
    }

    /// How long an answer has to be, if there is room for it beside `at_once` of its like.
    pub(crate) fn learn(&self, pace: &Pace, room: Room, usual: u32, at_once: usize) {
        let lasting = Stall::usual(usual, self.noticed + self.back);
        let found = lasting.of(pace, room, at_once);
        if found.hold == lasting.hold && found.max_tokens > usual {
            let _ = self.max_tokens.set(found.max_tokens);
        }
    }

    /// What a client asks for that vanishes when its answer has begun.
    pub(crate) fn max_tokens(&self, usual: u32) -> u32 {
        self.max_tokens.get().copied().unwrap_or(usual)
    }

    /// Returns when the request of this client, which has just vanished, is over on its engines, or should be. Without a
    /// feed, which tells that, at once where the answer was short.
    pub(crate) async fn while_there(&self, call: &CallRecord, feed: Option<&Feed>) {
        let there = self.noticed + self.back;
        {
            let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
            *until = (*until).max(Some(Instant::now() + there + self.back));
        }
        match feed {
            // It never came to an engine.
            Some(_) if call.sent_us.is_none() => {}
            Some(feed) => {
                drop(feed.until(&call.tag, there, |timeline| timeline.open().next().is_none()).await)
            }
            None if call.max_tokens.is_some() => tokio::time::sleep(self.noticed).await,
            None => {}
        }
    }

    /// How long engines get to come to rest now: as long as they would without ghosts, or longer.
    pub(crate) fn patience(&self, usual: Duration) -> Duration {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(usual, |until| usual.max(until.saturating_duration_since(Instant::now())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disconnect::record::raw::EventRecord;

    #[tokio::test]
    async fn where_clients_cannot_vanish_the_other_kinds_are_played_and_an_empty_rest_is_refused() {
        let not_here = Vanishing::NotHere("no root".into());
        assert_eq!(not_here.kinds(&[Kind::Fin, Kind::Vanish]), Ok(vec![Kind::Fin]));
        assert_eq!(not_here.kinds(&[Kind::Vanish]), Err("no client can vanish here: no root".into()));
        assert_eq!((not_here.why_not(), not_here.near()), (Some("no root"), None));
        let not_asked = Vanishing::begin(&[Kind::Fin, Kind::Rst]).await;
        assert!(matches!(not_asked, Vanishing::NotAsked) && not_asked.why_not().is_none());
    }

    #[test]
    fn an_answer_outlasts_what_a_deployment_may_take_to_notice_or_is_the_usual_one() {
        let asked = |ms_a_token, context| {
            let ghosts = Ghosts::new(20_000, 1_000);
            let pace = Pace::of_tokens(Duration::from_millis(ms_a_token), 168);
            ghosts.learn(&pace, Room { context: Some(context), pool: None }, 48, 10);
            ghosts.max_tokens(48)
        };
        // 22.5 s and one, twice over: 1,567 tokens of 30 ms.
        assert_eq!(asked(30, 32_768), 48 + 1_567);
        // No room for that: a shorter one would show nothing.
        assert_eq!(asked(30, 1_024), 48);
        assert_eq!(Ghosts::new(20_000, 1_000).max_tokens(48), 48);
    }

    #[tokio::test]
    async fn a_ghost_is_there_until_its_engines_are_done_with_it_and_a_part_waits_for_it() {
        let (ghosts, feed, second) = (Ghosts::new(3_600_000, 1_000), Feed::default(), Duration::from_secs(1));
        assert_eq!(ghosts.patience(second), second);
        let call = CallRecord { tag: "a".into(), sent_us: Some(1), ..CallRecord::default() };
        let tell = |kind: &str| {
            feed.tell(&EventRecord { tag: "a".into(), kind: kind.into(), ..EventRecord::default() });
        };
        tell("queued");
        let mut there = std::pin::pin!(ghosts.while_there(&call, Some(&feed)));
        assert!(futures::poll!(there.as_mut()).is_pending());
        tell("ended");
        there.await;
        assert!(ghosts.patience(second) > Duration::from_secs(3_600));
        // What was never sent is nowhere.
        ghosts.while_there(&CallRecord::default(), Some(&feed)).await;
    }
}
