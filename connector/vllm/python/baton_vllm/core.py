"""The Rust core: a `cdylib` with six functions. Requests and replies are JSON."""

import ctypes
import json
import os
import pathlib

# Bits of `pending` and `wait`.
ENDED, ABORTS, VERDICTS, POOL, STOPPING = 1, 2, 4, 8, 16

LIBRARY = "libbaton_vllm_core.so"


class CoreError(RuntimeError):
    """The core refused a call."""


def library_path():
    """The library beside this file, or the one that `BATON_VLLM_CORE` names."""
    named = os.environ.get("BATON_VLLM_CORE")
    return pathlib.Path(named) if named else pathlib.Path(__file__).with_name(LIBRARY)


def load_library(loader=ctypes.CDLL):
    path = library_path()
    try:
        library = loader(str(path))
    except OSError as error:
        raise CoreError(
            f"baton-vllm: cannot load {path}: {error}. Install the wheel, or build it: connector/vllm/README.md"
        ) from error
    text, number, small = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32
    # The replies are freed by the library, so their type must not be `c_char_p`, which copies.
    for name, result, arguments in [
        ("start", ctypes.c_void_p, [text]),
        ("call", ctypes.c_void_p, [number, text]),
        ("pending", small, [number]),
        ("wait", small, [number, small]),
        ("stop", None, [number]),
        ("free", None, [ctypes.c_void_p]),
    ]:
        function = getattr(library, f"baton_vllm_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class Core:
    """One core: leases, events, HTTP port and side channel of one EngineCore.

    Only functions that wait release the GIL. In the middle of a step another thread of EngineCore would take it, and the
    step would wait for that thread.
    """

    def __init__(self, config):
        self._library = load_library()
        self._with_gil = load_library(ctypes.PyDLL)
        reply = self._take(self._library.baton_vllm_start(json.dumps(config).encode()))
        self.number = reply["core"]
        self.epoch = reply["epoch"]
        self.http = reply["http"]
        self.channel_port = reply["channel_port"]

    def call(self, op, **fields):
        """Runs one operation; raises `CoreError` if the core refuses it."""
        library = self._library if fields.get("wait_us") else self._with_gil
        fields["op"] = op
        return self._take(library.baton_vllm_call(self.number, json.dumps(fields).encode()))

    def pending(self):
        """What waits for `take` and `pool`, as bits."""
        return self._with_gil.baton_vllm_pending(self.number)

    def wait(self, timeout_ms):
        """As `pending`, after something new arrives or the time is over."""
        return self._library.baton_vllm_wait(self.number, timeout_ms)

    def stop(self):
        """Releases every lease and stops the core's threads."""
        self._library.baton_vllm_stop(self.number)

    def _take(self, pointer):
        try:
            reply = json.loads(ctypes.string_at(pointer))
        finally:
            self._with_gil.baton_vllm_free(pointer)
        if "error" in reply:
            raise CoreError(reply["error"])
        return reply
