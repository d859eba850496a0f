"""Engines that are killed in every phase, and steps that take longer than a lease."""

import contextlib
import dataclasses
import json
import os
import signal
import time

from .base import Report, attempt, check, counted, expect, get_json, wait_until
from .clients import Background, Call
from .engines import BLOCKS, Engine, alone, decode_body, generated, overwrite, prefill

PHASES = ["P computing", "P offered", "P reading", "P decoding", "D reading", "D decoding", "D absent"]
PROMPT_BLOCKS, TOKENS = 30, 60


def streamed(seen):
    """The text of a stream, and whether it ended without an error."""
    text = ""
    for line in seen.decode(errors="replace").splitlines():
        if line.startswith("data: {"):
            # The last line of a stream that broke off is incomplete.
            with contextlib.suppress(ValueError):
                text += "".join(choice.get("text") or "" for choice in json.loads(line[6:]).get("choices", []))
    return text, b"[DONE]" in seen and b'"error"' not in seen


class Kill:
    """One engine killed in one phase."""

    def __init__(self, pair, phase):
        self.pair, self.phase = pair, phase
        self.killed = pair.prefill if phase.startswith("P") else pair.decode
        self.survivor = pair.decode if phase.startswith("P") else pair.prefill
        self.prompt = pair.prompt(PROMPT_BLOCKS)
        self.right = alone(self.survivor, self.prompt, TOKENS)

    def run(self):
        """What the client received: `right`, `wrong`, or the status of an error."""
        pair, phase = self.pair, self.phase
        if phase in ("P decoding", "D decoding"):
            outcome = self.in_stream()
        elif phase in ("P computing", "D absent"):
            if phase == "D absent":
                self.killed.stop()
            answer = Background(attempt, pair.url + "/v1/completions", decode_body(self.prompt, tokens=TOKENS))
            if phase == "P computing":
                time.sleep(pair.random.uniform(0.002, 0.04))
                self.killed.stop()
            outcome = self.judge(*answer.result(90))
        else:
            outcome = self.with_handoff()
        begun = time.monotonic()
        wait_until(f"{phase}: the survivor frees its blocks", lambda: self.survivor.pinned() == 0, pair.lease + 5, 0.05)
        free_s = time.monotonic() - begun
        if self.killed.process.poll() is not None:
            self.killed.start(self.killed.policy)
            self.killed.wait()
        pair.usable()
        status, answer = attempt(pair.url + "/v1/completions", decode_body(self.prompt, tokens=TOKENS))
        return outcome, free_s, self.judge(status, answer)

    def in_stream(self):
        call = Call(self.pair.url, "/v1/completions",
                    {**decode_body(self.prompt, tokens=TOKENS), "return_token_ids": False, "stream": True})
        call.read_frames(3)
        self.killed.stop()
        text, whole = streamed(call.read_to_end())
        right = self.right[0][0]
        if text == right and whole:
            return "right"
        return "broken off" if right.startswith(text) and not whole else "wrong"

    def with_handoff(self):
        """P is killed after its reply, or while D reads; or D is."""
        handoff = prefill(self.pair.prefill, self.prompt)
        url, body = self.pair.decode.url + "/v1/completions", decode_body(self.prompt, handoff, TOKENS)
        if self.phase == "P offered":
            # The handoff is of an earlier start of P, whose blocks hold other prompts.
            self.killed.restart(self.killed.policy)
            overwrite(self.killed)
            return self.judge(*attempt(url, body, 90))
        answer = Background(attempt, url, body)
        time.sleep(self.pair.random.uniform(0.002, 0.03))
        self.killed.stop()
        return self.judge(*answer.result(90))

    def judge(self, status, answer):
        if status != 200:
            return str(status)
        return "right" if generated(answer) == self.right else "wrong"


def restart_limit(options):
    return options.restarts * len(PHASES) * (240 + options.lease)


@check("restart", "P and D killed and restarted in every phase: right answer or error, blocks freed",
       limit_s=restart_limit)
