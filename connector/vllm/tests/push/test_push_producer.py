"""Registrations at a prefill rank: each is written or refused, in every order of events, and every table is bounded."""

import itertools
import os

import pytest

from baton_vllm.push import messages, producer
from baton_vllm.push.messages import Registration
from baton_vllm.push.producer import Hold, Refuse, Registrations, Release, Write

WAIT_S = 30.0
P, P2, OTHER = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-cccccccc", "cmpl-y-0-aaaaaaaa"
D, D2 = "cmpl-x-0-bbbbbbbb", "cmpl-x-0-dddddddd"


def registration(rid=D, engine="d"):
    return Registration(rid, engine, "127.0.0.1", 5600, 1, {})


def table():
    return Registrations(WAIT_S)


def refused(actions, rid=D):
    return [action.reason for action in actions if isinstance(action, Refuse) and action.registration.request_id == rid]


def check_empty(made):
    """Nothing is left but what is remembered for a time."""
    assert not made.pending and not made.lent and not made.claims and not made.claimed_by
    assert not made._lenders and not made._waiting


# Writes


@pytest.mark.parametrize("lender", [P, D], ids=["base id", "same id"])
def test_a_registration_before_the_blocks_is_written(lender):
    made = table()
    made.on_began(lender)
    assert made.on_registered(registration(), 0) == []
    assert made.on_lent(lender, "blocks", 1) == [Write(lender, "blocks", registration())]
    assert made.on_submitted(D) == [] and made.on_closed(lender, 2) == []
    check_empty(made)


def test_blocks_before_the_registration_are_written():
    made = table()
    made.on_began(P)
    assert made.on_lent(P, "blocks", 0) == []
    assert made.on_registered(registration(), 1) == [Write(P, "blocks", registration())]
    made.on_submitted(D)
    made.on_closed(P, 2)
    check_empty(made)


def test_the_same_id_goes_before_the_same_base_id():
    made = table()
    for lender in (P, D):
        made.on_lent(lender, lender, 0)
    assert made.on_registered(registration(D), 1) == [Write(D, D, registration(D))]
    made = table()
    made.on_began(P2)
    for rid in (D, P2):
        made.on_registered(registration(rid), 0)
    assert made.on_lent(P2, "blocks", 1) == [Write(P2, "blocks", registration(P2))]


def test_repeated_registrations_are_written_once():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    assert made.on_registered(registration(), 1) == [Hold(registration())]
    made.on_lent(P, "blocks", 2)
    assert made.on_registered(registration(), 3) == [Hold(registration())], "the handshake may take time"
    made.on_submitted(D)
    assert made.on_registered(registration(), 4) == [], "the write's own notice answers"
    made.on_closed(P, 5)
    assert made.on_registered(registration(), 6) == []
    check_empty(made)


# Each reason for a refusal, in both orders


def test_a_request_that_ends_while_a_registration_waits():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    assert refused(made.on_ended(P, 1)) == [producer.ENDED]
    check_empty(made)


def test_a_request_that_ended_before_the_registration():
    made = table()
    made.on_began(P)
    assert made.on_ended(P, 0) == []
    assert refused(made.on_registered(registration(), 100)) == [producer.ENDED]
    check_empty(made)


def test_a_lease_that_expired_before_the_registration():
    made = table()
    made.on_began(P)
    made.on_lent(P, "blocks", 0)
    assert made.on_closed(P, 30) == []
    assert refused(made.on_registered(registration(), 31)) == [producer.ENDED]
    check_empty(made)


def test_a_second_decode_engine_gets_no_write():
    made = table()
    made.on_began(P)
    made.on_registered(registration(D), 0)
    made.on_registered(registration(D2, "e"), 0)
    assert made.on_lent(P, "blocks", 1) == [Write(P, "blocks", registration(D))]
    made.on_submitted(D)
    assert refused(made.on_closed(P, 2), D2) == [producer.ENDED]
    check_empty(made)


def test_a_registration_without_a_request():
    made = table()
    made.on_registered(registration(), 0)
    assert made.on_time(WAIT_S - 1) == []
    assert refused(made.on_time(WAIT_S)) == [producer.UNKNOWN]
    assert made.on_time(WAIT_S + 1) == []
    # Its request comes after all: no engine needs the blocks.
    made.on_began(P)
    assert made.on_lent(P, "blocks", WAIT_S + 2) == [Release(P)]
    check_empty(made)


def test_a_request_that_waits_for_long_is_alive():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    assert made.on_time(100 * WAIT_S) == []
    assert made.on_lent(P, "blocks", 100 * WAIT_S) == [Write(P, "blocks", registration())]
    made = table()
    made.on_registered(registration(), 0)
    made.on_began(P)
    assert made.on_time(100 * WAIT_S) == [], "the request came after the registration"


