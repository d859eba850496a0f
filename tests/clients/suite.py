"""What the suites of all clients share: checks, `baton up` as a child, and the state of its engines."""

import argparse
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


def aborted(ctx):
    """Sequences that the engines have aborted so far."""
    return sum(metric(engine, 'vllm:request_success_total{[^}]*finished_reason="abort"') for engine in ctx.engines)


def metric(engine, pattern):
    text = urllib.request.urlopen(engine + "/metrics", timeout=10).read().decode()
    return sum(float(value) for value in re.findall(rf"^{pattern}\S* (\S+)$", text, re.M))


def everything_home(ctx):
    """Waits until no engine holds or leases a block. No lease may have expired."""
    if not ctx.engines:
        return "engines not given, blocks not looked at"
    deadline = time.monotonic() + HOME_S
    for engine in ctx.engines:
        while True:
            kv = json.load(urllib.request.urlopen(engine + "/debug/kv", timeout=10))
            blocks = kv["blocks"]
            held = blocks["active"] + blocks["leased"] + blocks["landing"]
            if held == 0 and kv["leases"]["live"] == 0 and not any(kv["requests"].values()):
                break
            expect(time.monotonic() < deadline, f"{engine} is not home after {HOME_S} s: {kv}")
            time.sleep(0.02)
        expect(metric(engine, "vllm:nixl_num_kv_expired_reqs") == 0, f"leases have expired at {engine}")
    return f"every block of {len(ctx.engines)} engines is home"


class Up:
    """`baton up` as a child, on a free port; stopped with SIGINT as from a terminal."""

    def __init__(self, binary):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [binary, "up", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def addresses(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = self.output()
            up = re.search(r"Baton is up .*?(http://[\d.]+:\d+)/v1", text)
            engines = re.search(r"Engines: prefill (http://\S+), decode (http://\S+)", text)
            if up and engines:
                return up.group(1), list(engines.groups())
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


def run_all(context, url, engines, built_in):
    ctx = context(url, engines, built_in)
    failed = 0
    for title, function in CHECKS:
        started = time.monotonic()
        try:
            found = function(ctx)
            print(f"ok      {title} ({time.monotonic() - started:.2f} s): {found}", flush=True)
        except Exception as error:  # one failure does not hide the others
            failed += 1
            print(f"FAILED  {title}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    return failed


def main(package, description, context):
    """Runs all checks. `context` makes their argument of a URL, the engines' URLs, and whether the model is built in."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--url", help="a running router; by default `baton up` is started ($BATON_BIN)")
    parser.add_argument("--engine", action="append", default=[], help="an engine behind it; may be repeated")
    options = parser.parse_args()
    print(f"{package.__name__} {package.__version__}, Python {sys.version.split()[0]}")
    if options.url:
        failed = run_all(context, options.url.rstrip("/"), options.engine, built_in=False)
    else:
        binary = os.environ.get("BATON_BIN")
        if not binary:
            parser.error("give --url, or the binary in BATON_BIN (cargo build --release)")
        up = Up(binary)
        try:
            failed = run_all(context, *up.addresses(), built_in=True)
        finally:
            status = up.stop()
        print(f"{'ok' if status == 0 else 'FAILED':7} `baton up` ended after SIGINT: {status}")
        failed += status != 0
    print(f"{len(CHECKS)} checks, {failed} failed")
    return 1 if failed else 0
