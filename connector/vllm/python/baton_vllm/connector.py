"""`BatonConnector`: vLLM's NixlPullConnector with the handoff contract around it."""

import os

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

from . import seams
from .core import Core
from .engine import Engine, Waiter, is_child_of_multi_connector
from .handoff import WorkerOrders, layout_fingerprint
from .scheduler import SchedulerHalf
from .settings import Settings
from .worker import WorkerHalf

logger = init_logger("vllm.baton")


class BatonConnector(NixlPullConnector):
    """Forwards each hook to the stock connector, and then or before to one of Baton's halves."""

    def __init__(self, vllm_config, role, kv_cache_config):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        import vllm.envs as envs

        rank = vllm_config.parallel_config.data_parallel_index
        settings = Settings.parse(extra, envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT, rank)
        refuse_unsupported(vllm_config, settings, is_child_of_multi_connector())
        seams.check(VLLM_VERSION, settings.allow_untested)
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_half = self._worker_half = self._waiter = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_half(vllm_config, kv_cache_config, settings, rank)
        else:
            self._worker_half = WorkerHalf(self.connector_worker, settings.strict_peers)

    def _start_scheduler_half(self, vllm_config, kv_cache_config, settings, rank):
        engine = Engine.find()
        if engine is None and settings.require_abort:
            raise RuntimeError(
                "baton-vllm: no EngineCore constructs this connector, so requests cannot be aborted by id. "
                "Set kv_connector_extra_config.baton.require_abort to false to go on without."
            )
        if engine is not None:
            engine.rename_notices()
        transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
        policy = transfer.kv_load_failure_policy
        core = Core(
            {
                "http": settings.http,
                "channel": settings.channel,
                "channel_host": self.connector_scheduler.side_channel_host,
                "secret_file": settings.secret_file or os.environ.get("BATON_CLUSTER_SECRET_FILE"),
                "previous_secret_file": settings.previous_secret_file
                or os.environ.get("BATON_PREVIOUS_CLUSTER_SECRET_FILE"),
                "lease_s": transfer.get_from_extra_config("kv_lease_duration", 30),
                "rank": rank,
                "engine": f"vllm {VLLM_VERSION}",
                "engine_id": self.engine_id,
                "nixl_port": self.connector_scheduler.side_channel_port,
                "tp_size": self.connector_scheduler.transfer_tp_size,
                "blocks": kv_cache_config.num_blocks - 1,
                "block_tokens": cache.block_size,
                "policy": policy,
                "model": vllm_config.model_config.served_model_name
                if isinstance(vllm_config.model_config.served_model_name, str)
                else vllm_config.model_config.model,
            }
        )
        self._scheduler_half = SchedulerHalf(
            core,
            settings,
            self.connector_scheduler,
            engine,
            kv_cache_config,
            cache.block_size,
            recompute=policy == "recompute",
            lease_s=transfer.get_from_extra_config("kv_lease_duration", 30),
        )
        self._waiter = Waiter(core, self._scheduler_half.on_news)
        self._waiter.start()
        logger.info("Baton: leases of this engine at http://%s, epoch %s", core.http, core.epoch)
        if not settings.strict_peers:
            logger.warning(
                "Baton: peers without the contract are admitted. Blocks that a stock decode engine reads after its "
                "lease are not detected there."
            )

    # The scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        half, hashes = self._scheduler_half, {payload.compatibility_hash for payload in metadata.values()}
        if half is not None and hashes:
            half.layout = layout_fingerprint(sorted(hashes)[0])
            half.core.call("layout", layout=half.layout)

    def bind_gpu_block_pool(self, gpu_block_pool):
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._scheduler_half is not None:
            self._scheduler_half.pool = gpu_block_pool

    def on_new_request(self, request):
        self._scheduler_half.on_new_request(request)
        super().on_new_request(request)
        self._scheduler_half.after_new_request(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        half = self._scheduler_half
        hold = half.hold_of(request)
        if hold == "holding":
            return None, False
        if hold == "gone" and half.recompute:
            half.drop_load(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        half = self._scheduler_half
        gone = num_external_tokens > 0 and half.hold_of(request) == "gone"
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        half.on_allocated(request, num_external_tokens, gone)

    def build_connector_meta(self, scheduler_output):
        half = self._scheduler_half
        half.report_drain()
        half.progress(scheduler_output)
        half.maybe_nap(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        meta.baton = half.orders_of_step(meta)
        half.flush_events()
        return meta

    def update_connector_output(self, connector_output):
        half = self._scheduler_half
        sent, received = connector_output.finished_sending, connector_output.finished_recving
        # The scheduler asserts on an id that it does not know, so it gets only known ones.
        if sent:
            connector_output.finished_sending = half.on_sent(sent)
        if received:
            connector_output.finished_recving = half.on_received(received, connector_output.failed_recving)
        half.on_worker_report(connector_output.kv_connector_worker_meta)
        half.flush_events()
        super().update_connector_output(connector_output)

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        delay, params = super().request_finished_all_groups(request, block_ids)
        return self._scheduler_half.on_finished(request, delay, params)

    # The worker's side

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        """vLLM 0.33: not with leases, which name blocks of one registration."""
        return False

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self._worker_half.seal_handshake()

    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        self._worker_half.accept(getattr(self._connector_metadata, "baton", None) or WorkerOrders())

    def get_transfer_results(self, finished_req_ids):
        return self._worker_half.report(super().get_transfer_results(finished_req_ids))

    def build_connector_worker_meta(self):
        return self._worker_half.take_report()

    # Both

    def shutdown(self):
        if self._waiter is not None:
            self._waiter.stop()
            self._scheduler_half.core.stop()
            self._waiter.join(timeout=2)
            self._waiter = None
        super().shutdown()


def refuse_unsupported(vllm_config, settings, in_multi_connector):
    """Settings of vLLM in which the contract is not kept. `allow_untested` admits those that are only untested."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    refused = {
        "decode_context_parallel_size above 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size above 1": parallel.prefill_context_parallel_size > 1,
        "bidirectional_kv_xfer": transfer.get_from_extra_config("bidirectional_kv_xfer", False),
        "a child of MultiConnector": in_multi_connector,
        "enable_sleep_mode": vllm_config.model_config.enable_sleep_mode,
    }
    untested = {
        "pipeline_parallel_size above 1": parallel.pipeline_parallel_size > 1,
    }
    names = [name for name, given in refused.items() if given]
    names += [name for name, given in untested.items() if given and not settings.allow_untested]
    if names:
        raise RuntimeError(f"baton-vllm does not support {', '.join(names)}")
