"""Waits of a decode rank: they end by answers of all prefill ranks or by the producer's end, and not otherwise."""

import itertools

import pytest

from baton_vllm.push import consumer
from baton_vllm.push.consumer import ALIVE, GONE, SILENT, Cancel, Failed, Landed, Probe, Register, Waits, Warn


def data(rid="r", engine="p"):
    return {"request_id": rid, "remote_engine_id": engine, "remote_host": "127.0.0.1", "remote_port": 5600}


def started(agents=("a", "b"), rid="r", made=None, engine="p", now=0.0, silent_s=0.0):
    made = made or Waits(silent_s)
    made.on_started(rid, data(rid, engine), now)
    assert made.on_reached(rid, data(rid, engine), agents, now) == [Register(data(rid, engine), tuple(agents))]
    return made


def check_empty(made):
    assert not made.waits and not made.producers and not made.engine_of


# Answers of several ranks


def test_every_mix_of_answers_waits_for_all_ranks():
    for answers in itertools.product([True, False], repeat=3):
        made = started("abc")
        for agent, wrote in zip("ab", answers):
            assert made.on_answer(agent, "r", wrote, "reason", 1) == []
        expected = Landed("r") if all(answers) else Failed("r", "reason")
        assert made.on_answer("c", "r", answers[2], "reason", 2) == [expected]
        check_empty(made)


def test_repeated_and_unknown_answers_are_ignored_and_counted():
    made = started()
    made.on_answer("a", "r", False, "reason", 1)
    for wrote in (False, True):
        assert made.on_answer("a", "r", wrote, "other", 2) == [], "an agent answers once"
        assert made.on_answer("c", "r", wrote, "other", 2) == [], "an agent without the registration"
        assert made.on_answer("b", "s", wrote, "other", 2) == [], "an unknown request"
    assert made.counts["late"] == 6
    assert made.on_answer("b", "r", True, None, 3) == [Failed("r", "reason")]
    assert made.on_answer("b", "r", False, "other", 4) == [] and made.counts["late"] == 7
    check_empty(made)


def test_an_answer_before_the_handshake_is_ignored():
    made = Waits()
    made.on_started("r", data(), 0)
    assert made.on_answer("a", "r", False, "reason", 1) == [] and "r" in made.waits


# Before the registration


def test_without_a_handshake_no_write_can_come():
    made = Waits()
    made.on_started("r", data(), 0)
    assert made.on_unreached("r") == [Failed("r", consumer.UNREACHED)]
    assert made.on_unreached("r") == []
    made.on_started("r", data(), 0)
    assert made.on_reached("r", data(), [], 1) == [Failed("r", consumer.UNREACHED)]
    check_empty(made)


def test_a_cancel_before_the_registration_sends_none():
    made = Waits()
    made.on_started("r", data(), 0)
    assert made.on_cancelled("r", 1) == [Failed("r", consumer.CANCELLED)]
    assert made.on_reached("r", data(), ["a"], 2) == [Cancel(data(), ("a",))]
    assert made.on_reached("r", data(), [], 2) == []
    check_empty(made)


# Cancels


def test_a_cancelled_request_keeps_its_blocks_until_the_answer():
    made = started()
    made.on_answer("a", "r", True, None, 1)
    assert made.on_cancelled("r", 2) == [Cancel(data(), ("b",))], "the rank that wrote is not asked"
    assert "r" in made.waits
    assert made.on_answer("b", "r", False, "cancelled", 3) == [Failed("r", "cancelled")]
    assert made.on_cancelled("r", 4) == []
    check_empty(made)


def test_a_write_after_the_cancel_ends_the_wait():
    made = started(["a"])
    made.on_cancelled("r", 1)
    assert made.on_answer("a", "r", True, None, 2) == [Landed("r")]


# Repetition


