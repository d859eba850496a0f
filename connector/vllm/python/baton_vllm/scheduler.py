"""The scheduler's half of the connector: producer and consumer of one EngineCore.

Every method runs on the scheduler's thread, except `on_news`, which the waiter calls. Neither touches the network: the
core does, on threads of its own. The class knows vLLM's objects only by the attributes that it reads.
"""

import collections
import contextlib
import dataclasses
import enum
import hashlib
import logging
import threading
import time

from . import core as core_bits
from .handoff import HEARTBEAT, PROMPT_DIGITS, TEXT_MAX, WorkerOrders, bounded_handoff, integer, prompt_fingerprint

logger = logging.getLogger("vllm.baton")

# The core is asked for verdicts within a step for this long. Later ones take effect in a later step.
VERDICT_WAIT_US = 2000

# The core is asked for a producer's first answer for this long, once per step: a silent producer delays no other work.
HOLD_WAIT_US = 500

# The longest nap. A lease's end, an abort and a request end a nap early. vLLM's workers spin for a second after each
# step.
NAP_S = 30

# Steps without a nap after an order to the workers, until all ranks have reported. Batches in flight add theirs.
STEPS_AFTER_ORDER = 3

# Why the core has no verdict on a complete read.
NO_VERDICT = ("timeout", "unreachable", "transfer", "stopped", "unknown")

# A read from a stock producer counts if it ends within this share of the lease after the handoff arrived. A gateway that
# keeps the handoff for most of the lease before is not noticed.
UNVERIFIED_SHARE = 1 / 3

# Blocks of a pool that every snapshot counts.
POOL_COUNTED_AT_ONCE = 16384

# The largest block id of a stock handoff, for the same reason as in the core.
BLOCK_ID_MAX = (1 << 24) - 1

# Consumers of one handoff. The core refuses more.
CONSUMERS_MAX = 16

# The replies if the core fails: nothing is lent, and no load is used.
REPLIES_WITHOUT_CORE = {
    "queued": {"released": False},
    "state": {"state": "gone", "reason": "unverified"},
    "offer": {"refused": "core"},
    "done": {"verdicts": []},
    "aborted": {"by_verb": False},
    "draining": None,
    "take": {"ended": [], "aborts": [], "verdicts": []},
}

# What a router's prefill names, and P's reply repeats.
ROUTER_KEYS = ("router_request_id", "router_user")


class Stage(enum.Enum):
    """Where a load is."""

    QUEUED = enum.auto()  # admitted by the core, blocks not allocated
    READING = enum.auto()  # the workers read
    UNVERIFIED = enum.auto()  # the workers read from a stock producer, which confirms nothing
    VERIFYING = enum.auto()  # the workers have read, the producer has not confirmed
    VERIFIED = enum.auto()  # confirmed after that step; the workers report it once more
    FAILED = enum.auto()  # must not be used; the workers report its failure
    PASSED = enum.auto()  # the scheduler has it


@dataclasses.dataclass
class Tracked:
    """A request that the scheduler has not finished."""

    request: object
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    started: bool = False
    computed: int = 0
    first_token: bool = False
    acknowledged: bool = False  # by a consumer, before it was lent: the workers report it no more
    stage: Stage | None = None  # of its load, if it has one
    reason: str | None = None  # why its lease cannot be read


