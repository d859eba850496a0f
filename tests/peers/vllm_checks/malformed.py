"""Malformed and forged handoffs, sent to the engines without a router."""

import copy
import json
import random
import time

from .base import NO_ANSWER, Report, attempt, check, counted, free_port
from .clients import Call
from .engines import BLOCKS, alone, decode_body, generated, give_back, prefill

# Values of a wrong type or out of range, for every key.
WRONG = [None, True, -1, 0, 7, 1 << 63, 1 << 200, 0.5, 1e300, "", "x", "x" * 5000, "\0\u20ac", "0" * 16, "f" * 32,
         [], [[]], [[[1]]], [["a"]], [None], {}, {"a": {"b": []}}]
PREFILL_KEYS = ["remote_consumers", "router_request_id", "router_user", "remote_engine_id", "remote_block_ids",
                "remote_host", "remote_port", "do_remote_prefill", "do_remote_decode"]
CHECKED_EVERY = 20


def table_variants(handoff):
    """Block tables of other shapes."""
    table = handoff["remote_block_ids"]
    first = table[0]
    return {
        "reversed": [first[::-1]],
        "one less": [first[:-1]],
        "one more": [first + [first[-1]]],
        "shifted": [[(block % (BLOCKS - 1)) + 1 for block in first]],
        "all the same": [[first[0]] * len(first)],
        "outside of the pool": [[1_000_000 + block for block in first]],
        "negative": [[-block for block in first]],
        "placeholder": [[0] * len(first)],
        "two groups": table * 2,
        "no group": [],
        "an empty group": [[]],
        "a second empty group": table + [[]],
        "flat": first,
        "texts": [[str(block) for block in first]],
        "fractions": [[block + 0.5 for block in first]],
        "very long": [first * 2000],
    }


def forged_variants(handoff):
    """Whole handoffs in which single facts are those of another one."""
    changes = {
        "other handle": {"remote_handle": "5" * 32},
        "other epoch": {"remote_epoch": "0123456789abcdef"},
        "other layout": {"remote_layout": "0123456789abcdef"},
        "other prompt": {"remote_prompt": "0123456789abcdef"},
        "other engine": {"remote_engine_id": "00000000-0000-0000-0000-000000000000"},
        "other request": {"remote_request_id": "cmpl-unknown-0-00000000"},
        "closed port": {"remote_port": free_port()},
        "closed channel": {"remote_channel_port": free_port()},
        "other address": {"remote_host": "127.0.0.2"},
        "no such host": {"remote_host": "no-such-host.invalid"},
        "long host": {"remote_host": "h" * 300},
        "push": {"transfer_mode": "push"},
        "two ranks": {"tp_size": 2},
        "no ranks": {"tp_size": 0, "dcp_size": 0, "pp_size": 0},
        "context ranks": {"dcp_size": 2},
        "pipeline ranks": {"pp_size": 3},
        "other block size": {"remote_block_size": 16},
        "fewer tokens": {"remote_num_tokens": 1},
        "more tokens": {"remote_num_tokens": handoff.get("remote_num_tokens", 1) + 64},
        "both directions": {"do_remote_decode": True},
        "many readers": {"remote_consumers": 1 << 31},
        "expired": {"remote_lease_left_ms": 0, "remote_blocks_expiry_time": 1},
        "unknown keys": {f"key_{k}": k for k in range(2000)},
    }
    return {name: {**handoff, **change} for name, change in changes.items()}


def whole_variants():
    """Values in the place of a handoff."""
    deep = 1
    for _ in range(200):
        deep = [deep]
    return {"text": "x", "number": 7, "list": [1], "empty": {},
            "deep": {"do_remote_prefill": True, "remote_block_ids": deep},
            "only the flag": {"do_remote_prefill": True}}


def variants(source, count, sample):
    """Names and functions that turn a handoff into a malformed one: absent keys, special ones, then wrong values."""
    special = [(f"blocks: {name}", lambda h, name=name: {**h, "remote_block_ids": table_variants(h)[name]})
               for name in table_variants(sample)]
    special += [(f"forged: {name}", lambda h, name=name: forged_variants(h)[name]) for name in forged_variants(sample)]
    special += [(f"whole: {name}", lambda _h, value=value: value) for name, value in whole_variants().items()]
    absent = [(f"{key} absent", lambda h, key=key: {k: v for k, v in h.items() if k != key}) for key in sample]
    others = [
        (f"{key} = {json.dumps(value)[:40]}", lambda h, key=key, value=value: {**h, key: copy.deepcopy(value)})
        for key in sample for value in WRONG if value != sample[key] or type(value) is not type(sample[key])
    ]
    source.shuffle(others)
    chosen = (absent + special + others)[:count]
    source.shuffle(chosen)
    return chosen


def prefill_variants(source, count):
    """Transfer parameters of a prefill leg with one wrong value."""
    found = [(f"prefill {key} = {json.dumps(value)[:40]}",
              {"do_remote_decode": True, "do_remote_prefill": False, key: value})
             for key in PREFILL_KEYS for value in WRONG]
    source.shuffle(found)
    return found[:count]