def test_an_old_live_registration_hides_no_later_one():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_registered(registration(OTHER), 1)
    assert refused(made.on_time(WAIT_S + 2), OTHER) == [producer.UNKNOWN]
    assert set(made.pending) == {D}


def test_one_of_two_requests_with_a_base_id_ends():
    made = table()
    made.on_began(P)
    made.on_began(P2)
    made.on_registered(registration(), 0)
    assert made.on_ended(P, 1) == []
    assert refused(made.on_ended(P2, 2)) == [producer.ENDED]


def test_a_request_of_the_same_base_id_begins_again():
    made = table()
    made.on_began(P)
    made.on_ended(P, 0)
    made.on_began(P2)
    assert made.on_registered(registration(), 1) == []
    assert made.on_lent(P2, "blocks", 2) == [Write(P2, "blocks", registration())]


# Cancels


def test_a_cancel_while_the_request_computes():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    assert refused(made.on_cancelled(registration(), 1)) == [producer.CANCELLED]
    assert made.on_lent(P, "blocks", 2) == [Release(P)], "no engine needs these blocks"
    made.on_closed(P, 3)
    check_empty(made)


def test_a_cancel_before_its_registration():
    made = table()
    made.on_began(P)
    assert refused(made.on_cancelled(registration(), 0)) == [producer.CANCELLED]
    assert refused(made.on_registered(registration(), 1)) == [producer.CANCELLED]
    check_empty(made)


def test_a_cancel_during_the_handshake_of_the_write():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_lent(P, "blocks", 1)
    assert made.may_write(D)
    assert made.on_cancelled(registration(), 2) == []
    assert not made.may_write(D)
    assert made.on_write_failed(D, "reason", 3) == [Refuse(registration(), producer.CANCELLED), Release(P)]
    check_empty(made)


def test_a_cancel_of_a_write_in_flight_is_ignored():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_lent(P, "blocks", 1)
    made.on_submitted(D)
    assert made.on_cancelled(registration(), 2) == []
    made.on_closed(P, 3)
    assert made.on_cancelled(registration(), 4) == []
    check_empty(made)


def test_a_cancel_ends_the_lease_of_unmatched_blocks():
    made = table()
    made.on_began(P)
    made.on_lent(P, "blocks", 0)
    assert made.on_cancelled(registration(), 1) == [Refuse(registration(), producer.CANCELLED), Release(P)]
    check_empty(made)


@pytest.mark.parametrize("end", ["cancel", "withdraw"])
def test_another_engines_registration_keeps_the_blocks(end):
    made = table()
    made.on_began(P)
    made.on_registered(registration(D2, "e"), 0)
    if end == "cancel":
        made.on_registered(registration(D), 0)
        assert refused(made.on_cancelled(registration(D), 1)) == [producer.CANCELLED]
    else:
        assert made.on_withdrawn(D, 1) == []
    assert made.on_lent(P, "blocks", 2) == [Write(P, "blocks", registration(D2, "e"))]


def test_an_engine_that_registers_after_anothers_cancel_gets_the_write():
    made = table()
    made.on_began(P)
    made.on_cancelled(registration(D), 0)
    made.on_registered(registration(D2, "e"), 1)
    assert made.on_lent(P, "blocks", 2) == [Write(P, "blocks", registration(D2, "e"))]


@pytest.mark.parametrize("withdrawn_first", [True, False])
def test_a_withdrawal_does_not_outlast_another_engines_registration(withdrawn_first):
    made = table()
    made.on_began(P)
    events = [lambda: made.on_withdrawn(D, 0), lambda: made.on_registered(registration(D2, "e"), 0)]
    for event in events if withdrawn_first else reversed(events):
        event()
    made.on_lent(P, "blocks", 1)
    made.on_submitted(D2)
    made.on_closed(P, 2)
    made.on_began(P2)
    assert made.on_lent(P2, "more", 3) == [], "these blocks wait for their registration"


@pytest.mark.parametrize("lent_first", [True, False])
def test_a_withdrawal_ends_the_lease(lent_first):
    made = table()
    made.on_began(P)
    if lent_first:
        made.on_lent(P, "blocks", 0)
        assert made.on_withdrawn(D, 1) == [Release(P)]
    else:
        assert made.on_withdrawn(D, 0) == []
        assert made.on_lent(P, "blocks", 1) == [Release(P)]
    made.on_closed(P, 2)
    assert made.on_withdrawn("cmpl-other-0-aaaaaaaa", 3) == []
    check_empty(made)


# Failed writes


