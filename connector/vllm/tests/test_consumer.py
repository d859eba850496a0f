"""The consumer: blocks count only after P's word, every load ends once, and client input ends no engine."""

import copy
import types

import pytest

import fakes
from baton_vllm.core import CoreError
from harness import BLOCK, Bench, Status

POLICIES = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])


def reason(bench, request):
    return [word for id, word in bench.core.left if id == request.request_id]


def results(bench, request):
    return [e["result"] for e in bench.core.history if e["id"] == request.request_id and e["kind"] == "fetched"]


def check_loaded(bench, request):
    """It was verified, used and computed to its end."""
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert request.request_id in bench.pool.hashed
    assert results(bench, request) == ["landed"] and reason(bench, request) == []
    check_failures(bench, [])
    bench.check_empty()


def check_failures(bench, expected):
    """Each load that did not deliver counts once, and no failure is a late event."""
    assert bench.core.failures == expected
    assert bench.core.late == len(bench.core.named("late"))


def check_not_loaded(bench, request, recompute, result="gone", why="lease_over"):
    """The prompt was computed here, or the request failed. Nothing unverified entered the prefix cache."""
    assert request.status == (Status.FINISHED_LENGTH_CAPPED if recompute else Status.FINISHED_ERROR)
    assert request.request_id not in bench.pool.hashed
    assert results(bench, request) == [result]
    check_failures(bench, [(request.request_id, why)])
    bench.check_empty()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_valid_within_the_step(ranks):
    bench = Bench(ranks=ranks)
    request = bench.decode()
    bench.step()
    assert request.status == Status.WAITING_FOR_REMOTE_KVS
    assert bench.core.named("begin") == [{"id": request.request_id}]
    for rank in range(ranks):
        assert not bench.core.named("done")
        bench.land(request, [rank])
        bench.step()
    assert request.status == Status.WAITING_FOR_REMOTE_KVS and len(bench.core.named("done")) == 1
    bench.step()
    assert request.status == Status.RUNNING, "a verified load loses no step"
    bench.drain()
    check_loaded(bench, request)


@pytest.mark.parametrize("delay", [0, 3])
def test_pending_then_valid(delay):
    bench = Bench()
    request = bench.decode()
    bench.core.answers[request.request_id] = "pending"
    bench.step()
    bench.land(request)
    bench.step(1 + delay)
    assert request.status == Status.WAITING_FOR_REMOTE_KVS and request.request_id not in bench.pool.hashed
    bench.core.decide(request.request_id, "valid")
    bench.drain()
    check_loaded(bench, request)


@POLICIES
@pytest.mark.parametrize(
    "word, why",
    [
        ("lease_over", "lease_over"),
        ("forged", "forged"),
        ("timeout", "unverified"),
        ("unreachable", "unverified"),
    ],
)
def test_pending_then_gone(recompute, word, why):
    bench = Bench(recompute=recompute)
    request = bench.decode()
    bench.core.answers[request.request_id] = "pending"
    bench.step()
    bench.land(request)
    bench.step(3)
    bench.core.decide(request.request_id, "gone", word)
    bench.drain()
    check_not_loaded(bench, request, recompute, why=why)


@POLICIES
def test_gone_within_the_step(recompute):
    bench = Bench(recompute=recompute)
    request = bench.decode()
    bench.core.answers[request.request_id] = "gone"
    bench.step()
    bench.land(request)
    bench.drain()
    check_not_loaded(bench, request, recompute)


@POLICIES
def test_gone_before_the_allocation(recompute):
    bench = Bench(recompute=recompute)
    request = bench.decode()
    bench.core.loads[request.request_id] = "gone"
    bench.drain()
    assert not bench.nixl[0].all_reads and not bench.core.named("begin"), "nothing is read"
    assert not any(nixl.notifications for nixl in bench.nixl)
    check_not_loaded(bench, request, recompute)


