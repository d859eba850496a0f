//! An answer that is not streamed: held until it is complete, or passed on as it comes where there is no room for that.
//!
//! Either way a 200 that is an error, a page, cut or empty is no answer. What is held becomes an error with its status. Of
//! what is passed on the beginning is read before anything is sent; behind that only the connection's end can say it.

use bytes::{Bytes, BytesMut};
use pingora::http::ResponseHeader;

use super::{Broken, Passing};
use crate::client::session::Length;
use crate::engines::body_budget::Held;
use crate::legs::outcome::Ended;
use crate::message::error_inside::{ERROR_BYTES_MAX, Unfit, unfit};
use crate::message::usage::Skim;

/// An answer is held up to this size, and within what all of them may take together. The tokens of the longest context,
/// with their texts. An engine sends such an answer when it has all of it, so that holding delays nothing, and its place is
/// free at once however slowly the client reads.
const HELD_BYTES_MAX: usize = 64 << 20;

impl Passing<'_> {
    pub(super) async fn held(&mut self, head: ResponseHeader) -> Result<(), Ended> {
        let mut held = Bytes::new();
        // Until the client has everything.
        let mut share = None;
        loop {
            let room = match self.chunk().await? {
                // In one piece, as it mostly is, it is neither copied nor counted: one read brought it.
                Ok(Some(chunk)) if held.is_empty() => {
                    held = chunk;
                    continue;
                }
                Ok(Some(chunk)) => {
                    let joined = joined(held, &chunk);
                    let room = joined.capacity();
                    held = joined.freeze();
                    room
                }
                Ok(None) => break,
                Err(broken) => return Err(self.refused(broken)),
            };
            if held.len() > HELD_BYTES_MAX || self.driver.hold_answer(&mut share, room).is_err() {
                return self.passed(head, held, share).await;
            }
        }
        let skim = Skim::of(&held);
        if let Some(broken) = self.unfit(&held, &skim) {
            return Err(self.refused(broken));
        }
        self.served();
        self.commit(head, Length::Known(held.len())).await?;
        self.write(held, true).await
    }

    /// An answer too large to hold. Its end in the middle can only be told by the connection's: no last chunk is sent, and
    /// the connection is closed.
    async fn passed(
        &mut self,
        head: ResponseHeader,
        mut begun: Bytes,
        share: Option<Held>,
    ) -> Result<(), Ended> {
        let mut skim = Box::new(Skim::of(&begun));
        // An error is short, and is held whatever else is.
        while skim.begins_error() && begun.len() <= ERROR_BYTES_MAX {
            match self.chunk().await? {
                Ok(Some(chunk)) => {
                    skim.feed(&chunk);
                    begun = joined(begun, &chunk).freeze();
                }
                Ok(None) => break,
                Err(broken) => return Err(self.refused(broken)),
            }
        }
        if skim.begins_error() || self.dialect.generates() && skim.is_no_object() {
            let broken = self.unfit(&begun, &skim).unwrap_or(Broken::Died);
            return Err(self.refused(broken));
        }
        self.commit(head, Length::Unknown).await?;
        self.write(begun, false).await?;
        // What was held is with the client.
        drop(share);
        loop {
            match self.chunk().await? {
                Ok(Some(chunk)) => {
                    skim.feed(&chunk);
                    if skim.begins_error() {
                        break;
                    }
                    self.write(chunk, false).await?;
                }
                Ok(None) => break,
                Err(broken) => {
                    self.ended_early(&broken);
                    return Ok(());
                }
            }
        }
        // Of an error here its words are not wanted: the client has the head of an answer.
        let broken = self.unfit(&Bytes::new(), &skim).or_else(|| skim.begins_error().then_some(Broken::Died));
        if let Some(broken) = broken {
            self.ended_early(&broken);
            return Ok(());
        }
        self.served();
        self.write(Bytes::new(), true).await
    }

    /// Whether a whole answer is none, or an error; notes what it says.
    fn unfit(&mut self, whole: &Bytes, skim: &Skim) -> Option<Broken> {
        self.driver.watched.seen.note(skim);
        let kind = self.reply.as_ref().and_then(|reply| reply.content_type());
        match unfit(whole, skim, kind, self.dialect.generates())? {
            Unfit::Error(error) => Some(self.told(error)),
            Unfit::Broken => Some(Broken::Died),
        }
    }

    /// The answer is none, and the client has nothing of it.
    fn refused(&mut self, broken: Broken) -> Ended {
        self.ended_early(&broken);
        Ended::Refused(broken.refusal())
    }
}

/// Both pieces as one.
fn joined(first: Bytes, second: &[u8]) -> BytesMut {
    let mut joined = first.try_into_mut().unwrap_or_else(|first| BytesMut::from(&*first));
    joined.extend_from_slice(second);
    joined
}
