"""vLLM's own classes in the place of the stubs: scheduler half, worker half, aggregator and the scheduler's functions.

Only NIXL, the model and the block pool are fakes.
"""

import queue
import types
from collections import defaultdict

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from scheduler_model import SchedulerModel

__all__ = [
    "Aggregator",
    "KVConnectorOutput",
    "RequestStatus",
    "make_scheduler",
    "make_stock_scheduler",
    "make_stock_worker",
]


def install():
    """vLLM is installed."""


def fake_config(block_size):
    extra = {"kv_lease_duration": 30}
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
        ),
        cache_config=types.SimpleNamespace(block_size=block_size),
        kv_transfer_config=types.SimpleNamespace(
            get_from_extra_config=extra.get, kv_buffer_device="cpu", kv_role="kv_both", is_kv_producer=True
        ),
        scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        num_prefill_lookahead_tokens=0,
    )


def fake_cache_config(block_size):
    group = types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(prefix_replay_tokens=0, block_size=block_size))
    return types.SimpleNamespace(
        transfer_groups=[group],
        kv_cache_groups=[group],
        has_mamba_layers=False,
        select_transfer_block_ids=lambda ids: ids,
    )


def make_stock_scheduler(block_size):
    return NixlPullConnectorScheduler(fake_config(block_size), "p", fake_cache_config(block_size))


class StockWorker(NixlPullConnectorWorker):
    """vLLM's worker half without memory and without NIXL: `nixl_wrapper` is the network."""

    def __init__(self, nixl_wrapper):
        self.nixl_wrapper = nixl_wrapper
        self.compat_hash = "hash"
        self.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="hash")
        self._reqs_to_send = {}
        self._reqs_to_process = set()
        self.consumer_notification_counts_by_req = defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._recving_metadata = {}
        self._recving_transfers = {}
        self._recv_failures = set()
        self._failed_recv_reqs = queue.Queue()
        self._ready_requests = queue.Queue()
        self._invalid_block_ids = queue.Queue()
        self._replicated_pcp_done_sending = set()
        self._pending_recv_notifs = {}
        self._lease_extension = 20
        self._physical_blocks_per_logical_kv_block = 1
        self.pcp_rank = self.tp_rank = 0
        self.pcp_dcp_sharded = self.use_host_buffer = self._is_hma_required = self.use_mla = False
        self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = self._has_mamba = False
        self.xfer_stats = types.SimpleNamespace(
            record_kv_expired_req=lambda: None, record_notification_after_expiry=lambda: None
        )
        info = types.SimpleNamespace(remote_block_size=1, remote_physical_blocks_per_logical=1)
        self.transfer_topo = types.SimpleNamespace(
            get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1
        )

    def _logical_to_kernel_block_ids(self, blocks, ratio):
        return blocks

    def _read_blocks_for_req(self, req_id, meta):
        if any(meta.local_block_ids):
            self._recving_transfers[req_id] = ["handle"]
        self.nixl_wrapper.read(req_id, meta)

    def _pop_done_transfers(self, transfers):
        done, failed = self.nixl_wrapper.finished_reads(transfers)
        for request_id in done:
            del transfers[request_id]
        # As in vLLM, a failed read is reported by its id in `_recv_failures`.
        return done - failed, failed

    def _send_pending_recv_notifs(self, req_id):
        remote = self.nixl_wrapper.reads[req_id].remote
        self.nixl_wrapper.send_notif(remote.engine_id, f"{remote.request_id}:1".encode())

    def register_kv_caches(self, caches):
        self.compat_hash = "hash"
        self.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="hash")

    def _send_heartbeats(self, metadata):
        pass

    def _cleanup_remote_engines(self):
        pass

    def shutdown(self):
        pass

    def __del__(self):
        pass


def make_stock_worker(nixl_wrapper):
    return StockWorker(nixl_wrapper)


class Aggregator(KVOutputAggregator):
    """vLLM's, for outputs of the connector alone."""

    def merge(self, outputs):
        ranks = [types.SimpleNamespace(kv_connector_output=output) for output in outputs]
        return self.aggregate(ranks).kv_connector_output


class VllmScheduler(SchedulerModel):
    """The model with vLLM's functions where those decide about requests and blocks."""

    _handle_failed_recving = Scheduler._handle_failed_recving
    _update_waiting_for_remote_kv = Scheduler._update_waiting_for_remote_kv
    _update_from_kv_xfer_finished = Scheduler._update_from_kv_xfer_finished
    finish_requests = Scheduler.finish_requests
    _free_request = Scheduler._free_request
    _connector_finished = Scheduler._connector_finished
    _free_blocks = Scheduler._free_blocks
    _free_request_blocks = Scheduler._free_request_blocks
    _request_blocks_can_be_freed = Scheduler._request_blocks_can_be_freed

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.vllm_config = fake_config(self.block_size)
        self.kv_cache_config = fake_cache_config(self.block_size)
        self.aux_output_connector = self.ec_connector = self.finished_req_ids_dict = None
        self._inflight_prefills = set()
        self.kv_holding_waiting = type(self.waiting)()
        self.deferred_waiting = set()
        self.num_waiting_for_streaming_input = 0
        self.needs_kv_cache_zeroing = self.defer_block_free = False
        self.encoder_cache_manager = types.SimpleNamespace(free=lambda request: None)

    def _set_kv_fetch_stage(self, request, stage):
        pass

    def _load_restores_replay_window(self, request):
        return False

    def _mark_prefix_replay(self, request, tokens, window_loaded):
        return 0


def make_scheduler(*arguments, **named):
    return VllmScheduler(*arguments, **named)
