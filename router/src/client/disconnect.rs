//! Every wait on behalf of a client ends when the client disconnects.
//!
//! Each wait of a request is raced against reads of the client's socket, which return its end. FIN and RST count
//! alike, and so does a half-close. Bytes of the client's next request are stored until this one is over. Beyond a
//! bound they stay unread, and the kernel is queried for an end behind them.
//!
//! Every wait of a stream is one of these, so the comments of a waiting stream are sent here too.
//!
//! The race must stop once the last byte of the response was read from the engine: a client with the whole
//! response may close.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use crate::client::session::{ClientGone, Session};

/// Runs `work` until it is done or the client disconnects. Of a body that was not read yet, a bounded part is stored
/// meanwhile.
///
/// `work` is the caller's: an `async fn` that takes a future by value has memory for it twice.
pub(crate) async fn race<F: Future>(
    session: &mut Session,
    mut work: Pin<&mut F>,
) -> Result<F::Output, ClientGone> {
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => session.poll_gone(context).map(|()| Err(ClientGone)),
    })
    .await
}
