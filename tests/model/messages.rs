//! What is on its way between the parties.
//!
//! The network holds a set of messages and delivers any of them next, in any order, however late, also to a party that
//! has restarted meanwhile. Two orders hold, because one connection carries both: an answer's head comes before its
//! end, and a request comes before the end of its connection ([`Message::waits_for`]).

use std::fmt;

use baton_connector::fetch::Answer;

use crate::names::{LeaseName, ReaderName, Renaming, Req, shown};
use crate::router::{Decoded, Prefilled, Streamed};

/// One message on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Message {
    // From the router.
    Prefill(Req, u8),
    AbortPrefill(Req, u8),
    Release(LeaseName),
    HangUpPrefill(Req, u8),
    Decode(Req, u8, Option<LeaseName>),
    AbortDecode(Req, u8),
    HangUpDecode(Req, u8),
    // From a prefill engine.
    Prefilled(Req, u8, Prefilled),
    /// The end of an answer that had lent before: sealed, or not.
    PrefillEnds(Req, u8, Option<LeaseName>),
    Verdict(ReaderName, Answer),
    LeaseGone(ReaderName),
    // From a decode engine.
    Decoded(Req, u8, Decoded),
    Streamed(Req, u8, Streamed),
    /// The release notice of this decode engine.
    Notice(u8, LeaseName),
    ReaderLeaves(ReaderName, LeaseName),
}

/// What becomes of a message that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// It was the last thing said of it: its sender's tries are spent, or nobody noticed.
    Vanishes,
    /// Somebody who waits sees the connection break.
    Becomes(Message),
    /// The same, and the sender sees it too.
    BecomesBoth(Message, Message),
    /// It stands for a break already.
    Impossible,
}

impl Message {
    pub(crate) fn renamed(self, by: Renaming) -> Self {
        let lease = |lease: LeaseName| lease.renamed(by);
        match self {
            Self::Prefill(r, p) => Self::Prefill(by.req(r), by.prefill(p)),
            Self::AbortPrefill(r, p) => Self::AbortPrefill(by.req(r), by.prefill(p)),
            Self::Release(of) => Self::Release(lease(of)),
            Self::HangUpPrefill(r, p) => Self::HangUpPrefill(by.req(r), by.prefill(p)),
            Self::Decode(r, d, of) => Self::Decode(by.req(r), by.decode(d), of.map(lease)),
            Self::AbortDecode(r, d) => Self::AbortDecode(by.req(r), by.decode(d)),
            Self::HangUpDecode(r, d) => Self::HangUpDecode(by.req(r), by.decode(d)),
            Self::Prefilled(r, p, Prefilled::Lent(of)) => {
                Self::Prefilled(by.req(r), by.prefill(p), Prefilled::Lent(lease(of)))
            }
            Self::Prefilled(r, p, Prefilled::Lending(of)) => {
                Self::Prefilled(by.req(r), by.prefill(p), Prefilled::Lending(lease(of)))
            }
            Self::Prefilled(r, p, what) => Self::Prefilled(by.req(r), by.prefill(p), what),
            Self::PrefillEnds(r, p, of) => Self::PrefillEnds(by.req(r), by.prefill(p), of.map(lease)),
            Self::Verdict(reader, answer) => Self::Verdict(reader.renamed(by), answer),
            Self::LeaseGone(reader) => Self::LeaseGone(reader.renamed(by)),
            Self::Decoded(r, d, what) => Self::Decoded(by.req(r), by.decode(d), what),
            Self::Streamed(r, d, how) => Self::Streamed(by.req(r), by.decode(d), how),
            Self::Notice(d, of) => Self::Notice(by.decode(d), lease(of)),
            Self::ReaderLeaves(reader, of) => Self::ReaderLeaves(reader.renamed(by), lease(of)),
        }
    }

    /// Whether it can only arrive after another that is still on its way.
    pub(crate) fn waits_for(self, other: Self) -> bool {
        match (self, other) {
            (Self::HangUpPrefill(r, p), Self::Prefill(r2, p2)) => (r, p) == (r2, p2),
            (Self::HangUpDecode(r, d), Self::Decode(r2, d2, _)) => (r, d) == (r2, d2),
            (Self::PrefillEnds(r, p, _), Self::Prefilled(r2, p2, _)) => (r, p) == (r2, p2),
            (Self::Streamed(r, d, _), Self::Decoded(r2, d2, _)) => (r, d) == (r2, d2),
            _ => false,
        }
    }

    /// Whether its sender repeats it until it is answered, so that it can arrive twice.
    pub(crate) fn is_repeated(self) -> bool {
        match self {
            Self::AbortPrefill(..)
            | Self::Release(_)
            | Self::AbortDecode(..)
            | Self::Notice(..)
            | Self::ReaderLeaves(..)
            | Self::LeaseGone(_) => true,
            Self::Prefill(..)
            | Self::HangUpPrefill(..)
            | Self::Decode(..)
            | Self::HangUpDecode(..)
            | Self::Prefilled(..)
            | Self::PrefillEnds(..)
            | Self::Verdict(..)
            | Self::Decoded(..)
            | Self::Streamed(..) => false,
        }
    }

