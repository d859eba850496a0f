"""A push pair on vLLM's halves: each write that does not come frees D's blocks, and no write goes into freed ones."""

import logging
import os
import threading

import pytest

import harness

pytestmark = pytest.mark.skipif(harness.REASON is not None, reason=str(harness.REASON))

if not harness.REASON:
    from push_bench import Pair, Status, probes

    from baton_vllm.push import consumer, messages, producer, worker

P, D = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"
# Ranks of P and D.
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


@pytest.fixture(params=RANKS, ids=[f"{p}to{d}" for p, d in RANKS])
def pair(request):
    return Pair(*request.param)


def computed(pair, request):
    """D has generated all tokens, and its blocks entered no cache as transferred ones."""
    pair.settle()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and request.num_output_tokens == 2
    assert pair.d.failed[D] >= 1


def transferred(pair, request):
    pair.settle()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert not pair.d.failed and pair.d.received[D] == len(pair.d.workers)


# Writes


@pytest.mark.parametrize("first", ["p", "d", "both"])
def test_blocks_are_written_in_every_order(pair, first):
    if first == "p":
        lent = pair.p.prefill(P)
        pair.step(3)
        assert pair.p.holds(lent) == 2
    if first != "p":
        request = pair.d.decode(D, pair.p)
    if first == "d":
        pair.step(3)
        assert pair.d.waits(request)
    if first == "p":
        request = pair.d.decode(D, pair.p)
    else:
        pair.p.prefill(P)
    transferred(pair, request)
    assert not pair.messages(messages.NO_WRITE)
    reply = pair.p.scheduler.replies[P]
    assert reply["remote_ends_writes"] is True and reply["transfer_mode"] == "push"


def test_names_of_agents_may_be_bytes(pair):
    request = pair.d.decode(D, pair.p)
    pair.step()
    assert all(isinstance(name, bytes) for w in pair.d.workers for name in w._remote_agents["p"].values())
    assert all(isinstance(name, str) for w in pair.d.workers for name in w._waits.waits[D].agents)
    pair.p.prefill(P)
    transferred(pair, request)


# P's request ends without a loan


def test_an_abort_while_d_waits(pair):
    lent = pair.p.prefill(P, max_tokens=50)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    assert pair.d.waits(request) and pair.d.holds(request) == 2
    pair.p.abort(lent)
    computed(pair, request)


def test_an_abort_before_the_registration(pair):
    lent = pair.p.prefill(P, max_tokens=50)
    pair.step(2)
    pair.p.abort(lent)
    pair.step(2)
    request = pair.d.decode(D, pair.p)
    computed(pair, request)


def test_an_abort_before_the_first_step_of_the_request(pair):
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    lent = pair.p.prefill(P)
    pair.p.abort(lent)
    computed(pair, request)


def test_a_cancelled_request_frees_its_blocks(pair):
    lent = pair.p.prefill(P, max_tokens=50)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    pair.p.abort(lent)
    pair.d.abort(request)
    pair.settle()
    assert request.status == Status.FINISHED_ABORTED


def test_the_policy_fail_ends_the_request():
    pair = Pair(recompute=False)
    lent = pair.p.prefill(P, max_tokens=50)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    pair.p.abort(lent)
    pair.settle()
    assert request.status == Status.FINISHED_ERROR


# D's request ends


def test_a_cancel_by_d_frees_its_blocks_while_p_computes(pair):
    lent = pair.p.prefill(P, max_tokens=8)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    pair.d.abort(request)
    assert pair.d.holds(request) == 2, "P may write until it has answered"
    pair.step(3)
    assert not pair.d.holds(request) and lent.status == Status.RUNNING
    pair.settle()
    assert not pair.net.transfers, "no blocks are lent to an engine that has left"


def test_a_cancel_by_d_while_the_write_is_in_flight(pair):
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4, finish=False)
    assert pair.net.transfers
    pair.d.abort(request)
    pair.step(5, finish=False)
    assert pair.d.holds(request) == 2, "a write in flight is never ended"
    pair.settle()
    assert not pair.messages(messages.NO_WRITE)


