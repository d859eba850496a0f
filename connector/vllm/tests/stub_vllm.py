"""A model of the parts of vLLM 0.32 that the connector touches, for machines without vLLM.

`install()` puts it in the place of the modules that `baton_vllm.connector` imports. With vLLM at hand, the tests use
vLLM's own classes instead (`real_vllm.py`).
"""

import dataclasses
import enum
import logging
import queue
import sys
import time
import types
from collections import defaultdict

VERSION = "0.32.0"


class RequestStatus(enum.IntEnum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclasses.dataclass
class KVConnectorOutput:
    finished_sending: set | None = None
    finished_recving: set | None = None
    failed_recving: set = dataclasses.field(default_factory=set)
    kv_connector_worker_meta: object = None


@dataclasses.dataclass
class TransferResults:
    finished_sending: set
    finished_recving: set
    failed_recving: set


class Metadata:
    def __init__(self):
        self.reqs_to_recv = {}
        self.reqs_to_send = {}
        self.reqs_in_batch = set()
        self.reqs_not_processed = set()
        self.heartbeat_by_engine = {}


class StockScheduler:
    """As NixlPullConnectorScheduler."""

    def __init__(self, block_size):
        self.block_size = block_size
        self._reqs_need_recv = {}
        self._reqs_need_send = {}
        self._reqs_in_batch = set()
        self._reqs_not_processed = set()
        self._heartbeat_by_engine = {}
        self._heartbeat_req_engine = {}

    def _get_remote_prefill_token_count(self, num_prompt_tokens):
        return num_prompt_tokens

    def on_new_request(self, request):
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_prefill"):
            return
        names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
        engine, remote, *rest = values = [params.get(name) for name in names]
        if any(value is None for value in values):
            return
        self._heartbeat_by_engine.setdefault(engine, set()).add(remote)
        self._heartbeat_req_engine[request.request_id] = (engine, remote)

    def _stop_heartbeat(self, request_id):
        if key := self._heartbeat_req_engine.pop(request_id, None):
            engine, remote = key
            if engine in self._heartbeat_by_engine:
                self._heartbeat_by_engine[engine].discard(remote)
                if not self._heartbeat_by_engine[engine]:
                    del self._heartbeat_by_engine[engine]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            count = len(request.prompt_token_ids or []) - num_computed_tokens
            if count > 0:
                return count, True
        names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if params.get("do_remote_decode") and params.get("remote_block_ids") and all(n in params for n in names):
            count = min(params.get("remote_num_tokens") or 0, request.num_prompt_tokens) - num_computed_tokens
            if count > 0:
                return count, True
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._reqs_in_batch.add(request.request_id)
        if params.get("do_remote_prefill"):
            if params.get("remote_block_ids"):
                names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
                if all(name in params for name in names):
                    local = blocks.get_unhashed_block_ids_all_groups() if num_external_tokens > 0 else ()
                    cached = tuple(sum(b.block_hash is not None for b in group) for group in blocks.blocks)
                    self._reqs_need_recv[request.request_id] = (request, local, cached, num_external_tokens > 0)
            else:
                assert num_external_tokens == 0
            params["do_remote_prefill"] = False

    def request_finished(self, request, block_ids):
        params = request.kv_transfer_params
        if not params:
            return False, None
        self._stop_heartbeat(request.request_id)
        if params.get("do_remote_prefill"):
            self._reqs_need_recv[request.request_id] = (request, [], (), False)
            params["do_remote_prefill"] = False
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"):
            self._reqs_not_processed.add(request.request_id)
            return False, None
        delay = any(len(group) > 0 for group in block_ids)
        if delay:
            self._reqs_need_send[request.request_id] = time.perf_counter() + 30
        return delay, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": block_ids,
            "remote_engine_id": "p",
            "remote_request_id": request.request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": request.num_computed_tokens if delay else 0,
        }

    def build_connector_meta(self, scheduler_output):
        meta = Metadata()
        for request_id, (request, local, cached, awaiting) in self._reqs_need_recv.items():
            params = request.kv_transfer_params
            remote = types.SimpleNamespace(
                block_ids=params["remote_block_ids"],
                engine_id=params["remote_engine_id"],
                request_id=params["remote_request_id"],
                host=params["remote_host"],
                port=params["remote_port"],
            )
            meta.reqs_to_recv[request_id] = types.SimpleNamespace(
                local_block_ids=local, remote=remote, awaiting_kvs=awaiting
            )
        meta.reqs_to_send, self._reqs_need_send = self._reqs_need_send, {}
        meta.reqs_in_batch, self._reqs_in_batch = self._reqs_in_batch, set()
        meta.reqs_not_processed, self._reqs_not_processed = self._reqs_not_processed, set()
        self._reqs_need_recv.clear()
        return meta

    def update_connector_output(self, output):
        for request_id in output.finished_recving or ():
            self._stop_heartbeat(request_id)


