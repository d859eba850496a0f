#!/usr/bin/env python3
"""Routers for SGLang in front of simulated SGLang engines: see run.sh. Standard library only.

Prints one line for each thing it did: `pass` and `FAIL` are what a router for SGLang and the simulated engines must do,
`SEEN` is what this router did, with times in SGLang's seconds. Exits with 1 if anything failed.
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

from fleet import COMMANDS, MODEL, SCALE, SLACK_S, Engines, Fleet, Router, Stream, leave_without_answer, post

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
# The longest that SGLang's engines hold something by themselves: 300 s for the other leg, then 30 s for its abort.
LONGEST_S = 330 * SCALE + SLACK_S
# Baton's router aborts by id. The rest is a step of six prompts.
BATON_HOME_S = 2
PLAIN, FAULTS = [], []


def check(checks, title):
    def register(function):
        checks.append((title, function))
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def chat(text, **options):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 12, **options}


def completion(text, **options):
    return {"model": MODEL, "prompt": text, "max_tokens": 12, **options}


def generate(text, **options):
    return {"text": text, "sampling_params": {"max_new_tokens": 12}, **options}


def text_of(path, answer):
    answer = json.loads(answer)
    if path == GENERATE:
        return answer["text"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def delta_of(path, event):
    event = json.loads(event)
    expect("error" not in event, event)
    return "".join((choice["delta"].get("content") or "") if path == CHAT else choice["text"] for choice in event["choices"])


@check(PLAIN, "chat, completion and /generate are those of the pair without a router")
def whole(ctx):
    for path, body in ((CHAT, chat), (COMPLETIONS, completion), (GENERATE, generate)):
        if path == GENERATE and ctx.name == "baton":
            continue
        for number in range(4):
            body_of = body(f"one two three {number} " * 20)
            status, answer = post(ctx.address, path, body_of)
            expect(status == 200, f"{path}: {status} {answer}")
            wanted = text_of(path, ctx.fleet.alone(path, body_of))
            expect(text_of(path, answer) == wanted, f"{path}: {text_of(path, answer)!r} instead of {wanted!r}")
    return "12 texts" if ctx.name != "baton" else "8 texts; Baton routes no /generate"


@check(PLAIN, "streams are the whole response in pieces, with usage and [DONE]")
def streams(ctx):
    for path, body in ((CHAT, chat), (COMPLETIONS, completion)):
        body_of = body("one two three " * 20)
        whole = json.loads(ctx.fleet.alone(path, body_of))
        events = list(Stream(ctx.address, path, {**body_of, "stream_options": {"include_usage": True}}).events())
        expect(events[-1] == "[DONE]", events[-1])
        text = "".join(delta_of(path, event) for event in events[:-1])
        expect(text == text_of(path, json.dumps(whole)), f"{path}: {text!r}")
        expect(json.loads(events[-2])["usage"]["total_tokens"] == whole["usage"]["total_tokens"], events[-2])
    return f"{len(events)} events"


@check(PLAIN, "a client's own bootstrap fields reach no engine")
def forged(ctx):
    body = completion("four five six " * 20, bootstrap_host="192.0.2.1", bootstrap_port=9, bootstrap_room=0)
    status, answer = post(ctx.address, COMPLETIONS, body)
    expect(status == 200, f"{status} {answer}")
    wanted = text_of(COMPLETIONS, ctx.fleet.alone(COMPLETIONS, completion("four five six " * 20)))
    expect(text_of(COMPLETIONS, answer) == wanted, answer)
    return "room 0 at a foreign address was replaced"


@check(PLAIN, "200 requests, 32 at once, on two prefill and two decode engines")
def many(ctx):
    bodies = [completion(f"prompt {number} " * (20 + number % 40), stream=number % 2 == 1) for number in range(200)]

    def one(body):
        if body["stream"]:
            events = list(Stream(ctx.address, COMPLETIONS, body).events())
            return "".join(delta_of(COMPLETIONS, event) for event in events[:-1])
        status, answer = post(ctx.address, COMPLETIONS, body)
        expect(status == 200, f"{status} {answer}")
        return text_of(COMPLETIONS, answer)

    before = ctx.fleet.counts("num_requests_total")
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(one, bodies))
    wanted = [text_of(COMPLETIONS, ctx.fleet.alone(COMPLETIONS, {**body, "stream": False})) for body in bodies[::10]]
    expect(texts[::10] == wanted, "equal texts")
    shares = [after - was for after, was in zip(ctx.fleet.counts("num_requests_total"), before)]
    expect(all(shares), f"every engine has a share: {shares}")
    return f"requests per engine, with 20 of the comparison: {shares}"


@check(PLAIN, "no room failed, and every page is free")
def clean(ctx):
    home = ctx.fleet.home_after(time.monotonic(), SLACK_S)
    for counter in ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total", "num_aborted_requests_total"):
        expect(not any(ctx.fleet.counts(counter)), f"{counter}: {ctx.fleet.counts(counter)}")
    return f"{home:.2f} s after the last response"


def left(ctx, leave):
    """Six clients leave at once. What is computed afterwards, and when everything is free."""
    threads = [threading.Thread(target=leave) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = lambda: sum(ctx.fleet.counts("generation_tokens_total", ctx.fleet.decode))  # noqa: E731
    before, since = tokens(), time.monotonic()
    home = ctx.fleet.home_after(since, LONGEST_S)
    expect(ctx.name != "baton" or home < BATON_HOME_S, f"free after {home:.2f} s")
    return f"free after {home:.2f} s, D computed {tokens() - before} tokens in it"


@check(PLAIN, "SEEN clients leave streams after three events")
def leave_stream(ctx):
    def leave():
        stream = Stream(ctx.address, COMPLETIONS, completion("seven " * 60, max_tokens=1500))
        events = [event for event, _ in zip(stream.events(), range(3))]
        expect(len(events) == 3, events)
        stream.leave()

    return left(ctx, leave)


@check(PLAIN, "SEEN clients leave before a response in one piece, while D decodes")
def leave_whole(ctx):
    return left(ctx, lambda: leave_without_answer(ctx.address, COMPLETIONS, completion("eight " * 60, max_tokens=1500), 0.5))


@check(PLAIN, "SEEN clients leave while P computes")
def leave_prefill(ctx):
    body = completion("nine " * 12000, max_tokens=20, stream=True)
    return left(ctx, lambda: leave_without_answer(ctx.address, COMPLETIONS, body, 0.2))


@check(PLAIN, "SEEN two choices of one request")
def choices(ctx):
    return f"chat {odd(ctx, CHAT, chat('ten eleven', n=2))}; completion {odd(ctx, COMPLETIONS, completion('ten eleven', n=2))}"


@check(PLAIN, "SEEN two prompts in one request, which the simulated engines do not take")
def batch(ctx):
    return odd(ctx, COMPLETIONS, completion(["ten", "eleven"]))


def odd(ctx, path, body):
    began = time.monotonic()
    status, answer = post(ctx.address, path, body)
    took, home = time.monotonic() - began, ctx.fleet.home_after(time.monotonic(), LONGEST_S)
    return f"{status} after {took:.2f} s, free {home:.2f} s later, {answer[:200]!r}"


@check(PLAIN, "the router and its engines go on after all that")
def afterwards(ctx):
    whole(ctx)
    ctx.fleet.home_after(time.monotonic(), SLACK_S)
    return "every page is free"


def fails(ctx, count, stream):
    """Requests that an engine may not serve: what clients get, and when every engine is idle again."""
    seen, slowest = [], 0
    for _ in range(count):
        began = time.monotonic()
        seen.append(streamed(ctx) if stream else str(post(ctx.address, COMPLETIONS, completion("twelve " * 40))[0]))
        slowest = max(slowest, time.monotonic() - began)
    since = time.monotonic()
    held, home = ctx.fleet.held(), ctx.fleet.home_after(since, LONGEST_S)
    pages = sum(row["pages"] for row in held.values())
    requests = sum(sum(row.values()) - row["pages"] for row in held.values())
    ended = f"{', '.join(sorted(set(seen)))}, the slowest after {slowest:.2f} s"
    left = f"{requests} requests and {pages} pages remained for {home:.2f} s" if held else "nothing remained"
    expect(ctx.name != "baton" or home < BATON_HOME_S, f"{ended}; {left}")
    return f"{ended}; {left}"


def streamed(ctx):
    stream = Stream(ctx.address, COMPLETIONS, completion("twelve " * 40))
    status = stream.answer.status
    if status != 200:
        return str(status)
    lines = list(stream.events())
    end = "complete" if lines[-1:] == ["[DONE]"] else "cut" if lines else "empty"
    return f"200 {'with an error event' if any('error' in json.loads(line) for line in lines if line != '[DONE]') else end}"


BATON_STATUS = {"D refuses": "503,", "one of two D refuses": "200", "P refuses": "400,", "P is dead": "503,"}


@check(FAULTS, "D refuses")
def decode_refuses(baton, processes):
    engines = Engines(baton, processes, "--fault", "refuses:1@decode-0")
    return Fleet(engines, engines), None


@check(FAULTS, "one of two D refuses")
def one_decode_refuses(baton, processes):
    engines = Engines(baton, processes, "--decode", "2", "--fault", "refuses:1@decode-0")
    return Fleet(engines, engines), None


@check(FAULTS, "P refuses")
def prefill_refuses(baton, processes):
    # P's context is shorter than D's, so only P refuses the prompt.
    return Fleet(Engines(baton, processes, "--max-model-len", "32"), Engines(baton, processes)), None


@check(FAULTS, "P is dead")
def prefill_dead(baton, processes):
    prefill = Engines(baton, processes)
    return Fleet(prefill, Engines(baton, processes)), prefill


def say(what, run, seen):
    """Runs one check and prints its line. Returns whether it failed."""
    try:
        found = run()
    except Exception as error:  # one failure does not hide the others
        print(f"FAIL  {what}: {type(error).__name__}: {error}", flush=True)
        return True
    print(f"{'SEEN' if seen else 'pass'}  {what}: {found}", flush=True)
    return False


def run_plain(name, tools, work, on, engine_options, titles):
    """The checks of one router, on engines without faults."""
    processes, failed = [], 0
    try:
        engines = Engines(tools.baton, processes, "--prefill", "2", "--decode", "2", *engine_options)
        fleet = Fleet(engines, engines)
        router = Router(name, tools, fleet, fleet.engines, work, processes)
        fleet.home_after(time.monotonic(), LONGEST_S)
        for title, function in PLAIN:
            if titles and function not in titles:
                continue
            seen = title.startswith("SEEN ")
            failed += say(f"{name}{on}: {title.removeprefix('SEEN ')}", lambda: function(router), seen)  # noqa: B023
    finally:
        end(processes)
    return failed


# Engines of the checks without faults, and the checks there; all, if none is named.
ENGINES = (
    ("", (), ()),
    (", two data-parallel ranks", ("--dp-size", "2"), (whole, streams, many, clean)),
    (", engines without the abort exchange", ("--abort-exchange", "old"),
     (whole, leave_stream, leave_whole, leave_prefill, afterwards)),
)


def run_fault(name, tools, work, title, make):
    """One router, on engines of which one refuses or is dead. Baton's statuses are known."""
    processes = []

    def run():
        fleet, dies = make(tools.baton, processes)
        router = Router(name, tools, fleet, fleet.prefill, work, processes)
        fleet.home_after(time.monotonic(), LONGEST_S)
        if dies:
            dies.process.kill()
            dies.process.wait()
            fleet.prefill = []
        found = [fails(router, 2, stream) for stream in (False, True)]
        known = all(line.startswith(BATON_STATUS[title]) for line in found)
        expect(name != "baton" or known, f"{found} instead of {BATON_STATUS[title]}")
        return f"whole: {found[0]}. Streams: {found[1]}"

    try:
        return say(f"{name}: {title}", run, True)
    finally:
        end(processes)


def end(processes):
    for process in reversed(processes):
        process.kill()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baton", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("folder", type=pathlib.Path, help="the routers' environments")
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="one router (repeatable)")
    tools = parser.parse_args()
    print(f"SGLang's waits are shortened by {SCALE}: 300 s to {300 * SCALE:.0f} s, 4 s to {4 * SCALE} s", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="baton-sglang-") as work:
        for name in tools.only or COMMANDS:
            if name != "baton" and not version(name, tools.folder):
                print(f"skip  {name}: is not installed", flush=True)
                continue
            print(f"      {name} {version(name, tools.folder)}", flush=True)
            for on, engine_options, titles in ENGINES:
                failed += run_plain(name, tools, pathlib.Path(work), on, engine_options, titles)
            for title, make in FAULTS:
                failed += run_fault(name, tools, pathlib.Path(work), title, make)
    print(f"{failed} failed")
    return 1 if failed else 0


def version(name, folder):
    if name == "baton":
        return "of this repository"
    package = {"mini_lb": "sglang-router"}.get(name, name)
    show = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
    python = folder / package / "bin/python"
    return subprocess.run([python, "-c", show], capture_output=True, text=True).stdout.strip() if python.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
