"""Settings: defaults, ranks, and every wrong value refused by name."""

import types

import pytest

from baton_vllm.settings import PushSettings, Settings, SettingsError
from harness import connector  # noqa: F401  (puts vLLM or its stubs in place)

from baton_vllm.connector import refuse_unsupported


def parse(baton=..., host="localhost", port=5600, rank=0):
    return Settings.parse({} if baton is ... else {"baton": baton}, host, port, rank)


def test_defaults():
    settings = parse()
    assert (settings.http, settings.channel) == ("127.0.0.1:7600", "127.0.0.1:9600")
    assert settings.strict_peers and settings.require_abort and settings.nap
    assert not settings.allow_untested and settings.secret_file is None and settings.previous_secret_file is None
    assert parse(None) == parse({}) == settings


@pytest.mark.parametrize("host, channel", [
    ("localhost", "127.0.0.1:9600"),
    ("127.0.0.2", "127.0.0.1:9600"),
    ("::1", "127.0.0.1:9600"),
    ("10.0.0.5", "0.0.0.0:9600"),
    ("0.0.0.0", "0.0.0.0:9600"),
    ("p-0.engines.svc", "0.0.0.0:9600"),
])
def test_the_side_channel_follows_vllms(host, channel):
    assert parse(host=host).channel == channel
    assert parse(host=host).http == "127.0.0.1:7600", "the HTTP port stays on loopback"


def test_each_rank_has_ports_of_its_own():
    assert (parse(rank=3).http, parse(rank=3).channel) == ("127.0.0.1:7603", "127.0.0.1:9603")
    given = parse({"http": "10.0.0.5:80", "channel": "[::1]:90"}, rank=2)
    assert (given.http, given.channel) == ("10.0.0.5:82", "[::1]:92")
    assert parse({"http": "127.0.0.1:0"}, rank=2).http == "127.0.0.1:0"


def test_given_values():
    settings = parse({
        "secret_file": "/s", "previous_secret_file": "/t", "peers": "any", "require_abort": False,
        "allow_untested": True, "nap": False
    })
    assert (settings.secret_file, settings.previous_secret_file) == ("/s", "/t") and settings.allow_untested
    assert not (settings.strict_peers or settings.require_abort or settings.nap)


@pytest.mark.parametrize("baton, named", [
    ([1], "baton must be an object"),
    ("strict", "baton must be an object"),
    (7, "baton must be an object"),
    ({"htp": "x"}, "baton.htp is unknown"),
    ({"strict_peers": True}, "baton.strict_peers is unknown"),
    ({"peers": "all"}, "baton.peers"),
    ({"peers": None}, "baton.peers"),
    ({"peers": ["strict"]}, "baton.peers"),
    ({"nap": 1}, "baton.nap"),
    ({"require_abort": "no"}, "baton.require_abort"),
    ({"allow_untested": None}, "baton.allow_untested"),
    ({"secret_file": 7}, "baton.secret_file"),
    ({"previous_secret_file": 7}, "baton.previous_secret_file"),
    ({"http": 7600}, "baton.http must be IP:PORT"),
    ({"http": None}, "baton.http must be IP:PORT"),
    ({"http": "127.0.0.1"}, "baton.http must be IP:PORT"),
    ({"http": ":7600"}, "baton.http must be IP:PORT"),
    ({"http": "127.0.0.1:"}, "baton.http must be IP:PORT"),
    ({"http": "127.0.0.1:-1"}, "baton.http must be IP:PORT"),
    ({"http": "127.0.0.1:http"}, "baton.http must be IP:PORT"),
    ({"channel": "127.0.0.1:65536"}, "baton.channel: port 65536"),
])
def test_wrong_values_are_refused_by_name(baton, named):
    with pytest.raises(SettingsError, match=named.replace(".", r"\.")):
        parse(baton)


def test_ports_beyond_the_range():
    with pytest.raises(SettingsError, match="port 65537 is above 65535; set a lower one"):
        parse(port=63537)
    with pytest.raises(SettingsError, match="port 65536"):
        parse({"http": "127.0.0.1:65535"}, rank=1)


# Settings of the push connector


def test_push_defaults_and_values():
    settings = PushSettings.parse({})
    assert (settings.push_wait_s, settings.push_silent_s, settings.allow_untested) == (None, 0.0, False)
    given = PushSettings.parse({"baton": {"push_wait_s": 6, "push_silent_s": 0.5, "allow_untested": True}})
    assert (given.push_wait_s, given.push_silent_s, given.allow_untested) == (6.0, 0.5, True)


@pytest.mark.parametrize("baton, named", [
    ([1], "baton must be an object"),
    ({"peers": "any"}, "baton.peers is unknown for push"),
    ({"http": "127.0.0.1:1"}, "baton.http is unknown for push"),
    ({"push_wait_s": 0}, "baton.push_wait_s must be a number of seconds, above 0"),
    ({"push_wait_s": True}, "baton.push_wait_s"),
    ({"push_wait_s": "6"}, "baton.push_wait_s"),
    ({"push_wait_s": 3601}, "baton.push_wait_s"),
    ({"push_wait_s": float("nan")}, "baton.push_wait_s"),
    ({"push_silent_s": -1}, "baton.push_silent_s must be a number of seconds, at least 0"),
    ({"push_silent_s": None}, "baton.push_silent_s"),
    ({"allow_untested": 1}, "baton.allow_untested"),
])
def test_wrong_push_values_are_refused_by_name(baton, named):
    with pytest.raises(SettingsError, match=named.replace(".", r"\.")):
        PushSettings.parse({"baton": baton})


# Settings of vLLM


def vllm_config(dcp=1, pcp=1, pp=1, bidirectional=False, sleep=False):
    parallel = types.SimpleNamespace(
        decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, pipeline_parallel_size=pp
    )
    transfer = types.SimpleNamespace(get_from_extra_config={"bidirectional_kv_xfer": bidirectional}.get)
    model = types.SimpleNamespace(enable_sleep_mode=sleep)
    return types.SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer, model_config=model)


def test_supported_settings_of_vllm():
    refuse_unsupported(vllm_config(), parse(), False)
    refuse_unsupported(vllm_config(pp=2), parse({"allow_untested": True}), False)


@pytest.mark.parametrize("change, named", [
    ({"dcp": 2}, "decode_context_parallel_size"),
    ({"pcp": 2}, "prefill_context_parallel_size"),
    ({"bidirectional": True}, "bidirectional_kv_xfer"),
    ({"pp": 2}, "pipeline_parallel_size"),
    ({"sleep": True}, "enable_sleep_mode"),
])
@pytest.mark.parametrize("allow", [False, True])
def test_unsupported_settings_of_vllm(change, named, allow):
    if allow and named == "pipeline_parallel_size":
        return
    with pytest.raises(RuntimeError, match=named):
        refuse_unsupported(vllm_config(**change), parse({"allow_untested": allow}), False)
