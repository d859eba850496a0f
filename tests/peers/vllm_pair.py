#!/usr/bin/env python3
"""`baton router` in front of a stock vLLM prefill/decode pair (NixlConnector), on this machine.

Starts two vLLM engines and the router, asks, leaves in every phase, sends what ends other front doors, and reads
vLLM's own metrics to see what was transferred and what is still pinned. One line for each thing it did; exits with 1
if any of them failed. Standard library only. See README.md in this folder.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = 600  # vLLM imports for half a minute, and machines are slow
BLOCK = 32
BLOCKS = 96
# Blocks that are free within this time were released. Blocks that wait for their lease take --lease seconds.
RELEASED_S = 5
CHECKS = []


def check(title):
    def register(function):
        CHECKS.append((title, function))
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url, timeout=30):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def post(url, body, timeout=120):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Engine:
    """One vLLM server."""

    def __init__(self, vllm, model, name, lease):
        self.name, self.port, side = name, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": lease},
        }
        environment = dict(
            os.environ,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(side),
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )
        self.log = tempfile.NamedTemporaryFile(prefix=f"vllm-{name}-", suffix=".log", delete=False)
        self.process = subprocess.Popen(
            [vllm, "serve", str(model), "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(self.port),
             "--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS),
             "--max-model-len", "1536", "--kv-transfer-config", json.dumps(transfer)],
            env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )

    def wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            expect(self.process.poll() is None, f"vLLM {self.name} ended; its log is {self.log.name}")
            try:
                get(self.url + "/health", 5)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"vLLM {self.name} did not start; its log is {self.log.name}")

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

    def pinned(self):
        """Blocks in use."""
        return round(self.metric("vllm:kv_cache_usage_perc") * (BLOCKS - 1))

    def asked(self):
        """Requests that reached the engine's core and ended."""
        return self.metric("vllm:request_success_total")

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pair:
    def __init__(self, args):
        self.lease = args.lease
        self.rounds = args.rounds
        self.random = random.Random(args.seed)
        self.prefill = Engine(args.vllm, args.model, "prefill", args.lease)
        self.decode = Engine(args.vllm, args.model, "decode", args.lease)
        self.router = None
        self.prompts = json.loads((ROOT / "engine/models/demo/prompts.json").read_text())
        try:
            self.prefill.wait()
            self.decode.wait()
            self.start_router(args.baton)
        except BaseException:
            self.stop()
            raise

    def start_router(self, baton):
        listen, admin = free_port(), free_port()
        self.url, self.admin = f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}"
        self.file = tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False)
        self.file.write(
            f"listen: 127.0.0.1:{listen}\nadmin: {{listen: '127.0.0.1:{admin}'}}\nmodels:\n  - name: demo\n"
            f"    prefill: {{engines: [{{url: '{self.prefill.url}'}}]}}\n"
            f"    decode: {{engines: [{{url: '{self.decode.url}'}}]}}\n"
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
            self.router.terminate()
            self.router.wait()
            os.unlink(self.file.name)
        self.prefill.stop()
        self.decode.stop()

    def home(self):
        """Seconds until no block is in use on either engine, polled every 20 ms; fails past the lease."""
        begun = time.monotonic()
        while time.monotonic() - begun < self.lease + 15:
            if self.prefill.pinned() == 0 and self.decode.pinned() == 0:
                return time.monotonic() - begun
            time.sleep(0.02)
        raise AssertionError(
            f"{self.prefill.pinned()} blocks of P and {self.decode.pinned()} of D never came back"
        )

    def leave(self, body, after_s, frames=None):
        """Sends a request and disconnects after this time, or after this many streamed frames."""
        data = json.dumps(body).encode()
        port = int(self.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 30) as s:
            s.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                + str(len(data)).encode() + b"\r\n\r\n" + data
            )
            if frames is None:
                time.sleep(after_s)
                return
            seen = b""
            while seen.count(b"data: ") < frames:
                piece = s.recv(65536)
                expect(piece, f"the stream ended early: {seen[-200:]!r}")
                seen += piece

    def prompt(self, blocks):
        """A prompt of about this many blocks that no prefix cache has."""
        words = " ".join(str(self.random.randrange(10, 99)) for _ in range(blocks * BLOCK // 2))
        return f"{words[: blocks * BLOCK]} The end."


@check("texts: the model's held-out prompts are answered exactly, every prompt token by transfer")
def texts(pair):
    before = pair.decode.metric("vllm:nixl_xfer_time_seconds_count")
    computed = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    moved = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    prompts, right = pair.prompts[:12], 0
    for prompt in prompts:
        body = {"model": "demo", "messages": prompt["messages"], "temperature": 0, "max_tokens": 24}
        status, answer = post(pair.url + "/v1/chat/completions", body)
        expect(status == 200, f"{status}: {answer}")
        right += json.loads(answer)["choices"][0]["message"]["content"].strip() == prompt["answer"]
    expect(right == len(prompts), f"{right} of {len(prompts)} are right")
    # vLLM publishes its counts some time after the response.
    until = time.monotonic() + RELEASED_S
    transfers = 0
    while transfers < len(prompts) and time.monotonic() < until:
        time.sleep(0.1)
        transfers = pair.decode.metric("vllm:nixl_xfer_time_seconds_count") - before
    expect(transfers >= len(prompts), f"{transfers} transfers for {len(prompts)} prompts")
    computed = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - computed
    moved = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") - moved
    expect(moved > 0, "no prompt token was told as transferred")
    expect(computed == 0, f"D computed {computed} prompt tokens itself")
    return f"{right} of {len(prompts)} right, {transfers:.0f} transfers, {moved:.0f} tokens moved, 0 computed by D"


@check("parameters: min_tokens, n, best_of, stop, ignore_eos, max_completion_tokens, stream_options reach D, not P's limits")
def parameters(pair):
    done = []
    for more in (
        {"min_tokens": 8, "max_tokens": 8},
        # vLLM refuses several answers to a greedy request.
        {"n": 2, "max_tokens": 4, "temperature": 1},
        {"stop": ["."], "max_tokens": 16},
        {"ignore_eos": True, "max_tokens": 12},
    ):
        status, answer = post(pair.url + "/v1/completions", {"model": "demo", "prompt": pair.prompt(3), "temperature": 0, **more})
        expect(status == 200, f"{more}: {status}: {answer}")
        usage = json.loads(answer)["usage"]["completion_tokens"]
        if "min_tokens" in more or "ignore_eos" in more:
            expect(usage == more["max_tokens"], f"{more}: {usage} tokens")
        if "n" in more:
            expect(len(json.loads(answer)["choices"]) == 2, answer)
        done.append("+".join(more))
    messages = [{"role": "user", "content": "Bob has a dog named Rex. What is the name of the dog?"}]
    status, answer = post(pair.url + "/v1/chat/completions", {"model": "demo", "messages": messages, "max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True}})
    expect(status == 200 and '"usage":{' in answer and answer.rstrip().endswith("data: [DONE]"), answer[-300:])
    return ", ".join(done + ["max_completion_tokens+stream_options"])


@check("leaving while P computes: blocks are back, not stranded for the lease")
def leaving_prefill(pair):
    times = []
    for _ in range(pair.rounds):
        pair.leave({"model": "demo", "prompt": pair.prompt(24), "max_tokens": 64, "temperature": 0}, pair.random.uniform(0, 0.12))
        times.append(pair.home())
    stranded = sum(t > RELEASED_S for t in times)
    told = f"{pair.rounds} left after 0 to 120 ms; back after {sorted(times)[len(times) // 2]:.2f} s (median), {max(times):.2f} s (longest); stranded {stranded}"
    # vLLM itself can drop a finished reply in the instant in which it sees the hang-up (1 of 24, measured).
    expect(stranded * 12 <= pair.rounds, told)
    return told


@check("leaving a stream after its first frames")
def leaving_stream(pair):
    times = []
    for _ in range(max(2, pair.rounds // 2)):
        pair.leave({"model": "demo", "prompt": pair.prompt(8), "max_tokens": 900, "ignore_eos": True, "stream": True}, 0, frames=3)
        times.append(pair.home())
    expect(max(times) < RELEASED_S, f"{max(times):.2f} s until every block was back")
    return f"{len(times)} left; back after {sorted(times)[len(times) // 2]:.2f} s (median), {max(times):.2f} s (longest)"


@check("bodies that D's parser would refuse reach no engine")
def refused(pair):
    before = pair.prefill.asked()
    for body in (
        {"model": "demo", "prompt": "x", "temperature": "abc"},
        {"model": "demo", "prompt": "x", "max_tokens": "many"},
        {"model": "demo", "prompt": {"a": 1}},
        {"model": "demo", "prompt": "x", "stop": 7},
        {"model": "demo", "prompt": "x", "n": 0},
        b'{"model": "demo", "prompt": "x"',
    ):
        status, answer = post(pair.url + "/v1/completions", body)
        expect(400 <= status < 500 and json.loads(answer)["error"]["message"], f"{body}: {status}: {answer}")
    expect(pair.prefill.asked() == before, "a prefill was spent")
    expect(pair.home() < RELEASED_S, "blocks are pinned")
    return "6 bodies, each a 4xx of the router's; P computed nothing"


@check("what D's handler refuses gives P its blocks back")
def refused_by_decode(pair):
    # The request is valid to a parser, and P gets one choice: only D's handler detects a greedy request for two.
    before = pair.prefill.asked()
    body = {"model": "demo", "prompt": pair.prompt(20), "max_tokens": 8, "n": 2, "temperature": 0}
    status, answer = post(pair.url + "/v1/completions", body)
    expect(status == 400, f"{status}: {answer}")
    until = time.monotonic() + RELEASED_S
    while pair.prefill.asked() == before:
        expect(time.monotonic() < until, "P was not asked, so nothing was lent")
        time.sleep(0.02)
    took = pair.home()
    expect(took < RELEASED_S, f"{took:.1f} s until the blocks were back")
    return f"400; blocks back after {took:.2f} s"


@check("a client's kv_transfer_params end no engine")
def hostile(pair):
    for params in ({"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]}, "text", {"do_remote_prefill": True}):
        body = {"model": "demo", "prompt": "Bob has a dog named Rex.", "max_tokens": 4, "kv_transfer_params": params}
        status, answer = post(pair.url + "/v1/completions", body)
        expect(status == 200, f"{params}: {status}: {answer}")
    get(pair.decode.url + "/health")
    return "3 variants: answered 200, D lives"


@check("D dies: the client reads a typed error, and P's blocks come back")
def decode_dies(pair):
    pair.decode.stop()
    body = {"model": "demo", "prompt": pair.prompt(8), "max_tokens": 8}
    status, answer = post(pair.url + "/v1/completions", body)
    expect(status in (502, 503) and json.loads(answer)["error"]["message"], f"{status}: {answer}")
    begun = time.monotonic()
    while pair.prefill.pinned():
        expect(time.monotonic() - begun < pair.lease + 15, "P's blocks never came back")
        time.sleep(0.05)
    return f"{status}; P free after {time.monotonic() - begun:.1f} s (its lease is {pair.lease} s)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("VLLM", "vllm"), help="the vllm command")
    parser.add_argument("--baton", default=os.environ.get("BATON_BIN", str(ROOT / "target/release/baton")))
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "engine/models/demo")
    parser.add_argument("--rounds", type=int, default=24, help="clients that leave while P computes")
    parser.add_argument("--lease", type=int, default=30, help="vLLM's kv_lease_duration, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    pair, failed = Pair(args), 0
    try:
        print(f"vLLM {json.loads(get(pair.prefill.url + '/version'))['version']}, lease {args.lease} s", flush=True)
        for title, function in CHECKS:
            try:
                print(f"ok    {title}: {function(pair)}", flush=True)
            except Exception as error:  # a check that fails must not hide the others
                failed += 1
                print(f"FAIL  {title}: {error}", flush=True)
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
        for line in get(pair.admin + "/metrics").splitlines():
            if re.match(r"baton_router_(disconnects|releases|settlements|aborts)_total.* [1-9]", line):
                print("      " + line)
    finally:
        pair.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
