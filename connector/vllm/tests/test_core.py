"""The Rust core itself, if `BATON_VLLM_CORE` names its library: two cores in one process as producer and consumer."""

import ctypes
import json
import os
import time
import urllib.error
import urllib.request

import pytest

from baton_vllm import core as bits
from baton_vllm.core import Core, CoreError, load_library
from baton_vllm.engine import Waiter

LIBRARY = os.environ.get("BATON_VLLM_CORE")
MISSING = None if LIBRARY and os.path.exists(LIBRARY) else "the Rust core (BATON_VLLM_CORE names no library)"
needs_core = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LAYOUT = "00000000000000bb"
PROMPT = "00000000000000cc00000000000000dd"


def config(**changes):
    given = {
        "http": "127.0.0.1:0",
        "channel": "127.0.0.1:0",
        "channel_host": None,
        "secret_file": None,
        "previous_secret_file": None,
        "lease_s": 30,
        "rank": 0,
        "engine": "vllm test",
        "engine_id": "e",
        "nixl_port": 5600,
        "blocks": 64,
        "block_tokens": 16,
        "policy": "recompute",
        "model": "m",
    }
    given.update(changes)
    return given


@pytest.fixture
def start():
    started = []

    def run(**changes):
        core = Core(config(**changes))
        started.append(core)
        core.call("layout", layout=LAYOUT)
        return core

    yield run
    for core in started:
        core.stop()


