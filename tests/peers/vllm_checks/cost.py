"""CPU time of an idle lease, and the pair's latency and throughput with and without the connector, in turns."""

import json
import statistics
import threading
import time
import urllib.request

from .base import Report, check, expect
from .clients import Background
from .engines import give_back, prefill

IDLE_S = 8
IDLE_SHARE_MAX = 0.05
WARM_UP, SERIAL, PARALLEL, CONCURRENCY = 6, 40, 60, 4
PROMPT_BLOCKS, TOKENS = 10, 32
# 71 million random weights: a step takes about 10 ms on one core.
LARGER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12,
          "num_key_value_heads": 4}


def arguments(model):
    """vLLM's arguments for the model of --cost-model."""
    return ("--load-format", "dummy", "--hf-overrides", json.dumps(LARGER)) if model == "larger" else ()


@check("idle", "CPU time of EngineCore and its worker with one idle lease: below 5 % of a core", limit_s=300)
def idle(pair):
    report = Report("")
    expect(pair.lease > IDLE_S + 4, f"the lease is too short: --lease {IDLE_S + 5} or more")
    pair.home()

    def measure():
        time.sleep(2)
        before = {title: pair.prefill.cpu_seconds(title) for title in ("EngineCore", "Worker")}
        time.sleep(IDLE_S)
        return {title: round((pair.prefill.cpu_seconds(title) - cpu) / IDLE_S, 3) for title, cpu in before.items()}

    report.numbers["without_lease"] = measure()
    handoff = prefill(pair.prefill, pair.prompt(3))
    report.numbers["with_lease"] = measure()
    give_back(pair, handoff)
    pair.home()
    used = sum(report.numbers["with_lease"].values())
    report.need(used <= IDLE_SHARE_MAX, f"the engine used {used:.0%} of a core")
    report.text = "share of a core: " + json.dumps(report.numbers)
    return report


def stream_once(pair, prompt):
    """Seconds to the first token, and to the end, of one stream."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True}
    request = urllib.request.Request(pair.url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    begun, first = time.monotonic(), None
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if first is None and line.startswith(b"data: {"):
                first = time.monotonic() - begun
            expect(b'"error"' not in line, line.decode(errors="replace")[:200])
    expect(first is not None, "the stream has no token")
    return first, time.monotonic() - begun


def measure(pair):
    """One run: medians of sequential streams, and tokens per second of parallel ones."""
    for _ in range(WARM_UP):
        stream_once(pair, pair.prompt(PROMPT_BLOCKS))
    serial = [stream_once(pair, pair.prompt(PROMPT_BLOCKS)) for _ in range(SERIAL)]
    prompts, lock = [pair.prompt(PROMPT_BLOCKS) for _ in range(PARALLEL)], threading.Lock()

    def work():
        while True:
            with lock:
                if not prompts:
                    return
                prompt = prompts.pop()
            stream_once(pair, prompt)

    begun = time.monotonic()
    for worker in [Background(work) for _ in range(CONCURRENCY)]:
        worker.result(300)
    took = time.monotonic() - begun
    return {
        "ttft_ms": 1000 * statistics.median(first for first, _ in serial),
        "reply_ms": 1000 * statistics.median(whole for _, whole in serial),
        "tokens_per_s": PARALLEL * TOKENS / took,
    }


def in_turns(pairs, turns):
    """The runs of each pair. The other pair's processes are stopped meanwhile; every second turn begins with it."""
    runs = [[] for _ in pairs]
    for pair in pairs:
        pair.suspend()
    try:
        for turn in range(turns):
            order = list(enumerate(pairs))
            for k, pair in order[::-1] if turn % 2 else order:
                pair.resume()
                pair.usable(60)
                runs[k].append(measure(pair))
                pair.home()
                pair.suspend()
    finally:
        for pair in pairs:
            pair.resume()
    return runs


def cost(pairs, options):
    """Ratios of the second pair to the first: medians over all turns, and of every turn."""
    report = Report("")
    runs = in_turns(pairs, options.turns)
    report.numbers["pairs"] = [pair.connector for pair in pairs]
    slower = []
    for name, better in (("ttft_ms", -1), ("reply_ms", -1), ("tokens_per_s", 1)):
        sides = [[run[name] for run in of_pair] for of_pair in runs]
        medians = [statistics.median(side) for side in sides]
        ratios = [b / a for a, b in zip(*sides)]
        ratio = medians[1] / medians[0]
        report.numbers[name] = {"medians": [round(m, 2) for m in medians], "ratio": round(ratio, 4),
                                "ratio_of_each_turn": [round(r, 4) for r in ratios]}
        limit = options.cost_limit
        beyond = [r for r in ratios if (r < 1 - limit if better > 0 else r > 1 + limit)]
        if ratio < 1 - limit if better > 0 else ratio > 1 + limit:
            # On a machine with noise single turns are on both sides of the limit.
            slower.append(name if len(beyond) >= 0.8 * len(ratios) else f"{name} (undecided)")
    report.numbers["beyond_limit"] = slower
    decided = [name for name in slower if "undecided" not in name]
    report.need(not decided, f"beyond {options.cost_limit:.0%}: {', '.join(decided)}")
    report.text = json.dumps(report.numbers)
    return report
