"""Release, stale reads, and several readers of one handoff. The legs are sent to the engines without a router."""

import json
import time

from .base import Report, attempt, check, counted, expect, post, spread, wait_until
from .clients import Background
from .engines import alone, decode_body, generated, give_back, overwrite, prefill

RELEASES = 100
RELEASE_P99_MS = 10
PROMPT_BLOCKS = 20


def release_by(pair, number, handoff, request_id):
    """One verb: by handle and by request id, on vLLM's address and on the engine process's port."""
    engine = pair.prefill
    address = engine.url if number // 2 % 2 else f"http://127.0.0.1:{engine.http}"
    if number % 2:
        status, answer = post(address + "/kv/release", {"handle": handoff["remote_handle"], "reason": "client_gone"})
        expect(status == 200 and json.loads(answer)["result"] in ("released", "draining"), f"{status}: {answer}")
    else:
        status, answer = post(address + "/abort_requests", {"request_ids": [request_id], "leg": "prefill"})
        expect(status == 200 and request_id in json.loads(answer)["results"], f"{status}: {answer}")


@check("release", "release of a lease at an idle engine: blocks are free within 10 ms (p99)", limit_s=600)
def release(pair):
    count = pair.options.releases
    freed_ms, verb_ms, report = [], [], Report("")
    engine, ahead = pair.prefill, pair.prefill.clock_ahead_us() if pair.is_baton else 0
    for number in range(count):
        request_id = f"release-{time.monotonic_ns()}"
        mark = engine.mark() if pair.is_baton else None
        handoff = prefill(engine, pair.prompt(PROMPT_BLOCKS), request_id, router_request_id=request_id)
        time.sleep(pair.random.uniform(0.05, 0.15))
        begun, begun_us = time.monotonic(), time.time_ns() // 1000
        if pair.is_baton:
            release_by(pair, number, handoff, request_id)
            verb_ms.append((time.monotonic() - begun) * 1000)
            freed = engine.find(mark, pair.lease + 5, kind="freed", request_id=request_id)
            freed_ms.append((freed["at_us"] - ahead - begun_us) / 1000)
        else:
            give_back(pair, handoff)
            verb_ms.append((time.monotonic() - begun) * 1000)
            wait_until("P frees its blocks", lambda: engine.pinned() == 0, pair.lease + 5, 0.005)
            freed_ms.append((time.monotonic() - begun) * 1000)
    report.numbers = {"release_to_free_ms": spread(freed_ms), "verb_ms": spread(verb_ms)}
    worst = report.numbers["release_to_free_ms"]["p99"]
    report.need(worst <= RELEASE_P99_MS, f"free after {worst} ms (p99)")
    report.need(pair.home() < 5, "blocks are in use afterwards")
    if pair.is_baton:
        repeated(report, pair)
    report.text = json.dumps(report.numbers)
    return report


def repeated(report, pair):
    """One release repeated: one end of the lease, and no error."""
    mark, request_id = pair.prefill.mark(), f"repeat-{time.monotonic_ns()}"
    handoff = prefill(pair.prefill, pair.prompt(3), request_id, router_request_id=request_id)
    answers = [give_back(pair, handoff) for _ in range(100)]
    results = counted(json.loads(text)["result"] if status == 200 else status for status, text in answers)
    pair.prefill.find(mark, 10, kind="freed", request_id=request_id)
    ends = [e for e in pair.prefill.events(mark) if e["kind"] == "lease_ended" and e["request_id"] == request_id]
    report.numbers["repeated"] = results
    report.need(len(ends) == 1, f"{len(ends)} ends of one lease")
    report.need(set(results) <= {"released", "draining", "already"}, f"repeated: {results}")


class Stale:
    """The outcomes of reads that came too late, under one policy."""

    def __init__(self, pair, policy):
        self.pair, self.policy = pair, policy
        self.statuses, self.wrong, self.poisoned, self.landed, self.rounds = [], 0, 0, 0, 0

    def round(self, how):
        """`how`: the lease ends by `release`, by `time`, or while D reads (`race`)."""
        pair = self.pair
        prompt = pair.prompt(PROMPT_BLOCKS)
        right = alone(pair.prefill, prompt)
        mark = pair.decode.mark() if pair.is_baton else None
        handoff = prefill(pair.prefill, prompt)
        url, body = pair.decode.url + "/v1/completions", decode_body(prompt, handoff)
        if how == "race":
            answer = Background(attempt, url, body)
            time.sleep(pair.random.uniform(0, 0.03))
        if how == "time":
            time.sleep(pair.lease + 1)
        else:
            give_back(pair, handoff)
        overwrite(pair.prefill)
        status, text = answer.result(90) if how == "race" else attempt(url, body)
        self.rounds += 1
        self.statuses.append(f"{how} {status}")
        self.wrong += status == 200 and generated(text) != right
        if pair.is_baton and how != "race":
            self.landed += any(e["kind"] == "fetched" and e["result"] == "landed" for e in pair.decode.events(mark))
        # The same prompt without a handoff shows what the read left in D's prefix cache.
        status, text = attempt(url, decode_body(prompt))
        self.poisoned += status != 200 or generated(text) != right

    def numbers(self):
        return {"rounds": self.rounds, "answers": counted(self.statuses), "wrong_text": self.wrong,
                "wrong_afterwards": self.poisoned, "landed": self.landed}

    def judge(self, report):
        name = self.policy or "stock"
        report.need(not self.wrong, f"{name}: {self.wrong} answers with wrong text")
        report.need(not self.poisoned, f"{name}: {self.poisoned} wrong answers afterwards")
        report.need(not self.landed, f"{name}: {self.landed} reads after the lease counted as landed")
        if self.policy is None:
            return
        allowed = ("200",) if self.policy == "recompute" else ("500", "503")
        for answer in set(self.statuses):
            how, status = answer.split()
            fine = status in allowed or (how == "race" and status == "200")
            report.need(fine, f"{name}: status {status} ({how})")


