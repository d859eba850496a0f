"""The pair compared with one engine, token by token, and judged by Baton's own tools."""

import json
import pathlib
import random
import subprocess
import tempfile
import threading

from .base import Report, attempt, check, counted, wait_until
from .clients import Background, make_prompt
from .engines import alone, decode_body, generated

TOKENS = 24
DOCTOR_S, DISCONNECT_S = 300, 900


def equal_limit(options):
    return 300 + options.equal * 3


@check("equal", "greedy responses of the pair and of one engine, token by token, each by transfer", limit_s=equal_limit)
def equal(pair):
    report, lock, left = Report(""), threading.Lock(), list(range(pair.options.equal))
    results, tokens, samples = [], 0, []
    before = pair.decode_metric("vllm:nixl_xfer_time_seconds_count") if not pair.is_baton else 0
    marks = [engine.mark() for engine in pair.decodes] if pair.is_baton else []
    landed = Landed(pair.decodes, marks)

    def ask():
        nonlocal tokens
        while True:
            with lock:
                if not left:
                    return
                number = left.pop()
            source = random.Random(f"equal-{pair.options.seed}-{number}")
            prompt = make_prompt(source, source.randint(1, 20))
            status, answer = attempt(pair.url + "/v1/completions", decode_body(prompt, tokens=TOKENS))
            mine = generated(answer) if status == 200 else None
            right = alone(pair.prefill, prompt, TOKENS)
            with lock:
                results.append("equal" if mine == right else "different" if mine else status)
                tokens += len(right[0][1] or [])
                if mine != right and len(samples) < 3:
                    samples.append({"number": number, "pair": mine or answer[:200], "alone": right})
            if number % 500 == 0 and pair.is_baton:
                with lock:
                    landed.read()

    workers = [Background(ask) for _ in range(pair.options.concurrency)]
    for worker in workers:
        worker.result(equal_limit(pair.options))
    total = pair.options.equal
    if pair.is_baton:
        landed.read()
        transfers = landed.results
    else:
        def look():
            return pair.decode_metric("vllm:nixl_xfer_time_seconds_count") - before >= total

        wait_until("vLLM has counted the transfers", look, 15, 0.2)
        transfers = {"landed": round(pair.decode_metric("vllm:nixl_xfer_time_seconds_count") - before)}
    report.numbers = {"requests": total, "results": counted(results), "tokens": tokens, "transfers": transfers}
    if samples:
        report.numbers["samples"] = samples
    report.need(report.numbers["results"] == {"equal": total}, f"results: {counted(results)}")
    report.need(transfers.get("landed", 0) >= total and set(transfers) == {"landed"}, f"transfers: {transfers}")
    report.text = json.dumps(report.numbers)
    return report


class Landed:
    """How the reads of decode engines ended, by their event logs, which keep a limited number of events."""

    def __init__(self, engines, marks):
        self.engines, self.marks, self.results = engines, marks, {}

    def read(self):
        for k, engine in enumerate(self.engines):
            events = engine.events(self.marks[k])
            if events:
                self.marks[k] = events[-1]["seq"]
            for event in events:
                if event["kind"] == "fetched":
                    self.results[event["result"]] = self.results.get(event["result"], 0) + 1


def run_tool(pair, name, *arguments, seconds):
    """The exit code and the last line of one command of baton; its output stays in the results' folder."""
    file = pair.options.folder / f"{pair.connector}-{name}.txt"
    with open(file, "w") as out:
        try:
            command = [pair.options.baton, *arguments]
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"not within {seconds} s"
    lines = file.read_text(errors="replace").strip().splitlines()
    return {"exit": code, "last": lines[-1] if lines else "", "file": str(file)}


@check("doctor", "`baton doctor --strict` is healthy, `baton bench disconnect` has no finding",
       limit_s=DOCTOR_S + DISCONNECT_S + 240)
def doctor(pair):
    report = Report("")
    pair.options.folder = pair.options.folder or pathlib.Path(tempfile.mkdtemp(prefix="baton-vllm-out-"))
    pair.home()
    urls = [pair.url, "--admin", pair.admin]
    report.numbers["doctor"] = run_tool(pair, "doctor", "doctor", *urls, "--strict", seconds=DOCTOR_S)
    pair.home()
    folder = pair.options.folder / f"{pair.connector}-disconnect"
    report.numbers["disconnect"] = run_tool(
        pair, "disconnect", "bench", "disconnect", "--url", *urls, "--out", str(folder), "--fail-on-findings",
        "--no-faults", *pair.options.disconnect_options.split(), seconds=DISCONNECT_S,
    )
    for name, result in report.numbers.items():
        report.need(result["exit"] == 0, f"{name}: exit {result['exit']}: {result['last']} ({result['file']})")
    report.need(pair.home() < 5, "blocks are in use afterwards")
    report.text = json.dumps(report.numbers)
    return report
