"""Push engines for the tests: vLLM's scheduler half, worker half and aggregator, around a model of NIXL.

Needs vLLM. The writer thread does not run: `Engine.step` and `Engine.turn` do its turns.
"""

import concurrent.futures
import contextlib
import queue
import threading
import types
from collections import Counter, defaultdict

import fakes
import real_vllm
from baton_vllm.push.connector import BatonPushConnector
from baton_vllm.push.scheduler import PushScheduler
from baton_vllm.push.worker import PushWorker

BLOCK = fakes.BLOCK
Status = real_vllm.RequestStatus


class Net:
    """What all agents share."""

    def __init__(self):
        self.inbox = defaultdict(list)  # agent -> [(sender, message)]
        self.sent = []  # (sender, receiver, message)
        self.lost = set()  # agents that no message reaches
        self.engines = {}  # engine id -> engine
        self.transfers = []

    def send(self, sender, receiver, message):
        if receiver in self.lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.sent.append((sender, receiver, message))
        self.inbox[receiver].append((sender, message))


class Transfer:
    """One write."""

    def __init__(self, net, sender, receiver, notice):
        self.net, self.sender, self.receiver, self.notice = net, sender, receiver, notice
        self.state, self.released, self.stuck = "PROC", False, False

    def finish(self):
        self.state = "DONE"
        self.net.send(self.sender, self.receiver, self.notice)

    def fail(self):
        self.state = "ERR"


class Nixl:
    """vLLM's `nixl_wrapper` of one rank."""

    def __init__(self, net, name):
        self.net, self.name = net, name
        self.refuse = set()  # receivers to which no write can be submitted

    def get_new_notifs(self):
        found = {}
        for sender, message in self.net.inbox.pop(self.name, []):
            found.setdefault(sender, []).append(message)
        return found

    def send_notif(self, agent, notif_msg):
        self.net.send(self.name, agent, notif_msg)

    def make_prepped_xfer(self, kind, local, local_ids, remote, remote_ids, notif_msg):
        assert kind == "WRITE" and len(local_ids) == len(remote_ids)
        return Transfer(self.net, self.name, remote, notif_msg)

    def transfer(self, handle):
        if handle.receiver in self.refuse:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.net.transfers.append(handle)

    def check_xfer_state(self, handle):
        return handle.state

    def get_xfer_telemetry(self, handle):
        return None

    def release_xfer_handle(self, handle):
        if handle.stuck:
            raise RuntimeError("NIXL_ERR_IN_PROG")
        assert not handle.released
        handle.released = True


class Stats:
    """vLLM's counters of one rank."""

    def __init__(self):
        self.counts = Counter()

    def __getattr__(self, name):
        return lambda *_: self.counts.update([name])


