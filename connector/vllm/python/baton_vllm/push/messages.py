"""Messages between a prefill rank and a decode rank. Imports nothing of vLLM.

vLLM's own: `PUSH_REG:` registers D's blocks, and a completed write notifies with `REQUEST:RANKS`. Baton's, by NIXL too:

- D to P, `BATON_CANCEL:` D no longer needs the write that it has registered for.
- D to P, `BATON_WITHDRAW:` a request of D ended before it registered.
- P to D, `BATON_NO_WRITE:` this rank does not write, and will not.
- P to D, `BATON_HELD:` this rank holds the registration, and may still write.
"""

import collections
import dataclasses
import json
import re

CANCEL = b"BATON_CANCEL:"
WITHDRAW = b"BATON_WITHDRAW:"
NO_WRITE = b"BATON_NO_WRITE:"
HELD = b"BATON_HELD:"

# Stock peers and pull connectors compare this suffix of the compatibility hash, and are refused by it.
HASH_SUFFIX = ".baton-push1"

TEXT_MAX = 512

# What vLLM appends to each request id. Both legs have the same id before it.
RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)

# Fields of a registration by which P reaches D.
ADDRESS = ("request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size")


def base_id(request_id):
    """The id that both legs of a request share."""
    return RANDOM_SUFFIX.sub("", request_id)


@dataclasses.dataclass(frozen=True)
class Registration:
    """One decode request that waits for a write. `data` is vLLM's registration, or its address alone."""

    request_id: str
    engine_id: str
    host: str
    port: int
    tp_size: int
    data: dict = dataclasses.field(compare=False, repr=False, default_factory=dict)

    @classmethod
    def of(cls, data):
        """None if a field is absent or malformed."""
        if not isinstance(data, dict):
            return None
        request_id, engine_id, host, port, tp_size = (data.get(name) for name in ADDRESS)
        texts = all(isinstance(text, str) and 0 < len(text) <= TEXT_MAX for text in (request_id, engine_id, host))
        numbers = all(type(number) is int and 0 < number <= 65535 for number in (port, tp_size))
        return cls(request_id, engine_id, host, port, tp_size, data) if texts and numbers else None


def encode_cancel(data):
    return CANCEL + json.dumps({name: data[name] for name in ADDRESS}).encode()


def decode_cancel(message):
    """The registration that is cancelled, without blocks; None for another text."""
    try:
        return Registration.of(json.loads(message[len(CANCEL) :]))
    except ValueError:
        return None


def encode_withdraw(request_id):
    return WITHDRAW + request_id.encode()


def decode_withdraw(message):
    """The request id; None for another text."""
    request_id = message[len(WITHDRAW) :].decode(errors="replace")
    return request_id if 0 < len(request_id) <= TEXT_MAX else None


def encode_no_write(request_id, reason):
    return NO_WRITE + json.dumps([request_id, reason]).encode()


def decode_no_write(message):
    """`(request id, reason)`, or None for another text."""
    try:
        request_id, reason = json.loads(message[len(NO_WRITE) :])
    except (ValueError, TypeError):
        return None
    return (request_id, reason[:TEXT_MAX]) if isinstance(request_id, str) and isinstance(reason, str) else None


def decode_completion(message):
    """The request id of vLLM's notice of a completed write; None for another text."""
    request_id, _, ranks = message.decode(errors="replace").rpartition(":")
    return request_id if request_id and ranks.isdecimal() else None


@dataclasses.dataclass
class PushOrders:
    """What the scheduler's half tells the workers with a step. All ranks get the same."""

    began: list[str] = dataclasses.field(default_factory=list)  # requests of P that may lend
    ended: list[str] = dataclasses.field(default_factory=list)  # requests of P that ended and lend nothing
    cancelled: list[str] = dataclasses.field(default_factory=list)  # requests of D that ended while they waited
    # `(request ids, P's address)` of requests of D that ended before they registered.
    withdrawn: list[tuple] = dataclasses.field(default_factory=list)

    def __bool__(self):
        return bool(self.began or self.ended or self.cancelled or self.withdrawn)


class Recent:
    """A table bounded by number and age. The oldest entry leaves first."""

    def __init__(self, most, age_s):
        self.most, self.age_s = most, age_s
        self._entries = collections.OrderedDict()  # key -> (time, value)

    def __len__(self):
        return len(self._entries)

    def put(self, key, value, now):
        self._entries.pop(key, None)
        self._entries[key] = (now, value)
        while len(self._entries) > self.most or next(iter(self._entries.values()))[0] < now - self.age_s:
            self._entries.popitem(last=False)

    def get(self, key, now):
        since, value = self._entries.get(key, (None, None))
        return None if since is None or since < now - self.age_s else value

    def pop(self, key):
        self._entries.pop(key, None)
