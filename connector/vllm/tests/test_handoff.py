"""Fingerprints and orders, and the worker's half by itself."""

import pickle
import types

import pytest

from baton_vllm.handoff import (
    BLOCKS_MAX,
    HANDOFF_KEYS,
    TEXT_MAX,
    WorkerOrders,
    bounded_handoff,
    integer,
    layout_fingerprint,
    prompt_fingerprint,
)
from baton_vllm.scheduler import extras
from baton_vllm.worker import ACKNOWLEDGED_MAX, WorkerHalf


def test_a_prompts_fingerprint_goes_by_its_tokens():
    assert prompt_fingerprint([1, 2, 3]) == prompt_fingerprint((1, 2, 3)) == prompt_fingerprint(range(1, 4))
    assert len({prompt_fingerprint(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1], [256], [1, 0])}) == 7
    for tokens in ([], [1], None):
        assert len(prompt_fingerprint(tokens)) == 32 and int(prompt_fingerprint(tokens), 16) >= 0


@pytest.mark.parametrize("tokens", [[-1], [1 << 64]])
def test_token_ids_that_no_model_has_end_no_engine(tokens):
    assert len(prompt_fingerprint(tokens)) == 32


def test_layouts():
    # Engines with `any` and with `strict` have one layout.
    assert layout_fingerprint("a") == layout_fingerprint("a.baton1") != layout_fingerprint("b")
    assert len(layout_fingerprint("a")) == 16 and int(layout_fingerprint("a"), 16) >= 0


def test_the_fingerprint_covers_what_else_the_kv_depends_on():
    plain = fingerprint()
    image = types.SimpleNamespace(identifier="i1", mm_position=types.SimpleNamespace(offset=3, length=9))
    others = [
        fingerprint(lora_request=types.SimpleNamespace(lora_name="l")),
        fingerprint(cache_salt="tenant"),
        fingerprint(mm_features=[image]),
    ]
    assert len({plain, *others}) == 4 and plain == fingerprint(lora_request=None, cache_salt=None, mm_features=[])


def test_the_fingerprint_covers_prompt_embeddings():
    torch = pytest.importorskip("torch")
    values = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2)]
    found = [prompt_fingerprint(None, extras(types.SimpleNamespace(prompt_embeds=embeds))) for embeds in values]
    assert len(set(found)) == 3
    assert found[1] == prompt_fingerprint(None, extras(types.SimpleNamespace(prompt_embeds=values[1].clone())))


@pytest.mark.parametrize("blocks", [[[5, 6], []], [5, 6], [], [["x", None, 1.5]], "x", None, [[0] * BLOCKS_MAX]])
def test_a_handoff_keeps_the_keys_that_the_core_reads(blocks):
    params = {key: 1 for key in HANDOFF_KEYS} | {"remote_block_ids": blocks, "remote_host": "x" * TEXT_MAX}
    assert bounded_handoff(params | {"unknown": ["x"] * 10}) == params
    assert bounded_handoff({"unknown": 1}) == {}


@pytest.mark.parametrize(
    "key, value",
    [
        ("remote_block_ids", [0] * (BLOCKS_MAX + 1)),
        ("remote_block_ids", [[0] * BLOCKS_MAX, [0]]),
        ("remote_block_ids", [[]] * (BLOCKS_MAX + 1)),
        ("remote_block_ids", [[[1]]]),
        ("remote_block_ids", {"a": 1}),
        ("remote_block_ids", [["x" * (TEXT_MAX + 1)]]),
        ("remote_host", "x" * (TEXT_MAX + 1)),
        ("remote_port", [1]),
        ("remote_epoch", {}),
        ("tp_size", 1 << 64),
    ],
)
def test_a_handoff_whose_check_would_take_long_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        bounded_handoff({key: value})


def fingerprint(**request):
    return prompt_fingerprint([1, 2], extras(types.SimpleNamespace(**request)))


def test_integers():
    assert integer(3) == 3 and integer(0) == 0 and integer(1, 1) == 1
    assert [integer(value, 1) for value in (0, -1, True, 1.0, "1", None, [])] == [None] * 7