def stale_limit(options):
    return 600 + options.stale * 12 + 4 * options.lease


@check("stale", "a read after the lease, all blocks reused: never 200 with wrong text", limit_s=stale_limit)
def stale(pair):
    report, before = Report(""), pair.decode.policy
    policies = ["recompute", "fail"] if pair.options.policy == "both" else [pair.options.policy]
    if not pair.is_baton:
        policies = [None]  # its reads do not fail, whatever the policy
    for policy in policies:
        if pair.is_baton and policy != (pair.decode.policy or "recompute"):
            pair.decode.restart(policy)
        outcome = Stale(pair, policy)
        for _ in range(pair.options.stale):
            outcome.round("release")
        for _ in range(pair.options.stale):
            outcome.round("race")
        outcome.round("time")
        report.numbers[policy or "stock"] = outcome.numbers()
        outcome.judge(report)
    if pair.decode.policy != before:
        pair.decode.restart(before)
    pair.usable()
    report.need(pair.home() < 5, "blocks are in use afterwards")
    report.text = json.dumps(report.numbers)
    return report


@check("n4", "four choices of one handoff, and two decode engines that read one handoff", limit_s=600)
def n4(pair):
    report, rounds, wrong, ends = Report(""), 20, 0, []
    mark = pair.prefill.mark() if pair.is_baton else None
    for _ in range(rounds):
        prompt = pair.prompt(6)
        # vLLM refuses several choices of a greedy request. `top_k` 1 leaves equal logits, among which the seed chooses.
        # The reference has four choices too: a batch of another size may round to another token.
        four = {"n": 4, "temperature": 1, "top_k": 1, "seed": 1}
        status, answer = attempt(pair.url + "/v1/completions", {**decode_body(prompt), **four})
        mine, right = generated(answer) if status == 200 else [], alone(pair.prefill, prompt, **four)
        if mine != right:
            wrong += 1
            report.numbers.setdefault("sample", {"status": status, "choices": mine, "alone": right})
    report.numbers["choices"] = {"rounds": rounds, "wrong": wrong}
    report.need(not wrong, f"{wrong} of {rounds} responses with four choices are wrong")
    if len(pair.decodes) > 1:
        two_readers(report, pair)
    else:
        report.numbers["two_readers"] = "not run: --decodes 2"
    report.need(pair.home() < 5, "blocks are in use afterwards")
    if pair.is_baton:
        events = pair.prefill.events(mark)
        ends = [e["reason"] for e in events if e["kind"] == "lease_ended"]
        opened = sum(e["kind"] == "lease_opened" for e in events)
        report.numbers["lease_ends"] = counted(ends)
        report.need(opened == len(ends), f"{opened} leases, {len(ends)} ends")
        report.need("lease_expired" not in ends, "a lease ended by time")
    report.text = json.dumps(report.numbers)
    return report


def two_readers(report, pair):
    """Two decode engines read one handoff at the same time."""
    wrong, incomplete, rounds = 0, 0, 10
    for _ in range(rounds):
        prompt = pair.prompt(PROMPT_BLOCKS // 2)
        mark = pair.prefill.mark() if pair.is_baton else None
        handoff = prefill(pair.prefill, prompt, remote_consumers=2)
        body = decode_body(prompt, handoff)
        readers = [Background(attempt, d.url + "/v1/completions", body) for d in pair.decodes[:2]]
        right = alone(pair.prefill, prompt)
        for reader in readers:
            status, answer = reader.result(90)
            wrong += status != 200 or generated(answer) != right
        if pair.is_baton:
            end = pair.prefill.find(mark, pair.lease + 5, kind="lease_ended")
            incomplete += (end["readers_done"], end["readers_expected"]) != (2, 2)
    report.numbers["two_readers"] = {"rounds": rounds, "wrong": wrong, "not_2_of_2": incomplete}
    report.need(not wrong, f"{wrong} answers of two readers are wrong")
    report.need(not incomplete, f"{incomplete} leases ended without both readers")
