"""One engine for the tests: scheduler, connector, ranks and core, on vLLM's classes if vLLM can be imported."""

import os
import types

import fakes
from baton_vllm import core as bits

WITHOUT = os.environ.get("BATON_TESTS_WITHOUT_VLLM") == "1"
REASON = "BATON_TESTS_WITHOUT_VLLM is set" if WITHOUT else None
if not WITHOUT:
    try:
        import vllm.version  # noqa: F401
    except Exception as error:  # vLLM's import fails in many ways
        REASON = f"vLLM cannot be imported: {type(error).__name__}: {error}"

if REASON:
    import stub_vllm as backend
else:
    import real_vllm as backend

backend.install()

from baton_vllm.connector import BatonConnector  # noqa: E402
from baton_vllm.scheduler import SchedulerHalf  # noqa: E402
from baton_vllm.settings import Settings  # noqa: E402
from baton_vllm.worker import WorkerHalf  # noqa: E402

Status = backend.RequestStatus
BLOCK = fakes.BLOCK


class FakeNixl:
    """The network of one rank."""

    def __init__(self):
        self.reads = {}  # request id -> its metadata, while not reported
        self.all_reads = {}
        self.landed = set()
        self.failed = set()
        self.lost = set()  # ids whose failure was reported
        self.notifications = []  # that this rank sent
        self.inbox = []

    def read(self, request_id, meta):
        if any(meta.local_block_ids):
            mine, theirs = meta.local_block_ids, meta.remote.block_ids
            # The assertions of the worker's code.
            assert len(mine) == len(theirs) and all(len(a) <= len(b) for a, b in zip(mine, theirs))
            self.reads[request_id] = self.all_reads[request_id] = meta
        else:
            self.send_notif(meta.remote.engine_id, f"{meta.remote.request_id}:1".encode())

    def finish(self, request_id, ok=True):
        (self.landed if ok else self.failed).add(request_id)

    def finished_reads(self, pending):
        failed = {i for i in self.failed if i in pending}
        done = {i for i in self.landed if i in pending} | failed
        self.landed -= done
        self.failed -= failed
        self.lost |= failed
        return done, failed

    def send_notif(self, agent, notif_msg):
        self.notifications.append(notif_msg.decode())

    def get_new_notifs(self):
        inbox, self.inbox = self.inbox, []
        return {"d": [message.encode() for message in inbox]}