def test_what_has_no_answer_is_repeated():
    made = started(now=0.0)
    made.on_answer("a", "r", True, None, 1)
    times = [consumer.REPEAT_EVERY_S * n for n in (0.9, 1.0, 1.9, 2.0)]
    sent = [[a for a in made.on_time(now) if not isinstance(a, Probe)] for now in times]
    assert sent == [[], [Register(data(), ("b",))], [], [Register(data(), ("b",))]]
    made.on_cancelled("r", 11)
    assert Cancel(data(), ("b",)) in made.on_time(11 + consumer.REPEAT_EVERY_S)


# Probes


def test_only_old_waits_are_probed_and_one_probe_runs_at_a_time():
    made = started()
    started(rid="s", made=made)
    assert made.on_time(consumer.PROBE_AFTER_S - 0.1) == []
    assert made.on_time(3.0) == [Probe(data())]
    assert made.on_time(4.0) == [], "one is under way"
    made.on_probed("p", ALIVE, 3.0, 4.0)
    assert not any(isinstance(a, Probe) for a in made.on_time(5.9))
    assert Probe(data()) in made.on_time(6.0)


def gone(made, start, seconds, engine="p", found=GONE):
    """Probes that find no process for this time."""
    actions, now = [], start
    while now <= start + seconds:
        actions += made.on_probed(engine, found, now, now)
        now += 1.0
    return actions


def test_an_ended_producer_fails_its_waits_alone():
    made = started()
    started(rid="s", made=made)
    started(["c"], rid="t", made=made, engine="q")
    made.on_started("u", data("u"), 0.0)  # its handshake is not done: the registration was not sent
    first = made.on_probed("p", GONE, 10.0, 10.1)
    assert first == [Register(data("r"), ("a", "b")), Register(data("s"), ("a", "b"))], "a rank that lives answers"
    assert gone(made, 11.0, consumer.GONE_S - 1.1) == []
    reason = consumer.PRODUCER_ENDED
    assert made.on_probed("p", GONE, 14.0, 14.0) == [Failed("r", reason), Failed("s", reason)]
    assert set(made.waits) == {"t", "u"}
    assert made.on_probed("none", GONE, 15.0, 15.0) == []


@pytest.mark.parametrize("sign", ["message", "probe", "silent probe"])
def test_a_sign_of_life_starts_the_time_again(sign):
    made = started()
    made.on_probed("p", GONE, 10.0, 10.0)
    if sign == "message":
        made.on_heard("b", 12.0)
    else:
        made.on_probed("p", ALIVE if sign == "probe" else SILENT, 12.0, 12.0)
    again = made.on_probed("p", GONE, 14.0, 14.0)
    assert again == [Register(data(), ("a", "b"))] and "r" in made.waits
    assert made.on_probed("p", GONE, 17.9, 17.9) == []
    assert made.on_probed("p", GONE, 18.0, 18.0) == [Failed("r", consumer.PRODUCER_ENDED)]
    made.on_heard("b", 19.0)
    check_empty(made)


def test_a_silent_producer_may_still_write():
    made = started()
    assert made.on_probed("p", SILENT, 10.0, 12.0) == [Warn(data(), 1)]
    assert gone(made, 13.0, 3600.0, found=SILENT) == [] and "r" in made.waits
    made.on_probed("p", ALIVE, 4000.0, 4000.0)
    assert made.on_probed("p", SILENT, 4001.0, 4002.0) == [Warn(data(), 1)], "another silence, another warning"


def test_a_silent_producer_has_ended_after_the_limit_if_one_is_set():
    made = started(silent_s=60.0)
    made.on_probed("p", SILENT, 10.0, 12.0)
    assert gone(made, 13.0, 55.0, found=SILENT) == []
    made.on_heard("a", 69.0)
    assert made.on_probed("p", SILENT, 71.0, 71.0) == [Warn(data(), 1)], "a rank has sent something"
    assert made.on_probed("p", SILENT, 130.9, 130.9) == []
    assert made.on_probed("p", SILENT, 131.0, 131.0) == [Failed("r", consumer.PRODUCER_SILENT)]
    check_empty(made)
