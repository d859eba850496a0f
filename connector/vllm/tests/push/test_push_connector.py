"""The constructor of the push connector and its handshake, with vLLM's base classes."""

import types

import pytest

import fakes
import harness

pytestmark = pytest.mark.skipif(harness.REASON is not None, reason=str(harness.REASON))

if not harness.REASON:
    from baton_vllm.push import connector as module
    from baton_vllm.push import messages, probe, worker
    from push_bench import Net, Worker
    from real_vllm import fake_cache_config, fake_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker


def construct(role=None, **extra):
    extra = {"kv_lease_duration": 12, **extra}
    config = fake_config(fakes.BLOCK)
    config.parallel_config.prefill_context_parallel_size = 1
    config.model_config = types.SimpleNamespace(enable_sleep_mode=False)
    vars(config.kv_transfer_config).update(
        engine_id="e", kv_connector="BatonPushConnector", kv_connector_extra_config=extra
    )
    config.kv_transfer_config.get_from_extra_config = extra.get
    return module.BatonPushConnector(config, role or KVConnectorRole.SCHEDULER, fake_cache_config(fakes.BLOCK))


def test_both_names_are_this_class():
    import baton_vllm

    assert baton_vllm.BatonPushConnector is baton_vllm.NixlPushConnector is module.BatonPushConnector
    assert baton_vllm.BatonConnector is not module.BatonPushConnector


def test_the_halves_are_batons():
    made = construct()
    assert type(made.connector_scheduler) is module.PushScheduler and made.connector_worker is None
    made.shutdown()


def test_a_worker_gets_the_settings(monkeypatch):
    given = []
    monkeypatch.setattr(NixlPushConnectorWorker, "__init__", lambda self, *_: None)
    monkeypatch.setattr(worker.PushWorker, "_start_tables", lambda self, *arguments: given.append(arguments))
    monkeypatch.setattr(worker.PushWorker, "__del__", lambda self: None)
    construct(KVConnectorRole.WORKER)
    construct(KVConnectorRole.WORKER, baton={"push_wait_s": 3, "push_silent_s": 60})
    assert given == [(12.0, 0.0), (3.0, 60.0)]


@pytest.mark.parametrize("extra, named", [
    ({"bidirectional_kv_xfer": True}, "bidirectional_kv_xfer"),
    ({"enforce_handshake_compat": False}, "enforce_handshake_compat"),
    ({"baton": {"peers": "any"}}, "peers is unknown"),
])
def test_unsupported_settings_are_refused(extra, named):
    with pytest.raises((RuntimeError, ValueError), match=named):
        construct(**extra)


def test_a_child_of_multi_connector_is_refused():
    class MultiConnector:
        def __init__(self):
            construct()

    with pytest.raises(RuntimeError, match="MultiConnector"):
        MultiConnector()


def test_an_untested_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(module, "VLLM_VERSION", "0.99.0")
    with pytest.raises(RuntimeError, match="0.99.0"):
        construct()
    construct(baton={"allow_untested": True}).shutdown()


def test_other_peers_fail_the_comparison_of_the_handshake(monkeypatch):
    def register(self, caches):
        self.compat_hash = "hash"
        self.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="hash")

    monkeypatch.setattr(NixlPushConnectorWorker, "register_kv_caches", register)
    rank = Worker(Net(), "e", 0, 1, 30.0, 0.0)
    rank.register_kv_caches({})
    sealed = rank.xfer_handshake_metadata.compatibility_hash
    assert sealed == rank.compat_hash == "hash" + messages.HASH_SUFFIX
    from baton_vllm.handoff import HASH_SUFFIX

    assert sealed not in ("hash", "hash" + HASH_SUFFIX)


# Probes


@pytest.fixture
def engine():
    """The side channel of an engine `p` with one rank; stopped at the end."""
    import socket
    import threading

    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = NixlAgentMetadata(
        engine_id="p", agent_metadata=b"agent", kv_caches_base_addr=[], device_id=0, num_blocks=1, block_lens=[],
        block_strides=[], kv_cache_layout="", block_size=1, ssm_sizes=(0, 0), attn_backend_name="",
        physical_blocks_per_logical_kv_block=1,
    )
    payload = NixlHandshakePayload(compatibility_hash="hash", agent_metadata_bytes=msgspec.msgpack.encode(agent))
    ready, stop = threading.Event(), threading.Event()
    listener = threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,
        args=({(0, 0): msgspec.msgpack.encode(payload)}, ready, stop, "127.0.0.1", port),
    )
    listener.start()
    assert ready.wait(10)
    yield port
    stop.set()
    listener.join(10)
    assert not listener.is_alive()


def test_a_probe_recognizes_the_process(engine):
    known = {probe.fingerprint(b"agent")}
    assert probe.probe("127.0.0.1", engine, "p", known) == "alive"
    assert probe.probe("127.0.0.1", engine, "p", ()) == "alive"
    assert probe.probe("127.0.0.1", engine, "q", known) == "gone", "another engine has the address"
    assert probe.probe("127.0.0.1", engine, "p", {"other"}) == "gone", "the engine has restarted under its id"


def test_a_probe_of_a_port_without_a_listener():
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert probe.probe("127.0.0.1", bound.getsockname()[1], "p", ()) == "gone"


def test_a_probe_of_a_process_that_does_not_answer(monkeypatch):
    import socket

    monkeypatch.setattr(probe, "TIMEOUT_S", 0.2)
    with socket.socket() as stopped:
        stopped.bind(("127.0.0.1", 0))
        stopped.listen(8)
        assert probe.probe("127.0.0.1", stopped.getsockname()[1], "p", ()) == "silent"
    assert probe.probe("no-such-host.invalid", 1, "p", ()) == "silent"
