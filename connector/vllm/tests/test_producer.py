"""The producer: what is lent comes back once, on every rank, however the lease ends."""

import pytest

import fakes
from harness import BLOCK, Bench, Status


@pytest.fixture(params=[1, 2])
def bench(request):
    return Bench(ranks=request.param)


def test_lend_gives_a_handoff_and_keeps_the_blocks(bench):
    request = bench.prefill(remote_consumers=3, router_user="u")
    bench.step()
    reply = bench.scheduler.replies[request.request_id]
    assert reply["remote_handle"] == f"{1:032x}" and reply["remote_channel_port"] == 7700
    assert reply["remote_consumers"] == 3 and reply["remote_block_size"] == BLOCK
    assert reply["router_request_id"] == "x" and reply["router_user"] == "u"
    assert reply["remote_lease_left_ms"] == 30000 and len(reply["remote_prompt"]) == 16
    assert bench.core.named("offer")[0]["prompt"].startswith(reply["remote_prompt"])
    bench.step(5)
    assert bench.pool.get_num_free_blocks() == bench.total - 2
    assert bench.workers[0].connector_worker._reqs_to_send[request.request_id] == float("inf")
    assert bench.core.end_lease(request.request_id, "released")
    bench.drain()
    bench.check_empty()


def test_release_frees_in_the_next_step(bench):
    request = bench.prefill()
    bench.step(5)
    assert bench.core.release("x") == "released"
    bench.step()
    assert bench.pool.get_num_free_blocks() == bench.total
    bench.drain()
    bench.check_empty()
    assert bench.core.kinds(request.request_id) == ["started", "computed", "first_token", "ended"]


def test_release_right_after_the_finish_reaches_the_workers_with_the_request(bench):
    bench.prefill()
    bench.step()
    bench.core.release("x")
    bench.step()
    assert bench.pool.get_num_free_blocks() == bench.total
    bench.drain()
    bench.check_empty()


@pytest.mark.parametrize("refused", ["released", "full", "blocks"])
def test_a_refused_lease_frees_at_once_and_replies_without_a_handoff(bench, refused):
    if refused == "released":
        # The engine does not apply the abort in time.
        request = bench.prefill()
        bench.core.released.add("x")
    else:
        bench.core.refuse_offer = refused
        request = bench.prefill()
    bench.step()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert bench.scheduler.replies[request.request_id] is None
    assert bench.pool.get_num_free_blocks() == bench.total
    bench.drain()
    bench.check_empty()


def test_a_request_that_was_not_queued_gets_no_lease(bench):
    request = fakes.FakeRequest(Status.FINISHED_LENGTH_CAPPED, "x", 2 * BLOCK, {"do_remote_decode": True})
    assert bench.connector.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    assert not bench.stock._reqs_need_send and not bench.half.lent


def test_a_tombstone_aborts_the_request_when_it_arrives(bench):
    assert bench.core.release("x") == "remembered"
    request = bench.prefill()
    bench.step()
    assert request.status == Status.FINISHED_ABORTED
    assert bench.engine.answered == [request.request_id]
    bench.drain()
    bench.check_empty()


def test_without_an_engine_a_tombstone_still_lends_nothing():
    bench = Bench(engine=False)
    bench.core.release("x")
    request = bench.prefill()
    bench.step()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and bench.scheduler.replies[request.request_id] is None
    bench.drain()
    bench.check_empty()


