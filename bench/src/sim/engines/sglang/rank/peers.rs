//! Messages of the other leg's engine, and what a leg's end means for it.

use std::borrow::Cow;
use std::time::Duration;

use baton_connector_leases::event_log::RequestEvent;

use super::{Drain, EndCause, LegPhase, RankAction, RankLegEnd, SglangRank, TimerOf, us};
use crate::sim::engines::pool::BlockHolder;
use crate::sim::engines::sglang::message::{DecodeLeg, Envelope, LegTicket, PeerMessage, PeerRank};
use crate::sim::engines::sglang::plan::AbortExchange;

/// The reason of a leg whose peer's leg was aborted or failed.
const PEER_ENDED: &str = "Aborted by the decode engine";

impl SglangRank {
    pub(super) fn send(&mut self, to: PeerRank, message: PeerMessage) {
        self.actions.push(RankAction::Send(to.at, Envelope { rank: to.rank, message }));
    }

    /// A message has arrived. Late and repeated ones change nothing.
    pub(in crate::sim::engines::sglang) fn receive(&mut self, message: PeerMessage, now_us: u64) {
        match message {
            PeerMessage::Metadata { room, from, pages } => {
                let waiting = self.rooms.set_peer(room, from, pages);
                if let Some(ticket) = waiting
                    && self.leg(ticket).phase == LegPhase::Bootstrapping
                {
                    self.queue(ticket);
                }
            }
            PeerMessage::Abort { room, from } => self.peer_aborted(room, from, now_us),
            PeerMessage::Written { room, leg, pages, contents, word } => {
                for (page, content) in pages.into_iter().zip(contents) {
                    // A write into memory asks for no permission, and none is outside the pool.
                    if (page as usize) < self.traits.plan.blocks {
                        self.pool.contents().write(page, content);
                    }
                }
                if let Some(word) = word {
                    self.landed(room, leg, word, now_us);
                }
            }
            PeerMessage::Failed { room, leg: ticket, reason } => {
                let ours = |leg: &super::SglangLeg| {
                    leg.sent.room == room
                        && matches!(leg.phase, LegPhase::Preallocating | LegPhase::Transferring)
                };
                if self.legs.get(&ticket).is_some_and(ours) {
                    self.fail(ticket, &reason, EndCause::Peer, now_us);
                }
            }
            PeerMessage::AbortAck { leg } => {
                if matches!(self.drains.get(&leg), Some(Drain::Pages { .. })) {
                    self.end_drain(leg);
                }
            }
        }
    }

    /// P: D's leg has ended. The acknowledgement waits for a write in flight.
    fn peer_aborted(&mut self, room: u64, from: DecodeLeg, now_us: u64) {
        if self.traits.plan.faults.never_aborts_prefill {
            return;
        }
        if let Some(ticket) = self.rooms.abort(room) {
            match self.leg(ticket).phase {
                LegPhase::Running => {
                    self.log_abort(ticket, EndCause::Peer);
                    self.leg(ticket).aborting.get_or_insert(EndCause::Peer);
                }
                LegPhase::Bootstrapping
                | LegPhase::Preallocating
                | LegPhase::Transferring
                | LegPhase::Waiting => self.fail(ticket, PEER_ENDED, EndCause::Peer, now_us),
                LegPhase::Done => {}
            }
        }
        let writes = self.drains.values_mut().find_map(|drain| match drain {
            Drain::Write { to, acks, .. } if *to == from => Some(acks),
            Drain::Write { .. } | Drain::Pages { .. } => None,
        });
        match writes {
            Some(acks) => *acks = true,
            None => self.send(from.peer, PeerMessage::AbortAck { leg: from.leg }),
        }
    }

    /// P: a leg that computed when D's ended.
    pub(super) fn fail_running(&mut self, ticket: LegTicket, now_us: u64) {
        self.fail(ticket, PEER_ENDED, EndCause::Peer, now_us);
    }

    /// D: P has written all pages and the first token.
    fn landed(&mut self, room: u64, ticket: LegTicket, word: String, now_us: u64) {
        let waits = self.legs.get(&ticket).is_some_and(|leg| leg.phase == LegPhase::Transferring);
        // A room of 0 in the metadata means that nothing was written yet.
        if !waits || room == 0 || self.legs[&ticket].sent.room != room {
            return;
        }
        self.emit(ticket, RequestEvent::Fetched("landed"));
        let leg = self.leg(ticket);
        leg.there = leg.sent.prompt;
        let (blocks, there) = (leg.pages.len(), leg.there);
        self.pool.become_of(blocks, BlockHolder::Landing, BlockHolder::Active);
        self.rooms.close(room, ticket);
        self.queue(ticket);
        self.emit(ticket, RequestEvent::Started(there));
        self.add_word(ticket, Cow::Owned(word));
        self.end_if_complete(ticket, now_us);
    }

    /// D: P's rank is known, or P cannot be reached.
    pub(in crate::sim::engines::sglang) fn resolved(
        &mut self,
        ticket: LegTicket,
        found: Result<PeerRank, String>,
        now_us: u64,
    ) {
        if self.legs.get(&ticket).is_none_or(|leg| leg.phase != LegPhase::Preallocating) {
            return;
        }
        match found {
            Ok(prefill) => self.leg(ticket).prefill = Some(prefill),
            Err(reason) => self.fail(ticket, &reason, EndCause::Error, now_us),
        }
    }

