"""A model of vLLM's Scheduler: it admits, parks, frees, and asserts on unknown ids as vLLM's does.

Block ids, and who holds them, are real: a block that is freed twice or used by two requests fails the test.
`real_vllm.py` replaces the methods of the second half by vLLM's own functions.
"""

import types

from fakes import FakeBlocks


class Pool:
    """vLLM's block pool and cache manager, as far as the connector and the scheduler's functions use them."""

    def __init__(self, blocks, block_size):
        self.block_size = block_size
        self.free_ids = list(range(1, blocks + 1))
        self.held = {}  # request id -> block ids
        self.frees = {}  # request id -> how often its blocks were freed
        self.hashed = set()  # requests whose blocks entered the prefix cache
        self.num_gpu_blocks = blocks + 1
        self.blocks = [types.SimpleNamespace(ref_cnt=0, block_hash=None) for _ in range(blocks + 1)]

    def get_num_free_blocks(self):
        return len(self.free_ids)

    def allocate(self, request, tokens):
        wanted = -(-tokens // self.block_size) - len(self.held.get(request.request_id, ()))
        if wanted > len(self.free_ids):
            return False
        ids = [self.free_ids.pop() for _ in range(max(0, wanted))]
        self.held.setdefault(request.request_id, []).extend(ids)
        return True

    def free(self, request):
        ids = self.held.pop(request.request_id, [])
        assert not set(ids) & set(self.free_ids), "a block is freed twice"
        self.free_ids.extend(ids)
        self.frees[request.request_id] = self.frees.get(request.request_id, 0) + bool(ids)

    def cache_blocks(self, request, num_computed_tokens):
        self.hashed.add(request.request_id)

    def get_block_ids_for_computed_tokens(self, request_id, num_computed_tokens):
        held = self.held.get(request_id, [])
        return (held[: -(-num_computed_tokens // self.block_size)],)

    def finalize_partial_tail_offloads(self, request):
        return []

    def remove_skipped_blocks(self, **_):
        pass


class Queue(list):
    def remove_requests(self, requests):
        self[:] = [request for request in self if request not in requests]


class SchedulerModel:
    """One step: `schedule`, the workers, `update_from_output`."""

    def __init__(self, connector, status, blocks, block_size, recompute, budget=64):
        self.connector = connector
        self.status = status
        self.block_size = block_size
        self.budget = budget
        self.recompute_kv_load_failures = recompute
        self.kv_cache_manager = self.pool = Pool(blocks, block_size)
        self.requests = {}
        self.waiting = Queue()
        self.running = []
        self.finished_recving_kv_req_ids = set()
        self.failed_recving_kv_req_ids = set()
        self.finished_req_ids = set()
        self.replies = {}  # request id -> transfer parameters of its reply

    # Input

    def add_request(self, request):
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)

    # Steps

    def schedule(self):
        scheduled = {request.request_id: self.tokens_of(request) for request in self.running}
        for request in list(self.waiting):
            tokens = self.admit(request)
            if tokens:
                scheduled[request.request_id] = tokens
        output = types.SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values())
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        for request_id, tokens in scheduled.items():
            self.requests[request_id].num_computed_tokens += tokens
        return output

    def tokens_of(self, request):
        return min(self.budget, request.num_tokens - request.num_computed_tokens)

    def admit(self, request):
        """The tokens of a request that starts in this step, else 0."""
        status = self.status
        if request.status == status.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self.finished_recving_kv_req_ids:
                return 0
            self._update_waiting_for_remote_kv(request)
            request.status = status.WAITING
        external, parked, local = 0, False, 0
        if request.num_computed_tokens == 0:
            local = request.cached
            external, parked = self.connector.get_num_new_matched_tokens(request, local)
            if external is None:
                # The connector does not know yet: the request is skipped in this step.
                return 0
            assert parked == (external > 0)
        computed = request.num_computed_tokens or local + external
        if not self.pool.allocate(request, computed if parked else request.num_tokens):
            return 0
        held = self.pool.held[request.request_id]
        blocks = FakeBlocks((list(held),), (request.cached if parked else computed) // self.block_size)
        self.connector.update_state_after_alloc(request, blocks, external)
        request.num_computed_tokens = computed
        if parked:
            request.status = status.WAITING_FOR_REMOTE_KVS
            return 0
        if computed == request.num_tokens:
            # vLLM computes the last token again.
            request.num_computed_tokens = computed - 1
        self.waiting.remove(request)
        self.running.append(request)
        request.status = status.RUNNING
        return self.tokens_of(request)

    def update_from_output(self, scheduled, output):
        failed = self._handle_failed_recving(output.failed_recving) if output.failed_recving else set()
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                request.status = self.status.FINISHED_LENGTH_CAPPED
                self.replies[request_id], _ = self._free_request(request)
        if failed:
            self.finish_requests(failed, self.status.FINISHED_ERROR)
        if output.finished_sending or output.finished_recving:
            self._update_from_kv_xfer_finished(output)

    # As vLLM's functions of the same names

    def _handle_failed_recving(self, failed):
        affected = set()
        for request_id in failed:
            request = self.requests.get(request_id)
            if request is not None and request.status == self.status.WAITING_FOR_REMOTE_KVS:
                affected.add(request_id)
                if self.recompute_kv_load_failures:
                    request.num_computed_tokens = 0
                    self.failed_recving_kv_req_ids.add(request_id)
        return set() if self.recompute_kv_load_failures else affected

    def _update_waiting_for_remote_kv(self, request):
        if request.request_id in self.failed_recving_kv_req_ids:
            if request.num_computed_tokens:
                self.pool.cache_blocks(request, request.num_computed_tokens)
            else:
                self.pool.free(request)
            self.failed_recving_kv_req_ids.remove(request.request_id)
        else:
            self.pool.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens = request.num_tokens - 1
        self.finished_recving_kv_req_ids.remove(request.request_id)

    def _update_from_kv_xfer_finished(self, output):
        self.connector.update_connector_output(output)
        for request_id in output.finished_recving or ():
            assert request_id in self.requests
            request = self.requests[request_id]
            if request.status == self.status.WAITING_FOR_REMOTE_KVS:
                self.finished_recving_kv_req_ids.add(request_id)
            else:
                assert request.is_finished()
                self._free_blocks(request)
        for request_id in output.finished_sending or ():
            assert request_id in self.requests
            self._free_blocks(self.requests[request_id])

    def finish_requests(self, request_ids, finished_status):
        ids = (request_ids,) if isinstance(request_ids, str) else set(request_ids)
        valid = [self.requests[i] for i in ids if i in self.requests and not self.requests[i].is_finished()]
        for request in valid:
            if request.status == self.status.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove_requests([request])
        for request in valid:
            delay = False
            if request.status == self.status.WAITING_FOR_REMOTE_KVS:
                delay = request.request_id not in self.finished_recving_kv_req_ids
                self.finished_recving_kv_req_ids.discard(request.request_id)
                self.failed_recving_kv_req_ids.discard(request.request_id)
            request.status = finished_status
            self._free_request(request, delay_free_blocks=delay)
        return valid

    def _free_request(self, request, delay_free_blocks=False):
        delay, params = self._connector_finished(request)
        if not (delay or delay_free_blocks):
            self._free_blocks(request)
        return params, None

    def _connector_finished(self, request):
        blocks = self.pool.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        return self.connector.request_finished_all_groups(request, blocks)

    def _free_blocks(self, request):
        assert request.is_finished()
        self.pool.free(request)
        del self.requests[request.request_id]
