#!/usr/bin/env python3
"""Runs aiperf with cancels through `baton up` and compares its records with the engines' event logs.

The judge varies the share of cancelled requests and the delay before the cancel. It follows every cancelled request by
its id: aiperf's record, the router's explanation (`/explain/ID`), the engines' events. Must hold:

- The router recorded the disconnect.
- An engine aborted or released the request, unless the router sent it to no engine or no engine had read it.
- Its last block is free within a second of the disconnect, and no lease has expired.
- aiperf cancelled as many requests as configured. A sweep without cancels shows nothing.

Prints one line per run and one for all. Exits with 1 if any of this does not hold. `--out` keeps the data of the
verdict, and `--again FILE` judges that data again. Standard library only. See README.md in this folder.
"""

import argparse
import gzip
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = 600
RUN_S = 900
HOME_WITHIN_S = 1.0
# aiperf draws each cancel independently: of the configured cancels it makes 1.00 to 1.04 with 100 requests, 0.8 with
# 40.
CANCELLED_SHARE_MIN = 0.7
# A few cancels may have nothing to abort.
EXCUSED_SHARE_MAX, EXCUSED_ALWAYS = 0.05, 1
# Reasons with which the lease of a cancelled request ends.
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

    def account(self, name):
        """The router's explanation of the request with this client id, or None."""
        try:
            page = json.loads(get(f"{self.metrics.removesuffix('/metrics')}/explain/{name}"))
        except urllib.error.HTTPError as error:
            expect(error.code == 404, f"/explain/{name}: {error}")
            return None
        account = page["requests"][0]
        expect(account["steps_left_out"] == 0, f"the router's account of {name} is not whole")
        asked = [[step["leg"], step["engine"]] for step in account["steps"] if step["what"] == "ask"]
        return {key: account[key] for key in ("id", "outcome", "status", "began_us", "took_us")} | {"asked": asked}

    def latest(self):
        pages = {name: json.loads(get(f"{url}/debug/kv/events?after=latest")) for name, url in self.engines.items()}
        return {name: page["next"] for name, page in pages.items()}

    def events(self, after):
        """The engines' events since then."""
        found = []
        for name, url in self.engines.items():
            next_event = after[name]
            while True:
                page = json.loads(get(f"{url}/debug/kv/events?after={next_event}&limit=10000"))
                expect(page["lost"] == 0,
                       f"{page['lost']} events of {name} were lost: fewer requests at a time, please")
                found += [dict(event, engine=name) for event in page["events"]]
                if not page["events"]:
                    break
                next_event = page["next"]
        return found

    def settled(self):
        """Seconds until both engines hold nothing."""
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
    """One run of aiperf, with all of its requests."""
    command = [
        aiperf, "profile", "--model", stack.model, "--url", stack.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(tokenizer), "--request-count", str(options.requests),
        "--concurrency", str(options.concurrency), "--isl", str(options.prompt_tokens),
        "--osl", str(options.output_tokens), "--extra-inputs", "ignore_eos:true",
        "--random-seed", "7", "--ui", "none", "--export-level", "records", "--artifact-dir", str(folder),
    ]
    if rate:
        command += ["--request-cancellation-rate", str(rate), "--request-cancellation-delay", str(delay)]
    environment = dict(os.environ, AIPERF_LOG_LEVEL="WARNING")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    records = folder / "profile_export.jsonl"
    expect(records.exists(), f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return [json.loads(line) for line in records.read_text().splitlines()]


def grouped(events):
    """The engines' events by request."""
    by_id = {}
    for event in events:
        # The name of a recomputation belongs to the same request.
        by_id.setdefault(event["request_id"].removesuffix("-2"), []).append(event)
    return by_id


def followed(stack, records, by_id):
    """Each of aiperf's records; with the router's explanation and the engines' events of cancelled ones."""
    requests = []
    for record in records:
        meta, error = record["metadata"], record.get("error")
        request = {
            "id": meta["x_request_id"], "began_ns": meta["request_start_ns"], "ended_ns": meta["request_end_ns"],
            "cancelled": bool(meta.get("was_cancelled")), "error": error and f"{error.get('code')} {error.get('type')}",
        }
        if request["cancelled"]:
            router = stack.account(request["id"])
            left_out = ("request_id", "tag", "seq", "rank", "index")
            seen = by_id.get(router["id"], []) if router else []
            request |= {"router": router, "events": [{k: v for k, v in e.items() if k not in left_out} for e in seen]}
        requests.append(request)
    return requests


def told(event):
    """Whether this event shows that an engine received the abort."""
    return event["kind"] == "abort" or (event["kind"] == "lease_ended" and event["reason"] in GIVEN_BACK)


def engines_aborted(events_by_request):
    """The number of requests that engines aborted by their own logs, independent of aiperf's records."""
    return sum(any(told(event) for event in events) for events in events_by_request)


def home_us(events):
    """When the last block of a request was free; None if none was held, and infinity if one never was."""
    last = []
    for engine in {event["engine"] for event in events}:
        own = [event for event in events if event["engine"] == engine]
        freed = [event["at_us"] for event in own if event["kind"] == "freed"]
        if freed:
            last.append(max(freed))
        elif any(event["kind"] == "lease_opened" or (event["kind"] == "ended" and event["blocks"]) for event in own):
            last.append(float("inf"))
    return max(last, default=None)


def gone_us(request):
    """The time of the disconnect: the earlier of aiperf's time stamp, which can be 100 ms late, and the router's."""
    router, stamp = request["router"], request["ended_ns"] / 1000
    return min(stamp, router["began_us"] + router["took_us"]) if router and router["took_us"] is not None else stamp


def fate(request):
    """The outcome of a cancelled request, in one word."""
    router, events = request["router"], request["events"]
    if router is None:
        return "unknown_to_router"
    if router["outcome"] != "client_gone":
        return "not_seen_leaving"
    if any(told(event) for event in events):
        return "given_up"
    if events:
        return "not_told"
    return "unread" if router["asked"] else "never_asked"


def judge(run):
    """The result of a run and its claims. Pure: a function of the data of `--out`."""
    requests = run["requests"]
    cancelled = [request for request in requests if request["cancelled"]]
    fates = [fate(request) for request in cancelled]
    count = {word: fates.count(word) for word in
             ("given_up", "never_asked", "unread", "not_told", "not_seen_leaving", "unknown_to_router")}
    homes = [(home_us(request["events"]), gone_us(request)) for request in cancelled]
    homes = sorted((home - gone) / 1e6 for home, gone in homes if home is not None)
    learnt = [min(e["at_us"] for e in r["events"] if told(e)) - gone_us(r)
              for r, word in zip(cancelled, fates) if word == "given_up"]
    failed = sum(bool(request["error"]) and not request["cancelled"] for request in requests)
    # Of all requests, where the file has the count. Older files have only the events of cancelled requests.
    aborted = run.get("engines_aborted", engines_aborted(request["events"] for request in cancelled))
    expected = run["rate"] / 100 * len(requests)
    summary = {
        "requests": len(requests), "cancelled": len(cancelled), "engines_aborted": aborted, "failed": failed,
        "router_saw_leave": run["router_saw_leave"], **count, "lease_expiries": run["lease_expiries"],
        "wasted_tokens": sum(e["generated"] for r in cancelled for e in r["events"]
                                 if e["kind"] == "ended" and e["engine"] == "decode"),
        "gone_to_told_ms_max": round(max(learnt, default=0) / 1000, 3),
        "gone_to_home_s_p50": round(homes[len(homes) // 2], 3) if homes else None,
        "gone_to_home_s_max": round(homes[-1], 3) if homes else None,
    }
    as_many = len(cancelled) >= CANCELLED_SHARE_MIN * expected if expected else not cancelled
    holds = {
        "aiperf cancelled as many as it was told to": as_many,
        "the router saw every cancelled one leave": len(cancelled) == run["router_saw_leave"]
        and not count["not_seen_leaving"] and not count["unknown_to_router"],
        "each that an engine had was aborted or released": not count["not_told"],
        "nothing failed": failed == 0,
        "each one's blocks home within a second of its end": all(home <= HOME_WITHIN_S for home in homes),
        "no lease expired": run["lease_expiries"] == 0,
    }
    return summary, [claim for claim, held in holds.items() if not held]


def judge_sweep(runs):
    """The same for all runs together: the number of excused cancels."""
    summaries = [judge(run)[0] for run in runs]
    keys = ("cancelled", "engines_aborted", "given_up", "never_asked", "unread")
    total = {key: sum(summary[key] for summary in summaries) for key in keys}
    most = max(EXCUSED_ALWAYS, int(EXCUSED_SHARE_MAX * total["cancelled"]))
    excused = total["never_asked"] + total["unread"]
    broken = ["almost every cancelled one had an engine to be aborted on"] if excused > most else []
    return {"runs": len(runs), **total, "excused_at_most": most}, broken


def check():
    """The judge's own test: a run for which all claims hold, and for every claim a run that breaks only that claim."""
    second = 1_000_000

    def event(engine, at_us, kind, **more):
        return {"engine": engine, "at_us": at_us, "kind": kind, **more}

    def run(change=lambda one: None, **more):
        one = {
            "id": "c", "began_ns": 0, "ended_ns": 5 * second * 1000, "cancelled": True, "error": "499 cancelled",
            "router": {"id": "r", "outcome": "client_gone", "began_us": 0, "took_us": 5 * second + 10,
                       "asked": [["prefill", "p"], ["decode", "d"]]},
            "events": [
                event("prefill", 4 * second, "lease_opened", blocks=4),
                event("prefill", 4 * second + 9, "lease_ended", reason="transfer_done"),
                event("prefill", 4 * second + 9, "freed", blocks=4),
                event("decode", 5 * second + 20, "abort", how="disconnect"),
                event("decode", 5 * second + 30, "ended", outcome="abort", generated=3, blocks=4),
                event("decode", 5 * second + 40, "freed", blocks=4),
            ],
        }
        change(one)
        # It ends long after the cancelled request: lateness counts from the request's own disconnect.
        other = {"id": "o", "began_ns": 0, "ended_ns": 60 * second * 1000, "cancelled": False, "error": None}
        return {"rate": 50.0, "requests": [one, other], "router_saw_leave": 1, "lease_expiries": 0, **more}

    def late(one):
        one["events"][-1]["at_us"] += 2 * second

    def late_by_the_router(one):
        one["ended_ns"] += 3 * second * 1000
        late(one)

    def never_home(one):
        one["events"].pop()

    def not_told(one):
        del one["events"][3]

    def crossed(one):
        one["router"]["outcome"] = "completed"

    def never_asked(one):
        one["router"]["asked"], one["events"] = [], []

    def fails(one):
        one["cancelled"], one["error"] = False, "500 oops"

    def unread(one):
        one["events"] = []

    def stays(one):
        one["cancelled"], one["error"] = False, None

    cancels = "aiperf cancelled as many as it was told to"
    home, aborted, left = ("each one's blocks home within a second of its end",
                           "each that an engine had was aborted or released",
                           "the router saw every cancelled one leave")
    for made, broken in (
        (run(), []), (run(never_asked), []), (run(late), [home]), (run(late_by_the_router), [home]),
        (run(never_home), [home]), (run(not_told), [aborted]),
        (run(crossed), [left]), (run(router_saw_leave=2), [left]),
        (run(fails, rate=0, router_saw_leave=0), ["nothing failed"]),
        (run(unread), []), (run(stays, router_saw_leave=0), [cancels]), (run(stays, rate=0, router_saw_leave=0), []),
        (run(rate=75.0), [cancels]), (run(rate=0), [cancels]),
        (run(lease_expiries=1), ["no lease expired"]),
    ):
        found = judge(made)
        expect(found[1] == broken, f"the judge says {found} where {broken} is broken")
    expect(judge(run(never_asked))[0]["never_asked"] == 1, "who was never asked is not counted")
    expect(judge(run())[0]["engines_aborted"] == 1 and judge(run(not_told))[0]["engines_aborted"] == 0,
           "the engines' own count is not theirs")
    # One in twenty is excused, and one in any case.
    for sweep, held in (
        ([run()], True), ([run(never_asked)], True), ([run(never_asked), run(unread)], False),
        ([run()] * 38 + [run(never_asked), run(unread)], True), ([run()] * 37 + [run(never_asked), run(unread)], False),
    ):
        found = judge_sweep(sweep)
        expect((not found[1]) == held, f"the judge says {found} of a sweep that {'holds' if held else 'does not'}")


def machine():
    """As `baton bench` prints it."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    kib = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1])
    return f"{len(names)} × {names[0] if names else 'unknown processor'}, {kib >> 20} GiB, Linux {os.uname().release}"


def commit():
    """As `baton bench` prints it: with a `+` for local changes."""
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def written(about, runs):
    """JSON with a line for each request."""
    def lines(run):
        head = {key: value for key, value in run.items() if key != "requests"}
        requests = ",\n   ".join(json.dumps(request, separators=(",", ":")) for request in run["requests"])
        return json.dumps(head)[:-1] + ', "requests": [\n   ' + requests + "]}"
    return json.dumps(about, indent=1)[:-2] + ',\n "runs": [\n  ' + ",\n  ".join(map(lines, runs)) + "]\n}\n"


def line(told_of, broken):
    """A line of the verdict; whether it holds."""
    print(("FAIL" if broken else "ok  "), json.dumps(told_of), *broken, sep="  ", flush=True)
    return not broken


def say(run):
    """The line of a run; whether it holds."""
    summary, broken = judge(run)
    return line({"rate": run["rate"], "delay_s": run["delay_s"], **summary,
                 "settled_after_exit_s": run["settled_after_exit_s"]}, broken)


def say_all(runs, sound):
    """The line of all runs, and the exit code."""
    whole = line(*judge_sweep(runs))
    print(f"{sound} of {len(runs)} runs hold" + ("" if whole else ", and the sweep does not"))
    return 0 if whole and sound == len(runs) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="0,25,50", help="percentages of requests that are cancelled")
    parser.add_argument("--delays", default="0,0.02,0.1,0.3", help="seconds from sent to cancelled")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=1500,
                        help="so many that an answer takes longer than the longest delay: a cancel that crosses the "
                             "end of an answer is counted by aiperf alone")
    parser.add_argument("--out", help="write every run's numbers and what they are made of here, as JSON")
    parser.add_argument("--again", metavar="FILE", help="judge what --out has kept, and start nothing")
    parser.add_argument("--check", action="store_true", help="only test the judge itself")
    options = parser.parse_args()
    check()
    if options.check:
        print("the judge finds every planted fault")
        return 0
    if options.again:
        kept = pathlib.Path(options.again).read_bytes()
        runs = json.loads(gzip.decompress(kept) if options.again.endswith(".gz") else kept)["runs"]
        return say_all(runs, sum([say(run) for run in runs]))
    binary = os.environ.get("BATON_BIN") or str(ROOT / "target/debug/baton")
    expect(pathlib.Path(binary).exists(), f"no {binary}: cargo build first, or set BATON_BIN")
    aiperf = os.environ.get("AIPERF", "aiperf")
    tokenizer = ROOT / "engine/models/demo"
    runs = [(0, 0.0)] if "0" in options.rates.split(",") else []
    runs += [(float(r), float(d)) for r in options.rates.split(",") if float(r) for d in options.delays.split(",")]
    stack, results, sound = Stack(binary), [], 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-aiperf-"))
    try:
        for number, (rate, delay) in enumerate(runs):
            after, gone = stack.latest(), stack.clients_gone()
            records = profile(aiperf, stack, tokenizer, options, rate, delay, folder / str(number))
            settled = stack.settled()
            events = stack.events(after)
            by_id = grouped(events)
            expired = sum(e["kind"] == "lease_ended" and e["reason"] == "lease_expired" for e in events)
            results.append({
                "rate": rate, "delay_s": delay, "router_saw_leave": stack.clients_gone() - gone,
                "lease_expiries": expired, "engines_aborted": engines_aborted(by_id.values()),
                "settled_after_exit_s": round(settled, 3), "requests": followed(stack, records, by_id),
            })
            sound += say(results[-1])
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        def version(command):
            return subprocess.run([command, "--version"], capture_output=True, text=True).stdout.strip()
        about = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine(), "commit": commit(),
            "baton": version(binary), "aiperf": version(aiperf),
            "command": "tests/peers/aiperf.sh " + shlex.join(word for word in sys.argv[1:]),
        }
        results = [run | {"summary": judge(run)[0], "broken": judge(run)[1]} for run in results]
        pathlib.Path(options.out).write_text(written(about, results))
    return say_all(results, sound)


if __name__ == "__main__":
    sys.exit(main())