def test_nothing_of_a_handoff_reaches_nixl_before_the_producer_has_answered():
    bench = Bench()
    bench.core.hold = "holding"
    request = bench.decode()
    bench.step(5)
    assert request.status == Status.WAITING and not bench.nixl[0].all_reads
    assert not bench.half.stock._heartbeat_by_engine, "a heartbeat would connect to the handoff's host"
    bench.core.loads[request.request_id] = "live"
    bench.step()
    bench.land(request)
    bench.drain()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and results(bench, request) == ["landed"]
    bench.check_empty()


def test_silent_producers_delay_a_step_once():
    bench = Bench()
    bench.core.hold = "holding"
    for k in range(4):
        bench.add(f"{k}_cmpl-y-0-00000002", params=fakes.handoff(2 * BLOCK), max_tokens=2)
    for _ in range(3):
        bench.core.calls.clear()
        bench.step()
        waits = [call["wait_us"] for call in bench.core.named("state")]
        assert len(waits) == 4 and sorted(waits)[:3] == [0, 0, 0] and max(waits) > 0


def test_gone_between_the_match_and_the_allocation():
    bench = Bench()
    request = bench.decode()
    match = bench.connector.get_num_new_matched_tokens

    def then_gone(*arguments):
        result = match(*arguments)
        if request.request_id in bench.core.loads:
            bench.core.loads[request.request_id] = "gone"
        return result

    bench.connector.get_num_new_matched_tokens = then_gone
    bench.drain()
    assert not bench.nixl[0].all_reads
    check_not_loaded(bench, request, recompute=True)


def test_full_local_hit_leaves_and_reads_nothing():
    bench = Bench()
    request = bench.decode(cached=2 * BLOCK)
    bench.drain()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert reason(bench, request) == ["cached"] and results(bench, request) == []
    assert not any(nixl.notifications or nixl.all_reads for nixl in bench.nixl)
    bench.check_empty()


def test_partial_local_hit_reads_the_rest():
    bench = Bench()
    request = bench.decode(tokens=3 * BLOCK, cached=BLOCK)
    bench.step()
    assert [len(group) for group in bench.nixl[0].reads[request.request_id].local_block_ids] == [2]
    bench.land(request)
    bench.drain()
    check_loaded(bench, request)


def test_the_workers_notification_means_nothing_to_a_producer():
    bench = Bench()
    request = bench.decode()
    bench.step()
    bench.land(request)
    bench.drain()
    for nixl in bench.nixl:
        assert nixl.all_reads[request.request_id].remote.request_id == "HB:cmpl-p-0-00000000"
        assert nixl.notifications == ["HB:cmpl-p-0-00000000:1"]
    check_loaded(bench, request)


@POLICIES
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_failed_transfer(recompute, ranks):
    bench = Bench(recompute=recompute)
    request = bench.decode()
    bench.step()
    bench.land(request, ranks, ok=False)
    bench.step()
    bench.land(request, [rank for rank in (0, 1) if rank not in ranks])
    bench.drain()
    assert not bench.core.named("done")
    check_not_loaded(bench, request, recompute, "failed", "transfer")


# Aborts


def test_abort_in_the_queue():
    bench = Bench()
    request = bench.decode()
    bench.abort(request)
    bench.drain()
    assert reason(bench, request) == ["request_ended"] and results(bench, request) == []
    assert not any(nixl.notifications for nixl in bench.nixl), "leave takes the place of the notification"
    bench.check_empty()


def test_abort_between_allocation_and_metadata():
    """vLLM 0.33 starts deferred loads outside of `schedule`."""
    bench = Bench()
    request = bench.decode()
    build = bench.connector.build_connector_meta

    def abort_first(output):
        if not request.is_finished():
            bench.abort(request)
        return build(output)

    bench.connector.build_connector_meta = abort_first
    bench.step()
    bench.land(request)
    bench.drain()
    assert results(bench, request) == ["stopped"]
    bench.check_empty()