def test_orders_survive_a_pickle_and_are_false_when_empty():
    orders = WorkerOrders(ended=["a"], landed=["b"], failed=["c"])
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert not WorkerOrders()
    assert all([WorkerOrders(ended=["a"]), WorkerOrders(landed=["a"]), WorkerOrders(failed=["a"])])


def stock():
    return types.SimpleNamespace(
        compat_hash="hash",
        xfer_handshake_metadata=types.SimpleNamespace(compatibility_hash="hash"),
        _reqs_to_send={"a": 1.0, "b": 1.0},
        _reqs_to_process={"a", "b"},
        consumer_notification_counts_by_req={"a": 1},
        expected_consumer_notifications_by_req={"a": 2},
        _handle_heartbeat=lambda payload: None,
    )


def results(*sent):
    return types.SimpleNamespace(finished_sending=set(sent), finished_recving=set(), failed_recving=set())


def test_strict_peers_have_another_hash_however_often_it_is_sealed():
    half = WorkerHalf(stock(), strict_peers=True)
    half.seal_handshake()
    half.seal_handshake()
    assert half.stock.compat_hash == half.stock.xfer_handshake_metadata.compatibility_hash == "hash.baton1"
    # vLLM makes both again when it registers its caches again.
    half.stock.compat_hash = "other"
    half.stock.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="other")
    half.seal_handshake()
    assert half.stock.compat_hash == half.stock.xfer_handshake_metadata.compatibility_hash == "other.baton1"
    free = WorkerHalf(stock(), strict_peers=False)
    free.seal_handshake()
    free.seal_handshake()
    # It serves the plain hash, and reads from producers with either.
    assert str(free.stock.xfer_handshake_metadata.compatibility_hash) == "hash"
    for theirs, same in [("hash", True), ("hash.baton1", True), ("other", False), ("other.baton1", False)]:
        assert (theirs == free.stock.compat_hash) is same and (theirs != free.stock.compat_hash) is not same


def test_heartbeats_of_stock_consumers_reach_the_scheduler_once():
    half, strict, seen = WorkerHalf(stock(), strict_peers=False), WorkerHalf(stock(), strict_peers=True), []
    half.stock._handle_heartbeat = seen.append
    half.seal_handshake()
    strict.seal_handshake()
    assert half.take_report() is None
    half.stock._handle_heartbeat("a,b")
    half.stock._handle_heartbeat("b,c")
    strict.stock._handle_heartbeat("a")
    assert seen == ["a,b", "b,c"] and strict.take_report() is None
    other = WorkerHalf(stock(), strict_peers=False)
    other.beats.update("d")
    assert half.take_report().aggregate(other.take_report()).beats == {"a", "b", "c", "d"}
    assert half.take_report() is None


def test_an_end_is_reported_once_and_forgotten_by_the_stock_half():
    half = WorkerHalf(stock(), strict_peers=True)
    half.accept(WorkerOrders(ended=["a"]))
    assert half.report(results()).finished_sending == {"a"}
    assert half.report(results()).finished_sending == set()
    assert list(half.stock._reqs_to_send) == ["b"] and half.stock._reqs_to_process == {"b"}
    assert not half.stock.consumer_notification_counts_by_req and not half.stock.expected_consumer_notifications_by_req


def test_what_the_stock_half_has_reported_is_not_reported_again():
    half = WorkerHalf(stock(), strict_peers=True)
    assert half.report(results("a")).finished_sending == {"a"}
    half.accept(WorkerOrders(ended=["a", "b"]))
    assert half.report(results()).finished_sending == {"b"}


def test_the_memory_of_acknowledgements_is_bounded():
    half = WorkerHalf(stock(), strict_peers=True)
    half.report(results(*map(str, range(ACKNOWLEDGED_MAX + 10))))
    assert len(half.acknowledged) == ACKNOWLEDGED_MAX


def test_failed_loads_are_reported_as_received_and_failed():
    half = WorkerHalf(stock(), strict_peers=True)
    half.accept(WorkerOrders(landed=["l"], failed=["f"]))
    report = half.report(results())
    assert report.finished_recving == {"l", "f"} and report.failed_recving == {"f"}
