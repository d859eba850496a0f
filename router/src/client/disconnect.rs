//! Everything that is awaited for a client is awaited only for as long as the client is there.
//!
//! Every wait of a request is raced against reads of the client's socket, which bring its end (FIN and RST alike; a
//! half-close counts as leaving). Bytes of its next request are kept for when this one is over; beyond a bound they stay
//! unread, and the system is asked whether an end is behind them.
//!
//! The race must stop once the last byte of the answer has been read from the engine: a client may close the moment it has
//! the answer.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::client::session::{ClientGone, Session};

/// Runs `work` until it is done or the client leaves. Its body must have been read.
///
/// # Cancel safety
/// `work` is dropped when the client leaves; pass `&mut future` to keep it.
pub(crate) async fn race<F: Future>(session: &Session, work: F) -> Result<F::Output, ClientGone> {
    let mut work = pin!(work);
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => session.poll_gone(context).map(|()| Err(ClientGone)),
    })
    .await
}