def test_a_write_that_fails_is_refused_once():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_lent(P, "blocks", 1)
    made.on_submitted(D)
    assert made.on_write_failed(D, "failed", 2) == [Refuse(registration(), "failed"), Release(P)]
    assert made.on_write_failed(D, "failed", 3) == []
    made.on_closed(P, 4)
    assert refused(made.on_registered(registration(), 5)) == ["failed"], "a repeated one gets the same answer"
    check_empty(made)


def test_agents_that_a_write_does_not_cover_are_refused():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_lent(P, "blocks", 1)
    expected = [Refuse(registration(), "reason", ("d1",))]
    assert made.on_submitted(D, "reason", ["d1"]) == expected
    made.on_closed(P, 2)
    assert made.on_registered(registration(), 3) == expected


def test_a_lease_that_ends_during_the_handshake():
    made = table()
    made.on_began(P)
    made.on_registered(registration(), 0)
    made.on_lent(P, "blocks", 1)
    assert made.on_closed(P, 2) == []
    assert made.on_write_failed(D, "over", 3) == [Refuse(registration(), "over"), Release(P)]
    check_empty(made)


# Bounds


def test_registrations_beyond_the_bound_are_refused(monkeypatch):
    monkeypatch.setattr(producer, "PENDING_MAX", 3)
    made = table()
    ids = [f"cmpl-{n}-0-aaaaaaaa" for n in range(5)]
    answers = [refused(made.on_registered(registration(rid), 0), rid) for rid in ids]
    assert answers == [[], [], [], [producer.FULL], [producer.FULL]] and len(made.pending) == 3


def test_ended_requests_are_remembered_within_bounds():
    recent = messages.Recent(3, 10.0)
    for number in range(5):
        recent.put(number, True, float(number))
    assert [n for n in range(5) if recent.get(n, 4.0)] == [2, 3, 4] and len(recent) == 3
    assert recent.get(2, 12.5) is None, "too old"
    recent.put(9, True, 13.5)
    assert len(recent) == 2, "old entries leave with the next one"
    recent.put(4, False, 14.0)
    assert recent.get(4, 20.0) is False
    made = table()
    for number in range(2 * 10):
        made.on_began(f"cmpl-{number}-0-aaaaaaaa")
        made.on_ended(f"cmpl-{number}-0-aaaaaaaa", 0)
    assert len(made.ended_bases) == 20 and made.ended_bases.most == producer.REMEMBERED_MAX and not made.live


# Every order

EVENTS = ["began", "ended", "lent", "expired", "registered", "registered again", "cancelled", "withdrawn", "late"]
LENGTH = int(os.environ.get("BATON_TEST_ORDERS", 6))


class Model:
    """One request of P and one of D. It checks that each action is allowed."""

    def __init__(self):
        self.made, self.now = table(), 0.0
        self.state = "new"  # of P's request: new, live, lent, over
        self.written = self.refused = 0
        self.releases = 0

    def happens(self, event):
        made = self.made
        self.now += 1
        if event == "began" and self.state == "new":
            self.state = "live"
            made.on_began(P)
        elif event == "ended" and self.state == "live":
            self.state = "over"
            self.act(made.on_ended(P, self.now))
        elif event == "lent" and self.state == "live":
            self.state = "lent"
            self.act(made.on_lent(P, "blocks", self.now))
        elif event == "expired" and self.state == "lent":
            self.state = "over"
            self.act(made.on_closed(P, self.now))
        elif event.startswith("registered"):
            self.act(made.on_registered(registration(), self.now))
        elif event == "cancelled":
            self.act(made.on_cancelled(registration(), self.now))
        elif event == "withdrawn":
            self.act(made.on_withdrawn(D2, self.now))
        elif event == "late":
            self.now += WAIT_S
            self.act(made.on_time(self.now))

    def act(self, actions):
        for action in actions:
            if isinstance(action, Write):
                assert not self.refused and not self.written, "written after an answer"
                assert self.state == "lent"
                self.written += 1
                self.act(self.made.on_submitted(D))
                self.state = "over"
                self.act(self.made.on_closed(P, self.now))
            elif isinstance(action, Refuse):
                assert not self.written, "refused after the write"
                self.refused += 1
            elif isinstance(action, Release):
                assert self.state == "lent", self.state
                self.releases += 1
                self.state = "over"
                self.act(self.made.on_closed(P, self.now))


def test_every_order():
    count = 0
    for length in range(1, LENGTH + 1):
        for order in itertools.permutations(EVENTS, length):
            model = Model()
            for event in order:
                model.happens(event)
            # The end of time: each request of P is over, and each registration has an answer.
            for event in ("ended", "expired", "late"):
                model.happens(event)
            if any(event.startswith("registered") for event in order):
                assert model.written == 1 or model.refused, order
            check_empty(model.made)
            assert not model.made.live, order
            count += 1
    assert count > 1000