def restart(pair):
    report = Report("")
    for phase in PHASES * pair.options.restarts:
        numbers = report.numbers.setdefault(phase, {"client": [], "free_s": [], "next": []})
        try:
            outcome, free_s, afterwards = Kill(pair, phase).run()
        except AssertionError as error:
            # The other phases are checked all the same.
            report.findings.append(f"{phase}: {error}")
            pair.ensure()
            continue
        for name, value in (("client", outcome), ("free_s", round(free_s, 2)), ("next", afterwards)):
            numbers[name].append(value)
        report.need(outcome != "wrong", f"{phase}: wrong text")
        report.need(afterwards == "right", f"{phase}: the next request: {afterwards}")
    for numbers in report.numbers.values():
        numbers["client"], numbers["next"] = counted(numbers["client"]), counted(numbers["next"])
    report.text = json.dumps(report.numbers)
    return report


# A long step

HELD, HELD_BLOCKS, SHORT_BLOCKS = 3, 20, 4


class LongStep:
    """Stops the workers of both engines for longer than a lease. Each EngineCore waits in its step meanwhile."""

    def __init__(self, pair):
        self.pair, self.numbers = pair, {}
        self.workers = [pid for engine in (pair.prefill, pair.decode) for pid in engine.process_ids("Worker")]
        expect(len(self.workers) >= 2, "the workers have no processes of their own, so no step can be stopped")

    def run(self):
        pair = self.pair
        # D is full, so that it admits handoffs and cannot read them yet.
        url = pair.decode.url + "/v1/completions"
        filling = [Background(attempt, url, decode_body(pair.prompt(38), tokens=240), 240) for _ in range(2)]
        wait_until("D is full", lambda: pair.decode.pinned() > BLOCKS - HELD_BLOCKS, 30)
        prompts = [pair.prompt(HELD_BLOCKS) for _ in range(HELD)]
        mark = pair.prefill.mark() if pair.is_baton else None
        handoffs = [prefill(pair.prefill, prompt) for prompt in prompts]
        short = [prefill(pair.prefill, pair.prompt(SHORT_BLOCKS)) for _ in range(2)]
        lent = time.monotonic()
        answers = [Background(attempt, pair.decode.url + "/v1/completions", decode_body(p, h), 240)
                   for p, h in zip(prompts, handoffs)]
        wait_until("D has queued the handoffs",
                   lambda: pair.decode.metric("vllm:num_requests_waiting") >= HELD or self.read(mark), 20)
        self.numbers["queued_when_stopped"] = round(pair.decode.metric("vllm:num_requests_waiting"))
        self.stop(lent, mark, short)
        outcomes = [answer.result(200) for answer in answers]
        for filler in filling:
            filler.result(200)
        rights = [alone(pair.prefill, prompt) for prompt in prompts]
        results = ["right" if s == 200 and generated(a) == r else "wrong" if s == 200 else s
                   for (s, a), r in zip(outcomes, rights)]
        self.numbers["held"] = counted(results)
        return handoffs, short, mark

    def read(self, mark):
        """Whether a handoff was read before the stop, so that nothing is left to renew."""
        return mark is not None and any(e["kind"] == "lease_ended" for e in self.pair.prefill.events(mark))

    def stop(self, lent, mark, short):
        """The workers stand still until both unrenewed leases and all renewals are over."""
        pair, stop_s = self.pair, self.pair.lease + 10
        for pid in self.workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            # P's EngineCore enters a step that does not end.
            Background(attempt, pair.prefill.url + "/v1/completions", decode_body(pair.prompt(1), tokens=1), 240)
            time.sleep(1)
            if mark is not None:
                self.verbs(mark, short)
            while time.monotonic() - lent < stop_s:
                if mark is not None:
                    self.look()
                time.sleep(1)
        finally:
            for pid in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.numbers["stopped_s"] = round(time.monotonic() - lent, 1)

    def verbs(self, mark, short):
        """A release in the middle of the step ends its lease at once."""
        begun = time.monotonic()
        body = {"handle": short[0]["remote_handle"], "reason": "client_gone"}
        status, answer = attempt(self.pair.prefill.url + "/kv/release", body, 10)
        self.numbers["release"] = f"{status} {answer[:100]}"
        self.pair.prefill.find(mark, 5, kind="lease_ended", reason="client_gone")
        self.numbers["release_ms"] = round((time.monotonic() - begun) * 1000, 1)

    def look(self):
        """The port of P's EngineCore answers."""
        begun = time.monotonic()
        get_json(f"http://127.0.0.1:{self.pair.prefill.http}/debug/kv", 5)
        took = (time.monotonic() - begun) * 1000
        self.numbers["state_ms_max"] = round(max(took, self.numbers.get("state_ms_max", 0)), 1)


