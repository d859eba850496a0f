"""The scheduler's half: tells the workers which requests may lend, and which no longer wait."""

import logging

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

from ..handoff import integer
from .messages import TEXT_MAX, PushOrders

logger = logging.getLogger("vllm.baton")

# A key of P's reply. A router may abort P's leg of a cancelled pair: D's blocks do not depend on P's write.
ENDS_WRITES = "remote_ends_writes"

# Numbers of a handoff and their defaults, as vLLM reads them.
NUMBERS = (("remote_port", None), ("tp_size", None), ("pp_size", 1), ("dcp_size", 1))


class PushScheduler(NixlPushConnectorScheduler):
    """vLLM's half, and what Baton's worker half needs."""

    def __init__(self, vllm_config, engine_id, kv_cache_config):
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._orders = PushOrders()
        self._awaiting = set()  # requests of D that wait for a write

    def on_new_request(self, request):
        given = request.kv_transfer_params or {}
        if given.get("do_remote_prefill") and producer_of(given) is None:
            # vLLM's half would end the engine.
            logger.warning("Baton: request %s has an invalid handoff; this engine computes it", request.request_id)
            given["do_remote_prefill"] = False
        super().on_new_request(request)
        if given.get("do_remote_decode"):
            self._orders.began.append(request.request_id)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._push_pending_registrations:
            self._awaiting.add(request.request_id)

    def request_finished(self, request, block_ids):
        given = request.kv_transfer_params or {}
        unregistered = given.get("do_remote_prefill")
        delay, params = super().request_finished(request, block_ids)
        if unregistered:
            # One of the ids has the base id of P's request: which one is up to the router.
            ids = (request.request_id, given["remote_request_id"])
            self._orders.withdrawn.append((ids, producer_of(given)))
        if request.request_id in self._awaiting:
            self._orders.cancelled.append(request.request_id)
        if given.get("do_remote_decode") and not delay:
            self._orders.ended.append(request.request_id)
        if params is not None:
            params[ENDS_WRITES] = True
        return delay, params

    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        if self._orders:
            meta.baton_push, self._orders = self._orders, PushOrders()
        return meta

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        self._awaiting.difference_update(connector_output.finished_recving or ())


def producer_of(given):
    """P's address in a handoff, by the names of a registration; None if vLLM cannot use the handoff."""
    texts = [given.get(name) for name in ("remote_engine_id", "remote_host", "remote_request_id")]
    if not all(isinstance(text, str) and 0 < len(text) <= TEXT_MAX for text in texts):
        return None
    numbers = [integer(given.get(name, default), 1) for name, default in NUMBERS]
    if None in numbers or max(numbers) > 65535:
        return None
    port, tp_size, pp_size, _ = numbers
    return {
        "remote_engine_id": texts[0],
        "remote_host": texts[1],
        "remote_port": port,
        "remote_tp_size": tp_size,
        "remote_pp_size": pp_size,
    }