class Topology:
    """Ratios of tensor-parallel sizes, as vLLM's `TransferTopology`."""

    def __init__(self, worker):
        self.worker = worker

    def tp_ratio(self, remote):
        mine = self.worker.world_size
        return mine // remote if mine >= remote else -(remote // mine)

    def target_ranks(self, remote):
        ratio = self.tp_ratio(remote)
        rank = self.worker.tp_rank
        return [rank // ratio] if ratio > 0 else [rank * -ratio + n for n in range(-ratio)]

    def get_engine_info(self, engine_id):
        ranks = len(self.worker.net.engines[engine_id].workers)
        return types.SimpleNamespace(
            remote_tp_size=ranks, remote_block_size=1, remote_physical_blocks_per_logical=1
        )

    def block_size_ratio(self, _):
        return 1


class Worker(PushWorker):
    """The worker half without memory, without NIXL and without threads."""

    def __init__(self, net, engine_id, rank, ranks, wait_s, silent_s):
        self.net, self.engine_id = net, engine_id
        self.tp_rank, self.world_size = rank, ranks
        self.nixl_wrapper = Nixl(net, f"{engine_id}{rank}")
        self._start_tables(wait_s, silent_s)
        self._reqs_to_send, self._reqs_to_process = {}, set()
        self.consumer_notification_counts_by_req = defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._recving_metadata, self._recving_transfers = {}, {}
        self._recv_failures, self._send_failures = set(), set()
        self._failed_recv_reqs, self._invalid_block_ids = queue.Queue(), queue.Queue()
        self._evict_finished_inbox, self._reg_send_inbox = queue.Queue(), queue.Queue()
        self._finished_blocks_inbox = queue.Queue()
        self._replicated_pcp_done_sending, self._pending_recv_notifs = set(), {}
        self._sending_transfers, self._sending_transfers_lock = defaultdict(list), threading.Lock()
        self._push_writer_wake, self._push_writer_stop = threading.Event(), threading.Event()
        self._push_writer_thread = None
        self._remote_agents, self._handshake_lock = {}, threading.Lock()
        self._engine_last_active, self._failed_remote_engines = {}, set()
        self._physical_blocks_per_logical_kv_block = 1
        self._lease_extension, self.pcp_rank = 20, 0
        self.pcp_dcp_sharded = self.use_host_buffer = self._is_hma_required = self.use_mla = False
        self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self._has_mamba = self._is_csa_linear = False
        self._group_spec_types, self._transfer_layer_group_ids = (object,), ()
        self.region_group_ids, self._uses_region_group_mapping = [0], False
        self.xfer_stats, self.transfer_topo = Stats(), Topology(self)
        self.src_xfer_handles_by_block_size = {1: "local"}
        self.src_xfer_handles_by_tp_ratio = defaultdict(lambda: ["local"] * ranks * 4)
        self.dst_xfer_side_handles, self.tp_mappings = {}, {}
        self.dst_region_group_ids = defaultdict(lambda: [0])
        self.dst_num_blocks, self.dst_region_num_blocks = defaultdict(int), defaultdict(list)
        self.dst_uses_region_group_mapping = defaultdict(bool)
        self.handshakes = []  # futures of handshakes that wait
        self.slow = False  # handshakes wait for `shake`
        self.cleaned = []

    def _ensure_handshake(self, engine_id, host, port, tp_size, dcp_size=1, pp_size=1, notif_agents_only=False):
        if engine_id in self._remote_agents:
            return None
        if self.slow:
            future = concurrent.futures.Future()
            self.handshakes.append((future, engine_id, tp_size))
            return future
        self.connect(engine_id, tp_size)
        return None

    def connect(self, engine_id, tp_size):
        ranks = self.transfer_topo.target_ranks(tp_size)
        self._remote_agents[engine_id] = {(0, rank): f"{engine_id}{rank}".encode() for rank in ranks}
        self.dst_xfer_side_handles[engine_id] = {rank: f"{engine_id}{rank}" for rank in ranks}
        self.tp_mappings[engine_id] = types.SimpleNamespace(
            all_source_ranks=tuple(ranks), source_ranks_per_group=(tuple(ranks),)
        )

    def shake(self, ok=True):
        """The handshakes that wait end."""
        waiting, self.handshakes = self.handshakes, []
        for future, engine_id, tp_size in waiting:
            if ok:
                self.connect(engine_id, tp_size)
                future.set_result(None)
            else:
                future.set_exception(RuntimeError("no such host"))

    def _logical_to_kernel_block_ids(self, blocks, ratio):
        return blocks

    def _apply_prefix_caching(self, decode_block_ids, prefill_block_ids, **_):
        pairs = [(d, p[len(p) - len(d) :]) for d, p in zip(decode_block_ids, prefill_block_ids)]
        return [d for d, _ in pairs], [p for _, p in pairs]

    def _compute_desc_ids(self, block_ids, **_):
        return [block for group in block_ids for block in group]

    def _cleanup_remote_engine(self, engine_id, **_):
        self.cleaned.append(engine_id)
        self._remote_agents.pop(engine_id, None)

    def _send_heartbeats(self, metadata):
        pass

    def shutdown(self):
        pass

    def __del__(self):
        pass


# NIXL takes names of agents as text here, and vLLM keeps them as NIXL's loadRemoteMD returns them.
def text(agent):
    return agent.decode() if isinstance(agent, bytes) else agent


Nixl.send_notif = lambda self, agent, notif_msg: self.net.send(self.name, text(agent), notif_msg)


class Engine:
    """Scheduler, connector and ranks of one engine."""

    def __init__(self, net, engine_id, ranks=1, blocks=32, recompute=True, wait_s=30.0, silent_s=0.0):
        self.net, self.id = net, engine_id
        config = real_vllm.fake_config(BLOCK)
        config.parallel_config.tensor_parallel_size = ranks
        self.half = PushScheduler(config, engine_id, real_vllm.fake_cache_config(BLOCK))
        self.scheduler = real_vllm.make_scheduler(self.connector(), Status, blocks, BLOCK, recompute)
        self.pool, self.total = self.scheduler.pool, blocks
        self.workers = [Worker(net, engine_id, rank, ranks, wait_s, silent_s) for rank in range(ranks)]
        self.facades = [self.connector(worker) for worker in self.workers]
        self.aggregator = real_vllm.Aggregator(ranks)
        self.sent, self.received, self.failed = Counter(), Counter(), Counter()
        self.now = 100.0  # of the writers' turns
        net.engines[engine_id] = self

    def connector(self, worker=None):
        made = BatonPushConnector.__new__(BatonPushConnector)
        made.connector_scheduler = None if worker else self.half
        made.connector_worker = worker
        made.kv_transfer_config = types.SimpleNamespace(kv_role="kv_both")
        return made

    # Requests

    def prefill(self, request_id, tokens=2 * BLOCK, max_tokens=1):
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        return self.add(request_id, tokens, params, max_tokens)

    def decode(self, request_id, producer, tokens=2 * BLOCK, max_tokens=2, **changes):
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": producer.id,
            "remote_request_id": "none", "remote_host": "127.0.0.1", "remote_port": 5600,
            "tp_size": len(producer.workers), **changes,
        }
        return self.add(request_id, tokens, {k: v for k, v in params.items() if v is not ...}, max_tokens)

    def add(self, request_id, tokens, params, max_tokens):
        request = fakes.FakeRequest(Status.WAITING, request_id, tokens, params, max_tokens)
        self.scheduler.add_request(request)
        return request

    def abort(self, request):
        self.scheduler.finish_requests(request.request_id, Status.FINISHED_ABORTED)

    # Time

    def turn(self, seconds=0.0):
        """One turn of each writer, this much later."""
        self.now += seconds
        for worker in self.workers:
            worker._turn(self.now)

    def step(self, count=1):
        for _ in range(count):
            scheduled = self.scheduler.schedule()
            outputs = [self.run_rank(facade, scheduled.kv_connector_metadata) for facade in self.facades]
            self.scheduler.update_from_output(scheduled, self.aggregator.merge(outputs))

    def run_rank(self, facade, metadata):
        facade.bind_connector_metadata(metadata)
        facade.start_load_kv(None)
        facade.connector_worker._turn(self.now)
        results = facade.get_transfer_results(set())
        facade.connector_worker._turn(self.now)
        self.sent.update(results.finished_sending)
        self.received.update(results.finished_recving)
        self.failed.update(results.failed_recving)
        return real_vllm.KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
        )

    def expire(self, request):
        """The lease of this request has ended by time."""
        for worker in self.workers:
            if request.request_id in worker._reqs_to_send:
                worker._reqs_to_send[request.request_id] = 0.0

    # State

    def waits(self, request):
        return request.status == Status.WAITING_FOR_REMOTE_KVS

    def holds(self, request):
        return len(self.pool.held.get(request.request_id, ()))

    def check_empty(self):
        ranks = len(self.workers)
        assert self.pool.get_num_free_blocks() == self.total, f"blocks are lost: {self.pool.held}"
        assert not self.scheduler.requests and not self.half._awaiting and not self.half._orders
        assert not self.half._finished_request_blocks and not self.half._push_pending_registrations
        for worker in self.workers:
            assert not worker._reqs_to_send and not worker._reqs_to_process and not worker._writing
            assert not worker._recving_metadata and not worker._recving_transfers and not worker._sending_transfers
            assert not worker._send_failures and not worker._recv_failures
            tables, waits = worker._registrations, worker._waits
            assert not tables.pending and not tables.lent and not tables.claims and not tables.live
            assert not waits.waits and not waits.producers
            assert worker._reg_send_inbox.empty() and worker._finished_blocks_inbox.empty()
            assert worker._inbox.empty() and worker._results.empty()
        for reports in (self.sent, self.received):
            assert all(count == ranks for count in reports.values()), reports
        remaining = (self.aggregator._send_remaining_count, self.aggregator._recv_remaining_count)
        assert not any(remaining), remaining


