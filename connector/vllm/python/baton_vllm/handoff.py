"""What crosses between the connector's halves and between engines. Imports nothing of vLLM."""

import array
import dataclasses
import hashlib

# Stock peers compare this suffix of the compatibility hash, and refuse each other with it.
HASH_SUFFIX = ".baton1"

# A NIXL notification with this prefix is a heartbeat. Every producer ignores one for an unknown id.
HEARTBEAT = "HB:"


@dataclasses.dataclass
class WorkerOrders:
    """What the scheduler's half tells the workers with a step. All ranks get the same."""

    ended: list[str] = dataclasses.field(default_factory=list)  # lent requests whose lease has ended
    again: list[str] = dataclasses.field(default_factory=list)  # as ended, after every rank has reported it once
    landed: list[str] = dataclasses.field(default_factory=list)  # withheld loads that are verified
    failed: list[str] = dataclasses.field(default_factory=list)  # loads that must not be used

    def __bool__(self):
        return bool(self.ended or self.again or self.landed or self.failed)


class AnyPeerHash(str):
    """A compatibility hash that equals one with and one without the suffix."""

    def __eq__(self, other):
        return isinstance(other, str) and str.__eq__(without_suffix(self), without_suffix(other))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def without_suffix(compatibility_hash):
    return str(compatibility_hash).removesuffix(HASH_SUFFIX)


def prompt_fingerprint(token_ids, extras=""):
    """16 hexadecimal digits for the tokens whose KV a handoff holds, and what else the KV depends on.

    Without token ids (prompt embeddings) all are zero.
    """
    if token_ids is None:
        return "0" * 16
    try:
        data = array.array("Q", token_ids).tobytes()
    except OverflowError:
        # No model has such a token, but a client may send one.
        data = repr(list(token_ids)).encode()
    return hashlib.blake2b(data + extras.encode(), digest_size=8).hexdigest()


def layout_fingerprint(compatibility_hash):
    """16 hexadecimal digits for everything that vLLM compares in a handshake."""
    return hashlib.blake2b(without_suffix(compatibility_hash).encode(), digest_size=8).hexdigest()


def integer(value, least=0):
    """The value if it is an integer of at least `least`, else None. `True` is none."""
    return value if type(value) is int and value >= least else None
