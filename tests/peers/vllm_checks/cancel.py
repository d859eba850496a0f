"""Clients that leave at uniformly drawn instants of a request's life."""

import json
import threading
import time

from .base import NO_ANSWER, Report, attempt, check, counted, expect, get_json, percentile, spread
from .clients import Call, Load

STREAMS = 8
PROMPT_BLOCKS, TOKENS = 12, 48
# A request that P has not queued within this time after its client left is not expected any more.
ARRIVAL_S = 1.5
QUIET_S = 0.7
# Allowance for the step that has the blocks when a client leaves, under load.
STEP_MS_MAX = 150


class Collector(threading.Thread):
    """Reads an engine's event log while a check runs: the events of each request, by the router's id."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine, self.next = engine, engine.mark()
        self.requests, self.lost = {}, 0
        self.stopping = threading.Event()
        self.start()

    def run(self):
        while not self.stopping.is_set():
            try:
                page = get_json(f"{self.engine.url}/debug/kv/events?after={self.next}&wait_ms=200&limit=2000")
            except NO_ANSWER:
                self.stopping.wait(0.1)
                continue
            self.lost += page["lost"]
            for event in page["events"]:
                self.requests.setdefault(event["request_id"], []).append(event)
            self.next = page["next"]

    def stop(self):
        """Stops after the events so far have arrived."""
        latest, until = self.engine.mark(), time.monotonic() + 5
        while self.next < latest and time.monotonic() < until:
            time.sleep(0.02)
        self.stopping.set()
        self.join(5)

    def of(self, request_id, kind):
        return [event for event in list(self.requests.get(request_id, ())) if event["kind"] == kind]


def request(pair, number, stream):
    """The path and the body of one trial. Every fourth is a chat without and with a stream."""
    body = {"model": "demo", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "stream": stream}
    text = pair.prompt(PROMPT_BLOCKS)
    if number % 2:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


def reply_times(pair):
    """Seconds of a prefill at P, and of a whole response through the router: medians of 7."""
    legs, replies = [], []
    for number in range(7):
        begun = time.monotonic()
        body = {"model": "demo", "prompt": pair.prompt(PROMPT_BLOCKS), "temperature": 0, "max_tokens": 1}
        status, answer = attempt(pair.prefill.url + "/v1/completions", body)
        expect(status == 200, f"{status}: {answer}")
        legs.append(time.monotonic() - begun)
        begun = time.monotonic()
        status, answer = attempt(pair.url + "/v1/completions", request(pair, 0, False)[1])
        expect(status == 200, f"{status}: {answer}")
        replies.append(time.monotonic() - begun)
    return percentile(legs, 0.5), percentile(replies, 0.5)


class Trial:
    """One client that left."""

    def __init__(self, pair, name, number, windows):
        # Half of the trials are within the prefill's time, the others within the whole life.
        window = windows[number // 8 % 2] * 1.5
        self.how = "rst" if number // 4 % 2 else "fin"
        path, body = request(pair, number, bool(number // 2 % 2))
        self.client_id = f"{name}-{number}"
        call = Call(pair.url, path, body, self.client_id)
        time.sleep(pair.random.uniform(0, window))
        self.completed = call.leave(self.how)
        self.left_us = time.time_ns() // 1000
        self.request_id, self.seconds = None, None

    def follow(self, pair, collector):
        """Waits until P has freed the request's blocks, or has not received it."""
        until = time.monotonic() + ARRIVAL_S
        while time.monotonic() < until:
            self.request_id = self.request_id or pair.router_id(self.client_id)
            if self.request_id and (collector.of(self.request_id, "freed") or collector.of(self.request_id, "refused")):
                return
            time.sleep(0.02)

    def watch(self, pair):
        """As `follow`, by the pool's usage: seconds until no block of P is in use for a while."""
        begun = last = time.monotonic()
        while time.monotonic() - last < QUIET_S:
            if pair.prefill.pinned():
                last = time.monotonic()
            expect(last - begun < pair.lease + 15, "P's blocks were not freed")
            time.sleep(0.005)
        self.seconds = last - begun


def by_log(pair, name, count, windows):
    """Trials against an engine with an event log. Returns their numbers."""
    collector, ahead = Collector(pair.prefill), pair.prefill.clock_ahead_us()
    readers = [(Collector(decode), decode.clock_ahead_us()) for decode in pair.decodes]
    trials = []
    for number in range(count):
        trial = Trial(pair, name, number, windows)
        trial.follow(pair, collector)
        trials.append(trial)
    # Leases that nothing released end now at the latest.
    until = time.monotonic() + pair.lease + 5
    while time.monotonic() < until and any(
        len(collector.of(t.request_id, "lease_opened")) > len(collector.of(t.request_id, "lease_ended")) for t in trials
    ):
        time.sleep(0.2)
    for each, _ in [(collector, ahead), *readers]:
        each.stop()
        expect(each.lost == 0, f"{each.lost} events of {each.engine.name} are overwritten")
    return judge(trials, collector, ahead, readers)


