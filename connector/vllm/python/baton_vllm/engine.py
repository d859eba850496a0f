"""The EngineCore around the connector: aborts by id, wake-ups and naps.

vLLM gives a connector no reference to its engine. The constructor finds it in its callers.
"""

import logging
import sys
import threading

logger = logging.getLogger("vllm.baton")

FRAMES_MAX = 32


class Engine:
    """The queues of one EngineCore. Both are thread-safe; nothing else of it is used from other threads."""

    def __init__(self, core):
        from vllm.v1.engine import EngineCoreRequestType

        self._core = core
        self._types = EngineCoreRequestType

    @classmethod
    def find(cls):
        """The EngineCore that is constructing the connector; None in another harness."""
        from vllm.v1.engine.core import EngineCore

        frame = sys._getframe(1)
        for _ in range(FRAMES_MAX):
            if frame is None:
                return None
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, EngineCore) and hasattr(candidate, "input_queue"):
                return cls(candidate)
            frame = frame.f_back
        return None

    def wake(self):
        """Ends a nap."""
        self._core.input_queue.put_nowait((self._types.WAKEUP, None))

    def abort(self, request_ids):
        """Aborts as the engine's own socket thread does: the first queue is read before a step's results apply."""
        queue = getattr(self._core, "aborts_queue", None)
        if queue is not None:
            queue.put_nowait(list(request_ids))
        self._core.input_queue.put_nowait((self._types.ABORT, list(request_ids)))

    def answer_aborted(self, request_id, client_index):
        """Ends the front end's wait for a request that it has not aborted itself."""
        self._core._send_abort_outputs_to_client([request_id], client_index)

    def nap(self, seconds):
        """Waits until the engine receives something, or the time is over."""
        queue = self._core.input_queue
        with queue.not_empty:
            if not queue.queue:
                queue.not_empty.wait(seconds)

    @property
    def can_nap(self):
        """Ranks of a data-parallel engine step together, and a batch in flight must be collected."""
        from vllm.v1.engine.core import DPEngineCoreProc

        return not isinstance(self._core, DPEngineCoreProc)

    @property
    def is_draining(self):
        """Whether a signal ends the engine. From then on it answers each new request as aborted."""
        return bool(getattr(self._core, "shutdown_state", 0))

    @property
    def batches_max(self):
        """Batches in flight with asynchronous scheduling or pipeline stages; 0 if each step ends with its results."""
        queue = getattr(self._core, "batch_queue", None)
        return 0 if queue is None else queue.maxlen


class Waiter(threading.Thread):
    """Waits for the core and wakes the engine: for ended leases, aborts and requested snapshots."""

    def __init__(self, core, on_news):
        super().__init__(name="baton-waiter", daemon=True)
        self._core = core
        self._on_news = on_news
        self._stopping = False

    def run(self):
        from .core import STOPPING, CoreError

        while not self._stopping:
            bits = self._core.wait(1000)
            if bits & STOPPING:
                return
            if bits and not self._stopping:
                try:
                    self._on_news(bits)
                except CoreError:
                    # The core stops; the next `wait` says so.
                    logger.debug("news of the core is lost", exc_info=True)
                except Exception:
                    logger.exception("news of the core is lost")

    def stop(self):
        self._stopping = True