@pytest.mark.parametrize("landed", [[], [0], [0, 1]])
def test_abort_while_reading(landed):
    bench = Bench()
    request = bench.decode()
    bench.step()
    bench.land(request, landed)
    if landed != [0, 1]:
        bench.step()
    bench.abort(request)
    bench.step(3)
    if landed != [0, 1]:
        assert bench.pool.get_num_free_blocks() < bench.total, "the workers may still write"
    bench.land(request, [rank for rank in (0, 1) if rank not in landed])
    bench.drain()
    assert reason(bench, request) == ["request_ended"] and results(bench, request) == ["stopped"]
    # The second one ends the producer's wait for the read.
    assert [call["reason"] for call in bench.core.named("leave")] == ["request_ended", "load_failed"]
    assert not bench.core.named("done")
    bench.check_empty()


@pytest.mark.parametrize("verdict", ["valid", "gone", None])
@pytest.mark.parametrize("steps", [0, 1])
def test_abort_while_verifying(verdict, steps):
    bench = Bench()
    request = bench.decode()
    bench.core.answers[request.request_id] = "pending"
    bench.step()
    bench.land(request)
    bench.step()
    bench.abort(request)
    bench.step(steps)
    if verdict:
        bench.core.decide(request.request_id, verdict)
    bench.drain()
    assert results(bench, request) == ["stopped"] and request.request_id not in bench.pool.hashed
    bench.check_empty()


@POLICIES
@pytest.mark.parametrize("verdict", ["valid", "gone"])
def test_abort_after_the_verdict_and_before_the_report(verdict, recompute):
    bench = Bench(recompute=recompute)
    request = bench.decode()
    bench.core.answers[request.request_id] = "pending"
    bench.step()
    bench.land(request)
    bench.step()
    bench.core.decide(request.request_id, verdict)
    bench.news()
    bench.half.orders = bench.half.orders_of_step(type("Meta", (), {"reqs_to_recv": {}}))
    bench.abort(request)
    bench.drain()
    assert request.status == Status.FINISHED_ABORTED and request.request_id not in bench.pool.hashed
    assert len(results(bench, request)) == 1, "one load has one result"
    bench.check_empty()


def test_abort_after_the_load_has_passed():
    for steps in (0, 1, 2):
        bench = Bench()
        request = bench.decode(max_tokens=100)
        bench.step()
        bench.land(request)
        bench.step(1 + steps)
        bench.abort(request)
        bench.drain()
        assert results(bench, request) == ["landed"] and reason(bench, request) == []
        bench.check_empty()


# What arrives


@pytest.mark.parametrize("stage", ["unknown", "queued", "no load", "passed", "reading twice"])
def test_ids_of_finished_recving_that_are_no_loads_in_flight_are_dropped(stage):
    bench = Bench()
    named = "cmpl-unknown"
    if stage == "queued":
        # No block is free, so that it waits.
        other = bench.add("cmpl-w-0-00000003", 32 * BLOCK, max_tokens=1000)
        bench.step()
        named = bench.decode().request_id
    elif stage == "no load":
        named = bench.add("cmpl-w-0-00000003", max_tokens=1000).request_id
        bench.step()
    elif stage == "passed":
        request = bench.decode(max_tokens=1000)
        bench.step()
        bench.land(request)
        bench.step(2)
        named = request.request_id
    if stage == "reading twice":
        request = bench.decode(max_tokens=3)
        bench.core.answers[request.request_id] = "pending"
        bench.step()
        bench.land(request)
        bench.step()
        named = request.request_id
    for worker in bench.workers:
        worker._worker_half.orders.landed.append(named)
    bench.step()
    assert bench.core.named("late") == [{"id": named}]
    if stage == "reading twice":
        bench.core.decide(named, "valid")
        bench.drain()
        check_loaded(bench, request)
    if stage == "queued":
        bench.abort(other)
        bench.step(2)


