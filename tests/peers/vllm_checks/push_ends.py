"""A push pair whose write does not come: each leg is sent to its engine directly, and one of them ends.

With the BatonPushConnector, D frees its blocks in each case. A D whose client stays computes the prompt itself.
"""

import os
import pathlib
import random
import signal
import time

from .base import Report, attempt, check, expect, post, spread, wait_until
from .clients import Background, Call
from .engines import PUSH_WAIT_S, alone, decode_body, generated, prefill

BLOCKS_OF_PROMPT, TOKENS = 8, 16
# Prefill legs generate this many tokens, so that they end while D waits.
LONG_TOKENS = 800
# Targets: by a notice of a live P; by probes of an ended P.
NOTICE_S, ENDED_S = 3.0, 15.0
# A D that waits for a stopped P, in seconds. An ended P would be detected within this time.
STOPPED_S = ENDED_S


def limit(options):
    return 300 + 20 * options.rounds + 2 * options.lease


class Legs:
    """The two legs of one request, without a router."""

    def __init__(self, pair, identity):
        self.pair, self.prompt = pair, pair.prompt(BLOCKS_OF_PROMPT)
        self.id = f"ends-{pair.random.randrange(1 << 40):010x}"
        self.params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "none", **identity}
        self.prefill = None

    def begin_prefill(self, tokens=LONG_TOKENS):
        """Returns when P generates. Only a leg of one token can be written."""
        self.prefill = self.send_prefill(tokens)
        self.prefill.read_frames(2)

    def send_prefill(self, tokens):
        params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                  "remote_block_ids": None, "remote_host": None, "remote_port": None}
        body = {**decode_body(self.prompt, tokens=tokens), "stream": True, "return_token_ids": False,
                "kv_transfer_params": params}
        return Call(self.pair.prefill.url, "/v1/completions", body, self.id)

    def body(self):
        return decode_body(self.prompt, self.params, TOKENS)

    def begin_decode(self):
        """A decode leg whose response a thread waits for."""
        decode = self.send_decode()
        self.wait_until_registered()
        return decode

    def send_decode(self):
        url, headers = self.pair.decode.url + "/v1/completions", {"x-request-id": self.id}
        return Background(attempt, url, self.body(), 120, headers)

    def begin_decode_stream(self):
        call = Call(self.pair.decode.url, "/v1/completions", {**self.body(), "stream": True}, self.id)
        self.wait_until_registered()
        return call

    def wait_until_registered(self):
        wait_until("blocks of D", self.pair.decode.pinned, 10)

    def expect_right(self, decode, seconds):
        """D's response has the text of one engine, and D's blocks are free."""
        status, answer = decode.result(seconds)
        expect(status == 200, f"{status}: {answer}")
        expect(generated(answer) == alone(self.pair.decode, self.prompt, TOKENS), "D has another text")
        free_after(self.pair.decode, NOTICE_S)


def identity_of(pair):
    """What a router learns from P's first reply. Its lease gets a reader."""
    prompt = pair.prompt(2)
    handoff = prefill(pair.prefill, prompt)
    expect(handoff.get("remote_ends_writes") is True, f"P does not report failed writes: {handoff}")
    names = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
    # The base id without the endpoint's prefix and the index.
    given = handoff["remote_request_id"].removeprefix("cmpl-").rsplit("-", 2)[0]
    body = decode_body(prompt, handoff, 2)
    status, answer = post(pair.decode.url + "/v1/completions", body, headers={"x-request-id": given})
    expect(status == 200, f"{status}: {answer}")
    return {name: handoff[name] for name in names}


def free_after(engine, seconds):
    """Seconds until no block of this engine is in use."""
    begun = time.monotonic()
    wait_until(f"free blocks of {engine.name}", lambda: not engine.pinned(), seconds)
    return time.monotonic() - begun


def report(text, times, target):
    numbers = spread([1000 * seconds for seconds in times])
    told = f"{text}: {numbers['n']}, median {numbers['p50']} ms, at most {numbers['max']} ms"
    made = Report(told, {"free_ms": numbers})
    made.need(numbers["max"] < 1000 * target, f"{numbers['max']} ms instead of {target} s")
    return made


@check("ends-abort", "P's leg is aborted while D waits, and before D registers: D computes the prompt",
       kind="push-ends", limit_s=limit)
def abort(pair):
    identity, times = identity_of(pair), []
    for number in range(pair.rounds):
        legs = Legs(pair, identity)
        legs.begin_prefill()
        if number % 2:
            legs.prefill.leave("rst")
            free_after(pair.prefill, NOTICE_S)
            begun = time.monotonic()
            decode = legs.send_decode()
        else:
            decode = legs.begin_decode()
            begun = time.monotonic()
            legs.prefill.leave("fin")
        decode.join(60)
        times.append(time.monotonic() - begun)
        legs.expect_right(decode, 1)
    return report("responses of D after the abort, or after its start", times, NOTICE_S)


@check("ends-cancel", "both clients leave, D's first or P's first: the blocks of both are free",
       kind="push-ends", limit_s=limit)
