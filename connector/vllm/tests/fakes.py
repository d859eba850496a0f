"""Fakes of everything around a `SchedulerHalf`: the Rust core, requests, blocks and the engine's queues.

`FakeCore` is a model of the core's operations. It refuses what the core refuses, and checks each request.
"""

import json
import types

from baton_vllm import core as bits
from baton_vllm.core import CoreError

BLOCK = 4  # tokens
LAYOUT = "0123456789abcdef"
EPOCH = "00000000000000e1"
DEPTH_MAX = 127  # of JSON that the core parses

EVENTS = {"started", "computed", "first_token", "fetching", "fetched", "abort", "refused", "ended", "freed"}
FETCHED = {"landed", "gone", "failed", "stopped"}
# Why loads fail: words of the core, and those of the connector.
REASONS = {"lease_over", "wait_expired", "forged", "unreachable"}
REASONS |= {"refused", "transfer", "unverified", "invalid", "stock"}


def depth(value):
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


class FakeCore:
    """Leases, tombstones, holds and verdicts of one engine, without threads and without network."""

    epoch, http, channel_port = EPOCH, "127.0.0.1:1", 7700

    def __init__(self):
        self.calls = []  # (op, fields)
        self.table = {}  # internal id -> router's request id
        self.over = {}  # internal id -> {"ended", "freed"} so far
        self.released = set()  # tombstones: request ids
        self.by_verb = set()  # internal ids with an abort by verb
        self.leases = {}  # internal id -> cause of its end, None while open
        self.loads = {}  # internal id -> "holding", "live", "gone"
        self.draining = set()  # ids whose acknowledgement waits for another reader
        self.hold = "live"  # of loads that are admitted from now on
        self.answers = {}  # internal id -> "valid", "gone" or "pending"; "valid" without an entry
        self.refuse_offer = None  # "full" or "blocks"
        self.invalid = None  # reply of `admit`
        self.acks_end = True  # `take` reports a lease that an acknowledgement ended
        self.late = 0
        self.begun = set()  # loads whose read is open
        self.abandoned = set()  # reads whose request has ended
        self.failures = []  # (id, reason) of failed loads
        self.unverified = []  # (id, used)
        self.history = []  # events
        self.news = {"ended": [], "aborts": [], "verdicts": []}
        self.asked = set()  # loads whose `done` is pending
        self.left = []  # (id, reason)
        self.bits = 0
        self.snapshots = []
        self.stopped = False

    # The C interface

    def call(self, op, **fields):
        if self.stopped:
            raise CoreError("no core 1")
        try:
            fields = json.loads(json.dumps(fields, allow_nan=False))
        except ValueError as error:
            raise CoreError(f"the operation is no JSON: {error}") from error
        if op == "admit" and depth(fields) > DEPTH_MAX:
            raise CoreError("the operation is no JSON: recursion limit exceeded")
        self.calls.append((op, fields))
        return getattr(self, f"op_{op}")(**fields)

    def pending(self):
        return bits.STOPPING if self.stopped else self.bits

    def wait(self, timeout_ms):
        return self.pending()

    def stop(self):
        self.stopped = True

    def named(self, op):
        """The fields of all calls of one operation."""
        return [fields for name, fields in self.calls if name == op]

    # Operations

    def op_layout(self, layout):
        return {}

    def op_queued(self, id, request_id, leg, prompt, tag):
        assert id not in self.table, "each request is queued once"
        assert leg in ("prefill", "decode", "whole") and isinstance(prompt, int)
        self.table[id] = request_id or id
        self.over[id] = set()
        return {"released": self.table[id] in self.released}

    def op_events(self, events):
        for event in events:
            assert event["kind"] in EVENTS, event
            if event["kind"] == "fetched":
                assert event["result"] in FETCHED and event["reason"] in {None, *REASONS}, event
                assert bool(event["reason"]) == (event["result"] in ("gone", "failed")), event
                if event["reason"]:
                    self.failures.append((event["id"], event["reason"]))
            self.history.append(event)
            if event["kind"] in ("ended", "freed"):
                self.finish_part(event["id"], event["kind"])
        return {}

    def finish_part(self, id, part):
        if id not in self.table:
            self.late += 1
            return
        assert part not in self.over[id], f"{id} has two events {part}"
        self.over[id].add(part)
        if len(self.over[id]) == 2:
            del self.table[id], self.over[id]

    def op_offer(self, id, blocks, consumers, prompt):
        if not (isinstance(consumers, int) and 1 <= consumers <= 16):
            raise CoreError("consumers: expected a number from 1 to 16")
        assert all(isinstance(block, int) for group in blocks for block in group)
        if self.table.get(id) in self.released:
            return {"refused": "released"}
        if self.refuse_offer:
            return {"refused": self.refuse_offer}
        assert id not in self.leases, "one lease per request"
        self.leases[id] = None
        return {"handle": f"{len(self.leases):032x}", "epoch": EPOCH, "left_ms": 30000}

    def op_take(self):
        news, self.news = self.news, {"ended": [], "aborts": [], "verdicts": []}
        self.bits &= ~(bits.ENDED | bits.ABORTS | bits.VERDICTS)
        return news

    def op_acked(self, id):
        if self.leases.get(id, "none") is None:
            self.leases[id] = "transfer_done"
            if self.acks_end:
                self.announce("ended", {"id": id, "cause": "transfer_done"}, bits.ENDED)
        return {"draining": id in self.draining}

    def op_beat(self, ids):
        return {}

    def op_freed(self, id, blocks):
        assert self.leases.get(id, "none") is not None, f"{id}: blocks are freed while the lease is open"
        self.finish_part(id, "freed")
        return {}

    def op_pool(self, **counts):
        self.snapshots.append(counts)
        self.bits &= ~bits.POOL
        return {}

    def op_admit(self, id, params, prompt, tokens, block_tokens, groups):
        if self.invalid:
            return self.invalid
        ids = params.get("remote_block_ids")
        if not isinstance(ids, list) or not ids:
            return {"invalid": "kv_transfer_params.remote_block_ids is missing", "stock": False}
        if not isinstance(params.get("remote_handle"), str):
            return {"invalid": "kv_transfer_params.remote_handle is missing", "stock": True}
        self.loads[id] = self.hold
        return {"params": dict(params), "load": True}

    def op_state(self, id, wait_us):
        state = self.loads.get(id, "none")
        return {"state": state, "reason": "lease_over" if state == "gone" else None}

    def op_begin(self, id):
        assert id in self.loads and id not in self.begun, "a load begins once"
        self.begun.add(id)
        return {}

    def op_done(self, ids, wait_us):
        verdicts = []
        for id in ids:
            assert id in self.loads, id
            verdict = self.answers.get(id, "valid")
            verdicts.append({"id": id, "verdict": verdict, "reason": "lease_over" if verdict == "gone" else None})
            if verdict == "pending":
                self.asked.add(id)
            else:
                del self.loads[id]
        return {"verdicts": verdicts}

    def op_leave(self, id, reason):
        if self.loads.pop(id, None) is not None:
            self.left.append((id, reason))
            if id in self.begun and id not in self.asked and reason != "load_failed":
                self.abandoned.add(id)
        elif id in self.abandoned:
            self.abandoned.discard(id)
        else:
            self.late += 1
        self.asked.discard(id)
        return {}

    def op_aborted(self, id):
        return {"by_verb": id in self.by_verb or self.table.get(id) in self.released}

    def op_unverified(self, id, used):
        self.unverified.append((id, used))
        return {}

    def op_give_back(self, params):
        return {}

    def op_draining(self):
        return {}

    def op_late(self, id):
        self.late += 1
        return {}

    # What happens at the core

    def announce(self, kind, entry, bit):
        self.news[kind].append(entry)
        self.bits |= bit

    def end_lease(self, id, cause):
        """The core's timer or a verb ends a lease. True if it was open."""
        if self.leases.get(id, "none") is not None:
            return False
        self.leases[id] = cause
        self.announce("ended", {"id": id, "cause": cause}, bits.ENDED)
        return True

    def release(self, request_id):
        """`POST /abort_requests` or `/kv/release` by request id: the lease, the running request, or a tombstone."""
        ids = [id for id, name in self.table.items() if name == request_id]
        if any([self.end_lease(id, "released") for id in ids]):
            return "released"
        running = [id for id in ids if id not in self.leases]
        if running:
            self.by_verb.update(running)
            # A tombstone besides: the request may finish before its abort is applied.
            self.released.add(request_id)
            self.news["aborts"].extend(running)
            self.bits |= bits.ABORTS
            return "aborting"
        self.released.add(request_id)
        return "remembered"

    def decide(self, id, verdict, reason="lease_over"):
        """P's answer to `done` arrives."""
        if id in self.asked:
            self.asked.discard(id)
            self.loads.pop(id, None)
            self.announce("verdicts", {"id": id, "verdict": verdict, "reason": reason}, bits.VERDICTS)
        else:
            self.answers[id] = verdict

    def kinds(self, id):
        """The kinds of one request's events, in order."""
        return [event["kind"] for event in self.history if event["id"] == id]