WRONG_LENGTHS = {
    "fewer blocks": {"remote_block_ids": [[100]]},
    "no block": {"remote_block_ids": [[]]},
    "more blocks": {"remote_block_ids": [[100, 101, 102]]},
    "no group": {"remote_block_ids": []},
    "two groups": {"remote_block_ids": [[100, 101], [100, 101]]},
    "larger blocks": {"remote_block_size": 2 * BLOCK, "remote_block_ids": [[100]]},
}


@POLICIES
@pytest.mark.parametrize("case", WRONG_LENGTHS)
def test_forged_lengths_are_never_read(case, recompute):
    """The core's check is not trusted with what ends the workers."""
    bench = Bench(recompute=recompute)
    request = bench.decode(**WRONG_LENGTHS[case])
    if case == "no group":
        # vLLM's scheduler half asserts that nothing is loaded then.
        assert request.kv_transfer_params is None
        bench.drain()
        check_failures(bench, [(request.request_id, "invalid")])
        return
    bench.drain()
    assert not bench.nixl[0].all_reads and not bench.core.named("begin")
    check_not_loaded(bench, request, recompute, "failed", "refused")


def test_a_prompt_that_ends_within_a_block_fits():
    bench = Bench()
    request = bench.decode(tokens=2 * BLOCK + 1)
    bench.step()
    bench.land(request)
    bench.drain()
    check_loaded(bench, request)


HOSTILE = [None, True, 7, -1, 1.5, float("nan"), float("inf"), "", "x" * 100000, [], {}, [[[]]], {"a": {"b": []}}]


@pytest.mark.parametrize("name", sorted(fakes.handoff(8)))
def test_hostile_values_end_no_engine(name):
    """The fake core admits nearly everything; what it cannot parse must not end the engine either."""
    for value in [*HOSTILE, ...]:
        bench = Bench()
        bench.core.invalid = {"invalid": f"kv_transfer_params.{name}", "stock": False}
        params = fakes.handoff(2 * BLOCK)
        params[name] = copy.deepcopy(value)
        if value is ...:
            del params[name]
        request = bench.add("cmpl-y-0-00000002", params=params)
        bench.drain()
        assert request.status == Status.FINISHED_LENGTH_CAPPED
        assert not bench.nixl[0].all_reads
        for lease in list(bench.core.leases):
            bench.core.end_lease(lease, "released")
        bench.drain()
        bench.check_empty()


def test_deep_nesting_is_refused():
    nested = []
    for _ in range(300):
        nested = [nested]
    bench = Bench()
    request = bench.decode(remote_block_ids=nested)
    assert request.kv_transfer_params is None
    bench.drain()
    bench.check_empty()


# Peers without the contract


def test_a_stock_handoff_is_not_read_under_strict():
    bench = Bench()
    request = bench.decode(remote_handle=...)
    assert request.kv_transfer_params is None
    bench.drain()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and not bench.nixl[0].all_reads
    check_failures(bench, [(request.request_id, "stock")])
    bench.check_empty()


@POLICIES
@pytest.mark.parametrize("ok", [True, False])
def test_a_stock_handoff_is_read_as_by_vllm_under_any(recompute, ok):
    bench = Bench(peers="any", recompute=recompute)
    request = bench.decode(remote_handle=...)
    bench.step()
    assert bench.nixl[0].reads[request.request_id].remote.request_id == "cmpl-p-0-00000000"
    bench.land(request, ok=ok)
    bench.drain()
    assert request.status == (Status.FINISHED_LENGTH_CAPPED if ok or recompute else Status.FINISHED_ERROR)
    assert bench.nixl[0].notifications == (["cmpl-p-0-00000000:1"] if ok else [])
    assert not bench.core.named("begin") and not bench.core.named("done")
    assert bench.core.unverified == ([(request.request_id, True)] if ok else [])
    check_failures(bench, [] if ok else [(request.request_id, "transfer")])
    bench.check_empty()


