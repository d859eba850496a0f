"""Every order of up to six events: blocks are freed once, each rank reports once, no id is unknown, nothing is left.

The scheduler's assertions are vLLM's. `step` lets the engine make progress; the other events happen between steps.
"""

import itertools
import logging
import os

import pytest

import fakes
from harness import BLOCK, Bench, Status

# Of the first variant of each test; the others have orders up to two shorter. Each length takes four times longer.
LENGTH = int(os.environ.get("BATON_TEST_ORDERS", 6))


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of refusals would fill the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def orders(events, first):
    """Every order of some of the events; an event may be given several times."""
    for length in range(1, LENGTH + (1 if first else -1)):
        yield from dict.fromkeys(itertools.permutations(events, length))


# The producer

PRODUCER = ["finish", "release", "abort", "expire", "ack0", "ack1", "step"]


def run_producer(order, engine):
    bench = Bench(engine=engine, blocks=4)
    bench.scheduler.budget = 1
    request = bench.add("cmpl-x-0-00000001", 3 * BLOCK, {"do_remote_decode": True, "router_request_id": "x"})
    bench.step()
    for event in order:
        if event == "finish":
            bench.scheduler.budget = 64
            bench.step()
        elif event == "release":
            bench.core.release("x")
        elif event == "abort":
            bench.abort(request)
        elif event == "expire":
            bench.core.end_lease(request.request_id, "expired")
        elif event == "step":
            bench.step()
        else:
            bench.acknowledge(request, int(event[-1]))
    return bench, request


def end_producer(bench, request):
    bench.scheduler.budget = 64
    bench.step(2)
    bench.core.end_lease(request.request_id, "expired")
    bench.drain()


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "no engine"])
def test_producer(engine):
    for order in orders(PRODUCER, engine):
        try:
            bench, request = run_producer(order, engine)
            end_producer(bench, request)
            lent = request.request_id in bench.core.leases
            bench.check_empty(partial=not lent and ("ack0" in order or "ack1" in order))
            assert bench.pool.frees[request.request_id] == 1
            reply = bench.scheduler.replies.get(request.request_id)
            assert lent == bool(reply and "remote_handle" in reply)
            if lent:
                assert all(report[request.request_id] == 1 for report in bench.reports)
                assert bench.core.named("freed") == [{"id": request.request_id, "blocks": 3}]
            if "release" in order and "finish" in order and order.index("release") < order.index("finish"):
                assert not lent, "a release before the finish lends nothing"
        except BaseException as error:
            raise AssertionError(f"order {', '.join(order)}") from error


# The consumer

CONSUMER = ["step", "step", "land0", "land1", "fail0", "verdict", "abort"]


def run_consumer(order, verdict, recompute):
    bench = Bench(recompute=recompute, blocks=4)
    request = bench.decode()
    bench.core.answers[request.request_id] = "pending"
    for event in order:
        if event == "step":
            bench.step()
        elif event == "abort":
            bench.abort(request)
        elif event == "verdict":
            bench.core.decide(request.request_id, verdict)
        else:
            bench.land(request, [int(event[-1])], ok=event.startswith("land"))
    return bench, request


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
@pytest.mark.parametrize("verdict", ["valid", "gone"])
def test_consumer(verdict, recompute):
    for order in orders(CONSUMER, recompute and verdict == "valid"):
        try:
            bench, request = run_consumer(order, verdict, recompute)
            bench.step()
            bench.land(request)
            bench.step()
            bench.core.decide(request.request_id, verdict)
            bench.drain()
            for nixl in bench.nixl:
                nixl.landed.clear()
                nixl.failed.clear()
            bench.check_empty()
            check_consumer(bench, request, order, verdict, recompute)
        except BaseException as error:
            raise AssertionError(f"order {', '.join(order)}") from error


def check_consumer(bench, request, order, verdict, recompute):
    used = request.request_id in bench.pool.hashed
    fetched = [e["result"] for e in bench.core.history if e["kind"] == "fetched"]
    assert len(fetched) <= 1 and (not used or fetched == ["landed"])
    good = verdict == "valid" and not any(nixl.lost for nixl in bench.nixl)
    assert not used or good
    if "abort" not in order:
        assert used == good
        expected = Status.FINISHED_LENGTH_CAPPED if good or recompute else Status.FINISHED_ERROR
        assert request.status == expected
    assert bench.pool.frees.get(request.request_id, 0) <= 1 + (recompute and not used)


# A lease ends and two requests use one producer's engine


def test_two_requests_share_nothing():
    events = ["finish", "release", "abort", "step", "other released"]
    for order in itertools.permutations(events):
        try:
            bench, request = None, None
            bench = Bench()
            bench.scheduler.budget = 1
            request = bench.prefill()
            other = bench.add("cmpl-z-0-00000009", params={"do_remote_decode": True, "router_request_id": "z"})
            for event in order:
                {
                    "finish": lambda: (setattr(bench.scheduler, "budget", 64), bench.step()),
                    "release": lambda: bench.core.release("x"),
                    "abort": lambda: bench.abort(request),
                    "step": bench.step,
                    "other released": lambda: bench.core.release("z"),
                }[event]()
            end_producer(bench, request)
            bench.core.end_lease(other.request_id, "expired")
            bench.drain()
            bench.check_empty()
        except BaseException as error:
            raise AssertionError(f"order {', '.join(order)}") from error


def test_children_in_every_order():
    """Two children of one request share a handoff: one may leave while the other reads."""
    events = [(kind, k) for k in (0, 1) for kind in ("land", "verdict", "abort")]
    for order in itertools.permutations(events, 4):
        bench = Bench(ranks=1)
        children = []
        for k in (0, 1):
            params = fakes.handoff(2 * BLOCK)
            children.append(bench.add(f"{k}_cmpl-y-0-00000002", params=params, max_tokens=2))
            bench.core.answers[children[k].request_id] = "pending"
        bench.step()
        for kind, k in order:
            child = children[k]
            if kind == "land":
                bench.land(child)
            elif kind == "verdict":
                bench.core.decide(child.request_id, "valid")
            else:
                bench.abort(child)
            bench.step()
        for child in children:
            bench.land(child)
            bench.step()
            bench.core.decide(child.request_id, "valid")
        bench.drain()
        bench.nixl[0].landed.clear()
        bench.check_empty()
