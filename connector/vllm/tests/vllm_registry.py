"""A pytest plugin for vLLM's own connector tests, which `run.sh --vllm-tests` runs.

`--connector stock` changes nothing, and writes the ids of the passed tests to the file of `--passed`. `--connector baton`
runs those tests with this connector in the place of the NixlConnector. The tests in `vllm_differences.json` must fail.

The tests construct schedulers without an engine, and several in one process: ports are free ones, and aborts by id off.
Their handoffs have flat block lists, which no producer sends: the check of the lists is off. `--handoffs stock` takes them
for those of a stock producer. Without a built core (`BATON_VLLM_CORE`), the model of the core in `fakes.py` takes its
place. `--handoffs baton` takes them for handoffs with the contract, whose producer is in that model.
"""

import functools
import json
import os
import pathlib
import threading

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

import fakes
from baton_vllm import connector, scheduler, settings

DIFFERENCES = pathlib.Path(__file__).with_name("vllm_differences.json")

SETTINGS = {"require_abort": False, "nap": False, "http": "127.0.0.1:0", "channel": "127.0.0.1:0"}


class TestedConnector(connector.BatonConnector):
    """Tests replace the worker's half after the construction, and finish requests that no scheduler has added."""

    made = 0
    in_test = []  # those of the current test

    def __init__(self, *arguments):
        super().__init__(*arguments)
        TestedConnector.made += 1
        self.in_test.append(self)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "connector_worker" and vars(self).get("_worker_half"):
            self._worker_half.stock = value

    def request_finished_all_groups(self, request, block_ids):
        if request.request_id not in self._scheduler_half.requests:
            self.on_new_request(request)
            request.num_computed_tokens = request.num_prompt_tokens
        return super().request_finished_all_groups(request, block_ids)


class WaitingCore(fakes.FakeCore):
    """The model of the core, with a `wait` that lasts."""

    def __init__(self):
        super().__init__()
        self.stopping = threading.Event()

    def wait(self, timeout_ms):
        self.stopping.wait(timeout_ms / 1000)
        return self.pending()

    def stop(self):
        super().stop()
        self.stopping.set()


class ContractCore(WaitingCore):
    """Every handoff has the contract, and its lease is live. Leases of this engine end by time."""

    def __init__(self, lease_s):
        super().__init__()
        self.lease_s = lease_s

    def op_offer(self, id, **fields):
        timer = threading.Timer(self.lease_s, self.end_lease, [id, "expired"])
        timer.daemon = True
        timer.start()
        return super().op_offer(id, **fields)

    def op_admit(self, id, params, **fields):
        self.loads[id] = self.hold
        return {"params": dict(params), "load": True}


def with_defaults(parse, defaults):
    """Settings of the tests; a test's own ones win."""

    @functools.wraps(parse)
    def parsed(extra, *arguments):
        return parse({**extra, "baton": {**defaults, **(extra.get("baton") or {})}}, *arguments)

    return parsed


def test_id(nodeid):
    """The id without the folder, which depends on where pytest finds its configuration."""
    return nodeid.split("::", 1)[0].rpartition("/")[2] + "::" + nodeid.partition("::")[2]


def is_named(name, entry):
    """An entry may end within the parameters, and then has all such cases."""
    return name.startswith(entry) if "[" in entry else name == entry


def pytest_addoption(parser):
    parser.addoption("--connector", choices=["stock", "baton"], required=True)
    parser.addoption("--handoffs", choices=["stock", "baton"], default="stock")
    parser.addoption("--passed", type=pathlib.Path, required=True)


def pytest_configure(config):
    connector_name, handoffs = config.getoption("connector"), config.getoption("handoffs")
    if connector_name == "stock":
        config.pluginmanager.register(StockRun(config.getoption("passed")))
        return
    config.pluginmanager.register(BatonRun(config.getoption("passed"), handoffs))
    defaults = {**SETTINGS, "peers": "any" if handoffs == "stock" else "strict"}
    settings.Settings.parse = with_defaults(settings.Settings.parse, defaults)
    scheduler.SchedulerHalf.fits = lambda self, request, local: True
    scheduler.stock_is_complete = lambda params, groups: True
    if handoffs == "baton":
        connector.Core = lambda given: ContractCore(given["lease_s"])
    elif not os.environ.get("BATON_VLLM_CORE"):
        connector.Core = lambda given: WaitingCore()
    KVConnectorFactory._registry["NixlConnector"] = lambda: TestedConnector
    nixl.NixlConnector = nixl.connector.NixlConnector = TestedConnector


class StockRun:
    """Collects the tests that vLLM itself passes here."""

    def __init__(self, file):
        self.file = file
        self.passed = set()
        self.failed = set()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.add(test_id(report.nodeid))
        elif not report.passed:
            self.failed.add(test_id(report.nodeid))

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(sorted(self.passed - self.failed)))


class BatonRun:
    """Runs the tests that vLLM passes, and expects the listed ones to fail."""

    def __init__(self, file, handoffs):
        self.passed = set(json.loads(file.read_text()))
        table = json.loads(DIFFERENCES.read_text())
        self.differences = {**table["any handoff"], **table[f"{handoffs} handoff"]}

    def difference(self, name):
        """The reason of a test."""
        return next((reason for entry, reason in self.differences.items() if is_named(name, entry)), None)

    def pytest_collection_modifyitems(self, config, items):
        stale = [entry for entry in self.differences if not any(is_named(name, entry) for name in self.passed)]
        if stale and not config.option.keyword:
            raise pytest.UsageError(f"{DIFFERENCES.name} names tests that vLLM has not or does not pass: {stale}")
        left_out = [item for item in items if test_id(item.nodeid) not in self.passed]
        items[:] = [item for item in items if test_id(item.nodeid) in self.passed]
        config.hook.pytest_deselected(items=left_out)
        for item in items:
            if reason := self.difference(test_id(item.nodeid)):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_teardown(self):
        # A failed test leaves its side channel open, and the next engine would wait for the port without end.
        while TestedConnector.in_test:
            made = TestedConnector.in_test.pop()
            if made._scheduler_half is not None:
                made.shutdown()

    def pytest_sessionfinish(self, session):
        if not TestedConnector.made and session.exitstatus == 0:
            print("\nno test has constructed the connector")
            session.exitstatus = 1
