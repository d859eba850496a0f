"""The EngineCore around the connector: aborts by id, wake-ups and naps.

vLLM gives a connector no reference to its engine. The constructor finds it in its callers.
"""

import logging
import sys
import threading
import uuid

logger = logging.getLogger("vllm.baton")

FRAMES_MAX = 32


def callers():
    """The objects whose methods construct the connector, the innermost first."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_child_of_multi_connector():
    """Its other children would need ids that this connector's checks drop."""
    return any(base.__name__ == "MultiConnector" for caller in callers() for base in type(caller).__mro__)


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

        for caller in callers():
            if isinstance(caller, EngineCore) and hasattr(caller, "input_queue"):
                return cls(caller)
        return None

    def rename_notices(self):
        """Gives the front end's notices of refused requests ids of their own.

        Their ids are the client's. The scheduler asserts on one that it knows, which ends the engine.
        """
        preprocess = self._core.preprocess_add_request

        def renamed(request):
            if request.abort_immediately:
                request.request_id = f"refused-{uuid.uuid4().hex}"
            return preprocess(request)

        self._core.preprocess_add_request = renamed

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
        """Ranks of a data-parallel engine step together."""
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
