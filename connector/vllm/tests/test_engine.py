"""The queues of an EngineCore, and the thread that waits for the core."""

import collections
import queue
import threading
import time
import types

import pytest

import fakes
import harness
from baton_vllm import core as bits
from baton_vllm.engine import Engine, Waiter

needs_vllm = pytest.mark.skipif(harness.REASON is not None, reason=str(harness.REASON))


def engine():
    answered = []
    core = types.SimpleNamespace(
        input_queue=queue.Queue(),
        aborts_queue=queue.Queue(),
        batch_queue=None,
        answered=answered,
        _send_abort_outputs_to_client=lambda ids, client: answered.append((ids, client)),
    )
    return Engine(core), core


@needs_vllm
def test_aborts_reach_both_queues_as_from_vllms_socket_thread():
    from vllm.v1.engine import EngineCoreRequestType

    wrapper, core = engine()
    wrapper.abort(["a", "b"])
    assert core.aborts_queue.get_nowait() == ["a", "b"]
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.ABORT, ["a", "b"])
    wrapper.wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    del core.aborts_queue
    wrapper.abort(["c"])
    assert core.input_queue.qsize() == 1
    wrapper.answer_aborted("a", 3)
    assert core.answered == [(["a"], 3)]


@needs_vllm
def test_notices_of_refused_requests_have_ids_of_their_own():
    wrapper, core = engine()
    core.preprocess_add_request = lambda request: (request, 7)
    wrapper.rename_notices()

    def add(notice):
        return core.preprocess_add_request(types.SimpleNamespace(request_id="a", abort_immediately=notice))

    plain, wave = add(False)
    assert (plain.request_id, wave) == ("a", 7)
    ids = {add(True)[0].request_id for _ in range(3)}
    assert len(ids) == 3 and "a" not in ids


@needs_vllm
def test_a_nap_ends_with_the_next_message():
    wrapper, core = engine()
    wrapper.wake()
    began = time.monotonic()
    wrapper.nap(30)
    assert core.input_queue.qsize() == 1, "a nap takes nothing"
    core.input_queue.get_nowait()
    threading.Timer(0.05, wrapper.wake).start()
    wrapper.nap(30)
    assert time.monotonic() - began < 20
    core.input_queue.get_nowait()
    wrapper.nap(0.01)
    assert core.input_queue.empty()


@needs_vllm
def test_an_engine_drains_from_the_signal_on():
    from vllm.v1.engine.core import EngineShutdownState

    wrapper, core = engine()
    assert not wrapper.is_draining, "a harness without the state"
    for state in EngineShutdownState:
        core.shutdown_state = state
        assert wrapper.is_draining == (state.name != "RUNNING")


def test_the_core_learns_of_the_drain_once():
    bench = harness.Bench()
    request = bench.prefill()
    bench.step(2)
    assert bench.core.named("draining") == []
    bench.engine.is_draining = True
    bench.step(3)
    assert bench.core.named("draining") == [{}]
    bench.core.end_lease(request.request_id, "released")
    bench.drain()
    bench.check_empty()


@needs_vllm
def test_an_engine_is_found_only_while_it_constructs():
    from vllm.v1.engine.core import EngineCore

    assert Engine.find() is None
    made = EngineCore.__new__(EngineCore)
    made.input_queue = queue.Queue()
    found = construct(made)
    assert found._core is made and found.can_nap and found.batches_max == 0
    made.batch_queue = collections.deque(maxlen=2)
    assert found.batches_max == 2
    del made.input_queue
    assert construct(made) is None


def construct(self):
    """As the constructor of a connector is called: some frames below a method of the engine."""
    return (lambda: (lambda: Engine.find())())()


@needs_vllm
def test_ranks_that_step_together_do_not_nap():
    from vllm.v1.engine.core import DPEngineCoreProc

    assert not Engine(DPEngineCoreProc.__new__(DPEngineCoreProc)).can_nap


class ScriptedCore(fakes.FakeCore):
    """A core whose waits return the given bits, then that it stops."""

    def __init__(self, *script):
        super().__init__()
        self.script = list(script)

    def wait(self, timeout_ms):
        return self.script.pop(0) if self.script else bits.STOPPING


def test_the_waiter_passes_news_on_until_the_core_stops():
    seen = []
    waiter = Waiter(ScriptedCore(0, bits.ENDED, 0, bits.POOL | bits.ABORTS), seen.append)
    waiter.start()
    waiter.join(timeout=5)
    assert not waiter.is_alive() and seen == [bits.ENDED, bits.POOL | bits.ABORTS]


@pytest.mark.parametrize(
    "error", [fakes.CoreError("no core 1"), KeyError("x"), RuntimeError("dictionary changed size")]
)
def test_a_fault_does_not_end_the_waiter(error):
    seen = []

    def news(found):
        seen.append(found)
        raise error

    waiter = Waiter(ScriptedCore(bits.ENDED, bits.ENDED), news)
    waiter.run()
    assert seen == [bits.ENDED, bits.ENDED]


def test_a_stopped_waiter_passes_nothing_on():
    waiter = Waiter(ScriptedCore(bits.ENDED, bits.ENDED), pytest.fail)
    waiter.stop()
    waiter.run()


def test_news_of_the_waiter_reach_the_next_step_in_order():
    bench = harness.Bench()
    first, second = bench.prefill("cmpl-a-0-00000001", "a"), bench.prefill("cmpl-b-0-00000002", "b")
    bench.step(2)
    bench.core.release("a")
    bench.half.on_news(bench.core.bits)
    bench.core.release("b")
    bench.half.on_news(bench.core.bits)
    assert bench.engine.wakes == 2 and bench.core.pending() == 0
    bench.step()
    assert bench.pool.get_num_free_blocks() == bench.total
    assert {first.request_id, second.request_id} == set(bench.pool.frees)
    bench.drain()
    bench.check_empty()