class Pair:
    """A prefill engine and a decode engine."""

    def __init__(self, prefill_ranks=1, decode_ranks=1, **named):
        self.net = Net()
        self.p = Engine(self.net, "p", prefill_ranks, **named)
        self.d = Engine(self.net, "d", decode_ranks, **named)

    def step(self, count=1, finish=True):
        """Steps of both engines. Writes end unless `finish` is false."""
        for _ in range(count):
            self.p.step()
            if finish:
                self.finish()
            self.d.step()

    def finish(self):
        for transfer in self.net.transfers:
            if transfer.state == "PROC":
                transfer.finish()

    def settle(self, most=12):
        """Steps until nothing is left, and checks it."""
        for _ in range(most):
            self.step()
        self.p.check_empty()
        self.d.check_empty()

    def messages(self, prefix):
        return [message for _, _, message in self.net.sent if message.startswith(prefix)]


@contextlib.contextmanager
def probes(found):
    """Each probe finds this, without a thread. Yields the list of probed engines."""
    import baton_vllm.push.worker as module

    class Executor:
        def __init__(self, *_):
            pass

        def submit(self, _, host, port, engine_id, known):
            probed.append(engine_id)
            future = concurrent.futures.Future()
            answer = found() if callable(found) else found
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
            return future

        def shutdown(self, wait):
            pass

    probed, before = [], module.concurrent.futures.ThreadPoolExecutor
    module.concurrent.futures.ThreadPoolExecutor = Executor
    try:
        yield probed
    finally:
        module.concurrent.futures.ThreadPoolExecutor = before
