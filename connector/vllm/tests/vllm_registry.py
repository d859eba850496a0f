"""A pytest plugin for vLLM's own tests: the name NixlConnector stands for this connector.

Its tests construct schedulers without an engine, and several in one process: ports are free ones, and aborts by id off.
Their handoffs are a stock producer's, with flat block lists that no producer sends: peers without the contract are
admitted, and the check of the lists is off. Without a built core (`BATON_VLLM_CORE`), the model of the core in `fakes.py`
takes its place.
"""

import functools
import os

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import fakes
from baton_vllm import connector, scheduler, settings

SETTINGS = {"peers": "any", "require_abort": False, "nap": False, "http": "127.0.0.1:0", "channel": "127.0.0.1:0"}


def with_defaults(parse):
    """Settings of the tests; a test's own ones win."""

    @functools.wraps(parse)
    def parsed(extra, *arguments):
        return parse({**extra, "baton": {**SETTINGS, **(extra.get("baton") or {})}}, *arguments)

    return parsed


def pytest_configure(config):
    settings.Settings.parse = with_defaults(settings.Settings.parse)
    scheduler.SchedulerHalf.fits = lambda self, request, local: True
    scheduler.stock_is_complete = lambda params, groups: True
    if not os.environ.get("BATON_VLLM_CORE"):
        connector.Core = lambda given: fakes.FakeCore()
    KVConnectorFactory._registry["NixlConnector"] = lambda: connector.BatonConnector