def test_abort_by_verb_answers_the_front_end_and_by_client_does_not(bench):
    for name, by_verb in (("v", True), ("c", False)):
        params = {"do_remote_decode": True, "router_request_id": name}
        request = bench.add(f"cmpl-{name}-0-00000000", 80 * BLOCK // 4, params)
        bench.scheduler.budget = BLOCK
        bench.step()
        if by_verb:
            assert bench.core.release(name) == "aborting"
        else:
            bench.abort(request)
        bench.step()
        assert request.status == Status.FINISHED_ABORTED
        assert (request.request_id in bench.engine.answered) is by_verb
    bench.drain()
    bench.check_empty()


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("how", ["client", "verb"])
def test_abort_at_every_step(bench, steps, how):
    bench.scheduler.budget = BLOCK
    request = bench.add("cmpl-x-0-00000001", 3 * BLOCK, {"do_remote_decode": True, "router_request_id": "x"})
    bench.step(steps)
    bench.core.release("x") if how == "verb" else bench.abort(request)
    bench.step(2)
    if how == "client":
        # An abort does not end a lease: the reply may have been delivered.
        bench.core.end_lease(request.request_id, "expired")
    bench.drain()
    bench.check_empty()


def test_expiry(bench):
    request = bench.prefill()
    bench.step(2)
    assert bench.core.end_lease(request.request_id, "expired")
    bench.step()
    assert bench.pool.get_num_free_blocks() == bench.total
    bench.drain()
    bench.check_empty()


def test_a_lease_that_is_ended_twice_frees_once(bench):
    request = bench.prefill()
    bench.step(2)
    bench.core.end_lease(request.request_id, "released")
    bench.core.announce("ended", {"id": request.request_id, "cause": "again"}, 1)
    bench.drain()
    assert bench.pool.frees[request.request_id] == 1
    assert bench.pool.get_num_free_blocks() == bench.total


@pytest.mark.parametrize("acks_end", [True, False])
def test_acknowledgement_of_a_stock_consumer(bench, acks_end):
    bench.core.acks_end = acks_end
    request = bench.prefill()
    bench.step(2)
    for rank in range(len(bench.nixl)):
        bench.acknowledge(request, rank)
        bench.step()
    assert bench.core.leases[request.request_id] == "transfer_done"
    bench.drain()
    bench.check_empty()
    assert bench.core.late == 0


@pytest.mark.parametrize("first", ["acknowledged", "released", "in one step"])
def test_acknowledgement_on_one_rank_and_release_on_the_other(first):
    bench = Bench(ranks=2)
    request = bench.prefill()
    bench.step(2)
    if first != "released":
        bench.acknowledge(request, 0)
    if first == "acknowledged":
        bench.step(2)
        assert bench.pool.get_num_free_blocks() < bench.total
    bench.core.end_lease(request.request_id, "released")
    if first == "released":
        bench.step()
        bench.acknowledge(request, 0)
    bench.drain()
    bench.check_empty()
    assert [report[request.request_id] for report in bench.reports] == [1, 1]


def test_an_acknowledgement_waits_for_another_reader():
    bench = Bench(peers="any")
    request = bench.prefill()
    bench.step(2)
    bench.core.draining.add(request.request_id)
    bench.core.acks_end = False
    for rank in (0, 1):
        bench.acknowledge(request, rank)
    bench.step(3)
    assert bench.pool.get_num_free_blocks() < bench.total, "the other consumer still reads"
    bench.core.draining.clear()
    bench.core.announce("ended", {"id": request.request_id, "cause": "transfer_done"}, 1)
    bench.drain()
    # Every rank reports once more, and the blocks are freed once.
    assert bench.pool.frees[request.request_id] == 1
    assert bench.pool.get_num_free_blocks() == bench.total


def test_an_acknowledgement_after_the_end_is_ignored(bench):
    request = bench.prefill()
    bench.step(2)
    bench.core.end_lease(request.request_id, "released")
    bench.step()
    for rank in range(len(bench.nixl)):
        bench.acknowledge(request, rank)
    bench.drain()
    bench.check_empty()


def test_unknown_ids_of_finished_sending_never_reach_the_scheduler(bench):
    request = bench.prefill()
    bench.step(2)
    for worker in bench.workers:
        worker._worker_half.orders.ended.append("cmpl-unknown")
    bench.step()
    assert bench.core.late == 1
    assert bench.core.named("late") == [{"id": "cmpl-unknown"}]
    bench.core.end_lease(request.request_id, "released")
    bench.drain()
    assert bench.pool.get_num_free_blocks() == bench.total


def test_ids_pass_once(bench):
    half = bench.half
    request = bench.prefill()
    bench.step(2)
    bench.core.end_lease(request.request_id, "released")
    assert half.on_sent({request.request_id, "other"}) == {request.request_id}
    assert half.on_sent({request.request_id}) == set()
    assert bench.core.late == 2


# Client input on the producer


@pytest.mark.parametrize("consumers", [0, -1, 17, 1 << 40, 1.5, True, "3", None, [], {}])
def test_odd_numbers_of_consumers_lend_to_one(bench, consumers):
    request = bench.prefill(remote_consumers=consumers)
    bench.step()
    reply = bench.scheduler.replies[request.request_id]
    assert reply["remote_consumers"] == 1 == bench.core.named("offer")[0]["consumers"]
    bench.core.end_lease(request.request_id, "released")
    bench.drain()
    bench.check_empty()


@pytest.mark.parametrize("tokens", [80, "80", None, float("nan"), [], 1 << 60])
def test_a_prefill_that_names_remote_blocks_is_computed_here(bench, tokens):
    """vLLM would park such a request for ever, or end its engine on a wrong type."""
    names = {"remote_engine_id": "d", "remote_request_id": "r", "remote_host": "h", "remote_port": 1}
    params = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_num_tokens": tokens, **names}
    request = bench.add("cmpl-x-0-00000001", 80, params)
    bench.step(2)
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    bench.core.end_lease(request.request_id, "released")
    bench.drain()
    bench.check_empty()


@pytest.mark.parametrize("params", [[], "x", 7, {"do_remote_decode": True, "do_remote_prefill": True}])
def test_parameters_of_no_use_are_ignored(bench, params):
    request = bench.add("cmpl-x-0-00000001", params=params)
    bench.step()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert bench.scheduler.replies[request.request_id] is None
    # A read-back is a handoff that is not loaded.
    assert bench.core.failures == ([(request.request_id, "invalid")] if isinstance(params, dict) else [])
    bench.drain()
    bench.check_empty()


@pytest.mark.parametrize("name", ["router_request_id", "router_user"])
@pytest.mark.parametrize("value", [7, None, "", "x" * 513, ["x"], {}])
def test_odd_names_are_not_passed_on(bench, name, value):
    request = bench.prefill(**{"router": None, name: value})
    bench.step()
    assert name not in bench.scheduler.replies[request.request_id]
    bench.core.end_lease(request.request_id, "released")
    bench.drain()
    bench.check_empty()


# Naps and snapshots


def test_an_idle_engine_with_leases_naps_until_there_is_news():
    bench = Bench(nap=True)
    request = bench.prefill()
    bench.step(10)
    assert bench.engine.naps >= 4
    naps = bench.engine.naps
    bench.core.end_lease(request.request_id, "released")
    bench.step()
    assert bench.engine.naps == naps, "no nap while the core has news"
    assert bench.engine.wakes == 1
    bench.drain()
    assert bench.engine.naps == naps, "without leases the engine waits by itself"
    bench.check_empty()


def test_batches_in_flight_are_empty_before_a_nap():
    steps = {}
    for batches in (0, 2):
        bench = Bench(nap=True)
        bench.engine.batches_max = batches
        request = bench.prefill()
        steps[batches] = 0
        while not bench.engine.naps:
            bench.step()
            steps[batches] += 1
        bench.core.end_lease(request.request_id, "released")
        bench.drain()
        bench.check_empty()
    assert steps[0] > 1 and steps[2] == steps[0] + 2


@pytest.mark.parametrize("setting", ["any", "off", "running"])
def test_no_nap(setting):
    bench = Bench(nap=setting != "off", peers="any" if setting == "any" else "strict")
    request = bench.prefill()
    bench.step()
    if setting == "running":
        bench.add("cmpl-w-0-00000003", max_tokens=1000)
    bench.step(10)
    assert bench.engine.naps == 0
    bench.core.end_lease(request.request_id, "released")
    bench.step()


def test_a_snapshot_adds_up(bench):
    bench.prefill()
    bench.step(2)
    decode = bench.decode()
    bench.step()
    bench.add("cmpl-w-0-00000003", max_tokens=1000)
    bench.step()
    bench.core.bits |= 8
    bench.news()
    (shot,) = bench.core.snapshots
    leased = sum(bench.half.lent.values())
    assert shot["free"] + shot["cached"] + shot["active"] + shot["landing"] + leased == bench.total
    assert (leased, shot["landing"]) == (2, 2)
    assert (shot["waiting"], shot["running"]) == (1, 1)
    assert decode.status == Status.WAITING_FOR_REMOTE_KVS