@POLICIES
def test_a_late_read_from_a_stock_producer_is_not_used(recompute):
    bench = Bench(peers="any", recompute=recompute)
    request = bench.decode(remote_handle=...)
    bench.step()
    # More than a third of the lease has passed since the handoff arrived.
    bench.half.requests[request.request_id].arrived -= bench.half.lease_s / 2
    bench.land(request)
    bench.drain()
    assert bench.core.unverified == [(request.request_id, False)]
    assert results(bench, request) == ["gone"]
    assert request.status == (Status.FINISHED_LENGTH_CAPPED if recompute else Status.FINISHED_ERROR)
    check_failures(bench, [(request.request_id, "unverified")])
    bench.check_empty()


@POLICIES
@pytest.mark.parametrize("broken", ["queued", "admit", "state", "begin", "done", "events", "aborted", "leave"])
def test_a_broken_core_ends_no_engine_and_verifies_nothing(recompute, broken):
    bench = Bench(recompute=recompute)
    call = bench.core.call

    def fail(op, **fields):
        if op == broken:
            raise CoreError("panicked")
        return call(op, **fields)

    bench.core.call = fail
    request = bench.decode()
    bench.step()
    if bench.nixl[0].reads:
        bench.land(request)
    bench.drain()
    # `core.answers` says "valid" for every load that is asked about.
    verified = broken not in ("admit", "state", "done")
    assert bench.half.requests == {}
    failed = broken in ("state", "done") and not recompute
    assert request.status == (Status.FINISHED_ERROR if failed else Status.FINISHED_LENGTH_CAPPED)
    passed = [event for event in bench.core.history if event.get("result") == "landed"]
    assert not passed or verified


def test_a_malformed_handoff_is_not_read_under_any():
    bench = Bench(peers="any")
    bench.core.invalid = {"invalid": "kv_transfer_params.remote_port", "stock": False}
    request = bench.decode(remote_handle=...)
    bench.drain()
    assert request.kv_transfer_params is None and not bench.nixl[0].all_reads
    check_failures(bench, [(request.request_id, "invalid")])
    bench.check_empty()


def test_a_stock_handoff_with_forged_lengths_is_not_read_under_any():
    bench = Bench(peers="any")
    request = bench.decode(remote_handle=..., remote_block_ids=[[100]])
    bench.drain()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and not bench.nixl[0].all_reads
    check_failures(bench, [(request.request_id, "refused")])
    bench.check_empty()


@pytest.mark.parametrize("cached", [0, 2 * BLOCK])
def test_abort_and_full_hit_of_a_stock_handoff_notify_its_producer(cached):
    bench = Bench(peers="any", ranks=1)
    request = bench.decode(remote_handle=..., cached=cached)
    if not cached:
        bench.abort(request)
    bench.drain()
    assert bench.nixl[0].notifications == ["cmpl-p-0-00000000:1"]
    bench.check_empty()


@POLICIES
@pytest.mark.parametrize("landed", [[], [0], [0, 1]])
@pytest.mark.parametrize("ok", [True, False])
def test_abort_while_reading_from_a_stock_producer(recompute, landed, ok):
    bench = Bench(peers="any", recompute=recompute)
    request = bench.decode(remote_handle=...)
    bench.step()
    bench.land(request, landed, ok)
    if landed != [0, 1]:
        bench.step()
    bench.abort(request)
    bench.land(request, [rank for rank in (0, 1) if rank not in landed])
    bench.drain()
    assert results(bench, request) == ["stopped"] and reason(bench, request) == []
    bench.check_empty()


