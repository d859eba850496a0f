"""What crosses between the connector's halves and between engines. Imports nothing of vLLM."""

import array
import dataclasses
import hashlib

# Stock peers compare this suffix of the compatibility hash, and refuse each other with it.
HASH_SUFFIX = ".baton1"

# Digits of a prompt's fingerprint in a handoff.
PROMPT_DIGITS = 16

# Limits of what a client can make a step read.
BLOCKS_MAX, TEXT_MAX = 65536, 512

# The keys of a handoff that the core reads.
HANDOFF_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_block_size",
    "remote_blocks_expiry_time",
    "remote_prefill_cached_tokens",
    "remote_registration_generation",
    "transfer_mode",
    "remote_handle",
    "remote_epoch",
    "remote_lease_left_ms",
    "remote_channel_port",
    "remote_layout",
    "remote_prompt",
    "remote_consumers",
)

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
    """32 hexadecimal digits for the tokens whose KV a handoff holds, and what else the KV depends on.

    A handoff has the first 16. Its handle proves all of them.
    """
    try:
        data = array.array("Q", () if token_ids is None else token_ids).tobytes()
    except OverflowError:
        # No model has such a token, but a client may send one.
        data = repr(list(token_ids)).encode()
    return hashlib.blake2b(data + extras.encode(), digest_size=16).hexdigest()


def bounded_handoff(params):
    """The keys of a handoff that the core reads. Raises `ValueError` for one whose check would take long."""
    kept = {key: params[key] for key in HANDOFF_KEYS if key in params}
    for key, value in kept.items():
        if not (is_table(value) if key == "remote_block_ids" else is_small(value)):
            raise ValueError(f"kv_transfer_params.{key} is malformed or too long")
    return kept


def is_table(value):
    """A list of block ids, or one for each group. The core checks other values than lists."""
    if not isinstance(value, list):
        return is_small(value)
    if len(value) > BLOCKS_MAX:
        return False
    groups = [group if isinstance(group, list) else [group] for group in value]
    return sum(map(len, groups)) <= BLOCKS_MAX and all(is_small(block) for group in groups for block in group)


def is_small(value):
    if isinstance(value, str):
        return len(value) <= TEXT_MAX
    return value is None or isinstance(value, (bool, float)) or (type(value) is int and value.bit_length() <= 64)


def layout_fingerprint(compatibility_hash):
    """16 hexadecimal digits for everything that vLLM compares in a handshake."""
    return hashlib.blake2b(without_suffix(compatibility_hash).encode(), digest_size=8).hexdigest()


def integer(value, least=0):
    """The value if it is an integer of at least `least`, else None. `True` is none."""
    return value if type(value) is int and value >= least else None