def judge(trials, collector, ahead, readers):
    after_ms, reasons, never_freed, repeated, lent = [], [], [], 0, 0
    slowest = (0, "")
    for trial in trials:
        queued, freed = collector.of(trial.request_id, "queued"), collector.of(trial.request_id, "freed")
        lent += bool(collector.of(trial.request_id, "lease_opened"))
        reasons += [event["reason"] for event in collector.of(trial.request_id, "lease_ended")]
        repeated += len(freed) > max(1, len(queued))
        # A request that is aborted in the queue has no blocks.
        if collector.of(trial.request_id, "started") and not freed:
            never_freed.append(story(trial, [(collector, ahead), *readers]))
        elif freed and not trial.completed:
            late = max(event["at_us"] for event in freed) - ahead - trial.left_us
            if late > 0:
                after_ms.append(late / 1000)
                slowest = max(slowest, (late, story(trial, [(collector, ahead), *readers])))
    # Leases of the load count as well.
    all_reasons = [e["reason"] for events in collector.requests.values() for e in events if e["kind"] == "lease_ended"]
    return {
        "left": len(trials),
        "completed": sum(trial.completed for trial in trials),
        "not_read_by_router": sum(trial.request_id is None for trial in trials),
        "reached_p": sum(bool(collector.of(trial.request_id, "queued")) for trial in trials),
        "lent": lent,
        "held_when_client_left": len(after_ms),
        "free_after_ms": spread(after_ms),
        "slowest": slowest[1],
        "step_ms": spread(list(steps(collector))),
        "lease_ends": counted(reasons),
        "expired": sum(reason == "lease_expired" for reason in all_reasons),
        "never_freed": never_freed,
        "freed_twice": repeated,
    }


def steps(collector):
    """Milliseconds of the steps that computed prompts: blocks of a running step are freed after its end."""
    for events in list(collector.requests.values()):
        times = {event["kind"]: event["at_us"] for event in events}
        if "started" in times and "first_token" in times:
            yield (times["first_token"] - times["started"]) / 1000


def story(trial, collectors):
    """The engines' events of one trial, in milliseconds after the client left."""
    events = sorted(
        (
            (event["at_us"] - ahead - trial.left_us) / 1000,
            collector.engine.name,
            event["kind"],
            event.get("reason") or "",
        )
        for collector, ahead in collectors
        for event in list(collector.requests.get(trial.request_id, ()))
    )
    lines = (f"{ms:.1f} {engine} {kind} {reason}".strip() for ms, engine, kind, reason in events)
    return f"{trial.client_id} ({trial.how}): {', '.join(lines)}"


def by_metrics(pair, name, count, windows, idle):
    """Trials against a stock engine. Under load only the counter of expired leases tells them apart."""
    before, trials = pair.prefill.expired(), []
    for number in range(count):
        trial = Trial(pair, name, number, windows)
        if idle:
            trial.watch(pair)
        else:
            time.sleep(0.1)
        trials.append(trial)
    if not idle:
        time.sleep(pair.lease + 8)
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    numbers = {
        "left": len(trials),
        "completed": sum(trial.completed for trial in trials),
        "expired": pair.prefill.expired() - before,
    }
    if idle:
        numbers["free_after_ms"] = spread([s * 1000 for s in seconds])
        numbers["pinned_for_the_lease"] = sum(s > pair.lease * 0.8 for s in seconds)
    return numbers


def limit(options):
    return 240 + options.cancels * 4 + 4 * options.lease + options.cancels // 10 * options.lease


@check("cancel", "clients leave at uniform instants: no lease ends by time, P's blocks are free soon", limit_s=limit)
def cancel(pair):
    count = max(1, pair.options.cancels // 2)
    report, texts = Report(""), []
    for name, streams in (("idle", 0), ("load", STREAMS)):
        with Load(pair.url, streams, seed=pair.options.seed) as load:
            if streams:
                time.sleep(2)
            windows = reply_times(pair)
            trial_name = f"cancel-{name}-{time.time_ns() // 1000}"
            if pair.is_baton:
                numbers = by_log(pair, trial_name, count, windows)
            else:
                numbers = by_metrics(pair, trial_name, count, windows, idle=not streams)
        numbers["prefill_ms"], numbers["reply_ms"] = (round(1000 * w, 1) for w in windows)
        numbers["load"] = {"done": load.done, "failed": load.failed, "reasons": load.reasons}
        report.numbers[name] = numbers
        settle(pair, report, name, numbers)
        texts.append(f"{name}: {json.dumps(numbers)}")
    report.text = "; ".join(texts)
    return report


def settle(pair, report, name, numbers):
    """The targets of one segment."""
    took = pair.home()
    report.need(numbers["expired"] == 0, f"{name}: {numbers['expired']} leases ended by time")
    report.need(not numbers["load"]["failed"], f"{name}: {numbers['load']['failed']} uncancelled requests failed")
    report.need(took < 5, f"{name}: blocks were in use {took:.1f} s after the last client")
    late, step = numbers.get("free_after_ms", {}).get("p99"), numbers.get("step_ms", {}).get("p99", 0)
    # A step that hangs must not raise its own limit.
    allowed = pair.options.p99_ms + (min(step, STEP_MS_MAX) if name == "load" else 0)
    in_time = late is None or late <= allowed
    report.need(in_time, f"{name}: P's blocks free after {late} ms (p99), allowed {allowed:.0f} ms")
    report.need(not numbers.get("never_freed"), f"{name}: not freed: {numbers.get('never_freed')}")
    report.need(not numbers.get("freed_twice"), f"{name}: freed twice: {numbers.get('freed_twice')}")