def post(core, path, secret=None, **body):
    headers = {"content-type": "application/json", **({"x-baton-cluster-secret": secret} if secret else {})}
    request = urllib.request.Request(f"http://{core.http}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(core, path):
    with urllib.request.urlopen(f"http://{core.http}{path}", timeout=5) as answer:
        return answer.read().decode()


def until(what, seconds=5.0):
    """Waits for a state, bounded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.005)
    raise AssertionError("the state did not come")


def queue(core, id="cmpl-x-0-0a1b2c3d", request_id="x", leg="prefill"):
    return core.call("queued", id=id, request_id=request_id, leg=leg, prompt=40, tag=None)["released"]


def lend(core, id="cmpl-x-0-0a1b2c3d", request_id="x", blocks=(5, 6, 7)):
    assert queue(core, id, request_id) is False
    return core.call("offer", id=id, blocks=[list(blocks)], consumers=1, prompt=PROMPT)


def handoff(producer, lease, **changes):
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[5, 6, 7]],
        "remote_engine_id": "e",
        "remote_request_id": "cmpl-x-0-0a1b2c3d",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 40,
        "remote_block_size": 16,
        "remote_handle": lease["handle"],
        "remote_epoch": lease["epoch"],
        "remote_lease_left_ms": lease["left_ms"],
        "remote_channel_port": producer.channel_port,
        "remote_layout": LAYOUT,
        "remote_prompt": PROMPT[:16],
        "remote_consumers": 1,
    }
    params.update(changes)
    return params


def admit(core, params, id="cmpl-y-0-0a1b2c3d"):
    assert queue(core, id, "y", "decode") is False
    return core.call("admit", id=id, params=params, prompt=PROMPT, tokens=40, block_tokens=16, groups=1)


def verdict(core, id="cmpl-y-0-0a1b2c3d"):
    (found,) = core.call("done", ids=[id], wait_us=100000)["verdicts"]
    if found["verdict"] != "pending":
        return found["verdict"]
    return until(lambda: core.call("take")["verdicts"], 8)[0]["verdict"]


# The library


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("BATON_VLLM_CORE", "/nowhere/libbaton_vllm_core.so")
    with pytest.raises(CoreError, match="cannot load /nowhere/libbaton_vllm_core.so"):
        load_library()


@needs_core
def test_only_calls_that_wait_release_the_gil(start):
    core = start()
    # Functions of a PyDLL keep the GIL.
    assert type(core._library) is ctypes.CDLL and type(core._with_gil) is ctypes.PyDLL
    waiting, core._library = core._library, None
    try:
        assert core.pending() == 0 and core.call("take")["aborts"] == []
        with pytest.raises(AttributeError):
            core.wait(0)
        with pytest.raises(AttributeError):
            core.call("done", ids=[], wait_us=1)
    finally:
        core._library = waiting
    assert core.call("done", ids=[], wait_us=1)["verdicts"] == []


@needs_core
@pytest.mark.parametrize("change, named", [
    ({"htp": 1}, "htp"),
    ({"http": 7}, "http"),
    ({"http": "x"}, "http"),
    ({"http": "0.0.0.0:0"}, "http"),
    ({"channel": "0.0.0.0:0"}, "channel"),
    ({"lease_s": "x"}, "lease_s"),
    ({"lease_s": -1}, "lease_s"),
    ({"policy": "x"}, "policy"),
    ({"blocks": -1}, "blocks"),
    ({"secret_file": "/nowhere"}, "secret_file"),
])
def test_wrong_settings_are_refused_by_name(change, named):
    with pytest.raises(CoreError, match=named):
        Core(config(**change))


@needs_core
def test_errors_and_the_end(start):
    core = start()
    for call in ({"op": "none"}, {"op": "offer", "id": 7}, {"op": "layout", "layout": "x"}):
        with pytest.raises(CoreError):
            core.call(**call)
    assert core.call("stats")["requests"] == 0 and core.pending() == 0
    began = time.monotonic()
    core.stop()
    core.stop()
    assert time.monotonic() - began < 2
    assert core.pending() == core.wait(60000) == bits.STOPPING
    with pytest.raises(CoreError, match="no core"):
        core.call("take")


@needs_core
def test_many_replies_are_freed(start):
    core = start()
    text = json.dumps(handoff(core, {"handle": "x", "epoch": "x", "left_ms": 1}, pad="x" * 3000))
    for _ in range(200):
        core.call("admit", id="a", params=text, prompt="", tokens=1, block_tokens=1, groups=1)
    before = resident()
    for _ in range(5000):
        with pytest.raises(CoreError):
            core.call("layout", layout=text)
    assert resident() - before < 8 << 20, "the errors repeat the text, which makes 15 MB"


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# The producer


@needs_core
@pytest.mark.parametrize("by", ["handle", "request_id"])
def test_release_by_http(start, by):
    core = start()
    lease = lend(core)
    assert len(lease["handle"]) == 32 and lease["epoch"] == core.epoch and lease["left_ms"] > 20000
    body = {"handle": lease["handle"]} if by == "handle" else {"request_id": "x"}
    assert post(core, "/kv/release", **body) == (200, {"result": "released"})
    assert core.wait(1000) & bits.ENDED
    assert [ended["id"] for ended in core.call("take")["ended"]] == ["cmpl-x-0-0a1b2c3d"]
    assert core.call("take")["ended"] == [] and not core.pending() & bits.ENDED
    assert post(core, "/kv/release", handle=lease["handle"])[1]["result"] == "already"
    core.call("freed", id="cmpl-x-0-0a1b2c3d", blocks=3)


@needs_core
def test_a_release_before_the_request_and_before_the_finish(start):
    core = start()
    assert post(core, "/kv/release", request_id="x") == (200, {"result": "remembered"})
    assert queue(core) is True
    assert "refused" in core.call("offer", id="cmpl-x-0-0a1b2c3d", blocks=[[1]], consumers=1, prompt="")
    queue(core, "cmpl-z-0-0a1b2c3d", "z")
    assert post(core, "/abort_requests", request_ids=["z"]) == (200, {"results": {"z": "aborting"}})
    assert core.wait(1000) & bits.ABORTS
    assert core.call("take")["aborts"] == ["cmpl-z-0-0a1b2c3d"]
    assert core.call("aborted", id="cmpl-z-0-0a1b2c3d")["by_verb"] is True
    assert core.call("aborted", id="cmpl-other-0-0a1b2c3d")["by_verb"] is False


@needs_core
def test_ids_of_other_routers_are_read_from_vllms(start):
    core = start()
    queue(core, "chatcmpl-abc-0a1b2c3d", None)
    assert post(core, "/abort_requests", request_ids=["abc"])[1]["results"]["abc"] == "aborting"


@needs_core
def test_expiry(start):
    core = start(lease_s=1)
    lend(core)
    assert until(lambda: core.wait(500) & bits.ENDED)
    assert core.call("take")["ended"][0]["id"] == "cmpl-x-0-0a1b2c3d"


@needs_core
def test_unknown_ids_are_counted_and_no_error(start):
    core = start()
    for op in ("acked", "freed", "late", "aborted", "state", "begin", "leave"):
        extra = {"freed": {"blocks": 1}, "leave": {"reason": "x"}}.get(op, {})
        core.call(op, id="cmpl-unknown", **extra)
    core.call("events", events=[{"id": "cmpl-unknown", "kind": "first_token"}])
    core.call("beat", ids=["cmpl-unknown"])
    assert core.call("done", ids=["cmpl-unknown"], wait_us=1000)["verdicts"][0]["verdict"] == "gone"
    assert core.call("stats")["late_events"] > 0


@needs_core
def test_state_and_metrics(start):
    core = start()

    def answer(found):
        if found & bits.POOL:
            core.call("pool", free=50, cached=8, active=3, landing=0, waiting=1, running=2)

    lend(core)
    waiter = Waiter(core, answer)
    waiter.start()
    # A reading of the last 100 ms counts as fresh.
    state = until(lambda: (state := json.loads(get(core, "/debug/kv")))["blocks"]["leased"] and state)
    waiter.stop()
    assert sum(state["blocks"][name] for name in ("free", "cached", "active", "leased", "landing")) == 64
    assert (state["blocks"]["leased"], state["requests"]["running"]) == (3, 2)
    assert [lease["request_id"] for lease in state["oldest_leases"]] == ["x"]
    assert state["engine"]["epoch"] == core.epoch
    assert "baton_kv_leases" in get(core, "/metrics")
    assert json.loads(get(core, "/debug/kv/events"))["events"]
    core.stop()
    waiter.join(timeout=3)
    assert not waiter.is_alive()


@needs_core
def test_the_drain_is_reported(start):
    core = start()
    assert json.loads(get(core, "/health")) == {"status": "ok"}
    core.call("draining")
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(core, "/health?wait_ms=10000")
    assert refused.value.code == 503 and refused.value.headers["retry-after"] == "1"
    assert json.load(refused.value)["error"]["code"] == "draining"


@needs_core
def test_a_failed_load_has_a_reason(start):
    core = start()
    queue(core, "cmpl-y-0-0a1b2c3d", "y", "decode")
    for reason in ("lease_over", "a word of no list"):
        event = {"id": "cmpl-y-0-0a1b2c3d", "kind": "fetched", "result": "gone", "reason": reason}
        core.call("events", events=[event])
    page = get(core, "/metrics")
    for label in ("gone", "other"):
        labels = f'model_name="m",engine="0",policy="recompute",reason="{label}"'
        assert f"baton_kv_load_failures_total{{{labels}}} 1" in page


@needs_core
def test_the_secret(start, tmp_path):
    file = tmp_path / "secret"
    file.write_text("a secret of some length\n")
    core = start(secret_file=str(file))
    assert post(core, "/kv/release", request_id="x")[0] == 401
    assert post(core, "/kv/release", secret="wrong", request_id="x")[0] == 401
    assert post(core, "/kv/release", secret="a secret of some length", request_id="x")[0] == 200


@needs_core
def test_the_previous_secret(start, tmp_path):
    files = {}
    for key, secret in (("secret_file", "a secret of some length"), ("previous_secret_file", "the secret before it")):
        (tmp_path / key).write_text(secret)
        files[key] = str(tmp_path / key)
    core = start(**files)
    for secret, status in (("a secret of some length", 200), ("the secret before it", 200), ("wrong", 401)):
        assert post(core, "/kv/release", secret=secret, request_id="x")[0] == status


# The consumer


@needs_core
def test_a_read_of_a_live_lease_is_valid(start):
    producer, consumer = start(), start()
    reply = admit(consumer, handoff(producer, lend(producer)))
    assert reply["load"] is True and reply["params"]["remote_block_ids"] == [[5, 6, 7]]
    assert "remote_handle" not in reply["params"]
    until(lambda: consumer.call("state", id="cmpl-y-0-0a1b2c3d")["state"] == "live")
    consumer.call("begin", id="cmpl-y-0-0a1b2c3d")
    assert verdict(consumer) == "valid"
    assert until(lambda: producer.call("take")["ended"])[0]["id"] == "cmpl-x-0-0a1b2c3d"


@needs_core
@pytest.mark.parametrize("when", ["before the hold", "before the read", "before done", "forged", "stopped"])
def test_a_read_of_a_lease_that_is_over_is_gone(start, when):
    producer, consumer = start(), start()
    lease = lend(producer)
    if when == "before the hold":
        post(producer, "/kv/release", handle=lease["handle"])
    changes = {"remote_block_ids": [[5, 6, 8]]} if when == "forged" else {}
    admit(consumer, handoff(producer, lease, **changes))
    if when == "before the hold":
        until(lambda: consumer.call("state", id="cmpl-y-0-0a1b2c3d")["state"] == "gone")
    if when == "before the read":
        post(producer, "/kv/release", handle=lease["handle"])
    consumer.call("begin", id="cmpl-y-0-0a1b2c3d")
    if when == "before done":
        # An open read is drained for a while; only its end decides.
        post(producer, "/kv/release", handle=lease["handle"])
        until(lambda: producer.call("take")["ended"], 8)
    if when == "stopped":
        producer.stop()
    assert verdict(consumer) == "gone"


@needs_core
def test_leave_ends_the_lease(start):
    producer, consumer = start(), start()
    admit(consumer, handoff(producer, lend(producer)))
    consumer.call("leave", id="cmpl-y-0-0a1b2c3d", reason="request_ended")
    assert until(lambda: producer.call("take")["ended"])


@needs_core
def test_a_refused_handoff_goes_back(start):
    producer, consumer = start(), start()
    params = handoff(producer, lend(producer))
    assert post(consumer, "/kv/refused", params=params, reason="refused_400")[0] == 200
    assert until(lambda: producer.call("take")["ended"])
    assert post(consumer, "/kv/refused", params={}, reason="refused_400")[0] == 400


@needs_core
def test_a_handle_of_another_prompt_is_refused_and_goes_back(start):
    producer, consumer = start(), start()
    params = handoff(producer, lend(producer))
    reply = consumer.call(
        "admit", id="cmpl-y-0-0a1b2c3d", params=params, prompt=PROMPT[:16] + "0" * 16, tokens=40, block_tokens=16, groups=1
    )
    assert "remote_handle" in reply["invalid"]
    assert until(lambda: producer.call("take")["ended"])
    # vLLM's notice of a refused request.
    params = handoff(producer, lend(producer, "cmpl-z-0-0a1b2c3d"), remote_request_id="cmpl-z-0-0a1b2c3d")
    assert consumer.call("give_back", params=params) == {}
    assert until(lambda: producer.call("take")["ended"])


@needs_core
@pytest.mark.parametrize("value", [None, True, -1, 1.5, 1 << 62, "", "x" * 600, [], {}, [[]], [[[1]]], {"a": [1]}])
def test_hostile_handoffs_are_refused_or_harmless(start, value):
    core = start()
    lease = lend(core)
    assert "params" in admit(core, handoff(core, lease, remote_channel_port=9))
    for i, name in enumerate(sorted(handoff(core, lease))):
        reply = admit(core, handoff(core, lease, **{"remote_channel_port": 9, name: value}), id=f"cmpl-y{i}-0-0a1b2c3d")
        assert ("invalid" in reply) != ("params" in reply)
        core.call("leave", id=f"cmpl-y{i}-0-0a1b2c3d", reason="request_ended")
    assert admit(core, handoff(core, lease, remote_handle=None), id="cmpl-s-0-0a1b2c3d").get("stock") is True
