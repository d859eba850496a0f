#!/usr/bin/env python3
"""aiperf cancels requests through `baton up`; what it says it cancelled is held against what the engines wrote down.

For each share of requests that are cancelled and each delay until they are: aiperf's own count of cancelled requests
must be the number of requests that the router saw leave, and the number that the engines aborted or released; every
block must be home within a second of the last client's end, by the engines' clocks; and no lease may have expired. One
line for each run; exits with 1 if any of it does not hold. Standard library only. See README.md in this folder.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = 600
RUN_S = 900
HOME_WITHIN_S = 1.0
# Why a lease ends that nobody will read, because its client has left.
GIVEN_BACK = ("client_gone", "aborted", "late_reply", "consumer_aborted")


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def get(url, timeout=30):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


class Stack:
    """`baton up` with the built-in model."""

    def __init__(self, binary):
        self.process = subprocess.Popen(
            [binary, "up", "--listen", f"127.0.0.1:{free_port()}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        said = []
        deadline = time.monotonic() + START_S
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"Baton is up after .*: (\S+)/v1, model (\S+)", line):
                self.url, self.model = found[1], found[2]
            if found := re.search(r"prefill (\S+), decode (\S+) .*Router metrics: (\S+)", line):
                self.engines, self.metrics = {"prefill": found[1], "decode": found[2]}, found[3]
                return
            expect(time.monotonic() < deadline, "baton up takes too long")
        raise AssertionError("baton up ended: " + "".join(said[-5:]))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def clients_gone(self):
        total = 0
        for line in get(self.metrics).splitlines():
            if line.startswith("baton_router_requests_total{") and 'outcome="client_gone"' in line:
                total += float(line.rsplit(" ", 1)[1])
        return int(total)

    def latest(self):
        pages = {name: json.loads(get(f"{url}/debug/kv/events?after=latest")) for name, url in self.engines.items()}
        return {name: page["next"] for name, page in pages.items()}

    def events(self, after):
        """What the engines wrote down since then."""
        found = []
        for name, url in self.engines.items():
            next_event = after[name]
            while True:
                page = json.loads(get(f"{url}/debug/kv/events?after={next_event}&limit=10000"))
                expect(page["lost"] == 0, f"{page['lost']} events of {name} were lost: fewer requests at a time, please")
                found += [dict(event, engine=name) for event in page["events"]]
                if not page["events"]:
                    break
                next_event = page["next"]
        return found

    def settled(self):
        """Seconds until both engines hold nothing for anybody."""
        begun = time.monotonic()
        while True:
            books = {name: json.loads(get(f"{url}/debug/kv")) for name, url in self.engines.items()}
            home = all(
                book["leases"]["live"] == 0
                and not any(book["requests"].values())
                and book["blocks"]["free"] + book["blocks"]["cached"] == book["blocks"]["total"]
                for book in books.values()
            )
            if home:
                return time.monotonic() - begun
            expect(time.monotonic() - begun < 60, f"blocks do not come home: {books}")
            time.sleep(0.01)


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def profile(aiperf, stack, tokenizer, options, rate, delay, folder):
    """One run of aiperf, and each of its requests."""
    command = [
        aiperf, "profile", "--model", stack.model, "--url", stack.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(tokenizer), "--request-count", str(options.requests), "--concurrency", str(options.concurrency),
        "--isl", str(options.prompt_tokens), "--osl", str(options.output_tokens), "--extra-inputs", "ignore_eos:true",
        "--random-seed", "7", "--ui", "none", "--export-level", "records", "--artifact-dir", str(folder),
    ]
    if rate:
        command += ["--request-cancellation-rate", str(rate), "--request-cancellation-delay", str(delay)]
    environment = dict(os.environ, AIPERF_LOG_LEVEL="WARNING")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    records = folder / "profile_export.jsonl"
    expect(records.exists(), f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return [json.loads(line) for line in records.read_text().splitlines()]


def judge(stack, records, events, gone):
    """What aiperf says against what the engines wrote down."""
    cancelled = [record for record in records if record["metadata"].get("was_cancelled")]
    failed = [r for r in records if r.get("error") and not r["metadata"].get("was_cancelled")]
    by_id = {}
    for event in events:
        by_id.setdefault(event["request_id"], []).append(event)
    answered = {
        name for name, seen in by_id.items()
        if any(e["engine"] == "decode" and e["kind"] == "ended" and e["outcome"] in ("stop", "length") for e in seen)
    }
    given_up = {
        name for name, seen in by_id.items()
        if any(e["kind"] == "abort" for e in seen)
        or any(e["kind"] == "lease_ended" and e["reason"] in GIVEN_BACK for e in seen)
    }
    expired = sum(e["kind"] == "lease_ended" and e["reason"] == "lease_expired" for e in events)
    computed = sum(e.get("generated", 0) for e in events if e["kind"] == "ended" and e["engine"] == "decode"
                   and e["request_id"] in given_up - answered)
    def to_home_ms(seen):
        """From the moment at which an engine learnt of it until its last block was home."""
        told = min(e["at_us"] for e in seen if e["kind"] == "abort" or e.get("reason") in GIVEN_BACK)
        return (max([e["at_us"] for e in seen if e["kind"] == "freed"], default=told) - told) / 1000

    slowest = max((to_home_ms(by_id[name]) for name in given_up - answered), default=0.0)
    last_client = max(record["metadata"]["request_end_ns"] for record in records) / 1e9
    last_freed = max((e["at_us"] for e in events if e["kind"] == "freed"), default=0) / 1e6
    return {
        "requests": len(records), "cancelled": len(cancelled), "failed": len(failed), "router_saw_leave": gone,
        "engines_gave_up": len(given_up - answered), "engines_never_asked": len(records) - len(by_id),
        "lease_expiries": expired, "tokens_for_nobody": computed, "told_to_home_ms_max": round(slowest, 3),
        "home_after_s": round(last_freed - last_client, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="0,25,50", help="percentages of requests that are cancelled")
    parser.add_argument("--delays", default="0,0.02,0.1,0.3", help="seconds from sent to cancelled")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--out", help="write every run's numbers here, as JSON")
    options = parser.parse_args()
    binary = os.environ.get("BATON_BIN") or str(ROOT / "target/debug/baton")
    expect(pathlib.Path(binary).exists(), f"no {binary}: cargo build first, or set BATON_BIN")
    aiperf = os.environ.get("AIPERF", "aiperf")
    tokenizer = ROOT / "engine/models/demo"
    runs = [(0, 0.0)] if "0" in options.rates.split(",") else []
    runs += [(float(r), float(d)) for r in options.rates.split(",") if float(r) for d in options.delays.split(",")]
    stack, results, wrong = Stack(binary), [], 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-aiperf-"))
    try:
        for number, (rate, delay) in enumerate(runs):
            after, gone = stack.latest(), stack.clients_gone()
            records = profile(aiperf, stack, tokenizer, options, rate, delay, folder / str(number))
            settled = stack.settled()
            verdict = judge(stack, records, stack.events(after), stack.clients_gone() - gone)
            verdict = {"rate": rate, "delay_s": delay, **verdict, "settled_after_exit_s": round(settled, 3)}
            results.append(verdict)
            # A client that leaves before any engine was asked leaves nothing for an engine to give up.
            server = verdict["engines_gave_up"] + verdict["engines_never_asked"]
            holds = {
                "server-side aborts equal client cancels": server == verdict["cancelled"] == verdict["router_saw_leave"],
                "nothing failed": verdict["failed"] == 0,
                "home within a second": verdict["home_after_s"] <= HOME_WITHIN_S,
                "no lease expired": verdict["lease_expiries"] == 0,
            }
            broken = [claim for claim, held in holds.items() if not held]
            wrong += bool(broken)
            print(("ok  " if not broken else "FAIL"), json.dumps(verdict), *broken, sep="  ", flush=True)
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        version = subprocess.run([aiperf, "--version"], capture_output=True, text=True).stdout.strip()
        pathlib.Path(options.out).write_text(json.dumps({"aiperf": version, "runs": results}, indent=2) + "\n")
    print(f"{len(results) - wrong} of {len(results)} runs hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
