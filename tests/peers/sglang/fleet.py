"""Simulated SGLang engines, the routers in front of them, and requests to either. Standard library only."""

import contextlib
import http.client
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from processes import ask, free_port, wait_for

# SGLang's waits are shortened by this factor: 300 s for the other leg become 6 s.
SCALE = 0.02
MODEL = "sim"
SLACK_S = 3


class Engines:
    """`baton bench sim --dialect sglang` as a child."""

    def __init__(self, baton, processes, *options):
        command = [baton, "bench", "sim", "--dialect", "sglang", "--time-scale", str(SCALE), "--until-stdin-ends", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(self.process)
        line = self.process.stdout.readline()
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        assert {"prefill", "decode", "bootstrap"} <= set(facts), f"no engines: {line!r}"
        self.prefill, self.decode = facts["prefill"].split(","), facts["decode"].split(",")
        self.bootstrap = [address.split(":")[1] for address in facts["bootstrap"].split(",")]


class Fleet:
    """The engines that a router gets, of one or two simulations."""

    def __init__(self, prefill, decode):
        self.pairs = list(zip(prefill.prefill, prefill.bootstrap))
        self.prefill, self.decode = prefill.prefill, decode.decode

    @property
    def engines(self):
        return [*self.prefill, *self.decode]

    def alone(self, path, body):
        """The response without a router: both legs are sent at once, with a room."""
        (prefill, port), decode = self.pairs[0], self.decode[0]
        room = random.randrange(1, 2**63)
        body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": int(port), "bootstrap_room": room}
        leg = threading.Thread(target=post, args=(prefill, path, body))
        leg.start()
        status, text = post(decode, path, body)
        leg.join()
        assert status == 200, f"the pair without a router: {status} {text}"
        return text

    def held(self):
        """What each engine has that is not idle: requests in a queue or at work, and pages in use."""
        rows = {}
        for engine in self.engines:
            page = ask(engine, "GET", "/debug/kv")
            blocks, requests = page["blocks"], page["requests"]
            used = blocks["total"] - blocks["free"]
            if used or any(requests.values()):
                rows[engine] = {"pages": used, **{name: count for name, count in requests.items() if count}}
        return rows

    def home_after(self, since, seconds):
        """Seconds since `since` until every engine is idle."""
        while held := self.held():
            assert time.monotonic() < since + seconds, f"after {seconds} s: {held}"
            time.sleep(0.01)
        return time.monotonic() - since

    def counts(self, name, engines=None):
        """A counter's value at each engine."""
        values = []
        for engine in engines or self.engines:
            lines = ask(engine, "GET", "/metrics").splitlines()
            values.append(sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"sglang:{name}{{")))
        return values


def post(address, path, body, timeout=120):
    """Status and text of a response in one piece."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


class Stream:
    """A streamed response."""

    def __init__(self, address, path, body):
        self.connection = http.client.HTTPConnection(address, timeout=120)
        body = json.dumps({**body, "stream": True})
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        self.answer = self.connection.getresponse()

    def events(self):
        for line in self.answer:
            if line.startswith(b"data: "):
                yield line[6:].strip().decode()

    def leave(self):
        self.connection.sock.close() if self.connection.sock else None
        self.answer.close()
        self.connection.close()


def leave_without_answer(address, path, body, after_s):
    """Sends a request and closes the connection before the response."""
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    time.sleep(after_s)
    connection.close()


class Router:
    """A router as a child, ready when it has sent a request to each of these engines."""

    def __init__(self, name, tools, fleet, engines, work, processes):
        self.name, self.fleet, self.engines = name, fleet, engines
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.log = work / f"{name}-{port}.log"
        command = COMMANDS[name](tools, fleet, port, work)
        self.process = subprocess.Popen(command, stdout=open(self.log, "w"), stderr=subprocess.STDOUT)
        processes.append(self.process)
        wait_for(f"{name} sends requests to {engines}", self.sends)

    def sends(self):
        assert self.process.poll() is None, self.log.read_text()
        before = self.fleet.counts("num_requests_total", self.engines)
        with contextlib.suppress(OSError, http.client.HTTPException):
            for number in range(4):
                post(self.address, "/v1/completions", {"model": MODEL, "prompt": f"warm {number}", "max_tokens": 1}, 2)
        return all(after > was for after, was in zip(self.fleet.counts("num_requests_total", self.engines), before))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def of_engines(fleet):
    for engine, port in fleet.pairs:
        yield from ("--prefill", f"http://{engine}", port)
    for engine in fleet.decode:
        yield from ("--decode", f"http://{engine}")


def smg(tools, fleet, port, _work):
    return [tools.folder / "smg/bin/smg", "launch", "--pd-disaggregation", *of_engines(fleet), "--policy", "round_robin",
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
            "--disable-tokenizer-autoload", "--log-level", "warn"]


def sglang_router(tools, fleet, port, _work):
    return [tools.folder / "sglang-router/bin/python", "-m", "sglang_router.launch_router", "--pd-disaggregation",
            *of_engines(fleet), "--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--log-level", "warn"]


def mini_lb(tools, fleet, port, _work):
    return [tools.folder / "sglang-router/bin/python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb",
            *of_engines(fleet), "--host", "127.0.0.1", "--port", str(port)]


def baton_router(tools, fleet, port, work):
    prefill = ", ".join(f"{{url: 'http://{engine}', bootstrap_host: 127.0.0.1, bootstrap_port: {at}}}"
                        for engine, at in fleet.pairs)
    decode = ", ".join(f"{{url: 'http://{engine}'}}" for engine in fleet.decode)
    config = work / f"baton-{port}.yaml"
    config.write_text(f"listen: 127.0.0.1:{port}\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: {MODEL}\n"
                      f"    protocol: sglang\n    prefill: {{engines: [{prefill}]}}\n    decode: {{engines: [{decode}]}}\n")
    return [tools.baton, "router", "-c", config]


COMMANDS = {"baton": baton_router, "smg": smg, "sglang-router": sglang_router, "mini_lb": mini_lb}