def test_a_cancel_before_the_handshake_sends_no_registration(pair):
    for rank in pair.d.workers:
        rank.slow = True
    request = pair.d.decode(D, pair.p)
    pair.d.step(2)
    pair.d.abort(request)
    pair.d.step(2)
    assert not pair.d.holds(request)
    for rank in pair.d.workers:
        rank.slow = False
        rank.shake()
    pair.settle()
    assert not pair.messages(worker.PUSH_REG_NOTIF_PREFIX) and pair.messages(messages.CANCEL)


def test_a_cancel_during_the_handshake_of_the_write(pair):
    for rank in pair.p.workers:
        rank.slow = True
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4)
    pair.d.abort(request)
    pair.step(2)
    for rank in pair.p.workers:
        rank.slow = False
        rank.shake()
    pair.settle()
    assert not pair.net.transfers and pair.p.sent[P] == len(pair.p.workers)
    assert lent.status == Status.FINISHED_LENGTH_CAPPED


def test_a_release_does_not_end_a_lease_whose_blocks_are_read():
    pair = Pair()
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4, finish=False)
    pair.p.workers[0]._results.put((pair.p.workers[0]._take_released, P))
    pair.step(2, finish=False)
    assert pair.p.holds(lent) == 2
    transferred(pair, request)


def test_a_request_that_ends_in_ds_queue_ends_ps_lease(pair):
    pair.p.prefill(P)
    pair.step(3)
    request = pair.d.decode(D, pair.p)
    pair.d.abort(request)
    pair.settle()
    assert pair.p.sent[P] == len(pair.p.workers)


def test_a_refused_handoff_ends_ps_lease_by_ps_id(pair):
    pair.p.prefill(P)
    pair.step(3)
    request = pair.d.decode("refused-0123", pair.p, remote_request_id=P)
    pair.d.abort(request)
    pair.settle()
    assert pair.p.sent[P] == len(pair.p.workers)


# P never gets the request


def test_a_registration_without_a_request(pair):
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    pair.p.turn(29.0)
    pair.step(2)
    assert pair.d.waits(request)
    pair.p.turn(1.1)
    computed(pair, request)


def test_a_request_that_waits_at_p_is_not_ended(pair):
    pair.p.scheduler.budget = 1
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    pair.p.turn(1000.0)
    pair.step(2)
    assert pair.d.waits(request) and lent.status == Status.RUNNING
    pair.p.scheduler.budget = 64
    transferred(pair, request)


# Leases


def test_a_lease_that_expired_before_the_registration(pair):
    lent = pair.p.prefill(P)
    pair.step(3)
    pair.p.expire(lent)
    pair.step(2)
    assert not pair.p.holds(lent)
    request = pair.d.decode(D, pair.p)
    computed(pair, request)
    assert not pair.net.transfers


def test_a_lease_does_not_end_while_its_blocks_are_read(pair):
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4, finish=False)
    assert pair.net.transfers
    pair.p.expire(lent)
    pair.step(3, finish=False)
    assert pair.p.holds(lent) == 2
    transferred(pair, request)


def test_a_lease_that_ends_during_the_handshake_is_not_read(pair):
    for rank in pair.p.workers:
        rank.slow = True
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4)
    assert not pair.net.transfers and all(rank.handshakes for rank in pair.p.workers)
    pair.p.expire(lent)
    pair.step(2)
    assert not pair.p.holds(lent)
    for rank in pair.p.workers:
        rank.slow = False
        rank.shake()
    computed(pair, request)
    assert not pair.net.transfers


def test_a_failed_write_keeps_the_lease_until_its_handle_is_released(pair):
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4, finish=False)
    for transfer in pair.net.transfers:
        transfer.stuck = True
        transfer.fail()
    pair.p.expire(lent)
    pair.step(3, finish=False)
    assert pair.p.holds(lent) == 2 and pair.d.waits(request), "the network may still read and write"
    for transfer in pair.net.transfers:
        transfer.stuck = False
    computed(pair, request)
    assert all(transfer.released for transfer in pair.net.transfers)


