//! The body of a request to an engine: one piece, or several that are never copied together.
//!
//! One vectored write sends all available pieces, and the head contains their exact length.

use std::sync::Arc;

use bytes::Bytes;

/// A body. It is cheap to clone, so that it can be sent to another engine.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    One(Bytes),
    Many(Arc<[Bytes]>),
}

impl Payload {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_order() {
        for (pieces, whole) in [(vec![], ""), (vec!["abc"], "abc"), (vec!["a", "", "bc", ""], "abc")] {
            let payload = Payload::from(pieces.into_iter().map(Bytes::from).collect::<Vec<_>>());
            assert_eq!(payload.pieces().concat(), whole.as_bytes());
        }
    }
}