    /// D: reserves pages for the whole response, in order, and sends their indices to P.
    pub(super) fn preallocate(&mut self, now_us: u64) {
        for ticket in self.opening.clone() {
            let leg = &self.legs[&ticket];
            let Some(prefill) = leg.prefill else { continue };
            let (room, tokens) = (leg.sent.room, leg.sent.prompt + leg.sent.max_tokens);
            let size = self.traits.plan.block_tokens;
            let prompt_pages = leg.sent.prompt.div_ceil(size);
            let Some(pages) = self.pool.take(tokens.div_ceil(size), BlockHolder::Landing) else { return };
            self.opening.retain(|of| *of != ticket);
            let from = self.decode_leg(ticket);
            let written = pages[..prompt_pages].to_vec();
            self.emit(ticket, RequestEvent::Fetching(pages.len()));
            let leg = self.leg(ticket);
            (leg.phase, leg.pages, leg.since_us) = (LegPhase::Transferring, pages, now_us);
            self.set_timer(ticket, now_us + us(self.traits.waits.waiting));
            self.send(prefill, PeerMessage::Metadata { room, from, pages: written });
        }
    }

    /// D: no engine listens at P's address, so P cannot have begun to write.
    pub(in crate::sim::engines::sglang) fn metadata_lost(&mut self, ticket: LegTicket, now_us: u64) {
        if self.legs.get(&ticket).is_some_and(|leg| leg.phase == LegPhase::Transferring) {
            self.leg(ticket).prefill = None;
            self.fail(ticket, "Failed to send metadata to the prefill engine", EndCause::Error, now_us);
        }
    }

    fn decode_leg(&self, ticket: LegTicket) -> DecodeLeg {
        let peer = PeerRank { at: self.traits.at, rank: self.traits.number };
        DecodeLeg { peer, leg: ticket }
    }

    /// D: heartbeats to this bootstrap server failed. Every leg that waits for its engine fails.
    pub(in crate::sim::engines::sglang) fn prefill_lost(&mut self, bootstrap: &str, now_us: u64) {
        let waits = |leg: &super::SglangLeg| {
            leg.sent.bootstrap == bootstrap
                && matches!(leg.phase, LegPhase::Preallocating | LegPhase::Transferring)
        };
        let mut lost: Vec<_> =
            self.legs.iter().filter(|(_, leg)| waits(leg)).map(|(ticket, _)| *ticket).collect();
        lost.sort_unstable();
        let reason = format!("Losing connection with prefill instance (bootstrap_addr: {bootstrap})");
        for ticket in lost {
            self.fail(ticket, &reason, EndCause::Error, now_us);
        }
    }

    /// P: the pages and the peer of a leg that has ended in this phase.
    pub(super) fn leave_prefill(
        &mut self,
        ticket: LegTicket,
        phase: LegPhase,
        peer: Option<(DecodeLeg, Vec<u32>)>,
        end: &RankLegEnd,
        reason: &str,
        now_us: u64,
    ) {
        let room = self.leg(ticket).sent.room;
        let failed = *end != RankLegEnd::Length;
        if phase == LegPhase::Transferring {
            let leg = &self.legs[&ticket];
            let (blocks, begun_us) = (leg.pages.len(), leg.since_us);
            let contents = self.contents_of(&leg.pages);
            let ended = RequestEvent::LeaseEnded {
                reason: if failed { "aborted".into() } else { "transfer_done".into() },
                blocks,
                readers: (usize::from(!failed), 1),
                held: Duration::from_micros(now_us.saturating_sub(begun_us)),
            };
            self.emit(ticket, ended);
            if failed && let Some((to, pages)) = peer.clone() {
                // A write in flight cannot be stopped.
                let takes_us =
                    (blocks as u64 * 1_000_000).checked_div(self.traits.plan.fetch_rate).unwrap_or(0);
                self.drains.insert(ticket, Drain::Write { room, to, pages, contents, acks: false });
                self.timers.insert((begun_us + takes_us, TimerOf::Drain(ticket)));
            }
            self.free(ticket, BlockHolder::Leased);
        } else {
            self.free(ticket, BlockHolder::Active);
        }
        if failed
            && self.traits.aborts == AbortExchange::Current
            && let Some((to, _)) = peer
        {
            let reason = reason.to_owned();
            self.send(to.peer, PeerMessage::Failed { room, leg: to.leg, reason });
        }
    }

    /// D: the pages and the peer of a leg that has ended in this phase.
    pub(super) fn leave_decode(&mut self, ticket: LegTicket, phase: LegPhase, now_us: u64) {
        let (room, from) = (self.leg(ticket).sent.room, self.decode_leg(ticket));
        let exchanges = self.traits.aborts == AbortExchange::Current;
        match (phase, self.leg(ticket).prefill) {
            (LegPhase::Preallocating, Some(prefill)) if exchanges => {
                self.send(prefill, PeerMessage::Abort { room, from });
            }
            (LegPhase::Transferring, Some(prefill)) if exchanges => {
                self.send(prefill, PeerMessage::Abort { room, from });
                let leg = self.leg(ticket);
                let (id, pages) = (leg.sent.id.clone(), std::mem::take(&mut leg.pages));
                self.drains.insert(ticket, Drain::Pages { id, pages });
                self.timers.insert((now_us + us(self.traits.waits.ack), TimerOf::Drain(ticket)));
            }
            (LegPhase::Transferring, _) => self.free(ticket, BlockHolder::Landing),
            (LegPhase::Preallocating, _) => {}
            (LegPhase::Bootstrapping | LegPhase::Waiting | LegPhase::Running | LegPhase::Done, _) => {
                self.free(ticket, BlockHolder::Active);
            }
        }
    }
}