# Submissions


def test_a_write_that_cannot_be_submitted(pair):
    for rank in pair.p.workers:
        rank.nixl_wrapper.refuse.update(f"d{n}" for n in range(2))
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4)
    assert not pair.net.transfers
    computed(pair, request)
    assert not pair.p.holds(lent) and pair.p.sent[P] == len(pair.p.workers)


def test_one_of_two_writes_cannot_be_submitted():
    pair = Pair(1, 2)
    pair.p.workers[0].nixl_wrapper.refuse.add("d1")
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(5, finish=False)
    (transfer,) = pair.net.transfers
    assert transfer.receiver == "d0" and pair.d.failed[D] == 1, "rank 1 gets the notice"
    assert pair.d.waits(request), "rank 0 is being written"
    computed(pair, request)


def test_an_error_between_two_submissions_loses_no_handle(monkeypatch):
    pair = Pair(1, 2)
    rank = pair.p.workers[0]
    before = rank._compute_desc_ids
    calls = []

    def failing(block_ids, **named):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no descriptors")
        return before(block_ids, **named)

    monkeypatch.setattr(rank, "_compute_desc_ids", failing)
    lent = pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(5, finish=False)
    (transfer,) = pair.net.transfers
    pair.p.expire(lent)
    pair.step(2, finish=False)
    assert pair.p.holds(lent) == 2 and pair.d.waits(request), "the first write is in flight"
    computed(pair, request)
    assert transfer.released


def test_a_transfer_that_fails(pair):
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(4, finish=False)
    pair.net.transfers[0].fail()
    computed(pair, request)


def test_a_handshake_with_d_that_fails_is_tried_again():
    pair = Pair()
    (rank,) = pair.p.workers
    rank.slow = True
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    pair.step(3)
    rank.shake(ok=False)
    pair.step(2)
    rank.shake(ok=False)
    pair.step(2)
    assert pair.d.waits(request), "D is not reached"
    rank.slow = False
    with probes(consumer.ALIVE):
        pair.d.turn(consumer.REPEAT_EVERY_S)
        computed(pair, request)


def test_a_handshake_with_p_that_fails():
    pair = Pair()
    (rank,) = pair.d.workers
    rank.slow = True
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    rank.shake(ok=False)
    computed(pair, request)


def test_an_orphaned_rank_of_p_does_not_write(monkeypatch):
    pair = Pair()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    computed(pair, request)
    assert not pair.net.transfers


# P ends


def lost(pair):
    """P has waited for its request, and ends."""
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    pair.net.lost.update(f"p{n}" for n in range(len(pair.p.workers)))
    return request


def ticks(pair, count):
    for _ in range(count):
        pair.d.turn(1.0)
        pair.d.step()


def test_an_ended_p_frees_ds_blocks(pair):
    request = lost(pair)
    with probes(consumer.GONE) as probed:
        ticks(pair, 2)
        assert not probed and pair.d.waits(request)
        ticks(pair, 12)
    assert request.status == Status.FINISHED_LENGTH_CAPPED and pair.d.failed[D] == len(pair.d.workers)
    pair.d.check_empty()
    assert all(rank.cleaned == ["p"] for rank in pair.d.workers), "the next process gets a handshake"


def test_an_ended_p_frees_the_blocks_of_a_cancelled_request(pair):
    request = lost(pair)
    pair.d.abort(request)
    with probes(consumer.GONE):
        ticks(pair, 14)
    pair.d.check_empty()


@pytest.mark.parametrize("found", ["silent", "alive", RuntimeError("no thread")])
def test_a_p_that_may_live_keeps_ds_blocks(pair, found):
    request = lost(pair)
    with probes(found) as probed:
        ticks(pair, 100)
        assert probed and pair.d.waits(request) and pair.d.holds(request) == 2
    pair.net.lost.clear()
    pair.p.prefill(P)
    transferred(pair, request)