class Bench:
    """An engine of `ranks` workers."""

    def __init__(self, ranks=2, recompute=True, peers="strict", blocks=32, engine=True, nap=False):
        settings = Settings.parse({"baton": {"peers": peers, "nap": nap}}, "localhost", 5600, 0)
        self.core = fakes.FakeCore()
        self.engine = fakes.FakeEngine() if engine else None
        self.stock = backend.make_stock_scheduler(BLOCK)
        groups = types.SimpleNamespace(transfer_groups=[object()])
        self.half = SchedulerHalf(self.core, settings, self.stock, self.engine, groups, BLOCK, recompute)
        self.half.layout = fakes.LAYOUT
        self.connector = connector(connector_scheduler=self.stock, _scheduler_half=self.half)
        self.scheduler = backend.make_scheduler(self.connector, Status, blocks, BLOCK, recompute)
        self.pool = self.half.pool = self.scheduler.pool
        self.total = blocks
        self.nixl = [FakeNixl() for _ in range(ranks)]
        self.workers = []
        for nixl in self.nixl:
            stock = backend.make_stock_worker(nixl)
            half = WorkerHalf(stock, settings.strict_peers)
            self.workers.append(connector(connector_worker=stock, _worker_half=half))
        self.aggregator = backend.Aggregator(ranks)
        self.reports = [{} for _ in range(ranks)]  # per rank: id -> how often reported as sent

    # Requests

    def add(self, request_id, tokens=2 * BLOCK, params=None, **more):
        request = fakes.FakeRequest(Status.WAITING, request_id, tokens, params, **more)
        self.scheduler.add_request(request)
        return request

    def prefill(self, request_id="cmpl-x-0-00000001", router="x", **params):
        return self.add(request_id, params={"do_remote_decode": True, "router_request_id": router, **params})

    def decode(self, request_id="cmpl-y-0-00000002", tokens=2 * BLOCK, cached=0, max_tokens=2, **changes):
        params = fakes.handoff(tokens, router_request_id="y", **changes)
        return self.add(request_id, tokens, params, max_tokens=max_tokens, cached=cached)

    def abort(self, request):
        """The client has left."""
        self.scheduler.finish_requests(request.request_id, Status.FINISHED_ABORTED)

    # Time

    def news(self):
        """What the waiter does."""
        if self.core.bits:
            self.half.on_news(self.core.bits)

    def step(self, count=1):
        for _ in range(count):
            self.news()
            if self.engine and self.engine.aborts:
                ids, self.engine.aborts = self.engine.aborts, []
                self.scheduler.finish_requests(ids, Status.FINISHED_ABORTED)
            scheduled = self.scheduler.schedule()
            outputs = [self.run_rank(rank, scheduled.kv_connector_metadata) for rank in range(len(self.workers))]
            self.scheduler.update_from_output(scheduled, self.aggregator.merge(outputs))

    def run_rank(self, rank, metadata):
        worker = self.workers[rank]
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        results = worker.get_transfer_results(set())
        for request_id in results.finished_sending:
            self.reports[rank][request_id] = self.reports[rank].get(request_id, 0) + 1
        return backend.KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
        )

    def drain(self, most=30):
        """Steps until nothing is left."""
        for _ in range(most):
            self.step()
            if not self.scheduler.requests and not self.core.bits:
                break
        self.step(2)

    # Checks

    def acknowledge(self, request, rank, readers=1):
        """A stock consumer's message to one rank."""
        self.nixl[rank].inbox.append(f"{request.request_id}:{readers}")

    def land(self, request, ranks=None, ok=True):
        """The reads of these ranks end."""
        for rank in range(len(self.nixl)) if ranks is None else ranks:
            self.nixl[rank].finish(request.request_id, ok)

    def check_empty(self, partial=False):
        """No block, no table entry and no order is left, and each rank reported each id at most once.

        With `partial`, vLLM's aggregator may wait for more ranks: one has been acknowledged before the lease.
        """
        half, stock = self.half, self.stock
        assert self.pool.get_num_free_blocks() == self.total, f"blocks are lost: {self.pool.held}"
        assert not self.scheduler.requests and not self.scheduler.finished_recving_kv_req_ids
        assert not self.scheduler.failed_recving_kv_req_ids
        assert not half.requests and not half.lent and not half.abandoned and not half.orders and not half.events
        assert not stock._reqs_need_recv and not stock._reqs_need_send and not stock._heartbeat_req_engine
        assert not self.core.table, f"the core still has requests: {self.core.table}"
        assert not self.core.loads, f"holds are open: {self.core.loads}"
        assert all(cause for cause in self.core.leases.values()), "a lease is open"
        for rank, worker in enumerate(self.workers):
            stock_worker = worker.connector_worker
            assert not stock_worker._reqs_to_send and not stock_worker._reqs_to_process
            assert not stock_worker.consumer_notification_counts_by_req
            assert not stock_worker._recving_metadata
            assert all(count == 1 for count in self.reports[rank].values()), self.reports[rank]
        remaining = (self.aggregator._send_remaining_count, self.aggregator._recv_remaining_count)
        assert partial or not any(remaining), f"some ranks reported, others did not: {remaining}"


def connector(**members):
    """A connector without its constructor, which needs an engine."""
    made = BatonConnector.__new__(BatonConnector)
    made.connector_scheduler = made.connector_worker = None
    made._scheduler_half = made._worker_half = made._waiter = None
    made.kv_transfer_config = types.SimpleNamespace(kv_role="kv_both")
    vars(made).update(members)
    return made


def ended(bench, request_id):
    """Whether a lease has ended, and the core's table knows it."""
    return bench.core.leases.get(request_id, "none") is not None


__all__ = ["BLOCK", "Bench", "REASON", "Status", "bits", "connector", "ended"]