def longstep_limit(options):
    return 600 + 3 * options.lease


@check("longstep", "a step that outlasts the lease: renewed leases stay, release and expiry take effect",
       limit_s=longstep_limit)
def longstep(pair):
    report, before = Report(""), pair.prefill.expired()
    pair.usable()  # so that the engines have exchanged their memory
    step = LongStep(pair)
    handoffs, short, mark = step.run()
    report.numbers = step.numbers
    queued = step.numbers["queued_when_stopped"]
    report.need(queued >= HELD, f"only {queued} of {HELD} handoffs were unread, so that no renewal is proved")
    report.need(step.numbers["held"] == {"right": HELD}, f"renewed handoffs: {step.numbers['held']}")
    pair.home()
    if pair.is_baton:
        ends = [e for e in pair.prefill.events(mark) if e["kind"] == "lease_ended"]
        expired = [e for e in ends if e["reason"] == "lease_expired"]
        report.numbers["lease_ends"] = counted(e["reason"] for e in ends)
        report.numbers["expired_held_s"] = [round(e["held_us"] / 1e6, 2) for e in expired]
        report.need(len(ends) == HELD + len(short), f"{len(ends)} ends of {HELD + len(short)} leases")
        report.need(len(expired) == 1, f"{len(expired)} leases ended by time; only one was not renewed")
        on_time = all(abs(e["held_us"] / 1e6 - pair.lease) < 1.5 for e in expired)
        report.need(on_time, f"expired after {report.numbers['expired_held_s']} s")
        report.need(step.numbers["release_ms"] < 1000, f"the release took {step.numbers['release_ms']} ms")
        report.need(step.numbers["state_ms_max"] < 1000, f"the state took {step.numbers['state_ms_max']} ms")
    else:
        report.numbers["expired"] = pair.prefill.expired() - before
    report.text = json.dumps(report.numbers)
    return report


@check("drain", "SIGTERM with --shutdown-timeout: P refuses new requests, D reads the open lease, then P ends", limit_s=400)
def drain(pair):
    report, prompt = Report(""), pair.prompt(8)
    right = alone(pair.decode, prompt)
    producer = Engine(dataclasses.replace(pair.setup, arguments=("--shutdown-timeout", "60")), "drain")
    try:
        producer.wait()
        handoff = prefill(producer, prompt)
        producer.process.send_signal(signal.SIGTERM)

        def refusal():
            status, answer = attempt(producer.url + "/v1/completions", decode_body("x", tokens=1), 10)
            return (status, answer) if status != 200 else None

        status, answer = wait_until("a refusal", refusal, 20, 0.1)
        report.numbers["refusal"] = [status, "draining" if "draining" in answer else answer[:100]]
        report.need(report.numbers["refusal"] == [503, "draining"], f"a new request: {status}: {answer[:100]}")
        report.need(producer.process.poll() is None, "P has ended before its lease")
        before = read_loads(pair)
        status, answer = attempt(pair.decode.url + "/v1/completions", decode_body(prompt, handoff), 30)
        report.need(status == 200 and generated(answer) == right, f"D: {status}: {answer[:100]}")
        report.need(read_loads(pair) == before + pair.is_baton, "D has not read the lease")
        begun = time.monotonic()
        producer.process.wait(45)
        report.numbers["ended_after_s"] = round(time.monotonic() - begun, 1)
    finally:
        producer.stop()
    report.text = json.dumps(report.numbers)
    return report


def read_loads(pair):
    """Leases that D has read; a stock engine does not count them."""
    return pair.decode.metric("baton_kv_transfers_total") if pair.is_baton else 0