def test_a_p_that_answers_by_nixl_is_not_ended():
    pair = Pair()
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    pair.p.prefill(P, max_tokens=200)
    with probes(consumer.GONE) as probed:
        for _ in range(40):
            pair.d.turn(1.0)
            pair.step()
        assert len(probed) > 5 and pair.d.waits(request)
        assert pair.messages(messages.HELD)


# Idle engines, hostile notices


def test_an_idle_p_answers_without_a_step():
    pair = Pair()
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    pair.p.turn(31.0)
    pair.d.step(2)
    assert pair.d.failed[D] == 1 and not pair.d.waits(request)


def test_the_writer_thread_reads_notices_while_no_step_wakes_it():
    pair = Pair()
    (rank,) = pair.p.workers
    thread = threading.Thread(target=rank._push_writer_loop)
    read = threading.Event()
    rank._registrations.on_registered = lambda registration, now: read.set() or []
    thread.start()
    try:
        pair.d.decode(D, pair.p)
        pair.d.step(2)
        assert read.wait(10)
    finally:
        rank._push_writer_stop.set()
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("notice", [
    b"", b":", b"\xff:1", b"PUSH_REG:", b"PUSH_REG:\xc1", b"PUSH_REG:\x80", b"BATON_CANCEL:{}", b"BATON_NO_WRITE:1",
    b"BATON_WITHDRAW:", b"BATON_HELD:x", b"none:1", b"HB:", b"HB:\xff", b"BATON_NO_WRITE:[\"none\",\"\"]",
])
def test_notices_of_strangers_end_nothing(notice):
    pair = Pair()
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    for agent in ("p0", "d0"):
        pair.net.inbox[agent].append(("stranger", notice))
    transferred(pair, request)


def test_an_answer_of_another_agent_ends_no_wait():
    pair = Pair()
    request = pair.d.decode(D, pair.p)
    pair.step(2)
    pair.net.inbox["d0"].append(("stranger", messages.encode_no_write(D, "reason")))
    pair.net.inbox["d0"].append(("stranger", f"{D}:1".encode()))
    pair.step(2)
    assert pair.d.waits(request) and pair.d.workers[0]._waits.counts["late"] == 2


def test_one_failing_event_does_not_cost_the_others(caplog):
    pair = Pair()
    (rank,) = pair.p.workers
    rank._post(lambda: 1 / 0)
    pair.p.prefill(P)
    request = pair.d.decode(D, pair.p)
    with caplog.at_level(logging.ERROR, "vllm.baton"):
        transferred(pair, request)


@pytest.mark.parametrize("name, value", [
    ("tp_size", ...), ("tp_size", 0), ("tp_size", "1"), ("remote_host", ...), ("remote_port", None),
    ("remote_engine_id", 7), ("remote_request_id", ...), ("pp_size", []), ("dcp_size", -1), ("remote_port", 1 << 70),
])
def test_a_malformed_handoff_is_computed(name, value):
    pair = Pair()
    request = pair.d.decode(D, pair.p, **{name: value})
    pair.settle()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and not pair.net.sent


def test_a_registration_that_vllms_watchdog_drops_is_a_failed_load():
    pair = Pair()
    pair.d.half._push_registration_timeout = -1.0
    request = pair.d.decode(D, pair.p)
    computed(pair, request)


def test_counts_of_a_pair():
    pair = Pair()
    pair.p.prefill(P)
    transferred(pair, pair.d.decode(D, pair.p))
    (p,), (d,) = pair.p.workers, pair.d.workers
    assert p._registrations.counts == {"written": 1} and d._waits.counts == {"landed": 1}
    lent = pair.p.prefill("cmpl-y-0-aaaaaaaa", max_tokens=50)
    pair.d.decode("cmpl-y-0-bbbbbbbb", pair.p)
    pair.step(3)
    pair.p.abort(lent)
    pair.settle()
    assert p._registrations.counts["refused", producer.ENDED] == d._waits.counts["failed", producer.ENDED] == 1
