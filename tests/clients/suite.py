"""What the suites of all clients share: checks, `baton up` as a child, and the state of its engines and its router.

A check prints one line: `pass`, `FAIL`, or `skip` with the reason.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request

import scripted

# Clients read the proxy settings when they are imported.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

FACTS = (
    "Alice lives in Paris. Bob has a dog named Rex. The red box holds a key. Carol plays the violin. "
    "What does the red box hold?"
)
START_S = 120
HOME_S = 5
CHECKS = []


def check(title):
    """Registers a check. The check returns the text of its line."""

    def register(function):
        CHECKS.append((title, function))
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


class Skip(Exception):
    """The check was not done. The text is the reason."""


class Place:
    """Where the client goes: a router, what is known of it, and one in front of a scripted engine."""

    def __init__(self, url, engines, admin=None, built_in=False, scripted=None):
        self.url, self.engines, self.admin, self.built_in, self.scripted = url, engines, admin, built_in, scripted

    def scripted_or_skip(self):
        if not self.scripted:
            raise Skip("only with `baton up`: the scripted engine is not behind this router")
        return self.scripted


def aborted(ctx):
    """Sequences that the engines have aborted so far."""
    return sum(metric(engine, 'vllm:request_success_total{[^}]*finished_reason="abort"') for engine in ctx.place.engines)


def metric(engine, pattern):
    text = urllib.request.urlopen(engine + "/metrics", timeout=10).read().decode()
    return sum(float(value) for value in re.findall(rf"^{pattern}\S* (\S+)$", text, re.M))


def everything_home(ctx):
    """Waits until no engine holds or leases a block, and the router has no request. No lease may have expired."""
    deadline = time.monotonic() + HOME_S
    place = ctx.place
    while place.admin:
        names = ("baton_router_requests_in_flight", "baton_router_settlements_in_flight")
        in_flight = [metric(place.admin, name) for name in names]
        if not any(in_flight):
            break
        expect(time.monotonic() < deadline, f"the router has {in_flight} in flight after {HOME_S} s")
        time.sleep(0.02)
    for engine in place.engines:
        while True:
            kv = json.load(urllib.request.urlopen(engine + "/debug/kv", timeout=10))
            blocks = kv["blocks"]
            held = blocks["active"] + blocks["leased"] + blocks["landing"]
            if held == 0 and kv["leases"]["live"] == 0 and not any(kv["requests"].values()):
                break
            expect(time.monotonic() < deadline, f"{engine} is not home after {HOME_S} s: {kv}")
            time.sleep(0.02)
        expect(metric(engine, "vllm:nixl_num_kv_expired_reqs") == 0, f"leases have expired at {engine}")
    router = "nothing in flight at the router" if place.admin else "the router's admin address is not known"
    engines = f"every block of {len(place.engines)} engines is home" if place.engines else "engines are not known"
    return f"{router}, {engines}"


def cancels(ctx, count, call):
    """Leaves `count` streams midway. Each must be aborted in the decode engine, and nothing remains."""
    before = aborted(ctx)
    for _ in range(count):
        call()
        home = everything_home(ctx)
    known = ctx.place.engines and ctx.place.built_in
    expect(not known or aborted(ctx) == before + count, f"{aborted(ctx) - before} of {count} were aborted in the engine")
    return f"{count} times; {home}"


async def cancels_a_call(ctx, call):
    """Cancels the task of a call while the decode engine, which is the last, works on it."""
    task = asyncio.create_task(call())
    deadline = time.monotonic() + HOME_S
    look = lambda: json.load(urllib.request.urlopen(ctx.place.engines[-1] + "/debug/kv", timeout=10))  # noqa: E731
    while ctx.place.engines and not (await asyncio.to_thread(look))["requests"]["running"]:
        expect(not task.done() and time.monotonic() < deadline, f"the call did not reach the engine in time: {task}")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    expect(task.cancelled(), f"the call ended before it was cancelled: {task}")


class Up:
    """`baton up` as a child, on a free port, with a checkpoint or the built-in model; stopped with SIGINT as from a terminal."""

    def __init__(self, binary, model=None):
        self.log, self.built_in = tempfile.NamedTemporaryFile("w+", suffix=".log"), model is None
        command = [binary, "up", "--listen", "127.0.0.1:0", *(["--model", str(model)] if model else [])]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def place(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = self.output()
            up = re.search(r"Baton is up .*?(http://[\d.]+:\d+)/v1", text)
            found = re.search(r"Engines: prefill (http://\S+), decode (http://\S+) .*Router metrics: (\S+)/metrics", text)
            if up and found:
                return Place(up.group(1), [found.group(1), found.group(2)], admin=found.group(3), built_in=self.built_in)
            expect(self.process.poll() is None, f"`baton up` has ended:\n{text}")
            time.sleep(0.05)
        raise AssertionError(f"`baton up` is not up after {START_S} s:\n{self.output()}")

    def output(self):
        with open(self.log.name, encoding="utf-8") as log:
            return log.read()

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"no end within 60 s:\n{self.output()}"


def run_all(context, place):
    ctx = context(place)
    failed, skipped = 0, 0
    for title, function in CHECKS:
        started = time.monotonic()
        try:
            found = function(ctx)
            print(f"pass  {title} ({time.monotonic() - started:.2f} s): {found}", flush=True)
        except Skip as reason:
            skipped += 1
            print(f"skip  {title}: {reason}", flush=True)
        except Exception as error:  # one failure does not hide the others
            failed += 1
            print(f"FAIL  {title}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    return failed, skipped


@contextlib.contextmanager
def everything_up(binary, model=None):
    """`baton up`, and a second router in front of a scripted pair."""
    up = Up(binary, model)
    try:
        place = up.place()
        with scripted.behind_a_router(binary) as place.scripted:
            yield place
    finally:
        status = up.stop()
        print(f"{'pass' if status == 0 else 'FAIL'}  `baton up` ended after SIGINT: {status}")
    expect(status == 0, "`baton up` ended with an error")


def main(title, description, context, model=None):
    """Runs all checks. `context` makes their argument of a `Place`. With a checkpoint, they are about its texts."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--url", help="a running router; by default `baton up` is started ($BATON_BIN)")
    parser.add_argument("--admin", help="its admin address, as http://HOST:PORT")
    parser.add_argument("--engine", action="append", default=[], help="an engine behind it; may be repeated")
    options = parser.parse_args()
    print(f"{title}, Python {sys.version.split()[0]}")
    if options.url and model:
        print(f"SKIPPED: the checks are about the texts of {model}; without --url, `baton up` serves it")
        return 0
    if options.url:
        failed, skipped = run_all(context, Place(options.url.rstrip("/"), options.engine, options.admin))
    else:
        binary = os.environ.get("BATON_BIN")
        if not binary:
            parser.error("give --url, or the binary in BATON_BIN (cargo build --release)")
        try:
            with everything_up(binary, model) as place:
                failed, skipped = run_all(context, place)
        except AssertionError as error:
            print(f"FAIL  {error}")
            return 1
    print(f"{len(CHECKS)} checks, {failed} failed, {skipped} skipped")
    return 1 if failed else 0
