"""A prefill engine, decode engines and `baton router` in front of them."""

import json
import os
import random
import signal
import subprocess
import tempfile
import time

from . import engines
from .base import NO_ANSWER, attempt, expect, free_port, get, get_json, wait_until
from .clients import Call, make_prompt
from .engines import ROOT, Engine, Setup

# Time after which the router releases blocks that are kept for a next turn.
TURN_IDLE_S = 4


# Keys of the model in the router's configuration, by connector.
MODEL_SETTINGS = {
    engines.TURNS: f"    bidirectional_kv: {{idle_ms: {TURN_IDLE_S * 1000}}}\n    reuse_tokens: true\n"
                   "    tokenize: {from: engine, timeout_ms: 10000, min_bytes: 0}\n",
    engines.STORE: "    protocol: vllm_store\n",
}


class Pair:
    """`options` are the command line's; `connector` and `arguments` are those of all engines."""

    def __init__(self, options, connector, environment, arguments=()):
        self.options, self.connector = options, connector
        self.lease, self.rounds = options.lease, options.rounds
        self.random = random.Random(options.seed)
        # In float32, engines with different numbers of ranks round to the same tokens.
        dtype = "auto" if options.prefill_ranks == options.decode_ranks else "float32"
        self.folder = tempfile.TemporaryDirectory(prefix="vllm-store-")
        self.setup = Setup(options.vllm, options.model, options.lease, connector, environment, dtype, arguments,
                           self.folder.name)
        self.prompts = json.loads((ROOT / "engine/models/demo/prompts.json").read_text())
        self.router = self.file = None
        self.engines = []
        try:
            self.engines.append(Engine(self.setup, "prefill", ranks=options.prefill_ranks))
            for k in range(options.decodes):
                self.engines.append(Engine(self.setup, f"decode{k or ''}", ranks=options.decode_ranks))
            self.prefill, self.decodes = self.engines[0], self.engines[1:]
            self.decode = self.decodes[0]
            for engine in self.engines:
                engine.wait()
            self.start_router(options.baton)
        except BaseException:
            self.stop()
            raise

    @property
    def is_baton(self):
        return self.connector == engines.BATON

    def start_router(self, baton):
        listen, admin = free_port(), free_port()
        self.url, self.admin = f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}"
        self.file = tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False)
        # The port of EngineCore answers while the front end is busy. The checks themselves use the plugin's verbs.
        control = {
            engine.url: f", control_url: 'http://127.0.0.1:{engine.http}'" if self.is_baton else ""
            for engine in self.engines
        }
        decodes = ", ".join(f"{{url: '{engine.url}'{control[engine.url]}}}" for engine in self.decodes)
        self.file.write(
            f"listen: 127.0.0.1:{listen}\nadmin: {{listen: '127.0.0.1:{admin}'}}\nmodels:\n  - name: demo\n"
            f"    prefill: {{engines: [{{url: '{self.prefill.url}'{control[self.prefill.url]}}}]}}\n"
            f"    decode: {{engines: [{decodes}]}}\n"
            f"{MODEL_SETTINGS.get(self.connector, '')}"
        )
        self.file.close()
        self.log = tempfile.NamedTemporaryFile(prefix="baton-router-", suffix=".log", delete=False)
        self.router = subprocess.Popen(
            [baton, "router", "-c", self.file.name], stdout=self.log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                get(self.url + "/health", 2)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the router did not start")

    def stop(self):
        if self.router:
            self.router.send_signal(signal.SIGCONT)
            self.router.terminate()
            try:
                self.router.wait(10)
            except subprocess.TimeoutExpired:
                self.router.kill()
                self.router.wait()
        if self.file:
            os.unlink(self.file.name)
            self.file = None
        for engine in self.engines:
            engine.stop()

    def suspend(self):
        self.router.send_signal(signal.SIGSTOP)
        for engine in self.engines:
            engine.signal_all(signal.SIGSTOP)

    def resume(self):
        for engine in self.engines:
            engine.signal_all(signal.SIGCONT)
        self.router.send_signal(signal.SIGCONT)

    def ensure(self):
        """Restarts engines that a check has ended, and waits until the router uses the pair."""
        for engine in self.engines:
            engine.signal_all(signal.SIGCONT)
        dead = [engine for engine in self.engines if not engine.healthy(20)]
        for engine in dead:
            engine.restart()
        self.usable()
        return len(dead)

    def usable(self, seconds=120):
        """Waits until the router is ready and answers a request with 200."""
        body = {"model": "demo", "prompt": self.prompt(2), "max_tokens": 2}
        wait_until("a response through the router",
                   lambda: attempt(self.url + "/v1/completions", body, 30)[0] == 200, seconds, 0.5)
        wait_until("a ready router", self.is_ready, seconds, 0.5)

    def is_ready(self):
        try:
            get(self.url + "/ready", 5)
        except NO_ANSWER:
            return False
        return True

    def pinned(self):
        return [engine.pinned() for engine in self.engines if engine.process.poll() is None]

    def decode_metric(self, name, **labels):
        """The sum over the decode engines."""
        return sum(engine.metric(name, **labels) for engine in self.decodes)

    def home(self):
        """Seconds until no block is in use on any engine, polled every 20 ms; fails past the lease."""
        begun = time.monotonic()
        while time.monotonic() - begun < self.lease + 15:
            if not any(self.pinned()):
                return time.monotonic() - begun
            time.sleep(0.02)
        raise AssertionError(f"{self.pinned()} blocks of P and D were not freed")

    def leave(self, body, after_s, frames=None):
        """Sends a request and disconnects after this time, or after this many streamed frames."""
        call = Call(self.url, "/v1/completions", body)
        if frames is None:
            time.sleep(after_s)
        else:
            call.read_frames(frames)
        call.socket.close()

    def prompt(self, blocks):
        """A prompt of about this many blocks that no prefix cache has."""
        return make_prompt(self.random, blocks)

    def router_id(self, client_id):
        """The router's name of a client's request; None if it has not read that request."""
        try:
            return get_json(f"{self.admin}/explain/{client_id}", 5)["requests"][0]["id"]
        except NO_ANSWER:
            return None

    def versions(self):
        return {"vllm": get_json(self.prefill.url + "/version")["version"], "lease_s": self.lease}

    def settlements(self):
        """The router's counters of disconnects and releases."""
        lines = get(self.admin + "/metrics").splitlines()
        names = ("disconnects", "releases", "settlements", "aborts", "abandon_waits")
        return [line for line in lines
                if line.startswith(tuple(f"baton_router_{name}_total" for name in names)) and not line.endswith(" 0")]


def check_text(pair, prompt, wanted, tokens=16):
    """A request through the router, against the reference."""
    status, answer = attempt(pair.url + "/v1/completions", engines.decode_body(prompt, tokens=tokens))
    expect(status == 200, f"{status}: {answer}")
    expect(engines.generated(answer) == wanted, f"{engines.generated(answer)} instead of {wanted}")
