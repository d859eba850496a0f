//! The messages between the actors.
//!
//! The network holds a set of messages and delivers any of them next, in any order and with any delay, also to an actor
//! that has restarted meanwhile. Two orders hold, because one connection carries both messages: a response's head comes
//! before its end, and a request comes before the end of its connection ([`Message::waits_for`]).

use std::fmt;

use baton_connector::fetch::Verification;

use crate::names::{LeaseName, ReaderName, Renaming, Req, shown};
use crate::router::{DecodeReply, PrefillReply, StreamEnd};

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
    Prefilled(Req, u8, PrefillReply),
    /// The end of a response after an early lease: sealed, or not.
    PrefillEnds(Req, u8, Option<LeaseName>),
    Verdict(ReaderName, Verification),
    LeaseGone(ReaderName),
    // From a decode engine.
    Decoded(Req, u8, DecodeReply),
    Streamed(Req, u8, StreamEnd),
    /// The release notice of this decode engine.
    Notice(u8, LeaseName),
    ReaderDeparts(ReaderName, LeaseName),
}

/// The effect of the loss of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// No effect: the sender's retries are exhausted, or nothing waits for the message.
    Vanishes,
    /// The waiting actor sees the connection break.
    Becomes(Message),
    /// The same, and the sender sees the break too.
    BecomesBoth(Message, Message),
    /// The message stands for a break already.
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
            Self::Prefilled(r, p, PrefillReply::Lent(of)) => {
                Self::Prefilled(by.req(r), by.prefill(p), PrefillReply::Lent(lease(of)))
            }
            Self::Prefilled(r, p, PrefillReply::Lending(of)) => {
                Self::Prefilled(by.req(r), by.prefill(p), PrefillReply::Lending(lease(of)))
            }
            Self::Prefilled(r, p, what) => Self::Prefilled(by.req(r), by.prefill(p), what),
            Self::PrefillEnds(r, p, of) => Self::PrefillEnds(by.req(r), by.prefill(p), of.map(lease)),
            Self::Verdict(reader, answer) => Self::Verdict(reader.renamed(by), answer),
            Self::LeaseGone(reader) => Self::LeaseGone(reader.renamed(by)),
            Self::Decoded(r, d, what) => Self::Decoded(by.req(r), by.decode(d), what),
            Self::Streamed(r, d, how) => Self::Streamed(by.req(r), by.decode(d), how),
            Self::Notice(d, of) => Self::Notice(by.decode(d), lease(of)),
            Self::ReaderDeparts(reader, of) => Self::ReaderDeparts(reader.renamed(by), lease(of)),
        }
    }

    /// Whether the message can only arrive after another that is still on its way.
    pub(crate) fn waits_for(self, other: Self) -> bool {
        match (self, other) {
            (Self::HangUpPrefill(r, p), Self::Prefill(r2, p2)) => (r, p) == (r2, p2),
            (Self::HangUpDecode(r, d), Self::Decode(r2, d2, _)) => (r, d) == (r2, d2),
            (Self::PrefillEnds(r, p, _), Self::Prefilled(r2, p2, _)) => (r, p) == (r2, p2),
            (Self::Streamed(r, d, _), Self::Decoded(r2, d2, _)) => (r, d) == (r2, d2),
            _ => false,
        }
    }

    /// Whether the sender repeats the message until it is answered, so that it can arrive twice.
    pub(crate) fn is_repeated(self) -> bool {
        match self {
            Self::AbortPrefill(..)
            | Self::Release(_)
            | Self::AbortDecode(..)
            | Self::Notice(..)
            | Self::ReaderDeparts(..)
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

    /// Whether the router keeps the message in memory until it is delivered, and loses it in a crash.
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
            Self::Prefill(r, p) => Loss::Becomes(Self::Prefilled(r, p, PrefillReply::Broken)),
            Self::Prefilled(_, _, PrefillReply::Broken | PrefillReply::NotReached)
            | Self::Decoded(_, _, DecodeReply::Broken | DecodeReply::NotReached)
            | Self::Streamed(_, _, StreamEnd::Broken)
            | Self::PrefillEnds(_, _, None)
            | Self::Verdict(_, Verification::Unknown) => Loss::Impossible,
            // The prefill engine writes on, and detects the break.
            Self::Prefilled(r, p, PrefillReply::Lending(_)) => {
                Loss::BecomesBoth(Self::Prefilled(r, p, PrefillReply::Broken), Self::HangUpPrefill(r, p))
            }
            Self::PrefillEnds(r, p, Some(_)) => Loss::Becomes(Self::PrefillEnds(r, p, None)),
            // The engine takes its response for delivered.
            Self::Prefilled(r, p, _) => Loss::Becomes(Self::Prefilled(r, p, PrefillReply::Broken)),
            Self::Decode(r, d, _) => Loss::Becomes(Self::Decoded(r, d, DecodeReply::Broken)),
            Self::Decoded(r, d, DecodeReply::Accepted) => {
                Loss::BecomesBoth(Self::Decoded(r, d, DecodeReply::Broken), Self::HangUpDecode(r, d))
            }
            Self::Decoded(r, d, _) => Loss::Becomes(Self::Decoded(r, d, DecodeReply::Broken)),
            Self::Streamed(r, d, _) => Loss::Becomes(Self::Streamed(r, d, StreamEnd::Broken)),
            Self::Verdict(reader, _) => Loss::Becomes(Self::Verdict(reader, Verification::Unknown)),
            Self::AbortPrefill(..)
            | Self::Release(_)
            | Self::HangUpPrefill(..)
            | Self::AbortDecode(..)
            | Self::HangUpDecode(..)
            | Self::LeaseGone(_)
            | Self::Notice(..)
            | Self::ReaderDeparts(..) => Loss::Vanishes,
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
            Self::Prefilled(r, p, what) => write!(f, "{} → router: {} {}", p_(p), req(r), reply_text(what)),
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
            Self::ReaderDeparts(reader, of) => {
                write!(f, "{} ✕ {}: rank {} reads {of} no more", d_(reader.d), p_(of.p), reader.rank)
            }
        }
    }
}

fn reply_text(what: PrefillReply) -> String {
    match what {
        PrefillReply::Lent(lease) => format!("is lent: {lease}"),
        PrefillReply::Lending(lease) => format!("is lent while it is computed: {lease}"),
        other => format!("{other:?}"),
    }
}