class StockWorker:
    """As NixlPullConnectorWorker, with `nixl_wrapper` for the network."""

    def __init__(self, nixl_wrapper):
        self.nixl_wrapper = nixl_wrapper
        self.compat_hash = "hash"
        self.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="hash")
        self._reqs_to_send = {}
        self._reqs_to_process = set()
        self.consumer_notification_counts_by_req = defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._recving_metadata = {}
        self._failed_recv_reqs = queue.Queue()

    def register_kv_caches(self, caches):
        self.compat_hash = "hash"
        self.xfer_handshake_metadata = types.SimpleNamespace(compatibility_hash="hash")

    def start_load_kv(self, meta):
        for request_id, recv in meta.reqs_to_recv.items():
            if recv.awaiting_kvs or any(recv.local_block_ids):
                self._recving_metadata[request_id] = recv
            self.nixl_wrapper.read(request_id, recv)
        self._reqs_to_process |= meta.reqs_in_batch
        for request_id in meta.reqs_not_processed:
            self._reqs_to_process.discard(request_id)
            assert request_id not in self._reqs_to_send
        for request_id, expiry in meta.reqs_to_send.items():
            if request_id in self._reqs_to_process:
                self._reqs_to_send[request_id] = expiry

    def get_transfer_results(self):
        sent = self._get_new_notifs()
        received, failed = self.nixl_wrapper.finished_reads(self._recving_metadata)
        for request_id in received:
            recv = self._recving_metadata.pop(request_id)
            if request_id not in failed:
                self.nixl_wrapper.send_notif(recv.remote.engine_id, f"{recv.remote.request_id}:1".encode())
        for request_id in [i for i, expiry in self._reqs_to_send.items() if time.perf_counter() >= expiry]:
            self._reqs_to_process.remove(request_id)
            del self._reqs_to_send[request_id]
            sent.add(request_id)
        return TransferResults(sent, received, failed)

    def _get_new_notifs(self):
        done = set()
        for messages in self.nixl_wrapper.get_new_notifs().values():
            for message in messages:
                text = message.decode()
                if text.startswith("HB:"):
                    continue
                request_id, expected = text.rsplit(":", 1)
                if request_id not in self._reqs_to_send and request_id not in self._reqs_to_process:
                    continue
                self.consumer_notification_counts_by_req[request_id] += 1
                if self.consumer_notification_counts_by_req[request_id] == int(expected):
                    done.add(request_id)
                    del self.consumer_notification_counts_by_req[request_id]
                    self._reqs_to_process.remove(request_id)
                    self._reqs_to_send.pop(request_id, None)
        return done


class NixlPullConnector:
    """The forwarding of vLLM's class."""

    def __init__(self, *_):
        raise NotImplementedError("the tests put the halves in place")

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        pass

    def bind_gpu_block_pool(self, pool):
        pass

    def on_new_request(self, request):
        self.connector_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.connector_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, output):
        self.connector_scheduler.update_connector_output(output)

    def request_finished_all_groups(self, request, block_ids):
        return self.connector_scheduler.request_finished(request, block_ids)

    def register_kv_caches(self, caches):
        self.connector_worker.register_kv_caches(caches)

    def start_load_kv(self, forward_context, **kwargs):
        self.connector_worker.start_load_kv(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids):
        return self.connector_worker.get_transfer_results()

    def shutdown(self):
        pass


class Aggregator:
    """As KVOutputAggregator: an id counts when every rank has reported it."""

    def __init__(self, ranks):
        self._ranks = ranks
        self._send_remaining_count = {}
        self._recv_remaining_count = {}
        self._failed_recving_pending = set()

    def merge(self, outputs):
        def count(name, remaining):
            done = set()
            for output in outputs:
                for request_id in getattr(output, name) or ():
                    remaining[request_id] = remaining.get(request_id, self._ranks) - 1
                    if remaining[request_id] == 0:
                        done.add(request_id)
                        del remaining[request_id]
            return done

        sent = count("finished_sending", self._send_remaining_count)
        received = count("finished_recving", self._recv_remaining_count)
        for output in outputs:
            self._failed_recving_pending |= output.failed_recving
        failed = self._failed_recving_pending & received
        self._failed_recving_pending -= failed
        return KVConnectorOutput(sent or None, received or None, failed)


def make_stock_scheduler(block_size):
    return StockScheduler(block_size)


def make_stock_worker(nixl_wrapper):
    return StockWorker(nixl_wrapper)


def make_scheduler(*arguments, **named):
    from scheduler_model import SchedulerModel

    return SchedulerModel(*arguments, **named)


def install():
    """Puts stub modules where `baton_vllm.connector` imports vLLM's."""
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    contents = {
        f"{base}.base": {"KVConnectorRole": KVConnectorRole},
        f"{base}.nixl.connector": {"NixlPullConnector": NixlPullConnector},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.version": {"__version__": VERSION},
        "vllm.envs": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost", "VLLM_NIXL_SIDE_CHANNEL_PORT": 5600},
    }
    for name, members in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                module = sys.modules[path] = types.ModuleType(path)
                module.__path__ = []
                if length > 1:
                    setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], module)
        vars(sys.modules[name]).update(members)
