"""vLLM engines with the NixlConnector, the NixlPushConnector, Baton's connectors, or one that shares a store."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

from .base import NO_ANSWER, expect, free_port, get, get_json, post, wait_until
from .clients import BLOCK

ROOT = pathlib.Path(__file__).resolve().parents[3]
START_S = 600  # vLLM imports for half a minute, and machines are slow
BLOCKS = 96
STOCK, PUSH, BATON, BATON_PUSH = "stock", "push", "baton", "baton-push"
# The NixlConnector with bidirectional KV, and vLLM's ExampleConnector, which keeps blocks in files.
TURNS, STORE = "turns", "store"
# Time for which D keeps the blocks of a response that no engine reads.
KEPT_S = 20
# Time for which P keeps a registration whose request does not come.
PUSH_WAIT_S = 6


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all engines of a pair share."""

    vllm: str
    model: pathlib.Path
    lease: int
    connector: str
    environment: dict
    dtype: str
    arguments: tuple = ()
    store: str = ""


class Engine:
    """One vLLM server. It keeps its ports when it is restarted."""

    def __init__(self, setup, name, policy=None, ranks=1):
        self.setup, self.name, self.ranks = setup, name, ranks
        self.port, self.side, self.http, self.channel = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.NamedTemporaryFile(prefix=f"vllm-{setup.connector}-{name}-", suffix=".log", delete=False)
        self.process = None
        self.start(policy)

    @property
    def has_log(self):
        """Whether `/debug/kv` exists."""
        return self.setup.connector == BATON

    def transfer_config(self, policy):
        connector = {PUSH: "NixlPushConnector", STORE: "ExampleConnector"}.get(self.setup.connector, "NixlConnector")
        config = {"kv_connector": connector, "kv_role": "kv_both"}
        extra = {"kv_lease_duration": self.setup.lease}
        if self.setup.connector == TURNS:
            extra.update(bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=KEPT_S)
        if self.setup.connector == STORE:
            extra = {"shared_storage_path": self.setup.store}
        if self.has_log:
            config.update(kv_connector="BatonConnector", kv_connector_module_path="baton_vllm")
            extra["baton"] = {"http": f"127.0.0.1:{self.http}", "channel": f"127.0.0.1:{self.channel}"}
            policy = policy or "recompute"
        if self.setup.connector == BATON_PUSH:
            config.update(kv_connector="BatonPushConnector", kv_connector_module_path="baton_vllm")
            extra["baton"] = {"push_wait_s": PUSH_WAIT_S}
            policy = policy or "recompute"
        if policy:
            config["kv_load_failure_policy"] = policy
        return {**config, "kv_connector_extra_config": extra}

    def start(self, policy=None):
        self.policy = policy
        environment = dict(
            os.environ,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(self.side),
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            **self.setup.environment,
        )
        if self.setup.connector in (BATON, BATON_PUSH):
            environment["VLLM_PLUGINS"] = "baton"
        self.process = subprocess.Popen(
            [self.setup.vllm, "serve", str(self.setup.model), "--served-model-name", "demo", "--host", "127.0.0.1",
             "--port", str(self.port), "--enforce-eager", "--block-size", str(BLOCK),
             "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1536",
             "--tensor-parallel-size", str(self.ranks), "--dtype", self.setup.dtype, *self.setup.arguments,
             *(["--enable-scale-out"] if self.setup.connector == TURNS else []),
             "--kv-transfer-config", json.dumps(self.transfer_config(policy))],
            env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )

    def wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            expect(self.process.poll() is None, f"vLLM {self.name} ended; its log is {self.log.name}")
            if self.healthy():
                return
            time.sleep(0.5)
        raise AssertionError(f"vLLM {self.name} did not start; its log is {self.log.name}")

    def healthy(self, timeout=5):
        if self.process.poll() is not None:
            return False
        try:
            get(self.url + "/health", timeout)
            return True
        except NO_ANSWER:
            return False

    def restart(self, policy=None):
        self.stop()
        self.start(policy)
        self.wait()

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def signal_all(self, number):
        """SIGSTOP or SIGCONT for each process of this engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def process_ids(self, title):
        """The processes of this engine whose title contains this word: `EngineCore`, `Worker`."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                group = int((folder / "stat").read_text().rpartition(") ")[2].split()[2])
                if group == self.process.pid and title in (folder / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(folder.name))
        return found

    def cpu_seconds(self, title):
        """CPU time of these processes since their start."""
        total = 0
        for pid in self.process_ids(title):
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    # Metrics

    def metric(self, name, **labels):
        """The sum of a metric's series that have these labels."""
        total, known = 0.0, False
        for line in get(self.url + "/metrics").splitlines():
            known = known or line.startswith(f"# TYPE {name.removesuffix('_count')}")
            found = re.match(re.escape(name) + r"(\{[^}]*\})? (\S+)", line)
            if found and all(f'{k}="{v}"' in (found[1] or "") for k, v in labels.items()):
                total += float(found[2])
        expect(known, f"vLLM {self.name} has no metric {name}")
        return total

    def expired(self):
        """Leases that ended by time, by the counter of the NixlConnector."""
        try:
            return round(self.metric("vllm:nixl_num_kv_expired_reqs_total"))
        except AssertionError:
            return 0

    def pinned(self):
        """Blocks in use."""
        if self.has_log:
            blocks = self.state()["blocks"]
            return blocks["active"] + blocks["leased"] + blocks["landing"]
        return round(self.metric("vllm:kv_cache_usage_perc") * (BLOCKS - 1))

    def asked(self):
        """Requests that reached the engine's core and ended."""
        return self.metric("vllm:request_success_total")

    # The engine's own log

    def state(self, timeout=10):
        return get_json(self.url + "/debug/kv", timeout)

    def mark(self):
        """The number of the latest event."""
        return get_json(self.url + "/debug/kv/events?after=latest")["next"]

    def events(self, mark):
        """All events after this number."""
        found, lost = [], 0
        while True:
            page = get_json(f"{self.url}/debug/kv/events?after={mark}&limit=2000")
            found, lost, mark = found + page["events"], lost + page["lost"], page["next"]
            if len(page["events"]) < 2000:
                expect(lost == 0, f"{lost} events of vLLM {self.name} are overwritten")
                return found

    def find(self, mark, seconds, **wanted):
        """The first event after this number with these fields."""

        def look():
            return next((e for e in self.events(mark) if all(e.get(k) == v for k, v in wanted.items())), None)

        return wait_until(f"an event {wanted} of vLLM {self.name}", look, seconds)

    def clock_ahead_us(self):
        """The engine's clock minus this process's."""
        best = None
        for _ in range(7):
            before = time.time_ns() // 1000
            there = get_json(self.url + "/debug/kv/events?after=latest")["now_us"]
            after = time.time_ns() // 1000
            if best is None or after - before < best[0]:
                best = (after - before, there - (before + after) // 2)
        return best[1]


# Legs that are sent to an engine without a router


def prefill(engine, prompt, request_id=None, **more):
    """The handoff of a prefill leg. `more` is added to its transfer parameters."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
              "remote_block_ids": None, "remote_host": None, "remote_port": None, **more}
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    headers = {"x-request-id": request_id} if request_id else {}
    status, answer = post(engine.url + "/v1/completions", body, headers=headers)
    expect(status == 200, f"prefill: {status}: {answer}")
    handoff = json.loads(answer).get("kv_transfer_params")
    expect(handoff, f"the reply has no handoff: {answer}")
    return handoff


def decode_body(prompt, handoff=None, tokens=16, **more):
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more}
    return body if handoff is None else {**body, "kv_transfer_params": handoff}


def generated(answer):
    """Texts and token ids of a response."""
    return [(choice["text"], choice.get("token_ids")) for choice in json.loads(answer)["choices"]]


def alone(engine, prompt, tokens=16, salt="reference", **more):
    """What one engine generates from a computed prompt. The salt keeps it apart from the handoff's cache."""
    body = {**decode_body(prompt, tokens=tokens, cache_salt=salt), **more}
    status, answer = post(engine.url + "/v1/completions", body)
    expect(status == 200, f"reference: {status}: {answer}")
    return generated(answer)


def give_back(pair, handoff):
    """Ends a lease: by the verb, or by a request that D's handler refuses."""
    if pair.prefill.has_log:
        body = {"handle": handoff["remote_handle"], "reason": "client_gone"}
        status, answer = post(pair.prefill.url + "/kv/release", body)
    else:
        body = {"model": "demo", "prompt": "x", "temperature": -1, "kv_transfer_params": handoff}
        status, answer = post(pair.decode.url + "/v1/completions", body)
    return status, answer


def overwrite(engine):
    """Other prompts through every block of the pool."""
    for k in range(4):
        text = f"{time.monotonic_ns()} {k} " * 80
        status, answer = post(engine.url + "/v1/completions",
                              {"model": "demo", "prompt": text[: 40 * BLOCK], "max_tokens": 1, "temperature": 0})
        expect(status == 200, f"{status}: {answer}")
