//! What a waiting stream sends: its head, and a line that clients skip, so that no proxy or client ends the connection.
//!
//! One timer serves the whole response. It is checked when it fires, not reset with each event.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pingora::http::ResponseHeader;
use tokio::time::{Instant, Sleep};

/// The comments of one response, between two of its events.
pub(crate) struct StreamComments {
    /// The head of the response, until it is sent.
    head: Option<Box<ResponseHeader>>,
    /// One comment, or an event without a meaning.
    line: &'static [u8],
    interval: Duration,
    /// When the response's last byte was sent; before that, when the wait began.
    since: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    /// A part of an event was sent, and its rest is due.
    is_inside_event: bool,
    /// A comment is not sent yet: the client reads nothing, and gets no second one.
    is_sending: bool,
}

/// What is sent now.
pub(super) struct DueComment {
    /// The response's head, before its first byte.
    pub head: Option<Box<ResponseHeader>>,
    pub line: &'static [u8],
}

impl StreamComments {
    pub(crate) fn new(head: ResponseHeader, line: &'static [u8], interval: Duration) -> Self {
        Self {
            head: Some(Box::new(head)),
            line,
            interval,
            since: Instant::now(),
            timer: None,
            is_inside_event: false,
            is_sending: false,
        }
    }

    /// A comment that is due.
    pub(super) fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<DueComment> {
        loop {
            let due = self.since + self.interval;
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(timer.as_mut().poll(context));
            if due > Instant::now() {
                timer.as_mut().reset(due);
                continue;
            }
            self.since = Instant::now();
            timer.as_mut().reset(self.since + self.interval);
            if !self.is_inside_event && !self.is_sending {
                self.is_sending = true;
                return Poll::Ready(DueComment { head: self.head.take(), line: self.line });
            }
        }
    }

    /// Whether a comment has to be sent.
    pub(super) fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// The client has all bytes so far.
    pub(super) fn sent(&mut self) {
        self.is_sending = false;
        self.since = Instant::now();
    }

    pub(super) fn set_inside_event(&mut self, is_inside: bool) {
        self.is_inside_event = is_inside;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(15);

    fn comments() -> StreamComments {
        let head = ResponseHeader::build_no_case(200, None).expect("a status");
        StreamComments::new(head, b": ka\n", INTERVAL)
    }

    /// The seconds from `begun` to the next comment, and whether the head precedes it.
    async fn next(comments: &mut StreamComments, begun: Instant) -> (u64, bool) {
        let due = poll_fn(|context| comments.poll_due(context)).await;
        assert_eq!(due.line, b": ka\n");
        (begun.elapsed().as_secs(), due.head.is_some())
    }

    #[tokio::test(start_paused = true)]
    async fn a_comment_follows_each_silence_and_only_the_first_has_the_head() {
        let (mut comments, begun) = (comments(), Instant::now());
        assert_eq!(next(&mut comments, begun).await, (15, true));
        comments.sent();
        assert_eq!(next(&mut comments, begun).await, (30, false));
        comments.sent();
        // An event at 40 s.
        tokio::time::advance(Duration::from_secs(10)).await;
        comments.sent();
        assert_eq!(next(&mut comments, begun).await, (55, false));
    }

    #[tokio::test(start_paused = true)]
    async fn no_comment_is_sent_inside_an_event_or_behind_an_unread_one() {
        let (mut comments, begun) = (comments(), Instant::now());
        comments.set_inside_event(true);
        let due = tokio::time::timeout(10 * INTERVAL, next(&mut comments, begun)).await;
        assert!(due.is_err());
        comments.set_inside_event(false);
        let (first, _) = next(&mut comments, begun).await;
        assert!(comments.is_sending());
        let due = tokio::time::timeout(10 * INTERVAL, next(&mut comments, begun)).await;
        assert!(due.is_err(), "the client has not read the first one");
        comments.sent();
        let (second, _) = next(&mut comments, begun).await;
        assert_eq!(second, first + 165);
    }
}
