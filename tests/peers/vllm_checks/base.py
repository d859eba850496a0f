"""The list of checks, requests over HTTP, time limits and percentiles."""

import collections
import contextlib
import dataclasses
import http.client
import json
import math
import signal
import socket
import time
import urllib.error
import urllib.request

# What `check` registers, in the order of the run.
CHECKS = []

# Errors of a request without a response: refused, reset, or broken off.
NO_ANSWER = (OSError, http.client.HTTPException)


@dataclasses.dataclass(frozen=True)
class Check:
    """One check. `kind` is `stock`, `push`, `push-ends`, `turns`, `store`, `contract` or `cost`."""

    name: str
    title: str
    function: object
    kind: str
    limit_s: object  # seconds, or a function of the options

    def limit(self, options):
        return self.limit_s(options) if callable(self.limit_s) else self.limit_s


@dataclasses.dataclass
class Report:
    """The result of a contract check. Findings are violated targets: failures of BatonConnector, facts of stock."""

    text: str
    numbers: dict = dataclasses.field(default_factory=dict)
    findings: list = dataclasses.field(default_factory=list)

    def need(self, condition, finding):
        if not condition:
            self.findings.append(finding)


class OutOfTime(Exception):
    """A check has passed its limit."""


def check(name, title, kind="contract", limit_s=300):
    def register(function):
        CHECKS.append(Check(name, title, function, kind, limit_s))
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


@contextlib.contextmanager
def bounded(seconds):
    """Raises `OutOfTime` in the main thread after this time."""

    def over(_signal, _frame):
        raise OutOfTime(f"not within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_until(what, look, seconds, pause_s=0.02):
    """The first true value of `look`."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        expect(time.monotonic() < end, f"not within {seconds:.0f} s: {what}")
        time.sleep(pause_s)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url, timeout=30):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def get_json(url, timeout=30):
    return json.loads(get(url, timeout))


def post(url, body, timeout=120, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def attempt(url, body, timeout=60, headers=None):
    """As `post`. Without a complete response the status is 0, and the text is the reason."""
    try:
        return post(url, body, timeout, headers)
    except NO_ANSWER as error:
        return 0, f"{type(error).__name__}: {error}"


def percentile(values, share):
    """The nearest rank; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def spread(values):
    """Count, median, p99 and maximum, rounded."""
    points = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values, default=None)}
    return {"n": len(values), **{name: None if v is None else round(v, 2) for name, v in points.items()}}


def counted(values):
    """How often each value occurs."""
    return dict(sorted(collections.Counter(map(str, values)).items()))
