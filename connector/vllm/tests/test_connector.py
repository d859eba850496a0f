"""The constructor and the end of the connector, with vLLM's base classes and the model of the core."""

import types

import pytest

import fakes
import harness

pytestmark = pytest.mark.skipif(harness.REASON is not None, reason=str(harness.REASON))

if not harness.REASON:
    from baton_vllm import connector as module
    from real_vllm import fake_cache_config, fake_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


@pytest.fixture
def made(monkeypatch):
    """What the constructor gave the core."""
    given = []

    def start(config):
        given.append(config)
        core = fakes.FakeCore()
        core.wait = lambda timeout_ms: core.pending()
        return core

    monkeypatch.setattr(module, "Core", start)
    return given


def construct(policy="recompute", served="m", **baton):
    extra = {"kv_lease_duration": 12, "baton": baton}
    config = fake_config(fakes.BLOCK)
    config.parallel_config.prefill_context_parallel_size = 1
    config.model_config = types.SimpleNamespace(served_model_name=served, model="path/m", enable_sleep_mode=False)
    vars(config.kv_transfer_config).update(
        engine_id="e", kv_connector="BatonConnector", kv_connector_extra_config=extra, kv_load_failure_policy=policy
    )
    config.kv_transfer_config.get_from_extra_config = extra.get
    cache = fake_cache_config(fakes.BLOCK)
    cache.num_blocks = 65
    return module.BatonConnector(config, KVConnectorRole.SCHEDULER, cache)


def test_both_names_are_this_class():
    import baton_vllm

    assert baton_vllm.BatonConnector is baton_vllm.NixlConnector is module.BatonConnector
    with pytest.raises(AttributeError):
        baton_vllm.Other


def test_without_an_engine_it_is_refused(made):
    with pytest.raises(RuntimeError, match="require_abort"):
        construct()
    assert not made, "no core is left behind"


def test_a_child_of_multi_connector_is_refused(made):
    class MultiConnector:
        def __init__(self):
            construct(require_abort=False)

    class Derived(MultiConnector):
        pass

    for multi in (MultiConnector, Derived):
        with pytest.raises(RuntimeError, match="MultiConnector"):
            multi()
    assert not made


def test_the_core_gets_vllms_settings(made):
    connector = construct(policy="fail", served=["m", "n"], require_abort=False, http="127.0.0.1:1")
    (config,) = made
    assert (config["lease_s"], config["blocks"], config["block_tokens"]) == (12, 64, fakes.BLOCK)
    assert (config["http"], config["policy"], config["engine_id"]) == ("127.0.0.1:1", "fail", "e")
    assert config["engine"].startswith("vllm 0.3")
    assert isinstance(config["model"], str)
    assert connector._scheduler_half.recompute is False
    connector.shutdown()
    connector.shutdown()
    assert connector._waiter is None


def test_the_layout_starts_the_side_channel(made):
    connector = construct(require_abort=False)
    half = connector._scheduler_half
    connector.connector_scheduler.set_xfer_handshake_metadata = lambda metadata: None
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): types.SimpleNamespace(compatibility_hash="h.baton1")})
    assert half.core.named("layout") == [{"layout": half.layout}] and len(half.layout) == 16
    connector.set_xfer_handshake_metadata_pp_aware({})
    assert len(half.core.named("layout")) == 1
    connector.shutdown()


def test_an_untested_vllm_is_refused(made, monkeypatch):
    monkeypatch.setattr(module, "VLLM_VERSION", "0.99.0")
    with pytest.raises(RuntimeError, match="0.99.0"):
        construct(require_abort=False)
    construct(require_abort=False, allow_untested=True).shutdown()