class Attack:
    """Sends variants to one engine, whose handoffs come from the other one."""

    def __init__(self, pair, producer, consumer, source):
        self.pair, self.producer, self.consumer, self.source = pair, producer, consumer, source
        self.statuses, self.wrong, self.ended, self.sent, self.failures = [], [], None, 0, []
        self.first_lost = None
        self.steady = pair.prompt(4)
        self.steady_answer = alone(producer, self.steady)

    def send(self, name, params, prompt, right):
        """One request: every third client leaves after 0 to 30 ms."""
        self.sent += 1
        body = decode_body(prompt, tokens=4)
        body["kv_transfer_params"] = params
        if self.sent % 3 == 0:
            try:
                call = Call(self.consumer.url, "/v1/completions", body)
                time.sleep(self.source.uniform(0, 0.03))
                call.leave("rst" if self.sent % 2 else "fin")
                self.statuses.append("left")
            except NO_ANSWER as error:
                self.failures.append(f"{name}: {error}")
            return
        status, answer = attempt(self.consumer.url + "/v1/completions", body, 30 if self.pair.is_baton else 8)
        self.statuses.append(status)
        if status == 0 and self.first_lost is None:
            self.first_lost = f"{name}: {answer[:100]}"
        if status == 200 and right is not None and generated(answer) != right:
            self.wrong.append(name)
        if status == 200 and isinstance(handoff := json.loads(answer).get("kv_transfer_params"), dict):
            if "remote_handle" in handoff:
                give_back_to(self.consumer, handoff)

    def alive(self):
        """Whether the engine answers a plain request, with the right text."""
        if not self.consumer.healthy(20):
            return False
        status, answer = attempt(self.consumer.url + "/v1/completions", decode_body(self.steady), 30)
        if status == 200 and generated(answer) != self.steady_answer:
            self.wrong.append("a plain request afterwards")
        return status == 200

    def run(self, chosen):
        for number, (name, change) in enumerate(chosen):
            prompt = self.pair.prompt(3)
            handoff = prefill(self.producer, prompt)
            right = alone(self.producer, prompt, tokens=4)
            self.send(name, change(copy.deepcopy(handoff)), prompt, right)
            if self.producer.has_log:
                give_back_to(self.producer, handoff)
            if (number + 1) % CHECKED_EVERY == 0 and not self.check(name):
                return

    def run_prefill(self, chosen):
        for number, (name, params) in enumerate(chosen):
            self.send(name, params, self.pair.prompt(3), None)
            if (number + 1) % CHECKED_EVERY == 0 and not self.check(name):
                return

    def run_refused(self, handoff):
        """Requests that the front end refuses, with the id of a request whose blocks are lent."""
        for _ in range(2):
            body = {**decode_body("x"), "model": "unknown", "request_id": handoff["remote_request_id"],
                    "kv_transfer_params": {"do_remote_prefill": True}}
            self.sent += 1
            self.statuses.append(attempt(self.consumer.url + "/v1/completions", body, 10)[0])
        self.check("a refused request with the id of a lent one")

    def check(self, name):
        if not self.alive():
            self.ended = f"after {self.sent} handoffs, the last {CHECKED_EVERY} until {name!r}"
        return self.ended is None

    def numbers(self):
        return {"sent": self.sent, "answers": counted(self.statuses), "wrong": self.wrong, "engine_ended": self.ended,
                "first_without_response": self.first_lost, "not_sent": self.failures}


def give_back_to(engine, handoff):
    """Ends a lease of an engine with the verb."""
    attempt(engine.url + "/kv/release", {"handle": handoff["remote_handle"], "reason": "unusable_handoff"}, 10)


def limit(options):
    return 600 + options.malformed * 4 + 2 * options.lease


@check("malformed", "malformed and forged handoffs: no engine ends, every text is right, blocks are freed",
       limit_s=limit)
def malformed(pair):
    report, total, source = Report(""), pair.options.malformed, random.Random(pair.options.seed)
    sample = prefill(pair.prefill, pair.prompt(3))
    give_back(pair, sample)
    to_decode = Attack(pair, pair.prefill, pair.decode, source)
    to_prefill = Attack(pair, pair.decode, pair.prefill, source)
    for name, attack, share in (("to_decode", to_decode, 0.6), ("to_prefill", to_prefill, 0.25)):
        attack.run(variants(source, round(total * share), sample))
        report.numbers[name] = attack.numbers()
        if attack.ended:
            attack.consumer.restart()
    last = Attack(pair, pair.decode, pair.prefill, source)
    last.run_prefill(prefill_variants(source, total - round(total * 0.6) - round(total * 0.25)))
    report.numbers["prefill_legs"] = last.numbers()
    if last.ended:
        last.consumer.restart()
    known = Attack(pair, pair.decode, pair.prefill, source)
    lent = prefill(pair.prefill, pair.prompt(3))
    known.run_refused(lent)
    give_back(pair, lent)
    report.numbers["known_ids"] = known.numbers()
    if known.ended:
        known.consumer.restart()
    for name, numbers in report.numbers.items():
        report.need(not numbers["engine_ended"], f"{name}: the engine ended {numbers['engine_ended']}")
        report.need(not numbers["wrong"], f"{name}: wrong text: {numbers['wrong']}")
        report.need(not numbers["not_sent"], f"{name}: not sent: {numbers['not_sent'][:3]}")
    pair.usable()
    took = pair.home()
    report.numbers["free_after_s"] = round(took, 2)
    report.need(took < (pair.lease + 5 if any_left_prefill(report) else 10), f"blocks were in use for {took:.1f} s")
    report.text = json.dumps(report.numbers)
    return report


def any_left_prefill(report):
    """Clients of prefill legs that left do not release what P may have lent in the same instant."""
    return report.numbers["prefill_legs"]["answers"].get("left", 0) > 0