def cancel(pair):
    identity, times = identity_of(pair), []
    for number in range(pair.rounds):
        legs = Legs(pair, identity)
        legs.begin_prefill()
        decode = legs.begin_decode_stream()
        calls = [legs.prefill, decode] if number % 2 else [decode, legs.prefill]
        begun = time.monotonic()
        for call in calls:
            call.leave("rst" if number % 4 // 2 else "fin")
        free_after(pair.decode, NOTICE_S)
        free_after(pair.prefill, NOTICE_S)
        times.append(time.monotonic() - begun)
    return report("blocks of both engines", times, NOTICE_S)


@check("ends-left", "D's client leaves and P's leg runs on: D is free at once, and P at the end of its leg",
       kind="push-ends", limit_s=limit)
def left(pair):
    identity, decode_times, prefill_times = identity_of(pair), [], []
    for _ in range(max(2, pair.rounds // 4)):
        legs = Legs(pair, identity)
        legs.begin_prefill(tokens=200)
        decode = legs.begin_decode_stream()
        begun = time.monotonic()
        decode.leave("fin")
        free_after(pair.decode, NOTICE_S)
        decode_times.append(time.monotonic() - begun)
        expect(b"[DONE]" in legs.prefill.read_to_end(), "P's leg did not end")
        prefill_times.append(free_after(pair.prefill, pair.lease / 2))
    made = report("blocks of D", decode_times, NOTICE_S)
    made.numbers["prefill_free_ms"] = spread([1000 * seconds for seconds in prefill_times])
    made.need(max(prefill_times) < NOTICE_S, f"P kept its blocks for {max(prefill_times):.1f} s")
    return made


def expired_requests(engine):
    """The part of this engine's log that names expired leases."""
    lines = pathlib.Path(engine.log.name).read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if "Releasing expired KV blocks" in line)


def mentioned(engine, request_id):
    """Whether the connector of this engine has logged the end of this request."""
    return request_id in pathlib.Path(engine.log.name).read_text(errors="replace")


def storm_request(pair, legs, source):
    """One request whose legs begin in either order. None, one or both of the clients leave at drawn instants."""
    leaves = source.choice(["none", "decode", "prefill", "both"])
    decode = None
    for leg in source.sample(["prefill", "decode"], 2):
        if leg == "prefill":
            legs.prefill = legs.send_prefill(1)
        elif leaves in ("decode", "both"):
            decode = Call(pair.decode.url, "/v1/completions", {**legs.body(), "stream": True}, legs.id)
        else:
            decode = legs.send_decode()
        time.sleep(source.uniform(0, 0.1))
    if leaves in ("prefill", "both"):
        legs.prefill.leave(source.choice(["fin", "rst"]))
    time.sleep(source.uniform(0, 0.1))
    if leaves in ("decode", "both"):
        decode.leave(source.choice(["fin", "rst"]))
    if leaves != "prefill" and leaves != "both":
        legs.prefill.read_to_end()
    return None if isinstance(decode, Call) else decode.result(120)


@check("ends-storm", "four clients at a time leave none, one or both of their legs: every text is right, and D is free",
       kind="push-ends", limit_s=lambda options: 300 + 10 * options.rounds)
def storm(pair):
    identity, expired = identity_of(pair), pair.prefill.expired()
    sources = [random.Random(f"storm-{k}") for k in range(4)]
    answered, everything = [], []
    for _ in range(2 * pair.rounds):
        legs = [Legs(pair, identity) for _ in sources]
        everything += legs
        running = [Background(storm_request, pair, leg, source) for leg, source in zip(legs, sources)]
        answered += [(leg, thread.result(150)) for leg, thread in zip(legs, running)]
    took = {engine.name: free_after(engine, pair.lease + 10) for engine in (pair.decode, pair.prefill)}
    expired = pair.prefill.expired() - expired
    answered = [(legs, answer) for legs, answer in answered if answer is not None]
    for legs, (status, answer) in answered:
        expect(status == 200, f"{status}: {answer}")
        expect(generated(answer) == alone(pair.decode, legs.prompt, TOKENS), "D has another text")
    count = 8 * pair.rounds
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
    made = Report(f"{count} requests, {len(answered)} answered with the right text, {expired} leases expired; "
                  f"free after {times}",
                  {"requests": count, "answered": len(answered), "expired": expired,
                   "free_s": {name: round(seconds, 2) for name, seconds in took.items()}})
    # If a client leaves before D's engine has the request, no process knows that P's blocks are not needed.
    stranded = expired_requests(pair.prefill)
    known = [legs.id for legs in everything if legs.id in stranded and mentioned(pair.decode, legs.id)]
    made.need(not known, f"leases of requests that D's engine had expired: {known}")
    made.need(took["decode"] < NOTICE_S, f"blocks of D were in use for {took['decode']:.1f} s")
    return made


@check("ends-absent", "P never gets the prompt: D computes it after push_wait_s, or frees its blocks at a cancel",
       kind="push-ends", limit_s=limit)
def absent(pair):
    identity, times = identity_of(pair), []
    for _ in range(3):
        legs = Legs(pair, identity)
        decode = legs.begin_decode_stream()
        begun = time.monotonic()
        decode.leave("fin")
        free_after(pair.decode, NOTICE_S)
        times.append(time.monotonic() - begun)
    legs = Legs(pair, identity)
    begun = time.monotonic()
    decode = legs.begin_decode()
    decode.join(60)
    waited = time.monotonic() - begun
    legs.expect_right(decode, 1)
    made = report("blocks of D after its cancel", times, NOTICE_S)
    made.numbers["computed_after_s"] = round(waited, 2)
    made.text += f"; computed after {waited:.1f} s, push_wait_s is {PUSH_WAIT_S}"
    made.need(PUSH_WAIT_S - 1 < waited < PUSH_WAIT_S + NOTICE_S, f"D computed after {waited:.1f} s")
    return made


@check("ends-unregistered", "D refuses the handoff, or its client leaves in D's queue: P is free without an expiry",
       kind="push-ends", limit_s=limit)
def unregistered(pair):
    times, expired = [], pair.prefill.expired()
    for _ in range(max(2, pair.rounds // 4)):
        prompt = pair.prompt(BLOCKS_OF_PROMPT)
        handoff = prefill(pair.prefill, prompt)
        begun = time.monotonic()
        status, answer = post(pair.decode.url + "/v1/completions", decode_body(prompt, handoff, temperature=-1))
        expect(status == 400, f"{status}: {answer}")
        free_after(pair.prefill, pair.lease + 10)
        times.append(time.monotonic() - begun)
    expect(pair.prefill.expired() == expired, "a lease expired")
    return report("blocks of P after the refusal", times, NOTICE_S)


@check("ends-expired", "D registers after P's lease has expired: D computes the prompt", kind="push-ends",
       limit_s=limit)
def expired(pair):
    legs = Legs(pair, identity_of(pair))
    expired = pair.prefill.expired()
    prefill(pair.prefill, legs.prompt, legs.id)
    free_after(pair.prefill, pair.lease + 10)
    expect(pair.prefill.expired() == expired + 1, "the lease did not expire")
    begun = time.monotonic()
    decode = legs.send_decode()
    decode.join(60)
    took = time.monotonic() - begun
    legs.expect_right(decode, 1)
    return report("the response of D", [took], NOTICE_S)


@check("ends-stopped", "P is stopped: D keeps its blocks, and P's write completes the request when P goes on",
       kind="push-ends", limit_s=limit)
def stopped(pair):
    legs = Legs(pair, identity_of(pair))
    moved = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    pair.prefill.signal_all(signal.SIGSTOP)
    try:
        call = legs.send_prefill(1)
        decode = legs.begin_decode()
        decode.join(STOPPED_S)
        held = decode.is_alive() and pair.decode.pinned()
    finally:
        pair.prefill.signal_all(signal.SIGCONT)
    expect(held, "D gave up blocks that a stopped P may write")
    begun = time.monotonic()
    decode.join(60)
    took = time.monotonic() - begun
    legs.expect_right(decode, 1)
    call.read_to_end()
    wait_until("transferred tokens", lambda: pair.decode_metric(
        "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > moved, 5)
    return Report(f"{held} blocks of D in use for {STOPPED_S:.0f} s; written {took:.1f} s after P went on",
                  {"stopped_s": STOPPED_S, "written_after_s": round(took, 2)})


@check("ends-killed", "P, or its EngineCore alone, is killed while D waits: D computes the prompt, or is free",
       kind="push-ends", limit_s=lambda options: 900)
def killed(pair):
    times = {}
    for name in ("computed", "cancelled", "engine_core"):
        legs = Legs(pair, identity_of(pair))
        legs.begin_prefill()
        decode = legs.begin_decode_stream() if name == "cancelled" else legs.begin_decode()
        begun = time.monotonic()
        if name == "engine_core":
            for pid in pair.prefill.process_ids("EngineCore"):
                os.kill(pid, signal.SIGKILL)
        else:
            os.killpg(pair.prefill.process.pid, signal.SIGKILL)
        if name == "cancelled":
            decode.leave("fin")
            free_after(pair.decode, 60)
        else:
            decode.join(60)
        times[name] = time.monotonic() - begun
        if name != "cancelled":
            legs.expect_right(decode, 1)
        pair.prefill.restart()
    pair.usable()
    made = report("D after the kill", times.values(), ENDED_S)
    made.numbers["after_s"] = {name: round(seconds, 2) for name, seconds in times.items()}
    return made


@check("ends-fail", "with kv_load_failure_policy fail, D answers 500 and frees its blocks", kind="push-ends",
       limit_s=lambda options: 600)
def fail(pair):
    pair.decode.restart("fail")
    legs = Legs(pair, identity_of(pair))
    legs.begin_prefill()
    decode = legs.begin_decode()
    begun = time.monotonic()
    legs.prefill.leave("fin")
    status, answer = decode.result(60)
    took = time.monotonic() - begun
    expect(status == 500, f"{status}: {answer}")
    free_after(pair.decode, NOTICE_S)
    return report("500 of D after the abort", [took], NOTICE_S)