    /// Whether it is in the router's memory until it has been delivered, and dies with it.
    pub(crate) fn is_of_router(self) -> bool {
        matches!(
            self,
            Self::Prefill(..)
                | Self::AbortPrefill(..)
                | Self::Release(_)
                | Self::Decode(..)
                | Self::AbortDecode(..)
        )
    }

    /// The same for a decode engine.
    pub(crate) fn is_of_decode(self, d: u8) -> bool {
        matches!(self, Self::Notice(of, _) if of == d)
    }

    pub(crate) fn loss(self) -> Loss {
        match self {
            Self::Prefill(r, p) => Loss::Becomes(Self::Prefilled(r, p, Prefilled::Broken)),
            Self::Prefilled(_, _, Prefilled::Broken | Prefilled::NotReached)
            | Self::Decoded(_, _, Decoded::Broken | Decoded::NotReached)
            | Self::Streamed(_, _, Streamed::Broken)
            | Self::PrefillEnds(_, _, None)
            | Self::Verdict(_, Answer::Unknown) => Loss::Impossible,
            // It writes on, and finds out.
            Self::Prefilled(r, p, Prefilled::Lending(_)) => {
                Loss::BecomesBoth(Self::Prefilled(r, p, Prefilled::Broken), Self::HangUpPrefill(r, p))
            }
            Self::PrefillEnds(r, p, Some(_)) => Loss::Becomes(Self::PrefillEnds(r, p, None)),
            // The engine believes that its answer has arrived.
            Self::Prefilled(r, p, _) => Loss::Becomes(Self::Prefilled(r, p, Prefilled::Broken)),
            Self::Decode(r, d, _) => Loss::Becomes(Self::Decoded(r, d, Decoded::Broken)),
            Self::Decoded(r, d, Decoded::Accepted) => {
                Loss::BecomesBoth(Self::Decoded(r, d, Decoded::Broken), Self::HangUpDecode(r, d))
            }
            Self::Decoded(r, d, _) => Loss::Becomes(Self::Decoded(r, d, Decoded::Broken)),
            Self::Streamed(r, d, _) => Loss::Becomes(Self::Streamed(r, d, Streamed::Broken)),
            Self::Verdict(reader, _) => Loss::Becomes(Self::Verdict(reader, Answer::Unknown)),
            Self::AbortPrefill(..)
            | Self::Release(_)
            | Self::HangUpPrefill(..)
            | Self::AbortDecode(..)
            | Self::HangUpDecode(..)
            | Self::LeaseGone(_)
            | Self::Notice(..)
            | Self::ReaderLeaves(..) => Loss::Vanishes,
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let req = shown;
        let (p_, d_) = (|p: u8| format!("P{}", p + 1), |d: u8| format!("D{}", d + 1));
        match *self {
            Self::Prefill(r, p) => write!(f, "router → {}: prefill {}", p_(p), req(r)),
            Self::AbortPrefill(r, p) => write!(f, "router → {}: abort {}", p_(p), req(r)),
            Self::Release(of) => write!(f, "router → {}: release {of}", p_(of.p)),
            Self::HangUpPrefill(r, p) => write!(f, "router ✕ {}: connection of {} closed", p_(p), req(r)),
            Self::Decode(r, d, Some(of)) => write!(f, "router → {}: decode {} from {of}", d_(d), req(r)),
            Self::Decode(r, d, None) => write!(f, "router → {}: compute all of {}", d_(d), req(r)),
            Self::AbortDecode(r, d) => write!(f, "router → {}: abort {}", d_(d), req(r)),
            Self::HangUpDecode(r, d) => write!(f, "router ✕ {}: connection of {} closed", d_(d), req(r)),
            Self::Prefilled(r, p, what) => write!(f, "{} → router: {} {}", p_(p), req(r), said(what)),
            Self::PrefillEnds(r, p, of) => {
                let how = if of.is_some() { "all is computed" } else { "ends before its prefill" };
                write!(f, "{} → router: {} {how}", p_(p), req(r))
            }
            Self::Verdict(reader, answer) => {
                write!(f, "P → {}: the read for {} is {answer:?}", d_(reader.d), req(reader.req))
            }
            Self::LeaseGone(reader) => {
                write!(f, "P → {}: heartbeat for {}: gone", d_(reader.d), req(reader.req))
            }
            Self::Decoded(r, d, what) => write!(f, "{} → router: {} {what:?}", d_(d), req(r)),
            Self::Streamed(r, d, how) => write!(f, "{} → router: text of {} {how:?}", d_(d), req(r)),
            Self::Notice(d, of) => write!(f, "{} → {}: release {of}", d_(d), p_(of.p)),
            Self::ReaderLeaves(reader, of) => {
                write!(f, "{} ✕ {}: rank {} reads {of} no more", d_(reader.d), p_(of.p), reader.rank)
            }
        }
    }
}

fn said(what: Prefilled) -> String {
    match what {
        Prefilled::Lent(lease) => format!("is lent: {lease}"),
        Prefilled::Lending(lease) => format!("is lent while it is computed: {lease}"),
        other => format!("{other:?}"),
    }
}
