//! The body of a request to an engine: one piece, or several that are never copied together.
//!
//! hyper writes what is ready of them with one vectored write, and says their exact length in the head.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// A body. Cheap to clone, so that another engine can be sent the same.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    One(Bytes),
    Many(Arc<[Bytes]>),
}

/// A body on its way.
#[derive(Debug)]
pub(crate) struct Sending {
    payload: Payload,
    next: usize,
    left_bytes: u64,
}

impl Payload {
    pub(crate) fn sending(&self) -> Sending {
        let left_bytes = self.pieces().iter().map(|piece| piece.len() as u64).sum();
        Sending { payload: self.clone(), next: 0, left_bytes }
    }

    pub(crate) fn pieces(&self) -> &[Bytes] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

impl From<Bytes> for Payload {
    fn from(piece: Bytes) -> Self {
        Self::One(piece)
    }
}

impl From<Vec<Bytes>> for Payload {
    fn from(mut pieces: Vec<Bytes>) -> Self {
        match pieces.len() {
            0 => Self::One(Bytes::new()),
            1 => Self::One(pieces.swap_remove(0)),
            _ => Self::Many(pieces.into()),
        }
    }
}

impl Body for Sending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        while let Some(piece) = self.payload.pieces().get(self.next).cloned() {
            self.next += 1;
            if !piece.is_empty() {
                self.left_bytes -= piece.len() as u64;
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.left_bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left_bytes)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn pieces_are_sent_in_order_under_their_exact_length() {
        for (pieces, whole) in [(vec![], ""), (vec!["abc"], "abc"), (vec!["a", "", "bc", ""], "abc")] {
            let payload = Payload::from(pieces.into_iter().map(Bytes::from).collect::<Vec<_>>());
            let body = payload.sending();
            assert_eq!(body.size_hint().exact(), Some(whole.len() as u64));
            assert_eq!(body.is_end_stream(), whole.is_empty());
            assert_eq!(body.collect().await.unwrap().to_bytes(), whole);
        }
    }
}