class FakeRequest:
    """What the connector reads of vLLM's `Request`."""

    def __init__(self, status, request_id, tokens, params=None, max_tokens=1, cached=0, notice=False):
        self.request_id = request_id
        self.prompt_token_ids = list(range(tokens))
        self._all_token_ids = list(range(tokens))
        self.prompt_embeds = None
        self.num_prompt_tokens = tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.max_tokens = max_tokens
        self.kv_transfer_params = params
        self.client_index = 0
        self.cached = cached  # tokens of its prompt in the local prefix cache
        self.abort_immediately = notice
        self.status = status

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self):
        return self.status.name.startswith("FINISHED")

    def get_skip_reading_prefix_cache(self):
        return False


class FakeBlocks:
    """vLLM's `KVCacheBlocks`."""

    def __init__(self, groups, hashed):
        def block(i, n):
            return types.SimpleNamespace(block_id=n, block_hash=i < hashed or None, is_null=False)

        self.blocks = tuple([block(i, n) for i, n in enumerate(group)] for group in groups)

    def get_unhashed_block_ids_all_groups(self):
        return [[b.block_id for b in group if b.block_hash is None] for group in self.blocks]


class FakeEngine:
    """The queues of an EngineCore."""

    can_nap = True
    batches_max = 0
    is_draining = False

    def __init__(self):
        self.aborts = []
        self.answered = []
        self.wakes = 0
        self.naps = 0

    def wake(self):
        self.wakes += 1

    def abort(self, request_ids):
        self.aborts.extend(request_ids)

    def answer_aborted(self, request_id, client_index):
        self.answered.append(request_id)

    def nap(self, seconds):
        self.naps += 1


def handoff(tokens, **changes):
    """The transfer parameters of a decode leg."""
    blocks = -(-tokens // BLOCK)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(100, 100 + blocks))],
        "remote_engine_id": "p",
        "remote_request_id": "cmpl-p-0-00000000",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_block_size": BLOCK,
        "remote_handle": "ab" * 16,
        "remote_epoch": EPOCH,
        "remote_layout": LAYOUT,
        "remote_channel_port": 7700,
    }
    params.update(changes)
    return {key: value for key, value in params.items() if value is not ...}