def test_children_of_one_request_load_apart():
    bench = Bench()
    children = []
    for k in range(3):
        params = fakes.handoff(2 * BLOCK)
        children.append(bench.add(f"{k}_cmpl-y-0-00000002", params=params, max_tokens=2))
    bench.step()
    bench.abort(children[0])
    bench.land(children[1])
    bench.step(2)
    bench.land(children[2])
    bench.land(children[0])
    bench.drain()
    assert [results(bench, child) for child in children] == [["stopped"], ["landed"], ["landed"]]
    bench.check_empty()


def test_a_second_report_of_a_load_that_is_gone_does_not_pass():
    bench = Bench()
    request = bench.decode()
    bench.core.answers[request.request_id] = "gone"
    bench.step()
    bench.land(request)
    bench.step()
    assert bench.half.on_received({request.request_id}, set()) == set()
    bench.drain()
    assert bench.core.late == 1
    check_not_loaded(bench, request, recompute=True)


@pytest.mark.parametrize("name, values", {
    "remote_block_ids": [..., None, [], [[]], [100], [7], [[100, "x"]], [[100, -1]], [[100, 101], [1]], "ab", {}],
    "remote_engine_id": [..., None, "", 7, []],
    "remote_request_id": [..., None, "", 7, []],
    "remote_host": [..., None, "", 7],
    "remote_port": [..., None, 0, "5600", 1.5],
    "tp_size": [..., None, 0, "1"],
    "dcp_size": [None, 0, "1"],
}.items())
def test_incomplete_stock_handoffs_are_not_read_under_any(name, values):
    for value in values:
        bench = Bench(peers="any")
        bench.core.invalid = {"invalid": "kv_transfer_params.remote_handle is missing", "stock": True}
        request = bench.decode(remote_handle=..., **{name: copy.deepcopy(value)})
        bench.drain()
        assert request.status == Status.FINISHED_LENGTH_CAPPED and not bench.nixl[0].all_reads, value
        check_failures(bench, [(request.request_id, "invalid")])
        bench.check_empty()


def notice(bench, params):
    """What vLLM's front end adds and ends when it has refused a request."""
    request = bench.add("cmpl-r", tokens=1, params=params, notice=True)
    bench.abort(request)
    bench.drain()
    assert bench.core.late == 0 and {op for op, _ in bench.core.calls} <= {"give_back", "pool", "take"}
    bench.check_empty()
    return bench.core.named("give_back")


@pytest.mark.parametrize("peers", ["strict", "any"])
def test_the_lease_of_a_refused_request_goes_back(peers):
    params = fakes.handoff(2 * BLOCK)
    assert notice(Bench(peers=peers), dict(params)) == [{"params": params}]
    # A router settles its own requests, and a prefill has nothing to give back.
    assert not notice(Bench(peers=peers), dict(params, router_request_id="y"))
    for other in (None, "x", {}, {"do_remote_decode": True}, {"do_remote_prefill": True}):
        assert not notice(Bench(peers=peers), other)


@pytest.mark.parametrize("peers", ["strict", "any"])
def test_a_refused_stock_handoff_notifies_its_producer_under_any(peers):
    bench = Bench(peers=peers, ranks=1)
    assert not notice(bench, fakes.handoff(2 * BLOCK, remote_handle=...))
    assert bench.nixl[0].notifications == (["cmpl-p-0-00000000:1"] if peers == "any" else [])
    bench = Bench(peers=peers, ranks=1)
    assert not notice(bench, fakes.handoff(2 * BLOCK, remote_handle=..., remote_port="no"))
    assert not bench.nixl[0].notifications


@pytest.mark.parametrize("params", [{"remote_block_ids": [[0] * 70000]}, {"remote_host": "x" * 1000}])
def test_a_handoff_of_another_size_does_not_reach_the_core(params):
    bench = Bench()
    request = bench.decode(**params)
    bench.drain()
    assert request.status == Status.FINISHED_LENGTH_CAPPED and not bench.core.named("admit")
    check_failures(bench, [(request.request_id, "invalid")])
    bench.check_empty()
