"""A deployment as it is used: texts, parameters, disconnects, refused requests, a decode engine that ends."""

import json
import time

from .base import check, expect, get, post

# Blocks that are free within this time were released. Blocks that wait for their lease take --lease seconds.
RELEASED_S = 5


def limit(options):
    return 240 + options.rounds * 3 + 2 * options.lease


@check("texts", "the model's held-out prompts are answered exactly, every prompt token by transfer", kind="stock",
       limit_s=limit)
def texts(pair):
    before = pair.decode_metric("vllm:nixl_xfer_time_seconds_count")
    computed = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    moved = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
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
        transfers = pair.decode_metric("vllm:nixl_xfer_time_seconds_count") - before
    expect(transfers >= len(prompts), f"{transfers} transfers for {len(prompts)} prompts")
    computed = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="local_compute") - computed
    moved = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") - moved
    expect(moved > 0, "no prompt token was told as transferred")
    expect(computed == 0, f"D computed {computed} prompt tokens itself")
    return f"{right} of {len(prompts)} right, {transfers:.0f} transfers, {moved:.0f} tokens moved, 0 computed by D"


@check("parameters",
       "min_tokens, n, best_of, stop, ignore_eos, max_completion_tokens, stream_options reach D, not P's limits",
       kind="stock", limit_s=limit)
def parameters(pair):
    done = []
    for more in (
        {"min_tokens": 8, "max_tokens": 8},
        # vLLM refuses several answers to a greedy request.
        {"n": 2, "max_tokens": 4, "temperature": 1},
        {"stop": ["."], "max_tokens": 16},
        {"ignore_eos": True, "max_tokens": 12},
    ):
        body = {"model": "demo", "prompt": pair.prompt(2), "temperature": 0, **more}
        status, answer = post(pair.url + "/v1/completions", body)
        expect(status == 200, f"{more}: {status}: {answer}")
        usage = json.loads(answer)["usage"]["completion_tokens"]
        if "min_tokens" in more or "ignore_eos" in more:
            expect(usage == more["max_tokens"], f"{more}: {usage} tokens")
        if "n" in more:
            expect(len(json.loads(answer)["choices"]) == 2, answer)
        done.append("+".join(more))
    messages = [{"role": "user", "content": "Bob has a dog named Rex. What is the name of the dog?"}]
    body = {"model": "demo", "messages": messages, "max_completion_tokens": 6, "stream": True,
            "stream_options": {"include_usage": True}}
    status, answer = post(pair.url + "/v1/chat/completions", body)
    expect(status == 200 and '"usage":{' in answer and answer.rstrip().endswith("data: [DONE]"), answer[-300:])
    return ", ".join(done + ["max_completion_tokens+stream_options"])


@check("leaving-prefill", "leaving while P computes: blocks are back, not stranded for the lease", kind="stock",
       limit_s=limit)
def leaving_prefill(pair):
    times = []
    for _ in range(pair.rounds):
        body = {"model": "demo", "prompt": pair.prompt(16), "max_tokens": 64, "temperature": 0}
        pair.leave(body, pair.random.uniform(0, 0.12))
        times.append(pair.home())
    stranded = sum(t > RELEASED_S for t in times)
    told = (f"{pair.rounds} left after 0 to 120 ms; back after {sorted(times)[len(times) // 2]:.2f} s (median), "
            f"{max(times):.2f} s (longest); stranded {stranded}")
    # vLLM itself can drop a finished reply in the instant in which it sees the hang-up (1 of 24, measured).
    expect(stranded * 12 <= pair.rounds, told)
    return told


@check("leaving-stream", "leaving a stream after its first frames", kind="stock", limit_s=limit)
def leaving_stream(pair):
    times = []
    for _ in range(max(2, pair.rounds // 2)):
        body = {"model": "demo", "prompt": pair.prompt(5), "max_tokens": 900, "ignore_eos": True, "stream": True}
        pair.leave(body, 0, frames=3)
        times.append(pair.home())
    expect(max(times) < RELEASED_S, f"{max(times):.2f} s until every block was back")
    median = sorted(times)[len(times) // 2]
    return f"{len(times)} left; back after {median:.2f} s (median), {max(times):.2f} s (longest)"


@check("refused", "bodies that D's parser would refuse reach no engine", kind="stock", limit_s=limit)
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


@check("refused-by-decode", "what D's handler refuses gives P its blocks back", kind="stock", limit_s=limit)
def refused_by_decode(pair):
    # The request is valid to a parser, and P gets one choice: only D's handler detects a greedy request for two.
    before = pair.prefill.asked()
    body = {"model": "demo", "prompt": pair.prompt(13), "max_tokens": 8, "n": 2, "temperature": 0}
    status, answer = post(pair.url + "/v1/completions", body)
    expect(status == 400, f"{status}: {answer}")
    until = time.monotonic() + RELEASED_S
    while pair.prefill.asked() == before:
        expect(time.monotonic() < until, "P was not asked, so nothing was lent")
        time.sleep(0.02)
    took = pair.home()
    expect(took < RELEASED_S, f"{took:.1f} s until the blocks were back")
    return f"400; blocks back after {took:.2f} s"


@check("hostile", "a client's kv_transfer_params end no engine", kind="stock", limit_s=limit)
def hostile(pair):
    forged = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 1,
              "remote_block_ids": [[1]]}
    for params in (forged, "text", {"do_remote_prefill": True}):
        body = {"model": "demo", "prompt": "Bob has a dog named Rex.", "max_tokens": 4, "kv_transfer_params": params}
        status, answer = post(pair.url + "/v1/completions", body)
        expect(status == 200, f"{params}: {status}: {answer}")
    get(pair.decode.url + "/health")
    return "3 variants: answered 200, D lives"


@check("decode-dies", "D dies: the client reads a typed error, and P's blocks come back", kind="stock", limit_s=limit)
def decode_dies(pair):
    pair.decode.stop()
    body = {"model": "demo", "prompt": pair.prompt(5), "max_tokens": 8}
    status, answer = post(pair.url + "/v1/completions", body)
    expect(status in (502, 503) and json.loads(answer)["error"]["message"], f"{status}: {answer}")
    begun = time.monotonic()
    while pair.prefill.pinned():
        expect(time.monotonic() - begun < pair.lease + 15, "P's blocks never came back")
        time.sleep(0.05)
    return f"{status}; P free after {time.monotonic() - begun:.1f} s (its lease is {pair.lease} s)"