class SchedulerHalf:
    """See the module's documentation. `stock` is vLLM's own scheduler half, `engine` may be None."""

    def __init__(self, core, settings, stock, engine, kv_cache_config, block_size, recompute, lease_s=30):
        self.core = core
        self.settings = settings
        self.stock = stock
        self.engine = engine
        self.groups = kv_cache_config.transfer_groups
        self.block_size = block_size
        self.recompute = recompute
        self.lease_s = lease_s
        self.pool = None
        self.layout = None
        self.draining = False  # the engine ends, and the core knows
        self.requests = {}  # id -> Tracked
        self.lent = {}  # id -> blocks; its lease is open, or its blocks are on their way back
        self.abandoned = {}  # id -> blocks and stage; its load ends after its request
        self.withheld = set()  # ids that the workers have reported as sent while another consumer reads
        self.orders = WorkerOrders()
        self.events = []
        self.steps_without_nap = 0
        self.hold_wait_us = HOLD_WAIT_US  # what is left of it in this step
        self.cached = self.cached_at = 0
        self.warned = set()
        self._news = collections.deque()  # what `take` returned, not yet applied
        self._take_lock = threading.Lock()

    # Requests

    def on_new_request(self, request):
        """Registers a request, and replaces its transfer parameters by checked ones."""
        params = request.kv_transfer_params
        if is_notice(request):
            self.give_back(request)
            return
        if params is not None and not isinstance(params, dict):
            self.warn_once("params", "kv_transfer_params of request %s is no object and is ignored", request.request_id)
            params = request.kv_transfer_params = None
        params = params or {}
        produces, consumes = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
        leg = "prefill" if produces else "decode" if consumes else "whole"
        reply = self.ask(
            "queued",
            id=request.request_id,
            request_id=text(params.get("router_request_id")),
            leg=leg,
            prompt=request.num_prompt_tokens,
            tag=text(params.get("router_user")),
        )
        tracked = self.requests[request.request_id] = Tracked(request)
        if produces and consumes:
            # A read-back from a decode engine: not supported, and refused by the core in both directions.
            self.report_fetch(request.request_id, "failed", "invalid")
            request.kv_transfer_params = None
        elif produces:
            request.kv_transfer_params = producer_params(params)
        elif consumes:
            self.admit(request, tracked, params)
        if reply["released"] and self.engine:
            self.engine.abort([request.request_id])

    def give_back(self, request):
        """Returns the lease of a refused or cancelled request to its producer."""
        params, request.kv_transfer_params = request.kv_transfer_params, None
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return
        if text(params.get("remote_handle")):
            # A router releases the handoff itself, or tries another engine with it.
            if not text(params.get("router_request_id")):
                with contextlib.suppress(ValueError):
                    self.ask("give_back", params=bounded_handoff(params))
        elif not self.settings.strict_peers and stock_is_complete(params, len(self.groups)):
            # The stock half notifies its producer.
            request.kv_transfer_params = params

    def admit(self, request, tracked, params):
        """Checks a handoff. An invalid one is dropped: the engine computes the prompt itself."""
        expected = self.stock._get_remote_prefill_token_count(request.num_prompt_tokens)
        try:
            reply = self.ask(
                "admit",
                id=request.request_id,
                params=bounded_handoff(params),
                prompt=fingerprint(request, expected),
                tokens=expected,
                block_tokens=self.block_size,
                groups=len(self.groups),
            )
        except ValueError as error:
            reply = {"invalid": str(error)}
        if "params" in reply:
            request.kv_transfer_params = reply["params"]
            if reply.get("load", True):
                tracked.stage = Stage.QUEUED
            return
        if reply.get("stock") and not self.settings.strict_peers:
            if stock_is_complete(params, len(self.groups)):
                return
            reply["stock"] = False
        stock = reply.get("stock")
        what = "a handoff without the contract" if stock else "an invalid handoff"
        message = "request %s has %s (%s); this engine computes its prompt"
        self.warn_once("admit", message, request.request_id, what, reply["invalid"])
        self.report_fetch(request.request_id, "failed", "stock" if stock else "invalid")
        request.kv_transfer_params = None

    # The consumer

    def after_new_request(self, request):
        """The stock half has begun heartbeats, the first of which would connect to the handoff's host unchecked."""
        tracked = self.requests.get(request.request_id)
        if tracked is not None and tracked.stage is Stage.QUEUED:
            self.stock._stop_heartbeat(request.request_id)

    def hold_of(self, request):
        """Before a read: `holding` until the producer has answered, then `live` or `gone`; None without a load.

        Nothing of a handoff reaches NIXL before the producer has confirmed its names over the core's own channel.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.stage is not Stage.QUEUED:
            return None
        wait, self.hold_wait_us = self.hold_wait_us, 0
        reply = self.ask("state", id=request.request_id, wait_us=wait)
        tracked.reason = reply["reason"]
        return reply["state"]

    def drop_load(self, request):
        """The request computes its prompt itself."""
        tracked = self.requests[request.request_id]
        tracked.stage = None
        request.kv_transfer_params["do_remote_prefill"] = False
        self.report_fetch(request.request_id, "gone", tracked.reason)
        self.ask("leave", id=request.request_id, reason="lease_gone")
        self.stock._stop_heartbeat(request.request_id)

    def on_allocated(self, request, external_tokens, gone):
        """After `update_state_after_alloc` of the stock half: begins the read, or prevents it."""
        request_id = request.request_id
        tracked = self.requests.get(request_id)
        if tracked is not None and tracked.stage is None and external_tokens > 0:
            self.begin_unverified(request, tracked)
            return
        if tracked is None or tracked.stage is not Stage.QUEUED:
            return
        if external_tokens == 0:
            # All blocks are here. The stock half would notify the producer, which the core does.
            self.stock._reqs_need_recv.pop(request_id, None)
            tracked.stage = None
            self.ask("leave", id=request_id, reason="cached")
            self.stock._stop_heartbeat(request_id)
            return
        entry = self.stock._reqs_need_recv.get(request_id)
        if gone or entry is None or not self.fits(request, entry[1]):
            self.stock._reqs_need_recv.pop(request_id, None)
            self.ask("leave", id=request_id, reason="load_failed")
            result, reason = ("gone", tracked.reason) if gone else ("failed", "refused")
            self.fail_load(request_id, tracked, result, reason)
            return
        tracked.stage = Stage.READING
        count = sum(len(group) for group in entry[1])
        self.events.append({"id": request_id, "kind": "fetching", "blocks": count})
        self.ask("begin", id=request_id)

    def begin_unverified(self, request, tracked):
        """A stock producer's handoff: the workers read, and notify the producer as the stock half does."""
        request_id = request.request_id
        entry = self.stock._reqs_need_recv.get(request_id)
        if entry is None or not self.fits(request, entry[1]):
            self.stock._reqs_need_recv.pop(request_id, None)
            self.fail_load(request_id, tracked, "failed", "refused")
            return
        tracked.stage = Stage.UNVERIFIED
        self.events.append({"id": request_id, "kind": "fetching", "blocks": sum(map(len, entry[1]))})

    def fits(self, request, local):
        """Whether the producer's block lists have the lengths that the workers' code asserts."""
        params = request.kv_transfer_params
        remote, size = params["remote_block_ids"], params.get("remote_block_size", self.block_size)
        # The workers go by the size in P's handshake. Any other one here may be forged, and is not supported.
        if size != self.block_size or len(remote) != len(local) or len(local) != len(self.groups):
            return False
        if any(len(mine) > len(theirs) for mine, theirs in zip(local, remote)):
            return False
        expected = self.stock._get_remote_prefill_token_count(request.num_prompt_tokens)
        return max(map(len, remote)) == -(-expected // self.block_size)

    def fail_load(self, request_id, tracked, result, reason):
        """A load without a read, or with one that must not be used: the workers report its failure."""
        tracked.stage = Stage.FAILED
        self.orders.failed.append(request_id)
        self.report_fetch(request_id, result, reason)

    def report_fetch(self, request_id, result, reason=None):
        """The end of a load, once. With a reason, the core counts it as failed."""
        self.events.append({"id": request_id, "kind": "fetched", "result": result, "reason": reason})

    def on_received(self, received, failed):
        """The ids of `finished_recving` that the scheduler may see."""
        passed, asked = set(), []
        for request_id in received:
            tracked = self.requests.get(request_id)
            if tracked is None:
                if request_id in self.abandoned:
                    # Its request has ended. The scheduler frees the blocks now.
                    blocks, stage = self.abandoned.pop(request_id)
                    if stage is Stage.READING:
                        # The read is over: the producer need not wait for it any more.
                        self.ask("leave", id=request_id, reason="load_failed")
                    self.events.append({"id": request_id, "kind": "freed", "blocks": blocks})
                    passed.add(request_id)
                else:
                    self.count_late(request_id, "finished_recving")
            elif tracked.stage is Stage.UNVERIFIED:
                if self.receive_unverified(request_id, tracked, request_id in failed):
                    passed.add(request_id)
            elif tracked.stage in (None, Stage.QUEUED, Stage.PASSED):
                self.count_late(request_id, "finished_recving")
            elif tracked.stage is Stage.VERIFIED or (tracked.stage is Stage.FAILED and request_id in failed):
                tracked.stage = Stage.PASSED
                passed.add(request_id)
            elif request_id in failed:
                self.report_fetch(request_id, "failed", "transfer")
                self.ask("leave", id=request_id, reason="load_failed")
                tracked.stage = Stage.PASSED
                passed.add(request_id)
            elif tracked.stage is Stage.READING:
                tracked.stage = Stage.VERIFYING
                asked.append(request_id)
            else:
                self.count_late(request_id, "finished_recving")
        if asked:
            verdicts = self.ask("done", ids=asked, wait_us=VERDICT_WAIT_US)["verdicts"]
            if not verdicts:
                # The core has failed, and may still have these loads.
                verdicts = [{"id": request_id, "verdict": "gone", "reason": "unverified"} for request_id in asked]
                for request_id in asked:
                    self.ask("leave", id=request_id, reason="load_failed")
            for verdict in verdicts:
                if self.apply_verdict(verdict, within_step=True):
                    passed.add(verdict["id"])
        return passed

    def receive_unverified(self, request_id, tracked, failed):
        """A stock producer confirms nothing. A read counts if it ends soon after the handoff arrived."""
        tracked.stage = Stage.PASSED
        if failed:
            self.report_fetch(request_id, "failed", "transfer")
            return True
        in_time = time.monotonic() - tracked.arrived <= self.lease_s * UNVERIFIED_SHARE
        self.ask("unverified", id=request_id, used=in_time)
        if in_time:
            self.report_fetch(request_id, "landed")
        else:
            self.fail_load(request_id, tracked, "gone", "unverified")
        return in_time

    def apply_verdict(self, verdict, within_step):
        """True if the load is verified and may pass in this step."""
        request_id = verdict["id"]
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.stage is not Stage.VERIFYING or verdict["verdict"] == "pending":
            return False
        if verdict["verdict"] != "valid":
            logger.warning("the blocks of request %s are not used: %s", request_id, verdict["reason"])
            reason = "unverified" if verdict["reason"] in NO_VERDICT else verdict["reason"]
            self.fail_load(request_id, tracked, "gone", reason)
            return False
        self.report_fetch(request_id, "landed")
        if within_step:
            tracked.stage = Stage.PASSED
            return True
        tracked.stage = Stage.VERIFIED
        self.orders.landed.append(request_id)
        return False

    # The producer

    def on_finished(self, request, delay, params):
        """After `request_finished` of the stock half: lends the blocks, and ends what the request had open."""
        if is_notice(request):
            return delay, params
        request_id = request.request_id
        tracked = self.requests.pop(request_id, None)
        self.end_load(request, tracked)
        self.report_end(request, tracked)
        if delay:
            # The log has the end of the prefill before its lease.
            self.flush_events()
            delay, params = self.lend(request, params, tracked)
        if request.status.name == "FINISHED_ABORTED" and self.engine and self.ask("aborted", id=request_id)["by_verb"]:
            self.engine.answer_aborted(request_id, request.client_index)
        if not delay and request_id not in self.abandoned:
            self.events.append({"id": request_id, "kind": "freed", "blocks": self.blocks_held(request)})
        self.flush_events()
        return delay, params

    def lend(self, request, params, tracked):
        """Opens the lease. A refused one frees the blocks now, as the stock half does for an aborted request."""
        request_id, stock = request.request_id, self.stock
        groups = [list(group) for group in params["remote_block_ids"]]
        given = request.kv_transfer_params
        blocks = sum(map(len, groups))
        prompt = fingerprint(request, params["remote_num_tokens"])
        reply = {"refused": "acknowledged or unknown"}
        if tracked is not None and not tracked.acknowledged:
            reply = self.ask("offer", id=request_id, blocks=groups, consumers=given["remote_consumers"], prompt=prompt)
        if "refused" in reply:
            stock._reqs_need_send.pop(request_id, None)
            stock._reqs_not_processed.add(request_id)
            return False, None
        # The core ends the lease; the workers' own deadline never does.
        stock._reqs_need_send[request_id] = float("inf")
        self.lent[request_id] = blocks
        params.update(
            remote_handle=reply["handle"],
            remote_epoch=reply["epoch"],
            remote_lease_left_ms=reply["left_ms"],
            remote_channel_port=self.core.channel_port,
            remote_layout=self.layout,
            remote_prompt=prompt[:PROMPT_DIGITS],
            remote_block_size=self.block_size,
            remote_consumers=given["remote_consumers"],
        )
        params.update((key, given[key]) for key in ROUTER_KEYS if key in given)
        return True, params

    def end_load(self, request, tracked):
        """A load whose request ends before its verdict: the producer gets its lease back at once."""
        request_id = request.request_id
        stage = tracked.stage if tracked else None
        if stage in (None, Stage.PASSED):
            return
        if stage in (Stage.QUEUED, Stage.READING, Stage.VERIFYING):
            self.ask("leave", id=request_id, reason="request_ended")
        if stage is Stage.QUEUED:
            # The stock half's notification of a refused request: the core's `leave` replaces it.
            self.stock._reqs_need_recv.pop(request_id, None)
            return
        # An entry of a load that is about to begin stays: the workers read and report, as those of a begun one.
        self.abandoned[request_id] = (self.blocks_held(request), stage)
        if stage not in (Stage.VERIFIED, Stage.FAILED):
            # With the policy `fail`, vLLM ends the request before it reports the failed transfer.
            failed = request.status.name == "FINISHED_ERROR"
            result, reason = ("failed", "transfer") if failed else ("stopped", None)
            self.report_fetch(request_id, result, reason)
        if stage is Stage.VERIFYING:
            # The workers have reported it, and were not believed. They report it again.
            self.orders.landed.append(request_id)

    def report_end(self, request, tracked):
        request_id, name = request.request_id, request.status.name
        outcomes = {"FINISHED_STOPPED": "stop", "FINISHED_ABORTED": "abort", "FINISHED_ERROR": "error"}
        outcome = outcomes.get(name, "length")
        if outcome == "abort":
            self.events.append({"id": request_id, "kind": "abort", "how": "disconnect"})
        if tracked and not tracked.first_token and request.num_output_tokens > 0:
            self.events.append({"id": request_id, "kind": "first_token"})
        self.events.append(
            {
                "id": request_id,
                "kind": "ended",
                "outcome": outcome,
                "generated": request.num_output_tokens,
                "computed": tracked.computed if tracked else 0,
                "blocks": self.blocks_held(request),
            }
        )

    def on_sent(self, sent):
        """The ids of `finished_sending` that the scheduler may see, each once."""
        passed = set()
        for request_id in sent:
            blocks = self.lent.pop(request_id, None)
            if blocks is None:
                if request_id in self.requests:
                    self.requests[request_id].acknowledged = True
                self.count_late(request_id, "finished_sending")
                continue
            # A stock consumer's acknowledgement ends the lease. After an end by the core this is a no-op.
            if self.ask("acked", id=request_id).get("draining"):
                # Another consumer reads. The workers report the id again when the lease has ended.
                self.lent[request_id] = blocks
                self.withheld.add(request_id)
                continue
            passed.add(request_id)
            self.ask("freed", id=request_id, blocks=blocks)
        return passed

    def on_worker_report(self, report):
        """Heartbeats of stock consumers, which the workers received."""
        if report is not None and report.beats:
            self.ask("beat", ids=sorted(report.beats))

    # Steps

    def report_drain(self):
        """Once, after the signal that ends the engine: it refuses each request that arrives from now on."""
        if self.engine and not self.draining and self.engine.is_draining:
            self.draining = self.ask("draining") is not None

    def on_news(self, bits):
        """The waiter's thread: takes what the core has, aborts, answers snapshots and ends a nap."""
        if bits & core_bits.POOL:
            self.ask("pool", **self.snapshot())
        if bits & (core_bits.ENDED | core_bits.ABORTS | core_bits.VERDICTS):
            self.take()
            if self.engine:
                self.engine.wake()

    def take(self):
        with self._take_lock:
            news = self.ask("take")
            if news["aborts"] and self.engine:
                self.engine.abort(news["aborts"])
            self._news.append(news)

    def orders_of_step(self, meta):
        """After `build_connector_meta` of the stock half: what the workers get with this step."""
        if self.core.pending() & (core_bits.ENDED | core_bits.VERDICTS):
            self.take()
        while self._news:
            news = self._news.popleft()
            for ended in news["ended"]:
                again = ended["id"] in self.withheld
                self.withheld.discard(ended["id"])
                (self.orders.again if again else self.orders.ended).append(ended["id"])
            for verdict in news["verdicts"]:
                self.apply_verdict(verdict, within_step=False)
        for request_id, recv in meta.reqs_to_recv.items():
            tracked = self.requests.get(request_id)
            stage = tracked.stage if tracked else self.abandoned.get(request_id, (0, None))[1]
            if stage is Stage.READING and recv.remote is not None:
                # The core reports the end of this read. The workers' notification becomes one that means nothing.
                recv.remote.request_id = HEARTBEAT + recv.remote.request_id
        self.hold_wait_us = HOLD_WAIT_US
        orders, self.orders = self.orders, WorkerOrders()
        if orders:
            self.stay_awake()
        return orders

    def progress(self, scheduler_output):
        """Events of the requests that this step computes."""
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, tokens in scheduled.items():
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.first_token:
                continue
            request = tracked.request
            if request.num_output_tokens > 0:
                tracked.first_token = True
                self.events.append({"id": request_id, "kind": "first_token"})
                continue
            if not tracked.started:
                tracked.started = True
                cached = max(0, request.num_computed_tokens - tracked.computed)
                self.events.append({"id": request_id, "kind": "started", "cached": cached})
            done = min(request.num_computed_tokens + tokens, request.num_prompt_tokens)
            tracked.computed += min(tokens, request.num_prompt_tokens)
            self.events.append({"id": request_id, "kind": "computed", "tokens": done})
        self.flush_events()

    def flush_events(self):
        if self.events:
            events, self.events = self.events, []
            self.ask("events", events=events)

    def stay_awake(self):
        """Afterwards every batch in flight is empty."""
        self.steps_without_nap = STEPS_AFTER_ORDER + (self.engine.batches_max if self.engine else 0)

    def maybe_nap(self, scheduler_output):
        """Leases without work need no steps: vLLM would step without pause while blocks are lent."""
        if not (self.settings.nap and self.engine and self.engine.can_nap and self.settings.strict_peers):
            return
        idle = not scheduler_output.total_num_scheduled_tokens and not self.requests and not self.abandoned
        if not idle or not self.lent:
            self.stay_awake()
            return
        if self.steps_without_nap > 0:
            self.steps_without_nap -= 1
            return
        if not self.core.pending() and not self._news:
            self.engine.nap(NAP_S)

    # Pool

    def snapshot(self):
        """Blocks by state. Reads of integers and of a list that never changes, safe on any thread."""
        pool = self.pool
        if pool is None:
            return {"free": 0, "cached": 0, "active": 0, "landing": 0, "waiting": 0, "running": 0}
        unused = pool.get_num_free_blocks()
        cached = min(self.count_cached(pool), unused)
        requests = list(self.requests.values())
        loading = [t for t in requests if t.stage not in (None, Stage.QUEUED, Stage.PASSED)]
        landing = sum(-(-t.request.num_prompt_tokens // self.block_size) for t in loading)
        running = sum(1 for t in requests if t.started)
        lent = sum(list(self.lent.values()))
        # One block of vLLM's pool is a placeholder and never used.
        used = max(0, pool.num_gpu_blocks - 1 - unused)
        landing = min(landing, max(0, used - lent))
        return {
            "free": unused - cached,
            "cached": cached,
            "active": max(0, used - lent - landing),
            "landing": landing,
            "waiting": len(requests) - running,
            "running": running,
        }

    def count_cached(self, pool):
        """Free blocks with content. A large pool is counted at most once per second: the count holds the GIL."""
        now = time.monotonic()
        if len(pool.blocks) <= POOL_COUNTED_AT_ONCE or now - self.cached_at >= 1:
            self.cached_at = now
            self.cached = sum(1 for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None)
        return self.cached

    # Small things

    def ask(self, op, **fields):
        """Runs an operation of the core. If the core fails, the reply is one with which nothing is lent or used."""
        try:
            return self.core.call(op, **fields)
        except (core_bits.CoreError, ValueError, RecursionError) as error:
            if op == "admit":
                # A client's JSON may have numbers and depths that the core's parser refuses.
                return {"invalid": str(error)}
            self.warn_once("core", "operation %s of the core failed: %s", op, error)
            return REPLIES_WITHOUT_CORE.get(op, {})

    def blocks_held(self, request):
        return -(-request.num_computed_tokens // self.block_size)

    def count_late(self, request_id, where):
        self.ask("late", id=request_id)
        logger.debug("late or unknown id %s in %s is ignored", request_id, where)

    def warn_once(self, kind, message, *arguments):
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning(message + " (further ones are counted only)", *arguments)


def is_notice(request):
    """Whether vLLM only announces that it has refused or cancelled this request, which has no blocks."""
    return getattr(request, "abort_immediately", False)


def producer_params(params):
    """The parameters of a prefill that are used. vLLM would also act on a client's block list, as for a read-back."""
    consumers = integer(params.get("remote_consumers"), 1) or 1
    used = {"do_remote_decode": True, "remote_consumers": consumers if consumers <= CONSUMERS_MAX else 1}
    used.update((key, params[key]) for key in ROUTER_KEYS if text(params.get(key)))
    return used


def stock_is_complete(params, groups):
    """Whether vLLM's code can use a stock producer's handoff: it asserts on lists, and parks requests without names."""
    names = ("remote_engine_id", "remote_request_id", "remote_host")
    numbers = ("remote_port", "tp_size")
    lists = params.get("remote_block_ids")
    return (
        all(text(params.get(key)) for key in names)
        and all(integer(params.get(key), 1) for key in numbers)
        and all(params[key] == 1 for key in ("dcp_size", "pp_size") if key in params)
        and isinstance(lists, list)
        and len(lists) == groups
        and all(isinstance(group, list) and group for group in lists)
        and all(integer(block) is not None and block <= BLOCK_ID_MAX for group in lists for block in group)
    )


def fingerprint(request, count):
    """The fingerprint of the first tokens of a request's prompt."""
    tokens = request.prompt_token_ids
    return prompt_fingerprint(None if tokens is None else tokens[:count], extras(request))


def extras(request):
    """What the KV depends on beside the tokens, as in vLLM's own block hashes."""
    lora, features = getattr(request, "lora_request", None), getattr(request, "mm_features", None) or ()
    names = [getattr(lora, "lora_name", None), getattr(request, "cache_salt", None)]
    for feature in features:
        place = feature.mm_position
        names += [feature.identifier, place.offset, place.length]
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is not None:
        import torch

        data = embeds.detach().cpu().contiguous().view(torch.uint8).numpy()
        names.append(hashlib.blake2b(data, digest_size=16).hexdigest())
    return repr(names) if any(name is not None for name in names) else ""


def text(value):
    """The value if it is a text of printable ASCII and of a sane length."""
    is_text = isinstance(value, str) and 0 < len(value) <= TEXT_MAX and value.isascii() and value.isprintable()
    return value if is_text else None
