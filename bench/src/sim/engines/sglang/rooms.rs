//! The rooms of one rank: which leg has a room, what its peer has sent, and whether it has failed.
//!
//! ```text
//!        leg or metadata                 the other half
//!  [none] ───────────────▶ half-open ───────────────────▶ met ─ leg ended ─▶ [none]
//!             ▲                │ abort, or a second leg with the room
//!             └─ leg ended ─ failed ◀─┘
//! ```
//!
//! As in SGLang's status table, metadata opens a room before its leg, and a room that failed stays so until its leg
//! has come and gone. An abort for an unknown room leaves no trace.

use std::collections::{HashMap, VecDeque};

use super::message::{DecodeLeg, LegTicket};

/// Maximum rooms without a leg. The oldest is forgotten. SGLang has no bound here.
const LEGLESS_MAX: usize = 4_096;

/// A room. See the module documentation.
#[derive(Debug, Default)]
struct Room {
    failed: bool,
    leg: Option<LegTicket>,
    peer: Option<(DecodeLeg, Vec<u32>)>,
}

/// The result of a leg's arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JoinOutcome {
    /// The peer has not sent its page indices.
    HalfOpen,
    Met,
    /// The room had failed before.
    Failed,
    /// Another leg in flight has the room.
    Duplicate(LegTicket),
}

/// All rooms of one rank.
#[derive(Debug, Default)]
pub(super) struct RoomTable {
    rooms: HashMap<u64, Room>,
    /// Rooms that were opened without a leg, oldest first.
    legless: VecDeque<u64>,
}

impl RoomTable {
    /// A leg arrives with this room.
    pub(super) fn join(&mut self, room: u64, ticket: LegTicket) -> JoinOutcome {
        let room = self.rooms.entry(room).or_default();
        if let Some(other) = room.leg {
            room.failed = true;
            return JoinOutcome::Duplicate(other);
        }
        room.leg = Some(ticket);
        match (room.failed, &room.peer) {
            (true, _) => JoinOutcome::Failed,
            (false, Some(_)) => JoinOutcome::Met,
            (false, None) => JoinOutcome::HalfOpen,
        }
    }

    /// D's page indices arrive. Returns the leg that waits for them.
    pub(super) fn set_peer(&mut self, room: u64, from: DecodeLeg, pages: Vec<u32>) -> Option<LegTicket> {
        if !self.rooms.contains_key(&room) {
            self.legless.push_back(room);
            while self.legless.len() > LEGLESS_MAX
                && let Some(oldest) = self.legless.pop_front()
            {
                if self.rooms.get(&oldest).is_some_and(|room| room.leg.is_none()) {
                    self.rooms.remove(&oldest);
                }
            }
        }
        let room = self.rooms.entry(room).or_default();
        room.peer = Some((from, pages));
        room.leg.filter(|_| !room.failed)
    }

    /// D's leg has ended. Returns the leg that ends with it.
    pub(super) fn abort(&mut self, room: u64) -> Option<LegTicket> {
        let room = self.rooms.get_mut(&room)?;
        room.failed = true;
        room.leg
    }

    /// D's leg and pages of a room.
    pub(super) fn peer(&self, room: u64) -> Option<&(DecodeLeg, Vec<u32>)> {
        self.rooms.get(&room)?.peer.as_ref()
    }

    /// The leg has ended. Returns its peer, if it is known. A leg that is not the room's changes nothing.
    pub(super) fn close(&mut self, room: u64, ticket: LegTicket) -> Option<(DecodeLeg, Vec<u32>)> {
        if self.rooms.get(&room)?.leg != Some(ticket) {
            return None;
        }
        self.rooms.remove(&room)?.peer
    }

    #[cfg(test)]
    pub(super) fn with_leg(&self) -> usize {
        self.rooms.values().filter(|room| room.leg.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::super::message::PeerRank;
    use super::*;

    fn decode(leg: u64) -> DecodeLeg {
        DecodeLeg {
            peer: PeerRank { at: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), rank: 0 },
            leg: LegTicket(leg),
        }
    }

    const ONE: LegTicket = LegTicket(1);
    const OTHER: LegTicket = LegTicket(2);

    #[test]
    fn both_orders_of_arrival_meet() {
        let mut rooms = RoomTable::default();
        assert_eq!(rooms.join(7, ONE), JoinOutcome::HalfOpen);
        assert_eq!(rooms.set_peer(7, decode(1), vec![3]), Some(ONE));
        assert_eq!(rooms.close(7, ONE), Some((decode(1), vec![3])));
        assert_eq!(rooms.set_peer(8, decode(2), vec![]), None);
        assert_eq!(rooms.join(8, OTHER), JoinOutcome::Met);
    }

    #[test]
    fn an_abort_fails_a_known_room_and_leaves_no_trace_of_an_unknown_one() {
        let mut rooms = RoomTable::default();
        assert_eq!(rooms.abort(7), None);
        assert_eq!(rooms.join(7, ONE), JoinOutcome::HalfOpen);
        assert_eq!(rooms.abort(7), Some(ONE));
        rooms.close(7, ONE);
        rooms.set_peer(8, decode(1), vec![]);
        assert_eq!(rooms.abort(8), None);
        assert_eq!(rooms.join(8, ONE), JoinOutcome::Failed);
        rooms.close(8, ONE);
        assert_eq!(rooms.join(8, OTHER), JoinOutcome::HalfOpen);
    }

    #[test]
    fn a_second_leg_is_found_and_does_not_close_the_room_of_the_first() {
        let mut rooms = RoomTable::default();
        rooms.join(7, ONE);
        assert_eq!(rooms.join(7, OTHER), JoinOutcome::Duplicate(ONE));
        assert_eq!(rooms.close(7, OTHER), None);
        assert_eq!(rooms.with_leg(), 1);
        rooms.close(7, ONE);
        assert_eq!(rooms.join(7, OTHER), JoinOutcome::HalfOpen);
    }

    #[test]
    fn rooms_without_a_leg_are_bounded() {
        let mut rooms = RoomTable::default();
        rooms.join(0, ONE);
        for room in 1..=LEGLESS_MAX as u64 + 5 {
            rooms.set_peer(room, decode(room), vec![]);
        }
        assert_eq!(rooms.rooms.len(), LEGLESS_MAX + 1);
        assert_eq!(rooms.join(5, OTHER), JoinOutcome::HalfOpen, "the oldest are forgotten");
        assert_eq!(rooms.with_leg(), 2);
    }
}
